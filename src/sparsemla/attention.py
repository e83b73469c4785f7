# SPDX-License-Identifier: Apache-2.0
"""`sparse_mla_attention`: the one public attention call, for prefill, decode and mixed batches in any cache format."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from sparsemla.cache import PagedKVCache
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall, ExtraKeys
from sparsemla.schedule import D_V, SplitSchedule

MAX_HEADS = 128
"""Most query heads of a call."""
_FLOAT32_MAX = torch.finfo(torch.float32).max
_POSITIONS = 2**31
"""Positions are int32; a shard's round over all ranks is no longer."""

Query: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]"
Extra: TypeAlias = (
    "ExtraKeys | tuple[PagedKVCache, torch.Tensor] | tuple[PagedKVCache, torch.Tensor, torch.Tensor | None]"
)


def sparse_mla_attention(
    q: Query,
    cache: PagedKVCache,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    context_shard: tuple[int, int, int] | None = None,
    attn_sink: torch.Tensor | None = None,
    extra: Extra | None = None,
    schedule: SplitSchedule | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends, for every query row, to the keys its indices name, straight from the quantised cache.

    T query rows (tokens, of any mixture of requests), H query heads, one key and value head; the value is the first 512
    columns of the key. All tensors lie on one device. Nothing here waits for the device, so a call can be captured
    in a CUDA graph, and a replay sees what the tensors hold then. Inference only: the result carries no gradient.

    An index that names no record of the cache (-1, or anything outside [0, num_slots)), a position that its request
    or this rank does not hold, and a row whose request id is out of range are "no key": never read, never counted. A
    row without any key answers out = 0 and lse = -inf.

    Args:
        q: (T, H, d_qk) bfloat16, columns [latent | rotary]; or the pair (q_nope (T, H, d_nope), q_rope (T, H,
            d_rope)), where d_nope and d_rope are the cache layout's (512 and 64; 448 and 64 for V4); q_rope is None
            for a layout without rotary columns. No concatenated copy is made. Last dimension contiguous, other
            strides free. H from 1 to 128.
        cache: the keys.
        indices: (T, topk) int32: slots, or positions inside the row's request when `block_table` is given. The last
            dimension is contiguous, the row stride free.
        softmax_scale: a number, finite in float32; multiplies q · k.
        topk_lengths: (T,) int32: only that many leftmost indices of a row count; clamped to [0, topk].
        block_table: (R, P) int32: page of the cache that holds positions i · block_size and on of a request.
            Positions are turned into slots where the keys are read; no converted copy of `indices` is made.
        request_ids: (T,) int32: the request of each row; given exactly when `block_table` is.
        context_shard: (rank, world, interleave), only with `block_table`: attend only the positions this rank holds,
            position p belonging to rank (p // interleave) % world and being local position
            p // (interleave · world) · interleave + p % interleave there; interleave · world below 2^31. Merge ranks'
            answers by their lse.
        attn_sink: (H,) float32: out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)). The returned lse is
            without it.
        extra: a second (cache, indices) or (cache, indices, topk_lengths) attended under the same softmax; indices
            (T, topk2) int32 are slots of its own cache, whose layout has the same columns.
        schedule: a plan for T rows, to reuse over layers. One that splits nothing means "do not split": the same row
            then has the same bits in every batch. None: the kernel plans for itself.
        out: (T, H, 512) bfloat16 to write into, last dimension contiguous, other strides free; not overlapping an
            input.
        lse: (T, H) float32 to write into, any strides.

    Returns:
        out (T, H, 512) bfloat16 and lse (T, H) float32, the natural logarithm of the sum of exp(softmax_scale · q · k).

    Raises:
        ValueError: a shape, dtype, device or layout is not as above; it names the argument, what was given, what is
            accepted.
    """
    if not isinstance(cache, PagedKVCache):
        raise ValueError(f"cache: got {_describe(cache)}, accepted is a PagedKVCache")
    q_nope, q_rope = _query(q, cache)
    rows, heads, _ = q_nope.shape
    device = q_nope.device
    _same_device("cache", cache.data, device)
    _matrix("indices", indices, rows, device)
    _vector("topk_lengths", topk_lengths, rows, torch.int32, device)
    _vector("attn_sink", attn_sink, heads, torch.float32, device)
    shard = _positions(block_table, request_ids, context_shard, rows, device)
    call = AttentionCall(
        q_nope=q_nope,
        q_rope=q_rope,
        cache=cache,
        indices=indices,
        softmax_scale=_scale(softmax_scale),
        topk_lengths=topk_lengths,
        block_table=block_table,
        request_ids=request_ids,
        context_shard=shard,
        attn_sink=attn_sink,
        extra=_extra(extra, cache, rows, device),
        schedule=_schedule(schedule, rows, heads),
        out=_output("out", out, (rows, heads, D_V), torch.bfloat16, device),
        lse=_output("lse", lse, (rows, heads), torch.float32, device),
    )
    if rows:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            registry.select(call).run(call)
    return call.out, call.lse


def _query(q: Any, cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The query as (q_nope, q_rope or None), views of what was given."""
    layout = cache.layout
    if isinstance(q, tuple | list):
        if len(q) != 2:
            raise ValueError(f"q: got a sequence of {len(q)}, accepted is a tensor or the pair (q_nope, q_rope)")
        q_nope, q_rope = q
        _query_part("q[0] (q_nope)", q_nope, layout.d_nope, cache)
        if layout.d_rope == 0:
            if q_rope is not None:
                raise ValueError(
                    f"q[1] (q_rope): got {_describe(q_rope)}, accepted is None: {layout.format.value} records of "
                    f"{layout.d_qk} columns have no separate rotary columns"
                )
            return q_nope, None
        _query_part("q[1] (q_rope)", q_rope, layout.d_rope, cache)
        if q_rope.shape[:2] != q_nope.shape[:2]:
            raise ValueError(
                f"q[1] (q_rope): got shape {tuple(q_rope.shape)}, accepted is "
                f"{(*q_nope.shape[:2], layout.d_rope)} as q_nope has shape {tuple(q_nope.shape)}"
            )
        _same_device("q[1] (q_rope)", q_rope, q_nope.device)
        return q_nope, q_rope
    _query_part("q", q, layout.d_qk, cache)
    if layout.d_rope == 0:
        return q, None
    return q[..., : layout.d_nope], q[..., layout.d_nope :]


