"""What all draft heads share: a network that reads the target's hidden states, and the drafter that feeds it.

Row t of a head holds token t and the target's state of the row before it, so a head's keys and values lie at the
target's slots and depend on the tokens up to there alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.drafters.blocks import Attend, BlockShape, causal
from faircopy.drafters.trees import OFFERED, Offer, Tree
from faircopy.kernels.linear import Product, product
from faircopy.layout.base import LayerShape, Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Words
from faircopy.model.runner import Result
from faircopy.sampling import Row, adjusted, choose, probabilities
from faircopy.types import Batch, Draft, Sequence, Verdict

PATIENCE = 64  # states that wait, where nothing is to be guessed, before they are read anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a head is, as its config.json says."""

    method: str
    shape: BlockShape  # of its decoder layers
    vocab: int  # the target's
    depth: int  # the target's number of layers
    levels: int  # tokens it guesses ahead at most
    target: str = ""  # the name it was trained under, and what tells that checkpoint from others
    fingerprint: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # the method's own


class Rows(NamedTuple):
    """Where rows stand: positions [T], and attention over the keys before them."""

    positions: Tensor
    attend: Attend


class Guess(NamedTuple):
    """What a head says at one level: [..., T, V], what it remembers, and the state its logits were made from."""

    logits: Tensor
    memory: Tensor
    out: Tensor


@dataclass(slots=True)
class Lesson:
    """A batch of text as the target sees it."""

    tokens: Tensor  # [B, L]
    states: Tensor  # [B, L, F]: what the head wants of the rows before
    logits: Tensor  # [B, L, V] the target's own
    final: Tensor  # [B, L, hidden] the normalised states its head reads


class Teaching(NamedTuple):
    """What one level should have said, rows without a state before them left out."""

    labels: Tensor  # [B, N] the text
    logits: Tensor  # [B, N, V] the target's
    final: Tensor  # [B, N, hidden]


class Head(nn.Module, ABC):
    """Guesses tokens from the target's hidden states. [B, T, ...] are texts in training, else one row of packed ones.

    Each method is a subclass: what it reads, how it steps from a token to the next guesses, its tree and its loss.
    """

    method: ClassVar[str]
    deep: ClassVar[bool] = False  # whether guesses beyond the first level need keys and values of their own
    decay: ClassVar[float] = 0.8  # what a level's loss weighs against the one before

    def __init__(self, config: HeadConfig, wants: tuple[int, ...], layers: int = 0) -> None:
        super().__init__()
        self.config, self.wants, self.levels = config, wants, config.levels
        self.layers: list[LayerShape] = [config.shape.cached] * layers
        self.name, self.vocab, self.context = config.method, config.vocab, config.shape.context
        self._words: Words | None = None
        self._product: Product | None = None

    @property
    def words(self) -> Words:
        assert self._words is not None, "a head was used before it was bound to its target"
        return self._words

    @property
    def dtype(self) -> torch.dtype:
        return self._like().dtype

    @property
    def device(self) -> torch.device:
        return self._like().device

    @property
    def width(self) -> int:
        """Size of what it reads per row."""
        return len(self.wants) * self.config.shape.hidden

    @property
    def trained(self) -> int:
        """How many levels its loss looks at."""
        return self.levels

    @property
    def size(self) -> int:
        """Trained parameters."""
        return sum(p.numel() for p in self.parameters())

    def bind(self, words: Words) -> Self:
        """Share the target's embedding and head; they are not part of its own weights."""
        self._words = words
        return self

    def serve(self) -> Self:
        """From now on it only guesses: the target's head is packed as the target packs its own."""
        self._product = product(self.words.rows.to(self.dtype), self.words.bias, exact=False)
        return self.eval()

    @abstractmethod
    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """What it remembers of each row: states [B, T, F] of the rows before, tokens [B, T]."""

    @abstractmethod
    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        """What follows these tokens, given what was remembered above them; level 0 follows the text itself."""

    def tree(self, room: int) -> Tree:
        """An empty tree of the method's own kind."""
        return Tree(room)

    def level_loss(self, guess: Guess, teaching: Teaching) -> Tensor:
        """What one level got wrong: cross entropy with the text, unless a method says otherwise."""
        return F.cross_entropy(guess.logits.flatten(0, 1).float(), teaching.labels.flatten())

    def unroll(self, states: Tensor, tokens: Tensor, levels: int) -> Iterator[Guess]:
        """All levels over whole texts, each given the true tokens before: level j loses its last j + 1 rows."""
        length = tokens.shape[1]
        memory = self.read(states, tokens, text_rows(tokens))
        for level in range(levels):
            count = length - 1 - level
            guess = self.step(level, memory[:, :count], tokens[:, level : level + count])
            memory = guess.memory
            yield guess

    def loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted over levels; metrics are how often each level's first guess is the target's."""
        total, metrics = torch.zeros((), device=lesson.tokens.device), {}
        for level, guess in enumerate(self.unroll(lesson.states, lesson.tokens, self.trained)):
            teaching, known = teaching_of(lesson, level), known_rows(guess)
            total = total + self.decay**level * self.level_loss(known, teaching)
            metrics[f"top1_{level + 1}"] = self.right(known, teaching)
        return total, metrics

    @torch.no_grad()
    def right(self, guess: Guess, teaching: Teaching) -> Tensor:
        return (guess.logits.argmax(-1) == teaching.logits.argmax(-1)).float().mean()

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        """Initial weights, from the target's last layer and final norm where the method says so."""

    def learned(self, ranks: list[list[float]]) -> dict[str, Any]:
        """Options to keep with the weights, from how often each rank of each level was right."""
        return {}

    def speak(self, out: Tensor) -> Tensor:
        """Logits of states, through the target's head."""
        words = self.words
        if self._product is not None:
            logits = self._product(out.flatten(0, -2)).view(*out.shape[:-1], -1)
        else:
            bias = None if words.bias is None else words.bias.to(out.dtype)
            logits = F.linear(out, words.rows.to(out.dtype), bias)
        return logits if words.divisor == 1.0 else logits / words.divisor

    def _like(self) -> Tensor:
        return next(self.parameters())


