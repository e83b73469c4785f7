# SPDX-License-Identifier: Apache-2.0
"""Device code: the online softmax and its products, for float32 scales.

Scores are (heads, keys), the output (heads, columns).

Scales. A key is its stored values times a float32 scale s (one for each segment of columns, or one for all; see
keys.py). Scores take the scale after the product, in float32. The value side needs weights p·s in float16: for each
head the largest p·s met so far, s being a key's largest scale, is kept as a *reference*, weights are stored relative
to it, and the output is rescaled when it grows, as the online softmax does with its maximum. So neither tiny nor huge
scales leave float16's range. Below the reference float16 keeps all its bits for 2**28, and something for 2**38.

bfloat16 values (a BF16 cache; the rotary columns of V4) are weighted by p in two bfloat16 pieces, since a single one
would round p as coarsely as the output itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemla.kernels.triton.keys import BF16

_WEIGHT_TOP = tl.constexpr(16384.0)
"""Weights relative to their reference times this: uses float16's whole range (2**-24 to 2**16)."""
_SCALE_LIFT = tl.constexpr(256.0)
"""Scales times this before they are compared with a reference."""
_SMALLEST = tl.constexpr(2.0**-104)
"""No reference is below it, so that what is divided by it stays finite; float16 has room for the scales below."""


@triton.jit
def to_bfloat16(x, INTERPRETED: tl.constexpr):
    """float32 rounded to bfloat16; still float32, but rounded, in the interpreter, whose own conversion truncates."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _multiply(a, b, accumulator, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def score(query, key, scores, INTERPRETED: tl.constexpr):
    """scores + query (heads, columns) · key (keys, columns)."""
    return _multiply(query, tl.trans(key), scores, INTERPRETED)


@triton.jit
def add_values(weight, value, output, INTERPRETED: tl.constexpr):
    """output + weight (heads, keys) float32 · value (keys, columns), float16 or bfloat16."""
    if value.dtype == tl.bfloat16:
        high = to_bfloat16(weight, INTERPRETED)
        low = to_bfloat16(weight - high.to(tl.float32), INTERPRETED)
        return _multiply(low, value, _multiply(high, value, output, INTERPRETED), INTERPRETED)
    else:
        return _multiply(weight.to(tl.float16), value, output, INTERPRETED)


@triton.jit
def packed(first, second):
    """(1, keys) int64 of two (keys,) float32. What belongs to a key is known where its record was loaded, and is needed
    where scores are; each number that moves there costs an exchange through shared memory with two barriers."""
    low = first.to(tl.uint32, bitcast=True).to(tl.int64)
    high = second.to(tl.uint32, bitcast=True).to(tl.int64)
    return ((high << 32) | low)[None, :]


@triton.jit
def first_of(pair):
    """(1, keys) the first of what was packed."""
    return pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def second_of(pair):
    """(1, keys) the second of what was packed."""
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _divisor(scale, largest):
    """(keys,) a segment's scales, none of them less than 2**-90 of the largest of their key, so that they may divide:
    float32 does not show the difference. NaN stays."""
    least = tl.maximum(largest * 2.0**-90, 2.0**-126)
    return tl.where(tl.abs(scale) < least, least, scale)


@triton.jit
def step_of(scale, following, largest):
    """(keys,) what brings scores in units of one segment's scale into units of the next one's."""
    return _divisor(scale, largest) / _divisor(following, largest)


@triton.jit
def last_step_of(scale, largest):
    """(keys,) the same after the last segment: into true units."""
    return tl.where(largest == 0.0, 0.0, _divisor(scale, largest))


@triton.jit
def weigh(scores, bias, top, sums, factor):
    """One tile of the online softmax.

    Args:
        scores: float32 in units of `factor`: logit · log2(e) = score · factor.
        bias: (1, keys) 0, or -inf for a key that does not count.
        top: (heads,) largest score so far, -inf where no key was seen.
        sums: (heads,) sums of weights relative to `top`.
        factor: (heads,), at least 0.

    Returns:
        weights relative to the new top (0 where masked), the new top and sums, and (heads,) what everything relative
        to the old top is multiplied with.
    """
    scores += bias
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Where no key was seen yet top is -inf, and -inf - -inf would be NaN for good.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2((top - base) * factor)
    weights = tl.exp2((scores - base[:, None]) * factor[:, None])
    return weights, new_top, sums * keep + tl.sum(weights, 1), keep


@triton.jit
def refer(weights, scale, keep, reference):
    """Makes weights relative to a running reference.

    Args:
        weights: as `weigh` returns them.
        scale: (1, keys) float32, the largest scale of each key.
        keep: (heads,) as `weigh` returns it.
        reference: (heads,) largest weight · scale · _SCALE_LIFT so far, relative to the top.

    Returns:
        weights times _SCALE_LIFT · _WEIGHT_TOP over the new reference (times a key's scale they are at most
        _WEIGHT_TOP); the new reference; and (heads,) what the output relative to the old one is multiplied with.
    """
    faded = reference * keep
    product = tl.max(weights * (scale * _SCALE_LIFT), 1)
    grown = tl.maximum(tl.maximum(faded, product), _SMALLEST)
    inverse = 1.0 / grown
    fade = tl.where(grown == faded, 1.0, faded * inverse)
    return weights * (inverse * (_SCALE_LIFT * _WEIGHT_TOP))[:, None], grown, fade


@triton.jit
def times(weights, scale, KIND: tl.constexpr):
    """weights · scale (1, keys), where the format has scales."""
    if KIND == BF16:
        return weights
    else:
        return weights * scale


@triton.jit
def unreferred(reference, total):
    """(heads,) what brings an output of such weights to true units, divided by `total` (heads,)."""
    return reference * (1.0 / (_SCALE_LIFT * _WEIGHT_TOP)) / total


@triton.jit
def sink_gate(sink, lse, nothing):
    """exp(lse) / (exp(lse) + exp(sink)), 0 for a row without keys; sink may be ±inf."""
    return tl.where(nothing, 0.0, 1.0 / (1.0 + tl.exp(sink - tl.where(nothing, 0.0, lse))))
