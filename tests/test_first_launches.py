"""After a warm-up no request launches a kernel in a new variant, for which a compiler would run on a GPU.

Engines of a Hopper serve on a device on which nothing runs (testing/idle_device.py), with batches of up to 64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from faircopy.bench.shapes import PAIR, SHAPES, RandomTensors, products, shape_config
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.folder import METHODS
from faircopy.drafters.heads import Head, HeadConfig
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.kernels.gpu import tables
from faircopy.kernels.gpu.suite import KERNELS
from faircopy.kernels.groups import group_count
from faircopy.model.fused import Fused, fused_weights
from faircopy.model.weights import Source, decoder_spec, head_size
from faircopy.strategy import STRATEGIES
from faircopy.testing.idle_device import IdleDevice
from faircopy.types import Request, SamplingParams

CPU, KIND, CONTEXT, VOCAB = torch.device("cpu"), torch.bfloat16, 1024, 512
TARGET: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 1024,
}  # fmt: skip
OF_HEADS = {
    "_pair", "_take_in", "_expand", "_rerank", "_spend", "_place_front", "_place_unread", "_leaders", "_offer",
    "_place_lanes",
}  # fmt: skip
DEEP_ALONE = {"_expand", "_rerank", "_place_front"}  # of heads with keys of their own, whose trees are EAGLE's


class Models(NamedTuple):
    """On the idle device; weights are shared by all tests."""

    device: IdleDevice
    target: Fused
    draft: Fused


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with IdleDevice().running() as device:
        yield Models(device, a_model(PAIR[0], **TARGET), a_model(PAIR[1], num_hidden_layers=1))


class Zeros(RandomTensors):
    """Weights of a shape that nothing reads."""

    def __call__(self, name: str) -> torch.Tensor | None:
        shape = self.shape(name)
        return None if shape is None else torch.zeros(shape, dtype=KIND)


def a_model(name: str, **changes: Any) -> Fused:
    """A named shape with changes in the GPU's decoder."""
    config = shape_config(name, CONTEXT, vocab_size=VOCAB, **changes)
    spec = decoder_spec(config, torch.ones(head_size(config) // 2), 1.0)
    return Fused(fused_weights(Source(name, spec, Zeros(config, KIND, CPU), VOCAB, CONTEXT, KIND, True)))


def a_head(target: Fused, method: str) -> Head:
    """Of the target's shape; it reads no state behind the last layer, as heads of deeper targets."""
    spec = target.spec
    shape = BlockShape(
        hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim,
        intermediate=spec.intermediate, context=CONTEXT,
    )  # fmt: skip
    options = {"draft_vocab": 256, **({"wants": (0, 0, 1)} if method == "eagle3" else {})}
    config = HeadConfig(
        method=method, shape=shape, vocab=VOCAB, depth=2, levels=7 if method == "eagle3" else 4, target="",
        fingerprint="", options=options,
    )  # fmt: skip
    head = METHODS[method](config).to(KIND).bind(target.token_weights())
    head.run_on_kernels()  # as `serve` does on a GPU
    return head


def engine_for(models: Models, drafter: str | None, **options: Any) -> tuple[Engine, EngineConfig]:
    config = EngineConfig(**{"max_batch": 64, "cache_memory": "256MiB", "prefix_reuse": False, **options})
    draft = models.draft if drafter == "model" else a_head(models.target, drafter) if drafter in METHODS else None
    ngram = NgramDrafter(1, 3) if drafter == "ngram" else None
    return build_engine(models.target, ngram, draft=draft, config=config, suite=KERNELS), config


def warm(engine: Engine, device: IdleDevice) -> None:
    """All launches of a warm-up, and then times of a device on which small passes cost about the same."""
    engine.rehearse()
    ahead = set(device.variants)
    engine.warm_up()
    late = {name for name, _ in device.variants - ahead}
    assert not late, f"compiled one after the other: {late}"
    assert engine.target.passes is not None
    engine.target.passes.times = {rows: 1e-3 * (1 + rows / 256) for rows in engine.target.passes.times}


def choose_at_random(engine: Engine, source: random.Random) -> None:
    """Let k="auto" choose each number of draft tokens now and then: nothing that it would learn from is measured."""
    lengths: Any = engine.draft_lengths
    lengths.choose = lambda seqs: [source.choice(lengths.lengths)] * len(seqs)


def serve(engine: Engine, config: EngineConfig, batch: int, requests: list[Request]) -> None:
    """`batch` texts at a time, the other requests wait."""
    config = replace(config, max_batch=batch)
    engine.scheduler.policy = STRATEGIES[config.strategy].policy(config, engine.captured)
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()


def queue(source: random.Random, count: int, prompt: tuple[int, int], tokens: int, **params: Any) -> list[Request]:
    """prompt: fewest and most tokens of one; texts of half to one and a half times `tokens`."""
    return [
        Request(
            tuple(source.randrange(3, VOCAB) for _ in range(source.randint(*prompt))),
            SamplingParams(max_tokens=source.randint(tokens // 2, tokens * 3 // 2), ignore_eos=True, **params),
        )
        for _ in range(count)
    ]


class Anything:
    """A constraint that forbids nothing: steps with one are not captured."""

    def allowed(self, output: Seq[int]) -> torch.Tensor:
        return torch.ones(VOCAB, dtype=torch.bool)

    def complete(self, output: Seq[int]) -> bool:
        return False


ASKING: dict[str, Any] = {
    "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 1, "logprobs": 2,
    "logit_bias": {7: 1.0}, "prompt_logprobs": 1,
}  # fmt: skip
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {"k": 0}),
    "n-gram": ("ngram", {"k": 7}),
    "draft model": ("model", {"k": 4}),
    "draft model, auto": ("model", {"k": 12, "auto": True}),
    "eagle3, 2 nodes": ("eagle3", {"k": 2}),
    "eagle3, 4 nodes": ("eagle3", {"k": 4}),
    "eagle3, chunks and few small pages": (
        "eagle3",
        {"k": 4, "chunk": 100, "cache_memory": "12MiB", "page": 16, "prefix_reuse": True},
    ),
    "eagle3, auto": ("eagle3", {"k": 12, "auto": True, "share_nodes": False}),
    "eagle3, auto, shared": ("eagle3", {"k": 12, "auto": True, "share_nodes": True}),
    "eagle3, rejection sampling": ("eagle3", {"k": 4, "verifier": "rejection"}),
    "clover": ("clover", {"k": 12}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_request_needs_a_new_variant(models: Models, case: str) -> None:
    drafter, options = CASES[case]
    engine, config = engine_for(models, drafter, **options)
    models.device.variants.clear()
    warm(engine, models.device)
    known, source = set(models.device.variants), random.Random(0)
    if config.auto:
        choose_at_random(engine, source)
    for batch in (64, 32, 8, 1):
        serve(engine, config, batch, queue(source, max(4, 2 * batch), (24, 64), 16))
    serve(engine, config, 4, queue(source, 5, (300, 1000), 60))  # keys of two spans, and texts that fill the context
    serve(engine, config, 8, queue(source, 5, (1, 600), 8, **ASKING))
    for batch, prompt in ((16, (24, 64)), (2, (100, 700))):
        constrained = [replace(request, constraint=Anything()) for request in queue(source, batch + 2, prompt, 8)]
        serve(engine, config, batch, constrained)
    fresh = models.device.variants - known
    assert not fresh, "\n".join(map(str, sorted(fresh, key=str)))
    assert (engine.captured is None or engine.meter.captured_steps > 20) and (
        drafter is None or engine.meter.drafted > 0
    )
    if drafter in METHODS and engine.captured is not None:
        others = {"_spend", "_take_in"} if drafter == "eagle3" else DEEP_ALONE
        assert {name for name, _ in known} >= OF_HEADS - others


@pytest.mark.parametrize("kind", ["hopper", "ampere", "default"])
def test_some_numbers_of_rows_use_all_tiles(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tables, "device_class", lambda device: kind)
    for name in SHAPES:
        for part, (outputs, inner) in products(name).items():
            plan, groups = tables.plan(CPU, outputs, inner), group_count(inner, outputs)
            for tile in (
                lambda rows, plan=plan, groups=groups: plan.tile(rows, True, groups),
                lambda rows, plan=plan: plan.gated(rows, True),
            ):
                known = {tile(rows) for rows in tables.TILE_ROWS}
                assert all(tile(rows + more) in known for rows in range(0, 4500, 32) for more in (1, 32)), (name, part)
