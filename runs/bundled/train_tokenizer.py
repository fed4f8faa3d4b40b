"""Step 2: a byte-level BPE tokenizer from part of the stories, and all stories as flat token files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from tokenizers import Tokenizer

from faircopy.train.data import pack
from faircopy.train.tokenizer import end_id, save_tokenizer, train_bpe
from runs.bundled.common import arguments, file_hash, in_chunks, note, prepare, read_stories


def encoded(tokenizer: Tokenizer, path: Path) -> Iterator[list[int]]:
    """Every story begins with the end token; one more closes the last."""
    for chunk in in_chunks(read_stories(path), 20_000):
        yield list(chain.from_iterable(encoding.ids for encoding in tokenizer.encode_batch_fast(chunk)))
    yield [end_id(tokenizer)]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--stories", type=int, default=50_000, help="how many to learn merges from")
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args(argv)
    prepare(args)
    started = time.perf_counter()
    stories, heldout = args.work / "stories.jsonl", args.work / "heldout.jsonl"
    tokenizer = train_bpe(islice(read_stories(stories), args.stories), args.vocab)
    save_tokenizer(tokenizer, args.work / "tokenizer", args.context)
    learned = time.perf_counter() - started
    print(f"tokenizer: learned in {learned:.1f} s", flush=True)
    counts = {
        "train": pack(encoded(tokenizer, stories), args.work / "train.bin"),
        "heldout": pack(encoded(tokenizer, heldout), args.work / "heldout.bin"),
    }
    note(
        args.work,
        "tokenizer",
        vocab=tokenizer.get_vocab_size(),
        tokens=counts,
        seconds=round(time.perf_counter() - started, 1),
        sha256={name: file_hash(args.work / f"{name}.bin") for name in counts},
    )


if __name__ == "__main__":
    main()
