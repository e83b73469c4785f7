# SPDX-License-Identifier: Apache-2.0
"""Device code of a host-resident cache: which records are hot, which must come, and the moving of records.

Nothing here waits for the host: which records are missing is known on the device alone, and the kernels read and write
pinned host memory by themselves (unified addressing maps it into the device's address space).
"""

from __future__ import annotations

import triton
import triton.language as tl

_BIG = tl.constexpr(2**31 - 1)


@triton.jit
def _lane_of(request, requests, lane_of_request):
    """-1 for what is no request."""
    known = (request >= 0) & (request < requests)
    return tl.load(lane_of_request + request, mask=known, other=-1)


@triton.jit
def _entries(
    first, end, topk, indices, index_row, request_ids, requests, lane_of_request, lane, rank, world, interleave,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries from `first` on: (entry, request, whether it is of the lane, may be a key, its local position)."""
    entry = first + tl.arange(0, BLOCK)
    row = entry // topk
    request = tl.load(request_ids + row, mask=entry < end, other=-1)
    mine = (entry < end) & (_lane_of(request, requests, lane_of_request) == lane)
    at = row.to(tl.int64) * index_row + entry % topk
    position = tl.load(indices + at, mask=mine, other=-1)
    key = position >= 0
    if world > 1:
        key &= position // interleave % world == rank
    return entry, request, mine, key, position // (interleave * world) * interleave + position % interleave


@triton.jit
def _missing(fetch, slots, entry, mine):
    """(slot of the host's pool, whether that record is missing) of some entries."""
    host = tl.load(fetch + entry, mask=mine, other=-1)
    return host, mine & (host >= 0) & (tl.load(slots + entry, mask=mine, other=0) < 0)


@triton.jit(do_not_specialize=["rows", "topk", "pages", "requests", "num_slots", "rank", "index_row", "table_row"])
def plan(
    indices, index_row, request_ids, lane_of_request, block_table, table_row, requests, pages,
    directory, position_of, order, used, unused_list, used_list, host_list, brought, clock, counters, slots, fetch,
    rows, topk, lanes, max_len, hot, block_size, num_slots, rank, world, interleave,
    APPEND: tl.constexpr, BLOCK: tl.constexpr, SLOT_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program `lane` makes what its request's rows name resident; after the lanes come programs for rows without one.

    Fills `slots` (slot of the hot buffer, -1: no key), with APPEND `fetch` (slot of the host's pool of every key, else
    scratch), and the lists by which the missing ones are moved. The steps are those of
    `sparsemla.serving.host_cache.hot`, in whose terms they are explained; a barrier stands where a step reads what
    other threads of the program wrote.
    """
    lane = tl.program_id(0)
    if lane >= lanes:
        row = lane - lanes
        mine = _lane_of(tl.load(request_ids + row), requests, lane_of_request)
        if (mine < 0) | (mine >= lanes):
            for first in range(0, topk, BLOCK):
                column = first + tl.arange(0, BLOCK)
                tl.store(slots + row * topk + column, -1, mask=column < topk)
                tl.store(fetch + row * topk + column, -1, mask=column < topk)
    else:
        begin = rows
        end = 0
        for first in range(0, rows, ROW_BLOCK):
            row = first + tl.arange(0, ROW_BLOCK)
            request = tl.load(request_ids + row, mask=row < rows, other=-1)
            mine = _lane_of(request, requests, lane_of_request) == lane
            begin = tl.minimum(begin, tl.min(tl.where(mine, row, rows), 0))
            end = tl.maximum(end, tl.max(tl.where(mine, row + 1, 0), 0))
        tl.store(brought + lane, 0)
        if begin < end:
            begin *= topk
            end *= topk
            directory += lane.to(tl.int64) * max_len
            position_of += lane.to(tl.int64) * hot
            order += lane.to(tl.int64) * hot
            used += lane.to(tl.int64) * hot
            unused_list += lane.to(tl.int64) * hot
            used_list += lane.to(tl.int64) * hot
            host_list += lane.to(tl.int64) * hot
            now = tl.load(clock + lane) + 1

            for first in range(0, hot, SLOT_BLOCK):
                slot = first + tl.arange(0, SLOT_BLOCK)
                position = tl.load(position_of + slot, mask=slot < hot, other=-1)
                tl.store(directory + position, slot, mask=(slot < hot) & (position >= 0))
            tl.debug_barrier()

            hits = 0
            for first in range(begin, end, BLOCK):
                entry, request, mine, key, position = _entries(
                    first, end, topk, indices, index_row, request_ids, requests, lane_of_request, lane,
                    rank, world, interleave, BLOCK,
                )  # fmt: skip
                page_at = position // block_size
                key &= page_at < pages
                page = tl.load(block_table + tl.cast(request, tl.int64) * table_row + page_at, mask=key, other=-1)
                host = page.to(tl.int64) * block_size + position % block_size
                slot = tl.load(directory + position, mask=key, other=-1)
                key &= (page >= 0) & (host < num_slots)
                inside = key & (slot >= 0) & (slot < hot)
                hit = inside & (tl.load(position_of + slot, mask=inside, other=-1) == position)
                miss = key & ~hit
                tl.store(used + slot, now, mask=hit)
                tl.store(directory + position, _BIG, mask=miss)
                tl.store(slots + entry, tl.where(hit, lane * hot + slot, -1), mask=mine)
                kept = key if APPEND else miss
                tl.store(fetch + entry, tl.where(kept, host, -1), mask=mine)
                hits += tl.sum(hit.to(tl.int32), 0)
            tl.debug_barrier()

            # Of several entries that name one missing record, the first in the batch brings it.
            for first in range(begin, end, BLOCK):
                entry, _, mine, _, position = _entries(
                    first, end, topk, indices, index_row, request_ids, requests, lane_of_request, lane,
                    rank, world, interleave, BLOCK,
                )  # fmt: skip
                _, miss = _missing(fetch, slots, entry, mine)
                tl.atomic_min(directory + position, entry, mask=miss, sem="relaxed")

            # Slots that no row uses now, least recently used first, and the others.
            unused_count = 0
            for first in range(0, hot, SLOT_BLOCK):
                place = first + tl.arange(0, SLOT_BLOCK)
                slot = tl.load(order + place, mask=place < hot, other=0)
                is_used = tl.load(used + slot, mask=place < hot, other=0) == now
                is_unused = (place < hot) & ~is_used
                rank_unused = unused_count + tl.cumsum(is_unused.to(tl.int32), 0) - 1
                tl.store(unused_list + rank_unused, slot, mask=is_unused)
                tl.store(used_list + place - rank_unused - 1, slot, mask=(place < hot) & is_used)
                unused_count += tl.sum(is_unused.to(tl.int32), 0)
            tl.debug_barrier()

            wanted = 0
            for first in range(begin, end, BLOCK):
                entry, _, mine, _, position = _entries(
                    first, end, topk, indices, index_row, request_ids, requests, lane_of_request, lane,
                    rank, world, interleave, BLOCK,
                )  # fmt: skip
                host, miss = _missing(fetch, slots, entry, mine)
                # Past the first-level cache: atomics act behind it.
                first_of = tl.load(directory + position, mask=miss, other=-1, cache_modifier=".cg")
                wins = miss & (first_of == entry)
                place = wanted + tl.cumsum(wins.to(tl.int32), 0) - 1
                placed = wins & (place < unused_count)
                slot = tl.load(unused_list + place, mask=placed, other=0)
                tl.store(position_of + slot, position, mask=placed)
                tl.store(slots + entry, lane * hot + slot, mask=placed)
                tl.store(host_list + place, host, mask=placed)
                tl.store(fetch + entry, -1, mask=wins & ~placed)
                tl.store(fetch + entry, (-2 - first_of).to(tl.int64), mask=miss & ~wins)
                wanted += tl.sum(wins.to(tl.int32), 0)
            tl.debug_barrier()

            repeats = 0
            for first in range(begin, end, BLOCK):
                entry, _, mine, _, _ = _entries(
                    first, end, topk, indices, index_row, request_ids, requests, lane_of_request, lane,
                    rank, world, interleave, BLOCK,
                )  # fmt: skip
                first_of = -2 - tl.load(fetch + entry, mask=mine, other=0)
                again = mine & (first_of >= 0)
                slot = tl.load(slots + first_of, mask=again, other=-1)
                tl.store(slots + entry, slot, mask=again)
                repeats += tl.sum((again & (slot >= 0)).to(tl.int32), 0)

            brought_count = tl.minimum(wanted, unused_count)
            tl.store(brought + lane, brought_count)
            for first in range(0, hot, SLOT_BLOCK):
                place = first + tl.arange(0, SLOT_BLOCK)
                source = (place + brought_count) % hot
                is_unused = source < unused_count
                slot = tl.load(unused_list + source, mask=(place < hot) & is_unused, other=0)
                slot += tl.load(used_list + source - unused_count, mask=(place < hot) & ~is_unused, other=0)
                tl.store(order + place, slot, mask=place < hot)

            counters += lane * 4
            if APPEND:
                tl.store(counters + 2, tl.load(counters + 2) + hits + repeats + brought_count)
            else:
                tl.store(counters, tl.load(counters) + hits + repeats)
                tl.store(counters + 1, tl.load(counters + 1) + brought_count)
            tl.store(counters + 3, tl.load(counters + 3) + wanted - brought_count)
            tl.debug_barrier()
            tl.store(clock + lane, now)


@triton.jit(do_not_specialize=["entries", "programs", "block", "page", "row", "to_block", "to_page", "to_row"])
def move(
    source, source_slots, block, page, row, at, target, target_slots, to_block, to_page, to_row, to_at,
    entries, counts, programs, WORDS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copies WORDS 8-byte words of each entry whose two slots are not negative; strides in words.

    None as slots: entry i is slot i. With `counts` each lane has its own list of `entries` slots, of which `counts` are
    there, and its own target page of as many records. `programs` programs take the entries (of a lane) in turn. One
    word a thread, so that a warp reads 256 bytes in a row, which host memory needs more than any other.
    """
    word = tl.arange(0, PADDED)
    lane = tl.program_id(0) // programs
    first = tl.cast(lane, tl.int64) * entries
    there = entries
    if counts is not None:
        there = tl.load(counts + lane)
    for number in range(tl.program_id(0) % programs, there, programs):
        start = first + number
        goal = first + number
        if source_slots is not None:
            start = tl.load(source_slots + first + number).to(tl.int64)
        if target_slots is not None:
            goal = tl.load(target_slots + first + number).to(tl.int64)
        if counts is not None:
            goal += first
        if (start >= 0) & (goal >= 0):
            start = start // block * page + start % block * row + at
            goal = goal // to_block * to_page + goal % to_block * to_row + to_at
            tl.store(target + goal + word, tl.load(source + start + word, mask=word < WORDS), mask=word < WORDS)
