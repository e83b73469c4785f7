# SPDX-License-Identifier: Apache-2.0
"""Which watch is on. Kept apart so that a workspace can report to it without pulling in the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .tracker import Tracker

_active: Tracker | None = None


def enter(tracker: Tracker) -> None:
    global _active
    if _active is not None:
        raise RuntimeError("a watch is already on: they do not nest")
    _active = tracker


def leave(tracker: Tracker) -> None:
    global _active
    if _active is tracker:
        _active = None


def is_watching() -> bool:
    """Whether a watch is on."""
    return _active is not None


def register_region(name: str, tensor: torch.Tensor) -> None:
    """Report a stretch of a larger buffer under its own name; does nothing unless a watch is on.

    To be called by whoever hands out scratch from a shared buffer, at the moment of handing out: by that call the
    content of `tensor` (a view with any shape and dtype, on CPU or CUDA) is declared undefined, and the sentinel is
    laid into it. Handing out the same bytes under the same name again leaves them as they are.
    """
    if _active is not None:
        _active.region(name, tensor)
