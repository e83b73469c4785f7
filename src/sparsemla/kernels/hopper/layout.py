# SPDX-License-Identifier: Apache-2.0
"""Shape of one variant: what lies where in shared memory, who has how many registers, which barriers there are."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.params import Params

BLOCK = 64
"""Records a step: the M side of S^T."""
GRANULE = 16
"""Records of a step that one warp gathers and one warp scores."""
LATENT = 512
GROUPS = 4
ROPE = 64
O_STRIDE = LATENT + 4
"""Row stride, in float32, of a partial output in shared memory: spreads a warp's stores over all banks."""
SLACK = 6.0
"""How far (in powers of two) a score may exceed the running maximum before that moves: P stays below 2^6 in f16."""

NEG_INF = -float("inf")
LOWEST = -3.0e38
"""Running maximum before the first key: finite, so that no difference of two maxima is a NaN."""


class Layout:
    """Configuration and code of one variant.

    Args:
        heads: rows of the query tile: 8, 16, 32 or 64.
        rope: whether records carry 64 rotary columns (FP8_DS_MLA) or not (FP8_NOPE).
        cluster: CTAs that share a token, 1 to 16.
        trace: whether the first CTA reports the cycles of each phase.
    """

    threads = 512

    def __init__(self, *, heads: int, rope: bool, cluster: int, trace: bool = False) -> None:
        self.trace = trace
        self.heads = heads
        self.rope = rope
        self.cluster = cluster
        # Output with the heads on M (64 of them, P is the small operand) or on N (fewer: no padded rows are
        # multiplied).
        self.heads_on_m = heads == 64
        # Warpgroups a job. Scoring takes longest: two take the blocks in turn where the output's accumulators leave
        # the registers.
        self.valuers, self.scorers = (2, 1) if heads == 64 else (1, 2)
        self.columns = LATENT // self.valuers
        self.value_registers, self.score_registers, self.gather_registers = {
            8: (128, 160, 64),
            16: (128, 160, 64),
            32: (192, 136, 48),
            64: (160, 152, 40),
        }[heads]
        # Sets of fragments of K, 64 columns each: one is filled while others are multiplied. An accumulator a group
        # of 128 columns where
        # registers allow it.
        self.sets = 4 if heads < 32 else 2
        self.accumulators = {8: GROUPS, 16: GROUPS, 32: 2, 64: 1}[heads]
        self.lead = 2 if heads < 32 else 1
        offset = 0

        def take(size: int, align: int = 128) -> int:
            nonlocal offset
            start = (offset + align - 1) // align * align
            offset = start + size
            return start

        self.off_q = take(heads * LATENT * 2, 1024)
        self.off_q_rope = take(heads * ROPE * 2 if rope else 0, 1024)
        self.off_v = take(BLOCK * LATENT * 2, 1024)
        # Granules a warp has in the ring: as many as fit.
        self.depth = 3 if heads < 32 else 2
        # Records of a granule that the bulk copy engine brings: issuing them takes time that few heads do not leave.
        self.bulk = 4 if heads <= 16 else 8
        self.record_bytes = LATENT + 16 + (ROPE * 2 if rope else 0)
        self.granule_bytes = GRANULE * self.record_bytes
        self.off_ring = take(4 * self.depth * self.granule_bytes, 16)
        self.off_p = take(heads * BLOCK * 2, 1024)
        self.off_mask = take(4 * self.depth * 4, 16)
        self.off_q_factor = take(heads * 4, 16)
        self.off_flag = take(16, 16)
        self.off_barriers = take((8 * self.depth + 7) * 8, 8)
        # Maximum and sum of every head, for the value warpgroups. Until they are known its first half hands over the
        # rescaling factors and
        # its second half keeps the running maxima.
        self.off_ml = take(heads * 8, 16)
        # Reductions over the four score warps use the room of P while no P lies there.
        self.off_reduce = self.off_p
        self.off_partial = self.off_v  # over values and ring, when both are done with
        self.shared_bytes = offset
        # mbarriers: two for every granule of the ring, then one each.
        self.RAW_FULL, self.RAW_EMPTY = 0, 4 * self.depth
        (self.STAGE_FULL, self.P_EMPTY, self.V_EMPTY, self.Q_FULL, self.ML_FULL, self.ML_EMPTY, self.TURN) = range(
            8 * self.depth, 8 * self.depth + 7
        )

    def _barrier(self, base: Any, kind: int, index: Any = 0) -> Any:
        return cute.make_ptr(
            Int64, base + self.off_barriers + (kind + index) * 8, cute.AddressSpace.smem, assumed_align=8
        )

    def _smem(self, address: Any, dtype: Any, kind: Any, shape: tuple[int, int], order: tuple[int, int]) -> Any:
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=order)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)

    def set_registers(self, count: int) -> None:
        """Moves a warpgroup from the 128 registers a thread it starts with to its share."""
        if count > 128:
            arch.setmaxregister_increase(count)
        else:
            arch.setmaxregister_decrease(count)

    @cute.jit
    def mark(self, times: cute.Tensor, phase: cutlass.Constexpr):
        """Adds the cycles since the last mark to a phase."""
        if cutlass.const_expr(self.trace):
            now = arch.clock()
            times[phase] = times[phase] + (now - times[8])
            times[8] = now

    @cute.jit
    def report(self, p: Params, times: cute.Tensor, warp: Int32, lane: Int32):
        """Leaves the sums of CTA 0 in p.trace."""
        if cutlass.const_expr(self.trace):
            if (arch.block_idx()[0] == 0) & (lane == 0):
                for i in cutlass.range_constexpr(8):
                    ptx.stg_b32(p.trace + Int64(warp * 8 + i) * 4, times[i], Int32(1))

    @cute.jit
    def lengths(self, p: Params, token: Int32):
        """How many index columns of the two sets count for a token."""
        length = p.topk
        if p.topk_lengths != 0:
            given = ptx.ldg_i32(p.topk_lengths + Int64(token) * 4, Int32(1), 0)
            length = cutlass.min(cutlass.max(given, Int32(0)), p.topk)
        request = Int32(0)
        if p.block_table != 0:
            request = ptx.ldg_i32(p.request_ids + Int64(token) * 4, Int32(1), 0)
            if (request < 0) | (request >= p.num_requests):
                length = Int32(0)
                request = Int32(0)
        extra = p.extra_topk
        if p.extra_lengths != 0:
            given = ptx.ldg_i32(p.extra_lengths + Int64(token) * 4, Int32(1), 0)
            extra = cutlass.min(cutlass.max(given, Int32(0)), p.extra_topk)
        return length, extra, request

    @cute.jit
    def my_blocks(self, length: Int32, extra: Int32, rank: Int32):
        """Blocks of this CTA: every `cluster`-th of the first set's blocks followed by the extra set's."""
        blocks = (length + (BLOCK - 1)) // BLOCK + (extra + (BLOCK - 1)) // BLOCK
        return (blocks - rank + (self.cluster - 1)) // self.cluster
