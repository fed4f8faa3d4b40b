"""Ranks that share a model: the same tokens and bits as one, errors that name a rank, and shares that are read alone.

The processes are started once and load many models.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import Store
from transformers import AutoModelForCausalLM

from faircopy import LLM, SamplingParams, build, bundled
from faircopy.config import EngineConfig
from faircopy.costs import CostTable, Curve
from faircopy.errors import ConfigError, FaircopyError, RankError, UnsupportedModel
from faircopy.kernels.ranks import OneRank
from faircopy.layout.base import kv_bytes_per_token
from faircopy.model.base import Model
from faircopy.model.loader import CheckpointTensors, load_model, load_stage
from faircopy.model.shape import shape_of_checkpoint
from faircopy.model.shape_share import WHOLE, Split
from faircopy.model.transformers_backend import TransformersModel
from faircopy.parallel import launch
from faircopy.parallel.group import Group
from faircopy.parallel.interrupts import uninterrupted
from faircopy.parallel.launch import start_ranks
from faircopy.parallel.messages import from_bytes, to_bytes
from faircopy.parallel.model import ParallelModel, Pipeline, SharedModel
from faircopy.parallel.shards import Load
from faircopy.planning.limit import fit_into_memory
from faircopy.planning.memory import weight_bytes
from faircopy.testing import Plain, ScriptedDrafter, cacheless
from faircopy.types import Request, Sequence
from tests.helpers import CPU, HEADS, engine_of, head_for, mixed, random_prompts, run, scripted
from tests.zoo import BASE, SUPPORTED, make_config

WIDTHS = {
    **BASE,
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 32,
}
DENSE = {"intermediate_size": 512, "attention_bias": True, "mlp_bias": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", DENSE),
    "tied": ("qwen3", {"intermediate_size": 512, "tie_word_embeddings": True}),
    "moe": ("qwen3_moe", MOE),
    "deep": ("llama", {**DENSE, "num_hidden_layers": 4}),
    "deep moe": ("qwen3_moe", {**MOE, "num_hidden_layers": 4}),
}
DTYPES = (torch.float32, torch.bfloat16)
PARAMS = (
    SamplingParams(max_tokens=8, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, logprobs=0),
    SamplingParams(max_tokens=8, temperature=1.2, top_k=20, repetition_penalty=1.2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A checkpoint whose inner widths have groups for eight ranks, or four."""

    @cache
    def made(name: str, seed: int = 0) -> str:
        return saved(tmp_path_factory.mktemp(name), *MODELS[name], seed)

    return made


