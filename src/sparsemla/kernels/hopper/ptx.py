# SPDX-License-Identifier: Apache-2.0
"""The PTX instructions the Hopper kernels are made of, one Python function each.

Addresses: global ones are Int64 byte addresses, shared ones Int32 byte addresses in this CTA's shared window. A
predicate is an Int32 that is
zero for false. Instruction semantics: PTX ISA, sections "Data Movement and Conversion" and "Warp-level matrix store".
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Uint32
from cutlass.cute import arch


def ldg128(address: Any, predicate: Any) -> tuple[Any, Any, Any, Any]:
    """16 bytes from global memory as four words, zeros where the predicate is false (nothing is read then)."""
    return arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0;"
        " mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @p ld.global.L1::no_allocate.L2::128B.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, predicate],
    )


def ldg_i32(address: Any, predicate: Any, otherwise: int) -> Any:
    """One int32 from global memory, or `otherwise`."""
    return arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; mov.b32 {{$w0}}, {otherwise};"
        " @p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[address, predicate],
    )


def ldg_f32(address: Any) -> Any:
    """One float32 from global memory."""
    return arch.inline_ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def stg_b32(address: Any, value: Any, predicate: Any) -> None:
    """Four bytes to global memory where the predicate holds."""
    arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r2}, 0; @p st.global.b32 [{$r0}], {$r1}; }",
        read_only_args=[address, value, predicate],
    )


def stg_f32(address: Any, value: Any) -> None:
    """One float32 to global memory."""
    arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def sts_f32(address: Any, value: Any) -> None:
    """One float32 to shared memory."""
    arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def sts_v2f32(address: Any, a: Any, b: Any) -> None:
    """Two float32 to shared memory."""
    arch.inline_ptx("st.shared.v2.f32 [{$r0}], { {$r1}, {$r2} };", read_only_args=[address, a, b])


def lds_f32(address: Any) -> Any:
    """One float32 from shared memory."""
    return arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def lds_v2f32(address: Any) -> tuple[Any, Any]:
    """Two float32 from shared memory."""
    return arch.inline_ptx(
        "ld.shared.v2.f32 { {$w0}, {$w1} }, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def lds_v4f32(address: Any) -> tuple[Any, Any, Any, Any]:
    """Four float32 from shared memory."""
    return arch.inline_ptx(
        "ld.shared.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def mapa(address: Any, rank: Any) -> Any:
    """The address of the same shared-memory place in CTA `rank` of this cluster."""
    return arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def lds_cluster_v2f32(address: Any) -> tuple[Any, Any]:
    """Two float32 from the shared memory of any CTA of the cluster."""
    return arch.inline_ptx(
        "ld.shared::cluster.v2.f32 { {$w0}, {$w1} }, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def e4m3x4_to_f16x4(word: Any) -> tuple[Any, Any]:
    """Four e4m3 values (one word) to two f16x2 words, exactly."""
    return arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )


def pack_f16x2(low: Any, high: Any) -> Any:
    """Two float32 to one f16x2 word, round to nearest even."""
    return arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def pack_bf16x2(low: Any, high: Any) -> Any:
    """Two float32 to one bf16x2 word, round to nearest even."""
    return arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def bf16_to_f32(word: Any, half: int) -> Any:
    """One of the two bf16 of a word as float32: the lower (half 0) or the upper one (1)."""
    return bits_to_f32(word & Uint32(0xFFFF0000) if half else word << 16)


def bits_to_f32(word: Any) -> Any:
    """The float32 with these bits."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def f32_to_bits(value: Any) -> Any:
    """The bits of a float32."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def exp2(x: Any) -> Any:
    """2**x, approximate to 2 ulp; 0 at -inf."""
    return arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x: Any) -> Any:
    """log2(x), approximate; -inf at 0."""
    return arch.inline_ptx("lg2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def fmax(a: Any, b: Any) -> Any:
    """The larger of two float32; a NaN loses."""
    return arch.inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def fmin(a: Any, b: Any) -> Any:
    """The smaller of two float32; a NaN loses."""
    return arch.inline_ptx("min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def stmatrix_x4(address: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four 8x8 matrices of 16-bit values to shared memory; lane i gives the address of row i % 8 of matrix i // 8."""
    arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, a, b, c, d],
    )


def stmatrix_x4_trans(address: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four transposed 8x8 matrices of 16-bit values to shared memory; lane i gives the address of row i % 8 of matrix
    i // 8."""
    arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, a, b, c, d],
    )


def stmatrix_x2_trans(address: Any, a: Any, b: Any) -> None:
    """Two transposed 8x8 matrices of 16-bit values to shared memory; lanes 0 to 15 give the row addresses."""
    arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], { {$r1}, {$r2} };", read_only_args=[address, a, b]
    )


def divide(n: Any, multiplier: Any, shift: Any) -> Any:
    """n // divisor for 0 <= n < 2**31, with the numbers of `params.magic`."""
    return arch.inline_ptx(
        "{ .reg .b32 t; mul.hi.u32 t, {$r0}, {$r1}; add.u32 t, t, {$r0}; shr.u32 {$w0}, t, {$r2}; }",
        write_only_types=[Int32],
        read_only_args=[n, multiplier, shift],
    )


def cp_async16(target: Any, address: Any, predicate: Any) -> None:
    """Starts a copy of 16 bytes from global to shared memory; zeros arrive where the predicate is false (nothing is
    read then)."""
    _cp_async("cg.shared.global.L2::128B", target, address, predicate, 16)


