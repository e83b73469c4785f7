# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's names and conventions over `sparse_mla_attention`: a drop-in for its sparse functions.

``sys.modules["flash_mla"] = sparsemla.integrations.flash_mla`` makes ``from flash_mla import
flash_mla_with_kvcache`` find this. Signatures and conventions are those of ``flash_mla/flash_mla_interface.py`` at
github.com/deepseek-ai/FlashMLA, in two generations, and of the forks that serving engines build:

* classic (from September 2025): ``get_mla_metadata(cache_seqlens, …, topk=…)`` returns the tensors
  (tile_scheduler_metadata, num_splits), handed to ``flash_mla_with_kvcache`` one by one;
* current (from January 2026): ``get_mla_metadata()`` returns (`FlashMLASchedMeta`, None); the plan is filled in by the
  first call that uses it.

What differs from the peer, always towards serving more:

* Plans never go stale. The peer reuses a plan as it is, and asks the caller to keep the lengths the same; with
  others it drops keys silently. Here the tensors are written for those who look at them, and the work is planned from
  the lengths of the call at hand (on the CPU) or by the kernel itself (on CUDA, where looking at lengths would wait for
  the device).
* Any number of heads from 1 to 128 (the peer: 64 and 128), any topk, any page size, the CPU, and bfloat16 caches in
  `flash_mla_with_kvcache`.
