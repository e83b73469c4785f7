# SPDX-License-Identifier: Apache-2.0
"""The forward on every path and policy: equal to the oracle on mixed batches; only live reservations are touched."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat
from sparsemla.reference import reference_attention
from sparsemla.schedule import SplitSchedule
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.host_cache import HostCache, RequestLanes, StagingRing, host_pool
from sparsemla.serving.metadata import Batch, Metadata, MetadataBuilder, local_length
from sparsemla.serving.paths import Path, PathKind, PathMismatchError, decide
from sparsemla.serving.workspace import SharedWorkspace

SCALE = 0.08
TOPK = 48
BLOCK = 16
POLICIES = ["flashmla", "flashmla-gated", "sparsemla"]


def deployment(
    heads: int,
    *,
    dcp: int = 1,
    pcp: int = 1,
    interleave: int = 1,
    fmt: KVFormat = KVFormat.FP8_DS_MLA,
    host_cache: bool = False,
    **limits: int,
) -> ServingConfig:
    settings = {"max_model_len": 200, "max_num_batched_tokens": 40, "max_num_seqs": 8, "spec_tokens": 2}
    return ServingConfig(
        ModelGeometry.preset("glm-5.3"),
        Parallelism(tp=64 // heads, dcp=dcp, pcp=pcp, interleave=interleave),
        ServingLimits(**(settings | {"block_size": BLOCK, "prefill_factor": 1, "cache_format": fmt} | limits)),
        host_cache=host_cache,
    )


@dataclass
class Case:
    """A mixed batch over random caches, one per rank, and the oracle's answer over the whole of it."""

    query_lens: list[int]
    seq_lens: list[int]
    caches: list[PagedKVCache]
    tables: list[torch.Tensor]
    q: torch.Tensor
    indices: torch.Tensor
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    padded: int

    def batch(self, rank: int = 0) -> Batch:
        return Batch(self.query_lens, self.seq_lens, self.tables[rank], self.padded)


def host_cache_of(
    cache: PagedKVCache, table: torch.Tensor, *, hot_records: int, device: torch.device, staged: int = 128
) -> HostCache:
    """A host cache with a cache's records; contexts above `staged` records go through the hot buffer."""
    pool = host_pool(cache.num_pages, cache.block_size, cache.format, d_qk=cache.d_qk)
    pool.byte_view.copy_(cache.byte_view)
    lanes = RequestLanes(max_requests=table.shape[0], max_len=table.shape[1] * BLOCK, device=device)
    ring = StagingRing(pool.layout.page_bytes(staged), device=device)
    return HostCache(pool, lanes, hot_records=hot_records, topk=TOPK, max_rows=40, staging=ring)


# decodes (one with 3 query tokens: MTP), a prefill from scratch, prefills with context that need several chunks
QUERY_LENS = [1, 3, 1, 9, 6, 5]
SEQ_LENS = [130, 77, 1, 9, 150, 61]


