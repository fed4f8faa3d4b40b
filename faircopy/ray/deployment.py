"""Replicas behind one address, on Ray Serve: the OpenAI application in each replica, and an ingress that passes on.

What is ours: the router's rule (`router.py`), and that an answer goes on from another replica when its own dies
(`server/relay.py`). Placement, scaling, health checks, restarts, draining and the transport are Ray Serve's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from faircopy.config import EngineConfig, refuse_unknown
from faircopy.errors import ConfigError
from faircopy.kernels.memory import keep_all_objects
from faircopy.llm import LLM
from faircopy.ray.asgi import Head, Headers, call
from faircopy.ray.router import PrefixRouter
from faircopy.server import relay
from faircopy.server.answers import DONE
from faircopy.server.app import create_app
from faircopy.server.endpoints import BODIES
from faircopy.server.settings import ServerConfig, read_keys

log = logging.getLogger("faircopy.server")
Json = dict[str, Any]
NAME = "faircopy"  # of the application in Ray Serve
BUSY = (429, 503)  # a replica that refuses a moved stream with one of these is asked again
BUSY_WAIT = 0.5  # seconds
CONNECTION_HEADERS = (b"content-length", b"transfer-encoding", b"connection", b"host")  # belong to one connection


@dataclass(frozen=True)
class Fleet:
    """How many replicas there are and what each has."""

    replicas: int = 1
    max_replicas: int | None = None  # None: always `replicas`
    queue_target: int = 16  # requests per replica that scaling aims at
    busy_threshold: int = 4  # a replica with the prefix is passed over if it has that many requests more
    devices: int = 1  # that share a replica's model
    gpus: float | None = None  # per replica; None: as many as devices, where there are any
    cpus: float = 1.0
    hedge: float | None = None  # seconds without a first byte after which a second replica is asked

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "below 1", "pass 1 or more")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError("max_replicas", self.max_replicas, "below replicas", "pass at least as many")
        if self.hedge is not None and not 0 <= self.hedge < math.inf:
            raise ConfigError("hedge", self.hedge, "not a time", "pass seconds, or leave it out")

    def options(self, most_requests: int, drain: float) -> Json:
        """The replicas' deployment, in Ray Serve's words."""
        gpus = self.gpus if self.gpus is not None else float(self.devices * (ray.cluster_resources().get("GPU", 0) > 0))
        scaling: Json = {"num_replicas": self.replicas}
        if self.max_replicas is not None:
            scaling = {"autoscaling_config": self._autoscaling()}
        return {
            **scaling,
            "max_ongoing_requests": most_requests,
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": gpus},
            "health_check_period_s": 5.0,
            "health_check_timeout_s": 30.0,
            "graceful_shutdown_timeout_s": drain,
            "request_router_config": RequestRouterConfig(
                request_router_class=PrefixRouter, request_router_kwargs={"threshold": self.busy_threshold}
            ),
        }

    def _autoscaling(self) -> AutoscalingConfig:
        """By requests per replica, averaged over ten seconds: a full queue must not wait for half a minute."""
        return AutoscalingConfig(
            min_replicas=self.replicas,
            max_replicas=self.max_replicas,
            target_ongoing_requests=self.queue_target,
            metrics_interval_s=2.0,
            look_back_period_s=10.0,
            upscale_delay_s=5.0,
        )


class Replica:
    """One engine with the application that `faircopy serve` runs."""

    def __init__(self, make: Callable[[], LLM], config: ServerConfig) -> None:
        llm = make()
        llm.warm_up()
        self._app = create_app(llm, config)
        keep_all_objects()
        self._service, self._started = self._app.state.service, False

    async def answer(self, method: str, path: str, headers: Headers, body: Json | bytes) -> AsyncIterator[Head | bytes]:
        self._start()
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        async for piece in call(self._app, method, path, headers, content):
            self._end_without_engine()
            yield piece

    def _end_without_engine(self) -> None:
        """A replica whose engine has ended (a rank died) ends too, so that its answers go on from another one."""
        if not self._service.healthy:
            log.error("the engine's thread has ended: this replica ends")
            os._exit(1)

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose check raises."""
        if self._started and not self._service.healthy:
            raise RuntimeError("the engine's thread has ended")

    def _start(self) -> None:
        """In the event loop that the requests run in."""
        if not self._started:
            self._started = True
            self._service.start()


