"""All kernels as one suite, and their torch twins as another: layouts and captured steps are given one of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from faircopy.kernels import tree_growth
from faircopy.kernels.gpu import (
    attention,
    gates,
    growth,
    heads,
    lanes,
    logprobs,
    norm,
    packing,
    pick,
    sampler,
    step,
    tree,
)
from faircopy.kernels.gpu.growth import UnreadRows
from faircopy.kernels.gpu.logprobs import LogprobReport
from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.pages import PagePlan
from faircopy.kernels.gpu.pending_norm import PendingNorm, few
from faircopy.kernels.gpu.sampler import RowSampling, SamplingSlots
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.kernels.tree_growth import TreeRules


class Pick(Protocol):
    """A token per row, see pick.pick."""

    def __call__(
        self,
        logits: Tensor,
        temperatures: Tensor,
        keys: Tensor,
        vocab: int | None = None,
        out: Tensor | None = None,
        strict: bool = False,
        sampling: RowSampling | None = None,
        words: Tensor | None = None,
    ) -> Tensor: ...


class Offer(Protocol):
    """The best few tokens of each row, see pick.offer."""

    def __call__(
        self,
        logits: Tensor,
        temperatures: Tensor,
        keys: Tensor,
        many: int,
        vocab: int | None = None,
        words: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class Describe(Protocol):
    """What rows are chosen with, see sampler.describe."""

    def __call__(
        self,
        batch: BatchSlots,
        inputs: StepInputs,
        rows: RowSampling,
        *,
        places: Tensor | None = None,
        paths: Tensor | None = None,
        level: int | None = None,
    ) -> None: ...


class Accept(Protocol):
    """Judges chains, see step.accept."""

    def __call__(
        self, batch: BatchSlots, inputs: StepInputs, chosen: Tensor, out: Tensor, starts: Tensor | None = None
    ) -> None: ...


class AcceptTree(Protocol):
    """Judges trees, see tree.accept_tree."""

    def __call__(
        self,
        batch: BatchSlots,
        inputs: StepInputs,
        trees: TreeNodes,
        chosen: Tensor,
        out: Tensor,
        starts: Tensor | None = None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Suite:
    """What a packed pass and a step are made of, products aside."""

    embed_norm: Callable[..., tuple[Tensor, Tensor]]
    pair: Callable[..., Tensor]
    add_norm: Callable[..., Tensor]
    take_in: Callable[..., Tensor]
    place: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    pick: Pick
    offer: Offer
    prepare: Callable[[BatchSlots, StepInputs, int, int], None]
    lookup: Callable[[BatchSlots, StepInputs, int, int], None]
    pack: Callable[[BatchSlots, StepInputs, PackedRows, int], None]
    pack_paths: Callable[[PackedRows, TreeNodes, PagePlan, int], None]
    place_lanes: Callable[[PagePlan, Tensor], None]
    accept: Accept
    place_nodes: Callable[[BatchSlots, StepInputs, TreeNodes], None]
    accept_tree: AcceptTree
    compact: Callable[[BatchSlots, TreeNodes, Tensor, int], None]
    describe: Describe
    count_tokens: Callable[[SamplingSlots, Tensor, int], None]
    report_logprobs: Callable[[Tensor, Tensor, Tensor, Tensor, LogprobReport], None]
    trees: TreeRules
    place_front: Callable[..., None]
    place_unread: Callable[[BatchSlots, UnreadRows, int, int], None]


KERNELS = Suite(
    norm.embed_norm,
    norm.pair,
    norm.add_norm,
    gates.take_in,
    heads.place,
    attention.attend_pages,
    pick.pick,
    pick.offer,
    step.prepare,
    step.lookup,
    packing.pack,
    packing.pack_paths,
    lanes.place_lanes,
    step.accept,
    tree.place_nodes,
    tree.accept_tree,
    tree.compact,
    sampler.describe,
    sampler.count_tokens,
    logprobs.report_logprobs,
    growth.RULES,
    growth.place_front,
    growth.place_unread,
)


def _attend_twin(*args: Any, arrived: Tensor, splits: int | None = None, **options: Any) -> Tensor:
    return attention.attend_pages_twin(*args, **options)


TWINS = Suite(
    norm.embed_norm_twin,
    norm.pair_twin,
    norm.add_norm_twin,
    gates.take_in_twin,
    heads.place_twin,
    _attend_twin,
    pick.pick_twin,
    pick.offer_twin,
    step.prepare_twin,
    step.lookup_twin,
    packing.pack_twin,
    packing.pack_paths_twin,
    lanes.place_lanes_twin,
    step.accept_twin,
    tree.place_nodes_twin,
    tree.accept_tree_twin,
    tree.compact_twin,
    sampler.describe_twin,
    sampler.count_tokens_twin,
    logprobs.report_logprobs_twin,
    tree_growth.TORCH,
    growth.place_front_twin,
    growth.place_unread_twin,
)


def add_norm_lazily(
    suite: Suite, x: Tensor, parts: Tensor, weight: Tensor, eps: float, *more: Any
) -> Tensor | PendingNorm:
    """norm.add_norm, with the same arguments: done now, or, for few rows, left to the product that reads them."""
    pending = suite is KERNELS and few(x)
    return (PendingNorm if pending else suite.add_norm)(x, parts, weight, eps, *more)


def residual_stream(rows: Tensor | PendingNorm, x: Tensor) -> Tensor:
    """The residual stream, once a product has read these rows."""
    return rows.x if isinstance(rows, PendingNorm) else x


def suite_for(device: torch.device) -> Suite | None:
    """The kernels where they run; None: this device is served by torch alone."""
    return KERNELS if device.type == "cuda" else None
