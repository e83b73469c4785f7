# SPDX-License-Identifier: Apache-2.0
"""Which records of one layer are hot: the hot buffer, its order of use, and the plan of what must come.

A lane's slots stand in a list, least recently used first. A plan does, for each lane:

1. *directory*: write every hot slot's number at its position. An entry is believed only if that slot holds that
   position, so entries left by other layers and earlier steps do no harm.
2. *look up* every position the rows name: hit, miss or no key. Of several entries that name one missing position, the
   first in the batch wins and brings it.
3. *order*: slots that no row uses now, in their order, then those in use. The winners take the first of them.
4. *rotate* the list by as many: what is used now and what has come end up last.

Slots are never compared by time; a prefix sum is enough. Two forms compute the same bits: torch operations of fixed
shapes (any device, temporaries of the size of the batch) and one kernel of `sparsemla.kernels.triton.residency`
(one program a lane, no temporaries). Neither waits for the device.
"""

from __future__ import annotations

import torch

from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.serving.host_cache.lanes import RequestLanes
from sparsemla.serving.host_cache.moving import Records, device_code, move, on_device

Shard = tuple[int, int, int]
"""(rank, world, interleave), as `context_shard` of `sparse_mla_attention`."""

_BIG = 2**31 - 1
HITS, MISSES, APPENDED, OVERFLOWED = range(4)
"""Columns of `HotSet.counters`."""
_BLOCK, _SLOT_BLOCK, _ROW_BLOCK = 2048, 4096, 128
"""Entries, slots and rows that a plan's kernel treats at once: each step over them waits for memory a few times."""
_PROGRAMS, _LEAST_PROGRAMS = 2048, 64
"""Programs that bring records, each with one on its way: over all lanes, and of a lane at least."""