def cp_async16_some(target: Any, address: Any, size: Any) -> None:
    """Starts a copy of `size` bytes (0 to 16), zeros behind them, from global to 16 bytes of shared memory."""
    arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, address, size]
    )


def cp_async(target: Any, address: Any, predicate: Any, size: int) -> None:
    """The same for 4, 8 or 16 bytes (through L1: past it 16 are the least)."""
    _cp_async("ca.shared.global", target, address, predicate, size)


def _cp_async(how: str, target: Any, address: Any, predicate: Any, size: int) -> None:
    arch.inline_ptx(
        f"{{ .reg .pred p; .reg .b32 n; setp.ne.b32 p, {{$r2}}, 0; selp.b32 n, {size}, 0, p;"
        f" cp.async.{how} [{{$r0}}], [{{$r1}}], {size}, n; }}",
        read_only_args=[target, address, predicate],
    )


def sts_i32(address: Any, value: Any) -> None:
    """Four bytes to shared memory."""
    arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def lds_i32(address: Any) -> Any:
    """Four bytes from shared memory."""
    return arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def lds128(address: Any) -> tuple[Any, Any, Any, Any]:
    """16 bytes from shared memory as four words."""
    return arch.inline_ptx(
        "ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def max_u16x2(a: Any, b: Any) -> Any:
    """The larger of each of two unsigned 16-bit halves."""
    return arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def sts128(address: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four words to shared memory."""
    arch.inline_ptx("st.shared.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", read_only_args=[address, a, b, c, d])


def lds_u32(address: Any) -> Any:
    """Four bytes from shared memory, as they are."""
    return arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def lds_v2u32(address: Any) -> tuple[Any, Any]:
    """Eight bytes from shared memory as two words."""
    return arch.inline_ptx(
        "ld.shared.v2.b32 { {$w0}, {$w1} }, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )


def sts_v4f32(address: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four float32 to shared memory."""
    arch.inline_ptx("st.shared.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", read_only_args=[address, a, b, c, d])


def sts_halves(address: Any, word: Any, distance: int) -> None:
    """The two 16-bit halves of a word to shared memory, `distance` bytes apart."""
    arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r1}; st.shared.b16 [{$r0}], lo;"
        f" st.shared.b16 [{{$r0}} + {distance}], hi; }}",
        read_only_args=[address, word],
    )


def interleave(a: Any, b: Any, half: int) -> Any:
    """Bytes of two words in turn: those of their lower halves (half 0) or upper halves (1)."""
    selector = "0x7362" if half else "0x5140"
    return arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def interleave_halves(a: Any, b: Any, half: int) -> Any:
    """The lower (half 0) or upper (1) 16 bits of two words, the first word's below the second's."""
    selector = "0x7632" if half else "0x5410"
    return arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def rcp(x: Any) -> Any:
    """1 / x, approximate to 1 ulp; 0 beyond 2^126."""
    return arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def mul_f16x2(a: Any, b: Any) -> Any:
    """Two products of f16 in one word each."""
    return arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def mul_f16x2_by(a: Any, b: Any, half: int) -> Any:
    """Both f16 of a word times one of another word: its lower (half 0) or upper one (1)."""
    which = ("lo", "hi")[half]
    return arch.inline_ptx(
        "{ .reg .b16 lo, hi; .reg .b32 t; mov.b32 {lo, hi}, {$r1};"
        f" mov.b32 t, {{{which}, {which}}};"
        " mul.rn.f16x2 {$w0}, {$r0}, t; }",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def mul_bf16x2(a: Any, b: Any) -> Any:
    """Two products of bf16 in one word each."""
    return arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def select(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition is not 0, else `b`: words."""
    return arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Uint32],
        read_only_args=[condition, a, b],
    )


def byte(word: Any, index: int) -> Any:
    """One byte of a word as an integer."""
    return arch.inline_ptx(
        f"bfe.u32 {{$w0}}, {{$r0}}, {8 * index}, 8;", write_only_types=[Int32], read_only_args=[word]
    )


def bytes_of(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes of eight, in the order that the selector's hexadecimal digits say (lowest first)."""
    return arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, selector]
    )


def barrier_or(index: Any, threads: int, value: Any) -> Any:
    """Meets `threads` threads at a named barrier; 1 if `value` was not 0 in any of them."""
    return arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.b32 p, {$r0}, 0;"
        " barrier.cta.red.or.aligned.pred q, {$r1}, {$r2}, p; selp.b32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[value, Int32(index), Int32(threads)],
    )


def lds_cluster_v4f32(address: Any) -> tuple[Any, Any, Any, Any]:
    """Four float32 from the shared memory of any CTA of the cluster."""
    return arch.inline_ptx(
        "ld.shared::cluster.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def stg64(address: Any, a: Any, b: Any) -> None:
    """Eight bytes to global memory."""
    arch.inline_ptx("st.global.v2.b32 [{$r0}], { {$r1}, {$r2} };", read_only_args=[address, a, b])


def prefetch_l2(address: Any) -> None:
    """Asks the L2 cache for the line at a global address."""
    arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def opaque(value: Any) -> Any:
    """The same Int32, as a value the compiler knows nothing about: what is computed from it is not kept in registers
    outside its use."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def bulk_copy(target: Any, address: Any, size: int, barrier: Any) -> None:
    """Starts a copy of `size` bytes (a multiple of 16) from global to shared memory by the bulk copy engine;
    `barrier` counts the bytes."""
    arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, address, Int32(size), barrier],
    )
