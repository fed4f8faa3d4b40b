"""Parameters of stock transformers models, read from a checkpoint one by one into a model without memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from faircopy.errors import CheckpointError, UnsupportedModel
from faircopy.model.shares import CheckpointParts, Cut

if TYPE_CHECKING:  # loading transformers' model classes takes seconds, and our decoder needs none of them
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


class StockReader:
    """Finds a model's parameters in its checkpoint, however that stores them."""

    def __init__(self, name: str, model: PreTrainedModel, tensors: CheckpointParts) -> None:
        self._name, self._tensors = name, tensors
        self._precise = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        self._sources = _sources(model, tensors.names())
        self._tied = dict(model.all_tied_weights_keys)

    def __call__(self, name: str, cut: Cut | None = None) -> Tensor:
        """A parameter, or some of it; that of a tied one is what it is tied to."""
        name = self._tied.get(name, name)
        if name not in self._sources:
            raise CheckpointError("model", self._name, f"tensor {name} is missing", "fetch the checkpoint again")
        precise = any(part in self._precise for part in name.split("."))
        return _read(self._tensors, self._sources[name], cut, torch.float32 if precise else None)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a parameter lies in the checkpoint: as it is, or in pieces, one list per expert."""

    pieces: list[list[str]]
    merged: bool


def put(model: PreTrainedModel, name: str, tensor: Tensor, trained: bool) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if trained:
        module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[last] = tensor
    getattr(module, last)._is_hf_initialized = True


def _read(tensors: CheckpointParts, source: _Source, cut: Cut | None, dtype: torch.dtype | None) -> Tensor:
    """A parameter, or this rank's part of it, put together from its pieces."""
    if not source.merged:
        return _one(tensors, source.pieces[0][0], cut, dtype)
    inner = None if cut is None else Cut(cut.dim - 1, cut.ranges[:1])  # of an expert's own weight, the same of each
    return torch.stack(
        [torch.cat([_one(tensors, piece, inner, dtype) for piece in expert]) for expert in source.pieces]
    )


def _one(tensors: CheckpointParts, name: str, cut: Cut | None, dtype: torch.dtype | None) -> Tensor:
    found = tensors(name, dtype) if cut is None else tensors.part(name, cut, dtype)
    assert found is not None, f"{name} was listed"
    return found


def _sources(model: PreTrainedModel, stored: list[str]) -> dict[str, _Source]:
    """Where each parameter lies, by transformers' own table of how checkpoints of this type are stored."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = {one: _Source([[one]], False) for one in stored}
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightConverter):
            found |= dict(_merged(rule, found))
        else:
            for pattern, target in zip(rule.source_patterns, rule.target_patterns, strict=True):
                found |= {re.sub(_regex(pattern), target, one): source for one, source in found.items()}
    return found


def _merged(rule: WeightConverter, stored: dict[str, _Source]) -> Iterator[tuple[str, _Source]]:
    """Experts that are stored one by one, by the parameter that holds them all."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(operation) for operation in rule.operations]
    if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or len(rule.target_patterns) != 1:
        return
    experts: dict[str, dict[int, list[str]]] = {}
    for pattern in rule.source_patterns:
        regex = re.compile(_regex(pattern).replace(r"\*", r"(\d+)"))
        for one, source in stored.items():
            match = regex.search(one)
            if match is not None:
                target = one[: match.start()] + rule.target_patterns[0] + one[match.end() :]
                experts.setdefault(target, {}).setdefault(int(match[1]), []).extend(source.pieces[0])
    for target, pieces in experts.items():
        yield target, _Source([pieces[expert] for expert in sorted(pieces)], True)


def _regex(pattern: str) -> str:
    """transformers writes some patterns as regular expressions and some plainly."""
    return pattern if "\\" in pattern else re.escape(pattern)


def make_buffers(name: str, model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no checkpoint holds, such as the frequencies of rope: as transformers makes them."""
    for module in model.modules():
        missing = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for key in missing:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
        if missing:
            with torch.no_grad():
                model._init_weights(module)
    left = [key for key, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    if left:
        raise UnsupportedModel("model", name, f"its {left[0]} is not in the checkpoint", "fetch the checkpoint again")
