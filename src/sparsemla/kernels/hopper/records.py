# SPDX-License-Identifier: Apache-2.0
"""The raw records in the ring: which thread reads what, and their conversion into the value stage."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import BLOCK, GROUPS, LATENT, Layout


class Records(Layout):
    """Reading and converting records."""

    def latent_rows(self, rows: Any, b: int) -> list[Any]:
        """16 e4m3 values of each of a thread's two records in column block b: what its fragments of four products
        hold."""
        return [ptx.lds128(rows + b * 64), ptx.lds128(rows + b * 64 + 8 * self.record_bytes)]

    def record_of(self, line: Any) -> Any:
        """Record of a granule that row `line` (0 to 7) of a fragment is; row line + 8 is that record + 8.

        Neighbouring rows are records four apart: those lie 64 bytes apart modulo 128, so eight lanes that read two
        rows cover all banks.
        """
        return line // 2 + (line % 2) * 4

    def split_scale(self, s4: Any) -> tuple[Any, Any]:
        """Exponent of a record's largest scale (within what float32 can undo), and 2 to minus that exponent."""
        top = ptx.fmax(ptx.fmax(s4[0], s4[1]), ptx.fmax(s4[2], s4[3]))
        exponent = (ptx.f32_to_bits(top) // 8388608) - 127
        exponent = cutlass.min(cutlass.max(exponent, Int32(-100)), Int32(120))
        return exponent, ptx.bits_to_f32((Int32(127) - exponent) * 8388608)

    @cute.jit
    def convert(self, base: Int32, warp: Int32, lane: Int32, count: Int32):
        """The 16 records of a warp's granule number `count`, scaled, to the value stage."""
        lane = ptx.opaque(lane)
        line = lane // 4
        quad = lane % 4
        slot = warp * self.depth + count % self.depth
        place = base + self.off_ring + slot * self.granule_bytes
        rows = place + self.record_of(line) * self.record_bytes + quad * 16
        scales = rows - quad * 16 + LATENT
        target = base + self.off_v + (16 * warp + line) * 128
        first_piece = ((2 * quad) ^ line) * 16
        second_piece = ((2 * quad + 1) ^ line) * 16
        arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, slot), (count // self.depth) % 2)
        by = []
        for i in cutlass.range_constexpr(2):
            s4 = ptx.lds_v4f32(scales + i * (8 * self.record_bytes))
            grow = self.split_scale(s4)[1]
            for g in cutlass.range_constexpr(GROUPS):
                by.append(ptx.pack_f16x2(s4[g] * grow, s4[g] * grow))
        arch.mbarrier_wait(self._barrier(base, self.V_EMPTY), (count + 1) % 2)
        # Loads run ahead of the stores: shared memory is accessed in program order.
        lead = 1 if self.heads == 32 else 2
        ahead: list[Any] = []
        for b in cutlass.range_constexpr(lead):
            ahead = ahead + self.latent_rows(rows, b)
        for b in cutlass.range_constexpr(2 * GROUPS):
            now = ahead
            if cutlass.const_expr(b + lead < 2 * GROUPS):
                ahead = now[2:] + self.latent_rows(rows, b + lead)
            else:
                ahead = now[2:]
            for i in cutlass.range_constexpr(2):
                halves = []
                for w in cutlass.range_constexpr(4):
                    pair = ptx.e4m3x4_to_f16x4(now[i][w])
                    halves.append(ptx.mul_f16x2(pair[0], by[4 * i + b // 2]))
                    halves.append(ptx.mul_f16x2(pair[1], by[4 * i + b // 2]))
                to = target + i * (8 * 128) + b * (BLOCK * 128)
                ptx.sts128(to + first_piece, halves[0], halves[1], halves[2], halves[3])
                ptx.sts128(to + second_piece, halves[4], halves[5], halves[6], halves[7])
        arch.fence_view_async_shared()
        arch.sync_warp()
        if lane == 0:
            arch.mbarrier_arrive(self._barrier(base, self.RAW_EMPTY, slot))
            arch.mbarrier_arrive(self._barrier(base, self.STAGE_FULL))
