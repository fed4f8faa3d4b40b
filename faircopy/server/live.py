"""The numbers behind the live page; no client's text is among them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from faircopy.drafters.base import NoDrafter
from faircopy.drafters.per_request import PerRequestDrafter
from faircopy.llm import LLM
from faircopy.server.service import Service


async def live_state(service: Service) -> dict[str, Any]:
    meter, scheduler = service.engine.meter, service.engine.scheduler
    return {
        "time": time.time(),
        "model": service.name,
        "healthy": service.healthy,
        "chat": bool(getattr(service.llm.tokenizer, "chat_template", None)),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "max_batch": service.llm.config.max_batch,
        "totals": service.metrics.totals,
        "accepted_at": service.metrics.accepted_at,
        "steps": meter.steps,
        "preemptions": meter.preemptions,
        "reused": meter.tokens_reused,
        "pages": await _pages(service),
        "plan": plan_in_words(service.llm),
        "audit": service.audit.state(),
    }


async def _pages(service: Service) -> dict[str, Any] | None:
    """Who holds which pages; None if the engine is in a long step or has stopped."""
    if not service.healthy:
        return None
    try:
        return await asyncio.wait_for(asyncio.wrap_future(service.pages()), 2.0)
    except TimeoutError:
        return None


def plan_in_words(llm: LLM) -> str:
    """How draft lengths are chosen, as a sentence."""
    drafter = llm.engine.drafter
    default = drafter.default if isinstance(drafter, PerRequestDrafter) else drafter
    where = f"{str(llm.model.dtype).removeprefix('torch.')} on {llm.model.device}"
    if type(default) is NoDrafter:
        return (
            f"Plain decoding: the server has no drafter. Requests may bring a prediction or ask for n-grams. {where}."
        )
    name = type(default).__name__.removesuffix("Drafter").lower()
    chosen = llm.engine.draft_lengths.reason
    return f"Sequences get draft tokens from the {name} drafter ({chosen}) unless they ask otherwise. {where}."
