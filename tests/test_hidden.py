"""Hidden states for drafters: the same rows from either backend, in any company, for fed tokens and nodes alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import FINAL, Model
from faircopy.model.runner import Result, Runner
from faircopy.types import Batch, Draft, Request, Sequence
from tests.helpers import CPU, load
from tests.zoo import build

WANTS = (0, 1, 2, FINAL)


def pass_over(model: Model, texts: list[list[int]], draft: Draft) -> Result:
    tables = BlockTables(PagePool(16), 32, reuse=False)
    runner = Runner(model, PagedLayout(tables, model.layers, model.dtype, CPU), WANTS)
    seqs = [Sequence(0, Request(tuple(text)), list(text)) for text in texts]
    for seq in seqs:
        tables.open(seq)
        tables.reserve(seq, len(seq.tokens) + 8)
    return runner.forward(Batch(seqs, [len(seq.tokens) for seq in seqs], [8] * len(seqs)), draft)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "decoder"), ("llama", "transformers"), ("gpt_neox", "transformers"), ("qwen3", "decoder")],
)
def test_states_are_those_of_the_stock_model(checkpoint: Callable[..., str], name: str, backend: str) -> None:
    model, stock = load(checkpoint(name), backend=backend), build(name)
    text, tail = [3, 1, 4, 1, 5], [9, 2, 6]
    result = pass_over(model, [[7, 7], text], Draft.chains([[], tail]))
    whole = stock(torch.tensor([text + tail]), output_hidden_states=True)
    for layer in (0, 1):
        torch.testing.assert_close(result.states[layer][2:], whole.hidden_states[layer][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.states[FINAL][2:], whole.hidden_states[-1][0], rtol=1e-4, atol=1e-5)
    assert result.states[2].shape == (10, 64)
    weights = model.token_weights()
    logits = result.states[FINAL] @ weights.rows.T
    torch.testing.assert_close(logits[-4:], result.of(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(weights.embedding[text], result.states[0][2:7])


def test_nobody_asks_and_nothing_is_kept(checkpoint: Callable[..., str]) -> None:
    model = load(checkpoint("llama"))
    tables = BlockTables(PagePool(1), 32)
    runner, seq = Runner(model, PagedLayout(tables, model.layers, model.dtype, CPU)), Sequence(0, Request((1,)), [1])
    tables.open(seq)
    tables.reserve(seq, 1)
    assert runner.forward(Batch([seq], [1], [0]), Draft.empty(1)).states == {}


def test_a_nodes_state_does_not_depend_on_its_siblings(checkpoint: Callable[..., str]) -> None:
    model = load(checkpoint("llama"))
    tree = pass_over(model, [[3, 1, 4]], Draft([[5, 6, 7]], [[-1, -1, 1]])).states
    chain = pass_over(model, [[3, 1, 4]], Draft.chains([[6, 7]])).states
    for layer in WANTS:
        assert torch.equal(tree[layer][[0, 1, 2, 4, 5]], chain[layer])
