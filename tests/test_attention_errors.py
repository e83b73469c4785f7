# SPDX-License-Identifier: Apache-2.0
"""Every ValueError of `sparse_mla_attention` names the argument, what was given and what is accepted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from sparsemla import PagedKVCache, sparse_mla_attention
from sparsemla.schedule import SplitSchedule

T, H, TOPK = 3, 4, 10


def good() -> dict[str, Any]:
    """Arguments that are accepted."""
    return {
        "q": torch.zeros((T, H, 576), dtype=torch.bfloat16),
        "cache": PagedKVCache.allocate(2, 8, "fp8_ds_mla"),
        "indices": torch.zeros((T, TOPK), dtype=torch.int32),
        "softmax_scale": 0.1,
    }


def ints(*shape: int) -> torch.Tensor:
    """int32 zeros."""
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    """bfloat16 zeros."""
    return torch.zeros(shape, dtype=torch.bfloat16)


def pages(**more: Any) -> dict[str, Any]:
    """A block table of two requests, with changes."""
    return {"block_table": ints(2, 2), "request_ids": ints(T), **more}


def v4() -> PagedKVCache:
    """A cache of another split of columns."""
    return PagedKVCache.allocate(2, 8, "fp8_v4")


def nope() -> PagedKVCache:
    """A cache without rotary columns."""
    return PagedKVCache.allocate(2, 8, "fp8_nope")


CASES: list[tuple[str, dict[str, Any], str]] = [
    # q
    ("q missing", {"q": None}, "q: got None, accepted is (T, H, 576) bfloat16 for fp8_ds_mla records"),
    ("q 2-d", {"q": bf16(T, 576)}, "q: got (3, 576) bfloat16, accepted is (T, H, 576) bfloat16"),
    ("q width", {"q": bf16(T, H, 512)}, "q: got (3, 4, 512) bfloat16, accepted is (T, H, 576)"),
    ("q dtype", {"q": torch.zeros(T, H, 576)}, "q: got (3, 4, 576) float32, accepted is (T, H, 576) bfloat16"),
    ("q no heads", {"q": bf16(T, 0, 576)}, "q: got 0 heads, accepted are 1 to 128"),
    ("q heads", {"q": bf16(T, 129, 576)}, "q: got 129 heads, accepted are 1 to 128"),
    ("q strides", {"q": bf16(576, H, T).transpose(0, 2)}, "q: got strides (1, 3, 12), accepted is a contiguous last"),
    ("pair of one", {"q": (bf16(T, H, 512),)}, "q: got a sequence of 1, accepted is a tensor or the pair"),
    ("pair nope", {"q": (bf16(T, H, 448), bf16(T, H, 64))}, "q[0] (q_nope): got (3, 4, 448) bfloat16, accepted is"),
    ("pair rope", {"q": (bf16(T, H, 512), bf16(T, H, 32))}, "q[1] (q_rope): got (3, 4, 32) bfloat16, accepted is"),
    ("pair no rope", {"q": (bf16(T, H, 512), None)}, "q[1] (q_rope): got None, accepted is (T, H, 64) bfloat16"),
    (
        "pair heads",
        {"q": (bf16(T, H, 512), bf16(T, 5, 64))},
        "q[1] (q_rope): got shape (3, 5, 64), accepted is (3, 4, 64)",
    ),
    ("pair rope dtype", {"q": (bf16(T, H, 512), torch.zeros(T, H, 64))}, "q[1] (q_rope): got (3, 4, 64) float32"),
    (
        "pair rope device",
        {"q": (bf16(T, H, 512), bf16(T, H, 64).to("meta"))},
        "q[1] (q_rope): got a tensor on meta, accepted is cpu",
    ),
    (
        "pair without rotary columns",
        {"q": (bf16(T, H, 512), bf16(T, H, 64)), "cache": nope()},
        "q[1] (q_rope): got (3, 4, 64) bfloat16, accepted is None: fp8_nope records of 512 columns have no separate",
    ),
    (
        "pair for V4",
        {"q": (bf16(T, H, 512), bf16(T, H, 64)), "cache": v4()},
        "accepted is (T, H, 448) bfloat16 for fp8_v4",
    ),
    # cache
    ("cache tensor", {"cache": ints(3, 3)}, "cache: got (3, 3) int32, accepted is a PagedKVCache"),
    (
        "cache device",
        {"cache": PagedKVCache.allocate(2, 8, "fp8_ds_mla", device="meta")},
        "cache: got a tensor on meta, accepted is cpu, where q is",
    ),
    # indices
    ("indices missing", {"indices": None}, "indices: got None, accepted is (3, topk) int32"),
    ("indices int64", {"indices": ints(T, TOPK).long()}, "indices: got (3, 10) int64, accepted is (3, topk) int32"),
    ("indices 3-d", {"indices": ints(T, 1, TOPK)}, "indices: got (3, 1, 10) int32, accepted is (3, topk) int32"),
    ("indices rows", {"indices": ints(4, TOPK)}, "indices: got (4, 10) int32, accepted is (3, topk) int32"),
    (
        "indices strides",
        {"indices": ints(TOPK, T).T},
        "indices: got strides (1, 3), accepted is a contiguous last dimension",
    ),
    ("indices device", {"indices": ints(T, TOPK).to("meta")}, "indices: got a tensor on meta, accepted is cpu"),
    # softmax_scale
    ("scale nan", {"softmax_scale": float("nan")}, "softmax_scale: got nan, accepted is a finite float"),
    ("scale inf", {"softmax_scale": float("inf")}, "softmax_scale: got inf, accepted is a finite float"),
    ("scale tensor", {"softmax_scale": torch.tensor(0.1)}, "softmax_scale: got () float32, accepted is a finite float"),
    ("scale None", {"softmax_scale": None}, "softmax_scale: got None, accepted is a finite float"),
    ("scale bool", {"softmax_scale": True}, "softmax_scale: got True, accepted is a finite float"),
    # topk_lengths
    ("lengths shape", {"topk_lengths": ints(2)}, "topk_lengths: got (2,) int32, accepted is (3,) int32 or None"),
    ("lengths 2-d", {"topk_lengths": ints(T, 1)}, "topk_lengths: got (3, 1) int32, accepted is (3,) int32 or None"),
    ("lengths dtype", {"topk_lengths": ints(T).long()}, "topk_lengths: got (3,) int64, accepted is (3,) int32 or None"),
    ("lengths list", {"topk_lengths": [1, 2, 3]}, "topk_lengths: got list of 3, accepted is (3,) int32 or None"),
    ("lengths strides", {"topk_lengths": ints(6)[::2]}, "topk_lengths: got strides (2,), accepted is a contiguous"),
    ("lengths device", {"topk_lengths": ints(T).to("meta")}, "topk_lengths: got a tensor on meta, accepted is cpu"),
    # attn_sink
    ("sink shape", {"attn_sink": torch.zeros(5)}, "attn_sink: got (5,) float32, accepted is (4,) float32 or None"),
    ("sink dtype", {"attn_sink": bf16(H)}, "attn_sink: got (4,) bfloat16, accepted is (4,) float32 or None"),
    ("sink device", {"attn_sink": torch.zeros(H, device="meta")}, "attn_sink: got a tensor on meta"),
    # block_table, request_ids, context_shard
    ("ids alone", {"request_ids": ints(T)}, "request_ids: got (3,) int32 without block_table, accepted is None then"),
    (
        "shard alone",
        {"context_shard": (0, 2, 1)},
        "context_shard: got tuple of 3 without block_table, accepted is None",
    ),
    ("table alone", {"block_table": ints(2, 2)}, "request_ids: got None with block_table, accepted is (3,) int32"),
    ("table shape", pages(block_table=ints(2)), "block_table: got (2,) int32, accepted is (R, P) int32"),
    ("table dtype", pages(block_table=ints(2, 2).long()), "block_table: got (2, 2) int64, accepted is (R, P) int32"),
    (
        "table strides",
        pages(block_table=ints(3, 2).T),
        "block_table: got strides (1, 2), accepted is a contiguous last",
    ),
    ("table device", pages(block_table=ints(2, 2).to("meta")), "block_table: got a tensor on meta"),
    ("ids shape", pages(request_ids=ints(2)), "request_ids: got (2,) int32, accepted is (3,) int32"),
    ("ids dtype", pages(request_ids=ints(T).long()), "request_ids: got (3,) int64, accepted is (3,) int32"),
    ("ids device", pages(request_ids=ints(T).to("meta")), "request_ids: got a tensor on meta"),
    ("shard two", pages(context_shard=(0, 1)), "context_shard: got tuple of 2, accepted is (rank, world, interleave)"),
    ("shard number", pages(context_shard=3), "context_shard: got 3, accepted is (rank, world, interleave)"),
    (
        "shard rank",
        pages(context_shard=(2, 2, 1)),
        "context_shard: got (2, 2, 1), accepted is (rank, world, interleave)",
    ),
    ("shard negative", pages(context_shard=(-1, 2, 1)), "context_shard: got (-1, 2, 1), accepted is"),
    ("shard interleave", pages(context_shard=(0, 2, 0)), "context_shard: got (0, 2, 0), accepted is"),
    ("shard float", pages(context_shard=(0, 2, 1.0)), "context_shard: got (0, 2, 1.0), accepted is"),
    # extra
    (
        "extra cache alone",
        {"extra": v4()},
        "extra: got PagedKVCache, accepted is (cache, indices) or (cache, indices, topk",
    ),
    ("extra of one", {"extra": (v4(),)}, "extra: got tuple of 1, accepted is (cache, indices)"),
    ("extra no cache", {"extra": (None, ints(T, 2))}, "extra[0] (cache): got None, accepted is a PagedKVCache"),
    (
        "extra columns",
        {"extra": (v4(), ints(T, 2))},
        "extra[0] (cache): got fp8_v4 records of 448 + 64 columns, accepted are records of 512 + 64 columns",
    ),
    (
        "extra device",
        {"extra": (PagedKVCache.allocate(2, 8, "bf16", device="meta"), ints(T, 2))},
        "extra[0] (cache): got a tensor on meta",
    ),
    (
        "extra indices",
        {"extra": (PagedKVCache.allocate(2, 8, "bf16"), ints(2, 2))},
        "extra[1] (indices): got (2, 2) int32, accepted is (3, topk) int32",
    ),
    (
        "extra lengths",
        {"extra": (PagedKVCache.allocate(2, 8, "bf16"), ints(T, 2), ints(2))},
        "extra[2] (topk_lengths): got (2,) int32, accepted is (3,) int32 or None",
    ),
    # schedule
    ("schedule tensor", {"schedule": ints(2, 8)}, "schedule: got (2, 8) int32, accepted is a SplitSchedule or None"),
    (
        "schedule rows",
        {"schedule": SplitSchedule.unsplit(2, rows_per_request=2)},
        "schedule: got a plan for 2 requests of 2 rows, accepted is one for 3 rows in all",
    ),
    (
        "schedule heads",
        {"schedule": SplitSchedule.plan(requests=T, heads=64, topk=2048)},
        "schedule: got a plan for 64 heads, accepted is one for 4",
    ),
    # out, lse
    ("out shape", {"out": bf16(T, H, 576)}, "out: got (3, 4, 576) bfloat16, accepted is (3, 4, 512) bfloat16"),
    ("out dtype", {"out": torch.zeros(T, H, 512)}, "out: got (3, 4, 512) float32, accepted is (3, 4, 512) bfloat16"),
    (
        "out strides",
        {"out": bf16(512, H, T).transpose(0, 2)},
        "out: got strides (1, 3, 12), accepted is a contiguous last",
    ),
    (
        "out expanded",
        {"out": bf16(1, H, 512).expand(T, -1, -1)},
        "out: got strides (0, 512, 1), accepted is one element",
    ),
    ("out device", {"out": bf16(T, H, 512).to("meta")}, "out: got a tensor on meta, accepted is cpu"),
    ("softmax_scale beyond float32", {"softmax_scale": 1e39}, "softmax_scale: got 1e+39, accepted is a finite float"),
    ("softmax_scale endless", {"softmax_scale": 10**400}, "softmax_scale: got an integer above 10**30, accepted is"),
    ("shard beyond int32", pages(context_shard=(0, 2**62, 2**62)), "context_shard: got (0, 4611686018427387904, "),
    ("shard of 2^31", pages(context_shard=(0, 2, 2**30)), "accepted is world * interleave below 2**31"),
    ("out list", {"out": [1]}, "out: got list of 1, accepted is (3, 4, 512) bfloat16"),
    ("lse shape", {"lse": torch.zeros(H, T)}, "lse: got (4, 3) float32, accepted is (3, 4) float32"),
    ("lse dtype", {"lse": bf16(T, H)}, "lse: got (3, 4) bfloat16, accepted is (3, 4) float32"),
    ("lse expanded", {"lse": torch.zeros(1, H).expand(T, -1)}, "lse: got strides (0, 1), accepted is one element"),
    ("lse device", {"lse": torch.zeros(T, H, device="meta")}, "lse: got a tensor on meta, accepted is cpu"),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_error(change: dict[str, Any], words: str) -> None:
    given = {**good(), **change}
    with pytest.raises(ValueError, match=re.escape(words)):
        sparse_mla_attention(given.pop("q"), given.pop("cache"), given.pop("indices"), **given)


def test_what_is_accepted() -> None:
    """The arguments that the cases start from, and neighbours of the refused ones."""
    base = good()
    q, cache, indices, scale = base["q"], base["cache"], base["indices"], base["softmax_scale"]
    accepted: list[dict[str, Any]] = [
        {},
        {"softmax_scale": np.float32(0.1)},
        {"topk_lengths": ints(T), "attn_sink": torch.zeros(H)},
        pages(context_shard=[1, 2, np.int64(1)]),
        {"extra": [PagedKVCache.allocate(2, 8, "bf16"), ints(T, 0), None]},
        {"schedule": SplitSchedule.unsplit(T), "out": bf16(T, H, 512), "lse": torch.zeros(H, T).T},
        {"schedule": SplitSchedule.plan(requests=T, heads=H, topk=TOPK)},
    ]
    for change in accepted:
        out, lse = sparse_mla_attention(q, cache, indices, **{"softmax_scale": scale, **change})
        assert out.shape == (T, H, 512) and lse.shape == (T, H)
    pair = [q[..., :512], q[..., 512:]]
    sparse_mla_attention(pair, cache, indices, softmax_scale=scale)  # type: ignore[arg-type]
