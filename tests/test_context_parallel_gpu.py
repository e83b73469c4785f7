# SPDX-License-Identifier: Apache-2.0
"""NCCL on two GPUs: the oracle's answers, no waiting for the device, captured graphs, a lost rank named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from context_cases import BLOCK, SCALE, TOPK, Spec, compare, run_cases
from context_ranks import run_ranks
from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.reference import reference_attention
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.context_parallel.exchange import exchange_for
from sparsemla.serving.context_parallel.ranks import RankLostError, Ranks
from sparsemla.serving.metadata import Batch, Metadata, MetadataBuilder
from sparsemla.serving.paths import decide
from sparsemla.serving.workspace import SharedWorkspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices; torch sees {torch.cuda.device_count()}"
    ),
]


def test_every_rank_gives_the_oracles_answer(tmp_path: Path) -> None:
    specs = [
        Spec(tp, dcp, pcp, interleave, comm, batch=batch, sink=sink, pair=not sink)
        for (tp, dcp, pcp), comm in (((2, 2, 1), "ag_rs"), ((2, 2, 1), "a2a"), ((1, 2, 2), "ag_rs"), ((1, 2, 2), "a2a"))
        for interleave, batch, sink in ((1, "padded mtp", False), (1, "mixed", True), (1, "short prefills", False))
    ]
    specs += [Spec(1, 1, 2, batch="mixed"), Spec(2, 2, 1, 4, heads=32, batch="chunked prefill", sink=True)]
    specs += [Spec(2, 2, 1, 4, policy="flashmla"), Spec(1, 2, 2, 4, policy="flashmla-gated", batch="chunked prefill")]
    for rank, ended in enumerate(run_ranks(2, run_cases, specs, "cuda", where=tmp_path, limit_s=120)):
        assert not ended.error, f"rank {rank}: {ended}"
        assert not ended.result, f"rank {rank}: {ended.result}"


def decode_in_a_graph(rank: int, world: int, init_method: str, comm: str) -> list[str]:
    """Captures one padded decode step and replays it for other batches; eager steps may not wait for the device."""
    device = torch.device("cuda", rank)
    spec = Spec(world, world, 1, comm=comm)
    config = spec.config()
    path = decide(config, "sparsemla")
    rows, heads, pages = 16, config.model.heads, 200 // BLOCK + 1
    with Ranks.connect(
        config.parallel, device=device, init_method=init_method, rank=rank, world_size=world, timeout_s=30.0
    ) as ranks:
        workspace = SharedWorkspace(device)
        exchange = exchange_for(ranks, config, path)
        backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, context=exchange)
        workspace.lock()
        builder = MetadataBuilder(config, path, device=device, rank=ranks.grid.shard)
        cache = PagedKVCache.allocate(8 * pages, BLOCK, config.cache_format, device=device)
        table = torch.zeros((8, pages), dtype=torch.int32, device=device)
        q = torch.zeros((rows, spec.heads, 576), dtype=torch.bfloat16, device=device)
        indices = torch.zeros((rows, TOPK), dtype=torch.int32, device=device)
        out = torch.empty((rows, spec.heads, 512), dtype=torch.bfloat16, device=device)

        def load(seed: int, query_lens: list[int], seq_lens: list[int]) -> tuple[Metadata, torch.Tensor]:
            """The next batch into the same tensors; what the oracle says of it."""
            rng = torch.Generator().manual_seed(seed)
            count, requests = sum(query_lens), len(seq_lens)
            whole = PagedKVCache.allocate(8 * pages, BLOCK, config.cache_format)
            host_table = torch.randperm(8 * pages, generator=rng).to(torch.int32).view(8, pages)
            for request, length in enumerate(seq_lens):
                latents = torch.randn(length, 576, generator=rng).bfloat16()
                position = torch.arange(length)
                ids = torch.full_like(position, request)
                whole.write(slots_from_positions(host_table, ids, position, BLOCK), latents)
                slots = slots_from_positions(host_table, ids, position, BLOCK, ranks.shard)
                cache.write(slots.to(device), latents.to(device))
            table.copy_(host_table)
            ids = torch.repeat_interleave(torch.arange(requests), torch.tensor(query_lens)).to(torch.int32)
            ids = torch.cat([ids, torch.full((rows - count,), -1, dtype=torch.int32)])
            named = (torch.rand(rows, TOPK, generator=rng) * min(seq_lens)).to(torch.int32)
            query = torch.randn(rows, heads, 576, generator=rng).bfloat16()[:, rank * spec.heads :][:, : spec.heads]
            q.copy_(query)
            indices.copy_(named)
            want, _ = reference_attention(
                query, whole, named, softmax_scale=SCALE, block_table=host_table, request_ids=ids
            )
            lens = query_lens + [0] * (8 - requests)
            return builder.build(Batch(lens, seq_lens + [0] * (8 - requests), table, rows)), want

        wrong = []
        metadata, want = load(0, [1, 3, 1], [40, 99, 7])
        backend.forward(q, cache, indices, metadata, out=out)  # compiles what is compiled on first use
        ranks.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        out.fill_(torch.nan)
        backend.forward(q, cache, indices, metadata, out=out)
        torch.cuda.set_sync_debug_mode("default")
        ranks.synchronize()
        compare(out.cpu(), want, 5e-3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events meanwhile
            backend.forward(q, cache, indices, metadata, out=out)
        for seed, (lens, seqs) in enumerate((([1, 3, 1], [40, 99, 7]), ([3, 3], [150, 20]), ([1] * 8, [60] * 8))):
            _, want = load(seed + 1, lens, seqs)
            out.fill_(torch.nan)
            graph.replay()
            ranks.synchronize()
            try:
                compare(out.cpu(), want, 5e-3)
            except AssertionError as error:
                wrong.append(f"{comm}, {lens}: {error}")
        del graph  # NCCL waits for the graphs that hold its collectives before it closes
        return wrong


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_a_captured_decode_step_replays_the_next_batch(comm: str, tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks(2, decode_in_a_graph, comm, where=tmp_path, limit_s=60)):
        assert not ended.error, f"rank {rank}: {ended}"
        assert not ended.result, f"rank {rank}: {ended.result}"


def lose_rank_1(rank: int, world: int, init_method: str, how: str) -> str:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else its watchdog may end the process first, without a name
    device = torch.device("cuda", rank)
    spec = Spec(2, 2, 1)
    config = spec.config()
    ranks = Ranks.connect(
        config.parallel,
        device=device,
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout_s=6.0,
        grace_s=1.0,
    )
    exchange = exchange_for(ranks, config, decide(config, "sparsemla"))
    q = torch.zeros(4, spec.heads, 576, dtype=torch.bfloat16, device=device)
    out, lse = torch.zeros_like(q[..., :512]).contiguous(), torch.zeros(4, spec.heads, device=device)
    steps: list[int] = []

    def partial(_q: Any, _rows: slice, to: torch.Tensor, to_lse: torch.Tensor) -> None:
        to.zero_()
        to_lse.zero_()
        if rank == 1 and len(steps) > 1 and how == "dies":
            os._exit(1)
        if rank == 1 and len(steps) > 1 and how == "stops":
            raise ArithmeticError("no luck")

    try:
        for step in range(2):  # the first one sets NCCL up
            steps.append(step)
            with ranks.watch():
                exchange.attend(q, partial, buffers=exchange.buffers(4, device), out=out, lse=lse)
            ranks.synchronize()
    except RankLostError as error:
        return str(error)
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_a_lost_rank_is_named(how: str, tmp_path: Path) -> None:
    mine, lost = run_ranks(2, lose_rank_1, how, where=tmp_path, limit_s=60)
    assert lost.error == {"stops": "ArithmeticError", "dies": "died"}[how]
    words = {"stops": "rank 1 stopped: ArithmeticError: no luck", "dies": "rank 1 is gone or does not answer"}[how]
    assert mine.result is not None and words in mine.result, mine
