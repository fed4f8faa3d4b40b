"""Products that several ranks share: the same bits on 1, 2, 4 and 8 of them, whatever the rows beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from faircopy.kernels import linear
from faircopy.kernels.groups import add_tree, shared_groups
from faircopy.kernels.linear import RowParallel, column_product
from faircopy.kernels.ranks import OneRank

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
