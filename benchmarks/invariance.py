"""Is a row's result independent of the other rows? Every architecture and backend, in bits; real models, in texts.

    python -m benchmarks.invariance rows --out FILE [--device cuda] [--sizes 640 1024 ...] [--workers 8]
    python -m benchmarks.invariance operations --out FILE
    python -m benchmarks.invariance heads --out FILE [--sizes 640 1024 ...]
    python -m benchmarks.invariance table --results FILE ...
    python -m benchmarks.invariance texts --out FILE --models DIR[=backend] ... --prompts spec_bench.jsonl

`rows` compares rows alone with the same rows in passes of 2 to 700 rows (`faircopy.model.selftest`) for every
architecture of tests/zoo.py at widths of real models; on a GPU also in a pass of 4,096 rows. `operations` does so for
single torch functions, stock and replaced. `heads` compares texts drafted by each kind of draft head with plain ones,
at the same widths. `texts` compares what real models write: plain and n-gram, batches 1 to 64, greedy and sampled; in
float32 with transformers' generate().
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.widen import widened_model
from benchmarks.widen_head import WidenedHead, wide_head
from faircopy import LLM, SamplingParams, bundled
from faircopy.bench.record import collect
from faircopy.drafters.folder import LEVELS, METHODS, load_head
from faircopy.drafters.heads import Head
from faircopy.drafters.networks.eagle3 import options_for
from faircopy.errors import UnsupportedModel
from faircopy.model.base import Model
from faircopy.model.bits import same_bits
from faircopy.model.invariant import RowInvariant
from faircopy.model.loader import build_decoder, fits_decoder, load_eos, load_model, load_tokenizer, rope_frequencies
from faircopy.model.selftest import ROWS, RowTrial, self_test
from faircopy.model.transformers_backend import TransformersModel
from tests.zoo import SIZES, ZOO, build_wide

Row = dict[str, Any]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


# rows: every architecture


def row_tasks(args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """(architecture, size, dtype, device, backend); three families at all sizes, each of the others at two in turn."""
    names, count = args.names or sorted(ZOO), len(args.sizes)
    tasks = []
    for n, name in enumerate(names):
        two = {args.sizes[n % count], args.sizes[(n + count // 2) % count]}
        for size in args.sizes if name in AT_ALL_SIZES else sorted(two):
            for dtype in args.dtypes:
                tasks += [(name, size, dtype, args.device, backend) for backend in ("transformers", "decoder")]
    return tasks


AT_ALL_SIZES = ("gemma", "llama", "qwen3")
LARGE = 4096  # rows: prompts on a GPU are read in passes of thousands


def compare_rows(name: str, size: str, dtype: str, device: str, backend: str) -> Row | None:
    """The verdict on one model; None where our decoder does not serve the family."""
    about: Row = {"model": name, "size": size, "dtype": dtype, "device": device, "backend": backend}
    begin = time.perf_counter()
    try:
        model = wide_model(name, size, DTYPES[dtype], torch.device(device), backend)
        return None if model is None else {**about, **verdict(model), "seconds": time.perf_counter() - begin}
    except UnsupportedModel as error:
        return {**about, "verdict": "refused", "why": str(error)}
    except Exception as error:  # one model's failure must not end the sweep
        return {**about, "verdict": "error", "why": repr(error)[:400], "where": traceback.format_exc()[-1500:]}


def wide_model(name: str, size: str, dtype: torch.dtype, device: torch.device, backend: str) -> Model | None:
    config = ZOO[name]()
    if backend == "decoder" and not fits_decoder(config):
        return None
    stock = build_wide(name, size, dtype, device)
    if backend == "transformers":
        if hasattr(stock, "set_experts_implementation"):
            stock.set_experts_implementation("eager")
        return TransformersModel(name, stock, True)
    tensors = stock.state_dict()
    if stock.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return build_decoder(name, stock.config, rope_frequencies(stock.config), tensors.get, dtype, device, True)


def verdict(model: Model) -> Row:
    """Passes of all sizes, and how long the load-time test takes once its kernels are compiled."""
    passes = ROWS if model.device.type == "cpu" else (*ROWS, LARGE)
    trial = RowTrial(model, max(passes))
    wrong = {rows: found for rows in passes if (found := trial.difference(rows)) is not None}
    begin = time.perf_counter()
    if not wrong:
        self_test(model, True)
    return {
        "verdict": "differs" if wrong else "proven",
        "passes": list(passes),
        "compared": trial.compared,
        "differing": wrong,
        "self_test_s": time.perf_counter() - begin,
    }


def rows_part(args: argparse.Namespace) -> Iterator[Row]:
    for row in in_parallel(args.workers, [partial(compare_rows, *task) for task in row_tasks(args)]):
        if row is not None:
            yield row


# operations: single functions


def operation_cases(device: torch.device, width: int) -> dict[str, Callable[[Tensor], Any]]:
    weight = torch.randn(width, device=device)
    square = torch.randn(4, 4, device=device)
    return {
        "pow(2).mean": lambda x: x.float().pow(2).mean(-1),
        "mean": lambda x: x.mean(-1),
        "sum": lambda x: x.sum(-1),
        "std": lambda x: x.float().std(-1, unbiased=False),
        "norm": lambda x: x.float().norm(dim=-1),
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x.float(), -1),
        "layer_norm": lambda x: F.layer_norm(x, (width,), weight.to(x.dtype)),
        "rms_norm": lambda x: F.rms_norm(x, (width,), weight.to(x.dtype), 1e-6),
        "cumsum": lambda x: x.float().cumsum(-1),
        "topk with ties": lambda x: torch.topk((x * 4).round(), 8, -1)[1].to(torch.float32),
        "matmul of activations": lambda x: x.view(*x.shape[:-1], -1, 4) @ square.to(x.dtype),
        "linear": lambda x: F.linear(x, weight.to(x.dtype).expand(256, -1).contiguous()),
        **{name: partial(_pointwise, op) for name, op in POINTWISE.items()},
    }


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "cos": torch.cos,
    "x * y + z": lambda x: x * x.flip(-1) + x,
}


def _pointwise(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return op(x)


def compare_operation(name: str, width: int, dtype: torch.dtype, device: torch.device, replaced: bool) -> Row:
    """The least number of rows from which on a row's bits differ from the row alone, and how many rows do."""
    run, x = operation_cases(device, width)[name], torch.randn(700, width, device=device, dtype=dtype)
    alone_rows, first, worst = 24, None, 0
    mode: Any = RowInvariant(device) if replaced else torch.no_grad()
    with mode:
        alone = [run(x[i : i + 1]) for i in range(alone_rows)]
        for rows in ROWS:
            out = run(x[:rows])
            wrong = sum(not same_bits(out[i], alone[i][0]) for i in range(min(rows, alone_rows)))
            first, worst = rows if wrong and first is None else first, max(worst, wrong)
        shifted = run(torch.cat([x.flatten()[:1], x[:16].flatten()])[1:].view(16, width))  # an odd address
    odd = sum(not same_bits(shifted[i], alone[i][0]) for i in range(16))
    return {
        "operation": name, "width": width, "dtype": str(dtype)[6:], "replaced": replaced, "differs_from": first,
        "rows_differing": worst, "of": alone_rows, "differing_at_odd_address": odd,
    }  # fmt: skip


