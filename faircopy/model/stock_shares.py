"""A rank's share of a stock transformers model: its modules with fewer heads and inner numbers, by its `tp_plan`.

Only the names of the plan are used. What a plan does not name is whole on every rank.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from faircopy.errors import UnsupportedModel
from faircopy.kernels.linear import Product, RowParallel, column_product
from faircopy.kernels.ranks import Ranks
from faircopy.model.shares import Cut, Divisible, TokenShares
from faircopy.model.stock_reader import StockReader, make_buffers, put

if TYPE_CHECKING:  # loading transformers' model classes takes seconds, and our decoder needs none of them
    from transformers import PreTrainedModel

REMEDY = "use tensor_parallel=1"
_COLUMNS, _ROWS, _PACKED = "colwise", "rowwise", "packed_colwise"
_TOKENS = "tokens"
_WHOLE = {"replicated_with_grad_allreduce", "moe_tp_experts"}
_KEYS = ("k_proj", "v_proj")


class StockCuts:
    """Which parameters of a stock model are cut, by its `tp_plan`."""

    def __init__(self, name: str, model: PreTrainedModel, ranks: Ranks, device: torch.device) -> None:
        """model: its parameters need no memory."""
        self.ranks, self._name, self._model = ranks, name, model
        config = model.config.get_text_config()
        self._tables = _token_tables(model)
        self.styles = {name: self._style(name) for name, _ in model.named_parameters()}
        self._heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        self.tokens = TokenShares(int(config.vocab_size), ranks)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}  # before they are cut
        self._check(device)

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """What this rank keeps of a parameter of this full shape; None: all of it."""
        style, module = self.styles[name], name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        if style == _TOKENS:
            return self.tokens.cut
        if style == _ROWS:
            return None if name.endswith(".bias") else Cut(len(shape) - 1, (self._even(shape[-1]),))
        if style == _PACKED:
            begin, end = self._even(shape[1] // 2)
            return Cut(1, ((begin, end), (begin + shape[1] // 2, end + shape[1] // 2)))
        if style == _COLUMNS:
            return Cut(0, (self._keys(shape[0]) if module in _KEYS else self._even(shape[0]),))
        return None

    @property
    def attends(self) -> bool:
        """Whether ranks share the heads of attention."""
        return any(style == _COLUMNS and "q_proj" in name for name, style in self.styles.items())

    def _style(self, parameter: str) -> str | None:
        """What the plan says of a parameter."""
        plan = self._model.tp_plan or {}
        general = re.sub(r"\.\d+\.", ".*.", parameter)
        module = general.removesuffix(".weight").removesuffix(".bias")
        style = plan.get(general, plan.get(module))
        if module in self._tables:
            return _TOKENS  # the plan may leave it out: any vocabulary can be cut
        if style is not None and style not in (_COLUMNS, _ROWS, _PACKED, *_WHOLE):
            raise UnsupportedModel("model", self._name, f"its tp_plan has {style!r} for {module}", REMEDY)
        return None if style in _WHOLE else style

    def _check(self, device: torch.device) -> None:
        weights = {
            name.removesuffix(".weight"): self.shapes[name][-2:]
            for name, style in self.styles.items()
            if style == _ROWS and not name.endswith(".bias")
        }
        if not weights:
            raise UnsupportedModel("model", self._name, "its tp_plan names no layer that can be shared", REMEDY)
        size = self.ranks.size
        heads, kv_heads = (self._heads, self._kv_heads) if self.attends else (size, size)
        Divisible(heads, kv_heads, weights, device).check(self._name, size)

    def _even(self, count: int) -> tuple[int, int]:
        if count % self.ranks.size:
            problem = f"{count} outputs of a layer cannot be shared by {self.ranks.size} ranks"
            raise UnsupportedModel("model", self._name, problem, REMEDY)
        width = count // self.ranks.size
        return self.ranks.rank * width, (self.ranks.rank + 1) * width

    def _keys(self, count: int) -> tuple[int, int]:
        """Whole key heads; where there are fewer than ranks, several ranks hold the same one."""
        size, width = self.ranks.size, count // self._kv_heads
        first = self.ranks.rank * self._kv_heads // size
        return first * width, (first + max(1, self._kv_heads // size)) * width


class StockShares:
    """What multiplies with the parameters of a stock model that were cut."""

    def __init__(self, model: PreTrainedModel, cuts: StockCuts, reader: StockReader) -> None:
        self.ranks, self._model, self._cuts, self._reader = cuts.ranks, model, cuts, reader

    def whole(self, weight: Tensor) -> Tensor:
        """A parameter as it was before it was cut."""
        return self._reader(next(name for name, p in self._model.named_parameters() if p is weight))

    def product(self, parameter: int, weight: Tensor, bias: Tensor | None) -> Product:
        """What multiplies with a parameter, given by its id, or with a part of it such as one expert's."""
        if parameter in self._row_parallel:
            return RowParallel(weight, bias, True, self.ranks)
        run = column_product(weight, bias, outputs=self._outputs.get(parameter))
        return self._cuts.tokens.joined(run) if parameter == self._head else run

    def embedded(self, ids: Tensor, weight: Tensor) -> Tensor | None:
        """Rows of the embedding, wherever they lie; None: of another table."""
        if id(weight) != self._embedding:
            return None
        found = self._cuts.tokens.embedded(ids.reshape(-1), partial(torch.Tensor.__getitem__, weight))
        return found.view(*ids.shape, -1)

    def settle(self) -> None:
        """The model's parameters are those it will keep."""
        named, cuts = dict(self._model.named_parameters()), self._cuts
        self._outputs = {id(p): cuts.shapes[name][-2] for name, p in named.items() if p.ndim > 1}
        self._row_parallel = {id(p) for name, p in named.items() if cuts.styles[name] == _ROWS}
        self._head = id(self._model.get_output_embeddings().weight)
        self._embedding = id(self._model.get_input_embeddings().weight)


def _token_tables(model: PreTrainedModel) -> set[str]:
    """The names of embedding and head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name for name, module in model.named_modules() if any(module is table for table in tables)}


def stock_share(
    name: str, model: PreTrainedModel, reader: StockReader, device: torch.device, ranks: Ranks
) -> StockShares:
    """Give a model without memory this rank's share of the checkpoint; nothing else of that is read."""
    cuts = StockCuts(name, model, ranks, device)
    shares = StockShares(model, cuts, reader)
    for parameter, like in list(model.state_dict(keep_vars=True).items()):
        if parameter in model.all_tied_weights_keys:
            continue
        trained = isinstance(like, nn.Parameter)
        cut = cuts.cut(parameter, tuple(like.shape)) if trained else None
        put(model, parameter, reader(parameter, cut), trained)
    model.tie_weights()
    make_buffers(name, model, device)
    shares.settle()
    return shares
