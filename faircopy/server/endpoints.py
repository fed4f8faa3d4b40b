"""What the endpoints that write text make of a body, whoever brings it: an HTTP request or a line of a batch file."""

from __future__ import annotations

import hashlib

from faircopy import __version__
from faircopy.llm import LLM
from faircopy.model.anatomy import known_identity
from faircopy.model.loader import response_template
from faircopy.server.answers import ChatShape, CompletionShape, Shape, Writer
from faircopy.server.protocol import ChatRequest, CompletionRequest
from faircopy.server.reading import Asked, Reader
from faircopy.server.service import Service
from faircopy.server.tools import ToolReader
from faircopy.server.writing import TokenNames

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, type[CompletionRequest | ChatRequest]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}


class Endpoints:
    """Makes writers of answers; may be called from worker threads."""

    def __init__(self, service: Service) -> None:
        llm = service.llm
        self._service, self._llm = service, llm
        self.reader = Reader(llm, service.config, service.name)
        self.names = TokenNames(llm)
        self._fingerprint = _fingerprint(llm)
        self._template = response_template(llm.model.name, llm.tokenizer)

    def writer(self, body: CompletionRequest | ChatRequest, number: str) -> Writer:
        """Reads a body and returns what writes its answer. number: the log's for this request."""
        asked, shape, prefix = self._chat(body) if isinstance(body, ChatRequest) else self._completion(body)
        return Writer(self._service, body, asked, shape, f"{prefix}-{number}", self._fingerprint)

    def _completion(self, body: CompletionRequest) -> tuple[Asked, Shape, str]:
        return self.reader.completion(body), CompletionShape(body, self._llm.decode, self.names), "cmpl"

    def _chat(self, body: ChatRequest) -> tuple[Asked, Shape, str]:
        tools = ToolReader(body, self._llm.tokenizer, self._template)
        return self.reader.chat(body), ChatShape(body, tools, self.names), "chatcmpl"


def _fingerprint(llm: LLM) -> str:
    """What, besides the request, decides the tokens: weights, type, kind of device and order of sums; not the ranks."""
    config, device = llm.config, llm.model.device.type
    grouped = device == "cpu" and (config.k_groups or config.tensor_parallel > 1)
    decoder, *_ranks = llm.model.backend.split(", ")
    rules = (str(grouped), str(config.exact), config.verifier)
    weights = known_identity(llm.model.name) or llm.model.name
    parts = (weights, str(llm.model.dtype), device, decoder, *rules, __version__)
    return "fc_" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]
