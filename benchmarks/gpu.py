"""Everything about the GPU in one run: floors, kernels, passes, exactness, whole texts, and transformers.

python -m benchmarks.gpu --out FOLDER [--parts kernels steps long exact speed sampling transformers] [--minutes 8]
    [--small] [--pairs bundled widened transformers] [--drafters model ngram clover] [--texts N] [--no-alone]
    [--prompt-tokens 100 180]

Part exact: --drafters runs the ways with these alone, --texts takes N prompts at most, --no-alone leaves out plain
decoding at batch 1 and without graphs, --prompt-tokens repeats prompts up to these lengths (24 to 64 if left out).
Results are written as they come, one JSON file per part. --small runs the whole script on tiny shapes, on any device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

import torch

from benchmarks.widen import read_checkpoint, widened_config, widened_model, widened_state
from faircopy import LLM, SamplingParams, bundled
from faircopy.bench.record import collect
from faircopy.bench.shapes import PAIR, SHAPES
from faircopy.model.loader import load_eos, load_model, load_tokenizer
from faircopy.model.selftest import self_test

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
Way = tuple[str, int | str, dict[str, Any], int]
Rows = Iterator[dict[str, Any]]
BEGIN = time.perf_counter()


def say(row: dict[str, Any]) -> None:
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", json.dumps(shown), flush=True)


class Session:
    """Models made once, and the deadline."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self._begin = args, time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = load_tokenizer(bundled.target())
        self._widened: tuple[Any, Any] | None = None
        self._stock: Any | None = None

    @property
    def late(self) -> bool:
        return time.perf_counter() - self._begin > 60 * self.args.minutes

    def prompts(self, count: int) -> list[list[int]]:
        texts = bundled.prompts()
        return [list(self.tokenizer.encode(texts[n % len(texts)]))[: 24 + n % 41] for n in range(count)]

    def widened(self) -> tuple[Any, Any]:
        if self._widened is None:
            shapes = (TINY, TINY) if self.args.small else tuple(SHAPES[name] for name in PAIR)
            kind = torch.float32 if self.device == "cpu" else torch.bfloat16
            pair = [
                widened_model(source, shape, dtype=kind, device=self.device)
                for source, shape in zip((bundled.target(), bundled.draft()), shapes, strict=True)
            ]
            for model in pair:
                model.eos = load_eos(bundled.target())  # type: ignore[attr-defined]
            self._widened = (pair[0], pair[1])
        return self._widened

    def llm(self, which: str, draft: str | None, **options: Any) -> LLM:
        if which == "widened":
            target, small = self.widened()
            own = small if draft == "model" else draft
            return LLM(target, own, tokenizer=self.tokenizer, **options)
        own = bundled.named(None if draft == "model" else draft) if draft in ("model", "clover") else draft
        if which == "transformers":
            target = self.stock()
            return LLM(target, own, tokenizer=self.tokenizer, device=self.device, dtype=NAMES[target.dtype], **options)
        return LLM(bundled.target(), own, device=self.device, **options)

    def stock(self) -> Any:
        """The bundled target on the transformers backend."""
        if self._stock is None:
            kind = torch.float32 if self.device == "cpu" else torch.bfloat16
            self._stock = load_model(bundled.target(), kind, torch.device(self.device), True, "transformers")
            self_test(self._stock, True)
        return self._stock


TINY = {
    "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4352, "tie_word_embeddings": True,
}  # fmt: skip


def kernels(session: Session) -> Rows:
    from faircopy.bench.kernels import rows

    return rows()


def steps(session: Session) -> Rows:
    from faircopy.bench.steps import rows

    return rows(names=tuple(session.args.shapes), late=lambda: session.late)


def long(session: Session) -> Rows:
    from faircopy.bench.steps import rows

    return rows(names=tuple(session.args.shapes), late=lambda: session.late, long=True, sweep=True)


