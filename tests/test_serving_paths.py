# SPDX-License-Identifier: Apache-2.0
"""The decision and what follows from it: paths, refusals, reservations, the published memory table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsemla.formats import KVFormat
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.paths import Path, PathKind, PathMismatchError, Policy, decide, require_same
from sparsemla.serving.reservations import Reservation, reservations_for, taken_together

PUBLISHED = ServingConfig(
    ModelGeometry.preset("glm-5.3"),
    Parallelism(tp=4, dcp=4),
    ServingLimits(max_model_len=786_432, max_num_batched_tokens=8192, max_num_seqs=32, spec_tokens=3),
)


def with_heads(heads: int, *, dcp: int = 1, pcp: int = 1, host_cache: bool = False, **limits) -> ServingConfig:
    """A GLM-5.3 deployment with that many heads a rank."""
    return ServingConfig(
        ModelGeometry.preset("glm-5.3"),
        Parallelism(tp=64 // heads, dcp=dcp, pcp=pcp),
        ServingLimits(max_model_len=65_536, max_num_seqs=32, **limits),
        host_cache=host_cache,
    )


def names(config: ServingConfig, policy: str) -> dict[str, Reservation]:
    return {item.name: item for item in reservations_for(config, decide(config, policy))}


def test_published_table_to_the_byte() -> None:
    path = decide(PUBLISHED, "flashmla")
    assert path.kind is PathKind.MIXED_FP8
    items = reservations_for(PUBLISHED, path)
    assert [(item.name, item.shape, item.nbytes, item.ever_read) for item in items] == [
        ("query_concat", (8192, 16, 576), 150_994_944, True),
        ("prefill_kv", (1_572_864, 576), 1_811_939_328, False),
        ("padded_query", (8192, 64, 576), 603_979_776, True),
        ("padded_output", (8192, 64, 512), 536_870_912, True),
        ("compact_output", (8192, 16, 512), 134_217_728, True),
    ]
    assert {item.dtype_name for item in items} == {"bfloat16"}
    assert taken_together(items) == 3_238_002_688
    assert items[1].read_by == "nobody"
    gated = reservations_for(PUBLISHED, decide(PUBLISHED, "flashmla-gated"))
    assert taken_together(gated) == 3_238_002_688 - 1_811_939_328
    assert all(item.ever_read for item in gated)


def test_policy_sparsemla_reserves_nothing() -> None:
    for config in (with_heads(16), with_heads(64), with_heads(32, pcp=2), with_heads(16, host_cache=True)):
        assert reservations_for(config, decide(config, "sparsemla")) == ()


def sizes(config: ServingConfig) -> dict[str, int]:
    items = reservations_for(config, decide(config, "sparsemla"))
    assert all(item.ever_read for item in items)
    return {item.name: item.nbytes for item in items}


def test_policy_sparsemla_reserves_what_travels_between_ranks() -> None:
    rows = 512
    query, output = rows * 64 * 576 * 2, rows * 64 * 514 * 2
    assert sizes(PUBLISHED) == {
        "exchange_received": query,
        "exchange_sent": query,
        "exchange_lse": rows * 16 * (4 + 16) * 4,
    }
    by_message = replace(PUBLISHED, parallel=Parallelism(tp=4, dcp=4, dcp_comm="a2a"))
    assert sizes(by_message) == {"exchange_received": query, "exchange_sent": query, "exchange_lse": rows * 64 * 4}
    # The dcp ranks have the same heads: no query travels, and the records of one request come together.
    assert sizes(with_heads(32, dcp=2, pcp=2)) == {
        "exchange_lse": rows * 32 * 2 * 4,
        "gathered_records": 65_536 * 656,
    }
    same_heads = replace(with_heads(32), parallel=Parallelism(tp=2, dcp=2, pcp=2, dcp_comm="a2a"))
    assert sizes(same_heads)["exchange_received"] == output and "exchange_lse" not in sizes(same_heads)


def test_deepseek_v32_prefill_buffer() -> None:
    config = ServingConfig(
        ModelGeometry.preset("deepseek-v3.2"), Parallelism(tp=2), ServingLimits(max_model_len=163_840)
    )
    path = decide(config, Policy.FLASHMLA_GATED)
    assert path.kind is PathKind.SEPARATE
    assert names(config, "flashmla-gated")["prefill_kv"].nbytes == 943_718_400


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("host_cache", [False, True])
@pytest.mark.parametrize("pcp_dcp", [False, True])
def test_prefill_buffer_exactly_where_it_is_read(heads: int, host_cache: bool, pcp_dcp: bool) -> None:
    shards = 2 if pcp_dcp else 1
    config = with_heads(heads, dcp=shards, pcp=shards, host_cache=host_cache)
    path = decide(config, "flashmla")
    expected = (
        PathKind.GATHERED
        if pcp_dcp
        else PathKind.HOST
        if host_cache
        else PathKind.MIXED_FP8
        if heads == 16
        else PathKind.SEPARATE
    )
    assert path.kind is expected
    read = expected is not PathKind.MIXED_FP8
    rows = 5 * 65_536
    assert path.copies_prefill_kv is read
    published, gated = names(config, "flashmla"), names(config, "flashmla-gated")
    assert published["prefill_kv"].ever_read is read
    assert ("prefill_kv" in gated) is read
    assert published["prefill_kv"].shape == (rows // shards, 576)
    assert ("gathered_kv" in gated) is pcp_dcp
    if pcp_dcp:
        assert gated["gathered_kv"].shape == (rows, 576)
        assert gated["prefill_kv"].read_by == "DCP all-gather"
    assert set(names(config, "sparsemla")) == ({"exchange_lse", "gathered_records"} if pcp_dcp else set())


def test_padding_follows_the_heads() -> None:
    assert "padded_query" not in names(with_heads(64), "flashmla")
    assert names(with_heads(64), "flashmla")["query_concat"].read_by == "attention kernel"
    assert names(with_heads(8), "flashmla")["padded_query"].shape == (8192, 64, 576)
    assert names(with_heads(32, arch="sm100"), "flashmla")["padded_query"].shape == (8192, 128, 576)


def test_bf16_cache_is_read_in_place() -> None:
    config = with_heads(16, cache_format=KVFormat.BF16)
    assert decide(config, "flashmla").kind is PathKind.BF16
    items = names(config, "flashmla")
    assert set(items) == {"query_concat", "padded_output", "compact_output"}
    assert items["query_concat"].shape == (8192, 64, 576)
    assert all(item.ever_read for item in items.values())


@pytest.mark.parametrize("policy", ["flashmla", "flashmla-gated"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_heads(32, dcp=2), "dcp: got 2 with 32 heads a rank"),
        (with_heads(16, dcp=2, host_cache=True), "dcp: got 2 with a host cache"),
        (with_heads(16, dcp=2, cache_format=KVFormat.BF16), "accepted under policy .* is an fp8_ds_mla cache"),
        (replace(PUBLISHED, parallel=Parallelism(tp=4, dcp=4, dcp_comm="a2a")), "dcp_comm: got 'a2a'"),
        (
            ServingConfig(
                ModelGeometry.preset("deepseek-v3.2"), Parallelism(tp=8, dcp=8), ServingLimits(max_model_len=1000)
            ),
            "16 heads a rank pad to 64, the 128 heads gathered over 8 ranks to 128",
        ),
        (
            ServingConfig(ModelGeometry.preset("deepseek-v4"), Parallelism(), ServingLimits(max_model_len=1000)),
            "does not serve cache format fp8_v4",
        ),
    ],
)
def test_published_refusals_and_none_of_ours(policy: str, config: ServingConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decide(config, policy)
    assert decide(config, "sparsemla").kind is PathKind.IN_PLACE


def test_a_reservation_nobody_reads_cannot_be_made() -> None:
    gated = decide(PUBLISHED, "flashmla-gated")
    with pytest.raises(ValueError, match=r"'prefill_kv' is never read on path mixed_fp8 \(policy flashmla-gated\)"):
        Reservation(gated, "prefill_kv", (8, 576))
    with pytest.raises(ValueError, match="never read on path in_place"):
        Reservation(decide(PUBLISHED, "sparsemla"), "query_concat", (8, 16, 576))
    with pytest.raises(ValueError, match="name: got 'scratch'"):
        Reservation(gated, "scratch", (8,))
    assert not Reservation(decide(PUBLISHED, "flashmla"), "prefill_kv", (8, 576)).ever_read


def test_paths_are_values() -> None:
    first, second = decide(PUBLISHED, "flashmla"), decide(PUBLISHED, Policy.FLASHMLA)
    assert first == second and hash(first) == hash(second)
    require_same(first, second)
    with pytest.raises(AttributeError):
        first.heads = 8  # type: ignore[misc]


def test_mismatch_names_both_paths() -> None:
    backend, other = decide(PUBLISHED, "flashmla"), decide(with_heads(32), "flashmla")
    with pytest.raises(PathMismatchError) as caught:
        require_same(backend, other)
    message = str(caught.value)
    assert str(backend) in message and str(other) in message
    assert "kind separate against mixed_fp8" in message


def test_lowering_the_length_keeps_the_path_of_the_start() -> None:
    start = with_heads(32)
    lowered = replace(start, limits=start.limits.lowered(1000))
    assert decide(lowered, "flashmla").prefill_rows == 5000
    assert decide(start, "flashmla").prefill_rows == 5 * 65_536


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="policy: got 'vllm', accepted are flashmla, flashmla-gated, sparsemla"):
        decide(PUBLISHED, "vllm")


def test_every_field_of_a_path_is_shown_or_compared() -> None:
    path: Path = decide(PUBLISHED, "flashmla")
    assert path.returns_lse and not decide(with_heads(16), "flashmla").returns_lse
    assert "16 heads padded to 64" in str(path)
