"""Before any token is served: does the model, run our way, say what it says by itself, and say it exactly?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from faircopy.errors import UnsupportedModel
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.model.universal import REMEDY, Universal
from faircopy.types import Batch, Draft, Request, Sequence

_PAGE, _PAGES, _VERIFIED = 16, 16, 3
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def self_test(model: Model, exact: bool) -> None:
    """Refuse a model by name rather than serve it wrongly."""
    tokens = [(7 * i * i + 3 * i + 1) % model.vocab for i in range(min(13, model.context - 1))]
    with torch.no_grad():
        together = _verified_in_company(model, tokens, exact)
        if isinstance(model, Universal):
            _compare_with_own_forward(model, tokens, together)
        if exact:
            alone = _one_by_one(model, tokens, exact)
            if not torch.equal(alone, together):
                count = int((alone != together).any(-1).sum())
                raise UnsupportedModel(
                    "model",
                    model.name,
                    f"{count} of {len(alone)} verified rows differ in bits from the same rows decoded alone",
                    "pass exact=False to serve it without the promise",
                )


def _compare_with_own_forward(model: Universal, tokens: list[int], together: Tensor) -> None:
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


def _verified_in_company(model: Model, tokens: list[int], exact: bool) -> Tensor:
    """The last rows, fed in two chunks beside others, over rejected garbage, then verified as a draft."""
    with _scratch(model, exact) as (runner, start):
        split = len(tokens) - _VERIFIED
        seq, other, third = start(tokens[:split]), start(tokens[3:7]), start(tokens[1:2])
        runner.forward(Batch([seq, other], [split // 2, 4], [0, 2]), Draft.chains([[], tokens[:2]]))
        batch = Batch([third, seq], [1, split], [1, _VERIFIED])
        runner.forward(batch, Draft.chains([tokens[:1], [1, 2, 3]]))  # advances over the tokens only
        seq.tokens.append(tokens[split])
        result = runner.forward(Batch([seq], [split + 1], [2]), Draft.chains([tokens[split + 1 :]]))
        return result.logits


def _one_by_one(model: Model, tokens: list[int], exact: bool) -> Tensor:
    with _scratch(model, exact) as (runner, start):
        seq, rows = start(tokens[: -_VERIFIED + 1]), []
        rows.append(runner.forward(Batch([seq], [len(seq.tokens)], [0]), Draft.empty(1)).logits[-1])
        for token in tokens[-_VERIFIED + 1 :]:
            seq.tokens.append(token)
            rows.append(runner.forward(Batch([seq], [len(seq.tokens)], [0]), Draft.empty(1)).logits[-1])
        return torch.stack(rows)


@contextmanager
def _scratch(model: Model, exact: bool) -> Iterator[tuple[Runner, _Start]]:
    tables = BlockTables(PagePool(_PAGES), _PAGE, reuse=False)
    yield Runner(model, PagedLayout(tables, model.layers, model.dtype, model.device, exact)), _Start(tables)


class _Start:
    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def __call__(self, tokens: list[int]) -> Sequence:
        seq = Sequence(0, Request(tuple(tokens)), list(tokens))
        self._tables.open(seq)
        self._tables.reserve(seq, len(tokens) + 2 * _VERIFIED)
        return seq
