"""The text of products for LLVM: tiles of some rows by a panel, and the loops over them."""

from __future__ import annotations

from faircopy.kernels.cpu.ir import constant, lines, module_text, shared_text
from faircopy.kernels.cpu.jit import Processor

# activation(y) = y / (1 + exp(-s)): what s is
GATED = {"silu": "y", "swish": "y", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}

_GELU = (0.0713548162726, 1.5957691216)  # 2 sqrt(2 / pi) times 0.044715 and 1
_ARGUMENTS = (
    ("ptr", "x"),
    ("ptr", "w"),
    ("ptr", "bias"),
    ("ptr", "out"),
    ("i64", "rows"),
    ("i64", "words"),
    ("i64", "panels"),
)


def product_text(processor: Processor, pairs: bool, activation: str | None, size: int) -> str:
    """A module with product(x, weight, bias, out, rows, words of K, panels, threads). size: bytes of an output."""
    lanes, gated = processor.lanes, activation is not None
    parts = ["" if activation is None else _activation(lanes, activation)]
    parts += [_tile(m, lanes, pairs, gated, size) for m in range(1, processor.rows + 1)]
    parts += [_panel_loop(processor, gated, size), shared_text("product", _ARGUMENTS, "panels")]
    return module_text(processor, parts)


def _tile(m: int, lanes: int, pairs: bool, gated: bool, size: int) -> str:
    """m rows by one panel; `ahead` is read into the cache on the way, `step` bytes further for every word of K."""
    kept = [(r, c) for r in range(m) for c in range(2)]
    rows = [f"%row{r} = getelementptr i32, ptr %x, i64 %start{r}" for r in range(m)]
    starts = [f"%start{r} = mul i64 %words, {r}" for r in range(m)]
    sums = [f"%sum{r}{c} = phi VECTOR [%bias{c}, %entry], [%next{r}{c}, %loop]" for r, c in kept]
    steps = [line for r in range(m) for line in _row_step(r, lanes, pairs)]
    stores = [line for r in range(m) for line in _row_store(r, lanes, size, gated)]
    return f"""
define internal void @tile{m}(ptr noalias %x, i64 %words, ptr noalias %w, ptr noalias %bias, ptr noalias %out,
                              i64 %line, ptr %ahead, i64 %step) {{
entry:
  {lines(starts + rows)}
  {lines(_two_vectors("bias", "%bias", "VECTOR"))}
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%after, %loop]
  {lines(sums)}
  %offset = mul i64 %i, {2 * lanes}
  %here = getelementptr i32, ptr %w, i64 %offset
  {lines(_two_vectors("weight", "%here", _operand(lanes, pairs)))}
  %far = mul i64 %i, %step
  %line_ahead = getelementptr i8, ptr %ahead, i64 %far
  call void @llvm.prefetch.p0(ptr %line_ahead, i32 0, i32 2, i32 1)
  {lines(steps)}
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, %words
  br i1 %more, label %loop, label %done
done:
  {lines(stores)}
  ret void
}}"""


def _operand(lanes: int, pairs: bool) -> str:
    return f"<{2 * lanes} x bfloat>" if pairs else "VECTOR"


def _two_vectors(name: str, at: str, kind: str) -> list[str]:
    """Two vectors that follow each other in memory."""
    return [
        f"%{name}0 = load {kind}, ptr {at}, align 32",
        f"%{name}_at1 = getelementptr VECTOR, ptr {at}, i64 1",
        f"%{name}1 = load {kind}, ptr %{name}_at1, align 32",
    ]


def _row_step(r: int, lanes: int, pairs: bool) -> list[str]:
    """Multiply one word of a row with the panel's two vectors."""
    words = f"<{lanes} x i32>"
    lines = [
        f"%at{r} = getelementptr i32, ptr %row{r}, i64 %i",
        f"%word{r} = load i32, ptr %at{r}, align 4",
        f"%one{r} = insertelement {words} poison, i32 %word{r}, i32 0",
        f"%all{r} = shufflevector {words} %one{r}, {words} poison, {words} zeroinitializer",
        f"%factor{r} = bitcast {words} %all{r} to {_operand(lanes, pairs)}",
    ]
    for c in range(2):
        if pairs:
            call = "@llvm.x86.avx512bf16.dpbf16ps.512"
            kind = _operand(lanes, pairs)
            lines.append(f"%next{r}{c} = call VECTOR {call}(VECTOR %sum{r}{c}, {kind} %factor{r}, {kind} %weight{c})")
        else:
            call = f"@llvm.fma.v{lanes}f32"
            lines.append(f"%next{r}{c} = call VECTOR {call}(VECTOR %factor{r}, VECTOR %weight{c}, VECTOR %sum{r}{c})")
    return lines


