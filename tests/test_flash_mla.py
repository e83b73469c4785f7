# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's names: recorded calls of both functions, both generations of the plan, and what is refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from generators import GOLDEN_NAMES, kept, load_golden, random_cache, random_indices, random_query, relative_error
from sparsemla import KVFormat, PagedKVCache, reference_attention, sparse_mla_attention
from sparsemla.integrations import flash_mla
from sparsemla.integrations.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from sparsemla.schedule import UNUSED

KINDS = {name: str(load_golden(name).raw["kind"]) for name in GOLDEN_NAMES}
DECODE = [name for name, kind in KINDS.items() if kind == "decode"]
PREFILL = [name for name, kind in KINDS.items() if kind == "prefill"]


def tensors(name: str, device: torch.device) -> dict[str, Any]:
    """The recorded arrays as tensors on a device, scalars as Python numbers."""
    raw = load_golden(name).raw
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if value.dtype.kind in "iuf":
            found[key] = torch.from_numpy(value).to(device) if value.ndim else value.item()
    for key in ("q", "kv"):
        if key in found:
            found[key] = found[key].view(torch.bfloat16)
    return found


def four_dims(data: torch.Tensor, block: int) -> torch.Tensor:
    """A recorded cache as the peer takes it: (pages, block, 1, bytes a token), pages strided where they are padded."""
    if data.dim() == 3:
        return data.unsqueeze(2)
    return data.as_strided((data.shape[0], block, 1, 584), (data.stride(0), 584, 584, 1))


def decode_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a recorded decode, without the plan."""
    found = {
        "q": given["q"],
        "k_cache": four_dims(given["cache"], given["block"]),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "softmax_scale": given["softmax_scale"],
        "is_fp8_kvcache": True,
        "indices": given["indices"],
        "attn_sink": given.get("attn_sink"),
        "topk_length": given.get("topk_length"),
    }
    if "extra_cache" in given:
        found["extra_k_cache"] = four_dims(given["extra_cache"], given["extra_block"])
        found["extra_indices_in_kvcache"] = given["extra_indices"]
        found["extra_topk_length"] = given["extra_topk_length"]
    return found


def same_as_recorded(out: torch.Tensor, lse: torch.Tensor, given: dict[str, Any]) -> None:
    """Shapes and numbers of the recorded answer; +inf where it says so."""
    assert kept(out).shape == given["out"].shape and lse.shape == given["lse"].shape
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert relative_error(kept(out), given["out"]) <= 4e-3
    finite = given["lse"].isfinite()
    assert torch.equal(lse[~finite], given["lse"][~finite])
    assert (lse - given["lse"])[finite].abs().max() <= 1e-4


def test_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
    namespace: dict[str, Any] = {}
    exec("from flash_mla import flash_mla_with_kvcache, get_mla_metadata, flash_mla_sparse_fwd", namespace)
    assert namespace["flash_mla_with_kvcache"] is flash_mla_with_kvcache
    assert all(hasattr(flash_mla, name) for name in flash_mla.__all__)


# --------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("name", DECODE)
def test_recorded_decode_with_the_current_plan(name: str, device: torch.device) -> None:
    given = tensors(name, device)
    meta, nothing = get_mla_metadata()
    assert isinstance(meta, FlashMLASchedMeta) and nothing is None and not meta.have_initialized
    out, lse = flash_mla_with_kvcache(tile_scheduler_metadata=meta, **decode_arguments(given))
    same_as_recorded(out, lse, given)
    assert meta.have_initialized and meta.config is not None and meta.config.topk == given["indices"].shape[-1]
    assert meta.tile_scheduler_metadata is not None and meta.num_splits is not None
    if device.type == "cpu":
        assert torch.equal(meta.tile_scheduler_metadata[:, :UNUSED], given["sched_meta"][:, :UNUSED])
        assert torch.equal(meta.num_splits, given["num_splits"])
    again, _ = flash_mla_with_kvcache(tile_scheduler_metadata=meta, **decode_arguments(given))
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", DECODE)
def test_recorded_decode_with_the_classic_plan(name: str, device: torch.device) -> None:
    given = tensors(name, device)
    batch, s_q, heads, _ = given["q"].shape
    seqlens = torch.full((batch,), 99, dtype=torch.int32, device=device)
    plan = get_mla_metadata(seqlens, s_q * heads, 1, heads, True, given["indices"].shape[-1])
    assert [tuple(t.shape) for t in plan] == [(132 // s_q // (heads // 64), 8), (batch + 1,)] or device.type == "cuda"
    assert all(t.dtype == torch.int32 and t.device.type == device.type for t in plan)
    arguments = decode_arguments(given)
    positional = [arguments.pop(key) for key in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")]
    scale = arguments.pop("softmax_scale")
    fp8, indices = arguments.pop("is_fp8_kvcache"), arguments.pop("indices")
    out, lse = flash_mla_with_kvcache(*positional, *plan, scale, False, fp8, indices, **arguments)
    same_as_recorded(out, lse, given)


def small_decode(batch: int = 3, s_q: int = 2, heads: int = 8, topk: int = 200, **more: Any) -> dict[str, Any]:
    """Arguments of a random decode on the CPU."""
    cache = random_cache(6, 64, KVFormat.FP8_DS_MLA)
    return {
        "q": random_query(batch * s_q, heads, 576).view(batch, s_q, heads, 576),
        "k_cache": cache.data.unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": FlashMLASchedMeta(),
        "is_fp8_kvcache": True,
        "indices": random_indices(batch * s_q, topk, cache.num_slots, masked=0.1).view(batch, s_q, topk),
        **more,
    }


def want_decode(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's answer in the peer's shapes."""
    q, indices = given["q"], given["indices"]
    batch, s_q, heads, d = q.shape
    lengths = given.get("topk_length")
    cache = PagedKVCache.wrap(given["k_cache"].view(torch.uint8), KVFormat.FP8_DS_MLA)
    out, lse = reference_attention(
        q.reshape(-1, heads, d),
        cache,
        indices.reshape(batch * s_q, -1),
        softmax_scale=d**-0.5,
        topk_lengths=None if lengths is None else lengths.repeat_interleave(s_q),
    )
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return out.view(batch, s_q, heads, 512), lse.view(batch, s_q, heads).transpose(1, 2)


