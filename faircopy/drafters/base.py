"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from faircopy.model.runner import Passes, Result
from faircopy.types import Batch, Draft, Sequence, Sources, Verdict

if TYPE_CHECKING:
    from faircopy.capture import CapturedDrafter


class Drafter(ABC):
    """Guesses the target's next tokens. Its guesses may be wrong or missing and never change the output.

    Only `propose` is needed. The host asks a drafter through `propose` in every step in which a sequence gets drafts,
    unless `capture` returns something that drafts inside captured steps on a GPU.
    """

    wants: tuple[int, ...] = ()  # hidden states of the target (see model.base.Taps), to be found in result.states
    passes: Passes | None = None  # a draft model's passes, if they are graphs
    rows_read = 0  # of text, from the host, since it was made; what a network that drafts cost besides drafting
    layers = 0  # of a head: reading costs about what as many of the target's layers do
    skips_states = False  # true: it needs no hidden states of steps without drafts, once drafting has been off a while
    ranks_nodes = False  # true: it obeys batch.shared_k, and gives nodes to the paths that it is surest of
    expensive = False  # true: each level of a draft costs the host a pass of a network

    @abstractmethod
    def propose(self, batch: Batch) -> Draft:
        """At most batch.max_nodes[i] nodes for sequence i, continuing its tokens; none for one not fed to its end."""

    def read(self, batch: Batch) -> Draft:
        """As `propose`, in an eager step behind which captured ones follow: making ready for those is enough."""
        return self.propose(batch)

    def settle(self, batch: Batch, result: Result) -> None:  # noqa: B027
        """Called in such a step without drafts while the target's pass still runs: what was fed can be read now."""

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:  # noqa: B027
        """Called once per step, before the verdict is appended."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027
        """The sequence finished or was preempted."""

    def rehearse(self) -> None:  # noqa: B027
        """Make the launches of eager steps once, for kernels that are compiled ahead; nothing is kept."""

    def capture(self, num_slots: int) -> CapturedDrafter | None:
        """The same drafter inside captured steps of up to num_slots sequences; None: it is asked by the host."""
        return None


def captured_drafter(drafter: Drafter, num_slots: int) -> CapturedDrafter | None:
    """drafter.capture, unless its `propose` or `observe` is newer than that: captured steps would never call them."""
    kind, own = type(drafter), getattr(drafter, "__dict__", {})
    newer = any(name in own or _place(kind, name) < _place(kind, "capture") for name in ("propose", "observe"))
    return None if newer else drafter.capture(num_slots)


def _place(kind: type, method: str) -> int:
    """Where in the order of inheritance a method is defined."""
    return next(n for n, parent in enumerate(kind.__mro__) if method in parent.__dict__)


def chains(batch: Batch, chain: Callable[[Sequence, int], list[int]]) -> Draft:
    """A chain of at most max_nodes for each sequence that gets one: chain(sequence, max_nodes)."""
    return Draft.chains(
        [
            chain(seq, max_nodes) if max_nodes and batch.complete(i) else []
            for i, (seq, max_nodes) in enumerate(zip(batch.seqs, batch.max_nodes, strict=True))
        ]
    )


def permitted(draft: Draft, batch: Batch) -> Draft:
    """The draft without the nodes that a sequence's constraint forbids, and without what follows them."""
    if all(seq.request.constraint is None for seq in batch.seqs):
        return draft
    kept = [_permitted_nodes(draft, i, seq) for i, seq in enumerate(batch.seqs)]
    places = [{node: n for n, node in enumerate(nodes)} for nodes in kept]
    return Draft(
        [[draft.tokens[i][node] for node in nodes] for i, nodes in enumerate(kept)],
        [[places[i].get(draft.parents[i][node], -1) for node in nodes] for i, nodes in enumerate(kept)],
        None if draft.sources is None else _of_kept(draft.sources, kept),
        None if draft.confidence is None else [_of_nodes(draft.confidence[i], nodes) for i, nodes in enumerate(kept)],
    )


def _of_kept(sources: Sources, kept: list[list[int]]) -> Sources:
    return replace(sources, rows=[[sources.rows[i][node] for node in nodes] for i, nodes in enumerate(kept)])


def _of_nodes(confidence: list[float], nodes: list[int]) -> list[float]:
    """Drafters may say how sure they are of some sequences only."""
    return [confidence[node] for node in nodes if node < len(confidence)]


def _permitted_nodes(draft: Draft, i: int, seq: Sequence) -> list[int]:
    tokens, parents, constraint = draft.tokens[i], draft.parents[i], seq.request.constraint
    if constraint is None:
        return list(range(len(tokens)))
    kept: list[int] = []
    for node, parent in enumerate(parents):
        path = [tokens[above] for above in draft.path(i, parent)]
        if (parent < 0 or parent in kept) and bool(constraint.allowed([*seq.output, *path])[tokens[node]]):
            kept.append(node)
    return kept


class NoDrafter(Drafter):
    """Plain decoding."""

    def propose(self, batch: Batch) -> Draft:
        return Draft.empty(len(batch))

    def capture(self, num_slots: int) -> CapturedDrafter | None:
        from faircopy.drafters.captured import CapturedNothing

        return CapturedNothing()