* Indices outside the cache are "no key" in both functions (the peer's decode reads them).
* Refusals are ValueErrors (the peer: AssertionError and RuntimeError), before anything is written.

Logarithms: both functions return the *natural* logarithm, as current FlashMLA does (its `flash_mla_sparse_fwd` of
September 2025 returned max_logits and lse in base 2: multiply by log2(e) for a caller from then). A row without any
key has out = 0 and lse = **+inf**, where `sparse_mla_attention` says -inf.

Dense attention (``indices=None``, and the ``flash_attn_varlen_*`` functions) is not here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat
from sparsemla.schedule import D_V, META_COLUMNS, SM90, SM100, ArchPolicy, SplitSchedule

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_DENSE = "accepted is a (batch, seq_len_q, topk) int32 tensor: dense attention is not served here, only sparse"
_FORMATS = {
    "V32": KVFormat.FP8_DS_MLA,
    "V32_NO_ROPE": KVFormat.FP8_NOPE,
    "V4": KVFormat.FP8_V4,
    "V41": KVFormat.FP8_V41,
}
_BY_SHAPE = {(576, 656): KVFormat.FP8_DS_MLA, (512, 584): KVFormat.FP8_V4, (512, 528): KVFormat.FP8_V41}
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
"""The peer's dtypes of a quantised cache: all mean bytes here."""
_MAX_LOGIT_FACTOR = 2.0**20
"""Scaled by this, log-sum-exp is the maximum to within log(topk) / 2^20 (7e-6 where 2048 keys tie)."""

_SCALE_MAX = torch.finfo(torch.float32).max / _MAX_LOGIT_FACTOR
"""Largest sm_scale, so that its multiple is a float32 too."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The peer's plan object: empty until the first call that uses it, bound to that call's shapes from then on.

    `tile_scheduler_metadata` (parts, 8) and `num_splits` (batch + 1,) are int32 tensors on the query's device, in the
    peer's format. On the CPU they follow the lengths of each call, in place; on CUDA they hold the plan for full
    length, written by the first call outside a graph capture.
    """

    @dataclasses.dataclass
    class Config:
        """The shapes a plan is bound to."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None

    def _check(self, config: Config) -> None:
        """The shapes of the first call bind all later ones."""
        if self.config is None:
            return
        for field in dataclasses.fields(config):
            got, bound = getattr(config, field.name), getattr(self.config, field.name)
            if got != bound:
                raise ValueError(
                    f"tile_scheduler_metadata: got a FlashMLASchedMeta bound to {field.name} = {bound} in a call with "
                    f"{field.name} = {got}, accepted is one of the same shapes; get_mla_metadata() makes a new one"
                )

    def _write(self, config: Config, plan: SplitSchedule | None, device: torch.device) -> None:
        """Binds the shapes and writes the plan, if there is one."""
        self.config, self.have_initialized = config, True
        if plan is None:
            return
        meta, splits = plan.tensors(device)
        if self.tile_scheduler_metadata is None or self.num_splits is None:
            self.tile_scheduler_metadata, self.num_splits = meta, splits
        else:
            self.tile_scheduler_metadata.copy_(meta)
            self.num_splits.copy_(splits)


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    """A plan for `flash_mla_with_kvcache`.

    Without arguments (current): (an empty FlashMLASchedMeta, None).

    With arguments (classic): the plan of one batch of sparse decoding, tensors on cache_seqlens's device.

    Args:
        cache_seqlens: (batch,) int32; only its size and device matter, a sparse plan does not depend on its values.
        num_q_tokens_per_head_k: seq_len_q · num_heads_q // num_heads_k.
        num_heads_k: 1.
        num_heads_q: query heads.
        is_fp8_kvcache: for the record; the plan is the same.
        topk: index columns.

    Returns:
        tile_scheduler_metadata (parts, 8) int32 and num_splits (batch + 1,) int32; or (FlashMLASchedMeta, None).

    Raises:
        ValueError: topk is None (dense), more than one key head, a number or shape that is not as above.
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    if topk is None:
        raise ValueError("topk: got None, accepted is the number of index columns: dense attention is not served here")
    if not isinstance(cache_seqlens, torch.Tensor) or cache_seqlens.dim() != 1 or cache_seqlens.dtype != torch.int32:
        raise ValueError(f"cache_seqlens: got {_shape(cache_seqlens)}, accepted is a (batch,) int32 tensor")
    if num_heads_k != 1:
        raise ValueError(f"num_heads_k: got {num_heads_k}, accepted is 1")
    if not isinstance(num_heads_q, int) or num_heads_q < 1:
        raise ValueError(f"num_heads_q: got {num_heads_q}, accepted is the number of query heads, required with topk")
    if (
        not isinstance(num_q_tokens_per_head_k, int)
        or num_q_tokens_per_head_k < num_heads_q
        or num_q_tokens_per_head_k % num_heads_q
    ):
        raise ValueError(
            f"num_q_tokens_per_head_k: got {num_q_tokens_per_head_k}, accepted is seq_len_q · num_heads_q "
            f"with num_heads_q = {num_heads_q}"
        )
    policy, sms = _device_policy(cache_seqlens.device)
    return SplitSchedule.plan(
        requests=cache_seqlens.shape[0],
        heads=num_heads_q,
        topk=topk,
        rows_per_request=num_q_tokens_per_head_k // num_heads_q,
        policy=policy,
        num_sms=sms,
    ).tensors(cache_seqlens.device)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    kv_format: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decoding over a paged cache.

    Args:
        q: (batch, seq_len_q, heads, d) bfloat16, d 576 or 512.
        k_cache: (pages, page_block_size, 1, bytes a token), a one-byte dtype; pages may be strided. Also a bfloat16
            (pages, page_block_size, 1, d) with is_fp8_kvcache=False.
        block_table, cache_seqlens: for dense attention; ignored, as the peer does with indices.
        head_dim_v: 512.
        tile_scheduler_metadata: a FlashMLASchedMeta (then num_splits is None), or the classic tensor (parts, 8) int32.
        num_splits: the classic tensor (batch + 1,) int32.
        softmax_scale: by default d ** -0.5.
        causal: False.
        is_fp8_kvcache: whether k_cache holds quantised records.
        indices: (batch, seq_len_q, topk) int32: page · page_block_size + offset; -1, or anything outside the cache, is
            "no key".
        attn_sink: (heads,) float32: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); lse is without it.
        extra_k_cache, extra_indices_in_kvcache: further keys, in the formats of k_cache and indices.
        topk_length, extra_topk_length: (batch,) int32: only that many leftmost indices count.
        kv_format: "V32", "V32_NO_ROPE", "V4" or "V41". By default from the bytes a token, as in the forks that have
            this argument: 656 is V32, 584 V4, 528 V41 (V32_NO_ROPE has as many and must be named).
        out: (batch, seq_len_q, heads, 512) bfloat16 to write into.

    Returns:
        out (batch, seq_len_q, heads, 512) bfloat16; lse (batch, heads, seq_len_q) float32, a transposed view, natural
        logarithm, +inf for a row without keys.

    Raises:
        ValueError: indices is None (dense), causal, a FlashMLASchedMeta bound to other shapes, or anything not as
            above.
    """
    if indices is None:
        raise ValueError(f"indices: got None, {_DENSE}")
    if causal:
        raise ValueError("causal: got True, accepted is False with indices: they say which keys count")
    _check_d_v("head_dim_v", head_dim_v)
    _check_dims("q", q, 4, "(batch, seq_len_q, heads, head_dim) bfloat16", torch.bfloat16)
    batch, s_q, heads, d = q.shape
    _check_indices("indices", indices, batch, s_q)
    cache = _wrap("k_cache", k_cache, q, is_fp8_kvcache, kv_format)
    rows = batch * s_q
    extra = _extra(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, q, is_fp8_kvcache, kv_format)
    lengths = _per_row("topk_length", topk_length, batch, s_q, q.device)
    config = FlashMLASchedMeta.Config(
        b=batch,
        s_q=s_q,
        h_q=heads,
        page_block_size=cache.block_size,
        h_k=1,
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=indices.shape[-1],
        extra_page_block_size=None if extra is None else extra[0].block_size,
        extra_topk=None if extra is None else extra[1].shape[-1],
    )
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        _check_classic(tile_scheduler_metadata, num_splits, batch)
    elif num_splits is not None:
        raise ValueError(f"num_splits: got {_shape(num_splits)}, accepted is None with a FlashMLASchedMeta")
    else:
        tile_scheduler_metadata._check(config)
    on_host = q.device.type == "cpu"
    plan = _plan(q, indices, topk_length, extra, extra_topk_length) if on_host else None
    if out is not None and (
        not isinstance(out, torch.Tensor) or tuple(out.shape) != (batch, s_q, heads, D_V) or out.dtype != torch.bfloat16
    ):
        raise ValueError(f"out: got {_shape(out)}, accepted is {(batch, s_q, heads, D_V)} bfloat16")
    result = torch.empty((batch, s_q, heads, D_V), dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty((batch, s_q, heads), dtype=torch.float32, device=q.device)
    sparse_mla_attention(
        q.reshape(rows, heads, d),
        cache,
        indices.reshape(rows, indices.shape[-1]),
        softmax_scale=d**-0.5 if softmax_scale is None else softmax_scale,
        topk_lengths=lengths,
        attn_sink=attn_sink,
        extra=extra,
        schedule=plan,
        out=_rows_of(result),
        lse=lse.view(rows, heads),
    )
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        if not on_host and tile_scheduler_metadata.num_splits is None and not torch.cuda.is_current_stream_capturing():
            # For show: the plan for full length, which needs no look at the lengths. The kernel has planned for itself.
            plan = _plan(q, indices, None, extra, None)
        tile_scheduler_metadata._write(config, plan, q.device)
    return result, _lonely_is_plus_inf(lse).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    *,
    out: torch.Tensor | None = None,
    return_max_logits: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """Sparse prefill over a flat bfloat16 kv.

    Args:
        q: (s_q, heads, d) bfloat16, d 576 or 512.
        kv: (s_kv, 1, d) bfloat16, rows may be strided.
        indices: (s_q, 1, topk) int32; -1, or anything outside [0, s_kv), is "no key".
        sm_scale: multiplies q · k.
        d_v: 512.
        attn_sink: (heads,) float32: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); the rest is without
            it.
        topk_length: (s_q,) int32: only that many leftmost indices of a row count.
        indexer_topk: above 0, a fourth result: the lse over the first indexer_topk indices alone.
        out: (s_q, heads, 512) bfloat16 to write into.
        return_max_logits: False puts None in the place of max_logits and saves half of the time: it is a second pass
            over the keys, which the peer has for free and almost no caller reads.

    Returns:
        (out (s_q, heads, 512) bfloat16, max_logits (s_q, heads) float32, lse (s_q, heads) float32), and lse_indexer
        (s_q, heads) where indexer_topk is above 0. max_logits is the largest sm_scale · q · k of a row, -inf without
        keys, right to 1e-5. lse is the natural logarithm, +inf without keys.

    Raises:
        ValueError: anything not as above.
    """
    _check_d_v("d_v", d_v)
    _check_dims("q", q, 3, "(s_q, heads, head_dim) bfloat16", torch.bfloat16)
    _check_dims("kv", kv, 3, "(s_kv, 1, head_dim)")
    if kv.shape[1] != 1 or kv.shape[2] != q.shape[2] or kv.dtype != torch.bfloat16:
        raise ValueError(f"kv: got {_shape(kv)}, accepted is (s_kv, 1, {q.shape[2]}) bfloat16")
    _check_dims("indices", indices, 3, f"({q.shape[0]}, 1, topk) int32", torch.int32)
    if tuple(indices.shape[:2]) != (q.shape[0], 1):
        raise ValueError(f"indices: got {_shape(indices)}, accepted is ({q.shape[0]}, 1, topk) int32")
    if isinstance(indexer_topk, bool) or not isinstance(indexer_topk, int) or indexer_topk < 0:
        raise ValueError(f"indexer_topk: got {indexer_topk!r}, accepted is an integer of at least 0")
    scale = _number("sm_scale", sm_scale)
    _per_row("topk_length", topk_length, q.shape[0], 1, q.device)
    cache = _wrap("kv", kv, q, False, None)
    columns = indices.squeeze(1)
    rows, heads = q.shape[:2]
    result = torch.empty((rows, heads, D_V), dtype=torch.bfloat16, device=q.device) if out is None else out

    def attend(named: torch.Tensor, factor: float, sink: torch.Tensor | None = None) -> torch.Tensor:
        _, lse = sparse_mla_attention(
            q, cache, named, softmax_scale=factor, topk_lengths=topk_length, attn_sink=sink, out=result
        )
        return lse

    # Each pass overwrites `result`; the one that is wanted comes last, so nothing but small tensors is allocated.
    max_logits = attend(columns, scale * _MAX_LOGIT_FACTOR) / _MAX_LOGIT_FACTOR if return_max_logits else None
    indexer_lse = attend(columns[:, :indexer_topk], scale) if indexer_topk else None
    lse = _lonely_is_plus_inf(attend(columns, scale, attn_sink))
    if indexer_lse is None:
        return result, max_logits, lse
    return result, max_logits, lse, _lonely_is_plus_inf(indexer_lse)


def _extra(
    data: torch.Tensor | None,
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
    q: torch.Tensor,
    is_fp8: bool,
    kv_format: str | None,
) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor | None] | None:
    """The second set of keys, per row."""
    batch, s_q = q.shape[:2]
    if data is None:
        for name, value in (("extra_indices_in_kvcache", indices), ("extra_topk_length", lengths)):
            if value is not None:
                raise ValueError(f"{name}: got {_shape(value)} without extra_k_cache, accepted is None then")
        return None
    if indices is None:
        raise ValueError("extra_indices_in_kvcache: got None, required with extra_k_cache")
    _check_indices("extra_indices_in_kvcache", indices, batch, s_q)
    return (
        _wrap("extra_k_cache", data, q, is_fp8, kv_format),
        indices.reshape(batch * s_q, indices.shape[-1]),
        _per_row("extra_topk_length", lengths, batch, s_q, q.device),
    )


def _plan(
    q: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra: tuple[PagedKVCache, torch.Tensor, torch.Tensor | None] | None,
    extra_topk_length: torch.Tensor | None,
) -> SplitSchedule:
    """The peer's plan for (batch,) lengths, which must be readable on the host; None: for full length."""
    policy, sms = _device_policy(q.device)
    extra_topk = 0 if extra is None else extra[1].shape[-1]
    return SplitSchedule.plan(
        requests=q.shape[0],
        heads=q.shape[2],
        topk=indices.shape[-1],
        rows_per_request=max(q.shape[1], 1),
        topk_lengths=topk_length,
        extra_topk=extra_topk,
        extra_topk_lengths=extra_topk_length if extra_topk else None,
        policy=policy,
        num_sms=sms,
        d_qk=q.shape[3],
    )


