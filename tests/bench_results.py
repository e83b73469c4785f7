# SPDX-License-Identifier: Apache-2.0
"""Invented results for tests of reports and pictures: a whole grid, with a loss, a failed peer and a case untimed."""

from __future__ import annotations

from sparsemla.bench.floors import Floors
from sparsemla.bench.report import OURS, Entry, Results, Row
from sparsemla.bench.shapes import GRID_HEADS, GRID_POOLS, GRID_ROWS, cases
from sparsemla.bench.timing import Timing
from sparsemla.formats import KVFormat, record_layout

FLOORS = Floors(
    copy_gbs=4254.0,
    matrix_tflops=708.0,
    launch_us=1.5,
    gather_gbs={"656/32K": 5000.0, "656/1M": 2700.0, "1152/32K": 5900.0, "1152/1M": 3900.0},
    gather_method="invented",
)


def entry(name: str, reads: str, us: float | None, **other: object) -> Entry:
    """An entry of that median, measured without spread."""
    timing = None if us is None else Timing(us, us * 0.98, us * 1.03, 20, 10)
    return Entry(name, reads, timing=timing, **other)  # type: ignore[arg-type]


def invented(formats: tuple[str, ...] = ("fp8_ds_mla", "bf16")) -> Results:
    """Peers about as far from the floors as they are; ours slower than the best of them at one shape."""
    rows = []
    for fmt in formats:
        for case in cases(GRID_HEADS, GRID_ROWS, GRID_POOLS):
            record_bytes = record_layout(fmt).record_bytes
            bound = FLOORS.bound(case, record_bytes)
            untimed = (case.heads, case.rows.label, case.pool) == (128, "1", GRID_POOLS[1])
            lost = (case.heads, case.rows.label, case.pool) == (64, "8", GRID_POOLS[0])
            ours = None if untimed else (30.0 if lost else 8 + 1.3 * bound.us)
            ours_entry = entry(OURS, fmt, ours, kernel="hopper", error=1.9e-3, lse_error=1e-6, transient_bytes=0)
            if untimed:
                ours_entry = entry(OURS, fmt, None, kernel="hopper", error=1.0, note="wrong: relative error 1.0e+00")
            fa3 = 16 + 1.9 * FLOORS.bound(case, 1152).us
            peers = [entry("fa3_bf16", "bf16", fa3, error=1.9e-3, transient_bytes=4096)]
            if fmt == KVFormat.FP8_DS_MLA.value:
                flashmla = 20 + 2.8 * FLOORS.bound(case, 656).us
                failed = entry("flashmla_bf16", "bf16", None, note="RuntimeError: invented")
                peers = [
                    entry("flashmla_fp8", "fp8_ds_mla", flashmla, error=3.8e-3, transient_bytes=10**7),
                    failed,
                    *peers,
                ]
            rows.append(
                Row(
                    format=fmt,
                    heads=case.heads,
                    batch=case.rows.batch,
                    s_q=case.rows.s_q,
                    pool=case.pool,
                    topk=case.topk,
                    d_qk=case.d_qk,
                    record_bytes=record_bytes,
                    flops=case.flops,
                    ours=ours_entry,
                    peers=tuple(peers),
                    gather_us=bound.gather_us,
                    matrix_us=bound.matrix_us,
                    bound_us=bound.us,
                    bound_by=bound.by,
                    upconversion_us=FLOORS.upconversion_us(case, record_bytes),
                )
            )
    return Results(
        command="python benchmarks/hopper.py --formats fp8_ds_mla,bf16",
        device="cuda",
        gpu="Invented GPU",
        versions={"sparsemla": "0", "torch": "0"},
        floors=FLOORS,
        rows=tuple(rows),
        notes=("tilelang: not installed",),
    )
