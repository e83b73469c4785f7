# SPDX-License-Identifier: Apache-2.0
"""The value warpgroups: output accumulation, and the end of a token: normalise, combine, write."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import BLOCK, GROUPS, LATENT, LOWEST, NEG_INF, O_STRIDE, RAISE
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.query import Query
from sparsemla.kernels.hopper.records import Records


class Value(Records, Query):
    """Accumulating and writing the output."""

    @cute.jit
    def value(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """O^T = V^T P^T over the blocks of each tile: all columns of the output, or half of them a warpgroup."""
        heads = self.heads
        lane = tid & 31
        quad = lane & 3
        rmem = warpgroup.OperandSource.RMEM
        major = OperandMajorMode.K
        kind = BFloat16 if self.wide else Float16
        op = warpgroup.MmaF16BF16Op(kind, Float32, (64, heads, 16), rmem, major, major)
        pv = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        thread = pv.get_slice(tid & 127)
        pv.set(warpgroup.Field.ACCUMULATE, True)
        # An accumulator 64 columns; fragments of V^T, some filled while others are multiplied.
        outs = [thread.make_fragment_C(thread.partition_shape_C((64, heads))) for _ in range(2 * self.parts)]
        kept = self.batch * self.batches
        fragments = [thread.make_fragment_A(thread.partition_shape_A((64, 16))) for _ in range(kept)]
        words = [cute.recast_tensor(a, Uint32) for a in fragments]
        group0 = (warp >> 2) * self.parts
        column = group0 * 128 + self.column_of(warp & 3, lane)
        ring = base + self.off_ring + column * (2 if self.wide else 1)
        mine = [ring + quad * self.record_stride, ring + (4 + ((quad + 2) & 3)) * self.record_stride]
        # This thread's row of the table of scales, in its first group of columns.
        row = group0 * self.scale_rows_a_group + ((self.column_of(warp & 3, lane) * self.scale_rows_a_group) >> 7)
        ratios = base + self.off_ratio + (row * 4 + quad) * (BLOCK // 4 * 2)
        if cutlass.const_expr(self.kind == "v4"):
            # The last 64 columns of V4's second half are its rotary ones: bf16, with a row of their own in the table.
            rotary = Int32((group0 > 0) & ((warp & 3) >= 2))
            tail_shift = Int32(128)
            tail_row = Int32(2)
            if rotary != 0:
                tail_shift = tail_shift + (column + 128 - 448)
                tail_row = self.scale_rows - 1 - row
        count = Int32(0)
        turn = Int32(0)
        times = cute.make_rmem_tensor((9,), Int32)
        if cutlass.const_expr(self.trace):
            times.fill(0)
            times[8] = arch.clock()
        tile = first
        while tile < p.tiles:
            # The accumulators leave few registers: what is needed after the blocks is computed again then, from
            # values the compiler takes for new.
            before = ptx.opaque(tile) // p.head_tiles
            length, extra, _ = self.lengths(p, before)
            left = self.my_blocks(length, extra, rank)
            if cutlass.const_expr(self.cluster > 1):  # one tile a CTA: these warps have nothing else to do yet
                head0 = (tile - before * p.head_tiles) * heads
                self.load_query(p, base, before, head0, warp, tid & 31, self.loaders)
                arch.fence_view_async_shared()
                self.signal(base, self.Q_FULL, 0, tid & 31)
            for out in outs:
                out.fill(0.0)
            self.mark(times, 0)
            while left > 0:
                slot, around = self.place_in_ring(count, 0)
                buffer = count & 1
                places = [place + slot * self.granule_bytes for place in mine]
                table = ratios + buffer * (self.scale_rows * BLOCK * 2)
                tables = [table + part * (self.scale_rows_a_group * BLOCK * 2) for part in range(self.parts)]
                tails = places
                if cutlass.const_expr(self.kind == "v4"):
                    tails = [place + tail_shift for place in places]
                    tables[1] = table + tail_row * (BLOCK * 2)
                p_operands = []
                for c in cutlass.range_constexpr(min(self.copies, self.parts)):
                    copy = buffer * self.copies + c
                    if cutlass.const_expr(self.copies == GROUPS):
                        copy = copy + group0
                    s_p = self._smem(
                        base + self.off_p + copy * (heads * 128),
                        kind,
                        warpgroup.SmemLayoutAtomKind.K_SW128,
                        (heads, BLOCK),
                        (0, 1),
                    )
                    p_operands.append(thread.make_fragment_B(thread.partition_B(s_p)))
                arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, slot), around)
                ahead = self.unit_columns(places, tails, 0)
                arch.mbarrier_wait(self._barrier(base, self.P_FULL, buffer), (count >> 1) & 1)
                self.mark(times, 1)
                if ptx.lds_i32(base + self.off_flag + buffer * 4) == count:  # this block has moved the maxima
                    m4 = ptx.opaque(tid) & 31
                    for s in cutlass.range_constexpr(heads // 4):
                        decay = ptx.lds_f32(base + self.off_decay + (buffer * heads + self.own_head(s, m4)) * 4)
                        for out in outs:
                            for e in cutlass.range_constexpr(heads // 2):
                                if cutlass.const_expr(self.own_slot(e) == s):
                                    out[e] = out[e] * decay
                per_granule = self.parts // self.unit
                for u in cutlass.range_constexpr(4 * per_granule):
                    granule = u // per_granule
                    part0 = u % per_granule * self.unit
                    scale: list[Any] = []
                    if cutlass.const_expr(self.scaled_values):
                        for i in cutlass.range_constexpr(self.unit):
                            scale.append(ptx.lds_v2u32(tables[part0 + i] + granule * 8))
                    for f in cutlass.range_constexpr(2 * self.unit):
                        number = u * 2 * self.unit + f
                        if cutlass.const_expr(number % self.batch == 0 and number >= kept):
                            warpgroup.wait_group(self.batches - 1)  # this batch of fragments is free again
                        if cutlass.const_expr(self.kind == "v4" and part0 + f // 2 == 1):
                            self.transpose_tail(ahead[f // 2], scale[f // 2], f % 2, rotary, words[number % kept])
                        else:
                            self.transpose(ahead[f // 2], scale[f // 2 :], f % 2, words[number % kept])
                        if cutlass.const_expr(f + 1 == 2 * self.unit):
                            if cutlass.const_expr((u + 1) % per_granule == 0):  # all of the granule is in registers
                                self.signal(base, self.RAW_EMPTY, granule * self.depth + slot, ptx.opaque(tid) & 31)
                                if cutlass.const_expr(granule < 3):
                                    next_slot = (granule + 1) * self.depth + slot
                                    arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, next_slot), around)
                            if cutlass.const_expr(u + 1 < 4 * per_granule):
                                ahead = self.unit_columns(places, tails, u + 1)
                        if cutlass.const_expr((number + 1) % self.batch == 0):
                            warpgroup.fence()
                            for i in cutlass.range_constexpr(self.batch):
                                t = 2 * part0 + f + 1 - self.batch + i
                                factors = p_operands if self.wide else [p_operands[t // 2 % len(p_operands)]]
                                a = fragments[(number + 1 - self.batch + i) % kept]
                                for b in factors:
                                    cute.gemm(pv, outs[t], a[None, None, 0], b[None, None, granule], outs[t])
                            warpgroup.commit_group()
                warpgroup.wait_group(0)
                left = left - 1
                self.signal(base, self.P_EMPTY, buffer, ptx.opaque(tid) & 31)
                count = count + 1
                self.mark(times, 2)
            token = ptx.opaque(tile) // p.head_tiles
            head0 = (tile - token * p.head_tiles) * heads
            m5 = ptx.opaque(tid)
            arch.mbarrier_wait(self._barrier(base, self.ML_FULL), turn & 1)
            if cutlass.const_expr(self.cluster > 1):
                # The partial output goes over query and ring: all are done with them.
                arch.barrier(barrier_id=3, number_of_threads=128 * self.valuers)
                for part in cutlass.range_constexpr(self.parts):
                    for s in cutlass.range_constexpr(heads // 4):
                        head = self.own_head(s, m5 & 31)
                        column = self.own_column(m5, part)
                        ptx.sts_v4f32(
                            base + self.off_partial + (head * O_STRIDE + column) * 4,
                            *[outs[2 * part + x // 2][self.element(s, x)] for x in range(4)],
                        )
                self.mark(times, 3)
                arch.cluster_arrive()
                arch.cluster_wait()
                self.mark(times, 4)
                self.combine(p, base, m5, rank, token, head0)
                self.mark(times, 5)
                arch.cluster_arrive()
                arch.cluster_wait()
            else:
                self.finish(p, base, m5, token, head0, outs)
                self.signal(base, self.ML_EMPTY, 0, m5 & 31)
            self.mark(times, 6)
            turn = turn + 1
            tile = tile + step
        self.report(p, times, warp, tid & 31)

    def unit_columns(self, places: list[Any], tails: list[Any], u: int) -> list[list[Any]]:
        """What this thread needs of unit u of a block: a granule's records, `unit` groups of columns of them."""
        per_granule = self.parts // self.unit
        granule, part0 = u // per_granule, u % per_granule * self.unit
        return [
            self.tail_columns(tails, granule)
            if self.kind == "v4" and part0 + i == 1
            else self.latent_columns(places, granule, part0 + i)
            for i in range(self.unit)
        ]

    def own_head(self, slot: int, lane: Any) -> Any:
        """Row of the query tile that slot `slot` of this thread's heads is."""
        return 8 * (slot // 2) + slot % 2 + 2 * (lane & 3)

    def own_slot(self, e: int) -> int:
        """Which of this thread's heads element e of an accumulator belongs to."""
        return 2 * (e // 4) + e % 2

    def own_column(self, tid: Any, part: int) -> Any:
        """First of this thread's four neighbouring output columns of a group."""
        return 128 * ((tid >> 7) * self.parts + part) + self.column_of((tid >> 5) & 3, tid & 31)

    def element(self, slot: int, x: int) -> int:
        """Element of an accumulator: head slot `slot`, column x (0 to 3; two an accumulator) of this thread's."""
        return 4 * (slot // 2) + 2 * (x % 2) + slot % 2

    @cute.jit
    def normaliser(self, p: Params, largest: Float32, total: Float32, head: Int32):
        """What the accumulated output is multiplied with: 0 without keys, the attention sink included."""
        divisor = total
        if (p.sink != 0) & (head < p.heads):
            sink = ptx.ldg_f32(p.sink + Int64(head) * 4)
            divisor = total + ptx.exp2(sink * 1.4426950408889634 - largest)
        inverse = Float32(0.0)
        if total > 0.0:
            inverse = (1.0 / RAISE if self.copies == GROUPS else 1.0) / divisor
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
    def finish(self, p: Params, base: Int32, tid: Int32, token: Int32, head0: Int32, outs: list[Any]):
        """Normalises and writes the output from registers, eight bytes a head and group: a token that was not cut."""
        if tid < self.heads:
            ml = ptx.lds_v2f32(base + self.off_ml + tid * 8)
            ptx.sts_f32(base + self.off_ml + tid * 8, self.normaliser(p, ml[0], ml[1], head0 + tid))
            if head0 + tid < p.heads:
                self.write_lse(p, token, head0 + tid, ml[0], ml[1])
        arch.barrier(barrier_id=3, number_of_threads=128 * self.valuers)
        row0 = self.own_head(0, tid & 31)
        left = p.heads - head0 - row0
        address0 = p.out + Int64(token) * p.out_token + Int64(head0 + row0) * p.out_head
        address0 = address0 + Int64(self.own_column(tid, 0)) * 2
        for part in cutlass.range_constexpr(self.parts):
            for s in cutlass.range_constexpr(self.heads // 4):
                row = self.own_head(s, 0)
                inverse = ptx.lds_f32(base + self.off_ml + (row0 + row) * 8)
                if row < left:
                    four = [outs[2 * part + x // 2][self.element(s, x)] * inverse for x in range(4)]
                    ptx.stg64(
                        address0 + row * p.out_head + part * 256,
                        ptx.pack_bf16x2(four[0], four[1]),
                        ptx.pack_bf16x2(four[2], four[3]),
                    )

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
