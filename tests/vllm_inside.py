# SPDX-License-Identifier: Apache-2.0
"""Our plugin against one real vLLM: tests/test_vllm.py runs this file for each release, in a process of its own."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker import workspace

from generators import relative_error
from sparsemla import reference_attention
from sparsemla.integrations.vllm import plugin, warmup
from sparsemla.integrations.vllm.versions import TESTED, UnsupportedVllmError, installed
from vllm_batches import (
    BLOCK,
    TOPK,
    Requests,
    cache_spec,
    common_metadata,
    context_group,
    make_builder,
    make_impl,
    merged,
    vllm_config,
)

NEW = vllm.__version__.startswith("0.33")
SCALE = 192**-0.5
MEMBERS_BEFORE = set(AttentionBackendEnum.__members__)
CUSTOM_BEFORE = AttentionBackendEnum.CUSTOM.is_overridden()

plugin.register()
from sparsemla.integrations.vllm.backend import SparseMLABackend as Backend  # noqa: E402

# -- registration


def test_the_release_is_one_of_those_tested() -> None:
    assert installed() is TESTED[vllm.__version__]


def test_registration_adds_one_name_and_changes_nothing_else() -> None:
    assert not CUSTOM_BEFORE and "SPARSEMLA" not in MEMBERS_BEFORE
    assert set(AttentionBackendEnum.__members__) - MEMBERS_BEFORE == ({"SPARSEMLA"} if NEW else set())
    overridden = {name for name, member in AttentionBackendEnum.__members__.items() if member.is_overridden()}
    assert overridden == {installed().flag}
    assert AttentionConfig().backend is None


def test_registering_twice_is_registering_once() -> None:
    before = dict(AttentionBackendEnum.__members__)
    plugin.register()
    assert dict(AttentionBackendEnum.__members__) == before


def test_a_member_that_another_plugin_holds_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    if NEW:
        pytest.skip("0.33.0 has room for all")
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "somebody.else.Backend")
    try:
        plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "somebody.else.Backend"
        assert "somebody.else.Backend" in caplog.text
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        plugin.register()


@pytest.mark.parametrize("spelled", [str.upper, str.lower])
def test_the_flag_finds_the_backend(spelled: Any) -> None:
    config = AttentionConfig(backend=spelled(installed().flag))
    assert config.backend.get_class() is Backend
    assert Backend.get_name() == "SPARSEMLA" and Backend.full_cls_name() == tuple(plugin.BACKEND.rsplit(".", 1))


def test_the_configuration_reaches_a_spawned_worker() -> None:
    """The worker unpickles it before it loads plugins."""
    chosen = AttentionConfig(backend=installed().flag).backend
    assert pickle.loads(pickle.dumps(chosen)) is chosen
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    worker = context.Process(target=_say_name, args=(chosen, ours))
    worker.start()
    ours.close()
    try:
        assert theirs.poll(120) and theirs.recv() == installed().flag
    finally:
        worker.join(30)


def _say_name(chosen: Any, connection: Any) -> None:
    connection.send(chosen.name)


# -- signatures and capabilities


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Backend, AttentionBackend),
        (Backend.get_builder_cls(), AttentionMetadataBuilder),
        (Backend.get_impl_cls(), MLAAttentionImpl),
    ],
)
def test_every_method_takes_what_vllm_gives(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs) and not ours.__abstractmethods__
    public = (name for name in vars(ours) if name == "__init__" or not name.startswith("__"))
    shared = [name for name in public if callable(getattr(theirs, name, None))]
    assert len(shared) >= 2
    for name in shared:
        given, expected = (inspect.signature(getattr(cls, name)).parameters for cls in (ours, theirs))
        assert list(given)[: len(expected)] == list(expected) or set(expected) <= set(given), name
        for extra in set(given) - set(expected):
            assert given[extra].default is not inspect.Parameter.empty, (name, extra)
        for parameter, value in expected.items():
            if value.default is not inspect.Parameter.empty:
                assert given[parameter].default == value.default, (name, parameter)


def capability(config: Any = None, **changes: Any) -> list[str]:
    """vLLM's list of reasons against the backend."""
    asked: dict[str, Any] = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": None,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        **changes,
    }
    with set_current_vllm_config(config or vllm_config(rotary=asked["head_size"] - 512)):
        return Backend.validate_configuration(**asked)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "auto", "head_size": 512},
        {"block_size": 128},
        {"use_pcp": True},
        {"use_kv_connector": True},
        {"device_capability": DeviceCapability(8, 0)},
        {"device_capability": DeviceCapability(10, 0)},
        *([{"use_dcp": True}, {"use_adaptive_verification": True}, {"head_size": 512}] if NEW else []),
    ],
    ids=str,
)
def test_what_is_served(changes: dict[str, Any]) -> None:
    assert capability(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 320}, "head_size"),
        ({"dtype": torch.float16}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"block_size": 16}, "block_size"),
        ({"use_sparse": False}, "sparse"),
        ({"use_mla": False}, "MLA"),
        ({"has_sink": True}, "sink"),
        ({"has_sliding_window": True}, "sliding"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "invarian"),
        ({"device_capability": DeviceCapability(7, 5)}, "capability"),
        ({"config": vllm_config(rotary=64), "head_size": 512, "kv_cache_dtype": "auto"}, "rotary"),
        *([] if NEW else [({"head_size": 512}, "0.26.0 writes no fp8_ds_mla records without rotary")]),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    reasons = capability(**changes)
    assert len(reasons) == 1 and reason.lower() in reasons[0].lower(), reasons


