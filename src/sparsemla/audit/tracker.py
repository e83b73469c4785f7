# SPDX-License-Identifier: Apache-2.0
"""Follows every storage from birth to death, and every named region from hand-out to hand-out."""

from __future__ import annotations

import functools
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from .dispatch import FACTORIES, AuditMode, Frame, byte_view, cuda_in_use, quiet, storage_of, written_arguments
from .ledger import Allocation, Ledger, Region
from .sentinel import EMPTY, WORDS, Pattern, Runs, complement, intersect, size, union

if TYPE_CHECKING:
    from .cuda_trace import CudaTrace, Raw
    from .deep import Probe

_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STACK_DEPTH: Final = 4
LIFT: Final = "aten::lift_fresh"
"""What `torch.tensor(data)` and `torch.from_numpy` end with: the storage was made before the dispatcher saw it, and may
be shared."""
_LARGE: Final = 1 << 20  # storages this large are looked after at every operator, small ones now and then
_SWEEP_EVERY: Final = 64
_FEW: Final = 256


@dataclass(slots=True)
class Live:
    """A storage under watch. Holds a reference: memory is given back at the first operator after its last user let
    go."""

    index: int
    storage: torch.UntypedStorage
    op: str
    via: tuple[str, ...]
    stack: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    nbytes: int
    born: int
    key: int
    filled: Runs  # bytes that got the sentinel; the others are taken as written
    pending: Runs | None = None  # never written at every look so far; None before the first look
    why_not: str = ""


@dataclass(slots=True, eq=False)
class Handout:
    """One stretch of a buffer handed out under a name, while nothing else was handed out over it."""

    storage: torch.UntypedStorage
    low: int
    high: int
    key: int
    itemsize: int


@dataclass(slots=True)
class Named:
    """Everything known of one region name."""

    name: str
    stack: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    nbytes: int = 0
    handouts: int = 0
    written: Runs = field(default_factory=lambda: EMPTY)
    inside: int | None = None
    open: list[Handout] = field(default_factory=list)
    why_not: str = ""


@dataclass(slots=True)
class Shared:
    """A buffer older than the watch, of which regions were handed out: bytes handed out, and those written
    afterwards."""

    handed: Runs = field(default_factory=lambda: EMPTY)
    written: Runs = field(default_factory=lambda: EMPTY)


def call_stack() -> tuple[str, ...]:
    """Python frames outside PyTorch and the audit, innermost first, as `file:line in function`."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _STACK_DEPTH:
        code = frame.f_code
        path = code.co_filename
        if not path.startswith((_HERE, _TORCH, "<frozen")):
            found.append(f"{_short(path)}:{frame.f_lineno} in {code.co_qualname}")
        elif path.startswith(_HERE) and code.co_name == "_audited":
            break  # below this frame is the audit itself
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _short(path: str) -> str:
    """A path as a reader knows it: from site-packages, or relative to the working directory."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in path:
            return path.split(marker, 1)[1]
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


