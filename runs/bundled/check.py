"""The whole recipe in miniature, in half a minute: run it before paying for a GPU, and first thing on one."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from runs.bundled import distil_draft, finish, sample_stories, train_head, train_target, train_tokenizer
from runs.bundled.common import arguments, facts


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--teacher", type=Path, required=True, help="the stories15M checkpoint folder")
    parser.add_argument("--compile", action="store_true", help="compile too: slower, tests more")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        run(args.teacher, Path(work), args.device, ["--compile" if args.compile else "--no-compile"])
        reached = facts(Path(work), "finish")["tokens_per_verify"]
    print(f"check: all stages ran in {time.perf_counter() - started:.0f} s ({reached}; means nothing at this size)")


def run(teacher: Path, work: Path, device: str, compiling: list[str]) -> None:
    common = ["--work", str(work), "--device", device]
    few = ["--rows", "48", "--length", "80", "--batches", "2", "--least", "20", "--temperature", "1.0"]
    small = ["--rows", "4", "--length", "64", "--steps", "6", *compiling]
    shape = ["--hidden", "64", "--heads", "4", "--kv-heads", "2", "--intermediate", "64"]
    own = ["--own-rows", "64", "--own-length", "64", "--own-seconds", "0"]
    sample_stories.main([*common, *few, "--teacher", str(teacher)])
    hold_out_more(work)
    train_tokenizer.main([*common, "--vocab", "512"])
    train_target.main([*common, *small, *shape, "--layers", "2", "--prompts", "8"])
    distil_draft.main([*common, *small, *shape, *own, "--layers", "1"])
    target = ["--target", str(work / "target"), "--out", str(work / "clover")]
    train_head.main([*common, "--rows", "4", "--length", "48", "--steps", "6", *own, *target])
    finish.main([*common, "--out", str(work / "out"), "--new", "24"])


def hold_out_more(work: Path) -> None:
    """Of so few stories, one in a hundred would be none."""
    stories = (work / "stories.jsonl").read_text().splitlines(keepends=True)
    (work / "stories.jsonl").write_text("".join(stories[20:]))
    (work / "heldout.jsonl").write_text("".join(stories[:20]))


if __name__ == "__main__":
    main()