def params(count: int, tokens: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens, temperature=temperature, seed=n, ignore_eos=True) for n in range(count)]


MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.8, "logit_bias": {5: 2.0, 9: -100.0}, "bad_words": ("the dog", "Tom")},
    {},
    {"temperature": 0.8},
)


def wishes(count: int, tokens: int) -> dict[str, list[SamplingParams]]:
    """What requests ask for: all greedy, all with one temperature, or all kinds of parameters in one batch."""
    mixed = [SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True, **MIXED[n % len(MIXED)]) for n in range(count)]
    return {"greedy": params(count, tokens, 0.0), "T .8": params(count, tokens, 0.8), "mixed": mixed}


ALONE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("batch 1", {"max_batch": 1}),
    ("eager", {"max_batch": 16, "graphs": False}),
)
PAIRS = {"widened": (128, 12, 96), "bundled": (512, 32, 256), "transformers": (16, 4, 24)}  # prompts, alone, tokens


def exact(session: Session) -> Rows:
    """Texts of every way to run against plain decoding; plain decoding in a batch against plain decoding alone."""
    args = session.args
    for which, (count, alone, tokens) in ((which, PAIRS[which]) for which in args.pairs):
        count, alone, tokens = (8, 2, 12) if args.small else (min(count, args.texts), alone, tokens)
        if session.late:
            return
        prompts = session.prompts(count)
        if args.prompt_tokens is not None:
            least, most = args.prompt_tokens
            prompts = [(prompt * most)[: least + n % (most - least + 1)] for n, prompt in enumerate(prompts)]
        wanted = wishes(count, tokens)
        llm = session.llm(which, None, k=0, max_batch=64)
        plain = {kind: texts(llm, prompts, asked) for kind, asked in wanted.items()}
        for about, options in ALONE if args.alone else ():
            llm = session.llm(which, None, k=0, **options)
            for kind, asked in wanted.items():
                other = texts(llm, prompts[:alone], asked[:alone])
                yield verdict(which, kind, {"plain": f"batch 64 against {about}"}, other, plain[kind][:alone])
        for drafter, k, options, share in (way for way in ways(which) if way[0] in args.drafters):
            if session.late:
                return
            part = max(1, count // share)
            llm = session.llm(which, drafter, k=k, **options)
            for kind, asked in wanted.items():
                got = texts(llm, prompts[:part], asked[:part])
                how = {"drafter": drafter, "k": k, **options, **counts(llm)}
                yield verdict(which, kind, how, plain[kind][:part], got)
        del llm


def ways(which: str) -> list[Way]:
    """Drafter, k, options, and the share of the prompts that is run."""
    squeezed = {"bundled": "12MiB", "widened": "1000MiB", "transformers": "12MiB"}[which]
    if which == "transformers":
        return [
            ("model", 3, {"max_batch": 32}, 1),
            ("ngram", 4, {"max_batch": 16, "cache_memory": squeezed, "chunk": 96}, 1),
        ]
    auto: Way = ("model", "auto", {"max_batch": 64}, 2)
    squeeze: Way = ("model", 3, {"max_batch": 64, "cache_memory": squeezed, "chunk": 96}, 2)
    some: list[Way] = [
        ("model", 5, {"max_batch": 64}, 1),
        ("model", 2, {"max_batch": 32}, 2),
        ("model", 8, {"max_batch": 8}, 8),
        ("ngram", 4, {"max_batch": 64}, 2),
    ]
    more: list[Way] = [
        ("model", 4, {"max_batch": 1}, 32),
        ("ngram", 7, {"max_batch": 8}, 16),
        ("clover", 4, {"max_batch": 64}, 4),
        ("clover", 12, {"max_batch": 16}, 8),
        ("clover", "auto", {"max_batch": 32}, 4),
        ("clover", "auto", {"max_batch": 32, "share_nodes": True}, 4),
        ("ngram", "auto", {"max_batch": 64}, 4),
    ]
    return [squeeze, *some, auto] if which == "widened" else [squeeze, *more, *some, auto]


def texts(llm: LLM, prompts: list[list[int]], wanted: list[SamplingParams]) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(prompts, wanted, progress=False)]


