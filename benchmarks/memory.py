"""Predicted against measured memory: engines of given shapes with random weights, loaded and run to their last token.

python -m benchmarks.memory --out benchmarks/results/memory-cpu.json        (a process per case, about three minutes)
python -m benchmarks.memory --device cuda --out $OUT/memory-h200.json       (one process)

Measured is the peak beyond what the process held before: on a CPU its anonymous memory, looked at every millisecond; on
a GPU what torch has allocated at most, and reserved. A small engine runs first, which loads libraries and compiles
kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from faircopy.bench.record import collect
from faircopy.bench.shapes import random_model
from faircopy.build import build_engine, load_target
from faircopy.config import DTYPES, EngineConfig
from faircopy.drafters.folder import LEVELS, METHODS
from faircopy.drafters.heads import Head, HeadConfig
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.drafters.ngram import NgramDrafter
from faircopy.kernels.memory import give_back_free_memory
from faircopy.model.base import Model
from faircopy.model.shape import shape_of_checkpoint, shape_of_config
from faircopy.model.shape_share import WHOLE, Split
from faircopy.planning.drafts import NGRAM, NO_DRAFT, DraftShape, shape_of_draft
from faircopy.planning.memory import Setup, memory_items, total
from faircopy.types import Request, SamplingParams

Shape = dict[str, Any]
PAGE = 32


def shape(hidden: int, layers: int, vocab: int, head_dim: int = 64, tied: bool = False, kv: int = 4) -> Shape:
    heads = hidden // head_dim
    return {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": head_dim, "intermediate_size": 3 * hidden, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 4096,
    }  # fmt: skip


QWEN3_8B = {**shape(4096, 36, 151936, 128, kv=8), "intermediate_size": 12288}
QWEN3_600M = {**shape(1024, 28, 151936, 128, True, kv=8), "num_attention_heads": 16}
SHAPES: dict[str, Shape] = {
    "8M": shape(256, 4, 8192),
    "45M": shape(512, 8, 16384, tied=True),
    "110M": shape(768, 12, 32000),
    "vocab100k": shape(384, 6, 100352, tied=True, kv=2),
    "150M": shape(896, 14, 50000, kv=2),
    "0.6B": QWEN3_600M,
    "8B, 8 layers": {**QWEN3_8B, "num_hidden_layers": 8},
    "8B": QWEN3_8B,
}


@dataclass(frozen=True, slots=True)
class Case:
    """An engine and the texts it writes."""

    target: str
    dtype: str
    draft: str | None = None  # a shape, a method of heads, or "ngram"
    k: int = 0
    batch: int = 1
    prompt: int = 96
    tokens: int = 256  # of each sequence at the end
    tensor: int = 1  # ranks that share each layer of the target,
    stages: int = 1  # or its layers; measured is rank 0

    @property
    def split(self) -> Split:
        return Split(self.tensor, self.stages)


CPU = (
    Case("110M", "float32"),
    Case("110M", "bfloat16", batch=16),
    Case("110M", "float32", batch=8, prompt=192),
    Case("110M", "float32", "45M", 4, 8),
    Case("110M", "bfloat16", "45M", 4, 16),
    Case("110M", "float32", "medusa", 16, 4),
    Case("110M", "float32", "clover", 4, 8),
    Case("110M", "bfloat16", "eagle3", 8, 8),
    Case("vocab100k", "float32", "ngram", 4, 32, 48, 96),
    Case("110M", "bfloat16", batch=8, prompt=900, tokens=1024),
    # Of a shape that the memory model was not adjusted with.
    Case("150M", "float32", "45M", 6, 12, 64, 160),
    Case("150M", "bfloat16", "clover2", 5, 10, 160, 224),
    Case("150M", "bfloat16", "ngram", 3, 24, 100, 192),
    Case("150M", "float32", "eagle3", 6, 3, 300, 416),
    # Rank 0 of several.
    Case("110M", "float32", batch=8, tensor=2),
    Case("110M", "bfloat16", "45M", 4, 8, tensor=2),
    Case("150M", "bfloat16", "ngram", 3, 24, 100, 192, tensor=2),
    Case("110M", "float32", batch=8, stages=2),
    Case("150M", "bfloat16", "45M", 4, 8, stages=2),
)
GPU = (
    Case("0.6B", "bfloat16", batch=1),
    Case("0.6B", "bfloat16", batch=32, prompt=512, tokens=1024),
    Case("0.6B", "float32", batch=8),
    Case("0.6B", "bfloat16", "ngram", 4, 16),
    Case("8B, 8 layers", "bfloat16", batch=8, prompt=1024, tokens=1152),
    Case("8B, 8 layers", "bfloat16", "0.6B", 4, 8),
    Case("8B, 8 layers", "bfloat16", "eagle3", 4, 8),
    Case("8B, 8 layers", "float32", "medusa", 16, 4),
    Case("8B", "bfloat16", "0.6B", 4, 8, 512, 640),
)


def config_of(name: str) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[name])


def head_config(method: str, config: Any) -> HeadConfig:
    block = BlockShape(
        hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, intermediate=config.intermediate_size, context=config.max_position_embeddings,
    )  # fmt: skip
    options = {"draft_vocab": 8192} if method == "eagle3" else {}
    depth, vocab = config.num_hidden_layers, config.vocab_size
    return HeadConfig(method=method, shape=block, vocab=vocab, depth=depth, levels=LEVELS[method], options=options)


def predicted(case: Case, device: torch.device) -> list[Any]:
    """The memory model's items, from sizes alone."""
    kind = DTYPES[case.dtype]
    draft: DraftShape = NGRAM if case.draft == "ngram" else NO_DRAFT
    if case.draft in METHODS:
        with torch.device("meta"):
            draft = shape_of_draft(METHODS[case.draft](head_config(case.draft, config_of(case.target))), kind, device)
    elif case.draft in SHAPES:
        model = shape_of_config(config_of(case.draft), kind)
        draft = DraftShape(name=case.draft, kind="model", model=model)
    with checkpoint(case.target) as folder:
        target = shape_of_checkpoint(folder, kind, device, case.split)
    setup = Setup(
        target=target, draft=draft, nodes=case.k,
        levels=min(case.k, draft.levels or case.k), batch=case.batch, tokens=case.tokens, device=device, page=PAGE,
        sampled=False, chunk=chunk_of(case, device),
    )  # fmt: skip
    return memory_items(setup)


