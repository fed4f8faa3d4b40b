"""Tests that every model passes before it serves: its logits are the stock model's, and a row's bits are its own.

Three checks:
1. The packed pass agrees with the stock model's own full forward (transformers backend only).
2. Tokens verified as a draft, in chunks and beside others, have the bits of tokens decoded one by one.
3. A row alone has the bits of the same row in passes of up to 700 rows, for texts that end on both sides of page, key
   block and window borders: logits and last hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from faircopy.errors import UnsupportedModel
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import FINAL, Model
from faircopy.model.bits import same_bits
from faircopy.model.divergence import RowRecording, first_layer, first_operation
from faircopy.model.runner import Result, Runner
from faircopy.model.transformers_backend import REMEDY, TransformersModel
from faircopy.types import Batch, Draft, Request, Sequence

ROWS = (2, 5, 16, 33, 160, 320, 700)  # rows of the passes that a row is compared in
ALWAYS = 33  # passes of up to this many rows are run however long they take
CPU_LIMIT_S = 2.0  # on a CPU no larger pass is begun after this; a GPU runs all of them, and compiles its kernels
WITHOUT = "pass exact=False to serve it without the promise"

_PAGE, _PAGES, _VERIFIED = 32, 16, 3
_BORDERS = (_PAGE, 128)  # tokens: a page, a block of keys
_WIDEST = 1024  # windows up to this size are tested on both sides
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def self_test(model: Model, exact: bool) -> list[int]:
    """Refuse a model by name rather than serve it wrongly; returns the row counts that were compared."""
    tokens = _text(min(13, model.context - 1), model.vocab)
    with torch.no_grad():
        together = _verified_in_company(model, tokens, exact)
        if isinstance(model, TransformersModel):
            _compare_with_own_forward(model, tokens, together)
        if not exact:
            return []
        _compare_with_one_by_one(model, tokens, together)
        return check_rows(model)


def check_rows(model: Model) -> list[int]:
    """Compare rows alone with the same rows in passes of all sizes, smallest first, while time allows."""
    trial, begin, checked = RowTrial(model, max(ROWS)), time.perf_counter(), []
    for count in ROWS:
        late = model.device.type == "cpu" and time.perf_counter() - begin > CPU_LIMIT_S
        if count > ALWAYS and late:
            break
        difference = trial.difference(count)
        if difference is not None:
            raise UnsupportedModel("model", model.name, difference, WITHOUT)
        checked.append(count)
    return checked


Takes = dict[Sequence, int]  # how many of its last rows each text gives to a pass


@dataclass(slots=True)
class _Reference:
    """A text's last hidden states [L, hidden], the pass that made all but the last, and the last row's logits alone."""

    states: Tensor
    takes: Takes
    logits: Tensor


class RowTrial:
    """Texts of one model whose last rows are computed again and again, in passes of different sizes."""

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        texts = [_text(n, model.vocab, n) for n in text_lengths(model, most)]
        tables = BlockTables(PagePool(sum(-(-len(text) // _PAGE) for text in texts)), _PAGE, reuse=False)
        self._layout = PagedLayout(tables, model.layers, model.dtype, model.device, True)
        self._seqs = [_open(tables, text, len(text)) for text in texts]
        self._references: dict[Sequence, _Reference] = {}
        self.compared = 0  # hidden states compared so far

    @torch.no_grad()
    def difference(self, count: int) -> str | None:
        """What differs between rows alone and in one pass of `count` rows; None: no bit."""
        takes = self._takes(count)
        soon = takes if self._model.device.type == "cpu" else self._seqs  # a CPU may stop early
        self._read([seq for seq in soon if seq not in self._references])
        result = self._run(takes)
        for i, (seq, taken) in enumerate(takes.items()):
            known, begin = self._references[seq], _row(takes, seq, 0)
            states, last = self._last(result)[begin : begin + taken], len(seq.tokens) - 1
            self.compared += taken
            if not same_bits(result.logits[i], known.logits) or not same_bits(states[-1], known.states[-1]):
                return self._located(seq, last, {seq: 1}, takes)
            for back in range(taken, 1, -1) if not same_bits(states, known.states[-taken:]) else ():
                if not same_bits(states[-back], known.states[-back]):
                    return self._located(seq, last + 1 - back, known.takes, takes)
        return None

    def _takes(self, count: int) -> Takes:
        """Rows from the shortest texts that suffice, one of each at least."""
        chosen: list[Sequence] = []
        for seq in self._seqs:
            if len(chosen) == count or (len(chosen) > 4 and sum(len(s.tokens) for s in chosen) >= count):
                break
            chosen.append(seq)
        takes = dict.fromkeys(chosen, 1)
        spare = count - len(chosen)
        for seq in reversed(chosen):
            more = min(spare, len(seq.tokens) - 1)
            takes[seq] += more
            spare -= more
        return takes

    def _read(self, seqs: list[Sequence]) -> None:
        """Cache new texts in one pass, then compute the last row of each alone."""
        if not seqs:
            return
        takes = {seq: len(seq.tokens) for seq in seqs}
        states = self._last(self._run(takes))
        for seq in seqs:
            begin = _row(takes, seq, 0)
            alone = self._run({seq: 1})
            known = torch.cat([states[begin : begin + len(seq.tokens) - 1], self._last(alone)])
            self._references[seq] = _Reference(known, takes, alone.logits[0])

    def _last(self, result: Result) -> Tensor:
        """The last hidden states; some stock models show what leaves the last layer only."""
        return result.states[FINAL if FINAL in result.states else len(self._model.layers)]

    def _run(self, takes: Takes, wants: tuple[int, ...] = ()) -> Result:
        """One pass over the last rows of each text."""
        for seq, taken in takes.items():
            self._layout.set_cached(seq, len(seq.tokens) - taken)
        batch = Batch([*takes], [len(seq.tokens) for seq in takes], [0] * len(takes))
        wants = wants or (FINAL, len(self._model.layers))
        return Runner(self._model, self._layout, wants).forward(batch, Draft.empty(len(takes)))

    def _located(self, seq: Sequence, position: int, one: Takes, other: Takes) -> str:
        """Which row differs, and the layer and the operation that differ first, as far as they can be found."""
        counts = sum(one.values()), sum(other.values())
        layer, operation = self._first(seq, position, one, other)
        found = f"row {position} of a text differs in bits between passes of {counts[0]} and {counts[1]} rows"
        found += "" if layer is None else f", first in layer {layer}"
        return found if operation is None else f"{found}, at {operation}"

    def _first(self, seq: Sequence, position: int, *passes: Takes) -> tuple[int | None, str | None]:
        wants = tuple(range(1, len(self._model.layers) + 1))
        states, records = [], []
        for takes in passes:
            row = _row(takes, seq, position - (len(seq.tokens) - takes[seq]))
            with ExitStack() as stack:
                if isinstance(self._model, TransformersModel):
                    path = stack.enter_context(self._model.module_path)
                    records.append(stack.enter_context(RowRecording(path, sum(takes.values()), row)))
                result = self._run(takes, wants)
            states.append({layer: rows[row] for layer, rows in result.states.items()})
        return first_layer(*states), first_operation(*records) if records else None


def _row(takes: Takes, seq: Sequence, row: int) -> int:
    """Where a text's row is among all rows of a pass."""
    before = [*takes][: [*takes].index(seq)]
    return sum(takes[other] for other in before) + row