def saved(path: Path, model_type: str, options: dict[str, Any], seed: int = 0) -> str:
    """A random model of these widths; experts get as many groups as other layers."""
    torch.manual_seed(seed)
    wide = {
        name: 256 if name.endswith("_intermediate_size") and value == 48 else value for name, value in options.items()
    }
    model = AutoModelForCausalLM.from_config(make_config(model_type, wide, WIDTHS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    model.save_pretrained(path)
    return str(path)


def cases(*names: str) -> list[tuple[int, str, torch.dtype]]:
    """Everything on two ranks; on four some models in one type each."""
    two = [(2, name, dtype) for name in names for dtype in DTYPES]
    return two + [(4, name, DTYPES[n % 2]) for n, name in enumerate(names) if name != "tied"]


@pytest.fixture(scope="module")
def started() -> Iterator[dict[int, Group]]:
    """Groups by their number of ranks."""
    groups: dict[int, Group] = {}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def group(request: pytest.FixtureRequest, started: dict[int, Group]) -> Group:
    if request.param not in started:
        started[request.param] = start_ranks(request.param, CPU)
    return started[request.param]


@pytest.fixture(scope="module", autouse=True)
def other_rank_0() -> Iterator[subprocess.Popen[str]]:
    """A process that is rank 0 of two and prints rank 1's process; it starts while other tests run."""
    script = "import torch; from faircopy.parallel.launch import start_ranks; import time\n"
    script += "group = start_ranks(2, torch.device('cpu')); print(*group.pids, flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=PIPE, stderr=PIPE, text=True)
    yield process
    process.kill()


def requests(count: int) -> list[Request]:
    prompts = random_prompts(count, 200, seed=count, longest=20)
    return [Request(tuple(p), PARAMS[n % len(PARAMS)], seed=n) for n, p in enumerate(prompts)]


def written(seqs: list[Sequence]) -> list[Any]:
    return [(seq.output, seq.finished, seq.logprobs, seq.prompt_logprobs) for seq in seqs]


@cache
def alone(path: str, dtype: torch.dtype, groups: bool) -> list[Any]:
    """What one process writes without drafts, one request after the other. groups: sums are made in K groups."""
    model = load_model(path, dtype, CPU, ranks=OneRank() if groups else None)
    return [written(run(engine_of(model, max_batch=1), [request]))[0] for request in requests(8)]


def guesses(expected: list[Any], vocab: int) -> ScriptedDrafter:
    """Trees whose nodes are right in every possible number."""
    truths = [Plain(tokens) for tokens, *_ in expected]
    return scripted([list(request.prompt) for request in requests(8)], truths, mixed, vocab, wide=True)


def compare(model: Model, path: str, groups: bool) -> None:
    """Batches of 1 to 8, drafts that are chains and trees, and too few pages, against one process."""
    expected, asked = alone(path, model.dtype, groups), requests(8)
    for batch in (1, 5, 8):
        engine = engine_of(model, guesses(expected, model.vocab), max_batch=batch, k=3)
        assert written(run(engine, asked[:batch])) == expected[:batch], f"batch {batch}"
    assert engine.meter.rows_moved, "trees move rows, on every rank"
    draft = load_model(path, model.dtype, CPU)
    memory = 14 * 4 * (kv_bytes_per_token(model) + kv_bytes_per_token(draft))
    small = engine_of(model, draft=draft, max_batch=8, k=2, page=4, cache_memory=memory)
    assert written(run(small, asked)) == expected
    assert small.meter.preemptions, "the pool was to be too small"


def compare_heads(model: Model, path: str, groups: bool) -> None:
    """Draft heads read the hidden states of the target, wherever they are made."""
    expected, asked = alone(path, model.dtype, groups), requests(8)
    reference = load_model(path, model.dtype, CPU, ranks=OneRank() if groups else None)
    for method in HEADS:
        drafted = []
        for target in (reference, model):
            engine = engine_of(target, draft=head_for(path, target, method), max_batch=4, k=4)
            assert written(run(engine, asked)) == expected, method
            drafted.append((engine.meter.drafted, engine.meter.accepted))
        assert drafted[0] == drafted[1], f"{method} did not see the same states"


@pytest.mark.parametrize(("group", "name", "dtype"), cases("dense", "moe", "tied"), indirect=["group"])
def test_tensor_parallel_writes_the_bits_of_one_rank(
    folder: Callable[..., str], group: Group, name: str, dtype: torch.dtype
) -> None:
    model = ParallelModel(group, Load(folder(name), dtype, True, 1))
    whole, text = load_model(folder(name), dtype, CPU, ranks=OneRank()), list(range(3, 40))
    assert torch.equal(cacheless(model)(text), cacheless(whole)(text)), "logits differ in bits"
    compare(model, folder(name), groups=True)
    if dtype == torch.float32 and (name == "dense" or (name == "moe" and group.size == 2)):
        compare_heads(model, folder(name), groups=True)


@pytest.mark.parametrize(("group", "name", "dtype"), cases("deep", "deep moe"), indirect=["group"])
def test_a_pipeline_writes_the_bits_of_one_rank(
    folder: Callable[..., str], group: Group, name: str, dtype: torch.dtype
) -> None:
    model = Pipeline(group, Load(folder(name), dtype, True, 1, pipeline=True))
    whole, text = load_model(folder(name), dtype, CPU), list(range(3, 40))
    assert torch.equal(cacheless(model)(text), cacheless(whole)(text)), "logits differ in bits"
    compare(model, folder(name), groups=False)
    if dtype == torch.float32 and (name == "deep" or group.size == 2):
        compare_heads(model, folder(name), groups=False)


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize(("kind", "name"), [(ParallelModel, "dense"), (ParallelModel, "moe"), (Pipeline, "deep")])
def test_prompts_may_come_in_chunks(
    folder: Callable[..., str], group: Group, kind: type[SharedModel], name: str
) -> None:
    """The pass of a chunk that does not reach a prompt's end has no logits."""
    pipeline, options = kind is Pipeline, {"k": 0, "cache_memory": "8MiB", "threads": 1}
    model = kind(group, Load(folder(name), torch.float32, True, 1, pipeline=pipeline))
    prompts, params = [list(request.prompt) for request in requests(3)], SamplingParams(max_tokens=4, logprobs=2)
    one = LLM(folder(name), k_groups=not pipeline, chunk=2, dtype="float32", **options)
    whole = LLM(folder(name), k_groups=not pipeline, dtype="float32", **options).generate(prompts, params)
    for llm in (one, LLM(model, chunk=2, **options)):
        answers = llm.generate(prompts, params)
        assert [(a.token_ids, a.logprobs) for a in answers] == [(a.token_ids, a.logprobs) for a in whole]


def test_every_stage_of_a_pipeline_has_a_pass(folder: Callable[..., str], group: Group) -> None:
    """Steps of different sequences are under way; one that is aborted ends first, and the others go on."""
    model = Pipeline(group, Load(folder("deep"), torch.float32, True, 1, pipeline=True))
    engine, expected = engine_of(model, max_batch=8, k=0), alone(folder("deep"), torch.float32, False)
    seqs = [engine.add(request) for request in requests(8)]
    outputs = engine.step()
    assert len(engine._under_way) == group.size - 1, "one of the steps under way has ended"
    taking_part = [seq for step in engine._under_way for seq in step.plan.seqs]
    assert len(taking_part) == len({*taking_part}) == 8 - len(outputs)
    engine.abort(taking_part[0])
    assert taking_part[0].finished == "abort"
    while engine.busy:
        engine.step()
        engine.tables.check()
    assert all(w == e for w, e, seq in zip(written(seqs), expected, seqs, strict=True) if seq is not taking_part[0])


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("seconds", [1e-9, 10.0], ids=["cheap", "expensive"])
def test_a_draft_model_is_shared_if_its_measured_cost_says_so(
    folder: Callable[..., str], group: Group, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = Curve(((1, seconds), (64, seconds)))
    monkeypatch.setattr(build, "known_costs", lambda target, draft: CostTable(curve, curve))
    target = ParallelModel(group, Load(folder("dense"), torch.float32, True, 1))
    _, draft = build.load_draft(folder("dense", 1), target, None, EngineConfig(threads=1))
    assert isinstance(draft, ParallelModel) == (seconds > 1)
    expected = alone(folder("dense"), torch.float32, True)
    assert written(run(engine_of(target, draft=draft, k=3), requests(8))) == expected


STOCK = (
    "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3", "granitemoe", "gemma2", "gemma3", "phi", "starcoder2",
    "gpt_neox", "nemotron", "exaone4",
)  # fmt: skip


WITHOUT_PP_PLAN = ("granitemoe", "nemotron")


@pytest.mark.skipif("FAIRCOPY_LONG_TESTS" not in os.environ, reason="two minutes")
def test_stock_models_are_shared_by_their_plans(tmp_path: Path) -> None:
    group = start_ranks(2, CPU)
    for name in STOCK:
        path = saved(tmp_path / name, *SUPPORTED[name])
        kinds = (ParallelModel,) if name in WITHOUT_PP_PLAN else (ParallelModel, Pipeline)
        for dtype in DTYPES:
            for kind in kinds:
                model = kind(group, Load(path, dtype, True, 1, pipeline=kind is Pipeline))
                whole = load_model(path, dtype, CPU, ranks=None if kind is Pipeline else OneRank())
                text = list(range(3, 40))
                assert torch.equal(cacheless(model)(text), cacheless(whole)(text)), f"{name} {dtype}"
                compare(model, path, groups=kind is ParallelModel)
    group.close()


@pytest.mark.skipif("FAIRCOPY_LONG_TESTS" not in os.environ, reason="half a minute")
def test_eight_ranks_write_the_bits_of_one(folder: Callable[..., str]) -> None:
    group = start_ranks(8, CPU)
    dense = saved(Path(folder("dense") + "-8"), "llama", {**DENSE, "head_dim": 64})
    for path in (
        dense,
        saved(Path(folder("moe") + "-8"), "qwen3_moe", {**MOE, "moe_intermediate_size": 512, "head_dim": 64}),
    ):
        for dtype in DTYPES:
            compare(ParallelModel(group, Load(path, dtype, True, 1)), path, groups=True)
    group.close()


class Share:
    """A rank that is never asked to gather: loading a dense model needs none of the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError("loading gathers nothing")


class Counter:
    """Counts what is read of a checkpoint: all of it, and what is alive at one time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.peak, self.live = 0, 0, 0
        whole, part = CheckpointTensors.__call__, CheckpointTensors.part
        monkeypatch.setattr(CheckpointTensors, "__call__", lambda *args: self.note(whole(*args)))
        monkeypatch.setattr(CheckpointTensors, "part", lambda *args: self.note(part(*args)))

    def note(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None:
            self.read, self.live = self.read + tensor.nbytes, self.live + tensor.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(tensor, self.drop, tensor.nbytes)
        return tensor

    def drop(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_share_and_holds_one_tensor_more(
    folder: Callable[..., str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(Path(folder("dense")) / "model.safetensors")
    whole = sum(t.nbytes for t in tensors.values())
    replicated = sum(t.nbytes for name, t in tensors.items() if t.ndim == 1 and "proj" not in name)
    key_heads = sum(t.nbytes for name, t in tensors.items() if "k_proj" in name or "v_proj" in name)
    repeated = key_heads * (max(1, size // 2) - 1) // size  # two key heads: four ranks hold each of them twice
    for rank in range(size):
        counter = Counter(monkeypatch)
        model = load_model(folder("dense"), torch.float32, CPU, ranks=Share(rank, size))
        kept = counter.live  # norms and the embedding, which are not packed
        padding = 128 * 4 * 16 * 2  # of the vocabulary's last share
        biases = sum(t.nbytes for name, t in tensors.items() if name.endswith("bias"))
        assert counter.read <= whole / size + replicated + repeated + biases + padding
        assert counter.peak - kept <= max(t.nbytes for t in tensors.values())
        assert model.weight_bytes <= whole / size + repeated + padding
        monkeypatch.undo()


def test_a_rank_of_a_pipeline_reads_its_layers(folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = sum(t.nbytes for n, t in load_file(Path(folder("deep")) / "model.safetensors").items() if "layers.0" in n)
    counts = []
    for rank in range(4):
        counter = Counter(monkeypatch)
        load_stage(folder("deep"), torch.float32, CPU, True, rank, 4)
        counts.append(counter.read)
        monkeypatch.undo()
    table = 200 * 128 * 4
    assert counts == [layer + table, layer, layer, layer + table + 128 * 4]


def test_what_ranks_cannot_share_is_refused(folder: Callable[..., str], checkpoint: Callable[..., str]) -> None:
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ConfigError, "tensor_parallel = 3", lambda: EngineConfig(tensor_parallel=3)),
        (ConfigError, "pipeline_parallel = 0", lambda: EngineConfig(pipeline_parallel=0)),
        (ConfigError, "pipeline_parallel = 2", lambda: EngineConfig(pipeline_parallel=2, tensor_parallel=2)),
        (ConfigError, "pipeline_parallel = 2", lambda: EngineConfig(pipeline_parallel=2, k_groups=True)),
        (ConfigError, "strategy", lambda: EngineConfig(tensor_parallel=2, strategy="padded")),
        (ConfigError, "attention output have 1 groups", lambda: shared(checkpoint("llama"), 2)),
        (ConfigError, "use 4", lambda: shared(folder("moe"), 8)),
        (ConfigError, "has 2 layers; use 2 or fewer", lambda: load_stage(folder("dense"), None, CPU, True, 0, 4)),
        (UnsupportedModel, "no pp_plan", lambda: load_stage(checkpoint("gpt2"), None, CPU, True, 0, 2)),
        (UnsupportedModel, "more than hidden states", lambda: load_stage(checkpoint("gemma3n"), None, CPU, True, 0, 2)),
        (UnsupportedModel, "tp_plan has 'colwise_gather_output'", lambda: shared(checkpoint("olmo2"), 2)),
        (UnsupportedModel, "names no layer", lambda: shared(checkpoint("gpt2"), 2)),
        (ConfigError, "needs the path", lambda: LLM(load_model(folder("dense"), None, CPU), tensor_parallel=2)),
    ]
    for kind, words, make in refused:
        with pytest.raises(kind, match=words):
            make()


def shared(path: str, size: int) -> Model:
    return load_model(path, torch.float32, CPU, ranks=Share(0, size))


def test_a_rank_that_dies_ends_the_job_with_its_name(
    folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through LLM, whose answers are those of one rank before; in the middle of a pass, and idle."""
    prompts = [list(request.prompt) for request in requests(4)]
    options: dict[str, Any] = {"cache_memory": "8MiB", "threads": 1}
    llm = LLM(folder("dense"), "ngram", k=2, tensor_parallel=2, **options)
    one = LLM(folder("dense"), k=2, k_groups=True, **options)
    assert [a.token_ids for a in llm.generate(prompts)] == [a.token_ids for a in one.generate(prompts)]
    assert "2 ranks" in llm.explain()["backend"]
    assert isinstance(llm.model, ParallelModel)
    group = llm.model.group
    (worker,), gather, gathers, killed = group.pids, group.gather, count(1), []

    def kill_at_the_50th(x: Tensor) -> Tensor:
        if next(gathers) == 50:
            os.kill(worker, signal.SIGKILL)
            killed.append(time.monotonic())
        return gather(x)

    monkeypatch.setattr(group, "gather", kill_at_the_50th)
    with pytest.raises(RankError, match="rank = 1: its process was ended by signal 9"):
        llm.generate(prompts * 8, SamplingParams(max_tokens=400))
    assert time.monotonic() - killed[0] < 10
    with pytest.raises(RankError, match="rank = 1"):
        llm.generate(prompts)


class HalfGroup(Group):
    """Rank 0 of two; the other one has died."""

    def __init__(self) -> None:
        self.rank, self.size, self.device, self.models, self._failed = 0, 2, CPU, 0, None
        self.closed: list[bool] = []
        self.close = lambda: self.closed.append(True)

    def post(self, message: Any) -> None:
        """Nobody reads it."""

    def gather(self, x: Tensor) -> Tensor:
        raise self.fail(1, "its process ended with status 1")


def test_a_rank_that_cannot_load_its_share_ends_the_loading(folder: Callable[..., str], tmp_path: Path) -> None:
    """Not the first request; and if rank 0 is the one, the others do not stay behind it, with their memory."""
    other, own = HalfGroup(), HalfGroup()
    with pytest.raises(RankError, match="rank = 1: its process ended with status 1"):
        Pipeline(other, Load(folder("deep"), torch.float32, True, 1, pipeline=True))
    with pytest.raises(FaircopyError) as raised:
        Pipeline(own, Load(str(tmp_path), torch.float32, True, 1, pipeline=True))
    assert other.closed and own.closed and not isinstance(raised.value, RankError)


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("kind", [ParallelModel, Pipeline])
def test_an_interrupt_ends_the_call_and_the_next_one_works(
    folder: Callable[..., str], group: Group, kind: type[SharedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C anywhere in a pass: all ranks end it, its results are dropped, and the texts are the same afterwards."""
    pipeline = kind is Pipeline
    path = folder("deep" if pipeline else "dense")
    llm = LLM(kind(group, Load(path, torch.float32, True, 1, pipeline=pipeline)), k=0, cache_memory="8MiB", threads=1)
    prompts, params = [list(request.prompt) for request in requests(4)], SamplingParams(max_tokens=8)
    wanted = [a.token_ids for a in llm.generate(prompts, params)]
    for name, place in product(("send", "fetch" if pipeline else "gather"), (1, 2, 5, 7)):
        calls, exchange = count(1), getattr(group, name)

        def interrupted(*args: Any, exchange: Any = exchange, place: int = place, calls: Any = calls) -> Any:
            if next(calls) == place:
                signal.raise_signal(signal.SIGINT)
            return exchange(*args)

        monkeypatch.setattr(group, name, interrupted)
        with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
        monkeypatch.undo()
        assert llm.engine.tables.held() == 0 and not llm.engine.busy
        assert [a.token_ids for a in llm.generate(prompts, params)] == wanted


def test_a_second_interrupt_ends_a_pass_at_once() -> None:
    with handled_by(signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached = "the end"
        assert reached == "the end"
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached = "too far"
        assert reached == "the end" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(RankError), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise RankError("rank", 1, "it has ended", "look")


def test_interrupts_of_earlier_waits_are_not_counted() -> None:
    """The thread that counts them may read them when the next wait has begun."""
    with handled_by(signal.default_int_handler):
        for _ in range(200):
            with pytest.raises(KeyboardInterrupt), uninterrupted():
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(RankError), uninterrupted():
                signal.raise_signal(signal.SIGINT)
                raise RankError("rank", 1, "it has ended", "look")


def test_a_second_interrupt_ends_a_wait_for_another_rank() -> None:
    """Python calls no handler while its main thread waits in gloo, or here in the system's poll."""
    reader, writer = os.pipe()
    wait = ctypes.CDLL(None).poll
    asked = (ctypes.c_int * 2)(reader, select.POLLIN)

    def press_twice() -> None:
        for _ in range(2):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    give_up = partial(os.write, writer, b"the ranks end")
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt), uninterrupted(give_up):
        threading.Thread(target=press_twice).start()
        assert wait(asked, 1, 10_000) == 1, "it waited for its time instead"
        raise RankError("rank", 1, "it has ended", "look")


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Ctrl-C as in a program or a notebook, whatever the process that runs the tests does with it."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_that_dies_before_it_is_connected_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, sys; from torch._C._distributed_c10d import TCPStore\n"
    script += "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False); store.set(sys.argv[2], '')\n"
    script += "store.wait(['connecting']); os._exit(3)"

    def start(rank: int, size: int, port: int, device: torch.device) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", script, str(port), launch.ready_key(rank)])

    def connecting(store: Store, *about: Any) -> Group:
        store.set("connecting", "")
        begun.append(time.monotonic())
        return Group(store, *about)

    begun: list[float] = []
    monkeypatch.setattr(launch, "_start", start)
    monkeypatch.setattr(launch, "Group", connecting)
    with pytest.raises(RankError, match=r"rank = 1: it could not start \(status 3\)"):
        start_ranks(2, CPU)
    assert time.monotonic() - begun[0] < 10


def test_ranks_end_with_rank_0(other_rank_0: subprocess.Popen[str]) -> None:
    with other_rank_0 as first:
        assert first.stdout is not None and first.stderr is not None
        worker = int(first.stdout.readline())
        first.kill()
        begin = time.monotonic()
        while Path(f"/proc/{worker}").exists() and time.monotonic() - begin < 10:
            time.sleep(0.05)
        assert not Path(f"/proc/{worker}").exists(), "rank 1 outlived rank 0"
        assert "rank 1 ends" in first.stderr.read()


def test_any_tensor_can_be_sent() -> None:
    """A single number out of a table has that table's stride."""
    table = torch.arange(16, dtype=torch.int32).view(4, 4)
    for sent in (
        table[1:2, 2],
        table[:, 1:2][2:3],
        table.t(),
        table[:0],
        torch.tensor(3.5),
        table.to(torch.bfloat16)[::3],
    ):
        arrived = from_bytes(to_bytes(sent), torch.device("cpu"))
        assert torch.equal(arrived, sent) and arrived.dtype == sent.dtype


class FirstOfTwo:
    """Rank 0 of two, the other of which says the same."""

    rank, size = 0, 2

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x, x])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_a_configuration_tells_what_the_first_of_two_devices_holds(kind: str, tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        "llama": DENSE,
        "qwen3": {"tie_word_embeddings": True},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    }
    config = make_config(kind, more[kind], {**WIDTHS, "vocab_size": 1000})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    path = str(tmp_path)
    known, half, stage = (
        shape_of_checkpoint(path, torch.float32, CPU, split) for split in (WHOLE, Split(tensor=2), Split(stages=2))
    )
    shared, first = (
        load_model(path, torch.float32, CPU, True, ranks=FirstOfTwo()),
        load_stage(path, torch.float32, CPU, True, 0, 2),
    )
    for share, loaded in ((half, shared), (stage, first)):
        if isinstance(loaded, TransformersModel):
            loaded.release_weights()
        kept = [(layer.kv_heads, layer.head_dim) for layer in loaded.layers]
        assert [(layer.kv_heads, layer.head_dim) for layer in share.layers] == kept
        assert weight_bytes(share, CPU) == pytest.approx(loaded.weight_bytes, rel=0.15)
        assert 0.4 < share.parameters / known.parameters < 0.75 and share.read <= share.parameters
    assert half.heads == known.heads // 2 and stage.heads == known.heads


def test_a_limit_of_memory_is_one_of_each_device(tmp_path: Path) -> None:
    """Two devices with half of the weights and keys each hold more pages in as much memory; what fits on neither is
    refused by name."""
    folder = str(bundled.target())
    pages = {}
    for name in ("", "tensor_parallel", "pipeline_parallel"):
        ranks = {name: 2} if name else {}
        config = EngineConfig(memory="80MiB", dtype="float32", device="cpu", max_batch=8, planned_tokens=64, **ranks)
        _, fitted, plan = fit_into_memory(folder, None, config)
        pages[name] = plan_pages = int(fitted.cache_memory) // sum(plan.setup.page_bytes())  # type: ignore[arg-type]
        assert plan.chosen.bytes <= 80 << 20 and plan_pages >= 16
        with pytest.raises(ConfigError, match="more devices" if ranks else "several devices"):
            fit_into_memory(folder, None, replace(config, memory="20MiB"))
    assert min(pages["tensor_parallel"], pages["pipeline_parallel"]) > 1.1 * pages[""]
