"""How Hopper's attention kernel shares key blocks among its blocks: the loops of its warps, run on small tensors, with
everything left out that they do with a block of keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from faircopy.kernels.gpu import flash
from faircopy.kernels.gpu.launch import power
from faircopy.kernels.gpu.pages import END

INT = torch.int32
BN, SPAN = 128, 4  # keys of a block, and blocks of a span
TILES = 4  # that a block looks at together
TOGETHER = 2  # spans that are merged at a time, more of which are merged by all blocks that share them
WHOLE = 6  # key blocks of a tile that one block takes
Tile = tuple[int, int, int]  # tile, key head, part


@dataclass(frozen=True, slots=True)
class Pointer:
    memory: Tensor
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


def load(pointer: Pointer, mask: Any = True, other: int = 0) -> Tensor:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    where = torch.where(mask, at, 0)
    assert bool(((where >= 0) & (where < pointer.memory.numel())).all()), "outside a tensor"
    return torch.where(mask, pointer.memory.view(-1)[where], torch.tensor(other, dtype=pointer.memory.dtype))


def number(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=INT)


def add(pointer: Pointer, more: int, sem: str, scope: str) -> int:
    before = int(load(pointer))
    pointer.memory[int(pointer.at)] += more
    return before


def nothing(*args: Any) -> None:
    return None


class Scalar(Tensor):
    """A kernel's number: adding to it makes another one."""

    def __iadd__(self, other: Any) -> Tensor:  # type: ignore[misc]
        return self + other