def soft_cross_entropy(logits: Tensor, wanted: Tensor, rows: Tensor | None = None) -> Tensor:
    """Against the target's whole distribution, over all rows or those marked."""
    each = -(torch.softmax(wanted.float(), -1) * torch.log_softmax(logits.float(), -1)).sum(-1)
    return each.mean() if rows is None else (each * rows).sum() / rows.sum().clamp(min=1)


def text_rows(tokens: Tensor) -> Rows:
    """Whole texts: every row sees those before it."""
    return Rows(torch.arange(tokens.shape[1], device=tokens.device), causal)


def known_rows(guess: Guess) -> Guess:
    """Without the first row, which has no state before it."""
    return Guess(*(part[:, 1:] for part in guess))


def teaching_of(lesson: Lesson, level: int) -> Teaching:
    """Row t at level j is about the token at t + 1 + j, which the target's row t + j says."""
    rows = slice(1 + level, -1)
    return Teaching(lesson.tokens[:, 2 + level :], lesson.logits[:, rows], lesson.final[:, rows])


class HeadDrafter:
    """Keeps the target's states until the head has read them, then grows a tree per sequence.

    A sequence whose states are not known yet gets no draft; rows whose states nobody has (before the first token, in a
    reused prefix) are read as zeros.
    """

    def __init__(self, head: Head, layout: PagedLayout, chunk: int, sampled: bool = False) -> None:
        self._head, self._layout, self._chunk, self._sampled = head.serve(), layout, chunk, sampled
        self.wants = head.wants
        self._known: dict[Sequence, _States] = {}

    @torch.no_grad()
    def propose(self, batch: Batch) -> Draft:
        draft = Draft.chains([[] for _ in batch.seqs], [[] for _ in batch.seqs] if self._sampled else None)
        part = self._readable(batch)
        if not part.seqs:
            return draft
        memory = self._read(part)
        live = [n for n in range(len(part)) if part.complete(n) and part.room[n]]
        if live:
            plants = [_Plant(part.seqs[n], self._tree(part.seqs[n], part.room[n])) for n in live]
            self._grow(plants, memory[live])
            places = {seq: i for i, seq in enumerate(batch.seqs)}
            for plant in plants:
                self._write(draft, places[plant.seq], plant)
        return draft

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        """Keep the states of fed tokens and accepted nodes, in the order of the text."""
        kept: list[int] = []
        spans, row = [], 0
        for i, (seq, decision) in enumerate(zip(batch.seqs, verdict.decisions, strict=True)):
            fed, nodes = result.packed.fed[i], result.packed.nodes[i]
            if seq.request.k != 0:
                mine = [*range(row, row + fed), *(row + fed + node for node in decision.nodes)]
                spans.append((seq, batch.upto[i] - fed, len(kept), len(kept) + len(mine)))
                kept += mine
            row += fed + len(nodes)
        if not kept:
            return
        index = torch.tensor(kept, device=result.states[self.wants[0]].device)
        states = torch.cat([result.states[layer].index_select(0, index) for layer in self.wants], -1)
        for seq, first, start, stop in spans:
            self._known.setdefault(seq, _States()).add(first, states[start:stop])

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)
        self._layout.forget(seq)

    def _readable(self, batch: Batch) -> Batch:
        """Sequences with states to read, if they are to guess now or much is waiting."""
        part = Batch([], [], [])
        for i, seq in enumerate(batch.seqs):
            known = self._known.get(seq)
            if known is None:
                continue
            cached = self._layout.cached(seq)
            upto = min(batch.upto[i], known.end + 1, cached + self._chunk)
            ready = bool(batch.room[i]) and batch.complete(i)
            if upto > cached and (ready or upto - cached >= PATIENCE):
                part.seqs.append(seq)
                part.upto.append(upto)
                part.room.append(batch.room[i])
        return part

    def _read(self, part: Batch) -> Tensor:
        """What the head remembers of each sequence's last row."""
        states = self._states(part)
        packed = self._layout.pack(part, Draft.empty(len(part)))
        memory = self._head.read(states[None], packed.ids[None], self._rows(packed))[0]
        self._layout.advance(part)
        ends = torch.tensor(packed.fed).cumsum(0) - 1
        return memory[ends.to(memory.device)]

    def _states(self, part: Batch) -> Tensor:
        """The target's states of the rows before those about to be read, end to end."""
        like, pieces = self._head._like(), []
        for seq, upto in zip(part.seqs, part.upto, strict=True):
            known = self._known[seq]
            pieces += known.take(self._layout.cached(seq) - 1, upto - 1, like.new_zeros(1, self._head.width))
            known.drop(upto - 1)
        return torch.cat(pieces).to(like.dtype)

    def _rows(self, packed: Packed) -> Rows:
        scale = self._head.config.shape.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            return self._layout.attend(packed, layer, q, k, v, scale).transpose(0, 1)[None]

        return Rows(packed.positions, attend)

    def _tree(self, seq: Sequence, room: int) -> Tree:
        """Sampled requests get a chain: the noise picks one token at every place."""
        return self._head.tree(room) if seq.params.greedy else Tree(room)

    def _grow(self, plants: list[_Plant], memory: Tensor) -> None:
        """Level by level, all sequences together."""
        tokens = torch.tensor([plant.seq.tokens[-1] for plant in plants], device=memory.device)
        front = [(plant, -1) for plant in plants]
        rows: Rows | None = None
        for level in range(self._head.levels):
            guess = self._head.step(level, memory[None], tokens[None], rows)
            self._offer(front, torch.nan_to_num(guess.logits[0].float(), neginf=-torch.inf))
            above = {place: n for n, place in enumerate(front)}
            grown = dict.fromkeys(plant for plant, _ in front)
            front = [(plant, node) for plant in grown for node in plant.tree.front]
            if not front:
                return
            memory = guess.memory[0][[above[plant, plant.tree.above(node)] for plant, node in front]]
            tokens = torch.tensor([p.tree.tokens[node] for p, node in front], device=memory.device)
            rows = self._node_rows(front) if self._head.deep and level + 1 < self._head.levels else None

    def _node_rows(self, front: list[tuple[_Plant, int]]) -> Rows:
        """Slots for the nodes in front, behind those expanded before."""
        plants = [*dict.fromkeys(plant for plant, _ in front)]
        part = Batch(
            [p.seq for p in plants], [len(p.seq.tokens) for p in plants], [len(p.tree.expanded) for p in plants]
        )
        done = [len(p.tree.expanded) - len(p.tree.front) for p in plants]
        return self._rows(self._layout.pack(part, _expanded([p.tree for p in plants]), done))

    def _offer(self, front: list[tuple[_Plant, int]], logits: Tensor) -> None:
        """Let every tree grow by what the head says at its front."""
        rows = [Row(plant.seq, plant.tree.path(node)) for plant, node in front]
        offers: dict[_Plant, list[Offer]] = {}
        for (plant, _), offer in zip(front, _offers(logits, rows), strict=True):
            offers.setdefault(plant, []).append(offer)
        if self._sampled:
            drawn_from = probabilities(logits, rows)
            for n, (plant, _) in enumerate(front):
                plant.sources.append(drawn_from[n])
        for plant, mine in offers.items():
            plant.tree.grow(mine)

    def _write(self, draft: Draft, i: int, plant: _Plant) -> None:
        tokens, parents = plant.tree.result()
        draft.tokens[i].extend(tokens)
        draft.parents[i].extend(parents)
        if draft.sources is not None:
            drawn = not plant.seq.params.greedy  # a node that was picked counts as drawn from itself
            draft.sources[i].extend(plant.sources[: len(tokens)] if drawn else _certain(tokens, self._head.vocab))


