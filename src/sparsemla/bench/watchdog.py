# SPDX-License-Identifier: Apache-2.0
"""Ends the process when one step hangs: a kernel that waits for ever cannot be interrupted in any other way."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_STATUS = 124
"""Of a process ended here (as `timeout` has it)."""


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_STATUS)


class Watchdog:
    """Watches one step at a time from a thread of its own.

    Results are saved as they come, so an end in here loses the step that hung and those after it.
    """

    def __init__(self, *, on_timeout: Callable[[str], None] = _end, interval: float = 0.5) -> None:
        self._step: tuple[str, float, float] | None = None
        self._on_timeout = on_timeout
        self._interval = interval
        threading.Thread(target=self._watch, daemon=True, name="sparsemla-watchdog").start()

    @contextmanager
    def step(self, what: str, seconds: float) -> Iterator[None]:
        """Ends the process unless the body is done within `seconds`."""
        self._step = (what, time.monotonic() + seconds, seconds)
        try:
            yield
        finally:
            self._step = None

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval)
            step = self._step
            if step is not None and time.monotonic() > step[1]:
                self._step = None
                self._on_timeout(f"gave up: {step[0]} did not end within {step[2]:.0f} s")
