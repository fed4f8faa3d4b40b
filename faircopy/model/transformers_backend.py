"""Any transformers causal language model through its attention interface: untouched modules, our cache and products.

The model is called with all tokens of a step in one row and explicit positions; its attention layers call us back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from faircopy.errors import UnsupportedModel
from faircopy.layout.base import Cache, LayerShape, Packed
from faircopy.model.base import Taps, TokenWeights
from faircopy.model.bits import same_bits
from faircopy.model.hidden import stock_token_weights, tapping
from faircopy.model.invariant import RowInvariant
from faircopy.model.operations import ModulePath, Operation, OperationList
from faircopy.model.shares import counted_ranks
from faircopy.model.stock_shares import StockShares

if TYPE_CHECKING:  # loading transformers' model classes takes seconds, and our decoder needs none of them
    from transformers import PreTrainedModel

ATTENTION = "faircopy_ragged"  # transformers looks for "sdpa", "flash", "flex" in names: keep clear of those
REMEDY = "serve it with transformers' own generate(), or choose another model"

# Layer kinds whose state is keys and values by position; everything else cannot be rolled back by length.
_LAYER_KINDS = {"full_attention", "sliding_attention"}
# They pass every check of shape, and compute something else: several attention calls per layer, masks of their own.
_REFUSED = {
    "doge": "it adds a mask of its own to attention",
    "diffllama": "each layer attends twice",
    "hrm_text": "it runs its layers several times per token",
    "deepseek_v32": "its sparse attention chooses keys by itself",
    "deepseek_v4": "its sparse attention chooses keys by itself",
    "glm_moe_dsa": "its sparse attention chooses keys by itself",
    "hy_v4": "its attention takes arguments of its own",
}


@dataclass(slots=True)
class _Step:
    """What the attention layers need to know while one forward runs."""

    packed: Packed
    cache: Cache
    layers: dict[nn.Module, int]
    seen: set[nn.Module] = field(default_factory=set)


@dataclass(slots=True)
class _Probe:
    """A first forward of one token that only looks at the shapes attention is called with."""

    layers: dict[nn.Module, int] = field(default_factory=dict)
    shapes: list[LayerShape] = field(default_factory=list)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_current: ContextVar[_Step | _Probe | None] = ContextVar("faircopy_step", default=None)


class TransformersModel:
    """A stock model behind the same interface as our own decoder."""

    backend = "transformers"

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        exact: bool,
        shares: StockShares | None = None,
        layers: int | None = None,
    ) -> None:
        """shares: how the model is cut, if it is one rank's share. layers: that attend; None: all."""
        config = model.config.get_text_config()
        check_static(name, config, type(model))
        self.name, self.vocab, self.context = name, int(config.vocab_size), context_length(config)
        self.dtype, self.device = model.dtype, model.device
        self._model, self._shares = model, shares
        self._mode = RowInvariant(self.device, shares) if exact or shares is not None else None
        if shares is not None:
            self.backend = f"transformers, sums in K groups, {counted_ranks(shares.ranks)}"
        self._one_at_a_time = Lock()  # several LLMs may share this model, and hooks belong to a forward
        _switch(name, model, ATTENTION)
        try:
            probe = self._probe(layers or config.num_hidden_layers)
        except RuntimeError as error:
            if shares is None:
                raise
            problem = f"its modules do not run with a rank's share of the heads ({error})"
            raise UnsupportedModel("model", name, problem, "use tensor_parallel=1") from error
        self.layers, self._layers = probe.shapes, probe.layers
        if self._mode is not None:
            self._check_operations()

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        tapped = contextlib.nullcontext() if taps is None else tapping(self._model, taps)
        with self._one_at_a_time, _running(_Step(packed, cache, self._layers)), self._mode or _NOTHING, tapped:
            # captured steps have -1 where a drafter found no node: the row is computed and ignored
            ids, positions = packed.ids.clamp(min=0).long(), packed.positions.long()  # kernels have them in 32 bits
            logits = self._call(ids, positions, packed.wanted)
        if taps is not None:
            taps.states = {layer: states[0] for layer, states in taps.states.items()}
        return logits

    @property
    def weight_bytes(self) -> int:
        """Of packed products, and of all parameters whose memory was not released."""
        packed = 0 if self._mode is None else self._mode.nbytes
        return packed + sum(int(p.untyped_storage().nbytes()) for p in self._model.parameters())

    @property
    def config(self) -> Any:
        return self._model.config.get_text_config()

    def token_weights(self) -> TokenWeights:
        """Embedding and head; rows that only a product keeps are taken out of it."""
        known = stock_token_weights(self._model)
        bias = known.bias if known.bias is None or self._shares is None else self._shares.whole(known.bias)
        return replace(known, embedding=self._whole(known.embedding), rows=self._whole(known.rows), bias=bias)

    def _whole(self, weight: Tensor) -> Tensor:
        if self._shares is not None:
            return self._shares.whole(weight)
        packed = self._mode.packed_copy(weight) if self._mode is not None else None
        return weight if packed is None else packed.rows(torch.arange(weight.shape[0]))

    def reference(self, ids: Tensor) -> Tensor:
        """The model's own full forward, with its own attention: logits [T, vocab] of one sequence."""
        _switch(self.name, self._model, "eager")
        try:
            with torch.no_grad():
                logits: Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
                return logits[:, : self.vocab]  # a share of the head may reach beyond it
        finally:
            _switch(self.name, self._model, ATTENTION)

    def _call(self, ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            try:
                out = self._model(
                    input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted
                )
                logits: Tensor = out.logits[0]
            except TypeError as error:
                if "logits_to_keep" not in str(error):
                    raise
                logits = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]

    def operations(self, device_type: str) -> list[Operation]:
        """The ATen operations of a forward over one token, attention left out, by the rules of a kind of device."""
        mode, path = self._mode, self.module_path
        found = OperationList(path, device_type, lambda: mode is not None and mode.replacing)
        self._one_token()  # packs the weights
        with path, found:
            self._one_token()
            self._few_tokens(3)  # some operations run only where there are several rows
        return found.operations

    @property
    def module_path(self) -> ModulePath:
        """A context that knows which module is running."""
        return ModulePath(self._model)

    def _check_operations(self) -> None:
        suspects = [operation for operation in self.operations(self.device.type) if not operation.row_invariant]
        if suspects:
            raise UnsupportedModel(
                "model",
                self.name,
                f"{suspects[0]} is not known to treat rows one by one on {self.device.type}",
                "pass exact=False to serve it without the promise",
            )

    def release_weights(self) -> int:
        """Free the stock copies of weights that CPU products have packed copies of; returns the bytes freed.

        A weight stays if a module other than a linear layer or an embedding owns it. All stay if the model computes
        something else without them. Afterwards `reference` has nothing to compute with.
        """
        if self._mode is None or self.device.type != "cpu":
            return 0
        before, owned = self._one_token(), self._replaceable()
        freed = [weight for weight in self._mode.packed if id(weight) in owned and weight.is_contiguous()]
        kept = [weight.data for weight in freed]
        for weight in freed:
            weight.data = weight.new_full((1,), torch.nan).expand(weight.shape)
        if not same_bits(self._one_token(), before):
            for weight, data in zip(freed, kept, strict=True):
                weight.data = data
            return 0
        return sum(data.nbytes for data in kept)

    def _replaceable(self) -> set[int]:
        """Ids of the parameters that products alone can stand for; rows, of those that have all of them to read."""
        from transformers.pytorch_utils import Conv1D

        owners: dict[int, set[type[nn.Module]]] = {}
        rows: set[int] = set()
        for module in self._model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(type(module))
                if self._mode is not None and self._mode.packed_copy(parameter) is not None:
                    rows.add(id(parameter))
        head = self._model.get_output_embeddings()
        weight = getattr(head, "weight", None)  # a stage of a pipeline has no head
        kept = set() if weight is None or id(weight) in rows else {id(weight)}
        return {
            parameter
            for parameter, kinds in owners.items()
            if parameter not in kept
            and all(
                issubclass(k, (nn.Linear, Conv1D)) or (issubclass(k, nn.Embedding) and parameter in rows) for k in kinds
            )
        }

    def _one_token(self) -> Tensor:
        return self._few_tokens(1)

    def _few_tokens(self, count: int) -> Tensor:
        """Logits of tokens that attend to themselves alone."""
        ids = torch.arange(count, device=self.device)
        with _running(_Probe()), self._mode or contextlib.nullcontext():
            return self._call(ids, ids, ids)

    def _probe(self, layers: int) -> _Probe:
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        probe = _Probe()
        with _running(probe):
            self._call(zero, zero, zero)
        if len(probe.shapes) < layers:
            raise UnsupportedModel(
                "model",
                self.name,
                f"only {len(probe.shapes)} of {layers} layers went through the attention interface",
                REMEDY,
            )
        return probe


