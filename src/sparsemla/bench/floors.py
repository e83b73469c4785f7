# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at all, measured in the same run: copy, gather of rows, matrix product, an empty launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from sparsemla.bench.shapes import Case, count_label
from sparsemla.bench.timing import one_line, time_one


@dataclass(frozen=True)
class Bound:
    """The floors under one case in microseconds; they use different units of the machine and may overlap fully."""

    gather_us: float
    matrix_us: float
    launch_us: float

    @property
    def us(self) -> float:
        """No implementation that gathers each record once and multiplies each head once is faster than this."""
        return max(self.gather_us, self.matrix_us, self.launch_us)

    @property
    def by(self) -> str:
        """Which of them it is."""
        named = {"gather": self.gather_us, "matrix": self.matrix_us, "launch": self.launch_us}
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class Floors:
    """Rates of this machine.

    Attributes:
        copy_gbs: device-to-device copy, 10⁹ bytes read plus written a second.
        matrix_tflops: a large matrix product (bf16 on a GPU, float32 on a CPU).
        launch_us: a kernel that adds 1 to one number, inside a graph; 0 on a CPU.
        gather_gbs: 10⁹ bytes read a second when gathering rows at random, keyed "<bytes a record>/<records>".
        gather_method: how that was measured.
    """

    copy_gbs: float
    matrix_tflops: float
    launch_us: float
    gather_gbs: dict[str, float] = field(default_factory=dict)
    gather_method: str = ""

    def bound(self, case: Case, record_bytes: int) -> Bound:
        """The floors under `case` over a cache of such records."""
        rate = self.gather_gbs[_key(record_bytes, case.pool)]
        gather_us = case.records * record_bytes / rate / 1e3
        return Bound(gather_us, case.flops / self.matrix_tflops / 1e6, self.launch_us)

    def upconversion_us(self, case: Case, record_bytes: int) -> float:
        """The least that turning the whole fp8 pool into a bf16 copy takes: its bytes at the copy's rate."""
        return case.pool * (record_bytes + 2 * case.d_qk) / self.copy_gbs / 1e3


def _key(record_bytes: int, pool: int) -> str:
    return f"{record_bytes}/{count_label(pool)}"


def measure(device: torch.device, wanted: Iterable[tuple[int, int]]) -> Floors:
    """Measures this machine.

    Args:
        device: where.
        wanted: (bytes of a record, records of the pool) of every gather to measure.
    """
    gpu = device.type == "cuda"
    rates: dict[str, float] = {}
    method = ""
    for record_bytes, pool in sorted(set(wanted)):
        rates[_key(record_bytes, pool)], method = _gather_gbs(device, record_bytes, pool)
    return Floors(
        copy_gbs=_copy_gbs(device, 2 * 1024**3 if gpu else 128 * 1024**2),
        matrix_tflops=_matrix_tflops(device, 8192 if gpu else 1024),
        launch_us=_launch_us(device) if gpu else 0.0,
        gather_gbs=rates,
        gather_method=method,
    )


def _copy_gbs(device: torch.device, nbytes: int) -> float:
    source = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / time_one(lambda: target.copy_(source), device).median_us / 1e3


def _matrix_tflops(device: torch.device, size: int) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn((size, size), dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / time_one(lambda: torch.mm(left, right, out=product), device).median_us / 1e6


def _launch_us(device: torch.device) -> float:
    number = torch.zeros(1, device=device)
    return time_one(lambda: number.add_(1), device, calls=50).median_us


def _gather_gbs(device: torch.device, record_bytes: int, pool: int) -> tuple[float, str]:
    """Rate of a gather that reads rows at random and writes next to nothing, where there is Triton; else of a copy."""
    count = 2**21 if device.type == "cuda" else 2**15
    rows = torch.randint(-(2**31), 2**31, (pool, record_bytes // 4), dtype=torch.int32, device=device)
    indices = torch.randint(0, pool, (count,), dtype=torch.int32, device=device)
    nbytes = count * record_bytes
    if device.type == "cuda":
        try:
            return nbytes / _fastest_gather(rows, indices) / 1e3, "rows summed by a Triton kernel, 16-byte loads"
        except Exception as error:
            why = f"no Triton kernel: {one_line(error, 60)}"
    else:
        why = "on a CPU"
    target = torch.empty((count, record_bytes // 4), dtype=torch.int32, device=device)
    taken = time_one(partial(torch.index_select, rows, 0, indices, out=target), device)
    return nbytes / taken.median_us / 1e3, f"torch.index_select, which also writes the rows ({why})"


def _fastest_gather(rows: torch.Tensor, indices: torch.Tensor) -> float:
    """Microseconds of the fastest configuration."""
    from sparsemla.bench import gather

    sms = torch.cuda.get_device_properties(rows.device).multi_processor_count
    times = []
    for rows_a_step, warps, a_sm in gather.CONFIGS:
        sums = torch.empty(sms * a_sm, dtype=torch.int32, device=rows.device)
        shape = {"rows_a_step": rows_a_step, "warps": warps, "programs": sms * a_sm}
        times.append(time_one(partial(gather.gather, rows, indices, sums, **shape), rows.device).median_us)
    return min(times)