def check_decode(given: dict[str, Any]) -> None:
    """Runs a decode and compares it with the oracle."""
    out, lse = flash_mla_with_kvcache(**given)
    want_out, want_lse = want_decode(given)
    assert relative_error(out, want_out) <= 2.2e-3
    finite = want_lse.isfinite()
    assert torch.equal(lse[~finite], want_lse[~finite].float())
    assert relative_error(lse[finite], want_lse[finite]) <= 1e-5


def test_default_scale_and_lengths_per_request() -> None:
    check_decode(small_decode())
    check_decode(small_decode(topk_length=torch.tensor([200, 0, 65], dtype=torch.int32)))


@pytest.mark.parametrize("generation", ["current", "classic"])
def test_a_plan_never_goes_stale(generation: str) -> None:
    """The lengths change between two calls with one plan; the peer would go on with the old pieces."""
    lengths = torch.tensor([64, 1, 10], dtype=torch.int32)
    given = small_decode(topk_length=lengths)
    meta = given["tile_scheduler_metadata"]
    if generation == "classic":
        plan = get_mla_metadata(lengths, 2 * 8, 1, 8, True, 200)
        given["tile_scheduler_metadata"], given["num_splits"] = plan
        plan[1].fill_(12345)  # whatever the numbers are
    check_decode(given)
    if generation == "current":
        address, splits = meta.num_splits.data_ptr(), meta.num_splits.tolist()
    lengths.copy_(torch.tensor([200, 200, 0], dtype=torch.int32))
    check_decode(given)
    if generation == "current":
        assert meta.num_splits.data_ptr() == address and meta.num_splits.tolist() != splits


