# SPDX-License-Identifier: Apache-2.0
"""What ranks that share a cache move, and what it costs: quantised against upconverted records, two forms of merging.

Run: ``PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/context_parallel.py --device cuda --out context.json``
(NCCL, under a minute on two H200; ``--device cpu`` is gloo at small sizes). Three parts, each on every rank at once,
the slowest rank counts:

* a prefill layer under PCP and DCP: the context's shards laid out, gathered and attended, as they are stored
  (policy sparsemla) and upconverted to bf16 (policy flashmla-gated); and without the attention;
* a step's new records shared by the PCP ranks, in both forms;
* a decode layer under DCP, ag_rs and a2a, against a rank that holds the whole cache for its own heads: eager, and
  replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.context_parallel.exchange import exchange_for
from sparsemla.serving.context_parallel.prefill import PrefillSplit, share_new_records
from sparsemla.serving.context_parallel.ranks import Ranks
from sparsemla.serving.metadata import Batch, MetadataBuilder, local_length
from sparsemla.serving.paths import decide
from sparsemla.serving.reservations import new_record_reservations
from sparsemla.serving.workspace import SharedWorkspace

BLOCK = 64
SCALE = 576**-0.5


@dataclass(frozen=True)
class Sizes:
    """What is run: contexts and query rows of a prefill, rows of new records, decode rows, heads a rank, keys a row."""

    contexts: tuple[int, ...]
    prefill_rows: int
    new_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    decode_context: int
    heads: int
    topk: int
    samples: int


GPU = Sizes((16_384, 131_072, 524_288), 2048, (2048, 8192), (1, 8, 64, 128), 262_144, 16, 2048, 9)
CPU = Sizes((2048,), 8, (64,), (1, 4), 2048, 4, 64, 3)


class Clock:
    """Microseconds of a call on the slowest rank: the median of several, the ranks started together."""

    def __init__(self, ranks: Ranks, samples: int) -> None:
        self.ranks, self.samples = ranks, samples

    def __call__(self, call: Callable[[], Any], *, inner: int = 1) -> float:
        call()
        self._wait()
        times = []
        for _ in range(self.samples):
            self.ranks.all_reduce(torch.zeros(1, device=self.ranks.device), "dcp")
            self._wait()
            begin = time.perf_counter()
            if self.ranks.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(inner):
                    call()
                end.record()
                self._wait()
                times.append(start.elapsed_time(end) * 1e3 / inner)
            else:
                for _ in range(inner):
                    call()
                times.append((time.perf_counter() - begin) * 1e6 / inner)
        mine = statistics.median(times)
        return max(float(said) for said in self.ranks.tell(repr(mine)))

    def _wait(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)


def config_for(parallel: Parallelism, sizes: Sizes, *, length: int, rows: int, requests: int = 1) -> ServingConfig:
    model = dataclasses.replace(ModelGeometry.preset("glm-5.3"), heads=sizes.heads * parallel.tp)
    limits = ServingLimits(
        max_model_len=length, max_num_batched_tokens=rows, max_num_seqs=requests, block_size=BLOCK, prefill_factor=2
    )
    return ServingConfig(model, parallel, limits)


def shard_of(config: ServingConfig, length: int, ranks: Ranks) -> tuple[PagedKVCache, torch.Tensor]:
    """Random records of this rank's share of one request, its pages in random order."""
    mine = local_length(length, ranks.grid.shard, config.parallel.dcp, config.parallel.interleave)
    pages = -(-mine // BLOCK)
    cache = PagedKVCache.allocate(pages, BLOCK, config.cache_format, device=ranks.device)
    table = torch.randperm(pages).to(torch.int32).view(1, pages).to(ranks.device)
    for page in range(0, pages, 256):
        slots = torch.arange(page * BLOCK, min(page + 256, pages) * BLOCK, device=ranks.device)
        cache.write(slots, torch.randn(len(slots), config.layout.d_qk, device=ranks.device))
    return cache, table


def prefill(world: Ranks, sizes: Sizes, length: int, policy: str) -> dict[str, Any]:
    """One layer of a prefill whose rows and cache are split over all ranks."""
    parallel = Parallelism(dcp=world.world_size, pcp=world.world_size)
    rows = sizes.prefill_rows
    config = config_for(parallel, sizes, length=length, rows=rows)
    path = decide(config, policy)
    with world.regroup(parallel) as ranks:
        workspace = SharedWorkspace(ranks.device)
        exchange = exchange_for(ranks, config, path)
        backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, context=exchange)
        workspace.lock()
        cache, table = shard_of(config, length, ranks)
        batch = Batch([rows], [length], table, num_decodes=0)
        metadata = MetadataBuilder(config, path, device=ranks.device, rank=ranks.grid.shard).build(batch)
        q = torch.randn(rows, sizes.heads, 576, device=ranks.device).bfloat16()
        keys = torch.randint(0, length, (rows, sizes.topk), device=ranks.device).to(torch.int32)
        no_rows = dataclasses.replace(metadata, padded_tokens=0, num_tokens=0, chunks=_without_rows(metadata))
        clock = Clock(ranks, sizes.samples)
        before = ranks.received_bytes
        backend.forward(q, cache, keys, metadata)
        moved = ranks.received_bytes - before
        step = clock(lambda: backend.forward(q, cache, keys, metadata))
        gather = clock(lambda: backend.forward(q[:0], cache, keys[:0], no_rows))
        return {
            "part": "prefill",
            "policy": policy,
            "context": length,
            "rows_a_rank": rows,
            "bytes_a_record_gathered": moved / (length - local_length(length, ranks.grid.shard, parallel.dcp, 1)),
            "bytes_received": moved,
            "scratch_bytes": workspace.nbytes(),
            "gather_us": round(gather, 1),
            "step_us": round(step, 1),
        }


