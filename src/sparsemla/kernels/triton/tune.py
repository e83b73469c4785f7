# SPDX-License-Identifier: Apache-2.0
"""Measures shapes on the GPU at hand and writes the best into the user's table: ``sparsemla bench --tune``.

Nothing here runs by itself; see shapes.py for the tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels.call import AttentionCall
from sparsemla.kernels.triton.launch import run, setting_of
from sparsemla.kernels.triton.resources import SM_REGISTERS
from sparsemla.kernels.triton.shapes import REGISTERS_PER_THREAD, Shape, user_table, write_entry
from sparsemla.schedule import SplitSchedule

HEAD_CLASSES = (16, 128)
"""Entries of a table: shapes for up to 16 heads, and for more. Measured with that many heads (64 for the second)."""
MEASURED_HEADS = {16: 16, 128: 64}


@dataclass(frozen=True)
class Trial:
    """One shape's time.

    Attributes:
        shape: what was tried.
        microseconds: median of one call; None where the shape does not run.
        note: why it does not.
    """

    shape: Shape
    microseconds: float | None
    note: str = ""


def candidates(arch: str, heads: int) -> list[Shape]:
    """Shapes worth trying for `heads` query heads."""
    tiles = (16,) if heads <= 16 else (32,) if heads <= 32 else (32, 64)
    found = []
    for tile in tiles:
        for keys, warps in ((32, 4), (64, 4), (32, 8), (64, 8), (128, 8)):
            if not arch.startswith("sm_"):
                found.append(Shape(tile, keys, warps, 0, 1))
                continue
            for per_sm in (1, 2, 3, 4):
                room = SM_REGISTERS // (32 * warps * per_sm) // 8 * 8
                if room < 128 or warps * per_sm < 8:
                    continue
                registers = 0 if room > REGISTERS_PER_THREAD else room
                for columns in (512, 256) if tile == 64 else (512,):
                    found.append(Shape(tile, keys, warps, registers, per_sm, columns))
    return found


def sample_call(
    *, rows: int, heads: int, topk: int, records: int, fmt: KVFormat | str, device: torch.device, seed: int = 0
) -> AttentionCall:
    """A call over random records, indices uniform over `records` of them: the hard case for memory. Not split."""
    fmt = KVFormat.parse(fmt)
    generator = torch.Generator(device=device).manual_seed(seed)
    layout = record_layout(fmt)
    cache = PagedKVCache.allocate(-(-records // 64), 64, fmt, device=device)
    for start in range(0, records, 65536):
        slots = torch.arange(start, min(start + 65536, records), device=device)
        cache.write(slots, torch.randn((slots.shape[0], layout.d_qk), device=device, generator=generator))
    q = torch.randn((rows, heads, layout.d_qk), device=device, generator=generator).to(torch.bfloat16)
    indices = torch.randint(records, (rows, topk), device=device, dtype=torch.int32, generator=generator)
    schedule = SplitSchedule.unsplit(rows, heads=heads)
    return AttentionCall.plain(q, cache, indices, softmax_scale=layout.d_qk**-0.5, schedule=schedule)


def time_call(action: Callable[[], None], *, repeats: int = 5) -> float:
    """Median microseconds of `action`, on a GPU on its current stream, after one call that does not count."""
    action()
    times = []
    for _ in range(repeats):
        if not torch.cuda.is_available():
            begun = time.perf_counter()
            action()
            times.append((time.perf_counter() - begun) * 1e6)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0)
    return statistics.median(times)


def trials(
    call: AttentionCall,
    shapes: Sequence[Shape] | None = None,
    *,
    until: float | None = None,
    progress: Callable[[Trial], None] | None = None,
) -> list[Trial]:
    """Times a call with each shape (None: the shape in use and all candidates); fastest first, those that fail last.

    Every answer is compared with that of the first shape that runs; one that differs by more than float16's rounding
    counts as failed. From `until` (of time.monotonic) on nothing is begun but the first shape.
    """
    setting = setting_of(call.device, call.cache.format, call.num_heads)
    if shapes is None:
        shapes = list(dict.fromkeys((setting.shape, *candidates(setting.arch, call.num_heads))))
    want: torch.Tensor | None = None
    done: list[Trial] = []
    for shape in shapes:
        if done and until is not None and time.monotonic() > until:
            break
        try:
            call.out.fill_(torch.nan)
            microseconds: float | None = time_call(lambda shape=shape: run(call, shape=shape))  # type: ignore[misc]
            note = ""
            if want is None:
                want = call.out.clone()
            elif not float((call.out.float() - want.float()).norm() / want.float().norm()) < 5e-3:
                microseconds, note = None, "another answer than the shape before"
        except (OutOfResources, PTXASError) as error:
            microseconds, note = None, str(error).strip().partition("\n")[0]
        done.append(Trial(shape, microseconds, note))
        if progress is not None:
            progress(done[-1])
    return sorted(done, key=lambda trial: (trial.microseconds is None, trial.microseconds or 0.0))


def tune(
    *,
    device: torch.device | str = "cuda",
    fmt: KVFormat | str = KVFormat.FP8_DS_MLA,
    rows: int = 2048,
    topk: int = 2048,
    records: int = 131072,
    until: float | None = None,
    path: Path | None = None,
    progress: Callable[[Trial], None] | None = None,
) -> dict[int, list[Trial]]:
    """Tries all candidates for each class of head counts and writes the best into a table.

    Args:
        device: a CUDA or HIP device.
        fmt: cache format; the entry is for it alone.
        rows, topk, records: the call measured: query rows, keys of each, distinct records.
        until: of time.monotonic: after it no further shape is tried. Each takes seconds to compile. The classes get
            equal shares of the time.
        path: the table; by default the user's (shapes.user_table).
        progress: called after each trial.

    Returns:
        heads class → trials, fastest first.

    Raises:
        RuntimeError: no shape runs on this device.
    """
    device, fmt = torch.device(device), KVFormat.parse(fmt)
    arch = setting_of(device, fmt, HEAD_CLASSES[0]).arch
    begin = time.monotonic()
    results: dict[int, list[Trial]] = {}
    for place, up_to in enumerate(HEAD_CLASSES, start=1):
        share = None if until is None else begin + (until - begin) * place / len(HEAD_CLASSES)
        call = sample_call(rows=rows, heads=MEASURED_HEADS[up_to], topk=topk, records=records, fmt=fmt, device=device)
        results[up_to] = trials(call, until=share, progress=progress)
        if results[up_to][0].microseconds is None:
            raise RuntimeError(f"no shape runs with {MEASURED_HEADS[up_to]} heads: {results[up_to][0].note}")
    write_entry(
        user_table() if path is None else path,
        architecture=arch,
        fmt=fmt,
        shapes=[(up_to, found[0].shape) for up_to, found in results.items()],
    )
    return results
