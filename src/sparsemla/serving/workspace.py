# SPDX-License-Identifier: Apache-2.0
"""The one scratch buffer that all users of a step share.

Users never need their scratch at the same time as another user's, so the buffer is as large as the largest set of
tensors that is *taken together*, not as the sum. It grows while users reserve and, once locked (before CUDA graphs are
captured and the KV pool takes the rest of the memory), never again.

Whoever audits a run hears what is handed out: through `SharedWorkspace.listen`, and in :mod:`sparsemla.audit`'s ledger
under the name ``owner/tensor``.

A *lane* separates executions that overlap in time (micro-batches, side streams): each has a buffer of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod

import torch

from sparsemla.serving.reservations import WORKSPACE_ALIGN, Reservation, align


class WorkspaceLockedError(RuntimeError):
    """Somebody asked a locked workspace for more than is there."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a scratch tensor that is not one of attention's reservations (an indexer's, a MoE's)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return prod(self.shape) * self.dtype.itemsize


Spec = Reservation | TensorSpec


@dataclass(frozen=True)
class LedgerEntry:
    """One set of tensors that one owner reserved on one lane.

    `nbytes` is the aligned size of the set; `grew_by` is what its first reservation added to the lane's buffer.
    """

    owner: str
    lane: int
    specs: tuple[Spec, ...]
    nbytes: int
    grew_by: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in layout order."""
        return tuple(spec.name for spec in self.specs)


def _describe(specs: Sequence[Spec]) -> str:
    return ", ".join(f"{spec.name} {spec.shape}" for spec in specs) or "nothing"


Listener = Callable[[str, int, Mapping[str, torch.Tensor]], None]
"""Called with (owner, lane, tensors by name) whenever a set is handed out."""


class SharedWorkspace:
    """Reserve, lock, hand out.

    Args:
        device: where the buffers live.
        lanes: executions that may overlap; each gets a buffer when it first reserves.

    Not for concurrent use of one lane: two users of a lane overwrite each other, which is the point of sharing.
    """

    def __init__(self, device: torch.device | str = "cpu", *, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"lanes: got {lanes}, accepted is at least 1")
        self.device = torch.device(device)
        self.lanes = lanes
        self._buffers: list[torch.Tensor | None] = [None] * lanes
        self._ledger: dict[tuple[str, int], LedgerEntry] = {}
        self._listeners: list[Listener] = []
        self._locked = False
        self._guard = threading.Lock()
        self._lane: ContextVar[int] = ContextVar(f"sparsemla_workspace_lane_{id(self)}", default=0)

    @contextmanager
    def on_lane(self, lane: int) -> Iterator[None]:
        """Everything reserved or taken in this context (and its async tasks) uses that lane."""
        self._check_lane(lane)
        token = self._lane.set(lane)
        try:
            yield
        finally:
            self._lane.reset(token)

    def _check_lane(self, lane: int) -> int:
        if not 0 <= lane < self.lanes:
            raise ValueError(f"lane: got {lane}, accepted are 0 to {self.lanes - 1}")
        return lane

    def nbytes(self, lane: int | None = None) -> int:
        """Bytes of one lane's buffer; of all of them together without an argument."""
        buffers = self._buffers if lane is None else [self._buffers[self._check_lane(lane)]]
        return sum(0 if buffer is None else buffer.numel() for buffer in buffers)

    @property
    def locked(self) -> bool:
        """Whether growth is over."""
        return self._locked

    def lock(self) -> None:
        """No growth from here on."""
        self._locked = True

    def unlock(self) -> None:
        """Allow growth again (an engine reconfigures itself). Tensors handed out before must not be used afterwards."""
        self._locked = False

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Who reserved what, in the order of first reservation."""
        return tuple(self._ledger.values())

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` whenever tensors are handed out (for audits). Returns a function that stops it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def reserve(self, owner: str, specs: Sequence[Spec]) -> int:
        """Make room for a set of tensors that are taken together; returns its aligned bytes.

        An empty set is allowed and takes nothing. Keeps no views: a buffer that is outgrown is freed before the larger
        one is allocated.

        Raises:
            ValueError: two tensors of one name, or another set than this owner reserved before on this lane.
            WorkspaceLockedError: locked, and the set is larger than the buffer.
        """
        specs = tuple(specs)
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ValueError(f"specs: got the names {names} from {owner}, accepted are distinct names")
        lane = self._lane.get()
        nbytes = sum(align(spec.nbytes) for spec in specs)
        with self._guard:
            known = self._ledger.get((owner, lane))
            if known is not None and known.specs != specs:
                raise ValueError(
                    f"specs: {owner} asks for {_describe(specs)} on lane {lane}, accepted is what it reserved before: "
                    f"{_describe(known.specs)}"
                )
            grew = self._ensure(owner, lane, nbytes)
            if known is None:
                self._ledger[owner, lane] = LedgerEntry(owner, lane, specs, nbytes, grew)
        return nbytes

    def reserve_bytes(self, owner: str, nbytes: int) -> int:
        """`reserve` for a user of whom only the size of its largest set is known."""
        return self.reserve(owner, [TensorSpec("set", (nbytes,), torch.uint8)])

    def _ensure(self, owner: str, lane: int, nbytes: int) -> int:
        there = 0 if self._buffers[lane] is None else self.nbytes(lane)
        if nbytes <= there:
            return 0
        if self._locked:
            raise WorkspaceLockedError(
                f"workspace is locked: {owner} asks for {nbytes} bytes on lane {lane}, there are {there} bytes"
            )
        self._buffers[lane] = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else the outgrown segment stays reserved beside the new one
        self._buffers[lane] = _aligned(nbytes, self.device)
        return nbytes - there

    def take(self, owner: str) -> dict[str, torch.Tensor]:
        """The owner's reserved tensors, views of the current lane's buffer with whatever was left there.

        Raises:
            ValueError: the owner reserved nothing on this lane.
        """
        lane = self._lane.get()
        entry = self._ledger.get((owner, lane))
        if entry is None:
            owners = sorted({name for name, on in self._ledger if on == lane})
            raise ValueError(f"owner: got {owner!r}, which reserved nothing on lane {lane}; accepted are {owners}")
        tensors: dict[str, torch.Tensor] = {}
        buffer = self._buffers[lane]
        offset = 0
        for spec in entry.specs:
            if buffer is None:  # only sets of empty tensors reach a lane without a buffer
                tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            else:
                raw = buffer[offset : offset + spec.nbytes]
                tensors[spec.name] = raw.view(spec.dtype).view(spec.shape)
            offset += align(spec.nbytes)
        for listener in self._listeners:
            listener(owner, lane, tensors)
        _report_to_audit(owner, lane, tensors)
        return tensors


def _aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    """(nbytes,) uint8 that starts at a multiple of WORKSPACE_ALIGN."""
    if device.type == "cuda":  # its allocator aligns to more; the host's to less
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    raw = torch.empty(nbytes + WORKSPACE_ALIGN, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % WORKSPACE_ALIGN
    return raw[start : start + nbytes]


def _report_to_audit(owner: str, lane: int, tensors: Mapping[str, torch.Tensor]) -> None:
    # Looked up, not imported: where nobody imported the audit no watch can be on, and this room does not depend on it.
    state = sys.modules.get("sparsemla.audit.state")
    if state is None or not state.is_watching():
        return
    for name, tensor in tensors.items():
        state.register_region(f"{owner}/{name}" if lane == 0 else f"{owner}/{name} (lane {lane})", tensor)


__all__ = [
    "WORKSPACE_ALIGN",
    "LedgerEntry",
    "Listener",
    "SharedWorkspace",
    "Spec",
    "TensorSpec",
    "WorkspaceLockedError",
]
