# SPDX-License-Identifier: Apache-2.0
"""What is written and never read: the code runs again, once and more for each allocation, with that allocation
corrupted.

A `Probe` sits on one target. Around every operator that can touch it, it compares the target's bytes with what it left
there; elements that changed were just written, by whatever means, and are flipped at once. If no result changes,
nothing read them.

A flip can only be laid where PyTorch's dispatcher passes by. What a compiled operator writes and reads between two such
points, in one call, is out of reach; there the verdict is "unknown", with the reason, never "never read".
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch

from .dispatch import Frame, byte_view, cuda_in_use, storage_of
from .sentinel import EMPTY, Runs, complement

if TYPE_CHECKING:
    from .tracker import Live

_CHUNK: Final = 8 << 20  # elements compared at once
_DEPTH: Final = 12

_WORD: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX: Final = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A, 8: 0x5A5A5A5A5A5A5A5A}
_INTEGERS: Final = frozenset({torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64})


@dataclass(frozen=True)
class Target:
    """What a probe sits on: an allocation by its index, or a region by its name."""

    index: int | None = None
    region: str | None = None


def _flipped(words: torch.Tensor, dtype: torch.dtype, attempt: int) -> torch.Tensor:
    """Words of a tensor of `dtype`, corrupted.

    Every bit, then a mix. Integers larger than a byte may be indices: their lowest bit moves, then they become 1 (what
    was 1: 0; negative ones stay), so that a corrupted run reads a neighbour or an early place rather than an address
    that ends the process. Booleans must stay 0 or 1.

    The first attempt is one-to-one: it can turn the values of a tensor (a range of indices, a mask half set) into a
    permutation of themselves, and a sum over what they select does not see that; nor does the row that a byte offset
    lies in. The second is not, and moves more than low bits.
    """
    if dtype is torch.bool:
        return words ^ 1 if attempt == 0 else words * 0
    if dtype in _INTEGERS:
        return words ^ 1 if attempt == 0 else torch.where(words < 0, words, (words > 1).to(words.dtype))
    if attempt == 0:
        return words ^ -1
    size = words.element_size()
    return (words ^ _MIX[size]) & 0x7F if size == 1 else words ^ _MIX[size]


class Probe:
    """Corrupts one target throughout one run."""

    def __init__(self, target: Target, *, attempt: Literal[0, 1]) -> None:
        self.target = target
        self.attempt = attempt
        self.storage: torch.UntypedStorage | None = None
        self.flipped = False
        self.opaque = ""  # why a read may have gone unseen
        self._low = self._high = 0
        self._dtype = torch.uint8
        self._last: torch.Tensor | None = None
        self._known_at = 0
        self._clock = 0

    # --- the target comes and goes ----------------------------------------------------------------------------------

    def born(self, live: Live, *, written: bool) -> None:
        """A new storage. `written`: by the operator that returned it, all of it."""
        if self.target.index != live.index or self.storage is not None:
            return
        self._attach(live.storage, 0, live.nbytes, live.dtype, at=live.born)
        if written and self._last is not None:
            self._last = _words(self._view(), live.dtype).bitwise_not()  # all of it counts as changed

    def resized(self, live: Live) -> None:
        if self.storage is live.storage and self.target.index is not None and self._last is not None:
            old, view = self._last.view(torch.uint8), byte_view(live.storage)
            self._high, self._dtype = view.numel(), live.dtype
            fresh = view.clone()
            fresh[: old.numel()] = old[: fresh.numel()]
            self._last = _words(fresh, live.dtype).clone()

    def died(self, live: Live) -> None:
        if self.storage is live.storage:
            self._look(trusted=False, why="written after the last operator that PyTorch's dispatcher saw")
            self._detach()

    def handed_out(self, name: str, storage: torch.UntypedStorage, low: int, high: int, dtype: torch.dtype) -> None:
        if self.target.region != name:
            return
        if self.storage is not None:  # one probe, one place: the earlier hand-out goes on unwatched
            self._look(trusted=False, why="handed out in two places at once")
            self.opaque = self.opaque or "handed out in two places at once"
        self._attach(storage, low, high, dtype, at=self._clock)

    def taken_back(self, name: str, storage: torch.UntypedStorage, low: int) -> None:
        if self.target.region == name and self.storage is storage and self._low == low:
            self._look(trusted=False, why="written after the last operator that PyTorch's dispatcher saw")
            self._detach()

    def before_fill(self, storage: torch.UntypedStorage) -> None:
        """The audit is about to lay the sentinel into a part of a storage."""
        if self.storage is storage and self.target.index is not None:
            self._look(trusted=False, why="written by code that PyTorch's dispatcher did not see, before a hand-out")

    def after_fill(self, storage: torch.UntypedStorage) -> None:
        if self.storage is storage and self.target.index is not None:
            self._last = _words(self._view(), self._dtype).clone()

    def _attach(self, storage: torch.UntypedStorage, low: int, high: int, dtype: torch.dtype, *, at: int) -> None:
        if (high - low) % dtype.itemsize or low % min(dtype.itemsize, 8):
            dtype = torch.uint8
        self.storage, self._low, self._high, self._dtype, self._known_at = storage, low, high, dtype, at
        self._last = _words(self._view(), dtype).clone()

    def _detach(self) -> None:
        self.storage, self._last = None, None

    def _view(self) -> torch.Tensor:
        assert self.storage is not None  # callers checked
        return byte_view(self.storage, self._low, self._high)

    # --- operators --------------------------------------------------------------------------------------------------

    def before(self, frame: Frame, *, capturing: bool) -> None:
        self._clock = frame.start
        if capturing:
            self.opaque = self.opaque or "a CUDA graph was captured"
        elif self.storage is not None and (not frame.trusted or self.storage._cdata in frame.inputs):
            self._look(trusted=False, why=f"written by code that PyTorch's dispatcher did not see, before {frame.name}")

    def after(self, frame: Frame, outputs: list[torch.Tensor], *, capturing: bool) -> None:
        if self.storage is None or capturing:
            return
        here = self.storage._cdata
        older = self._known_at < frame.start
        returned = any(s is not None and s._cdata == here for s in map(storage_of, outputs))
        if frame.trusted and not returned and older and here not in frame.inputs:
            return
        if frame.trusted and (older or returned):
            self._look(trusted=True, why="")
        elif returned:
            self._look(trusted=False, why=f"returned by {frame.name}, which may read it before it returns")
        else:
            self._look(trusted=False, why=f"written inside {frame.name}, which may read it before it returns")

    def _look(self, *, trusted: bool, why: str) -> None:
        """Flip what changed since the last look."""
        if self._last is None:
            return
        now = _words(self._view(), self._dtype)
        changed = False
        for low in range(0, now.numel(), _CHUNK):
            part, last = now[low : low + _CHUNK], self._last[low : low + _CHUNK]
            differs = part != last
            if bool(differs.any()):
                changed = True
                part.copy_(torch.where(differs, _flipped(part, self._dtype, self.attempt), part))
                last.copy_(part)
        if changed:
            self.flipped = True
            if not trusted:
                self.opaque = self.opaque or why


def _words(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes seen as the integers that an element of `dtype` is corrupted as."""
    return data.view(_WORD[min(dtype.itemsize, 8)])


