# SPDX-License-Identifier: Apache-2.0
"""Device code: which record an index names, where it lies, and its values as matrix operands.

A *tile* is N keys. Masked keys are never loaded: their lanes are predicated off and read as zeros, whatever lies in the
pool. Offsets into the pool are int64.

The 512 (V4: 448) leading columns of a key come as four *segments* of 128 columns (V4: the last one 64), because one
float32 scale of the 656- and 528-byte formats covers 128 columns. A segment's values times its per-key scale are the
key; e4m3 values are exact in float16, so nothing is rounded before the scale, and the scale acts in float32 (see
softmax.py). Formats with e8m0 scales bring the groups of a record to one common power of two first, which is exact in
float16 for groups up to 2**21 apart; beyond that the smaller group is below a thousandth of float32's resolution of the
larger one.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How a format keeps the leading columns. The offsets inside a record come from its RecordLayout, as constants.
BF16 = tl.constexpr(0)
FLOAT32_SCALES = tl.constexpr(1)
V4 = tl.constexpr(2)
V41 = tl.constexpr(3)

# How e4m3 becomes float16.
PLAIN = tl.constexpr(0)  # integer operations, anywhere
NATIVE = tl.constexpr(1)  # the conversion of NVIDIA's hardware from compute capability 8.9
PACKED = tl.constexpr(2)  # NVIDIA before that: integer operations on four codes at once

_HEADROOM = tl.constexpr(6)
"""Power of two by which e8m0 records are scaled up: 448 · 2**6 still fits float16, and small groups keep more bits."""


@triton.jit
def divide(n, magic, shift):
    """n // divisor for 0 <= n < 2**31 by the divisor's magic number (see launch.magic)."""
    n = n.to(tl.uint32)
    high = tl.umulhi(n, tl.full(n.shape, magic, tl.uint32))
    return ((high + n) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def locate(
    index_row, columns, wanted, last_slot, block_size, block_magic, block_shift,
    table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave, page_stride,
    POSITIONS: tl.constexpr, SHARDED: tl.constexpr, RECORD: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """Where the keys lie that a row's indices at `columns` name.

    Returns:
        (N,) int64 byte offset of their records in the pool, that of their scales where these follow the page's data,
        and which of them are keys. Whatever names no key (garbage, another rank's position, a page outside the pool)
        is not.
    """
    index = tl.load(index_row + columns, mask=wanted, other=-1)
    valid = index >= 0
    if POSITIONS:
        position = tl.where(valid, index, 0)
        if SHARDED:
            run = position // shard_interleave
            valid = valid & (run % shard_world == shard_rank)
            position = run // shard_world * shard_interleave + position % shard_interleave
        entry = divide(position, block_magic, block_shift)
        valid = valid & (entry < table_columns)
        page = tl.load(table_row + entry, mask=valid, other=-1)
        valid = (page >= 0) & (page < num_pages)
        offset = position - entry * block_size
        page = tl.where(valid, page, 0)
    else:
        valid = valid & (index <= last_slot)
        slot = tl.where(valid, index, 0)
        page = divide(slot, block_magic, block_shift)
        offset = slot - page * block_size
    page_at = page.to(tl.int64) * page_stride
    record_at = tl.multiple_of(page_at + offset.to(tl.int64) * RECORD, 16)
    scale_at = record_at
    if SCALE_BYTES > 0:
        scale_at = page_at + block_size.to(tl.int64) * RECORD + offset.to(tl.int64) * SCALE_BYTES
        scale_at = tl.multiple_of(scale_at, 8)
    return record_at, scale_at, valid


@triton.jit
def _plain(codes):
    """int32 e4m3 codes, one each → float16.

    The bits of an e4m3 value, moved to float16's places, are the value times 2**-8 (the biases differ by 8), subnormal
    values included. PACKED does the same, two at a time.
    """
    codes = codes.to(tl.uint16)
    value = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def e4m3_to_float16(words, CONVERT: tl.constexpr):
    """(N, W) int32 words of four e4m3 codes → (N, 4 · W) float16, exact.

    NaN becomes NaN (PACKED: so does one more value of its word). Codes travel as words because a compiler that keeps
    single bytes in registers gives each a register of its own; and the reshaping at the end keeps it from moving the
    conversion behind the exchange through shared memory, where bytes are slow.
    """
    if CONVERT == NATIVE:
        value0, value1, value2, value3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }
            """,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    elif CONVERT == PACKED:
        value0, value1, value2, value3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, sign, nan;
            .reg .pred any;
            prmt.b32 low, $4, 0, 0x1404;
            prmt.b32 high, $4, 0, 0x3424;
            and.b32 sign, low, 0x80008000;
            and.b32 low, low, 0x7f007f00;
            shr.u32 low, low, 1;
            or.b32 low, low, sign;
            and.b32 sign, high, 0x80008000;
            and.b32 high, high, 0x7f007f00;
            shr.u32 high, high, 1;
            or.b32 high, high, sign;
            mov.b32 sign, 0x5c005c00;
            mul.f16x2 low, low, sign;
            mul.f16x2 high, high, sign;
            and.b32 nan, $4, 0x7f7f7f7f;
            add.u32 nan, nan, 0x01010101;
            and.b32 nan, nan, 0x80808080;
            setp.ne.u32 any, nan, 0;
            selp.b32 low, 0x7e007e00, low, any;
            mov.b32 {$0, $1}, low;
            mov.b32 {$2, $3}, high;
            }
            """,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        value0 = _plain(words & 0xFF)
        value1 = _plain((words >> 8) & 0xFF)
        value2 = _plain((words >> 16) & 0xFF)
        value3 = _plain((words >> 24) & 0xFF)
    values = tl.join(tl.join(value0, value2), tl.join(value1, value3))
    return tl.reshape(values, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def spread(WIDTH: tl.constexpr):
    """(WIDTH,) the column of a segment that each column of its operands holds.

    A thread loads 16 codes, 32 bytes as float16, and stores 16 bytes of them at a time. In the columns' own order these
    are every second 16 bytes, and eight threads meet in half of the banks of shared memory. So operands of 128 columns
    hold the first halves of all sixteens in front, the second halves behind. Queries and outputs follow.
    """
    place = tl.arange(0, WIDTH)
    if WIDTH == 128:
        return place // 8 % 8 * 16 + place // 64 * 8 + place % 8
    else:
        return place


@triton.jit
def _settled(values, CONVERT: tl.constexpr):
    """The values, their columns in the order that `spread` gives, as something Triton does not look behind.

    Triton 3.4 to 3.6 see that a matrix operand was joined from halves and then want it in shared memory in one
    arrangement for the scores and in another for the output, so twice.
    """
    if values.shape[1] == 128:
        values = tl.permute(tl.reshape(values, (values.shape[0], 8, 2, 8)), (0, 2, 1, 3))
        values = tl.reshape(values, (values.shape[0], 128))
    if CONVERT == PLAIN:
        return values
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float16, is_pure=False, pack=2)


@triton.jit
def _bytes(record, valid, first, WIDTH: tl.constexpr):
    """(N, WIDTH) uint8 from byte `first` of the records on."""
    return tl.load(record[:, None] + (first + tl.arange(0, WIDTH))[None, :], mask=valid[:, None], other=0)


@triton.jit
def _words(record, valid, first, WIDTH: tl.constexpr):
    """(N, WIDTH) int32 from byte `first` of the records on."""
    start = (record + first).to(tl.pointer_type(tl.int32))
    return tl.load(start[:, None] + tl.arange(0, WIDTH)[None, :], mask=valid[:, None], other=0)


@triton.jit
def _bfloat16(record, valid, offset, WIDTH: tl.constexpr):
    """(N, WIDTH) bfloat16 that lie `offset` bytes into the records."""
    start = (record + offset).to(tl.pointer_type(tl.bfloat16))
    return tl.load(start[:, None] + spread(WIDTH)[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def _column(matrix, which):
    """(N,) column `which` of (N, 4)."""
    return tl.sum(tl.where((tl.arange(0, 4) == which)[None, :], matrix, 0.0), 1)


@triton.jit
def segment(part, which: tl.constexpr, PARTS: tl.constexpr):
    """Which segment of the leading columns a program calls its `which`-th: of two programs that share a row's output,
    each with two segments of it, the second one calls the last two its first."""
    if PARTS == 1:
        return which
    else:
        return (which + 2 * part) % 4


@triton.jit
def fetch(
    record, scale_row, valid, part, KIND: tl.constexpr, ROPE: tl.constexpr, ROPE_AT: tl.constexpr,
    SCALE_AT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The bytes of a tile of records: four segments, the rotary columns, what each segment's scales are made of."""
    first0 = 128 * segment(part, 0, PARTS)
    first1 = 128 * segment(part, 1, PARTS)
    first2 = 128 * segment(part, 2, PARTS)
    first3 = 128 * segment(part, 3, PARTS)
    rotary = 0
    scale0 = 0
    scale1 = 0
    scale2 = 0
    scale3 = 0
    if KIND == BF16:
        codes0 = _bfloat16(record, valid, 2 * first0, 128)
        codes1 = _bfloat16(record, valid, 2 * first1, 128)
        codes2 = _bfloat16(record, valid, 2 * first2, 128)
        codes3 = _bfloat16(record, valid, 2 * first3, 128)
    elif KIND == FLOAT32_SCALES:
        codes0 = _words(record, valid, first0, 32)
        codes1 = _words(record, valid, first1, 32)
        codes2 = _words(record, valid, first2, 32)
        codes3 = _words(record, valid, first3, 32)
        start = (record + SCALE_AT).to(tl.pointer_type(tl.float32))
        scale0 = tl.load(start[:, None] + tl.arange(0, 4)[None, :], mask=valid[:, None], other=0.0)
    elif KIND == V4:
        codes0 = _words(record, valid, first0, 32)
        codes1 = _words(record, valid, first1, 32)
        codes2 = _words(record, valid, first2, 32)
        codes3 = _words(record, valid, 384, 16)
        scale0 = _bytes(scale_row, valid, 0, 2)
        scale1 = _bytes(scale_row, valid, 2, 2)
        scale2 = _bytes(scale_row, valid, 4, 2)
        scale3 = _bytes(scale_row, valid, 6, 1)
    else:
        codes0 = _words(record, valid, first0, 32)
        codes1 = _words(record, valid, first1, 32)
        codes2 = _words(record, valid, first2, 32)
        codes3 = _words(record, valid, first3, 32)
        scale0 = _bytes(scale_row, valid, first0 // 32, 4)
        scale1 = _bytes(scale_row, valid, first1 // 32, 4)
        scale2 = _bytes(scale_row, valid, first2 // 32, 4)
        scale3 = _bytes(scale_row, valid, first3 // 32, 4)
    if ROPE > 0:
        if KIND == BF16 or KIND == V4:
            rotary = _bfloat16(record, valid, ROPE_AT, ROPE)
        else:  # in the arrangement of the other words: where a record lies is then worked out once
            rotary = _words(record, valid, ROPE_AT, ROPE // 2)
    return codes0, codes1, codes2, codes3, rotary, scale0, scale1, scale2, scale3


@triton.jit
def _brought(codes, exponents, largest, CONVERT: tl.constexpr):
    """Words of codes → (N, columns) float16, their groups brought to the common exponent `largest` (N,)."""
    power = tl.maximum(exponents.to(tl.int32) - largest[:, None] + _HEADROOM, -30)  # below 2**-24 float16 has zero
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    values = e4m3_to_float16(codes, CONVERT)
    grouped = tl.reshape(values, (values.shape[0], factor.shape[1], values.shape[1] // factor.shape[1]))
    return _settled(tl.reshape(grouped * factor[:, :, None], values.shape), CONVERT)


@triton.jit
def operands(
    codes0, codes1, codes2, codes3, scale0, scale1, scale2, scale3, part, KIND: tl.constexpr, CONVERT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """What `fetch` fetched, as matrix operands.

    Returns:
        four segments (N, 128) (V4: the last one (N, 64)), the (N,) float32 scale of each, and the largest of these.
    """
    if KIND == BF16:
        one = tl.full((codes0.shape[0],), 1.0, tl.float32)
        return codes0, codes1, codes2, codes3, one, one, one, one, one
    elif KIND == FLOAT32_SCALES:
        key0 = _settled(e4m3_to_float16(codes0, CONVERT), CONVERT)
        key1 = _settled(e4m3_to_float16(codes1, CONVERT), CONVERT)
        key2 = _settled(e4m3_to_float16(codes2, CONVERT), CONVERT)
        key3 = _settled(e4m3_to_float16(codes3, CONVERT), CONVERT)
        scales = scale0
        scale0 = _column(scales, segment(part, 0, PARTS))
        scale1 = _column(scales, segment(part, 1, PARTS))
        scale2 = _column(scales, segment(part, 2, PARTS))
        scale3 = _column(scales, segment(part, 3, PARTS))
        return key0, key1, key2, key3, scale0, scale1, scale2, scale3, tl.max(tl.abs(scales), 1)
    else:
        largest = tl.maximum(
            tl.maximum(tl.max(scale0.to(tl.int32), 1), tl.max(scale1.to(tl.int32), 1)),
            tl.maximum(tl.max(scale2.to(tl.int32), 1), tl.max(scale3.to(tl.int32), 1)),
        )
        largest = tl.maximum(largest, _HEADROOM + 1)
        key0 = _brought(codes0, scale0, largest, CONVERT)
        key1 = _brought(codes1, scale1, largest, CONVERT)
        key2 = _brought(codes2, scale2, largest, CONVERT)
        key3 = _brought(codes3, scale3, largest, CONVERT)
        scale = ((largest - _HEADROOM) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(largest == 255, float("nan"), scale)
        return key0, key1, key2, key3, scale, scale, scale, scale, scale


@triton.jit
def rotary_operand(rotary, KIND: tl.constexpr, ROPE: tl.constexpr, CONVERT: tl.constexpr):
    """The rotary columns as `fetch` fetched them, (N, ROPE) bfloat16."""
    if ROPE == 0 or KIND == BF16 or KIND == V4:
        return rotary
    elif CONVERT == PLAIN:
        low = (rotary & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = ((rotary >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return tl.reshape(tl.join(low, high), (rotary.shape[0], ROPE))
    else:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [rotary],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
        return tl.reshape(tl.join(low, high), (rotary.shape[0], ROPE))


@triton.jit
def bias_of(valid):
    """(N,) float32: 0 for a key, -inf for none. The detour over a second dimension keeps the compiler from reading the
    indices again, one by one, in the arrangement that scores have."""
    twice = tl.where(valid[:, None] & (tl.arange(0, 2) >= 0)[None, :], 0.0, float("-inf"))
    return tl.max(twice, 1)
