"""`faircopy batch`: a file of requests in OpenAI's batch format, answered by one engine or by several on Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from tqdm import tqdm

from faircopy.terminal.batch_file import BatchFile
from faircopy.terminal.serve import require_packages, require_ray

Json = dict[str, Any]
Answers = Callable[[Iterable[Json]], AsyncIterator[Json]]


def answers_of(file: BatchFile, make: Callable[[], Any], together: int, replicas: int | None) -> Answers:
    """One engine in this process, or several on Ray. make: loads the engine's LLM; together: requests in work."""
    require_packages("batch")
    if replicas is not None:
        require_ray()
        from faircopy.ray.batch import answers

        return lambda lines: answers(file.requests, file.answered_ids, make, together, replicas)
    from faircopy.server.offline import Offline

    return lambda lines: Offline(make()).answers(lines, together)


def run(file: BatchFile, answers: Answers) -> bool:
    """Answer what is missing; each answer is in the file as soon as it is finished. True if all requests were good."""
    if file.answered:
        print(f"{file.answered} of {file.total} requests are already answered", file=sys.stderr)
    return file.answered == file.total or asyncio.run(_run(file, answers))


async def _run(file: BatchFile, answers: Answers) -> bool:
    refused = tokens = 0
    with tqdm(total=file.total, initial=file.answered, unit="req", dynamic_ncols=True, disable=None) as bar:
        async for answer in answers(file.missing()):
            file.add(answer)
            response = answer["response"]
            refused += response["status_code"] != 200
            tokens += response["body"].get("usage", {}).get("completion_tokens", 0)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            bar.update()
    if refused:
        print(f"{refused} requests were refused; their answers have the status and the reason", file=sys.stderr)
    return not refused
