# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle against a plainer computation still, against the recorded answers, and on its edges."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generators import (
    ALL_FORMATS,
    Golden,
    format_id,
    kept,
    pages_for_positions,
    random_cache,
    random_call,
    random_kv,
    random_query,
    relative_error,
)
from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat
from sparsemla.reference import reference_attention


def plain_attention(
    q: torch.Tensor, keys: list[list[torch.Tensor]], scale: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with Python loops and exp: keys[row] is a list of (d_qk,) float64 vectors."""
    rows, heads, _ = q.shape
    out = torch.zeros((rows, heads, 512), dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            logits = [float(torch.dot(q[row, head].double(), key)) * scale for key in keys[row]]
            if not logits:
                continue
            total = sum(math.exp(logit) for logit in logits)
            with_sink = total + (math.exp(float(sink[head])) if sink is not None else 0.0)
            lse[row, head] = math.log(total)
            for logit, key in zip(logits, keys[row], strict=True):
                out[row, head] += math.exp(logit) / with_sink * key[:512]
    return out, lse


def keys_by_hand(cache: PagedKVCache, indices: torch.Tensor, lengths: torch.Tensor | None) -> list[list[torch.Tensor]]:
    """The key vectors of each row, looked up one at a time."""
    rows = []
    for row, named in enumerate(indices.tolist()):
        counted = named if lengths is None else named[: int(lengths[row])]
        kept = [slot for slot in counted if 0 <= slot < cache.num_slots]
        rows.append([cache.read(torch.tensor([slot]), dtype=torch.float64)[0] for slot in kept])
    return rows


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
@pytest.mark.parametrize("features", ["plain", "all"])
def test_agrees_with_a_plain_computation(fmt: KVFormat, d_qk: int, features: str) -> None:
    more: dict[str, Any] = {"lengths": True, "sink": True, "extra_topk": 9} if features == "all" else {}
    call = random_call(rows=3, heads=3, topk=20, num_pages=3, block_size=61, fmt=fmt, d_qk=d_qk, **more)
    out, lse = reference_attention(*call.args, **call.kwargs)
    keys = keys_by_hand(call.cache, call.indices, call.kwargs["topk_lengths"])
    if features == "all":
        extra_keys = keys_by_hand(*call.kwargs["extra"])
        keys = [first + second for first, second in zip(keys, extra_keys, strict=True)]
    want, want_lse = plain_attention(call.q, keys, call.kwargs["softmax_scale"], call.kwargs.get("attn_sink"))
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_agrees_with_the_recorded_answers(golden: Golden) -> None:
    out, lse = reference_attention(*golden.call.args, **golden.call.kwargs)
    assert relative_error(golden.out, kept(out)) < 2.2e-3
    assert torch.equal(lse.isfinite(), golden.lse.isfinite())
    finite = lse.isfinite()
    assert float((lse[finite] - golden.lse[finite]).abs().max()) < 2e-6
    assert (golden.lse[~finite] == lse[~finite]).all()


def test_row_without_keys() -> None:
    call = random_call(rows=4, heads=2, topk=8, masked=0.0, sink=True)
    indices = call.indices.clone()
    indices[1] = -1
    indices[2] = 2**31 - 1
    out, lse = reference_attention(call.q, call.cache, indices, **call.kwargs)
    assert not out[1:3].any()
    assert (lse[1:3] == -torch.inf).all()
    assert lse[[0, 3]].isfinite().all()


def test_sinks_at_both_infinities() -> None:
    call = random_call(rows=2, heads=3, topk=8, masked=0.0)
    sink = torch.tensor([-torch.inf, torch.inf, 0.0])
    plain, plain_lse = reference_attention(*call.args, **call.kwargs)
    out, lse = reference_attention(*call.args, **call.kwargs, attn_sink=sink)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[:, 0], plain[:, 0])
    assert not out[:, 1].any()
    share = plain_lse[:, 2].exp() / (plain_lse[:, 2].exp() + 1)
    torch.testing.assert_close(out[:, 2], plain[:, 2] * share.unsqueeze(1))


def test_masked_keys_are_never_read() -> None:
    """The cache is NaN wherever no counted index points, so a finite answer means that nothing else was read."""
    for seed in range(5):
        call = random_call(rows=4, heads=2, topk=50, masked=0.4, lengths=True, extra_topk=10, seed=seed)
        out, _ = reference_attention(*call.args, **call.kwargs)
        assert out.isfinite().all()


def test_lengths_are_clamped() -> None:
    call = random_call(rows=3, heads=2, topk=8, masked=0.0)
    want, want_lse = reference_attention(*call.args, **call.kwargs)
    kwargs = {**call.kwargs, "topk_lengths": torch.tensor([8, 2**31 - 1, -5], dtype=torch.int32)}
    out, lse = reference_attention(*call.args, **kwargs)
    assert torch.equal(out[:2], want[:2])
    assert torch.equal(lse[:2], want_lse[:2])
    assert not out[2].any()


def test_a_key_named_twice_counts_twice() -> None:
    call = random_call(rows=1, heads=2, topk=4, masked=0.0)
    _, once = reference_attention(*call.args, **call.kwargs)
    out, twice = reference_attention(call.q, call.cache, call.indices.repeat(1, 2), **call.kwargs)
    torch.testing.assert_close(twice, once + math.log(2))
    torch.testing.assert_close(out, reference_attention(*call.args, **call.kwargs)[0])


def test_query_pair_and_extra_as_an_object() -> None:
    call = random_call(rows=2, heads=3, topk=12, extra_topk=5, fmt="fp8_v4")
    want = reference_attention(*call.args, **call.kwargs)
    cache, indices, lengths = call.kwargs["extra"]
    kwargs = {**call.kwargs, "extra": SimpleNamespace(cache=cache, indices=indices, topk_lengths=lengths)}
    got = reference_attention((call.q[..., :448], call.q[..., 448:]), call.cache, call.indices, **kwargs)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    two = reference_attention(*call.args, **{**call.kwargs, "extra": (cache, indices)})
    assert torch.equal(two[0], want[0])
    rope_free = random_call(rows=2, heads=3, topk=12, fmt="fp8_nope")
    pair = reference_attention((rope_free.q, None), rope_free.cache, rope_free.indices, **rope_free.kwargs)
    assert torch.equal(pair[0], reference_attention(*rope_free.args, **rope_free.kwargs)[0])


def test_positions_give_what_their_slots_give() -> None:
    cache = random_cache(9, 61, "fp8_ds_mla")
    table = pages_for_positions([100, 200], 61, 9)
    positions = torch.tensor([[0, 60, 61, 99, -1], [199, 122, 5, 0, 10**6]], dtype=torch.int32)
    requests = torch.tensor([0, 1], dtype=torch.int32)
    by_hand = torch.full((2, 5), -1, dtype=torch.int64)
    for row in range(2):
        for column in range(5):
            position = int(positions[row, column])
            if 0 <= position < 200:
                by_hand[row, column] = int(table[row, position // 61]) * 61 + position % 61
    q = random_query(2, 4, 576)
    got = reference_attention(q, cache, positions, softmax_scale=0.04, block_table=table, request_ids=requests)
    want = reference_attention(q, cache, by_hand, softmax_scale=0.04)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match="request_ids: got None, required with block_table"):
        reference_attention(q, cache, positions, softmax_scale=0.04, block_table=table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": None}, "q: got NoneType, accepted is (T, H, 576) for fp8_ds_mla records"),
        ({"q": torch.zeros(2, 4, 512)}, "q: got (2, 4, 512) torch.float32, accepted is (T, H, 576)"),
        ({"cache": None}, "cache: got NoneType, accepted is a PagedKVCache"),
        ({"indices": torch.zeros(1, 3, dtype=torch.int32)}, "indices: got (1, 3) torch.int32, accepted is (2, topk)"),
        ({"indices": torch.zeros(2, 3)}, "indices: got (2, 3) torch.float32, accepted is (2, topk) of an integer"),
        ({"softmax_scale": None}, "softmax_scale: got NoneType, accepted is a number"),
        ({"topk_lengths": torch.zeros(3)}, "topk_lengths: got (3,) torch.float32, accepted is (2,) or None"),
        ({"attn_sink": 1}, "attn_sink: got int, accepted is (4,) or None"),
        ({"extra": 1}, "extra: got 1, accepted is (cache, indices[, topk_lengths])"),
        ({"request_ids": torch.zeros(2)}, "request_ids: got one without block_table"),
        ({"context_shard": (0, 2, 1)}, "context_shard: got one without block_table"),
    ],
)
def test_errors(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(2, 4, 576),
        "cache": PagedKVCache.allocate(1, 8, "fp8_ds_mla"),
        "indices": torch.zeros(2, 3, dtype=torch.int32),
        "softmax_scale": 0.1,
        **change,
    }
    with pytest.raises(ValueError, match=re.escape(words)):
        reference_attention(given.pop("q"), given.pop("cache"), given.pop("indices"), **given)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 16), (4, 64)])
def test_context_shards_combine_to_the_whole(world: int, interleave: int) -> None:
    """Each rank holds its share of a request in its own pool; merging their answers by LSE gives the whole answer."""
    length, block_size, rows, topk = 500, 32, 3, 120
    kv = random_kv(length, 576)
    whole = PagedKVCache.allocate(-(-length // block_size), block_size, "fp8_ds_mla")
    whole.write(torch.arange(length), kv)
    positions = torch.rand((rows, length)).argsort(dim=1)[:, :topk].to(torch.int32)
    positions[0, 5] = -1
    q = random_query(rows, 4, 576)
    want, want_lse = reference_attention(q, whole, positions, softmax_scale=0.04)

    outs, lses = [], []
    for rank in range(world):
        mine = [p for p in range(length) if (p // interleave) % world == rank]
        pages = -(-len(mine) // block_size)
        cache = PagedKVCache.allocate(pages, block_size, "fp8_ds_mla")
        order = torch.randperm(pages)
        local = torch.arange(len(mine))
        cache.write(order[local // block_size] * block_size + local % block_size, kv[mine])
        out, lse = reference_attention(
            q,
            cache,
            positions,
            softmax_scale=0.04,
            block_table=order.unsqueeze(0).to(torch.int32),
            request_ids=torch.zeros(rows, dtype=torch.int32),
            context_shard=(rank, world, interleave),
        )
        outs.append(out)
        lses.append(lse)
    merged_lse = torch.logsumexp(torch.stack(lses), dim=0)
    merged = sum(out * (lse - merged_lse).exp().unsqueeze(-1) for out, lse in zip(outs, lses, strict=True))
    torch.testing.assert_close(merged, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(merged_lse, want_lse, rtol=1e-12, atol=1e-12)


def test_no_rows_and_no_columns() -> None:
    cache = random_cache(1, 64, "fp8_ds_mla")
    out, lse = reference_attention(
        torch.empty(0, 4, 576), cache, torch.empty((0, 8), dtype=torch.int32), softmax_scale=1.0
    )
    assert out.shape == (0, 4, 512)
    assert lse.shape == (0, 4)
    out, lse = reference_attention(
        random_query(2, 4, 576), cache, torch.empty((2, 0), dtype=torch.int32), softmax_scale=1.0
    )
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_large_logits_do_not_overflow() -> None:
    call = random_call(rows=2, heads=2, topk=16, masked=0.0)
    out, lse = reference_attention(call.q * 1000, call.cache, call.indices, softmax_scale=10.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert float(lse.abs().max()) > 1000