def _device_policy(device: torch.device) -> tuple[ArchPolicy, int | None]:
    """The scheduling policy and SM count of a device; an H200's on the CPU."""
    if device.type != "cuda":
        return SM90, None
    properties = torch.cuda.get_device_properties(device)
    return (SM100 if properties.major >= 10 else SM90), properties.multi_processor_count


def _wrap(name: str, data: torch.Tensor, q: torch.Tensor, is_fp8: bool, kv_format: str | None) -> PagedKVCache:
    """The peer's cache tensor as a PagedKVCache, nothing copied; on the device and of the width of q."""
    d = q.shape[-1]
    if not isinstance(data, torch.Tensor) or data.dim() not in (3, 4):
        raise ValueError(f"{name}: got {_shape(data)}, accepted is (pages, page_block_size, 1, bytes a token)")
    if data.dim() == 4 and data.shape[2] != 1:
        raise ValueError(f"{name}: got {data.shape[2]} key heads in {_shape(data)}, accepted is 1")
    if data.device != q.device:
        raise ValueError(f"{name}: got a tensor on {data.device}, accepted is {q.device}, where q is")
    if is_fp8:
        if data.dtype not in _BYTES:
            raise ValueError(
                f"{name}: got {_shape(data)} with is_fp8_kvcache=True, accepted are uint8, int8 and float8_e4m3fn"
            )
        fmt = _format(name, data, d, kv_format)
        data = data.view(torch.uint8)
    elif data.dtype == torch.bfloat16:
        fmt = KVFormat.BF16
    else:
        raise ValueError(f"{name}: got {_shape(data)} with is_fp8_kvcache=False, accepted is bfloat16")
    try:
        cache = PagedKVCache.wrap(data, fmt)
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix('data: ')}") from None
    if cache.d_qk != d:
        raise ValueError(f"{name}: got {fmt.value} records of {cache.d_qk} columns, accepted are {d} columns as in q")
    return cache


