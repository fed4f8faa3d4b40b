"""Pieces of LLVM's text form that several kernels are made of. VECTOR stands for a register full of float32 numbers."""

from __future__ import annotations

from collections.abc import Iterable
from struct import pack, unpack

from faircopy.kernels.cpu.jit import Processor

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def module_text(processor: Processor, parts: Iterable[str]) -> str:
    """A whole module: what kernels call, then the kernels."""
    lanes = processor.lanes
    return "\n".join([_declarations(lanes), exp_text(lanes), *parts]).replace("VECTOR", f"<{lanes} x float>")


def _declarations(lanes: int) -> str:
    pair = f"<{2 * lanes} x bfloat>"
    return f"""
declare VECTOR @llvm.fma.v{lanes}f32(VECTOR, VECTOR, VECTOR)
declare VECTOR @llvm.rint.v{lanes}f32(VECTOR)
declare VECTOR @llvm.minnum.v{lanes}f32(VECTOR, VECTOR)
declare VECTOR @llvm.maxnum.v{lanes}f32(VECTOR, VECTOR)
declare float @llvm.vector.reduce.fmax.v{lanes}f32(VECTOR)
declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, VECTOR)
declare VECTOR @llvm.x86.avx512bf16.dpbf16ps.512(VECTOR, {pair}, {pair})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
"""


def exp_text(lanes: int) -> str:
    """@exp of a vector, as in Cephes: less than two roundings off; arguments are held between -87 and 88."""
    words, fma = f"<{lanes} x i32>", f"call VECTOR @llvm.fma.v{lanes}f32"
    powers = [f"%p0 = fadd VECTOR zeroinitializer, {constant(_EXP[0], lanes)}"]
    powers += [
        f"%p{i} = {fma}(VECTOR %p{i - 1}, VECTOR %r, VECTOR {constant(_EXP[i], lanes)})" for i in range(1, len(_EXP))
    ]
    return f"""
define internal VECTOR @exp(VECTOR %s) alwaysinline {{
  %low = call VECTOR @llvm.minnum.v{lanes}f32(VECTOR %s, VECTOR {constant(88.0, lanes)})
  %e = call VECTOR @llvm.maxnum.v{lanes}f32(VECTOR %low, VECTOR {constant(-87.0, lanes)})
  %scaled = fmul VECTOR %e, {constant(_LOG2E, lanes)}
  %n = call VECTOR @llvm.rint.v{lanes}f32(VECTOR %scaled)
  %r1 = {fma}(VECTOR %n, VECTOR {constant(-_LN2_HIGH, lanes)}, VECTOR %e)
  %r = {fma}(VECTOR %n, VECTOR {constant(-_LN2_LOW, lanes)}, VECTOR %r1)
  {lines(powers)}
  %rr = fmul VECTOR %r, %r
  %r_1 = fadd VECTOR %r, {constant(1.0, lanes)}
  %mantissa = {fma}(VECTOR %p{len(_EXP) - 1}, VECTOR %rr, VECTOR %r_1)
  %whole = fptosi VECTOR %n to {words}
  %biased = add {words} %whole, {constant(127, lanes, "i32")}
  %shifted = shl {words} %biased, {constant(23, lanes, "i32")}
  %power = bitcast {words} %shifted to VECTOR
  %exp = fmul VECTOR %mantissa, %power
  ret VECTOR %exp
}}"""


def shared_text(name: str, arguments: tuple[tuple[str, str], ...], count: str) -> str:
    """@name(arguments, threads): runs @name_part(arguments, first, last) over `count` units on torch's threads."""
    given = ", ".join(f"{kind} %{argument}" for kind, argument in arguments)
    places = [
        f"%{argument}_place = getelementptr %{name}_work, ptr %work, i32 0, i32 {i}"
        for i, (_, argument) in enumerate(arguments)
    ]
    return f"""
%{name}_work = type {{{", ".join(kind for kind, _ in arguments)}}}

define void @{name}({given}, i64 %threads) {{
  %alone = icmp slt i64 %threads, 2
  br i1 %alone, label %direct, label %shared
direct:
  call void @{name}_part({given}, i64 0, i64 %{count})
  ret void
shared:
  %work = alloca %{name}_work
  {lines(places)}
  {lines(f"store {kind} %{argument}, ptr %{argument}_place" for kind, argument in arguments)}
  %team = trunc i64 %threads to i32
  call void @GOMP_parallel(ptr @{name}_share, ptr %work, i32 %team, i32 0)
  ret void
}}

define internal void @{name}_share(ptr %work) {{
  {lines(places)}
  {lines(f"%{argument} = load {kind}, ptr %{argument}_place" for kind, argument in arguments)}
  %thread = call i32 @omp_get_thread_num()
  %team = call i32 @omp_get_num_threads()
  %mine = zext i32 %thread to i64
  %all = zext i32 %team to i64
  %begin = mul i64 %{count}, %mine
  %end = add i64 %begin, %{count}
  %first = sdiv i64 %begin, %all
  %last = sdiv i64 %end, %all
  call void @{name}_part({given}, i64 %first, i64 %last)
  ret void
}}"""


def constant(number: float, lanes: int, kind: str = "float") -> str:
    """A vector of one number."""
    return "<" + ", ".join([f"{kind} {number if kind == 'i32' else literal(number)}"] * lanes) + ">"


def literal(number: float) -> str:
    """A float32 number as LLVM writes it: the bits of the same number in 64 bits."""
    rounded = unpack("<f", pack("<f", number))[0]
    return f"0x{unpack('<Q', pack('<d', rounded))[0]:016X}"


def lines(texts: Iterable[str]) -> str:
    return "\n  ".join(texts)
