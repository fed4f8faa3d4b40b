"""The command line: thin; each command reads its options, calls the library, and says how it went.

Exit codes: 0 good, 1 the job failed, 2 wrong usage: an option, a file or a model that cannot be used.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from faircopy import __version__, bundled
from faircopy.errors import (
    CheckpointError,
    ConfigError,
    FaircopyError,
    NumericsError,
    OutOfPages,
    RequestError,
    UnsupportedModel,
)
from faircopy.terminal.bench import app as bench
from faircopy.terminal.guard import drawable, option_of, stoppable, writable
from faircopy.terminal.laws import app as laws
from faircopy.terminal.options import Command, Group, with_sampling
from faircopy.terminal.train import app as train

app = typer.Typer(
    name="faircopy",
    help="Batch speculative decoding whose output is exactly what the target model alone would have written.",
    no_args_is_help=True,
    cls=Group,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.add_typer(laws, name="laws")

Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; the bundled one if left out.")]
Draft = Annotated[
    str | None,
    typer.Option(help="Folder or hub id of a draft model or head, 'ngram' or 'none'; the bundled target has its own."),
]
Width = Annotated[int, typer.Option("--k", help="Draft tokens per step.")]
WidthOrAuto = Annotated[
    str,
    typer.Option(
        "--k",
        metavar="N|auto|law",
        help="Draft tokens per step; auto: as many as measured to pay; law: as many as are free.",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens per answer at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus; 1 switches it off.")]
Seed = Annotated[int | None, typer.Option(help="A fresh one if left out.")]
BatchSize = Annotated[int, typer.Option("--batch", help="Sequences that run together at most.")]
Strategy = Annotated[str, typer.Option(help="How a ragged batch is held: docs/strategies.md.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Weights, drafter, cache and passes together, such as 24GiB; no limit but the device's if left out."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; chosen by the machine if left out.")]
TensorParallel = Annotated[
    int, typer.Option(help="Devices that share each layer of the target: 1, 2, 4 or 8. The text is that of any number.")
]
PipelineParallel = Annotated[int, typer.Option(min=1, help="Devices that share the target's layers among them.")]
Exact = Annotated[bool, typer.Option(help="--no-exact drops the promise that batches and drafts change no token.")]
System = Annotated[str | None, typer.Option(help="The system message of the chat template.")]
File = Annotated[Path | None, typer.Option("--file", help="Prompts: .txt, one a line, or .jsonl with prompt or turns.")]
Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts; standard input if there are none.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(cls=Command)
@stoppable
@with_sampling()
def generate(
    params: Any,
    prompts: Prompts = None,
    file: File = None,
    target: Target = None,
    draft: Draft = None,
    k: WidthOrAuto = "auto",
    batch: BatchSize = 64,
    strategy: Strategy = "ragged",
    dtype: Dtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    threads: Threads = None,
    exact: Exact = True,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts go through the model's chat template.")] = False,
    system: System = None,
    out: Annotated[Path | None, typer.Option(help="Write answers to this JSONL file, which must be new.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Answer only what is missing in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print the resolved configuration first.")] = False,
) -> None:
    """Answer prompts in a batch. Ctrl-C keeps what is finished."""
    from faircopy.terminal.chat import conversation
    from faircopy.terminal.generate import generate as run
    from faircopy.terminal.prompts import read_prompts

    if system is not None and not chat:
        raise ConfigError("--system", system, "given without --chat", "add --chat: only a chat template has a place")
    asked = read_prompts(prompts or [], file)
    if params.asks_logprobs and out is None and not as_json:
        field = "logprobs" if params.logprobs is not None else "prompt_logprobs"
        raise ConfigError(field, getattr(params, field), "text has no place for them", "add --json or --out FILE")
    answers = _answer_file(out, asked, params, resume, overwrite)
    options = _engine_options(dtype, device, memory, threads, exact, tensor_parallel, pipeline_parallel)
    llm = _llm(target, draft, k, max_batch=batch, strategy=strategy, **options)
    if explain:
        print(json.dumps(llm.explain(), indent=1), file=sys.stderr)
    encode = (lambda text: llm.chat_prompt(conversation(system, text))) if chat else str
    if not run(llm, asked, params, answers, as_json, encode):
        raise typer.Exit(1)


@app.command(cls=Command)
@stoppable
@with_sampling(left_out=("n", "logprobs", "prompt_logprobs"), max_tokens=256)
def chat(
    params: Any,
    target: Target = None,
    draft: Draft = None,
    k: WidthOrAuto = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    threads: Threads = None,
    exact: Exact = True,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    system: System = None,
    url: Annotated[str | None, typer.Option(help="Talk to an OpenAI-compatible server instead.")] = None,
    model: Annotated[str | None, typer.Option(help="With --url: the model's name there.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="With --url.")] = None,
) -> None:
    """Talk to a model; earlier turns stay in the cache."""
    from faircopy.terminal.chat import chat as run
    from faircopy.terminal.remote_chat import RemoteModel

    if url is not None and (target or draft):
        raise ConfigError("--url", url, "given beside a model", "talk to a server or to a model")
    options = _engine_options(dtype, device, memory, threads, exact, tensor_parallel, pipeline_parallel)
    llm = RemoteModel(url, model, api_key) if url is not None else _llm(target, draft, k, **options)
    run(llm, params, system=system)


def _read_config(ctx: typer.Context, file: str | None) -> str | None:
    """--config: its values are what options are that were not given."""
    if file is not None:
        from faircopy.terminal.serve import read_options

        names = {param.name for param in ctx.command.params if param.name is not None}
        ctx.default_map = {**(ctx.default_map or {}), **read_options(file, names)}
    return file


@app.command(cls=Command, context_settings={"auto_envvar_prefix": "FAIRCOPY_SERVE"})
def serve(
    target: Target = None,
    draft: Draft = None,
    k: WidthOrAuto = "auto",
    batch: BatchSize = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    threads: Threads = None,
    exact: Exact = True,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; its folder's name if left out.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="File with a key a line; or set FAIRCOPY_API_KEYS. Without keys all may ask.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call; may be given several times.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Sequences that wait for a place in the batch at most.")] = 256,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body at most.")] = 4 << 20,
    max_prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt at most; the context if left out.")] = None,
    max_prompts: Annotated[int, typer.Option(help="Prompts in one request at most.")] = 128,
    max_n: Annotated[int, typer.Option(help="Samples per prompt at most.")] = 16,
    deadline: Annotated[float | None, typer.Option(help="Seconds a request may take at most.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running requests get after the first signal.")] = 30.0,
    shadow_audit: Annotated[
        float, typer.Option(help="Share of the requests that are run again, plainly, in idle time.")
    ] = 0.0,
    audit_folder: Annotated[Path, typer.Option(help="Where a mismatch is written.")] = Path("faircopy-mismatches"),
    per_request_spec_decode_metrics: Annotated[str, typer.Option(help="none, summary or detailed.")] = "summary",
    vllm_metrics: Annotated[bool, typer.Option(help="Counters under vLLM's names too.")] = True,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    replicas: Annotated[int, typer.Option(min=1, help="Engines behind this address, on Ray Serve if above 1.")] = 1,
    max_replicas: Annotated[int | None, typer.Option(help="Scale from --replicas up to this by queue length.")] = None,
    hedge: Annotated[
        float | None, typer.Option(help="With replicas: seconds to the first byte after which another is asked too.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="YAML or TOML file with any of these options.", is_eager=True, callback=_read_config),
    ] = None,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible. Every option is also FAIRCOPY_SERVE_<OPTION> in the environment."""
    from faircopy.terminal.serve import serve as run
    from faircopy.terminal.serve import serve_replicas

    options = _engine_options(dtype, device, memory, threads, exact, tensor_parallel, pipeline_parallel)
    make = partial(_llm, target, draft, k, max_batch=batch, drafter_per_request=True, **options)
    server: dict[str, Any] = dict(  # noqa: C408
        host=host, port=port, name=name, cors=tuple(cors or ()), max_queue=max_queue, max_body=max_body,
        max_prompt=max_prompt, max_prompts=max_prompts, max_n=max_n, deadline=deadline, drain=drain,
        shadow_audit=shadow_audit, audit_folder=audit_folder, vllm_metrics=vllm_metrics,
        spec_metrics=per_request_spec_decode_metrics,
    )  # fmt: skip
    if replicas == 1 and max_replicas is None:
        _refuse_without("--hedge", hedge, "--replicas or --max-replicas")
        run(make(), log_format, log_level, api_keys, **server)
    else:
        devices = tensor_parallel * pipeline_parallel
        fleet = {"replicas": replicas, "max_replicas": max_replicas, "hedge": hedge, "devices": devices}
        serve_replicas(make, api_keys, fleet, batch + max_queue, **server)


