"""The values of the engine: requests, sequences, and what is passed along within a step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from faircopy.errors import DraftError, FaircopyError, RequestError

if TYPE_CHECKING:  # the command line's help needs this module and not torch
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]
Logprobs = dict[int, float]  # token id -> log probability: the chosen token first, then the best ones


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. Greedy unless a temperature is given."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one, reported with the answer
    max_tokens: int | None = 128  # None: until the context is full
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # 0: the chosen token's; m: and the m best
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        for name, check, problem, remedy in _RULES:
            if not check(getattr(self, name)):
                raise RequestError(name, getattr(self, name), problem, remedy)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", self.min_tokens, f"above max_tokens = {self.max_tokens}", "lower it or raise max_tokens"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    def given(self) -> dict[str, Any]:
        """The fields that are not as they would be if left out, as JSON has them."""
        left_out = SamplingParams()
        found = {name: getattr(self, name) for name in self.names() if getattr(self, name) != getattr(left_out, name)}
        if "logit_bias" in found:
            found["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @property
    def asks_logprobs(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | int):
        return (value,)
    if not isinstance(value, Seq):
        raise RequestError(name, value, "not a list", "pass a list, or leave it out")
    return tuple(value)


def _as_bias(value: Any) -> dict[int, float]:
    """JSON has ids as texts; other keys are whole numbers of any kind."""
    try:
        return {
            int(token) if isinstance(token, str) else operator.index(token): float(bias)
            for token, bias in (value or {}).items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise RequestError(
            "logit_bias", value, "not a mapping of token ids to numbers", "pass {token_id: bias}"
        ) from None


def _number(low: float, high: float, open_low: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300 or value != value:
            return False
        return (low < value if open_low else low <= value) and value <= high

    return check


def _temperature(value: Any) -> bool:
    return _number(0.0, 1e4)(value) and (value == 0 or value >= 1e-4)


def _integer(low: int, optional: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and value >= low

    return check


def _each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: all(check(value) for value in values)


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _seed(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63)


_RULES: list[tuple[str, Callable[[Any], bool], str, str]] = [
    ("temperature", _temperature, "neither 0 nor in [0.0001, 10000]", "use 0 for greedy decoding"),
    ("top_p", _number(0.0, 1.0, open_low=True), "not in (0, 1]", "use 1 to switch it off"),
    ("top_k", _integer(0), "not a whole number of at least 0", "use 0 to switch it off"),
    ("min_p", _number(0.0, 1.0), "not in [0, 1]", "use 0 to switch it off"),
    ("seed", _seed, "not a whole number in [0, 2**63)", "pass one, or None for a fresh seed"),
    ("max_tokens", _integer(1, optional=True), "not a whole number of at least 1", "use None for the context's end"),
    ("min_tokens", _integer(0), "not a whole number of at least 0", "use 0 to switch it off"),
    ("stop", _each(_text), "holds something that is not a non-empty string", "pass a string or a list of strings"),
    ("stop_token_ids", _each(_integer(0)), "holds something that is not a token id", "pass a list of token ids"),
    ("n", _integer(1), "not a whole number of at least 1", "use 1 for one answer"),
    ("logprobs", _integer(0, optional=True), "not a whole number of at least 0", "use None to switch them off"),
    ("prompt_logprobs", _integer(0, optional=True), "not a whole number of at least 0", "use None to switch them off"),
    ("repetition_penalty", _number(1e-6, 1e9), "not in [1e-6, 1e9]", "use 1 to switch it off"),
    ("presence_penalty", _number(-1e9, 1e9), "not in [-1e9, 1e9]", "use 0 to switch it off"),
    ("frequency_penalty", _number(-1e9, 1e9), "not in [-1e9, 1e9]", "use 0 to switch it off"),
    ("bad_words", _each(_text), "holds something that is not a non-empty string", "pass a list of strings"),
    ("ignore_eos", lambda v: isinstance(v, bool), "not true or false", "pass a bool"),
    (
        "logit_bias",
        lambda v: all(abs(b) <= 1e9 for b in v.values()),
        "not finite, or beyond 1e9",
        "-100 bans, 100 forces",
    ),
]


class TextStream(Protocol):
    """Turns tokens into text as they come and watches for stop strings; the scheduler feeds it, token by token."""

    def push(self, token: int, may_stop: bool) -> bool:
        """Take one token; true if a stop string is now complete (text then ends before it)."""


class Constraint(Protocol):
    """Which tokens a request may write: a grammar, for example."""

    def allowed(self, output: Seq[int]) -> torch.Tensor:
        """[vocabulary] true for the tokens that may follow this output; depends on nothing but the output."""

    def complete(self, output: Seq[int]) -> bool:
        """Whether this output ends the text because nothing may follow, where the model has no end token to say so."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, in token ids."""

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    seed: int = 0
    k: int | None = None  # None: the engine's
    text: TextStream | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    constraint: Constraint | None = None
    drafter: str | None = None  # one of PerRequestDrafter's; None: the engine's
    prediction: tuple[int, ...] = ()  # what the output may be; drafts are taken from it
    written: tuple[int, ...] = ()  # the output's first tokens, if another engine wrote them: it goes on behind them


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in work; only the scheduler changes it."""

    id: int
    request: Request
    tokens: list[int]
    stops: frozenset[int] = frozenset()  # token ids that end it
    limit: int = 0  # tokens never grows beyond this
    finished: FinishReason | None = None
    error: FaircopyError | None = None
    drafted: int = 0
    accepted: int = 0
    steps: int = 0  # verify passes it took part in
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    origins: list[bool] = field(default_factory=list)  # per output token: true if it was a draft's

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def adjusts(self) -> bool:
        """Whether its logits are changed before a token is chosen, temperature and filters aside."""
        params, request = self.params, self.request
        changes = params.logit_bias or params.min_tokens or params.penalises or request.bad_words
        return bool(changes) or request.constraint is not None

    @property
    def drafts_itself(self) -> bool:
        """Whether its drafts come from elsewhere than the engine's drafter."""
        return self.request.drafter is not None or bool(self.request.prediction)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Confidence(NamedTuple):
    """How sure a drafter must be of a path of tokens."""

    least: float  # a path less likely than this is not worth verifying
    more: float  # one less likely than this is not worth another pass of the drafter
    rates: tuple[float, ...]  # how often tokens are accepted, by the drafter's confidence from 0 to 1 in equal bins

    def extended(self, path: float, confidence: float) -> float:
        """How likely a path is accepted with one more token."""
        return path * self.rates[min(len(self.rates) - 1, int(confidence * len(self.rates)))]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a step: how many of its tokens each has fed after it, and how many draft nodes each may have."""

    seqs: list[Sequence]
    upto: list[int]
    max_nodes: list[int]
    confidence: Confidence | None = None  # what of max_nodes is wanted; None: all
    idle: Set[Sequence] = frozenset()  # no drafts are wanted for these: a drafter does nothing for them, not even read
    shared_k: int | None = None  # nodes per sequence, which go to the surest of all trees; None: each tree has its own

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: Sequence, upto: int, max_nodes: int) -> None:
        """Used while a batch is put together; afterwards it does not change."""
        self.seqs.append(seq)
        self.upto.append(upto)
        self.max_nodes.append(max_nodes)

    def shares(self, i: int) -> bool:
        """Whether the tree of sequence i takes part in sharing nodes: those of a request's own k are its own."""
        seq = self.seqs[i]
        return self.shared_k is not None and bool(self.max_nodes[i]) and seq.request.k is None and not seq.drafts_itself

    def complete(self, i: int) -> bool:
        """Whether sequence i is fed to its end, so that a next token can be chosen."""
        return self.upto[i] == len(self.seqs[i].tokens)


