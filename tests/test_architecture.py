"""The shape of the code itself: imports point down only, and the public names are pinned."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import faircopy

ROOT = Path(faircopy.__file__).parent

# Lowest first. A module may import from its own package and from lower levels; packages on one level do not know each
# other. docs/architecture.md draws the same levels.
LEVELS: list[set[str]] = [
    {"errors"},
    {
        "types",
        "rng",
        "config",
        "meter",
        "pace",
        "costs",
        "text",
        "html",
        "acceptance",
        "ledger",
        "cache",
        "threads",
        "fair_lock",
        "files",
        "progress",
    },
    {"kernels"},
    {"layout", "sampling", "acceptance_rates", "plain_steps"},
    {"model"},
    {"capture", "parallel", "measured_acceptance"},
    {"scheduler", "policy", "draft_length", "planner", "drafters", "verify"},
    {"papers"},
    {"replay", "strategy", "memory", "measured_costs", "requests"},
    {"engine", "answers", "planning"},
    {"build"},
    {"llm", "testing", "bundled"},
    {"audit", "bench", "train", "server"},
    {"ray", "laws"},
    {"terminal"},
    {"cli"},
    {"__main__"},
]
ROOT_FILE = "__init__"  # it only gathers names
FREE = {("scheduler", "policy"), ("scheduler", "draft_length"), ("planner", "draft_length")}  # what a scheduler asks
KNOWS_TRANSFORMERS = {"model", "train", "bench"}
FOR_PEOPLE = {"__main__", "cli", "terminal", "audit", "bench", "train", "server", "laws"}
# Private names that are still imported across modules.
STILL_PRIVATE = {
    ("model/anatomy.py", "_Tensors"),
    ("model/anatomy.py", "_read_json"),
    ("model/fused.py", "_Layer"),
    ("bench/broken.py", "_Feed"),
}


class Module(NamedTuple):
    """A file of the package and what it imports, wherever the import stands: at the top, in a function, or for types
    only (TYPE_CHECKING)."""

    file: str
    room: str
    ours: set[str]  # packages and modules of faircopy
    others: set[str]
    names: set[str]  # names taken from modules of faircopy


def modules() -> list[Module]:
    return [_module(file) for file in sorted(ROOT.rglob("*.py"))]


def _module(file: Path) -> Module:
    place = file.relative_to(ROOT)
    found = Module(str(place), place.parts[0].removesuffix(".py"), set(), set(), set())
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{place}: imports are absolute, so that they can be checked"
            for alias in node.names:
                _note(found, f"{node.module}.{alias.name}" if node.module == "faircopy" else node.module)
            if node.module.startswith("faircopy"):
                found.names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                _note(found, alias.name)
    return found


def _note(module: Module, name: str) -> None:
    first, *rest = name.split(".")
    (module.ours if first == "faircopy" else module.others).add(rest[0] if first == "faircopy" else first)


def level(room: str) -> int:
    return next(n for n, names in enumerate(LEVELS) if room in names)


def test_imports_point_down_only() -> None:
    for file, room, ours, _, _ in modules():
        for other in ours - {room, "__version__"} if room != ROOT_FILE else set():
            allowed = level(other) < level(room) or (room, other) in FREE
            assert allowed, f"{file} imports {other}, which is not below {room}"


def test_no_private_name_is_imported_across_modules() -> None:
    private = {
        (file, name)
        for file, _, _, _, names in modules()
        for name in names
        if name.startswith("_") and name != "__version__"
    }
    assert private <= STILL_PRIVATE


def test_the_documents_draw_the_same_levels() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    diagram = text.split("Imports point down only")[1].split("```")[1]
    drawn = [re.split(r"\s{2,}", line.strip())[0].split(" \N{MIDDLE DOT} ") for line in diagram.strip().splitlines()]
    assert [set(names) for names in reversed(drawn)] == LEVELS


def test_only_models_know_transformers() -> None:
    for file, room, _, others, _ in modules():
        if room not in KNOWS_TRANSFORMERS:
            assert not others & {"transformers", "tokenizers", "safetensors", "huggingface_hub"}, file


def test_the_core_needs_no_heavy_packages() -> None:
    for file, room, _, others, _ in modules():
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