def _without_rows(metadata: Any) -> tuple[Any, ...]:
    return tuple(
        dataclasses.replace(chunk, tokens=slice(0, 0), request_ids=chunk.request_ids[:0]) for chunk in metadata.chunks
    )


def new_records(world: Ranks, sizes: Sizes, rows: int, policy: str) -> dict[str, Any]:
    """The records of a step's new tokens, brought to every rank and written there."""
    parallel = Parallelism(pcp=world.world_size)
    config = config_for(parallel, sizes, length=rows, rows=rows)
    path = decide(config, policy)
    # The clock starts the ranks together over their dcp group, so the groups of both are made.
    with (
        world.regroup(parallel) as ranks,
        world.regroup(Parallelism(tp=world.world_size, dcp=world.world_size)) as all_,
    ):
        cache = PagedKVCache.allocate(-(-rows // BLOCK), BLOCK, config.cache_format, device=ranks.device)
        table = torch.arange(cache.num_pages, dtype=torch.int32, device=ranks.device).view(1, -1)
        batch = Batch([rows], [rows], table, num_decodes=0)
        split = PrefillSplit.of(batch, decode_query_len=1, rank=ranks.grid.pcp_rank, world=parallel.pcp)
        latents = torch.randn(len(split.rows), config.layout.d_qk, device=ranks.device).bfloat16()
        slots = torch.arange(rows, device=ranks.device)
        workspace = SharedWorkspace(ranks.device)
        workspace.reserve("new records", new_record_reservations(config, path))
        scratch = workspace.take("new records").get("new_records")

        def share() -> None:
            share_new_records(ranks, path, split, latents, cache, slots, scratch=scratch)

        before = ranks.received_bytes
        share()
        moved = ranks.received_bytes - before
        return {
            "part": "new records",
            "policy": policy,
            "rows": rows,
            "bytes_a_record": moved / (rows - len(split.rows)),
            "bytes_received": moved,
            "step_us": round(Clock(all_, sizes.samples)(share), 1),
        }


def decode(world: Ranks, sizes: Sizes, rows: int, comm: str) -> dict[str, Any]:
    """One decode layer over a cache that all ranks share; comm "none": this rank's heads over a cache of its own."""
    alone = comm == "none"
    parallel = Parallelism(tp=world.world_size, dcp=world.world_size, dcp_comm="ag_rs" if alone else comm)
    length = sizes.decode_context
    config = config_for(parallel, sizes, length=length, rows=rows, requests=rows)
    with world.regroup(parallel) as ranks:
        clock = Clock(ranks, sizes.samples)
        if alone:
            config = dataclasses.replace(config, parallel=Parallelism(tp=parallel.tp))
        path = decide(config, "sparsemla")
        workspace = SharedWorkspace(ranks.device)
        exchange = None if alone else exchange_for(ranks, config, path)
        backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, context=exchange)
        workspace.lock()
        # Every request names the same pages: what is measured does not depend on whose records they are.
        cache, table = shard_of(config, length, ranks)
        table = table.expand(rows, -1).contiguous()
        shard = 0 if alone else ranks.grid.shard
        metadata = MetadataBuilder(config, path, device=ranks.device, rank=shard).build(
            Batch([1] * rows, [length] * rows, table)
        )
        q = torch.randn(rows, sizes.heads, 576, device=ranks.device).bfloat16()
        seed = torch.Generator(ranks.device).manual_seed(1)
        keys = torch.randint(0, length, (rows, sizes.topk), generator=seed, device=ranks.device).to(torch.int32)
        out = torch.empty(rows, sizes.heads, 512, dtype=torch.bfloat16, device=ranks.device)

        def step() -> None:
            backend.forward(q, cache, keys, metadata, out=out)

        before = ranks.received_bytes
        step()
        moved = ranks.received_bytes - before
        found = {
            "part": "decode",
            "form": comm,
            "rows": rows,
            "heads_a_rank": sizes.heads,
            "bytes_received_a_row": moved / rows,
            "scratch_bytes": workspace.nbytes(),
            "step_us": round(clock(step), 1),
        }
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            found["graph_us"] = round(clock(graph.replay, inner=20), 1)
            del graph
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="where rank 0 writes the results as JSON")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which nothing new is started")
    options = parser.parse_args()
    sizes = GPU if options.device == "cuda" else CPU
    if options.device == "cpu":
        torch.set_num_threads(1)
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    started = time.monotonic()
    world_size = int(os.environ["WORLD_SIZE"])
    both = ("sparsemla", "flashmla-gated")
    todo: list[Callable[[Ranks], dict[str, Any]]] = []
    todo += [lambda w, n=n, c=c: decode(w, sizes, n, c) for n in sizes.decode_rows for c in ("none", "ag_rs", "a2a")]
    todo += [lambda w, n=n, p=p: prefill(w, sizes, n, p) for n in sizes.contexts for p in both]
    todo += [lambda w, n=n, p=p: new_records(w, sizes, n, p) for n in sizes.new_rows for p in both]
    results, skipped = [], 0
    with Ranks.connect(Parallelism(tp=world_size), device=device, timeout_s=60.0) as world:
        first = world.world_rank == 0
        for run in todo:
            late = time.monotonic() - started > options.budget
            if any(said == "late" for said in world.tell("late" if late else "")):
                skipped += 1
                continue
            results.append(run(world))
            if first:
                print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
        seconds = round(time.monotonic() - started, 1)
    if first:
        report = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "ranks": world_size,
            "collectives": "gloo" if device.type == "cpu" else f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
            "seconds": seconds,
            "skipped": skipped,
            "results": results,
        }
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{len(results)} results, {skipped} not started within {options.budget:g} s; {seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
