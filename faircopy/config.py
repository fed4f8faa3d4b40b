"""What the user chose, checked and completed once; it never changes afterwards."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from faircopy.errors import ConfigError

STRATEGIES = ("ragged", "padded", "realign", "pool", "unpad_cache", "unpad_inputs", "ems")  # docs/strategies.md
RANKS = (1, 2, 4, 8)  # of tensor_parallel
VERIFIERS = ("exact", "rejection")
QUALITIES = ("both", "explicit", "implicit", "off")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GPU_RESERVE = 2 << 30  # bytes left free on a GPU: contexts, graphs, other processes
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20,
          "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of the engine.

    With strategy="ragged", verifier="exact" and exact=True, only dtype, device and k_groups change the tokens.
    """

    k: int = 4  # draft tokens per step and sequence, at most if `auto` or `law`
    auto: bool = False  # each draft length is chosen by measured acceptance and cost
    law: bool = False  # draft lengths follow the batch size: rows that cost no time by the roofline
    quality: str = "both"  # what sets a sequence's own draft length if `auto`: explicit, implicit, both or off
    share_nodes: bool | None = (
        None  # `auto` and explicit or both: a batch's nodes go to its surest trees; None: on CPUs
    )
    acceptance_history: bool = True  # `auto` begins with what earlier runs learned of its drafter, and keeps more of it
    dtype: str = "auto"
    device: str = "auto"
    strategy: str = "ragged"
    verifier: str = "exact"
    exact: bool = True
    max_batch: int = 64
    chunk: int | None = None  # prompt tokens fed per step at most; None: 512 on a CPU, 8192 on a GPU
    step_ms: float | None = None  # on a GPU, steps with prompts beside running texts take no longer; None: 2.5 times
    tensor_parallel: int = 1  # ranks, one per device, that share each layer of the target
    pipeline_parallel: int = 1  # ranks, one per device, each with some of the target's layers
    k_groups: bool = False  # sums along K as ranks make them: the bits of any tensor_parallel, which switches it on
    threads: int | None = None  # CPU threads, for the whole process; None: torch's own choice
    memory: int | str | None = (
        None  # bytes, or "24GiB", that weights, drafter, cache, graphs and passes may take, per device
    )
    planned_tokens: int | None = None  # of each of max_batch sequences, to fit into `memory`; None: one whole context
    cache_memory: int | str | None = None  # bytes for keys and values; None: what is left on a GPU, else a quarter
    draft_levels: int | None = None  # tokens that a draft head guesses ahead at most; None: as many as it was made for
    page: int = 32  # tokens per page
    prefix_reuse: bool = True
    graphs: bool = True  # on a GPU: capture steps as CUDA graphs
    pack_rows: bool = True  # captured steps: verify only the draft nodes that were found, where their number varies
    lookup_min: int = 1  # n-gram drafting: shortest and longest suffix looked up
    lookup_max: int = 4
    drafter_per_request: bool = False  # a request may name a drafter of its own, or bring a prediction
    refill: bool | None = None  # new sequences join a running batch; None: as the strategy was published
    pool_window: int | None = None  # strategy "pool": sequences to choose from; None: 48, or two batches
    pool_sort: bool = False  # strategy "pool": shortest prompts first

    def __post_init__(self) -> None:
        if isinstance(self.k, str):
            raise ConfigError("k", self.k, "not a whole number", 'pass 0 or more, or LLM(k="auto" or "law")')
        self._whole("k", 0)
        given = self._given("chunk", "threads", "planned_tokens", "draft_levels")
        for name in ("max_batch", "page", "lookup_min", *given):
            self._whole(name, 1)
        self._whole("lookup_max", self.lookup_min)
        if self.step_ms is not None and not self.step_ms > 0:
            raise ConfigError("step_ms", self.step_ms, "not above 0", "give milliseconds, or None")
        self._one_of("strategy", STRATEGIES)
        self._one_of("verifier", VERIFIERS)
        self._one_of("quality", QUALITIES)
        self._one_of("dtype", ("auto", *DTYPES))
        if self.auto and self.law:
            raise ConfigError("law", True, "given beside auto", 'give one of the two: LLM(k="auto") or LLM(k="law")')
        self._check_parallel()
        for name in (
            "auto",
            "law",
            "acceptance_history",
            "exact",
            "prefix_reuse",
            "graphs",
            "pack_rows",
            "pool_sort",
            "drafter_per_request",
            "k_groups",
            *self._given("refill", "share_nodes"),
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "not true or false", "pass a bool")
        if self.pool_window is not None:
            self._whole("pool_window", 1)
            if self.pool_window < self.max_batch:
                raise ConfigError(
                    "pool_window",
                    self.pool_window,
                    f"below max_batch = {self.max_batch}",
                    "raise it, or lower max_batch",
                )

        self.torch_device()
        self._check_memory()

    def _check_parallel(self) -> None:
        if self.tensor_parallel not in RANKS or isinstance(self.tensor_parallel, bool):
            problem = "sums have one order on 1, 2, 4 and 8 ranks alone"
            raise ConfigError("tensor_parallel", self.tensor_parallel, problem, "use one of them")
        self._whole("pipeline_parallel", 1)
        if self.ranks == 1:
            return
        field = "tensor_parallel" if self.tensor_parallel > 1 else "pipeline_parallel"
        if self.pipeline_parallel > 1 and (self.tensor_parallel > 1 or self.k_groups):
            given = "tensor_parallel" if self.tensor_parallel > 1 else "k_groups"
            problem = f"given beside {given} = {getattr(self, given)}"
            raise ConfigError("pipeline_parallel", self.pipeline_parallel, problem, "give one of the two")
        if self.strategy != "ragged":
            problem = f"ranks share the cache of strategy 'ragged' alone, not of {self.strategy!r}"
            raise ConfigError(field, self.ranks, problem, "use strategy='ragged'")

    @property
    def ranks(self) -> int:
        """Processes that share the target."""
        return self.tensor_parallel * self.pipeline_parallel

    def _check_memory(self) -> None:
        if self.memory is None:
            if self.planned_tokens is not None:
                raise ConfigError("planned_tokens", self.planned_tokens, "given without memory", "pass memory= as well")
            return
        if self.cache_memory is not None:
            raise ConfigError("cache_memory", self.cache_memory, "given beside memory", "give one of the two")
        if self.strategy != "ragged":
            problem = f"counts the memory of strategy 'ragged' alone, not of {self.strategy!r}"
            raise ConfigError("memory", self.memory, problem, "limit keys and values with cache_memory=")
        parse_bytes(self.memory)

    def _given(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def torch_dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.dtype)

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError("device", self.device, "not a device", "use 'cpu', 'cuda' or 'auto'") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", self.device, "no GPU is visible", "use device='cpu'")
        return device

    def window(self) -> int:
        """How many sequences the strategy "pool" chooses from."""
        return max(48, 2 * self.max_batch) if self.pool_window is None else self.pool_window

    def chunk_on(self, device: torch.device) -> int:
        """Prompt tokens fed per step at most."""
        return self.chunk or (8192 if device.type == "cuda" else 512)

    def cache_bytes(self, device: torch.device, passes: int = 0) -> int:
        """Bytes for keys and values: what was asked for, or what is left when passes have the bytes they need."""
        if self.cache_memory is not None:
            return parse_bytes(self.cache_memory, "cache_memory")
        free = free_memory(device)
        return free // (4 * self.ranks) if device.type != "cuda" else max(0, free - passes - GPU_RESERVE)

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"not a whole number of at least {least}", f"pass {least} or more")

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise ConfigError(name, value, "unknown", f"use one of {', '.join(known)}")


