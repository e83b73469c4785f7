# SPDX-License-Identifier: Apache-2.0
"""The split-KV plan: the recorded plans, the published memory table, and that every block is worked on exactly once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generators import GOLDEN_NAMES, load_golden
from sparsemla.schedule import (
    BEGIN_REQUEST,
    BLOCK_KEYS,
    END_REQUEST,
    FIRST_IS_SPLIT,
    LAST_IS_SPLIT,
    SM90,
    SM100,
    UNUSED,
    SplitSchedule,
    accumulator_bytes,
    memory_table,
)

DECODE = [name for name in GOLDEN_NAMES if str(load_golden(name).raw["kind"]) == "decode"]


def recorded_plan(raw: dict[str, Any]) -> SplitSchedule:
    """Our plan for a recorded call."""
    requests, rows, heads, _ = raw["q"].shape
    return SplitSchedule.plan(
        requests=requests,
        rows_per_request=rows,
        heads=heads,
        topk=raw["indices"].shape[-1],
        topk_lengths=raw.get("topk_length"),
        extra_topk=raw["extra_indices"].shape[-1] if "extra_indices" in raw else 0,
        extra_topk_lengths=raw.get("extra_topk_length"),
    )


def test_there_are_recorded_plans() -> None:
    assert len(DECODE) == 4


@pytest.mark.parametrize("name", DECODE)
def test_recorded_plans_are_reproduced(name: str) -> None:
    raw = load_golden(name).raw
    plan = recorded_plan(raw)
    assert plan.sched_meta.dtype == plan.num_splits.dtype == np.int32
    np.testing.assert_array_equal(plan.sched_meta[:, :UNUSED], raw["sched_meta"][:, :UNUSED])
    np.testing.assert_array_equal(plan.num_splits, raw["num_splits"])
    meta, splits = plan.tensors("cpu")
    np.testing.assert_array_equal(meta.numpy(), plan.sched_meta)
    np.testing.assert_array_equal(splits.numpy(), plan.num_splits)


def test_published_memory_table() -> None:
    table = {(row.heads, row.tokens): row for row in memory_table()}
    published = {
        64: {1: 16.7, 8: 17.0, 128: 32.1, 1024: 256.5, 8192: 2052, 32768: 8208},
        128: {1: 16.8, 8: 18.0, 128: 64.1, 1024: 513, 8192: 4104},
    }
    assert set(table) == {(heads, tokens) for heads, row in published.items() for tokens in row}
    for heads, row in published.items():
        for tokens, mib in row.items():
            assert round(table[heads, tokens].peer_mib, 1) == mib
    assert table[64, 8192].peer_bytes == 2 * 8192 * 64 * 513 * 4
    # One part: the accumulators cannot be read.
    assert [row.gated_bytes for row in memory_table() if row.tokens >= 128] == [0] * 7
    assert all(row.gated_bytes == row.peer_bytes for row in memory_table() if row.tokens < 128)


def test_parts_of_the_architectures() -> None:
    assert SM90.num_parts(rows_per_request=1, heads=16) == 132
    assert SM90.num_parts(rows_per_request=1, heads=64) == 132
    assert SM90.num_parts(rows_per_request=1, heads=128) == 66
    assert SM90.num_parts(rows_per_request=3, heads=64, num_sms=78) == 26
    assert SM90.num_parts(rows_per_request=8192, heads=64) == 1
    assert SM100.num_parts(rows_per_request=1, heads=128) == 148
    assert SM100.num_parts(rows_per_request=1, heads=128, d_qk=512) == 74
    assert SM100.overhead_blocks(heads=128, d_qk=512) == 3
    assert SM100.overhead_blocks(heads=64, d_qk=512) == SM90.overhead_blocks(heads=128, d_qk=512) == 5


def test_policies_when_nothing_can_be_split() -> None:
    """SM90 keeps scheduling on and drops the accumulators; SM100 turns splitting off unless it is mandatory."""
    shape: dict[str, Any] = {"requests": 1, "rows_per_request": 4096, "heads": 64, "topk": 2048}
    hopper = SplitSchedule.plan(**shape, policy=SM90)
    assert (hopper.num_parts, hopper.splitting, hopper.nothing_split, hopper.accumulator_bytes) == (1, True, True, 0)
    assert not SplitSchedule.plan(**shape, policy=SM100).splitting
    assert SplitSchedule.plan(**shape, policy=SM100, mandatory=True).splitting
    assert SM100.splitting(2)
    assert hopper.peer_accumulator_bytes == accumulator_bytes(requests=1, rows_per_request=4096, heads=64, num_parts=1)


def test_accumulators_hold_the_pieces_of_split_requests_only() -> None:
    plan = SplitSchedule.plan(requests=3, heads=16, topk=2048, topk_lengths=[2048, 64, 64], num_sms=2)
    pieces = plan.splits_per_request.tolist()
    assert pieces == [2, 1, 1]
    assert plan.slots().tolist() == [0, -1, -1]
    assert plan.accumulator_shape == (2, 1, 16, 513)
    assert plan.accumulator_bytes == 2 * 16 * 513 * 4 < plan.peer_accumulator_bytes


def test_unsplit() -> None:
    plan = SplitSchedule.unsplit(5, rows_per_request=3)
    assert (plan.num_rows, plan.num_requests, plan.nothing_split, plan.accumulator_bytes) == (15, 5, True, 0)
    (item,) = plan.work()
    assert (item.first_request, item.end_request, item.begin_block, item.end_block, item.slot) == (0, 5, 0, None, None)
    empty = SplitSchedule.unsplit(0)
    assert (empty.num_rows, list(empty.work()), empty.nothing_split) == (0, [], True)


@given(
    lengths=st.lists(st.integers(0, 700), max_size=40),
    extra=st.one_of(st.none(), st.integers(0, 300)),
    rows=st.sampled_from([1, 2, 7, 200]),
    heads=st.sampled_from([1, 16, 64, 128]),
    num_sms=st.sampled_from([1, 3, 78, 132]),
    policy=st.sampled_from([SM90, SM100]),
)
def test_every_block_is_worked_on_once(
    lengths: list[int], extra: int | None, rows: int, heads: int, num_sms: int, policy: Any
) -> None:
    requests = len(lengths)
    plan = SplitSchedule.plan(
        requests=requests,
        heads=heads,
        topk=640,
        rows_per_request=rows,
        topk_lengths=lengths,
        extra_topk=300 if extra is not None else 0,
        extra_topk_lengths=None if extra is None else [extra] * requests,
        num_sms=num_sms,
        policy=policy,
    )
    blocks = [max(-(-min(length, 640) // BLOCK_KEYS), 1) + -(-(extra or 0) // BLOCK_KEYS) for length in lengths]
    seen: list[list[tuple[int, int]]] = [[] for _ in lengths]
    slots: list[int] = []
    for item in plan.work():
        assert item.slot is None or item.end_request == item.first_request + 1
        for request in range(item.first_request, item.end_request):
            end = blocks[request] if item.end_block is None else item.end_block
            seen[request].append((item.begin_block, end))
        if item.slot is not None:
            slots.append(item.slot)
    for request, ranges in enumerate(seen):
        assert ranges[0][0] == 0 and ranges[-1][1] == blocks[request]
        assert all(begin < end for begin, end in ranges)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert len(ranges) == plan.splits_per_request[request]
    # Slots are filled in order, so a combine finds the pieces of a request next to each other.
    assert slots == list(range(plan.accumulator_slots))
    assert plan.accumulator_slots <= requests + plan.num_parts
    assert plan.nothing_split == (not slots) == (plan.accumulator_bytes == 0)
    for part in plan.sched_meta:
        if part[BEGIN_REQUEST] <= part[END_REQUEST]:
            pieces = plan.splits_per_request
            assert bool(part[FIRST_IS_SPLIT]) == (pieces[part[BEGIN_REQUEST]] > 1)
            assert bool(part[LAST_IS_SPLIT]) == (pieces[part[END_REQUEST]] > 1)


def test_lengths_may_be_given_per_row() -> None:
    per_row = SplitSchedule.plan(requests=2, heads=64, topk=512, rows_per_request=2, topk_lengths=[1, 500, 64, 2])
    per_request = SplitSchedule.plan(
        requests=2, heads=64, topk=512, rows_per_request=2, topk_lengths=torch.tensor([500, 64], dtype=torch.int32)
    )
    np.testing.assert_array_equal(per_row.sched_meta, per_request.sched_meta)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requests": -1}, "requests: got -1"),
        ({"requests": 2.0}, "requests: got 2.0"),
        ({"heads": 0}, "heads: got 0"),
        ({"topk": -1}, "topk: got -1"),
        ({"topk": True}, "topk: got True"),
        ({"rows_per_request": 0}, "rows_per_request: got 0"),
        ({"num_sms": 0}, "num_sms: got 0"),
        ({"extra_topk": -1}, "extra_topk: got -1"),
        ({"topk_lengths": [1, 2, 3]}, r"topk_lengths: got shape \(3,\)"),
        ({"topk_lengths": [1.0, 2.0]}, "topk_lengths: got shape .* of float64"),
        ({"topk_lengths": [[1, 2]]}, "topk_lengths: got shape"),
        ({"topk_lengths": torch.empty(2, device="meta")}, "topk_lengths: got a tensor on meta"),
        ({"extra_topk_lengths": [1, 2]}, "extra_topk_lengths: got lengths with extra_topk 0"),
        ({"extra_topk": 64, "extra_topk_lengths": [1]}, r"extra_topk_lengths: got shape \(1,\)"),
    ],
)
def test_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SplitSchedule.plan(**{"requests": 2, "heads": 64, "topk": 128, **change})


def test_errors_of_unsplit() -> None:
    with pytest.raises(ValueError, match="requests: got -1"):
        SplitSchedule.unsplit(-1)
    with pytest.raises(ValueError, match="rows_per_request: got 0"):
        SplitSchedule.unsplit(1, rows_per_request=0)
    with pytest.raises(ValueError, match="heads: got 0"):
        SplitSchedule.unsplit(1, heads=0)
