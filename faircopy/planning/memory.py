"""The memory model: everything the engine allocates, as named items in bytes, from sizes alone.

An item's bytes come from the module that allocates it (weights: `model`, `kernels`; passes: `model/pass_bytes.py`;
choosing tokens: `sampling.py`, `verify/rejection.py`) or follow its code here. What Python, torch and compiled kernels
take for themselves is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from faircopy.kernels.cpu.product import packed_bytes
from faircopy.layout.base import kv_bytes
from faircopy.model.base import ModelShape
from faircopy.model.pass_bytes import activation_bytes, head_layer_bytes, logits_bytes, partial_attention_bytes
from faircopy.planning.drafts import DraftShape
from faircopy.sampling import choice_bytes
from faircopy.verify.rejection import drawing_bytes

# As replay/passes.py and replay/runner.py capture them; tests/test_planning.py compares.
GRAPH_ROWS = (16, 32, 64, 96, 128, 144, 160, 192, 256, 320, 384, 512, 768, 1024)
JOINING_ROWS = (64, 192, 416)  # of prompts, that captured steps read beside those of the batch: up to the next tile
GRAPH_WANTED = 128  # rows whose logits a graph of a pass keeps at most
HEAP = 8 << 20  # bytes between blocks of passes on a CPU, as measured by benchmarks/memory.py
GATHERING = 4  # passes' worth of freed blocks where ranks share layers on a CPU, as measured by benchmarks/memory.py
KEPT = 4  # messages per rank that are kept after they were sent (parallel/group.py)
MARGIN = 0.1  # of a limit: measured peaks were up to 8 % above the predicted ones (docs/planner.md)
TRIAL_ROWS = 700  # rows of the largest pass of the test at load


class Item(NamedTuple):
    """One thing that takes memory."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine before it is built."""

    target: ModelShape
    draft: DraftShape
    nodes: int  # draft tokens per sequence and step
    levels: int  # of them, how many lie on one path
    batch: int
    tokens: int  # per sequence, prompt and answers of the whole dialogue
    device: torch.device
    page: int = 32
    chunk: int = 512  # prompt tokens per step
    sampled: bool = True  # whether requests may sample with filters and penalties; else all are greedy
    rejection: bool = False  # whether the verifier wants what every draft token was drawn from
    graphs: bool = True
    margin: float = 0.0  # share of everything that is added: what a prediction may be wrong by
    pages: int | None = None  # of the pool; None: as many as the batch's tokens need

    @property
    def rows(self) -> int:
        """Rows of a verifying pass."""
        return self.batch * (self.nodes + 1)

    @property
    def pool_pages(self) -> int:
        """Pages for the tokens of every sequence. Draft nodes lie where the next tokens will, none behind a limit."""
        return self.batch * -(-self.tokens // self.page) if self.pages is None else self.pages

    @property
    def captured(self) -> bool:
        return self.graphs and self.device.type == "cuda" and self.draft.kind != "own" and self.target.whole

    def page_bytes(self) -> tuple[int, int]:
        """Of one page: the target's keys and values, and the draft's."""
        layers, dtype = self.draft.layers, self.target.dtype
        if self.draft.model is not None:
            layers, dtype = self.draft.model.layers, self.draft.model.dtype
        own = kv_bytes(self.target.layers, self.target.dtype, self.device)
        return self.page * own, self.page * kv_bytes(layers, dtype, self.device)


def memory_items(setup: Setup) -> list[Item]:
    """What is allocated when memory is fullest; the bytes add up to the peak."""
    fixed = [*_weights(setup), *_cache(setup)]
    working = [*_working(setup), *_graphs(setup)]
    items = [*fixed, *working]
    loading = max(_loading(setup), _loading_head(setup, fixed)) - sum(item.bytes for item in items[1:])
    if loading > 0:
        items.append(Item("loading", loading, "beside the weights while they are read and tested, more than later"))
    items.append(Item("margin", _margin(setup, total(items)), f"{setup.margin:.0%}, for errors of this table"))
    return [item for item in items if item.bytes]


def _margin(setup: Setup, size: int) -> int:
    """A share of everything; on a CPU some bytes at least, since its heap varies from run to run."""
    least = HEAP if setup.margin and setup.device.type == "cpu" else 0
    return max(int(setup.margin * size), least)


def total(items: list[Item]) -> int:
    return sum(item.bytes for item in items)


def speculation_bytes(setup: Setup) -> int:
    """What drafting adds to plain decoding of the same dialogue."""
    return total(memory_items(setup)) - total(memory_items(without_drafts(setup)))


def without_drafts(setup: Setup) -> Setup:
    from faircopy.planning.drafts import NO_DRAFT

    return replace(setup, draft=NO_DRAFT, nodes=0, levels=0)


def weight_bytes(shape: ModelShape, device: torch.device) -> int:
    """A model's weights as its decoder keeps them, and its table of rotations."""
    size, table = shape.dtype.itemsize, shape.context * shape.head_dim * shape.dtype.itemsize
    if device.type != "cpu" or not shape.hidden:
        return shape.parameters * size + table
    if shape.backend == "transformers":
        return (shape.parameters + shape.experts) * size + table
    return shape.parameters * size + table + _packing_bytes(shape)


def _packing_bytes(shape: ModelShape) -> int:
    """What the CPU's packed weights take beyond their numbers."""
    hidden, inner, size = shape.hidden, shape.heads * shape.head_dim, shape.dtype.itemsize
    of_layer = ((shape.qkv, hidden), (hidden, inner), (2 * shape.intermediate, hidden), (hidden, shape.intermediate))
    layers = sum(packed_bytes(*weight, size) - weight[0] * weight[1] * size for weight in of_layer)
    return len(shape.layers) * layers + packed_bytes(shape.spoken, hidden, size) - shape.spoken * hidden * size


def _weights(setup: Setup) -> list[Item]:
    target, draft, device = setup.target, setup.draft, setup.device
    name = str(target.dtype).removeprefix("torch.")
    items = [Item("weights", weight_bytes(target, device), f"{target.parameters:,} numbers in {name}")]
    if draft.model is not None:
        count = f"{draft.model.parameters:,} numbers"
        return [*items, Item("draft weights", weight_bytes(draft.model, device), count)]
    numbers = draft.parameters(setup.levels)
    shared = _shared_copies(target, draft.draft_vocab or target.vocab, device) if numbers else 0
    why = f"{numbers:,} numbers" + (", and its own copy of the target's output layer" if shared else "")
    return [*items, Item("draft weights", numbers * target.dtype.itemsize + shared, why)]


def _shared_copies(target: ModelShape, draft_vocab: int, device: torch.device) -> int:
    """What a head that guesses this many tokens copies of its target's embedding and output layer, where the target
    keeps a product alone."""
    numbers = target.vocab * target.hidden * target.dtype.itemsize
    if device.type == "cpu":
        return packed_bytes(draft_vocab, target.hidden, target.dtype.itemsize) + numbers
    if not target.whole:  # the device has a part of either, and reads both again
        return numbers * (1 if target.tied else 2)
    return 0 if target.tied else numbers


def _cache(setup: Setup) -> list[Item]:
    """Pages of the pool, and the scratch page."""
    (target, draft), pages = setup.page_bytes(), setup.pool_pages
    of = f"{pages} pages of {setup.page} tokens"
    return [
        Item("keys and values", (pages + 1) * target, f"{of}, draft nodes in flight included"),
        Item("draft keys and values", (pages + 1) * draft, of),
    ]


def _working(setup: Setup) -> list[Item]:
    """The largest pass, and what choosing tokens needs beyond it: a pass's layers are gone when its logits are read."""
    rows = setup.rows + (setup.chunk if setup.tokens > 1 else 0)
    layers = max(_pass(setup.target, setup, rows), _draft_pass(setup))
    choosing = max(logits_bytes(setup.target, setup.rows) + _choices(setup), _draft_choices(setup))
    states = setup.draft.inputs * setup.target.dtype.itemsize * rows * 2
    gaps = HEAP if setup.device.type == "cpu" else 0
    return [
        Item("activations", layers, f"the largest pass, {rows} rows"),
        Item("logits and sampling", max(0, choosing - layers - gaps), f"{setup.rows} rows, beyond what passes leave"),
        Item("hidden states", states, "kept until the head has read them"),
        Item("allocator", _kept_blocks(setup, layers), "freed blocks that the C library keeps"),
        Item("messages", _messages(setup, rows), "hidden states on their way to the next stage"),
    ]


def _kept_blocks(setup: Setup, layers: int) -> int:
    """On a CPU: as much as a pass; three times more where ranks gather in every layer, as measured."""
    if setup.device.type != "cpu":
        return 0
    return (1 if setup.target.ranks == 1 else GATHERING) * layers + HEAP


def _messages(setup: Setup, rows: int) -> int:
    """On a CPU: what a pipeline's first rank has sent and keeps, the largest of them as bytes and in parts."""
    target = setup.target
    if target.stages == 1 or setup.device.type != "cpu":
        return 0
    kept = KEPT * target.stages * -(-setup.batch // target.stages) * (setup.nodes + 1)
    return (4 * rows + kept) * target.hidden * target.dtype.itemsize


def _pass(shape: ModelShape, setup: Setup, rows: int) -> int:
    parts = 0
    if setup.device.type == "cuda":
        parts = partial_attention_bytes(shape, setup.batch, setup.rows, min(setup.tokens, shape.context))
    return activation_bytes(shape, rows, setup.device) + parts


def _draft_pass(setup: Setup) -> int:
    draft, rows = setup.draft, setup.chunk + 2 * setup.batch
    if draft.model is not None:
        return _pass(draft.model, setup, rows)
    return head_layer_bytes(setup.target, draft.inputs, rows) if draft.layers else 0


def _choices(setup: Setup) -> int:
    """What the verifier allocates beside the target's logits."""
    vocab, dtype = setup.target.vocab, setup.target.dtype
    if not (setup.rejection and setup.sampled):
        return choice_bytes(setup.rows, vocab, dtype, setup.sampled)
    drawn = setup.batch * setup.nodes if setup.draft.kind in ("model", "head", "own") else 0
    return drawing_bytes(setup.batch, setup.rows, drawn, vocab, dtype)


def _draft_choices(setup: Setup) -> int:
    """A drafter's logits of one level: a row per sequence, or as many as its tree has in front."""
    if setup.draft.kind not in ("model", "head"):
        return 0
    rows = setup.batch * max(1, min(setup.draft.breadth, setup.nodes))
    return rows * setup.target.vocab * (setup.target.dtype.itemsize + 12)


def _graphs(setup: Setup) -> list[Item]:
    """On a GPU: what graphs of passes and steps keep, and the sampling parameters of all batch slots."""
    if not setup.captured:
        return []
    models = [setup.target, *([] if setup.draft.model is None else [setup.draft.model])]
    passes = sum(_pass_graphs(shape, setup) for shape in models)
    steps = max(_captured_step(setup, setup.rows + prompts) for prompts in (0, *JOINING_ROWS))
    steps += logits_bytes(setup.target, setup.rows)
    slots = 8 * setup.batch * setup.target.vocab
    return [Item("graphs", passes + steps + slots, "memory that captured passes and steps keep")]


def _captured_step(setup: Setup, rows: int) -> int:
    """The target's layers in a step with this many rows, whose attention is planned for the whole context."""
    target = setup.target
    parts = partial_attention_bytes(target, setup.batch, rows, target.context)
    return activation_bytes(target, rows, setup.device) + parts


def _pass_graphs(shape: ModelShape, setup: Setup) -> int:
    """The largest graph's layers, which smaller ones share, and the logits that each keeps."""
    rows = [n for n in GRAPH_ROWS if n == GRAPH_ROWS[0] or n < 2 * shape.context * setup.batch]
    kept = sum(logits_bytes(shape, min(n, GRAPH_WANTED)) for n in rows)
    return activation_bytes(shape, max(rows), setup.device) + kept


def _loading_head(setup: Setup, fixed: list[Item]) -> int:
    """Beside the target's weights while a head's are packed on a CPU, one by one: one of them is there twice."""
    if setup.device.type != "cpu" or setup.draft.kind != "head":
        return 0
    own = sum(item.bytes for item in fixed if item.name == "draft weights")
    return own + setup.draft.largest_weight * setup.target.dtype.itemsize


def _loading(setup: Setup) -> int:
    """Beside the target's weights when it is read and tested: what is not packed yet (of stock modules all of it, of
    our decoder the output layer), or the largest pass of the test with its small cache."""
    target, device = setup.target, setup.device
    stock = target.backend == "transformers"
    unpacked = target.parameters if stock else target.spoken * target.hidden
    unpacked *= target.dtype.itemsize if device.type == "cpu" else 0
    layers = activation_bytes(target, TRIAL_ROWS, device)
    trial = layers + (TRIAL_ROWS + 200) * kv_bytes(target.layers, target.dtype, device)
    trial += _kept_blocks(setup, layers) if target.ranks > 1 else 0
    return unpacked + trial if stock else max(unpacked, trial)
