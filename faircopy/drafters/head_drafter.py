"""The drafter of all draft heads: keeps the target's states until the head has read them, then grows trees."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from faircopy.drafters.base import Drafter
from faircopy.drafters.heads import Head, Rows
from faircopy.drafters.sources import SourceTable
from faircopy.drafters.states import KnownRows, SequenceStates, gather_into
from faircopy.drafters.trees import OFFERED, Offer, Tree, share_nodes, shared_depth
from faircopy.kernels.gumbel import BROKEN
from faircopy.kernels.transfer import rows_of, sent
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.runner import Result
from faircopy.model.trial import CachedRows, scene, tree_scene
from faircopy.sampling import SamplingRow, choose, noisy
from faircopy.types import PICKED, Batch, Draft, Sequence, Sources, Verdict

if TYPE_CHECKING:
    from faircopy.capture import CapturedDrafter

PART = 16  # rows of a sequence while reading is rehearsed: numbers of rows with tiles of their own are multiples of it
MOST_GUESSED = 1024  # rows whose guesses are rehearsed: their logits take memory
MAX_UNREAD = 64  # states of a sequence that gets no draft are read once this many wait; of an idle one no more are kept


class HeadDrafter(Drafter):
    """Keeps the target's states until the draft head has read them, then grows a tree per sequence.

    A sequence whose states are not known yet gets no draft; rows without a state (before the first token, in a reused
    prefix) are read as zeros.
    """

    expensive = True  # a pass of the head per level
    skips_states = True  # unknown ones are read as zeros

    def __init__(self, head: Head, layout: PagedLayout, chunk: int, sampled: bool = False, chains: int = 0) -> None:
        """chains: drafts of at most this number of nodes are chains instead of the head's own trees."""
        self._head, self._layout, self._chunk, self._sampled = head.serve(), layout, chunk, sampled
        self._chains = chains
        self.wants, self.layers = head.wants, len(head.layers)
        self.ranks_nodes = head.tree(1).ranked and not sampled  # what is drawn must not decide what is verified
        self._known: dict[Sequence, SequenceStates] = {}

    @torch.no_grad()
    def propose(self, batch: Batch) -> Draft:
        drawn = SourceTable() if self._sampled else None
        draft = Draft.chains(
            [[] for _ in batch.seqs], None if drawn is None else Sources([[] for _ in batch.seqs], drawn)
        )
        part = self._readable(batch)
        if not part.seqs:
            return draft
        memory = self._read(part)
        live = [n for n in range(len(part)) if part.complete(n) and part.max_nodes[n]]
        if live:
            growing = [self._growing(part, n) for n in live]
            self._grow(growing, rows_of(memory, live), drawn)
            if part.shared_k is not None:
                shared = [growth.tree for growth, n in zip(growing, live, strict=True) if part.shares(n)]
                share_nodes(shared, part.shared_k * len(shared))
            places = {seq: i for i, seq in enumerate(batch.seqs)}
            for growth in growing:
                self._write(draft, places[growth.seq], growth)
        return draft

    def read(self, batch: Batch) -> Draft:
        """Draft nothing: what there is to read comes with the step's own states."""
        return Draft.empty(len(batch))

    @torch.no_grad()
    def settle(self, batch: Batch, result: Result) -> None:
        """Read the rows that the next captured step does not: it reads up to levels + 1, the token that this step
        chooses among them, so a text with no more than `levels` unread rows is left to it.

        Rows of accepted nodes are left in any case.
        """
        self._keep(batch, result, [[] for _ in batch.seqs])
        part = Batch([], [], [])
        for seq, upto in zip(batch.seqs, batch.upto, strict=True):
            known, cached = self._known.get(seq), self._layout.cached(seq)
            if known is not None and upto - cached > self._head.levels and seq not in batch.idle:
                most = max(self._chunk, self._head.levels + 1)  # more than a step adds: what was left is made up for
                part.add(seq, min(upto, cached + most), 0)
        if part.seqs:
            self._read(part)

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        decoding = result.packed.size == len(batch) and bool(result.states)
        if decoding and all(seq in batch.idle and seq.request.k != 0 for seq in batch.seqs):
            self._keep_latest(batch, result)
        else:
            self._keep(batch, result, [decision.nodes for decision in verdict.decisions])

    def _keep_latest(self, batch: Batch, result: Result) -> None:
        """The same where drafting is off for all and each sequence had one token fed, as in most steps then."""
        states = self._kept(result, None)
        for row, (seq, upto) in enumerate(zip(batch.seqs, batch.upto, strict=True)):
            if self._follows(seq, upto - 1):
                known = self._known.setdefault(seq, SequenceStates())
                known.add(upto - 1, states, range(row, row + 1))
                known.drop(upto - MAX_UNREAD)

    def _keep(self, batch: Batch, result: Result, accepted: list[list[int]]) -> None:
        """Keep the states of fed tokens and accepted nodes, in the order of the text, unless they are kept already."""
        if not result.states:
            return  # drafting is off, and has been for a while
        kept: list[int] = []
        spans, row = [], 0
        for i, (seq, right) in enumerate(zip(batch.seqs, accepted, strict=True)):
            fed, nodes = result.packed.fed[i], result.packed.nodes[i]
            first, mine = batch.upto[i] - fed, [*range(row, row + fed), *(row + fed + node for node in right)]
            if seq in batch.idle:
                mine = mine[-MAX_UNREAD:] if self._follows(seq, first) else []
                first = batch.upto[i] - len(mine)
            known = self._known.get(seq)
            if mine and seq.request.k != 0 and (known is None or known.end < first + len(mine)):
                spans.append((seq, first, len(kept), len(kept) + len(mine)))
                kept += mine
            row += fed + len(nodes)
        if not kept:
            return
        states = self._kept(result, kept)
        for seq, first, start, stop in spans:
            self._known.setdefault(seq, SequenceStates()).add(first, states, range(start, stop))
            if seq in batch.idle:
                self._known[seq].drop(first + stop - start - MAX_UNREAD)

    def _kept(self, result: Result, rows: list[int] | None) -> Tensor:
        """What the head wants of some rows of a pass, in their order; None: of all."""
        states = [result.states[layer] for layer in self.wants]
        if rows is not None and len(rows) < len(states[0]):
            index = sent(rows, torch.int64, states[0].device)
            states = [part.index_select(0, index) for part in states]
        return states[0] if len(states) == 1 else torch.cat(states, -1)

    def _follows(self, seq: Sequence, first: int) -> bool:
        """Whether states from this position on leave no gap; captured steps leave one."""
        known = self._known.get(seq)
        return first == (0 if known is None else known.end)

    def over(self, layout: PagedLayout) -> HeadDrafter:
        """The same head with another cache, which knows no states yet."""
        other = copy(self)
        other._layout, other._known = layout, {}
        return other

    def empty_states(self, rows: int) -> dict[int, Tensor]:
        """The target's states that it wants of this many rows, all zero."""
        head, width = self._head, self._head.input_size // len(self.wants)
        return {layer: torch.zeros(rows, width, dtype=head.dtype, device=head.device) for layer in self.wants}

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)
        self._layout.forget(seq)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Read every number of rows that products have a tile of their own for, and keys of one span and of two.

        Trees are grown on the host where a step cannot be captured.
        """
        from faircopy.kernels.gpu.pages import SPAN
        from faircopy.kernels.gpu.tables import TILE_ROWS

        if self._head.layers:
            for rows in TILE_ROWS:
                self._rehearse(-(-rows // PART), min(rows, PART), min(rows, PART))
            self._rehearse(1, 1, SPAN + 1)
            for context in (SPAN // 2, SPAN + 1) if self._head.deep else ():
                layout, packed = tree_scene(self.cached_rows, context, self._layout.tables.page)
                memory, ids = self._rehearse_reading(layout, packed)
                self._head.step(1, memory, ids.long(), self._rows(packed, layout))

    def _rehearse(self, batch: int, rows: int, context: int) -> None:
        """Read the last rows of texts of this length, and guess."""
        made = scene(self.cached_rows, batch, rows, context, prompt=True, page=self._layout.tables.page)
        memory, ids = self._rehearse_reading(*made)
        if ids.shape[1] <= MOST_GUESSED:
            self._head.step(0, memory, ids.long())

    def _rehearse_reading(self, layout: PagedLayout, packed: Packed) -> tuple[Tensor, Tensor]:
        """What is remembered of these rows, and their tokens."""
        head = self._head
        states = torch.zeros(1, packed.size, head.input_size, dtype=head.dtype, device=head.device)
        return head.read(states, packed.ids[None], self._rows(packed, layout)), packed.ids[None]

    @property
    def cached_rows(self) -> CachedRows:
        """What its cache keeps per token."""
        head = self._head
        return CachedRows(head.layers, head.dtype, head.device, head.vocab)

    def capture(self, num_slots: int) -> CapturedDrafter | None:
        from faircopy.drafters.captured_head import CapturedHead

        return CapturedHead(self._head, self._layout, self._rows, self._known, num_slots, self._chains)

    def _readable(self, batch: Batch) -> Batch:
        """Sequences with states to read, if they get a draft now or many states wait."""
        part = Batch([], [], [], shared_k=batch.shared_k)
        for i, seq in enumerate(batch.seqs):
            known = self._known.get(seq)
            if known is None or seq in batch.idle:
                continue
            cached = self._layout.cached(seq)
            upto = min(batch.upto[i], known.end + 1, cached + self._chunk)
            ready = bool(batch.max_nodes[i]) and batch.complete(i)
            if upto > cached and (ready or upto - cached >= MAX_UNREAD):
                part.add(seq, upto, batch.max_nodes[i])
        return part

    def _read(self, part: Batch) -> Tensor:
        """What the head remembers of each sequence's last row."""
        states = self._states(part)
        # whatever their number and lengths, rows lie in tiles of one height: another one is a kernel to compile
        packed = self._layout.pack(part, Draft.empty(len(part)), like_graphs=True)
        memory = self._head.read(states[None], packed.ids[None], self._rows(packed))[0]
        self.rows_read += packed.size
        self._layout.advance(part)
        return rows_of(memory, [end - 1 for end in accumulate(packed.fed)])

    def _states(self, part: Batch) -> Tensor:
        """The target's states of the rows before those about to be read, end to end."""
        head, found, count = self._head, KnownRows(), 0
        for seq, upto in zip(part.seqs, part.upto, strict=True):
            known, cached = self._known[seq], self._layout.cached(seq)
            known.find(cached - 1, upto - 1, count, found)
            known.drop(upto - 1)
            count += upto - cached
        return gather_into(torch.empty(count, head.input_size, dtype=head.dtype, device=head.device), found)

    def _rows(self, packed: Packed, layout: PagedLayout | None = None) -> Rows:
        """Rows over the head's own cache, or another of its kind."""
        return rows_over(layout or self._layout, packed, self._head.config.shape.head_dim)

    def _tree(self, seq: Sequence, max_nodes: int) -> Tree:
        """With rejection sampling sampled requests get a chain, each token of which is drawn."""
        chain = max_nodes <= self._chains or (self._sampled and not seq.params.greedy)
        return Tree(max_nodes) if chain else self._head.tree(max_nodes)

    def _growing(self, part: Batch, n: int) -> _GrowingTree:
        """An empty tree of one of these sequences."""
        levels = self._head.levels
        if part.shared_k is not None and part.shares(n):
            levels = min(levels, shared_depth(part.shared_k))
        return _GrowingTree(part.seqs[n], self._tree(part.seqs[n], part.max_nodes[n]), levels)

    def _grow(self, growing: list[_GrowingTree], memory: Tensor, drawn: SourceTable | None) -> None:
        """Level by level, all sequences together; drawn: to be told what tokens are drawn from."""
        tokens = sent([growth.seq.tokens[-1] for growth in growing], torch.int64, memory.device)
        front = [(growth, -1) for growth in growing]
        rows: Rows | None = None
        for level in range(self._head.levels):
            guess = self._head.step(level, memory[None], tokens[None], rows)
            logits = self._head.over_vocabulary(guess.logits[0])
            self._offer(front, torch.nan_to_num(logits.float(), neginf=-torch.inf), drawn)
            above = {place: n for n, place in enumerate(front)}
            grown = dict.fromkeys(growth for growth, _ in front if level + 1 < growth.levels)
            front = [(growth, node) for growth in grown for node in growth.tree.front]
            if not front:
                return
            memory = rows_of(guess.memory[0], [above[growth, growth.tree.above(node)] for growth, node in front])
            tokens = sent([growth.tree.tokens[node] for growth, node in front], torch.int64, memory.device)
            rows = self._node_rows(front) if self._head.deep else None

    def _node_rows(self, front: list[tuple[_GrowingTree, int]]) -> Rows:
        """Slots for the nodes in front, behind those expanded before."""
        growing = [*dict.fromkeys(growth for growth, _ in front)]
        part = Batch([], [], [])
        for growth in growing:
            part.add(growth.seq, len(growth.seq.tokens), len(growth.tree.expanded))
        trees = [growth.tree for growth in growing]
        done = [len(tree.expanded) - len(tree.front) for tree in trees]
        return self._rows(self._layout.pack(part, _expanded(trees), done, like_graphs=True))

    def _offer(self, front: list[tuple[_GrowingTree, int]], logits: Tensor, drawn: SourceTable | None) -> None:
        """Add one level to every tree, from the head's logits at its front."""
        rows = [SamplingRow(growth.seq, growth.tree.path(node)) for growth, node in front]
        offers: dict[_GrowingTree, list[Offer]] = {}
        offered = _offers if drawn is None else _chain_offers
        for (growth, _), offer in zip(front, offered(logits, rows), strict=True):
            offers.setdefault(growth, []).append(offer)
        if drawn is not None:
            for (growth, _), place in zip(front, drawn.add(logits, rows), strict=True):
                growth.sources.append(place)
        for growth, mine in offers.items():
            growth.tree.grow(mine)

    def _write(self, draft: Draft, i: int, growth: _GrowingTree) -> None:
        tokens, parents = growth.tree.result()
        draft.tokens[i].extend(tokens)
        draft.parents[i].extend(parents)
        if draft.sources is not None:
            picked = growth.seq.params.greedy
            draft.sources.rows[i].extend([PICKED] * len(tokens) if picked else growth.sources[: len(tokens)])


