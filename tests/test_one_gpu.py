"""One command for what is measured on one GPU: parts that fail or take too long stop no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import one_gpu


def test_parts_end_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:  # type: ignore[type-arg]
    parts = {
        "good": (1.0, "-c print(1)"),
        "bad": (1.0, "-c raise(SystemExit(3))"),
        "late": (1.0, "-c print(2)"),
    }
    monkeypatch.setattr(one_gpu, "PARTS", parts)
    one_gpu.main(["--out", str(tmp_path), "--parts", "good", "bad"])
    found = [json.loads(line[line.index("{") :]) for line in capsys.readouterr().out.splitlines()]
    assert [row["outcome"].split(":")[0] for row in found] == ["done", "failed"]
    assert (tmp_path / "good.log").read_text() == "1\n"
    one_gpu.main(["--out", str(tmp_path), "--parts", "late", "--minutes", "0.1"])
    assert "no time left" in capsys.readouterr().out and not (tmp_path / "late.log").exists()


def test_small_shapes_need_few_texts(tmp_path: Path) -> None:
    words = one_gpu.command("heads", tmp_path, 1.0, small=True)
    assert words[-1] == "--small" and words[words.index("--batches") + 1] == "4"
    assert str(tmp_path / "heads.json") in words
