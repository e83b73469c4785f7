# SPDX-License-Identifier: Apache-2.0
"""`PagedKVCache`: a pool of pages of one format, our own or a view over an engine's tensor; and block tables.

A *slot* names one record of the pool: ``slot = page · block_size + offset``. A *position* names a token inside its
request; `slots_from_positions` turns one into the other. Whatever does not name a record is "no key": it reads as zeros
and is skipped on writing, on every device alike, without asking the device first.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch

from sparsemla.formats import KVFormat, RecordLayout, ScaleStyle, pack, record_layout, unpack

_ALIGN = 16
"""Bytes: pages and records start on multiples of this, the widest load a kernel issues. Every layout keeps to it."""
_WORD = 8
"""Bytes of the int64 words that records are copied in (byte-wise gathers take several times as long)."""


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """A paged pool of KV records. Make one with `allocate` or `wrap`.

    The bytes of page ``p`` start ``p · page_stride_bytes`` after the first page; record ``o`` of it starts
    ``o · record_stride_bytes`` further on. Where the layout keeps its scales after the page's data, those of record
    ``o`` start ``block_size · record_stride_bytes + o · layout.scale_bytes`` after the page's start.
    """

    data: torch.Tensor
    """The storage as given: uint8, or bfloat16 for BF16. Shapes: see `wrap`. Never copied, never resized."""
    layout: RecordLayout
    block_size: int
    """Records of a page; any number from 1, no multiple of anything."""
    num_pages: int
    page_stride_bytes: int
    """Distance between neighbouring pages, a multiple of 16; above a page's size where an engine interleaves layers."""

    @property
    def num_slots(self) -> int:
        """Records the pool can hold."""
        return self.num_pages * self.block_size

    @property
    def record_stride_bytes(self) -> int:
        """Distance between neighbouring records of a page."""
        return self.layout.data_bytes

    @property
    def format(self) -> KVFormat:
        """Format of the records."""
        return self.layout.format

    @property
    def d_qk(self) -> int:
        """Columns of one latent vector."""
        return self.layout.d_qk

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self.data.device

    @property
    def byte_view(self) -> torch.Tensor:
        """(span,) uint8 from the first to the last record, no copy; between strided pages it shows bytes not ours."""
        used = self.block_size * self.layout.record_bytes
        span = (self.num_pages - 1) * self.page_stride_bytes + used if self.num_pages else 0
        item = self.data.element_size()
        return self.data.as_strided((span // item,), (1,), self.data.storage_offset()).view(torch.uint8)

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        block_size: int,
        fmt: KVFormat | str,
        *,
        device: torch.device | str = "cpu",
        d_qk: int | None = None,
    ) -> PagedKVCache:
        """A new pool of zeros.

        Raises:
            ValueError: negative num_pages, block_size below 1, unknown format or width, no such device.
        """
        check_count("num_pages", num_pages, 0)
        check_count("block_size", block_size, 1)
        layout = record_layout(fmt, d_qk)
        device = _checked_device(device)
        page_bytes = layout.page_bytes(block_size)
        if layout.format is KVFormat.BF16:
            data = torch.zeros((num_pages, block_size, layout.d_qk), dtype=torch.bfloat16, device=device)
        elif layout.scales_after_page:
            data = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
        else:
            data = torch.zeros((num_pages, block_size, layout.record_bytes), dtype=torch.uint8, device=device)
        return cls(data, layout, block_size, num_pages, page_bytes)

    @classmethod
    def wrap(
        cls,
        data: torch.Tensor,
        fmt: KVFormat | str,
        block_size: int | None = None,
        d_qk: int | None = None,
    ) -> PagedKVCache:
        """A view over an engine's tensor; nothing is copied.

        Args:
            data: uint8 (float8_e4m3fn is taken as bytes) of shape (pages, block, record_bytes), (pages, block, 1,
                record_bytes) or (pages, page_bytes); for BF16 bfloat16 of shape (pages, block, d_qk) or (pages,
                block, 1, d_qk). Pages may be strided, by a multiple of 16 bytes and at least their own size; a page
                is contiguous. With scales after the page's data only the bytes of a page count, whatever its shape.
            fmt: format of the records.
            block_size: records of a page; needed only for (pages, page_bytes), else it must agree with the shape.
            d_qk: width; needed only to insist on one of the widths of BF16.

        Raises:
            ValueError: any of the above is not so.
        """
        fmt = KVFormat.parse(fmt)
        data = _checked_dtype(data, fmt)
        item = data.element_size()
        shape, strides = tuple(data.shape), data.stride()
        by_page = len(shape) == 2 and fmt is not KVFormat.BF16
        if fmt is KVFormat.BF16 and d_qk is None and shape:
            d_qk = shape[-1]
        layout = record_layout(fmt, d_qk)
        width = layout.record_bytes // item

        if by_page:
            if block_size is None:
                raise ValueError("block_size: got None, required where data is (pages, page_bytes)")
            check_count("block_size", block_size, 1)
            if shape[1] < block_size * layout.record_bytes:
                least = block_size * layout.record_bytes
                raise ValueError(
                    f"data: got shape {shape}, accepted is at least {least} bytes a page for block_size {block_size}"
                )
        elif not (len(shape) in (3, 4) and shape[-1] == width and shape[1] >= 1 and (len(shape) == 3 or shape[2] == 1)):
            by_bytes = "" if fmt is KVFormat.BF16 else ", or (pages, page_bytes)"
            raise ValueError(
                f"data: got shape {shape} for format {fmt.value}, "
                f"accepted is (pages, block, {width}) or (pages, block, 1, {width}){by_bytes}"
            )
        elif block_size is not None and block_size != shape[1]:
            raise ValueError(f"block_size: got {block_size}, but data of shape {shape} has {shape[1]} records a page")
        block = shape[1] if not by_page else int(block_size or 0)

        contiguous = strides[-1] == 1 and (by_page or block == 1 or strides[1] == width)
        if not contiguous:
            raise ValueError(f"data: got strides {strides}, accepted are contiguous records inside a page")
        used = block * layout.record_bytes
        page_stride = strides[0] * item if shape[0] > 1 else max(strides[0] * item, layout.page_bytes(block))
        if shape[0] > 1 and (page_stride % _ALIGN or page_stride < used):
            raise ValueError(
                f"data: got a page stride of {page_stride} bytes, accepted is a multiple of {_ALIGN}, at least {used}"
            )
        page_stride = -(-page_stride // _ALIGN) * _ALIGN  # one page or none: the stride is never used, only kept legal
        if data.data_ptr() % _ALIGN or (data.storage_offset() * item) % _WORD:
            raise ValueError(f"data: got the address {data.data_ptr():#x}, accepted is a multiple of {_ALIGN}")
        return cls(data, layout, block, shape[0], page_stride)

    def write(self, slots: torch.Tensor, kv: torch.Tensor, scale_style: ScaleStyle = "float32") -> None:
        """Quantise latent vectors and store them.

        Args:
            slots: (n,) integer. One outside [0, num_slots) is skipped. Of several rows for one slot one stays, unsaid
                which.
            kv: (n, d_qk) of a floating dtype, on the cache's device; columns [latent | rotary].
            scale_style: see `sparsemla.formats.pack`.

        Raises:
            ValueError: wrong shape, dtype, device or scale style.
        """
        self._check_slots(slots)
        _check_tensor("kv", kv)
        if kv.dim() != 2 or kv.shape[0] != slots.shape[0] or kv.shape[1] != self.d_qk:
            raise ValueError(f"kv: got shape {tuple(kv.shape)}, accepted is ({slots.shape[0]}, {self.d_qk})")
        if kv.device != self.device:
            raise ValueError(f"kv: got device {kv.device}, accepted is the cache's, {self.device}")
        self.write_bytes(slots, pack(kv, self.format, scale_style=scale_style, d_qk=self.d_qk))

    def write_bytes(self, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store logical records (n, record_bytes) uint8, as `gather_bytes` returns them; `slots` as in `write`."""
        self._check_slots(slots)
        _check_tensor("records", records)
        if records.dtype != torch.uint8 or tuple(records.shape) != (slots.shape[0], self.layout.record_bytes):
            raise ValueError(
                f"records: got shape {tuple(records.shape)} of {records.dtype}, "
                f"accepted is ({slots.shape[0]}, {self.layout.record_bytes}) of torch.uint8"
            )
        if records.device != self.device:
            raise ValueError(f"records: got device {records.device}, accepted is the cache's, {self.device}")
        if slots.shape[0] == 0 or self.num_slots == 0:
            return
        # Skipping rows without asking the device how many there are: a skipped row repeats the first valid row, and
        # where no row is valid every row rewrites what slot 0 holds already.
        slots = slots.to(torch.int64)
        valid = (slots >= 0) & (slots < self.num_slots)
        first_valid = valid.to(torch.int8).argmax()
        source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), first_valid)
        any_valid = valid.any()
        target = torch.where(any_valid, slots[source], 0)
        payload = torch.where(any_valid, records[source], self.gather_bytes(torch.zeros_like(slots[:1])))
        page, offset = target // self.block_size, target % self.block_size
        words = payload.contiguous().view(torch.int64)
        at = 0
        for area, row_bytes in self._areas():
            row_words = row_bytes // _WORD
            strides = (self.page_stride_bytes // _WORD, row_words, 1)
            rows = self._words(area).as_strided((self.num_pages, self.block_size, row_words), strides)
            rows[page, offset] = words[:, at : at + row_words]
            at += row_words

    def read(self, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dequantised latent vectors of some slots; the rest of the pool is not touched.

        Args:
            slots: (n,) integer. One outside [0, num_slots) reads as zeros.
            dtype: float32 (scale · e4m3, rounded once) or float64 (exact).

        Returns:
            (n, d_qk) of `dtype`; columns [latent | rotary].

        Raises:
            ValueError: wrong shape, dtype or device.
        """
        return unpack(self.gather_bytes(slots), self.format, self.d_qk, dtype=dtype)

    def gather_bytes(self, slots: torch.Tensor) -> torch.Tensor:
        """Logical records of some slots: (n,) integer → (n, record_bytes) uint8, zeros for a slot outside the pool.

        Raises:
            ValueError: wrong shape, dtype or device.
        """
        self._check_slots(slots)
        slots = slots.to(torch.int64)
        if slots.shape[0] == 0 or self.num_slots == 0:
            return torch.zeros((slots.shape[0], self.layout.record_bytes), dtype=torch.uint8, device=self.device)
        valid = (slots >= 0) & (slots < self.num_slots)
        safe = torch.where(valid, slots, 0)
        page_at = (safe // self.block_size) * self.page_stride_bytes
        offset = safe % self.block_size
        last_page_at = (self.num_pages - 1) * self.page_stride_bytes
        parts = []
        for area, row_bytes in self._areas():
            # A row starts at every _ALIGN (or _WORD) bytes and rows overlap: a record of any page is then a row of
            # one matrix, strided pages included, and selecting rows is a plain copy of bytes.
            step = _ALIGN if row_bytes % _ALIGN == 0 else _WORD
            count = (last_page_at + (self.block_size - 1) * row_bytes) // step + 1
            rows = self._words(area).as_strided((count, row_bytes // _WORD), (step // _WORD, 1))
            parts.append(torch.index_select(rows, 0, (page_at + offset * row_bytes) // step))
        words = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return words.masked_fill_(~valid.unsqueeze(1), 0).view(torch.uint8)

    def _areas(self) -> list[tuple[int, int]]:
        """(offset inside a page, bytes a record) of each area of a page, in the order of a logical record."""
        data = (0, self.layout.data_bytes)
        if not self.layout.scales_after_page:
            return [data]
        return [data, (self.layout.scale_area_offset(self.block_size), self.layout.scale_bytes)]

    def _words(self, byte_offset: int) -> torch.Tensor:
        """The pool from `byte_offset` on as int64 words, 1-D."""
        return self.byte_view.view(torch.int64)[byte_offset // _WORD :]

    def _check_slots(self, slots: torch.Tensor) -> None:
        _check_tensor("slots", slots)
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(slots.shape)} of {slots.dtype}"
            raise ValueError(f"slots: got shape {got}, accepted is (n,) of torch.int32 or torch.int64")
        if slots.device != self.device:
            raise ValueError(f"slots: got device {slots.device}, accepted is the cache's, {self.device}")


def check_count(name: str, given: Any, least: int) -> None:
    """ValueError unless `given` is an integer (bool is none) of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or int(given) < least:
        raise ValueError(f"{name}: got {given!r}, accepted is an integer of at least {least}")


def _check_tensor(name: str, given: Any) -> None:
    """ValueError unless `given` is a dense tensor."""
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, accepted is a tensor")
    if given.layout is not torch.strided:
        raise ValueError(f"{name}: got layout {given.layout}, accepted is a dense tensor (torch.strided)")


def _checked_device(device: torch.device | str) -> torch.device:
    """The device, if this torch has it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"device: got {str(device)!r}, accepted is a device of this machine ({why})") from None
    return found


def _checked_dtype(data: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """`data` with the dtype a cache of `fmt` keeps, without a copy."""
    _check_tensor("data", data)
    if fmt is KVFormat.BF16:
        if data.dtype != torch.bfloat16:
            raise ValueError(f"data: got dtype {data.dtype} for format {fmt.value}, accepted is torch.bfloat16")
        return data
    if data.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"data: got dtype {data.dtype} for format {fmt.value}, accepted is torch.uint8")
    return data.view(torch.uint8)


def check_context_shard(context_shard: tuple[int, int, int]) -> None:
    """ValueError unless (rank, world, interleave) has 0 <= rank < world and interleave >= 1."""
    rank, world, interleave = context_shard
    if not 0 <= rank < world or interleave < 1:
        raise ValueError(
            f"context_shard: got {tuple(context_shard)}, "
            "accepted is (rank, world, interleave) with 0 <= rank < world and interleave >= 1"
        )


def slots_from_positions(
    block_table: torch.Tensor,
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    context_shard: tuple[int, int, int] | None = None,
    *,
    num_slots: int | None = None,
) -> torch.Tensor:
    """Positions inside requests → slots of this rank's pool. No host synchronisation.

    With ``context_shard = (rank, world, interleave)`` a request's positions are dealt out over ranks in runs of
    `interleave`: position p is held by rank ``(p // interleave) % world``, where it is the local position
    ``p // (interleave · world) · interleave + p % interleave``; the block table names the pages of local positions.

    Args:
        block_table: (R, P) integer; entry (r, i) is the page of request r's local positions i · block_size and on.
        request_ids: (T,) integer: the request of each row.
        positions: (T,) or (T, topk) integer, global positions; -1 (any negative number) is "no key".
        block_size: records of a page.
        context_shard: see above; None: this rank holds every position.
        num_slots: size of the pool; slots at or past it become -1. Without it only negative pages are caught.

    Returns:
        int64 of the shape of `positions`: the slot, or -1 where there is no key: a negative position, one that another
        rank holds or that lies beyond the block table, a request outside [0, R), a page outside the pool.

    Raises:
        ValueError: wrong shapes, dtypes or devices, block_size below 1, an impossible context_shard.
    """
    for name, given in (("block_table", block_table), ("request_ids", request_ids), ("positions", positions)):
        _check_tensor(name, given)
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(f"{name}: got dtype {given.dtype}, accepted is an integer dtype")
        if given.device != positions.device:
            raise ValueError(f"{name}: got device {given.device}, accepted is that of positions, {positions.device}")
    if block_table.dim() != 2:
        raise ValueError(f"block_table: got shape {tuple(block_table.shape)}, accepted is (requests, pages)")
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions: got shape {tuple(positions.shape)}, accepted is (T,) or (T, topk)")
    if tuple(request_ids.shape) != (positions.shape[0],):
        raise ValueError(f"request_ids: got shape {tuple(request_ids.shape)}, accepted is ({positions.shape[0]},)")
    check_count("block_size", block_size, 1)
    if num_slots is not None:
        check_count("num_slots", num_slots, 0)
    requests, pages = block_table.shape
    if requests == 0 or pages == 0:
        return torch.full(positions.shape, -1, dtype=torch.int64, device=positions.device)

    request = request_ids.to(torch.int64)
    if positions.dim() == 2:
        request = request.unsqueeze(1)
    position = positions.to(torch.int64)
    held = (position >= 0) & (request >= 0) & (request < requests)
    position = position.clamp_min(0)
    if context_shard is not None:
        check_context_shard(context_shard)
        rank, world, interleave = context_shard
        held &= (position // interleave) % world == rank
        position = position // (interleave * world) * interleave + position % interleave
    page_index = position // block_size
    held &= page_index < pages
    page = block_table[request.clamp(0, requests - 1), page_index.clamp(0, pages - 1)].to(torch.int64)
    slot = page * block_size + position % block_size
    held &= page >= 0
    if num_slots is not None:
        held &= slot < num_slots
    return torch.where(held, slot, -1)
