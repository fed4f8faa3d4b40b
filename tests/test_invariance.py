"""The transformers backend: which operations models run, and a self-test that sees rows depend on each other."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy import LLM, SamplingParams, UnsupportedModel
from faircopy.model.invariant import RowInvariant
from faircopy.model.selftest import ROWS, check_rows, self_test, text_lengths
from faircopy.model.transformers_backend import TransformersModel
from tests.helpers import CPU, load
from tests.zoo import ZOO, build

CUDA = torch.device("cuda")  # only the name of the device's rules: nothing is put there


def stock(name: str, dtype: torch.dtype = torch.float32, rules: torch.device = CPU) -> TransformersModel:
    """A model on the CPU with the replacements that a kind of device gets."""
    model = build(name, dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    served = TransformersModel(name, model, True)
    served._mode = RowInvariant(rules)
    return served


@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_operation_is_left_whose_order_depends_on_the_rows(name: str) -> None:
    for rules in (CPU, CUDA):
        model = stock(name, rules=rules)
        left = [str(o) for o in model.operations(rules.type) if not o.row_invariant]
        assert not left, rules


def test_without_replacements_the_operations_that_broke_the_promise_are_named() -> None:
    model = stock("gemma3", rules=CUDA)
    model._mode = None
    names = {o.name for o in model.operations("cuda") if not o.row_invariant}
    assert {"aten.mean.dim", "aten.mm.default"} <= names


def test_a_model_with_an_unknown_operation_is_refused_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + torch.logcumsumexp(out, -1))
    with pytest.raises(UnsupportedModel, match=r"logcumsumexp.*model\.layers\.1\.mlp.*exact=False"):
        TransformersModel("llama", model, True)
    TransformersModel("llama", model, False)


@pytest.mark.parametrize(
    ("hook", "operation"),
    [
        (lambda out: out.scatter(-1, torch.zeros_like(out, dtype=torch.long), out, reduce="add"), "scatter"),
        (lambda out: out.index_add(1, torch.zeros(out.shape[1], dtype=torch.long), out), "index_add"),
        (lambda out: out + torch.sum(out, -1, keepdim=True, out=torch.empty(*out.shape[:-1], 1)), "sum"),
        (lambda out: F.elu(out), "elu"),
        (lambda out: F.softplus(out, beta=2.0), "softplus"),
        (lambda out: out.abs().pow(1.5), "pow"),
    ],
    ids=["scatter", "index_add", "sum into out", "elu", "softplus", "pow"],
)
def test_operations_that_hide_are_seen(hook: Callable[[Tensor], Tensor], operation: str) -> None:
    model = build("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: hook(out))
    served = TransformersModel("llama", model, False)
    kind = "cpu" if operation in ("elu", "softplus", "pow") else "cuda"
    served._mode = RowInvariant(torch.device(kind))
    left = [o.name for o in served.operations(kind) if not o.row_invariant]
    assert any(operation in name for name in left), left


@pytest.mark.parametrize("name", ["gemma2", "gemma3n", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "olmo2"])
def test_the_gpus_replacements_write_the_same_text(checkpoint: Callable[..., str], name: str) -> None:
    """On CPU tensors the fixed-order definitions run as torch operations, and must mean what the stock ones mean."""
    texts = []
    for rules in (CPU, CUDA):
        model = load(checkpoint(name), backend="transformers")
        assert isinstance(model, TransformersModel)
        model._mode = RowInvariant(rules)
        llm = LLM(model, draft="ngram", k=4, cache_memory="32MiB")
        texts.append([a.token_ids for a in llm.generate([[5, 6, 7], [9] * 30], SamplingParams(max_tokens=16))])
    assert texts[0] == texts[1]


def disturbed(name: str, module: str, rows: int) -> TransformersModel:
    """A model in which one module's result changes in passes of at least this many rows."""
    model = stock(name)

    def disturb(_: object, __: object, out: Tensor) -> Tensor:
        return out * (1 + 1e-3 * (out.shape[1] >= rows))

    model._model.get_submodule(module).register_forward_hook(disturb)
    return model


@pytest.mark.parametrize("rows", [2, 33, 160, 700])
def test_the_self_test_sees_a_row_that_depends_on_the_number_of_rows(rows: int) -> None:
    model = disturbed("llama", "model.layers.1.mlp", rows)
    with pytest.raises(UnsupportedModel) as caught:
        check_rows(model)
    found = re.search(r"between passes of (\d+) and (\d+) rows, first in layer 1, at (.*); pass", str(caught.value))
    assert found, caught.value
    smaller, larger = sorted(map(int, found.groups()[:2]))
    assert smaller < rows <= larger
    assert found[3] == "aten.mul.Tensor in model.layers.1.mlp"


def test_a_disturbed_model_is_not_served(checkpoint: Callable[..., str]) -> None:
    with pytest.raises(UnsupportedModel, match="differs in bits"):
        self_test(disturbed("gemma3", "model.layers.0.input_layernorm", 16), True)
    assert self_test(disturbed("gemma3", "model.layers.0.input_layernorm", 16), False) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_served_model_is_compared_in_passes_of_all_sizes(dtype: torch.dtype) -> None:
    assert check_rows(stock("gemma3", dtype)) == list(ROWS)


def test_texts_end_on_both_sides_of_borders() -> None:
    lengths = text_lengths(stock("gemma3"), 700)
    assert {8, 9, 32, 33, 128, 129} <= set(lengths), "windows of 8, pages of 32, key blocks of 128"
    assert sum(lengths) >= 700
