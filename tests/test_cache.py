"""Tables that are kept between processes: found again, merged, and never fatal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faircopy import LLM, UnsupportedModel, build
from faircopy.cache import KeptTable, cache_folder, cpu_kind
from faircopy.kernels import linear


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_value_is_found_by_the_next_process_and_beside_those_of_others(folder: Path) -> None:
    one, other = KeptTable("t"), KeptTable("t")
    assert one.get("a") is None and other.get("b") is None
    one.put("a", 1)
    other.put("b", [2])
    assert {key: KeptTable("t").get(key) for key in "abc"} == {"a": 1, "b": [2], "c": None}
    assert [file.name for file in folder.iterdir()] == ["t.json"], "no temporary file is left"


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_damaged_file_costs_time_only(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "t.json").write_text(content)
    table = KeptTable("t")
    assert table.get("a") is None
    table.put("a", 1)
    assert KeptTable("t").get("a") == 1


def test_a_folder_that_cannot_be_written_costs_time_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path / "file" / "below"))
    table = KeptTable("t")
    table.put("a", 1)
    assert table.get("a") == 1
    monkeypatch.setenv("FAIRCOPY_CACHE", "")
    assert cache_folder() is None


def test_a_products_trial_is_made_once_per_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []
    original = linear._least_rows
    monkeypatch.setattr(linear, "_least_rows", lambda *args: trials.append(1) or original(*args))
    monkeypatch.setattr(linear, "fits", lambda weight: False)
    for _ in range(2):
        monkeypatch.setattr(linear, "_settled", KeptTable("cpu-products"))  # as a new process would
        run = linear.product(torch.randn(40, 24))
        assert run(torch.randn(1, 24)).shape == (1, 40)
    assert len(trials) == 1
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert "ATEN_CPU_CAPABILITY=default" in cpu_kind(), "another set of instructions is another machine"


def test_a_checkpoint_is_tested_once_per_machine(
    folder: Path, checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = []
    original = build.self_test
    monkeypatch.setattr(build, "self_test", lambda *args: tested.append(args[0].name) or original(*args))
    monkeypatch.setattr(build, "_PASSED", KeptTable("self-tests"))
    options = {"dtype": "float32", "cache_memory": "8MiB"}
    for name, seed in (("llama", 0), ("llama", 0), ("llama", 1), ("gemma2", 0), ("gemma2", 0)):
        monkeypatch.setattr(build, "_PASSED", KeptTable("self-tests"))  # as a new process would
        LLM(checkpoint(name, seed), **options)
    assert len(tested) == 3, "another checkpoint is tested, the same one is not"
    LLM(checkpoint("llama"), exact=False, **options)
    monkeypatch.setattr(build, "source_hash", lambda: "changed")
    LLM(checkpoint("llama"), **options)
    monkeypatch.setattr(build, "library_versions", lambda: "changed")
    LLM(checkpoint("llama"), **options)
    assert len(tested) == 6, "another mode, other code and another transformers are"


def test_a_model_that_fails_is_tested_again(
    folder: Path, checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[int]:
        raise UnsupportedModel("model", "m", "differs", "do something else")

    monkeypatch.setattr(build, "_PASSED", KeptTable("self-tests"))
    monkeypatch.setattr(build, "self_test", fails)
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            LLM(checkpoint("llama"), dtype="float32", cache_memory="8MiB")


def test_values_that_change_are_those_of_the_last_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    one, other = KeptTable("t", changes=True), KeptTable("t", changes=True)
    one.put("a", 1)
    other.put("a", 2)
    one.put("b", 3)
    assert (one.get("a"), other.get("b")) == (2, 3)
