# SPDX-License-Identifier: Apache-2.0
"""Attention of query rows over a host cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsemla.attention import Query, sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.serving.host_cache.hot import held_positions
from sparsemla.serving.host_cache.records import HostRecords, Shard
from sparsemla.serving.metadata import Metadata, local_length


@dataclass(frozen=True)
class HostAttention:
    """Rows over a host cache, cut into groups whose records fit the hot buffer.

    Attributes:
        host: the records.
        softmax_scale: multiplies q·k.
        shard: this rank's share of the positions.
    """

    host: HostRecords
    softmax_scale: float
    shard: Shard | None = None

    def rows(
        self,
        q: Query,
        part: slice,
        indices: torch.Tensor,
        metadata: Metadata,
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Rows `part` of a step.

        Decodes go through the hot buffer. Prefills are attended over their context, staged as a whole; a context longer
        than the staging buffers goes through the hot buffer too, few rows at a time. Padding rows: 0 and -inf.

        Args:
            q, out, lse: of the rows `part`.
            indices: (padded_tokens, topk) int32 positions of the whole step.
            metadata: of the step.
            sink: (heads,) float32.
        """
        call = _Call(q, part.start, indices, metadata, sink, out, lse)
        if not metadata.num_prefills:
            self._through_hot(call, part, max(metadata.query_lens, default=0))
            return
        starts = [0]
        for length in metadata.query_lens:
            starts.append(starts[-1] + length)
        rank, world, interleave = self.shard or (0, 1, 1)
        prefills = []
        for request in range(metadata.num_decodes, metadata.num_requests):
            rows = _common(part, slice(starts[request], starts[request + 1]))
            records = local_length(metadata.seq_lens[request], rank, world, interleave)
            if rows.start < rows.stop:
                prefills.append((request, rows, records if records <= self.host.staged_records else 0))
        # The first context is on its way while the decodes are attended, each further one during the one before.
        staged = self.host.stage([(r, 0, records) for r, _, records in prefills if records], metadata.block_table)
        decodes = _common(part, slice(0, metadata.num_decode_tokens))
        self._through_hot(call, decodes, max(metadata.query_lens[: metadata.num_decodes], default=0))
        for request, rows, records in prefills:
            if records:
                self._attend(call, rows, next(staged), held_positions(indices[rows], self.shard))
            else:
                self._through_hot(call, rows, metadata.query_lens[request])
        for _ in staged:  # the last piece's use ends
            pass
        padding = _common(part, slice(metadata.num_tokens, metadata.padded_tokens))
        out[call.of(padding)].zero_()
        lse[call.of(padding)].fill_(-torch.inf)

    def _through_hot(self, call: _Call, rows: slice, of_one_request: int) -> None:
        if rows.start >= rows.stop:
            return
        metadata, indices = call.metadata, call.indices
        step = self.host.rows_at_once(indices.shape[1], of_one_request=of_one_request, longest=metadata.max_seq_len)
        for begin in range(rows.start, rows.stop, step):
            group = slice(begin, min(begin + step, rows.stop))
            ids = metadata.request_ids[group]
            hot, slots = self.host.bring(indices[group], ids, metadata.block_table, self.shard)
            self._attend(call, group, hot, slots)

    def _attend(self, call: _Call, rows: slice, cache: PagedKVCache, slots: torch.Tensor) -> None:
        here = call.of(rows)
        q = call.q
        sparse_mla_attention(
            q[here] if isinstance(q, torch.Tensor) else (q[0][here], None if q[1] is None else q[1][here]),
            cache,
            slots,
            softmax_scale=self.softmax_scale,
            attn_sink=call.sink,
            out=call.out[here],
            lse=call.lse[here],
        )


@dataclass(frozen=True)
class _Call:
    """Query and results of the rows from `first` on."""

    q: Query
    first: int
    indices: torch.Tensor
    metadata: Metadata
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    def of(self, rows: slice) -> slice:
        """Rows of the step as rows of the call."""
        return slice(rows.start - self.first, max(rows.stop, rows.start) - self.first)


def _common(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))
