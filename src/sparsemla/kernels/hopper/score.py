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
from sparsemla.kernels.hopper.layout import (
    BLOCK,
    GROUPS,
    LATENT,
    LOWEST,
    NEG_INF,
    RAISE,
    ROPE,
    SLACK,
)
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.products import Products
from sparsemla.kernels.hopper.query import Query


class Score(Products, Query):
    """Scoring."""

    @cute.jit
    def score(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """S^T of a block from the raw records, softmax, P. Two warpgroups take the blocks in turn, or one all of
        them."""
        lane = tid & 31
        me = warp >> 2
        warp = warp & 3
        tid = tid & 127
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
        main, kind = (rk_thread, BFloat16) if self.wide else (qk_thread, Float16)
        s_q = self._smem(base + self.off_q, kind, kinds.K_SW128, (heads, LATENT), (0, 1))
        b_q = main.make_fragment_B(main.partition_B(s_q))
        a_k = [main.make_fragment_A(main.partition_shape_A((BLOCK, 64))) for _ in range(self.sets)]
        a_words = [cute.recast_tensor(a, Uint32) for a in a_k]
        rotary_b: list[Any] = []
        if cutlass.const_expr(self.rope):
            s_qr = self._smem(base + self.off_q_rope, BFloat16, kinds.K_SW128, (heads, ROPE), (0, 1))
            b_qr = rk_thread.make_fragment_B(rk_thread.partition_B(s_qr))
            rotary_b = [b_qr[None, None, k] for k in range(4)]
            if cutlass.const_expr(not self.wide):
                a_r = rk_thread.make_fragment_A(rk_thread.partition_shape_A((BLOCK, ROPE)))
                r_words = cute.recast_tensor(a_r, Uint32)
        x = qk_thread.make_fragment_C(qk_thread.partition_shape_C((BLOCK, heads)))
        # Columns (heads) of this thread: 8 j + 2 (lane % 4) + c. Rows (records): 16 warp + lane // 4 + 8 i. Element 4
        # j + 2 i + c.
        total = cute.make_rmem_tensor((tiles_n, 2), Float32)
        mine = cute.make_rmem_tensor((tiles_n, 2), Float32)  # the maxima that this warpgroup's sums are relative to
        line = lane >> 2
        quad = lane & 3
        column0 = quad * 2
        maxima = base + self.off_max + column0 * 4
        # Where this thread leaves its two records' scales (of group `quad`, relative to the record's exponent) for the
        # value warps: by the group, then by the lane that reads them, then in its order.
        ratio_place = base + self.off_ratio + (quad * 4 + (line >> 1)) * (BLOCK // 2) + 8 * warp + (line & 1) * 2
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
            seen = Int32(-1)  # the block whose maxima this warpgroup's sums are relative to
            if (me == 0) & (tid < heads):  # what the first block is relative to until its own maxima are known
                ptx.sts_f32(base + self.off_max + tid * 4, Float32(0.0))
                if tid == 0:
                    ptx.sts_i32(base + self.off_flag + 12, Int32(0))
            if cutlass.const_expr(self.cluster == 1):
                m0 = ptx.opaque(tid)
                self.load_query(p, base, token, head0, me * 4 + (m0 >> 5), m0 & 31, 4 * self.scorers)
            else:  # one tile a CTA: the value warps have nothing else to do yet
                self.load_query(p, base, token, head0, 4 * self.valuers + me * 4 + warp, lane, self.loaders)
                arch.mbarrier_wait(self._barrier(base, self.Q_FULL), 0)
            arch.fence_view_async_shared()
            arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            self.mark(times, 0)
            n = Int32(0)
            if cutlass.const_expr(self.scorers > 1):
                n = (me + before) & 1
            while n < blocks:
                count = before + n
                slot, filled = self.place_in_ring(count, warp)
                rows = base + self.off_ring + slot * self.granule_bytes + self.own_rows(lane)
                scales = rows - quad * 16 + (self.record_bytes if self.fine else LATENT)
                arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, slot), filled)
                self.mark(times, 1)
                mask = ptx.lds_i32(base + self.off_mask + slot * 4)
                # For a thread's two records: 2 to minus the exponent of the largest scale, and that exponent as a bias
                # of the score, -inf for "no key".
                grow: list[Any] = []
                bias: list[Any] = []
                if cutlass.const_expr(self.wide or self.fine):
                    queries = [
                        b_q[None, None, k] for k in range(4 * (8 if self.wide else self.narrow_blocks))
                    ] + rotary_b
                    exponents = [Int32(127), Int32(127)]
                    if cutlass.const_expr(self.wide):
                        self.multiply_wide(rows, rk, x, a_k, a_words, queries)
                    else:
                        exponents = self.multiply_fine(rows, scales, quad, qk, rk, x, a_k, a_words, queries)
                        for i in cutlass.range_constexpr(2):
                            grow.append(ptx.bits_to_f32((Int32(254) - exponents[i]) * 8388608))
                    for i in cutlass.range_constexpr(2):
                        shift = Float32(exponents[i] - 127)
                        if ((mask >> (self.record_of(line) + 8 * i)) & 1) == 0:
                            shift = Float32(NEG_INF)
                        bias.append(shift)
                else:
                    # S is a sum over groups of 128 columns, each times its record's scale, kept in one accumulator
                    # that is multiplied between groups. Loads run ahead of conversions, those ahead of products.
                    both = [ptx.lds_v4f32(scales + i * (8 * self.record_bytes)) for i in range(2)]
                    steps: list[Any] = []
                    loaded = [self.latent_rows(rows, 0)]
                    for piece in cutlass.range_constexpr(4 * 2 * GROUPS // self.piece):
                        for k in cutlass.range_constexpr(self.piece * piece, self.piece * (piece + 1)):
                            block = k // 4
                            if cutlass.const_expr(k % 4 == 0 and block + 1 < 2 * GROUPS):
                                loaded.append(self.latent_rows(rows, block + 1))
                            self.to_fragment(loaded[block], k % 4, a_words[block % self.sets])
                        if cutlass.const_expr(piece == 1):  # while the first products run
                            for i in cutlass.range_constexpr(2):
                                exponent, small = self.split_scale(both[i])
                                grow.append(small)
                                steps.append(self.steps(both[i], exponent))
                                shift = Float32(exponent)
                                if ((mask >> (self.record_of(line) + 8 * i)) & 1) == 0:
                                    shift = Float32(NEG_INF)
                                bias.append(shift)
                        if cutlass.const_expr(piece > 0 and self.piece * piece % 8 == 0):
                            warpgroup.wait_group(0)
                            self.rescale(x, steps, self.piece * piece // 8 - 1)
                        warpgroup.fence()
                        for k in cutlass.range_constexpr(self.piece * piece, self.piece * (piece + 1)):
                            qk.set(warpgroup.Field.ACCUMULATE, k > 0)
                            fragment = a_k[k // 4 % self.sets]
                            cute.gemm(qk, x, fragment[None, None, k % 4], b_q[None, None, k], x)
                        warpgroup.commit_group()
                    if cutlass.const_expr(self.rope):
                        self.fill_wide(self.wide_rows(rows, LATENT + 16), r_words)
                    warpgroup.wait_group(0)
                    self.rescale(x, steps, GROUPS - 1)
                    if cutlass.const_expr(self.rope):
                        warpgroup.fence()
                        rk.set(warpgroup.Field.ACCUMULATE, True)
                        for k in cutlass.range_constexpr(4):
                            at = (None, None, k)
                            cute.gemm(rk, x, a_r[at], rotary_b[k], x)
                        warpgroup.commit_group()
                if cutlass.const_expr(self.scorers == 1):
                    factors, largest = self.before_softmax(base, maxima, column0)
                if cutlass.const_expr(self.rope and self.kind == "sparse"):
                    warpgroup.wait_group(0)
                # The records' scales relative to their exponents, for V.
                ratio = []
                if cutlass.const_expr(self.fine):
                    ratio = self.fine_ratios(scales, quad, exponents)
                elif cutlass.const_expr(self.scaled_values):
                    places = [scales + quad * 4, scales + quad * 4 + 8 * self.record_bytes]
                    ratio.append(ptx.pack_f16x2(ptx.lds_f32(places[0]) * grow[0], ptx.lds_f32(places[1]) * grow[1]))
                elif cutlass.const_expr(not self.wide):
                    for i in cutlass.range_constexpr(2):
                        s4 = ptx.lds_v4f32(scales + i * (8 * self.record_bytes))
                        ratio.append([s4[g] * (grow[i] * RAISE) for g in range(GROUPS)])
                self.signal(base, self.RAW_EMPTY, slot, lane)
                self.mark(times, 2)
                if cutlass.const_expr(self.scorers > 1):  # the block before this one has left its maxima
                    arch.mbarrier_wait(self._barrier(base, self.TURN), (count + 1) & 1)
                    factors, largest = self.before_softmax(base, maxima, column0)
                    moved = ptx.lds_i32(base + self.off_flag + 8)
                    if moved != seen:
                        for j in cutlass.range_constexpr(tiles_n):
                            for c in cutlass.range_constexpr(2):
                                total[j, c] = total[j, c] * ptx.exp2(mine[j, c] - largest[j][c])
                                mine[j, c] = largest[j][c]
                        seen = moved
                # Whether no block had a key so far: its maxima are the first then, whatever they are.
                keyless = Int32(ptx.lds_i32(base + self.off_flag + 12) == 0)
                # x becomes the distance from the running maximum. A masked record's bytes arrived as zeros; its bias
                # is -inf.
                highest = Float32(NEG_INF)
                for j in cutlass.range_constexpr(tiles_n):
                    for c in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            e = 4 * j + 2 * i + c
                            x[e] = x[e] * factors[j][c] + (bias[i] - largest[j][c])
                            highest = ptx.fmax(highest, x[e])
                flag = ptx.barrier_or(1 + me, 128, Int32(highest > SLACK) | keyless)
                if flag != 0:
                    m1 = ptx.opaque(tid)
                    reduce_here = base + self.off_reduce + 8 * (m1 & 3)
                    maxima_here = base + self.off_max + 8 * (m1 & 3)
                    # Rare: move the maxima. The room for this block's factors must be free first.
                    arch.mbarrier_wait(self._barrier(base, self.P_EMPTY, (count & 1)), ((count >> 1) + 1) & 1)
                    for j in cutlass.range_constexpr(tiles_n):
                        peak = []
                        for c in cutlass.range_constexpr(2):
                            m = ptx.fmax(x[4 * j + c], x[4 * j + 2 + c])
                            for s in cutlass.range_constexpr(3):
                                m = ptx.fmax(m, arch.shuffle_sync_bfly(m, 4 << s))
                            peak.append(m)
                        if (m1 & 31) < 4:
                            ptx.sts_v2f32(reduce_here + ((m1 >> 5) * heads + 8 * j) * 4, peak[0], peak[1])
                    # Whether the block has a key: its records say so, not a head's maximum, where a NaN does not show.
                    some = ptx.barrier_or(1 + me, 128, Int32(ptx.fmax(bias[0], bias[1]) > NEG_INF))
                    if (m1 == 0) & (some != 0):
                        ptx.sts_i32(base + self.off_flag + 12, Int32(1))
                    for j in cutlass.range_constexpr(tiles_n):
                        old = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                        # How far each maximum moves: at least 0, except from the nothing before the first key.
                        move = [Float32(0.0), Float32(0.0)]
                        if keyless != 0:
                            move = [Float32(NEG_INF), Float32(NEG_INF)]
                        for w in cutlass.range_constexpr(4):
                            got = ptx.lds_v2f32(reduce_here + (w * heads + 8 * j) * 4)
                            for c in cutlass.range_constexpr(2):
                                move[c] = ptx.fmax(move[c], got[c])
                        decay = []
                        for c in cutlass.range_constexpr(2):
                            if move[c] == NEG_INF:  # still no key, or nothing but NaN: the maximum stays 0
                                move[c] = Float32(0.0)
                            shrink = ptx.exp2(-move[c])
                            if keyless != 0:
                                shrink = Float32(0.0)
                            decay.append(shrink)
                            total[j, c] = total[j, c] * shrink
                            if cutlass.const_expr(self.scorers > 1):
                                mine[j, c] = old[c] + move[c]
                            for i in cutlass.range_constexpr(2):
                                x[4 * j + 2 * i + c] = x[4 * j + 2 * i + c] - move[c]
                        if m1 < 4:
                            new = [old[c] + move[c] for c in range(2)]
                            ptx.sts_v2f32(maxima_here + (self.off_new_max - self.off_max + 32 * j), *new)
                            place = self.off_decay - self.off_max + 32 * j
                            ptx.sts_v2f32(maxima_here + (place + (count & 1) * (heads * 4)), *decay)
                    # All have read the old maxima before the new ones replace them, and see them after.
                    arch.barrier(barrier_id=1 + me, number_of_threads=128)
                    if m1 < heads:
                        ptx.sts_f32(base + self.off_max + m1 * 4, ptx.lds_f32(base + self.off_new_max + m1 * 4))
                    if m1 == 0:  # the value warpgroups find their block's number there
                        ptx.sts_i32(base + self.off_flag + (count & 1) * 4, count)
                    if cutlass.const_expr(self.scorers > 1):
                        seen = count
                        if m1 == 0:
                            ptx.sts_i32(base + self.off_flag + 8, count)
                    arch.barrier(barrier_id=1 + me, number_of_threads=128)
                if cutlass.const_expr(self.scorers > 1):
                    self.signal(base, self.TURN, 0, lane)
                for j in cutlass.range_constexpr(tiles_n):
                    for c in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            e = 4 * j + 2 * i + c
                            x[e] = ptx.exp2(x[e])
                            total[j, c] = total[j, c] + (x[e] if self.wide else x[e] * grow[i])
                self.mark(times, 3)
                packed = []
                for j in cutlass.range_constexpr((tiles_n + 1) // 2):
                    for g in cutlass.range_constexpr(self.copies):
                        for jj in cutlass.range_constexpr(min(2, tiles_n)):
                            for i in cutlass.range_constexpr(2):
                                e = 4 * (2 * j + jj) + 2 * i
                                if cutlass.const_expr(self.wide):
                                    packed.append(self.term(g, x[e], x[e + 1]))
                                else:
                                    by = Float32(1.0) if self.copies == 1 else ratio[i][g]
                                    packed.append(ptx.pack_f16x2(x[e] * by, x[e + 1] * by))
                buffer = count & 1
                arch.mbarrier_wait(self._barrier(base, self.P_EMPTY, buffer), ((count >> 1) + 1) & 1)
                self.mark(times, 4)
                # P, transposed: row = head, 64 records contiguous.
                m2 = ptx.opaque(tid)
                table = buffer * (self.scale_rows * BLOCK * 2)
                if cutlass.const_expr(self.fine):
                    own = self.scale_bytes // 4
                    for t in cutlass.range_constexpr(own):
                        ptx.sts_halves(ratio_place + ((own - 1) * quad + t) * (BLOCK * 2) + table, ratio[t], 4)
                    if cutlass.const_expr(self.kind == "v4"):
                        if quad == 0:
                            ptx.sts_halves(ratio_place + (self.scale_rows - 1) * (BLOCK * 2) + table, ratio[own], 4)
                elif cutlass.const_expr(self.scaled_values):
                    ptx.sts_halves(ratio_place + table, ratio[0], 4)
                wide = 2 * min(2, tiles_n)
                for j in cutlass.range_constexpr((tiles_n + 1) // 2):
                    row = (2 * j + ((m2 >> 4) & (min(2, tiles_n) - 1))) * 8 + (m2 & 7)
                    piece = (m2 >> 5) * 2 + ((m2 >> 3) & 1)
                    target = base + self.off_p + buffer * (self.copies * heads * 128)
                    target = target + row * 128 + (piece ^ (m2 & 7)) * 16
                    for g in cutlass.range_constexpr(self.copies):
                        four = packed[(j * self.copies + g) * wide : (j * self.copies + g + 1) * wide]
                        if cutlass.const_expr(tiles_n > 1):
                            ptx.stmatrix_x4_trans(target + g * (heads * 128), *four)
                        else:
                            ptx.stmatrix_x2_trans(target + g * (heads * 128), *four)
                arch.fence_view_async_shared()
                self.signal(base, self.P_FULL, buffer, lane)
                self.mark(times, 5)
                n = n + self.scorers
            before = before + blocks
            # Sums over all records, then maxima and sums to the value warpgroups.
            if cutlass.const_expr(self.scorers > 1):  # from here on the last maxima are known
                arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            arch.mbarrier_wait(self._barrier(base, self.ML_EMPTY), (turn + 1) & 1)
            m3 = ptx.opaque(tid)
            reduce_here = base + self.off_reduce + 8 * (m3 & 3)
            maxima_here = base + self.off_max + 8 * (m3 & 3)
            for j in cutlass.range_constexpr(tiles_n):
                if cutlass.const_expr(self.scorers > 1):
                    reached = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        total[j, c] = total[j, c] * ptx.exp2(mine[j, c] - reached[c])
                for c in cutlass.range_constexpr(2):
                    for s in cutlass.range_constexpr(3):
                        total[j, c] = total[j, c] + arch.shuffle_sync_bfly(total[j, c], 4 << s)
                if (m3 & 31) < 4:
                    ptx.sts_v2f32(reduce_here + ((me * 4 + (m3 >> 5)) * heads + 8 * j) * 4, total[j, 0], total[j, 1])
            arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            if (me == 0) & (m3 < 4):
                highs = cute.make_rmem_tensor((2 * tiles_n,), Float32)
                none = Int32(ptx.lds_i32(base + self.off_flag + 12) == 0)
                for j in cutlass.range_constexpr(tiles_n):
                    final = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        highs[2 * j + c] = final[c]
                        if none != 0:
                            highs[2 * j + c] = Float32(LOWEST)
                arch.sync_warp(15)
                for j in cutlass.range_constexpr(tiles_n):
                    sums = [Float32(0.0), Float32(0.0)]
                    for w in cutlass.range_constexpr(4 * self.scorers):
                        got = ptx.lds_v2f32(reduce_here + (w * heads + 8 * j) * 4)
                        for c in cutlass.range_constexpr(2):
                            sums[c] = sums[c] + got[c]
                    for c in cutlass.range_constexpr(2):
                        ptx.sts_v2f32(base + self.off_ml + (8 * j + 2 * (m3 & 3) + c) * 8, highs[2 * j + c], sums[c])
            # Nobody reduces anew before all has been read.
            arch.barrier(barrier_id=6, number_of_threads=128 * self.scorers)
            self.signal(base, self.ML_FULL, 0, lane)
            self.mark(times, 6)
            turn = turn + 1
            tile = tile + step
        self.report(p, times, 4 * self.valuers + me * 4 + warp, lane)
        if cutlass.const_expr(self.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
            arch.cluster_arrive()
            arch.cluster_wait()

    def own_rows(self, lane: Any) -> Any:
        """Offset in a granule of what this thread reads of its first record; the second is eight records on."""
        return self.record_of(lane >> 2) * self.record_stride + (lane & 3) * 16

    def before_softmax(self, base: Any, maxima: Any, column0: int) -> tuple[list[Any], list[Any]]:
        """Scale factors and running maxima of this thread's heads."""
        places = [8 * j * 4 for j in range(self.heads // 8)]
        factors = [ptx.lds_v2f32(base + self.off_q_factor + column0 * 4 + place) for place in places]
        return factors, [ptx.lds_v2f32(maxima + place) for place in places]