class HotSet:
    """The hot buffer of one layer: a page of `hot_records` for each lane.

    Args:
        lanes: whose pages.
        host: the pool in host memory.
        hot_records: records of a page.
        entries: entries (rows · topk) of a plan, at most.

    Attributes:
        pool: the records.
        counters: (lanes, 4) int64 on the device, see the names above.
    """

    def __init__(self, lanes: RequestLanes, host: PagedKVCache, *, hot_records: int, entries: int) -> None:
        count, device = lanes.max_requests, lanes.device
        self.lanes = lanes
        self.hot_records = hot_records
        self.pool = PagedKVCache.allocate(count, hot_records, host.format, device=device, d_qk=host.d_qk)
        self.host = host
        # One element more than slots: it takes what belongs nowhere, so that nobody asks the device how much does.
        self._position_of = torch.full((count * hot_records + 1,), -1, dtype=torch.int32, device=device)
        self.position_of = self._position_of[:-1].view(count, hot_records)
        self.records, self.host_records = Records.of_pool(self.pool), Records.of_pool(host)
        self.order = torch.arange(hot_records, dtype=torch.int32, device=device).repeat(count, 1)
        self.counters = torch.zeros((count, 4), dtype=torch.int64, device=device)
        self._slots = torch.full((entries,), -1, dtype=torch.int32, device=device)
        self._fetch = torch.full((entries,), -1, dtype=torch.int64, device=device)
        self._code = device_code(device.type)
        scratch = 0 if self._code is None else count
        self._clock = torch.zeros(scratch, dtype=torch.int32, device=device)
        self._lists = torch.zeros((3, scratch, hot_records), dtype=torch.int32, device=device)
        self._host_list = torch.zeros((scratch, hot_records), dtype=torch.int64, device=device)
        self._brought = torch.zeros(scratch, dtype=torch.int32, device=device)

    def sizes(self) -> dict[str, int]:
        """Bytes on the device by name: what was reserved, and all a plan ever takes on a GPU."""
        tensors = {
            "hot_records": self.pool.data,
            "hot_positions": self._position_of,
            "hot_order": self.order,
            "hot_counters": self.counters,
            "plan_slots": self._slots,
            "plan_fetch": self._fetch,
            "plan_lists": self._lists,
            "plan_host_list": self._host_list,
            "plan_brought": self._brought,
            "plan_clock": self._clock,
        }
        return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}

    def bring(self, slots: torch.Tensor, fetch: torch.Tensor) -> None:
        """Copies what the last plan found missing from the host's pool; `slots` and `fetch` are what it returned."""
        source, target, device = self.host_records, self.records, self.pool.device
        if self._code is None:
            move(source, fetch.view(-1), target, slots.view(-1), device=device, count=slots.numel())
        elif slots.numel():
            programs = max(_PROGRAMS // self.lanes.max_requests, _LEAST_PROGRAMS)
            lists, hot = (self._host_list, self._lists[1]), self.hot_records
            move(source, lists[0], target, lists[1], device=device, count=hot, counts=self._brought, programs=programs)

    def forget(self, lanes: torch.Tensor) -> None:
        """Nothing of these lanes is hot any more: (n,) int64, negative for none."""
        count = self.lanes.max_requests
        named = torch.zeros(count + 1, dtype=torch.bool, device=lanes.device)
        named[torch.where(lanes >= 0, lanes, count)] = True
        self.position_of.masked_fill_(named[:count, None], -1)

    def plan(
        self,
        indices: torch.Tensor,
        request_ids: torch.Tensor,
        block_table: torch.Tensor,
        shard: Shard | None = None,
        append: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives every record that rows name a hot slot.

        Args:
            indices: (rows, topk) int32 positions; what names no record is no key.
            request_ids: (rows,) int32, rows of the block table.
            block_table: (requests, pages) int32 of the pool in host memory.
            shard: positions are global ones, those of other ranks no keys.
            append: the caller has the records: nothing is counted as hit or miss, and every key gets its host slot.

        Returns:
            Views valid until the next plan: (rows, topk) int32 hot slots, -1 for no key, and (rows, topk) int64 what
            `bring` wants to see again; with `append` slots of the host pool, negative for a key named before.
        """
        rows, topk = indices.shape
        slots = self._slots[: rows * topk].view(rows, topk)
        fetch = self._fetch[: rows * topk].view(rows, topk)
        if rows * topk == 0:
            return slots, fetch
        if self._code is None:
            self._plan(slots, fetch, indices, request_ids, block_table, shard, append)
            return slots, fetch
        lanes = self.lanes
        with on_device(self.pool.device):
            self._code.plan[(lanes.max_requests + rows,)](
                indices, indices.stride(0), request_ids, lanes.of_request,
                block_table, block_table.stride(0), *block_table.shape, lanes.directory,
                self.position_of, self.order, *self._lists, self._host_list, self._brought, self._clock, self.counters,
                slots, fetch, rows, topk, lanes.max_requests, lanes.max_len, self.hot_records,
                self.host.block_size, self.host.num_slots, *(shard or (0, 1, 1)),
                APPEND=append, BLOCK=_BLOCK, SLOT_BLOCK=_SLOT_BLOCK, ROW_BLOCK=_ROW_BLOCK, num_warps=16,
            )  # fmt: skip
        return slots, fetch

    # -- in torch ------------------------------------------------------------------------------------------------------

    def _write_directory(self) -> None:
        count, hot = self.position_of.shape
        device, max_len = self.position_of.device, self.lanes.max_len
        start = torch.arange(0, count * max_len, max_len, device=device).unsqueeze(1)
        keys = torch.where(self.position_of >= 0, start + self.position_of, self.lanes.directory.numel() - 1)
        numbers = torch.arange(hot, dtype=torch.int32, device=device).repeat(count)
        self.lanes.directory.index_put_((keys.view(-1),), numbers)

    def _plan(
        self,
        slots: torch.Tensor,
        fetch: torch.Tensor,
        indices: torch.Tensor,
        request_ids: torch.Tensor,
        block_table: torch.Tensor,
        shard: Shard | None,
        append: bool,
    ) -> None:
        rows, topk = indices.shape
        count, hot = self.position_of.shape
        device = indices.device
        directory, max_len = self.lanes.directory, self.lanes.max_len
        spare, nowhere = count * hot, directory.numel() - 1
        # The lane of each row (count: none), the record of each entry.
        known = (request_ids >= 0) & (request_ids < block_table.shape[0])
        row_lane = self.lanes.of_request[request_ids.clamp(0, count - 1).long()].long()
        row_lane = torch.where(known & (row_lane >= 0), row_lane, count).unsqueeze(1)
        is_lane = row_lane == torch.arange(count + 1, device=device)
        block_size, num_slots = self.host.block_size, self.host.num_slots
        host = slots_from_positions(block_table, request_ids, indices, block_size, shard, num_slots=num_slots)
        position = held_positions(indices.long(), shard)
        lane = row_lane.expand(rows, topk)
        key = (host >= 0) & (lane < count) & (position >= 0) & (position < max_len)
        keys = torch.where(key, lane * max_len + position, nowhere)

        self._write_directory()
        slot = directory[keys].long()
        inside = key & (slot >= 0) & (slot < hot)
        at = torch.where(inside, lane * hot + slot, spare)
        hit = inside & (self._position_of[at] == position)
        at = torch.where(hit, at, spare)

        miss = key & ~hit
        entry = torch.arange(rows * topk, dtype=torch.int32, device=device).view(rows, topk)
        missing = torch.where(miss, keys, nowhere)
        directory[missing] = _BIG
        directory.scatter_reduce_(0, missing.view(-1), entry.view(-1), "amin")
        first = directory[keys].long()
        wins = miss & (first == entry)

        used = torch.zeros(count * hot + 1, dtype=torch.bool, device=device)
        used[at] = True
        in_use = used[:-1].view(count, hot).gather(1, self.order.long())
        order = self.order.gather(1, torch.argsort(in_use.to(torch.int8), dim=1, stable=True))
        unused = hot - in_use.sum(1)

        # Winners of the same lane that stand before each entry: in earlier rows, and in its own.
        in_row = is_lane * wins.sum(1, keepdim=True)
        place = (in_row.cumsum(0) - in_row).gather(1, row_lane) + wins.cumsum(1) - wins.long()
        wanted = in_row.sum(0)[:-1]
        brought = torch.minimum(wanted, unused)
        safe_lane = lane.clamp_max(count - 1)
        placed = wins & (place < unused[safe_lane])
        victim = order[safe_lane, place.clamp(0, hot - 1)].long()
        at = torch.where(placed, lane * hot + victim, at)
        self._position_of[torch.where(placed, at, spare)] = torch.where(placed, position, -1).to(torch.int32)
        at = torch.where(miss & ~wins, at.view(-1)[first.clamp(0, rows * topk - 1)], at)

        slots.copy_(torch.where(at == spare, -1, at))
        fetch.copy_(torch.where(placed | (hit & append), host, -1))
        turn = torch.arange(hot, device=device) + brought.unsqueeze(1)
        self.order.copy_(order.gather(1, turn % hot))
        found = (is_lane * (key & (at != spare) & ~placed).sum(1, keepdim=True)).sum(0)[:-1]
        if append:
            self.counters[:, APPENDED] += found + brought
        else:
            self.counters[:, HITS] += found
            self.counters[:, MISSES] += brought
        self.counters[:, OVERFLOWED] += wanted - brought


def held_positions(positions: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Global positions as this rank counts its own, -1 for those of other ranks; same dtype."""
    if shard is None:
        return positions
    rank, world, interleave = shard
    held = (positions >= 0) & (positions // interleave % world == rank)
    return torch.where(held, positions // (interleave * world) * interleave + positions % interleave, -1)
