"""k="auto" on a device whose time is computed: never much slower than plain, and a drafter that is off is off."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Seq

import pytest

pytest.importorskip("triton")

from benchmarks.simulated import CONTEXT, VOCAB, Queue, Written, read_table, write
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths
from faircopy.engine import Engine
from faircopy.kernels.gpu.suite import TWINS
from faircopy.planner import TRIED, AutoLength
from faircopy.testing.simulated_device import FreeModel, SimulatedDevice
from faircopy.types import Sequence

BATCH = 64
QUEUE = Queue(batch=BATCH, tokens=64)


def engine_of(draft: FreeModel, lengths: DraftLengths, batch: int = BATCH, **options: object) -> Engine:
    settings: dict[str, object] = {"k": 8, "max_batch": batch, "cache_memory": "64MiB", "prefix_reuse": False}
    config = EngineConfig(**(settings | options))  # type: ignore[arg-type]
    return build_engine(FreeModel(VOCAB, CONTEXT), draft=draft, config=config, suite=TWINS, draft_lengths=lengths)


@pytest.fixture(scope="module")
def plain() -> Written:
    return write(QUEUE, None, 0, read_table())


@pytest.mark.parametrize(
    "right,turn,least",
    [(0.0, None, 0.98), (0.9, None, 1.1), (0.95, 76, 0.98)],
    ids=["useless", "good", "changing"],
)
def test_a_large_batch_is_not_slower_than_plain(plain: Written, right: float, turn: int | None, least: float) -> None:
    """The H200's table at batch 64, a queue six times as long; a fixed length of the good one gains a fifth at best."""
    found = write(QUEUE, FreeModel(VOCAB, CONTEXT, right, turn), "auto", read_table())
    assert found.texts == plain.texts
    assert found.rate > least * plain.rate


class Never(DraftLengths):
    """Drafting is off."""

    lengths = (0, 2)

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [0] * len(seqs)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_drafter_that_is_off_reads_nothing(graphs: bool) -> None:
    """Neither prompts, in however many chunks, nor what is written."""
    engine = engine_of(FreeModel(VOCAB, CONTEXT), Never(), 4, graphs=graphs, chunk=8)
    for request in Queue(batch=8, times=1).requests():
        engine.add(request)
    while engine.busy:
        engine.step()
    assert engine.meter.drafter_rows == 0 and engine.meter.captured_steps * graphs >= 0.5 * graphs * engine.meter.steps


@pytest.mark.parametrize(("prompt", "most"), [(44, BATCH), (120, TRIED)])
def test_a_trial_drafts_for_as_many_as_may_be_read(prompt: int, most: int) -> None:
    """The first drafts at a large batch are for all sequences, or where reading their prompts would cost more than a
    trial may, for a few, and the drafter reads those alone."""
    engine = engine_of(FreeModel(VOCAB, CONTEXT, 0.0), AutoLength(8))
    device = SimulatedDevice(engine, read_table())
    seqs = [engine.add(request) for request in Queue(batch=BATCH, times=1, prompt=prompt).requests()]
    with device.running():
        while not any(seq.drafted for seq in seqs):
            engine.step()
        for _ in range(16):
            engine.step()
    tried = [seq for seq in seqs if seq.drafted]
    assert most // 2 < len(tried) <= most
    assert engine.meter.drafter_rows < 2 * sum(len(seq.tokens) for seq in tried)


def test_the_choice_takes_the_host_little_time() -> None:
    """Of a plain step of 64 sequences, which takes 4.9 ms, less than a tenth; drafts on and off."""
    for right in (0.0, 0.95):
        lengths = AutoLength(8)
        engine = engine_of(FreeModel(VOCAB, CONTEXT, right), lengths)
        device, spent = SimulatedDevice(engine, read_table()), _watched(lengths)
        for request in Queue(batch=BATCH, times=1).requests():
            engine.add(request)
        with device.running():
            while engine.scheduler.waiting:
                engine.step()
            taken = []
            for _ in range(25):
                before = sum(spent)
                engine.step()
                taken.append(sum(spent) - before)
        assert statistics.median(taken) < 0.1 * read_table().step(BATCH, 0)


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