def test_other_shapes_need_another_plan() -> None:
    given = small_decode()
    flash_mla_with_kvcache(**given)
    meta = given["tile_scheduler_metadata"]
    for change, field in (
        ({"batch": 2}, "b = 3 in a call with b = 2"),
        ({"s_q": 1}, "s_q = 2 in a call with s_q = 1"),
        ({"heads": 16}, "h_q = 8 in a call with h_q = 16"),
        ({"topk": 64}, "topk = 200 in a call with topk = 64"),
    ):
        with pytest.raises(ValueError, match=f"tile_scheduler_metadata: got a FlashMLASchedMeta bound to {field}"):
            flash_mla_with_kvcache(**small_decode(**change, tile_scheduler_metadata=meta))
    fresh = FlashMLASchedMeta()
    with pytest.raises(ValueError, match="attn_sink"):
        flash_mla_with_kvcache(**small_decode(tile_scheduler_metadata=fresh, attn_sink=torch.zeros(3)))
    assert fresh == FlashMLASchedMeta(), "a refused call binds nothing"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_one_byte_dtypes(dtype: torch.dtype) -> None:
    given = small_decode()
    given["k_cache"] = given["k_cache"].view(dtype)
    check_decode(given)


@pytest.mark.parametrize(
    ("fmt", "kv_format"),
    [
        (KVFormat.FP8_NOPE, "V32_NO_ROPE"),
        (KVFormat.FP8_V41, None),
        (KVFormat.FP8_V41, "V41"),
        (KVFormat.FP8_V4, "V4"),
        (KVFormat.BF16, None),
    ],
)
def test_formats(fmt: KVFormat, kv_format: str | None) -> None:
    d = 576 if fmt is KVFormat.BF16 else 512
    cache = random_cache(4, 64, fmt)
    data = cache.data
    if data.dim() == 2:
        width = cache.layout.record_bytes
        data = data.as_strided((4, 64, 1, width), (data.stride(0), width, width, 1))
    else:
        data = data.unsqueeze(2)
    q, indices = random_query(2, 4, d), random_indices(2, 100, 256, masked=0.2)
    meta, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q.unsqueeze(1),
        data,
        None,
        None,
        512,
        meta,
        is_fp8_kvcache=fmt is not KVFormat.BF16,
        indices=indices.unsqueeze(1),
        kv_format=kv_format,
    )
    want_out, want_lse = reference_attention(q, cache, indices, softmax_scale=d**-0.5)
    assert relative_error(out.squeeze(1), want_out) <= 2.2e-3
    assert relative_error(lse.squeeze(2), want_lse) <= 1e-5


def test_writes_where_it_is_told() -> None:
    given = small_decode()
    wide = torch.zeros((3, 2, 16, 512), dtype=torch.bfloat16)
    out, _ = flash_mla_with_kvcache(**given, out=wide[:, :, 4:12])
    assert out.data_ptr() == wide[:, :, 4:12].data_ptr()
    assert relative_error(wide[:, :, 4:12], want_decode(given)[0]) <= 2.2e-3
    assert not wide[:, :, :4].any() and not wide[:, :, 12:].any()


def test_strided_queries_and_an_empty_batch() -> None:
    given = small_decode()
    given["q"] = given["q"].transpose(0, 1).contiguous().transpose(0, 1)
    given["indices"] = torch.nn.functional.pad(given["indices"], (3, 4), value=7)[..., 3:-4]
    check_decode(given)
    out, lse = flash_mla_with_kvcache(**small_decode(batch=0))
    assert out.shape == (0, 2, 8, 512) and lse.shape == (0, 8, 2)


# -------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("name", PREFILL)
def test_recorded_prefill(name: str, device: torch.device) -> None:
    given = tensors(name, device)
    arguments = (given["q"], given["kv"], given["indices"], given["softmax_scale"], 512)
    optional = {"attn_sink": given.get("attn_sink"), "topk_length": given.get("topk_length")}
    out, max_logits, lse = flash_mla_sparse_fwd(*arguments, **optional)
    assert out is not None and max_logits is not None and lse is not None
    same_as_recorded(out, lse, given)
    assert (max_logits - given["max_logits"]).abs().max() <= 1e-4
    quick, nothing, same_lse = flash_mla_sparse_fwd(*arguments, **optional, return_max_logits=False)
    assert nothing is None and torch.equal(quick, out) and torch.equal(same_lse, lse)