def chunk_of(case: Case, device: torch.device) -> int:
    """Prompt rows of one step: all of them, or the engine's own limit."""
    return min(EngineConfig().chunk_on(device), case.batch * case.prompt)


@contextmanager
def checkpoint(name: str, kind: torch.dtype | None = None) -> Iterator[str]:
    """A folder with a configuration, and random weights that are read as this type: stored in another one, because
    memory that the file itself backs is not counted."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = config_of(name)
        if kind is None:
            config.save_pretrained(folder)
        else:
            stored = torch.bfloat16 if kind == torch.float32 else torch.float32
            AutoModelForCausalLM.from_config(config).to(stored).save_pretrained(folder)
        yield folder


def run(case: Case, device: torch.device, folder: str | None = None) -> None:
    """Load, warm up, and write all texts. folder: where ranks read their shares."""
    kind = DTYPES[case.dtype]
    ranks = {"tensor_parallel": case.tensor, "pipeline_parallel": case.stages}
    if folder is None:
        target = random_model(config_of(case.target), kind, device)
    else:
        target = load_target(folder, EngineConfig(device=device.type, dtype=case.dtype, **ranks))
    draft: Model | Head | None = None
    if case.draft in SHAPES:
        draft = random_model(config_of(case.draft), kind, device)
    elif case.draft in METHODS:
        with device:
            head = METHODS[case.draft](head_config(case.draft, config_of(case.target)))
        draft = head.to(device, kind).bind(target.token_weights()).requires_grad_(False)
    drafter = NgramDrafter(1, 4) if case.draft == "ngram" else None
    pages = case.batch * -(-(case.tokens + 2 * (case.k + 1)) // PAGE)
    config = EngineConfig(
        k=case.k, max_batch=case.batch, page=PAGE, prefix_reuse=False, device=device.type, dtype=case.dtype,
        cache_memory=pages * PAGE * kv_of(target, draft), chunk=chunk_of(case, device), **ranks,
    )  # fmt: skip
    engine = build_engine(target, drafter, draft=draft, config=config, limited=True)
    if device.type == "cuda":
        engine.warm_up()
    params = SamplingParams(max_tokens=case.tokens - case.prompt, ignore_eos=True)
    for n in range(case.batch):
        engine.add(Request(tuple((7 * i + n) % target.vocab for i in range(case.prompt)), params))
    while engine.busy:
        engine.step()


def kv_of(*models: Model | Head | None) -> int:
    from faircopy.layout.base import kv_bytes_per_token

    return sum(kv_bytes_per_token(model) for model in models if model is not None)


class Peak:
    """The most anonymous memory of this process while it is watched."""

    def __init__(self) -> None:
        self.before = self.most = anonymous_bytes()

    @contextmanager
    def watched(self) -> Iterator[None]:
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    @property
    def grown(self) -> int:
        return self.most - self.before

    def _watch(self, done: threading.Event) -> None:
        while not done.is_set():
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.001)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure(case: Case, device: torch.device) -> dict[str, int]:
    if device.type == "cpu":
        draft = "8M" if case.draft in SHAPES else case.draft
        warm = replace(case, target="8M", draft=draft, batch=2, prompt=96, tokens=128)
        with ExitStack() as stack:
            read, kind = case.split != WHOLE, DTYPES[case.dtype]
            small, large = (stack.enter_context(checkpoint(n, kind)) if read else None for n in ("8M", case.target))
            run(warm, device, small)
            gc.collect()
            give_back_free_memory()
            peak = Peak()
            with peak.watched():
                run(case, device, large)
        return {"measured": peak.grown}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(case, device)
    torch.cuda.synchronize()
    return {
        "measured": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
    }


def row(case: Case, device: torch.device) -> dict[str, Any]:
    begin, found, items = time.perf_counter(), measure(case, device), predicted(case, device)
    expected = total(items)
    return {
        **asdict(case), "predicted": expected, **found, "ratio": round(expected / found["measured"], 4),
        "items": {item.name: item.bytes for item in items}, "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def in_a_process(index: int) -> dict[str, Any]:
    """A fresh process: what earlier cases freed is not there to be used again."""
    command = [sys.executable, "-m", "benchmarks.memory", "--only", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(found: dict[str, Any]) -> str:
    mib = {name: found[name] / 2**20 for name in ("predicted", "measured")}
    what = f"{found['target']:12s} {found['dtype']:8s} {found['draft'] or '-':8s}"
    what += f" k {found['k']:2d} batch {found['batch']:2d}"
    what += f" ranks {found['tensor']}" * (found["tensor"] > 1) + f" stages {found['stages']}" * (found["stages"] > 1)
    return f"{what}  predicted {mib['predicted']:9.1f} MiB  measured {mib['measured']:9.1f} MiB  {found['ratio']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out")
    parser.add_argument("--only", type=int, help="one case, in this process")
    args = parser.parse_args()
    device, cases = torch.device(args.device), CPU if args.device == "cpu" else GPU
    if args.device == "cuda":
        run(Case("8M", "bfloat16", batch=2, tokens=128), device)
    if args.only is not None:
        print(json.dumps(row(cases[args.only], device)))
        return
    rows = (in_a_process(n) if args.device == "cpu" else row(case, device) for n, case in enumerate(cases))
    settings = {"device": args.device, "page": PAGE, "threads": torch.get_num_threads()}
    for found in collect(args.out, settings, rows) if args.out else rows:
        print(line(found), flush=True)


if __name__ == "__main__":
    main()
