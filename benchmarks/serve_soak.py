"""Minutes of mixed load on a server: disconnects, slow readers, bad requests, malformed JSON; then looks for leaks.

    python -m benchmarks.serve_soak --seconds 300

Every answer is compared with what the same request gave alone, without drafts, before the load began. At the end no
page may be held, and memory, threads and open files must be where they were after the first quarter of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from faircopy import LLM, bundled
from faircopy.server.run import in_thread
from faircopy.server.settings import ServerConfig

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 20, "logprobs": 2},
    {"temperature": 0.7, "stop": [".", "and"]},
    {"temperature": 0, "repetition_penalty": 1.2, "speculative": {"drafter": "ngram"}},
    {"temperature": 1, "n": 2},
    {"temperature": 0, "response_format": {"type": "regex", "regex": "[A-Z][a-z ]{4,30}[.]"}},
]
BAD: list[bytes] = [
    b"{",
    b"[]",
    b"null",
    b'{"prompt": 5}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "n": 1000}',
    b'{"prompt": "\\ud800"}',
    b"\xff\xfe",
    b'{"prompt": "a", "response_format": {"type": "regex", "regex": "("}}',
    b"[" * 5000,
]


@dataclass
class Soak:
    """The clients' side."""

    url: str
    bodies: list[dict[str, Any]]
    wanted: list[Any]
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self, number: int) -> None:
        source = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while time.monotonic() < self.until:
                act = source.choices([self.whole, self.stream, self.leave, self.slow, self.bad], [5, 5, 2, 1, 2])[0]
                try:
                    await act(http, source)
                except httpx.HTTPError as error:
                    self.wrong.append(f"{act.__name__}: {error!r}")
                self.counts[act.__name__] += 1
                await asyncio.sleep(source.random() * 0.05)

    async def whole(self, http: httpx.AsyncClient, source: random.Random) -> None:
        n = source.randrange(len(self.bodies))
        reply = await http.post("/v1/completions", json=self.bodies[n])
        if reply.status_code == 429:
            self.counts["429"] += 1
            return
        self._check(n, [choice["text"] for choice in reply.json()["choices"]])

    async def stream(self, http: httpx.AsyncClient, source: random.Random, pause: float = 0.0) -> None:
        n = source.randrange(len(self.bodies))
        texts: dict[int, str] = {}
        async with http.stream("POST", "/v1/completions", json={**self.bodies[n], "stream": True}) as reply:
            if reply.status_code == 429:
                self.counts["429"] += 1
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                await asyncio.sleep(pause)
        self._check(n, [texts[index] for index in sorted(texts)])

    async def slow(self, http: httpx.AsyncClient, source: random.Random) -> None:
        await self.stream(http, source, pause=0.2)

    async def leave(self, http: httpx.AsyncClient, source: random.Random) -> None:
        body = {**source.choice(self.bodies), "max_tokens": 200, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                if source.random() < 0.3:
                    return

    async def bad(self, http: httpx.AsyncClient, source: random.Random) -> None:
        content = source.choice(BAD)
        reply = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        if reply.status_code != 400 or "error" not in reply.json():
            self.wrong.append(f"bad request {content[:40]!r}: {reply.status_code}")

    def _check(self, n: int, texts: list[str]) -> None:
        self.counts["compared"] += 1
        if texts != self.wanted[n]:
            self.wrong.append(f"request {n}: {texts} instead of {self.wanted[n]}")


def resources() -> dict[str, float]:
    """What this process holds; the clients are in it too."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=24)
    args = parser.parse_args()
    llm = LLM(
        bundled.target(), draft=bundled.draft(), drafter_per_request=True, max_batch=12, cache_memory="3MiB", threads=1
    )
    with in_thread(llm, ServerConfig(port=0, max_queue=40, shadow_audit=0.05)) as server:
        soak = prepare(server.url, args.seconds)
        before = asyncio.run(run(soak, args))
        settle(llm)
        after = resources()
    print(f"{args.seconds:g} s, {args.clients} clients: {dict(sorted(soak.counts.items()))}")
    print(f"preemptions {llm.engine.scheduler.preemptions}, pages held {llm.engine.tables.held()}")
    print(f"shadow audit: {server.service.audit.state()}")
    print(f"after a quarter of the time {rounded(before)}, at the end {rounded(after)}")
    print(f"wrong: {len(soak.wrong)} {soak.wrong[:3]}")
    leaks = llm.engine.tables.held() or after["threads"] > before["threads"] or after["files"] > before["files"]
    raise SystemExit(1 if soak.wrong or leaks or after["MiB"] - before["MiB"] > 40 else 0)


def prepare(url: str, seconds: float) -> Soak:
    """Requests, and what each gives alone."""
    source, prompts = random.Random(0), bundled.prompts()
    bodies = [
        {
            "prompt": prompts[n][: source.randint(20, 300)],
            "max_tokens": source.randint(5, 40),
            "seed": n,
            **KINDS[n % len(KINDS)],
        }
        for n in range(42)
    ]
    with httpx.Client(base_url=url, timeout=120) as http:
        alone = [http.post("/v1/completions", json={**body, "speculative": False}).json() for body in bodies]
    wanted = [[choice["text"] for choice in answer["choices"]] for answer in alone]
    return Soak(url, bodies, wanted, time.monotonic() + seconds)


async def run(soak: Soak, args: argparse.Namespace) -> dict[str, float]:
    """Let the clients work; what the process held after a quarter of the time, while they did."""
    clients = [asyncio.create_task(soak.client(n)) for n in range(args.clients)]
    await asyncio.sleep(args.seconds / 4)
    before = resources()
    await asyncio.gather(*clients)
    return before


def settle(llm: LLM) -> None:
    while llm.engine.busy:
        time.sleep(0.05)
    llm.engine.tables.check()


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


if __name__ == "__main__":
    main()
