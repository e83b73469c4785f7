# SPDX-License-Identifier: Apache-2.0
"""Recorded answers of the peer on an H200: ours differ by no more than two roundings to bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generators import Golden, kept, relative_error
from sparsemla import PagedKVCache, reference_attention, sparse_mla_attention
from sparsemla.schedule import SplitSchedule

PEER_OUT, PEER_LSE = 4e-3, 1e-4
OUT, LSE = 2.2e-3, 1e-5


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, cache or tuple of them on `device`."""
    if isinstance(value, PagedKVCache):
        return PagedKVCache.wrap(value.data.to(device), value.format, value.block_size)
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value


def plans(golden: Golden) -> list[SplitSchedule | None]:
    """No plan, one that splits nothing, and for a decode the peer's own."""
    rows, heads = golden.call.q.shape[:2]
    found: list[SplitSchedule | None] = [None, SplitSchedule.unsplit(rows)]
    raw = golden.raw
    if "sched_meta" in raw:
        meta = raw["sched_meta"].copy()
        found.append(SplitSchedule(meta, raw["num_splits"].copy(), raw["q"].shape[1], heads))
        assert not found[-1].nothing_split
    return found


def test_recorded_answers(golden: Golden, device: torch.device) -> None:
    call = golden.call
    kwargs = {key: moved(value, device) for key, value in call.kwargs.items()}
    want_out, want_lse = reference_attention(*call.args, **call.kwargs)
    for plan in plans(golden):
        out = torch.full((*golden.lse.shape, 512), torch.nan, dtype=torch.bfloat16, device=device)
        lse = torch.full(golden.lse.shape, torch.nan, device=device)
        args = (moved(argument, device) for argument in call.args)
        sparse_mla_attention(*args, **kwargs, schedule=plan, out=out, lse=lse)
        got_out, got_lse = out.cpu(), lse.cpu()

        keys = golden.lse > -torch.inf
        assert torch.equal(got_lse > -torch.inf, keys)
        assert not got_out[~keys].any()
        assert relative_error(kept(got_out), golden.out) <= PEER_OUT
        assert (got_lse - golden.lse)[keys].abs().max() <= PEER_LSE
        assert relative_error(got_out, want_out) <= OUT
        assert relative_error(got_lse[keys], want_lse[keys]) <= LSE


def test_the_recordings_cover_what_they_should(golden: Golden) -> None:
    """A recording that lost its special case would test nothing."""
    empty = bool((golden.lse == -torch.inf).any())
    special = {
        "v32_h64_rows_without_keys": empty,
        "v32_h128_split": golden.raw.get("num_splits", [0])[-1] == 8,
        "v4_h64_extra_topklen": "extra_cache" in golden.raw and "topk_length" in golden.raw,
        "bf16_h128_512_sink_len": "attn_sink" in golden.raw and "topk_length" in golden.raw,
        "v32_h64_mixed": golden.raw["q"].shape[1] == 3,
        "bf16_h64_576": golden.raw["q"].shape[-1] == 576,
    }
    if golden.name not in special:
        pytest.fail(f"no expectation for the recording {golden.name}")
    assert special[golden.name]
