"""Some layers of a stock transformers model: the others are left out of its modules, by the names of its `pp_plan`."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from faircopy.errors import UnsupportedModel
from faircopy.layout.base import Cache, Packed
from faircopy.model.base import FINAL, Taps, TokenWeights
from faircopy.model.hidden import decoder_blocks
from faircopy.model.shares import CheckpointParts
from faircopy.model.stock_reader import StockReader, make_buffers, put
from faircopy.model.transformers_backend import TransformersModel
from faircopy.model.weights import Stage

if TYPE_CHECKING:  # loading transformers' model classes takes seconds, and our decoder needs none of them
    from transformers import PreTrainedModel

# What passes between layers besides the hidden states.
_MORE = ("hidden_size_per_layer_input", "num_kv_shared_layers")


class _LeftOut(nn.Module):
    """Stands for a layer, a norm or a head that another rank has."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return x


class _NoEmbedding(nn.Module):
    """Stands for the embedding on ranks whose layers get hidden states."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        super().__init__()
        self._shape, self._dtype, self._device = like.shape, like.dtype, device

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self._shape[-1], dtype=self._dtype, device=self._device)


class StockStage(TransformersModel):
    """A stock model with the layers of one stage; the embedding is in the first, norm and head in the last."""

    def __init__(self, name: str, model: PreTrainedModel, tensors: CheckpointParts, exact: bool, stage: Stage) -> None:
        """model: without memory."""
        _check(name, model)
        self._stage, self._depth = stage, model.config.get_text_config().num_hidden_layers
        self._names, self._reader = _table_names(model), StockReader(name, model, tensors)
        self._first, self._last = (decoder_blocks(model)[i] for i in (stage.layers.start, stage.layers.stop - 1))
        _leave_out(model, stage, tensors.device)
        for parameter, like in list(model.state_dict(keep_vars=True).items()):
            put(model, parameter, self._reader(parameter), isinstance(like, nn.Parameter))
        make_buffers(name, model, tensors.device)
        super().__init__(name, model.eval().requires_grad_(False), exact, layers=len(stage.layers))

    def run_stage(self, x: Tensor | None, packed: Packed, cache: Cache, taps: Taps) -> Tensor:
        """What leaves the layers that are here; of the last ones, logits. x: what enters, None: the ids."""
        left: list[Tensor] = []
        known, own = taps.states, Taps(tuple(layer for layer in taps.wants if self._has(layer)))
        with ExitStack() as stack:
            stack.enter_context(nullcontext() if x is None else self._entering(x))
            stack.enter_context(self._last.register_forward_hook(lambda module, args, out: left.append(_states(out))))
            logits = self.forward(packed, cache, own if own.wants else None)
        taps.states = known | own.states
        return logits if self._stage.last else left[0][0]

    def token_weights(self) -> TokenWeights:
        """Embedding and head, read from the checkpoint again: no rank has both."""
        embedding, rows = (self._reader(f"{table}.weight") for table in self._names)
        divisor = float(getattr(self.config, "logits_scaling", None) or 1.0)
        return TokenWeights(embedding, rows, None, divisor)

    def _has(self, layer: int) -> bool:
        """Whether a hidden state that a drafter wants is made here."""
        return layer in self._stage.layers or (self._stage.last and layer in (FINAL, self._depth))

    def _entering(self, x: Tensor) -> Any:
        """While in force, x enters the first of these layers."""

        def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return (x[None], *args[1:]), {name: v for name, v in options.items() if name != "hidden_states"}

        return self._first.register_forward_pre_hook(enter, with_kwargs=True)


def _states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _check(name: str, model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    problem = None
    if "layers" not in (getattr(config, "base_model_pp_plan", None) or {}):
        problem = f"{config.model_type} has no pp_plan that says what passes between its layers"
    elif any(getattr(config, field, None) for field in _MORE):
        problem = f"more than hidden states passes between the layers of {config.model_type}"
    if problem is not None:
        raise UnsupportedModel("model", name, problem, "use tensor_parallel instead of pipeline_parallel")


def _table_names(model: PreTrainedModel) -> list[str]:
    """The names of embedding and head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [next(name for name, module in model.named_modules() if module is table) for table in tables]


def _leave_out(model: PreTrainedModel, stage: Stage, device: torch.device) -> None:
    """Take out of a model what other ranks have."""
    blocks, plan = decoder_blocks(model), model.config.get_text_config().base_model_pp_plan
    for i in range(len(blocks)):
        if i not in stage.layers:
            blocks[i] = _LeftOut()
    if not stage.first:
        model.set_input_embeddings(_NoEmbedding(model.get_input_embeddings().weight, device))
    if not stage.last:
        model.set_output_embeddings(_LeftOut())
        behind = [*plan][[*plan].index("layers") + 1 :]
        for called in behind:
            setattr(model.base_model, called, _LeftOut())