@app.command(cls=Command)
@stoppable
def batch(
    requests: Annotated[Path, typer.Option("--in", help="JSONL file in OpenAI's batch format: custom_id, url, body.")],
    out: Annotated[Path, typer.Option(help="JSONL file for the answers; what it has already is not made again.")],
    target: Target = None,
    draft: Draft = None,
    k: WidthOrAuto = "auto",
    batch: BatchSize = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    memory: Memory = None,
    threads: Threads = None,
    exact: Exact = True,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Several engines on ray.data.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: engines.")] = 1,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; its folder's name if left out.")
    ] = None,
) -> None:
    """Answer a file of requests. Killed and started again it goes on where it was."""
    from faircopy.files import exclusive
    from faircopy.terminal.batch import answers_of, run
    from faircopy.terminal.batch_file import BatchFile

    if not ray:
        _refuse_without("--replicas", replicas if replicas > 1 else None, "--ray")
    writable("--out", out)
    options = _engine_options(dtype, device, memory, threads, exact, tensor_parallel, pipeline_parallel)
    make = partial(_llm, target, draft, k, max_batch=batch, drafter_per_request=True, **options)
    with exclusive("--out", out):  # of two runs at once, both would answer what is missing
        file = BatchFile(requests, out)
        devices = tensor_parallel * pipeline_parallel
        if not run(file, answers_of(file, make, 2 * batch, replicas if ray else None, name, devices)):
            raise typer.Exit(1)


