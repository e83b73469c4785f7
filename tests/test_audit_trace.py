# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping behind the CUDA allocator's hook, driven by hand on host memory. The hook: tests marked gpu."""

from __future__ import annotations

import ctypes

import pytest
import torch

from sparsemla.audit import runner
from sparsemla.audit.cuda_trace import CudaTrace
from sparsemla.audit.tracker import Tracker

CPU = torch.device("cpu")


@pytest.fixture
def tracker() -> Tracker:
    made = Tracker()
    made.trace = CudaTrace(made)
    return made


def host(nbytes: int) -> tuple[object, int]:
    memory = (ctypes.c_uint8 * nbytes)()
    return memory, ctypes.addressof(memory)


def test_memory_that_no_tensor_ever_names(tracker: Tracker) -> None:
    freed, kept = host(4096), host(1000)
    with runner._open(tracker):
        assert tracker.trace is not None
        tracker.trace.seen(freed[1], 4096, CPU)
        ctypes.memset(freed[1], 0, 1024)
        tracker.trace._on_free(freed[1])
        tracker.trace._on_free(12345)  # never seen: older than the watch
        tracker.trace.seen(kept[1], 1000, CPU)
    first, second = tracker.ledger.allocations
    assert (first.nbytes, first.never_written, first.died is None) == (4096, 3072, False)
    assert (second.nbytes, second.never_written, second.died) == (1000, 1000, None)
    assert first.dtype == "bytes" and "dispatcher" in first.read_note
    assert "test_memory_that_no_tensor_ever_names" in first.site


def test_a_tensor_takes_over_what_the_allocator_reported(tracker: Tracker) -> None:
    """The sentinel laid at the allocation stays: an operator's own output is examined like any other memory."""
    library = torch.library.Library("audit_trace_test", "DEF")
    library.define("half(Tensor x) -> Tensor")
    made: list[int] = []

    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():  # as memory taken past the dispatcher
            out = torch.empty(100)
        assert tracker.trace is not None
        tracker.trace.seen(out.data_ptr(), 400, CPU)
        made.append(out.data_ptr())
        with torch.utils._python_dispatch._disable_current_modes():
            out[:50] = 1
        return out

    library.impl("half", half, "CPU")
    with runner._open(tracker):
        torch.ops.audit_trace_test.half(torch.ones(1))
    found = [a for a in tracker.ledger.allocations if a.nbytes == 400]
    assert len(found) == len(made) == 1
    assert (found[0].never_written, found[0].dtype, found[0].op) == (200, "float32", "audit_trace_test::half")
    assert tracker.ledger.dead_bytes == 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_missing_hook_is_a_note(tracker: Tracker) -> None:
    assert tracker.trace is not None
    tracker.trace.open()
    assert not tracker.trace.works
    assert any("hook" in note for note in tracker.ledger.notes)
