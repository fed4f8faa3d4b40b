"""Widen a small model to a big model's shape: the same text at the big model's cost, without its weights."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from faircopy.errors import ConfigError
from faircopy.model.base import Model
from faircopy.model.loader import build_decoder, load_config
from faircopy.model.weights import head_size

# How the wide model computes the small one's function (h, H: hidden sizes; d, D: head sizes):
#
# - Residual. The stream x lies in the first h dimensions, s * x in the next h, a constant c in the last.
#   The wide mean square is (1 + s^2) h / H times the small one's; s makes that a power of four, so that a norm weight
#   takes a power of two and keeps its bits. The constant's share, c^2 / H, is taken off eps.
# - Rope. Dimension i of a head goes to i * D / d: theta^(-2i/d) is the wide frequency there. If d does not divide D,
#   i stays i and theta becomes theta^(D/d).
# - Attention scale. The wide one is sqrt(d / D) of the small one's. Llama: q's weights make up for it; what they lose
#   in rounding is read from the copy s * x. Qwen3 normalises q and k: both are made so short that eps alone decides
#   their length, which turns the norm into a constant factor, and its weights make up for everything.
# - Vocabulary. Extra rows of the head read the constant with a huge negative weight.
# - Everything else is noise, 2^-12 of its neighbours; what it makes of x meets noise on its way back: 2^-20 arrives.

NOISE = 2.0**-12  # of a neighbouring weight's size
LOW = 2.0**-8  # norm weight of the copy: its columns hold what bfloat16 rounded off, times 2^8
UNREAD = 2.0**-20  # final norm weight of the copy, which a tied head would read in full
CONSTANT = 2.0**-10  # norm weight of the constant
BANNED = -(2.0**34)  # head weight of extra tokens on the constant
SHORT = 2.0**-32  # length of q and k before Qwen3's norm: far below sqrt(eps)
SHARD = 4 * 2**30  # bytes per file


def widen(
    source: str | Path,
    config: Any,
    out: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> None:
    """Write a checkpoint of `config`'s shape (Llama or Qwen3; an object or a dict) that writes the source's text."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    widening = Widening(*read_checkpoint(source), config, seed=seed, dtype=dtype, device=device)
    _write_shards(folder, widening)
    widening.config.save_pretrained(folder)
    for file in Path(source).iterdir():
        if file.name.startswith(("tokenizer", "generation_config", "chat_template", "special_tokens")):
            shutil.copyfile(file, folder / file.name)


def widened_model(
    source: str | Path,
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    exact: bool = True,
) -> Model:
    """The widened model, ready for LLM, built on the device without a file in between."""
    widening = Widening(*read_checkpoint(source), config, seed=seed, dtype=dtype, device=device)
    wide = widening.config
    width = head_size(wide)
    frequencies = 1.0 / (rope_theta(wide) ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    name = f"{source} as {wide.model_type} of {wide.hidden_size}"
    return build_decoder(name, wide, (frequencies, 1.0), widening, dtype, torch.device(device), exact)


def widened_state(
    source_state: Mapping[str, Tensor],
    source_config: Any,
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """Every tensor of the widened model, on the device; `widened_config` gives the configuration they need."""
    return dict(Widening(source_state, source_config, config, seed=seed, dtype=dtype, device=device))


def widened_config(source_config: Any, config: Any) -> Any:
    """`config` with the eps, rope, context and special tokens for which the widened weights compute the same."""
    source, wide = _as_config(source_config), deepcopy(_as_config(config))
    fit = Fit.of(source, wide)
    wide.rms_norm_eps = fit.eps
    wide.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta(source) ** fit.theta_power}
    for name in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act"):
        setattr(wide, name, getattr(source, name, None))
    return wide


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Tensor], Any]:
    """A small checkpoint's tensors and configuration."""
    state = {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}
    return state, load_config(Path(folder))


