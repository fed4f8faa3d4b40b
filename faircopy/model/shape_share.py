"""The sizes of what one of several devices holds of a model, before a weight is read: rank 0's, which has most.

With tensor parallelism every rank has as many weights and keys; with a pipeline rank 0 has as many layers as any and
the embedding, which is as large as the last rank's output layer. Rank 0 alone has the drafter and chooses tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faircopy.layout.base import LayerShape
from faircopy.model.base import ModelShape
from faircopy.model.hidden import decoder_blocks
from faircopy.model.loader import fits_decoder, stage_of
from faircopy.model.shares import Cut, TokenShares, dense_shares
from faircopy.model.weights import head_size


@dataclass(frozen=True, slots=True)
class Split:
    """How many devices share a model: each of its layers, or its layers in stages."""

    tensor: int = 1
    stages: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.stages


WHOLE = Split()
Cuts = Callable[[str, tuple[int, ...]], Cut | None]


class _FirstOf:
    """Rank 0 of some that do not run."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is computed of a shape")


def first_share(shape: ModelShape, config: Any, skeleton: Any, split: Split, device: torch.device) -> ModelShape:
    """Rank 0's part of a model. skeleton: the stock model without memory."""
    if split.tensor > 1:
        return _tensor_share(shape, config, skeleton, _FirstOf(split.tensor), device)
    return _first_stage(shape, skeleton, split.stages) if split.stages > 1 else shape


def _tensor_share(shape: ModelShape, config: Any, skeleton: Any, ranks: _FirstOf, device: torch.device) -> ModelShape:
    """A part of each layer: heads, key heads, inner numbers of the MLP, and of the vocabulary."""
    cuts, attends = _cuts(shape.name, config, skeleton, ranks, device)
    held = {name: _held(cuts(name, tuple(p.shape)), tuple(p.shape)) for name, p in skeleton.named_parameters()}
    experts = sum(count for name, count in held.items() if ".experts." in name)
    size = ranks.size if attends else 1
    embedding = TokenShares(shape.vocab, ranks).width * skeleton.get_input_embeddings().weight.shape[1]
    return replace(
        shape,
        parameters=sum(held.values()),
        read=sum(held.values()) - (0 if shape.tied else embedding) - int(experts * shape.idle),
        heads=shape.heads // size,
        layers=tuple(_narrow(layer, size) for layer in shape.layers),
        intermediate=-(-shape.intermediate // ranks.size),
        experts=experts,
        head_rows=TokenShares(shape.vocab, ranks).width,
        ranks=ranks.size,
    )


def _cuts(name: str, config: Any, skeleton: Any, ranks: _FirstOf, device: torch.device) -> tuple[Cuts, bool]:
    """What rank 0 keeps of each parameter, and whether attention heads are shared."""
    if fits_decoder(config):
        shares = dense_shares(name, config, head_size(config), config.vocab_size, device, ranks)
        return (lambda parameter, _: shares.cut(parameter)), True
    from faircopy.model.stock_shares import StockCuts

    stock = StockCuts(name, skeleton, ranks, device)
    return stock.cut, stock.attends


def _held(cut: Cut | None, shape: tuple[int, ...]) -> int:
    if cut is None:
        return math.prod(shape)
    kept = cut.size or sum(end - begin for begin, end in cut.ranges)
    return math.prod(shape) // shape[cut.dim] * kept


def _narrow(layer: LayerShape, size: int) -> LayerShape:
    """Where there are fewer key heads than ranks, each has one."""
    kept = max(1, layer.kv_heads // size)
    return replace(layer, kv_heads=kept, group=layer.kv_heads * layer.group // size // kept)


def _first_stage(shape: ModelShape, skeleton: Any, stages: int) -> ModelShape:
    """The embedding and the first layers."""
    kept, blocks = len(stage_of(shape.name, len(shape.layers), 0, stages).layers), decoder_blocks(skeleton)
    left = [p for block in list(blocks)[kept:] for p in block.parameters()]
    experts = sum(p.numel() for block in list(blocks)[:kept] for n, p in block.named_parameters() if "experts." in n)
    head = 0 if shape.tied else skeleton.get_output_embeddings().weight.numel()
    held = shape.parameters - sum(p.numel() for p in left) - head
    embedding = skeleton.get_input_embeddings().weight.numel()
    return replace(
        shape,
        parameters=held,
        read=held - embedding - int(experts * shape.idle),
        layers=shape.layers[:kept],
        experts=experts,
        head_rows=0,
        stages=stages,
    )
