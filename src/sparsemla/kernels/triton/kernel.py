# SPDX-License-Identifier: Apache-2.0
"""Device code: the attention kernel. One program takes one query row, one tile of its heads, one piece of its keys, and
the output's columns, or half of them where a tile is so large that they would not fit its registers.

The same kernel serves decode, prefill and mixed batches. It walks over the keys of the call's cache and then over
those of the extra cache, tile by tile, and leaves either the answer or, for a piece of a split row, a partial answer
in the accumulators, which combine.py merges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemla.kernels.triton.keys import (
    BF16,
    FLOAT32_SCALES,
    V4,
    V41,
    bias_of,
    fetch,
    locate,
    operands,
    rotary_operand,
    segment,
    spread,
)
from sparsemla.kernels.triton.query import load_query, query_factor
from sparsemla.kernels.triton.softmax import (
    add_values,
    first_of,
    last_step_of,
    packed,
    refer,
    score,
    second_of,
    sink_gate,
    step_of,
    times,
    to_bfloat16,
    unreferred,
    weigh,
)

# How work is handed out.
WHOLE = tl.constexpr(0)  # a program a row
UNIFORM = tl.constexpr(1)  # every row in the same number of pieces
TABLE = tl.constexpr(2)  # a table of pieces, from a plan

BLOCK = tl.constexpr(64)
"""Keys of one block of a plan (schedule.BLOCK_KEYS)."""
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _length(lengths, row, limit):
    """Columns of a row that count, in [0, limit]."""
    if lengths is not None:
        return tl.minimum(tl.maximum(tl.load(lengths + row), 0), limit)
    else:
        return limit


@triton.jit
def look_ahead(
    pool, record_at, scale_at, valid, part, index_row, columns, end, last_slot, block_size, block_magic, block_shift,
    table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave, page_stride,
    POSITIONS: tl.constexpr, SHARDED: tl.constexpr, KIND: tl.constexpr, ROPE: tl.constexpr, RECORD: tl.constexpr,
    ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, SCALE_BYTES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The bytes of the records that were located last, and where those of the keys at `columns` lie."""
    codes0, codes1, codes2, codes3, rotary, raw0, raw1, raw2, raw3 = fetch(
        pool + record_at, pool + scale_at, valid, part, KIND, ROPE, ROPE_AT, SCALE_AT, PARTS
    )
    bias = bias_of(valid)
    record_at, scale_at, valid = locate(
        index_row, columns, columns < end, last_slot, block_size, block_magic, block_shift,
        table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave, page_stride,
        POSITIONS, SHARDED, RECORD, SCALE_BYTES,
    )  # fmt: skip
    return codes0, codes1, codes2, codes3, rotary, raw0, raw1, raw2, raw3, bias, record_at, scale_at, valid


