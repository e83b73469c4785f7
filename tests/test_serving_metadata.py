# SPDX-License-Identifier: Apache-2.0
"""A step's metadata: decodes first, padding rows, chunks of prefills that fit the workspace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.metadata import (
    Batch,
    MetadataBuilder,
    copy_page_rows,
    count_decodes,
    decodes_first,
    local_length,
    split_into_chunks,
)
from sparsemla.serving.paths import PathKind, decide


def builder(
    policy: str = "flashmla", *, tp: int = 1, dcp: int = 1, pcp: int = 1, rank: int = 0, **limits: int
) -> MetadataBuilder:
    settings = {"max_model_len": 200, "max_num_batched_tokens": 64, "max_num_seqs": 8, "spec_tokens": 1} | limits
    config = ServingConfig(
        ModelGeometry.preset("glm-5.3"), Parallelism(tp=tp, dcp=dcp, pcp=pcp), ServingLimits(**settings)
    )
    return MetadataBuilder(config, decide(config, policy), rank=rank)


def table(requests: int, pages: int = 4) -> torch.Tensor:
    return torch.arange(requests * pages, dtype=torch.int32).view(requests, pages)


def test_decodes_come_first() -> None:
    assert count_decodes([1, 2, 1, 5, 1], 2) == 3
    assert count_decodes([], 1) == 0 and count_decodes([1, 1], 1) == 2 and count_decodes([9], 1) == 0
    order = decodes_first([5, 1, 9, 2], 2)
    assert order == [1, 3, 0, 2]


def test_rows_and_requests() -> None:
    made = builder().build(Batch([2, 1, 7, 4], [50, 3, 7, 100], table(6), padded_tokens=20))
    assert (made.num_requests, made.num_decodes, made.num_prefills) == (4, 2, 2)
    assert (made.num_decode_tokens, made.num_tokens, made.num_prefill_tokens) == (3, 14, 11)
    assert (made.max_query_len, made.max_seq_len, made.padded_tokens) == (7, 100, 20)
    assert made.request_ids.tolist() == [0, 0, 1] + [2] * 7 + [3] * 4 + [-1] * 6
    assert made.block_table.shape == (4, 4)


def test_buffers_keep_their_address() -> None:
    build = builder("sparsemla")
    first = build.build(Batch([1, 1], [5, 5], table(2), padded_tokens=4))
    address = first.request_ids.data_ptr()
    second = build.build(Batch([1], [6], table(1), padded_tokens=4))
    assert second.request_ids.data_ptr() == address
    assert first.request_ids.tolist() == [0, -1, -1, -1]  # what a captured graph reads on replay


def test_empty_batch_and_requests_without_query_tokens() -> None:
    made = builder().build(Batch([], [], table(0), padded_tokens=3))
    assert made.num_tokens == 0 and made.request_ids.tolist() == [-1, -1, -1] and made.chunks == ()
    assert builder().build(Batch([0, 1], [4, 4], table(2))).request_ids.tolist() == [1]


def test_chunks_fit_the_workspace() -> None:
    build = builder(prefill_factor=1)  # 200 rows: page rows of 8
    assert build.path.kind is PathKind.SEPARATE and copy_page_rows(build.path) == 8
    made = build.build(Batch([2, 5, 6, 7, 8], [9, 100, 90, 130, 61], table(5)))
    assert [(c.first_request, c.end_request, c.tokens) for c in made.chunks] == [
        (1, 3, slice(2, 13)),
        (3, 5, slice(13, 28)),
    ]
    first, second = made.chunks
    assert (first.starts, first.ends, first.local_lens, first.rows) == ((0, 104), (104, 200), (100, 90), 200)
    assert (second.starts, second.rows) == ((0, 136), 200)
    assert first.request_ids.tolist() == [0] * 5 + [1] * 6
    assert first.block_table.tolist() == [list(range(13)), [*range(13, 25), -1]]


def test_the_longest_request_always_fits() -> None:
    for length in (1, 7, 64, 97, 200):
        for factor in (1, 2, 5):
            build = builder(max_model_len=length, prefill_factor=factor, spec_tokens=0)
            query = min(length, 64)
            made = build.build(Batch([query], [length], table(1, 8)))
            assert len(made.chunks) == (1 if query > 1 else 0)


def test_in_place_and_mixed_paths_have_no_chunks() -> None:
    batch = Batch([1, 9], [4, 90], table(2))
    assert builder("sparsemla").build(batch).chunks == ()
    assert builder("flashmla", tp=4).build(batch).chunks == ()


def test_gathered_chunks_are_the_same_on_every_rank() -> None:
    made = [
        builder(tp=2, pcp=2, dcp=2, rank=rank).build(Batch([1, 9, 5], [4, 91, 50], table(3))).chunks for rank in (0, 1)
    ]
    for chunks in made:
        assert [(c.rows, c.starts, c.ends) for c in chunks] == [(71, (0, 46), (46, 71))]
        rows = chunks[0].block_table.tolist()  # rank 1's rows follow the 71 of rank 0
        assert rows[0] == [p // 2 + (71 if p % 2 else 0) for p in range(91)]
        assert rows[1] == [46 + p // 2 + (71 if p % 2 else 0) for p in range(50)] + [-1] * 41
    assert [chunks[0].local_lens for chunks in made] == [(46, 25), (45, 25)]


@given(tokens=st.integers(0, 300), world=st.integers(1, 5), interleave=st.integers(1, 16))
def test_local_lengths_deal_out_every_token(tokens: int, world: int, interleave: int) -> None:
    lengths = [local_length(tokens, rank, world, interleave) for rank in range(world)]
    assert sum(lengths) == tokens and lengths[0] == max(lengths)
    held = [sum(1 for p in range(tokens) if p // interleave % world == rank) for rank in range(world)]
    assert lengths == held


@given(rows=st.lists(st.integers(0, 10), max_size=20), capacity=st.integers(10, 20))
def test_chunks_are_consecutive_and_complete(rows: list[int], capacity: int) -> None:
    chunks = split_into_chunks(rows, capacity)
    assert [i for begin, end in chunks for i in range(begin, end)] == list(range(len(rows)))
    assert all(sum(rows[begin:end]) <= capacity and end > begin for begin, end in chunks)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch([1], [2, 3], table(2)), "seq_lens: got 2 requests"),
        (Batch([3], [2], table(1)), "got 2 tokens with 3 query tokens"),
        (Batch([1], [201], table(1)), "at most max_model_len = 200"),
        (Batch([1, 1], [2, 2], table(1)), r"block_table: got shape \(1, 4\)"),
        (Batch([1], [2], table(1).long()), "torch.int64"),
        (Batch([2], [2], table(1), padded_tokens=1), "padded_tokens: got 1 for 2 query tokens"),
        (Batch([65], [65], table(1)), "max_num_batched_tokens = 64"),
        (Batch([1], [1], table(1), num_decodes=2), "num_decodes: got 2, accepted are 0 to 1"),
    ],
)
def test_contradictions(batch: Batch, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        builder().build(batch)


def test_rank_and_capacity_errors() -> None:
    with pytest.raises(ValueError, match="rank: got 2, accepted are 0 to 1"):
        builder("sparsemla", tp=2, dcp=2, rank=2)
    with pytest.raises(ValueError, match="takes 9 rows of the prefill workspace, accepted are 8"):
        split_into_chunks([9], 8)
