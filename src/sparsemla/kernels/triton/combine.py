# SPDX-License-Identifier: Apache-2.0
"""Device code: merges the pieces of split rows. Runs only where something was split.

A piece leaves 512 columns of output divided by its own sum, and that sum's logarithm: log2 of the sum of 2**(score ·
factor) over *unit*, where unit is the factor of its head's scores or 1, whichever is larger. In that unit the
logarithm of the largest bfloat16 query fits float32; as a natural logarithm it would not, and two pieces at infinity
cannot be merged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemla.kernels.triton.kernel import UNIFORM
from sparsemla.kernels.triton.query import query_factor
from sparsemla.kernels.triton.softmax import sink_gate, to_bfloat16

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["lse_row", "lse_head", "pieces", "rows_per_request", "num_heads"])
def combine(
    q_nope, q_nope_row, q_nope_head, q_rope, q_rope_row, q_rope_head, out, out_row, out_head, lse, lse_row, lse_head,
    accumulators, sink, pieces, rows_per_request, num_heads, scale_log2,
    NOPE: tl.constexpr, ROPE: tl.constexpr, WORK: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program merges COLUMNS columns of one head of one row, PIECES pieces at a time.

    `pieces` is the number of pieces of every row, or a table of (request, first accumulator, number of pieces).
    """
    chunks: tl.constexpr = 512 // COLUMNS
    program = tl.program_id(0)
    chunk = program % chunks
    head = program // chunks % num_heads
    item = program // chunks // num_heads
    if WORK == UNIFORM:
        row = item
        first = item.to(tl.int64) * pieces
        step = 1
        count = pieces
    else:
        within = item % rows_per_request
        split = pieces + item // rows_per_request * 3
        row = tl.load(split) * rows_per_request + within
        first = tl.load(split + 1).to(tl.int64) * rows_per_request + within
        step = rows_per_request
        count = tl.load(split + 2)
    row64 = row.to(tl.int64)

    heads = head.to(tl.int64) + tl.arange(0, 1)
    rope = q_rope
    if ROPE > 0:
        rope = q_rope + row64 * q_rope_row
    _, factor = query_factor(
        q_nope + row64 * q_nope_row, q_nope_head, rope, q_rope_head, heads, heads >= 0, scale_log2, NOPE, ROPE
    )
    unit = tl.max(tl.maximum(factor, 1.0), 0)

    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    top = float("-inf")
    total = 0.0
    merged = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, count, PIECES):
        piece = begin + tl.arange(0, PIECES)
        wanted = piece < count
        partial = accumulators + ((first + piece.to(tl.int64) * step) * num_heads + head) * 513
        logarithm = tl.load(partial + 512, mask=wanted, other=float("-inf"))
        values = tl.load(partial[:, None] + columns[None, :], mask=wanted[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(logarithm, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2((logarithm - base) * unit)
        keep = tl.exp2((top - base) * unit)
        total = total * keep + tl.sum(weight, 0)
        merged = merged * keep + tl.sum(values * weight[:, None], 0)
        top = new_top

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    merged = merged / total
    lse_value = tl.where(nothing, float("-inf"), (top * unit + tl.log2(total)) * _LN2)
    if sink is not None:
        merged *= sink_gate(tl.load(sink + head), lse_value, nothing)
    head64 = head.to(tl.int64)
    tl.store(out + row64 * out_row + head64 * out_head + columns, to_bfloat16(merged, INTERPRETED).to(tl.bfloat16))
    if chunk == 0:
        tl.store(lse + row64 * lse_row + head64 * lse_head, lse_value)