def first_launches() -> list[str]:
    """Kernels launched for the first time so far, once per variant: after warm_up() there should be no more."""
    if not torch.cuda.is_available():
        return []
    from faircopy.kernels.gpu.launch import first_launches as names

    return names


def counts(llm: LLM) -> dict[str, Any]:
    numbers = llm.metrics()
    wanted = ("steps", "captured_steps", "prompt_rows", "acceptance", "preemptions", "tokens_per_step")
    return {name: numbers[name] for name in wanted}


def verdict(which: str, kind: str, about: dict[str, Any], a: list[list[int]], b: list[list[int]]) -> dict[str, Any]:
    """How many texts are the same; of those that are not, the number of the prompt and of the first other token."""
    others = [n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    places = [(n, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a[n], b[n])))) for n in others]  # noqa: B905
    return {
        "pair": which, "parameters": kind, **about, "identical": len(a) - len(others), "of": len(a),
        **({"others": places} if places else {}),
    }  # fmt: skip


def speed(session: Session) -> Rows:
    """Tokens a second of the widened pair, plain and drafted, and the device's idle time between steps."""
    small = session.args.small
    tokens = 10 if small else 96
    for batch in (1, 8) if small else (1, 8, 32, 64):
        prompts, wanted = session.prompts(batch), params(batch, tokens, 0.0)
        for drafter, k in ((None, 0), ("model", 4 if batch <= 8 else 3), *((("ngram", 3),) if batch == 8 else ())):
            if session.late:
                return
            llm = session.llm("widened", drafter, k=k, max_batch=batch, cache_memory="16MiB" if small else "24GiB")
            llm.warm_up()
            texts(llm, prompts, params(batch, 24, 0.0))
            clock = Gaps(llm)
            yield {
                "pair": "widened", "batch": batch, "drafter": drafter or "none", "k": k,
                "tokens_per_s": timed(llm, prompts, wanted), "steps": llm.metrics()["steps"],
                **clock.summary(), **{n: counts(llm)[n] for n in ("acceptance", "tokens_per_step")},
            }  # fmt: skip
            del llm, clock


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T .8": {"temperature": 0.8},
    "top-p .95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 20": {"temperature": 0.8, "top_k": 20},
    "top-k 20, top-p .95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "min-p .05": {"temperature": 0.8, "min_p": 0.05},
    "repetition 1.1": {"repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
}


def sampling(session: Session) -> Rows:
    """Tokens a second with each kind of sampling parameter: prompts of 300 tokens, 128 new ones."""
    small = session.args.small
    length, tokens = (24, 8) if small else (300, 128)
    for batch in (1, 2) if small else (8, 64, 32, 1):
        prompts = [(prompt * 20)[:length] for prompt in session.prompts(batch)]
        for drafter, k in ((None, 0), ("model", 4)):
            llm = session.llm("widened", drafter, k=k, max_batch=batch, cache_memory="16MiB" if small else "24GiB")
            texts(llm, prompts, params(batch, 4, 0.0))
            for name, options in KINDS.items():
                if session.late:
                    return
                wanted = [SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True, **options) for n in range(batch)]
                texts(llm, prompts, [replace(one, max_tokens=4) for one in wanted])
                before = llm.metrics()
                rate = timed(llm, prompts, wanted)
                steps = llm.metrics()["steps"] - before["steps"]
                yield {
                    "pair": "widened", "batch": batch, "drafter": drafter or "none", "k": k, "parameters": name,
                    "tokens_per_s": rate, "steps": steps, "captured": llm.explain()["captured_steps"],
                }  # fmt: skip
            del llm


