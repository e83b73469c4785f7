# SPDX-License-Identifier: Apache-2.0
"""Decode with the cache in host memory against the whole cache on the device, at hit rates 0.5, 0.9 and 0.99.

Run: ``PYTHONPATH=src python benchmarks/host_cache.py --out host_cache.json`` (under a minute on an H200; small sizes
on the CPU). Each request's keys slide over a ring of positions that is longer than its hot buffer: a step keeps the
given share of the step before and names as many records that were displaced long ago. A whole turn of the ring is one
CUDA graph, so every replay is in the same steady state; microseconds are those of one step. Beside the steps: what
bringing a whole top-k costs, launches included, by the device and by the host (which looks at the misses, gathers and
copies once), against one plain copy of as many bytes; and how much of staging a context hides behind attention. Exit
status 1 where an answer differs from that over the whole cache in any bit.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.bench.report import quotable, write_json
from sparsemla.bench.timing import Effort, alternate
from sparsemla.cache import PagedKVCache
from sparsemla.serving.host_cache import HostCache, RequestLanes, StagingRing, host_pool, moving

RATES = (0.5, 0.9, 0.99)
BLOCK = 64
SCALE = 576**-0.5
Run = Callable[[], object]


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
        pages = sizes.context // BLOCK
        self.cache = PagedKVCache.allocate(pages, BLOCK, "fp8_ds_mla", device=device)
        for slots in torch.arange(sizes.context, device=device).split(32_768):
            self.cache.write(slots, torch.randn((len(slots), 576), device=device))
        self.pool = host_pool(pages, BLOCK, "fp8_ds_mla")
        self.pool.byte_view.copy_(self.cache.byte_view)
        self.page_order = torch.randperm(pages).to(torch.int32).to(device)

    def host(self, batch: int, staging: StagingRing | None = None) -> HostCache:
        """A host cache with its hot buffer empty."""
        sizes = self.sizes
        lanes = RequestLanes(max_requests=batch, max_len=sizes.context, device=self.device)
        return HostCache(self.pool, lanes, hot_records=sizes.hot, topk=sizes.topk, max_rows=batch, staging=staging)

    def requests(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One row a request, each with all pages: (batch,) ids and (batch, pages) block table, int32."""
        return torch.arange(batch, dtype=torch.int32, device=self.device), self.page_order.repeat(batch, 1)

    def positions(self, batch: int, count: int) -> torch.Tensor:
        """(batch, count) int32, different ones in each row."""
        rows = [torch.randperm(self.sizes.context)[:count] for _ in range(batch)]
        return torch.stack(rows).to(torch.int32).to(self.device)

    def turn(self, batch: int, rate: float) -> list[torch.Tensor]:
        """Steps of one turn of the ring: (batch, topk) int32 each."""
        topk = self.sizes.topk
        fresh = round(topk * (1 - rate))
        steps = math.ceil(1.25 * self.sizes.hot / fresh)
        ring = self.positions(batch, steps * fresh)
        places = torch.arange(topk, device=self.device)
        return [ring[:, (step * fresh + places) % ring.shape[1]] for step in range(steps)]


def decode_row(setting: Setting, heads: int, batch: int, rate: float) -> dict[str, Any]:
    """Times a turn over the host cache, over the whole cache, and of the plan and the bringing alone."""
    device = setting.device
    turn = setting.turn(batch, rate)
    host = setting.host(batch)
    ids, table = setting.requests(batch)
    q = torch.randn((batch, heads, 576), device=device).to(torch.bfloat16)
    hosted, whole = (torch.empty((batch, heads, 512), dtype=torch.bfloat16, device=device) for _ in range(2))
    lse = torch.empty((batch, heads), device=device)
    into = {"softmax_scale": SCALE, "lse": lse}

    def over_host() -> None:
        for positions in turn:
            sparse_mla_attention(q, *host.bring(positions, ids, table), out=hosted, **into)

    def resident() -> None:
        for positions in turn:
            sparse_mla_attention(q, setting.cache, positions, block_table=table, request_ids=ids, out=whole, **into)

    def bring_only() -> None:
        for positions in turn:
            host.bring(positions, ids, table)

    def plan_only() -> None:
        for positions in turn:
            host.hot.plan(positions, ids, table)

    over_host()
    resident()
    same = torch.equal(hosted, whole)
    host.reset_stats()
    over_host()
    stats = host.stats()
    steps = len(turn)
    # A plan alone leaves the hot buffer without the records it planned; nothing reads them after this.
    runs = {"host": over_host, "resident": resident, "bring": bring_only, "plan": plan_only}
    found = alternate(runs, Effort(setting.sizes.samples, 1), device)
    us = {name: None if isinstance(timing, str) else timing.median_us / steps for name, timing in found.items()}
    moved = stats.bytes_to_device / steps
    bringing = None if us["bring"] is None or us["plan"] is None else us["bring"] - us["plan"]
    return {
        "heads": heads,
        "batch": batch,
        "rate": rate,
        "measured_rate": round(stats.hit_rate, 4),
        "steps": steps,
        "bytes_per_step": round(moved),
        **{f"{name}_us": None if each is None else round(each, 1) for name, each in us.items()},
        "gb_s": gb_s(moved, bringing),
        "same_bits": same,
        "overflowed": stats.overflowed,
        "notes": [f"{name}: {timing}" for name, timing in found.items() if isinstance(timing, str)],
    }


