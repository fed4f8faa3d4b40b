"""Step 3: the target, from scratch on the stories; then what it says on held-out prompts against the training text."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from faircopy.train.data import Windows, load_tokens, overlap, unseen
from faircopy.train.language import NextToken, held_out_loss, speed_up
from faircopy.train.llama import Llama, Shape, fresh, load_llama, save_llama
from faircopy.train.loop import Settings, train
from faircopy.train.sampler import rows_of, sample
from faircopy.train.tokenizer import PAD, end_id, save_tokenizer
from runs.bundled.common import note, on_gpu, prepare, read_stories, talker, time_left, training_arguments

PROMPT_LENGTHS = (16, 24, 32, 48, 64)  # tokens, the end token in front included


def main(argv: list[str] | None = None) -> None:
    parser = training_arguments(__doc__ or "", seconds=210.0)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--prompts", type=int, default=400, help="held-out prompts to keep for measuring")
    args = parser.parse_args(argv)
    prepare(args)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    corpus, heldout = (load_tokens(args.work / f"{name}.bin", args.device) for name in ("train", "heldout"))
    network = fresh(shape_of(args, tokenizer.get_vocab_size()), args.seed).to(args.device)
    learned = fit(network, corpus, args)
    folder = args.work / "target"
    save(network, tokenizer, folder)
    loss = held_out_loss(network, held_out_batches(heldout, args.length), on_gpu(args))
    prompts = held_out_prompts(tokenizer, args.work / "heldout.jsonl", corpus, args.prompts, args.seed)
    (args.work / "prompts.json").write_text(json.dumps(prompts))
    share = echoes(folder, prompts, corpus, end_id(tokenizer), args.device)
    stories = [row.ids for row in tokenizer.encode_batch(list(read_stories(args.work / "heldout.jsonl")))]
    shares = {"continuations_in_training_text": share, "held_out_stories_in_training_text": overlap(stories, corpus)}
    note(args.work, "target", parameters=network.size, heldout_loss=loss, prompts=len(prompts), **shares, **learned)


def shape_of(args: argparse.Namespace, vocab: int) -> Shape:
    return Shape(
        vocab=vocab,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        intermediate=args.intermediate,
        context=512,
    )


def fit(network: Llama, corpus: Tensor, args: argparse.Namespace) -> dict[str, float | bool | int]:
    """Train; returns what the card says about it."""
    task, batches = NextToken(network), Windows(corpus, args.length, args.rows, args.seed)
    wanted = on_gpu(args) if args.compile is None else args.compile
    compiled = wanted and speed_up(task, batches.batch(0), on_gpu(args))
    seconds = time_left(args)
    settings = Settings(
        steps=args.steps, seconds=seconds, lr=args.lr, warmup=0.03, bf16=on_gpu(args), log_every=20, seed=args.seed
    )
    done = train(task, batches, settings, args.work / "logs" / "target.jsonl", watch=talker("target"))
    return {
        "steps": done.step,
        "tokens": done.tokens,
        "epochs": done.step / batches.per_epoch,
        "train_seconds": round(done.seconds, 1),
        "last_loss": done.loss,
        "compiled": compiled,
        "lr": args.lr,
        "rows": args.rows,
        "length": args.length,
        "seed": args.seed,
    }


def save(network: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """A complete Hugging Face folder, but for the card."""
    end, pad = end_id(tokenizer), tokenizer.token_to_id(PAD)
    save_llama(network, folder, bos_token_id=end, eos_token_id=end, pad_token_id=pad)
    save_tokenizer(tokenizer, folder, network.shape.context)


def held_out_batches(tokens: Tensor, length: int, rows: int = 32, most: int = 64) -> list[Tensor]:
    rows = max(1, min(rows, (len(tokens) - length - 1) // length))
    windows = Windows(tokens, length, rows, seed=0)
    return [windows.batch(index) for index in range(min(most, windows.per_epoch))]


def held_out_prompts(tokenizer: Tokenizer, path: Path, corpus: Tensor, most: int, seed: int) -> list[list[int]]:
    """Beginnings of held-out stories that nowhere occur in the training text."""
    lengths, chosen = random.Random(seed), []
    for row in tokenizer.encode_batch(list(read_stories(path))[: 4 * most]):
        cut = lengths.choice(PROMPT_LENGTHS)
        if len(row.ids) > 2 * cut:
            chosen.append(row.ids[:cut])
    return unseen(chosen, corpus)[:most]


def echoes(folder: Path, prompts: list[list[int]], corpus: Tensor, end: int, device: str) -> float:
    """The share of 13-grams in the target's greedy continuations (128 tokens) that the training text holds."""
    if not prompts:
        return 0.0
    target = load_llama(folder, torch.float32, device)
    texts = rows_of(sample(target, prompts, max(map(len, prompts)) + 128, (end,)))
    new = [text[len(prompt) : len(prompt) + 128] for text, prompt in zip(texts, prompts, strict=True)]
    return overlap(new, corpus)


if __name__ == "__main__":
    main()
