# SPDX-License-Identifier: Apache-2.0
"""The upright kernel's gather warpgroup: records into the order the matrix units read."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.gather import Gather
from sparsemla.kernels.hopper.layout import GRANULE
from sparsemla.kernels.hopper.upright_layout import TILE, UprightLayout


class UprightGather(UprightLayout, Gather):
    """Bringing records: 16 of a block a warp, first the left half of the columns of all, then the right one."""

    @cute.jit
    def deliver(self, base: Int32, slot: Int32, before: Int32, mine: Int64, scales: Int64, lane: Int32, cache: Int64):
        """Copies 16 records into their places as soon as each half of the buffer is free. `mine` is the address of
        record lane % 16, 0 for none: zeros arrive for it.

        The rotary columns come with the half that the warpgroup frees which reads P where they were.
        """
        lane = ptx.opaque(lane)
        buffer = slot >> 2
        valid = arch.vote_ballot_sync(mine != 0)
        source = mine
        if mine == 0:
            source = cache
        # Eight lanes copy 128 bytes of a record: lane group g those of records g, g + 4, g + 8 and g + 12.
        group, piece = lane >> 3, lane & 7
        place = base + self.keys(buffer) + ((slot & 3) * GRANULE + group) * 128
        targets = [place + (piece ^ (group + 4 * odd)) * 16 for odd in range(2)]
        starts, sizes = [], []
        for k in cutlass.range_constexpr(GRANULE // 4):
            starts.append(arch.shuffle_sync(source, group + 4 * k) + Int64(piece) * 16)
            sizes.append(((valid >> (group + 4 * k)) & 1) * 16)
        for half in cutlass.range_constexpr(2):
            full = self._barrier(base, self.K_FULL, buffer * 2 + half)
            arch.mbarrier_wait(self._barrier(base, self.K_EMPTY, buffer * 2 + half), (before + 1) & 1)
            if cutlass.const_expr(half == 0):
                if lane == 0:
                    ptx.sts_i32(base + self.off_mask + slot * 4, valid)
                    arch.mbarrier_arrive(full)
            for tile in cutlass.range_constexpr(4 * half, 4 * half + 4):
                for k in cutlass.range_constexpr(GRANULE // 4):
                    ptx.cp_async16_some(targets[k % 2] + (tile * TILE + k * 512), starts[k] + tile * 128, sizes[k])
            if cutlass.const_expr(self.rope):
                if buffer == 1 - half:
                    for k in cutlass.range_constexpr(GRANULE // 4):
                        ptx.cp_async16_some(targets[k % 2] + (8 * TILE + k * 512), starts[k] + 1024, sizes[k])
            arch.cp_async_mbarrier_arrive_noinc(full)
