"""After a warm-up no request launches a kernel in a new variant, for which a compiler would run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.engine import Engine
from faircopy.kernels.gpu import flash, launch, pages
from faircopy.replay import passes
from faircopy.types import Request, SamplingParams
from tests.helpers import head_for, load
from tests.test_gluon_kernels import HALF, KERNELS, Set, a_model, hopper
from tests.test_replay import fused

assert hopper


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What every launch so far would have been compiled for."""
    found: set[Any] = set()
    run = launch.Launcher._launch

    def launched(self: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        kernel = getattr(self.kernel, "_kernel", self.kernel)
        found.add((kernel.fn.__name__, self.variant(args, meta)))
        run(self, grid, *args, **meta)

    monkeypatch.setattr(launch.Launcher, "_launch", launched)
    return found


def a_small_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    """Passes of more than 24 rows, or with logits of more than 4, are not captured."""
    monkeypatch.setattr("faircopy.layout.paged.cache_dtype", lambda *about: HALF)  # as on a GPU
    monkeypatch.setattr(passes, "ROWS", (16, 24))
    monkeypatch.setattr(passes, "LARGER", (40,))
    monkeypatch.setattr(passes, "WANTED", 4)
    for module in (flash, pages):
        monkeypatch.setattr(module, "GRAPH_ROWS", 24)
    config = EngineConfig(k=0, max_batch=1, cache_memory="4MiB", **options)
    return build_engine(a_model(folder, layers=1), config=config, suite=KERNELS)


def test_no_request_needs_a_new_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variants: set[Any], hopper: Set
) -> None:
    hopper(1, 3)
    engine = a_small_engine(tmp_path, monkeypatch)
    assert engine.target.passes is not None and engine.captured is not None
    engine.target.passes.rehearse()  # the launches of a warm-up
    engine.captured.rehearse([])
    known = set(variants)
    plain, asking = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1), SamplingParams(
        max_tokens=3, ignore_eos=True, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=1,
        logprobs=2, logit_bias={7: 1.0},
    )  # fmt: skip
    for n, params in ((5, plain), (33, asking)):
        engine.add(Request(tuple(range(3, 3 + n)), params))
    while engine.busy:
        engine.step()
    fresh = variants - known
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))


OF_HEADS = {"_pair", "_take_in", "_expand", "_rerank", "_spend", "_place_front", "_place_unread", "_leaders", "_offer"}
DEEP_ALONE = {"_expand", "_rerank", "_place_front"}  # of heads with keys of their own, whose trees are EAGLE's


@pytest.mark.parametrize("method", ["eagle3", "clover"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_draft_needs_a_new_variant(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch, variants: set[Any], method: str
) -> None:
    for choice in ("faircopy.kernels.gpu.suite.suite_for", "faircopy.layout.paged._suite"):
        monkeypatch.setattr(choice, lambda device: KERNELS)
    monkeypatch.setattr("faircopy.drafters.head_drafter.REHEARSED", ((1, 1), (1, 2)))
    folder = checkpoint("llama")
    head = head_for(folder, load(folder), method, draft_vocab=40)
    head.run_on_kernels(exact=False)
    config = EngineConfig(k=3, max_batch=1, cache_memory="1MiB")
    engine = build_engine(fused(folder), draft=head, config=config, suite=KERNELS)
    assert engine.captured is not None
    engine.drafter.rehearse()
    engine.captured.warm((3,))
    known = set(variants)
    assert {name for name, _ in known} >= OF_HEADS - ({"_spend", "_take_in"} if method == "eagle3" else DEEP_ALONE)
    engine.add(Request((3, 1, 4), SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.busy:
        engine.step()
    fresh = {variant for variant in variants - known if variant[0] in OF_HEADS}
    assert engine.meter.drafted > 0 and not fresh, "\n".join(map(str, sorted(fresh, key=str)))
