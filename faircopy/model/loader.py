"""From a checkpoint to a model: on our decoder where it knows the family, else on the transformers backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from faircopy.errors import CheckpointError, ConfigError, FaircopyError, UnsupportedModel
from faircopy.kernels.activation import ACTIVATIONS
from faircopy.kernels.ranks import Ranks
from faircopy.model.base import Model, StageModel
from faircopy.model.decoder import Decoder, eager_weights
from faircopy.model.shares import Cut, DenseShares, dense_shares, padded
from faircopy.model.weights import FAMILIES, DenseModel, Source, Stage, Tensors, decoder_spec, head_size

CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"  # transformers' option
Backend = Literal["auto", "decoder", "transformers"]  # our decoder, or transformers' own modules


def load_model(
    path: str,
    dtype: torch.dtype | None,
    device: torch.device,
    exact: bool = True,
    backend: Backend = "auto",
    ranks: Ranks | None = None,
) -> Model:
    """A model from a folder or a hub id; dtype None: the checkpoint's, or float32 where that has no native products.

    ranks: of these processes each loads its share; None: sums are not made in the groups that shares need.
    """
    folder = find_checkpoint(path)
    config = load_config(folder)
    kind = dtype or native_dtype(checkpoint_dtype(config), device)
    if backend == "decoder" or (backend == "auto" and fits_decoder(config)):
        return _load_decoder(path, folder, config, kind, device, exact, ranks)
    return _load_transformers(path, folder, kind, device, exact, ranks)


def find_checkpoint(path: str) -> Path:
    """The local folder of a checkpoint; a hub id is fetched, or found where it was fetched before."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise CheckpointError("model", path, "no such folder", "pass a folder with config.json, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:
        raise CheckpointError(
            "model", path, f"neither a folder nor to be had from the hub ({error})", "check the name or pass a folder"
        ) from error


def load_config(folder: Path | str) -> Any:
    """The configuration in a folder, or of a hub id: no other file is needed."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder).get_text_config()
    except Exception as error:  # a wrong field raises whatever its validator raises
        raise CheckpointError(
            "model", str(folder), f"its config.json cannot be read ({error})", "pass a complete checkpoint folder"
        ) from error


def checkpoint_dtype(config: Any) -> torch.dtype:
    kind = getattr(config, "dtype", None)
    return kind if isinstance(kind, torch.dtype) else torch.float32


def native_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The checkpoint's type, or float32 on CPUs whose products of that type are emulated."""
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype if dtype == torch.bfloat16 and native else torch.float32


def fits_decoder(config: Any) -> bool:
    """Whether our decoder computes exactly what this configuration says."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and getattr(config, "hidden_act", None) in ACTIVATIONS
        and parameters.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and not getattr(config, "quantization_config", None)
    )


def _load_decoder(
    name: str, folder: Path, config: Any, dtype: torch.dtype, device: torch.device, exact: bool, ranks: Ranks | None
) -> Model:
    tensors = CheckpointTensors(folder, dtype, device)
    _check_tensors(name, config, tensors)
    rope = rope_frequencies(config)
    if ranks is None:
        model: Model = build_decoder(name, config, rope, tensors, dtype, device, exact)
    else:
        model = _shared_decoder(name, config, rope, tensors, dtype, exact, ranks)
    tensors.close()
    return model


def _shared_decoder(
    name: str,
    config: Any,
    rope: tuple[Tensor, float],
    tensors: CheckpointTensors,
    dtype: torch.dtype,
    exact: bool,
    ranks: Ranks,
) -> DenseModel:
    """A rank's share of our decoder: with the heads, inner numbers and tokens that are its own."""
    whole = decoder_spec(config, *rope)
    shares = dense_shares(name, config, whole.head_dim, config.vocab_size, tensors.device, ranks)
    spec = replace(
        whole,
        heads=shares.own_heads,
        kv_heads=shares.own_kv_heads,
        intermediate=whole.intermediate // ranks.size,
    )
    own = partial(_share, tensors, shares)
    context = config.max_position_embeddings
    source = Source(name, spec, own, config.vocab_size, context, dtype, exact, ranks, tensors, whole)
    return _fused_decoder(source, tensors.device) or Decoder(eager_weights(source))


def load_stage(
    path: str, dtype: torch.dtype | None, device: torch.device, exact: bool, rank: int, size: int
) -> StageModel:
    """A rank's layers of a pipeline."""
    folder = find_checkpoint(path)
    config = load_config(folder)
    kind = dtype or native_dtype(checkpoint_dtype(config), device)
    tensors = CheckpointTensors(folder, kind, device)
    stage = stage_of(path, config.num_hidden_layers, rank, size)
    make = _decoder_stage if fits_decoder(config) else _stock_stage
    model = make(path, config, tensors, kind, exact, stage)
    model.backend = f"{model.backend}, pipeline of {size}"
    tensors.close()
    return model


def _decoder_stage(
    name: str, config: Any, tensors: CheckpointTensors, dtype: torch.dtype, exact: bool, stage: Stage
) -> StageModel:
    _check_tensors(name, config, tensors)
    spec, context = decoder_spec(config, *rope_frequencies(config)), config.max_position_embeddings
    return Decoder(eager_weights(Source(name, spec, tensors, config.vocab_size, context, dtype, exact, part=stage)))


