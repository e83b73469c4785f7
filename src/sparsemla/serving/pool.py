# SPDX-License-Identifier: Apache-2.0
"""A KV pool that grows by whole pages without moving a record.

Address space for the largest pool is reserved at once; memory is committed only as pages are added. Every page keeps
its address, so caches, block tables and captured graphs made before an extension stay valid after it.

On the CPU the operating system commits memory page by page when it is first written. On CUDA the driver's virtual
memory functions do it (the same that PyTorch's expandable segments use), in steps of the device's granularity, usually
2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, record_layout


class _Range(Protocol):
    """A reserved range of addresses, committed from its start."""

    def commit(self, nbytes: int) -> int:
        """Commits at least the first `nbytes`; returns how many are committed."""

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` as uint8; keeps the range alive."""


class GrowingPool:
    """One layer's pages.

    Args:
        max_pages: pages it can ever hold.
        block_size: records of a page.
        fmt: format of the records.
        device: where it lies.
        d_qk: width, to choose among those of bf16.

    Raises:
        ValueError: max_pages below 1, block size below 1, unknown format.
        RuntimeError: the driver refuses.
    """

    def __init__(
        self,
        max_pages: int,
        block_size: int,
        fmt: KVFormat | str,
        *,
        device: torch.device | str = "cpu",
        d_qk: int | None = None,
    ) -> None:
        if max_pages < 1:
            raise ValueError(f"max_pages: got {max_pages}, accepted is at least 1")
        self.device = torch.device(device)
        self.layout = record_layout(fmt, d_qk)
        self.block_size = block_size
        self.max_pages = max_pages
        self.page_bytes = self.layout.page_bytes(block_size)
        self.pages = 0
        self.committed_bytes = 0
        size = max_pages * self.page_bytes
        self._range: _Range = _CudaRange.reserve(size, self.device) if self.device.type == "cuda" else _HostRange(size)

    @property
    def cache(self) -> PagedKVCache:
        """The pages there are now. Caches taken earlier stay valid; they do not see pages added since."""
        raw = self._range.tensor(self.pages * self.page_bytes)
        if self.layout.scales_after_page:
            return PagedKVCache.wrap(raw.view(self.pages, self.page_bytes), self.layout.format, self.block_size)
        if self.layout.format is KVFormat.BF16:
            raw = raw.view(torch.bfloat16)
        data = raw.view(
            self.pages, self.block_size, raw.numel() // max(self.pages * self.block_size, 1) or _width(self)
        )
        return PagedKVCache.wrap(data, self.layout.format, d_qk=self.layout.d_qk)

    def extend(self, pages: int) -> PagedKVCache:
        """Adds zeroed pages at the end and returns the larger cache.

        Raises:
            ValueError: negative, or more than max_pages in all.
            RuntimeError: there is no memory for them; the pool stays as it is.
        """
        if pages < 0 or self.pages + pages > self.max_pages:
            raise ValueError(f"pages: got {pages}, accepted are 0 to {self.max_pages - self.pages}")
        before = self.pages * self.page_bytes
        after = before + pages * self.page_bytes
        self.committed_bytes = self._range.commit(after)
        self.pages += pages
        self._range.tensor(after)[before:].zero_()
        return self.cache


def _width(pool: GrowingPool) -> int:
    """Elements of a record, for a pool without pages."""
    return pool.layout.record_bytes // (2 if pool.layout.format is KVFormat.BF16 else 1)


_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag, which Python names from 3.13 on."""


class _HostRange:
    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:
            raise RuntimeError(f"{nbytes} bytes of address space cannot be reserved: {error}") from None
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)

    def commit(self, nbytes: int) -> int:
        return nbytes  # the operating system commits on first write

    def tensor(self, nbytes: int) -> torch.Tensor:
        return self._whole[:nbytes]


# -- CUDA's virtual memory functions: "Virtual Memory Management" in the manual of the driver API


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _AccessDescriptor(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM_GRANULARITY = 1, 1, 3, 0


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"a growing pool on CUDA needs the driver's library: {error}") from None


def _call(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{function.__name__} failed: {(name.value or b'?').decode()} ({status})")


@dataclass
class _CudaRange:
    base: int
    size: int
    granularity: int
    device: torch.device
    properties: _AllocationProperties
    committed: int = 0
    handles: list[tuple[int, int, int]] = field(default_factory=list)
    """(address, bytes, handle) of what is mapped."""

    @classmethod
    def reserve(cls, nbytes: int, device: torch.device) -> _CudaRange:
        if not torch.cuda.is_available():
            raise ValueError(f"device: got {device}, but torch sees no CUDA device here")
        driver = _driver()
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.empty(1, device=device)  # the driver functions need the device's context
        properties = _AllocationProperties(type=_PINNED, location=_Location(_ON_DEVICE, index))
        granularity = ctypes.c_size_t()
        with torch.cuda.device(device):
            _call(
                driver.cuMemGetAllocationGranularity,
                ctypes.byref(granularity),
                ctypes.byref(properties),
                _MINIMUM_GRANULARITY,
            )
            step = granularity.value
            size = -(-nbytes // step) * step
            base = ctypes.c_uint64()
            _call(
                driver.cuMemAddressReserve,
                ctypes.byref(base),
                ctypes.c_size_t(size),
                ctypes.c_size_t(0),
                ctypes.c_uint64(0),
                ctypes.c_ulonglong(0),
            )
        return cls(base.value, size, step, device, properties)

    def commit(self, nbytes: int) -> int:
        more = -(-nbytes // self.granularity) * self.granularity - self.committed
        if more <= 0:
            return self.committed
        driver, address = _driver(), self.base + self.committed
        handle = ctypes.c_uint64()
        with torch.cuda.device(self.device):
            size = ctypes.c_size_t(more)
            _call(driver.cuMemCreate, ctypes.byref(handle), size, ctypes.byref(self.properties), ctypes.c_ulonglong(0))
            try:
                _call(
                    driver.cuMemMap, ctypes.c_uint64(address), size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)
                )
            except RuntimeError:
                driver.cuMemRelease(handle)
                raise
            self.handles.append((address, more, handle.value))
            self.committed += more
            access = _AccessDescriptor(self.properties.location, _READ_WRITE)
            _call(driver.cuMemSetAccess, ctypes.c_uint64(address), size, ctypes.byref(access), ctypes.c_size_t(1))
        return self.committed

    def tensor(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_ArrayInterface(self, nbytes), device=self.device)

    def __del__(self) -> None:
        try:
            driver = _driver()
            torch.cuda.synchronize(self.device)
            for address, size, handle in self.handles:
                driver.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))
                driver.cuMemRelease(ctypes.c_uint64(handle))
            driver.cuMemAddressFree(ctypes.c_uint64(self.base), ctypes.c_size_t(self.size))
        except Exception:  # at interpreter shutdown the driver may be gone, and with it the memory
            return


class _ArrayInterface:
    """What torch makes a tensor of without copying; the tensor keeps this object, and it the range."""

    def __init__(self, of: _CudaRange, nbytes: int) -> None:
        self.of = of
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (of.base, False),
            "version": 3,
        }
