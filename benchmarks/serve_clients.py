"""Other people's clients against our server: schemathesis, lm-eval's log-likelihoods, guidellm's load.

    make clients        # installs them into .venv-clients, then runs this

Needs no network once they are installed: the model, the tokenizer and the tasks are local.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from faircopy import bundled

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"


@contextmanager
def server() -> Iterator[None]:
    """`faircopy serve` with the bundled pair, until the end of the block."""
    command = [sys.executable, "-m", "faircopy", "serve", "--port", str(PORT), "--threads", "1", "--batch", "16"]
    process = subprocess.Popen([*command, "--log-level", "warning", "--shadow-audit", "0.05"])
    try:
        while True:
            try:
                httpx.get(f"{URL}/ready").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def schemathesis(bin: Path, folder: Path) -> list[str]:
    """All checks; tests/schemathesis_hooks.py knows the languages of grammars."""
    command = [str(bin / "schemathesis"), "run", f"{URL}/openapi.json", "--phases", "coverage", "--no-color"]
    return [*command, "--request-timeout", "120"]


def lm_eval(bin: Path, folder: Path) -> list[str]:
    """Which of two sentences continues a story: two log-likelihoods a question, asked with token ids and echo."""
    source, prompts = random.Random(0), bundled.prompts()[:60]
    halves = [(text[: len(text) // 2].rsplit(" ", 1)[0], text[len(text) // 2 :].split(" ", 1)[-1]) for text in prompts]
    rows = []
    for n, (first, rest) in enumerate(halves):
        other = halves[(n + source.randrange(1, len(halves))) % len(halves)][1]
        right = source.randrange(2)
        rows.append({"context": first, "choices": [other, rest] if right else [rest, other], "label": right})
    (folder / "stories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "stories.yaml").write_text(
        "task: stories\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'stories.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{context}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    arguments = (
        f"model=target,base_url={URL}/v1/completions,tokenizer={bundled.target()},num_concurrent=4,max_length=512"
    )
    command = [str(bin / "lm_eval"), "--model", "local-completions", "--model_args", arguments]
    return [*command, "--tasks", "stories", "--include_path", str(folder), "--batch_size", "1"]


def guidellm(bin: Path, folder: Path) -> list[str]:
    command = [str(bin / "guidellm"), "run", "--disable-console-interactive", "--output", "kind=console"]
    command += ["--backend", f"kind=openai_http,target={URL},model=target,request_format=/v1/completions"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={bundled.target()}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=48"]
    return [*command, "--profile", "kind=concurrent,streams=8", "--constraint", "kind=max_requests,count=48"]


CLIENTS: dict[str, Callable[[Path, Path], list[str]]] = {
    "schemathesis": schemathesis,
    "lm_eval": lm_eval,
    "guidellm": guidellm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=Path(".venv-clients/bin"))
    parser.add_argument("--only", choices=CLIENTS)
    args = parser.parse_args()
    failed = []
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none", "COLUMNS": "120"}
    offline |= {"SCHEMATHESIS_HOOKS": "tests.schemathesis_hooks"}
    with server(), tempfile.TemporaryDirectory() as folder:
        for name, make in CLIENTS.items():
            if args.only in (None, name):
                command = make(args.bin, Path(folder))
                print(f"$ {' '.join(command)}", flush=True)
                if subprocess.run(command, env=os.environ | offline, check=False).returncode:
                    failed.append(name)
        counters = [
            line for line in httpx.get(f"{URL}/metrics").text.splitlines() if line.startswith("faircopy_shadow")
        ]
    print("\n".join(line for line in counters if "_created" not in line))
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