def _inside_trusted(stack: list[Frame]) -> bool:
    """Whether an operator runs as a part of one of PyTorch's own. Nothing is corrupted there: such an operator believes
    what its parts return (`bincount` allocates by the maximum it just took), and would write past its memory."""
    return any(outer.trusted for outer in stack)


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream: nothing may be looked at or filled then."""
    return cuda_in_use() and torch.cuda.is_current_stream_capturing()


class Tracker:
    """The state of one watch."""

    def __init__(self, *, inverted: bool = False, exact: bool = False) -> None:
        self.mode = AuditMode(self)
        self.ledger = Ledger()
        self.inverted = inverted
        self.exact = exact
        self.thread = threading.get_ident()
        self.trace: CudaTrace | None = None
        self.probe: Probe | None = None
        self.outside: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] | None = None
        self.busy = False  # inside the audit's own tensor work: its allocations are not the code's
        self._clock = 0
        self._births = 0
        self._live: dict[int, Live] = {}
        self._done: list[Allocation] = []
        self._names: dict[str, Named] = {}
        self._shared: dict[int, Shared] = {}
        self.scratch: dict[int, Runs] = {}  # storage address -> bytes of it that were handed out as regions
        self._patterns: dict[torch.device, Pattern] = {}

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def next_index(self) -> int:
        self._births += 1
        return self._births - 1

    def pattern(self, device: torch.device) -> Pattern:
        if device not in self._patterns:
            self._patterns[device] = Pattern(device, inverted=self.inverted)
        return self._patterns[device]

    def add_uncovered(self, what: str, nbytes: int) -> None:
        self.ledger.uncovered[what] = self.ledger.uncovered.get(what, 0) + nbytes

    def open_trace(self) -> None:
        """Listen to the CUDA allocator from here on."""
        from .cuda_trace import CudaTrace

        was, self.busy = self.busy, True
        self.trace = CudaTrace(self)
        self.trace.open()
        self.busy = was

    # --- operators --------------------------------------------------------------------------------------------------

    def before(
        self, frame: Frame, stack: list[Frame], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        was, self.busy = self.busy, True
        try:
            if self.trace is None and cuda_in_use():
                self.open_trace()
            self.sweep()
            if self.outside is not None and all(not outer.trusted for outer in stack):
                self._keep_outside(written_arguments(func, args, kwargs))
            if self.probe is not None and not _inside_trusted(stack):
                self.probe.before(frame, capturing=capturing())
        finally:
            self.busy = was

    def after(self, frame: Frame, stack: list[Frame], tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        was, self.busy = self.busy, True
        try:
            for tensor in tensors:
                self._grown(frame, stack, tensor)
            for tensor in outputs:
                self._born(frame, stack, tensor)
            if self.probe is not None and not _inside_trusted(stack):
                self.probe.after(frame, outputs, capturing=capturing())
        finally:
            self.busy = was

    def _born(self, frame: Frame, stack: list[Frame], tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._live or storage.nbytes() == 0:
            return
        if storage._cdata in frame.inputs and frame.name != LIFT:
            return
        raw = self.trace.adopt(storage.data_ptr()) if self.trace is not None else None
        heard = raw is not None or self.trace is None or not self.trace.works or not tensor.is_cuda or capturing()
        if not heard and frame.name not in FACTORIES and frame.name != LIFT:
            return  # the allocator handed out nothing: the operator returned memory that it kept from earlier
        live = self._track(frame, stack, tensor, storage, fill=frame.name in FACTORIES, raw=raw)
        if self.probe is not None:
            self.probe.born(live, written=frame.name not in FACTORIES)

    def _grown(self, frame: Frame, stack: list[Frame], tensor: torch.Tensor) -> None:
        """`resize_` and operators that resize their out= argument: old bytes moved along, new ones are fresh."""
        storage = storage_of(tensor)
        if storage is None:
            return
        before, now = frame.inputs.get(storage._cdata, 0), storage.nbytes()
        live = self._live.get(storage._cdata)
        fresh = frame.name.startswith("aten::resize_")
        if live is None:
            if before == 0 and now > 0:
                raw = self.trace.adopt(storage.data_ptr()) if self.trace is not None else None
                live = self._track(frame, stack, tensor, storage, fill=fresh, raw=raw)
                if self.probe is not None:
                    self.probe.born(live, written=not fresh)
            return
        if now == live.nbytes:
            return
        if now > live.nbytes:
            if fresh and not capturing():
                self.pattern(storage.device).fill(byte_view(storage, live.nbytes, now), live.key, offset=live.nbytes)
                live.filled = union(live.filled, np.array([[live.nbytes, now]], dtype=np.int64))
            live.pending = None if live.pending is None else union(live.pending, _span(live.nbytes, now))
        live.nbytes, live.dtype, live.shape = max(now, live.nbytes), tensor.dtype, tuple(tensor.shape)
        if self.trace is not None:
            self.trace.adopt(storage.data_ptr())
        if self.probe is not None:
            self.probe.resized(live)

    def _track(
        self,
        frame: Frame,
        stack: list[Frame],
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        *,
        fill: bool,
        raw: Raw | None,
    ) -> Live:
        """Start to follow a storage. `raw`: what the CUDA allocator said of the same memory, its sentinel already
        laid."""
        nbytes = storage.nbytes()
        index = self.next_index() if raw is None else raw.index
        live = Live(
            index=index,
            storage=storage,
            op=frame.name,
            via=tuple(outer.name for outer in stack),
            stack=call_stack(),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            nbytes=nbytes,
            born=self.tick() if raw is None else raw.born,
            key=key_of(index),
            filled=EMPTY,
        )
        if raw is not None:
            live.filled, live.why_not = raw.filled(nbytes), raw.why_not
        elif fill and capturing():
            live.why_not = "allocated during graph capture"
            self.add_uncovered(live.why_not, nbytes)
        elif fill:
            self.pattern(storage.device).fill(byte_view(storage), live.key)
            live.filled = _span(0, nbytes)
        self._live[storage._cdata] = live
        return live

    def _keep_outside(self, tensors: list[torch.Tensor]) -> None:
        """Remember tensors of the surroundings as they were before the code first changed them."""
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None or storage._cdata in self._live or self.outside is None:
                continue
            if storage._cdata not in self.outside and storage.nbytes():
                self.outside[storage._cdata] = (storage, byte_view(storage).clone())

    # --- death ------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Take leave of storages that only the audit still holds."""
        everything = len(self._live) <= _FEW or self._clock % _SWEEP_EVERY == 0
        if capturing():
            return
        gone = [
            live
            for live in self._live.values()
            if (everything or live.nbytes >= _LARGE) and _unused(live, held=self._held(live))
        ]
        for live in gone:
            self._bury(live, died=self.tick())

    def _held(self, live: Live) -> int:
        """References to the storage in the audit's own books, beside the one in `live`."""
        held = sum(at.storage is live.storage for named in self._names.values() for at in named.open)
        return held + (self.probe is not None and self.probe.storage is live.storage)

    def _bury(self, live: Live, *, died: int | None) -> None:
        del self._live[live.storage._cdata]
        for named in self._names.values():
            for at in [at for at in named.open if at.storage is live.storage]:
                self._close_handout(named, at)
        if self.probe is not None:
            self.probe.died(live)
        self._look(live)
        runs = live.pending
        self._done.append(
            Allocation(
                index=live.index,
                op=live.op,
                via=live.via,
                stack=live.stack,
                device=str(live.storage.device),
                dtype=str(live.dtype).removeprefix("torch."),
                shape=live.shape,
                nbytes=live.nbytes,
                born=live.born,
                died=died,
                never_written=None if runs is None else size(runs),
                runs=EMPTY if runs is None else runs,
                why_not=live.why_not,
            )
        )

    def _look(self, live: Live) -> None:
        """Fold what is still untouched now into what was untouched at every earlier look."""
        if live.why_not:
            return
        if not len(live.filled):
            live.pending = EMPTY
            return
        nbytes = min(live.nbytes, live.storage.nbytes())
        _settle(live.storage.device)
        runs = self.pattern(live.storage.device).unwritten(
            byte_view(live.storage, 0, nbytes), live.key, itemsize=live.dtype.itemsize, exact=self.exact
        )
        if size(live.filled) != live.nbytes:
            runs = intersect(runs, live.filled)
        live.pending = runs if live.pending is None else intersect(live.pending, runs)

    # --- regions ----------------------------------------------------------------------------------------------------

    def region(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` was handed out as scratch under `name`: what lies in its bytes now is nobody's."""
        storage = storage_of(tensor)
        if storage is None or tensor.numel() == 0:
            return
        low = int(tensor.storage_offset()) * tensor.element_size()
        extent = sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        high = low + extent * tensor.element_size()
        was, self.busy = self.busy, True
        try:
            with _disable_current_modes(), quiet():  # called from the code's side, where the mode is on
                self._region(name, tensor, storage, low, high)
        finally:
            self.busy = was

    def _region(self, name: str, tensor: torch.Tensor, storage: torch.UntypedStorage, low: int, high: int) -> None:
        named = self._names.get(name)
        if named is None:
            named = Named(name, call_stack(), storage.device, tensor.dtype)
            self._names[name] = named
        named.handouts += 1
        named.nbytes = max(named.nbytes, high - low)
        here = storage._cdata
        self.scratch[here] = union(self.scratch.get(here, EMPTY), _span(low, high))
        if capturing():
            named.why_not = "handed out during graph capture"
            self.add_uncovered("regions handed out during graph capture", high - low)
            return
        for other in self._names.values():
            for at in list(other.open):
                if at.storage._cdata != here or at.low >= high or low >= at.high:
                    continue
                if other is named and (at.low, at.high) == (low, high):
                    return  # the same bytes again: what was written stays written
                self._close_handout(other, at)
        live = self._live.get(here)
        key = live.key if live is not None else here // 64 % WORDS
        if live is not None:
            named.inside = live.index
            self._look(live)  # the sentinel laid below would hide what was written there before
            if size(live.filled) != live.nbytes:
                live.filled = union(live.filled, _span(low, high))
                live.pending = EMPTY if live.pending is None else live.pending
        if self.probe is not None:
            self.probe.before_fill(storage)
        self.pattern(storage.device).fill(byte_view(storage, low, high), key, offset=low)
        if self.probe is not None:
            self.probe.after_fill(storage)
        named.open.append(Handout(storage, low, high, key, tensor.element_size()))
        if self.probe is not None:
            self.probe.handed_out(name, storage, low, high, tensor.dtype)

    def _close_handout(self, named: Named, at: Handout) -> None:
        named.open.remove(at)
        if self.probe is not None:
            self.probe.taken_back(named.name, at.storage, at.low)
        _settle(at.storage.device)
        runs = self.pattern(at.storage.device).unwritten(
            byte_view(at.storage, at.low, at.high), at.key, offset=at.low, itemsize=at.itemsize, exact=self.exact
        )
        written = complement(runs, at.high - at.low)
        named.written = union(named.written, written)
        if named.inside is None:
            shared = self._shared.setdefault(at.storage._cdata, Shared())
            shared.handed = union(shared.handed, _span(at.low, at.high))
            shared.written = union(shared.written, written + at.low)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> Ledger:
        """Look at everything still alive and hand over the ledger."""
        self.busy = True
        with quiet():
            for named in self._names.values():
                for at in list(named.open):
                    self._close_handout(named, at)
            for live in list(self._live.values()):
                self._bury(live, died=None)
            if self.trace is not None:
                self.trace.close()
        self._patterns.clear()
        ledger = self.ledger
        ledger.allocations = sorted(self._done, key=lambda a: a.index)
        ledger.regions = [_region_of(named) for named in self._names.values()]
        ledger.shared_dead = sum(size(s.handed) - size(intersect(s.handed, s.written)) for s in self._shared.values())
        return ledger

    def add_raw(self, allocation: Allocation) -> None:
        """An allocation that only the CUDA allocator saw."""
        self._done.append(allocation)


def _region_of(named: Named) -> Region:
    runs = complement(named.written, named.nbytes)
    return Region(
        name=named.name,
        nbytes=named.nbytes,
        handouts=named.handouts,
        stack=named.stack,
        device=str(named.device),
        dtype=str(named.dtype).removeprefix("torch."),
        inside=named.inside,
        never_written=None if named.why_not else size(runs),
        runs=runs,
        why_not=named.why_not,
    )


def _span(low: int, high: int) -> Runs:
    return np.array([[low, high]], dtype=np.int64)


def _settle(device: torch.device) -> None:
    """Wait for kernels of every stream: a look at memory that is still being written would accuse it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def key_of(index: int) -> int:
    """The word of the pattern at which allocation `index` starts: another one for each of 131,071 in a row."""
    return index * 7919 % WORDS


def _references(live: Live) -> int:
    return sys.getrefcount(live.storage)


def _unused(live: Live, *, held: int) -> bool:
    """Whether only the audit holds the storage: one C++ reference (through Python's object), and no other Python
    one."""
    if torch._C._storage_Use_Count(live.storage._cdata) != 1:
        return False
    return _references(live) <= _OWN_REFERENCES + held


def _calibrate() -> int:
    """What `_references` says of a storage that only its Live holds: it differs between Python versions."""
    empty = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    live = Live(0, empty, "", (), (), torch.uint8, None, 0, 0, 0, EMPTY)
    del empty
    return _references(live)


_OWN_REFERENCES: Final = _calibrate()
