"""CPU kernels of our own: right against float64, and one order of sums whatever rows, tiles or threads there are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from faircopy import LLM, SamplingParams
from faircopy.kernels import linear
from faircopy.kernels.attention import Lane
from faircopy.kernels.cpu import attention, jit, product
from faircopy.kernels.cpu.attention import attend_rows, has_kernel, plan_rows
from faircopy.kernels.cpu.product import PackedWeight, fits
from faircopy.layout import paged

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(jit.processor() is None, reason="no LLVM, or a processor without kernels")


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight_of(outputs: int, inner: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(outputs, inner, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if not fits(weight):
        pytest.skip(f"no kernel for {dtype} here")
    return weight


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inner"), [(96, 64), (100, 70), (33, 258), (1, 2)])
def test_a_rows_product_is_right_and_does_not_depend_on_other_rows(
    dtype: torch.dtype, outputs: int, inner: int
) -> None:
    weight, bias = weight_of(outputs, inner, dtype), torch.randn(outputs).to(dtype)
    run, x = PackedWeight(weight, bias), torch.randn(50, inner).to(dtype)
    whole = run(x)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (whole.double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()
    for rows in range(1, 50):
        assert torch.equal(run(x[1 : rows + 1]), whole[1 : rows + 1])
    assert run(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_number_of_threads_changes_no_bit(one_thread_after: None, dtype: torch.dtype) -> None:
    run, x = PackedWeight(weight_of(200, 130, dtype), None), torch.randn(9, 130).to(dtype)
    torch.set_num_threads(1)
    alone = run(x)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        assert torch.equal(run(x), alone)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gate_and_up_in_one_product(dtype: torch.dtype, name: str) -> None:
    weight = weight_of(192, 64, dtype) / 4
    assert fits(weight, name) and not fits(weight, "relu") and not fits(weight[:190], name)
    x = torch.randn(11, 64).to(dtype)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
    expected = (F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")) * up
    assert (PackedWeight(weight, None, name)(x).double() - expected).abs().max() <= ROUNDING[
        dtype
    ] * expected.abs().max()


def test_an_activation_is_right_over_all_magnitudes_and_keeps_what_is_not_finite() -> None:
    weight = torch.zeros(64, 2)
    weight[:32, 0] = weight[32:, 1] = 1  # gate and up are the two inputs
    gates = torch.cat([torch.linspace(-110, 110, 2001), torch.tensor([0.0, 1e-30, 1e30])])
    out = PackedWeight(weight, None, "silu")(torch.stack([gates, torch.ones_like(gates)], 1))[:, 0]
    expected = F.silu(gates.double())
    assert ((out - expected).abs() <= 3e-7 * expected.abs() + 1e-35).all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not torch.isfinite(PackedWeight(weight, None, "silu")(torch.tensor([[bad, 1.0]]))[0, 0])


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_a_packed_weight_are_the_weights(dtype: torch.dtype) -> None:
    weight, ids = weight_of(100, 70, dtype), torch.tensor([[0, 99], [31, 32]])
    assert torch.equal(PackedWeight(weight, None).rows(ids), weight[ids])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "window"), [(64, 4, 3, 0), (128, 1, 4, 0), (32, 3, 1, 7), (16, 2, 2, 20)]
)
def test_attention_of_a_row_is_right_and_does_not_depend_on_other_rows(
    one_thread_after: None, dtype: torch.dtype, dim: int, kv_heads: int, group: int, window: int
) -> None:
    if not has_kernel(dim, dtype, CPU):
        pytest.skip(f"no kernel for {dtype} here")
    pool = torch.randn(512, 2, kv_heads, dim).to(dtype)
    free, lanes, size = torch.randperm(511).numpy(), [], 0
    for length in (1, 5, 16, 17, 100, 130):
        first = max(0, length - 9)
        lanes.append(Lane(first, range(size, size + length - first), free[:length]))
        free, size = free[length:], size + length - first
    q, scale = torch.randn(size, kv_heads * group, dim).to(dtype), dim**-0.5
    out = attend_rows(q, pool, plan_rows(lanes, size, 511), scale, window)
    torch.set_num_threads(3)
    assert torch.equal(attend_rows(q, pool, plan_rows(lanes, size, 511), scale, window), out)
    for lane in lanes:
        for position, row in enumerate(lane.rows, lane.first):
            low = max(0, position - window + 1) if window else 0
            seen = pool[lane.slots[low : position + 1]].double().repeat_interleave(group, 2)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q[row].double(), seen[:, 0]) * scale, -1)
            expected = torch.einsum("hn,nhd->hd", weights, seen[:, 1])
            assert (out[row].double() - expected).abs().max() <= 2 * ROUNDING[dtype]
            alone = plan_rows([Lane(position, range(1), np.array(lane.slots[: position + 1]))], 1, 511)
            assert torch.equal(attend_rows(q[row : row + 1], pool, alone, scale, window)[0], out[row])


def test_other_instruction_sets_have_kernels_too() -> None:
    script = "import pytest, sys; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    chosen = [f"{__file__}::test_a_rows_product_is_right_and_does_not_depend_on_other_rows"]
    chosen += [f"{__file__}::test_attention_of_a_row_is_right_and_does_not_depend_on_other_rows"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", script, *chosen], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_machine_without_them_serves_the_same_texts(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    prompts, params = [[1, 2, 3], [5] * 40], SamplingParams(max_tokens=20)
    path = checkpoint("llama")
    first = LLM(path, draft="ngram", dtype="float32", cache_memory="8MiB")
    for module in (linear, product):
        monkeypatch.setattr(module, "fits", lambda *_: False)
    for module in (paged, attention):
        monkeypatch.setattr(module, "has_kernel", lambda *_: False)
    monkeypatch.setattr("faircopy.model.decoder.fits", lambda *_: False)
    monkeypatch.setattr("faircopy.build._IN_USE", {})
    second = LLM(path, draft="ngram", dtype="float32", cache_memory="8MiB")
    texts = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in (first, second)]
    assert texts[0] == texts[1]
