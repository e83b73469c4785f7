# SPDX-License-Identifier: Apache-2.0
"""Decode with the cache in host memory against the whole cache on the device, at hit rates 0.5, 0.9 and 0.99.

Run: ``PYTHONPATH=src python benchmarks/host_cache.py --out host_cache.json`` (under a minute on an H200; small sizes
on the CPU). Each request's keys slide over a ring of positions that is longer than its hot buffer: a step keeps the
given share of the step before and names as many records that were displaced long ago. A whole turn of the ring is one
CUDA graph, so every replay is in the same steady state; microseconds are those of one step. Beside the steps: what
bringing a whole top-k costs against one plain copy of as many bytes, what the other way (the host looks at the misses,
gathers, copies once) costs, and how much of staging a context hides behind attention. Exit status 1 where an answer
differs from that over the whole cache in any bit.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.bench.report import quotable, write_json
from sparsemla.bench.timing import Effort, alternate
from sparsemla.cache import PagedKVCache
from sparsemla.kernels import registry
from sparsemla.serving.host_cache import HostCache, RequestLanes, StagingRing, host_pool

RATES = (0.5, 0.9, 0.99)
BLOCK = 64
SCALE = 576**-0.5


@dataclass(frozen=True)
class Sizes:
    """What is run. `hot` and `topk` records a request, `context` records of the pool (all requests name the same)."""

    context: int
    topk: int
    hot: int
    batches: tuple[int, ...]
    heads: tuple[int, ...]
    samples: int
    staged: int
    prefill_rows: int


GPU = Sizes(262_144, 2048, 4096, (1, 8, 32), (16, 64), 7, 131_072, 1024)
CPU = Sizes(4096, 64, 128, (2,), (8,), 2, 1024, 4)


class Setting:
    """The caches of one run: the same records on the device and in host memory."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        gen = torch.Generator(device).manual_seed(0)
        pages = sizes.context // BLOCK
        self.cache = PagedKVCache.allocate(pages, BLOCK, "fp8_ds_mla", device=device)
        for begin in range(0, sizes.context, 32_768):
            slots = torch.arange(begin, min(begin + 32_768, sizes.context), device=device)
            self.cache.write(slots, torch.randn((len(slots), 576), generator=gen, device=device))
        started = time.monotonic()
        self.pool = host_pool(pages, BLOCK, "fp8_ds_mla")
        self.pool.byte_view.copy_(self.cache.byte_view)
        self.pin_seconds = time.monotonic() - started
        self.page_order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32).to(device)

    def host(self, batch: int, staging: StagingRing | None = None) -> HostCache:
        """A host cache with its hot buffer empty."""
        lanes = RequestLanes(max_requests=batch, max_len=self.sizes.context, device=self.device)
        sizes = self.sizes
        return HostCache(self.pool, lanes, hot_records=sizes.hot, topk=sizes.topk, max_rows=batch, staging=staging)

    def table(self, batch: int) -> torch.Tensor:
        """(batch, pages) int32: every request has all pages."""
        return self.page_order.repeat(batch, 1)

    def turn(self, batch: int, rate: float) -> list[torch.Tensor]:
        """Steps of one turn of the ring: (batch, topk) int32 each."""
        sizes = self.sizes
        fresh = round(sizes.topk * (1 - rate))
        steps = math.ceil(1.25 * sizes.hot / fresh)
        gen = torch.Generator().manual_seed(2)
        ring = torch.stack([torch.randperm(sizes.context, generator=gen)[: steps * fresh] for _ in range(batch)]).to(
            torch.int32
        )
        if ring.shape[1] < sizes.topk:
            raise ValueError("rate: the ring is shorter than a top-k")
        places = torch.arange(sizes.topk)
        return [ring[:, (step * fresh + places) % ring.shape[1]].to(self.device) for step in range(steps)]


def cases(sizes: Sizes) -> list[tuple[int, int, float]]:
    """(heads, batch, hit rate) of every row."""
    return [(heads, batch, rate) for heads in sizes.heads for batch in sizes.batches for rate in RATES]


