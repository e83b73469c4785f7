# SPDX-License-Identifier: Apache-2.0
"""The score warpgroups: S from raw records, softmax, P."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import BLOCK, GROUPS, LATENT, LOWEST, NEG_INF, ROPE, SLACK
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.query import Query
from sparsemla.kernels.hopper.records import Records


class Score(Records, Query):
    """Scoring."""

    @cute.jit
    def score(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """S^T of a block from the raw records, softmax, P. Two warpgroups take the blocks in turn, or one all of
        them."""
        lane = tid % 32
        me = warp // 4
        warp = warp % 4
        tid = tid % 128
        heads = self.heads
        tiles_n = heads // 8
        kinds = warpgroup.SmemLayoutAtomKind
        major = OperandMajorMode.K
        rmem = warpgroup.OperandSource.RMEM
        qk = cute.make_tiled_mma(
            cute.make_mma_atom(warpgroup.MmaF16BF16Op(Float16, Float32, (64, heads, 16), rmem, major, major)), (1, 1, 1)
        )
        rk = cute.make_tiled_mma(
            cute.make_mma_atom(warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, heads, 16), rmem, major, major)),
            (1, 1, 1),
        )
        qk_thread = qk.get_slice(tid)
        rk_thread = rk.get_slice(tid)
        s_q = self._smem(base + self.off_q, Float16, kinds.K_SW128, (heads, LATENT), (0, 1))
        b_q = qk_thread.make_fragment_B(qk_thread.partition_B(s_q))
        a_k = [qk_thread.make_fragment_A(qk_thread.partition_shape_A((BLOCK, 64))) for _ in range(self.sets)]
        a_words = [cute.recast_tensor(a, Uint32) for a in a_k]
        if cutlass.const_expr(self.rope):
            s_qr = self._smem(base + self.off_q_rope, BFloat16, kinds.K_SW128, (heads, ROPE), (0, 1))
            b_qr = rk_thread.make_fragment_B(rk_thread.partition_B(s_qr))
            a_r = rk_thread.make_fragment_A(rk_thread.partition_shape_A((BLOCK, ROPE)))
            r_words = cute.recast_tensor(a_r, Uint32)
        x = qk_thread.make_fragment_C(qk_thread.partition_shape_C((BLOCK, heads)))
        part = [
            qk_thread.make_fragment_C(qk_thread.partition_shape_C((BLOCK, heads))) for _ in range(self.accumulators)
        ]
        # Columns (heads) of this thread: 8 j + 2 (lane % 4) + c. Rows (records): 16 warp + lane // 4 + 8 i. Element 4
        # j + 2 i + c.
        total = cute.make_rmem_tensor((tiles_n, 2), Float32)
        mine = cute.make_rmem_tensor((tiles_n, 2), Float32)  # the maxima that this warpgroup's sums are relative to
        line = lane // 4
        quad = lane % 4
        column0 = quad * 2
        maxima = base + self.off_ml + (heads + column0) * 4
        before = Int32(0)  # blocks of earlier tiles
        turn = Int32(0)
        times = cute.make_rmem_tensor((9,), Int32)
        if cutlass.const_expr(self.trace):
            times.fill(0)
            times[8] = arch.clock()
        tile = first
        while tile < p.tiles:
            token = tile // p.head_tiles
            head0 = (tile - token * p.head_tiles) * heads
            length, extra, _ = self.lengths(p, token)
            blocks = self.my_blocks(length, extra, rank)
            for j in cutlass.range_constexpr(tiles_n):
                for c in cutlass.range_constexpr(2):
                    total[j, c] = Float32(0.0)
                    if cutlass.const_expr(self.scorers > 1):
                        mine[j, c] = Float32(LOWEST)
            if cutlass.const_expr(self.cluster == 1):
                m0 = ptx.opaque(tid)
                self.load_query(p, base, token, head0, me * 4 + m0 // 32, m0 % 32, 4 * self.scorers)
            else:  # one tile a CTA: the value warps have nothing else to do yet
                self.load_query(p, base, token, head0, 4 * self.valuers + me * 4 + warp, lane, 12)
                arch.mbarrier_wait(self._barrier(base, self.Q_FULL), 0)
            arch.fence_view_async_shared()
            arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            self.mark(times, 0)
            n = Int32(0)
            if cutlass.const_expr(self.scorers > 1):
                n = (me + before) % 2
            while n < blocks:
                count = before + n
                slot = warp * self.depth + count % self.depth
                place = base + self.off_ring + slot * self.granule_bytes
                arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, slot), (count // self.depth) % 2)
                self.mark(times, 1)
                record = self.record_of(line)
                rows = place + record * self.record_bytes + quad * 16
                mask = ptx.lds_i32(base + self.off_mask + slot * 4)
                scales = rows - quad * 16 + LATENT
                grow = []
                bias = []
                for i in cutlass.range_constexpr(2):
                    exponent, small = self.split_scale(ptx.lds_v4f32(scales + i * (8 * self.record_bytes)))
                    grow.append(small)
                    shift = Float32(exponent)
                    if ((mask >> (record + 8 * i)) & 1) == 0:
                        shift = Float32(NEG_INF)
                    bias.append(shift)
                # The rotary part goes straight into S.
                if cutlass.const_expr(self.rope):
                    for i in cutlass.range_constexpr(2):
                        for h in cutlass.range_constexpr(2):
                            words = ptx.lds128(rows + i * (8 * self.record_bytes) + LATENT + 16 + 64 * h)
                            for w in cutlass.range_constexpr(4):
                                r_words[4 * (2 * h + w // 2) + i + 2 * (w % 2)] = words[w]
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(4):
                        rk.set(warpgroup.Field.ACCUMULATE, k != 0)
                        at = (None, None, k)
                        cute.gemm(rk, x, a_r[at], b_qr[at], x)
                    warpgroup.commit_group()
                else:
                    x.fill(0.0)
                # Loads run ahead of conversions and products: shared memory is read in program order.
                ahead: list[Any] = []
                for b in cutlass.range_constexpr(self.lead):
                    ahead = ahead + self.latent_rows(rows, b)
                for b in cutlass.range_constexpr(2 * GROUPS):
                    now = ahead
                    if cutlass.const_expr(b + self.lead < 2 * GROUPS):
                        ahead = now[2:] + self.latent_rows(rows, b + self.lead)
                    else:
                        ahead = now[2:]
                    if cutlass.const_expr(b >= self.sets):
                        warpgroup.wait_group(self.sets - 1)  # this set is free again
                    filled = a_words[b % self.sets]
                    for i in cutlass.range_constexpr(2):
                        for w in cutlass.range_constexpr(4):
                            pair = ptx.e4m3x4_to_f16x4(now[i][w])
                            filled[4 * w + i] = pair[0]
                            filled[4 * w + i + 2] = pair[1]
                    if cutlass.const_expr(b % 2 == 0 and b // 2 >= self.accumulators):
                        warpgroup.wait_group(2 * (self.accumulators - 1))
                        self.fold(x, part[(b // 2) % self.accumulators], scales, b // 2 - self.accumulators)
                    into = part[(b // 2) % self.accumulators]
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(4):
                        qk.set(warpgroup.Field.ACCUMULATE, (b % 2 == 1) or (k != 0))
                        cute.gemm(qk, into, a_k[b % self.sets][None, None, k], b_q[None, None, 4 * b + k], into)
                    warpgroup.commit_group()
                warpgroup.wait_group(0)
                for g in cutlass.range_constexpr(GROUPS - self.accumulators, GROUPS):
                    self.fold(x, part[g % self.accumulators], scales, g)
                arch.sync_warp()
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.RAW_EMPTY, slot))
                self.mark(times, 2)
                if cutlass.const_expr(self.scorers > 1):  # the block before this one has left its maxima and its P
                    arch.mbarrier_wait(self._barrier(base, self.TURN), (count + 1) % 2)
                # x becomes the distance from the running maximum. A masked record's bytes arrived as zeros; its bias
                # is -inf.
                highest = Float32(NEG_INF)
                for j in cutlass.range_constexpr(tiles_n):
                    factor = ptx.lds_v2f32(base + self.off_q_factor + (8 * j + column0) * 4)
                    largest = ptx.lds_v2f32(maxima + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        known = largest[c]
                        if n == 0:
                            known = Float32(0.0)
                        if cutlass.const_expr(self.scorers > 1):
                            total[j, c] = total[j, c] * ptx.exp2(mine[j, c] - known)
                            mine[j, c] = known
                        for i in cutlass.range_constexpr(2):
                            e = 4 * j + 2 * i + c
                            x[e] = (x[e] * factor[c] + bias[i]) - known
                            highest = ptx.fmax(highest, x[e])
                over = Int32(highest > SLACK)
                if n == 0:
                    over = Int32(1)
                flag = ptx.barrier_or(1 + me, 128, over)
                if flag != 0:
                    x_new = cute.make_rmem_tensor((2 * tiles_n,), Float32)
                    m1 = ptx.opaque(tid)
                    reduce_here = base + self.off_reduce + 8 * (m1 % 4)
                    maxima_here = base + self.off_ml + (heads + 2 * (m1 % 4)) * 4
                    # Rare: move the maxima. The room for reductions and factors must be free first.
                    arch.mbarrier_wait(self._barrier(base, self.P_EMPTY), (count + 1) % 2)
                    arch.mbarrier_wait(self._barrier(base, self.ML_EMPTY), (turn + 1) % 2)
                    for j in cutlass.range_constexpr(tiles_n):
                        peak = []
                        for c in cutlass.range_constexpr(2):
                            m = ptx.fmax(x[4 * j + c], x[4 * j + 2 + c])
                            for s in cutlass.range_constexpr(3):
                                m = ptx.fmax(m, arch.shuffle_sync_bfly(m, 4 << s))
                            peak.append(m)
                        if m1 % 32 < 4:
                            ptx.sts_v2f32(reduce_here + (m1 // 32 * heads + 8 * j) * 4, peak[0], peak[1])
                    arch.barrier(barrier_id=1 + me, number_of_threads=128)
                    for j in cutlass.range_constexpr(tiles_n):
                        largest = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                        # How far each maximum moves: at least 0, except from the nothing before the first block.
                        move = [Float32(0.0), Float32(0.0)]
                        if n == 0:
                            move = [Float32(LOWEST), Float32(LOWEST)]
                        for w in cutlass.range_constexpr(4):
                            got = ptx.lds_v2f32(reduce_here + (w * heads + 8 * j) * 4)
                            for c in cutlass.range_constexpr(2):
                                move[c] = ptx.fmax(move[c], got[c])
                        decay = []
                        for c in cutlass.range_constexpr(2):
                            shrink = ptx.exp2(-move[c])
                            known = largest[c]
                            if n == 0:
                                shrink = Float32(0.0)
                                known = Float32(0.0)
                            decay.append(shrink)
                            total[j, c] = total[j, c] * shrink
                            x_new[2 * j + c] = known + move[c]
                            if cutlass.const_expr(self.scorers > 1):
                                mine[j, c] = known + move[c]
                            for i in cutlass.range_constexpr(2):
                                x[4 * j + 2 * i + c] = x[4 * j + 2 * i + c] - move[c]
                        if m1 < 4:
                            ptx.sts_v2f32(base + self.off_ml + (8 * j + 2 * (m1 % 4)) * 4, decay[0], decay[1])
                    # All have read the old maxima before the new ones replace them, and see them after.
                    arch.barrier(barrier_id=1 + me, number_of_threads=128)
                    if m1 < 4:
                        for j in cutlass.range_constexpr(tiles_n):
                            ptx.sts_v2f32(maxima_here + 8 * j * 4, x_new[2 * j], x_new[2 * j + 1])
                    arch.barrier(barrier_id=1 + me, number_of_threads=128)
                for j in cutlass.range_constexpr(tiles_n):
                    for c in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            e = 4 * j + 2 * i + c
                            x[e] = ptx.exp2(x[e])
                            total[j, c] = total[j, c] + x[e] * grow[i]
                self.mark(times, 3)
                arch.mbarrier_wait(self._barrier(base, self.P_EMPTY), (count + 1) % 2)
                self.mark(times, 4)
                # P, transposed: row = head, 64 records contiguous.
                m2 = ptx.opaque(tid)
                for j in cutlass.range_constexpr((tiles_n + 1) // 2):
                    pairs = []
                    for jj in cutlass.range_constexpr(min(2, tiles_n)):
                        for i in cutlass.range_constexpr(2):
                            e = 4 * (2 * j + jj) + 2 * i
                            pairs.append(ptx.pack_f16x2(x[e], x[e + 1]))
                    row = (2 * j + (m2 // 16) % min(2, tiles_n)) * 8 + m2 % 8
                    piece = m2 // 32 * 2 + (m2 // 8) % 2
                    target = base + self.off_p + row * 128 + ((piece ^ (row % 8)) * 16)
                    if cutlass.const_expr(tiles_n > 1):
                        ptx.stmatrix_x4_trans(target, *pairs)
                    else:
                        ptx.stmatrix_x2_trans(target, *pairs)
                if (warp == 0) & (lane == 0):
                    ptx.sts_i32(base + self.off_flag, flag)
                arch.fence_view_async_shared()
                arch.sync_warp()
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.STAGE_FULL))
                    if cutlass.const_expr(self.scorers > 1):
                        arch.mbarrier_arrive(self._barrier(base, self.TURN))
                self.mark(times, 5)
                n = n + self.scorers
            before = before + blocks
            # Sums over all records, then maxima and sums to the value warpgroups.
            if cutlass.const_expr(self.scorers > 1):  # from here on the last block's P has been written
                arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            arch.mbarrier_wait(self._barrier(base, self.P_EMPTY), (before + 1) % 2)
            arch.mbarrier_wait(self._barrier(base, self.ML_EMPTY), (turn + 1) % 2)
            m3 = ptx.opaque(tid)
            reduce_here = base + self.off_reduce + 8 * (m3 % 4)
            maxima_here = base + self.off_ml + (heads + 2 * (m3 % 4)) * 4
            for j in cutlass.range_constexpr(tiles_n):
                if cutlass.const_expr(self.scorers > 1):
                    largest = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        known = largest[c]
                        if blocks == 0:
                            known = Float32(0.0)
                        total[j, c] = total[j, c] * ptx.exp2(mine[j, c] - known)
                for c in cutlass.range_constexpr(2):
                    for s in cutlass.range_constexpr(3):
                        total[j, c] = total[j, c] + arch.shuffle_sync_bfly(total[j, c], 4 << s)
                if m3 % 32 < 4:
                    ptx.sts_v2f32(reduce_here + ((me * 4 + m3 // 32) * heads + 8 * j) * 4, total[j, 0], total[j, 1])
            arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            if (me == 0) & (m3 < 4):
                highs = cute.make_rmem_tensor((2 * tiles_n,), Float32)
                for j in cutlass.range_constexpr(tiles_n):
                    final = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        highs[2 * j + c] = final[c]
                        if blocks == 0:
                            highs[2 * j + c] = Float32(LOWEST)
                arch.sync_warp(15)
                for j in cutlass.range_constexpr(tiles_n):
                    sums = [Float32(0.0), Float32(0.0)]
                    for w in cutlass.range_constexpr(4 * self.scorers):
                        got = ptx.lds_v2f32(reduce_here + (w * heads + 8 * j) * 4)
                        for c in cutlass.range_constexpr(2):
                            sums[c] = sums[c] + got[c]
                    for c in cutlass.range_constexpr(2):
                        ptx.sts_v2f32(base + self.off_ml + (8 * j + 2 * (m3 % 4) + c) * 8, highs[2 * j + c], sums[c])
            # Nobody writes P before all have read what was summed there.
            arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            if cutlass.const_expr(self.cluster == 1):
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.ML_FULL))
            self.mark(times, 6)
            turn = turn + 1
            tile = tile + step
        self.report(p, times, 4 * self.valuers + me * 4 + warp, lane)
        if cutlass.const_expr(self.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
            arch.cluster_arrive()
            arch.cluster_wait()

    @cute.jit
    def fold(self, x: cute.Tensor, part: cute.Tensor, scales: Int32, g: cutlass.Constexpr):
        """S += scale of group g times the product over that group's columns."""
        scale = [ptx.lds_f32(scales + g * 4), ptx.lds_f32(scales + 8 * self.record_bytes + g * 4)]
        for e in cutlass.range_constexpr(self.heads // 2):
            x[e] = x[e] + part[e] * scale[(e // 2) % 2]
