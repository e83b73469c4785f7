# SPDX-License-Identifier: Apache-2.0
"""How time and memory are measured: graph replays between events, candidates in turn, the allocator's peak."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], object]
_cuda: Any = torch.cuda  # typed differently from release to release
_FLUSH_BYTES = 256 * 1024**2
"""Written before a cold sample: several times the L2 of any GPU there is."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call. `low_us` and `high_us` are the 10th and 90th percentile of the samples."""

    median_us: float
    low_us: float
    high_us: float
    samples: int
    calls: int
    """Calls inside one sample, between two events."""


@dataclass(frozen=True)
class Effort:
    """How often a case is measured: `samples` replays of `calls` calls each."""

    samples: int
    calls: int

    @classmethod
    def of(cls, tokens: int, device: torch.device, *, cold: bool = False) -> Effort:
        """20 samples, 7 of a large case; calls of a few microseconds are repeated inside the graph."""
        if device.type != "cuda":
            return cls(5, 1)
        calls = 1 if cold else min(max(1280 // tokens, 1), 20)
        return cls(20 if tokens < 1024 else 7, calls)


def summarise(samples_us: list[float], calls: int) -> Timing:
    """Median and spread of samples, each already divided by its calls."""
    ordered = sorted(samples_us)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Timing(middle, ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered), calls)


def alternate(
    runs: Mapping[str, Run], effort: Effort, device: torch.device, *, cold: bool = False
) -> dict[str, Timing | str]:
    """Times every run, in turn within each round, the order rotated from round to round.

    On CUDA each is captured in a graph of `effort.calls` calls and replayed between two events; one that cannot be
    captured answers with the reason instead of a time. All replays are queued before the first is waited for, so that
    no launch is timed. With `cold` the L2 is overwritten before each sample (and a sample is one call).

    Raises:
        RuntimeError: a replay failed on the device; nothing more can run in this process then.
    """
    if device.type != "cuda":
        return dict(_alternate_cpu(runs, effort))
    found: dict[str, Timing | str] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    pool = _cuda.graph_pool_handle()  # one pool: they never run at once
    for name, run in runs.items():
        try:
            graphs[name] = capture(run, effort.calls, pool)
        except Exception as error:
            _cuda.synchronize()
            found[name] = f"no graph: {one_line(error)}"
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if cold else None
    for graph in graphs.values():
        graph.replay()
    _cuda.synchronize()

    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    _cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead of the device
    for turn in range(effort.samples):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            if flush is not None:
                flush.zero_()
            begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            events[name].append((begin, end))
    _cuda.synchronize()
    for name, pairs in events.items():
        samples = [begin.elapsed_time(end) * 1000 / effort.calls for begin, end in pairs]
        found[name] = summarise(samples, effort.calls)
    return found


def capture(run: Run, calls: int, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls. `run` has been called before, so that nothing is compiled or planned in here.

    Raises:
        Exception: whatever `run` raises, or torch where `run` did what cannot be captured.
    """
    graph: torch.cuda.CUDAGraph = _cuda.CUDAGraph()
    stream = _cuda.Stream()
    stream.wait_stream(_cuda.current_stream())
    # torch.cuda.graph would collect garbage and empty the allocator's cache each time: seconds over a grid.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for _ in range(calls):
                    run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    _cuda.current_stream().wait_stream(stream)
    return graph


def _alternate_cpu(runs: Mapping[str, Run], effort: Effort) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(effort.samples):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - begin) * 1e6)
    return {name: summarise(taken, 1) for name, taken in samples.items()}


def time_one(run: Run, device: torch.device, *, samples: int = 10, calls: int = 1) -> Timing:
    """The time of one run alone. RuntimeError where it cannot be captured."""
    run()
    found = alternate({"it": run}, Effort(samples, calls), device)["it"]
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def transient_bytes(run: Run, device: torch.device) -> int | None:
    """Bytes that one call takes from torch's allocator at its peak; None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    _cuda.synchronize(device)
    _cuda.reset_peak_memory_stats(device)
    before = int(_cuda.memory_allocated(device))
    kept = run()
    _cuda.synchronize(device)
    peak = int(_cuda.max_memory_allocated(device))
    del kept
    return peak - before


def one_line(error: BaseException, limit: int = 160) -> str:
    """An exception for a line of a log: its type and the beginning of its message."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}"
