"""Step 5: prove that the folders load with transformers, write model cards, sample texts and the manifest."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from faircopy.errors import CheckpointError
from faircopy.train.acceptance import measure_acceptance
from faircopy.train.llama import load_llama
from faircopy.train.sampler import rows_of, sample
from runs.bundled.common import K, arguments, facts, note, prepare

LIMIT = 32_000_000  # bytes of both folders together
BEGINNINGS = (
    "Once upon a time",
    "One day, a little dog named Max",
    "The old boat lay on the beach.",
    "Lily was sad because",
    "Tom and Mia wanted to build",
    "It was raining, and",
)
STAGES = ("sample", "tokenizer", "target", "draft", "finish")


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--out", type=Path, help="folder for copies: models/, logs/, manifest.json, samples.md")
    parser.add_argument("--new", type=int, default=128, help="tokens per prompt when measuring acceptance")
    parser.add_argument("--same", type=float, default=2e-2, help="how far transformers' logits may be from ours")
    args = parser.parse_args(argv)
    prepare(args)
    for name in ("target", "draft"):
        check_folder(args.work / name, args.same)
    tokenizer = tokenizer_of(args.work)
    measure(args, tokenizer)
    (args.work / "samples.md").write_text(samples(args, tokenizer))
    manifest = {stage: facts(args.work, stage) for stage in STAGES}
    (args.work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name in ("target", "draft"):
        (args.work / name / "README.md").write_text(card(name, manifest))
    if args.out:
        copy(args.work, args.out)


def tokenizer_of(work: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(work / "target")


def check_folder(folder: Path, tolerance: float) -> None:
    """transformers loads the folder and computes what our network computes."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_llama(folder)
    tokens = torch.randint(ours.shape.vocab, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        apart = float((theirs(tokens).logits - ours(tokens)).abs().max())
    if apart > tolerance:
        raise CheckpointError("model", str(folder), f"transformers' logits are {apart} apart", "look at config.json")


def measure(args: argparse.Namespace, tokenizer: Any) -> None:
    """Acceptance of the saved pair on held-out prompts, by k, and the size of the folders."""
    prompts = json.loads((args.work / "prompts.json").read_text())
    target, draft = (load_llama(args.work / name, torch.float32, args.device) for name in ("target", "draft"))
    reached = {
        k: measure_acceptance(target, draft, prompts, k, args.new, tokenizer.eos_token_id, chunk=256)
        for k in (1, 2, K, 6, 8)
    }
    size = sum(file.stat().st_size for name in ("target", "draft") for file in (args.work / name).iterdir())
    if size > LIMIT:
        raise CheckpointError("models", size, f"larger than {LIMIT} bytes together", "use a smaller shape")
    note(
        args.work,
        "finish",
        tokens_per_verify={str(k): value.tokens_per_verify for k, value in reached.items()},
        agreement=reached[K].agreement,
        verifies=reached[K].verifies,
        prompts=len(prompts),
        bytes=size,
        torch=torch.__version__,
    )


def samples(args: argparse.Namespace, tokenizer: Any) -> str:
    """A few texts of each model, greedy and sampled, as they come."""
    end, prompts = tokenizer.eos_token_id, [tokenizer(text)["input_ids"] for text in BEGINNINGS]
    parts = ["# Sample texts\n\nThe first of each kind, not chosen. The beginning given is in bold.\n"]
    for name, temperature in (("target", 0.0), ("target", 0.8), ("draft", 0.0)):
        network = load_llama(args.work / name, torch.float32, args.device)
        rows = rows_of(sample(network, prompts, 220, (end,), temperature, min_p=0.02, seed=args.seed))
        parts.append(f"\n## {name}, {f'temperature {temperature}' if temperature else 'greedy'}\n")
        for row, begun, text in zip(rows, prompts, BEGINNINGS, strict=True):
            rest = tokenizer.decode(row[len(begun) :], skip_special_tokens=True).replace("\n", "\n> ")
            parts.append(f"\n> **{text}**{rest}\n")
    return "".join(parts)


def card(name: str, manifest: dict[str, Any]) -> str:
    """A model card: its template, then the one about the data, both filled with facts."""
    here = Path(__file__).parent
    text = "".join((here / f"card_{part}.md").read_text() for part in (name, "data"))
    rows = (f"| {k} | {value:.2f} |" for k, value in manifest["finish"]["tokens_per_verify"].items())
    return text.format(**manifest, by_k="\n".join(rows), soft=1.0 - manifest["draft"]["hard"])


def copy(work: Path, out: Path) -> None:
    """Everything that is kept, without the text files in between."""
    for name in ("target", "draft"):
        shutil.copytree(work / name, out / "models" / name, dirs_exist_ok=True)
    shutil.copytree(work / "logs", out / "logs", dirs_exist_ok=True)
    for name in ("manifest.json", "samples.md", "prompts.json"):
        shutil.copy(work / name, out / name)


if __name__ == "__main__":
    main()
