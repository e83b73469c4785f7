# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: sparse MLA attention, one query row at a time, written to be obviously right.

It takes the arguments of `sparsemla.sparse_mla_attention` and is what every kernel is compared with. It reads each key
exactly as stored (the product scale · e4m3 in float64) and never touches a record that no index names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparsemla.cache import slots_from_positions

if TYPE_CHECKING:
    from sparsemla.cache import PagedKVCache


def reference_attention(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    context_shard: tuple[int, int, int] | None = None,
    attn_sink: torch.Tensor | None = None,
    extra: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over the keys its indices name.

    Args:
        q: (T, H, d_qk), or the pair (q_nope (T, H, d_nope), q_rope (T, H, d_rope) or None).
        cache: the keys; the value of a key is its first 512 columns.
        indices: (T, topk) integer: slots of the cache, or with `block_table` positions inside each row's request. An
            index outside the pool is "no key". A key named twice counts twice.
        softmax_scale: multiplies q·k.
        topk_lengths: (T,): only that many leftmost entries of a row count; clamped to [0, topk].
        block_table, request_ids, context_shard: see `sparsemla.cache.slots_from_positions`.
        attn_sink: (H,): a further logit without a value: out *= exp(lse) / (exp(lse) + exp(sink)). ±inf allowed.
        extra: a second (cache, indices) or (cache, indices, lengths or None), or an object with the attributes cache,
            indices and topk_lengths, attended together with the first; its indices are always slots.

    Returns:
        out (T, H, 512) float64; lse (T, H) float64, natural log of the sum of exp(logit), the sink not counted.
        A row without keys has out = 0 and lse = -inf.

    Raises:
        ValueError: shapes that do not fit; it names the argument, what was given, what is accepted.
    """
    if isinstance(q, tuple):
        parts = [part for part in q if part is not None]
        q = torch.cat(parts, dim=-1)
    _check(q, cache, indices, topk_lengths, attn_sink)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise ValueError(f"softmax_scale: got {_told(softmax_scale)}, accepted is a number")
    if block_table is None and not (request_ids is None and context_shard is None):
        name = "context_shard" if request_ids is None else "request_ids"
        raise ValueError(f"{name}: got one without block_table, accepted is None then")
    rows, heads, _ = q.shape
    device = q.device
    out = torch.zeros((rows, heads, cache.layout.d_v), dtype=torch.float64, device=device)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64, device=device)

    slots = indices.to(torch.int64)
    if block_table is not None:
        if request_ids is None:
            raise ValueError("request_ids: got None, required with block_table")
        slots = slots_from_positions(
            block_table, request_ids, indices, cache.block_size, context_shard, num_slots=cache.num_slots
        )
    key_sets = [(cache, slots, topk_lengths)]
    if extra is not None:
        if isinstance(extra, tuple):
            if len(extra) not in (2, 3):
                raise ValueError(f"extra: got a tuple of {len(extra)}, accepted is (cache, indices[, topk_lengths])")
            extra_cache, extra_indices, *rest = extra
            extra_lengths = rest[0] if rest else None
        else:
            if not all(hasattr(extra, name) for name in ("cache", "indices", "topk_lengths")):
                raise ValueError(f"extra: got {extra!r}, accepted is (cache, indices[, topk_lengths]) or an ExtraKeys")
            extra_cache, extra_indices, extra_lengths = extra.cache, extra.indices, extra.topk_lengths
        _check(q, extra_cache, extra_indices, extra_lengths, None, prefix="extra ")
        key_sets.append((extra_cache, extra_indices.to(torch.int64), extra_lengths))

    for row in range(rows):
        keys = torch.cat([_keys_of_row(row, *key_set) for key_set in key_sets])
        if keys.shape[0] == 0:
            continue
        logits = (q[row].to(torch.float64) @ keys.T) * softmax_scale
        lse[row] = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1)
        out[row] = weights @ keys[:, : cache.layout.d_v]
        if attn_sink is not None:
            out[row] *= torch.sigmoid(lse[row] - attn_sink.to(torch.float64)).unsqueeze(-1)
    return out, lse


def _check(
    q: torch.Tensor,
    cache: PagedKVCache,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    prefix: str = "",
) -> None:
    """ValueError where shapes do not fit each other."""
    width = getattr(getattr(cache, "layout", None), "d_qk", None)
    if width is None:
        raise ValueError(f"{prefix}cache: got {type(cache).__name__}, accepted is a PagedKVCache")
    if not isinstance(q, torch.Tensor) or q.dim() != 3 or q.shape[2] != width:
        raise ValueError(f"q: got {_told(q)}, accepted is (T, H, {width}) for {cache.layout.format.value} records")
    wanted: tuple[tuple[str, torch.Tensor | None, tuple[int, ...]], ...] = (
        (f"{prefix}topk_lengths", lengths, (q.shape[0],)),
        (f"{prefix}attn_sink", sink, (q.shape[1],)),
    )
    for name, given, shape in wanted:
        if given is not None and (not isinstance(given, torch.Tensor) or tuple(given.shape) != shape):
            raise ValueError(f"{name}: got {_told(given)}, accepted is {shape} or None")
    if (
        not isinstance(indices, torch.Tensor)
        or indices.dim() != 2
        or indices.shape[0] != q.shape[0]
        or indices.is_floating_point()
    ):
        raise ValueError(f"{prefix}indices: got {_told(indices)}, accepted is ({q.shape[0]}, topk) of an integer dtype")


def _told(given: Any) -> str:
    return f"{tuple(given.shape)} {given.dtype}" if isinstance(given, torch.Tensor) else type(given).__name__


def _keys_of_row(row: int, cache: PagedKVCache, slots: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """(keys, d_qk) float64: the latent vectors that row `row` attends to."""
    named = slots[row]
    if lengths is not None:
        named = named[: max(int(lengths[row]), 0)]
    named = named[(named >= 0) & (named < cache.num_slots)]
    return cache.read(named, dtype=torch.float64)
