# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over quantised records, for a tile of 8, 16, 32 or 64 heads. One CTA an SM, four warpgroups, one job each.

gather   brings records as they are into a ring in shared memory with 16-byte cp.async, 16 records a warp and turn; converts those that
         have arrived, scaled, into the value stage.
score    reads the same records as matrix fragments (e4m3 to f16, exact), multiplies them from registers with the query,
             S^T = K Q^T   (64 records x heads),
         one accumulator a group of 128 columns, folded into S with the record's float32 scale; does the online softmax; leaves P.
value 0, value 1    accumulate 256 columns of the output each from the value stage and P.

So the scales act on S in float32: K enters the matrix units as the exact e4m3 values. V carries them in f16, relative to the power of two of
the record's largest scale; that power of two goes into the softmax's exponent, and so does the one that brings a query row into f16's range.
Nothing depends on the magnitude of scales or queries.

The running maximum of the softmax moves only where a block exceeds it by more than 2^6: then, rarely, the output is rescaled. Everywhere else
a block needs no reduction over records at all, only a vote.

A token can be cut over the CTAs of a cluster. They leave their partial outputs in their own shared memory and every CTA combines a slice of
the output from all of them through distributed shared memory: nothing is written to global memory but the result.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.params import Params

BLOCK = 64
"""Records a step: the M side of S^T."""
GRANULE = 16
"""Records of a step that one warp gathers and one warp scores."""
DEPTH = 2
"""Granules a warp has in the ring."""
LATENT = 512
HALF = LATENT // 2
GROUPS = 4
ROPE = 64
O_STRIDE = LATENT + 4
"""Row stride, in float32, of a partial output in shared memory: spreads a warp's stores over all banks."""
SLACK = 6.0
"""How far (in powers of two) a score may exceed the running maximum before that moves: P stays below 2^6 in f16."""

NEG_INF = -float("inf")
LOWEST = -3.0e38
"""Running maximum before the first key: finite, so that no difference of two maxima is a NaN."""


