# SPDX-License-Identifier: Apache-2.0
"""What a Hopper kernel is called with: addresses, strides and counts, in the order of its parameter list.

The same table serves the compiler (a NamedTuple of DSL scalars) and the launch (ctypes values), so they cannot
disagree.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

INT64 = "int64"
INT32 = "int32"
FLOAT32 = "float32"

FIELDS: dict[str, str] = {
    # Query: (T, H, 512) and (T, H, 64) bfloat16. Strides in bytes.
    "q_nope": INT64,
    "q_nope_token": INT64,
    "q_nope_head": INT64,
    "q_rope": INT64,
    "q_rope_token": INT64,
    "q_rope_head": INT64,
    # Result: (T, H, 512) bfloat16 and (T, H) float32. Strides in bytes.
    "out": INT64,
    "out_token": INT64,
    "out_head": INT64,
    "lse": INT64,
    "lse_token": INT64,
    "lse_head": INT64,
    # Cache.
    "cache": INT64,
    "page_stride": INT64,
    # Indices: (T, topk) int32. Row stride in bytes. Addresses of absent tensors are 0.
    "indices": INT64,
    "indices_stride": INT64,
    "topk_lengths": INT64,
    "block_table": INT64,
    "table_stride": INT64,
    "request_ids": INT64,
    "sink": INT64,
    # The second set of keys.
    "extra_cache": INT64,
    "extra_page_stride": INT64,
    "extra_indices": INT64,
    "extra_indices_stride": INT64,
    "extra_lengths": INT64,
    # Counts.
    "block_size": INT32,
    "block_magic": INT32,  # see `magic`
    "block_shift": INT32,
    "slots": INT32,
    "pages": INT32,
    "record_bytes": INT32,
    "topk": INT32,
    "table_columns": INT32,
    "num_requests": INT32,
    "shard_rank": INT32,
    "shard_world": INT32,
    "shard_interleave": INT32,
    "extra_block": INT32,
    "extra_magic": INT32,
    "extra_shift": INT32,
    "extra_slots": INT32,
    "extra_topk": INT32,
    "heads": INT32,
    "head_tiles": INT32,
    "tiles": INT32,  # head_tiles * T
    "scale_log2": FLOAT32,  # softmax_scale * log2(e)
    "trace": INT64,  # (warps, 8) int32 cycles of the first CTA, only read by variants compiled with trace=True
}

_CTYPES: dict[str, Any] = {INT64: ctypes.c_int64, INT32: ctypes.c_int32, FLOAT32: ctypes.c_float}


class Params(NamedTuple("Params", [(name, Any) for name in FIELDS])):  # type: ignore[misc]
    """The parameters as DSL scalars (see `FIELDS`)."""


def placeholders() -> Params:
    """Values of the right types, to compile with."""
    import cutlass

    types = {INT64: cutlass.Int64, INT32: cutlass.Int32, FLOAT32: cutlass.Float32}
    return Params(*(types[kind](1) for kind in FIELDS.values()))


def magic(divisor: int) -> tuple[int, int]:
    """Multiplier and shift that divide by `divisor`: n // divisor == (umulhi(n, multiplier) + n) >> shift for 0 <= n
    < 2**31.

    The round-up method of Granlund and Montgomery, "Division by invariant integers using multiplication" (PLDI 1994),
    figure 4.1. The
    multiplier is returned as the int32 with the same bits.
    """
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return multiplier - (1 << 32) if multiplier >= 1 << 31 else multiplier, shift


class Arguments:
    """The parameters of one launch, laid out as the driver takes them.

    Args:
        values: one number for each name of `FIELDS`.
    """

    def __init__(self, values: dict[str, float]) -> None:
        self._values: list[Any] = [_CTYPES[kind](values[name]) for name, kind in FIELDS.items()]
        self._pointers = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(v) for v in self._values))

    @property
    def address(self) -> int:
        """Address of the array of parameter addresses; valid while this object lives."""
        return ctypes.addressof(self._pointers)
