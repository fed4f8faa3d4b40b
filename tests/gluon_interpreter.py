"""Runs Gluon kernels on the CPU, for tests: Triton's interpreter does not know them.

Every partition of every block is a thread, of which one runs at a time; a random choice says which goes on at each
synchronisation. What the device does on its own (copies between global and shared memory, products on the tensor cores)
happens at a random time between its start and the wait for it, and a buffer that a copy is on its way to holds NaN. So
a kernel that waits for the wrong thing gets NaN, another result for another seed, or an error: a deadlock, an address
outside a tensor, a product read before the wait for it, shared memory read by the copy engine or the tensor cores
without a fence. Layouts of registers have no effect here; barriers within a partition neither.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SHARED_BYTES = 232_448  # of a block on Hopper
STEP = 16  # of a product's inner dimension that tensor cores add to a sum at once
EARLY = 0.3  # the share of copies that read, and of products that are computed, as soon as they are asked for


class KernelError(AssertionError):
    """What a kernel may not do."""


# Numbers


def _whole(kind: torch.dtype) -> bool:
    return not kind.is_floating_point


def _with(x: Any, other: torch.dtype) -> Tensor:
    """A Python number as a tensor of the type that it takes beside a tensor of another."""
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, int) and _whole(other):
        return torch.tensor(x, dtype=torch.int64 if abs(x) >= 1 << 31 else other)
    return torch.tensor(x, dtype=torch.float32 if _whole(other) else other)


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors of one type: scalars count as much as blocks."""
    x, y = _data(a), _data(b)
    x = x if isinstance(x, Tensor) else _with(x, y.dtype if isinstance(y, Tensor) else torch.int32)
    y = y if isinstance(y, Tensor) else _with(y, x.dtype)
    kind = torch.promote_types(x.dtype, y.dtype)
    return x.to(kind), y.to(kind)


