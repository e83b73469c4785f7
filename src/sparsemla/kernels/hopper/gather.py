# SPDX-License-Identifier: Apache-2.0
"""The gather warpgroup: index to address, address to bytes in the ring."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import BLOCK, GRANULE
from sparsemla.kernels.hopper.params import Params
from sparsemla.kernels.hopper.query import Query
from sparsemla.kernels.hopper.records import Records


class Gather(Records, Query):
    """Bringing records."""

    @cute.jit
    def load_index(self, p: Params, token: Int32, length: Int32, extra: Int32, block: Int32, row: Int32):
        """The raw index of one record of a block (global block number); -1 past the end."""
        first_blocks = self.blocks_of(length)
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
        """Page and offset in it of the record an index names; page -1 for "no key". With a block table the page may
        still be on its way."""
        page = Int32(-1)
        offset = Int32(0)
        if block >= self.blocks_of(length):
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
        """Byte addresses of a record and of its scales where they lie elsewhere, 0 for "no key"."""
        address = Int64(0)
        scales = Int64(0)
        start = Int64(0)
        size = p.block_size
        if block >= self.blocks_of(length):
            if page >= 0:
                start = p.extra_cache + Int64(page) * p.extra_page_stride
                size = p.extra_block
        elif (page >= 0) & (page < p.pages):
            start = p.cache + Int64(page) * p.page_stride
        if start != 0:
            address = start + Int64(offset) * p.record_bytes
            if cutlass.const_expr(self.scale_bytes > 0):
                scales = start + Int64(size) * p.record_bytes + Int64(offset) * self.scale_bytes
        return address, scales

    @cute.jit
    def deliver(self, base: Int32, slot: Int32, before: Int32, mine: Int64, scales: Int64, lane: Int32, cache: Int64):
        """`bring`, once the granule's place is free."""
        arch.mbarrier_wait(self._barrier(base, self.RAW_EMPTY, slot), (before + 1) & 1)
        self.bring(base, slot, mine, scales, lane, cache)

    @cute.jit
    def bring(self, base: Int32, slot: Int32, mine: Int64, scales: Int64, lane: Int32, cache: Int64):
        """Starts the copies of 16 records into granule `slot` of the ring. `mine` is the address of record lane % 16,
        0 for none, `scales` that of its scales where they lie elsewhere.

        Two engines share the work: the bulk copy engine takes whole records, a thread each, and the load pipe the
        rest, 512 bytes an
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
            counter = base + self.off_barriers + (self.RAW_FULL + slot) * 8
            for r in cutlass.range_constexpr(self.bulk):
                here = arch.shuffle_sync(mine, r)
                with arch.elect_one():
                    ptx.bulk_copy(place + r * self.record_stride, here, self.record_bytes, counter)
            self.copy(place, mine, Int32(1), lane, self.bulk)
        else:
            if lane == 0:
                arch.mbarrier_arrive(full)
            source = mine
            if mine == 0:
                source = cache
            self.copy(place, source, Int32(mine != 0), lane, 0)
        if cutlass.const_expr(self.scale_bytes > 0):
            if lane < GRANULE:
                wanted = Int32(mine != 0)
                if mine == 0:
                    scales = cache
                ptx.cp_async(place + lane * self.record_stride + self.record_bytes, scales, wanted, self.scale_bytes)
        arch.cp_async_mbarrier_arrive_noinc(full)

    @cute.jit
    def copy(self, place: Int32, source: Int64, present: Int32, lane: Int32, start: cutlass.Constexpr):
        """Records `start` to 15 of a granule with cp.async; zeros for those that are not present."""
        whole = self.record_bytes // 512
        for r in cutlass.range_constexpr(start, GRANULE):
            here = arch.shuffle_sync(source, r) + Int64(lane) * 16
            wanted = arch.shuffle_sync(present, r)
            for part in cutlass.range_constexpr(whole):
                ptx.cp_async16(place + r * self.record_stride + part * 512 + lane * 16, here + part * 512, wanted)
        # What follows the latent part (scales, rotary part): 16 bytes times `rest`.
        rest = self.record_bytes // 16 - 32 * whole
        for t in cutlass.range_constexpr(((GRANULE - start) * rest + 31) // 32 if rest else 0):
            item = lane + 32 * t
            row = start + item // rest
            chunk = 32 * whole + item % rest
            here = arch.shuffle_sync(source, cutlass.min(row, Int32(GRANULE - 1)))
            wanted = arch.shuffle_sync(present, cutlass.min(row, Int32(GRANULE - 1)))
            if row < GRANULE:
                ptx.cp_async16(place + row * self.record_stride + chunk * 16, here + Int64(chunk) * 16, wanted)

    @cute.jit
    def gather(self, p: Params, base: Int32, tid: Int32, warp: Int32, rank: Int32, first: Int32, step: Int32):
        """Gather warp w feeds score warp w: copies run as far ahead as the ring has room, pages one granule, indices
        two."""
        lane = tid & 31
        mine = warp * GRANULE + (lane & (GRANULE - 1))
        count = Int32(0)  # granules brought so far
        tile = first
        while tile < p.tiles:
            token = tile // p.head_tiles
            length, extra, request = self.lengths(p, token)
            blocks = self.blocks_to_bring(self.my_blocks(length, extra, rank))
            block = rank
            raw0 = self.load_index(p, token, length, extra, block, mine)
            raw = self.load_index(p, token, length, extra, block + self.cluster, mine)
            page, offset = self.find_page(p, request, length, block, raw0)
            if cutlass.const_expr(self.cluster == 1):
                self.prefetch_query(p, tile + step, tid)
            n = Int32(0)
            while n < blocks:
                slot, before = self.place_in_ring(count, warp)
                address, scales = self.address_of(p, length, block, page, offset)
                # The loads for later blocks start before anything is waited for: they have arrived when the loop
                # comes round.
                page, offset = self.find_page(p, request, length, block + self.cluster, raw)
                raw = self.load_index(p, token, length, extra, block + 2 * self.cluster, mine)
                self.deliver(base, slot, before, address, scales, lane, p.cache)
                count = count + 1
                block = block + self.cluster
                n = n + 1
            tile = tile + step
        if cutlass.const_expr(self.cluster > 1):
            arch.cluster_arrive()
            arch.cluster_wait()
            arch.cluster_arrive()
            arch.cluster_wait()
