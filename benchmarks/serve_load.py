"""What the server costs beyond the engine: the same requests through generate() and through HTTP streams.

    python -m benchmarks.serve_load                                   # a model that costs nothing, batch 8
    python -m benchmarks.serve_load --target models/target --draft models/draft --streams 8
    python -m benchmarks.serve_load --gpu --streams 64 --tokens 256 --out FILE.json        # see serve_in_process
    python -m benchmarks.serve_load --url http://127.0.0.1:8301 http://127.0.0.1:8302      # servers, in turns

The client is a process of its own that only counts bytes, so that it takes little from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from typing import Any

from benchmarks import serve_in_process
from faircopy import LLM, SamplingParams
from faircopy.testing import ByteTokenizer, TableModel


def load(args: argparse.Namespace) -> LLM:
    options = {"max_batch": args.streams, "drafter_per_request": True, "threads": args.threads}
    if args.target is None:
        return LLM(TableModel(256, 8192), tokenizer=ByteTokenizer(), cache_memory="64MiB", k=0, **options)
    return LLM(args.target, draft=args.draft, k=args.k, **options)


async def stream(port: int, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first and to the last byte of one stream."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    first, tail = 0.0, b""
    while piece := await reader.read(1 << 16):
        tail = (tail + piece)[-64:]
        if not first and b"data:" in piece:
            first = time.perf_counter() - began
    assert b"[DONE]" in tail, "a stream did not end"
    writer.close()
    return first, time.perf_counter() - began


def client(port: int, bodies: list[dict[str, Any]], results: Any) -> None:
    async def all_streams() -> list[tuple[float, float]]:
        return await asyncio.gather(*(stream(port, body) for body in bodies))

    began = time.perf_counter()
    times = asyncio.run(all_streams())
    results.put((time.perf_counter() - began, [first for first, _ in times]))


def through_server(port: int, bodies: list[dict[str, Any]]) -> tuple[float, list[float]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=client, args=(port, bodies, results))
    process.start()
    found: tuple[float, list[float]] = results.get(timeout=600)
    process.join()
    return found


def through_engine(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", nargs="+", help="OpenAI-compatible servers to compare instead")
    parser.add_argument("--model", default="target", help="with --url: the model's name there")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="the Qwen3-8B / 0.6B pair, without HTTP")
    parser.add_argument("--small", action="store_true", help="with --gpu: tiny shapes, to try it on a CPU")
    parser.add_argument("--out", default="/dev/null", help="with --gpu: a file for the results")
    args = parser.parse_args()
    if args.gpu:
        serve_in_process.main(args)
        return
    if args.url:
        compare(args)
        return
    llm = load(args)
    llm.warm_up()
    prompts, bodies = requests(args)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    through_engine(llm, prompts, params)  # what is done once
    alone = [through_engine(llm, prompts, params) for _ in range(args.rounds)]
    from faircopy.server.run import in_thread
    from faircopy.server.settings import ServerConfig

    with in_thread(llm, ServerConfig(port=0)) as server:
        port = int(server.url.rpartition(":")[2])
        through_server(port, bodies)
        served = [through_server(port, bodies) for _ in range(args.rounds)]
    report(args, alone, [seconds for seconds, _ in served], [first for _, firsts in served for first in firsts])


def requests(args: argparse.Namespace) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts as token ids, and the same as bodies of streams."""
    prompts = [[(7 * n + step) % 200 + 20 for step in range(16)] for n in range(3, 3 + args.streams)]
    body = {"max_tokens": args.tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body |= {"model": args.model} if args.url else {}
    return prompts, [{**body, "prompt": ids} for ids in prompts]


def compare(args: argparse.Namespace) -> None:
    """Several servers in turns, so that what else the machine does meets all of them; ratios to the first."""
    _, bodies = requests(args)
    ports = [int(url.rstrip("/").rpartition(":")[2]) for url in args.url]
    for port in ports:
        through_server(port, bodies)
    rounds = [[through_server(port, bodies) for port in ports] for _ in range(args.rounds)]
    tokens = args.streams * args.tokens
    print(f"{args.streams} streams of {args.tokens} tokens, medians of {args.rounds} rounds in turns")
    results = []
    for url, found in zip(args.url, zip(*rounds, strict=True), strict=True):
        seconds = statistics.median(seconds for seconds, _ in found)
        first = statistics.median(first for _, firsts in found for first in firsts)
        results.append((tokens / seconds, first))
        rate, wait = results[-1][0] / results[0][0], results[-1][1] / results[0][1]
        print(f"  {url}  {tokens / seconds:7.0f} tokens/s ({rate:.2f}x)", end="")
        print(f"   first token {1000 * first:6.1f} ms ({wait:.2f}x)")


def report(args: argparse.Namespace, alone: list[float], served: list[float], firsts: list[float]) -> None:
    tokens = args.streams * args.tokens
    engine, server = statistics.median(alone), statistics.median(served)
    more, share = 1000 * (server - engine) / tokens, engine / server
    print(f"{args.streams} streams of {args.tokens} tokens, medians of {args.rounds} rounds")
    print(f"  generate()   {tokens / engine:9.0f} tokens/s   {1000 * engine / tokens:7.4f} ms a token")
    print(f"  server       {tokens / server:9.0f} tokens/s   {1000 * server / tokens:7.4f} ms a token")
    print(f"  overhead     {more:9.4f} ms a token; the server has {share:.1%} of generate()'s throughput")
    print(f"  first token  {1000 * statistics.median(firsts):9.1f} ms median, {1000 * max(firsts):.1f} ms at most")


if __name__ == "__main__":
    main()
