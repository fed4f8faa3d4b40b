"""`faircopy batch`: a file of requests in OpenAI's batch format, answered by one engine or by several on Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from tqdm import tqdm

from faircopy.server.batch_lines import engine_stopped, is_final
from faircopy.terminal.batch_file import BatchFile
from faircopy.terminal.serve import require_packages, require_ray

Json = dict[str, Any]
Answers = Callable[[Iterable[Json]], AsyncGenerator[Json]]


def answers_of(
    file: BatchFile, make: Callable[[], Any], together: int, replicas: int | None, name: str | None, devices: int = 1
) -> Answers:
    """One engine in this process, or several on Ray.

    make: loads the engine's LLM; together: requests in work; name: what requests call the model; devices: of an engine.
    """
    require_packages("batch")
    if replicas is not None:
        require_ray()
        from faircopy.ray.batch import answers

        return lambda lines: answers(file.requests, file.answered_ids, make, together, replicas, name, devices)
    from faircopy.server.offline import Offline

    return lambda lines: Offline(make(), name).answers(lines, together)


def run(file: BatchFile, answers: Answers) -> bool:
    """Answer what is missing; each answer is in the file as soon as it is finished. True if all requests were good."""
    if file.answered:
        print(f"{file.answered} of {file.total} requests are already answered", file=sys.stderr)
    if file.answered < file.total:
        asyncio.run(_run(file, answers))
    if file.refused:
        print(f"{file.refused} requests were refused; their answers have the status and the reason", file=sys.stderr)
    missing = file.total - file.answered
    if missing:
        print(f"{missing} requests have no answer because the engine failed; run the command again", file=sys.stderr)
    return not file.refused and not missing


async def _run(file: BatchFile, answers: Answers) -> None:
    """Until all is answered or nothing more can be."""
    tokens = 0
    with tqdm(total=file.total, initial=file.answered, unit="req", dynamic_ncols=True, disable=None) as bar:
        async with aclosing(answers(file.missing())) as coming:
            async for answer in coming:
                if engine_stopped(answer):
                    return
                if is_final(answer):
                    file.add(answer)
                    tokens += answer["response"]["body"].get("usage", {}).get("completion_tokens", 0)
                    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
                    bar.update()