# --- results ----------------------------------------------------------------------------------------------------------

Leaf = tuple[str, object]


@dataclass
class Outcome:
    """Everything a run left behind that can be compared."""

    leaves: list[Leaf] = field(default_factory=list)
    error: str = ""

    def same_as(self, other: Outcome) -> bool:
        """Bit for bit."""
        if self.error != other.error or len(self.leaves) != len(other.leaves):
            return False
        return all(_same(a, b) for a, b in zip(self.leaves, other.leaves, strict=True))


def _same(a: Leaf, b: Leaf) -> bool:
    if a[0] != b[0]:
        return False
    left, right = a[1], b[1]
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.device == right.device and torch.equal(left, right)
    return type(left) is type(right) and left == right


def outcome_of(*values: object) -> Outcome:
    """A deep copy of the comparable content of values: tensors and arrays as bytes, numbers, text, containers, object
    attributes."""
    found = Outcome()
    _collect(values, "", found.leaves, set(), 0)
    return found


def _collect(value: object, path: str, leaves: list[Leaf], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        leaves.append((f"{path}:{tuple(value.shape)}:{value.dtype}", _tensor_bytes(value)))
    elif isinstance(value, (np.ndarray, np.generic)):
        leaves.append((f"{path}:{value.shape}:{value.dtype}", value.tobytes()))
    elif isinstance(value, float):
        leaves.append((path, struct.pack("<d", value)))  # NaN equals itself
    elif value is None or isinstance(value, (bool, int, complex, str, bytes)):
        leaves.append((path, value))
    elif isinstance(value, (bytearray, memoryview)):
        leaves.append((path, bytes(value)))
    elif depth < _DEPTH and id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            _collect(part, f"{path}/{name}", leaves, seen, depth + 1)


def _parts(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(repr(key), part) for key, part in value.items()]
    if isinstance(value, Set):
        return [(str(i), part) for i, part in enumerate(sorted(value, key=repr))]
    if isinstance(value, (list, tuple, deque)):
        return [(str(i), part) for i, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, torch.nn.Module):
        parts: list[tuple[str, object]] = [*value.named_parameters(), *value.named_buffers()]
        for name, module in value.named_modules():
            parts += [(f"{name}.{key}", part) for key, part in vars(module).items() if not key.startswith("_")]
        return [(key, part) for key, part in parts if not isinstance(part, torch.nn.Module)]
    slots = [n for kind in type(value).__mro__ for n in _names(vars(kind).get("__slots__")) if hasattr(value, n)]
    if slots and not isinstance(value, type):
        return [(name, getattr(value, name)) for name in slots] + list(getattr(value, "__dict__", {}).items())
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, type) and not callable(value):
        return list(attributes.items())
    return []


