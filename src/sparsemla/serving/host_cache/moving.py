# SPDX-License-Identifier: Apache-2.0
"""Copies of records between pools, also between host memory and a device."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import RecordLayout

_WORD = 8
"""Bytes of the words that are copied; records and pages of every layout are multiples."""
_PROGRAMS = 4096
"""Programs of a copy on the device, at most."""


@dataclass(frozen=True, eq=False)
class Records:
    """Where records lie: pages of a pool, or rows of a matrix.

    `parts` are the contiguous parts of a record: (offset in the page, distance to the next record's, length), in
    words. A pool has its data and, where the layout keeps them apart, its scales.
    """

    layout: RecordLayout
    words: torch.Tensor
    block: int
    page: int
    parts: tuple[tuple[int, int, int], ...]
    pool: PagedKVCache | None

    @classmethod
    def of_pool(cls, pool: PagedKVCache) -> Records:
        """Slots are the pool's."""
        layout = pool.layout
        parts = [(0, layout.data_bytes, layout.data_bytes)]
        if layout.scales_after_page:
            parts.append((layout.scale_area_offset(pool.block_size), layout.scale_bytes, layout.scale_bytes))
        words, page = pool.byte_view.view(torch.int64), pool.page_stride_bytes // _WORD
        return cls(layout, words, pool.block_size, page, _in_words(parts), pool)

    @classmethod
    def of_rows(cls, records: torch.Tensor, layout: RecordLayout) -> Records:
        """(n, record_bytes) uint8, contiguous, as `PagedKVCache.gather_bytes` gives them; slot i is row i."""
        whole = layout.record_bytes
        parts = [(0, whole, layout.data_bytes if layout.scales_after_page else whole)]
        if layout.scales_after_page:
            parts.append((layout.data_bytes, whole, layout.scale_bytes))
        return cls(layout, records.view(torch.int64).view(-1), max(records.shape[0], 1), 0, _in_words(parts), None)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """(n, record_bytes) uint8 of some slots, all of which exist."""
        if self.pool is not None:
            return self.pool.gather_bytes(slots)
        return self.words.view(-1, self.layout.record_bytes // _WORD)[slots].view(torch.uint8)


def _in_words(parts: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((at // _WORD, step // _WORD, size // _WORD) for at, step, size in parts)


@cache
def device_code(device_type: str) -> ModuleType | None:
    """The Triton kernels where they run on such a device (or, for tests, in the interpreter), else None."""
    try:
        module = importlib.import_module("sparsemla.kernels.triton.residency")
        interpreted = importlib.import_module("sparsemla.kernels.triton.launch").INTERPRETED
    except ImportError:
        return None
    return module if interpreted == (device_type == "cpu") else None


def move(
    source: Records,
    source_slots: torch.Tensor | None,
    target: Records,
    target_slots: torch.Tensor | None,
    *,
    device: torch.device,
    count: int,
    counts: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copies record `source_slots[i]` to `target_slots[i]` for every i where neither is negative.

    Where Triton serves the device, the device does it: no wait, no memory taken. Else the host does, and waits.

    Args:
        source, target: of the same layout; host memory must be pinned where the device is a GPU.
        source_slots, target_slots: (count,) integers on the device, contiguous, each a slot of its side or negative;
            None: 0, 1, 2 and on. A target named twice gets either record.
        device: who copies.
        count: entries.
        counts: (lanes,) int32, where Triton serves the device: every lane has a list of `count` slots on each side, of
            which so many are there; target slots are those of the lane's page of `count` records.
        programs: of the device that take part (for each lane), at most.
    """
    if count == 0:
        return
    code = device_code(device.type)
    if code is None:
        _by_host(source, source_slots, target, target_slots, count, device)
        return
    programs = min(count, programs or _PROGRAMS)
    grid = (programs if counts is None else programs * len(counts),)
    with on_device(device):
        for (at, row, size), (to_at, to_row, _) in zip(source.parts, target.parts, strict=True):
            padded = 1 << (size - 1).bit_length()
            code.move[grid](
                source.words, source_slots, source.block, source.page, row, at,
                target.words, target_slots, target.block, target.page, to_row, to_at,
                count, counts, programs, WORDS=size, PADDED=padded, num_warps=max(padded // 32, 1),
            )  # fmt: skip


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels launched inside run on that GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _by_host(
    source: Records,
    source_slots: torch.Tensor | None,
    target: Records,
    target_slots: torch.Tensor | None,
    count: int,
    device: torch.device,
) -> None:
    every = torch.arange(count, device=device)
    start = every if source_slots is None else source_slots.long()
    goal = every if target_slots is None else target_slots.long()
    moved = (start >= 0) & (goal >= 0)
    start, goal = start[moved], goal[moved]
    records = source.read(start.to(source.words.device)).to(target.words.device)
    goal = goal.to(target.words.device)
    if target.pool is not None:
        target.pool.write_bytes(goal, records)
    else:
        rows = target.words.view(-1, target.layout.record_bytes // _WORD)
        rows[goal] = records.view(torch.int64)