def _format(name: str, data: torch.Tensor, d: int, kv_format: str | None) -> KVFormat:
    if kv_format is not None:
        if not isinstance(kv_format, str) or kv_format not in _FORMATS:
            raise ValueError(f"kv_format: got {kv_format!r}, accepted are {', '.join(map(repr, _FORMATS))} and None")
        return _FORMATS[kv_format]
    fmt = _BY_SHAPE.get((d, data.shape[-1]))
    if fmt is None:
        raise ValueError(
            f"{name}: got {data.shape[-1]} bytes a token with head_dim {d}, "
            "accepted are 656 with head_dim 576, 584 or 528 with head_dim 512"
        )
    return fmt


def _per_row(
    name: str, lengths: torch.Tensor | None, batch: int, s_q: int, device: torch.device
) -> torch.Tensor | None:
    """(batch,) lengths as (batch · s_q,)."""
    if lengths is None:
        return None
    if not isinstance(lengths, torch.Tensor) or tuple(lengths.shape) != (batch,) or lengths.dtype != torch.int32:
        raise ValueError(f"{name}: got {_shape(lengths)}, accepted is ({batch},) int32")
    if lengths.device != device:
        raise ValueError(f"{name}: got a tensor on {lengths.device}, accepted is {device}, where q is")
    return lengths.unsqueeze(1).expand(batch, s_q).reshape(-1)