def operations_part(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(args.device)
    for width in (64, 256, 640, 1152, 2304, 4096, 32000):
        for name in operation_cases(device, width):
            for dtype in (torch.bfloat16, torch.float32):
                for replaced in (False, True):
                    yield compare_operation(name, width, dtype, device, replaced)


# heads: texts drafted by draft heads


def compare_heads(size: str, dtype: str, device: str) -> list[Row]:
    """The bundled target at one width: texts drafted by each kind of head, in a batch, against plain ones alone."""
    kind, place = DTYPES[dtype], torch.device(device)
    small, shape = load_model(bundled.target(), kind, place), head_shape(size)
    target = widened_model(bundled.target(), shape, dtype=kind, device=place)
    tokenizer: Any = load_tokenizer(bundled.target())
    prompts = [list(tokenizer.encode(text))[:48] for text in bundled.prompts()]
    plain = {t: drafted_texts(target, None, prompts, t)[0] for t in (0.0, 0.8)}
    lonely = {t: drafted_texts(target, None, prompts[:8], t, batch=1)[0] for t in plain}
    about: Row = {"size": size, "dtype": dtype, "device": device}
    found = [{**about, "draft": "none", "batch": 1, **same_texts(lonely, plain)}]
    for method in METHODS:
        head, accepted = head_of(method, small, shape, target), {}
        texts = {}
        for t in plain:
            texts[t], accepted[t] = drafted_texts(target, head, prompts, t)
        found.append({**about, "draft": method, "batch": 64, "accepted": accepted, **same_texts(texts, plain)})
    return found


def head_shape(size: str) -> Row:
    """A Qwen3 configuration of this width with at least the bundled target's number of heads."""
    hidden, intermediate, heads, kv_heads, head_dim = SIZES[size]
    return {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": 8, "num_attention_heads": max(heads, 8),
        "num_key_value_heads": max(kv_heads, 2), "head_dim": head_dim, "intermediate_size": intermediate,
        "vocab_size": 32000, "tie_word_embeddings": False,
    }  # fmt: skip


def head_of(method: str, small: Model, shape: Row, target: Model) -> Head:
    """The bundled Clover head at this width; the other methods with random weights, whose guesses are rejected."""
    clover = load_head(str(bundled.folder() / "clover"), small).to(target.dtype)
    if method == "clover":
        return WidenedHead(clover, wide_head(clover, shape, target)).bind(target.token_weights())
    options = options_for(target.vocab, {}) if method == "eagle3" else {}
    head = wide_head(clover, shape, target, method=method, levels=LEVELS[method], options=options)
    return head.bind(target.token_weights()).serve()


def drafted_texts(
    target: Model, draft: Head | None, prompts: list[list[int]], temperature: float, batch: int = 64
) -> tuple[list[list[int]], float]:
    """Texts of 32 tokens, and the share of draft tokens that was accepted."""
    memory = "4GiB" if target.device.type == "cuda" else "256MiB"
    options: Row = {
        "max_batch": batch,
        "cache_memory": memory,
        "device": target.device.type,
        "dtype": str(target.dtype)[6:],
    }
    llm = LLM(target, draft, k=4 if draft is not None else 0, **options)
    params = [
        SamplingParams(max_tokens=32, temperature=temperature, seed=n, ignore_eos=True) for n in range(len(prompts))
    ]
    answers = llm.generate(prompts, params, progress=False)
    drafted = sum(answer.drafted for answer in answers)
    return [answer.token_ids for answer in answers], round(sum(a.accepted for a in answers) / max(1, drafted), 3)


def same_texts(texts: dict[float, list[list[int]]], plain: dict[float, list[list[int]]]) -> Row:
    pairs = [(a, b) for t in texts for a, b in zip(texts[t], plain[t], strict=False)]
    return {"identical": sum(a == b for a, b in pairs), "of": len(pairs)}


def heads_part(args: argparse.Namespace) -> Iterator[Row]:
    tasks = [partial(compare_heads, size, dtype, args.device) for size in args.sizes for dtype in args.dtypes]
    for rows in in_parallel(args.workers, tasks):
        yield from rows


# texts: real models


def text_tasks(args: argparse.Namespace) -> list[Callable[[], Row]]:
    tasks: list[Callable[[], Row]] = []
    for given in args.models:
        folder, _, backend = given.partition("=")
        about = {"folder": folder, "backend": backend or "auto", "device": args.device, "tokens": args.tokens}
        for dtype, ways in WAYS.items():
            for drafter, batch, temperature in ways:
                count, size = (args.alone, 25) if batch == 1 else (args.count, 200 if batch == 8 else args.count)
                for first in range(0, count, size):
                    part = (first, min(first + size, count))
                    way = {"dtype": dtype, "drafter": drafter, "batch": batch, "temperature": temperature}
                    tasks.append(partial(write_texts, args.prompts, part, {**about, **way}))
    return sorted(tasks, key=lambda task: (-task.args[2]["batch"], task.args[2]["dtype"]))


BOTH = [(drafter, batch, t) for drafter in ("plain", "ngram") for batch in (1, 8, 32, 64) for t in (0.0, 0.8)]
WAYS: dict[str, list[tuple[str, int, float]]] = {
    "bfloat16": BOTH,
    "float32": [("generate", 1, 0.0), ("plain", 64, 0.0), ("ngram", 8, 0.0), ("plain", 64, 0.8), ("ngram", 32, 0.8)],
}


def write_texts(prompts: str, part: tuple[int, int], way: Row) -> Row:
    begin = time.perf_counter()
    asked = list(enumerate(read_prompts(prompts, way["folder"])))[slice(*part)]
    ids = [tokens for _, tokens in asked]
    if way["drafter"] == "generate":
        out = generated(way, ids)
    else:
        params = [
            SamplingParams(max_tokens=way["tokens"], temperature=way["temperature"], seed=n, ignore_eos=True)
            for n, _ in asked
        ]
        out = [answer.token_ids for answer in text_llm(way).generate(ids, params, progress=False)]
    return {**way, "part": part, "texts": out, "seconds": time.perf_counter() - begin}


@cache
def read_prompts(file: str, folder: str) -> list[list[int]]:
    tokenizer: Any = load_tokenizer(folder)
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [list(tokenizer.encode(line["turns"][0]))[:96] for line in lines]


@cache
def text_model(folder: str, dtype: str, device: str, backend: str) -> Any:
    model = load_model(folder, DTYPES[dtype], torch.device(device), True, backend)  # type: ignore[arg-type]
    self_test(model, True)
    model.eos = load_eos(folder)  # type: ignore[attr-defined]
    return model


def text_llm(way: Row) -> LLM:
    model = text_model(way["folder"], way["dtype"], way["device"], way["backend"])
    draft, k = ("ngram", 4) if way["drafter"] == "ngram" else (None, 0)
    memory = "2GiB" if way["device"] == "cuda" else "256MiB"
    return LLM(model, draft, k=k, max_batch=way["batch"], cache_memory=memory, dtype=way["dtype"], device=way["device"])


@cache
def stock_model(folder: str, dtype: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    model.generation_config.eos_token_id = None  # texts go on behind an end token, as with ignore_eos
    return model.to(device).eval()


def generated(way: Row, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy text, one prompt at a time: no padding."""
    model, texts = stock_model(way["folder"], way["dtype"], way["device"]), []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=way["device"])
        options = {"max_new_tokens": way["tokens"], "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def texts_part(args: argparse.Namespace) -> Iterator[Row]:
    """One row per way to run a model: how many texts equal the reference's."""
    found: dict[tuple[Any, ...], dict[int, list[int]]] = {}
    seconds: dict[tuple[Any, ...], float] = {}
    for row in in_parallel(args.workers, text_tasks(args)):
        way = (row["folder"], row["backend"], row["dtype"], row["temperature"], row["drafter"], row["batch"])
        found.setdefault(way, {}).update(enumerate(row["texts"], row["part"][0]))
        seconds[way] = seconds.get(way, 0.0) + row["seconds"]
        print(f"{row['part']} of {way}: {row['seconds']:.1f} s", flush=True)
        with Path(args.out).with_suffix(".jsonl").open("a") as file:  # a run that is cut short leaves what it had
            file.write(json.dumps(row) + "\n")
    for way, texts in sorted(found.items(), key=str):
        folder, backend, dtype, temperature, drafter, batch = way
        alone = ("plain", 64) if batch == 1 or dtype == "float32" else ("plain", 8)
        if (drafter, batch) == alone:
            continue
        reference = found[(*way[:4], *alone)]
        same = sum(reference.get(n) == text for n, text in texts.items())
        yield {
            "model": Path(folder).name, "backend": backend, "dtype": dtype, "drafter": drafter, "batch": batch,
            "temperature": temperature, "compared_with": f"{alone[0]}, batch {alone[1]}", "identical": same,
            "of": len(texts), "seconds": seconds[way],
        }  # fmt: skip


# table: what the result files prove, for docs/exactness.md


def table_part(args: argparse.Namespace) -> Iterator[Row]:
    """Markdown: hidden sizes at which no bit differed, by architecture, backend, device and type."""
    cells: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for file in args.results:
        for row in json.loads(Path(file).read_text())["rows"]:
            found = cells.setdefault((row["model"], row["backend"]), {})
            text = row["size"] if row["verdict"] == "proven" else f"{row['size']}: {row['verdict']}"
            found.setdefault((row["device"], row["dtype"]), []).append(text)
    columns = [(device, dtype) for device in ("cpu", "cuda") for dtype in ("float32", "bfloat16")]
    print("| architecture | backend | CPU float32 | CPU bfloat16 | GPU float32 | GPU bfloat16 |\n|" + "---|" * 6)
    for (model, backend), found in sorted(cells.items()):
        proofs = [", ".join(sorted(found.get(column, []), key=len)) for column in columns]
        print(f"| {model} | {backend} | " + " | ".join(proofs) + " |")
    yield {"architectures": len({model for model, _ in cells}), "rows": sum(map(len, cells.values()))}


# all parts


def in_parallel(workers: int, tasks: list[Callable[[], Any]]) -> Iterator[Any]:
    """Results as they come, from processes that keep what they have loaded."""
    if workers == 0:
        yield from (task() for task in tasks)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(task) for task in tasks]):
            yield done.result()


PARTS = {
    "rows": rows_part,
    "operations": operations_part,
    "heads": heads_part,
    "texts": texts_part,
    "table": table_part,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--names", nargs="+", choices=sorted(ZOO), help="these architectures only")
    parser.add_argument(
        "--models", nargs="+", default=[], help="folders, each with =transformers to force that backend"
    )
    parser.add_argument("--results", nargs="+", default=[], help="files that `rows` wrote")
    parser.add_argument("--prompts", default="../shared/data/prompts/spec_bench.jsonl")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--alone", type=int, default=100, help="prompts written one at a time")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: this one")
    args = parser.parse_args(arguments)
    begin = time.perf_counter()
    for row in collect(args.out, vars(args), PARTS[args.part](args)):
        print(f"[{time.perf_counter() - begin:6.1f}]", json.dumps({**row, "where": ""})[:400], flush=True)


if __name__ == "__main__":
    main()
