"""Spans for OpenTelemetry, where it is installed and set up by its environment variables."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from faircopy.types import Request

log = logging.getLogger("faircopy.server")
FLUSH = 3.0  # seconds that a collector gets at the end
try:
    from opentelemetry import trace
except ImportError:
    trace = None


def set_up() -> bool:
    """Send spans to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names; false if there is none, or no exporter."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no spans are sent (%s): pip install opentelemetry-exporter-otlp-proto-http", error)
        return False
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def flush() -> None:
    """Send the spans that wait to be sent: the signal that ends the process skips what Python does at its exit."""
    if trace is not None and hasattr(provider := trace.get_tracer_provider(), "force_flush"):  # an SDK's
        sender = threading.Thread(target=provider.force_flush, daemon=True)  # its own limit is not kept by exporters
        sender.start()
        sender.join(FLUSH)


@contextlib.contextmanager
def traced(path: str, model: str, request: Request, usage: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """A span around a request, with the attributes of the convention for generative models. usage: asked at the end."""
    if trace is None:
        yield
        return
    with trace.get_tracer("faircopy").start_as_current_span(path) as span:
        span.set_attribute("gen_ai.request.model", model)
        span.set_attribute("gen_ai.request.temperature", request.params.temperature)
        span.set_attribute("gen_ai.request.top_p", request.params.top_p)
        try:
            yield
        finally:
            found = usage()
            span.set_attribute("gen_ai.usage.input_tokens", found["prompt_tokens"])
            span.set_attribute("gen_ai.usage.output_tokens", found["completion_tokens"])
