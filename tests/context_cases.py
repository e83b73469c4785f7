# SPDX-License-Identifier: Apache-2.0
"""One step of a deployment whose cache or prefill rows are split over ranks, against the single-rank oracle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.formats import KVFormat
from sparsemla.reference import reference_attention
from sparsemla.schedule import SplitSchedule
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.context_parallel.exchange import exchange_for
from sparsemla.serving.context_parallel.prefill import PrefillSplit, share_new_records
from sparsemla.serving.context_parallel.ranks import Ranks
from sparsemla.serving.metadata import Batch, MetadataBuilder
from sparsemla.serving.paths import decide
from sparsemla.serving.reservations import new_record_reservations, reservations_for
from sparsemla.serving.workspace import SharedWorkspace

SCALE = 0.08
TOPK = 40
BLOCK = 16
SPEC = 2

_TOLERANCE = {"a2a": 4e-3, "ag_rs": 5e-3, "copy": 8e-3}
"""Of a row and head, relative: partial outputs are bf16; ag_rs rounds weighed parts and sums too; copies round keys."""

BATCHES: dict[str, tuple[list[int], list[int], int | None]] = {
    "decode": ([1, 1, 1], [5, 120, 64], None),
    "padded mtp": ([3, 1, 3], [9, 1, 70], 16),
    "mixed": ([1, 3, 9, 6], [130, 77, 9, 150], None),
    "chunked prefill": ([7, 11], [57, 111], 24),
    "short prefills": ([2, 4, 5], [2, 199, 5], None),
    "empty": ([], [], 4),
}
"""name → (query lengths, sequence lengths, padded rows). "padded" as a captured graph would run it."""


@dataclass(frozen=True)
class Spec:
    """One case of the matrix; `tile` rows are exchanged at a time."""

    tp: int
    dcp: int
    pcp: int
    interleave: int = 1
    comm: str = "ag_rs"
    policy: str = "sparsemla"
    fmt: str = "fp8_ds_mla"
    heads: int = 8
    batch: str = "mixed"
    sink: bool = False
    pair: bool = False
    unsplit: bool = False

    def __str__(self) -> str:
        odd = [name for name in ("sink", "pair", "unsplit") if getattr(self, name)]
        sizes = f"tp{self.tp}-dcp{self.dcp}-pcp{self.pcp}-i{self.interleave}-{self.comm}"
        return "-".join([sizes, self.policy, self.fmt, f"{self.heads}heads", self.batch, *odd]).replace(" ", "_")

    def config(self) -> ServingConfig:
        fmt = KVFormat(self.fmt)
        model = ModelGeometry.preset("deepseek-v4" if fmt in (KVFormat.FP8_V4, KVFormat.FP8_V41) else "glm-5.3")
        model = dataclasses.replace(model, heads=self.heads * self.tp)
        if fmt is KVFormat.FP8_NOPE:
            model = dataclasses.replace(model, d_qk=512, rope_dim=0, formats=(fmt,))
        return ServingConfig(
            model,
            Parallelism(self.tp, self.dcp, self.pcp, self.interleave, self.comm),
            ServingLimits(
                max_model_len=200,
                max_num_batched_tokens=40,
                max_num_seqs=8,
                spec_tokens=SPEC,
                block_size=BLOCK,
                cache_format=fmt,
                prefill_factor=2,
            ),
        )


def run_case(spec: Spec, ranks: Ranks, *, seed: int, device: torch.device) -> None:
    """Runs one step on this rank. AssertionError where it is not the oracle's answer."""
    config = spec.config()
    path = decide(config, spec.policy)
    exchange = exchange_for(ranks, config, path)
    workspace = SharedWorkspace(device)
    backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, context=exchange)
    fresh = new_record_reservations(config, path)
    workspace.reserve("new records", fresh)
    workspace.lock()
    buffers = [buffer for buffer in workspace._buffers if buffer is not None]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(0xFF)  # NaN in any float

    # The same on every rank: the generator is seeded alike.
    rng = torch.Generator().manual_seed(seed)
    query_lens, seq_lens, padded = BATCHES[spec.batch]
    requests, rows = len(seq_lens), sum(query_lens)
    step_rows = max(rows if padded is None else padded, rows)
    contexts = [torch.randn(length, config.layout.d_qk, generator=rng).bfloat16() for length in seq_lens]
    ids = torch.repeat_interleave(torch.arange(requests), torch.tensor(query_lens, dtype=torch.int64))
    place = torch.cat([torch.arange(s - n, s) for n, s in zip(query_lens, seq_lens, strict=True)] or [torch.empty(0)])
    place = place.to(torch.int64)
    positions = (torch.rand(step_rows, TOPK, generator=rng) * 210).to(torch.int32)
    positions[:rows] = torch.minimum(positions[:rows], place[:, None].to(torch.int32))
    positions[torch.rand(step_rows, TOPK, generator=rng) < 0.1] = -1
    positions[:rows:5, 3] = 0x7FC00000  # the bits of a NaN, from an upstream top-k
    if rows > 2:
        positions[2] = -1  # a row without keys
        positions[0, 1:] = -1  # one key: all ranks but one have none
    heads = config.model.heads
    query = torch.randn(step_rows, heads, config.layout.d_qk, generator=rng).bfloat16()
    sink = torch.randn(heads, generator=rng) if spec.sink else None
    pages = 200 // BLOCK + 1

    def pool(shard: tuple[int, int, int], upto: list[int]) -> tuple[PagedKVCache, torch.Tensor]:
        """A shard's pool with each request's first `upto` positions; whatever else is in it reads as NaN."""
        cache = PagedKVCache.allocate(requests * pages + 1, BLOCK, config.cache_format, d_qk=config.layout.d_qk)
        cache.data.view(torch.uint8).fill_(0xFF)
        table = torch.randperm(requests * pages).to(torch.int32).view(requests, pages) + 1
        for request, (context, end) in enumerate(zip(contexts, upto, strict=True)):
            position = torch.arange(end)
            slots = slots_from_positions(table, torch.full_like(position, request), position, BLOCK, shard)
            cache.write(slots, context[:end])
        return cache, table

    # This rank's pool without the step's own tokens, then those as the ranks computed them.
    old = [s - n for n, s in zip(query_lens, seq_lens, strict=True)]
    cache, table = pool(ranks.shard, old)
    latents = torch.cat([c[o:] for c, o in zip(contexts, old, strict=True)] or [torch.empty(0, config.layout.d_qk)])
    slots = slots_from_positions(table, ids, place, BLOCK, ranks.shard)
    cache = PagedKVCache.wrap(cache.data.to(device), cache.format, BLOCK)
    table, slots = table.to(device), slots.to(device)
    batch = Batch(query_lens, seq_lens, table, padded)
    mine, local = torch.arange(rows), batch
    if spec.pcp > 1:
        split = PrefillSplit.of(batch, decode_query_len=1 + SPEC, rank=ranks.grid.pcp_rank, world=spec.pcp)
        mine, local = split.rows.cpu(), split.batch
        scratch = workspace.take("new records").get("new_records")
        share_new_records(ranks, path, split, latents[mine].to(device), cache, slots, scratch=scratch)
    else:
        cache.write(slots, latents.to(device))
    everything, whole_table = pool((0, 1, 1), seq_lens)

    own = slice(ranks.grid.tp_rank * spec.heads, (ranks.grid.tp_rank + 1) * spec.heads)
    count = len(mine)
    padded_rows = step_rows if local is batch else (local.padded_tokens or 0)
    q = torch.full((padded_rows, spec.heads, query.shape[2]), 7.0, dtype=torch.bfloat16)
    q[:count] = query[mine, own]
    indices = torch.full((padded_rows, TOPK), 3, dtype=torch.int32)
    indices[:count] = positions[mine]
    want, want_lse = reference_attention(
        q,
        everything,
        indices,
        softmax_scale=SCALE,
        block_table=whole_table,
        request_ids=torch.cat([ids[mine], torch.full((padded_rows - count,), -1)]).to(torch.int32),
        attn_sink=None if sink is None else sink[own],
    )
    q = q.to(device)
    d_nope = config.layout.d_nope
    given = (q[..., :d_nope], q[..., d_nope:] if config.layout.d_rope else None) if spec.pair else q
    metadata = MetadataBuilder(config, path, device=device, rank=ranks.grid.shard).build(local)
    target = torch.full((padded_rows, spec.heads, 512), torch.nan, dtype=torch.bfloat16, device=device)
    out, lse = backend.forward(
        given,
        cache,
        indices.to(device),
        metadata,
        attn_sink=None if sink is None else sink[own].contiguous().to(device),
        schedule=SplitSchedule.unsplit(padded_rows) if spec.unsplit else None,
        out=target,
    )
    assert out is target
    compare(out.cpu(), want, _TOLERANCE[spec.comm if spec.policy == "sparsemla" else "copy"])
    assert not out[count:].any(), "rows that pad the batch are not 0"
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), want_lse[: lse.shape[0]], atol=2e-4, rtol=1e-5)
    else:
        assert spec.policy != "sparsemla" or spec.dcp == 1
    assert addresses == [buffer.data_ptr() for buffer in buffers]
    assert spec.policy != "sparsemla" or spec.dcp == 1 or workspace.nbytes() > 0
    assert sum(entry.nbytes for entry in workspace.ledger()) >= sum(r.nbytes for r in reservations_for(config, path))


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Every row and head: bf16 rounds each partial output, and once more the sum."""
    assert not got.isnan().any(), "NaN in the output"
    error = (got.double() - want).norm(dim=-1)
    assert bool((error <= tolerance * want.norm(dim=-1) + 1e-12).all()), (
        f"rows differ by up to {float((error / want.norm(dim=-1).clamp_min(1e-12)).max()):.2e}"
    )


def run_cases(rank: int, world: int, init_method: str, specs: list[Spec], kind: str) -> dict[str, str]:
    """name → what is wrong, for every case; the cases go on after one fails alike on all ranks."""
    device = torch.device(kind if kind == "cpu" else f"cuda:{rank}")
    wrong: dict[str, str] = {}
    groups: dict[Parallelism, Ranks] = {}
    with Ranks.connect(
        Parallelism(tp=world), device=device, init_method=init_method, rank=rank, world_size=world, timeout_s=30.0
    ) as ranks:
        for seed, spec in enumerate(specs):
            parallel = spec.config().parallel
            if parallel not in groups:
                groups[parallel] = ranks.regroup(parallel)
            try:
                run_case(spec, groups[parallel], seed=seed, device=device)
            except AssertionError as error:
                wrong[str(spec)] = str(error) or "assertion"
        for mine in groups.values():
            mine.close()
    return wrong
