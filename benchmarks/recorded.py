"""A trained head's drafts at the cost of a wide one: the drafts are made before the clock runs.

A text that plain decoding wrote is read by the small target and its head, which drafts a chain behind every token.
While the clock runs, a random head of the wide shape works as it would, and what it says is replaced by these chains:
one look per step into a table, found by how a text begins and how long it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faircopy.capture import GraphState, Work
from faircopy.drafters.captured_head import CapturedHead
from faircopy.drafters.head_drafter import HeadDrafter
from faircopy.drafters.heads import Head, text_rows
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.types import Batch, Draft, Request, Sequence

PLACES = 1 << 22


def chains_of(model: Model, head: Head, tokens: list[int]) -> Tensor:
    """What the head drafts behind every token of a text [T, levels]."""
    ids = torch.tensor(tokens, device=model.device)[None]
    states = torch.cat([_states(model, head, tokens)[want] for want in head.wants], -1).to(head.dtype)
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    memory, said, chain = head.read(before[None], ids, text_rows(ids)), ids, []
    for level in range(head.levels):
        guess = head.step(level, memory, said)
        memory, said = guess.memory, guess.logits.argmax(-1)
        chain.append(said[0])
    return torch.stack(chain, 1)


def _states(model: Model, head: Head, tokens: list[int]) -> dict[int, Tensor]:
    tables = BlockTables(PagePool(-(-len(tokens) // 32)), 32, reuse=False)
    runner = Runner(model, PagedLayout(tables, model.layers, model.dtype, model.device, False), head.wants)
    seq = Sequence(0, Request(tuple(tokens)), tokens)
    tables.open(seq)
    tables.reserve(seq, len(tokens))
    return runner.forward(Batch([seq], [len(tokens)], [0]), Draft.empty(1)).states


class Recorded:
    """The chains of many texts, and where to find them."""

    def __init__(self, model: Model, head: Head, texts: list[list[int]], begin: int) -> None:
        """begin: tokens that tell a text from the others."""
        self._begin = begin
        texts = sorted(texts, key=len)  # of two that begin alike the longer one holds the other
        longest = len(texts[-1])
        self._factors = torch.randint(1, PLACES, (begin,), generator=torch.Generator().manual_seed(0))
        self.chains = torch.zeros(len(texts) + 1, longest + 1, head.levels, dtype=torch.int64)
        self.places = torch.full((PLACES,), len(texts), dtype=torch.int64)
        for n, text in enumerate(texts):
            self.chains[n, 1 : len(text) + 1] = chains_of(model, head, text).cpu()
            place = int((torch.tensor(text[:begin]) * self._factors).sum() % PLACES)
            other = int(self.places[place])
            assert other == len(texts) or text[: len(texts[other])] == texts[other], "two texts have one place"
            self.places[place] = n
        self.chains, self.places, self._factors = (
            part.to(model.device) for part in (self.chains, self.places, self._factors)
        )

    def look_up(self, begins: Tensor, lengths: Tensor, k: int) -> Tensor:
        """Chains [B, k] of texts that begin so [B, begin] and have this many tokens."""
        text = self.places[(begins * self._factors).sum(1) % PLACES]
        return self.chains[text, lengths.clamp(max=self.chains.shape[1] - 1)][:, :k]

    def install(self) -> Callable[[], None]:
        """Let every head's drafter say what was recorded; the result undoes it."""
        propose, plan_fill = HeadDrafter.propose, CapturedHead.plan_fill

        def spoken(drafter: Any, batch: Batch) -> Draft:
            draft = propose(drafter, batch)
            for i, seq in enumerate(batch.seqs):
                if draft.tokens[i]:
                    begin = torch.tensor([seq.tokens[: self._begin]], device=self.places.device)
                    length = torch.tensor([len(seq.tokens)], device=self.places.device)
                    draft.tokens[i][:] = self.look_up(begin, length, len(draft.tokens[i]))[0].tolist()
            return draft

        def filled(drafter: Any, graph: GraphState) -> Work:
            fill = plan_fill(drafter, graph)

            def work() -> None:
                fill()
                slots = graph.batch_slots
                found = self.look_up(slots.history[:, : self._begin].long(), slots.lengths.long(), graph.k)
                graph.inputs.ids[:, 1:] = found.to(graph.inputs.ids.dtype)

            return work

        HeadDrafter.propose, CapturedHead.plan_fill = spoken, filled  # type: ignore[method-assign]

        def undo() -> None:
            HeadDrafter.propose, CapturedHead.plan_fill = propose, plan_fill  # type: ignore[method-assign]

        return undo
