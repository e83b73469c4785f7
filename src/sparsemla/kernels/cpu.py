# SPDX-License-Identifier: Apache-2.0
"""The blockwise kernel in plain torch: serves every call, on the CPU and, as the fallback, on CUDA.

It works as a GPU kernel does: tiles of keys gathered from the quantised records, an online softmax, pieces of split
requests left in float32 accumulators and merged by a combine. Beyond those accumulators it holds one tile of
dequantised keys, a fixed number of records whatever T, topk and the pool are. Nothing here synchronises with the
host on CUDA.

Numbers: all arithmetic is float32; the only rounding to bfloat16 is the output's. Each query row is scaled by a
power of two (exact) so that products with bfloat16 queries up to 3e38 stay finite; the softmax factor takes it back.

Bits: the shape of every tile depends on topk and the lengths of the rows in it, never on T, so without splits a
row's answer has the same bits whatever batch it comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.kernels.call import AttentionCall
from sparsemla.schedule import BLOCK_KEYS, D_V

_TILE_RECORDS = {"cpu": 1024, "cuda": 8192}
"""Records dequantised at a time. 1024 of 576 float32 columns are 2.4 MB, about what a core's cache holds; a GPU wants
more."""
_FACTOR_MAX = 3.0e38
"""Largest softmax factor: beyond it every difference of logits is decided anyway, and inf · 0 would be NaN."""


@dataclass
class _Partial:
    """Online softmax of n rows: `top` (n, H) largest scaled score, `total` (n, H) sum of weights, `out` (n, H, 512)."""

    top: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class _Keys:
    """One set of keys of n rows, and which of its columns belong to the piece at hand."""

    cache: PagedKVCache
    indices: torch.Tensor  # (n, columns) int32
    begin: torch.Tensor  # (n, 1) int64: first column of the piece
    end: torch.Tensor  # (n, 1) int64: one past the last that counts
    translate: AttentionCall | None  # the call whose block table turns indices into slots; None: they are slots
    rows: torch.Tensor  # (n,) int64


def scratch_bytes(call: AttentionCall) -> int:
    """Bytes of accumulators beyond out and lse (the fixed tile aside): 0 unless the schedule splits something."""
    return 0 if call.schedule is None else call.schedule.accumulator_bytes


def run(call: AttentionCall) -> None:
    """Fills ``call.out`` and ``call.lse``."""
    with torch.no_grad():
        schedule = call.schedule
        if call.num_rows == 0:
            return
        if schedule is None or schedule.nothing_split:
            _run_whole(call, 0, call.num_rows)
            return
        accumulators = torch.empty(schedule.accumulator_shape, dtype=torch.float32, device=call.device)
        per_request = schedule.rows_per_request
        for item in schedule.work():
            first, end = item.first_request * per_request, item.end_request * per_request
            if item.slot is None:
                _run_whole(call, first, end)
            else:
                _run_piece(call, first, end, item.begin_block, item.end_block, accumulators[item.slot])
        pieces = schedule.splits_per_request
        for request, slot in enumerate(schedule.slots().tolist()):
            if slot >= 0:
                out, lse = _combine(accumulators[slot : slot + int(pieces[request])])
                _store(call, slice(request * per_request, (request + 1) * per_request), out, lse)


def _run_whole(call: AttentionCall, first: int, end: int) -> None:
    """Rows first to end, all of their keys, straight into out and lse."""
    step = _rows_at_a_time(call, call.topk + call.extra_topk)
    for start in range(first, end, step):
        stop = min(start + step, end)
        # A short last chunk repeats its last row: its shape, and with it the bits, must not depend on how many rows
        # there are.
        rows = torch.arange(start, start + step, device=call.device).clamp_max(stop - 1)
        out, lse = _attend(call, rows, 0, None)
        _store(call, slice(start, stop), out[: stop - start], lse[: stop - start])


def _run_piece(
    call: AttentionCall, first: int, end: int, begin_block: int, end_block: int | None, accumulator: torch.Tensor
) -> None:
    """One piece of one request: rows first to end over blocks begin_block to end_block, into (rows, H, 513)."""
    columns = call.topk + call.extra_topk + BLOCK_KEYS
    if end_block is not None:
        columns = min(columns, (end_block - begin_block) * BLOCK_KEYS)
    step = _rows_at_a_time(call, columns)
    for start in range(first, end, step):
        stop = min(start + step, end)
        out, lse = _attend(call, torch.arange(start, stop, device=call.device), begin_block, end_block)
        accumulator[start - first : stop - first, :, :D_V] = out
        accumulator[start - first : stop - first, :, D_V] = lse


def _rows_at_a_time(call: AttentionCall, columns: int) -> int:
    return max(_tile_records(call.device) // max(columns, BLOCK_KEYS), 1)


def _tile_records(device: torch.device) -> int:
    return _TILE_RECORDS.get(device.type, _TILE_RECORDS["cuda"])


def _attend(
    call: AttentionCall, rows: torch.Tensor, begin_block: int, end_block: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised out (n, H, 512) and lse (n, H), float32, of `rows` (n,) over blocks begin_block to end_block (None:
    all)."""
    n, heads = rows.shape[0], call.num_heads
    query, factor = _scaled_query(call, rows)
    partial = _Partial(
        top=torch.full((n, heads), -torch.inf, device=call.device),
        total=torch.zeros((n, heads), device=call.device),
        out=torch.zeros((n, heads, D_V), device=call.device),
    )
    for keys, low, high in _key_sets(call, rows, begin_block, end_block):
        tile = max(_tile_records(call.device) // (n * BLOCK_KEYS), 1) * BLOCK_KEYS
        for start in range(low, high, tile):
            _add_tile(partial, query, factor, keys, start, min(start + tile, high))
    no_keys = partial.total == 0
    lse = partial.top * factor + partial.total.log()
    lse.masked_fill_(no_keys, -torch.inf)
    out = partial.out / partial.total.masked_fill(no_keys, 1.0).unsqueeze(-1)
    return out, lse


def _scaled_query(call: AttentionCall, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (n, H, d_qk) float32 scaled to at most 4 in magnitude, and the positive factor (n, H) of their scores.

    score · factor = q · k · softmax_scale; a negative softmax_scale turns the query's sign instead.
    """
    query = call.q_nope[rows].to(torch.float32)
    if call.q_rope is not None:
        query = torch.cat((query, call.q_rope[rows].to(torch.float32)), dim=-1)
    exponent = torch.frexp(query.abs().amax(dim=-1)).exponent.clamp(0, 126)
    sign = -1.0 if call.softmax_scale < 0 else 1.0
    query = query * torch.ldexp(torch.full_like(exponent, sign, dtype=torch.float32), -exponent).unsqueeze(-1)
    factor = torch.ldexp(torch.full_like(exponent, abs(call.softmax_scale), dtype=torch.float32), exponent)
    return query, factor.clamp_max(_FACTOR_MAX)


def _key_sets(
    call: AttentionCall, rows: torch.Tensor, begin_block: int, end_block: int | None
) -> list[tuple[_Keys, int, int]]:
    """The sets of keys of `rows` inside blocks begin_block to end_block, each with the range of columns worth visiting.

    Blocks are numbered through: first those of the call's indices (at least one, even where a row has no key), then
    those of the extra indices, each set rounded up to whole blocks by the row's own length. This is the numbering
    plans are made in.
    """
    begin = begin_block * BLOCK_KEYS
    sets = []
    length = _length(call.topk_lengths, rows, call.topk)
    own = ((length + BLOCK_KEYS - 1) // BLOCK_KEYS).clamp_min(1) * BLOCK_KEYS
    end = length if end_block is None else length.clamp_max(end_block * BLOCK_KEYS)
    translate = call if call.block_table is not None else None
    primary = _Keys(call.cache, call.indices[rows], torch.full_like(end, begin), end, translate, rows)
    sets.append((primary, *_range(primary, begin, call.topk if end_block is None else end_block * BLOCK_KEYS)))
    if call.extra is not None:
        length = _length(call.extra.topk_lengths, rows, call.extra_topk)
        end = length if end_block is None else torch.minimum(length, end_block * BLOCK_KEYS - own)
        first = (begin - own).clamp_min(0)
        extra = _Keys(call.extra.cache, call.extra.indices[rows], first, end, None, rows)
        # On the host the first set is only known to take between one block and all of its columns.
        at_most = max(-(-call.topk // BLOCK_KEYS), 1) * BLOCK_KEYS
        high = call.extra_topk if end_block is None else (end_block - 1) * BLOCK_KEYS
        sets.append((extra, *_range(extra, max(begin - at_most, 0), high)))
    return sets


def _length(lengths: torch.Tensor | None, rows: torch.Tensor, limit: int) -> torch.Tensor:
    """(n, 1) int64: columns that count, in [0, limit]."""
    if lengths is None:
        return torch.full((rows.shape[0], 1), limit, dtype=torch.int64, device=rows.device)
    return lengths[rows].to(torch.int64).clamp(0, limit).unsqueeze(1)


def _range(keys: _Keys, low: int, high: int) -> tuple[int, int]:
    """Columns to visit: exact for one row on the CPU, where looking is free; else the bounds known without looking."""
    if keys.cache.num_slots == 0:
        return 0, 0
    high = min(high, keys.indices.shape[1])
    if keys.begin.device.type == "cpu" and keys.begin.shape[0] == 1:
        # For one row only: a row's tiles, with them its bits, must not depend on its neighbours' lengths.
        return max(low, int(keys.begin)), min(high, int(keys.end))
    return low, high


def _add_tile(partial: _Partial, query: torch.Tensor, factor: torch.Tensor, keys: _Keys, start: int, stop: int) -> None:
    """Adds the columns start to stop of `keys` to the online softmax of its rows."""
    slots = keys.indices[:, start:stop].to(torch.int64)
    if keys.translate is not None:
        call = keys.translate
        assert call.block_table is not None and call.request_ids is not None  # AttentionCall: given together
        slots = slots_from_positions(
            call.block_table, call.request_ids[keys.rows], slots, keys.cache.block_size, call.context_shard
        )
    column = torch.arange(start, stop, device=slots.device)
    counts = (slots >= 0) & (slots < keys.cache.num_slots) & (column >= keys.begin) & (column < keys.end)
    # A masked record reads as zeros, whatever lies in the pool: 0 · NaN would not be 0.
    records = keys.cache.read(torch.where(counts, slots, -1).reshape(-1)).view(*slots.shape, -1)

    masked = ~counts.unsqueeze(1)
    score = torch.bmm(query, records.transpose(1, 2)).masked_fill_(masked, -torch.inf)
    top = torch.maximum(partial.top, score.amax(dim=-1))
    # Where no key was seen yet top is -inf, and -inf - -inf would be NaN for good.
    reference = top.masked_fill(top == -torch.inf, 0.0)
    weight = score.sub_(reference.unsqueeze(-1)).mul_(factor.unsqueeze(-1)).exp_().masked_fill_(masked, 0.0)
    keep = ((partial.top - reference) * factor).exp().masked_fill_(partial.top == -torch.inf, 0.0)
    partial.total.mul_(keep).add_(weight.sum(dim=-1))
    partial.out.mul_(keep.unsqueeze(-1)).baddbmm_(weight, records[..., :D_V])
    partial.top = top


def _combine(accumulators: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(pieces, rows, H, 513) → out (rows, H, 512), lse (rows, H). A piece without keys (lse -inf) weighs nothing."""
    out, lse = accumulators[..., :D_V], accumulators[..., D_V]
    top = lse.amax(dim=0)
    reference = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.where(lse == -torch.inf, 0.0, (lse - reference).exp())
    total = weight.sum(dim=0)
    no_keys = total == 0
    merged = (out * weight.unsqueeze(-1)).sum(dim=0) / total.masked_fill(no_keys, 1.0).unsqueeze(-1)
    return merged, (reference + total.log()).masked_fill(no_keys, -torch.inf)


def _store(call: AttentionCall, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Applies the sink and writes out and lse in place, whatever their strides."""
    if call.attn_sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)); a row without keys is 0 already, and -inf - -inf would make it NaN.
        gate = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - call.attn_sink))
        out = out * gate.unsqueeze(-1)
    call.out[rows] = out.to(torch.bfloat16)
    call.lse[rows] = lse