MOST_JOINING = 16  # sequences whose prompts one captured step reads at most


class StepPlan(NamedTuple):
    """One step as the scheduler planned it.

    A captured step that follows one in flight is planned before its sequences' lengths are known: `upto` is then what
    the host knows, and the device goes on from its own lengths.
    """

    batch: Batch
    captured: bool = False
    k: int = 0  # draft nodes per sequence of a captured step's graph
    room: int = 0  # nodes that one of its sequences may have: more than k where the batch shares them
    before_capture: bool = False  # an eager step behind which captured ones follow

    @property
    def seqs(self) -> list[Sequence]:
        return self.batch.seqs


PICKED = -1  # the row of a node that was not drawn


@dataclass(frozen=True, slots=True)
class Sources:
    """What draft nodes were drawn from, for rejection sampling."""

    rows: list[list[int]]  # of each node, its row in the table; or PICKED
    table: Callable[[], torch.Tensor]  # [N, V] distributions; asked for once, when the target's pass has begun


@dataclass(frozen=True, slots=True)
class Draft:
    """One tree of guesses per sequence; a node's parent comes before it, -1 is the last committed token.

    A tree's first node is the token that a draft of one would have had.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    sources: Sources | None = None  # None: no node was drawn, all were picked
    confidence: list[list[float]] | None = None  # how sure the drafter is of each node of a chain, if it was asked

    @classmethod
    def chains(
        cls,
        tokens: list[list[int]],
        sources: Sources | None = None,
        confidence: list[list[float]] | None = None,
    ) -> Draft:
        return cls(tokens, [list(range(-1, len(chain) - 1)) for chain in tokens], sources, confidence)

    @classmethod
    def empty(cls, size: int) -> Draft:
        return cls([[] for _ in range(size)], [[] for _ in range(size)])

    def is_chain(self, i: int) -> bool:
        return self.parents[i] == list(range(-1, len(self.parents[i]) - 1))

    def source_rows(self, i: int) -> list[int]:
        """Of each node, see Sources."""
        return [PICKED] * len(self.tokens[i]) if self.sources is None else self.sources.rows[i]

    def path(self, i: int, node: int) -> list[int]:
        """The nodes from the root's child down to this one."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[i][node]
        return path[::-1]


