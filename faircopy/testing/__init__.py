"""What tests of engines and drafters need: fakes, and the decoding loop that is too simple to be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from faircopy import rng
from faircopy.drafters.base import Drafter
from faircopy.kernels.gumbel import gumbel
from faircopy.layout.base import Cache, LayerShape, Packed
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import FINAL, Model, Taps, TokenWeights
from faircopy.model.runner import Result, Runner
from faircopy.types import Batch, Draft, FinishReason, Logprobs, Request, SamplingParams, Sequence, Verdict

Forward = Callable[[list[int]], Tensor]  # tokens -> logits [T, V], from scratch


class TableModel:
    """A model that costs nothing: logits are looked up by token and position."""

    backend = "table"

    def __init__(self, vocab: int = 64, context: int = 512, seed: int = 0, eos: Seq[int] = ()) -> None:
        self.name, self.vocab, self.context, self.eos = "table", vocab, context, tuple(eos)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.layers = [LayerShape(1, 1)]  # nothing is stored in it, but pages have a size
        self.poison: int | None = None  # a token after which all logits are NaN
        self._table = torch.randn(7, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 3

    @property
    def weight_bytes(self) -> int:
        return self._table.nbytes

    def token_weights(self) -> TokenWeights:
        """Its logits are its hidden states."""
        return TokenWeights(torch.eye(self.vocab), torch.eye(self.vocab))

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        if taps is not None:
            taps(FINAL, self._table[packed.positions % 7, packed.ids])
        ids, positions = packed.ids[packed.wanted], packed.positions[packed.wanted]
        logits = self._table[positions % 7, ids]
        return logits if self.poison is None else logits.masked_fill((ids == self.poison)[:, None], torch.nan)


class SpyDrafter(Drafter):
    """Passes everything on to another drafter and remembers it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.wants, self.expensive = inner, inner.wants, inner.expensive
        self.proposed: list[Draft] = []
        self.observed: list[Verdict] = []
        self.forgotten: list[Sequence] = []

    def propose(self, batch: Batch) -> Draft:
        self.proposed.append(self.inner.propose(batch))
        return self.proposed[-1]

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        self.observed.append(verdict)
        self.inner.observe(batch, draft, result, verdict)

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)
        self.inner.forget(seq)


class ScriptedDrafter(Drafter):
    """Knows how each text goes on and how many of its guesses should be right.

    script(seq, max_nodes) -> (nodes, right nodes).

    With `wide` each right node gets a wrong elder sibling, so the draft is a tree.
    """

    def __init__(
        self,
        truth: dict[tuple[int, ...], list[int]],
        script: Callable[[Sequence, int], tuple[int, int]],
        vocab: int,
        wide: bool = False,
    ) -> None:
        self._truth, self._script, self._vocab, self._wide = truth, script, vocab, wide

    def propose(self, batch: Batch) -> Draft:
        trees = [
            self._tree(seq, max_nodes) if batch.complete(i) else ([], [])
            for i, (seq, max_nodes) in enumerate(zip(batch.seqs, batch.max_nodes, strict=True))
        ]
        return Draft([tokens for tokens, _ in trees], [parents for _, parents in trees])

    def _tree(self, seq: Sequence, max_nodes: int) -> tuple[list[int], list[int]]:
        nodes, right = self._script(seq, max_nodes)
        future = self._truth.get(seq.prompt, [])[len(seq.tokens) - len(seq.prompt) :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth in range(min(nodes, max_nodes)):
            true = future[depth] if depth < len(future) else 0
            if self._wide and len(tokens) + 2 <= max_nodes:
                tokens.append((true + 2) % self._vocab)
                parents.append(parent)
            if len(tokens) < max_nodes:
                tokens.append(true if depth < right else (true + 1) % self._vocab)
                parents.append(parent)
                parent = len(tokens) - 1
        return tokens, parents


class ByteTokenizer:
    """One token per byte; `end` is the end of text."""

    chat_template = "{{ messages }}"

    def __init__(self, end: int = 0) -> None:
        self.end = end

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i == self.end)]
        return bytes(i % 256 for i in kept).decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "
        return self.encode(text)


