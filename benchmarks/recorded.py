"""A trained head's drafts at the cost of a wide one: the drafts are made before the clock runs.

Texts that plain decoding wrote are read by the small target and its head, which drafts chains or trees behind every
token that was written. While the clock runs, a random head of the wide shape works as it would, and its drafts are
replaced by those: a step looks them up by the text so far, with about fifteen small operations. In bfloat16 a few
drafts differ from the engine's by rounding. Greedy texts only: drafts behind a sampled text depend on its noise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.widen_head import DRAFT_VOCAB, wide_head
from faircopy import bundled
from faircopy.capture import GraphState, Work
from faircopy.drafters.captured_head import CapturedHead
from faircopy.drafters.folder import load_head
from faircopy.drafters.head_drafter import HeadDrafter
from faircopy.drafters.heads import Head
from faircopy.drafters.trees import Tree
from faircopy.engine import Engine
from faircopy.kernels.gpu.launch import compiling_ahead
from faircopy.kernels.tree_growth import Nodes
from faircopy.laws.acceptance import HeldOutTexts, Reading, drafts_behind, held_out_texts
from faircopy.model.base import Model
from faircopy.model.loader import load_model, load_stock
from faircopy.train.heads import Teacher

AT_ONCE = 512  # places that drafts are made behind together
Texts = dict[tuple[int, ...], list[int]]  # prompts, and what plain decoding wrote behind them


def small_head(folder: str, target: Model, chain: bool, levels: int | None = None) -> Head:
    """A trained head; chain: it drafts chains instead of its own trees."""
    head = load_head(folder, target, levels)
    if chain:
        head.tree = Tree  # type: ignore[method-assign]
    return head


def read_texts(head: Head, texts: Texts, target: str = "") -> HeldOutTexts:
    """Greedy texts with the states of the bundled target, or another one, that this head wants."""
    teacher = Teacher(load_stock(target or bundled.target(), head.dtype, head.device))
    whole = [[*prompt, *text] for prompt, text in texts.items()]
    return held_out_texts([*texts], whole, teacher, head.device, wants=head.wants)


class RecordedHead:
    """A random head of the wide target's shape, and what a trained head of the bundled target drafts behind texts."""

    def __init__(
        self,
        folder: str,
        target: Model,
        shape: dict[str, Any],
        texts: Texts,
        *,
        chain: bool = False,
        levels: int | None = None,
        draft_vocab: int = DRAFT_VOCAB,
    ) -> None:
        source = load_model(bundled.target(), target.dtype, target.device)
        small = small_head(folder, source, chain, levels).serve()
        self.recorded = Recorded(small, read_texts(small, texts))
        self.head = wide_head(small, shape, target, draft_vocab).bind(target.token_weights())
        self.head.tree = small.tree  # type: ignore[method-assign]


