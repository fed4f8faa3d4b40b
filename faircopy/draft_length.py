"""How many nodes each sequence's next draft should have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq

from faircopy.costs import CostTable
from faircopy.measured_acceptance import History
from faircopy.types import Confidence, FinishedStep, Sequence

LADDER = (0, 1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)  # draft lengths that captured steps exist for
AUTO_MAX = 8  # draft tokens of k="auto" at most
AUTO_CHAIN = 8  # nodes of a head's draft on a GPU up to which k="auto" has a chain: trees accept as many tokens
AUTO_TREE = 24  # nodes of a tree of k="auto" on a GPU at most
AUTO_ROWS = 1024  # rows of a full batch of such trees at most
SHARED_FROM = 3  # sequences of a batch from which on they share nodes: they run in graphs of four batch slots


def auto_tree_nodes(max_batch: int) -> int:
    """Nodes that k="auto" gives a tree at most, on a device whose captured steps verify rows at little cost."""
    return max(n for n in LADDER if n <= AUTO_MAX or (n <= AUTO_TREE and max_batch * (n + 1) <= AUTO_ROWS))


Room = Callable[[int, int], int]  # k, sequences of a batch -> nodes that one of them may have


def own_room(k: int, batch: int) -> int:
    """Every sequence has k nodes."""
    return k


def shared_room(k: int, batch: int, most: int) -> int:
    """A batch of several sequences shares k nodes per sequence: one may have twice as many, if `most` allows it."""
    return max(k, min(2 * k, most)) if batch >= SHARED_FROM else k


class DraftLengths(ABC):
    """Chooses the draft lengths of a step; memory and the sequence's limit may cut them. Only `choose` is needed."""

    reason = "chosen by a class of your own"  # what is chosen at present, and why, in words for people
    lengths: tuple[int, ...] = ()  # what it chooses from, if that is known: captured steps are made for these

    @property
    def brief(self) -> str:
        """What is chosen at present, in two words for a progress bar; empty if it does not change."""
        return ""

    @property
    def off_for_long(self) -> bool:
        """Whether drafting has been off for a while in a large batch: passes need not hand over hidden states."""
        return False

    @property
    def confidence(self) -> Confidence | None:
        """How sure a drafter must be of what it drafts; None: it drafts what it may."""
        return None

    @property
    def history(self) -> History | None:
        """What was learned of the drafter's drafts, to be kept for plans and later runs; None: nothing."""
        return None

    def room(self, k: int, batch: int) -> int:
        """Nodes that a sequence may have where k are chosen for each of a batch: more, if the batch shares them."""
        return k

    @abstractmethod
    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        """A number of nodes for each of these sequences, which are the candidates for one step."""

    def observe(self, step: FinishedStep, seconds: float | None) -> None:  # noqa: B027
        """A step has finished. seconds: how long it took; None if that says nothing of decoding."""

    def use(self, table: CostTable) -> None:  # noqa: B027
        """What steps cost was measured."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027
        """The sequence finished or was preempted."""


class NoLength(DraftLengths):
    """No nodes: plain decoding, whatever number a request asked for."""

    reason = "no drafter"

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [0] * len(seqs)


class BatchLength(DraftLengths):
    """As many nodes for every sequence as a law of the batch size says, rounded down to lengths that are captured."""

    def __init__(self, law: Callable[[int], float], most: int, max_batch: int) -> None:
        sizes = [n for n in LADDER if n < most] + [most]
        self._by_batch = [max((n for n in sizes if n <= law(b)), default=0) for b in range(1, max_batch + 1)]
        self.lengths = tuple(sorted({0, *self._by_batch}))
        self.reason = f"{self._by_batch[0]} at batch 1 to {self._by_batch[-1]} at batch {max_batch}, by the roofline"

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        k = self._by_batch[min(len(seqs), len(self._by_batch)) - 1] if seqs else 0
        return [k if seq.request.k is None else seq.request.k for seq in seqs]


class FixedLength(DraftLengths):
    """k nodes for every sequence, unless its request asked for a number of its own. room: see DraftLengths.room."""

    def __init__(self, k: int, room: Room = own_room) -> None:
        self._k, self.lengths, self._room = k, (0, k), room
        self.reason = f"{k} for every sequence"

    def room(self, k: int, batch: int) -> int:
        return self._room(k, batch)

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [self._k if seq.request.k is None else seq.request.k for seq in seqs]
