"""`faircopy bench kernels`: every kernel against its twin, and what the products and attention cost on this device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from faircopy.bench.shapes import PAIR, SHAPES, products
from faircopy.bench.timing import graph_ms, matrix_rate, read_rate
from faircopy.kernels.gpu import attention, pages
from faircopy.kernels.gpu.linear import Linear
from faircopy.testing.kernel_checks import checks

ROWS = (8, 48, 192, 384)
COLD = 256 << 20  # weights and keys rotate through more bytes than the cache holds


def check_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """One row per check: how far the kernel is off what is allowed; bits must agree where the name says so."""
    for name, run in checks():
        error = run(device)
        yield {"check": name, "error": error, "passes": error <= 1.0 if ":" not in name else error == 0.0}


def product_rows(rate: float, names: tuple[str, ...] = PAIR) -> Iterator[dict[str, Any]]:
    """Microseconds of each product, ours and cuBLAS's, against reading the weight once. Gated: the activation too."""
    for name in names:
        for kind, (outputs, inner) in products(name).items():
            layers = _layers(outputs, inner)
            for rows in ROWS:
                x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
                yield {
                    "model": name, "product": kind, "rows": rows, "floor_us": outputs * inner * 2 / rate * 1e6,
                    "ours_us": _each_us(layers, x, kind == "gate_up"),
                    "cublas_us": _library_us(layers, x),
                }  # fmt: skip
            del layers
            torch.cuda.empty_cache()


def _layers(outputs: int, inner: int) -> list[Linear]:
    copies = min(12, max(2, COLD // (outputs * inner * 2)))
    return [Linear(torch.randn(outputs, inner, device="cuda", dtype=torch.bfloat16)) for _ in range(copies)]


def _each_us(layers: list[Linear], x: torch.Tensor, gated: bool) -> float:
    def run() -> None:
        for layer in layers:
            layer.gated(x, "silu") if gated else layer.parts(x)

    return graph_ms(run, 5) / len(layers) * 1e3


def _library_us(layers: list[Linear], x: torch.Tensor) -> float:
    return graph_ms(lambda: [x @ layer.weight.T for layer in layers], 5) / len(layers) * 1e3


SCENES = (
    (1, 1, 512), (8, 1, 512), (8, 6, 512), (32, 6, 512), (64, 6, 512), (8, 6, 1024), (8, 6, 2048), (64, 3, 1024),
    (1, 1, 8192), (8, 6, 8192), (1, 1, 32768), (1, 6, 32768), (8, 6, 32768),
)  # fmt: skip  # batch, rows per sequence, context


def attention_rows(rate: float) -> Iterator[dict[str, Any]]:
    """Microseconds of one layer's attention against reading its keys and values once."""
    for name in PAIR:
        c = SHAPES[name]
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        for batch, rows, context in SCENES:
            scenes = [_scene(batch, rows, heads, kv, dim, context) for _ in range(_copies(batch, context, kv, dim))]
            floor = 4 * batch * context * kv * dim / rate * 1e6
            yield {
                "model": name, "batch": batch, "rows": rows, "context": context, "floor_us": floor,
                "ours_us": _attention_us(scenes, dim**-0.5),
            }  # fmt: skip


def _attention_us(scenes: list[dict[str, Any]], scale: float) -> float:
    arrived = attention.counters(torch.device("cuda"))

    def run() -> None:
        for scene in scenes:
            attention.attend_pages(**scene, arrived=arrived, scale=scale)

    return graph_ms(run, 5) / len(scenes) * 1e3


def _copies(batch: int, context: int, kv: int, dim: int) -> int:
    return max(2, min(12, COLD // (4 * batch * context * kv * dim)))


def _scene(batch: int, rows: int, heads: int, kv: int, dim: int, context: int) -> dict[str, Any]:
    page, per = 32, -(-(context + rows) // 32)
    tables = torch.randperm(batch * per).int().view(batch, per).cuda()
    keys, values = (torch.randn(batch * per * page, kv, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch * rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    positions = (context - 1 + torch.arange(rows, device="cuda")).repeat(batch).int()
    plan = pages.even_plan(batch, rows, tables, page, context + rows, dim)
    return {"q": q, "keys": keys, "values": values, "positions": positions, "plan": plan}


def rows(names: tuple[str, ...] = PAIR) -> Iterator[dict[str, Any]]:
    """Checks first, then the two ceilings, then times against them."""
    yield from check_rows(torch.device("cuda"))
    rate = read_rate()
    yield {"read_bytes_per_s": rate, "matrix_operations_per_s": matrix_rate()}
    yield from attention_rows(rate)
    yield from product_rows(rate, names)