def _data(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _over(x: Tensor, y: Tensor) -> Tensor:
    return x.float() / y.float() if _whole(x.dtype) else x / y


def _truncated(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc")


class Value:
    """A block of numbers, or one number."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    @property
    def data(self) -> Tensor:
        return self._data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    type = SimpleNamespace(layout=None)

    def to(self, kind: torch.dtype) -> Value:
        return Value(self.data.to(kind))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


def _operator(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, Any]:
    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(function(*_pair(self, other)))

    def backward(self: Value, other: Any) -> Value:
        return Value(function(*_pair(other, self)))

    return forward, backward


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": _over, "floordiv": _truncated,
    "mod": torch.fmod, "and": torch.bitwise_and, "or": torch.bitwise_or,
}.items():  # fmt: skip
    _forward, _backward = _operator(_function)
    setattr(Value, f"__{_name}__", _forward)
    setattr(Value, f"__r{_name}__", _backward)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(getattr(torch, _name))[0])


class Product(Value):
    """A product on the tensor cores that nobody has waited for yet."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work, self._result, self.awaited = work, None, False

    def finish(self) -> Tensor:
        if self._result is None:
            self._result = self._work()
        return self._result

    @property
    def data(self) -> Tensor:
        if not self.awaited:
            raise KernelError("a product is read before the wait for it")
        return self.finish()


# Memory


class Pointer:
    """Places in a tensor in global memory."""

    def __init__(self, tensor: Tensor, offset: Tensor) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + _data(other))

    __radd__ = __add__

    def numbers(self, tensor: Tensor) -> Tensor:
        """A tensor's memory as one line."""
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.as_strided((extent if tensor.numel() else 0,), (1,))

    def inside(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The places, and which of them are meant; those must exist."""
        meant = torch.ones((), dtype=torch.bool) if mask is None else _data(mask)
        offset, meant = torch.broadcast_tensors(self.offset, meant)
        size = self.numbers(self.tensor).numel()
        if bool((meant & ((offset < 0) | (offset >= size))).any()):
            raise KernelError(f"an address outside a tensor of shape {tuple(self.tensor.shape)}")
        return offset.long(), meant


def _offsets(shape: Sequence[int], layout: Any) -> Tensor:
    """Where each number of a tile lies in shared memory: strips of at most 128 bytes, 16-byte pieces swizzled."""
    columns, rows = shape[-1], torch.Size(shape[:-1]).numel()
    line = layout.swizzle_byte_width * 8 // layout.element_bitwidth
    piece = 128 // layout.element_bitwidth
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    turn = row // (128 // layout.swizzle_byte_width) % (layout.swizzle_byte_width // 16)
    within = ((column % line // piece) ^ turn) * piece + column % piece
    return (column // line * rows * line + row * line + within).view(*shape)


@dataclass
class Storage:
    """One allocation in shared memory. unfenced: written by threads, not yet visible to the copy engine."""

    numbers: Tensor
    unfenced: bool = False


@dataclass
class Shared:
    """Tiles in shared memory, or one of them."""

    storage: Storage
    shape: tuple[int, ...]
    layout: Any
    start: int = 0
    order: tuple[int, ...] | None = None
    lines: slice | None = None  # of the tile

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.numbers.dtype

    def index(self, at: Any) -> Shared:
        count, *rest = self.shape
        if not 0 <= int(at) < count:
            raise KernelError(f"tile {int(at)} of {count} in shared memory")
        return Shared(self.storage, tuple(rest), self.layout, self.start + int(at) * torch.Size(rest).numel())

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.storage, self.shape, self.layout, self.start, order)

    def slice(self, start: int, length: int) -> Shared:
        """Some lines of a tile."""
        return Shared(self.storage, self.shape, self.layout, self.start, lines=slice(start, start + length))

    def _reinterpret(self, kind: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        if kind != self.dtype or torch.Size(shape).numel() != torch.Size(self.shape).numel():
            raise KernelError("other numbers in the same shared memory")
        return Shared(self.storage, tuple(shape), layout, self.start)

    def _places(self) -> Tensor:
        tile = self.shape[-self.layout.rank :]
        copies = torch.arange(torch.Size(self.shape[: -self.layout.rank]).numel()) * torch.Size(tile).numel()
        places = self.start + (copies.view(-1, *[1] * len(tile)) + _offsets(tile, self.layout)).view(self.shape)
        return places if self.lines is None else places[self.lines]

    def read(self) -> Tensor:
        tile = self.storage.numbers[self._places()]
        return tile if self.order is None else tile.permute(self.order)

    def write(self, tile: Tensor) -> None:
        self.storage.numbers[self._places()] = tile

    def store(self, value: Value) -> None:
        places = self._places()
        if value.shape != tuple(places.shape):
            raise KernelError(f"a block {value.shape} stored to a tile {tuple(places.shape)}")
        self.storage.numbers[places] = value.data.to(self.dtype)
        self.storage.unfenced = True

    def fenced(self) -> Shared:
        if self.storage.unfenced:
            raise KernelError("shared memory is read without a fence after threads have written it")
        return self


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes have come."""

    count: int = 0
    left: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int, announced: int = 0) -> None:
        self.left -= count
        self.bytes += announced
        if self.left < 0:
            raise KernelError("more have arrived at a barrier than it was made for")
        self._turn()

    def came(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Barriers:
    all: list[Barrier]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


def _overlap(at: int, size: int, end: int) -> tuple[slice, slice]:
    """What of a line of `size` at this place lies within [0, end): its place, and its part of the line."""
    first, stop = max(at, 0), max(min(at + size, end), 0)
    return slice(first, max(first, stop)), slice(first - at, max(first, stop) - at)


@dataclass
class Descriptor:
    """A tensor whose tiles are copied."""

    tensor: Tensor
    block: tuple[int, int]
    layout: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def box(self, place: Sequence[Any]) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """What of the tile at this place lies inside: in the tensor, and in the tile."""
        (own_row, row), (own_column, column) = (
            _overlap(int(at), size, end) for at, size, end in zip(place, self.block, self.tensor.shape, strict=True)
        )
        return (own_row, own_column), (row, column)

    def check(self, tile: Shared) -> None:
        if tile.layout != self.layout or tile.shape != self.block:
            raise KernelError(f"a tile {tile.shape} for a descriptor of {self.block}, or another layout")


# Threads


@dataclass
class Partition:
    """Warps that run together."""

    program: int
    name: str
    thread: threading.Thread | None = None
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    ended: bool = False
    follows: bool = False  # sees what the kernel before has written
    speed: int = 1  # how often it is chosen
    products: deque[Product] = field(default_factory=deque)
    stores: int = 0  # copies to global memory on their way
    begun: list[Callable[[], None]] = field(default_factory=list)  # threads' own copies of the group that is not closed
    groups: deque[list[Callable[[], None]]] = field(default_factory=deque)  # of such copies, on their way
    unfenced: set[int] = field(default_factory=set)  # addresses of tensors that it has written itself


class Stopped(BaseException):
    """Another partition has failed."""


class Launch:
    """One kernel on its way: all blocks side by side."""

    def __init__(self, seed: int, grid: int, stale: dict[int, Tensor]) -> None:
        """stale: by address, what a tensor holds until the kernel before has ended."""
        self.chance, self.grid, self._stale = Random(seed), grid, stale
        self._partitions: list[Partition] = []
        self._flights: list[Callable[[], None]] = []
        self._back = threading.Semaphore(0)
        self._error: BaseException | None = None
        self.now: Partition
        self.shared = [0] * grid
        self.storages: list[list[Storage]] = [[] for _ in range(grid)]

    def run(self, work: Callable[[], None]) -> None:
        for program in range(self.grid):
            self.spawn(program, "main", work, follows=False)
        while self._partitions or self._flights:
            ready = [partition for partition in self._partitions if partition.ready()]
            if not ready and not self._flights:
                self._stop(KernelError(f"all wait for each other: {[(p.program, p.name) for p in self._partitions]}"))
                break
            choices = [*ready, *self._flights]
            speeds = [partition.speed for partition in ready] + [1] * len(self._flights)
            self._go(self.chance.choices(choices, speeds)[0])
            if self._error is not None:
                self._stop(self._error)
        if self._error is not None:
            raise self._error

    def _go(self, choice: Any) -> None:
        if not isinstance(choice, Partition):
            self._flights.remove(choice)
            choice()
            return
        self.now = choice
        choice.resume.release()
        self._back.acquire()
        if choice.ended:
            self._partitions.remove(choice)

    def _stop(self, error: BaseException) -> None:
        self._error = error
        self._flights.clear()
        for partition in list(self._partitions):
            partition.resume.release()
            self._back.acquire()
        self._partitions.clear()

    def spawn(self, program: int, name: str, work: Callable[[], None], follows: bool) -> Partition:
        partition = Partition(program, name, follows=follows, speed=self.chance.choice((1, 3, 20)))

        def body() -> None:
            partition.resume.acquire()
            try:
                if self._error is None:
                    work()
            except Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error
            partition.ended = True
            self._back.release()

        partition.thread = threading.Thread(target=body, daemon=True)
        partition.thread.start()
        self._partitions.append(partition)
        return partition

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on until this partition can."""
        own = self.now
        own.ready = ready
        self._back.release()
        own.resume.acquire()
        if self._error is not None:
            raise Stopped

    def later(self, flight: Callable[[], None]) -> None:
        self._flights.append(flight)

    def check_fenced(self, tensor: Tensor) -> None:
        """Nobody in this block has written the tensor without a fence that lets the copy engine see it."""
        mine = (partition for partition in self._partitions if partition.program == self.now.program)
        if any(tensor.data_ptr() in partition.unfenced for partition in mine):
            raise KernelError("global memory is copied without a fence after threads have written it")

    def seen(self, tensor: Tensor) -> Tensor:
        """A tensor as this partition sees it."""
        old = None if self.now.follows else self._stale.get(tensor.data_ptr())
        return tensor if old is None else old.as_strided(tensor.shape, tensor.stride())


_current: Launch


# What kernels call


def _number(x: Any) -> Any:
    return x if isinstance(x, Value) else Value(torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else None))


def _choose(condition: Any, a: Any, b: Any) -> Value:
    x, y = _pair(a, b)
    return Value(torch.where(_number(condition).data.bool(), x, y))


def _both(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Value]:
    return lambda a, b: Value(function(*_pair(a, b)))


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Value], Value]:
    return lambda x: Value(function(x.data))


def _fused(a: Any, b: Any, c: Any) -> Value:
    """a * b + c, rounded once."""
    x, y, z = (_number(v).data.double() for v in (a, b, c))
    return Value((x * y + z).float())


def _full(shape: Sequence[int], value: Any, kind: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.full(tuple(shape), _data(value), dtype=kind))


def _arange(begin: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(begin, end, dtype=torch.int32))


def _sum(x: Value, axis: int) -> Value:
    return Value(x.data.sum(axis, dtype=x.dtype))


def _scan(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    lines = [Value(line) for line in x.data.unbind(axis)]
    for n in range(1, len(lines)):
        lines[n] = combine(lines[n - 1], lines[n])
    return Value(torch.stack([line.data for line in lines], axis))


def _split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0]), Value(x.data[..., 1])


def _broadcast(a: Value, b: Value) -> tuple[Value, ...]:
    return tuple(Value(x) for x in torch.broadcast_tensors(a.data, b.data))


def _load(pointer: Pointer, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Value:
    offset, meant = pointer.inside(mask)
    line = pointer.numbers(_current.seen(pointer.tensor))
    missing = _with(0 if other is None else _data(other), line.dtype).to(line.dtype)
    if not line.numel():
        return Value(missing.expand(offset.shape).clone())
    return Value(torch.where(meant, line[offset.clamp(0, line.numel() - 1)], missing))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, meant = pointer.inside(mask)
    numbers = _number(value).data.to(pointer.tensor.dtype)
    _current.now.unfenced.add(pointer.tensor.data_ptr())
    pointer.numbers(pointer.tensor)[offset[meant]] = numbers.expand(offset.shape)[meant]


def _atomic_add(pointer: Pointer, value: Any, sem: str, scope: str) -> Value:
    _current.pause()
    before = _load(pointer)
    _store(pointer, before + value)
    return before


def _range(*bounds: Any) -> Iterator[Value]:
    for n in range(*(int(bound) for bound in bounds)):
        yield Value(torch.tensor(n, dtype=torch.int32))


def _allocate(kind: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        return Barriers([Barrier() for _ in range(shape[0])])
    size, program = torch.Size(shape).numel(), _current.now.program
    _current.shared[program] += size * kind.itemsize
    if _current.shared[program] > SHARED_BYTES:
        raise KernelError(f"{_current.shared[program]} bytes of shared memory, {SHARED_BYTES} are there")
    storage = Storage(torch.full((size,), float("nan"), dtype=kind))
    _current.storages[program].append(storage)
    return Shared(storage, tuple(shape), layout)


def _warp_specialize(parts: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int], registers: Any) -> None:
    own, workers = _current.now, []
    for n, (function, given) in enumerate(parts[1:]):
        name = f"{function.__name__} {n + 1}"
        workers.append(_current.spawn(own.program, name, lambda f=function, g=given: f(*g), own.follows))
    if len(warps) != len(workers) or len(registers) != len(workers):
        raise KernelError("warps and registers are given for each partition but the first")
    parts[0][0](*parts[0][1])
    _current.pause(lambda: all(worker.ended for worker in workers))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if pred:
        barrier.arrive(1, int(size))
    _current.pause()


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)
    _current.pause()


def _wait(barrier: Barrier, phase: Any) -> None:
    parity = int(phase)
    _current.pause(lambda: barrier.passed(parity))


def _copy_in(source: Descriptor, place: Sequence[Any], barrier: Barrier, tile: Shared, pred: Any = True) -> None:
    """Global to shared memory; outside the tensor there are zeros."""
    source.check(tile)
    _current.check_fenced(source.tensor)
    own, inside = source.box(place)
    tile.write(torch.tensor(float("nan"), dtype=tile.dtype))
    seen = _current.seen(source.tensor)
    early = seen[own].clone() if _current.chance.random() < EARLY else None

    def arrive() -> None:
        numbers = torch.zeros(source.block, dtype=source.dtype)
        numbers[inside] = seen[own] if early is None else early
        tile.write(numbers)
        barrier.came(numbers.nbytes)

    _current.later(arrive)
    _current.pause()


def _copy_out(target: Descriptor, place: Sequence[Any], tile: Shared) -> None:
    """Shared to global memory; what lies outside the tensor is left out."""
    target.check(tile)
    own, inside = target.box(place)
    tile.fenced()
    partition = _current.now
    partition.stores += 1

    def arrive() -> None:
        target.tensor[own] = tile.read()[inside]
        partition.stores -= 1

    _current.later(arrive)
    _current.pause()


def _store_wait(left: int) -> None:
    partition = _current.now
    _current.pause(lambda: partition.stores <= left)


def _copy_by_threads(tile: Shared, pointer: Pointer, mask: Any = None) -> None:
    """Global to shared memory, number by number; zeros where the mask says so. A fence has to follow the wait."""
    numbers = _load(pointer, mask).data
    if tuple(numbers.shape) != tile.shape:
        raise KernelError(f"a block {tuple(numbers.shape)} copied to a tile {tile.shape}")
    tile.write(torch.tensor(float("nan"), dtype=tile.dtype))

    def arrive() -> None:
        tile.write(numbers)
        tile.storage.unfenced = True

    _current.now.begun.append(arrive)


def _close_group() -> None:
    partition = _current.now
    partition.groups.append(partition.begun)
    partition.begun = []


def _await_groups(left: int = 0) -> None:
    groups = _current.now.groups
    while len(groups) > left:
        for arrive in groups.popleft():
            arrive()
    _current.pause()


def _fence() -> None:
    for storage in _current.storages[_current.now.program]:
        storage.unfenced = False


def _exp2(x: Tensor) -> Tensor:
    """By way of 64 bits: in 32 its last bit depends on how many numbers a tensor has."""
    return torch.exp2(x.double()).to(x.dtype)


def _assembly(code: str, constraints: str, args: Sequence[Value], kind: torch.dtype, pure: bool, pack: int) -> Value:
    """What is written so: a fence between threads' stores and the copy engine; a hint to the cache, a no-op here."""
    assert code.startswith(("fence.proxy.async;", "prefetch.global.L2 ")) and not pure
    if code.startswith("fence"):
        _current.now.unfenced.clear()
    return args[0]


def _operand(x: Any) -> Callable[[], Tensor]:
    if isinstance(x, Shared):
        return x.fenced().read
    numbers = x.data
    return lambda: numbers


def _multiply(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    left, right = _operand(a), _operand(b)

    def work() -> Tensor:
        before = acc.finish() if isinstance(acc, Product) else acc.data
        total, (a, b) = before * bool(use_acc), (left().double(), right().double())
        for k in range(0, a.shape[1], STEP):
            total = (total.double() + a[:, k : k + STEP] @ b[k : k + STEP]).float()
        return total

    result, partition = Product(work), _current.now
    partition.products.append(result)
    if _current.chance.random() < EARLY:
        result.finish()
    return result if is_async else _await_products(0, (result,))


def _await_products(left: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    products = _current.now.products
    while len(products) > left:
        first = products.popleft()
        first.finish()
        first.awaited = True
    return deps[0] if len(deps) == 1 else deps


def _follow() -> None:
    """Everything that the kernel before has written is there."""
    _current.pause()
    _current.now.follows = True


def _no_op(*_: Any) -> None:
    return None


_HALF = {2: gl.bfloat16, 4: gl.float32}


class _SharedLayout:
    def __new__(cls, *given: Any) -> Any:
        return gl.NVMMASharedLayout(*given)

    @staticmethod
    def get_default_for(shape: Sequence[int], kind: torch.dtype) -> Any:
        return gl.NVMMASharedLayout.get_default_for(list(shape), _HALF[kind.itemsize])


LANGUAGE = SimpleNamespace(
    constexpr=gl.constexpr, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16,
    int32=torch.int32, int64=torch.int64,
    BlockedLayout=_no_op, SliceLayout=_no_op, NVMMADistributedLayout=_no_op, DotOperandLayout=_no_op,
    NVMMASharedLayout=_SharedLayout, convert_layout=lambda x, layout: x,
    program_id=lambda axis: Value(torch.tensor(_current.now.program, dtype=torch.int32)),
    num_programs=lambda axis: Value(torch.tensor(_current.grid, dtype=torch.int32)),
    static_range=range, arange=_arange, full=_full, zeros=lambda shape, kind, layout=None: _full(shape, 0, kind),
    full_like=lambda x, value: _full(x.shape, value, x.dtype), zeros_like=lambda x: _full(x.shape, 0, x.dtype),
    where=_choose, minimum=_both(torch.minimum), maximum=_both(torch.maximum), fma=_fused,
    exp2=_each(_exp2), exp=_each(torch.exp), erf=_each(torch.erf), rsqrt=_each(torch.rsqrt), abs=_each(torch.abs),
    sum=_sum, max=lambda x, axis: Value(x.data.amax(axis)), min=lambda x, axis: Value(x.data.amin(axis)),
    associative_scan=_scan, split=_split, broadcast=_broadcast,
    reshape=lambda x, shape: Value(x.data.reshape(tuple(shape))),
    permute=lambda x, order: Value(x.data.permute(tuple(order))),
    load=_load, store=_store, atomic_add=_atomic_add, allocate_shared_memory=_allocate,
    thread_barrier=_no_op, inline_asm_elementwise=_assembly, warp_specialize=_warp_specialize,
)  # fmt: skip
_REPLACED: dict[int, Any] = {
    id(gl): LANGUAGE,
    id(tl): LANGUAGE,
    id(hopper.mbarrier): SimpleNamespace(
        MBarrierLayout=lambda: Barrier, init=_init, expect=_expect, arrive=_arrive, wait=_wait
    ),
    id(hopper.tma): SimpleNamespace(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
    ),
    id(ampere.async_copy): SimpleNamespace(
        async_copy_global_to_shared=_copy_by_threads, commit_group=_close_group, wait_group=_await_groups
    ),
    id(hopper.warpgroup_mma): _multiply,
    id(hopper.warpgroup_mma_wait): _await_products,
    id(hopper.fence_async_shared): _fence,
    id(gdc_wait): _follow,
    id(gdc_launch_dependents): _no_op,
}


def plain(kernel: GluonJITFunction[Any]) -> Any:
    """A device function as a Python function over the objects above."""
    own = kernel.fn
    names: dict[str, Any] = {"range": _range}
    function = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    for name in own.__code__.co_names:
        value = own.__globals__.get(name)
        if isinstance(value, GluonJITFunction):
            names[name] = plain(value)
        elif value is not None:
            names[name] = _REPLACED.get(id(value), value.value if isinstance(value, gl.constexpr) else value)
    return function


class Interpreted:
    """A kernel that the host launches, run here."""

    def __init__(self, kernel: GluonJITFunction[Any], seed: int = 0, stale: dict[int, Tensor] | None = None) -> None:
        self._kernel, self._seed, self._stale = kernel, seed, stale or {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **meta: self._run(grid[0], args, meta)

    def _run(self, grid: int, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        global _current
        params = self._kernel.params
        given = [_argument(value, not param.do_not_specialize) for param, value in zip(params, args, strict=False)]
        constants = [{**meta, "PDL": True}[param.name] for param in params[len(given) :]]
        function = plain(self._kernel)
        _current = Launch(self._seed, grid, self._stale)
        _current.run(lambda: function(*given, *constants))


def _argument(x: Any, specialised: bool) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x, torch.zeros((), dtype=torch.int64))
    if isinstance(x, TensorDescriptor):
        return Descriptor(x.base, (x.block_shape[0], x.block_shape[1]), x.layout)
    if x is None or (specialised and x.__class__ is int and x == 1):
        return x  # a constant for the compiler
    return Value(torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else torch.int32))