def test_shapes_and_pages() -> None:
    assert Backend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert Backend.get_kv_cache_shape(7, 128, 1, 512, "auto") == (7, 128, 512)
    assert Backend.get_preferred_block_size(16) == 64 and Backend.get_preferred_block_size(128) == 128


def test_the_impl_says_what_vllm_checks_for_context_parallelism() -> None:
    config = vllm_config(dcp=2)
    impl = make_impl(Backend, config, torch.zeros(8, TOPK, dtype=torch.int32), heads=128, scale=SCALE, rank=1)
    assert impl.need_to_return_lse_for_decode and impl.lse_base_on_e
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size and impl.supports_dcp and Backend.supports_pcp()
    assert (impl.dcp_world_size, impl.dcp_rank) == (2, 1)


@pytest.mark.parametrize("pcp", [1, 2])
def test_graphs(pcp: int) -> None:
    support = Backend.get_builder_cls().get_cudagraph_support(vllm_config(pcp=pcp), cache_spec(576, "fp8_ds_mla"))
    assert support is (AttentionCGSupport.ALWAYS if pcp == 1 else AttentionCGSupport.UNIFORM_BATCH)


# -- metadata


def builder(**changes: Any) -> Any:
    return make_builder(Backend, vllm_config(**changes), cache_spec(576, "fp8_ds_mla"))


def table(requests: int) -> torch.Tensor:
    return torch.arange(requests * 4, dtype=torch.int32).view(requests, 4)


def test_metadata_of_a_mixed_batch() -> None:
    made = builder(spec_tokens=2).build(0, common_metadata([3, 1, 20], [50, 9, 120], table(5)))
    assert (made.num_decodes, made.num_prefills, made.num_decode_tokens) == (2, 1, 4)
    assert made.req_id_per_token.tolist() == [0] * 3 + [1] + [2] * 20
    assert made.req_id_per_token.dtype == torch.int32 and made.block_table.shape == (3, 4)
    assert made.num_actual_tokens == 24 and made.prefill is None and made.gathers == ()


def test_prefills_never_take_the_layers_own_dense_attention() -> None:
    """0.26.0 takes it where prefill_max_seq_len <= topk_tokens."""
    made = builder().build(0, common_metadata([1, 5], [7, 5], table(2)))
    assert made.num_prefills == 1 and made.prefill_max_seq_len > made.topk_tokens
    assert not Backend.get_impl_cls().supports_dense_mha_prefill