def text_lengths(model: Model, most: int) -> list[int]:
    """Lengths of texts, ascending, that end on both sides of borders and have `most` rows together."""
    borders = {*_BORDERS, *(layer.window for layer in model.layers if 0 < layer.window <= _WIDEST)}
    lengths = [5, 20, *(border + side for border in borders for side in (0, 1))]
    lengths = sorted({min(length, model.context - 1) for length in lengths})
    while sum(lengths) < most:
        lengths.append(min(max(most - sum(lengths), 200 + len(lengths)), model.context - 1))
    return sorted(lengths)


def _text(length: int, vocab: int, start: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + 1 + start) % vocab for i in range(length)]


def _compare_with_own_forward(model: TransformersModel, tokens: list[int], together: Tensor) -> None:
    own = model.reference(torch.tensor(tokens, device=model.device))[-together.shape[0] :].float()
    errors = (own - together.float()).norm(dim=-1) / own.norm(dim=-1)
    # in 16 bits one rounding may send a token to another expert: then a row is far off for no fault of ours
    error = float(errors.max() if model.dtype == torch.float32 else errors.min())
    if not error <= _TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            "model",
            model.name,
            f"packed logits are off its own by {error:.1e}: its attention does more than it says",
            REMEDY,
        )


def _compare_with_one_by_one(model: Model, tokens: list[int], together: Tensor) -> None:
    alone = _one_by_one(model, tokens)
    if not torch.equal(alone, together):
        count = int((alone != together).any(-1).sum())
        problem = f"{count} of {len(alone)} verified rows differ in bits from the same rows decoded alone"
        raise UnsupportedModel("model", model.name, problem, WITHOUT)


def _verified_in_company(model: Model, tokens: list[int], exact: bool) -> Tensor:
    """The last rows, fed in two chunks beside others, over rejected draft tokens, then verified as a draft."""
    with _scratch(model, exact) as (runner, tables):
        split = len(tokens) - _VERIFIED
        texts = (tokens[:split], tokens[3:7], tokens[1:2])
        seq, other, third = (_open(tables, text, len(text) + 2 * _VERIFIED) for text in texts)
        runner.forward(Batch([seq, other], [split // 2, 4], [0, 2]), Draft.chains([[], tokens[:2]]))
        batch = Batch([third, seq], [1, split], [1, _VERIFIED])
        runner.forward(batch, Draft.chains([tokens[:1], [1, 2, 3]]))  # advances over the tokens only
        seq.tokens.append(tokens[split])
        result = runner.forward(Batch([seq], [split + 1], [2]), Draft.chains([tokens[split + 1 :]]))
        return result.logits


def _one_by_one(model: Model, tokens: list[int]) -> Tensor:
    with _scratch(model, True) as (runner, tables):
        seq, rows = _open(tables, tokens[: -_VERIFIED + 1], len(tokens) + _VERIFIED), []
        rows.append(runner.forward(Batch([seq], [len(seq.tokens)], [0]), Draft.empty(1)).logits[-1])
        for token in tokens[-_VERIFIED + 1 :]:
            seq.tokens.append(token)
            rows.append(runner.forward(Batch([seq], [len(seq.tokens)], [0]), Draft.empty(1)).logits[-1])
        return torch.stack(rows)


@contextmanager
def _scratch(model: Model, exact: bool) -> Iterator[tuple[Runner, BlockTables]]:
    tables = BlockTables(PagePool(_PAGES), _PAGE, reuse=False)
    yield Runner(model, PagedLayout(tables, model.layers, model.dtype, model.device, exact)), tables


def _open(tables: BlockTables, tokens: list[int], most: int) -> Sequence:
    """A sequence with these tokens, and pages for this many."""
    seq = Sequence(0, Request(tuple(tokens)), list(tokens))
    tables.open(seq)
    tables.reserve(seq, most)
    return seq