def _names(slots: object) -> list[str]:
    """What a class names in `__slots__`."""
    names = [slots] if isinstance(slots, str) else list(slots) if isinstance(slots, (list, tuple)) else []
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _tensor_bytes(tensor: torch.Tensor) -> object:
    with torch.no_grad():
        plain = tensor.detach()
        if plain.layout is not torch.strided or plain.device.type == "meta":
            return repr(plain)
        plain = plain.resolve_conj().resolve_neg().contiguous().clone()
        return plain.reshape(-1).view(torch.uint8) if plain.numel() else b""


# --- the state around the code ----------------------------------------------------------------------------------------


@dataclass
class Surroundings:
    """Random number states and tensors outside the code, put back before every rerun."""

    torch_rng: torch.Tensor
    cuda_rng: list[torch.Tensor]
    python_rng: object
    numpy_rng: object
    tensors: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def now(cls, tensors: list[torch.Tensor]) -> Surroundings:
        """As things stand; `tensors` (the arguments) are copied, others join when the code first changes them."""
        initialised = cuda_in_use()
        kept = cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if initialised else [],
            random.getstate(),
            np.random.get_state(),
        )
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.nbytes():
                kept.tensors[storage._cdata] = (storage, byte_view(storage).clone())
        return kept

    def again(self) -> Surroundings:
        """The same tensors and random number states as they are now."""
        later = Surroundings.now([])
        later.tensors = {at: (storage, byte_view(storage).clone()) for at, (storage, _) in self.tensors.items()}
        return later

    def restore(self) -> None:
        torch.set_rng_state(self.torch_rng)
        if self.cuda_rng:
            torch.cuda.set_rng_state_all(self.cuda_rng)
        random.setstate(self.python_rng)  # type: ignore[arg-type]
        np.random.set_state(self.numpy_rng)  # type: ignore[arg-type]
        for storage, before in self.tensors.values():
            if storage.nbytes() == before.numel():
                byte_view(storage).copy_(before)

    def contents(self, scratch: Mapping[int, Runs]) -> list[torch.Tensor]:
        """The kept tensors' bytes as they are now, in the order in which they were met, without handed-out scratch."""
        found: list[torch.Tensor] = []
        for address, (storage, _) in self.tensors.items():
            nbytes = storage.nbytes()
            lasting = complement(scratch.get(address, EMPTY), nbytes) if nbytes else EMPTY
            found += [byte_view(storage, low, high) for low, high in lasting.tolist()]
        return found