def test_padding_belongs_to_nobody_and_buffers_stay() -> None:
    made = builder(spec_tokens=1)
    first = made.build(0, common_metadata([2, 2, 1], [9, 9, 9], table(4), padded_rows=8, padded_requests=4))
    assert first.req_id_per_token.tolist() == [0, 0, 1, 1, 2, 4, 4, 4] and first.block_table.shape[0] == 4
    address = first.req_id_per_token.data_ptr()
    second = made.build(0, common_metadata([1, 2], [9, 9], table(4), padded_rows=8, padded_requests=4))
    assert second.req_id_per_token.data_ptr() == address
    assert second.req_id_per_token.tolist() == [0, 1, 1, 4, 4, 4, 4, 4]
    assert second.num_decodes == 4 and second.num_prefills == 0


def test_drafts_and_other_groups_reuse_metadata() -> None:
    made = builder(spec_tokens=2)
    metadata = made.build_for_cudagraph_capture(common_metadata([2, 2], [9, 9], table(2), padded_rows=5))
    metadata.query_start_loc[1] = 1
    metadata.query_start_loc[2] = 2
    made.update_draft_decode_metadata(metadata)
    assert metadata.req_id_per_token.tolist() == [0, 1, 2, 2, 2]
    other = made.update_block_table(metadata, table(3) + 7, metadata.slot_mapping[:2])
    assert other.block_table.tolist() == (table(2) + 7).tolist() and other.slot_mapping.shape == (2,)
    assert other.req_id_per_token is metadata.req_id_per_token
    assert made.build_for_drafting(common_metadata([1, 1], [9, 9], table(2)), 0).num_decodes == 2


def test_short_tails_of_prefills_are_exchanged_under_pcp() -> None:
    lens = [1, 1, 9]
    common = common_metadata(lens, [9, 9, 9], table(3), prefilling=[False, True, True])
    assert builder(pcp=2).build(0, common).num_decode_tokens == 1
    assert builder().build(0, common).num_decode_tokens == 2