def parse_bytes(value: int | str, field: str = "memory") -> int:
    """2000000, "512MiB" or "2 GB" as a number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    text = str(value).strip().upper()
    number = text.rstrip("BKMGTI ")
    unit = text[len(number) :].strip()
    try:
        amount = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        amount = 0
    if isinstance(value, bool) or amount <= 0:
        raise ConfigError(field, value, "not a positive amount of memory", "pass bytes, or a text such as '2GiB'")
    return amount


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system knows
        return 4 * 2**30


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str], also: Iterable[str] = ()) -> None:
    """Unknown names are refused, with the nearest known one as remedy. also: names to suggest besides the known."""
    known = set(known)
    names = sorted(known | {name for name in also if name not in ("self", "options")})
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise ConfigError(owner, name, "unknown option", hint)


# vLLM's names for what we call draft, k and lookup lengths.
_SPECULATIVE_METHODS = {"draft_model", "ngram", "medusa", "clover", "clover2", "eagle3", "scylla"}
_SPECULATIVE_KEYS = {"model", "method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}


def from_speculative(config: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """Our draft and options from a vLLM speculative_config."""
    refuse_unknown("speculative_config", config, _SPECULATIVE_KEYS)
    method = config.get("method") or ("ngram" if config.get("model", "[ngram]") == "[ngram]" else "draft_model")
    if method not in _SPECULATIVE_METHODS:
        known = ", ".join(sorted(_SPECULATIVE_METHODS))
        raise ConfigError("speculative_config.method", method, "unknown", f"use one of {known}")
    if method != "ngram" and "model" not in config:
        raise ConfigError("speculative_config.model", None, "missing", "name the draft model or the head's folder")
    names = {"num_speculative_tokens": "k", "prompt_lookup_min": "lookup_min", "prompt_lookup_max": "lookup_max"}
    options = {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
    return ("ngram" if method == "ngram" else config["model"]), options
