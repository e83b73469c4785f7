# SPDX-License-Identifier: Apache-2.0
"""The query tile: from global memory into the order that the fragments of K ask for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import Layout
from sparsemla.kernels.hopper.params import Params


class Query(Layout):
    """Loading queries."""

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
        """Half a warp a head: brings the row into f16's range by a power of two, whatever the kind of records, and
        stores it in the column order of the fragments of K."""
        passes = (self.heads + 2 * warps - 1) // (2 * warps)
        batch = min(passes, 4)
        words = cute.make_rmem_tensor((batch, 5, 4), Uint32)
        for start in cutlass.range(0, passes, batch, unroll=1):
            for t in cutlass.range_constexpr(batch):
                row = (start + t) * (2 * warps) + warp * 2 + (lane >> 4)
                head = head0 + row
                present = Int32((head < p.heads) & (row < self.heads))
                chunk = lane & 15
                here = p.q_nope + Int64(token) * p.q_nope_token + Int64(head) * p.q_nope_head + Int64(chunk) * 16
                for i in cutlass.range_constexpr(4):
                    there_is = present
                    if cutlass.const_expr(2 * i + 1 == self.narrow_blocks):  # V4: 448 columns
                        if chunk >= 8:
                            there_is = Int32(0)
                    got = ptx.ldg128(here + i * 256, there_is)
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
                self.store_query(p, base, (start + t) * (2 * warps) + warp * 2 + (lane >> 4), lane, words, t)

    @cute.jit
    def store_query(self, p: Params, base: Int32, row: Int32, lane: Int32, words: cute.Tensor, t: cutlass.Constexpr):
        """Row `row` of the query tile, lane's share of it in words[t], to shared memory."""
        chunk = lane & 15
        # The magnitude of a bf16 is ordered as its bits are.
        pair = words[t, 0, 0] & 0x7FFF7FFF
        for i in cutlass.range_constexpr(5 if self.rope else 4):
            for w in cutlass.range_constexpr(4):
                pair = ptx.max_u16x2(pair, words[t, i, w] & 0x7FFF7FFF)
        largest = cutlass.max(Int32(pair & 0xFFFF), Int32(pair >> 16))
        for s in cutlass.range_constexpr(4):
            largest = cutlass.max(largest, arch.shuffle_sync_bfly(largest, 8 >> s))
        exponent = cutlass.max(largest >> 7, Int32(8))
        # The row's largest magnitude comes to lie in [2^7, 2^8).
        shrink = ptx.bits_to_f32((Int32(261) - exponent) * 8388608)
        undo = ptx.bits_to_f32((exponent - 7) * 8388608)
        if row < self.heads:
            for i in cutlass.range_constexpr(5):
                self.store_columns(base, row, chunk, shrink, words, t, i)
            if chunk == 0:
                # Beyond 1e28 a score could pass float32's range; the softmax of such scores has one winner with this
                # factor too.
                factor = ptx.fmax(ptx.fmin(undo * p.scale_log2, Float32(1e28)), Float32(-1e28))
                ptx.sts_f32(base + self.off_q_factor + row * 4, factor)

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
        """Eight of the columns 128 i to 128 i + 127 of a row, times `shrink`, in the order of the fragments of K."""
        # Columns 8 chunk ... of a block of 64, as four pairs. Of e4m3 lane q of a fragment holds columns 16 q
        # ... 16 q + 15 of the block, four a product: pair (h, u) belongs to product 2 (chunk % 2) + h and lies
        # at columns 8 u + 2 q of it. Of bf16 it holds 8 q ... of each half of 32: the pair belongs to product
        # 2 (chunk // 4) + h and lies at columns 8 u + 2 q.
        block = 2 * i + (chunk >> 3)
        narrow_product, narrow_quad = chunk & 1, (chunk >> 1) & 3
        wide_product, wide_quad = (chunk >> 2) & 1, chunk & 3
        for h in cutlass.range_constexpr(2):
            for u in cutlass.range_constexpr(2):
                word = words[t, i, 2 * h + u]
                first = ptx.bf16_to_f32(word, 0) * shrink
                second = ptx.bf16_to_f32(word, 1) * shrink
                narrow = (2 * (2 * narrow_product + h) + u) ^ (row & 7)
                wide = (2 * (2 * wide_product + h) + u) ^ (row & 7)
                target = base + self.off_q + block * (self.heads * 128) + row * 128
                if cutlass.const_expr(i < 4 and self.wide):
                    ptx.sts_i32(target + wide * 16 + wide_quad * 4, ptx.pack_bf16x2(first, second))
                elif cutlass.const_expr(i < 4):
                    ptx.sts_i32(target + narrow * 16 + narrow_quad * 4, ptx.pack_f16x2(first, second))
                elif cutlass.const_expr(self.rope):
                    if chunk < 8:
                        target = base + self.off_q_rope + row * 128
                        ptx.sts_i32(target + wide * 16 + wide_quad * 4, ptx.pack_bf16x2(first, second))

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
            if line >= (self.narrow_blocks if self.fine else 8):
                address = p.q_rope + Int64(token) * p.q_rope_token + Int64(head) * p.q_rope_head
            if (tile < p.tiles) & (row < self.heads) & (head < p.heads):
                ptx.prefetch_l2(address)
