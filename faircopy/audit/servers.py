"""Audits servers: do OpenAI-compatible servers write, under load, what the first of them writes one by one?"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

from faircopy.audit.margin import first_difference
from faircopy.audit.report import (
    Difference,
    Estimate,
    Finding,
    Kind,
    Report,
    Run,
    Token,
    Watch,
    ending,
    versions,
)
from faircopy.errors import ConfigError, FaircopyError

TOP = 5  # log probabilities asked for per token: the most that OpenAI's own completions give
_AFTER = 160  # characters shown from a difference on
_REMEDIES = {
    401: "pass api_key=",
    403: "pass an api_key= that may use this model",
    404: "check that the url is the server's root and that it serves this model",
    429: "lower concurrency=",
}


class ServerError(FaircopyError):
    """A server did not answer, or not as an OpenAI-compatible server does."""

    def __init__(self, url: str, problem: str, remedy: str, status: int | None = None) -> None:
        self.status = status
        super().__init__("url", url, problem, remedy)


def audit_servers(
    urls: Seq[str],
    prompts: Seq[str],
    *,
    model: str | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    concurrency: Seq[int] = (1, 8),
    timeout: float = 120.0,
    tie: float = 0.5,
    api_key: str | None = None,
    client: httpx.Client | None = None,
    watch: Watch | None = None,
) -> Report:
    """Ask the first server, the reference, for every text, one at a time; then the others, `concurrency` at a time.

    `tie` is the distance in log probability below which a difference counts as rounding: a server does not tell its
    dtype. watch: told an estimate, from the time of the first answer, and each run.
    """
    _check(urls, prompts, concurrency)
    body = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with nullcontext(client) if client is not None else httpx.Client() as http:
        servers = [_Server(url, http, {**body, "model": model}, headers, timeout) for url in urls]
        for server in servers:
            server.find_model()
        wanted = _ask_first(servers[0], prompts, len(servers) - 1, concurrency, watch)
        report = Report(f"Audit against {servers[0].name}", list(prompts), _settings(servers, body, tie))
        for server in servers[1:]:
            for many in concurrency:
                report.runs.append(_run(server, prompts, wanted, many, None if temperature else tie))
                if watch is not None:
                    watch.on_run(report.runs[-1])
    return report


@dataclass(frozen=True, slots=True)
class _Text:
    """What a server wrote; tokens and their alternatives where it tells them."""

    text: str
    finish_reason: str | None
    tokens: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


class _Server:
    """One OpenAI-compatible server."""

    def __init__(
        self, url: str, http: httpx.Client, body: dict[str, Any], headers: dict[str, str], timeout: float
    ) -> None:
        self._root = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.name = _without_password(self._root)
        self._http, self._body, self._headers, self._timeout = http, body, headers, timeout
        self._logprobs = True  # until it refuses

    @property
    def model(self) -> str:
        return str(self._body["model"])

    def find_model(self) -> None:
        """Use the model that was named, or the first that the server has."""
        if self._body["model"] is None:
            try:
                self._body["model"] = str(self._send("GET", "models")["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise ServerError(self.name, "lists no model at /v1/models", "name one with model=") from error

    def complete(self, prompt: str) -> _Text:
        body = {**self._body, "prompt": prompt}
        if self._logprobs:
            try:
                return self._read(self._send("POST", "completions", {**body, "logprobs": TOP}))
            except ServerError as error:
                if error.status not in (400, 422):
                    raise
        # the refusal may be about log probabilities or about something else: the plain request tells
        text = self._read(self._send("POST", "completions", body))
        self._logprobs = False
        return text

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"{self._root}/v1/{path}"
        try:
            reply = self._http.request(method, url, json=body, headers=self._headers, timeout=self._timeout)
        except httpx.TimeoutException as error:
            problem = f"no answer from /v1/{path} within {self._timeout:g} s"
            raise ServerError(self.name, problem, "raise timeout=, or lower max_tokens=") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"cannot be reached ({error})"
            raise ServerError(self.name, problem, "check the address and that the server runs") from error
        if reply.is_error:
            remedy = _REMEDIES.get(reply.status_code, "read the server's message or its log")
            problem = f"/v1/{path} answered {reply.status_code} {reply.reason_phrase}: {reply.text[:200]}"
            raise ServerError(self.name, problem, remedy, reply.status_code)
        try:
            return reply.json()
        except ValueError as error:
            problem = f"/v1/{path} did not answer in JSON"
            raise ServerError(self.name, problem, "pass the root of an OpenAI-compatible server") from error

    def _read(self, reply: Any) -> _Text:
        try:
            choice = reply["choices"][0]
            logprobs = choice.get("logprobs") or {}
            return _Text(
                text=str(choice["text"]),
                finish_reason=choice.get("finish_reason"),
                tokens=[str(token) for token in logprobs.get("tokens") or ()],
                ids=[int(token) for token in choice.get("token_ids") or ()],
                top=[dict(best or {}) for best in logprobs.get("top_logprobs") or ()],
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            problem = f"/v1/completions answered without choices[0].text ({error!r})"
            raise ServerError(self.name, problem, "pass the root of an OpenAI-compatible server") from error


def _ask(server: _Server, prompts: Seq[str], many: int) -> list[_Text]:
    """Every prompt's text, `many` requests at a time; the first failure ends the audit."""
    if many == 1:
        return [server.complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(many) as pool:
        futures = [pool.submit(server.complete, prompt) for prompt in prompts]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ask_first(
    server: _Server, prompts: Seq[str], others: int, concurrency: Seq[int], watch: Watch | None
) -> list[_Text]:
    """The reference's texts; the first answer's time is what the estimate is made of."""
    begin = time.perf_counter()
    first = _ask(server, prompts[:1], 1)
    each = time.perf_counter() - begin
    if watch is not None:
        rounds = [-(-max(len(prompts), many) // many) for many in concurrency]
        seconds = each * (len(prompts) + others * sum(rounds))
        watch.on_estimate(Estimate(len(prompts), len(prompts), others * len(concurrency), seconds, seconds))
    return first + _ask(server, prompts[1:], 1)


def _run(server: _Server, prompts: Seq[str], wanted: list[_Text], many: int, tie: float | None) -> Run:
    start = time.perf_counter()
    crowd = [prompts[n % len(prompts)] for n in range(max(len(prompts), many))]  # copies fill it up
    texts = _ask(server, crowd, many)
    seconds = time.perf_counter() - start
    found: list[Difference | None] = [None] * len(prompts)
    for n, got in enumerate(texts):
        n %= len(prompts)
        found[n] = found[n] or compare(wanted[n], got, tie)
    return Run(server.name, many, None, [Finding(n, d) for n, d in enumerate(found)], seconds=seconds)


def compare(want: _Text, got: _Text, tie: float | None) -> Difference | None:
    """The first difference: by token where both servers tell them, else by character. tie None: texts were sampled."""
    if want.ids and got.ids:
        place, unit = first_difference(want.ids, got.ids), "token"
    elif want.tokens and got.tokens:
        place, unit = first_difference(want.tokens, got.tokens), "token"
    else:
        place, unit = first_difference(want.text, got.text), "character"
    if place is None and want.text != got.text:  # tokens that read alike, in other bytes
        place, unit = first_difference(want.text, got.text), "character"
    if place is not None:
        return _token_difference(want, got, place, tie) if unit == "token" else _text_difference(want, got, place, tie)
    if want.finish_reason == got.finish_reason:
        return None
    why = f"the same text, but finish reason {want.finish_reason!r} against {got.finish_reason!r}"
    return Difference(len(want.text), None, None, "bug", why, "character", before=ending(want.text))


def _token_difference(want: _Text, got: _Text, place: int, tie: float | None) -> Difference:
    margin, kind, why = _explain(want, _name(got, place), place, tie)
    parted = first_difference(want.text, got.text)
    at = _offset(want, place) if parted is None else min(parted, _offset(want, place) or parted)
    return Difference(
        place, _token(want, place), _token(got, place), kind, why, "token", margin, tie, *_around(want, got, at)
    )


def _text_difference(want: _Text, got: _Text, place: int, tie: float | None) -> Difference:
    """Where only texts are known; the reference's own tokens, if any, still tell its margin."""
    index = next((n for n in range(len(want.tokens)) if _offset(want, n + 1) > place), len(want.tokens))
    rest = got.text[_offset(want, index) :]
    candidates = want.top[index] if index < len(want.top) else {}
    said = max((t for t in candidates if t and rest.startswith(t)), key=len, default=None)
    margin, kind, why = _explain(want, said, index, tie)
    sides = [Token(text[place : place + 1]) if place < len(text) else None for text in (want.text, got.text)]
    return Difference(place, sides[0], sides[1], kind, why, "character", margin, tie, *_around(want, got, place))


def _explain(want: _Text, said: str | None, place: int, tie: float | None) -> tuple[float | None, Kind, str]:
    """The reference's margin at a token, and what it says about the token that came instead."""
    best = sorted((want.top[place] if place < len(want.top) else {}).values(), reverse=True)
    if len(best) < 2:
        return None, "unknown", "the reference gave no log probabilities here, so the cause is unknown"
    margin = best[0] - best[1]
    says = f"the reference's best two tokens are {margin:.3g} apart in log probability"
    if tie is None:
        return margin, "unknown", f"{says}, but the noise of a sampled text is not known"
    behind = best[0] - want.top[place].get(said, -float("inf")) if said is not None else float("inf")
    if behind < tie:
        return margin, "tie", f"{says}, the threshold is {tie:g}"
    if margin < tie:
        return margin, "unknown", f"{says}, but the token that came is not one of them"
    return margin, "bug", f"{says}, the threshold is {tie:g}"


def _around(want: _Text, got: _Text, at: int) -> tuple[str, str, str]:
    return ending(want.text[:at]), want.text[at : at + _AFTER], got.text[at : at + _AFTER]


def _offset(text: _Text, place: int) -> int:
    """Where a token begins, in characters."""
    return sum(map(len, text.tokens[:place]))


def _name(text: _Text, place: int) -> str | None:
    return text.tokens[place] if place < len(text.tokens) else None


def _token(text: _Text, place: int) -> Token | None:
    if place >= max(len(text.tokens), len(text.ids)):
        return None
    return Token(_name(text, place) or "", text.ids[place] if place < len(text.ids) else None)


def _settings(servers: list[_Server], body: dict[str, Any], tie: float) -> dict[str, str]:
    named = {f"server {n + 1}": f"{server.name}, model {server.model}" for n, server in enumerate(servers)}
    given = {name: str(value) for name, value in body.items()}
    return {**named, **given, "tie threshold": f"{tie:g} in log probability", **versions()}


def _check(urls: Seq[str], prompts: Seq[str], concurrency: Seq[int]) -> None:
    if isinstance(urls, str) or len(urls) < 2:
        raise ConfigError("urls", urls, "fewer than two servers", "pass the reference first, then those to compare")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("urls", url, "not an http address", "pass something like http://localhost:8000")
    if isinstance(prompts, str) or not len(prompts):
        raise ConfigError("prompts", prompts, "not a list with at least one prompt", "pass a list of texts")
    if not concurrency or min(concurrency) < 1:
        raise ConfigError("concurrency", concurrency, "not numbers of at least 1", "pass for example (1, 8)")


def _without_password(url: str) -> str:
    """A url to show: user and password stay out of reports."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