@app.command(cls=Command)
@stoppable
def demo(
    target: Target = None,
    draft: Draft = None,
    k: Width = 4,
    max_tokens: MaxTokens = 96,
) -> None:
    """Watch a batch of eight being written, then see what it cost and that it is exact."""
    from faircopy.terminal.demo import choose_prompts
    from faircopy.terminal.demo import demo as run

    console = Console()
    own = bundled.draft_for(target, draft if draft or target is None else "ngram")
    exact = run(target or bundled.target(), own, choose_prompts(), k, max_tokens, console)
    raise typer.Exit(0 if exact else 1)


@app.command(cls=Command)
@stoppable
def audit(
    prompts: Prompts = None,
    file: File = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Audit OpenAI-compatible servers; the first is the reference.")
    ] = None,
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Drafts to try: folders, hub ids, 'ngram'.", show_default="ngram, and the bundled target's"),
    ] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="Draft lengths to try.", show_default="2, 4, 8")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes to try.", show_default="1, 4, 8")] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    exact: Annotated[bool, typer.Option(help="--no-exact shows what happens without the promise.")] = True,
    limit: Annotated[int | None, typer.Option(help="Prompts at most; 32 of the bundled ones if left out.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="About how long it may take; 0: no limit. 60 if it is given no prompts or options."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a one-file HTML report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    model: Annotated[str | None, typer.Option(help="With --url: the model's name there.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="With --url.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="With --url: requests at a time to try.", show_default="1, 8")
    ] = None,
    timeout: Annotated[float, typer.Option(help="With --url: seconds to wait for an answer.")] = 120.0,
    tie: Annotated[float, typer.Option(help="With --url: log probability below which a difference is a tie.")] = 0.5,
) -> None:
    """Check that speculation changes nothing, on your models and prompts. Exit code 0 only at 100 %.

    Ctrl-C keeps the report of what was compared.
    """
    from faircopy.terminal.audit import SECONDS, Sampling, audit_and_show

    asked = _audited_prompts(prompts, file, own=target is None and not url, limit=limit)
    writable("--html", html)
    if url and (target or draft or k or batch):
        raise ConfigError("--url", url, "given beside options for models", "audit servers or models, not both at once")
    if url and seconds is not None:
        raise ConfigError("--seconds", seconds, "given beside --url", "limit an audit of servers with --limit")
    if seconds is None and not (prompts or file or limit or target or draft or k or batch):
        seconds = SECONDS
    sampling = Sampling(max_tokens, temperature, top_p, seed)
    if url:
        from faircopy.terminal.audit import servers_audit

        options = {"model": model, "concurrency": concurrency or (1, 8), "timeout": timeout, "tie": tie}
        audited = servers_audit(url, asked, sampling, **options, api_key=api_key)
    else:
        from faircopy.terminal.audit import models_audit

        drafts = _audited_drafts(draft, own=target is None)
        ways = {"batches": batch or (1, 4, 8), "ks": k or (2, 4, 8), "seconds": seconds or None}
        options = {"dtype": dtype, "device": device, "exact": exact}
        audited = models_audit(target or bundled.target(), drafts, asked, sampling, **ways, **options)
    raise typer.Exit(0 if audit_and_show(audited, as_json, html) else 1)


@app.command(cls=Command)
@stoppable
def tune(
    target: Annotated[str, typer.Option(help="Checkpoint folder or hub id; only its config.json is read.")],
) -> None:
    """On a GPU: time tiles for a model's products (a minute) and keep the fastest. Texts do not change."""
    from faircopy.terminal.tune import tune as run

    run(target)