def test_prefill_rows_without_keys_and_indexer_lse() -> None:
    q, kv = random_query(3, 4, 576), torch.randn(100, 1, 576).to(torch.bfloat16)
    indices = random_indices(3, 40, 100, masked=0.2).unsqueeze(1)
    indices[1] = 100
    target = torch.zeros((3, 4, 512), dtype=torch.bfloat16)
    out, max_logits, lse, indexer = flash_mla_sparse_fwd(q, kv, indices, 0.05, indexer_topk=8, out=target)
    assert out is target and max_logits is not None and lse is not None and indexer is not None
    cache = PagedKVCache.wrap(kv, KVFormat.BF16)
    want_out, want_lse = reference_attention(q, cache, indices.squeeze(1), softmax_scale=0.05)
    _, want_indexer = reference_attention(q, cache, indices.squeeze(1)[:, :8], softmax_scale=0.05)
    assert relative_error(out, want_out) <= 2.2e-3 and not out[1].any()
    assert (lse[1] == torch.inf).all() and (indexer[1] == torch.inf).all() and (max_logits[1] == -torch.inf).all()
    assert relative_error(lse[::2], want_lse[::2]) <= 1e-5
    assert relative_error(indexer[::2], want_indexer[::2]) <= 1e-5
    logits = torch.einsum("thd,sd->ths", q.double(), kv.squeeze(1).double()) * 0.05
    for row in (0, 2):
        named = indices[row, 0][(indices[row, 0] >= 0) & (indices[row, 0] < 100)].long()
        assert (max_logits[row] - logits[row, :, named].amax(dim=1)).abs().max() <= 1e-5


