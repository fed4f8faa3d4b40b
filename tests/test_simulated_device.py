"""k="auto" on a device whose time is computed: never much slower than plain, and a drafter that is off is off."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

pytest.importorskip("triton")

from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.costs import CostTable
from faircopy.draft_length import DraftLengths
from faircopy.engine import Engine
from faircopy.kernels.gpu.suite import TWINS
from faircopy.planner import TRIED, AutoLength
from faircopy.testing.simulated_device import FreeModel, SimulatedDevice
from faircopy.types import Request, SamplingParams, Sequence

H200 = Path(__file__).parent.parent / "benchmarks" / "results" / "costs-h200.json"
BATCH, QUEUE, TOKENS = 64, 6, 64


def table() -> CostTable:
    return CostTable.of_json(json.loads(H200.read_text())["rows"][0])


def engine_of(draft: FreeModel | None, lengths: DraftLengths | None, batch: int = BATCH, **options: object) -> Engine:
    config = EngineConfig(k=8 if draft else 0, max_batch=batch, cache_memory="64MiB", prefix_reuse=False, **options)  # type: ignore[arg-type]
    return build_engine(FreeModel(), draft=draft, config=config, suite=TWINS, draft_lengths=lengths)


def requests(count: int) -> list[Request]:
    """Prompts of 20 to 60 tokens, texts of half to one and a half times TOKENS."""
    source = random.Random(0)
    prompts = [tuple(source.randrange(64) for _ in range(source.randint(20, 60))) for _ in range(count)]
    lengths = [source.randint(TOKENS // 2, TOKENS * 3 // 2) for _ in prompts]
    return [Request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in zip(prompts, lengths, strict=True)]


def rate(draft: FreeModel | None) -> tuple[float, list[list[int]]]:
    """Tokens a second of a queue six times the batch, and the texts."""
    engine = engine_of(draft, AutoLength(8) if draft else None)
    device = SimulatedDevice(engine, table())
    with device.running():
        seqs = [engine.add(request) for request in requests(QUEUE * BATCH)]
        while engine.busy:
            engine.step()
    texts = [seq.output for seq in seqs]
    return sum(map(len, texts)) / device.now, texts


@pytest.fixture(scope="module")
def plain() -> tuple[float, list[list[int]]]:
    return rate(None)


@pytest.mark.parametrize(
    "draft,least",
    [({"right": 0.0}, 0.98), ({"right": 0.9}, 1.1), ({"right": 0.95, "turn": 72}, 0.98)],
    ids=["useless", "good", "changing"],
)
def test_a_large_batch_is_not_slower_than_plain(plain, draft: dict[str, float], least: float) -> None:  # type: ignore[no-untyped-def]
    """The H200's table at batch 64: with 2 of 3 draft tokens accepted the best fixed length gains a fifth."""
    found, texts = rate(FreeModel(**draft))  # type: ignore[arg-type]
    assert texts == plain[1]
    assert found > least * plain[0]


class Never(DraftLengths):
    """Drafting is off."""

    lengths = (0, 2)

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [0] * len(seqs)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_drafter_that_is_off_reads_nothing(graphs: bool) -> None:
    """Neither prompts, in however many chunks, nor what is written."""
    engine = engine_of(FreeModel(), Never(), 4, graphs=graphs, chunk=8)
    for request in requests(8):
        engine.add(request)
    while engine.busy:
        engine.step()
    assert engine.meter.drafter_rows == 0 and engine.meter.captured_steps * graphs >= 0.5 * graphs * engine.meter.steps


def test_a_trial_drafts_for_a_few() -> None:
    """The first drafts at a large batch are for a few sequences; the drafter reads those alone."""
    engine = engine_of(FreeModel(right=0.0), AutoLength(8))
    device = SimulatedDevice(engine, table())
    seqs = [engine.add(request) for request in requests(BATCH)]
    with device.running():
        while not any(seq.drafted for seq in seqs):
            engine.step()
        for _ in range(16):
            engine.step()
    tried = [seq for seq in seqs if seq.drafted]
    assert 0 < len(tried) <= TRIED
    assert engine.meter.drafter_rows < 2 * sum(len(seq.tokens) for seq in tried)


def test_the_choice_takes_the_host_little_time() -> None:
    """Of a plain step of 64 sequences, which takes 4.9 ms, less than a tenth; drafts on and off."""
    for right in (0.0, 0.95):
        lengths = AutoLength(8)
        engine = engine_of(FreeModel(right=right), lengths)
        device, spent = SimulatedDevice(engine, table()), _watched(lengths)
        for request in requests(BATCH):
            engine.add(request)
        with device.running():
            while engine.scheduler.waiting:
                engine.step()
            taken = []
            for _ in range(25):
                before = sum(spent)
                engine.step()
                taken.append(sum(spent) - before)
        assert statistics.median(taken) < 0.1 * table().step(BATCH, 0)


def _watched(lengths: AutoLength) -> list[float]:
    """Seconds of the thread in every call of the chooser."""
    spent: list[float] = []
    for name in ("choose", "observe"):
        inner = getattr(lengths, name)

        def timed(*args, inner=inner):  # type: ignore[no-untyped-def]
            begin = time.thread_time()
            found = inner(*args)
            spent.append(time.thread_time() - begin)
            return found

        setattr(lengths, name, timed)
    return spent