@dataclass
class Launch:
    """One launch, program after program; `merged` holds the blocks of each tile's part, span by span."""

    programs: int
    program: int = 0
    copied: list[tuple[int, int, int, int]] = field(default_factory=list)  # the same, keys and values in turn
    read: list[tuple[int, int, int, int]] = field(default_factory=list)  # key head, tile, block, place in the ring
    tile: Tile = (0, 0, 0)
    states: dict[tuple[Tile, int], tuple[int, ...]] = field(default_factory=dict)
    merged: dict[Tile, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    chunks: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # of tile, key head and chunk of places
    told: list[int] = field(default_factory=list)  # barriers that tell merging warps of spans
    awaited: list[int] = field(default_factory=list)  # those that they have waited for

    def functions(self) -> dict[str, Any]:
        """The kernel's own loops, over tensors, with other functions for what they do."""
        language = SimpleNamespace(
            arange=lambda low, high, layout: torch.arange(low, high, dtype=INT), load=load, int32=INT,
            where=lambda which, a, b: torch.where(torch.as_tensor(which), number(a), number(b)),
            int64=torch.int64, zeros_like=torch.zeros_like, minimum=lambda a, b: torch.minimum(number(a), number(b)),
            convert_layout=lambda x, layout: x,
            maximum=lambda a, b: torch.maximum(number(a), number(b)), max=torch.amax, min=torch.amin,
            sum=lambda x, axis: x.sum(axis, dtype=INT), associative_scan=lambda x, axis, f: x.cumsum(axis, dtype=INT),
            program_id=lambda axis: number(self.program), num_programs=lambda axis: self.programs, atomic_add=add,
            store=lambda pointer, x: pointer.memory.index_fill_(0, torch.as_tensor([int(pointer.at)]), x),
            thread_barrier=nothing, SliceLayout=nothing, BlockedLayout=nothing, NVMMADistributedLayout=nothing,
        )  # fmt: skip
        space: dict[str, Any] = {
            "gl": language, "_END": END, "_WHOLE": WHOLE, "_copy_block": self.copy_block, "_extend": self.extend,
            "_put": self.put, "_empty": lambda *args: ((), (), ()), "_query": self.begin_tile, "_finish": self.finish,
            "_merge": lambda m, total, acc, m_new, total_new, new, layout: (m, total, (*acc, new) if new else acc),
            "_merge_spans": self.merge_spans, "_PATIENCE": 2, "_DONE": flash.DONE, "mbarrier": self,
        }  # fmt: skip
        for name in (
            "_tile",
            "_counts",
            "_share",
            "_plus",
            "_unit_blocks",
            "_begin",
            "_unit",
            "_rows",
            "_block_of",
            "_merge_among_blocks",
            "_merge_shared",
            "_copy",
            "_multiply",
        ):
            space[name] = FunctionType(getattr(flash, name).fn.__code__, space)
        return space

    def copy_block(self, pool: str, pages: Any, table: Pointer, block: int, last: Any, head: Any, *args: Any) -> None:
        self.copied.append((int(head), int(table.at), block, args[0]))

    def begin_tile(self, q: Any, query: Any, tile: Tensor, head: Tensor, rows: Any, *args: Any) -> None:
        part = args[2]
        self.tile = int(tile), int(head), part

    def extend(self, m: Any, total: Any, acc: tuple[int, ...], *args: Any) -> tuple[Any, Any, tuple[int, ...]]:
        ring, block = args[5:7]
        self.read.append((self.tile[1], self.tile[0], block, ring))
        return m, total, (*acc, block)

    def put(self, m: Any, total: Any, acc: tuple[int, ...], *args: Any) -> None:
        span = int(args[5])
        assert (self.tile, span) not in self.states, "a span has one owner"
        self.states[self.tile, span] = acc

    def finish(self, m: Any, total: Any, acc: tuple[tuple[int, ...], ...], *_: Any) -> None:
        assert self.tile not in self.merged, "a tile is finished once"
        self.merged[self.tile] = acc

    def index(self, place: Tensor) -> int:
        """Of barriers."""
        return int(place)

    def arrive(self, barrier: int, count: int) -> None:
        assert barrier not in self.told, "a barrier is for one tile"
        self.told.append(barrier)

    def wait(self, barrier: int, phase: int) -> None:
        assert barrier in self.told, "warps wait for spans that are not left"
        self.awaited.append(barrier)

    def merge_spans(self, parts: Any, stats: Any, out: Any, sinks: Any, tile: Any, head: Any, *args: Any) -> None:
        low, high, begin, end, step = map(int, args[2:7])
        each = flash.PLACES // args[11]
        for chunk in range(begin, end, step):
            where = int(tile), int(head), chunk // each
            found = tuple(self.states[where, span] for span in range(low, high))
            assert self.chunks.setdefault((*where[:2], chunk), found) == found
            self.merged[where] = found


@dataclass(frozen=True)
class Scene:
    """Tiles of queries: the positions of their rows, which are -1 for padding, and the blocks that they may see."""

    positions: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    window: int
    even: bool
    heads: int
    group: int
    parts: bool
    kind: torch.dtype
    programs: tuple[int, ...]  # in the order in which they run
    blocks: int = 16

    @property
    def tall(self) -> bool:
        return self.height * self.group > flash.PLACES

    @property
    def merged(self) -> tuple[int, int]:
        """Places and spans that are merged at a time."""
        return flash.MERGED_TALL if self.tall else (flash.MERGED[0], TOGETHER)

    @property
    def height(self) -> int:
        return max(1, *map(len, self.positions))

    def shared(self) -> Launch:
        """All programs, one after the other; each copies what it reads."""
        launch, tiles = Launch(len(self.programs)), len(self.positions)
        functions, counters = launch.functions(), torch.zeros(2 * tiles * self.heads, dtype=INT)
        given = self._tensors()
        for launch.program in self.programs:
            self._run(launch, functions, given, Pointer(counters))
        assert not counters.any(), "counters are zero between passes"
        most = -(-self.height * self.group // self.merged[0])
        shared = {where[:2] for where, _ in launch.states}
        assert set(launch.chunks) == {(*where, chunk) for where in shared for chunk in range(most)}
        return launch

    def _run(self, launch: Launch, functions: dict[str, Any], given: tuple[Pointer, ...], counters: Pointer) -> None:
        rows, ranges, seqs, positions = given
        height, tiles, windowed = self.height, len(self.positions), self.window > 0
        even, unit = height if self.even else 0, SPAN if self.parts else END
        numbers = self.window, self.blocks, tiles, even
        sizes = height, power(height), TILES, BN, self.even, windowed, 4
        share = functions["_share"](rows, ranges, positions, *numbers, self.heads, *sizes)
        share = tuple(torch.as_tensor(x).as_subclass(Scalar) for x in share)
        launch.copied.clear()
        functions["_copy"](
            "keys", "values", None, None, None, rows, ranges, seqs, Pointer(torch.zeros(1)), positions, None,
            self.window, 1, self.blocks, tiles, even, *share[:5], 64, height, power(height), BN, unit,
            16, 4, 64, self.even, windowed, self.parts, False, self.even, False,
        )  # fmt: skip
        launch.told.clear()
        launch.awaited.clear()
        for part in range(1 + self.tall):
            launch.read.clear()
            functions["_multiply"](
                None, None, None, None, counters, None, None, None, None, None, launch, rows, ranges, seqs, positions,
                None, None, 1.0, 0.0, self.window, self.blocks, self.blocks // SPAN, tiles, even,
                *share[:5], part,
                self.heads * self.group, self.heads, 64, height, power(height), flash.PLACES, BN, SPAN, unit, 4,
                self.even, False, windowed, False, self.parts, self.tall, False, *self.merged, 4, False,
            )  # fmt: skip
            assert launch.copied == [(*where, ring + n) for *where, ring in launch.read for n in (0, 1)]
            assert [ring for *_, ring in launch.copied] == list(range(len(launch.copied)))
        if self.parts and not self.tall:
            functions["_merge_shared"](
                None, None, None, counters, launch, rows, ranges, seqs, positions, None, self.window, self.blocks,
                self.blocks // SPAN, tiles, even, *share, self.heads * self.group, self.heads, 64, height,
                power(height), BN, SPAN, unit, self.even, windowed, False, *self.merged, 4, False,
            )  # fmt: skip
            assert launch.awaited == launch.told

    def _tensors(self) -> tuple[Pointer, ...]:
        """Rows, ranges and sequences of tiles, and positions of rows."""
        rows, first = torch.full((len(self.positions), self.height), -1, dtype=INT), 0
        for n, own in enumerate(self.positions):
            rows[n, : len(own)] = torch.arange(first, first + len(own))
            first += len(own)
        flat = torch.tensor([position for own in self.positions for position in own], dtype=self.kind)
        seqs = torch.arange(len(self.positions), dtype=INT)
        return Pointer(rows), Pointer(torch.tensor(self.ranges, dtype=INT)), Pointer(seqs), Pointer(flat)

    def wanted(self) -> dict[Tile, tuple[tuple[int, ...], ...]]:
        """The blocks of each tile, span by span."""
        found: dict[Tile, tuple[tuple[int, ...], ...]] = {}
        for n, (own, (first, end)) in enumerate(zip(self.positions, self.ranges, strict=True)):
            first, end = (0, END) if self.even else (first, end)
            if self.window and own:
                first = max(first, (min(own) - self.window + 1) // BN)
            seen = range(first, min(end, self.blocks, max(own, default=-1) // BN + 1))
            spans = sorted({block // SPAN for block in seen})
            cut = tuple(tuple(block for block in seen if block // SPAN == span) for span in spans)
            parts = range(1 + self.tall)
            found |= {(n, head, part): cut for head in range(self.heads) for part in parts if cut}
        return found


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    even, tiles = draw(st.booleans()), draw(st.integers(1, 2 * TILES + 1))
    height = draw(st.sampled_from([1, 3, 8]))
    blocks = Scene.__dataclass_fields__["blocks"].default
    longest = BN * blocks - height

    def positions() -> tuple[int, ...]:
        rows = height if even else draw(st.integers(0, height))
        first = draw(st.one_of(st.integers(0, longest), st.integers(0, blocks - 1).map(lambda n: n * BN)))
        return (-1,) * rows if draw(st.integers(0, 7)) == 0 else tuple(range(first, first + rows))

    places = tuple(positions() for _ in range(tiles))
    ends = st.one_of(st.just(END), st.integers(0, blocks))
    ranges = tuple((draw(st.sampled_from([0, 0, 0, 3, 9])), draw(ends)) for _ in range(tiles))
    return Scene(
        places if any(places) else ((0,), *places[1:]), ranges, draw(st.sampled_from([0, 0, 1, 300, 900])),
        even, draw(st.integers(1, 3)), draw(st.sampled_from([1, 9])), draw(st.booleans()),
        draw(st.sampled_from([torch.int32, torch.int64])),
        tuple(draw(st.permutations(range(draw(st.sampled_from([1, 2, 3, 7, 20])))))),
    )  # fmt: skip


@given(scenes())
@settings(max_examples=40, deadline=None)
def test_every_key_block_has_one_owner(scene: Scene) -> None:
    """Each tile is finished once, of all its spans in order, by warps that read what was copied for them."""
    assert scene.shared().merged == scene.wanted()


@pytest.mark.parametrize(("batch", "rows", "context"), [(1, 1, 8192), (1, 6, 8192), (8, 6, 1024), (8, 6, 8192)])
def test_long_texts_on_all_processors(batch: int, rows: int, context: int) -> None:
    """As many blocks as a Hopper has, eight key heads of four heads."""
    own = tuple(range(context - 1, context - 1 + rows))
    order = torch.randperm(132, generator=torch.Generator().manual_seed(batch)).tolist()
    scene = Scene(
        (own,) * batch, ((0, END),) * batch, 0, True, 8, 4, True, torch.int32, tuple(order), context // BN + 1
    )
    assert scene.shared().merged == scene.wanted()