@dataclass(slots=True, eq=False)
class _GrowingTree:
    """A sequence and the tree that grows from its end."""

    seq: Sequence
    tree: Tree
    levels: int  # that it may have
    sources: list[int] = field(default_factory=list)  # of a chain, per level, see Sources


def rows_over(layout: PagedLayout, packed: Packed, head_dim: int) -> Rows:
    """Packed rows of a head over a cache of pages."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return layout.attend(packed, layer, q, k, v, head_dim**-0.5).transpose(0, 1)[None]

    return Rows(packed.positions, attend, *((packed, layout) if layout.suite is not None else ()))


def _expanded(trees: list[Tree]) -> Draft:
    """The nodes whose children were or are wanted, as a draft of their own."""
    tokens, parents = [], []
    for tree in trees:
        place = {node: n for n, node in enumerate(tree.expanded)}
        tokens.append([tree.tokens[node] for node in tree.expanded])
        parents.append([place.get(tree.parents[node], -1) for node in tree.expanded])
    return Draft(tokens, parents)


def _offers(logits: Tensor, rows: list[SamplingRow]) -> list[Offer]:
    """The best tokens of each row, of a sampled request with its noise: the first is the one that it draws."""
    values, ids = torch.log_softmax(noisy(logits, rows), -1).topk(min(OFFERED, logits.shape[-1]))
    return [
        [(token, value) for token, value in zip(*both, strict=True) if value > -torch.inf]
        for both in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _chain_offers(logits: Tensor, rows: list[SamplingRow]) -> list[Offer]:
    """The same for chains of sampled requests, which need one token."""
    offers: list[Offer] = [[] for _ in rows]
    for greedy, offered in ((True, _offers), (False, _drawn)):
        places = [n for n, row in enumerate(rows) if row.seq.params.greedy == greedy]
        some = offered(rows_of(logits, places), [rows[n] for n in places]) if places else []
        for n, offer in zip(places, some, strict=True):
            offers[n] = offer
    return offers


def _drawn(logits: Tensor, rows: list[SamplingRow]) -> list[Offer]:
    return [[(token, 0.0)] if token != BROKEN else [] for token in choose(logits, rows)]