def check_static(name: str, config: Any, kind: type[PreTrainedModel]) -> None:
    """Refuse by name what its configuration shows to be unservable."""
    problem = _static_problem(config, kind)
    if problem:
        raise UnsupportedModel("model", name, f"{config.model_type}: {problem}", REMEDY)


def context_length(config: Any) -> int:
    """The most positions the model knows; some configurations call it otherwise, some set no limit."""
    for field_name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(config, field_name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 4096


def _static_problem(config: Any, kind: type[PreTrainedModel]) -> str | None:
    if config.model_type in _REFUSED:
        return _REFUSED[config.model_type]
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model, not a causal one"
    if getattr(kind, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot be rolled back when a draft is rejected"
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS
    if strange:
        return f"layers of kind {', '.join(sorted(strange))} cannot be rolled back by length"
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention is not implemented"
    for rope in _rope_kinds(config):
        if rope in ("dynamic", "longrope"):
            return f"{rope} rope depends on the current length, so sequences in a batch would change each other"
    return None


def _rope_kinds(config: Any) -> Iterator[str]:
    """Rope parameters are one dictionary, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for value in (parameters, *parameters.values()):
        if isinstance(value, dict) and "rope_type" in value:
            yield value["rope_type"]


def _switch(name: str, model: PreTrainedModel, implementation: str) -> None:
    """transformers only logs a warning when a model cannot switch, so look."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(implementation)
    config = model.config.get_text_config()
    if config._attn_implementation != implementation:
        raise UnsupportedModel(
            "model", name, f"{config.model_type}: its attention does not go through the attention interface", REMEDY
        )


@contextlib.contextmanager
def _running(step: _Step | _Probe) -> Iterator[None]:
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a stock attention layer calls: [1, heads, T, dim] in, [1, T, heads, dim] out."""
    step = _current.get()
    _guard(module, query, key, attention_mask, options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(step, _Probe):
        return _look(step, module, q, k, v, sliding_window), None
    assert step is not None, "a served model's attention ran outside a step"
    if module in step.seen:
        _refuse(module, "its attention is called twice in one forward")
    step.seen.add(module)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = step.cache.attend(step.packed, step.layers[module], q, k, v, scale, softcap or 0.0, s_aux)
    return out[None], None


def _guard(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse whatever would change the result and is not implemented."""
    if mask is not None:
        _refuse(module, "it brings an attention mask of its own")
    if options.get("position_bias") is not None:
        _refuse(module, "its attention has a position bias")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        _refuse(module, "its attention is not causal")
    if key.shape[2] != query.shape[2]:
        _refuse(module, "it gives attention other keys than those of the new tokens")
    if options.get("dropout"):
        _refuse(module, "it drops attention at random")


def _look(probe: _Probe, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Note a layer's shapes; one token alone attends to itself, so its values are the answer."""
    if module in probe.layers:
        _refuse(module, "its attention is called twice in one forward")
    group = q.shape[1] // k.shape[1]
    probe.layers[module] = len(probe.shapes)
    probe.shapes.append(LayerShape(k.shape[1], max(k.shape[2], v.shape[2]), window or 0, group))
    return v.repeat_interleave(group, dim=1)[None]


def _refuse(module: nn.Module, problem: str) -> None:
    raise UnsupportedModel("model", type(module).__name__, problem, REMEDY)
