"""The server's layers without HTTP, for machines that have torch and no web server: `benchmarks.serve_load --gpu`.

The widened Qwen3-8B / 0.6B pair (see benchmarks.gpu), plain and with drafts. Each stream is a job of the service, as
the HTTP application makes it: the engine runs in its own thread, updates cross to the event loop, texts are decoded
and events are written as JSON. Left out are HTTP, the reading of bodies and Prometheus. Compared with generate() on
the same engine and prompts, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu import Session, counts, say, timed
from faircopy import LLM, SamplingParams
from faircopy.bench.record import collect
from faircopy.server.service import Service
from faircopy.server.settings import ServerConfig
from faircopy.server.writing import Choice


class NoMetrics:
    """Takes what the service reports, and keeps nothing."""

    def __init__(self, *about: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


async def stream(service: Service, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
    """Seconds to the first event, and the tokens."""
    began, first = time.perf_counter(), 0.0
    choice = Choice(service.llm, service.llm.request(prompt, params), 0)
    async with service.job([choice.request], None) as job:
        async for news in job.updates():
            for updates in news.values():
                piece = choice.take(updates)
                event = {"index": 0, "text": piece.text, "finish_reason": piece.finished}
                json.dumps({"object": "text_completion", "choices": [event]}).encode()
                first = first or time.perf_counter() - began
    return first, choice.whole.tokens


async def all_streams(llm: LLM, prompts: list[list[int]], wanted: list[SamplingParams]) -> Any:
    """Seconds for all, those of them that the event loop's thread worked, and what each stream gave.

    The engine's thread begins and ends with it.
    """
    service = Service(llm, ServerConfig(max_queue=len(prompts)), "widened", NoMetrics)  # type: ignore[arg-type]
    service.start()
    began, worked = time.perf_counter(), time.thread_time()
    pairs = zip(prompts, wanted, strict=True)
    found = await asyncio.gather(*(stream(service, prompt, params) for prompt, params in pairs))
    seconds, worked = time.perf_counter() - began, time.thread_time() - worked
    await service.stop()
    return seconds, worked, found


def measured(llm: LLM, prompts: list[list[int]], wanted: list[SamplingParams], count: int) -> dict[str, Any]:
    """generate() and the service in turns."""
    texts = [output.token_ids for output in llm.generate(prompts, wanted, progress=False)]
    asyncio.run(all_streams(llm, prompts, wanted))
    alone, served, fronts, firsts, same = [], [], [], [], 0
    tokens = sum(map(len, texts))
    for _ in range(count):
        alone.append(timed(llm, prompts, wanted))
        seconds, worked, found = asyncio.run(all_streams(llm, prompts, wanted))
        served.append(tokens / seconds)
        fronts.append(worked / tokens)
        firsts += [first for first, _ in found]
        same += sum(written == text for (_, written), text in zip(found, texts, strict=True))
    engine, layers = statistics.median(alone), statistics.median(served)
    return {
        "generate_tokens_per_s": engine,
        "served_tokens_per_s": layers,
        "share_of_generate": layers / engine,
        "overhead_ms_per_token": 1e3 / layers - 1e3 / engine,
        "event_loop_us_per_token": 1e6 * statistics.median(fronts),
        "first_ms_median": 1e3 * statistics.median(firsts),
        "first_ms_most": 1e3 * max(firsts),
        "identical": same,
        "of": count * len(prompts),
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    args.minutes = 60.0
    session = Session(args)
    prompts = session.prompts(args.streams)
    wanted = [SamplingParams(max_tokens=args.tokens, ignore_eos=True)] * args.streams
    memory = "32MiB" if args.small else "24GiB"
    for drafter, k in ((None, 0), ("model", args.k)):
        options = {"max_batch": args.streams, "cache_memory": memory, "drafter_per_request": True}
        llm = session.llm("widened", drafter, k=k, prefix_reuse=False, **options)
        llm.warm_up()
        about = {"drafter": drafter or "none", "k": k, "streams": args.streams, "tokens": args.tokens}
        yield {**about, **measured(llm, prompts, wanted, args.rounds), **counts(llm)}
        del llm


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    for row in collect(args.out, vars(args), rows(args)):
        say(row)