@app.command(cls=Command)
@stoppable
def plan(
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Draft models, heads or 'ngram' to choose from, the best first; the bundled target has its own."
        ),
    ] = None,
    k: Annotated[
        int, typer.Option("--k", min=0, help="Draft tokens per step at most; of a head, nodes of its tree.")
    ] = 4,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Dialogues that run together.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Questions and answers in a dialogue.")] = 20,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one question and its answer.")] = 256,
    memory: Annotated[
        str | None, typer.Option(help="The budget, such as 24GiB; the device's memory if left out.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A device to plan for: h200, h100, a100-80, l4, ..., or cpu; this machine's if left out."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Devices that share each layer; memory is then that of each.")
    ] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option(min=1, help="Devices with some of the layers each; memory is then that of each.")
    ] = 1,
    dtype: Dtype = "auto",
    acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of draft tokens accepted; assumed, or a head's own, if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes everywhere.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what was tried, and the law of k over batch sizes.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of k over batch sizes.")] = None,
) -> None:
    """See what fits into a device's memory, before anything is loaded: config.json is enough."""
    from faircopy.terminal import plan as planning

    drawable("--plot", plot)
    own = [bundled.named(None)] if target is None and draft is None else []
    drafts = [bundled.named(name) for name in draft or own] if target is None else draft or []
    wish = planning.Wish(
        target=target or bundled.target(), drafts=[name for name in drafts if name != "none"], k=k, batch=batch,
        turns=turns, turn_tokens=turn_tokens, memory=memory, gpu=gpu, dtype=dtype, acceptance=acceptance,
        split=planning.split_of(tensor_parallel, pipeline_parallel),
    )  # fmt: skip
    found = planning.plan_for(wish)
    if plot is not None:
        planning.plot(found, wish, plot)
    if as_json:
        print(planning.as_json(found, wish))
    else:
        planning.show(found, wish, explain, Console())


def _answer_file(out: Path | None, prompts: list[str], params: Any, resume: bool, overwrite: bool) -> Any:
    from faircopy.terminal.answer_file import AnswerFile

    if out is None:
        if resume or overwrite:
            option = "--resume" if resume else "--overwrite"
            raise ConfigError(option, True, "given without --out", "name the file with --out")
        return None
    writable("--out", out)
    return AnswerFile(out, prompts, params.given(), resume, overwrite)


def _audited_prompts(prompts: list[str] | None, file: Path | None, own: bool, limit: int | None) -> list[str]:
    """The user's prompts, all of them unless limited; the bundled ones where nothing is the user's own."""
    from faircopy.terminal.prompts import read_prompts

    if own and not prompts and file is None:
        return bundled.prompts()[: limit or 32]
    asked = read_prompts(prompts or [], file)
    if limit is not None and limit < len(asked):
        print(f"auditing {limit} of {len(asked)} prompts", file=sys.stderr)
    return asked[:limit]


def _audited_drafts(drafts: list[str] | None, own: bool) -> list[str]:
    if not own:
        return drafts or ["ngram"]
    return [bundled.named(draft) for draft in drafts] if drafts else [bundled.draft(), "ngram"]


def _engine_options(
    dtype: str, device: str, memory: str | None, threads: int | None, exact: bool, tensor: int, pipeline: int
) -> dict[str, Any]:
    """LLM's keywords; those that were left out are left to LLM."""
    given = {"memory": memory, "threads": threads}
    shared = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    known = {"dtype": dtype, "device": device, "exact": exact, **shared}
    return known | {name: value for name, value in given.items() if value is not None}


def _refuse_without(option: str, value: Any, needed: str) -> None:
    if value is not None:
        raise ConfigError(option, value, f"given without {needed}", f"add {needed}")


def _llm(target: str | None, draft: str | None, k: str, **options: Any) -> Any:
    from faircopy.llm import LLM

    length = int(k) if k.removeprefix("-").isdecimal() else k
    return LLM(target or bundled.target(), draft=bundled.draft_for(target, draft), k=length, **options)


def main() -> None:
    """Run the command line; errors of ours and an interruption are one line, not a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except FaircopyError as error:
        print(f"faircopy: {error.describe(option_of(error, sys.argv[1:]))}", file=sys.stderr)
        unusable = isinstance(error, ConfigError | RequestError | CheckpointError | UnsupportedModel)
        sys.exit(2 if unusable and not isinstance(error, NumericsError | OutOfPages) else 1)


if __name__ == "__main__":
    main()
