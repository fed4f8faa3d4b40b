"""Fixed-order reductions and products: right, and the same for a row whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from faircopy.kernels import product, reduce
from faircopy.model.bits import same_bits
from faircopy.model.fixed_order import PRODUCTS, REDUCTIONS, WIDE_SUMS
from faircopy.model.invariant import RowInvariant

ROWS = (1, 2, 7, 33, 160)
WEIGHT = torch.linspace(0.5, 1.5, 300)

# torch function on x [R, 300] -> the replacement's arguments are torch's own
CALLS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sum": (torch.sum, lambda f, x: f(x, -1)),
    "Tensor.sum, keepdim": (Tensor.sum, lambda f, x: f(x, dim=-1, keepdim=True)),
    "mean": (torch.mean, lambda f, x: f(x, -1)),
    "Tensor.mean of two dims": (Tensor.mean, lambda f, x: f(x.view(len(x), 3, 100), (1, 2))),
    "var": (torch.var, lambda f, x: f(x, -1)),
    "std, biased": (torch.std, lambda f, x: f(x, dim=-1, keepdim=True, unbiased=False)),
    "norm": (Tensor.norm, lambda f, x: f(x, dim=-1)),
    "norm of order 1": (torch.norm, lambda f, x: f(x, 1, -1)),
    "norm of order infinity": (torch.norm, lambda f, x: f(x, float("inf"), -1)),
    "vector_norm": (torch.linalg.vector_norm, lambda f, x: f(x, dim=-1)),
    "softmax": (F.softmax, lambda f, x: f(x, dim=-1)),
    "softmax in another type": (F.softmax, lambda f, x: f(x.bfloat16(), dim=-1, dtype=torch.float32)),
    "torch.softmax": (torch.softmax, lambda f, x: f(x, -1)),
    "log_softmax": (F.log_softmax, lambda f, x: f(x, dim=-1)),
    "logsumexp": (torch.logsumexp, lambda f, x: f(x, -1)),
    "cumsum": (Tensor.cumsum, lambda f, x: f(x, -1)),
    "layer_norm": (F.layer_norm, lambda f, x: f(x, (300,), WEIGHT, WEIGHT, 1e-5)),
    "layer_norm without weights": (F.layer_norm, lambda f, x: f(x, (300,))),
    "rms_norm": (F.rms_norm, lambda f, x: f(x, (300,), WEIGHT, 1e-6)),
    "rms_norm, default eps": (F.rms_norm, lambda f, x: f(x, (300,))),
    "sort": (torch.sort, lambda f, x: f(x, -1, descending=True)[0]),
    "argsort": (torch.argsort, lambda f, x: f(x, -1).float()),
    "topk": (torch.topk, lambda f, x: f(x, 7, -1).values),
    "topk, smallest": (Tensor.topk, lambda f, x: f(x, 7, dim=-1, largest=False)[1].float()),
    "bmm": (torch.bmm, lambda f, x: f(x.view(-1, 3, 100), x.view(-1, 100, 3))),
    "mm": (torch.mm, lambda f, x: f(x, WEIGHT.expand(5, -1).T)),
    "matmul": (torch.matmul, lambda f, x: f(x.view(-1, 75, 4), WEIGHT[:16].view(4, 4))),
    "addmm": (torch.addmm, lambda f, x: f(WEIGHT[:5], x, WEIGHT.expand(5, -1).T, beta=0.5, alpha=2.0)),
    "baddbmm": (torch.baddbmm, lambda f, x: f(x[:, :9].view(-1, 3, 3), x.view(-1, 3, 100), x.view(-1, 100, 3))),
    "einsum": (torch.einsum, lambda f, x: f("rij,jk->rik", x.view(-1, 75, 4), WEIGHT[:12].view(4, 3))),
}


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 300, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("name", CALLS)
def test_a_replacement_computes_what_torch_computes(name: str) -> None:
    stock, call = CALLS[name]
    fixed = (PRODUCTS | REDUCTIONS)[stock]
    torch.testing.assert_close(call(fixed, rows(9)), call(stock, rows(9)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    stock, call = CALLS[name]
    fixed, x = (PRODUCTS | REDUCTIONS)[stock], rows(max(ROWS))
    whole = call(fixed, x)
    for count in ROWS:
        assert same_bits(call(fixed, x[:count])[0], whole[0]), count


X, Z = torch.randn(3, 4, 5), torch.zeros(0, 4)
WHOLE, C = torch.arange(12).view(3, 4), torch.randn(2, 3, 3, dtype=torch.complex64)
# Forms that the replacements must compute as torch does, or leave to torch.
FORMS: dict[str, Callable[[], Any]] = {
    "integers": lambda: torch.sum(WHOLE, 1),
    "running sums of integers": lambda: WHOLE.cumsum(1),
    "products of integers": lambda: WHOLE @ (WHOLE.T * (1 << 40)),
    "complex products": lambda: torch.bmm(C, C),
    "complex times complex": lambda: C * C.flip(0),
    "complex times real": lambda: C * 0.5,
    "real times complex": lambda: X[:2, :3, :3] * C,
    "float64": lambda: X.double().sum(-1),
    "float64 asked for": lambda: X.sum(-1, dtype=torch.float64),
    "axis": lambda: torch.sum(X, axis=1),
    "input": lambda: torch.mean(input=X, dim=-1),
    "no dim, keepdim": lambda: X.sum(None, True),
    "all of them": lambda: X.mean(),
    "scalars": lambda: torch.tensor(3.0).sum(),
    "nothing": lambda: Z.sum(0),
    "an empty product": lambda: Z.T @ Z,
    "out": lambda: torch.sum(X, -1, out=torch.empty(3, 4)),
    "norm with out": lambda: torch.norm(X, p=2, dim=-1),
    "matrix norm": lambda: torch.linalg.norm(X[0], 2),
    "matrix norm over dims": lambda: torch.linalg.norm(X, 2, dim=(1, 2)),
    "logsumexp by name": lambda: torch.logsumexp(X, dim=-1, keepdim=True),
    "logsumexp of nothing": lambda: torch.logsumexp(torch.full((2, 3), -torch.inf), -1),
    "logsumexp of everything": lambda: torch.logsumexp(torch.tensor([[1.0, torch.inf]]), -1),
    "softmax without dim": lambda: F.softmax(X),
    "addmm, beta 0": lambda: torch.addmm(torch.full((4,), torch.nan), X[0].T, X[0, :, :4], beta=0),
    "linear by name": lambda: F.linear(input=X, weight=X[0]),
    "linear with a vector": lambda: F.linear(X, X[0, 0]),
    "vector times matrix": lambda: X[0, 0] @ X[0].T,
    "silu in place": lambda: F.silu(X.clone(), inplace=True),
    "softplus with beta": lambda: F.softplus(X, beta=2.0),
    "gelu by name": lambda: F.gelu(input=X, approximate="tanh"),
}


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_every_form_of_a_call_means_what_torch_means(name: str, rules: str) -> None:
    wanted = FORMS[name]()
    with RowInvariant(torch.device(rules)):
        got = FORMS[name]()
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dims", [5, (1, 1), (0, -3)])
def test_wrong_dimensions_are_torchs_error(dims: Any) -> None:
    with RowInvariant(torch.device("cuda")), pytest.raises((IndexError, RuntimeError)):
        X.sum(dims)


def test_ties_go_to_the_lowest_index() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert REDUCTIONS[torch.topk](x, 2, -1).indices.tolist() == [[1, 2]]
    assert REDUCTIONS[torch.sort](x, -1, True).indices.tolist() == [[1, 2, 4, 3, 0]]


def test_a_wide_row_on_the_cpu_is_added_in_a_fixed_order() -> None:
    x = torch.randn(3, 60000, generator=torch.Generator().manual_seed(1))
    together = WIDE_SUMS[torch.sum](x, -1)
    assert same_bits(WIDE_SUMS[torch.sum](x[:1], -1)[0], together[0])
    torch.testing.assert_close(together, x.sum(-1), rtol=1e-3, atol=1e-2)
    assert WIDE_SUMS[Tensor.mean](x[:, :90], -1) is NotImplemented, "narrow rows are torch's"


@given(st.integers(1, 9000), st.integers(0, 99))
@settings(max_examples=40)
def test_the_tree_adds_every_number_once(width: int, seed: int) -> None:
    x = torch.randint(-99, 99, (2, width), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(reduce.tree_sum(x), x.sum(-1))


@pytest.mark.parametrize(
    ("left", "right"), [((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 1, 3, 4), (5, 4, 6)), ((4,), (2, 4, 3))]
)
def test_matmul_has_torchs_shapes(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left), torch.randn(right)
    torch.testing.assert_close(product.matmul(a, b), a @ b)


class TestKernels:
    """The Triton kernels, in the interpreter or on a GPU, against the same definitions made of torch operations."""

    @pytest.fixture(scope="class")
    def device(self) -> torch.device:
        pytest.importorskip("triton")
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @pytest.mark.parametrize("width", [1, 7, 256, 640, 9000])
    def test_row_sums(self, device: torch.device, width: int) -> None:
        from faircopy.kernels.gpu import reduce as kernels

        x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(device)
        torch.testing.assert_close(kernels.row_sum(x), reduce.tree_sum(x), rtol=1e-5, atol=1e-3)
        assert same_bits(kernels.row_sum(x[2:3]), kernels.row_sum(x)[2:3])

    @pytest.mark.parametrize("centred", [True, False])
    @pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
    def test_norms(self, device: torch.device, centred: bool, kind: torch.dtype) -> None:
        from faircopy.kernels.gpu import reduce as kernels

        x, weight = rows(5).to(device, kind), WEIGHT.to(device)
        ours = kernels.norm(x, 300, weight, weight if centred else None, 1e-5, centred)
        wide = x.double().cpu()
        theirs = (
            F.layer_norm(wide, (300,), WEIGHT.double(), WEIGHT.double(), 1e-5)
            if centred
            else F.rms_norm(wide, (300,), WEIGHT.double(), 1e-5)
        )
        torch.testing.assert_close(
            ours.cpu().double(), theirs, rtol=1e-2, atol=2e-2 if kind == torch.bfloat16 else 1e-5
        )
        shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(5, 300)  # at an address that is not aligned
        assert same_bits(kernels.norm(shifted[1:2], 300, weight, None, 1e-5, centred)[0],
                         kernels.norm(x, 300, weight, None, 1e-5, centred)[1])  # fmt: skip

    @pytest.mark.parametrize("shape", [(3, 40, 70, 5), (2, 1, 4, 4), (1, 65, 128, 33)])
    def test_batched_products(self, device: torch.device, shape: tuple[int, ...]) -> None:
        from faircopy.kernels.gpu import product as kernels

        batch, m, k, n = shape
        a, b = torch.randn(batch, m, k).to(device), torch.randn(batch, k, n).to(device)
        out = kernels.batched_product(a, b)
        torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
        assert same_bits(kernels.batched_product(a[:1, :1], b[:1])[0, 0], out[0, 0])

    def test_a_product_reads_rows_that_do_not_follow_each_other(self, device: torch.device) -> None:
        from faircopy.kernels.gpu.linear import Linear

        layer, x = Linear(torch.randn(64, 128).to(device)), torch.randn(5, 256).to(device)
        torch.testing.assert_close(layer(x[:, :128]), x[:, :128] @ layer.weight.T, rtol=1e-3, atol=1e-3)
        assert layer(x[:0, :128]).shape == (0, 64)


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_complex_products_of_a_row_do_not_depend_on_threads_and_rows(threads: int) -> None:
    """torch's own take another path where threads divide the work."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.complex(*torch.randn(2, 700, 16, 32, generator=generator)) for _ in range(2))
    with RowInvariant(torch.device("cpu")):
        whole = x * y
        assert all(torch.equal(x[n : n + 1] * y[n : n + 1], whole[n : n + 1]) for n in range(0, 700, 7))
