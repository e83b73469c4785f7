# SPDX-License-Identifier: Apache-2.0
"""Times the blockwise torch kernel on the CPU: 64 query tokens, 16 heads, 2048 keys each, against an aim of 1.5 s.

Run: ``python benchmarks/cpu_kernel.py [--threads 2] [--format fp8_ds_mla] [--json]``. Prints what was measured: the
median and the fastest of the repeats, with and without a plan that splits, the error against the float64 oracle on a
few rows, and the machine. Exit status 1 where the median is over the aim or the error over 2.2e-3.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch

from sparsemla import KVFormat, PagedKVCache, reference_attention, sparse_mla_attention
from sparsemla.schedule import SplitSchedule

AIM_SECONDS = 1.5
TOLERANCE = 2.2e-3


def main() -> int:
    """Measures, prints, and says whether the aim was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=512, help="pages of 64 records in the pool")
    parser.add_argument("--format", default="fp8_ds_mla", choices=[fmt.value for fmt in KVFormat])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    given = parser.parse_args()

    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    cache = PagedKVCache.allocate(given.pages, 64, given.format)
    for start in range(0, cache.num_slots, 4096):
        slots = torch.arange(start, min(start + 4096, cache.num_slots))
        cache.write(slots, torch.randn(slots.shape[0], cache.d_qk))
    q = torch.randn(given.tokens, given.heads, cache.d_qk).to(torch.bfloat16)
    indices = torch.randint(0, cache.num_slots, (given.tokens, given.topk), dtype=torch.int32)
    scale = cache.d_qk**-0.5
    split = SplitSchedule.plan(requests=given.tokens, heads=given.heads, topk=given.topk)

    def measure(schedule: SplitSchedule | None) -> list[float]:
        times = []
        for _ in range(given.repeats + 1):
            begin = time.perf_counter()
            sparse_mla_attention(q, cache, indices, softmax_scale=scale, schedule=schedule)
            times.append(time.perf_counter() - begin)
        return times[1:]

    whole, pieces = measure(None), measure(split)
    out, _ = sparse_mla_attention(q, cache, indices, softmax_scale=scale)
    rows = min(given.tokens, 4)
    want, _ = reference_attention(q[:rows], cache, indices[:rows], softmax_scale=scale)
    error = float((out[:rows].double() - want).norm() / want.norm())
    report = {
        "tokens": given.tokens,
        "heads": given.heads,
        "topk": given.topk,
        "format": given.format,
        "pool_records": cache.num_slots,
        "threads": given.threads,
        "repeats": given.repeats,
        "unsplit_median_s": round(statistics.median(whole), 4),
        "unsplit_fastest_s": round(min(whole), 4),
        "split_pieces": split.accumulator_slots,
        "split_median_s": round(statistics.median(pieces), 4),
        "split_fastest_s": round(min(pieces), 4),
        "relative_error": error,
        "aim_s": AIM_SECONDS,
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
    }
    if given.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:18} {value:.3g}" if key == "relative_error" else f"{key:18} {value}")
    return 0 if report["unsplit_median_s"] <= AIM_SECONDS and error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
