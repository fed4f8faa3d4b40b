"""The drafter behind every head: keeps the target's states until the head has read them, then grows trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.drafters.batched_trees import batch_trees
from faircopy.drafters.captured_head import CapturedHead
from faircopy.drafters.heads import Head, Rows
from faircopy.drafters.trees import OFFERED, Offer, Tree
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.runner import Result
from faircopy.sampling import Row, adjusted, choose, probabilities
from faircopy.types import Batch, Draft, Sequence, Verdict

LARGEST = 64  # nodes of a tree
PATIENCE = 64  # states that wait, where nothing is to be guessed, before they are read anyway


class HeadDrafter:
    """Keeps the target's states until the head has read them, then grows a tree per sequence.

    A sequence whose states are not known yet gets no draft; rows whose states nobody has (before the first token, in a
    reused prefix) are read as zeros.
    """

    costly = True  # a step of the head per level

    def __init__(self, head: Head, layout: PagedLayout, chunk: int, sampled: bool = False, seats: int = 0) -> None:
        self._head, self._layout, self._chunk, self._sampled = head.serve(), layout, chunk, sampled
        self._captured = CapturedHead(head, layout, self._rows, seats)
        self.wants = head.wants
        self._known: dict[Sequence, _States] = {}

    @torch.no_grad()
    def propose(self, batch: Batch) -> Draft:
        draft = Draft.chains([[] for _ in batch.seqs], [[] for _ in batch.seqs] if self._sampled else None)
        part = self._readable(batch)
        if not part.seqs:
            return draft
        memory = self._read(part)
        live = [n for n in range(len(part)) if part.complete(n) and part.max_nodes[n]]
        if live:
            plants = [_Plant(part.seqs[n], self._tree(part.seqs[n], part.max_nodes[n])) for n in live]
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

    @property
    def longest(self) -> int:
        """How many nodes it can guess without the host."""
        return self._head.levels if _straight(self._head) else LARGEST

    def levels(self, k: int) -> int:
        """How deep its trees of k nodes can be; 0: they are chains."""
        return 0 if _straight(self._head) else min(self._head.levels, k)

    def plan_fill(self, space: Any) -> Callable[[], None]:
        return self._captured.plan_fill(space)

    def ready(self, seq: Sequence) -> bool:
        """Whether what it has not read fits a seat, with known states; who wants no drafts may fly too."""
        if seq.request.k == 0:
            return True
        known, unread = self._known.get(seq), len(seq.tokens) - self._layout.cached(seq)
        return known is not None and known.end == len(seq.tokens) - 1 and unread <= self._head.levels + 1

    def board(self, seats: dict[Sequence, int]) -> None:
        """Hand over what the head has not read, and the states for it."""
        unknown = self._head._like().new_zeros(1, self._head.width)
        for seq, seat in seats.items():
            known, end = self._known.get(seq, _States()), len(seq.tokens)
            read = end - 1 if seq.request.k == 0 else self._layout.cached(seq)
            self._captured.board(seat, read, torch.cat(known.take(read - 1, end - 1, unknown)))

    def keep(self, space: Any, states: dict[int, Tensor]) -> None:
        self._captured.keep(space, states)

    @property
    def kept(self) -> list[Tensor]:
        return [self._captured.read, self._captured.states]

    def settle(self, seq: Sequence, length: int, accepted: int, k: int) -> None:
        """The head has read what there was at launch; states of what came after stay on the device."""
        self._known.pop(seq, None)
        if k and seq.request.k != 0:
            self._layout.settle(seq, length)

    def _readable(self, batch: Batch) -> Batch:
        """Sequences with states to read, if they are to guess now or much is waiting."""
        part = Batch([], [], [])
        for i, seq in enumerate(batch.seqs):
            known = self._known.get(seq)
            if known is None:
                continue
            cached = self._layout.cached(seq)
            upto = min(batch.upto[i], known.end + 1, cached + self._chunk)
            ready = bool(batch.max_nodes[i]) and batch.complete(i)
            if upto > cached and (ready or upto - cached >= PATIENCE):
                part.seqs.append(seq)
                part.upto.append(upto)
                part.max_nodes.append(batch.max_nodes[i])
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

    def _tree(self, seq: Sequence, max_nodes: int) -> Tree:
        """Sampled requests get a chain: the noise picks one token at every place."""
        return self._head.tree(max_nodes) if seq.params.greedy else Tree(max_nodes)

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


def _straight(head: Head) -> bool:
    """Whether its trees are chains, in the air at least."""
    return batch_trees(head.tree(1), 1, torch.device("cpu")).is_chain


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
