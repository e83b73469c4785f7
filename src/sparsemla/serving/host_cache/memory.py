# SPDX-License-Identifier: Apache-2.0
"""A pool in host memory that a GPU reads and writes by itself.

Memory is mapped page by page and then registered with CUDA. PyTorch's own pinned allocator rounds every size up to a
power of two: harmless for a batch of inputs, half of the machine for a cache of 300 GB. It serves where a driver
registers nothing (in some sandboxes).
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import torch

from sparsemla.cache import PagedKVCache, check_count
from sparsemla.formats import KVFormat, record_layout

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


class _Region(mmap.mmap):
    """Anonymous zeroed memory; registered with CUDA until nobody holds it."""

    registered_at = 0

    def __del__(self) -> None:
        if self.registered_at and not sys.is_finalizing():
            _runtime().cudaHostUnregister(self.registered_at)


def host_pool(
    num_pages: int, block_size: int, fmt: KVFormat | str, *, d_qk: int | None = None, pinned: bool | None = None
) -> PagedKVCache:
    """A pool of zeros in host memory.

    Args:
        num_pages: pages.
        block_size: records of a page.
        fmt: format of the records.
        d_qk: width, for formats with several.
        pinned: whether a GPU must reach it; None: exactly where there is a CUDA device.

    Raises:
        ValueError: a count below 1, an unknown format; `pinned` without a CUDA device.
        MemoryError: the machine has not that much memory, or lets no process pin that much (``ulimit -l``).
    """
    check_count("num_pages", num_pages, 1)
    check_count("block_size", block_size, 1)
    layout = record_layout(fmt, d_qk)
    if pinned is None:
        pinned = torch.cuda.is_available()
    if pinned and not torch.cuda.is_available():
        raise ValueError("pinned: got True, accepted is False or None where torch sees no CUDA device")
    nbytes = num_pages * layout.page_bytes(block_size)
    try:
        region = _Region(-1, nbytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"num_pages: {num_pages} pages take {nbytes:,} bytes of host memory: {error}") from None
    flat = torch.frombuffer(region, dtype=torch.uint8)
    if pinned:
        status = int(_runtime().cudaHostRegister(flat.data_ptr(), nbytes, _PORTABLE))
        if status == 0:
            region.registered_at = flat.data_ptr()
        else:
            flat = _allocated(nbytes, status)
    pages = flat.view(num_pages, -1)
    if layout.format is KVFormat.BF16:
        return PagedKVCache.wrap(pages.view(torch.bfloat16).view(num_pages, block_size, layout.d_qk), layout.format)
    return PagedKVCache.wrap(pages, layout.format, block_size)


def _allocated(nbytes: int, status: int) -> torch.Tensor:
    """PyTorch's pinned memory, where the driver registers none of ours (`status` is its answer)."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # takes the error that the runtime remembers
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise MemoryError(
            f"num_pages: CUDA does not pin {nbytes:,} bytes of host memory (cudaError {status}; {error})"
        ) from None


def _runtime() -> Any:
    """The CUDA runtime; makes the process's context first."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
