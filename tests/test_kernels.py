"""Kernels against simple twins, and each row's bits against the same row in other company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from faircopy.kernels import activation, linear
from faircopy.kernels.attention import Lane, attend_tiles, plan_attention
from faircopy.kernels.gumbel import gumbel, gumbel_argmax, gumbel_argmax_dense
from faircopy.kernels.norm import rms_norm
from faircopy.kernels.rope import rope_table, rotate

CPU = torch.device("cpu")
COMPANIES = (1, 2, 3, 5, 8, 13, 21, 32)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "onednn"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(48, 80), (33, 17), (1536, 64), (2048, 256), (64, 1000)])
def test_a_products_rows_do_not_know_their_number(
    shape: tuple[int, int], dtype: torch.dtype, threads: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    if not ours:
        monkeypatch.setattr(linear, "fits", lambda weight: False)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape[1], shape[0], generator=generator).to(dtype)
    bias = torch.randn(shape[1], generator=generator).to(dtype)
    x = torch.randn(40, shape[0], generator=generator).to(dtype)
    run = linear.product(weight, bias)
    whole = run(x)
    for m in COMPANIES:
        assert torch.equal(run(x[3 : 3 + m].contiguous()), whole[3 : 3 + m])
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (whole.double() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_the_way_that_cannot_fail_is_a_product_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fits", lambda weight: False)
    monkeypatch.setattr(linear, "_packed", lambda weight, bias: None)
    weight, x = torch.randn(30, 20), torch.randn(19, 20)
    run = linear.product(weight)
    assert torch.allclose(run(x), x @ weight.t(), atol=1e-5)
    for m in (0, 1, 7, 8, 9):
        assert torch.equal(run(x[:m]), run(x)[:m])


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "onednn"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [1024, 1100, 1536, 4096])
def test_a_wide_products_row_alone_has_the_bits_it_has_in_company(
    inner: int, dtype: torch.dtype, threads: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of rows one by one: in 16 bits a change of order shows in few of them."""
    torch.set_num_threads(threads)
    if not ours:
        monkeypatch.setattr(linear, "fits", lambda weight: False)
    generator = torch.Generator().manual_seed(2)
    weight, x = (
        torch.randn(192, inner, generator=generator).to(dtype),
        torch.randn(300, inner, generator=generator).to(dtype),
    )
    run = linear.product(weight)
    whole = run(x)
    assert all(torch.equal(run(x[n : n + 1]), whole[n : n + 1]) for n in range(300))
    assert all(torch.equal(run(x[n : n + 3]), whole[n : n + 3]) for n in range(0, 297, 5))


