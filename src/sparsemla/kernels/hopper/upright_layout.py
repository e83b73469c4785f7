# SPDX-License-Identifier: Apache-2.0
"""Shape of the upright kernel: what lies where in shared memory, and which barriers there are."""

from __future__ import annotations

from typing import Any

from sparsemla.kernels.hopper.layout import BLOCK, LATENT, O_STRIDE, ROPE, Layout, Rooms

TILE = BLOCK * 128
"""Bytes of 64 rows (heads or records) of 64 bf16 columns: one tile of the matrix units' 128-byte swizzle."""
HALF = LATENT // 2
"""Columns of the output that a math warpgroup has."""


class UprightLayout(Layout):
    """Configuration of one variant: 64 heads over bf16 records.

    Args:
        rope: whether records carry 64 bf16 rotary columns.
        cluster: CTAs that share a token, 1 to 16.
        trace, checked: see `Layout`.
    """

    def __init__(self, *, rope: bool, cluster: int, trace: bool = False, checked: bool = False) -> None:
        self.heads, self.kind, self.wide, self.fine = 64, "wide", True, False
        self.rope = rope
        self.cluster = cluster
        self.cluster_log2 = cluster.bit_length() - 1
        self.trace = trace
        self.checked = checked
        self.valuers = 2  # both math warpgroups end a token
        self.loaders = 8  # and bring its query
        self.threads = 384
        self.math_registers, self.gather_registers = 232, 40
        self.copies = 2
        self.narrow_blocks = 0
        self.column_tiles = (LATENT + (ROPE if rope else 0)) // 64
        self.record_bytes = self.column_tiles * 128
        self.scale_bytes = 0
        rooms = Rooms()
        take = rooms.take
        heads = self.heads
        self.off_barriers = take((4 + 4 + 2 + 4) * 8)
        self.off_mask = take(2 * 4 * 4)
        self.off_flag = take(2 * 4 * 4)
        self.off_max = take(heads * 4)
        self.off_decay = take(2 * heads * 4)
        self.off_q_factor = take(heads * 4)
        self.off_sums = take(2 * heads * 4)
        self.off_ml = take(heads * 8)
        self.off_low = take(TILE, 1024)  # P's second terms: half of the tile a buffer
        self.off_p = self.off_low  # `combine` keeps its weights there
        self.off_q = take(self.column_tiles * TILE, 1024)
        self.off_q_rope = self.off_q + 8 * TILE
        self.off_ring = take(2 * self.column_tiles * TILE, 1024)
        self.off_main = 0 if rope else take(2 * TILE, 1024)
        self.off_partial = self.off_q
        self.shared_bytes = max(rooms.end, self.off_partial + heads * O_STRIDE * 4)
        # mbarriers: a buffer's two halves each; a buffer each; one for each quarter of the heads.
        self.K_FULL, self.K_EMPTY, self.P_FULL, self.TURN = 0, 4, 8, 10

    def keys(self, buffer: Any) -> Any:
        """Offset of a buffer of records."""
        return self.off_ring + buffer * (self.column_tiles * TILE)

    def main_terms(self, buffer: int) -> int:
        """Offset of P's first terms: over the block's rotary columns, which its own scores alone have read."""
        return self.keys(buffer) + 8 * TILE if self.rope else self.off_main + buffer * TILE

    def low_steps(self, buffer: int) -> range:
        """Products of 16 records whose P has a second term: half of those of a block, by turns the first and the last
        ones."""
        return range(2 * buffer, 2 * buffer + 2)

    def place_in_ring(self, count: Any, granule: Any) -> tuple[Any, Any]:
        """Number of a granule among both buffers', and how often (modulo 2) it was filled before."""
        return (count & 1) * 4 + granule, (count >> 1) & 1

    def blocks_to_bring(self, blocks: Any) -> Any:
        """Blocks go in pairs: an odd one's partner has no key."""
        return (blocks + 1) >> 1 << 1
