# SPDX-License-Identifier: Apache-2.0
"""How the work of a call is handed out to programs, on the host.

Without a plan every row is cut into the same number of pieces, none where there are rows enough: two numbers,
computed in the kernel from the row's own length, so nothing has to be copied to the device. A caller's plan that
splits something becomes a small table on the device, copied once for each plan and device.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from sparsemla.schedule import BLOCK_KEYS, D_V, META_COLUMNS, IntArray, SplitSchedule

TO_THE_END = 2**24
"""Block that no row reaches: the last piece of a row goes to the end of its keys, however many there are by then."""

_SETUP_BLOCKS = 3
"""What a program costs beyond its keys, in blocks of 64 keys."""
_COMBINE_BLOCKS = 4
"""What a second launch that merges pieces costs, in the same unit."""


@dataclass(frozen=True, eq=False)
class Table:
    """A plan's pieces on a device: (items, 4) and (split requests, 3) int32, see `pieces_of`."""

    items: torch.Tensor
    splits: torch.Tensor


def pieces_a_row(tiles: int, blocks: int, slots: int) -> int:
    """Pieces that every row is cut into: those that take the least time by a simple count.

    Args:
        tiles: programs if nothing is split (rows times head tiles).
        blocks: blocks of 64 keys of a row.
        slots: programs the device runs at once.
    """

    def time(pieces: int) -> int:
        waves = math.ceil(tiles * pieces / slots)
        return waves * (math.ceil(blocks / pieces) + _SETUP_BLOCKS) + (_COMBINE_BLOCKS if pieces > 1 else 0)

    if tiles >= slots:
        return 1  # another wave costs what a split saves, and the accumulators besides
    most = min(blocks, math.ceil(slots / tiles))
    return min(range(1, most + 1), key=lambda pieces: (time(pieces), pieces))


def blocks_of(topk: int, extra_topk: int) -> int:
    """Blocks of a row of full length."""
    return max(-(-topk // BLOCK_KEYS), 1) + -(-extra_topk // BLOCK_KEYS)


def even_schedule(*, rows: int, heads: int, blocks: int, pieces: int) -> SplitSchedule:
    """The plan that cuts each of `rows` rows of `blocks` blocks into `pieces` pieces, a part each."""
    if pieces == 1:
        return SplitSchedule.unsplit(rows, heads=heads)
    meta = np.zeros((rows * pieces, META_COLUMNS), dtype=np.int32)
    request, piece = np.divmod(np.arange(rows * pieces), pieces)
    meta[:, 0] = meta[:, 1] = request
    meta[:, 2] = piece * blocks // pieces
    meta[:, 3] = (piece + 1) * blocks // pieces
    meta[:, 4] = piece
    meta[:, 5:7] = 1
    return SplitSchedule(meta, (np.arange(rows + 1) * pieces).astype(np.int32), 1, heads)


def accumulator_bytes(rows: int, pieces: int, heads: int) -> int:
    """Bytes of the accumulators of an even cut: what `even_schedule(...)` calls its accumulator_bytes."""
    return rows * pieces * heads * (D_V + 1) * 4 if pieces > 1 else 0


def pieces_of(schedule: SplitSchedule) -> tuple[IntArray, IntArray]:
    """A plan as tables: (items, 4) request, begin block, end block, accumulator (-1: none); (n, 3) split requests:
    request, first accumulator, pieces."""
    items: list[tuple[int, int, int, int]] = []
    for work in schedule.work():
        if work.slot is None:
            items += [(request, 0, TO_THE_END, -1) for request in range(work.first_request, work.end_request)]
        else:
            end = TO_THE_END if work.end_block is None else work.end_block
            items.append((work.first_request, work.begin_block, end, work.slot))
    slots = schedule.slots()
    split = np.flatnonzero(slots >= 0)
    splits = np.stack((split, slots[split], schedule.splits_per_request[split]), axis=1)
    return np.asarray(items, dtype=np.int32).reshape(-1, 4), splits.astype(np.int32)


_tables: weakref.WeakKeyDictionary[SplitSchedule, dict[torch.device, Table]] = weakref.WeakKeyDictionary()
_captured: list[Table] = []
"""Tables that a CUDA graph reads: they must outlive the plan they were made from."""


def table_on(schedule: SplitSchedule, device: torch.device) -> Table:
    """The tables of a plan on a device. No host synchronisation; a call under capture leaves them valid for replays."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    known = _tables.setdefault(schedule, {})
    if device not in known:
        items, splits = pieces_of(schedule)
        if capturing:
            # A captured copy would read host memory at every replay. Constants travel with the launches instead.
            return Table(_as_constants(items, device), _as_constants(splits, device))
        known[device] = Table(_copied(items, device), _copied(splits, device))
    table = known[device]
    if capturing and not any(table is kept for kept in _captured):
        _captured.append(table)
    return table


def _copied(array: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _as_constants(array: IntArray, device: torch.device) -> torch.Tensor:
    """The array made by kernels whose arguments are its numbers: one launch a number."""
    table = torch.empty(array.size, dtype=torch.int32, device=device)
    for place, number in enumerate(array.reshape(-1).tolist()):
        table[place].fill_(number)
    return table.view(array.shape)
