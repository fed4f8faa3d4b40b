"""A Hopper on which nothing runs: an engine serves requests on it, and what its kernels would be compiled for is kept.

Shapes never depend on what kernels compute, but for how many draft nodes a captured step accepts: that is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from faircopy import build
from faircopy.kernels.gpu import (
    attention,
    flash,
    launch,
    linear,
    norm,
    pages,
    pending_norm,
    pipelined,
    stream,
    suite,
    tables,
)
from faircopy.kernels.gpu.records import Report, ReportColumns
from faircopy.kernels.gpu.suite import KERNELS
from faircopy.layout import paged
from faircopy.replay.in_flight import InFlightStep
from faircopy.replay.runner import CapturedRunner
from faircopy.types import FinishedStep, Sequence

PROCESSORS = 132
LARGE = 1 << 16  # numbers of a tensor whose memory is not worth clearing
Variant = tuple[str, tuple[Any, ...]]  # a kernel's name, and what it is compiled for


class IdleDevice:
    """variants: what every launch so far would have been compiled for."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()
        self._source, self._empty, self._collect = random.Random(0), torch.empty, CapturedRunner.collect

    @contextmanager
    def running(self) -> Iterator[IdleDevice]:
        """Inside, models and engines that are made on the CPU are made for this device."""
        with ExitStack() as stack:
            for owner, name, value in self._replaced():
                stack.enter_context(patch.object(owner, name, value))
            yield self

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        yield launch.Launcher, "_launch", lambda *args, **meta: self._launched(*args, **meta)
        yield CapturedRunner, "collect", lambda runner, step: self._collected(runner, step)
        yield torch, "empty", self._emptied
        yield F, "linear", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
        yield paged, "cache_dtype", lambda layers, dtype, device: dtype
        yield paged, "_suite", lambda device: KERNELS
        yield suite, "suite_for", lambda device: KERNELS
        yield build, "cost_table", lambda *about: None  # measured while it warms up
        yield tables, "device_class", lambda device: "hopper"
        for module in (flash, pages, pending_norm):
            yield module, "hopper", lambda device: True
        for module in (attention, flash, linear, norm, pending_norm, pipelined, stream):
            if hasattr(module, "processors"):
                yield module, "processors", lambda device: PROCESSORS

    def _launched(self, launcher: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        kernel = getattr(launcher.kernel, "fn", launcher.kernel)
        self.variants.add((kernel.__name__, launcher.variant(args, meta)))

    def _emptied(self, *shape: Any, **options: Any) -> Tensor:
        """Memory as if kernels had written it: all rows are healthy, tokens are some of the vocabulary."""
        made = self._empty(*shape, **options)
        if made.dtype == torch.bool:
            return made.fill_(True)
        return made if made.is_floating_point() and made.numel() > LARGE else made.zero_()

    def _collected(self, runner: CapturedRunner, step: InFlightStep) -> FinishedStep:
        rooms = zip(step.batch_slots.items(), step.plan.batch.max_nodes, strict=True)
        for (seq, slot), room in rooms:
            self._report(step.report.numpy()[slot], seq, min(room, step.plan.k), step)
        return self._collect(runner, step)

    def _report(self, row: NDArray[Any], seq: Sequence, nodes: int, step: InFlightStep) -> None:
        """Say that a chain was drafted and some of it accepted, as far as the text may go on."""
        trees, columns = step.graph.trees, ReportColumns(step.graph.k + 1, step.graph.trees is not None)
        nodes = max(0, min(nodes, seq.limit - len(seq.tokens) - 1, nodes if trees is None else trees.deepest))
        accepted = self._source.randint(0, nodes)
        row[:] = 0
        row[: Report.TOKENS] = accepted + 1, nodes, 1
        if columns.tree:
            row[columns.parents : columns.parents + nodes] = range(-1, nodes - 1)
            row[columns.path : columns.path + accepted + 1] = range(accepted + 1)