def _row_store(r: int, lanes: int, size: int, gated: bool) -> list[str]:
    """Round a row's sums and write them; gated: activation(first) * second."""
    lines = [f"%skip{r} = mul i64 %line, {r}", f"%to{r}0 = getelementptr i8, ptr %out, i64 %skip{r}"]
    values = [f"%next{r}0", f"%next{r}1"]
    if gated:
        lines.append(f"%active{r} = call VECTOR @activation(VECTOR %next{r}0)")
        lines.append(f"%gated{r} = fmul VECTOR %active{r}, %next{r}1")
        values = [f"%gated{r}"]
    for c, value in enumerate(values):
        if c:
            lines.append(f"%to{r}{c} = getelementptr i8, ptr %to{r}0, i64 {c * lanes * size}")
        kind = "VECTOR"
        if size == 2:
            kind = f"<{lanes} x bfloat>"
            lines.append(f"%short{r}{c} = fptrunc VECTOR {value} to {kind}")
            value = f"%short{r}{c}"
        lines.append(f"store {kind} {value}, ptr %to{r}{c}, align {size}")
    return lines


def _panel_loop(processor: Processor, gated: bool, size: int) -> str:
    """Panels first to last, of each all rows, in tiles of nearly equal height.

    Where a panel is read more than once, the next one is fetched meanwhile; else the processor fetches well enough.
    """
    lanes, most = processor.lanes, processor.rows
    panel_bytes = 8 * lanes
    width = (1 if gated else 2) * lanes * size  # bytes that a panel adds to a row of the output
    heights = range(1, most + 1)
    cases = " ".join(f"i64 {m}, label %height{m}" for m in heights)
    calls = [
        f"height{m}:\n  call void @tile{m}(ptr %rows_at, i64 %words, ptr %w_at, ptr %bias_at, ptr %out_at, i64 %line, "
        f"ptr %ahead, i64 %step)\n  br label %tile_end"
        for m in heights
    ]
    return f"""
define internal void @product_part(ptr %x, ptr %w, ptr %bias, ptr %out, i64 %rows, i64 %words, i64 %panels,
                                   i64 %first, i64 %last) {{
entry:
  %line = mul i64 %panels, {width}
  %rounded = add i64 %rows, {most - 1}
  %tiles = sdiv i64 %rounded, {most}
  %height = sdiv i64 %rows, %tiles
  %taller = srem i64 %rows, %tiles
  %panel_size = mul i64 %words, {panel_bytes}
  %part = sdiv i64 %panel_size, %tiles
  %share_of_line = sdiv i64 {panel_bytes}, %tiles
  %once = icmp eq i64 %tiles, 1
  %step = select i1 %once, i64 0, i64 %share_of_line
  %any = icmp slt i64 %first, %last
  br i1 %any, label %panel, label %end
panel:
  %p = phi i64 [%first, %entry], [%next_p, %panel_end]
  %w_offset = mul i64 %p, %panel_size
  %w_at = getelementptr i8, ptr %w, i64 %w_offset
  %next_w = getelementptr i8, ptr %w_at, i64 %panel_size
  %bias_offset = mul i64 %p, {panel_bytes}
  %bias_at = getelementptr i8, ptr %bias, i64 %bias_offset
  %column = mul i64 %p, {width}
  br label %tile
tile:
  %t = phi i64 [0, %panel], [%next_t, %tile_end]
  %row = phi i64 [0, %panel], [%next_row, %tile_end]
  %is_taller = icmp slt i64 %t, %taller
  %one = zext i1 %is_taller to i64
  %m = add i64 %height, %one
  %x_words = mul i64 %row, %words
  %rows_at = getelementptr i32, ptr %x, i64 %x_words
  %out_row = mul i64 %row, %line
  %out_offset = add i64 %out_row, %column
  %out_at = getelementptr i8, ptr %out, i64 %out_offset
  %ahead_offset = mul i64 %t, %part
  %ahead = getelementptr i8, ptr %next_w, i64 %ahead_offset
  switch i64 %m, label %height1 [{cases}]
{lines(calls)}
tile_end:
  %next_t = add i64 %t, 1
  %next_row = add i64 %row, %m
  %more_tiles = icmp slt i64 %next_t, %tiles
  br i1 %more_tiles, label %tile, label %panel_end
panel_end:
  %next_p = add i64 %p, 1
  %more_panels = icmp slt i64 %next_p, %last
  br i1 %more_panels, label %panel, label %end
end:
  ret void
}}"""


def _activation(lanes: int, name: str) -> str:
    """@activation: y / (1 + exp(-s)), where s is y, or what makes it gelu's tanh form."""
    argument = ["%s = fneg VECTOR %y"]
    if GATED[name] == "gelu":
        argument = [
            "%yy = fmul VECTOR %y, %y",
            f"%inner = call VECTOR @llvm.fma.v{lanes}f32(VECTOR %yy, VECTOR {constant(_GELU[0], lanes)}, "
            f"VECTOR {constant(_GELU[1], lanes)})",
            "%sum = fmul VECTOR %y, %inner",
            "%s = fneg VECTOR %sum",
        ]
    return f"""
define internal VECTOR @activation(VECTOR %y) alwaysinline {{
  {lines(argument)}
  %exp = call VECTOR @exp(VECTOR %s)
  %below = fadd VECTOR %exp, {constant(1.0, lanes)}
  %result = fdiv VECTOR %y, %below
  ret VECTOR %result
}}"""