def decode_row(setting: Setting, heads: int, batch: int, rate: float) -> dict[str, Any]:
    """Times a turn over the host cache, over the whole cache, and of the plan and the bringing alone."""
    device = setting.device
    turn = setting.turn(batch, rate)
    host = setting.host(batch)
    table = setting.table(batch)
    ids = torch.arange(batch, dtype=torch.int32, device=device)
    q = torch.randn((batch, heads, 576), device=device).to(torch.bfloat16)
    out = torch.empty((batch, heads, 512), dtype=torch.bfloat16, device=device)
    whole = torch.empty_like(out)
    lse = torch.empty((batch, heads), device=device)

    def over_host() -> None:
        for positions in turn:
            hot, slots = host.bring(positions, ids, table)
            sparse_mla_attention(q, hot, slots, softmax_scale=SCALE, out=out, lse=lse)

    def resident() -> None:
        for positions in turn:
            sparse_mla_attention(
                q, setting.cache, positions, softmax_scale=SCALE, block_table=table, request_ids=ids, out=whole, lse=lse
            )

    def bring_only() -> None:
        for positions in turn:
            host.bring(positions, ids, table)

    def plan_only() -> None:
        for positions in turn:
            host.hot.plan(positions, ids, table, block_size=BLOCK, num_slots=setting.pool.num_slots)

    over_host()
    resident()
    same = torch.equal(out, whole)
    host.reset_stats()
    over_host()
    stats = host.stats()
    steps = len(turn)
    # A plan alone leaves the hot buffer without the records it planned; nothing reads them after this.
    runs = {"host": over_host, "resident": resident, "bring": bring_only, "plan": plan_only}
    found = alternate(runs, Effort(setting.sizes.samples, 1), device)
    times = {name: None if isinstance(timing, str) else timing.median_us / steps for name, timing in found.items()}
    moved = stats.bytes_to_device / steps
    return {
        "heads": heads,
        "batch": batch,
        "rate": rate,
        "measured_rate": round(stats.hit_rate, 4),
        "steps": steps,
        "bytes_per_step": round(moved),
        "host_us": rounded(times["host"]),
        "resident_us": rounded(times["resident"]),
        "bring_us": rounded(times["bring"]),
        "plan_us": rounded(times["plan"]),
        "gb_s": bandwidth(moved, times["bring"], times["plan"]),
        "same_bits": same,
        "overflowed": stats.overflowed,
        "notes": [f"{name}: {timing}" for name, timing in found.items() if isinstance(timing, str)],
    }


def rounded(us: float | None) -> float | None:
    """To a tenth of a microsecond."""
    return None if us is None else round(us, 1)


def bandwidth(nbytes: float, us: float | None, less_us: float | None = 0.0) -> float | None:
    """GB/s of what took `us` less `less_us`; None where that is nothing."""
    if us is None or less_us is None or us <= less_us:
        return None
    return round(nbytes / (us - less_us) / 1e3, 2)


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    return (
        f"h={row['heads']:3} b={row['batch']:3} hits {row['measured_rate']:.3f}: {row['host_us']} us against "
        f"{row['resident_us']} us resident (plan {row['plan_us']}, plan and bring {row['bring_us']}), "
        f"{row['bytes_per_step']:,} bytes a step, {row['gb_s']} GB/s{'' if row['same_bits'] else '  DIFFERENT BITS'}"
    )