@pytest.mark.parametrize("dcp", [1, 2])
def test_decodes_are_told_by_their_length(dcp: int) -> None:
    assert builder(spec_tokens=3, dcp=dcp).reorder_batch_threshold == 4


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({}, 16),
        ({"dcp": 4}, 64),
        ({"pcp": 2}, 16),
        *([({"pcp": 2, "dcp": 2}, 16), ({"pcp": 2, "dcp": 4, "tp": 2}, 32)] if NEW else []),
    ],
    ids=str,
)
def test_kernels_are_there_for_every_size_that_is_captured(
    changes: dict[str, Any], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = warmup.sparse_mla_attention
    monkeypatch.setattr(warmup, "sparse_mla_attention", lambda q, *a, **k: seen.append(q.shape[:2]) or real(q, *a, **k))
    config = vllm_config(**{name: value for name, value in changes.items() if name != "tp"})
    config.parallel_config.tensor_parallel_size = changes.get("tp", 1)
    config.compilation_config.cudagraph_capture_sizes = [4, 1, 2]
    assert warmup.warm_up(config, cache_spec(576, "fp8_ds_mla"), torch.device("cpu")) == [1, 2, 4]
    assert seen == [(1, heads), (2, heads), (4, heads)]


# -- the forward


BATCHES = {
    "prefill": ([40, 7], [200, 7], {}),
    "decode": ([1, 1, 1], [300, 64, 1], {}),
    "mixed": ([1, 1, 30], [300, 65, 100], {}),
    "mtp": ([3, 2, 1, 3], [300, 65, 1, 130], {"spec_tokens": 2}),
    "mtp mixed": ([3, 1, 17], [129, 65, 90], {"spec_tokens": 2}),
}


def query(rows: int, heads: int, rotary: int, *, whole: bool) -> Any:
    """As vLLM's layer makes it: a pair whose latent part is a transposed product, or one tensor after a gather."""
    latent = (torch.randn(heads, rows, 512) * 0.3).to(torch.bfloat16).transpose(0, 1)
    projected = (torch.randn(rows, heads, 128 + rotary) * 0.3).to(torch.bfloat16)
    rope = projected[..., 128:]
    return torch.cat((latent, rope), dim=-1) if whole else (latent, rope)


def run(
    requests: Requests, *, heads: int, rotary: int = 64, whole: bool = False, rank: int = 0, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]]:
    """The real builder and impl on one rank; what they answer, and float64 over that rank's cache."""
    padded = changes.pop("padded_rows", None)
    cache_dtype = changes.pop("cache_dtype", "fp8_ds_mla")
    block_size, gap = changes.pop("block_size", BLOCK), changes.pop("gap_bytes", 0)
    q = changes.pop("q", None)
    config = vllm_config(heads=heads, rotary=rotary, cache_dtype=cache_dtype, **changes)
    parallel = config.parallel_config
    world, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
    fmt = "fp8_ds_mla" if cache_dtype == "fp8_ds_mla" else "bf16"
    rope_free_fp8 = fmt == "fp8_ds_mla" and rotary == 0
    cache, pages = requests.store(
        fmt, block_size=block_size, gap_bytes=gap, shard=(rank, world, interleave), rope_free=rope_free_fp8
    )
    rows = requests.indices.shape[0]
    total = rows if padded is None else padded
    buffer = torch.full((total + 3, TOPK), 0x7FC00000, dtype=torch.int32)
    buffer[:rows] = requests.indices
    common = common_metadata(
        requests.query_lens,
        requests.seq_lens,
        torch.nn.functional.pad(pages, (0, 3), value=-1),
        padded_rows=total,
        padded_requests=len(requests.query_lens) if padded is None else len(requests.query_lens) + 2,
    )
    if padded is not None:
        common.block_table_tensor = torch.cat((common.block_table_tensor, common.block_table_tensor[:2]))
    spec = cache_spec(512 + rotary, cache_dtype, block_size)
    with context_group(rank, world):
        metadata = make_builder(Backend, config, spec).build(0, common)
    impl = make_impl(Backend, config, buffer, heads=heads, scale=SCALE, rank=rank)
    if q is None:
        q = query(total, heads, rotary, whole=whole)
    out, lse = impl.forward_mqa(q, cache.data, metadata, SimpleNamespace())
    part = q if isinstance(q, torch.Tensor) else torch.cat(q, dim=-1)
    if part.shape[-1] < cache.d_qk:
        part = torch.nn.functional.pad(part, (0, cache.d_qk - part.shape[-1]))
    want = reference_attention(
        part[:rows],
        cache,
        requests.indices,
        softmax_scale=SCALE,
        block_table=pages,
        request_ids=requests.owners,
        context_shard=(rank, world, interleave) if world > 1 else None,
    )
    assert out.shape == (total, heads, 512) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert not out[rows:].any()
    return out[:rows], None if lse is None else lse, want


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "auto"])
def test_forward(batch: str, cache_dtype: str) -> None:
    query_lens, seq_lens, changes = BATCHES[batch]
    requests = Requests.draw(query_lens, seq_lens, 576)
    out, lse, want = run(requests, heads=16, cache_dtype=cache_dtype, **changes)
    assert lse is None
    assert relative_error(out, want[0]) < 3e-3
    assert not out[requests.query_lens[0] - 1].any(), "a row without keys"


@pytest.mark.parametrize("heads", [1, 8, 128])
@pytest.mark.parametrize("whole", [False, True])
def test_any_number_of_heads_and_both_kinds_of_query(heads: int, whole: bool) -> None:
    requests = Requests.draw([1, 4], [70, 30], 576)
    out, _, want = run(requests, heads=heads, whole=whole)
    assert relative_error(out, want[0]) < 3e-3


@pytest.mark.parametrize(("block_size", "gap"), [(64, 64 * 132), (128, 0), (256, 4096)])
def test_pages_as_they_lie(block_size: int, gap: int) -> None:
    requests = Requests.draw([1, 9], [300, 150], 576)
    out, _, want = run(requests, heads=8, block_size=block_size, gap_bytes=gap)
    assert relative_error(out, want[0]) < 3e-3


