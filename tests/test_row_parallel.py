"""Products that several ranks share: the same bits on 1, 2, 4 and 8 of them, whatever the rows beside."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from faircopy.kernels import linear
from faircopy.kernels.groups import add_tree, shared_groups
from faircopy.kernels.linear import RowParallel, column_product
from faircopy.kernels.ranks import OneRank
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model import loader
from faircopy.types import Batch, Draft, Request, Sequence
from tests.helpers import CPU
from tests.zoo import BASE, make_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Share:
    """One of several ranks whose partial sums a test gathers by itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError("a test gathers by itself")


def rows_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """What `size` ranks compute together."""
    inputs, weights = x.chunk(size, 1), weight.chunk(size, 1)
    shares = [RowParallel(w, bias, True, Share(rank, size)) for rank, w in enumerate(weights)]
    return add_tree(torch.stack([share.partial(part) for share, part in zip(shares, inputs, strict=True)])).to(x.dtype)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_parallel_sums_have_the_same_bits_on_any_number_of_ranks(
    dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(linear, "fits", lambda weight: False)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((11, 512), (48, 512), (48,)))
    for b in (bias, None):
        one = RowParallel(weight, b, True, OneRank())
        whole = one(x)
        torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, b), atol=0.5, rtol=0.02)
        for size in (2, 4, 8):
            assert torch.equal(rows_parallel(x, weight, b, size), whole), size
        assert all(torch.equal(one(x[m : m + 1]), whole[m : m + 1]) for m in range(11)), "a row alone differs"


def test_the_tree_is_that_of_the_full_weight() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 1024), torch.randn(8, 1024)
    assert shared_groups(8, 1024, "cpu") == 8
    sums = [column_product(w)(part) for w, part in zip(weight.chunk(8, 1), x.chunk(8, 1), strict=True)]
    assert torch.equal(RowParallel(weight, None, True, OneRank())(x), add_tree(torch.stack(sums)))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_output_does_not_depend_on_the_outputs_beside(
    dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(linear, "fits", lambda weight: False)
    torch.manual_seed(2)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((9, 192), (96, 192), (96,)))
    whole = column_product(weight, bias)(x)
    for size in (2, 3, 6):
        parts = zip(weight.chunk(size), bias.chunk(size), strict=True)
        assert torch.equal(torch.cat([column_product(*part)(x) for part in parts], 1), whole), size


class Turns:
    """Ranks that are threads of a test. One runs at a time, since Triton's interpreter knows no threads, until it gives
    its numbers and waits for those of the others."""

    def __init__(self, rank: int, size: int, given: dict[int, Tensor], turn: threading.Lock, all_here: Any) -> None:
        self.rank, self.size, self._given, self._turn, self._all_here = rank, size, given, turn, all_here

    def gather(self, x: Tensor) -> Tensor:
        self._given[self.rank] = x
        self._meet()
        found = torch.stack([self._given[rank] for rank in range(self.size)])
        self._meet()
        return found

    def _meet(self) -> None:
        self._turn.release()
        self._all_here.wait(60)
        self._turn.acquire()


def fused_logits(folder: str, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of three prompts and a pass of one row each, by the GPU's decoder in Triton's interpreter."""
    from faircopy.kernels.gpu.suite import TWINS
    from faircopy.model.fused import Fused, fused_weights

    monkeypatch.setattr(loader, "_fused_decoder", lambda source, device: Fused(fused_weights(source)))
    model = loader.load_model(folder, torch.float32, CPU, True, ranks=ranks)
    assert isinstance(model, Fused)
    found = []
    for rows, context in ((3, 9), (1, 20)):
        tables = BlockTables(PagePool(16), 32, reuse=False)
        layout = PagedLayout(tables, model.layers, model.dtype, CPU, suite=TWINS)
        seqs = [Sequence(n, Request((1,)), [(7 * i + n) % 200 for i in range(context)]) for n in range(rows)]
        for seq in seqs:
            tables.open(seq)
            tables.reserve(seq, context)
        with torch.no_grad():
            packed = layout.pack(Batch(seqs, [context] * rows, [0] * rows), Draft.empty(rows))
            found.append(model.forward(packed, layout))
    return torch.cat(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_fused_decoder_has_the_same_bits_on_two_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    sizes = {"vocab_size": 200, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    more = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {"tie_word_embeddings": True}
    torch.manual_seed(0)
    folder = str(tmp_path)
    AutoModelForCausalLM.from_config(make_config(kind, more, {**BASE, **sizes})).save_pretrained(folder)
    whole = fused_logits(folder, None, monkeypatch)
    assert torch.equal(fused_logits(folder, OneRank(), monkeypatch), whole)
    given, found = dict[int, Tensor](), dict[int, Tensor]()
    turn, all_here = threading.Lock(), threading.Barrier(2)

    def run(rank: int) -> None:
        with turn:
            found[rank] = fused_logits(folder, Turns(rank, 2, given, turn, all_here), monkeypatch)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert torch.equal(found[0], whole) and torch.equal(found[1], whole)
