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
SHARED_LIMIT = 232_448
"""Bytes of dynamic shared memory a CTA may have on SM90 (227 KiB)."""
MAX_DEPTH = 5
"""Most granules of a warp in the ring."""
SLACK = 6.0
"""How far (in powers of two) a score may exceed the running maximum before that moves: P stays below 2^6 in f16."""

NEG_INF = -float("inf")
RAISE = 256.0
"""What P times a scale is multiplied with in f16, so that groups of small scales keep their digits."""
KEY_RAISE_LOG2 = 6
"""The same, as a power of two, for K times its scale where that is in f16: 448 times this is below 2^15."""
LOWEST = -3.0e38
"""Running maximum before the first key: finite, so that no difference of two maxima is a NaN."""


class Rooms:
    """Deals out shared memory from its start on. `end`: the bytes dealt out so far."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size: int, align: int = 16) -> int:
        """Offset of `size` more bytes."""
        start = (self.end + align - 1) // align * align
        self.end = start + size
        return start


class Layout:
    """Configuration and code of one variant.

    Args:
        heads: rows of the query tile: 8, 16, 32 or 64 (over bf16 records that is `UprightLayout`).
        rope: whether records carry 64 bf16 rotary columns.
        kind: what records are: "sparse": e4m3 with four float32 scales (FP8_DS_MLA, FP8_NOPE); "wide": bf16 throughout
            (BF16); "v4" and "v41": e4m3 with e8m0 scales behind the page's data (FP8_V4, whose rotary columns are
            values, too, and FP8_V41).
        cluster: CTAs that share a token, 1 to 16.
        trace: whether the first CTA reports the cycles of each phase.
        checked: whether every lane arrives at barriers itself: slower, for compute-sanitizer's racecheck only, which
            does not follow the order through a warp's meeting to the one lane that arrives for it.
    """

    def __init__(
        self, *, heads: int, rope: bool, cluster: int, kind: str = "sparse", trace: bool = False, checked: bool = False
    ) -> None:
        self.trace = trace
        self.checked = checked
        self.heads = heads
        self.rope = rope
        self.kind = kind
        self.wide = wide = kind == "wide"
        self.fine = fine = kind in ("v4", "v41")
        self.cluster = cluster
        self.cluster_log2 = cluster.bit_length() - 1
        # Warpgroups a job. Two have half of the output's columns each. Where registers allow, two take the scores of
        # the blocks in turn.
        self.valuers, self.scorers = 2, 1 if heads == 64 else 2
        self.threads = 128 * (self.valuers + self.scorers + 1)
        # Warps that do not gather; all of them bring the query of a token that is cut.
        self.loaders = 4 * (self.valuers + self.scorers)
        # Groups of 128 columns of the output a value warpgroup has, and how many of them it loads at a time.
        self.parts = GROUPS // self.valuers
        self.unit = 2 if heads < 32 and kind == "sparse" else 1
        # Fragments of V^T, 64 columns each, that are multiplied together, and how many such batches there are.
        self.batch, self.batches = {8: (4, 2), 16: (4, 2), 32: (2, 2), 64: (1, 3)}[heads]
        # Below 64 heads P is small: it is kept four times, once for every group of columns, with the records' scales of
        # that group in it, and V enters the product as it is. With 64 heads V is scaled. Where records are bf16,
        # nothing is scaled, but P has to be bf16 like V, which is too coarse: it is kept as a sum of two.
        self.copies = 2 if wide else 1 if heads == 64 or fine else GROUPS
        self.scaled_values = fine or heads == 64 and not wide
        # Rows of the table of scales for V, and how many of them a group of 128 columns has. V4's last row is its
        # rotary columns' power of two, in bf16.
        self.scale_rows, self.scale_rows_a_group = {"v4": (9, 2), "v41": (16, 4)}.get(kind, (GROUPS, 1))
        self.value_registers, self.score_registers, self.gather_registers = {
            8: (96, 104, 56) if kind == "sparse" else (96, 120, 48),
            16: (96, 112, 56) if kind == "sparse" else (96, 120, 48),
            32: (112, 112, 32) if kind == "sparse" else (120, 104, 32),
            64: (176, 128, 32) if fine else (176, 136, 24),
        }[heads]
        # Sets of fragments of K, 64 columns each: one is filled while others are multiplied.
        self.sets = {"sparse": {8: 4, 16: 4, 32: 3, 64: 3}, "wide": {8: 4, 16: 4, 32: 2}}.get(
            kind, {8: 3, 16: 3, 32: 2, 64: 2}
        )[heads]
        # Products of 16 columns started together. The warp stands still while products queue, so where they take long
        # few are started at a time and the next ones' fragments are filled in between.
        self.piece = 8 if heads == 8 else 4
        # Bytes that lie together of a record, of scales that lie elsewhere, and what a record takes in the ring (see
        # `record_of`). Blocks of 64 e4m3 columns.
        rotary = ROPE * 2 if rope else 0
        self.record_bytes, self.scale_bytes, self.record_stride, self.narrow_blocks = {
            "sparse": (LATENT + 16 + rotary, 0, LATENT + 16 + rotary, 8),
            "wide": (LATENT * 2 + rotary, 0, LATENT * 2 + rotary + 16, 0),
            "v4": (448 + rotary, 8, 608, 7),
            "v41": (LATENT, 16, LATENT + 16, 8),
        }[kind]
        self.granule_bytes = GRANULE * self.record_stride
        # Records of a granule that the bulk copy engine brings.
        self.bulk = 8
        rooms = Rooms()
        take = rooms.take
        # Two buffers of P, so that scores run a block ahead of the output.
        self.off_p = take(2 * self.copies * heads * BLOCK * 2, 1024)
        self.off_ratio = take(2 * self.scale_rows * BLOCK * 2 if self.scaled_values else 0)
        self.off_decay = take(2 * heads * 4)
        self.off_max = take(heads * 4)
        self.off_new_max = take(heads * 4)
        self.off_ml = take(heads * 8)
        self.off_reduce = take(4 * self.scorers * heads * 4)
        self.off_q_factor = take(heads * 4)
        # Words: a buffer of P each, the last of its blocks that moved the maxima; the last one of all; whether there
        # was a key.
        self.off_flag = take(16)
        self.off_barriers = take((8 * MAX_DEPTH + 8) * 8)
        self.off_mask = take(4 * MAX_DEPTH * 4)
        self.off_q = take(heads * LATENT * 2, 1024)
        self.off_q_rope = take(heads * ROPE * 2 if rope else 0, 1024)
        # Granules in the ring, the same number for each warp.
        self.depth = min(MAX_DEPTH, (SHARED_LIMIT - rooms.end) // (4 * self.granule_bytes))
        self.slots = 4 * self.depth
        self.off_ring = take(self.slots * self.granule_bytes)
        # Partial outputs of a token that is cut lie over query and ring, when all are done with them.
        self.off_partial = self.off_q
        self.shared_bytes = max(rooms.end, self.off_partial + heads * O_STRIDE * 4)
        # mbarriers: two for every granule of the ring, two for every buffer of P, then one each.
        self.RAW_FULL, self.RAW_EMPTY = 0, self.slots
        self.P_FULL, self.P_EMPTY, self.Q_FULL, self.ML_FULL, self.ML_EMPTY, self.TURN = (
            2 * self.slots + i for i in (0, 2, 4, 5, 6, 7)
        )

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

    def _barrier(self, base: Any, kind: int, index: Any = 0) -> Any:
        return cute.make_ptr(
            Int64, base + self.off_barriers + (kind + index) * 8, cute.AddressSpace.smem, assumed_align=8
        )

    def place_in_ring(self, count: Any, granule: Any) -> tuple[Any, Any]:
        """Slot of a granule of block `count` in the ring, and how often (modulo 2) it was filled before."""
        return granule * self.depth + count % self.depth, (count // self.depth) & 1  # a warp's granules lie together

    def blocks_to_bring(self, blocks: Any) -> Any:
        """How many blocks the gather warpgroup brings of a tile with so many."""
        return blocks

    def term(self, number: int, low: Any, high: Any) -> Any:
        """Term 0 or 1 of two values of P as a sum of two bf16 each."""
        first = ptx.pack_bf16x2(low, high)
        if number == 0:
            return first
        return ptx.pack_bf16x2(low - ptx.bf16_to_f32(first, 0), high - ptx.bf16_to_f32(first, 1))

    def _smem(self, address: Any, dtype: Any, kind: Any, shape: tuple[int, int], order: tuple[int, int]) -> Any:
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=order)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)

    def set_registers(self, count: int) -> None:
        """Moves a warpgroup from the registers a thread it starts with (a multiple of 8) to its share."""
        start = 65536 // self.threads // 8 * 8
        if count == start:
            return
        if count > start:
            arch.setmaxregister_increase(count)
        else:
            arch.setmaxregister_decrease(count)

    @cute.jit
    def signal(self, base: Int32, kind: cutlass.Constexpr, index: Int32, lane: Int32):
        """A warp that is done with something arrives at an mbarrier: one lane for all, once all have met."""
        if cutlass.const_expr(self.checked):
            arch.mbarrier_arrive(self._barrier(base, kind, index))
        else:
            arch.sync_warp()
            if lane == 0:
                arch.mbarrier_arrive(self._barrier(base, kind, index))

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

    def blocks_of(self, length: Any) -> Any:
        """Blocks that hold `length` records. Shifts and masks stand for divisions throughout: the compiler does not
        know that nothing here is negative, and rounds towards minus infinity in many instructions."""
        return (length + (BLOCK - 1)) >> (BLOCK.bit_length() - 1)

    @cute.jit
    def my_blocks(self, length: Int32, extra: Int32, rank: Int32):
        """Blocks of this CTA: every `cluster`-th of the first set's blocks followed by the extra set's."""
        blocks = self.blocks_of(length) + self.blocks_of(extra)
        return (blocks - rank + (self.cluster - 1)) >> self.cluster_log2
