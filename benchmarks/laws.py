"""Scylla's laws on one GPU: as many heads of a grid as fit some minutes, the most important ones first.

python -m benchmarks.laws --target models/target --device cuda --minutes 6 --out $OUT/laws-bundled
python -m benchmarks.laws --target DIR --prepare carry/laws.npz --text FILE... --prompts FILE   # here, with a tokenizer
python -m benchmarks.laws --target DIR --given carry/laws.npz --device cuda --minutes 8 --out $OUT/laws-smollm2

Without --given the target (a small Llama) writes the training text and the prompts itself, and T counts tokens of that
text. With --given T counts tokens of raw text, and behind them every head reads the same answers: the target writes
questions behind its chat template's beginning, and answers them. Prompts that heads are measured on are in the file.

--part 1/2 and 2/2 in two processes, each with its own OUT and the same WORK, train a grid on one device sooner: one
trains while the other measures. --only names single points. `faircopy laws fit` takes all their files. `prompts` in a
result's settings tells whether the held-out texts were the same.

OUT/results.jsonl gets a line as each head ends; a run with the same file in OUT goes on behind it. OUT/best is the best
head so far, and OUT/times.json has the time of a level by layers and rows. Texts are kept in WORK/texts.pt: all heads
of one results.jsonl must be trained and measured on the same ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faircopy.bench.record import write
from faircopy.drafters.folder import new_head
from faircopy.drafters.heads import Guess, Head
from faircopy.laws.acceptance import HeldOutTexts, held_out_texts, noise_keys
from faircopy.laws.plan import name_of
from faircopy.laws.points import Point, grid
from faircopy.laws.run import DEEPER, GridRun
from faircopy.laws.states import CachedText
from faircopy.laws.timing import level_times
from faircopy.model.hidden import stock_token_weights
from faircopy.model.loader import load_stock, load_tokenizer
from faircopy.train.corpus import read_documents
from faircopy.train.heads import Teacher
from faircopy.train.llama import Llama, load_llama
from faircopy.train.losses import HeadObjective, Lesson, known_rows, objective_of, teaching_of
from faircopy.train.sampler import flat, own_text, rows_of, sample

TEMPERATURE = 0.8
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # of Spec-Bench, besides MT-Bench's
HELD_OUT_SEED = 1_000_003
LAST = 15.0  # seconds kept for what comes behind the grid
LETTERS_PER_TOKEN = 4.5  # a little more than English and code have


def prepare(args: argparse.Namespace) -> None:
    """Tokens of raw text, and prompts in the target's chat template, in one file that needs no tokenizer."""
    tokenizer = load_tokenizer(args.target)
    kept = []
    for file, share in zip(args.text, args.shares, strict=True):
        kept.append(_encoded(tokenizer, read_documents([file]).texts, int(args.text_tokens * share)))
    windows = np.concatenate([part[: len(part) // args.length * args.length].reshape(-1, args.length) for part in kept])
    text = np.random.default_rng(0).permutation(windows).reshape(-1)
    asking = {tuple(_chat(tokenizer, prompt)): task for prompt, task in _questions(args.prompts)}
    prompts = [prompt for prompt in asking if len(prompt) <= args.longest]
    asked = tokenizer.encode("?")[-1:]
    around = _chat(tokenizer, "?")
    begin, answer = around[: around.index(asked[0])], around[around.index(asked[0]) + 2 :]  # without the end of a turn
    np.savez_compressed(
        args.prepare,
        text=text.astype(np.uint16),
        prompts=np.concatenate([np.array(prompt, np.uint16) for prompt in prompts]),
        lengths=np.array([len(prompt) for prompt in prompts]),
        tasks=np.array([asking[prompt] for prompt in prompts]),
        begin=np.array(begin),
        answer=np.array(answer),
    )
    print(f"{len(text)} tokens of text, {len(prompts)} prompts: {args.prepare}")


def _questions(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The first turns of Spec-Bench's or MT-Bench's questions, each with its task."""
    for file in files:
        for line in map(json.loads, file.read_text().splitlines()):
            task = line.get("category", file.stem)
            yield line["turns"][0], task if task in TASKS else "mt_bench"


def _encoded(tokenizer: Any, texts: Sequence[str], count: int) -> np.ndarray:
    """About `count` tokens: the same share of every text's letters, from its beginning."""
    letters = sum(map(len, texts))
    part = min(1.0, count * LETTERS_PER_TOKEN / letters)
    found = [tokenizer.encode(text[: int(part * len(text))], verbose=False) for text in texts]
    return np.concatenate([np.array(ids, np.uint16) for ids in found])[:count]


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))


class Texts:
    """Training text, answers and held-out texts of a target, made once and kept beside the results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._device = args, torch.device(args.device)
        kept, part = args.work / "texts.pt", args.work / "texts.part"
        if not kept.exists():
            torch.save(self._make(), part)
            part.replace(kept)
        self.tokens: dict[str, Any] = torch.load(kept, weights_only=True)

    def _make(self) -> dict[str, Any]:
        args = self._args
        network = load_llama(args.target, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
        given = dict(np.load(args.given)) if args.given else None
        found = self._own(network) if given is None else self._given(network, given)
        for name, temperature in (("greedy", 0.0), ("sampled", TEMPERATURE)):
            found[name] = self._continued(network, found["prompts"], temperature)
        return found

    def _own(self, network: Llama) -> dict[str, Any]:
        """Everything written by the target, from nothing."""
        args, ends = self._args, self._ends(network)
        size = (args.own_rows, min(args.own_length, network.shape.context))
        text = own_text(network, ends[0], ends, *size, args.own_seconds, 7)
        begun = sample(network, [[ends[0]]] * args.prompts_wanted, 48, ends, 1.0, 0.01, HELD_OUT_SEED)
        prompts = [row[: 8 + n % 32] for n, row in enumerate(rows_of(begun))]
        return {"text": text, "prompts": [p for p in prompts if p[-1] not in ends[1:] or len(p) == 1]}

    def _given(self, network: Llama, given: dict[str, np.ndarray]) -> dict[str, Any]:
        """Raw text and prompts from a file; the answers are the target's own."""
        args, ends = self._args, self._ends(network)[1:]
        begin, answer = given["begin"].tolist(), given["answer"].tolist()
        parts, total, seed = list[Tensor](), 0, 0
        while total < args.answer_tokens:
            rows = min(args.own_rows, 1 + args.answer_tokens // 2)  # many questions do not end
            asked = rows_of(sample(network, [begin] * rows, len(begin) + 64, ends, 1.0, 0.02, seed))
            chats = [[*row, *answer] for row in asked if row[-1] in ends]
            length = len(begin) + 64 + len(answer) + args.answer_length
            for temperature, mine in ((0.0, chats[::2]), (TEMPERATURE, chats[1::2])):
                if mine:
                    parts.append(flat(sample(network, mine, length, ends, temperature, 0.0, seed), ()))
                    total += len(parts[-1])
            seed += 1
            print(f"answers: {total} tokens", flush=True)
        ids, places = given["prompts"].astype(np.int64), np.cumsum(given["lengths"])[:-1]
        prompts = [part.tolist() for part in np.split(ids, places)][: args.prompts_wanted]
        text = torch.from_numpy(given["text"].astype(np.int32))
        return {"text": text, "answers": torch.cat(parts).int()[: args.answer_tokens], "prompts": prompts}

    def _continued(self, network: Llama, prompts: list[list[int]], temperature: float) -> list[list[int]]:
        """What the target writes behind the prompts, with the engine's noise; shortest first, in batches."""
        args, ends = self._args, self._ends(network)[1:]
        order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
        found: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), args.continued):
            part = order[start : start + args.continued]
            begun = [prompts[n] for n in part]
            length = max(map(len, begun)) + args.new
            keys = noise_keys(part, length).to(self._device) if temperature else None
            rows = rows_of(sample(network, begun, length, ends, temperature, keys=keys))
            for n, row in zip(part, rows, strict=True):
                found[n] = row[: len(prompts[n]) + args.new]
        return found

    def _ends(self, network: Llama) -> tuple[int, ...]:
        """The token that begins a text, then those that end one."""
        config = json.loads((Path(self._args.target) / "config.json").read_text())
        return (config["bos_token_id"], config["eos_token_id"])

    def cached(self, name: str, teacher: Teacher, most: int) -> CachedText | None:
        """The first tokens of a text; None: there is no such text."""
        tokens = self.tokens.get(name)
        return None if tokens is None else CachedText(teacher, tokens[:most].to(self._device), self._args.length)

    def held_out(self, name: str, teacher: Teacher, temperature: float) -> HeldOutTexts:
        prompts, rows = self.tokens["prompts"], self.tokens[name]
        return held_out_texts(prompts, rows, teacher, self._device, temperature)


def part_of(points: list[Point], part: int, parts: int) -> list[Point]:
    """One of some parts of about the same cost, in the grid's order; the longest point is in the first one."""
    costs, mine = [0.0] * parts, set[Point]()
    for point in sorted(points, key=_cost, reverse=True):
        least = costs.index(min(costs))
        costs[least] += _cost(point)
        mine |= {point} if least == part - 1 else set()
    return [point for point in points if point in mine]


def _cost(point: Point) -> float:
    return point.tokens * (1 + DEEPER * (point.layers - 1))


def compiled(objective: HeadObjective, rows: int, length: int, head: Head) -> HeadObjective:
    """The same loss in one kernel: with a large vocabulary most of a step is reading and writing logits.

    It is tried on tensors of a training's size first; where it cannot be compiled, the loss stays as it is.
    """
    fast = torch.compile(objective.level_loss, dynamic=False)
    begin, hidden = time.time(), head.config.shape.hidden
    out = torch.randn(rows, length - 1, hidden, device="cuda", requires_grad=True)
    logits = torch.zeros(rows, length - 1, head.vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(rows, length, device="cuda", dtype=torch.int64)
    final = torch.randn(rows, length, hidden, device="cuda")
    wanted = torch.zeros(rows, length, head.vocab, device="cuda", dtype=torch.bfloat16)
    guess, taught = known_rows(Guess(logits, out, out)), teaching_of(Lesson(tokens, final, wanted, final), 0)
    try:
        with torch.autocast("cuda", torch.bfloat16):
            fast(guess, taught).backward()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler may raise
        print(f"the loss is not compiled: {error}", flush=True)
        return objective
    print(f"compiled the loss in {time.time() - begin:.1f} s", flush=True)
    return replace(objective, level_loss=fast)


def run(args: argparse.Namespace) -> None:
    deadline = time.time() + 60 * args.minutes - LAST
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    device, cuda = torch.device(args.device), args.device == "cuda"
    teacher = Teacher(load_stock(args.target, torch.bfloat16 if cuda else torch.float32, device))
    begin = time.time()
    texts = Texts(args)
    budgets = [args.smallest << n for n in args.budgets]
    points = grid(args.smallest, args.doublings, args.depths, budgets, range(args.seeds))
    mine = [point for point in part_of(points, *args.part) if not args.only or point in args.only]
    text = texts.cached("text", teacher, max(point.tokens for point in mine))
    assert text is not None
    print(f"texts: {text.windows.numel()} tokens, {time.time() - begin:.1f} s", flush=True)
    held_out = [texts.held_out("greedy", teacher, 0.0), texts.held_out("sampled", teacher, TEMPERATURE)]
    print(f"held out: {len(held_out[0].begins)} prompts, {time.time() - begin:.1f} s", flush=True)
    grid_run = GridRun(
        target=args.name or name_of(args.target), folder=args.target, teacher=teacher, text=text,
        answers=texts.cached("answers", teacher, args.answer_tokens), held_out=held_out, out=args.out, rows=args.rows,
        lr=args.lr, bf16=cuda,
    )  # fmt: skip
    if args.compile:
        head = new_head("scylla", args.target, stock_token_weights(teacher.stock))
        fast = compiled(objective_of(head), args.rows, args.length, head)
        grid_run.prepare = lambda objective: fast
    grid_run.run(points, deadline, lambda line: print(f"{time.time() - begin:6.1f} s  {line}", flush=True), mine)
    if args.part[0] == 1:
        rows = level_times(args.target, stock_token_weights(teacher.stock), args.depths, device)
        write(str(args.out / "times.json"), {"target": grid_run.target}, rows)


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def _point(text: str) -> Point:
    tokens, layers, seed = map(int, text.split(":"))
    return Point(tokens, layers, seed)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/target", help="folder of a small Llama")
    parser.add_argument("--name", help="of the target in the results, if not its folder's")
    parser.add_argument("--out", type=Path, default=Path("faircopy-laws"))
    parser.add_argument("--work", type=Path, help="OUT if left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--given", type=Path, help="a file that --prepare wrote")
    parser.add_argument("--prepare", type=Path, help="write such a file and stop")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="with --prepare: raw text")
    parser.add_argument("--shares", type=float, nargs="+", default=[], help="with --prepare: of each file of --text")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="with --prepare: prompts to measure on")
    parser.add_argument("--text-tokens", type=int, default=32 << 20)
    parser.add_argument("--longest", type=int, default=384, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rows", type=int, default=16, help="windows of a batch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--smallest", type=int, default=1 << 18, help="tokens of the smallest point")
    parser.add_argument("--doublings", type=int, default=7)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 3, 6])
    parser.add_argument("--budgets", type=int, nargs="+", default=[3, 5], help="doublings at which depths are trained")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", type=_part, default=(1, 1), help="of the grid, such as 2/3")
    parser.add_argument(
        "--only", type=_point, nargs="+", default=[], help="points such as 8388608:1:2 (tokens:layers:seed)"
    )
    parser.add_argument("--new", type=int, default=64, help="tokens behind a prompt")
    parser.add_argument("--prompts-wanted", type=int, default=384)
    parser.add_argument("--own-rows", type=int, default=4096)
    parser.add_argument("--own-length", type=int, default=256)
    parser.add_argument("--own-seconds", type=float, default=40.0)
    parser.add_argument("--answer-tokens", type=int, default=2 << 20)
    parser.add_argument("--answer-length", type=int, default=192)
    parser.add_argument("--continued", type=int, default=256, help="prompts continued at once")
    parser.add_argument("--compile", action="store_true", help="compile the loss: for large vocabularies")
    args = parser.parse_args(argv)
    args.work = args.work or args.out
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length; the sampler has hundreds
    if args.prepare:
        prepare(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
