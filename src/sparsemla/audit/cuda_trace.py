# SPDX-License-Identifier: Apache-2.0
"""The CUDA caching allocator's own word on what it handed out.

PyTorch can call Python at every allocation and release of the CUDA caching allocator (the hook behind its CUDA
sanitizer). It runs in line: the sentinel laid there comes before any kernel of the code on the same stream, and the
release is reported before the memory goes back. So scratch that compiled code takes past the dispatcher is seen too,
and outputs of built-in operators are examined like any other memory. The hook passes an address only; the size is the
growth of the allocator's `requested_bytes` counter.

The hook is checked by one small allocation when a watch begins; where it does not work (another allocator backend, a
private name that moved) the audit goes on with the dispatcher alone and says so.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from .dispatch import quiet
from .ledger import Allocation
from .sentinel import EMPTY, Runs, size

if TYPE_CHECKING:
    from .tracker import Tracker


@dataclass(slots=True)
class Raw:
    """An allocation known by address only."""

    index: int
    address: int
    nbytes: int
    device: torch.device
    op: str
    via: tuple[str, ...]
    stack: tuple[str, ...]
    born: int
    key: int
    why_not: str

    def filled(self, nbytes: int) -> Runs:
        """Bytes of the storage that carry the sentinel."""
        if self.why_not:
            return EMPTY
        return np.array([[0, min(nbytes, self.nbytes)]], dtype=np.int64)


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory at an address as a (n,) uint8 tensor that does not own it."""
    if device.type == "cpu":  # for tests of the bookkeeping on a machine without a GPU
        import ctypes

        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


class CudaTrace:
    """Connects the allocator's hook to one tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.works = False
        self._requested: dict[int, int] = {}
        self._pending: dict[int, Raw] = {}
        self._probe: list[tuple[int, int]] | None = None
        self._registries: list[tuple[Any, Any]] = []

    # --- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Hook in and prove that it works; never raises for a missing hook."""
        try:
            from torch.cuda import _gpu_trace

            torch.cuda.init()  # type: ignore[no-untyped-call]
            for device in range(torch.cuda.device_count()):
                self._requested[device] = _requested_bytes(device)
            torch._C._activate_gpu_trace()
            self._registries = [
                (_gpu_trace.MemoryAllocationCallbacks, self._on_alloc),
                (_gpu_trace.MemoryDeallocationCallbacks, self._on_free),
            ]
            for registry, callback in self._registries:
                registry.add_callback(callback)
            self._probe = []
            probe = torch.empty(12_345, dtype=torch.uint8, device="cuda")
            self.works = (probe.data_ptr(), 12_345) in self._probe
        except (ImportError, AttributeError, AssertionError, RuntimeError) as problem:
            self.tracker.ledger.notes.append(f"CUDA allocator hook not available: {problem}")
        finally:
            self._probe = None
        if not self.works:
            self.unhook()
            self.tracker.ledger.notes.append(
                "the CUDA allocator's hook does not answer: allocations made past PyTorch's dispatcher are not seen"
            )

    def unhook(self) -> None:
        for registry, callback in self._registries:
            if callback in registry.callback_list:
                registry.callback_list.remove(callback)
        self._registries = []

    def close(self) -> None:
        """Report what was never released and never seen by the dispatcher."""
        self.unhook()
        for raw in list(self._pending.values()):
            self._finish(raw, died=None)
        self._pending.clear()

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_alloc(self, address: int) -> None:
        if self._probe is None and threading.get_ident() != self.tracker.thread:
            nbytes = self._growth(torch.cuda.current_device())
            self.tracker.add_uncovered("allocated by another thread", nbytes)
            return
        nbytes = self._growth(torch.cuda.current_device())
        if self._probe is not None:
            self._probe.append((address, nbytes))
        elif not self.tracker.busy and nbytes > 0:
            self.seen(address, nbytes, torch.device("cuda", torch.cuda.current_device()))

    def _on_free(self, address: int) -> None:
        raw = self._pending.pop(address, None)
        if raw is not None:
            self._finish(raw, died=self.tracker.tick())

    def _growth(self, device: int) -> int:
        now = _requested_bytes(device)
        grown, self._requested[device] = now - self._requested.get(device, now), now
        return grown

    def seen(self, address: int, nbytes: int, device: torch.device) -> None:
        """Memory was handed out: note who asked, and lay the sentinel."""
        from .tracker import call_stack, capturing, key_of

        tracker = self.tracker
        index = tracker.next_index()
        names = tracker.mode.names()
        raw = Raw(
            index=index,
            address=address,
            nbytes=nbytes,
            device=device,
            op=names[-1] if names else "(no operator)",
            via=names[:-1],
            stack=call_stack(),
            born=tracker.tick(),
            key=key_of(index),
            why_not="",
        )
        if capturing():
            raw.why_not = "allocated during graph capture"
            tracker.add_uncovered("allocated during graph capture", nbytes)
        else:
            self._quietly(lambda: tracker.pattern(device).fill(bytes_at(address, nbytes, device), raw.key))
        self._pending[address] = raw

    def adopt(self, address: int) -> Raw | None:
        """The dispatcher has met the tensor at this address: its storage takes over."""
        return self._pending.pop(address, None)

    def _finish(self, raw: Raw, *, died: int | None) -> None:
        from .tracker import _settle, capturing

        found: list[Runs] = []
        why_not = raw.why_not or ("released during graph capture" if capturing() else "")
        if not why_not:

            def look() -> None:
                _settle(raw.device)
                data = bytes_at(raw.address, raw.nbytes, raw.device)
                found.append(self.tracker.pattern(raw.device).unwritten(data, raw.key, exact=self.tracker.exact))

            self._quietly(look)
        runs = found[0] if found else EMPTY
        self.tracker.add_raw(
            Allocation(
                index=raw.index,
                op=raw.op,
                via=raw.via,
                stack=raw.stack,
                device=str(raw.device),
                dtype="bytes",
                shape=None,
                nbytes=raw.nbytes,
                born=raw.born,
                died=died,
                never_written=size(runs) if found else None,
                runs=runs,
                why_not=why_not,
                read_note="not a tensor that PyTorch's dispatcher saw",
            )
        )

    def _quietly(self, work: Any) -> None:
        """Tensor work from inside an allocator call: no modes, and our own allocations do not count."""
        was, self.tracker.busy = self.tracker.busy, True
        try:
            with _disable_current_modes(), quiet():
                work()
        finally:
            self.tracker.busy = was


def _requested_bytes(device: int) -> int:
    """Bytes ever asked of the caching allocator on this device."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats.get("requested_bytes", {}).get("all", {}).get("allocated", 0))