def test_a_product_that_varies_with_its_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe sees a product whose order of summation changes with the number of rows."""
    weight = torch.randn(31, 1024)

    def fickle(least: int) -> linear.Product:
        halves = weight.t()[:512], weight.t()[512:]

        def run(x: torch.Tensor) -> torch.Tensor:
            x = x.double()
            if len(x) < least:  # another order, rounded in between
                parts = [(x[:, :512] @ halves[0].double()).float(), (x[:, 512:] @ halves[1].double()).float()]
                return parts[0] + parts[1]
            return (x @ weight.t().double()).float()

        return run

    x = torch.randn(301, 1024)
    assert linear._least_rows(fickle(0), x) == 1
    assert linear._least_rows(fickle(2), x) == 2
    assert linear._least_rows(fickle(4), x) == 4
    assert linear._least_rows(fickle(30), x) is None


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (activation.silu, F.silu),
        (activation.sigmoid, torch.sigmoid),
        (activation.gelu, F.gelu),
        (activation.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        (activation.softplus, F.softplus),
    ],
    ids=["silu", "sigmoid", "gelu", "gelu_tanh", "softplus"],
)
def test_an_activations_rows_do_not_know_where_they_lie(ours, theirs, dtype: torch.dtype, threads: int) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(threads)
    for width in (48, 100, 4864, 11008):
        x = (torch.randn(33, width) * 4).to(dtype)
        whole = ours(x)
        assert torch.allclose(
            whole.float(), theirs(x.float()), atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=1e-2
        )
        wide = torch.cat([x, x], -1)[:, :width]  # the same numbers, strided as the half of a fused product
        for m in COMPANIES:
            assert torch.equal(ours(x[1 : m + 1].clone()), whole[1 : m + 1])
            assert torch.equal(ours(wide[1 : m + 1]), whole[1 : m + 1])


def test_norm_and_rope() -> None:
    x, weight = torch.randn(9, 4, 16), torch.randn(16)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    assert torch.allclose(rms_norm(x, weight, 1e-6), expected, atol=1e-6)
    table = rope_table(torch.tensor([1.0, 0.1, 0.01]), 9, 1.0, torch.float32)
    for interleaved in (False, True):
        turned = rotate(x, table, interleaved)
        assert torch.equal(turned[..., 6:], x[..., 6:]), "dimensions beyond the rotary ones stay"
        assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5), "a rotation keeps lengths"
        assert torch.equal(turned[0], x[0]), "position 0 does not turn"


def naive_attention(q, k, v, positions, scale, window=0, softcap=0.0, sinks=None):  # type: ignore[no-untyped-def]
    """One query at a time, float64, no tricks."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row, position in enumerate(positions):
        low = max(0, position - window + 1) if window else 0
        for head in range(q.shape[1]):
            keys, values = k[low : position + 1, head // group].double(), v[low : position + 1, head // group].double()
            scores = keys @ q[row, head].double() * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            out[row, head] = torch.softmax(scores, 0)[: len(values)] @ values
    return out


@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"softcap": 5.0}, {"sinks": True}, {"window": 7, "sinks": True}]
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_is_right_and_alone_the_same(
    heads: tuple[int, int], options: dict[str, object], threads: int
) -> None:
    torch.set_num_threads(threads)
    q_heads, kv_heads = heads
    generator, dim = torch.Generator().manual_seed(0), 16
    spans = [(0, 1), (0, 70), (33, 5), (600, 9), (95, 2), (512, 1)]  # (first position, queries) of each sequence
    pool_k = torch.randn(4000, kv_heads, dim, generator=generator)
    pool_v = torch.randn(4000, kv_heads, dim, generator=generator)
    scratch = 3999
    pool_k[scratch] = pool_v[scratch] = 0
    window, softcap = int(options.get("window", 0)), float(options.get("softcap", 0.0))  # type: ignore[call-overload, arg-type]
    sinks = torch.randn(q_heads, generator=generator) if options.get("sinks") else None
    lanes, row, base, queries = [], 0, 0, []
    for n, (first, count) in enumerate(spans):
        slots = np.arange(base, base + first + count)
        run = (base, len(slots) + 64) if n % 2 == 0 else (0, 0)
        if n % 2:
            slots = slots[::-1].copy()  # scattered
        lanes.append(Lane(first, range(row, row + count), slots, run))
        queries.append(torch.randn(count, q_heads, dim, generator=generator))
        row, base = row + count, base + first + count + 64

    def run_lanes(chosen: list[int], exact: bool = True) -> list[torch.Tensor]:
        rows = np.cumsum([0] + [len(lanes[n].rows) for n in chosen])
        part = [
            Lane(lanes[n].first, range(rows[i], rows[i + 1]), lanes[n].slots, lanes[n].run)
            for i, n in enumerate(chosen)
        ]
        plan = plan_attention(part, int(rows[-1]), window, q_heads // kv_heads, scratch, CPU, exact)
        q = torch.cat([queries[n] for n in chosen])
        out = attend_tiles(q, torch.stack([pool_k, pool_v], 1), plan, dim**-0.5, softcap, sinks)
        return [out[rows[i] : rows[i + 1]] for i in range(len(chosen))]

    together = run_lanes(list(range(len(spans))))
    loose = run_lanes(list(range(len(spans))), exact=False)
    for n, (first, count) in enumerate(spans):
        slots = torch.from_numpy(lanes[n].slots)
        positions = range(first, first + count)
        expected = naive_attention(
            queries[n], pool_k[slots], pool_v[slots], positions, dim**-0.5, window, softcap, sinks
        )
        assert torch.allclose(loose[n].double(), expected, atol=1e-5)
        assert torch.allclose(together[n].double(), expected, atol=1e-5)
        assert torch.equal(run_lanes([n])[0], together[n]), "alone it has other bits"


def test_pruned_gumbel_argmax_is_the_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 500, generator=generator) * 8
    logits[::3, 100:] = -torch.inf
    keys = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    assert torch.equal(gumbel_argmax(logits, keys), gumbel_argmax_dense(logits, keys))


def test_gumbel_noise_is_bounded_by_its_reach_and_has_the_right_law() -> None:
    keys = torch.arange(400) * 7919 + (123456789 << 31)
    noise = gumbel(keys[:, None], torch.arange(500)[None, :])
    assert torch.isfinite(noise).all()
    assert float(noise.min()) > -2.83 and float(noise.max()) < 16.65
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03


def test_sampling_with_noise_draws_from_the_softmax() -> None:
    """Chi-square over 20,000 draws, 15 degrees of freedom: 37.7 is the 0.1 % point."""
    logits = torch.linspace(-2, 2, 16)
    keys = torch.tensor([(k * 0x9E3779B97F4A7C15) % 2**63 for k in range(20000)])
    counts = torch.bincount(gumbel_argmax(logits.expand(20000, -1).contiguous(), keys), minlength=16)
    expected = torch.softmax(logits, 0) * 20000
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.7
