# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over records of any cache format, for a tile of 8, 16, 32 or 64 heads. One CTA an SM, four or
five warpgroups, one job each. What follows is said of FP8_DS_MLA; the other kinds differ in what is scaled (below).

gather   brings records as they are into a ring in shared memory, 16 records a warp and turn.
score    (one warpgroup, or two in turn) reads them as matrix fragments (e4m3 to f16, exact) and multiplies them from
         registers with the query, S^T = K Q^T (64 records x heads): one accumulator, multiplied between groups of 128
         columns by the ratio of the record's float32 scales. Online softmax. Leaves P.
value    (two warpgroups, half of the output's columns each) read the same records as fragments of V^T and multiply
         them from registers with P, O^T = V^T P^T.

The ring is the only copy of a record: no operand is converted through shared memory, whose bandwidth is what is short.
The scales act on S in float32. For V they act in f16, relative to the power of two of the record's largest scale: on P,
which is kept once for each group of columns, or with 64 heads on V. That power of two goes into the softmax's exponent,
and so does the one that brings a query row into f16's range: nothing depends on the magnitude of scales or queries.

The running maximum of the softmax moves only where a block exceeds it by more than 2^6: then, rarely, the output is
rescaled. Everywhere else a block needs no reduction over records at all, only a vote.

V4 and V4.1: scales are powers of two, which K takes up in f16 exactly, so S needs no multiplication between groups;
V is scaled at every head count. BF16: both products are bf16 and nothing is scaled; P is a sum of two bf16 (64 heads:
`upright.py`).

A token can be cut over the CTAs of a cluster. They leave their partial outputs in their own shared memory and every
CTA combines a slice of the output from all of them through distributed shared memory: nothing is written to global
memory but the result.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.gather import Gather
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.score import Score
from sparsemla.kernels.hopper.value import Value


class SparseKernel(Gather, Score, Value):
    """The kernel of one variant: see `Layout` for its arguments."""

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
            for i in cutlass.range_constexpr(2):
                ptx.sts_i32(base + self.off_flag + i * 4, Int32(-1))
            for i in cutlass.range_constexpr(self.slots):
                arch.mbarrier_init(self._barrier(base, self.RAW_FULL, i), 33)
                arch.mbarrier_init(self._barrier(base, self.RAW_EMPTY, i), (1 + 4 * self.valuers) * each)
            for i in cutlass.range_constexpr(2):
                arch.mbarrier_init(self._barrier(base, self.P_FULL, i), 4 * each)
                arch.mbarrier_init(self._barrier(base, self.P_EMPTY, i), 4 * self.valuers * each)
            arch.mbarrier_init(self._barrier(base, self.Q_FULL), 4 * self.valuers * each)
            arch.mbarrier_init(self._barrier(base, self.ML_FULL), 4 * self.scorers * each)
            arch.mbarrier_init(self._barrier(base, self.ML_EMPTY), 4 * self.valuers * each)
            arch.mbarrier_init(self._barrier(base, self.TURN), 4 * each)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        if warp < 4 * self.valuers:
            self.set_registers(self.value_registers)
            self.value(p, base, tid, warp, rank, first, step)
        elif warp < self.loaders:
            self.set_registers(self.score_registers)
            self.score(p, base, tid - 128 * self.valuers, warp - 4 * self.valuers, rank, first, step)
        else:
            self.set_registers(self.gather_registers)
            self.gather(p, base, tid - 32 * self.loaders, warp - self.loaders, rank, first, step)
