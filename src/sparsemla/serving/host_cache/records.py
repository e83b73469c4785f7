# SPDX-License-Identifier: Apache-2.0
"""What the backend asks of a cache in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import RecordLayout

Shard = tuple[int, int, int]
"""(rank, world, interleave), as `context_shard` of `sparse_mla_attention`."""

Piece = tuple[int, int, int]
"""(request, begin, end): the records of a request's positions (under DCP: this rank's local positions) begin to end."""


class HostRecords(Protocol):
    """Records in host memory, brought to the device on demand. Requests are rows of the step's block table."""

    @property
    def layout(self) -> RecordLayout:
        """Layout of the records, in host memory and on the device."""

    @property
    def staged_records(self) -> int:
        """Records of a piece that `stage` takes, at most."""

    def rows_at_once(self, topk: int, *, of_one_request: int, longest: int) -> int:
        """Query rows that one `bring` takes whatever they name.

        Args:
            topk: records a row names, at most.
            of_one_request: rows that belong to one request, at most.
            longest: positions of the longest request.

        Raises:
            ValueError: not even one row.
        """

    def bring(
        self,
        indices: torch.Tensor,
        request_ids: torch.Tensor,
        block_table: torch.Tensor,
        shard: Shard | None = None,
    ) -> tuple[PagedKVCache, torch.Tensor]:
        """Makes the records that rows name resident.

        Args:
            indices: (rows, topk) int32 positions, no more rows than `rows_at_once`; what names no record is no key.
            request_ids: (rows,) int32, row of the block table, or anything outside it for a row without keys.
            block_table: (requests, pages) int32 of the pool in host memory.
            shard: with it positions are global ones, and those of other ranks are no keys.

        Returns:
            The hot buffer, and (rows, topk) int32 slots in it, -1 for no key. Valid until the next call.
        """

    def stage(self, pieces: Sequence[Piece], block_table: torch.Tensor) -> Iterator[PagedKVCache]:
        """For each piece a cache of one page on the device with its records, in order; valid until the next is taken.

        The first piece is on its way when this returns; while one is used, the next is.
        """