def rope_theta(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        heads = config.num_attention_heads
        return cls(
            config.hidden_size,
            config.num_hidden_layers,
            heads,
            config.num_key_value_heads or heads,
            head_size(config),
            config.intermediate_size,
            config.vocab_size,
        )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Fit:
    """Where the small model lies in the wide one, and the factors that make up for the difference."""

    small: Shape
    wide: Shape
    copy: float  # s; 0: the stream is too narrow for a copy
    factor: float  # of norm weights
    constant: float  # c; 0: there is no room
    eps: float

    @classmethod
    def of(cls, source: Any, config: Any) -> Fit:
        small, wide = Shape.of(source), Shape.of(config)
        _check_configs(source, config)
        _check_sizes(small, wide)
        ratio = wide.hidden / small.hidden
        factor, copy = ratio**-0.5, 0.0
        if wide.hidden > 2 * small.hidden:
            power = math.ceil(math.log(ratio, 4)) - 1  # ratio / 4^power in (1, 4]
            factor, copy = 2.0**-power, math.sqrt(ratio / 4**power - 1)
        eps = factor**2 * source.rms_norm_eps
        constant = 2.0 ** math.floor(math.log2(eps * wide.hidden / 2) / 2) if ratio > 1 else 0.0
        return cls(small, wide, copy, factor, constant, eps - constant**2 / wide.hidden)

    @property
    def stride(self) -> int:
        """Distance of neighbouring rope pairs in a wide head."""
        return self.wide.head_dim // self.small.head_dim if self.wide.head_dim % self.small.head_dim == 0 else 1

    @property
    def theta_power(self) -> float:
        return self.wide.head_dim / self.small.head_dim / self.stride

    @property
    def attention(self) -> float:
        """What q . k must gain, because the wide attention scale is smaller."""
        return math.sqrt(self.wide.head_dim / self.small.head_dim)

    @property
    def repeats(self) -> int:
        """Wide key heads per small one: a wide group may be too small for all of its queries."""
        return -(-self.small.group // self.wide.group)

    def query_rows(self) -> Tensor:
        """Wide row of every row of a small q projection."""
        each = self.wide.group
        head = torch.arange(self.small.heads)
        kv, member = head // self.small.group, head % self.small.group
        return self._rows((kv * self.repeats + member // each) * each + member % each)

    def key_rows(self) -> Tensor:
        """Wide row of every row of a small k or v projection whose heads are repeated."""
        return self._rows(torch.arange(self.small.kv_heads * self.repeats))

    def source_layers(self) -> list[int | None]:
        """Per wide layer the small layer it computes, spread evenly; None: an extra one."""
        spread: list[int | None] = [None] * self.wide.layers
        for i in range(self.small.layers):
            spread[i * self.wide.layers // self.small.layers] = i
        return spread

    def _rows(self, heads: Tensor) -> Tensor:
        half = torch.arange(self.small.head_dim // 2) * self.stride
        inside = torch.cat([half, half + self.wide.head_dim // 2])
        return (heads[:, None] * self.wide.head_dim + inside).flatten()


class Widening:
    """The widened tensors by name, each made when asked for: a function of (source, config, seed, name)."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        source_config: Any,
        config: Any,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError("dtype", dtype, "its range is too small", "use bfloat16 or float32")
        if any(name.endswith((".bias", "_norm.weight")) for name in state):
            raise ConfigError("source", "", "it has biases or normalises q and k", "pass a plain Llama checkpoint")
        self.config = widened_config(source_config, config)
        self.config.dtype = dtype
        self._source, self._seed = state, seed
        self._dtype, self._device = dtype, torch.device(device)
        self._fit = Fit.of(_as_config(source_config), _as_config(config))
        self._tied = bool(self.config.tie_word_embeddings)
        self._layers = self._fit.source_layers()
        self._normalised = self.config.model_type == "qwen3"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names():
            tensor = self(name)
            assert tensor is not None, f"{name} is named but not made"
            yield name, tensor

    def names(self) -> list[str]:
        layers = [f"model.layers.{i}.{part}" for i in range(len(self._layers)) for part in self._parts()]
        head = [] if self._tied else ["lm_head.weight"]
        return ["model.embed_tokens.weight", *layers, "model.norm.weight", *head]

    def _parts(self) -> list[str]:
        heads = [f"self_attn.{part}_proj" for part in "qkvo"]
        heads += [f"self_attn.{part}_norm" for part in "qk"] if self._normalised else []
        mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        return [f"{part}.weight" for part in (*heads, *mlp, "input_layernorm", "post_attention_layernorm")]

    def __call__(self, name: str) -> Tensor | None:
        """One widened tensor; None if the wide model has none of that name."""
        if name == "model.embed_tokens.weight":
            return self._embedding(name)
        if name == "lm_head.weight":
            return None if self._tied else self._head(name)
        if name == "model.norm.weight":
            return self._norm(name, self._load(name), UNREAD)
        if not name.startswith("model.layers.") or name.split(".", 3)[-1] not in self._parts():
            return None
        return self._part(name, int(name.split(".")[2]), name.split(".")[-2])

    def _part(self, name: str, index: int, part: str) -> Tensor:
        if part in ("q_norm", "k_norm"):
            return self._length(part)
        mapped = self._layers[index]
        like = max(i for i in self._layers[: index + 1] if i is not None)  # what an extra layer's noise is measured by
        source = self._load(name.replace(f"layers.{index}.", f"layers.{like}."))
        if part.endswith("layernorm"):
            return self._norm(name, source, LOW)
        if part in ("o_proj", "down_proj"):
            return self._writer(name, source, part, mapped is not None)
        return self._reader(name, source, part, mapped is not None)

    def _embedding(self, name: str) -> Tensor:
        """Rows of x, s * x, noise, c. A tied head reads them too; c adds the same to the logit of every small token."""
        source, fit = self._load(name), self._fit
        weight = self._noise(name, (fit.wide.vocab, fit.wide.hidden), source)
        weight[: fit.small.vocab, : fit.small.hidden] = source.to(self._dtype)
        if fit.copy:
            weight[: fit.small.vocab, self._copy] = (source * fit.copy).to(self._dtype)
        if fit.constant:
            weight[:, -1] = fit.constant
            if self._tied:
                weight[fit.small.vocab :, -1] = BANNED
        return weight

    def _head(self, name: str) -> Tensor:
        source, fit = self._load(name if name in self._source else "model.embed_tokens.weight"), self._fit
        weight = self._noise(name, (fit.wide.vocab, fit.wide.hidden), source)
        weight[: fit.small.vocab, : fit.small.hidden] = source.to(self._dtype)
        if fit.constant:
            weight[: fit.small.vocab, -1] = 0.0
            weight[fit.small.vocab :, -1] = BANNED
        return weight

    def _norm(self, name: str, source: Tensor, copy: float) -> Tensor:
        fit = self._fit
        level = source.abs().mean() * fit.factor
        weight = (level + self._noise(name, (fit.wide.hidden,), source)).to(self._dtype)
        weight[: fit.small.hidden] = (source * fit.factor).to(self._dtype)
        if fit.copy:
            weight[self._copy] = (source * (fit.factor * copy / fit.copy)).to(self._dtype)
        if fit.constant:
            weight[-1] = CONSTANT
        return weight

    def _length(self, part: str) -> Tensor:
        """Weight of Qwen3's q or k norm, which divides by sqrt(eps)."""
        query, key = _factors(self._fit.attention * self._fit.eps / SHORT**2, self._dtype)
        value = query if part == "q_norm" else key
        return torch.full((self._fit.wide.head_dim,), value, dtype=self._dtype, device=self._device)

    def _reader(self, name: str, source: Tensor, part: str, mapped: bool) -> Tensor:
        """A projection of the normalised stream: columns x, what rounding took (read from s * x), noise."""
        fit = self._fit
        factor, outputs, rows = 1.0, fit.wide.intermediate, torch.arange(fit.small.intermediate)
        if part == "q_proj":
            factor, outputs, rows = fit.attention, fit.wide.heads * fit.wide.head_dim, fit.query_rows()
        elif part in ("k_proj", "v_proj"):
            outputs, rows = fit.wide.kv_heads * fit.wide.head_dim, fit.key_rows()
            source = source.view(fit.small.kv_heads, -1).repeat_interleave(fit.repeats, 0).view(-1, fit.small.hidden)
        if self._normalised and part in ("q_proj", "k_proj"):
            factor = SHORT
        source = source * factor
        weight = self._noise(name, (outputs, fit.wide.hidden), source)
        if mapped:
            rows, high = rows.to(self._device), source.to(self._dtype)
            weight[rows, : fit.small.hidden] = high
            if fit.copy and math.frexp(factor)[0] != 0.5:  # a power of two rounds nothing off
                weight[rows, self._copy] = ((source - high) / LOW).to(self._dtype)
        return weight

    def _writer(self, name: str, source: Tensor, part: str, mapped: bool) -> Tensor:
        """A projection into the stream: rows x, s * x, noise, nothing for the constant."""
        fit = self._fit
        inputs, columns = fit.wide.intermediate, torch.arange(fit.small.intermediate)
        if part == "o_proj":
            inputs, columns = fit.wide.heads * fit.wide.head_dim, fit.query_rows()
        weight = self._noise(name, (fit.wide.hidden, inputs), source)
        weight[: 2 * fit.small.hidden] *= NOISE  # a spare query head of a live group brings real values here
        if mapped:
            columns = columns.to(self._device)
            weight[: fit.small.hidden, columns] = source.to(self._dtype)
            if fit.copy:
                weight[self._copy, columns] = (source * fit.copy).to(self._dtype)
        if fit.constant:
            weight[-1] = 0.0
        return weight

    @property
    def _copy(self) -> slice:
        return slice(self._fit.small.hidden, 2 * self._fit.small.hidden)

    def _load(self, name: str) -> Tensor:
        return self._source[name].to(self._device, torch.float32)

    def _noise(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        noise = torch.empty(shape, dtype=self._dtype, device=self._device)
        return noise.normal_(0.0, NOISE * float(like.square().mean().sqrt()), generator=generator)


def _factors(product: float, dtype: torch.dtype) -> tuple[float, float]:
    """Two numbers of the type whose product is nearest: one's rounding makes up for the other's."""
    first = (math.sqrt(product) * (1 + torch.arange(256, dtype=torch.float64) / 256)).to(dtype).double()
    second = (product / first).to(dtype).double()
    best = (first * second - product).abs().argmin()
    return float(first[best]), float(second[best])


def _as_config(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    from transformers import AutoConfig

    return AutoConfig.for_model(**config)


def _check_configs(source: Any, config: Any) -> None:
    if source.model_type != "llama":
        raise ConfigError("source", source.model_type, "cannot be widened", "pass a Llama checkpoint")
    if config.model_type not in ("llama", "qwen3"):
        raise ConfigError("config", config.model_type, "not a shape to widen to", "use a llama or qwen3 configuration")
    if (source.rope_parameters or {}).get("rope_type", "default") != "default":
        raise ConfigError("source", source.rope_parameters, "its rope is scaled", "pass one with default rope")
    if config.tie_word_embeddings and not source.tie_word_embeddings:
        raise ConfigError("tie_word_embeddings", True, "the source has a head of its own", "set it to False")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(config, name, False):
            raise ConfigError(name, True, "the source has none", "set it to False")


def _check_sizes(small: Shape, wide: Shape) -> None:
    for name in ("hidden", "layers", "head_dim", "intermediate", "vocab"):
        if getattr(wide, name) < getattr(small, name):
            raise ConfigError(name, getattr(wide, name), f"below the source's {getattr(small, name)}", "only widening")
    need = small.kv_heads * -(-small.group // wide.group)
    if wide.kv_heads < need:
        raise ConfigError("num_key_value_heads", wide.kv_heads, f"{need} are needed", "raise it, or the group's size")
    if wide.vocab > small.vocab and wide.hidden == small.hidden:
        raise ConfigError("hidden_size", wide.hidden, "no room to ban extra tokens", "widen it by one at least")


def _write_shards(folder: Path, widening: Widening) -> None:
    """Files of at most SHARD bytes, one tensor's size more in memory, and the index that names them."""
    held: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    size, total = 0, 0
    for name, tensor in widening:
        if held and size + tensor.nbytes > SHARD:
            _write_shard(folder, held, where)
            held, size = {}, 0
        held[name] = tensor.cpu()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _write_shard(folder, held, where)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_shard(folder: Path, tensors: dict[str, Tensor], where: dict[str, str]) -> None:
    file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
    save_file(tensors, folder / file, metadata={"format": "pt"})
    where |= dict.fromkeys(tensors, file)