def make_case(
    config: ServingConfig,
    *,
    device: torch.device,
    q_heads: int | None = None,
    world: int = 1,
    query_lens: list[int] | None = None,
    seq_lens: list[int] | None = None,
    padded: int = 33,
    sink: bool = False,
    pool_device: torch.device | None = None,
) -> Case:
    query_lens = QUERY_LENS if query_lens is None else query_lens
    seq_lens = SEQ_LENS if seq_lens is None else seq_lens
    interleave, requests, d_qk = config.parallel.interleave, len(seq_lens), config.layout.d_qk
    pool_device = pool_device or device
    contexts = [torch.randn(length, d_qk, device=pool_device) for length in seq_lens]
    pages = 200 // BLOCK + 1

    def shard(rank: int, ranks: int) -> tuple[PagedKVCache, torch.Tensor]:
        cache = PagedKVCache.allocate(requests * pages + 3, BLOCK, config.cache_format, device=pool_device, d_qk=d_qk)
        table = torch.randperm(requests * pages).to(torch.int32).view(requests, pages).to(pool_device) + 3
        for request, context in enumerate(contexts):
            position = torch.arange(len(context), device=pool_device)
            mine = position[position // interleave % ranks == rank]
            local = torch.arange(len(mine), device=pool_device)
            assert len(mine) == local_length(len(context), rank, ranks, interleave)
            slots = table[request, local // BLOCK].long() * BLOCK + local % BLOCK
            cache.write(slots, context[mine])
        return cache, table

    shards = [shard(rank, world) for rank in range(world)]
    whole_cache, whole_table = shards[0] if world == 1 else shard(0, 1)
    rows = sum(query_lens)
    request_ids = torch.repeat_interleave(torch.arange(requests), torch.tensor(query_lens, dtype=torch.int64))
    limit = torch.cat(
        [torch.arange(s - n + 1, s + 1) for n, s in zip(query_lens, seq_lens, strict=True)]
        or [torch.empty(0, dtype=torch.int64)]
    )
    indices = (torch.rand(padded, TOPK) * torch.cat([limit, torch.ones(padded - rows)])[:, None]).to(torch.int32)
    indices[torch.rand(padded, TOPK) < 0.1] = -1
    indices[:rows:7, 3] = 0x7FC00000  # the bits of a NaN, from an upstream top-k
    if rows > 5:
        indices[5] = -1  # a row without keys
    indices = indices.to(device)
    q = torch.randn(padded, q_heads or config.heads, d_qk, device=device).bfloat16()
    sinks = torch.randn(q.shape[1], device=device) if sink else None
    out, lse = reference_attention(
        q.cpu(),
        _to_cpu(whole_cache),
        indices.cpu(),
        softmax_scale=SCALE,
        block_table=whole_table.cpu(),
        request_ids=torch.cat([request_ids, torch.full((padded - rows,), -1)]).to(torch.int32),
        attn_sink=None if sinks is None else sinks.cpu(),
    )
    caches, tables = zip(*shards, strict=True)
    return Case(query_lens, seq_lens, list(caches), list(tables), q, indices, sinks, out, lse, padded)


def _to_cpu(cache: PagedKVCache) -> PagedKVCache:
    return PagedKVCache.wrap(cache.data.cpu(), cache.format, cache.block_size)


def poison(workspace: SharedWorkspace) -> None:
    """Every byte of the workspace 0xFF: NaN in any float."""
    for buffer in workspace._buffers:
        if buffer is not None:
            buffer.fill_(0xFF)


def close(got: torch.Tensor, expected: torch.Tensor, *, tolerance: float = 4e-3) -> None:
    got = got.double().cpu()
    assert not got.isnan().any()
    assert (got - expected).norm() <= tolerance * expected.norm().clamp_min(1e-6)


def run(
    config: ServingConfig, policy: str, case: Case, device: torch.device, **forward
) -> tuple[torch.Tensor, torch.Tensor | None, Path, SharedWorkspace]:
    path = decide(config, policy)
    workspace = SharedWorkspace(device)
    host = None
    if config.host_cache:
        host = host_cache_of(case.caches[0], case.tables[0], hot_records=3 * TOPK, device=device)
    backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, host=host)
    workspace.lock()
    poison(workspace)
    batch = case.batch()
    if host is not None:
        batch = Batch(batch.query_lens, batch.seq_lens, batch.block_table.to(device), batch.padded_tokens)
    metadata = MetadataBuilder(config, path, device=device).build(batch)
    out, lse = backend.forward(
        forward.pop("q", case.q),
        None if config.host_cache else case.caches[0],
        case.indices,
        metadata,
        attn_sink=case.sink,
        **forward,
    )
    return out.clone(), lse, path, workspace


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("host_cache", [False, True])
def test_mixed_batches_equal_the_oracle(policy: str, heads: int, host_cache: bool, device: torch.device) -> None:
    config = deployment(heads, host_cache=host_cache)
    case = make_case(config, device=device, pool_device=torch.device("cpu") if host_cache else device)
    out, lse, path, _ = run(config, policy, case, device)
    expected = (
        PathKind.IN_PLACE
        if policy == "sparsemla"
        else PathKind.HOST
        if host_cache
        else PathKind.MIXED_FP8
        if heads < 32
        else PathKind.SEPARATE
    )
    assert path.kind is expected
    close(out, case.out)
    assert not out[sum(case.query_lens) :].any()
    if path.kind is PathKind.IN_PLACE:
        assert lse is not None
        torch.testing.assert_close(lse.double().cpu(), case.lse, atol=1e-4, rtol=1e-5)
    else:
        assert lse is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padded"),
    [
        ([1, 1, 1], [5, 200, 64], 3),
        ([3, 3, 3], [9, 150, 70], 16),
        ([20, 13], [20, 113], 33),
        ([40], [200], 40),
        ([2, 5, 5, 5, 5], [2, 199, 199, 60, 150], 22),
        ([0, 1, 0], [4, 10, 0], 4),
        ([], [], 4),
    ],
    ids=["decode", "mtp", "prefill", "longest", "chunks", "no query", "empty"],
)
def test_batch_shapes(policy: str, heads: int, query_lens, seq_lens, padded: int, device: torch.device) -> None:
    config = deployment(heads)
    case = make_case(config, device=device, query_lens=query_lens, seq_lens=seq_lens, padded=padded)
    out, _, _, _ = run(config, policy, case, device)
    close(out, case.out)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", [16, 32])
