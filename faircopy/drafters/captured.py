"""Drafters without hidden states inside captured steps: plain decoding, n-gram lookup, a draft model."""

from __future__ import annotations

from collections.abc import Callable

from faircopy.capture import CapturedDrafter, GraphState, PromptRows, Work
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model
from faircopy.types import Batch, Draft, Sequence


class CapturedNothing(CapturedDrafter):
    """Plain decoding: steps without nodes."""

    max_nodes = 0
    latest = 0

    def plan_fill(self, graph: GraphState) -> Work:
        assert graph.k == 0, "plain decoding has no nodes"
        return lambda: None


class CapturedNgram(CapturedDrafter):
    """The n-gram lookup by a kernel over the histories on the device."""

    variable_length = True

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def plan_fill(self, graph: GraphState) -> Work:
        return lambda: graph.suite.lookup(graph.batch_slots, graph.inputs, self._shortest, self._longest)


class CapturedModel(CapturedDrafter):
    """A draft model: the last two tokens first, which it may not have read, then node by node."""

    latest = 2

    def __init__(self, model: Model, layout: PagedLayout, vocab: int, is_idle: Callable[[Sequence], bool]) -> None:
        self._model, self._layout, self._vocab, self._is_idle = model, layout, vocab, is_idle

    def plan_fill(self, graph: GraphState) -> Work:
        inputs, sampling = graph.inputs, graph.row_sampling(graph.size)
        passes = [graph.catch_up_rows(self._layout)]
        passes += [graph.node_rows(self._layout, node) for node in range(graph.k - 1)]
        prompts = graph.drafter_prompts

        def fill() -> None:
            for node, packed in enumerate(passes):
                rows = packed if node or prompts is None else prompts.behind(packed)
                logits = self._model.forward(rows, self._layout)
                temperatures, keys, out = inputs.temperatures[:, node], inputs.keys[:, node], inputs.ids[:, node + 1]
                graph.suite.describe(graph.batch_slots, inputs, sampling, level=node)
                graph.suite.pick(logits, temperatures, keys, vocab=self._vocab, out=out, sampling=sampling)

        return fill

    def ready(self, seq: Sequence) -> bool:
        """Whether it has read all but the last two tokens. Sequences without drafts may share a captured step; what
        is drafted for them is ignored."""
        return self._is_idle(seq) or self._layout.cached(seq) >= len(seq.tokens) - 2

    def prompt_rows(self, seq: Sequence) -> int | None:
        """All but the last two tokens, which it reads in every step; as `ModelDrafter` it reads nothing that it has no
        token for, and nothing behind its context."""
        if self._is_idle(seq):
            return 0
        cached, tokens = self._layout.cached(seq), seq.tokens
        if len(tokens) > self._model.context or max(tokens[cached:], default=0) >= self._model.vocab:
            return None
        return max(0, len(tokens) - 2 - cached)

    def prompt_inputs(self, graph: GraphState, count: int) -> PromptRows | None:
        return graph.prompt_rows(self._layout, count, 2 * graph.size)  # behind the rows that catch up

    def join(self, graph: GraphState, slots: dict[Sequence, int], rows: dict[Sequence, range]) -> int:
        assert graph.drafter_prompts is not None, "prompts are read"
        read = [seq for seq in slots if not self._is_idle(seq)]
        ends = [max(self._layout.cached(seq), len(seq.tokens) - 2) for seq in read]
        listed = self._layout.list_rows(Batch(read, ends, [0] * len(read)), Draft.empty(len(read)))
        graph.drafter_prompts.write(listed, [slots[seq] for seq in read])
        for seq, end in zip(read, ends, strict=True):
            self._layout.set_cached(seq, end)
        return len(listed.ids)

    def commit(self, seq: Sequence, length: int, accepted: int, k: int) -> None:
        """The last node of a chain has no keys: it was drafted and never read. What was not ready stays so."""
        if k and not self._is_idle(seq) and self._layout.cached(seq) >= length - 2:
            self._layout.set_cached(seq, length + min(accepted, k - 1))