@dataclass(slots=True, eq=False)
class _Plant:
    """A sequence and the tree that grows from its end."""

    seq: Sequence
    tree: Tree
    sources: list[Tensor] = field(default_factory=list)  # of a chain, per level


class _States:
    """Some of the target's states of one sequence, by position."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Tensor]] = []

    @property
    def end(self) -> int:
        first, states = self._pieces[-1]
        return first + len(states)

    def add(self, first: int, states: Tensor) -> None:
        self._pieces.append((first, states))

    def take(self, start: int, stop: int, unknown: Tensor) -> list[Tensor]:
        """States of positions start to stop, end to end; `unknown` [1, F] where there are none."""
        found: list[Tensor] = []
        for first, states in self._pieces:
            low, high = max(start, first), min(stop, first + len(states))
            if low < high:
                found += [unknown.expand(low - start, -1), states[low - first : high - first]]
                start = high
        return [*found, unknown.expand(max(0, stop - start), -1)]

    def drop(self, below: int) -> None:
        """Positions below this have been read."""
        self._pieces = [piece for piece in self._pieces[:-1] if piece[0] + len(piece[1]) > below] + self._pieces[-1:]


def _expanded(trees: list[Tree]) -> Draft:
    """The nodes whose children were or are wanted, as a draft of their own."""
    tokens, parents = [], []
    for tree in trees:
        place = {node: n for n, node in enumerate(tree.expanded)}
        tokens.append([tree.tokens[node] for node in tree.expanded])
        parents.append([place.get(tree.parents[node], -1) for node in tree.expanded])
    return Draft(tokens, parents)


def _offers(logits: Tensor, rows: list[Row]) -> list[Offer]:
    """The best tokens of each row, or the one that the request's noise picks."""
    scores = adjusted(logits, rows) if any(row.seq.adjusts for row in rows) else logits
    values, ids = torch.log_softmax(scores, -1).topk(min(OFFERED, logits.shape[-1]))
    offers = [
        [(token, value) for token, value in zip(*both, strict=True) if value > -torch.inf]
        for both in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    drawn = [n for n, row in enumerate(rows) if not row.seq.params.greedy]
    if drawn:
        for n, token in zip(drawn, choose(logits[drawn], [rows[n] for n in drawn]), strict=True):
            offers[n] = [(token, 0.0)]
    return offers


def _certain(tokens: list[int], vocab: int) -> list[Tensor]:
    return [F.one_hot(torch.tensor(token), vocab).float() for token in tokens]
