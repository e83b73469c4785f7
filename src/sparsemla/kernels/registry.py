# SPDX-License-Identifier: Apache-2.0
"""Who serves an attention call: one ordered table, first match wins.

A kernel is a module with

* ``run(call) -> None``: fills ``call.out`` and ``call.lse``;
* ``why_not(call) -> str | None``: a reason not to serve this call, None to serve it (optional: serves everything);
* ``scratch_bytes(call) -> int``: device bytes it takes beyond out and lse (optional: ``schedule.accumulator_bytes``);
* ``plan(...) -> SplitSchedule | None``: its own idea of how to cut the work (optional).

Modules are imported when a call first asks for them, so importing sparsemla imports no compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sparsemla.kernels.call import AttentionCall

if TYPE_CHECKING:
    from sparsemla.schedule import SplitSchedule

logger = logging.getLogger(__name__)


@cache
def _missing(name: str) -> str | None:
    """Why the module `name` cannot be imported here; None when it can. Looks, does not import."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent package is missing
        spec = None
    return None if spec is not None else f"{name} is not there"


@cache
def _load(module: str) -> ModuleType | str:
    """The module, or the reason why importing it failed (kept, so that a broken install costs one attempt)."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a compiler that does not fit the driver fails in its own ways; the next kernel serves
        return f"import of {module} failed: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Kernel:
    """One entry of the table.

    Attributes:
        name: what logs, `sparsemla doctor` and tests call it.
        module: where ``run`` and its companions live; imported on first use.
        device_types: torch device types it can serve.
        requires: importable modules it needs, looked for (not imported) before `module` is imported.
    """

    name: str
    module: str
    device_types: tuple[str, ...]
    requires: tuple[str, ...] = ()

    def unavailable(self) -> str | None:
        """Why this kernel cannot run on this installation whatever the call; None when it can."""
        for name in (*self.requires, self.module):
            reason = _missing(name)
            if reason is not None:
                return reason
        return None

    def implementation(self) -> ModuleType:
        """The imported module.

        Raises:
            ImportError: it cannot be imported here.
        """
        loaded = _load(self.module)
        if isinstance(loaded, str):
            raise ImportError(f"kernel {self.name!r}: {loaded}")
        return loaded

    def why_not(self, call: AttentionCall) -> str | None:
        """Why this kernel does not serve `call`; None when it does."""
        if call.device.type not in self.device_types:
            return f"serves {' and '.join(self.device_types)}, the call is on {call.device.type}"
        reason = self.unavailable()
        if reason is not None:
            return reason
        loaded = _load(self.module)
        if isinstance(loaded, str):
            return loaded
        ask = getattr(loaded, "why_not", None)
        return None if ask is None else cast("str | None", ask(call))

    def run(self, call: AttentionCall) -> None:
        """Fills ``call.out`` and ``call.lse``."""
        self.implementation().run(call)

    def scratch_bytes(self, call: AttentionCall) -> int:
        """Device bytes of accumulators this kernel takes for `call`, beyond out and lse."""
        ask = getattr(self.implementation(), "scratch_bytes", None)
        if ask is not None:
            return int(ask(call))
        return 0 if call.schedule is None else call.schedule.accumulator_bytes

    def plan(self, **shape: Any) -> SplitSchedule | None:
        """The kernel's own plan for a shape (see the module's ``plan``); None: it needs none."""
        make = getattr(self.implementation(), "plan", None)
        return None if make is None else cast("SplitSchedule | None", make(**shape))


KERNELS: tuple[Kernel, ...] = (
    Kernel("hopper", "sparsemla.kernels.hopper", ("cuda",), requires=("cutlass",)),
    Kernel("triton", "sparsemla.kernels.triton", ("cuda",), requires=("triton",)),
    Kernel("cpu", "sparsemla.kernels.cpu", ("cpu", "cuda")),
)
"""Best first. The last entry, blockwise torch, serves every call, on CUDA tensors too."""

_told: set[tuple[str, ...]] = set()


def kernel(name: str) -> Kernel:
    """The entry called `name`.

    Raises:
        ValueError: no such kernel.
    """
    for entry in KERNELS:
        if entry.name == name:
            return entry
    raise ValueError(f"kernel: got {name!r}, accepted are {[entry.name for entry in KERNELS]}")


def select(call: AttentionCall) -> Kernel:
    """The first kernel of the table that serves `call`.

    On a CUDA device where only the blockwise torch kernel serves it, one line is logged for each distinct set of
    reasons.
    """
    reasons: list[str] = []
    for entry in KERNELS:
        reason = entry.why_not(call)
        if reason is None:
            if reasons and call.device.type == "cuda" and entry is KERNELS[-1]:
                _tell(reasons)
            return entry
        reasons.append(f"{entry.name}: {reason}")
    raise ValueError(f"q: no kernel serves device {call.device}; " + "; ".join(reasons))


def _tell(reasons: list[str]) -> None:
    key = tuple(reasons)
    if key not in _told:
        _told.add(key)
        logger.warning("attention runs blockwise in torch (correct, not fast): %s", "; ".join(reasons))