def wall(run: Callable[[], object], device: torch.device, samples: int) -> float:
    """Median microseconds of a run that may wait for the device, which is waited for before and after."""
    taken = []
    for _ in range(samples):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        taken.append((time.perf_counter() - begin) * 1e6)
    return sorted(taken)[len(taken) // 2]


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cold(setting: Setting, batch: int) -> dict[str, Any]:
    """A whole top-k brought at once, by the device and by the host, against a plain copy of as many bytes."""
    sizes, device = setting.sizes, setting.device
    gen = torch.Generator().manual_seed(3)
    positions = torch.stack([torch.randperm(sizes.context, generator=gen)[: sizes.topk] for _ in range(batch)])
    positions = positions.to(torch.int32).to(device)
    ids = torch.arange(batch, dtype=torch.int32, device=device)
    table = setting.table(batch)
    nbytes = batch * sizes.topk * setting.pool.layout.record_bytes

    def bringing(host: HostCache) -> Callable[[], object]:
        def run() -> None:
            host.hot.position_of.fill_(-1)
            host.bring(positions, ids, table)

        run()
        return run

    by_device = setting.host(batch)
    by_host = setting.host(batch)
    by_host.hot._code = None  # torch operations: the misses go to the host, which gathers and copies once
    plain = setting.pool.byte_view[:nbytes]
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    samples = 5
    times = {
        "device": wall(bringing(by_device), device, samples),
        "host": wall(host_gathers(by_host, bringing(by_host)), device, samples),
        "copy": wall(lambda: target.copy_(plain, non_blocking=True), device, samples),
    }
    return {
        "batch": batch,
        "bytes": nbytes,
        **{f"{name}_us": rounded(us) for name, us in times.items()},
        **{f"{name}_gb_s": bandwidth(nbytes, us) for name, us in times.items()},
    }


def host_gathers(host: HostCache, run: Callable[[], object]) -> Callable[[], object]:
    """`run` with every copy of records made by the host."""
    from sparsemla.serving.host_cache import moving

    def wrapped() -> None:
        code, moving.device_code = moving.device_code, lambda device_type: None  # type: ignore[assignment]
        try:
            run()
        finally:
            moving.device_code = code

    return wrapped


def staging(setting: Setting) -> dict[str, Any]:
    """Contexts staged ahead of the attention of prefill rows: alone, attention alone, together."""
    sizes, device = setting.sizes, setting.device
    ring = StagingRing(setting.pool.layout.page_bytes(sizes.staged), device=device)
    host = setting.host(1, ring)
    table = setting.table(1)
    pieces = [(0, begin, begin + sizes.staged) for begin in range(0, sizes.context, sizes.staged)] * 2
    q = torch.randn((sizes.prefill_rows, sizes.heads[0], 576), device=device).to(torch.bfloat16)
    slots = torch.randint(0, sizes.staged, (sizes.prefill_rows, sizes.topk), dtype=torch.int32, device=device)
    out = torch.empty((*q.shape[:2], 512), dtype=torch.bfloat16, device=device)

    def stage() -> None:
        for _ in host.stage(pieces, table):
            pass

    def attend(cache: PagedKVCache) -> None:
        for _ in range(4):
            sparse_mla_attention(q, cache, slots, softmax_scale=SCALE, out=out)

    def attention() -> None:
        for _ in pieces:
            attend(setting.cache)

    def together() -> None:
        for cache in host.stage(pieces, table):
            attend(cache)

    for run in (stage, attention, together):
        run()
    alone, busy, both = (wall(run, device, 3) for run in (stage, attention, together))
    nbytes = sum(end - begin for _, begin, end in pieces) * setting.pool.layout.record_bytes
    return {
        "bytes": nbytes,
        "stage_us": rounded(alone),
        "stage_gb_s": bandwidth(nbytes, alone),
        "attention_us": rounded(busy),
        "together_us": rounded(both),
        "hidden_share": round((alone + busy - both) / min(alone, busy), 3),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds after which no further row is begun")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    deadline = time.monotonic() + given.budget
    sizes = GPU if device.type == "cuda" else CPU
    setting = Setting(sizes, device)
    report: dict[str, Any] = {
        "command": quotable(
            ["python", "benchmarks/host_cache.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "sizes": asdict(sizes),
        "pin_seconds": round(setting.pin_seconds, 2),
        "reserved_bytes": setting.host(sizes.batches[-1]).reservations(),
        "kernels": [kernel.name for kernel in registry.KERNELS if device.type in kernel.device_types][:1],
    }
    report["staging"] = staging(setting)
    print("staging", report["staging"], flush=True)
    report["cold"] = []
    for batch in sizes.batches:
        report["cold"].append(cold(setting, batch))
        print("cold", report["cold"][-1], flush=True)
    report["rows"] = []
    wanted = cases(sizes)
    for case in wanted:
        if time.monotonic() > deadline:
            print(f"no time for {len(wanted) - len(report['rows'])} rows", flush=True)
            break
        report["rows"].append(decode_row(setting, *case))
        report["complete"] = len(report["rows"]) == len(wanted)
        print(line(report["rows"][-1]), flush=True)
        if given.out is not None:
            write_json(given.out, report)
    fine = all(row["same_bits"] and not row["overflowed"] for row in report["rows"])
    print("every answer has the same bits as over the whole cache" if fine else "DIFFERENT ANSWERS")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
