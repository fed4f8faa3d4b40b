"""Replicas on Ray Serve: one address, the same answers, and nothing lost when a replica is killed or replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="faircopy[serve] is not installed")

from faircopy import LLM, SamplingParams, bundled
from faircopy.testing import ByteTokenizer, TableModel

HERE = "http://127.0.0.1:8571"
COMPLETIONS = f"{HERE}/v1/completions"
ENGINE: dict[str, Any] = {"cache_memory": "32MiB", "dtype": "float32", "threads": 1, "max_batch": 16}


def test_a_prompt_goes_where_its_beginning_is_unless_that_replica_is_busier() -> None:
    from faircopy.ray.prefixes import BLOCK, PrefixHomes, prefix_keys

    long, other = {"prompt": "a" * 3 * BLOCK}, {"prompt": "b" * BLOCK}
    homes = PrefixHomes(threshold=2)
    assert homes.order(prefix_keys(long), {"x": 1, "y": 0}) == ["y", "x"]  # not known: the least busy one
    homes.sent(prefix_keys(long), "x")
    assert homes.order(prefix_keys(long), {"x": 2, "y": 0}) == ["x", "y"]
    assert homes.order(prefix_keys({"prompt": "a" * 2 * BLOCK + "c"}), {"x": 2, "y": 0}) == ["x", "y"]
    assert homes.order(prefix_keys(long), {"x": 3, "y": 0}) == ["y", "x"]
    assert homes.order(prefix_keys(other), {"x": 2, "y": 0}) == ["y", "x"]
    homes.gone("x")
    assert homes.order(prefix_keys(long), {"x": 2, "y": 0}) == ["y", "x"]
    talk = [{"role": "user", "content": "d" * BLOCK}]
    assert prefix_keys({"messages": talk})[0] == prefix_keys({"messages": [*talk, *talk]})[0]


def test_a_fleet_is_checked() -> None:
    pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from faircopy.ray.deployment import Fleet

    for name, value in {"replicas": 0, "max_replicas": 0, "hedge": float("nan")}.items():
        with pytest.raises(ValueError, match=name):
            Fleet(**{name: value})  # type: ignore[arg-type]


def test_a_serve_config_is_read_as_the_command_lines_options_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from faircopy.ray.deployment import read_options

    monkeypatch.setenv("FAIRCOPY_API_KEYS", "b")
    server = {"api_keys": "a", "cors": ["http://x"], "audit_folder": "found", "max_queue": 3}
    engine, config, fleet = read_options({"engine": {"target": "t", "tensor_parallel": 4}, "server": server})
    assert (config.api_keys, config.cors, config.max_queue) == (("a", "b"), ("http://x",), 3)
    assert config.audit_folder == Path("found") and fleet.devices == 4 and engine["drafter_per_request"]
    assert read_options({"engine": {"target": "t"}, "fleet": {"devices": 2}})[2].devices == 2
    for options, named in (
        ({}, "engine.target"),
        ({"engine": {"target": "t", "max_bach": 1}}, "max_batch"),
        ({"engine": {"target": "t"}, "server": {"max_qeue": 1}}, "max_queue"),
        ({"engine": {"target": "t"}, "fleet": {"replica": 1}}, "replicas"),
        ({"engin": {}}, "engine"),
    ):
        with pytest.raises(ValueError, match=named):
            read_options(options)


def test_the_deployments_that_come_along_are_what_ray_serve_and_we_accept() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="faircopy[ray] is not installed")
    yaml = pytest.importorskip("yaml")
    from faircopy.ray.deployment import read_options

    folder = Path(__file__).parents[1] / "deploy" / "ray"
    cluster = yaml.safe_load((folder / "kuberay.yaml").read_text())
    for text in ((folder / "serve_config.yaml").read_text(), cluster["spec"]["serveConfigV2"]):
        (application,) = schema.ServeDeploySchema(**yaml.safe_load(text)).applications
        module, _, name = application.import_path.partition(":")
        assert callable(getattr(import_module(module), name))
        _, _, fleet = read_options(application.args)
        assert fleet.max_replicas == cluster["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"]


def test_a_replica_whose_engine_has_ended_fails_its_health_check() -> None:
    pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from faircopy.ray.asgi import Head
    from faircopy.ray.deployment import Replica
    from faircopy.server.settings import ServerConfig

    replica = Replica(lambda: LLM(TableModel(), tokenizer=ByteTokenizer(), cache_memory="1MiB"), ServerConfig())

    async def run() -> None:
        replica.check_health()
        head, *_ = [piece async for piece in replica.answer("GET", "/health", [], b"")]
        assert isinstance(head, Head) and head.status == 200
        replica.check_health()
        await replica._service.stop()

    asyncio.run(run())
    with pytest.raises(RuntimeError, match="ended"):
        replica.check_health()


def test_a_replica_ends_when_its_engine_does_before_a_client_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams go on from another replica, as those of a process that was killed do."""
    pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from faircopy.errors import RankError
    from faircopy.ray import deployment
    from faircopy.server.settings import ServerConfig

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended

    monkeypatch.setattr(deployment.os, "_exit", end)
    llm = LLM(TableModel(), tokenizer=ByteTokenizer(), cache_memory="1MiB")
    replica = deployment.Replica(lambda: llm, ServerConfig())
    step, left = llm.engine.step, iter(range(3, 0, -1))

    def die_later() -> Any:
        if not next(left, 0):
            raise RankError("rank", 1, "died", "start again")
        return step()

    llm.engine.step = die_later  # type: ignore[method-assign]
    seen: list[Any] = []

    async def run() -> None:
        body = {"prompt": [1], "max_tokens": 9, "stream": True, "ignore_eos": True}
        headers = [(b"content-type", b"application/json")]
        async for piece in replica.answer("POST", "/v1/completions", headers, body):
            seen.append(piece)

    with pytest.raises(Ended):
        asyncio.run(run())
    assert not any(b"error" in piece for piece in seen[1:])  # the head comes first, if anything does


