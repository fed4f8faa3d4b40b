"""The package as users get it: the wheel in a clean environment, its types, and the examples in the documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from faircopy import __version__
from faircopy.audit.servers import ServerError

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SNIPPET = """
from typing import assert_type

from faircopy import LLM, Answer, SamplingParams

llm = LLM("models/target", draft="ngram", k=2, dtype="float32")
answers = llm.generate(["one", "two"], SamplingParams(max_tokens=4, stop=("x",)))
assert_type(answers, list[Answer])
assert_type(answers[0].text, str)
assert_type(answers[0].token_ids, list[int])
for piece in llm.stream("one"):
    assert_type(piece, str)
"""

MYPY = """
[mypy]
strict = true
[mypy-torch.*,numpy.*,transformers.*]
follow_imports = skip
"""


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel in it; other packages are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("faircopy", "models", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    venv.create(folder / "clean", with_pip=False, symlinks=True)
    python = folder / "clean" / "bin" / "python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    wheel = next(folder.glob("faircopy-*.whl"))
    call(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_works_in_a_clean_environment(installed: Path, tmp_path: Path) -> None:
    where = call(installed, "-c", "import faircopy; print(faircopy.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(installed.parents[1]), "the wheel is used, not the clone"
    assert (Path(where).parent / "py.typed").exists()
    faircopy = installed.with_name("faircopy")
    assert call(faircopy, "--version", cwd=tmp_path) == __version__
    assert call(faircopy, "generate", "Once upon a time", "--max-tokens", "4", "--json", cwd=tmp_path).startswith("{")


def test_a_script_beside_a_clone_imports_the_installed_package(installed: Path, tmp_path: Path) -> None:
    clone = tmp_path / "faircopy" / "faircopy"
    clone.mkdir(parents=True)
    (clone / "__init__.py").write_text("raise ImportError('the clone')")
    (tmp_path / "script.py").write_text("import faircopy; print(faircopy.__version__)")
    assert call(installed, tmp_path / "script.py", cwd=tmp_path) == __version__


def test_the_public_interface_is_typed(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(MYPY)
    call(sys.executable, "-m", "mypy", "--python-executable", installed, "snippet.py", cwd=tmp_path)


def examples() -> list[tuple[str, str]]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [(f"{file.name}:{n}", text) for file in files for n, text in enumerate(EXAMPLE.findall(file.read_text()))]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in examples()])
def test_examples_in_the_documents_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    if "localhost" in code:  # no server runs there, and the error says so
        with pytest.raises(ServerError, match="cannot be reached"):
            exec(compile(code, "example", "exec"), names)
    else:
        exec(compile(code, "example", "exec"), names)
