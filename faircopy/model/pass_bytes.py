"""What passes allocate besides weights and cache, from a model's sizes: one function per way a model runs.

Each follows the tensors that live at the same time in the code it names; change them together.
"""

from __future__ import annotations

import torch

from faircopy.kernels.groups import GROUPS, group_count, shared_groups
from faircopy.model.base import ModelShape

FEW = 64  # rows up to which the fused decoder's products leave their groups of K to the reader
ASIDE = 132 * 3 * 128 * 128 * 4  # what blocks of larger products put aside at most (kernels/gpu/linear.py)
COUNTERS = 4096  # two for each sequence and key head whose keys several programs may share (kernels/gpu/attention.py)
PARTS_LIMIT = 256 << 20  # bytes of partial results at most (kernels/gpu/attention.py)
SPAN = 512  # keys of a partial result (kernels/gpu/pages.py)


def activation_bytes(shape: ModelShape, rows: int, device: torch.device) -> int:
    """Peak bytes of the layers of one pass over this many rows, before its logits."""
    if shape.backend == "transformers":
        own = rows * shape.dtype.itemsize * _stock_numbers(shape)
    else:
        own = _fused(shape, rows) if device.type == "cuda" else rows * _eager(shape)
    return max(own, rows * _exchange(shape, device)) if shape.ranks > 1 else own


def head_layer_bytes(target: ModelShape, inputs: int, rows: int) -> int:
    """Of a draft head that reads this many numbers per row with a decoder layer of its own, as wide as the target's."""
    return rows * target.dtype.itemsize * (inputs + _stock_numbers(target))


def logits_bytes(shape: ModelShape, rows: int) -> int:
    """The logits of this many rows, and the states they are made from.

    Of several ranks: this one's, all ranks' as they were gathered, and in one (model/shares.py); of a pipeline: the
    last one's message as it arrives, as bytes and as a tensor (parallel/group.py).
    """
    copies = 1.0 if shape.whole else 3.0 if shape.stages > 1 else 2.0 + 1.0 / shape.ranks
    return int(rows * (copies * shape.vocab + 2 * shape.hidden) * shape.dtype.itemsize)


def _exchange(shape: ModelShape, device: torch.device) -> int:
    """kernels/linear.py, RowParallel, per row: float32 sums of all groups of this rank, apart and stacked; or its own,
    those of all ranks, and what their tree adds up to."""
    inner = (shape.heads * shape.head_dim, shape.intermediate)
    groups = max(shared_groups(shape.hidden, shape.ranks * n, device.type) // shape.ranks for n in inner)
    apart = 2 * groups if device.type == "cpu" else groups
    return 2 * shape.hidden * shape.dtype.itemsize + 4 * shape.hidden * max(apart, shape.ranks + 2)


def partial_attention_bytes(shape: ModelShape, seqs: int, rows: int, context: int) -> int:
    """On a GPU: results of spans of keys that several programs compute side by side (kernels/gpu/attention.py)."""
    keys = max((layer.kv_heads for layer in shape.layers), default=0)
    size = 4 * rows * shape.heads * -(-context // SPAN) * (shape.head_dim + 2)
    return size if 2 * seqs * keys <= COUNTERS and size <= PARTS_LIMIT else 0


def _eager(shape: ModelShape) -> int:
    """model/decoder.py, per row: torch normalises 16-bit numbers in two float32 copies; rotating needs two copies."""
    size, rotated = shape.dtype.itemsize, (shape.qkv + shape.heads * shape.head_dim) // 2
    in_float = 8 if size == 2 else 0
    norm = 2 * shape.hidden * size + in_float * shape.hidden
    heads = max((2 + shape.qk_norm) * rotated * size, in_float * rotated if shape.qk_norm else 0)
    attention = (shape.hidden + shape.qkv + shape.head_dim) * size + heads
    return max(norm, attention, (2 * shape.hidden + shape.intermediate) * size)


def _stock_numbers(shape: ModelShape) -> int:
    """model/transformers_backend.py, per row: stock modules hold gate, up and their product apart."""
    attention = 2 * shape.hidden + 3 * shape.qkv
    return max(attention, 3 * shape.hidden + 3 * shape.intermediate)


def _fused(shape: ModelShape, rows: int) -> int:
    """model/fused.py: the residual, its norm, attention's output and the sums before it live on through the MLP."""
    size, inner = shape.dtype.itemsize, shape.heads * shape.head_dim
    qkv, out = _product(shape.qkv, shape.hidden, rows, size), _product(shape.hidden, inner, rows, size)
    down = _product(shape.hidden, shape.intermediate, rows, size)
    attention = 2 * shape.hidden * size + down + 3 * inner * size + qkv
    mlp = (2 * shape.hidden + inner + shape.intermediate) * size + out + down
    aside = ASIDE if rows > FEW and group_count(shape.intermediate, shape.hidden) == GROUPS else 0
    return rows * max(attention, mlp) + aside


def _product(outputs: int, inner: int, rows: int, itemsize: int) -> int:
    """Bytes per row of a product: finished, or float32 parts for the reader to add (kernels/gpu/linear.py)."""
    parts = group_count(inner, outputs) if itemsize == 4 or rows <= FEW else 1
    return outputs * (itemsize if parts == 1 else 4 * parts)
