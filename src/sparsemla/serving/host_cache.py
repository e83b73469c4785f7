# SPDX-License-Identifier: Apache-2.0
"""A cache whose records live in host memory: what the backend asks of it, and the plainest thing that answers.

The GPU holds a *hot buffer* of records. Before rows are attended, the records they name must be in it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.formats import RecordLayout


class HostRecords(Protocol):
    """Records in host memory, brought to the device on demand. Positions are positions in a request."""

    @property
    def layout(self) -> RecordLayout:
        """Layout of the records, in host memory and in the hot buffer."""

    def rows_at_once(self, topk: int) -> int:
        """Query rows whose `topk` records all fit the hot buffer together (at least 1)."""

    def bring(self, indices: torch.Tensor, request_ids: torch.Tensor) -> tuple[PagedKVCache, torch.Tensor]:
        """Makes the records that rows name resident.

        Args:
            indices: (rows, topk) int32 positions, at most `rows_at_once(topk)` rows; no position means no key.
            request_ids: (rows,) int32, row of the block table, or anything outside it for a row without keys.

        Returns:
            The hot buffer, and (rows, topk) int32 slots in it, -1 for no key. Valid until the next call.
        """

    def stage(self, request: int, begin: int, end: int) -> torch.Tensor:
        """(end - begin, record_bytes) uint8 on the device: the records of a request's positions begin to end."""


class GatheredHostRecords:
    """Copies every record a row names into the hot buffer, each time: correct, without any memory of what is there.

    It looks at the indices on the host, so it waits for the device.

    Args:
        cache: the full cache, in host memory.
        block_table: (requests, pages) int32 in host memory.
        hot_records: records of the hot buffer.
        device: where the hot buffer lives.

    Raises:
        ValueError: the cache is not in host memory.
    """

    def __init__(
        self, cache: PagedKVCache, block_table: torch.Tensor, *, hot_records: int, device: torch.device | str = "cpu"
    ) -> None:
        if cache.device.type != "cpu" or block_table.device.type != "cpu":
            raise ValueError(f"cache: got device {cache.device}, accepted is host memory (cpu)")
        self.cache = cache
        self.block_table = block_table
        self.hot = PagedKVCache.allocate(1, hot_records, cache.format, device=device, d_qk=cache.d_qk)

    @property
    def layout(self) -> RecordLayout:
        """Layout of the records."""
        return self.cache.layout

    def rows_at_once(self, topk: int) -> int:
        """See HostRecords.

        Raises:
            ValueError: the hot buffer does not hold the records of one row.
        """
        if topk > self.hot.num_slots:
            raise ValueError(f"hot_records: got {self.hot.num_slots}, accepted is at least topk = {topk}")
        return self.hot.num_slots // max(topk, 1)

    def bring(self, indices: torch.Tensor, request_ids: torch.Tensor) -> tuple[PagedKVCache, torch.Tensor]:
        """See HostRecords."""
        rows, topk = indices.shape
        if rows > self.rows_at_once(topk):
            raise ValueError(f"indices: got {rows} rows, accepted are at most {self.rows_at_once(topk)} at once")
        slots = slots_from_positions(
            self.block_table,
            request_ids.cpu(),
            indices.cpu(),
            self.cache.block_size,
            num_slots=self.cache.num_slots,
        )
        records = self.cache.gather_bytes(slots.reshape(-1))
        hot_slots = torch.arange(rows * topk, dtype=torch.int64)
        self.hot.write_bytes(hot_slots.to(self.hot.device), records.to(self.hot.device))
        named = torch.where(slots >= 0, hot_slots.view(rows, topk), -1).to(torch.int32)
        return self.hot, named.to(indices.device)

    def stage(self, request: int, begin: int, end: int) -> torch.Tensor:
        """See HostRecords."""
        positions = torch.arange(begin, end)
        ids = torch.full_like(positions, request)
        slots = slots_from_positions(self.block_table, ids, positions, self.cache.block_size)
        return self.cache.gather_bytes(slots).to(self.hot.device)
