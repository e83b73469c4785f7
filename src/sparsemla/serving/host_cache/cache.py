# SPDX-License-Identifier: Apache-2.0
"""`HostCache`: one layer's full cache in host memory, with a hot buffer of each request's records on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sparsemla.cache import PagedKVCache, check_count, slots_from_positions
from sparsemla.formats import KVFormat, RecordLayout, ScaleStyle, pack
from sparsemla.serving.host_cache.hot import APPENDED, HITS, MISSES, OVERFLOWED, HotSet, Shard, held_positions
from sparsemla.serving.host_cache.lanes import RequestLanes
from sparsemla.serving.host_cache.moving import Records, move
from sparsemla.serving.host_cache.staging import Piece, StagingRing

STAGED_RECORDS = 2048
"""Records of a staging buffer where no ring is given."""
STAGE_PROGRAMS = 256
"""Programs of the device that bring a staged context, each with one record on its way: enough to fill the bus, few
enough (two small ones an SM) to leave the SMs to others."""


@dataclass(frozen=True)
class HostCacheStats:
    """What a host cache did since it was made or `reset_stats`.

    Attributes:
        hits: keys of query rows that were hot, or that another entry of the same call brought.
        misses: records brought into the hot buffer.
        appended: records written to host memory and the hot buffer at once.
        written: records written to host memory alone.
        staged: records of contexts that were staged.
        bytes_to_device: of misses and staged records.
        bytes_to_host: of appended and written records.
        overflowed: keys that found no place in the hot buffer and were left out. Above 0 an answer was wrong: more rows
            of one request came at once than `rows_at_once` allows.
    """

    hits: int
    misses: int
    appended: int
    written: int
    staged: int
    bytes_to_device: int
    bytes_to_host: int
    overflowed: int

    @property
    def hit_rate(self) -> float:
        """Hits of all keys; 1 where there were none."""
        return self.hits / (self.hits + self.misses) if self.misses else 1.0


class HostCache:
    """Records of one layer in host memory; what query rows name is brought to the device before they are attended.

    Every record is in host memory from the moment it is written: the hot buffer can be lost at any time. Everywhere
    `request_ids` are rows of the block table of the pool in host memory, or anything outside it for rows without keys;
    with `shard` positions are global ones, and those of other ranks name no record.

    Args:
        cache: the full cache, in host memory: pinned where the hot buffer is on a GPU (see `host_pool`).
        lanes: which request has which part of the hot buffer; its device is the hot buffer's.
        hot_records: records a request may have on the device, at least topk. For decodes of n query tokens in one pass
            n · topk; more keep more between steps.
        topk: records a row names, at most.
        max_rows: rows of a call, at most.
        staging: buffers for contexts of prefills, shared by all layers; None: a small ring of its own.

    Raises:
        ValueError: the cache is on a device or not pinned, or the hot buffer does not hold the records of one row.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        lanes: RequestLanes,
        *,
        hot_records: int,
        topk: int,
        max_rows: int,
        staging: StagingRing | None = None,
    ) -> None:
        check_count("topk", topk, 1)
        check_count("max_rows", max_rows, 1)
        check_count("hot_records", hot_records, 1)
        if hot_records < topk:
            raise ValueError(
                f"hot_records: got {hot_records}, accepted are at least topk = {topk}, the records of one row"
            )
        if cache.device.type != "cpu":
            raise ValueError(f"cache: got device {cache.device}, accepted is host memory (cpu)")
        self.device = lanes.device
        if self.device.type == "cuda" and not cache.data.is_pinned():
            raise ValueError("cache: got pageable memory, accepted is pinned memory (host_pool) where the GPU reads it")
        self.cache = cache
        self.lanes = lanes
        self.topk = topk
        self.max_rows = max_rows
        self.hot = HotSet(lanes, cache, hot_records=hot_records, entries=max_rows * topk)
        self.staging = staging or StagingRing(cache.layout.page_bytes(STAGED_RECORDS), device=self.device)
        self._written = torch.zeros((), dtype=torch.int64, device=self.device)
        self._staged = 0
        lanes.attach(self)

    @property
    def layout(self) -> RecordLayout:
        """Layout of the records, in host memory and on the device."""
        return self.cache.layout

    @property
    def staged_records(self) -> int:
        """Records of a piece that `stage` takes, at most."""
        records = self.staging.nbytes // self.layout.record_bytes
        while records and self.layout.page_bytes(records) > self.staging.nbytes:
            records -= 1
        return records

    def reservations(self) -> dict[str, int]:
        """Bytes on the device by name. A decode step on a GPU takes nothing beyond them."""
        sizes = self.hot.sizes()
        sizes["lanes (all layers)"] = self.lanes.nbytes
        sizes["staging (all layers)"] = self.staging.buffers.numel()
        return sizes

    # -- attention's side ----------------------------------------------------------------------------------------------

    def rows_at_once(self, topk: int, *, of_one_request: int, longest: int) -> int:
        """Query rows that one `bring` takes whatever they name.

        Args:
            topk: records a row names, at most.
            of_one_request: rows that belong to one request, at most.
            longest: positions of the longest request.

        Raises:
            ValueError: topk is above that at construction.
        """
        if topk > self.topk:
            raise ValueError(f"topk: got {topk}, accepted are at most {self.topk} as at construction")
        hot, page = self.hot.hot_records, self.cache.block_size
        of_request = hot // max(topk, 1)
        whole = -(-longest // page) * page <= hot
        return self.max_rows if whole or of_one_request <= of_request else min(self.max_rows, of_request)

    def bring(
        self, indices: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, shard: Shard | None = None
    ) -> tuple[PagedKVCache, torch.Tensor]:
        """Makes the records that rows name resident.

        Args:
            indices: (rows, topk) int32 positions, no more rows than `rows_at_once`; what names no record is no key.
            request_ids: (rows,) int32.
            block_table: (requests, pages) int32.
            shard: see the class.

        Returns:
            The hot buffer, and (rows, topk) int32 slots in it, -1 for no key. Valid until the next call.

        Raises:
            ValueError: too many rows or columns, or a block table for more requests or positions than there are lanes.
        """
        rows, topk = indices.shape
        if rows > self.max_rows or topk > self.topk:
            raise ValueError(
                f"indices: got shape {(rows, topk)}, accepted are at most {self.max_rows} rows of {self.topk}"
            )
        slots, fetch = self._plan(indices, request_ids, block_table, shard)
        self.hot.bring(slots, fetch)
        return self.hot.pool, slots

    def stage(self, pieces: Sequence[Piece], block_table: torch.Tensor) -> Iterator[PagedKVCache]:
        """For each piece a cache of one page on the device with its records, in order; valid until the next is taken.

        The first piece is on its way when this returns; while one is used, the next is.

        Raises:
            ValueError: a piece of more than `staged_records`.
        """
        most = self.staged_records
        for request, begin, end in pieces:
            if not 0 <= begin < end or end - begin > most:
                raise ValueError(
                    f"pieces: got positions {begin} to {end} of request {request}, accepted are 1 to {most} records"
                )
            self._staged += end - begin

        def fill(piece: Piece, buffer: torch.Tensor) -> None:
            request, begin, end = piece
            positions = torch.arange(begin, end, device=self.device)
            slots = self._host_slots(positions, torch.full_like(positions, request), block_table)
            page = Records.of_pool(_one_page(buffer, self.layout, end - begin))
            count = end - begin
            move(self.hot.host_records, slots, page, None, device=self.device, count=count, programs=STAGE_PROGRAMS)

        filled = self.staging.run(pieces, fill)
        return (_one_page(buffer, self.layout, end - begin) for (_, begin, end), buffer in filled)

    # -- new records ---------------------------------------------------------------------------------------------------

    def append(
        self,
        kv: torch.Tensor,
        positions: torch.Tensor,
        request_ids: torch.Tensor,
        block_table: torch.Tensor,
        shard: Shard | None = None,
        scale_style: ScaleStyle = "float32",
    ) -> None:
        """Stores the records of new tokens in host memory and in the hot buffer (decodes).

        Args:
            kv: (n, d_qk) of a floating dtype, columns [latent | rotary], which is quantised; or (n, record_bytes)
                uint8 as `pack` makes them, which takes no memory on a GPU.
            positions: (n,) int32. What names no record is skipped.
            request_ids, block_table, shard: as in `bring`.
            scale_style: see `sparsemla.formats.pack`.

        Raises:
            ValueError: shapes that do not fit, or more rows than the hot buffer of a request holds.
        """
        records, count = self._packed(kv, positions, scale_style)
        most = min(self.hot.hot_records, self.max_rows * self.topk)
        if count > most:
            raise ValueError(f"kv: got {count} records, accepted are at most {most} at once (more: write)")
        slots, host = self._plan(positions.view(-1, 1), request_ids, block_table, shard, append=True)
        slots, host = slots.view(-1), host.view(-1)
        move(records, None, self.hot.records, slots, device=self.device, count=count)
        # From the hot buffer, so that both hold the same where a caller names a position twice.
        move(self.hot.records, slots, self.hot.host_records, host, device=self.device, count=count)

    def write(
        self,
        kv: torch.Tensor,
        positions: torch.Tensor,
        request_ids: torch.Tensor,
        block_table: torch.Tensor,
        shard: Shard | None = None,
        scale_style: ScaleStyle = "float32",
    ) -> None:
        """As `append`, in host memory alone and any number (prefills). What was hot of these requests is forgotten."""
        records, count = self._packed(kv, positions, scale_style)
        self._check_table(block_table)
        slots = self._host_slots(held_positions(positions.long(), shard), request_ids, block_table)
        lane = self.lanes.of_request[request_ids.long().clamp(0, self.lanes.max_requests - 1)].long()
        self.hot.forget(torch.where(slots >= 0, lane, -1))
        move(records, None, self.hot.host_records, slots, device=self.device, count=count)
        self._written += (slots >= 0).sum()

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def drop(self, lane: int) -> None:
        """Forgets what is hot of a lane. Nothing is lost: it comes again when it is named."""
        self.hot.position_of[lane].fill_(-1)

    def stats(self) -> HostCacheStats:
        """What was counted. Waits for the device."""
        counted = self.hot.counters.sum(0).tolist()
        written = int(self._written)
        size = self.layout.record_bytes
        return HostCacheStats(
            hits=counted[HITS],
            misses=counted[MISSES],
            appended=counted[APPENDED],
            written=written,
            staged=self._staged,
            bytes_to_device=(counted[MISSES] + self._staged) * size,
            bytes_to_host=(counted[APPENDED] + written) * size,
            overflowed=counted[OVERFLOWED],
        )

    def reset_stats(self) -> None:
        """Begins to count anew."""
        self.hot.counters.zero_()
        self._written.zero_()
        self._staged = 0

    def _plan(
        self,
        indices: torch.Tensor,
        request_ids: torch.Tensor,
        block_table: torch.Tensor,
        shard: Shard | None,
        append: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_table(block_table)
        self._check_int32("indices", indices)
        self._check_int32("request_ids", request_ids)
        return self.hot.plan(indices, request_ids, block_table, shard, append)

    def _host_slots(self, local: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        block, slots = self.cache.block_size, self.cache.num_slots
        return slots_from_positions(block_table, request_ids, local, block, num_slots=slots)

    def _check_int32(self, name: str, given: torch.Tensor) -> None:
        if given.dtype != torch.int32 or given.device.type != self.device.type:
            raise ValueError(f"{name}: got {given.dtype} on {given.device}, accepted is int32 on {self.device}")

    def _check_table(self, block_table: torch.Tensor) -> None:
        self._check_int32("block_table", block_table)
        requests, pages = block_table.shape
        positions = pages * self.cache.block_size
        if requests > self.lanes.max_requests or positions > self.lanes.max_len:
            raise ValueError(
                f"block_table: got {requests} requests of {positions} positions, accepted are at most "
                f"{self.lanes.max_requests} requests (max_requests) of {self.lanes.max_len} (max_len)"
            )

    def _packed(self, kv: torch.Tensor, positions: torch.Tensor, scale_style: ScaleStyle) -> tuple[Records, int]:
        """Records of new tokens, and their number."""
        if kv.dtype != torch.uint8:
            kv = pack(kv, self.layout.format, scale_style=scale_style, d_qk=self.cache.d_qk)
        want = (positions.shape[0], self.layout.record_bytes)
        if tuple(kv.shape) != want:
            raise ValueError(f"kv: got records of shape {tuple(kv.shape)}, accepted is {want}")
        return Records.of_rows(kv, self.layout), want[0]


def _one_page(buffer: torch.Tensor, layout: RecordLayout, records: int) -> PagedKVCache:
    """A cache of one page of that many records in a buffer's first bytes."""
    page = buffer[: layout.page_bytes(records)].unsqueeze(0)
    if layout.format is KVFormat.BF16:
        return PagedKVCache.wrap(page.view(torch.bfloat16).view(1, records, layout.d_qk), layout.format)
    return PagedKVCache.wrap(page, layout.format, records)