def gb_s(nbytes: float, us: float | None) -> float | None:
    """None where it took no time."""
    return round(nbytes / us / 1e3, 2) if us is not None and us > 0 else None


def wall(run: Run, device: torch.device, samples: int) -> float:
    """Median microseconds of a run, launches included, after one that is not counted."""
    taken = []
    for _ in range(samples + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - begin) * 1e6)
    return round(sorted(taken[1:])[samples // 2], 1)


def cold(setting: Setting, batch: int) -> dict[str, Any]:
    """A whole top-k brought at once, by the device and by the host, against a plain copy of as many bytes."""
    device, samples = setting.device, 5
    positions = setting.positions(batch, setting.sizes.topk)
    ids, table = setting.requests(batch)
    nbytes = positions.numel() * setting.pool.layout.record_bytes
    plain, target = setting.pool.byte_view[:nbytes], torch.empty(nbytes, dtype=torch.uint8, device=device)
    host = setting.host(batch)

    def bring() -> None:
        host.hot.position_of.fill_(-1)
        host.bring(positions, ids, table)

    us = {
        "device": wall(bring, device, samples),
        "copy": wall(lambda: target.copy_(plain, non_blocking=True), device, samples),
    }
    host.hot._code = None  # torch operations: the misses go to the host, which gathers and copies once
    with mock.patch.object(moving, "device_code", return_value=None):
        us["host"] = wall(bring, device, samples)
    rates = {f"{name}_gb_s": gb_s(nbytes, each) for name, each in us.items()}
    return {"batch": batch, "bytes": nbytes, **{f"{name}_us": each for name, each in us.items()}, **rates}


def staging(setting: Setting) -> dict[str, Any]:
    """Contexts staged ahead of the attention of prefill rows: alone, attention alone, together."""
    sizes, device, layout = setting.sizes, setting.device, setting.pool.layout
    host = setting.host(1, StagingRing(layout.page_bytes(sizes.staged), device=device))
    _, table = setting.requests(1)
    pieces = [(0, begin, begin + sizes.staged) for begin in range(0, sizes.context, sizes.staged)] * 2
    q = torch.randn((sizes.prefill_rows, sizes.heads[0], 576), device=device).to(torch.bfloat16)
    slots = torch.randint(0, sizes.staged, (sizes.prefill_rows, sizes.topk), dtype=torch.int32, device=device)
    out = torch.empty((*q.shape[:2], 512), dtype=torch.bfloat16, device=device)

    def attend(cache: PagedKVCache) -> None:
        for _ in range(4):
            sparse_mla_attention(q, cache, slots, softmax_scale=SCALE, out=out)

    def attention() -> None:
        for _ in pieces:
            attend(setting.cache)

    def together() -> None:
        for cache in host.stage(pieces, table):
            attend(cache)

    alone = wall(lambda: list(host.stage(pieces, table)), device, 3)
    busy, both = wall(attention, device, 3), wall(together, device, 3)
    nbytes = len(pieces) * sizes.staged * layout.record_bytes
    return {
        "bytes": nbytes,
        "stage_us": alone,
        "stage_gb_s": gb_s(nbytes, alone),
        "attention_us": busy,
        "together_us": both,
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
    torch.manual_seed(0)
    deadline = time.monotonic() + given.budget
    sizes = GPU if device.type == "cuda" else CPU
    setting = Setting(sizes, device)
    command = ["python", "benchmarks/host_cache.py", *(sys.argv[1:] if arguments is None else arguments)]
    report: dict[str, Any] = {
        "command": quotable(command),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "sizes": asdict(sizes),
        "reserved_bytes": setting.host(sizes.batches[-1]).reservations(),
        "staging": staging(setting),
        "cold": [cold(setting, batch) for batch in sizes.batches],
        "rows": [],
        "complete": False,
    }
    print("staging", report["staging"], "cold", *report["cold"], sep="\n", flush=True)
    cases = list(itertools.product(sizes.heads, sizes.batches, RATES))
    for case in cases:
        if time.monotonic() > deadline:
            print(f"no time for {len(cases) - len(report['rows'])} rows", flush=True)
            break
        report["rows"].append(decode_row(setting, *case))
        report["complete"] = len(report["rows"]) == len(cases)
        print(report["rows"][-1], flush=True)
        if given.out is not None:
            write_json(given.out, report)
    fine = all(row["same_bits"] and not row["overflowed"] for row in report["rows"])
    print("every answer has the same bits as over the whole cache" if fine else "DIFFERENT ANSWERS")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
