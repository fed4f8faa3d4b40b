"""Batch files on ray.data: each replica is an actor with an engine of its own; the caller gets answers as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import ray
import ray.data

from faircopy.server.offline import Offline

Json = dict[str, Any]
BYTE_ORDER = "\ufeff"  # some programs begin a file with it
LINES = 256  # of one call of an actor at most: few enough that little is made again after a kill


class Replica:
    """An actor of ray.data: loads its engine once, then answers blocks of lines."""

    def __init__(self, make: Callable[[], Any], answered: Any, together: int, name: str | None) -> None:
        self._llm, self._answered, self._together, self._name = make(), ray.get(answered), together, name

    def __call__(self, block: dict[str, Any]) -> dict[str, list[str]]:
        lines = [json.loads(text.removeprefix(BYTE_ORDER)) for text in block["text"] if text.strip()]
        missing = [line for line in lines if line["custom_id"] not in self._answered]
        return {"answer": asyncio.run(self._answers(missing))}

    async def _answers(self, lines: list[Json]) -> list[str]:
        return [json.dumps(answer) async for answer in Offline(self._llm, self._name).answers(lines, self._together)]


async def answers(
    requests: Path,
    answered: frozenset[str],
    make: Callable[[], Any],
    together: int,
    replicas: int,
    name: str | None = None,
    devices: int = 1,
) -> AsyncGenerator[Json]:
    """Answers to the lines of a file that have none, from several engines. devices: that share an engine's model."""
    ray.init(ignore_reinit_error=True)
    gpus = devices if ray.cluster_resources().get("GPU") else 0
    reading = {"num_cpus": 0}  # engines may hold every CPU that Ray knows of
    path = str(requests.resolve())
    lines = ray.data.read_text(path, override_num_blocks=4 * replicas, ray_remote_args=reading)
    done = lines.map_batches(
        Replica,
        fn_constructor_args=(make, ray.put(answered), together, name),
        batch_size=LINES,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        num_gpus=gpus,
        num_cpus=0 if gpus else 1,
    )
    for row in done.iter_rows():
        yield json.loads(row["answer"])