@triton.jit
def walk(
    # the running softmax and output
    top, sums, reference, out0, out1, out2, out3, out4,
    # which columns of it
    part,
    # queries
    nope, nope_head, rope, rope_head, heads, wanted, power, factor,
    # keys
    pool, page_stride, last_slot, block_size, block_magic, block_shift, index_row, begin, end,
    table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave,
    # the format
    KIND: tl.constexpr, ROPE: tl.constexpr, RECORD: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    # the variant
    POSITIONS: tl.constexpr, SHARDED: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, CONVERT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Adds columns begin to end of one set of keys to the running softmax and output."""
    half: tl.constexpr = KIND != BF16
    last: tl.constexpr = 64 if KIND == V4 else 128
    query0 = load_query(nope, nope_head, heads, wanted, power, 128 * segment(part, 0, PARTS), 128, half)
    query1 = load_query(nope, nope_head, heads, wanted, power, 128 * segment(part, 1, PARTS), 128, half)
    query2 = load_query(nope, nope_head, heads, wanted, power, 128 * segment(part, 2, PARTS), 128, half)
    query3 = load_query(nope, nope_head, heads, wanted, power, 128 * segment(part, 3, PARTS), last, half)
    if ROPE > 0:
        query4 = load_query(rope, rope_head, heads, wanted, power, 0, ROPE, False)

    # Asked for when a tile is done: the records of the next tile, in registers, and where those of the one after lie.
    columns = begin + tl.arange(0, KEYS)
    record_at, scale_at, valid = locate(
        index_row, columns, columns < end, last_slot, block_size, block_magic, block_shift,
        table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave, page_stride,
        POSITIONS, SHARDED, RECORD, SCALE_BYTES,
    )  # fmt: skip
    codes0, codes1, codes2, codes3, rotary, raw0, raw1, raw2, raw3, bias, record_at, scale_at, valid = look_ahead(
        pool, record_at, scale_at, valid, part, index_row, columns + KEYS, end,
        last_slot, block_size, block_magic, block_shift,
        table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave, page_stride,
        POSITIONS, SHARDED, KIND, ROPE, RECORD, ROPE_AT, SCALE_AT, SCALE_BYTES, PARTS,
    )  # fmt: skip
    for start in tl.range(begin, end, KEYS, num_stages=1):
        key0, key1, key2, key3, scale0, scale1, scale2, scale3, largest = operands(
            codes0, codes1, codes2, codes3, raw0, raw1, raw2, raw3, part, KIND, CONVERT, PARTS
        )
        present = rotary_operand(rotary, KIND, ROPE, CONVERT)
        # One accumulator: between segments it is multiplied with what makes the sum of all products so far one in units
        # of the next segment's scale. Numbers of keys are packed where they are needed: where scores are, each takes a
        # register for every key that a thread has.
        if ROPE > 0:
            rotary_scores = score(query4, present, tl.zeros((HEADS, KEYS), tl.float32), INTERPRETED)
        scores = score(query0, key0, tl.zeros((HEADS, KEYS), tl.float32), INTERPRETED)
        if KIND == FLOAT32_SCALES:
            steps12 = packed(step_of(scale0, scale1, largest), step_of(scale1, scale2, largest))
            scores *= first_of(steps12)
        scores = score(query1, key1, scores, INTERPRETED)
        if KIND == FLOAT32_SCALES:
            scores *= second_of(steps12)
        scores = score(query2, key2, scores, INTERPRETED)
        if KIND == FLOAT32_SCALES:
            steps34 = packed(step_of(scale2, scale3, largest), last_step_of(scale3, largest))
            scores *= first_of(steps34)
        scores = score(query3, key3, scores, INTERPRETED)
        if KIND == FLOAT32_SCALES:
            scores *= second_of(steps34)
        biases = packed(bias, largest)
        if KIND == V4 or KIND == V41:
            scores *= second_of(biases)  # one scale for all segments
        if ROPE > 0:
            scores += rotary_scores

        weights, top, sums, keep = weigh(scores, first_of(biases), top, sums, factor)
        fade = keep
        if SCALED:
            weights_of, reference, fade = refer(weights, second_of(biases), keep, reference)
        else:
            weights_of = weights
        fades = fade[:, None]
        if KIND == FLOAT32_SCALES:
            scales01 = packed(scale0, scale1)
            by0 = first_of(scales01)
            by1 = second_of(scales01)
        else:  # one for all segments
            by0 = second_of(biases)
            by1 = by0
        out0 = add_values(times(weights_of, by0, KIND), key0, out0 * fades, INTERPRETED)
        out1 = add_values(times(weights_of, by1, KIND), key1, out1 * fades, INTERPRETED)
        if PARTS == 1:
            by2 = by0
            by3 = by0
            if KIND == FLOAT32_SCALES:
                scales23 = packed(scale2, scale3)
                by2 = first_of(scales23)
                by3 = second_of(scales23)
            out2 = add_values(times(weights_of, by2, KIND), key2, out2 * fades, INTERPRETED)
            out3 = add_values(times(weights_of, by3, KIND), key3, out3 * fades, INTERPRETED)
        if KIND == V4:
            out4 = add_values(weights, present, out4 * keep[:, None], INTERPRETED)
        # Only now: what is on its way takes registers, and where products are asynchronous each has a fence before it,
        # which waits for loads, too. Other warps and programs cover for the wait.
        codes0, codes1, codes2, codes3, rotary, raw0, raw1, raw2, raw3, bias, record_at, scale_at, valid = look_ahead(
            pool, record_at, scale_at, valid, part, index_row, start + 2 * KEYS + tl.arange(0, KEYS), end,
            last_slot, block_size, block_magic, block_shift,
            table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave, page_stride,
            POSITIONS, SHARDED, KIND, ROPE, RECORD, ROPE_AT, SCALE_AT, SCALE_BYTES, PARTS,
        )  # fmt: skip
    return top, sums, reference, out0, out1, out2, out3, out4


@triton.jit
def _store(row, head_stride, heads, wanted, output, first, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Stores columns `first` and on of the heads of one row, as bfloat16 or float32, whichever `row` points to."""
    pointers = row + heads[:, None] * head_stride + (first + spread(WIDTH))[None, :]
    if row.dtype.element_ty == tl.bfloat16:
        output = to_bfloat16(output, INTERPRETED).to(tl.bfloat16)
    tl.store(pointers, output, mask=wanted[:, None])


@triton.jit(
    do_not_specialize=[
        "lse_row", "lse_head",
        "page_stride", "last_slot", "block_size", "block_magic", "block_shift", "indices_row", "topk",
        "table_stride", "table_columns", "num_requests", "num_pages", "shard_rank", "shard_world", "shard_interleave",
        "extra_page_stride", "extra_last_slot", "extra_block_size", "extra_block_magic", "extra_block_shift",
        "extra_indices_row", "extra_topk", "pieces", "rows_per_request", "num_heads", "head_tiles",
    ]
)  # fmt: skip
def attend(
    q_nope, q_nope_row, q_nope_head, q_rope, q_rope_row, q_rope_head,
    out, out_row, out_head, lse, lse_row, lse_head, accumulators, sink,
    pool, page_stride, last_slot, block_size, block_magic, block_shift, indices, indices_row, topk, lengths,
    block_table, table_stride, table_columns, request_ids, num_requests, num_pages,
    shard_rank, shard_world, shard_interleave,
    extra_pool, extra_page_stride, extra_last_slot, extra_block_size, extra_block_magic, extra_block_shift,
    extra_indices, extra_indices_row, extra_topk, extra_lengths,
    pieces, rows_per_request, num_heads, head_tiles, scale_log2,
    NOPE: tl.constexpr, ROPE: tl.constexpr,
    KIND: tl.constexpr, RECORD: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    EXTRA_KIND: tl.constexpr, EXTRA_RECORD: tl.constexpr, EXTRA_ROPE_AT: tl.constexpr, EXTRA_SCALE_AT: tl.constexpr,
    EXTRA_SCALE_BYTES: tl.constexpr,
    WORK: tl.constexpr, POSITIONS: tl.constexpr, SHARDED: tl.constexpr, SCALED: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, CONVERT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """See launch.py for the arguments. Strides are in elements, those of pools in bytes."""
    program = tl.program_id(0)
    part = 0
    if PARTS > 1:
        part = program % PARTS
        program = program // PARTS
    tile = program % head_tiles
    item = program // head_tiles
    if WORK == TABLE:
        piece = item // rows_per_request
        within = item % rows_per_request
        request = tl.load(pieces + 4 * piece)
        begin_block = tl.load(pieces + 4 * piece + 1)
        end_block = tl.load(pieces + 4 * piece + 2)
        slot = tl.load(pieces + 4 * piece + 3)
        row = request * rows_per_request + within
        partial = slot.to(tl.int64) * rows_per_request + within
    elif WORK == UNIFORM:
        row = item // pieces
        partial = item.to(tl.int64)
    else:
        row = item
    row64 = row.to(tl.int64)
    heads32 = tile * HEADS + tl.arange(0, HEADS)
    wanted = heads32 < num_heads
    once = wanted  # what only one of the programs that share a row's columns stores
    if PARTS > 1:
        once = heads32 < num_heads * (1 - part)
    heads = heads32.to(tl.int64)

    length = _length(lengths, row64, topk)
    table_row = block_table
    if POSITIONS:
        request_id = tl.load(request_ids + row64)
        known = (request_id >= 0) & (request_id < num_requests)
        length = tl.where(known, length, 0)
        table_row = block_table + tl.where(known, request_id, 0).to(tl.int64) * table_stride
    # Blocks are numbered through, those of the call's indices first, at least one of them even where none counts.
    blocks = tl.maximum((length + BLOCK - 1) // BLOCK, 1)
    extra_length = 0
    if extra_indices is not None:
        extra_length = _length(extra_lengths, row64, extra_topk)
    begin = 0
    end = length
    if WORK == UNIFORM:
        all_blocks = blocks + (extra_length + BLOCK - 1) // BLOCK
        share = item % pieces
        begin_block = share * all_blocks // pieces
        end_block = (share + 1) * all_blocks // pieces
    if WORK != WHOLE:
        begin = begin_block * BLOCK
        end = tl.minimum(length, end_block * BLOCK)

    nope = q_nope + row64 * q_nope_row
    rope = q_rope
    if ROPE > 0:
        rope = q_rope + row64 * q_rope_row
    power, factor = query_factor(nope, q_nope_head, rope, q_rope_head, heads, wanted, scale_log2, NOPE, ROPE)

    last: tl.constexpr = 64 if KIND == V4 else 128
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    sums = tl.zeros((HEADS,), tl.float32)
    reference = tl.zeros((HEADS,), tl.float32)
    out0 = tl.zeros((HEADS, 128), tl.float32)
    out1 = tl.zeros((HEADS, 128), tl.float32)
    out2 = tl.zeros((HEADS, 128), tl.float32)
    out3 = tl.zeros((HEADS, last), tl.float32)
    out4 = tl.zeros((HEADS, 64), tl.float32)
    top, sums, reference, out0, out1, out2, out3, out4 = walk(
        top, sums, reference, out0, out1, out2, out3, out4, part,
        nope, q_nope_head, rope, q_rope_head, heads, wanted, power, factor,
        pool.to(tl.pointer_type(tl.uint8)), page_stride, last_slot, block_size, block_magic, block_shift,
        indices + row64 * indices_row, begin, end,
        table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave,
        KIND, ROPE, RECORD, ROPE_AT, SCALE_AT, SCALE_BYTES,
        POSITIONS, SHARDED, SCALED, HEADS, KEYS, PARTS, CONVERT, INTERPRETED,
    )  # fmt: skip
    if extra_indices is not None:
        extra_begin = 0
        extra_end = extra_length
        if WORK != WHOLE:
            extra_begin = tl.maximum(begin_block - blocks, 0) * BLOCK
            extra_end = tl.minimum(extra_length, (end_block - blocks) * BLOCK)
        top, sums, reference, out0, out1, out2, out3, out4 = walk(
            top, sums, reference, out0, out1, out2, out3, out4, part,
            nope, q_nope_head, rope, q_rope_head, heads, wanted, power, factor,
            extra_pool.to(tl.pointer_type(tl.uint8)), extra_page_stride, extra_last_slot,
            extra_block_size, extra_block_magic, extra_block_shift,
            extra_indices + row64 * extra_indices_row, extra_begin, extra_end,
            table_row, table_columns, num_pages, shard_rank, shard_world, shard_interleave,
            EXTRA_KIND, ROPE, EXTRA_RECORD, EXTRA_ROPE_AT, EXTRA_SCALE_AT, EXTRA_SCALE_BYTES,
            False, False, SCALED, HEADS, KEYS, PARTS, CONVERT, INTERPRETED,
        )  # fmt: skip

    nothing = sums == 0.0
    total = tl.where(nothing, 1.0, sums)
    share = 1.0 / total
    if SCALED:
        share = unreferred(reference, total)
    out0 = out0 * share[:, None]
    out1 = out1 * share[:, None]
    out2 = out2 * share[:, None]
    out3 = out3 * share[:, None]
    out4 = out4 * (1.0 / total)[:, None]

    whole = WORK == WHOLE
    if WORK == TABLE:
        whole = slot < 0
    if whole:
        lse_value = tl.where(nothing, float("-inf"), (top * factor + tl.log2(total)) * _LN2)
        tl.store(lse + row64 * lse_row + heads * lse_head, lse_value, mask=once)
        if sink is not None:
            gate = sink_gate(tl.load(sink + heads, mask=wanted, other=0.0), lse_value, nothing)
            out0 *= gate[:, None]
            out1 *= gate[:, None]
            out2 *= gate[:, None]
            out3 *= gate[:, None]
            out4 *= gate[:, None]
        at = out + row64 * out_row
        _store(at, out_head, heads, wanted, out0, 256 * part, 128, INTERPRETED)
        _store(at, out_head, heads, wanted, out1, 256 * part + 128, 128, INTERPRETED)
        if PARTS == 1:
            _store(at, out_head, heads, wanted, out2, 256, 128, INTERPRETED)
            _store(at, out_head, heads, wanted, out3, 384, last, INTERPRETED)
        if KIND == V4:
            _store(at, out_head, heads, wanted, out4, 448, 64, INTERPRETED)
    if WORK != WHOLE:
        if not whole:
            unit = tl.maximum(factor, 1.0)
            value = tl.where(nothing, float("-inf"), top * (factor / unit) + tl.log2(total) / unit)
            at = accumulators + partial * num_heads * (512 + 1)
            tl.store(at + heads * 513 + 512, value, mask=once)
            _store(at, 513, heads, wanted, out0, 256 * part, 128, INTERPRETED)
            _store(at, 513, heads, wanted, out1, 256 * part + 128, 128, INTERPRETED)
            if PARTS == 1:
                _store(at, 513, heads, wanted, out2, 256, 128, INTERPRETED)
                _store(at, 513, heads, wanted, out3, 384, last, INTERPRETED)
            if KIND == V4:
                _store(at, 513, heads, wanted, out4, 448, 64, INTERPRETED)
