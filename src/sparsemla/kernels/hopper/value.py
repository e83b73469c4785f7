# SPDX-License-Identifier: Apache-2.0
"""The value warpgroups: output accumulation, and the end of a token: normalise, combine, write."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import BLOCK, LATENT, LOWEST, NEG_INF, O_STRIDE
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.query import Query
from sparsemla.kernels.hopper.records import Records


class Value(Records, Query):
    """Accumulating and writing the output."""

    @cute.jit
    def value(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """The output's columns, or half of them a warpgroup."""
        group = warp // 4
        in_group = tid % 128
        heads = self.heads
        tiles_n = heads // 8
        kinds = warpgroup.SmemLayoutAtomKind
        smem = warpgroup.OperandSource.SMEM
        s_v = self._smem(
            base + self.off_v + group * (self.columns * BLOCK * 2),
            Float16,
            kinds.MN_SW128,
            (self.columns, BLOCK),
            (1, 0),
        )
        s_p = self._smem(base + self.off_p, Float16, kinds.K_SW128, (heads, BLOCK), (0, 1))
        if cutlass.const_expr(self.heads_on_m):
            op = warpgroup.MmaF16BF16Op(Float16, Float32, (64, 128, 16), smem, OperandMajorMode.K, OperandMajorMode.MN)
        else:
            op = warpgroup.MmaF16BF16Op(
                Float16, Float32, (64, heads, 16), smem, OperandMajorMode.MN, OperandMajorMode.K
            )
        pv = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        thread = pv.get_slice(in_group)
        if cutlass.const_expr(self.heads_on_m):
            a = thread.make_fragment_A(thread.partition_A(s_p))
            b = thread.make_fragment_B(thread.partition_B(s_v))
            out = thread.make_fragment_C(thread.partition_shape_C((heads, self.columns)))
        else:
            a = thread.make_fragment_A(thread.partition_A(s_v))
            b = thread.make_fragment_B(thread.partition_B(s_p))
            out = thread.make_fragment_C(thread.partition_shape_C((self.columns, heads)))
        # This thread's heads: on M 16 quarter + lane // 4 + 8 i, on N 8 j + 2 (lane % 4) + c.
        own = 2 if self.heads_on_m else 2 * tiles_n
        factor = cute.make_rmem_tensor((own,), Float32)
        count = Int32(0)
        turn = Int32(0)
        times = cute.make_rmem_tensor((9,), Int32)
        if cutlass.const_expr(self.trace):
            times.fill(0)
            times[8] = arch.clock()
        tile = first
        while tile < p.tiles:
            # The accumulators leave few registers: what is needed after the blocks is computed again then, from
            # values the compiler
            # takes for new.
            before = ptx.opaque(tile) // p.head_tiles
            length, extra, _ = self.lengths(p, before)
            left = self.my_blocks(length, extra, rank)
            if cutlass.const_expr(self.cluster > 1):  # one tile a CTA: these warps have nothing else to do yet
                head0 = (tile - before * p.head_tiles) * heads
                self.load_query(p, base, before, head0, warp, tid % 32, 12)
                arch.fence_view_async_shared()
                arch.sync_warp()
                if tid % 32 == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.Q_FULL))
            had = left
            out.fill(0.0)
            self.mark(times, 0)
            while left > 0:
                if cutlass.const_expr(self.valuers == 1):
                    self.convert(base, warp, ptx.opaque(tid) % 32, count)
                arch.mbarrier_wait(self._barrier(base, self.STAGE_FULL), count % 2)
                count = count + 1
                self.mark(times, 1)
                if ptx.lds_i32(base + self.off_flag) != 0:
                    m4 = ptx.opaque(tid)
                    for s in cutlass.range_constexpr(own):
                        factor[s] = ptx.lds_f32(base + self.off_ml + self.own_head(s, (m4 // 32) % 4, m4 % 32) * 4)
                    for e in cutlass.range_constexpr(cute.size(out)):
                        out[e] = out[e] * factor[self.own_slot(e)]
                warpgroup.fence()
                pv.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(4):
                    at = (None, None, k)
                    cute.gemm(pv, out, a[at], b[at], out)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                left = left - 1
                arch.sync_warp()
                if ptx.opaque(tid) % 32 == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.P_EMPTY))
                    if left > 0:  # after the last block the output goes where the values were
                        arch.mbarrier_arrive(self._barrier(base, self.V_EMPTY))
                self.mark(times, 2)
            token = ptx.opaque(tile) // p.head_tiles
            head0 = (tile - token * p.head_tiles) * heads
            m5 = ptx.opaque(tid)
            if cutlass.const_expr(self.cluster > 1):
                # The other half may still be multiplying with what lies under the partial output.
                arch.barrier(barrier_id=3, number_of_threads=128 * self.valuers)
                for e in cutlass.range_constexpr(cute.size(out)):
                    head = self.own_head(self.own_slot(e), (m5 // 32) % 4, m5 % 32)
                    column = self.own_column(e, m5 // 128, (m5 // 32) % 4, m5 % 32)
                    ptx.sts_f32(base + self.off_partial + (head * O_STRIDE + column) * 4, out[e])
                self.mark(times, 3)
                arch.cluster_arrive()
                arch.cluster_wait()
                self.mark(times, 4)
                self.combine(p, base, m5, rank, token, head0)
                self.mark(times, 5)
                arch.cluster_arrive()
                arch.cluster_wait()
            else:
                arch.mbarrier_wait(self._barrier(base, self.ML_FULL), turn % 2)
                self.finish(p, base, m5, m5 // 128, (m5 // 32) % 4, m5 % 32, token, head0, out, factor)
                arch.sync_warp()
                if m5 % 32 == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.ML_EMPTY))
                    if had > 0:
                        arch.mbarrier_arrive(self._barrier(base, self.V_EMPTY))
            self.mark(times, 6)
            turn = turn + 1
            tile = tile + step
        self.report(p, times, warp, tid % 32)

    @cute.jit
    def own_head(self, slot: cutlass.Constexpr, quarter: Int32, lane: Int32):
        """Row of the query tile that slot `slot` of this thread's heads is."""
        if cutlass.const_expr(self.heads_on_m):
            return 16 * quarter + lane // 4 + 8 * slot
        return 8 * (slot // 2) + 2 * (lane % 4) + slot % 2

    def own_slot(self, e: int) -> int:
        """Which of this thread's heads element e of the output fragment belongs to."""
        if self.heads_on_m:
            return (e // 2) % 2
        return 2 * ((e // 4) % (self.heads // 8)) + e % 2

    @cute.jit
    def own_column(self, e: cutlass.Constexpr, group: Int32, quarter: Int32, lane: Int32):
        """Output column of element e of the output fragment."""
        if cutlass.const_expr(self.heads_on_m):
            return self.columns * group + 8 * (e // 4) + 2 * (lane % 4) + e % 2
        tile = e // (self.heads // 2)
        return self.columns * group + 64 * tile + 16 * quarter + lane // 4 + 8 * ((e // 2) % 2)

    @cute.jit
    def normaliser(self, p: Params, largest: Float32, total: Float32, head: Int32):
        """What the accumulated output is multiplied with: 0 without keys, the attention sink included."""
        divisor = total
        if (p.sink != 0) & (head < p.heads):
            sink = ptx.ldg_f32(p.sink + Int64(head) * 4)
            divisor = total + ptx.exp2(sink * 1.4426950408889634 - largest)
        inverse = Float32(0.0)
        if total > 0.0:
            inverse = 1.0 / divisor
        if total != total:
            inverse = total
        return inverse

    @cute.jit
    def write_lse(self, p: Params, token: Int32, head: Int32, largest: Float32, total: Float32):
        """The row's natural logarithm of the sum of exponentials; -inf without keys."""
        natural = (largest + ptx.log2(total)) * 0.6931471805599453
        if total == 0.0:
            natural = Float32(NEG_INF)
        ptx.stg_f32(p.lse + Int64(token) * p.lse_token + Int64(head) * p.lse_head, natural)

    @cute.jit
    def finish(
        self,
        p: Params,
        base: Int32,
        tid: Int32,
        group: Int32,
        quarter: Int32,
        lane: Int32,
        token: Int32,
        head0: Int32,
        out: cute.Tensor,
        factor: cute.Tensor,
    ):
        """Normalises and writes the output from registers: a token that was not cut."""
        own = 2 if self.heads_on_m else self.heads // 4
        for s in cutlass.range_constexpr(own):
            row = self.own_head(s, quarter, lane)
            ml = ptx.lds_v2f32(base + self.off_ml + row * 8)
            factor[s] = self.normaliser(p, ml[0], ml[1], head0 + row)
        if tid < self.heads:
            ml = ptx.lds_v2f32(base + self.off_ml + tid * 8)
            if head0 + tid < p.heads:
                self.write_lse(p, token, head0 + tid, ml[0], ml[1])
        # Through shared memory, over this half's own values, so that whole rows of 512 bytes are written.
        rows = base + self.off_v + group * (self.columns * BLOCK * 2)
        for t in cutlass.range_constexpr(cute.size(out) // 8 if self.heads > 8 else cute.size(out) // 4):
            words = []
            if cutlass.const_expr(self.heads_on_m):
                # Matrices: 8 heads x 8 columns; rows 8 i, columns 16 t + 8 (0 or 1).
                for jj in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        e = 8 * t + 4 * jj + 2 * i
                        words.append(ptx.pack_bf16x2(out[e] * factor[i], out[e + 1] * factor[i]))
                row = 16 * quarter + 8 * ((lane // 8) % 2) + lane % 8
                piece = 2 * t + lane // 16
                ptx.stmatrix_x4(
                    rows + row * (self.columns * 2) + ((piece ^ (row % 8)) * 16), words[0], words[1], words[2], words[3]
                )
            else:
                # Matrices: 8 columns x 8 heads, transposed; columns 8 i, heads 8 (0 or 1) of the pair of head tiles.
                wide = min(2, self.heads // 8)
                tile = (4 * wide * t) // (self.heads // 2)
                j0 = (wide * t) % (self.heads // 8)
                for jj in cutlass.range_constexpr(wide):
                    for i in cutlass.range_constexpr(2):
                        e = tile * (self.heads // 2) + 4 * (j0 + jj) + 2 * i
                        f = 2 * (j0 + jj)
                        words.append(ptx.pack_bf16x2(out[e] * factor[f], out[e + 1] * factor[f + 1]))
                row = 8 * (j0 + (lane // 16) % wide) + lane % 8
                piece = 8 * tile + 2 * quarter + (lane // 8) % 2
                target = rows + row * (self.columns * 2) + ((piece ^ (row % 8)) * 16)
                if cutlass.const_expr(wide == 2):
                    ptx.stmatrix_x4_trans(target, words[0], words[1], words[2], words[3])
                else:
                    ptx.stmatrix_x2_trans(target, words[0], words[1])
        arch.barrier(barrier_id=4 + group, number_of_threads=128)
        pieces = self.columns // 8
        for r in cutlass.range_constexpr(self.heads * pieces // 128):
            item = 128 * r + tid % 128
            row = item // pieces
            piece = item % pieces
            head = head0 + row
            line = ptx.lds128(rows + row * (self.columns * 2) + ((piece ^ (row % 8)) * 16))
            address = p.out + Int64(token) * p.out_token + Int64(head) * p.out_head
            ptx.stg128(address + Int64(self.columns * group + 8 * piece) * 2, line, Int32(head < p.heads))

    @cute.jit
    def combine(self, p: Params, base: Int32, tid: Int32, rank: Int32, token: Int32, head0: Int32):
        """Every CTA of the cluster writes its slice of the output: 512 / cluster columns of all heads of the tile."""
        # First the weight of every CTA for every head, over P, which nobody needs any more.
        if tid < self.heads:
            marks = []
            for r in cutlass.range_constexpr(self.cluster):
                marks.append(ptx.lds_cluster_v2f32(ptx.mapa(base + self.off_ml + tid * 8, Int32(r))))
            top = Float32(LOWEST)
            for r in cutlass.range_constexpr(self.cluster):
                top = ptx.fmax(top, marks[r][0])
            weights = []
            total = Float32(0.0)
            for r in cutlass.range_constexpr(self.cluster):
                w = ptx.exp2(marks[r][0] - top)
                weights.append(w)
                total = total + w * marks[r][1]
            inverse = self.normaliser(p, top, total, head0 + tid)
            for r in cutlass.range_constexpr(self.cluster):
                ptx.sts_f32(base + self.off_p + (r * self.heads + tid) * 4, weights[r] * inverse)
            if (rank == 0) & (head0 + tid < p.heads):
                self.write_lse(p, token, head0 + tid, top, total)
        arch.barrier(barrier_id=3, number_of_threads=128 * self.valuers)
        quads = LATENT // 4 // self.cluster
        item = tid
        while item < self.heads * quads:
            row = item // quads
            column = (rank * quads + item - row * quads) * 4
            parts = []
            for r in cutlass.range_constexpr(self.cluster):
                parts.append(
                    ptx.lds_cluster_v4f32(ptx.mapa(base + self.off_partial + (row * O_STRIDE + column) * 4, Int32(r)))
                )
            sums = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
            for r in cutlass.range_constexpr(self.cluster):
                w = ptx.lds_f32(base + self.off_p + (r * self.heads + row) * 4)
                for c in cutlass.range_constexpr(4):
                    sums[c] = sums[c] + w * parts[r][c]
            if head0 + row < p.heads:
                address = p.out + Int64(token) * p.out_token + Int64(head0 + row) * p.out_head + Int64(column) * 2
                ptx.stg64(address, ptx.pack_bf16x2(sums[0], sums[1]), ptx.pack_bf16x2(sums[2], sums[3]))
            item = item + 128 * self.valuers