def test_sink_pair_and_given_output(policy: str, heads: int, device: torch.device) -> None:
    config = deployment(heads)
    case = make_case(config, device=device, sink=True)
    given = torch.full((case.padded, heads, 512), float("nan"), dtype=torch.bfloat16, device=device)
    pair = (case.q[..., :512].contiguous(), case.q[..., 512:].contiguous())
    run(config, policy, case, device, q=pair, out=given)
    close(given, case.out)


@pytest.mark.parametrize("policy", POLICIES)
def test_bf16_cache(policy: str, device: torch.device) -> None:
    config = deployment(16, fmt=KVFormat.BF16)
    case = make_case(config, device=device)
    out, _, path, _ = run(config, policy, case, device)
    assert path.kind is (PathKind.IN_PLACE if policy == "sparsemla" else PathKind.BF16)
    close(out, case.out)


@pytest.mark.parametrize(("model", "fmt"), [("deepseek-v4", "fp8_v4"), ("deepseek-v4", "fp8_v41")])
def test_v4_records_are_read_in_place(model: str, fmt: str, device: torch.device) -> None:
    config = ServingConfig(
        ModelGeometry.preset(model),
        Parallelism(tp=4),
        ServingLimits(
            max_model_len=200, max_num_batched_tokens=40, max_num_seqs=8, spec_tokens=2, cache_format=KVFormat(fmt)
        ),
    )
    case = make_case(config, device=device)
    out, lse, _, workspace = run(config, "sparsemla", case, device)
    close(out, case.out)
    assert lse is not None and workspace.nbytes() == 0


def test_schedule_without_splits_gives_the_same_bits_alone(device: torch.device) -> None:
    config = deployment(16)
    case = make_case(config, device=device)
    out, _, _, _ = run(config, "sparsemla", case, device, schedule=SplitSchedule.unsplit(case.padded, heads=16))
    alone = make_case(config, device=device)  # only to have a case of one row to overwrite
    alone.query_lens, alone.seq_lens, alone.padded = case.query_lens[:1], case.seq_lens[:1], 1
    alone.caches, alone.tables = case.caches, case.tables
    alone.q, alone.indices = case.q[:1], case.indices[:1]
    first, _, _, _ = run(config, "sparsemla", alone, device, schedule=SplitSchedule.unsplit(1, heads=16))
    assert torch.equal(first[0], out[0])