class Refused(Exception):
    """A replica's answer that is not 200."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status)
        self.head, self.body = head, body

    def response(self) -> Response:
        return _response(self.body, self.head)


class Ingress:
    """Takes HTTP requests and passes them on; answers of the two endpoints that write text survive their replica."""

    def __init__(self, replicas: DeploymentHandle, hedge: float | None = None) -> None:
        self._replicas, self._hedge = replicas, hedge

    async def __call__(self, request: Request) -> Response:
        content = await request.body()
        headers = [pair for pair in request.headers.raw if pair[0].lower() not in CONNECTION_HEADERS]
        body = _object(content) if request.url.path in BODIES and request.method == "POST" else None
        try:
            if body is None:
                return await self._pass(request.method, request.url.path, headers, content)
            heads: list[Head] = []  # of the replicas that answered
            send = self._sender(request.url.path, headers, heads)
            if not body.get("stream"):
                return _response(await relay.whole(body, send), heads[-1])
            events = relay.stream(body, send)
            first = await anext(events)  # now it is known that it is not refused
            return StreamingResponse(_joined(first, events), headers=_kept(heads[-1]))
        except Refused as refused:
            return refused.response()
        except relay.ReplicaLost:
            return _response(LOST, Head(503, [(b"content-type", b"application/json"), (b"retry-after", b"5")]))

    def _sender(self, path: str, headers: Headers, heads: list[Head]) -> relay.Send:
        send = partial(self._send, "POST", path, headers, heads)
        return send if self._hedge is None else lambda body: relay.hedged(body, send, self._hedge or 0.0)

    async def _send(
        self, method: str, path: str, headers: Headers, heads: list[Head], body: Json
    ) -> AsyncGenerator[bytes]:
        """One replica's answer, which must be 200; its head is added to heads."""
        async with aclosing(self._pieces(method, path, headers, body)) as pieces:
            head = await anext(pieces)
            if head.status in BUSY and body.get("continued"):
                await asyncio.sleep(BUSY_WAIT)
                raise relay.ReplicaLost(f"a replica refused with {head.status}")
            if head.status != 200:
                raise Refused(head, b"".join([piece async for piece in pieces]))
            heads.append(head)
            async for piece in pieces:
                yield piece

    async def _pass(self, method: str, path: str, headers: Headers, content: bytes) -> Response:
        async def attempt() -> list[Any]:
            return [piece async for piece in self._pieces(method, path, headers, content)]

        head, *body = await relay.retried(attempt)
        return _response(b"".join(body), head)

    async def _pieces(self, method: str, path: str, headers: Headers, body: Json | bytes) -> AsyncGenerator[Any]:
        """The head and the body's pieces, of the replica that Ray Serve's router chooses.

        A client that leaves ends the request there too.
        """
        streaming = self._replicas.options(stream=True)
        answer = streaming.answer.remote(method=method, path=path, headers=headers, body=body)
        try:
            async for piece in answer:
                yield Head(*piece) if isinstance(piece, tuple) else piece
        except RayTaskError:
            raise  # the replica lives: an error of ours
        except RayError as error:
            raise relay.ReplicaLost(str(error)) from error
        finally:
            answer.cancel()


LOST = json.dumps({"error": {"message": "no replica could answer", "type": "overloaded_error", "param": None}}).encode()


def application(make: Callable[[], LLM], config: ServerConfig, fleet: Fleet, most_requests: int) -> serve.Application:
    """What `serve.run` takes. make: loads a replica's LLM; most_requests: that a replica has at once."""
    replica = serve.deployment(Replica, **fleet.options(most_requests, config.drain)).bind(make, config)
    ingress = serve.deployment(Ingress, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replica, fleet.hedge)


def run(make: Callable[[], LLM], config: ServerConfig, fleet: Fleet, most_requests: int) -> None:
    """Serve until a signal comes, on the cluster of RAY_ADDRESS or on this machine; a second signal ends at once."""
    ray.init(ignore_reinit_error=True)
    ended = _signalled()
    serve.start(http_options={"host": config.host, "port": config.port})
    serve.run(application(make, config, fleet, most_requests), name=NAME)
    ended.wait()
    serve.delete(NAME)  # drains the replicas
    ray.shutdown()


def _signalled() -> threading.Event:
    """Set by the first signal; the next one does what it does by default."""
    ended = threading.Event()

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return ended


def build(options: Json) -> serve.Application:
    """For `serve run` and serve_config.yaml: the options of LLM under `engine`, of the server and of the fleet."""
    engine, config, fleet = read_options(options)
    return application(partial(LLM, **engine), config, fleet, engine.get("max_batch", 64) + config.max_queue)


def read_options(options: Json) -> tuple[Json, ServerConfig, Fleet]:
    """What a serve_config.yaml says; API keys come from the environment too, as for `faircopy serve`."""
    refuse_unknown("args", options, ("engine", "server", "fleet"))
    engine, server, fleet = (dict(options.get(part) or {}) for part in ("engine", "server", "fleet"))
    refuse_unknown("engine", engine, {*EngineConfig.__dataclass_fields__, *signature(LLM).parameters} - {"options"})
    refuse_unknown("server", server, ServerConfig.__dataclass_fields__)
    refuse_unknown("fleet", fleet, Fleet.__dataclass_fields__)
    if engine.get("target") is None:
        raise ConfigError("engine.target", None, "not given", "name a folder or a hub id")
    for name in {"api_keys", "cors"} & server.keys():
        server[name] = tuple(server[name].split() if isinstance(server[name], str) else server[name])
    if "audit_folder" in server:
        server["audit_folder"] = Path(server["audit_folder"])
    server["api_keys"] = (*server.get("api_keys", ()), *read_keys(None))
    devices = engine.get("tensor_parallel", 1) * engine.get("pipeline_parallel", 1)
    return {"drafter_per_request": True, **engine}, ServerConfig(**server), Fleet(**{"devices": devices, **fleet})


def _object(content: bytes) -> Json | None:
    """A JSON object; None for everything else, which the replica refuses in its own words."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _joined(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """A stream; one that no replica can finish ends with an error event, as that of a single server does."""
    async with aclosing(rest):
        yield first
        try:
            async for piece in rest:
                yield piece
        except (Refused, relay.ReplicaLost) as error:
            told = error.body if isinstance(error, Refused) else LOST
            yield b"data: " + told + b"\n\n" + DONE


def _response(body: bytes, head: Any) -> Response:
    return Response(body, head.status, headers=_kept(head))


def _kept(head: Any) -> dict[str, str]:
    """A replica's headers that are the client's too: its request's number, and which pages may read the answer."""
    return {n.decode(): v.decode() for n, v in head.headers if n.lower() not in CONNECTION_HEADERS}
