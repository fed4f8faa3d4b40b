"""All kernels as one suite, and their torch twins as another: layouts and captured steps are given one of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faircopy.kernels.gpu import attention, heads, norm, packing, pick, step, tree


@dataclass(frozen=True, slots=True)
class Suite:
    """What a packed pass and a step are made of, products aside."""

    embed_norm: Callable[..., tuple[Tensor, Tensor]]
    add_norm: Callable[..., Tensor]
    place: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    pick: Callable[..., Tensor]
    offer: Callable[..., tuple[Tensor, Tensor]]
    prepare: Callable[..., None]
    lookup: Callable[..., None]
    pack: Callable[..., None]
    accept: Callable[..., None]
    place_nodes: Callable[..., None]
    accept_tree: Callable[..., None]
    compact: Callable[..., None]


KERNELS = Suite(
    norm.embed_norm,
    norm.add_norm,
    heads.place,
    attention.attend_pages,
    pick.pick,
    pick.offer,
    step.prepare,
    step.lookup,
    packing.pack,
    step.accept,
    tree.place_nodes,
    tree.accept_tree,
    tree.compact,
)


def _attend_twin(*args: Any, arrived: Tensor, splits: int | None = None, **options: Any) -> Tensor:
    return attention.attend_pages_twin(*args, **options)


TWINS = Suite(
    norm.embed_norm_twin,
    norm.add_norm_twin,
    heads.place_twin,
    _attend_twin,
    pick.pick_twin,
    pick.offer_twin,
    step.prepare_twin,
    step.lookup_twin,
    packing.pack_twin,
    step.accept_twin,
    tree.place_nodes_twin,
    tree.accept_tree_twin,
    tree.compact_twin,
)


def suite_for(device: torch.device) -> Suite | None:
    """The kernels where they run; None: this device is served by torch alone."""
    return KERNELS if device.type == "cuda" else None
