# SPDX-License-Identifier: Apache-2.0
"""From memory to tokens: exact bytes a token, whole pages, the published gain."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemla.formats import KVFormat
from sparsemla.serving.capacity import MemoryMeter, MemoryProfile, kv_budget, kv_geometry, workspace_size
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.plan import Comparison, make_plan

GPU = 150_754_820_096
WEIGHTS = 123_600_000_000
OTHER = {"other users": 1_745_879_040}


def published(**limits) -> ServingConfig:
    return ServingConfig(
        ModelGeometry.preset("glm-5.3"),
        Parallelism(tp=4, dcp=4),
        ServingLimits(
            **{
                "max_model_len": 786_432,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 32,
                "spec_tokens": 3,
                "utilization": 0.945,
            }
            | limits
        ),
    )


def test_published_bytes_a_token() -> None:
    geometry = kv_geometry(published())
    assert geometry.bytes_per_token_per_rank == 13_682
    assert geometry.bytes_per_page == 64 * (79 * 656 + 22 * 132)
    assert geometry.tokens_per_page == 256
    assert [(g.layers, g.record_bytes) for g in geometry.groups] == [(79, 656), (22, 132)]


def test_published_totals_and_gain() -> None:
    profile = MemoryProfile(GPU, WEIGHTS)
    before, after, ours = (
        make_plan(published(), policy, profile=profile, other_users=OTHER)
        for policy in ("flashmla", "flashmla-gated", "sparsemla")
    )
    assert before.workspace.total_bytes == 3_238_002_688
    assert before.never_read_bytes == 1_811_939_328
    assert after.workspace.total_bytes == ours.workspace.total_bytes == 1_745_879_040
    assert ours.workspace.attention_bytes == 76_152_832  # what travels between the ranks, 512 rows at a time
    comparison = Comparison(before, after)
    assert comparison.bytes_saved == before.wasted_bytes == 1_492_123_648
    assert comparison.kv_tokens_gained == 109_056
    assert Comparison(after, before).kv_tokens_gained == -109_056
    # The weights are chosen so that the published figures of a server come out.
    assert before.budget is not None and after.budget is not None
    assert (before.budget.tokens, after.budget.tokens) == (1_142_016, 1_251_072)
    assert before.budget.requests == 1 and before.budget.concurrency == Fraction(4461, 3072)


@given(spare=st.integers(min_value=0, max_value=4 * 3_502_592))
def test_gain_does_not_depend_on_the_memory_and_is_within_a_page_of_the_plans(spare: int) -> None:
    profile = MemoryProfile(GPU, WEIGHTS - spare)
    before, after = (
        make_plan(published(), policy, profile=profile, other_users=OTHER) for policy in ("flashmla", "flashmla-gated")
    )
    assert Comparison(before, after).kv_tokens_gained == 109_056
    assert before.budget is not None and after.budget is not None
    assert after.budget.tokens - before.budget.tokens in (109_056, 109_312)


def test_explicit_kv_bytes() -> None:
    config = published()
    page = kv_geometry(config).bytes_per_page
    budget = kv_budget(config, kv_bytes=5000 * page + page - 1)
    assert (budget.pages, budget.tokens) == (5000, 5000 * 256)
    plans = [make_plan(config, policy, kv_bytes=5000 * page) for policy in ("flashmla", "sparsemla")]
    comparison = Comparison(*plans)
    assert comparison.bytes_saved == 3_238_002_688 - 76_152_832 and comparison.kv_tokens_gained == 0
    with pytest.raises(ValueError, match="accepted are at most the"):
        kv_budget(config, kv_bytes=GPU, profile=MemoryProfile(GPU, WEIGHTS))


def test_no_room_for_one_request() -> None:
    with pytest.raises(ValueError, match=r"one request of 786,432 tokens takes 10,759,962,624 bytes of cache a rank"):
        make_plan(published(), "flashmla", profile=MemoryProfile(GPU, GPU - 20_000_000_000))
    with pytest.raises(ValueError, match=r"-\d[\d,]* are left; accepted is up to 0 tokens"):
        kv_budget(published(), profile=MemoryProfile(GPU, GPU), workspace_bytes=1)
    with pytest.raises(ValueError, match="neither a memory profile nor kv_bytes"):
        kv_budget(published())


def test_utilization_is_the_decimal_that_was_written() -> None:
    assert MemoryProfile(1000, 0).left(0.1, 0) == 100
    assert MemoryProfile(10**12, 0).left(0.945, 1) == 945 * 10**9 - 1
    profile = MemoryProfile(1000, 100, activation_bytes=50, overhead_bytes=25)
    assert profile.left(0.9, 200) == 900 - 100 - 50 - 25 - 200


def test_v4_counts_records_windows_and_page_padding() -> None:
    model = ModelGeometry.preset("deepseek-v4")
    config = ServingConfig(model, Parallelism(), ServingLimits(max_model_len=1024, max_num_seqs=4, block_size=256))
    geometry = kv_geometry(config)
    # 64 records of 584 bytes round up to 65 · 576; 2 records to 3 · 576; an indexer keeps 64 records of 132 a page.
    per_page = 21 * 65 * 576 + 20 * 3 * 576 + 21 * 64 * 132
    assert geometry.bytes_per_page == per_page
    # a window of 128 tokens touches at most three pages of 64 records
    assert geometry.bytes_per_request == 43 * 3 * 65 * 576
    assert geometry.bytes_per_token_per_rank == Fraction(per_page, 256)
    budget = kv_budget(config, kv_bytes=4 * geometry.bytes_per_request + 10 * per_page)
    assert (budget.pages, budget.window_bytes) == (10, 4 * geometry.bytes_per_request)
    small = ServingConfig(model, Parallelism(), ServingLimits(max_model_len=1024, max_num_seqs=4))
    with pytest.raises(ValueError, match=r"block_size: got 64 for deepseek-v4.* multiples of 128"):
        kv_geometry(small)


def test_bf16_cache_costs_its_own_bytes() -> None:
    config = ServingConfig(
        ModelGeometry.preset("deepseek-v3.2"),
        Parallelism(tp=8),
        ServingLimits(max_model_len=4096, cache_format=KVFormat.BF16),
    )
    assert kv_geometry(config).bytes_per_token_per_rank == 61 * 1152 + 61 * 132


def test_the_largest_user_decides() -> None:
    size = workspace_size((), {"moe": 1000, "indexer": 3000})
    assert size.total_bytes == 3072 and size.decided_by == "indexer"
    assert workspace_size(()).total_bytes == 0 and workspace_size(()).decided_by == "nobody"
    with pytest.raises(ValueError, match="others: got -1 bytes for moe"):
        workspace_size((), {"moe": -1})


def test_measuring_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="device: got cpu, accepted is a CUDA device"):
        MemoryMeter("cpu")


@pytest.mark.gpu
def test_measured_profile_counts_what_a_step_takes() -> None:
    weights = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    meter = MemoryMeter("cuda")
    with meter.step():
        scratch = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del scratch
    profile = meter.profile(workspace_bytes=16 << 20)
    assert profile.weights_bytes >= weights.numel()
    assert profile.activation_bytes == (64 - 16) << 20
    assert profile.total_bytes == torch.cuda.mem_get_info()[1]


def test_what_lies_outside_the_workspace_is_said() -> None:
    theirs, ours = (make_plan(published(), policy) for policy in ("flashmla", "sparsemla"))
    assert theirs.kernel_bytes == 2 * 8192 * 64 * 513 * 4  # the 2052 MiB measured for one call of 8192 tokens
    assert ours.kernel_bytes == 0
    assert theirs.answer_bytes == 8192 * 64 * 4
    assert ours.answer_bytes == 8192 * 16 * (512 * 2 + 4)
    # Gathered queries twice and weighed outputs in place of them; the log-sum-exps of 4 ranks for 64 heads each.
    assert theirs.exchange_bytes == 8192 * 16 * (2 * 4 * 576 * 2 + 20 * 4) and ours.exchange_bytes == 0
    separate = make_plan(
        ServingConfig(ModelGeometry.preset("glm-5"), Parallelism(), ServingLimits(max_model_len=1000, max_num_seqs=8)),
        "flashmla-gated",
    )
    assert separate.kernel_bytes == (8 + 132) * 64 * 513 * 4