def _query_part(name: str, q: Any, columns: int, cache: PagedKVCache) -> None:
    accepted = f"accepted is (T, H, {columns}) bfloat16 for {cache.layout.format.value} records"
    if not isinstance(q, torch.Tensor):
        raise ValueError(f"{name}: got {_describe(q)}, {accepted}")
    if q.dim() != 3 or q.shape[2] != columns or q.dtype != torch.bfloat16:
        raise ValueError(f"{name}: got {_describe(q)}, {accepted}")
    if not 1 <= q.shape[1] <= MAX_HEADS:
        raise ValueError(f"{name}: got {q.shape[1]} heads, accepted are 1 to {MAX_HEADS}")
    _last_contiguous(name, q)


def _positions(
    block_table: torch.Tensor | None,
    request_ids: torch.Tensor | None,
    context_shard: Any,
    rows: int,
    device: torch.device,
) -> tuple[int, int, int] | None:
    """Checks the three arguments that turn positions into slots; the shard as a tuple of ints."""
    if block_table is None:
        for name, given in (("request_ids", request_ids), ("context_shard", context_shard)):
            if given is not None:
                raise ValueError(f"{name}: got {_describe(given)} without block_table, accepted is None then")
        return None
    if request_ids is None:
        raise ValueError(f"request_ids: got None with block_table, accepted is ({rows},) int32")
    _matrix("block_table", block_table, None, device)
    _vector("request_ids", request_ids, rows, torch.int32, device)
    if context_shard is None:
        return None
    accepted = "accepted is (rank, world, interleave) with 0 <= rank < world and interleave >= 1"
    if not isinstance(context_shard, Sequence) or len(context_shard) != 3:
        raise ValueError(f"context_shard: got {_describe(context_shard)}, {accepted}")
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in context_shard):
        raise ValueError(f"context_shard: got {tuple(context_shard)}, {accepted}")
    rank, world, interleave = (int(n) for n in context_shard)
    if not (0 <= rank < world and interleave >= 1):
        raise ValueError(f"context_shard: got {(rank, world, interleave)}, {accepted}")
    if world * interleave >= _POSITIONS:
        raise ValueError(f"context_shard: got {(rank, world, interleave)}, accepted is world * interleave below 2**31")
    return rank, world, interleave


