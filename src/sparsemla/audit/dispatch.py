# SPDX-License-Identifier: Apache-2.0
"""The eye of the audit: a dispatch mode that stays open inside the operators it sees.

A `TorchDispatchMode` is taken off while its handler runs, so the `at::empty` inside a compiled operator's kernel would
go unseen. The mode therefore calls the operator's backend kernel directly (`OpOverload.redispatch` with the backend's
key alone) with itself pushed again: every dispatcher call the kernel makes comes back here, whatever way the extension
was built (TORCH_LIBRARY, the stable ABI, or a plain pybind function, whose `at::empty` reaches the mode without help).
Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .tracker import Tracker

TRUSTED_NAMESPACES: Final = frozenset({"aten", "prims", "prim", "quantized"})
"""Operators that read nothing but their arguments and write nothing but their outputs."""

FACTORIES: Final = frozenset(
    {
        "aten::empty.memory_format",
        "aten::empty.names",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
"""Operators whose result is fresh, uninitialised memory: the sentinel is laid into it at once."""

_LEAVES: Final = frozenset({"aten::empty.memory_format", "aten::empty_strided"})
_BACKENDS: Final = {"cpu": DispatchKey.CPU, "cuda": DispatchKey.CUDA}


@dataclass(slots=True)
class Frame:
    """One operator in flight."""

    name: str
    trusted: bool
    start: int
    inputs: dict[int, int] = field(default_factory=dict)  # storage address -> its bytes before the call

    @classmethod
    def of(cls, func: OpOverload, tensors: Iterable[torch.Tensor], start: int) -> Frame:
        frame = cls(name_of(func), func.namespace in TRUSTED_NAMESPACES, start)
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None:
                frame.inputs[storage._cdata] = storage.nbytes()
        return frame


def name_of(func: OpOverload) -> str:
    """Namespace, operator and overload: `aten::empty.memory_format`."""
    return str(func.name())  # type: ignore[no-untyped-call]


def cuda_in_use() -> bool:
    """Whether this process has a CUDA context; asking does not make one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The audit's own tensor work: unseen by function modes (default devices, tracers), gradients off."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain CPU or CUDA tensor, None for every other kind."""
    if tensor.device.type not in _BACKENDS or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # nested and wrapper tensors have none
        return None


def byte_view(storage: torch.UntypedStorage, low: int = 0, high: int | None = None) -> torch.Tensor:
    """Bytes [low, high) of a storage as a (n,) uint8 tensor on its memory."""
    high = storage.nbytes() if high is None else high
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))


def tensors_in(*trees: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


class AuditMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operator, nested ones included, to a tracker."""

    supports_higher_order_operators = True

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self._stack: list[Frame] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # higher-order operators carry callables: nothing to look at here
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        if any(torch._C._dispatch_keys(tensor).has(DispatchKey.Python) for tensor in tensors):
            return NotImplemented  # a tensor subclass: it unwraps itself, and its inner operators come back here
        tracker = self.tracker
        with quiet():
            frame = Frame.of(func, tensors, tracker.tick())
            tracker.before(frame, self._stack, func, args, kwargs)
        self._stack.append(frame)
        try:
            out = self._call(func, args, kwargs, tensors)
        finally:
            self._stack.pop()
        with quiet():
            tracker.after(frame, self._stack, tensors, tensors_in(out))
        return out

    def names(self) -> tuple[str, ...]:
        """Operators in flight, outermost first."""
        return tuple(frame.name for frame in self._stack)

    def _call(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        numbers = _numbers_for_tensors(func, args, kwargs)
        if numbers:  # entering the kernel would turn the number into a tensor, and type promotion with it
            return _overload_taking(func, numbers)(*args, **kwargs)
        keys = self._kernel_keys(func, kwargs, tensors)
        if keys is None:
            return func(*args, **kwargs)
        with self:
            return func.redispatch(keys, *args, **kwargs)

    def _kernel_keys(
        self, func: OpOverload, kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> DispatchKeySet | None:
        """Where to enter the operator's own kernel with the mode on; None where it must be called as usual."""
        name = name_of(func)
        if name in _LEAVES or (func.is_view and func.namespace == "aten"):
            return None  # nothing happens inside, and aten::detach would call itself without end
        if func.namespace == "aten" and "Scalar" in func._overloadname:
            return None  # the same operator again with the number as a tensor
        if len(self._stack) > 1 and self._stack[-2].name == name:
            return None
        if _get_current_dispatch_mode() is not None:
            return None  # another mode under this one has to see the operator first
        kinds = {tensor.device.type for tensor in tensors}
        if not tensors:
            kinds = {torch.device(kwargs.get("device") or "cpu").type}
        if any(kind not in _BACKENDS for kind in kinds):
            return None
        if any(tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested for tensor in tensors):
            return None
        key = _BACKENDS["cuda" if "cuda" in kinds else "cpu"]
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key.name):
            return None
        return DispatchKeySet(key)


def _numbers_for_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Names of arguments at which a plain number stands where the schema says Tensor.

    A kernel that wraps a number and calls the tensor overload is seen here with the number unwrapped again.
    """
    found: list[str] = []
    for position, (name, is_tensor) in enumerate(_signature(func)):
        if is_tensor:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, (int, float, complex)):
                found.append(name)
    return frozenset(found)


@functools.cache
def _signature(func: OpOverload) -> tuple[tuple[str, bool], ...]:
    """Arguments of an operator: name, and whether the schema says Tensor or Tensor?."""
    declared = func._schema.arguments
    return tuple((a.name, str(a.type).removeprefix("Optional[").startswith("Tensor")) for a in declared)


@functools.cache
def _overload_taking(func: OpOverload, numbers: frozenset[str]) -> OpOverload:
    """The overload of the same operator with numbers declared at these arguments; `func` itself where there is none."""
    want = tuple((name, is_tensor and name not in numbers) for name, is_tensor in _signature(func))
    for name in func.overloadpacket.overloads():
        other: OpOverload = getattr(func.overloadpacket, name)
        if other is not func and _signature(other) == want:
            return other
    return func


def written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that the schema says the operator writes in place."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += tensors_in(value)
    return found
