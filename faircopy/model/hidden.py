"""Hidden states of stock transformers models, taken where they pass by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from faircopy.errors import UnsupportedModel
from faircopy.model.base import FINAL, Taps, TokenWeights

if TYPE_CHECKING:  # loading transformers' model classes takes seconds, and our decoder needs none of them
    from transformers import PreTrainedModel


@contextmanager
def tapping(model: PreTrainedModel, taps: Taps) -> Iterator[None]:
    """While in force, a forward fills the taps with states [rows, tokens, hidden]."""
    blocks = decoder_blocks(model)

    def enter(layer: int) -> Any:
        return lambda module, args, kwargs: taps(layer, args[0] if args else kwargs["hidden_states"])

    def leave(layer: int) -> Any:
        return lambda module, args, output: taps(layer, _first(output))

    with ExitStack() as stack:
        for layer in {*taps.wants} - {FINAL, len(blocks)}:
            stack.enter_context(blocks[layer].register_forward_pre_hook(enter(layer), with_kwargs=True))
        stack.enter_context(blocks[-1].register_forward_hook(leave(len(blocks))))
        stack.enter_context(model.base_model.register_forward_hook(leave(FINAL)))
        yield


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers: its first list of as many modules as there are layers."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel("model", type(model).__name__, "its layers were not found", "use a draft without heads")


def stock_token_weights(model: PreTrainedModel) -> TokenWeights:
    """A stock model's embedding and head."""
    head = model.get_output_embeddings()
    divisor = float(getattr(model.config.get_text_config(), "logits_scaling", None) or 1.0)
    return TokenWeights(model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None), divisor)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
