# SPDX-License-Identifier: Apache-2.0
"""The raw records in the ring: which thread reads what of them, and as what.

Nothing is converted in shared memory: both products take K as a matrix operand from registers, read from the ring as
it is. For S^T = K Q^T a thread holds columns of two records; for O^T = V^T P^T it holds records of four columns. Which
record of a granule is which row of the one and which column of the other is free as long as both agree. `record_of`
is the choice that lets both read without bank conflicts: records are 16 bytes more than a multiple of 128 apart.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import GROUPS, Layout


class Records(Layout):
    """Reading records."""

    def record_of(self, line: Any) -> Any:
        """Record of a granule that row `line` (0 to 7) of a fragment is; row line + 8 is eight records on.

        Rows 2 q and 2 q + 1 are records q and q + 4, half of all banks apart: records are 16 bytes more than a multiple
        of 128 apart. Eight lanes that read 16 bytes each of two such rows cover all banks, and so do 32 lanes that read
        4 bytes each of records 0 to 3 at the places of `column_of`. V4's are 96 bytes more apart; rows of a pair are
        two or six records apart then.
        """
        if self.kind == "v4":
            return (line >> 1) + (line & 1) * (4 + (((line >> 1) + 2) & 3) - (line >> 1))
        return (line >> 1) + (line & 1) * 4

    def column_of(self, quarter: Any, lane: Any) -> Any:
        """First of the four columns of a group of 128 that a lane of the quarter-th warp of a warpgroup has."""
        if self.kind == "v4":  # no warp has e4m3 and rotary columns in one group
            return quarter * 32 + (lane >> 2) * 4
        if self.wide:  # 16 lanes that read 8 bytes each of records 0 to 3 cover all banks
            return quarter * 8 + ((lane >> 2) & 1) * 4 + ((lane >> 3) & 1) * 32 + (lane >> 4) * 64
        return quarter * 16 + ((lane >> 2) & 3) * 4 + (lane >> 4) * 64

    def latent_rows(self, rows: Any, b: int) -> list[Any]:
        """16 e4m3 values of each of a thread's two records in column block b: what its fragments of four products
        hold."""
        return [ptx.lds128(rows + b * 64), ptx.lds128(rows + b * 64 + 8 * self.record_stride)]

    def wide_rows(self, rows: Any, offset: int) -> list[Any]:
        """16 bf16 values of each of a thread's two records in a block of 64 columns, `offset` bytes from the record's
        first: eight of each half of the block."""
        return [ptx.lds128(rows + (offset + i * 8 * self.record_stride + 64 * h)) for i in range(2) for h in range(2)]

    def fill_wide(self, loaded: list[Any], filled: Any) -> None:
        """What `wide_rows` loaded as fragments of four products: word w of half h belongs to product 2 h + w // 2."""
        for i in range(2):
            for h in range(2):
                for w in range(4):
                    filled[4 * (2 * h + w // 2) + i + 2 * (w % 2)] = loaded[2 * i + h][w]

    def latent_columns(self, places: list[Any], granule: int, part: int) -> list[Any]:
        """Four values of each of a thread's four records of a granule, in the order of its fragments' columns: one word
        of e4m3, two of bf16.

        Args:
            places: see `record_places`.
            granule: granule of the block.
            part: group of 128 columns.
        """
        at = granule * self.depth * self.granule_bytes + part * (256 if self.wide else 128)
        return [(ptx.lds_v2u32 if self.wide else ptx.lds_u32)(p + at) for p in self.record_places(places)]

    def record_places(self, places: list[Any]) -> list[Any]:
        """Of a thread's four records: two places are given where their distance is not the same for all threads, and
        two more are eight records on."""
        step = self.record_stride
        if self.kind == "v4":
            return [places[0], places[1], places[0] + 8 * step, places[1] + 8 * step]
        return [places[0] + i * 4 * step for i in range(4)]

    def tail_columns(self, places: list[Any], granule: int) -> list[Any]:
        """The same of V4's last group of columns, two words each: e4m3 in the first, or rotary columns in both.

        Args:
            places: see `record_places`.
            granule: granule of the block.
        """
        at = granule * self.depth * self.granule_bytes
        return [[ptx.lds_u32(p + at), ptx.lds_u32(p + (at + 4))] for p in self.record_places(places)]

    def transpose(self, words: list[Any], ratio: list[Any], pair: int, filled: Any) -> None:
        """Two of the four values of four records each to a fragment of V^T in f16, or in bf16.

        `ratio`: empty, or first the scales of the first two and of the last two records.
        """
        for half in range(2):
            if self.wide:
                for i in range(2):
                    a, b = words[2 * half][pair], words[2 * half + 1][pair]
                    filled[2 * half + i] = ptx.interleave_halves(a, b, i)
                continue
            values = ptx.e4m3x4_to_f16x4(ptx.interleave(words[2 * half], words[2 * half + 1], pair))
            for i in range(2):
                filled[2 * half + i] = ptx.mul_f16x2(values[i], ratio[0][half]) if ratio else values[i]

    def transpose_tail(self, words: list[Any], ratio: Any, pair: int, rotary: Any, filled: Any) -> None:
        """`transpose` of what `tail_columns` loaded; `rotary`: whether this warp has rotary columns there."""
        for half in range(2):
            a, b = words[2 * half], words[2 * half + 1]
            narrow = ptx.e4m3x4_to_f16x4(ptx.interleave(a[0], b[0], pair))
            for i in range(2):
                wide = ptx.mul_bf16x2(ptx.interleave_halves(a[pair], b[pair], i), ratio[half])
                as_f16 = ptx.pack_f16x2(*(ptx.bf16_to_f32(wide, h) for h in range(2)))
                filled[2 * half + i] = ptx.select(rotary, as_f16, ptx.mul_f16x2(narrow[i], ratio[half]))

    def split_scale(self, s4: Any) -> tuple[Any, Any]:
        """Exponent of a record's largest scale (within what float32 can undo), and 2 to minus that exponent."""
        top = ptx.fmax(ptx.fmax(s4[0], s4[1]), ptx.fmax(s4[2], s4[3]))
        exponent = (ptx.f32_to_bits(top) // 8388608) - 127
        exponent = cutlass.min(cutlass.max(exponent, Int32(-100)), Int32(120))
        return exponent, ptx.bits_to_f32((Int32(127) - exponent) * 8388608)

    def steps(self, s4: Any, exponent: Any) -> list[Any]:
        """What S is multiplied with after each group, so that it becomes the sum of all groups' products times their
        scales: after group g scale g over scale g + 1, after the last one the last scale.

        A scale counts as at least 2^-90 of the record's largest, and as 2^-120 where that is 0.
        """
        floor = ptx.bits_to_f32((cutlass.max(exponent - 90, Int32(-120)) + 127) * 8388608)
        least = [ptx.fmax(s, floor) for s in s4]
        return [least[g] * ptx.rcp(least[g + 1]) for g in range(GROUPS - 1)] + [least[GROUPS - 1]]