@pytest.mark.parametrize("batch", ["decode", "mtp"])
def test_padded_graph_batches(batch: str) -> None:
    query_lens, seq_lens, changes = BATCHES[batch]
    requests = Requests.draw(query_lens, seq_lens, 576)
    out, _, want = run(requests, heads=16, padded_rows=sum(query_lens) + 5, **changes)
    assert relative_error(out, want[0]) < 3e-3


@pytest.mark.parametrize("cache_dtype", ["auto", *(["fp8_ds_mla"] if NEW else [])])
@pytest.mark.parametrize("whole", [False, True])
def test_models_without_rotary_columns(cache_dtype: str, whole: bool) -> None:
    requests = Requests.draw([1, 9], [130, 80], 512)
    out, _, want = run(requests, heads=16, rotary=0, cache_dtype=cache_dtype, whole=whole)
    assert relative_error(out, want[0]) < 3e-3


@pytest.mark.parametrize("batch", ["prefill", "mixed", "mtp"])
@pytest.mark.parametrize(("world", "interleave", "heads"), [(2, 1, 16), (4, 16, 64), (8, 64, 128)])
def test_context_shards_merge_to_the_whole(batch: str, world: int, interleave: int, heads: int) -> None:
    """The query holds the heads of all ranks, as vLLM gathers it."""
    query_lens, seq_lens, changes = BATCHES[batch]
    requests = Requests.draw(query_lens, seq_lens, 576)
    q = query(sum(query_lens), heads, 64, whole=True)
    _, _, want = run(requests, heads=heads, q=q, **changes)
    parts = []
    for rank in range(world):
        out, lse, local = run(requests, heads=heads, q=q, rank=rank, dcp=world, interleave=interleave, **changes)
        assert lse is not None and lse.dtype == torch.float32 and lse.shape == out.shape[:2]
        lonely = torch.isneginf(local[1])
        assert torch.equal(torch.isneginf(lse), lonely) and not out[lonely].any()
        assert torch.allclose(lse.double(), local[1], atol=1e-4, rtol=0)
        parts.append((out, lse))
    assert relative_error(merged(parts), want[0]) < 3e-3


