# SPDX-License-Identifier: Apache-2.0
"""Attention of query rows over a host cache."""

from __future__ import annotations

from itertools import accumulate

import torch

from sparsemla.attention import Query, sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.serving.host_cache.cache import HostCache
from sparsemla.serving.host_cache.hot import Shard, held_positions
from sparsemla.serving.metadata import Metadata, local_length


def attend_from_host(
    host: HostCache,
    q: Query,
    part: slice,
    indices: torch.Tensor,
    metadata: Metadata,
    *,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    shard: Shard | None = None,
) -> None:
    """Rows `part` of a step, in groups whose records fit the hot buffer.

    Decodes go through the hot buffer. Prefills are attended over their context, staged as a whole; a context longer
    than the staging buffers goes through the hot buffer too, few rows at a time. Padding rows: 0 and -inf.

    Args:
        host: the records.
        q, out, lse: of the rows `part`.
        indices: (padded_tokens, topk) int32 positions of the whole step.
        metadata: of the step.
        softmax_scale: multiplies q·k.
        attn_sink: (heads,) float32.
        shard: this rank's share of the positions.
    """

    def here(rows: slice) -> slice:
        """Rows of the step as rows of q, out and lse."""
        return slice(rows.start - part.start, max(rows.stop, rows.start) - part.start)

    def attend(rows: slice, cache: PagedKVCache, slots: torch.Tensor) -> None:
        at = here(rows)
        query = q[at] if isinstance(q, torch.Tensor) else (q[0][at], None if q[1] is None else q[1][at])
        sparse_mla_attention(
            query, cache, slots, softmax_scale=softmax_scale, attn_sink=attn_sink, out=out[at], lse=lse[at]
        )

    def through_hot(rows: slice, of_one_request: int) -> None:
        if rows.start >= rows.stop:
            return
        step = host.rows_at_once(indices.shape[1], of_one_request=of_one_request, longest=metadata.max_seq_len)
        for begin in range(rows.start, rows.stop, step):
            group = slice(begin, min(begin + step, rows.stop))
            attend(group, *host.bring(indices[group], metadata.request_ids[group], metadata.block_table, shard))

    lengths = metadata.query_lens
    if not metadata.num_prefills:
        through_hot(part, max(lengths, default=0))
        return
    starts = list(accumulate(lengths, initial=0))
    prefills = []
    for request in range(metadata.num_decodes, metadata.num_requests):
        rows = _common(part, slice(starts[request], starts[request + 1]))
        records = local_length(metadata.seq_lens[request], *(shard or (0, 1, 1)))
        if rows.start < rows.stop:
            prefills.append((request, rows, records if records <= host.staged_records else 0))
    # The first context is on its way while the decodes are attended, each further one during the one before.
    staged = host.stage([(r, 0, records) for r, _, records in prefills if records], metadata.block_table)
    decodes = _common(part, slice(0, metadata.num_decode_tokens))
    through_hot(decodes, max(lengths[: metadata.num_decodes], default=0))
    for request, rows, records in prefills:
        if records:
            attend(rows, next(staged), held_positions(indices[rows], shard))
        else:
            through_hot(rows, lengths[request])
    for _ in staged:  # the last piece's use ends
        pass
    padding = here(_common(part, slice(metadata.num_tokens, metadata.padded_tokens)))
    out[padding].zero_()
    lse[padding].fill_(-torch.inf)


def _common(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))