def _stock_stage(
    name: str, config: Any, tensors: CheckpointTensors, dtype: torch.dtype, exact: bool, stage: Stage
) -> StageModel:
    from faircopy.model.stock_stage import StockStage
    from faircopy.model.transformers_backend import check_static

    check_static(name, config, _model_class(name, config))
    return StockStage(name, stock_skeleton(config, dtype), tensors, exact, stage)


def stage_of(name: str, depth: int, rank: int, size: int) -> Stage:
    """The first stages have one layer more where the number is not even: rank 0 has as many as any."""
    if size > depth:
        problem = f"{name} has {depth} layers"
        raise ConfigError("pipeline_parallel", size, problem, f"use {depth} or fewer")
    begin, end = (-(-place * depth // size) for place in (rank, rank + 1))
    return Stage(range(begin, end), rank == size - 1)


def _share(tensors: CheckpointTensors, shares: DenseShares, name: str) -> Tensor | None:
    """What this rank keeps of a tensor; nothing else of it is read."""
    cut = shares.cut(name)
    return tensors(name) if cut is None else tensors.part(name, cut)


def build_decoder(
    name: str,
    config: Any,
    rope: tuple[Tensor, float],
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
) -> DenseModel:
    """Our decoder around these tensors: the fused one on devices that have its kernels, else the eager one."""
    spec, context = decoder_spec(config, *rope), config.max_position_embeddings
    source = Source(name, spec, tensors, config.vocab_size, context, dtype, exact)
    return _fused_decoder(source, device) or Decoder(eager_weights(source))


def _fused_decoder(source: Source, device: torch.device) -> DenseModel | None:
    if device.type != "cuda":
        return None
    try:
        from faircopy.model.fused import Fused, fused_weights
    except ImportError:  # torch came without Triton
        return None
    return Fused(fused_weights(source))


def _check_tensors(name: str, config: Any, tensors: CheckpointTensors) -> None:
    """Every tensor the stock model has must be there, in its shape: a skeleton without memory tells which."""
    skeleton = stock_skeleton(config).state_dict()
    if config.tie_word_embeddings:
        skeleton.pop("lm_head.weight", None)
    for tensor, like in skeleton.items():
        shape = tensors.shape(tensor)
        if shape != tuple(like.shape):
            problem = "is missing" if shape is None else f"has shape {shape}, not {tuple(like.shape)}"
            raise CheckpointError("model", name, f"tensor {tensor} {problem}", "fetch the checkpoint again")


def stock_skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The stock model of a configuration without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")


def rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and scaling factor of a configuration's rope."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    if parameters["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        return frequencies, float(factor)
    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    width = int(head_size(config) * share)
    return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0


class CheckpointTensors:
    """A checkpoint's tensors by name, read when asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self.device = dtype, device
        self._files: dict[Path, Any] = {}  # those that are open
        self._readers: dict[str, Callable[[], Tensor]] = {}
        self._slices: dict[str, Callable[[], Any]] = {}  # what can be indexed without being read as a whole
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self._open(file)
        if not self._readers:
            self._convert(folder)
        self._check_index(folder)

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        read = self._readers.get(name)
        return None if read is None else read().to(self.device, dtype or self._dtype)

    def part(self, name: str, cut: Cut, dtype: torch.dtype | None = None) -> Tensor | None:
        """Some of a tensor, without reading the rest of it."""
        if name not in self._slices:
            return None
        lazy, before = self._slices[name](), (slice(None),) * cut.dim
        ranges = [lazy[(*before, slice(*part))] for part in cut.ranges]
        found = ranges[0] if len(ranges) == 1 else torch.cat(ranges, cut.dim)
        return padded(found, cut).to(self.device, dtype or self._dtype)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape, without reading it."""
        return self._shapes.get(name)

    def names(self) -> list[str]:
        return list(self._readers)

    def beginning(self, name: str, count: int = 16) -> Tensor:
        """The first numbers of a tensor, without reading all of it."""
        lazy = self._slices[name]()
        first: Tensor = lazy[:1] if len(self._shapes[name]) > 1 else self._readers[name]()
        return first.flatten()[:count].to(self._dtype)

    def close(self) -> None:
        """Close the files, whose pages count as resident while they are mapped; reading opens them again."""
        self._files.clear()

    def _open(self, file: Path) -> None:
        handle = self._file(file)
        names = list(handle.keys())
        self._readers |= {name: partial(self._tensor, file, name) for name in names}
        self._slices |= {name: partial(self._slice, file, name) for name in names}
        self._shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in names}

    def _file(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError("model", str(file), f"corrupt ({error})", "fetch the checkpoint again") from error
        return self._files[file]

    def _tensor(self, file: Path, name: str) -> Tensor:
        found: Tensor = self._file(file).get_tensor(name)
        return found

    def _slice(self, file: Path, name: str) -> Any:
        return self._file(file).get_slice(name)

    def _convert(self, folder: Path) -> None:
        """Checkpoints in older formats are read by transformers."""
        state = _from_pretrained(str(folder), folder, self._dtype).state_dict()
        self._readers = self._slices = {name: partial(state.__getitem__, name) for name in state}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    def _check_index(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            return
        for name, file in read_json(index).get("weight_map", {}).items():
            if name not in self._readers:
                raise CheckpointError(
                    "model", str(folder), f"tensor {name} of {file} is missing", "fetch the checkpoint again"
                )


def _load_transformers(
    name: str, folder: Path, dtype: torch.dtype, device: torch.device, exact: bool, ranks: Ranks | None
) -> Model:
    from faircopy.model.transformers_backend import TransformersModel

    config = load_config(folder)
    check_servable(name, config)
    if ranks is None:
        return TransformersModel(name, load_stock(name, dtype, device), exact)
    from faircopy.model.stock_reader import StockReader
    from faircopy.model.stock_shares import stock_share

    model = stock_skeleton(config, dtype)
    tensors = CheckpointTensors(folder, dtype, device)
    shares = stock_share(name, model, StockReader(name, model, tensors), device, ranks)
    tensors.close()
    return TransformersModel(name, model.eval().requires_grad_(False), exact, shares)


def load_stock(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A frozen transformers model, for those who train on what it says."""
    return _from_pretrained(path, find_checkpoint(path), dtype).to(device).eval().requires_grad_(False)


def check_servable(name: str, config: Any) -> None:
    """Refuse by name what a configuration alone shows to be unservable."""
    from faircopy.model.transformers_backend import check_static

    if not fits_decoder(config):
        check_static(name, config, _model_class(name, config))


def _model_class(name: str, config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise UnsupportedModel(
            "model", name, f"{config.model_type} is not a causal language model", "pass a causal language model"
        ) from error


def _from_pretrained(name: str, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with _no_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, experts_implementation="eager", output_loading_info=True
            )
    except Exception as error:  # transformers, safetensors and torch each raise their own
        raise CheckpointError("model", name, f"cannot be loaded ({error})", "fetch the checkpoint again") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would fill them with random numbers
        raise CheckpointError(
            "model", name, f"tensor {missing[0]} is missing from the checkpoint", "fetch the checkpoint again"
        )
    return model


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' own progress bar: it is shown even where there is no terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointError("model", str(file), f"not JSON ({error})", "fetch the checkpoint again") from error
    return content if isinstance(content, dict) else {}


def load_tokenizer(path: str) -> Any | None:
    """The checkpoint's tokenizer, or None if it brings none."""
    from transformers import AutoTokenizer

    folder = find_checkpoint(path)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers and transformers each raise their own
        raise CheckpointError("tokenizer", path, f"cannot be loaded ({error})", "fetch the checkpoint again") from error


def text_decoder(tokenizer: Any | None) -> Callable[[list[int]], str]:
    """Tokens to text without special tokens, not cleaned; straight from the backend where transformers adds nothing."""
    if tokenizer is None:
        return lambda tokens: ""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    stock = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    if stock:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    options = {} if space_cleaner(tokenizer) is None else {"clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True, **options))


def space_cleaner(tokenizer: Any | None) -> Callable[[str], str] | None:
    """What takes spaces out of decoded text before punctuation; None if the tokenizer's decode() does not do that."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    # newer transformers clean texts of BPE only on demand; older ones do not have the option
    if type(model).__name__ == "BPE" and not getattr(tokenizer, CLEANS_BPE, True):
        return None
    cleaner: Callable[[str], str] = tokenizer.clean_up_tokenization  # type: ignore[union-attr]
    return cleaner


def response_template(path: str, tokenizer: Any | None) -> dict[str, Any] | None:
    """How transformers' `parse_response` reads this model's answers: the tokenizer's own template, or the one that
    transformers' server has for the architecture; None if there is neither."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None or not hasattr(tokenizer, "parse_response"):
        return own
    try:
        from transformers.cli.serving.utils import get_response_template

        found: dict[str, Any] | None = get_response_template(
            tokenizer, SimpleNamespace(config=load_config(find_checkpoint(path)))
        )
    except (ImportError, AttributeError, FaircopyError, OSError):
        return None
    return found


def load_eos(path: str) -> frozenset[int]:
    """The tokens that end a text, as generate() has it: the generation config's list, else the model config's."""
    folder = find_checkpoint(path)
    file = folder / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.exists() else None
    if value is None:
        value = getattr(load_config(folder), "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def vocabulary_difference(target: Any | None, draft: Any | None, sizes: tuple[int, int]) -> str | None:
    """The first difference between two vocabularies, or None; output layers padded to other sizes are no difference."""
    if target is None or draft is None:
        return None if sizes[0] == sizes[1] else f"vocabularies of {sizes[0]} and {sizes[1]} tokens"
    ours, theirs = ({i: word for word, i in t.get_vocab().items()} for t in (target, draft))
    for i in sorted({*ours, *theirs}):
        if ours.get(i) != theirs.get(i):
            return f"token {i} is {ours.get(i)!r} for the target and {theirs.get(i)!r} for the draft"
    return None
