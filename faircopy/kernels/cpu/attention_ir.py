"""The text of attention for LLVM: one query row after the other, keys in blocks at fixed positions."""

from __future__ import annotations

from faircopy.kernels.cpu.ir import constant, lines, module_text, shared_text
from faircopy.kernels.cpu.jit import Processor

ARGUMENTS = (
    ("ptr", "q"),
    ("ptr", "pool"),
    ("ptr", "slots"),
    ("ptr", "rows"),
    ("ptr", "out"),
    ("ptr", "scratch"),
    ("i64", "units"),
    ("i64", "q_stride"),
    ("i64", "kv_heads"),
    ("i64", "group"),
    ("i64", "window"),
    ("i64", "scale_bits"),
    ("i64", "scratch_stride"),
)


def attention_text(processor: Processor, dim: int, short: bool) -> str:
    """A module with attention(*ARGUMENTS, threads) for heads of `dim` numbers, in bfloat16 if short, else float32."""
    element = _Element(processor.lanes, short)
    parts = [_scores(element, dim), _weights(element), _values(element, dim), _units(element, dim)]
    return module_text(processor, [*parts, shared_text("attention", ARGUMENTS, "units")])


class _Element:
    """How numbers of one type are read and written, a register at a time."""

    def __init__(self, lanes: int, short: bool) -> None:
        self.lanes, self.short = lanes, short
        self.scalar = "bfloat" if short else "float"
        self.size = 2 if short else 4

    def load(self, name: str, at: str) -> list[str]:
        kind = f"<{self.lanes} x {self.scalar}>"
        if not self.short:
            return [f"%{name} = load {kind}, ptr {at}, align 4"]
        return [f"%{name}_short = load {kind}, ptr {at}, align 2", f"%{name} = fpext {kind} %{name}_short to VECTOR"]

    def store(self, value: str, at: str) -> list[str]:
        kind = f"<{self.lanes} x {self.scalar}>"
        if not self.short:
            return [f"store {kind} %{value}, ptr {at}, align 4"]
        return [
            f"%{value}_short = fptrunc VECTOR %{value} to {kind}",
            f"store {kind} %{value}_short, ptr {at}, align 2",
        ]

    def fma(self, a: str, b: str, c: str) -> str:
        return f"call VECTOR @llvm.fma.v{self.lanes}f32(VECTOR %{a}, VECTOR %{b}, VECTOR {c})"


