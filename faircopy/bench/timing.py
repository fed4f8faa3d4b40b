"""How long device work takes: graphs of many calls, medians of replays, and the two ceilings to hold them against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import triton
import triton.language as tl


def graph_of(run: Callable[[], object], warm: int = 2) -> torch.cuda.CUDAGraph:
    """Capture after a warm-up on another stream, so that nothing is compiled or grown inside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, repeats: int = 20, warm: int = 3) -> float:
    """Median milliseconds of one replay."""
    for _ in range(warm):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(median(times))


def graph_ms(run: Callable[[], object], repeats: int = 20) -> float:
    return replay_ms(graph_of(run), repeats)


@triton.jit
def _read(x, out, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
    for n in tl.static_range(ROUNDS):
        at = start + n * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_rate(gigabytes: float = 8.0) -> float:
    """Bytes a second that a kernel reads at best."""
    size = int(gigabytes * 1e9) // 2
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16).repeat(size // (1 << 20) + 1)
    best = 0.0
    for block, rounds, warps in ((4096, 4, 8), (8192, 4, 8), (4096, 8, 4), (8192, 8, 16)):
        programs = -(-x.numel() // (block * rounds))
        out = torch.empty(programs, device="cuda")
        shape = {"BLOCK": block, "ROUNDS": rounds, "num_warps": warps}
        launch = partial(_read[(programs,)], x, out, x.numel(), **shape)
        best = max(best, x.numel() * 2 / (graph_ms(launch, 5) * 1e-3))
    return best


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of a large bfloat16 product, on random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (graph_ms(lambda: a @ b, 10) * 1e-3)
