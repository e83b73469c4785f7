# SPDX-License-Identifier: Apache-2.0
"""S = K Q^T of one block, for each kind of records: which fragments are filled when, and what scales do to them."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from sparsemla.kernels.hopper import ptx
from sparsemla.kernels.hopper.layout import KEY_RAISE_LOG2
from sparsemla.kernels.hopper.records import Records


class Products(Records):
    """A score warpgroup's products. Registers of a fragment are filled again only when its products have ended."""

    def to_fragment(self, rows: list[Any], w: int, filled: Any, scales: Any = None) -> None:
        """Of 64 columns of a thread's two records those of product w (0 to 3) as its fragment; times the records' two
        scales, if given."""
        for i in range(2):
            for h, value in enumerate(ptx.e4m3x4_to_f16x4(rows[i][w])):
                filled[4 * w + i + 2 * h] = value if scales is None else ptx.mul_f16x2_by(value, scales, i)

    def rescale(self, x: cute.Tensor, step: list[Any], g: int) -> None:
        """S times what stands between group g and the next one."""
        for e in range(self.heads // 2):
            x[e] = x[e] * step[(e // 2) % 2][g]

    def multiply_wide(self, rows: Any, mma: Any, x: Any, sets: list[Any], words: list[Any], queries: list[Any]) -> None:
        """S of bf16 records: the next 64 columns are loaded while the last ones are multiplied."""
        blocks = len(queries) // 4
        self.fill_wide(self.wide_rows(rows, 0), words[0])
        for b in range(blocks):
            if b + 1 < blocks:
                if b + 1 >= self.sets:
                    warpgroup.wait_group(self.sets - 2)  # the fragments filled next are free again
                self.fill_wide(self.wide_rows(rows, 128 * (b + 1)), words[(b + 1) % self.sets])
            warpgroup.fence()
            for k in range(4):
                mma.set(warpgroup.Field.ACCUMULATE, b + k > 0)
                cute.gemm(mma, x, sets[b % self.sets][None, None, k], queries[4 * b + k], x)
            warpgroup.commit_group()
        warpgroup.wait_group(0)

    def multiply_fine(
        self,
        rows: Any,
        scales: Any,
        quad: Any,
        mma: Any,
        rotary_mma: Any,
        x: Any,
        sets: list[Any],
        words: list[Any],
        queries: list[Any],
    ) -> list[Any]:
        """S of records with powers of two for scales, which K takes up in f16: relative to the largest one of the
        record and 2^6 above it, exactly as far down as 2^-21 of it.

        Returns:
            The biased exponents (as of a float32) of what a thread's two records are relative to.
        """
        table = [
            [ptx.lds_u32(scales + (i * 8 * self.record_stride + 4 * w)) for w in range(self.scale_bytes // 4)]
            for i in range(2)
        ]
        if self.kind == "v4":
            table = [[first, second & Uint32(0x00FFFFFF)] for first, second in table]  # the last byte is padding
        highest = []
        for i in range(2):
            pairs = [
                half for word in table[i] for half in (word & Uint32(0x00FF00FF), (word >> 8) & Uint32(0x00FF00FF))
            ]
            for other in pairs[1:]:
                pairs[0] = ptx.max_u16x2(pairs[0], other)
            highest.append(cutlass.max(Int32(pairs[0] & 0xFFFF), Int32(pairs[0] >> 16)))
        loaded_rotary = []
        if self.rope:
            # V4's rotary columns are values, too: no larger than 2^9 in the record's unit.
            loaded_rotary = self.wide_rows(rows, 448)
            for i in range(2):
                largest = loaded_rotary[2 * i][0] & Uint32(0x7FFF7FFF)
                for word in (*loaded_rotary[2 * i][1:], *loaded_rotary[2 * i + 1]):
                    largest = ptx.max_u16x2(largest, word & Uint32(0x7FFF7FFF))
                own = cutlass.max(Int32(largest & 0xFFFF), Int32(largest >> 16))
                for s in range(2):
                    own = cutlass.max(own, arch.shuffle_sync_bfly(own, 1 << s))
                highest[i] = cutlass.max(highest[i], own // 128 - 8)
        exponents = [cutlass.min(cutlass.max(h, Int32(27)), Int32(247)) for h in highest]
        if self.kind == "v41":  # 32 columns a scale: a thread's 16 columns of a block of 64 are in one half
            selector = Uint32(0x6420) + Uint32(quad // 2) * Uint32(0x1111)
            table = [[ptx.bytes_of(t[2 * h], t[2 * h + 1], selector) for h in range(2)] for t in table]
        used = 0
        if self.rope:
            filled = words[0]
            self.fill_wide(loaded_rotary, filled)
            for i in range(2):
                unit = (Int32(2 * 127 + KEY_RAISE_LOG2) - exponents[i]) * 0x00800080  # as two bf16
                for w in range(8):
                    place = 4 * (w // 2) + i + 2 * (w % 2)
                    filled[place] = ptx.mul_bf16x2(filled[place], unit)
            fragments = cute.recast_tensor(sets[0], BFloat16)
            warpgroup.fence()
            for k in range(4):
                rotary_mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                cute.gemm(rotary_mma, x, fragments[None, None, k], queries[4 * self.narrow_blocks + k], x)
            warpgroup.commit_group()
            used = 1
        lift = 127 + KEY_RAISE_LOG2
        ahead = self.latent_rows(rows, 0)
        for b in range(self.narrow_blocks):
            if used >= self.sets:
                warpgroup.wait_group(self.sets - 1)  # the fragments filled next are free again
            powers = []
            for i in range(2):
                field = cutlass.max(ptx.byte(table[i][b // 4], b % 4) + (lift - exponents[i]), Int32(0))
                powers.append(ptx.bits_to_f32(field * 8388608))
            scale = ptx.pack_f16x2(*powers)
            loaded = ahead
            if b + 1 < self.narrow_blocks:
                ahead = self.latent_rows(rows, b + 1)
            for w in range(4):
                self.to_fragment(loaded, w, words[used % self.sets], scale)
            warpgroup.fence()
            for k in range(4):
                mma.set(warpgroup.Field.ACCUMULATE, used + k > 0)
                cute.gemm(mma, x, sets[used % self.sets][None, None, k], queries[4 * b + k], x)
            warpgroup.commit_group()
            used += 1
        warpgroup.wait_group(0)
        widen = [ptx.bits_to_f32((e - KEY_RAISE_LOG2) * 8388608) for e in exponents]
        for e in range(self.heads // 2):
            x[e] = x[e] * widen[e // 2 % 2]
        return exponents

    def fine_ratios(self, scales: Any, quad: Any, exponents: list[Any]) -> list[Any]:
        """A thread's share of its two records' scales relative to their largest, for V: two f16 a word, four groups or
        two; V4's last word has its rotary columns' powers of two, in bf16."""
        own = self.scale_bytes // 4
        table = [
            ptx.lds_u32(scales + (i * 8 * self.record_stride) + quad // (4 // own) * 4)
            if self.kind == "v4"
            else ptx.lds_u32(scales + i * 8 * self.record_stride + quad * 4)
            for i in range(2)
        ]
        if self.kind == "v4":  # two of the word's four bytes
            table = [word >> (quad % 2 * 16) for word in table]
        ratio = []
        for t in range(own):
            powers = [
                ptx.bits_to_f32(cutlass.max(ptx.byte(table[i], t) + (127 - exponents[i]), Int32(0)) * 8388608)
                for i in range(2)
            ]
            ratio.append(ptx.pack_f16x2(*powers))
        if self.kind == "v4":
            ratio.append((Int32(254) - exponents[0]) * 128 + (Int32(254) - exponents[1]) * 8388608)
        return ratio