def _rows_of(out: torch.Tensor) -> torch.Tensor:
    """(batch, seq_len_q, heads, 512) as (rows, heads, 512), the same memory."""
    try:
        return out.view(out.shape[0] * out.shape[1], *out.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"out: got strides {out.stride()}, accepted is stride(0) = seq_len_q · stride(1), as in a contiguous tensor"
        ) from None


def _lonely_is_plus_inf(lse: torch.Tensor) -> torch.Tensor:
    """-inf turned to the peer's +inf, in place and without a mask in memory."""
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def _check_classic(metadata: Any, num_splits: Any, batch: int) -> None:
    """Shapes of the classic tensors; the numbers in them are not used, so they cannot be stale."""
    if not isinstance(metadata, torch.Tensor) or metadata.dim() != 2 or metadata.shape[1] != META_COLUMNS:
        raise ValueError(
            f"tile_scheduler_metadata: got {_shape(metadata)}, accepted is a FlashMLASchedMeta, or the "
            f"(parts, {META_COLUMNS}) int32 tensor of get_mla_metadata"
        )
    if metadata.dtype != torch.int32:
        raise ValueError(f"tile_scheduler_metadata: got {_shape(metadata)}, accepted is int32")
    if (
        not isinstance(num_splits, torch.Tensor)
        or tuple(num_splits.shape) != (batch + 1,)
        or num_splits.dtype != torch.int32
    ):
        raise ValueError(
            f"num_splits: got {_shape(num_splits)}, accepted is the ({batch + 1},) int32 tensor of get_mla_metadata"
        )


def _check_indices(name: str, indices: Any, batch: int, s_q: int) -> None:
    _check_dims(name, indices, 3, "(batch, seq_len_q, topk) int32")
    if tuple(indices.shape[:2]) != (batch, s_q) or indices.dtype != torch.int32:
        raise ValueError(f"{name}: got {_shape(indices)}, accepted is ({batch}, {s_q}, topk) int32")


def _number(name: str, given: Any) -> float:
    number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not number or given != given or given in (math.inf, -math.inf):
        raise ValueError(f"{name}: got {_shape(given)}, accepted is a finite float")
    if not -_SCALE_MAX <= given <= _SCALE_MAX:  # before float(), which overflows on a large integer
        raise ValueError(f"{name}: got a number above {_SCALE_MAX:.1e}, accepted is one of at most that magnitude")
    return float(given)


def _check_dims(name: str, given: Any, dims: int, accepted: str, dtype: torch.dtype | None = None) -> None:
    if not isinstance(given, torch.Tensor) or given.dim() != dims or dtype not in (None, given.dtype):
        raise ValueError(f"{name}: got {_shape(given)}, accepted is {accepted}")


def _check_d_v(name: str, given: Any) -> None:
    if given != D_V:
        raise ValueError(f"{name}: got {given}, accepted is {D_V}")


def _shape(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return f"{tuple(given.shape)} {str(given.dtype).removeprefix('torch.')}"
    return repr(given) if given is None or isinstance(given, bool | int | float | str) else type(given).__name__
