# SPDX-License-Identifier: Apache-2.0
"""The upright kernel's math warpgroups: scores of every other block, and half of the output's columns of every one."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import BLOCK, LOWEST, NEG_INF, O_STRIDE, SLACK
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.upright_layout import HALF, TILE, UprightLayout
from sparsemla.kernels.hopper.value import Value

BOTH = 256
"""Threads of both math warpgroups."""
STEPS = BLOCK // 16
"""Products of 16 records a block."""


class UprightMath(UprightLayout, Value):
    """Scores, softmax, output.

    Each warpgroup has its own code, with its number `me` as a constant. Element 4 j + 2 i + c of an accumulator is head
    16 warp + lane // 4 + 8 i of the tile and record (or column) 8 j + 2 (lane % 4) + c.
    """

    @cute.jit
    def math(
        self,
        me: cutlass.Constexpr,
        p: Params,
        base: Int32,
        tid: Int32,
        warp: Int32,
        rank: Int32,
        first: Int32,
        step: Int32,
    ):
        """Math warpgroup `me` of two: scores blocks me, me + 2, ..., and has columns 256 me to 256 me + 255."""
        lane = tid & 31
        quad = lane & 3
        row0 = 16 * warp + (lane >> 2)  # this thread's heads: row0 and row0 + 8
        kinds = warpgroup.SmemLayoutAtomKind
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        across, along = OperandMajorMode.MN, OperandMajorMode.K
        # The first product of a block's scores, the others; the output's from the own P and from the other one's.
        begin, score, own, given = (
            cute.make_tiled_mma(
                cute.make_mma_atom(warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), source, along, order)),
                (1, 1, 1),
            )
            for n, source, order in (
                (BLOCK, smem, along),
                (BLOCK, smem, along),
                (HALF, rmem, across),
                (HALF, smem, across),
            )
        )
        begin.set(warpgroup.Field.ACCUMULATE, False)
        for mma in (score, own, given):
            mma.set(warpgroup.Field.ACCUMULATE, True)
        score_thread, own_thread, given_thread = (mma.get_slice(tid) for mma in (score, own, given))
        columns = self.column_tiles * 64
        s_q = self._smem(base + self.off_q, BFloat16, kinds.K_SW128, (64, columns), (0, 1))
        s_k = self._smem(base + self.keys(me), BFloat16, kinds.K_SW128, (BLOCK, columns), (0, 1))
        a_q = score_thread.make_fragment_A(score_thread.partition_A(s_q))
        b_k = score_thread.make_fragment_B(score_thread.partition_B(s_k))
        products = [(a_q[None, None, k], b_k[None, None, k]) for k in range(4 * self.column_tiles)]
        # V is the same tiles, read across.
        values = [
            self._smem(base + self.keys(buffer) + 4 * me * TILE, BFloat16, kinds.MN_SW128, (HALF, BLOCK), (1, 0))
            for buffer in range(2)
        ]
        b_v = [own_thread.make_fragment_B(own_thread.partition_B(v)) for v in values]
        # The other warpgroup's P: first and second terms.
        s_p, s_low = (
            self._smem(base + place, BFloat16, kinds.K_SW128, (64, BLOCK), (0, 1))
            for place in (self.main_terms(1 - me), self.off_low)
        )
        a_p = given_thread.make_fragment_A(given_thread.partition_A(s_p))
        a_low = given_thread.make_fragment_A(given_thread.partition_A(s_low))
        given_terms = [(a_p[None, None, t], b_v[1 - me][None, None, t]) for t in range(STEPS)]
        given_terms += [(a_low[None, None, t], b_v[1 - me][None, None, t]) for t in self.low_steps(1 - me)]
        # The own one's, in registers.
        main = own_thread.make_fragment_A(own_thread.partition_shape_A((64, BLOCK)))
        low = own_thread.make_fragment_A(own_thread.partition_shape_A((64, BLOCK // 2)))
        main_words, low_words = cute.recast_tensor(main, Uint32), cute.recast_tensor(low, Uint32)
        own_terms = [(main[None, None, t], b_v[me][None, None, t]) for t in range(STEPS)]
        own_terms += [(low[None, None, n], b_v[me][None, None, t]) for n, t in enumerate(self.low_steps(me))]
        x = score_thread.make_fragment_C(score_thread.partition_shape_C((64, BLOCK)))
        out = own_thread.make_fragment_C(own_thread.partition_shape_C((64, HALF)))
        total = cute.make_rmem_tensor((2,), Float32)
        mine = cute.make_rmem_tensor((2,), Float32)  # the maxima that these sums are relative to
        factor = cute.make_rmem_tensor((2,), Float32)
        decay = cute.make_rmem_tensor((2,), Float32)
        # Where this lane stores a matrix of P: its row, and which sixteen bytes of two.
        p_row = base + (16 * warp + (lane & 15)) * 128
        p_piece = lane >> 4
        times = cute.make_rmem_tensor((9,), Int32)
        if cutlass.const_expr(self.trace):
            times.fill(0)
            times[8] = arch.clock()
        pairs_before = Int32(0)
        tile = first
        while tile < p.tiles:
            token = tile // p.head_tiles
            head0 = (tile - token * p.head_tiles) * 64
            length, extra, _ = self.lengths(p, token)
            pairs = (self.my_blocks(length, extra, rank) + 1) >> 1
            self.load_query(p, base, token, head0, me * 4 + warp, lane, self.loaders)
            if cutlass.const_expr(me == 0):
                if tid < 64:
                    ptx.sts_f32(base + self.off_max + tid * 4, Float32(LOWEST))
            arch.fence_view_async_shared()
            arch.barrier(barrier_id=3, number_of_threads=BOTH)
            for i in cutlass.range_constexpr(2):
                factor[i] = ptx.lds_f32(base + self.off_q_factor + (row0 + 8 * i) * 4)
                total[i] = Float32(0.0)
                mine[i] = Float32(LOWEST)
            out.fill(0.0)
            self.mark(times, 0)
            turn = Int32(0)
            if cutlass.const_expr(me == 0):
                if pairs > 0:
                    self.multiply(base, me, pairs_before & 1, x, begin, score, products)
                    warpgroup.wait_group(0)
            while turn < pairs:
                phase = (pairs_before + turn) & 1
                count = (pairs_before + turn) * 2 + me
                if cutlass.const_expr(me == 1):  # warpgroup 0 has done this at the end of the turn before
                    self.multiply(base, me, phase, x, begin, score, products)
                    warpgroup.wait_group(0)
                self.mark(times, 1)
                # --- softmax
                valid = ptx.lds128(base + self.off_mask + me * 16)
                arch.mbarrier_wait(self._barrier(base, self.TURN, warp), (count + 1) & 1)
                reference = []
                keyless = []
                for i in cutlass.range_constexpr(2):
                    reached = ptx.lds_f32(base + self.off_max + (row0 + 8 * i) * 4)
                    keyless.append(Int32(reached == LOWEST))
                    total[i] = total[i] * ptx.exp2(mine[i] - reached)
                    mine[i] = reached
                    if reached == LOWEST:
                        reached = Float32(0.0)
                    reference.append(reached)
                for e in cutlass.range_constexpr(BLOCK // 2):
                    x[e] = x[e] * factor[e // 2 % 2] - reference[e // 2 % 2]
                if (valid[0] & valid[1] & valid[2] & valid[3]) != Uint32(0xFFFFFFFF):
                    for j in cutlass.range_constexpr(BLOCK // 8):
                        bits = valid[j // 2] >> Uint32(8 * (j % 2) + 2 * quad)
                        for c in cutlass.range_constexpr(2):
                            if (bits >> c) & Uint32(1) == Uint32(0):
                                for i in cutlass.range_constexpr(2):
                                    x[4 * j + 2 * i + c] = Float32(NEG_INF)
                highest = [Float32(NEG_INF), Float32(NEG_INF)]
                for e in cutlass.range_constexpr(BLOCK // 2):
                    highest[e // 2 % 2] = ptx.fmax(highest[e // 2 % 2], x[e])
                above = Int32(0)
                for i in cutlass.range_constexpr(2):
                    limit = Float32(SLACK)
                    if keyless[i] != 0:
                        limit = Float32(NEG_INF)
                    above = above | Int32(highest[i] > limit)
                moved = Int32(0)
                if arch.vote_ballot_sync(above != 0) != 0:  # rare: move the maxima of the warp's 16 heads
                    moved = Int32(1)
                    arch.sync_warp()  # all lanes have read the maxima that one lane of four replaces
                    for i in cutlass.range_constexpr(2):
                        top = highest[i]
                        for s in cutlass.range_constexpr(2):
                            top = ptx.fmax(top, arch.shuffle_sync_bfly(top, 1 << s))
                        move = ptx.fmax(top, Float32(0.0))
                        shrink = ptx.exp2(-move)
                        new = reference[i] + move
                        if keyless[i] != 0:  # the first key's score is the maximum, whatever it is
                            move = top
                            new = top
                            shrink = Float32(0.0)
                            if top == NEG_INF:  # still no key, or nothing but NaN
                                move = Float32(0.0)
                                new = Float32(LOWEST)
                        for j in cutlass.range_constexpr(BLOCK // 8):
                            for c in cutlass.range_constexpr(2):
                                x[4 * j + 2 * i + c] = x[4 * j + 2 * i + c] - move
                        total[i] = total[i] * shrink
                        mine[i] = new
                        decay[i] = shrink
                        if quad == 0:
                            ptx.sts_f32(base + self.off_max + (row0 + 8 * i) * 4, new)
                            ptx.sts_f32(base + self.off_decay + (me * 64 + row0 + 8 * i) * 4, shrink)
                    if lane == 0:
                        ptx.sts_i32(base + self.off_flag + (me * 4 + warp) * 4, count)
                self.signal(base, self.TURN, warp, lane)
                for e in cutlass.range_constexpr(BLOCK // 2):
                    x[e] = ptx.exp2(x[e])
                    total[e // 2 % 2] = total[e // 2 % 2] + x[e]
                self.mark(times, 2)
                # --- P: for the own products in registers, for the other warpgroup's in shared memory
                for t in cutlass.range_constexpr(STEPS):
                    for h in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            e = 4 * (2 * t + h) + 2 * i
                            place = 4 * t + i + 2 * h
                            main_words[place] = ptx.pack_bf16x2(x[e], x[e + 1])
                            if cutlass.const_expr(t in self.low_steps(me)):
                                low_words[place - 4 * self.low_steps(me)[0]] = self.term(1, x[e], x[e + 1])
                arch.barrier(barrier_id=1 + me, number_of_threads=128)  # all have read the rotary columns
                for t in cutlass.range_constexpr(STEPS):
                    target = p_row + ((2 * t + p_piece) ^ (lane & 7)) * 16
                    ptx.stmatrix_x4(target + self.main_terms(me), *[main_words[4 * t + w] for w in range(4)])
                for n, t in enumerate(self.low_steps(me)):
                    target = p_row + ((2 * t + p_piece) ^ (lane & 7)) * 16
                    ptx.stmatrix_x4(target + self.off_low, *[low_words[4 * n + w] for w in range(4)])
                arch.fence_view_async_shared()
                self.signal(base, self.P_FULL, me, lane)
                self.mark(times, 3)
                # --- output, in the order of the blocks: warpgroup 1's own one comes second, warpgroup 0's first
                if cutlass.const_expr(me == 1):
                    self.decay_given(base, me, phase, count - 1, row0, warp, out)
                    self.accumulate(out, given, given_terms)
                    warpgroup.wait_group(0)
                    self.free(base, me, 1 - me, lane)
                    self.mark(times, 4)
                if moved != 0:
                    for e in cutlass.range_constexpr(HALF // 2):
                        out[e] = out[e] * decay[e // 2 % 2]
                self.accumulate(out, own, own_terms)
                warpgroup.wait_group(0)
                self.free(base, me, me, lane)
                self.mark(times, 5)
                if cutlass.const_expr(me == 0):
                    self.decay_given(base, me, phase, count + 1, row0, warp, out)
                    self.accumulate(out, given, given_terms)
                    warpgroup.wait_group(0)
                    self.free(base, me, 1 - me, lane)
                    self.mark(times, 4)
                    if turn + 1 < pairs:
                        self.multiply(base, me, phase ^ 1, x, begin, score, products)
                    warpgroup.wait_group(0)
                turn = turn + 1
            pairs_before = pairs_before + pairs
            self.end_tile(me, p, base, tid, row0, quad, rank, token, head0, total, mine, out)
            self.mark(times, 6)
            tile = tile + step
        self.report(p, times, me * 4 + warp, lane)

    @cute.jit
    def multiply(
        self,
        base: Int32,
        me: cutlass.Constexpr,
        phase: Int32,
        x: cute.Tensor,
        begin: Any,
        mma: Any,
        products: list[Any],
    ):
        """Starts the products of the own block's scores, the left half of the columns as soon as it is there."""
        for half in cutlass.range_constexpr(2):
            arch.mbarrier_wait(self._barrier(base, self.K_FULL, me * 2 + half), phase)
            arch.fence_view_async_shared()
            if cutlass.const_expr(half == 0):
                warpgroup.fence()
            for k in cutlass.range_constexpr(16 * half, 16 if half == 0 else len(products)):
                cute.gemm(begin if k == 0 else mma, x, *products[k], x)
        warpgroup.commit_group()

    def accumulate(self, out: Any, mma: Any, terms: list[Any]) -> None:
        """Starts the products of a block's P with this warpgroup's columns of V."""
        warpgroup.fence()
        for a, b in terms:
            cute.gemm(mma, out, a, b, out)
        warpgroup.commit_group()

    def free(self, base: Any, me: int, buffer: int, lane: Any) -> None:
        """This warpgroup's half of a buffer's columns has been read."""
        self.signal(base, self.K_EMPTY, buffer * 2 + me, lane)

    @cute.jit
    def decay_given(
        self,
        base: Int32,
        me: cutlass.Constexpr,
        phase: Int32,
        count: Int32,
        row0: Int32,
        warp: Int32,
        out: cute.Tensor,
    ):
        """Waits for the other warpgroup's P of block `count`, and shrinks the output if that has moved the maxima."""
        other = 1 - me
        arch.mbarrier_wait(self._barrier(base, self.P_FULL, other), phase)
        if ptx.lds_i32(base + self.off_flag + (other * 4 + warp) * 4) == count:
            for i in cutlass.range_constexpr(2):
                shrink = ptx.lds_f32(base + self.off_decay + (other * 64 + row0 + 8 * i) * 4)
                for e in cutlass.range_constexpr(HALF // 2):
                    if cutlass.const_expr(e // 2 % 2 == i):
                        out[e] = out[e] * shrink

    @cute.jit
    def end_tile(
        self,
        me: cutlass.Constexpr,
        p: Params,
        base: Int32,
        tid: Int32,
        row0: Int32,
        quad: Int32,
        rank: Int32,
        token: Int32,
        head0: Int32,
        total: cute.Tensor,
        mine: cute.Tensor,
        out: cute.Tensor,
    ):
        """Adds up both warpgroups' sums and writes this one's columns of the output, or combines a token that is
        cut."""
        arch.barrier(barrier_id=3, number_of_threads=BOTH)  # the last maxima are known
        reached = []
        for i in cutlass.range_constexpr(2):
            reached.append(ptx.lds_f32(base + self.off_max + (row0 + 8 * i) * 4))
            amount = total[i] * ptx.exp2(mine[i] - reached[i])
            for s in cutlass.range_constexpr(2):
                amount = amount + arch.shuffle_sync_bfly(amount, 1 << s)
            if quad == 0:
                ptx.sts_f32(base + self.off_sums + (me * 64 + row0 + 8 * i) * 4, amount)
        arch.barrier(barrier_id=3, number_of_threads=BOTH)
        for i in cutlass.range_constexpr(2):
            row = row0 + 8 * i
            amount = ptx.lds_f32(base + self.off_sums + row * 4) + ptx.lds_f32(base + self.off_sums + (64 + row) * 4)
            if cutlass.const_expr(self.cluster > 1):
                if (me == 0) & (quad == 0):
                    ptx.sts_v2f32(base + self.off_ml + row * 8, reached[i], amount)
                place = base + self.off_partial + (row * O_STRIDE + HALF * me + 2 * quad) * 4
                for j in cutlass.range_constexpr(HALF // 8):
                    ptx.sts_v2f32(place + 32 * j, out[4 * j + 2 * i], out[4 * j + 2 * i + 1])
            else:
                inverse = self.normaliser(p, reached[i], amount, head0 + row)
                if cutlass.const_expr(me == 0):
                    if (quad == 0) & (head0 + row < p.heads):
                        self.write_lse(p, token, head0 + row, reached[i], amount)
                # Two lanes exchange, so that a lane has four neighbouring columns: of tile j, or of tile j + 1.
                odd = quad & 1
                column = HALF * me + 8 * odd + 2 * (quad - odd)
                address = p.out + Int64(token) * p.out_token + Int64(head0 + row) * p.out_head + Int64(column) * 2
                for j in cutlass.range_constexpr(0, HALF // 8, 2):
                    here, there = (
                        ptx.pack_bf16x2(out[4 * t + 2 * i] * inverse, out[4 * t + 2 * i + 1] * inverse)
                        for t in (j, j + 1)
                    )
                    got = arch.shuffle_sync_bfly(ptx.select(odd, here, there), 1)
                    if head0 + row < p.heads:
                        ptx.stg64(address + 16 * j, ptx.select(odd, got, here), ptx.select(odd, there, got))
        if cutlass.const_expr(self.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
            self.combine(p, base, me * 128 + tid, rank, token, head0)
            arch.cluster_arrive()
            arch.cluster_wait()

    @cute.jit
    def store_columns(
        self,
        base: Int32,
        row: Int32,
        chunk: Int32,
        shrink: Float32,
        words: cute.Tensor,
        t: cutlass.Constexpr,
        i: cutlass.Constexpr,
    ):
        """Eight of the columns 128 i to 128 i + 127 of a row, times `shrink`, as the matrix units read them."""
        scaled = [
            ptx.pack_bf16x2(*(ptx.bf16_to_f32(words[t, i, w], half) * shrink for half in range(2))) for w in range(4)
        ]
        target = base + self.off_q + (2 * i + (chunk >> 3)) * TILE + row * 128 + ((chunk & 7) ^ (row & 7)) * 16
        if cutlass.const_expr(i < 4):
            ptx.sts128(target, *scaled)
        elif cutlass.const_expr(self.rope):
            if chunk < 8:
                ptx.sts128(target, *scaled)