class SparseKernel:
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
        # Output with the heads on M (64 of them, P is the small operand) or on N (fewer: no padded rows are multiplied).
        self.heads_on_m = heads == 64
        self.score_registers, self.value_registers, self.gather_registers = (152, 160, 40) if heads == 64 else (168, 128, 88)
        # Sets of fragments of K, 64 columns each: one is filled while others are multiplied. An accumulator a group of 128 columns where
        # registers allow it.
        self.sets = 4 if heads < 32 else 2
        self.accumulators = GROUPS if heads < 64 else 1
        self.lead = 2 if heads < 64 else 1
        offset = 0

        def take(size: int, align: int = 128) -> int:
            nonlocal offset
            start = (offset + align - 1) // align * align
            offset = start + size
            return start

        self.off_q = take(heads * LATENT * 2, 1024)
        self.off_q_rope = take(heads * ROPE * 2 if rope else 0, 1024)
        self.off_v = take(BLOCK * LATENT * 2, 1024)
        # Records of a granule that the bulk copy engine brings: issuing them takes time that few heads do not leave.
        self.bulk = 4 if heads <= 16 else 8
        self.record_bytes = LATENT + 16 + (ROPE * 2 if rope else 0)
        self.granule_bytes = GRANULE * self.record_bytes
        self.off_ring = take(4 * DEPTH * self.granule_bytes, 16)
        self.off_p = take(heads * BLOCK * 2, 1024)
        self.off_mask = take(4 * DEPTH * 4, 16)
        self.off_q_factor = take(heads * 4, 16)
        self.off_flag = take(16, 16)
        self.off_barriers = take(22 * 8, 8)
        # Maximum and sum of every head, for the value warpgroups. Until they are known its first half hands over the rescaling factors and
        # its second half keeps the running maxima.
        self.off_ml = take(heads * 8, 16)
        # Reductions over the four score warps use the room of P while no P lies there.
        self.off_reduce = self.off_p
        self.off_partial = self.off_v  # over values and ring, when both are done with
        self.shared_bytes = offset

    # mbarriers, by kind and index.
    RAW_FULL, RAW_EMPTY, STAGE_FULL, P_EMPTY, V_EMPTY, Q_FULL, ML_FULL, ML_EMPTY = 0, 8, 16, 17, 18, 19, 20, 21

    def _barrier(self, base: Any, kind: int, index: Any = 0) -> Any:
        return cute.make_ptr(
            Int64, base + self.off_barriers + (kind + index) * 8, cute.AddressSpace.smem, assumed_align=8
        )

    def _smem(self, address: Any, dtype: Any, kind: Any, shape: tuple[int, int], order: tuple[int, int]) -> Any:
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=order)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)

    @cute.jit
    def __call__(self, p: Params, grid: Int32) -> None:
        """Host entry used only to compile: the launch itself goes through the driver (see `launch.py`)."""
        self.kernel(p).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            smem=self.shared_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, p: Params) -> None:
        tid = arch.thread_idx()[0]
        warp = arch.make_warp_uniform(arch.warp_idx())
        base = arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        rank = arch.block_idx()[0] % self.cluster
        first = arch.block_idx()[0] // self.cluster
        step = arch.grid_dim()[0] // self.cluster
        if tid == 0:
            for i in cutlass.range_constexpr(4 * DEPTH):
                arch.mbarrier_init(self._barrier(base, self.RAW_FULL, i), 33)
                arch.mbarrier_init(self._barrier(base, self.RAW_EMPTY, i), 2)
            arch.mbarrier_init(self._barrier(base, self.STAGE_FULL), 8)
            arch.mbarrier_init(self._barrier(base, self.P_EMPTY), 8)
            arch.mbarrier_init(self._barrier(base, self.V_EMPTY), 8)
            arch.mbarrier_init(self._barrier(base, self.Q_FULL), 8)
            arch.mbarrier_init(self._barrier(base, self.ML_FULL), 4)
            arch.mbarrier_init(self._barrier(base, self.ML_EMPTY), 8)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        if warp < 8:
            arch.setmaxregister_increase(self.value_registers)
            self.value(p, base, tid, warp, rank, first, step)
        elif warp < 12:
            arch.setmaxregister_increase(self.score_registers)
            self.score(p, base, tid - 256, warp - 8, rank, first, step)
        else:
            arch.setmaxregister_decrease(self.gather_registers)
            self.gather(p, base, tid - 384, warp - 12, rank, first, step)

    # ----------------------------------------------------------------------------------------------------------------- trace
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

    # ------------------------------------------------------------------------------------------------------------------ work
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

    # -------------------------------------------------------------------------------------------------------------- producer
    @cute.jit
    def load_index(self, p: Params, token: Int32, length: Int32, extra: Int32, block: Int32, row: Int32):
        """The raw index of one record of a block (global block number); -1 past the end."""
        first_blocks = (length + (BLOCK - 1)) // BLOCK
        column = block * BLOCK + row
        address = p.indices + Int64(token) * p.indices_stride + Int64(column) * 4
        inside = Int32(column < length)
        if block >= first_blocks:
            column = column - first_blocks * BLOCK
            address = p.extra_indices + Int64(token) * p.extra_indices_stride + Int64(column) * 4
            inside = Int32(column < extra)
        return ptx.ldg_i32(address, inside, -1)

    @cute.jit
    def find_page(self, p: Params, request: Int32, length: Int32, block: Int32, raw: Int32):
        """Page and offset in it of the record an index names; page -1 for "no key". With a block table the page may still be on its way."""
        page = Int32(-1)
        offset = Int32(0)
        if block >= (length + (BLOCK - 1)) // BLOCK:
            if (raw >= 0) & (raw < p.extra_slots):
                page = ptx.divide(raw, p.extra_magic, p.extra_shift)
                offset = raw - page * p.extra_block
        elif p.block_table == 0:
            if (raw >= 0) & (raw < p.slots):
                page = ptx.divide(raw, p.block_magic, p.block_shift)
                offset = raw - page * p.block_size
        elif raw >= 0:
            local = raw
            mine = Int32(1)
            if p.shard_world > 1:
                lap = raw // p.shard_interleave
                mine = Int32(lap % p.shard_world == p.shard_rank)
                local = (lap // p.shard_world) * p.shard_interleave + raw % p.shard_interleave
            column = ptx.divide(local, p.block_magic, p.block_shift)
            offset = local - column * p.block_size
            page = ptx.ldg_i32(
                p.block_table + Int64(request) * p.table_stride + Int64(column) * 4,
                mine & Int32(column < p.table_columns),
                -1,
            )
        return page, offset

    @cute.jit
    def address_of(self, p: Params, length: Int32, block: Int32, page: Int32, offset: Int32):
        """Byte address of a record, 0 for "no key"."""
        address = Int64(0)
        if block >= (length + (BLOCK - 1)) // BLOCK:
            if page >= 0:
                address = p.extra_cache + Int64(page) * p.extra_page_stride + Int64(offset) * p.record_bytes
        elif (page >= 0) & (page < p.pages):
            address = p.cache + Int64(page) * p.page_stride + Int64(offset) * p.record_bytes
        return address

    @cute.jit
    def bring(self, base: Int32, slot: Int32, mine: Int64, lane: Int32, cache: Int64):
        """Starts the copies of 16 records into granule `slot` of the ring. `mine` is the address of record lane % 16, 0 for none.

        Two engines share the work: the bulk copy engine takes whole records, a thread each, and the load pipe the rest, 512 bytes an
        instruction. Neither alone keeps up with the matrix units.
        """
        lane = ptx.opaque(lane)
        place = base + self.off_ring + slot * self.granule_bytes
        full = self._barrier(base, self.RAW_FULL, slot)
        valid = arch.vote_ballot_sync(mine != 0)
        if lane == 0:
            ptx.sts_i32(base + self.off_mask + slot * 4, valid)
        if valid == -1:
            if lane == 0:
                arch.mbarrier_arrive_and_expect_tx(full, self.bulk * self.record_bytes)
            arch.sync_warp()
            if lane < self.bulk:
                ptx.bulk_copy(
                    place + lane * self.record_bytes, mine, self.record_bytes, base + self.off_barriers + (self.RAW_FULL + slot) * 8
                )
            self.copy(place, mine, Int32(1), lane, self.bulk)
        else:
            if lane == 0:
                arch.mbarrier_arrive(full)
            source = mine
            if mine == 0:
                source = cache
            self.copy(place, source, Int32(mine != 0), lane, 0)
        arch.cp_async_mbarrier_arrive_noinc(full)

    @cute.jit
    def copy(self, place: Int32, source: Int64, present: Int32, lane: Int32, start: cutlass.Constexpr):
        """Records `start` to 15 of a granule with cp.async; zeros for those that are not present."""
        for r in cutlass.range_constexpr(start, GRANULE):
            here = arch.shuffle_sync(source, r)
            wanted = arch.shuffle_sync(present, r)
            ptx.cp_async16(place + r * self.record_bytes + lane * 16, here + Int64(lane) * 16, wanted)
        # What follows the latent part: scales and rotary part of 16 bytes times `rest`.
        rest = self.record_bytes // 16 - 32
        for t in cutlass.range_constexpr(((GRANULE - start) * rest + 31) // 32):
            item = lane + 32 * t
            row = start + item // rest
            chunk = 32 + item % rest
            here = arch.shuffle_sync(source, cutlass.min(row, Int32(GRANULE - 1)))
            wanted = arch.shuffle_sync(present, cutlass.min(row, Int32(GRANULE - 1)))
            if row < GRANULE:
                ptx.cp_async16(place + row * self.record_bytes + chunk * 16, here + Int64(chunk) * 16, wanted)

    @cute.jit
    def load_query(
        self,
        p: Params,
        base: Int32,
        token: Int32,
        head0: Int32,
        warp: Int32,
        lane: Int32,
        warps: cutlass.Constexpr,
    ):
        """Half a warp a head: brings the row into f16's range by a power of two and stores it in the column order of the fragments of K."""
        passes = (self.heads + 2 * warps - 1) // (2 * warps)
        batch = min(passes, 4)
        words = cute.make_rmem_tensor((batch, 5, 4), Uint32)
        for start in cutlass.range(0, passes, batch, unroll=1):
            for t in cutlass.range_constexpr(batch):
                row = (start + t) * (2 * warps) + warp * 2 + lane // 16
                head = head0 + row
                present = Int32((head < p.heads) & (row < self.heads))
                chunk = lane % 16
                here = p.q_nope + Int64(token) * p.q_nope_token + Int64(head) * p.q_nope_head + Int64(chunk) * 16
                for i in cutlass.range_constexpr(4):
                    got = ptx.ldg128(here + i * 256, present)
                    for w in cutlass.range_constexpr(4):
                        words[t, i, w] = got[w]
                if cutlass.const_expr(self.rope):
                    there = p.q_rope + Int64(token) * p.q_rope_token + Int64(head) * p.q_rope_head + Int64(chunk) * 16
                    wanted = present
                    if chunk >= 8:
                        wanted = Int32(0)
                    got = ptx.ldg128(there, wanted)
                    for w in cutlass.range_constexpr(4):
                        words[t, 4, w] = got[w]
                else:
                    for w in cutlass.range_constexpr(4):
                        words[t, 4, w] = Uint32(0)
            for t in cutlass.range_constexpr(batch):
                self.store_query(p, base, (start + t) * (2 * warps) + warp * 2 + lane // 16, lane, words, t)

    @cute.jit
    def store_query(
        self, p: Params, base: Int32, row: Int32, lane: Int32, words: cute.Tensor, t: cutlass.Constexpr
    ):
        """Row `row` of the query tile, lane's share of it in words[t], to shared memory."""
        chunk = lane % 16
        # The magnitude of a bf16 is ordered as its bits are.
        largest = Int32(0)
        for i in cutlass.range_constexpr(5):
            for w in cutlass.range_constexpr(4):
                low = Int32(words[t, i, w] & 0x7FFF)
                high = Int32((words[t, i, w] >> 16) & 0x7FFF)
                largest = cutlass.max(largest, cutlass.max(low, high))
        for s in cutlass.range_constexpr(4):
            largest = cutlass.max(largest, arch.shuffle_sync_bfly(largest, 8 >> s))
        exponent = cutlass.max(largest // 128, Int32(8))
        # The row's largest magnitude comes to lie in [2^7, 2^8).
        shrink = ptx.bits_to_f32((Int32(261) - exponent) * 8388608)
        undo = ptx.bits_to_f32((exponent - 7) * 8388608)
        if row < self.heads:
            for i in cutlass.range_constexpr(5):
                # Columns 8 chunk ... of a block of 64, as four pairs. Lane q of a fragment holds columns 16 q ... 16 q + 15 of the block,
                # four a product: pair (h, u) belongs to product 2 (chunk % 2) + h and lies at columns 8 u + 2 q of it.
                block = 2 * i + chunk // 8
                quad = (chunk % 8) // 2
                for h in cutlass.range_constexpr(2):
                    for u in cutlass.range_constexpr(2):
                        word = words[t, i, 2 * h + u]
                        first = ptx.bits_to_f32(word << 16) * shrink
                        second = ptx.bits_to_f32(word & Uint32(0xFFFF0000)) * shrink
                        if cutlass.const_expr(i < 4):
                            piece = (2 * (2 * (chunk % 2) + h) + u) ^ (row % 8)
                            target = base + self.off_q + block * (self.heads * 128) + row * 128 + piece * 16 + quad * 4
                            ptx.sts_i32(target, ptx.pack_f16x2(first, second))
                        elif cutlass.const_expr(self.rope):
                            # Rotary columns: lane q holds 8 q ... of each half of 32: product 2 (chunk // 4) + h, columns 8 u + 2 q.
                            if chunk < 8:
                                piece = (2 * (2 * (chunk // 4) + h) + u) ^ (row % 8)
                                target = base + self.off_q_rope + row * 128 + piece * 16 + (chunk % 4) * 4
                                ptx.sts_i32(target, ptx.pack_bf16x2(first, second))
            if chunk == 0:
                ptx.sts_f32(base + self.off_q_factor + row * 4, undo * p.scale_log2)

    @cute.jit
    def prefetch_query(self, p: Params, tile: Int32, tid: Int32):
        """Asks the L2 cache for a tile's query rows: nine lines of 128 bytes a head."""
        token = tile // p.head_tiles
        head0 = (tile - token * p.head_tiles) * self.heads
        for i in cutlass.range_constexpr((self.heads * 9 + 127) // 128):
            item = tid + 128 * i
            row = item // 9
            line = item - row * 9
            head = head0 + row
            address = p.q_nope + Int64(token) * p.q_nope_token + Int64(head) * p.q_nope_head + Int64(line) * 128
            if line == 8:
                address = p.q_rope + Int64(token) * p.q_rope_token + Int64(head) * p.q_rope_head
            if (tile < p.tiles) & (row < self.heads) & (head < p.heads):
                ptx.prefetch_l2(address)

    @cute.jit
    def convert(self, base: Int32, warp: Int32, lane: Int32, count: Int32):
        """The 16 records of a warp's granule number `count`, scaled, to the value stage."""
        lane = ptx.opaque(lane)
        line = lane // 4
        quad = lane % 4
        slot = warp * DEPTH + count % DEPTH
        place = base + self.off_ring + slot * self.granule_bytes
        rows = place + self.record_of(line) * self.record_bytes + quad * 16
        scales = rows - quad * 16 + LATENT
        target = base + self.off_v + (16 * warp + line) * 128
        first_piece = ((2 * quad) ^ line) * 16
        second_piece = ((2 * quad + 1) ^ line) * 16
        arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, slot), (count // DEPTH) % 2)
        by = []
        for i in cutlass.range_constexpr(2):
            s4 = ptx.lds_v4f32(scales + i * (8 * self.record_bytes))
            grow = self.split_scale(s4)[1]
            for g in cutlass.range_constexpr(GROUPS):
                by.append(ptx.pack_f16x2(s4[g] * grow, s4[g] * grow))
        arch.mbarrier_wait(self._barrier(base, self.V_EMPTY), (count + 1) % 2)
        # Loads run two column blocks ahead of the stores: shared memory is accessed in program order.
        ahead = self.latent_rows(rows, 0) + self.latent_rows(rows, 1)
        for b in cutlass.range_constexpr(2 * GROUPS):
            now = ahead
            if cutlass.const_expr(b + 2 < 2 * GROUPS):
                ahead = now[2:] + self.latent_rows(rows, b + 2)
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

    def split_scale(self, s4: Any) -> tuple[Any, Any]:
        """Exponent of a record's largest scale (within what float32 can undo), and 2 to minus that exponent."""
        top = ptx.fmax(ptx.fmax(s4[0], s4[1]), ptx.fmax(s4[2], s4[3]))
        exponent = (ptx.f32_to_bits(top) // 8388608) - 127
        exponent = cutlass.min(cutlass.max(exponent, Int32(-100)), Int32(120))
        return exponent, ptx.bits_to_f32((Int32(127) - exponent) * 8388608)

    @cute.jit
    def gather(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """Gather warp w feeds score warp w: copies run as far ahead as the ring has room, pages one granule, indices two."""
        lane = tid % 32
        mine = warp * GRANULE + lane % GRANULE
        count = Int32(0)  # granules brought so far
        tile = first
        while tile < p.tiles:
            token = tile // p.head_tiles
            length, extra, request = self.lengths(p, token)
            blocks = self.my_blocks(length, extra, rank)
            block = rank
            raw0 = self.load_index(p, token, length, extra, block, mine)
            raw = self.load_index(p, token, length, extra, block + self.cluster, mine)
            page, offset = self.find_page(p, request, length, block, raw0)
            if cutlass.const_expr(self.cluster == 1):
                self.prefetch_query(p, tile + step, tid)
            n = Int32(0)
            while n < blocks:
                slot = warp * DEPTH + count % DEPTH
                address = self.address_of(p, length, block, page, offset)
                # The loads for later blocks start before anything is waited for: they have arrived when the loop comes round.
                page, offset = self.find_page(p, request, length, block + self.cluster, raw)
                raw = self.load_index(p, token, length, extra, block + 2 * self.cluster, mine)
                arch.mbarrier_wait(self._barrier(base, self.RAW_EMPTY, slot), (count // DEPTH + 1) % 2)
                self.bring(base, slot, address, lane, p.cache)
                if count > 0:
                    self.convert(base, warp, lane, count - 1)
                count = count + 1
                block = block + self.cluster
                n = n + 1
            tile = tile + step
        if count > 0:
            self.convert(base, warp, lane, count - 1)
        if cutlass.const_expr(self.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
            arch.cluster_arrive()
            arch.cluster_wait()

    # ----------------------------------------------------------------------------------------------------------------- score
    @cute.jit
    def score(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """S^T of a block from the raw records, softmax, value stage and P."""
        lane = tid % 32
        heads = self.heads
        tiles_n = heads // 8
        kinds = warpgroup.SmemLayoutAtomKind
        major = OperandMajorMode.K
        rmem = warpgroup.OperandSource.RMEM
        qk = cute.make_tiled_mma(
            cute.make_mma_atom(warpgroup.MmaF16BF16Op(Float16, Float32, (64, heads, 16), rmem, major, major)), (1, 1, 1)
        )
        rk = cute.make_tiled_mma(
            cute.make_mma_atom(warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, heads, 16), rmem, major, major)), (1, 1, 1)
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
        part = [qk_thread.make_fragment_C(qk_thread.partition_shape_C((BLOCK, heads))) for _ in range(self.accumulators)]
        # Columns (heads) of this thread: 8 j + 2 (lane % 4) + c. Rows (records): 16 warp + lane // 4 + 8 i. Element 4 j + 2 i + c.
        total = cute.make_rmem_tensor((tiles_n, 2), Float32)
        line = lane // 4
        quad = lane % 4
        column0 = quad * 2
        maxima = base + self.off_ml + (heads + column0) * 4
        count = Int32(0)
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
            if cutlass.const_expr(self.cluster == 1):
                m0 = ptx.opaque(tid)
                self.load_query(p, base, token, head0, m0 // 32, m0 % 32, 4)
            else:  # one tile a CTA: the value warps have nothing else to do yet
                self.load_query(p, base, token, head0, warp + 8, lane, 12)
                arch.mbarrier_wait(self._barrier(base, self.Q_FULL), 0)
            arch.fence_view_async_shared()
            arch.barrier(barrier_id=1, number_of_threads=128)
            self.mark(times, 0)
            n = Int32(0)
            while n < blocks:
                slot = warp * DEPTH + count % DEPTH
                place = base + self.off_ring + slot * self.granule_bytes
                arch.mbarrier_wait(self._barrier(base, self.RAW_FULL, slot), (count // DEPTH) % 2)
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
                ahead = []
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
                    if cutlass.const_expr(self.accumulators == 1 and b % 2 == 0 and b > 0):
                        warpgroup.wait_group(0)
                        self.fold(x, part[0], scales, b // 2 - 1)
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
                # x becomes the distance from the running maximum. A masked record's bytes arrived as zeros; its bias is -inf.
                highest = Float32(NEG_INF)
                for j in cutlass.range_constexpr(tiles_n):
                    factor = ptx.lds_v2f32(base + self.off_q_factor + (8 * j + column0) * 4)
                    largest = ptx.lds_v2f32(maxima + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        known = largest[c]
                        if n == 0:
                            known = Float32(0.0)
                        for i in cutlass.range_constexpr(2):
                            e = 4 * j + 2 * i + c
                            x[e] = (x[e] * factor[c] + bias[i]) - known
                            highest = ptx.fmax(highest, x[e])
                over = Int32(highest > SLACK)
                if n == 0:
                    over = Int32(1)
                flag = ptx.barrier_or(1, 128, over)
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
                    arch.barrier(barrier_id=1, number_of_threads=128)
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
                            for i in cutlass.range_constexpr(2):
                                x[4 * j + 2 * i + c] = x[4 * j + 2 * i + c] - move[c]
                        if m1 < 4:
                            ptx.sts_v2f32(base + self.off_ml + (8 * j + 2 * (m1 % 4)) * 4, decay[0], decay[1])
                    # All have read the old maxima before the new ones replace them, and see them after.
                    arch.barrier(barrier_id=1, number_of_threads=128)
                    if m1 < 4:
                        for j in cutlass.range_constexpr(tiles_n):
                            ptx.sts_v2f32(maxima_here + 8 * j * 4, x_new[2 * j], x_new[2 * j + 1])
                    arch.barrier(barrier_id=1, number_of_threads=128)
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
                    words = []
                    for jj in cutlass.range_constexpr(min(2, tiles_n)):
                        for i in cutlass.range_constexpr(2):
                            e = 4 * (2 * j + jj) + 2 * i
                            words.append(ptx.pack_f16x2(x[e], x[e + 1]))
                    row = (2 * j + (m2 // 16) % min(2, tiles_n)) * 8 + m2 % 8
                    piece = m2 // 32 * 2 + (m2 // 8) % 2
                    target = base + self.off_p + row * 128 + ((piece ^ (row % 8)) * 16)
                    if cutlass.const_expr(tiles_n > 1):
                        ptx.stmatrix_x4_trans(target, words[0], words[1], words[2], words[3])
                    else:
                        ptx.stmatrix_x2_trans(target, words[0], words[1])
                if (warp == 0) & (lane == 0):
                    ptx.sts_i32(base + self.off_flag, flag)
                arch.fence_view_async_shared()
                arch.sync_warp()
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.STAGE_FULL))
                self.mark(times, 5)
                count = count + 1
                n = n + 1
            # Sums over all records, then maxima and sums to the value warpgroups.
            arch.mbarrier_wait(self._barrier(base, self.P_EMPTY), (count + 1) % 2)
            arch.mbarrier_wait(self._barrier(base, self.ML_EMPTY), (turn + 1) % 2)
            m3 = ptx.opaque(tid)
            reduce_here = base + self.off_reduce + 8 * (m3 % 4)
            maxima_here = base + self.off_ml + (heads + 2 * (m3 % 4)) * 4
            for j in cutlass.range_constexpr(tiles_n):
                for c in cutlass.range_constexpr(2):
                    for s in cutlass.range_constexpr(3):
                        total[j, c] = total[j, c] + arch.shuffle_sync_bfly(total[j, c], 4 << s)
                if m3 % 32 < 4:
                    ptx.sts_v2f32(reduce_here + (m3 // 32 * heads + 8 * j) * 4, total[j, 0], total[j, 1])
            arch.barrier(barrier_id=1, number_of_threads=128)
            if m3 < 4:
                known = cute.make_rmem_tensor((2 * tiles_n,), Float32)
                for j in cutlass.range_constexpr(tiles_n):
                    largest = ptx.lds_v2f32(maxima_here + 8 * j * 4)
                    for c in cutlass.range_constexpr(2):
                        known[2 * j + c] = largest[c]
                        if blocks == 0:
                            known[2 * j + c] = Float32(LOWEST)
                arch.sync_warp(15)
                for j in cutlass.range_constexpr(tiles_n):
                    sums = [Float32(0.0), Float32(0.0)]
                    for w in cutlass.range_constexpr(4):
                        got = ptx.lds_v2f32(reduce_here + (w * heads + 8 * j) * 4)
                        for c in cutlass.range_constexpr(2):
                            sums[c] = sums[c] + got[c]
                    for c in cutlass.range_constexpr(2):
                        ptx.sts_v2f32(base + self.off_ml + (8 * j + 2 * (m3 % 4) + c) * 8, known[2 * j + c], sums[c])
            # Nobody writes P before all have read what was summed there.
            arch.barrier(barrier_id=1, number_of_threads=128)
            if cutlass.const_expr(self.cluster == 1):
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.ML_FULL))
            self.mark(times, 6)
            turn = turn + 1
            tile = tile + step
        self.report(p, times, warp + 8, lane)
        if cutlass.const_expr(self.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
            arch.cluster_arrive()
            arch.cluster_wait()

    def latent_rows(self, rows: Any, b: int) -> list[Any]:
        """16 e4m3 values of each of a thread's two records in column block b: what its fragments of four products hold."""
        return [ptx.lds128(rows + b * 64), ptx.lds128(rows + b * 64 + 8 * self.record_bytes)]

    def record_of(self, line: Any) -> Any:
        """Record of a granule that row `line` (0 to 7) of a fragment is; row line + 8 is that record + 8.

        Neighbouring rows are records four apart: those lie 64 bytes apart modulo 128, so eight lanes that read two rows cover all banks.
        """
        return line // 2 + (line % 2) * 4

    @cute.jit
    def fold(self, x: cute.Tensor, part: cute.Tensor, scales: Int32, g: cutlass.Constexpr):
        """S += scale of group g times the product over that group's columns."""
        scale = [ptx.lds_f32(scales + g * 4), ptx.lds_f32(scales + 8 * self.record_bytes + g * 4)]
        for e in cutlass.range_constexpr(self.heads // 2):
            x[e] = x[e] + part[e] * scale[(e // 2) % 2]

    # ----------------------------------------------------------------------------------------------------------------- value
    @cute.jit
    def value(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """Half of the output's columns a warpgroup."""
        group = warp // 4
        quarter = warp % 4
        lane = tid % 32
        in_group = tid % 128
        heads = self.heads
        tiles_n = heads // 8
        kinds = warpgroup.SmemLayoutAtomKind
        smem = warpgroup.OperandSource.SMEM
        s_v = self._smem(
            base + self.off_v + group * (HALF * BLOCK * 2), Float16, kinds.MN_SW128, (HALF, BLOCK), (1, 0)
        )
        s_p = self._smem(base + self.off_p, Float16, kinds.K_SW128, (heads, BLOCK), (0, 1))
        if cutlass.const_expr(self.heads_on_m):
            op = warpgroup.MmaF16BF16Op(
                Float16, Float32, (64, HALF // 2, 16), smem, OperandMajorMode.K, OperandMajorMode.MN
            )
        else:
            op = warpgroup.MmaF16BF16Op(
                Float16, Float32, (64, heads, 16), smem, OperandMajorMode.MN, OperandMajorMode.K
            )
        pv = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        thread = pv.get_slice(in_group)
        if cutlass.const_expr(self.heads_on_m):
            a = thread.make_fragment_A(thread.partition_A(s_p))
            b = thread.make_fragment_B(thread.partition_B(s_v))
            out = thread.make_fragment_C(thread.partition_shape_C((heads, HALF)))
        else:
            a = thread.make_fragment_A(thread.partition_A(s_v))
            b = thread.make_fragment_B(thread.partition_B(s_p))
            out = thread.make_fragment_C(thread.partition_shape_C((HALF, heads)))
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
            token = tile // p.head_tiles
            head0 = (tile - token * p.head_tiles) * heads
            length, extra, _ = self.lengths(p, token)
            blocks = self.my_blocks(length, extra, rank)
            if cutlass.const_expr(self.cluster > 1):  # one tile a CTA: these warps have nothing else to do yet
                self.load_query(p, base, token, head0, warp, lane, 12)
                arch.fence_view_async_shared()
                arch.sync_warp()
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.Q_FULL))
            out.fill(0.0)
            self.mark(times, 0)
            n = Int32(0)
            while n < blocks:
                arch.mbarrier_wait(self._barrier(base, self.STAGE_FULL), count % 2)
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
                arch.sync_warp()
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.P_EMPTY))
                    if n + 1 < blocks:  # after the last block the output goes where the values were
                        arch.mbarrier_arrive(self._barrier(base, self.V_EMPTY))
                self.mark(times, 2)
                count = count + 1
                n = n + 1
            m5 = ptx.opaque(tid)
            if cutlass.const_expr(self.cluster > 1):
                # The other half may still be multiplying with what lies under the partial output.
                arch.barrier(barrier_id=3, number_of_threads=256)
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
                if lane == 0:
                    arch.mbarrier_arrive(self._barrier(base, self.ML_EMPTY))
                    if blocks > 0:
                        arch.mbarrier_arrive(self._barrier(base, self.V_EMPTY))
            self.mark(times, 6)
            turn = turn + 1
            tile = tile + step
        self.report(p, times, warp, lane)

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
            return HALF * group + 8 * (e // 4) + 2 * (lane % 4) + e % 2
        tile = e // (self.heads // 2)
        return HALF * group + 64 * tile + 16 * quarter + lane // 4 + 8 * ((e // 2) % 2)

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
        rows = base + self.off_v + group * (HALF * BLOCK * 2)
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
                ptx.stmatrix_x4(rows + row * 512 + ((piece ^ (row % 8)) * 16), words[0], words[1], words[2], words[3])
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
                target = rows + row * 512 + ((piece ^ (row % 8)) * 16)
                if cutlass.const_expr(wide == 2):
                    ptx.stmatrix_x4_trans(target, words[0], words[1], words[2], words[3])
                else:
                    ptx.stmatrix_x2_trans(target, words[0], words[1])
        arch.barrier(barrier_id=4 + group, number_of_threads=128)
        for r in cutlass.range_constexpr(self.heads // 4):
            row = 4 * r + (tid % 128) // 32
            head = head0 + row
            words = ptx.lds128(rows + row * 512 + ((lane ^ (row % 8)) * 16))
            address = p.out + Int64(token) * p.out_token + Int64(head) * p.out_head + Int64(HALF * group + 8 * lane) * 2
            ptx.stg128(address, words, Int32(head < p.heads))

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
        arch.barrier(barrier_id=3, number_of_threads=256)
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
            item = item + 256