@pytest.mark.parametrize("heads", [16, 64])
def test_dead_reservations_are_never_touched_and_live_ones_are(heads: int, device: torch.device) -> None:
    config = deployment(heads, prefill_factor=2)
    case = make_case(config, device=device)
    _, _, path, workspace = run(config, "flashmla", case, device)
    entry = workspace.ledger()[0]
    touched = {name: bool((t.view(torch.uint8) != 0xFF).any()) for name, t in workspace.take("attention").items()}
    assert touched == {spec.name: spec.ever_read for spec in entry.specs}
    assert touched["prefill_kv"] is (path.kind is PathKind.SEPARATE)


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial answers of disjoint shards → the whole, by their lse."""
    lses = torch.stack([lse.double().cpu() for _, lse in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse).nan_to_num(0.0)
    return sum(w.unsqueeze(-1) * out.double().cpu() for w, (out, _) in zip(weights, parts, strict=True)), lse


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 1), (4, 8)])
def test_sharded_cache_merges_to_the_oracle(policy: str, world: int, interleave: int, device: torch.device) -> None:
    config = deployment(16, dcp=world, interleave=interleave)
    case = make_case(config, device=device, world=world, q_heads=16 * world)
    path = decide(config, policy)
    parts = []
    for rank in range(world):
        workspace = SharedWorkspace(device)
        backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, rank=rank)
        poison(workspace)
        metadata = MetadataBuilder(config, path, device=device, rank=rank).build(case.batch(rank))
        out, lse = backend.forward(case.q, case.caches[rank], case.indices, metadata)
        assert lse is not None and out.shape == (case.padded, 16 * world, 512)
        parts.append((out.clone(), lse.clone()))
    out, lse = merge(parts)
    close(out, case.out)
    torch.testing.assert_close(lse, case.lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("interleave", [1, 4])
def test_gathered_prefills_see_every_shard(heads: int, interleave: int, device: torch.device) -> None:
    world = 2
    config = deployment(heads, dcp=world, pcp=2, interleave=interleave, prefill_factor=2)
    case = make_case(config, device=device, world=world)
    path = decide(config, "flashmla-gated")
    assert path.kind is PathKind.GATHERED
    barrier = threading.Barrier(world, timeout=60)
    exchange: dict[int, torch.Tensor] = {}
    answers: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        def all_gather(output: torch.Tensor, given: torch.Tensor) -> None:
            exchange[rank] = given
            barrier.wait()
            output.copy_(torch.cat([exchange[r] for r in range(world)]))
            barrier.wait()

        try:
            workspace = SharedWorkspace(device)
            backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE, rank=rank, all_gather=all_gather)
            poison(workspace)
            metadata = MetadataBuilder(config, path, device=device, rank=rank).build(case.batch(rank))
            assert len(metadata.chunks) > 0
            out, lse = backend.forward(case.q, case.caches[rank], case.indices, metadata)
            answers[rank] = (out.clone(), lse)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    decodes = sum(n for n in case.query_lens if n <= 3)
    for out, lse in answers.values():
        close(out[decodes:], case.out[decodes:])
        assert lse is not None and lse.shape == (decodes, heads)
    out, _ = merge([(out[:decodes], lse) for out, lse in answers.values() if lse is not None])
    close(out, case.out[:decodes])


def test_a_path_of_another_backend_is_refused_by_name(device: torch.device) -> None:
    config = deployment(16)
    path, other = decide(config, "sparsemla"), decide(deployment(32), "flashmla")
    backend = SparseMLABackend(config, path, SharedWorkspace(device), softmax_scale=SCALE)
    metadata = MetadataBuilder(deployment(32), other, device=device).build(
        Batch([1], [1], torch.zeros((1, 1), dtype=torch.int32, device=device))
    )
    with pytest.raises(PathMismatchError) as caught:
        backend.forward(torch.empty(0), None, torch.empty(0), metadata)
    assert str(path) in str(caught.value) and str(other) in str(caught.value)


def test_refusals(device: torch.device) -> None:
    config = deployment(16)
    case = make_case(config, device=device)
    path = decide(config, "flashmla")
    backend = SparseMLABackend(config, path, SharedWorkspace(device), softmax_scale=SCALE)
    metadata = MetadataBuilder(config, path, device=device).build(case.batch())
    cache = case.caches[0]
    with pytest.raises(ValueError, match=r"q: got shape \(2, 16, 576\), accepted is \(33, heads, columns\)"):
        backend.forward(case.q[:2], cache, case.indices, metadata)
    with pytest.raises(ValueError, match="indices: got shape"):
        backend.forward(case.q, cache, case.indices[:2], metadata)
    with pytest.raises(ValueError, match="cache: got None"):
        backend.forward(case.q, None, case.indices, metadata)
    with pytest.raises(ValueError, match="q: got 65 heads, accepted are at most 64"):
        backend.forward(case.q.repeat(1, 5, 1)[:, :65], cache, case.indices, metadata)
    gathered = deployment(16, dcp=2, pcp=2)
    with pytest.raises(ValueError, match="all_gather: got None"):
        SparseMLABackend(gathered, decide(gathered, "flashmla"), SharedWorkspace(device), softmax_scale=SCALE)
    hosted = deployment(16, host_cache=True)
    with pytest.raises(ValueError, match="host: got None"):
        SparseMLABackend(hosted, decide(hosted, "sparsemla"), SharedWorkspace(device), softmax_scale=SCALE)
    with pytest.raises(ValueError, match="rank: got 1, accepted are 0 to 0"):
        SparseMLABackend(config, path, SharedWorkspace(device), softmax_scale=SCALE, rank=1)


def _graph_inputs(config: ServingConfig, policy: str, device: torch.device) -> tuple[SparseMLABackend, MetadataBuilder]:
    path = decide(config, policy)
    workspace = SharedWorkspace(device)
    backend = SparseMLABackend(config, path, workspace, softmax_scale=SCALE)
    workspace.lock()
    return backend, MetadataBuilder(config, path, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_forward_never_waits_for_the_device(policy: str) -> None:
    device = torch.device("cuda")
    for heads in (16, 64):
        config = deployment(heads)
        case = make_case(config, device=device)
        backend, builder = _graph_inputs(config, policy, device)
        metadata = builder.build(case.batch())
        backend.forward(case.q, case.caches[0], case.indices, metadata)  # compiles what is compiled on first use
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, _ = backend.forward(case.q, case.caches[0], case.indices, metadata)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        close(out, case.out)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_captured_graph_replays_the_next_batch(policy: str) -> None:
    device = torch.device("cuda")
    config = deployment(16)
    first = make_case(config, device=device, query_lens=[1, 3, 1], seq_lens=[40, 99, 7], padded=16)
    backend, builder = _graph_inputs(config, policy, device)
    table = torch.zeros((8, first.tables[0].shape[1]), dtype=torch.int32, device=device)
    q, indices = first.q.clone(), first.indices.clone()
    out = torch.empty((16, 16, 512), dtype=torch.bfloat16, device=device)

    def load(case: Case) -> Metadata:
        table.zero_()
        table[: len(case.seq_lens)].copy_(case.tables[0])
        q.copy_(case.q)
        indices.copy_(case.indices)
        lens = case.query_lens + [0] * (8 - len(case.query_lens))
        return builder.build(Batch(lens, case.seq_lens + [0] * (8 - len(case.seq_lens)), table, 16))

    metadata = load(first)
    cache = PagedKVCache.wrap(first.caches[0].data.clone(), config.cache_format)
    backend.forward(q, cache, indices, metadata, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(q, cache, indices, metadata, out=out)
    for lens, seqs in (([1, 3, 1], [40, 99, 7]), ([3, 3], [150, 20])):
        case = make_case(config, device=device, query_lens=lens, seq_lens=seqs, padded=16)
        load(case)
        cache.data[: case.caches[0].num_pages].copy_(case.caches[0].data[: cache.num_pages])
        graph.replay()
        torch.cuda.synchronize()
        close(out, case.out)


@pytest.mark.parametrize("heads", [16, 64])
def test_the_audit_names_the_dead_reservation(heads: int, device: torch.device) -> None:
    audit = pytest.importorskip("sparsemla.audit")
    config = deployment(heads, prefill_factor=2)
    case = make_case(config, device=device)
    with audit.watch() as ledger:
        run(config, "flashmla", case, device)
    prefill = ledger.region("attention/prefill_kv")
    assert prefill.nbytes == 400 * 576 * 2
    mixed = decide(config, "flashmla").kind is PathKind.MIXED_FP8
    assert (prefill.dead == prefill.nbytes) is mixed
    assert ledger.region("attention/compact_output").dead < ledger.region("attention/compact_output").nbytes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_position_past_the_end_finds_nothing_of_the_last_user(policy: str, device: torch.device) -> None:
    """An engine should not name one; if it does, the answer is what the empty page gives, not the workspace's NaN."""
    config = deployment(32)
    case = make_case(config, device=device, query_lens=[9], seq_lens=[9], padded=9)
    case.indices[:, 0] = 9
    expected, _ = reference_attention(
        case.q.cpu(),
        _to_cpu(case.caches[0]),
        case.indices.cpu(),
        softmax_scale=SCALE,
        block_table=case.tables[0].cpu(),
        request_ids=torch.zeros(9, dtype=torch.int32),
    )
    out, _, _, _ = run(config, policy, case, device)
    close(out, expected)


def test_host_cache_and_shards_together(device: torch.device) -> None:
    config = deployment(16, dcp=2, interleave=4, host_cache=True)
    host_memory = torch.device("cpu")
    case = make_case(config, device=device, world=2, q_heads=32, pool_device=host_memory)
    path = decide(config, "sparsemla")
    parts = []
    for rank in range(2):
        host = host_cache_of(case.caches[rank], case.tables[rank], hot_records=5 * TOPK, device=device)
        backend = SparseMLABackend(config, path, SharedWorkspace(device), softmax_scale=SCALE, rank=rank, host=host)
        batch = Batch(case.query_lens, case.seq_lens, case.tables[rank].to(device), case.padded)
        metadata = MetadataBuilder(config, path, device=device, rank=rank).build(batch)
        out, lse = backend.forward(case.q, None, case.indices, metadata)
        assert lse is not None
        parts.append((out, lse))
    out, lse = merge(parts)
    close(out, case.out)
    torch.testing.assert_close(lse, case.lse, atol=1e-4, rtol=1e-5)
