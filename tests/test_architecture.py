"""The shape of the code itself: imports point down only, and the public names are pinned."""

from __future__ import annotations

import ast
from pathlib import Path

import faircopy

ROOT = Path(faircopy.__file__).parent

# Lowest first. A module may import from its own room and from lower ones; rooms on one level do not know each other.
LEVELS: list[set[str]] = [
    {"errors"},
    {"types", "rng", "config", "meter", "text", "html"},
    {"kernels"},
    {"layout", "sampling"},
    {"model"},
    {"scheduler", "policy", "drafters", "verify", "plan"},
    {"papers"},
    {"replay", "strategy"},
    {"engine"},
    {"llm", "testing", "bundled"},
    {"audit", "bench", "train"},
    {"terminal"},
    {"cli"},
]
ROOT_FILE = "__init__"  # it only gathers names
FREE = {("scheduler", "policy")}  # a policy is the scheduler's own question
KNOWS_TRANSFORMERS = {"model", "train", "bench"}
FOR_PEOPLE = {"cli", "terminal", "audit", "bench", "train"}


def rooms() -> list[tuple[str, str, set[str], set[str]]]:
    """(file, room, faircopy rooms imported, other packages imported) of every module."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        ours: set[str] = set()
        others: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{a.name}" if node.module == "faircopy" else node.module for a in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                (ours if parts[0] == "faircopy" else others).add(parts[1] if parts[0] == "faircopy" else parts[0])
        found.append((str(file.relative_to(ROOT)), room, ours, others))
    return found


def level(room: str) -> int:
    return next(n for n, names in enumerate(LEVELS) if room in names)


def test_imports_point_down_only() -> None:
    for file, room, imported, _ in rooms():
        for other in imported - {room, "__version__"} if room != ROOT_FILE else set():
            allowed = level(other) < level(room) or (room, other) in FREE
            assert allowed, f"{file} imports {other}, which is not below {room}"


def test_only_models_know_transformers() -> None:
    for file, room, _, others in rooms():
        if room not in KNOWS_TRANSFORMERS:
            assert not others & {"transformers", "tokenizers", "safetensors", "huggingface_hub"}, file


def test_the_core_needs_no_heavy_packages() -> None:
    for file, room, _, others in rooms():
        if room not in FOR_PEOPLE:
            assert not others & {"typer", "rich", "fastapi", "uvicorn", "matplotlib"}, file
            assert "triton" not in others or file.startswith("kernels/gpu/"), file


def test_public_names_are_pinned() -> None:
    assert faircopy.__all__ == [
        "LLM",
        "Answer",
        "BatchError",
        "CheckpointError",
        "Completion",
        "ConfigError",
        "DraftError",
        "FaircopyError",
        "NumericsError",
        "OutOfPages",
        "RequestError",
        "SamplingParams",
        "UnsupportedModel",
    ]