def _extra(extra: Any, cache: PagedKVCache, rows: int, device: torch.device) -> ExtraKeys | None:
    if extra is None:
        return None
    if isinstance(extra, ExtraKeys):
        extra = (extra.cache, extra.indices, extra.topk_lengths)
    if not isinstance(extra, tuple | list) or len(extra) not in (2, 3):
        raise ValueError(
            f"extra: got {_describe(extra)}, accepted is (cache, indices) or (cache, indices, topk_lengths)"
        )
    keys, indices, *rest = extra
    if not isinstance(keys, PagedKVCache):
        raise ValueError(f"extra[0] (cache): got {_describe(keys)}, accepted is a PagedKVCache")
    ours, theirs = cache.layout, keys.layout
    if (theirs.d_qk, theirs.d_nope, theirs.d_rope) != (ours.d_qk, ours.d_nope, ours.d_rope):
        raise ValueError(
            f"extra[0] (cache): got {theirs.format.value} records of {theirs.d_nope} + {theirs.d_rope} columns, "
            f"accepted are records of {ours.d_nope} + {ours.d_rope} columns like those of cache ({ours.format.value})"
        )
    _same_device("extra[0] (cache)", keys.data, device)
    _matrix("extra[1] (indices)", indices, rows, device)
    lengths = rest[0] if rest else None
    _vector("extra[2] (topk_lengths)", lengths, rows, torch.int32, device)
    return ExtraKeys(keys, indices, lengths)


def _schedule(schedule: Any, rows: int, heads: int) -> SplitSchedule | None:
    if schedule is None:
        return None
    if not isinstance(schedule, SplitSchedule):
        raise ValueError(f"schedule: got {_describe(schedule)}, accepted is a SplitSchedule or None")
    if schedule.num_rows != rows:
        raise ValueError(
            f"schedule: got a plan for {schedule.num_requests} requests of {schedule.rows_per_request} rows, "
            f"accepted is one for {rows} rows in all"
        )
    if not schedule.nothing_split and schedule.heads != heads:
        raise ValueError(f"schedule: got a plan for {schedule.heads} heads, accepted is one for {heads}")
    return schedule


def _scale(softmax_scale: Any) -> float:
    # A tensor would do, but reading one from a device waits for it.
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float | np.integer | np.floating):
        raise ValueError(f"softmax_scale: got {_describe(softmax_scale)}, accepted is a finite float")
    # Python compares an integer of any size with a float exactly; converting it first might overflow.
    if not -_FLOAT32_MAX <= softmax_scale <= _FLOAT32_MAX:
        raise ValueError(f"softmax_scale: got {_number(softmax_scale)}, accepted is a finite float (float32)")
    return float(softmax_scale)


def _number(given: Any) -> str:
    """A number, for a message: thousands of digits are not printed."""
    return "an integer above 10**30" if isinstance(given, int) and abs(given) > 10**30 else str(given)


def _output(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape or given.dtype != dtype:
        raise ValueError(f"{name}: got {_describe(given)}, accepted is {shape} {_dtype(dtype)}")
    _same_device(name, given, device)
    if len(shape) == 3:
        _last_contiguous(name, given)
    if any(stride == 0 and size > 1 for stride, size in zip(given.stride(), shape, strict=True)):
        raise ValueError(f"{name}: got strides {given.stride()}, accepted is one element in memory for each of {shape}")
    return given


def _matrix(name: str, given: Any, rows: int | None, device: torch.device) -> None:
    """(rows, any) int32, last dimension contiguous."""
    accepted = f"accepted is ({'R' if rows is None else rows}, {'P' if rows is None else 'topk'}) int32"
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.dtype != torch.int32:
        raise ValueError(f"{name}: got {_describe(given)}, {accepted}")
    if rows is not None and given.shape[0] != rows:
        raise ValueError(f"{name}: got {_describe(given)}, {accepted}")
    _same_device(name, given, device)
    _last_contiguous(name, given)


def _vector(name: str, given: Any, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """(size,) of dtype, contiguous; None is fine."""
    if given is None:
        return
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != (size,) or given.dtype != dtype:
        raise ValueError(f"{name}: got {_describe(given)}, accepted is ({size},) {_dtype(dtype)} or None")
    _same_device(name, given, device)
    _last_contiguous(name, given)


def _same_device(name: str, given: torch.Tensor, device: torch.device) -> None:
    if given.device != device:
        raise ValueError(f"{name}: got a tensor on {given.device}, accepted is {device}, where q is")


def _last_contiguous(name: str, given: torch.Tensor) -> None:
    if given.shape[-1] > 1 and given.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {given.stride()}, accepted is a contiguous last dimension (stride 1)")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(given: Any) -> str:
    """What was given, for a message: never a tensor's values, which may lie on a device."""
    if isinstance(given, torch.Tensor):
        return f"{tuple(given.shape)} {_dtype(given.dtype)}"
    if given is None or isinstance(given, bool | int | float | str):
        return repr(given)
    if isinstance(given, tuple | list):
        return f"{type(given).__name__} of {len(given)}"
    return type(given).__name__
