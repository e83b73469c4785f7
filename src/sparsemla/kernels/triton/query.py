# SPDX-License-Identifier: Apache-2.0
"""Device code: queries as matrix operands of any magnitude.

bfloat16 queries reach 3e38, float16 ends at 65504. Each head of a row is scaled by a power of two, exactly, so that
its largest value lies in [2**13, 2**14); the factor of its scores takes that back. Nothing is lost but what lies
2**38 below the row's largest value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemla.kernels.triton.keys import spread

_TOP = tl.constexpr(13)
_FACTOR_MAX = tl.constexpr(3.0e38)
"""Beyond it every difference of logits is decided anyway, and inf · 0 would be NaN."""
_FACTOR_MIN = tl.constexpr(2.0**-126)
"""So that -inf times the factor is -inf, for a softmax_scale of 0 too; no difference of logits shows below it."""


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def query_factor(nope, nope_head, rope, rope_head, heads, wanted, scale_log2, NOPE: tl.constexpr, ROPE: tl.constexpr):
    """How the heads of one row are scaled.

    Args:
        nope, rope: pointers to the row's bfloat16 values; NOPE and ROPE columns (ROPE may be 0).
        nope_head, rope_head: head strides, elements.
        heads: (H,) int64; wanted: (H,) which of them exist.
        scale_log2: softmax_scale · log2(e).

    Returns:
        (H,) float32 signed power of two that queries are multiplied with, and the (H,) non-negative factor that makes
        logits · log2(e) of the scores.
    """
    columns = tl.arange(0, 128)
    largest = tl.zeros(heads.shape, tl.float32)
    for first in tl.static_range(0, NOPE, 128):
        column = first + columns
        mask = wanted[:, None] & (column < NOPE)[None, :]
        values = _load(nope + heads[:, None] * nope_head + column[None, :], mask)
        largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
    if ROPE > 0:
        column = tl.arange(0, ROPE)
        values = _load(rope + heads[:, None] * rope_head + column[None, :], wanted[:, None])
        largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 127)
    exponent -= _TOP
    power = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    factor = tl.minimum(tl.maximum(tl.abs(scale_log2) * back, _FACTOR_MIN), _FACTOR_MAX)
    return tl.where(scale_log2 < 0, -power, power), factor


@triton.jit
def load_query(row, head_stride, heads, wanted, power, first, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """(H, WIDTH) columns `first` and on of one row's heads times `power`; float16 where HALF, else bfloat16 (exact)."""
    column = first + spread(WIDTH)
    values = _load(row + heads[:, None] * head_stride + column[None, :], wanted[:, None]) * power[:, None]
    if HALF:
        return values.to(tl.float16)
    else:
        return values.to(tl.bfloat16)