def cacheless(model: Model, exact: bool = True) -> Forward:
    """A model's logits at every token of a text, computed in one go with nothing kept."""

    def forward(tokens: list[int]) -> Tensor:
        tables = BlockTables(PagePool(-(-len(tokens) // 32)), 32, reuse=False)
        runner = Runner(model, PagedLayout(tables, model.layers, model.dtype, model.device, exact))
        seq = Sequence(0, Request(tuple(tokens), SamplingParams(prompt_logprobs=0)), list(tokens))
        tables.open(seq)
        tables.reserve(seq, len(tokens))
        return runner.forward(Batch([seq], [len(tokens)], [0]), Draft.empty(1)).logits

    return forward


@dataclass(slots=True)
class Plain:
    """What plain decoding of one request gives."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)


def plain(
    forward: Forward,
    prompt: Seq[int],
    params: SamplingParams,
    *,
    context: int,
    seed: int = 0,
    eos: Seq[int] = (),
    decode: Callable[[list[int]], str] = lambda ids: "",
    bad_words: Seq[Seq[int]] = (),
) -> Plain:
    """Decode one request alone, token by token, recomputing everything each time: the meaning of all parameters."""
    out, ends = Plain(), {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    if params.prompt_logprobs is not None:
        rows = forward(list(prompt))
        out.prompt_logprobs = [None]
        for i, token in enumerate(prompt[1:]):
            out.prompt_logprobs.append(_plain_logprobs(rows[i], token, params.prompt_logprobs))
    limit = context - len(prompt) if params.max_tokens is None else min(params.max_tokens, context - len(prompt))
    while len(out.tokens) < limit:
        logits = forward([*prompt, *out.tokens])[-1]
        scores = plain_scores(logits, prompt, out.tokens, params, ends, bad_words)
        token = plain_choice(scores, params, seed, len(prompt) + len(out.tokens))
        if params.logprobs is not None:
            out.logprobs.append(_plain_logprobs(logits, token, params.logprobs))
        out.tokens.append(token)
        known, out.text = len(out.text), decode(out.tokens)
        if len(out.tokens) < params.min_tokens:
            continue
        found = [out.text.find(stop, max(0, known - len(stop) + 1)) for stop in params.stop]
        cuts = [place for place in found if place >= 0]
        if cuts:
            out.text, out.finish_reason = out.text[: min(cuts)], "stop"
            return out
        if token in ends:
            out.finish_reason = "stop"
            return out
    return out


def plain_scores(
    logits: Tensor, prompt: Seq[int], output: list[int], params: SamplingParams, ends: set[int], bad: Seq[Seq[int]]
) -> Tensor:
    scores = logits.float().clone()
    if params.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            positive = scores[token] > 0
            scores[token] = (
                scores[token] / params.repetition_penalty if positive else scores[token] * (params.repetition_penalty)
            )
    for token, count in Counter(output).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * torch.tensor(float(count))
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        scores[list(ends)] = -torch.inf
    for word in bad:
        if list(word[:-1]) == output[len(output) - len(word) + 1 :] or len(word) == 1:
            scores[word[-1]] = -torch.inf
    return scores


def plain_choice(scores: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    if params.temperature == 0:
        return int(scores.argmax())
    scores = scores / params.temperature
    values: list[float] = scores.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    allowed = set(range(len(values)))
    if params.top_k:
        weakest = values[order[min(params.top_k, len(order)) - 1]]
        allowed = {token for token in allowed if values[token] >= weakest}
    if params.top_p < 1:
        probs = _plain_softmax(scores, allowed)
        total, nucleus = 0.0, set()
        for token in order:
            if token in allowed and total < params.top_p:
                nucleus.add(token)
                total += probs[token]
        allowed = nucleus
    if params.min_p:
        probs = _plain_softmax(scores, allowed)
        best = max(probs.values())
        allowed = {token for token in allowed if probs[token] >= params.min_p * best}
    noise = gumbel(torch.tensor(rng.signed(rng.key(seed, position))), torch.arange(len(scores)))
    noisy: list[float] = (scores + noise).tolist()
    return max(sorted(allowed), key=lambda token: noisy[token])


def _plain_softmax(scores: Tensor, allowed: set[int]) -> dict[int, float]:
    tokens = sorted(allowed)
    return dict(zip(tokens, torch.softmax(scores[tokens].double(), 0).tolist(), strict=True))


def _plain_logprobs(logits: Tensor, token: int, best: int) -> Logprobs:
    table: list[float] = torch.log_softmax(logits.float(), -1).tolist()
    order = sorted(range(len(table)), key=lambda t: (-table[t], t))
    return {t: table[t] for t in [token, *order[:best]]}