def timed(llm: LLM, prompts: list[list[int]], wanted: list[SamplingParams]) -> float:
    synchronize()
    begin = time.perf_counter()
    count = sum(map(len, texts(llm, prompts, wanted)))
    synchronize()
    return count / (time.perf_counter() - begin)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Gaps:
    """Marks the beginning and end of each captured step on the device's own clock."""

    def __init__(self, llm: LLM) -> None:
        self.marks: list[tuple[Any, Any]] = []
        if llm.engine.captured is not None and torch.cuda.is_available():
            llm.engine.captured.around_steps(self._marked)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        yield
        pair[1].record()
        self.marks.append(pair)

    def summary(self) -> dict[str, float]:
        """Medians over the steps in the middle, in milliseconds."""
        if len(self.marks) < 8:
            return {}
        torch.cuda.synchronize()
        inner = self.marks[2:-3]
        gaps = sorted(a[1].elapsed_time(b[0]) for a, b in pairwise(inner))
        times = sorted(a.elapsed_time(b) for a, b in inner)
        gap, step = gaps[len(gaps) // 2], times[len(times) // 2]
        return {"step_ms": step, "gap_ms": gap, "gap_share": gap / (gap + step)}


def transformers(session: Session) -> Rows:
    """The same weights in transformers: generate() in a batch, and assistant_model= alone."""
    shapes = (TINY, TINY) if session.args.small else tuple(SHAPES[name] for name in PAIR)
    target, draft = (
        stock(s, c, session.device) for s, c in zip((bundled.target(), bundled.draft()), shapes, strict=True)
    )
    tokens = 8 if session.args.small else 24
    for batch in (1, 8) if session.args.small else (1, 8, 32, 64):
        if session.late:
            return
        yield {"generate": "batched", "batch": batch, "tokens_per_s": generated(session, target, batch, tokens)}
    yield {
        "generate": "assistant_model", "batch": 1,
        "tokens_per_s": generated(session, target, 1, tokens, assistant_model=draft),
    }  # fmt: skip


def stock(source: str, shape: dict[str, Any], device: str) -> Any:
    from transformers import AutoModelForCausalLM

    state, config = read_checkpoint(source)
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    wide = widened_config(config, shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(wide, dtype=kind)
    model.load_state_dict(widened_state(state, config, shape, dtype=kind, device=device), assign=True, strict=False)
    model.tie_weights()
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(wide)  # its buffers are in no state
    return model.eval()


def generated(session: Session, model: Any, batch: int, tokens: int, **options: Any) -> float:
    prompts = [prompt[:24] for prompt in session.prompts(batch)]
    ids = torch.tensor(prompts, device=session.device)
    ask = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens,
        "min_new_tokens": tokens, "pad_token_id": 0, **options,
    }  # fmt: skip
    with torch.no_grad():
        model.generate(ids, **{**ask, "max_new_tokens": 3, "min_new_tokens": 3})
        synchronize()
        begin = time.perf_counter()
        out = model.generate(ids, **ask)
        synchronize()
    return (out.shape[1] - ids.shape[1]) * batch / (time.perf_counter() - begin)


PARTS = {
    "kernels": kernels,
    "steps": steps,
    "long": long,
    "exact": exact,
    "speed": speed,
    "sampling": sampling,
    "transformers": transformers,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="no new measurement is begun after this")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(PAIR), help="for steps")
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="for exact")
    parser.add_argument("--drafters", nargs="+", default=["model", "ngram", "clover"], help="for exact")
    parser.add_argument("--texts", type=int, default=512, help="for exact, of each kind at most")
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="for exact")
    parser.add_argument("--prompt-tokens", nargs=2, type=int, metavar=("LEAST", "MOST"), help="for exact")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    session = Session(args)
    for part in args.parts:
        if not session.late:
            for row in collect(f"{args.out}/gpu-{part}.json", vars(args), PARTS[part](session)):
                say(row)


if __name__ == "__main__":
    main()