def check_draft(draft: Draft, batch: Batch, vocab: int) -> None:
    """Refuse what is not a draft for this batch: drafters may be users' own."""
    if not isinstance(draft, Draft):
        raise DraftError("draft", draft, "not a Draft", "return Draft(...), Draft.chains(...) or Draft.empty(...)")
    if not isinstance(draft.sources, Sources | None):
        raise DraftError("sources", draft.sources, "not Sources", "return Draft(..., sources=Sources(rows, table))")
    sources = draft.tokens if draft.sources is None else draft.sources.rows
    for name, trees in (("tokens", draft.tokens), ("parents", draft.parents), ("sources", sources)):
        if len(trees) != len(batch):
            raise DraftError(name, f"{len(trees)} trees", f"for {len(batch)} sequences", "one per sequence, some empty")
    for i, (tokens, parents) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        max_nodes = batch.max_nodes[i] if batch.complete(i) else 0
        if len(tokens) > max_nodes:
            raise DraftError("draft", tokens, f"{len(tokens)} nodes where {max_nodes} are allowed", "propose fewer")
        if len(parents) != len(tokens) or any(not -1 <= p < node for node, p in enumerate(parents)):
            raise DraftError("parents", parents, "a parent must come before its node", "order the tree")
        if len(sources[i]) != len(tokens):
            raise DraftError("sources", f"{len(sources[i])} rows", f"for {len(tokens)} nodes", "one per node")
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise DraftError("draft", token, f"not a token id below {vocab}", "propose the target's tokens")


@dataclass(frozen=True, slots=True)
class Decision:
    """What one sequence gained: accepted nodes, and their tokens plus one more; with an error, without that one.

    Both are empty for a prompt chunk that has not reached the end.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    error: FaircopyError | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision per sequence of the batch."""

    decisions: list[Decision]


class FinishedStep(NamedTuple):
    """What a step drafted and decided, and the rows it cost; nothing of it is appended yet."""

    batch: Batch
    draft: Draft
    verdict: Verdict
    rows: int  # rows the target computed
    padding: int  # of these, rows that belong to no token or node
    captured: bool = False
    read: int = 0  # rows of text that the drafter read, beyond what it reads of every step
    prompt_rows: int = 0  # of a captured step's rows those that there are for prompts
    prompts_read: int = 0  # of these, those that held a prompt's token


class Output(NamedTuple):
    """What is new for one sequence after a step: immutable, so that another thread may read it."""

    id: int  # of the sequence
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]  # of these tokens, if they were asked for
    finished: FinishReason | None
    accepted: int  # how many of the tokens a draft had right