def test_prefill_over_a_strided_kv() -> None:
    q, wide = random_query(2, 2, 512), torch.randn(50, 1, 640).to(torch.bfloat16)
    indices = random_indices(2, 20, 50)
    kv = wide[..., 64:576]
    out, _, _ = flash_mla_sparse_fwd(q, kv, indices.unsqueeze(1), 0.05)
    flat = PagedKVCache.wrap(kv.contiguous(), KVFormat.BF16)
    assert torch.equal(out, sparse_mla_attention(q, flat, indices, softmax_scale=0.05)[0])


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"indices": None},
            "indices: got None, accepted is a (batch, seq_len_q, topk) int32 tensor: dense attention is",
        ),
        ({"causal": True}, "causal: got True, accepted is False with indices"),
        ({"head_dim_v": 576}, "head_dim_v: got 576, accepted is 512"),
        ({"q": torch.zeros(2, 8, 576)}, "q: got (2, 8, 576) float32, accepted is (batch, seq_len_q, heads, head_dim)"),
        (
            {"q": torch.zeros(3, 2, 8, 576)},
            "q: got (3, 2, 8, 576) float32, accepted is (batch, seq_len_q, heads",
        ),
        ({"indices": torch.zeros(3, 2, 8)}, "indices: got (3, 2, 8) float32, accepted is (3, 2, topk) int32"),
        ({"indices": torch.zeros(3, 8, dtype=torch.int32)}, "indices: got (3, 8) int32, accepted is (batch, seq_len_q"),
        (
            {"indices": torch.zeros(2, 2, 8, dtype=torch.int32)},
            "indices: got (2, 2, 8) int32, accepted is (3, 2, topk)",
        ),
        ({"k_cache": None}, "k_cache: got None, accepted is (pages, page_block_size, 1, bytes a token)"),
        (
            {"k_cache": torch.zeros(2, 64, 2, 656, dtype=torch.uint8)},
            "k_cache: got 2 key heads in (2, 64, 2, 656) uint8",
        ),
        ({"k_cache": torch.zeros(2, 64, 1, 656)}, "k_cache: got (2, 64, 1, 656) float32 with is_fp8_kvcache=True"),
        (
            {"k_cache": torch.zeros(2, 64, 1, 584, dtype=torch.uint8)},
            "k_cache: got 584 bytes a token with head_dim 576",
        ),
        ({"kv_format": "V41"}, "k_cache: got shape (6, 64, 1, 656) for format fp8_v41"),
        ({"kv_format": "V5"}, "kv_format: got 'V5', accepted are 'V32', 'V32_NO_ROPE', 'V4', 'V41' and None"),
        (
            {"is_fp8_kvcache": False},
            "k_cache: got (6, 64, 1, 656) uint8 with is_fp8_kvcache=False, accepted is bfloat16",
        ),
        (
            {"k_cache": torch.zeros(2, 64, 1, 512, dtype=torch.bfloat16), "is_fp8_kvcache": False},
            "k_cache: got bf16 records of 512 columns, accepted are 576 columns as in q",
        ),
        (
            {"tile_scheduler_metadata": None},
            "tile_scheduler_metadata: got None, accepted is a FlashMLASchedMeta, or the",
        ),
        (
            {"tile_scheduler_metadata": torch.zeros(4, 8)},
            "tile_scheduler_metadata: got (4, 8) float32, accepted is int32",
        ),
        (
            {"tile_scheduler_metadata": torch.zeros((4, 8), dtype=torch.int32)},
            "num_splits: got None, accepted is the (4,) int32 tensor of get_mla_metadata",
        ),
        (
            {"num_splits": torch.zeros(4, dtype=torch.int32)},
            "num_splits: got (4,) int32, accepted is None with a Flash",
        ),
        ({"topk_length": torch.zeros(6, dtype=torch.int32)}, "topk_length: got (6,) int32, accepted is (3,) int32"),
        ({"topk_length": torch.zeros(3)}, "topk_length: got (3,) float32, accepted is (3,) int32"),
        (
            {"extra_indices_in_kvcache": torch.zeros((3, 2, 4), dtype=torch.int32)},
            "extra_indices_in_kvcache: got (3, 2, 4) int32 without extra_k_cache, accepted is None then",
        ),
        (
            {"extra_topk_length": torch.zeros(3, dtype=torch.int32)},
            "extra_topk_length: got (3,) int32 without extra_k_cache, accepted is None then",
        ),
        (
            {"extra_k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8)},
            "extra_indices_in_kvcache: got None, required with extra_k_cache",
        ),
        ({"attn_sink": torch.zeros(3)}, "attn_sink: got (3,) float32, accepted is (8,) float32 or None"),
        ({"kv_format": ["V32"]}, "kv_format: got ['V32'], accepted are 'V32', 'V32_NO_ROPE', 'V4', 'V41' and None"),
        ({"out": 1}, "out: got 1, accepted is (3, 2, 8, 512) bfloat16"),
        ({"out": torch.zeros(3, 2, 8, 512)}, "out: got (3, 2, 8, 512) float32, accepted is (3, 2, 8, 512) bfloat16"),
        ({"softmax_scale": float("nan")}, "softmax_scale: got nan, accepted is a finite float"),
        ({"out": torch.zeros(3, 2, 8, 576)}, "out: got (3, 2, 8, 576) float32, accepted is (3, 2, 8, 512) bfloat16"),
        (
            {"out": torch.zeros((2, 3, 8, 512), dtype=torch.bfloat16).transpose(0, 1)},
            "out: got strides (4096, 12288, 512, 1), accepted is stride(0) = seq_len_q · stride(1)",
        ),
    ],
)
def test_decode_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        flash_mla_with_kvcache(**small_decode(**change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_v": 256}, "d_v: got 256, accepted is 512"),
        ({"q": torch.zeros(3, 576)}, "q: got (3, 576) float32, accepted is (s_q, heads, head_dim)"),
        ({"kv": torch.zeros(9, 576)}, "kv: got (9, 576) float32, accepted is (s_kv, 1, head_dim)"),
        (
            {"kv": torch.zeros((9, 2, 576), dtype=torch.bfloat16)},
            "kv: got (9, 2, 576) bfloat16, accepted is (s_kv, 1, 576)",
        ),
        ({"kv": torch.zeros(9, 1, 576)}, "kv: got (9, 1, 576) float32, accepted is (s_kv, 1, 576) bfloat16"),
        (
            {"indices": torch.zeros((3, 4), dtype=torch.int32)},
            "indices: got (3, 4) int32, accepted is (3, 1, topk) int32",
        ),
        (
            {"indices": torch.zeros((3, 2, 4), dtype=torch.int32)},
            "indices: got (3, 2, 4) int32, accepted is (3, 1, topk)",
        ),
        ({"indices": torch.zeros(3, 1, 4)}, "indices: got (3, 1, 4) float32, accepted is (3, 1, topk) int32"),
        ({"indexer_topk": -1}, "indexer_topk: got -1, accepted is an integer of at least 0"),
        ({"sm_scale": 1e35}, "sm_scale: got a number above 3.2e+32, accepted is one of at most that magnitude"),
        ({"sm_scale": 10**400}, "sm_scale: got a number above 3.2e+32"),
        ({"q": torch.zeros(3, 4, 576)}, "q: got (3, 4, 576) float32, accepted is (s_q, heads, head_dim) bfloat16"),
        (
            {"kv": torch.zeros((9, 1, 576), dtype=torch.bfloat16, device="meta")},
            "kv: got a tensor on meta, accepted is cpu, where q is",
        ),
        (
            {"topk_length": torch.zeros(3, dtype=torch.int32, device="meta")},
            "topk_length: got a tensor on meta, accepted is cpu, where q is",
        ),
        ({"sm_scale": float("inf")}, "sm_scale: got inf, accepted is a finite float"),
        ({"sm_scale": torch.tensor(1.0)}, "sm_scale: got () float32, accepted is a finite float"),
        ({"topk_length": torch.zeros(2, dtype=torch.int32)}, "topk_length: got (2,) int32, accepted is (3,) int32"),
    ],
)
def test_prefill_errors(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros((3, 4, 576), dtype=torch.bfloat16),
        "kv": torch.zeros((9, 1, 576), dtype=torch.bfloat16),
        "indices": torch.zeros((3, 1, 4), dtype=torch.int32),
        "sm_scale": 0.1,
        **change,
    }
    with pytest.raises(ValueError, match=re.escape(words)):
        flash_mla_sparse_fwd(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk": None}, "topk: got None, accepted is the number of index columns: dense attention is not served here"),
        (
            {"cache_seqlens": torch.zeros(2, 2)},
            "cache_seqlens: got (2, 2) float32, accepted is a (batch,) int32 tensor",
        ),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens: got (2,) float32, accepted is a (batch,) int32 tensor"),
        ({"num_q_tokens_per_head_k": 65}, "num_q_tokens_per_head_k: got 65, accepted is seq_len_q · num_heads_q"),
        ({"num_heads_k": 2}, "num_heads_k: got 2, accepted is 1"),
        ({"num_heads_q": None}, "num_heads_q: got None, accepted is the number of query heads"),
        ({"num_q_tokens_per_head_k": 3}, "num_q_tokens_per_head_k: got 3, accepted is seq_len_q · num_heads_q"),
    ],
)
def test_metadata_errors(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "cache_seqlens": torch.zeros(3, dtype=torch.int32),
        "num_q_tokens_per_head_k": 128,
        "num_heads_k": 1,
        "num_heads_q": 64,
        "topk": 512,
        **change,
    }
    with pytest.raises(ValueError, match=re.escape(words)):
        get_mla_metadata(**given)


@pytest.mark.gpu
def test_capture_with_a_fresh_plan() -> None:
    """An engine's first call with a FlashMLASchedMeta may lie inside a graph capture; a replay follows new lengths."""
    lengths = torch.tensor([200, 3, 65], dtype=torch.int32)
    host = small_decode(topk_length=lengths)
    given = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in host.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_mla_with_kvcache(**{**given, "tile_scheduler_metadata": FlashMLASchedMeta()})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla_with_kvcache(**given)
    lengths.copy_(torch.tensor([1, 200, 0], dtype=torch.int32))
    given["topk_length"].copy_(lengths)
    graph.replay()
    want_out, want_lse = want_decode(host)
    assert relative_error(out.cpu(), want_out) <= 2.2e-3
    np.testing.assert_allclose(lse.cpu().numpy(), want_lse.float().numpy(), rtol=1e-5, atol=1e-5)