class Handle:
    """One replica's answers, as Ray Serve's handle gives them."""

    def __init__(self, replica: Any) -> None:
        self._replica, self.answer = replica, self

    def options(self, stream: bool) -> Handle:
        return self

    def remote(self, **arguments: Any) -> Handle:
        self._pieces = self._replica.answer(**arguments)
        return self

    def __aiter__(self) -> Any:
        return self._pieces

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_replicas_headers(stream: bool) -> None:
    """Without those of CORS a browser does not show it to the page that asked."""
    pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from starlette.requests import Request

    from faircopy.ray.asgi import _scope
    from faircopy.ray.deployment import Ingress, Replica
    from faircopy.server.settings import ServerConfig

    body = json.dumps({"prompt": [1], "max_tokens": 3, "stream": stream}).encode()
    asked = _scope("POST", "/v1/completions", [(b"content-type", b"application/json"), (b"origin", b"https://a.page")])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> Any:
        llm = LLM(TableModel(), tokenizer=ByteTokenizer(), cache_memory="1MiB")
        replica = Replica(lambda: llm, ServerConfig(cors=("https://a.page",)))
        answer = await Ingress(Handle(replica))(Request(asked, receive))
        if stream:
            assert [piece async for piece in answer.body_iterator][-1] == b"data: [DONE]\n\n"
        await replica._service.stop()
        return answer.headers

    headers = asyncio.run(run())
    assert headers["access-control-allow-origin"] == "https://a.page" and headers["x-request-id"]
    assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")


def test_a_stream_that_no_replica_can_finish_ends_with_an_error() -> None:
    pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from faircopy.ray.deployment import _joined
    from faircopy.server.relay import ReplicaLost

    async def rest() -> AsyncGenerator[bytes]:
        yield b"data: {}\n\n"
        raise ReplicaLost

    async def run() -> bytes:
        return b"".join([piece async for piece in _joined(b"data: 1\n\n", rest())])

    *_, error, done, _ = asyncio.run(run()).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "overloaded_error" and done == b"data: [DONE]"


@pytest.mark.parametrize(("known", "wanted"), [({"GPU": 8.0}, {"num_gpus": 4, "num_cpus": 0}), ({}, {"num_cpus": 1})])
def test_an_engine_of_a_batch_has_a_device_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: dict[str, float], wanted: dict[str, int]
) -> None:
    pytest.importorskip("ray.data", reason="faircopy[ray] is not installed")
    from faircopy.ray import batch

    given: dict[str, Any] = {}

    class Lines:
        def map_batches(self, kind: type, **options: Any) -> Lines:
            given.update(options)
            return self

        def iter_rows(self) -> list[dict[str, str]]:
            return [{"answer": "{}"}]

    monkeypatch.setattr(batch.ray, "init", lambda **options: None)
    monkeypatch.setattr(batch.ray, "put", lambda value: value)
    monkeypatch.setattr(batch.ray, "cluster_resources", lambda: known)
    monkeypatch.setattr(batch.ray.data, "read_text", lambda *args, **options: Lines())

    async def run() -> list[Any]:
        return [one async for one in batch.answers(tmp_path, frozenset(), LLM, 8, 2, None, devices=4)]

    assert asyncio.run(run()) == [{}] and given.items() >= wanted.items()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    """Deploys two replicas; called again, it replaces them."""
    ray = pytest.importorskip("ray", reason="faircopy[ray] is not installed")
    serve = pytest.importorskip("ray.serve", reason="faircopy[ray] is not installed")
    from faircopy.ray.deployment import Fleet, application
    from faircopy.server.settings import ServerConfig

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": 8571})
    make = partial(LLM, bundled.target(), bundled.draft(), drafter_per_request=True, **ENGINE)

    def deploy(name: str = "target") -> None:
        config = ServerConfig(name=name)
        serve.run(application(make, config, Fleet(replicas=2, cpus=0.5), 512), name="faircopy")

    deploy()
    yield deploy
    serve.shutdown()
    ray.shutdown()