def _scores(e: _Element, dim: int) -> str:
    """@scores: one query against a block of as many keys as a register has lanes."""
    chunks = range(dim // e.lanes)
    body = []
    for c in chunks:
        body += [f"%q_at{c} = getelementptr {e.scalar}, ptr %q, i64 {c * e.lanes}", *e.load(f"q{c}", f"%q_at{c}")]
    for j in range(e.lanes):
        body += [
            f"%slot_at{j} = getelementptr i64, ptr %slots, i64 {j}",
            f"%slot{j} = load i64, ptr %slot_at{j}",
            f"%offset{j} = mul i64 %slot{j}, %stride",
            f"%key{j} = getelementptr {e.scalar}, ptr %keys, i64 %offset{j}",
        ]
        total = "zeroinitializer"
        for c in chunks:
            at = f"key_at{j}_{c}"
            body += [f"%{at} = getelementptr {e.scalar}, ptr %key{j}, i64 {c * e.lanes}"]
            body += e.load(f"k{j}_{c}", f"%{at}")
            body += [f"%dot{j}_{c} = {e.fma(f'q{c}', f'k{j}_{c}', total)}"]
            total = f"%dot{j}_{c}"
    names = [f"dot{j}_{chunks[-1]}" for j in range(e.lanes)]
    body += _sums_of_lanes(names, e.lanes)
    return f"""
define internal VECTOR @scores(ptr %q, ptr %keys, ptr %slots, i64 %stride) alwaysinline {{
  {lines(body)}
  ret VECTOR %total
}}"""


def _sums_of_lanes(names: list[str], lanes: int) -> list[str]:
    """As many vectors as lanes -> %total: its lane j is the sum of vector j's lanes, neighbours first."""
    body: list[str] = []
    level = 0
    while len(names) > 1:
        halves, following = len(names) // 2, []
        for i in range(halves):
            a, b = names[2 * i], names[2 * i + 1]
            name = f"level{level}_{i}" if halves > 1 else "total"
            even, odd = _mix(lanes, lanes // len(names))
            body += [
                f"%{name}_even = shufflevector VECTOR %{a}, VECTOR %{b}, <{lanes} x i32> {even}",
                f"%{name}_odd = shufflevector VECTOR %{a}, VECTOR %{b}, <{lanes} x i32> {odd}",
                f"%{name} = fadd VECTOR %{name}_even, %{name}_odd",
            ]
            following.append(name)
        names, level = following, level + 1
    return body


def _mix(lanes: int, done: int) -> tuple[str, str]:
    """Two vectors with `done` keys each become one with twice as many: the lanes that are added.

    Lane l of a vector belongs to its key l % done. Afterwards the second vector's keys lie behind the first's.
    """
    even, odd = [], []
    for lane in range(lanes):
        key, turn = lane % (2 * done), lane // (2 * done)
        source = (key % done) + (lanes if key >= done else 0)
        even.append(source + 2 * turn * done)
        odd.append(source + (2 * turn + 1) * done)
    return _indices(even), _indices(odd)


def _indices(numbers: list[int]) -> str:
    return "<" + ", ".join(f"i32 {i}" for i in numbers) + ">"


def _weights(e: _Element) -> str:
    """@weights: scores of `count` keys in scratch become exp(score - most); returns their sum."""
    lanes = e.lanes
    return f"""
define internal float @weights(ptr %scratch, i64 %count, float %most) alwaysinline {{
entry:
  %one = insertelement VECTOR poison, float %most, i32 0
  %all = shufflevector VECTOR %one, VECTOR poison, <{lanes} x i32> zeroinitializer
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%after, %loop]
  %sum = phi VECTOR [zeroinitializer, %entry], [%next, %loop]
  %at = getelementptr float, ptr %scratch, i64 %i
  %score = load VECTOR, ptr %at, align 4
  %less = fsub VECTOR %score, %all
  %exp = call VECTOR @exp(VECTOR %less)
  %tiny = fcmp olt VECTOR %less, {constant(-87.0, lanes)}
  %weight = select <{lanes} x i1> %tiny, VECTOR zeroinitializer, VECTOR %exp
  store VECTOR %weight, ptr %at, align 4
  %next = fadd VECTOR %sum, %weight
  %after = add i64 %i, {lanes}
  %more = icmp slt i64 %after, %count
  br i1 %more, label %loop, label %done
done:
  %total = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, VECTOR %next)
  ret float %total
}}"""


def _values(e: _Element, dim: int) -> str:
    """@values: the sum of weight times value over keys low to high, first to last, over the weights' sum."""
    lanes, chunks = e.lanes, range(dim // e.lanes)
    sums = [f"%sum{c} = phi VECTOR [zeroinitializer, %entry], [%next{c}, %loop]" for c in chunks]
    body, stores = [], []
    for c in chunks:
        body += [f"%at{c} = getelementptr {e.scalar}, ptr %value, i64 {c * lanes}", *e.load(f"v{c}", f"%at{c}")]
        body += [f"%next{c} = {e.fma('weight', f'v{c}', f'%sum{c}')}"]
        stores += [f"%result{c} = fdiv VECTOR %next{c}, %all_total"]
        stores += [f"%to{c} = getelementptr {e.scalar}, ptr %out, i64 {c * lanes}", *e.store(f"result{c}", f"%to{c}")]
    return f"""
define internal void @values(ptr %values, ptr %slots, i64 %stride, ptr %scratch, i64 %first, i64 %low, i64 %high,
                             float %total, ptr %out) alwaysinline {{
entry:
  br label %loop
loop:
  %i = phi i64 [%low, %entry], [%after, %loop]
  {lines(sums)}
  %slot_at = getelementptr i64, ptr %slots, i64 %i
  %slot = load i64, ptr %slot_at
  %offset = mul i64 %slot, %stride
  %value = getelementptr {e.scalar}, ptr %values, i64 %offset
  %place = sub i64 %i, %first
  %weight_at = getelementptr float, ptr %scratch, i64 %place
  %scalar = load float, ptr %weight_at
  %one = insertelement VECTOR poison, float %scalar, i32 0
  %weight = shufflevector VECTOR %one, VECTOR poison, <{lanes} x i32> zeroinitializer
  {lines(body)}
  %after = add i64 %i, 1
  %more = icmp slt i64 %i, %high
  br i1 %more, label %loop, label %done
done:
  %one_total = insertelement VECTOR poison, float %total, i32 0
  %all_total = shufflevector VECTOR %one_total, VECTOR poison, <{lanes} x i32> zeroinitializer
  {lines(stores)}
  ret void
}}"""


def _units(e: _Element, dim: int) -> str:
    """@attention_part: units of one row and one key head, of each all query heads that share its keys."""
    lanes, given = e.lanes, ", ".join(f"{kind} %{name}" for kind, name in ARGUMENTS)
    counting = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
    return f"""
define internal void @attention_part({given}, i64 %begin, i64 %end) {{
entry:
  %scale32 = trunc i64 %scale_bits to i32
  %scale = bitcast i32 %scale32 to float
  %one_scale = insertelement VECTOR poison, float %scale, i32 0
  %all_scale = shufflevector VECTOR %one_scale, VECTOR poison, <{lanes} x i32> zeroinitializer
  %half = mul i64 %kv_heads, {dim}
  %stride = mul i64 %half, 2
  %heads = mul i64 %kv_heads, %group
  %out_stride = mul i64 %heads, {dim}
  %windowed = icmp sgt i64 %window, 0
  %thread32 = call i32 @omp_get_thread_num()
  %thread = zext i32 %thread32 to i64
  %own = mul i64 %thread, %scratch_stride
  %scores_at = getelementptr float, ptr %scratch, i64 %own
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %unit, label %finish
unit:
  %u = phi i64 [%begin, %entry], [%next_u, %unit_end]
  %t = sdiv i64 %u, %kv_heads
  %h = srem i64 %u, %kv_heads
  %row = mul i64 %t, 2
  %position_at = getelementptr i64, ptr %rows, i64 %row
  %position = load i64, ptr %position_at
  %lane_at = getelementptr i64, ptr %position_at, i64 1
  %lane = load i64, ptr %lane_at
  %path = getelementptr i64, ptr %slots, i64 %lane
  %reach0 = sub i64 %position, %window
  %reach1 = add i64 %reach0, 1
  %before = icmp slt i64 %reach1, 0
  %reach = select i1 %before, i64 0, i64 %reach1
  %low = select i1 %windowed, i64 %reach, i64 0
  %rest = srem i64 %low, {lanes}
  %first = sub i64 %low, %rest
  %head_offset = mul i64 %h, {dim}
  %keys = getelementptr {e.scalar}, ptr %pool, i64 %head_offset
  %values = getelementptr {e.scalar}, ptr %keys, i64 %half
  %one_low = insertelement <{lanes} x i64> poison, i64 %low, i32 0
  %all_low = shufflevector <{lanes} x i64> %one_low, <{lanes} x i64> poison, <{lanes} x i32> zeroinitializer
  %one_high = insertelement <{lanes} x i64> poison, i64 %position, i32 0
  %all_high = shufflevector <{lanes} x i64> %one_high, <{lanes} x i64> poison, <{lanes} x i32> zeroinitializer
  br label %query
query:
  %g = phi i64 [0, %unit], [%next_g, %query_end]
  %first_head = mul i64 %h, %group
  %head = add i64 %first_head, %g
  %column = mul i64 %head, {dim}
  %q_row = mul i64 %t, %q_stride
  %q_offset = add i64 %q_row, %column
  %q_at = getelementptr {e.scalar}, ptr %q, i64 %q_offset
  br label %block
block:
  %b = phi i64 [%first, %query], [%next_b, %block]
  %most = phi VECTOR [{constant(float("-inf"), lanes)}, %query], [%next_most, %block]
  %block_slots = getelementptr i64, ptr %path, i64 %b
  %dots = call VECTOR @scores(ptr %q_at, ptr %keys, ptr %block_slots, i64 %stride)
  %scaled = fmul VECTOR %dots, %all_scale
  %one_b = insertelement <{lanes} x i64> poison, i64 %b, i32 0
  %all_b = shufflevector <{lanes} x i64> %one_b, <{lanes} x i64> poison, <{lanes} x i32> zeroinitializer
  %at = add <{lanes} x i64> %all_b, {counting}
  %not_below = icmp sge <{lanes} x i64> %at, %all_low
  %not_above = icmp sle <{lanes} x i64> %at, %all_high
  %seen = and <{lanes} x i1> %not_below, %not_above
  %score = select <{lanes} x i1> %seen, VECTOR %scaled, VECTOR {constant(float("-inf"), lanes)}
  %place = sub i64 %b, %first
  %score_at = getelementptr float, ptr %scores_at, i64 %place
  store VECTOR %score, ptr %score_at, align 4
  %next_most = call VECTOR @llvm.maxnum.v{lanes}f32(VECTOR %most, VECTOR %score)
  %next_b = add i64 %b, {lanes}
  %more_blocks = icmp sle i64 %next_b, %position
  br i1 %more_blocks, label %block, label %weigh
weigh:
  %top = call float @llvm.vector.reduce.fmax.v{lanes}f32(VECTOR %next_most)
  %count = sub i64 %next_b, %first
  %total = call float @weights(ptr %scores_at, i64 %count, float %top)
  %out_row = mul i64 %t, %out_stride
  %out_offset = add i64 %out_row, %column
  %out_at = getelementptr {e.scalar}, ptr %out, i64 %out_offset
  call void @values(ptr %values, ptr %path, i64 %stride, ptr %scores_at, i64 %first, i64 %low, i64 %position,
                    float %total, ptr %out_at)
  br label %query_end
query_end:
  %next_g = add i64 %g, 1
  %more_queries = icmp slt i64 %next_g, %group
  br i1 %more_queries, label %query, label %unit_end
unit_end:
  %next_u = add i64 %u, 1
  %more_units = icmp slt i64 %next_u, %end
  br i1 %more_units, label %unit, label %finish
finish:
  ret void
}}"""
