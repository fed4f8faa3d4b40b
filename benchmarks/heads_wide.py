"""Trained heads at the cost of a large model: the bundled target widened to Qwen3-8B's shape, heads of that shape too.

python -m benchmarks.heads_wide --work /tmp/faircopy-heads/bundled --out $OUT [--minutes 4]

Takes the heads that benchmarks.heads left in its work folder. A widened target computes the small one's states in its
first dimensions, so the small head guesses from those as it was trained to, while a random head of the wide shape runs
beside it over everything and is not listened to: the texts and acceptance of the small one at the cost of both.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.heads import cycle, folder_of, name_of, speeds, tidy, timed
from benchmarks.widen import widened_model
from faircopy.bench.record import write
from faircopy.bench.shapes import SHAPES
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.folder import METHODS, load_head
from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.drafters.trees import Tree
from faircopy.model.base import FINAL, Model, TokenWeights
from faircopy.model.loader import load_model


class WidenedHead(Head):
    """Says what the small head says, and costs what the wide one costs."""

    def __init__(self, small: Head, wide: Head) -> None:
        super().__init__(wide.config, wide_wants(small, wide), len(wide.layers))
        self.layers, self.deep = [*wide.layers, *small.layers], small.deep
        self.small, self.wide = small, wide
        self._hidden = wide.config.shape.hidden

    def bind(self, weights: TokenWeights) -> Self:
        self.wide.bind(weights)
        return super().bind(weights)

    def serve(self) -> Self:
        self.small.serve()
        self.wide.serve()
        return self.eval()

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        wide = self.wide.read(states, tokens, rows)
        inner = self.small.config.shape.hidden
        parts = [part[..., :inner] for part in states.split(self._hidden, -1)]
        return torch.cat([wide, self.small.read(torch.cat(parts, -1), tokens, self._inner(rows))], -1)

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        cost = self.wide.step(level, memory[..., : self._hidden], tokens, rows)
        guess = self.small.step(level, memory[..., self._hidden :], tokens, rows and self._inner(rows))
        logits = F.pad(guess.logits, (0, self.vocab - guess.logits.shape[-1]), value=-torch.inf)
        return Guess(logits, torch.cat([cost.memory, guess.memory], -1), guess.out)

    def tree(self, max_nodes: int) -> Tree:
        return self.small.tree(max_nodes)

    def _inner(self, rows: Rows) -> Rows:
        """The small head's layers lie behind the wide one's, and attention is scaled for the wide ones."""
        behind = len(self.wide.layers)
        factor = (self.config.shape.head_dim / self.small.config.shape.head_dim) ** 0.5
        return Rows(rows.positions, lambda layer, q, k, v: rows.attend(layer + behind, q * factor, k, v))


def wide_wants(small: Head, wide: Head) -> tuple[int, ...]:
    """Where the wide target has the states that the small head wants."""
    layers, more = small.config.depth, wide.config.depth
    return tuple(FINAL if want == FINAL else want * more // layers for want in small.wants)


def wide_head(small: Head, shape: dict[str, Any], target: Model, **changes: Any) -> Head:
    """A random head at the wide shape, of the same method unless `changes` name another."""
    sizes = BlockShape(
        hidden=shape["hidden_size"],
        heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        intermediate=shape["intermediate_size"],
        context=target.context,
    )
    options = dict(small.config.options)
    if options.pop("words", None) or options.get("draft_vocab"):
        options["draft_vocab"] = min(32000, shape["vocab_size"])
    widths = {"shape": sizes, "vocab": shape["vocab_size"], "depth": shape["num_hidden_layers"], "options": options}
    config: HeadConfig = replace(small.config, **{**widths, **changes})
    with target.device:
        return METHODS[config.method](config).to(target.dtype)


def drafter(args: argparse.Namespace, variant: str, small_target: Model, target: Model) -> Any:
    folder = str(args.work / folder_of(variant))
    if variant == "draft":
        kind = json.loads(args.draft_shape) if args.draft_shape else SHAPES["qwen3-0.6b"]
        return widened_model(folder, kind, dtype=target.dtype, device=target.device, exact=args.exact)
    small = load_head(folder, small_target).to(target.dtype)
    return WidenedHead(small, wide_head(small, shape_of(args), target)).bind(target.token_weights())


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    return json.loads(args.shape) if args.shape else SHAPES["qwen3-8b"]


def measure(
    args: argparse.Namespace,
    name: str,
    target: Model,
    draft: Any,
    k: int,
    plain: dict[int, list[list[int]]],
    rows: list[dict[str, Any]],
) -> None:
    """One drafter at every batch size; plain decoding comes first, and its texts are kept to compare with."""
    prompts = torch.load(args.work / "own.pt", weights_only=True)["prompts"]
    for batch in args.batches:
        if time.time() > args.deadline:
            return
        tidy(target.device)
        options = {"cache_memory": args.memory, "device": args.device, "exact": args.exact}
        config = EngineConfig(k=k, max_batch=batch, prefix_reuse=False, chunk=8192, **options)
        engine = build_engine(target, draft=draft, config=config)
        done = timed(engine, cycle(prompts, batch), args.new)
        same = sum(a == b for a, b in zip(done.texts, plain.setdefault(batch, done.texts), strict=True))
        facts = {"rate": round(done.rate, 1), "per_step": round(done.per_step, 3), "identical": same}
        rows.append({"variant": name, "batch": batch, **facts})
        print(json.dumps(rows[-1]), flush=True)
        write(str(args.out / "heads-wide.json"), {n: str(v) for n, v in vars(args).items()}, rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/target")
    parser.add_argument("--work", type=Path, default=Path("/tmp/faircopy-heads/bundled"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 48])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--shape", help="JSON of another wide configuration")
    parser.add_argument("--draft-shape", help="JSON of the wide draft's")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.deadline = time.time() + 60 * args.minutes
    kind, device = getattr(torch, args.dtype), torch.device(args.device)
    rows: list[dict[str, Any]] = []
    plain: dict[int, list[list[int]]] = {}
    small = load_model(args.target, kind, device)
    target = widened_model(args.target, shape_of(args), dtype=kind, device=device, exact=args.exact)
    for variant, k, tree in speeds():
        if time.time() > args.deadline or (variant and not (args.work / folder_of(variant) / "config.json").exists()):
            continue
        draft = None if variant is None else drafter(args, variant, small, target)
        if tree == "chain" and isinstance(draft, Head):
            draft.tree = Tree  # type: ignore[method-assign, assignment]
        measure(args, name_of(variant, k, tree), target, draft, k, plain, rows)


if __name__ == "__main__":
    main()
