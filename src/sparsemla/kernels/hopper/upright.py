# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention for 64 heads over bf16 records. One CTA an SM, three warpgroups.

`kernel.py` takes records as fragments of the transposed products, whose N is the number of heads. With 64 heads the
output's accumulators leave room for one warpgroup of scores, and it becomes the chain that everything waits for. bf16
records need no conversion, though: here the matrix units read them where the gather put them, in both products, with
the heads as M.

gather   (one warpgroup) brings blocks of 64 records into two buffers, swizzled, half of the columns at a time.
math     (two) S = Q K^T (64 heads x 64 records) of every other block, softmax, P; and O += P V over every block for
         half of the output's columns. While one's softmax runs, the matrix units have the other's products.

P is a bf16 like V. That alone is too coarse (an output 2.3e-3 from float64, of which its own rounding is 1.65e-3), so
half of a block's P has a second term: 2.0e-3. A warp has the same 16 heads in both warpgroups; the maxima, which move
as rarely as in `kernel.py`, are a matter between two warps.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.upright_gather import UprightGather
from sparsemla.kernels.hopper.upright_math import UprightMath


class UprightKernel(UprightGather, UprightMath):
    """The kernel of one variant: see `UprightLayout` for its arguments."""

    @cute.kernel
    def kernel(self, p: Params) -> None:
        tid = arch.thread_idx()[0]
        warp = arch.make_warp_uniform(arch.warp_idx())
        base = arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        rank = arch.block_idx()[0] & (self.cluster - 1)
        first = arch.block_idx()[0] >> self.cluster_log2
        step = arch.grid_dim()[0] >> self.cluster_log2
        each = 32 if self.checked else 1  # arrivals of a warp
        if tid == 0:
            for i in cutlass.range_constexpr(8):
                ptx.sts_i32(base + self.off_flag + i * 4, Int32(-1))
            for i in cutlass.range_constexpr(4):
                # All gather threads; with the left halves the four that leave the masks, too.
                arch.mbarrier_init(self._barrier(base, self.K_FULL, i), 128 if i % 2 else 132)
                arch.mbarrier_init(self._barrier(base, self.K_EMPTY, i), 4 * each)
                arch.mbarrier_init(self._barrier(base, self.TURN, i), each)
            for i in cutlass.range_constexpr(2):
                arch.mbarrier_init(self._barrier(base, self.P_FULL, i), 4 * each)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        if warp < 4:
            self.set_registers(self.math_registers)
            self.math(0, p, base, tid, warp, rank, first, step)
        elif warp < 8:
            self.set_registers(self.math_registers)
            self.math(1, p, base, tid - 128, warp - 4, rank, first, step)
        else:
            self.set_registers(self.gather_registers)
            self.gather(p, base, tid - 256, warp - 8, rank, first, step)