def pids() -> list[int]:
    """The processes of the replicas."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    replicas = [actor for actor in named if "#Replica#" in actor["name"]]
    actors = [ray.get_actor(actor["name"], namespace=actor["namespace"]) for actor in replicas]
    return list(ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors]))


def body(n: int) -> dict[str, Any]:
    prompts = bundled.prompts()
    return {
        "prompt": prompts[n][: 30 + n],
        "seed": n,
        "temperature": (n % 2) * 0.9,
        "max_tokens": 96,
        "ignore_eos": True,
    }


def streamed(n: int, events: list[int]) -> str:
    """The text of a stream; `events` counts what came."""
    text = ""
    with httpx.stream("POST", COMPLETIONS, json={**body(n), "stream": True}, timeout=120) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                events[n] += 1
    assert line == "data: [DONE]" or not line
    return text


def test_the_ingress_answers_as_a_server_does(fleet: Any) -> None:
    with httpx.Client(base_url=HERE, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "target"
        assert client.get("/health").json() == {"status": "ok"} and client.get("/nothing").status_code == 404
        refused = client.post(COMPLETIONS, json={"prompt": "a", "temprature": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temprature"
        assert client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "n": 99}).status_code == 400
        broken = client.post(COMPLETIONS, content=b"{", headers={"content-type": "application/json"})
        assert broken.json()["error"]["code"] == "invalid_json"
        assert client.post(COMPLETIONS, content=b"[" * 100_000).status_code == 400


def test_32_streams_survive_a_replica_that_is_killed(fleet: Any) -> None:
    """kill -9 in the middle: all 32 complete, and each is the text that one engine writes alone without drafts."""
    llm = LLM(bundled.target(), **ENGINE)
    params = [
        SamplingParams(max_tokens=96, seed=n, temperature=body(n)["temperature"], ignore_eos=True) for n in range(32)
    ]
    wanted = [answer.text for answer in llm.generate([body(n)["prompt"] for n in range(32)], params, progress=False)]
    victim, *others = pids()
    assert len(others) == 1
    events = [0] * 32
    with ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(streamed, n, events) for n in range(32)]
        while sum(count >= 3 for count in events) < 12:
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        under_way = sum(not stream.done() for stream in streams)
        texts = [stream.result() for stream in streams]
    assert under_way >= 16 and texts == wanted
    assert victim not in pids()


def test_a_batch_on_several_engines_gives_what_one_gives(fleet: Any, tmp_path: Path) -> None:
    from faircopy.ray.batch import answers

    lines = [{"custom_id": f"r{n}", "url": "/v1/completions", "body": {**body(n), "max_tokens": 8}} for n in range(12)]
    requests = tmp_path / "in.jsonl"
    requests.write_text("\ufeff" + "".join(json.dumps(line) + "\n" for line in lines))

    async def run() -> dict[str, str]:
        make = partial(LLM, bundled.target(), drafter_per_request=True, **ENGINE)
        found = answers(requests, frozenset({"r3", "r4"}), make, 8, 2)
        return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] async for one in found}

    texts = asyncio.run(run())
    assert sorted(texts) == sorted(f"r{n}" for n in range(12) if n not in (3, 4))
    llm = LLM(bundled.target(), **ENGINE)
    for n in (0, 1, 11):
        params = SamplingParams(max_tokens=8, seed=n, temperature=body(n)["temperature"])
        assert llm.generate(body(n)["prompt"], params)[0].text == texts[f"r{n}"]


@pytest.mark.skipif("FAIRCOPY_LONG_TESTS" not in os.environ, reason="takes half a minute: set FAIRCOPY_LONG_TESTS=1")
def test_replicas_are_replaced_without_a_failed_request(fleet: Any) -> None:
    ended, statuses = threading.Event(), []

    def ask() -> None:
        while not ended.is_set():
            statuses.append(httpx.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 8}, timeout=60).status_code)

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask) for _ in range(3)]
        fleet(name="renamed")
        assert httpx.get(f"{HERE}/v1/models", timeout=60).json()["data"][0]["id"] == "renamed"
        ended.set()
        for client in clients:
            client.result()
    assert len(statuses) > 3 and set(statuses) == {200}