def test_prefill_and_decode_context_parallelism_together() -> None:
    """Two ranks with prefill rows of their own, decodes in common. 0.26.0's layer would add up different rows."""
    world, interleave, heads = 2, 4, 16
    changes: dict[str, Any] = {"dcp": world, "pcp": 2, "interleave": interleave, "max_model_len": 160}
    if not NEW:
        with pytest.raises(UnsupportedVllmError, match=r"0\.26\.0.*0\.33\.0"):
            builder(**changes)
        with pytest.raises(UnsupportedVllmError, match="prefill_context_parallel_size 2"):
            make_impl(Backend, vllm_config(**changes), torch.zeros(1, TOPK), heads=8, scale=SCALE)
        return
    # Requests: two decodes, then prefills whose rows are dealt out: a rank has two chunks of each.
    requests = Requests.draw([1, 1, 8, 8, 12], [150, 31, 60, 159, 12], 576)
    starts = [0, 1, 2, 10, 18, 30]
    chunks = [
        [(2, [(0, 2), (6, 8)]), (3, [(0, 2), (6, 8)]), (4, [(0, 3), (9, 12)])],
        [(2, [(2, 4), (4, 6)]), (3, [(2, 4), (4, 6)]), (4, [(3, 6), (6, 9)])],
    ]
    config = vllm_config(heads=heads, **changes)
    q = query(30, heads, 64, whole=True)
    caches = [requests.store("fp8_ds_mla", shard=(rank, world, interleave)) for rank in range(world)]
    whole_cache, whole_table = requests.store("fp8_ds_mla")
    want, _ = reference_attention(
        q, whole_cache, requests.indices, softmax_scale=SCALE, block_table=whole_table, request_ids=requests.owners
    )
    most = [-(-tokens // (world * interleave)) * interleave for tokens in requests.seq_lens]
    decode_parts, plans = [], []
    for rank in range(world):
        names, lens, rows = [0, 1], [1, 1], [0, 1]
        for request, pieces in chunks[rank]:
            for begin, end in pieces:
                names.append(request)
                lens.append(end - begin)
                rows += range(starts[request] + begin, starts[request] + end)
        cache, pages = caches[rank]
        common = common_metadata(
            lens,
            [requests.seq_lens[name] for name in names],
            pages[names],
            prefilling=[name > 1 for name in names],
            request_names=names,
            most_shards=[most[name] for name in names],
        )
        metadata = make_builder(Backend, config, cache_spec(576, "fp8_ds_mla")).build(0, common)
        plans.append((metadata, rows, cache))
    assert len(plans[0][0].gathers) >= 2, "more records than one gather may take"
    sizes = [[gather.slots.shape[0] for gather in metadata.gathers] for metadata, _, _ in plans]
    assert sizes[0] == sizes[1] and max(sizes[0]) <= 80
    for rank, (metadata, rows, cache) in enumerate(plans):
        buffer = torch.full((40, TOPK), 0x7FC00000, dtype=torch.int32)
        buffer[: len(rows)] = requests.indices[rows]
        impl = make_impl(Backend, config, buffer, heads=heads, scale=SCALE, rank=rank)
        turn = iter(range(len(metadata.gathers)))

        def all_gather(pool: torch.Tensor, shard: torch.Tensor, *, turn: Any = turn, rank: int = rank) -> None:
            step = next(turn)
            shards = [their.gather_bytes(plan.gathers[step].slots) for plan, _, their in plans]
            assert torch.equal(shards[rank], shard)
            pool.copy_(torch.cat(shards))

        impl._all_gather = all_gather
        out, lse = impl.forward_mqa(q[rows], cache.data, metadata, None)
        assert next(turn, None) is None and lse.shape == (2, heads)
        assert relative_error(out[2:], want[rows[2:]]) < 3e-3
        decode_parts.append((out[:2], lse))
        impl.reserve_workspace()
    assert relative_error(merged(decode_parts), want[:2]) < 3e-3


def test_the_indexers_buffer_counts_whichever_it_is_now() -> None:
    old, new = (torch.zeros(4, TOPK, dtype=torch.int32) for _ in range(2))
    indexer = SimpleNamespace(topk_indices_buffer=old)
    impl = make_impl(Backend, vllm_config(), torch.zeros(1, 1), heads=8, scale=SCALE, indexer=indexer)
    assert impl.topk_indices_buffer is old
    indexer.topk_indices_buffer = new
    assert impl.topk_indices_buffer is new
    impl.topk_indices_buffer = old
    assert impl.topk_indices_buffer is old


def test_nothing_is_reserved_in_vllms_workspace() -> None:
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    try:
        out, _, want = run(Requests.draw([1, 30], [300, 100], 576), heads=16)
        assert relative_error(out, want[0]) < 3e-3
        manager = workspace.current_workspace_manager()
        assert [manager._workspace_size_bytes(buffer) for buffer in manager._current_workspaces] == [0]
    finally:
        workspace.reset_workspace_manager()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"attn_type": "encoder"}, "attn_type"),
        ({"kv_lora_rank": 256}, "kv_lora_rank"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
    ids=str,
)
def test_layers_that_are_not_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}.*got.*accepted"):
        make_impl(Backend, vllm_config(), torch.zeros(1, 1), heads=8, scale=SCALE, **changes)


def test_a_host_cache_and_a_missing_buffer_are_refused() -> None:
    config = vllm_config()
    config.attention_config.hisparse_config = object()
    with pytest.raises(UnsupportedVllmError, match="hisparse_config"):
        make_impl(Backend, config, torch.zeros(1, 1), heads=8, scale=SCALE)
    requests = Requests.draw([1], [9], 576)
    cache, pages = requests.store("fp8_ds_mla")
    impl = make_impl(Backend, vllm_config(), None, heads=8, scale=SCALE)
    metadata = builder().build(0, common_metadata([1], [9], pages))
    with pytest.raises(ValueError, match="topk_indices_buffer"):
        impl.forward_mqa(query(1, 8, 64, whole=False), cache.data, metadata, None)
