"""What ranks that share a model send each other: sizes by shape and rows, their projected cost, and a check of bits.

python -m benchmarks.tensor_parallel [--shapes qwen3-8b qwen3-32b] [--out FILE]     # tables; times are a projection
python -m benchmarks.tensor_parallel --device cuda [--ranks 2] [--out FILE]         # ranks on one device, bit for bit
python -m benchmarks.tensor_parallel --groups [--out FILE]       # what sums in K groups cost one process on a CPU

The sizes are checked against what a small model sends. The times are no measurement: an exchange takes LATENCY, which
is published for a one-shot all-reduce of 0.5 MB (vLLM #24111), and the time in which the bytes of all other ranks pass
an NVLink at the data sheet's rate; NCCL with a fixed order is published to take PINNED times as long as one shot at
four ranks (vLLM #50505). The floor is the time in which a rank reads its share of the weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from faircopy import bundled
from faircopy.bench.record import write
from faircopy.bench.shapes import SHAPES
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.ngram import NgramDrafter
from faircopy.kernels.ranks import OneRank
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model
from faircopy.model.loader import load_model
from faircopy.model.trial import scene
from faircopy.parallel.launch import start_ranks
from faircopy.parallel.model import ParallelModel
from faircopy.parallel.shards import Load
from faircopy.testing import cacheless
from faircopy.types import Request, SamplingParams

RANKS = (2, 4, 8)
ROWS = (1, 8, 48, 512)  # one text; eight; eight with five draft tokens each; a prompt
LATENCY, PINNED = 7e-6, 2.05
NVLINK = 450e9  # bytes a second into one H100 or H200
HEALTH = "rows that are finite"
MEMORY = 4.69e12  # bytes a second of an H200, measured
SMALL: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


class Message(NamedTuple):
    """What each rank sends in a pass: how often, and how many bytes each time."""

    name: str
    count: int
    size: int


def messages(shape: dict[str, Any], rows: int, ranks: int, itemsize: int) -> list[Message]:
    """Of a pass over this many rows, all of whose logits are wanted."""
    hidden, layers, vocab = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    share = -(-vocab // (ranks * 16)) * 16
    return [
        Message("embedding", 1, rows * hidden * itemsize),
        Message("attention output, down", 2 * layers, rows * hidden * 4),
        Message("logits", 1, rows * share * itemsize),
        Message(HEALTH, 1, rows),
    ]


class Recorder(OneRank):
    """Notes the size of everything that would be sent."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()

    def gather(self, x: Tensor) -> Tensor:
        self.sizes[x.nbytes] += 1
        return super().gather(x)


def check_sizes(path: str) -> None:
    """The sizes of `messages` are those that a model sends."""
    ranks = Recorder()
    forward = cacheless(load_model(path, torch.float32, torch.device("cpu"), ranks=ranks))
    forward(list(range(48)))
    expected: Counter[int] = Counter()
    for message in messages(SMALL, 48, 1, 4):
        expected[message.size] += message.count if message.name != HEALTH else 0  # not sent where there is one rank
    assert ranks.sizes == +expected, f"{ranks.sizes} were sent, not {expected}"


def projected(sent: list[Message], ranks: int) -> float:
    """Seconds of a pass's exchanges, one after the other."""
    return sum(m.count * (LATENCY + m.size * (ranks - 1) / NVLINK) for m in sent)


def weight_bytes(shape: dict[str, Any]) -> int:
    """That a pass reads, in 16 bits."""
    c = shape
    heads = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
    layer = c["hidden_size"] * (heads + c["num_attention_heads"] * c["head_dim"] + 3 * c["intermediate_size"])
    return int(2 * (c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]))


def table(shapes: list[str]) -> Iterator[dict[str, Any]]:
    for name in shapes:
        for rows in ROWS:
            for ranks in RANKS:
                sent = messages(SHAPES[name], rows, ranks, 2)
                seconds = projected(sent, ranks)
                yield {
                    "shape": name, "rows": rows, "ranks": ranks, "messages": sum(m.count for m in sent),
                    "row_parallel_bytes": sent[1].size, "bytes_sent": sum(m.count * m.size for m in sent),
                    "projected_ms": 1e3 * seconds, "projected_nccl_ms": 1e3 * PINNED * seconds,
                    "floor_ms": 1e3 * weight_bytes(SHAPES[name]) / ranks / MEMORY,
                }  # fmt: skip


def small_checkpoint(folder: str) -> str:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.06 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


def texts(model: Model, batch: int) -> tuple[list[Any], float]:
    """What a batch writes, half of it sampled, and in how many seconds."""
    config = EngineConfig(k=3, max_batch=batch, cache_memory="64MiB", device=model.device.type)
    engine = build_engine(model, NgramDrafter(1, 3), config=config)
    params = [SamplingParams(max_tokens=24, temperature=0.9 * (n % 2), logprobs=1) for n in range(batch)]
    seqs = [engine.add(Request(tuple(range(3 + n, 9 + 3 * n)), p, n)) for n, p in enumerate(params)]
    begin = time.perf_counter()
    while engine.busy:
        engine.step()
    return [(seq.output, seq.logprobs) for seq in seqs], time.perf_counter() - begin


def compared(path: str, device: torch.device, size: int) -> Iterator[dict[str, Any]]:
    """Ranks on one device against one process: logits in bits, and texts."""
    group = start_ranks(size, device)
    for dtype in (torch.float32, torch.bfloat16):
        one = load_model(path, dtype, device, ranks=OneRank())
        many = ParallelModel(group, Load(path, dtype, True, torch.get_num_threads()))
        text = list(range(5, 105))
        bits = torch.equal(cacheless(one)(text), cacheless(many)(text))
        for batch in (1, 8):
            (expected, alone), (found, shared) = texts(one, batch), texts(many, batch)
            yield {
                "dtype": str(dtype), "device": device.type, "ranks": size, "batch": batch, "logits_equal": bits,
                "texts_equal": [text for text, _ in expected] == [text for text, _ in found],
                "logprobs_equal": expected == found, "seconds_one": alone, "seconds": shared,
            }  # fmt: skip
    group.close()


@torch.no_grad()
def grouped(repeats: int = 60) -> Iterator[dict[str, Any]]:
    """Processor time of a pass of the bundled target with sums in K groups over one without, in turns."""
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        models = [load_model(bundled.target(), dtype, cpu, ranks=ranks) for ranks in (None, OneRank())]
        for rows in (1, 8, 40):
            scenes = [scene(model, rows, 1, 128) for model in models]
            turns = [[_seconds(m, *s) for m, s in zip(models, scenes, strict=True)] for _ in range(repeats)]
            yield {"dtype": str(dtype), "rows": rows, "over_plain": median(groups / plain for plain, groups in turns)}


def _seconds(model: Model, layout: PagedLayout, packed: Packed) -> float:
    begin = time.process_time()
    model.forward(packed, layout)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-8b", "qwen3-32b"], choices=sorted(SHAPES))
    parser.add_argument("--device")
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = small_checkpoint(folder)
        if args.device is not None:
            found = compared(path, torch.device(args.device), args.ranks)
        else:
            check_sizes(path)
            found = grouped() if args.groups else table(args.shapes)
        for row in found:
            rows.append(row)
            print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    if args.out:
        write(args.out, vars(args), rows)
    equal = ("logits_equal", "texts_equal", "logprobs_equal")
    assert all(row.get(name, True) for row in rows for name in equal), "bits differ"


if __name__ == "__main__":
    main()