class Recorded:
    """What a head drafts behind every token of some texts, found by the text up to there."""

    def __init__(self, head: Head, texts: HeldOutTexts) -> None:
        assert texts.temperature == 0, "drafts behind sampled texts depend on their noise"
        self._head, self._reading = head, Reading(head, texts)
        source, length = torch.Generator().manual_seed(0), texts.tokens.shape[1]
        self._factors = torch.randint(-(1 << 62), 1 << 62, (length,), generator=source).to(texts.tokens.device)
        self._at = torch.arange(length, device=texts.tokens.device)
        self._hashes, self._rows, self._places = self._distinct(texts)
        self._drafts: dict[tuple[int, int, bool], Nodes] = {}

    def drafts(self, nodes: int, levels: int, chain: bool = False) -> Nodes:
        """Nodes behind all places, made when first asked for; -1: a missing one, as in batched_trees.py.

        chain: of chains instead of the head's own trees.
        """
        key = nodes, levels, chain
        if key not in self._drafts:
            parts = [
                self._drafted(rows, places, *key)
                for rows, places in zip(self._rows.split(AT_ONCE), self._places.split(AT_ONCE), strict=True)
            ]
            self._drafts[key] = Nodes(*map(torch.cat, zip(*parts, strict=True)))
        return self._drafts[key]

    def _drafted(
        self, rows: Tensor, places: Tensor, nodes: int, levels: int, chain: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        tree = Tree(nodes) if chain else self._head.tree(nodes)
        trees = drafts_behind(self._reading, rows, places, tree, levels)
        trees.finish()
        assert trees.out.values is not None, "trees have values"
        return trees.out.tokens, trees.out.parents, trees.out.values

    def look_up(self, texts: Tensor, lengths: Tensor, drafts: Nodes) -> tuple[Nodes, Tensor]:
        """Nodes [B, nodes] behind the first `lengths` [B] tokens of texts [B, L], and whether they are known [B, 1]."""
        begin = texts[:, : len(self._factors)]
        inside = self._at[: begin.shape[1]] < lengths[:, None]
        hashes = (torch.where(inside, begin + 1, 0) * self._factors[: begin.shape[1]]).sum(1)
        place = torch.searchsorted(self._hashes, hashes).clamp(max=len(self._hashes) - 1)
        assert drafts.values is not None, "trees have values"
        found = Nodes(drafts.tokens[place], drafts.parents[place], drafts.values[place])
        return found, (self._hashes[place] == hashes)[:, None]

    def replace(self, tree: Tree, text: list[int], levels: int) -> None:
        """Let a tree behind this text have the nodes that were recorded there; it stays if nothing was."""
        device = self._factors.device
        drafts = self.drafts(tree.max_nodes, min(levels, tree.max_nodes), type(tree) is Tree)
        found, known = self.look_up(
            torch.tensor([text], device=device), torch.tensor([len(text)], device=device), drafts
        )
        if not known[0]:
            return
        assert found.values is not None, "trees have values"
        place, above = {-1: -1}, (found.parents[0] - 1).tolist()
        for node, (token, parent) in enumerate(zip(found.tokens[0].tolist(), above, strict=True)):
            if token >= 0 and parent in place:
                place[node] = len(place) - 1
        kept = [*place][1:]
        tree.tokens, tree.values = ([part[0][node].item() for node in kept] for part in (found.tokens, found.values))
        tree.parents = [place[above[node]] for node in kept]

    def attach(self, engine: Engine) -> None:
        """Let this engine's head work and draft what was recorded, before any of its steps is captured.

        Behind other texts, such as those that steps are timed with while an engine warms up, its own drafts stay.
        """
        drafter = engine.drafter
        assert isinstance(drafter, HeadDrafter), "a head drafts"
        grow = drafter._grow

        def grown(growing: list[Any], memory: Tensor, drawn: Any) -> None:
            grow(growing, memory, drawn)
            for growth in growing:
                self.replace(growth.tree, growth.seq.tokens, growth.levels)

        drafter._grow = grown  # type: ignore[method-assign]
        if engine.captured is not None:
            captured = engine.captured._drafter
            assert isinstance(captured, CapturedHead) and not engine.captured.graphs.captured_sizes
            self._attach_captured(captured)
            return
        for nodes in range(1, max(engine.draft_lengths.lengths, default=0) + 1):
            self.drafts(nodes, min(self._head.levels, nodes))  # all numbers: near its limit a text gets fewer nodes

    def _attach_captured(self, captured: CapturedHead) -> None:
        plan_growth = captured.plan_growth
        captured.latest = None  # drafts are found by the whole text

        def planned(graph: GraphState) -> Work:
            grow, slots = plan_growth(graph), graph.batch_slots
            if compiling_ahead():  # kernels do not run, those of the trained head neither: nothing can be recorded
                return grow
            levels = min(self._head.levels, graph.k) if graph.trees is None else graph.trees.deepest
            drafts = self.drafts(
                graph.k, levels, graph.trees is None
            )  # made now: nothing may be made while a step is captured

            def work() -> None:
                grow()
                found, known = self.look_up(slots.history, slots.lengths, drafts)
                _overwrite(graph.inputs.ids[:, 1:], found.tokens, known)
                if graph.trees is not None:
                    _overwrite(graph.trees.parents[:, 1:], found.parents, known)
                if graph.shared is not None and found.values is not None:
                    _overwrite(graph.shared.values, found.values, known)

            return work

        captured.plan_growth = planned  # type: ignore[method-assign]

    def _distinct(self, texts: HeldOutTexts) -> tuple[Tensor, Tensor, Tensor]:
        """Hashes, texts and places of the tokens that were written, once for texts that are the same up to there."""
        hashes = ((texts.tokens + 1) * self._factors).cumsum(1)
        written = (self._at >= texts.begins[:, None]) & (self._at < texts.ends[:, None])
        rows, places = written.nonzero(as_tuple=True)
        hashes, order = hashes[rows, places].sort()
        rows, places = rows[order], places[order]
        again = F.pad(hashes[1:] == hashes[:-1], (1, 0))
        assert bool((places == places.roll(1))[again].all()), "two texts have one hash"
        return hashes[~again], rows[~again], places[~again]


def _overwrite(nodes: Tensor, others: Tensor, rows: Tensor) -> None:
    """Write others [B, nodes] over these rows [B, 1] of the nodes."""
    nodes.copy_(torch.where(rows, others.to(nodes.dtype), nodes))
