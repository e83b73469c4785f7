# SPDX-License-Identifier: Apache-2.0
"""The forward of one attention layer, for every path.

A backend is built for a path, reserves what that path reads (policy ``flashmla``: what is published) in the shared
workspace, and runs steps whose metadata was built for the same path. Nothing in a forward waits for the device (a host
cache may, see :mod:`sparsemla.serving.host_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.formats import KVFormat, RecordLayout, unpack
from sparsemla.schedule import SplitSchedule
from sparsemla.serving.config import ServingConfig
from sparsemla.serving.context_parallel.records import in_whole_pages, lay_out_pages
from sparsemla.serving.host_cache.attend import attend_from_host
from sparsemla.serving.host_cache.cache import HostCache
from sparsemla.serving.metadata import Metadata, PrefillChunk, copy_page_rows
from sparsemla.serving.paths import Path, PathKind, require_same
from sparsemla.serving.reservations import reservations_for
from sparsemla.serving.workspace import SharedWorkspace

if TYPE_CHECKING:
    from sparsemla.serving.context_parallel.exchange import HeadExchange

Query: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]

AllGather: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""all_gather(output (world · n, ...), input (n, ...)): every rank's input, in rank order, on every rank."""

_COPY_TILE = 16_384
"""Records dequantised at a time while a context is copied: bounds what the copy takes beyond the workspace."""

_RECORD_TILE = 32_768
"""Records moved at a time while a shard is laid out for gathering: tens of MB."""


class SparseMLABackend:
    """Attention of one layer on one rank.

    Args:
        config: the deployment.
        path: what was decided for it.
        workspace: the shared scratch buffer; this backend's reservations are made here, at once.
        softmax_scale: multiplies q·k.
        owner: name of the reservations in the workspace's ledger. Layers that use it one after the other share it.
        rank: this rank among those that share the cache.
        all_gather: where prefills gather shards: gathers rows from those ranks.
        host: for a host cache: where the records are.
        context: the exchange with those ranks; the forward then takes and gives this rank's own heads, over the whole
            cache. It brings `rank` and `all_gather`.

    Raises:
        ValueError: something a path needs is missing.
        WorkspaceLockedError: the workspace is locked and too small.
    """

    def __init__(
        self,
        config: ServingConfig,
        path: Path,
        workspace: SharedWorkspace,
        *,
        softmax_scale: float,
        owner: str = "attention",
        rank: int = 0,
        all_gather: AllGather | None = None,
        host: HostCache | None = None,
        context: HeadExchange | None = None,
    ) -> None:
        if context is not None:
            if context.ranks.grid.parallel != config.parallel:
                raise ValueError(
                    f"context: got ranks for {context.ranks.grid.parallel}, accepted are those of {config.parallel}"
                )
            rank = context.ranks.grid.shard
            all_gather = context.gather_shards
        if not 0 <= rank < path.context_world:
            raise ValueError(f"rank: got {rank}, accepted are 0 to {path.context_world - 1}")
        if path.gathers_prefill and all_gather is None:
            raise ValueError(f"all_gather: got None, required for path {path}")
        if path.host_cache and host is None:
            raise ValueError(f"host: got None, required for path {path}")
        self.path = path
        self.softmax_scale = softmax_scale
        self.max_tokens = config.limits.max_num_batched_tokens
        self.owner = owner
        self._workspace = workspace
        self._all_gather = all_gather
        self._host = host
        self._context = context if path.context_world > 1 else None
        self._shard = (rank, path.context_world, path.interleave) if path.context_world > 1 else None
        self.reserved_bytes = workspace.reserve(owner, reservations_for(config, path))

    def forward(
        self,
        q: Query,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        *,
        attn_sink: torch.Tensor | None = None,
        schedule: SplitSchedule | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend one step's rows.

        Args:
            q: (padded_tokens, heads, d_qk) bfloat16, or the pair (latent part, rotary part). Under DCP without
                `context` the heads are those gathered over the ranks that share the cache.
            cache: this rank's pages. None with a host cache.
            indices: (padded_tokens, topk) int32 positions in each row's request; -1 is no key.
            metadata: of this step.
            attn_sink: (heads,) float32.
            schedule: for the in-place path, see sparse_mla_attention.
            out: (padded_tokens, heads, 512) bfloat16 to write into. Without it the answer of a path with staging
                buffers lies in the workspace and is valid until its next user.

        Returns:
            out (padded_tokens, heads, 512); padding rows are 0. lse (padded_tokens, heads) float32 on the in-place path
            and, under DCP, on the mixed one; of the decode rows on the gathered path (a prefill row there has seen
            every shard already); None where the policy returns none. Under DCP both are this rank's part over its
            shard, for the caller to merge; with `context` they are the whole, for this rank's heads.

        Raises:
            PathMismatchError: the metadata was built for another path; the message names both.
            ValueError: wrong shapes.
            RankLostError: with `context`, another rank is gone.
        """
        if self._context is None:
            return self._forward(q, cache, indices, metadata, attn_sink, schedule, out)
        with self._context.ranks.watch():  # an error here must not leave the other ranks waiting
            return self._forward(q, cache, indices, metadata, attn_sink, schedule, out)

    def _forward(
        self,
        q: Query,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        schedule: SplitSchedule | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_same(self.path, metadata.path)
        rows = metadata.padded_tokens
        given = q if isinstance(q, torch.Tensor) else q[0]
        if given.dim() != 3 or given.shape[0] != rows:
            raise ValueError(
                f"q: got shape {tuple(given.shape)}, accepted is ({rows}, heads, columns) as in the metadata"
            )
        if indices.dim() != 2 or indices.shape[0] != rows:
            raise ValueError(
                f"indices: got shape {tuple(indices.shape)}, accepted is ({rows}, topk) as in the metadata"
            )
        if rows > self.max_tokens:
            raise ValueError(f"q: got {rows} rows, accepted are at most max_num_batched_tokens = {self.max_tokens}")
        if cache is None and not self.path.host_cache:
            raise ValueError("cache: got None, accepted is a PagedKVCache (None is for a host cache)")
        if self._context is not None and given.shape[1] != self.path.heads:
            raise ValueError(f"q: got {given.shape[1]} heads, accepted are this rank's own {self.path.heads}")
        if self.path.kind is PathKind.IN_PLACE:
            if self._context is None and not metadata.chunks:
                return self._shard_rows(q, slice(0, rows), cache, indices, metadata, attn_sink, schedule, out, None)
            return self._in_place(q, cache, indices, metadata, attn_sink, schedule, out)
        return self._staged(q, cache, indices, metadata, attn_sink, out)

    # -- the cache as it is stored ------------------------------------------------------------------------------------

    def _in_place(
        self,
        q: Query,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        schedule: SplitSchedule | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows over a sharded cache, and prefill rows over the gathered shards where there are chunks."""
        nope = q if isinstance(q, torch.Tensor) else q[0]
        rows, heads = nope.shape[:2]
        answer = out
        if answer is None or not answer.is_contiguous():
            answer = torch.empty((rows, heads, self.path.d_v), dtype=torch.bfloat16, device=nope.device)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=nope.device)
        scratch = self._workspace.take(self.owner)
        cached = slice(0, metadata.num_decode_tokens if metadata.chunks else rows)

        def partial(query: Query, part: slice, to: torch.Tensor, to_lse: torch.Tensor) -> None:
            sink = attn_sink if self._context is None else None
            self._shard_rows(query, part, cache, indices, metadata, sink, schedule, to, to_lse)

        if cached.stop:
            mine = _rows(q, cached)
            if self._context is None:
                partial(mine, cached, answer[cached], lse[cached])
            else:
                self._context.attend(
                    mine, partial, buffers=scratch, out=answer[cached], lse=lse[cached], attn_sink=attn_sink
                )
        for chunk in metadata.chunks:
            keys = self._gather_records(chunk, cache, metadata, scratch["gathered_records"])
            sparse_mla_attention(
                _rows(q, chunk.tokens),
                keys,
                indices[chunk.tokens],
                softmax_scale=self.softmax_scale,
                block_table=chunk.block_table,
                request_ids=chunk.request_ids,
                attn_sink=attn_sink,
                out=answer[chunk.tokens],
                lse=lse[chunk.tokens],
            )
        if metadata.chunks:
            answer[metadata.num_tokens :].zero_()
            lse[metadata.num_tokens :].fill_(-torch.inf)
        if out is not None and answer is not out:
            out.copy_(answer)
            answer = out
        return answer, lse

    def _shard_rows(
        self,
        q: Query,
        part: slice,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        schedule: SplitSchedule | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `part` of the step, whose queries are given, over the records that lie here."""
        if self._host is not None:
            return self._from_host(q, part, indices, metadata, attn_sink, out, lse)
        ids = metadata.request_ids[part]
        assert cache is not None  # checked in forward
        return sparse_mla_attention(
            q,
            cache,
            indices[part],
            softmax_scale=self.softmax_scale,
            block_table=metadata.block_table,
            request_ids=ids,
            context_shard=self._shard,
            attn_sink=attn_sink,
            schedule=_schedule_for(schedule, ids.shape[0], metadata.padded_tokens),
            out=out,
            lse=lse,
        )

    def _gather_records(
        self, chunk: PrefillChunk, cache: PagedKVCache | None, metadata: Metadata, scratch: torch.Tensor
    ) -> PagedKVCache:
        """The shards of a chunk's context from every rank, as they are stored; a page of one record for each."""
        assert self._all_gather is not None and self._shard is not None  # checked in __init__
        gathered = scratch[: chunk.rows * self.path.context_world]
        mine = gathered[self._shard[0] * chunk.rows :][: chunk.rows]
        layout = self._layout(cache)
        whole_pages = self._host is None and cache is not None and in_whole_pages(cache, gathered.shape[1])
        for index, (start, length) in enumerate(zip(chunk.starts, chunk.local_lens, strict=True)):
            if whole_pages and cache is not None and start % cache.block_size == 0:
                pages = metadata.block_table[chunk.first_request + index, : -(-length // cache.block_size)]
                lay_out_pages(cache, pages, mine[start:][: pages.shape[0] * cache.block_size])
                continue
            tiles = self._records(cache, metadata, chunk.first_request + index, length, _RECORD_TILE)
            for begin, end, records in tiles:
                mine[start + begin : start + end, : layout.record_bytes].copy_(records)
        self._all_gather(gathered, mine)
        if layout.format is KVFormat.BF16:
            return PagedKVCache.wrap(gathered.view(torch.bfloat16).unsqueeze(1), layout.format)
        return PagedKVCache.wrap(gathered[:, : layout.record_bytes].unsqueeze(1), layout.format)

    def _records(
        self, cache: PagedKVCache | None, metadata: Metadata, request: int, length: int, tile: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(begin, end, (end - begin, record_bytes) uint8): records this rank holds of a request, by their number here.

        From a host cache a tile is on its way while the one before is used.
        """
        if self._host is not None:
            tile = min(tile, self._host.staged_records)
        pieces = [(request, begin, min(begin + tile, length)) for begin in range(0, length, tile)]
        if self._host is not None:
            for (_, begin, end), page in zip(pieces, self._host.stage(pieces, metadata.block_table), strict=True):
                yield begin, end, page.gather_bytes(torch.arange(end - begin, device=page.device))
            return
        assert cache is not None  # checked in forward
        for _, begin, end in pieces:
            positions = torch.arange(begin, end, device=cache.device)
            ids = torch.full_like(positions, request)
            slots = slots_from_positions(
                metadata.block_table, ids, positions, cache.block_size, num_slots=cache.num_slots
            )
            yield begin, end, cache.gather_bytes(slots)

    def _from_host(
        self,
        q: Query,
        part: slice,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `part` of the step, whose queries are given, over the host cache."""
        assert self._host is not None  # checked in __init__
        nope = q if isinstance(q, torch.Tensor) else q[0]
        rows, heads = nope.shape[:2]
        if out is None:
            out = torch.empty((rows, heads, self.path.d_v), dtype=torch.bfloat16, device=nope.device)
        if lse is None:
            lse = torch.empty((rows, heads), dtype=torch.float32, device=nope.device)
        attend_from_host(
            self._host,
            q,
            part,
            indices,
            metadata,
            softmax_scale=self.softmax_scale,
            out=out,
            lse=lse,
            attn_sink=attn_sink,
            shard=self._shard,
        )
        return out, lse

    # -- the published paths ------------------------------------------------------------------------------------------

    def _staged(
        self,
        q: Query,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scratch = self._workspace.take(self.owner)
        whole = self.path.kind in (PathKind.MIXED_FP8, PathKind.BF16)
        end = metadata.padded_tokens if whole else metadata.num_decode_tokens
        if self._context is not None:
            return self._staged_shards(q, slice(0, end), cache, indices, metadata, attn_sink, out, scratch)
        stage = _Staging(self.path, scratch, q)
        lse = None
        if end:
            part = slice(0, end)
            lse = self._cached_rows(stage, part, cache, indices, metadata, attn_sink)
        elif self.path.returns_lse:
            lse = torch.empty((0, stage.heads), dtype=torch.float32, device=indices.device)
        for chunk in metadata.chunks:
            self._chunk(stage, chunk, cache, indices, metadata, attn_sink, scratch)
        if not whole:
            stage.result[metadata.num_tokens : metadata.padded_tokens].zero_()
        answer = stage.result
        if out is not None:
            out.copy_(answer)
            answer = out
        return answer, lse if self.path.returns_lse else None

    def _staged_shards(
        self,
        q: Query,
        cached: slice,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        out: torch.Tensor | None,
        scratch: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The published paths over a sharded cache; what is exchanged lies in fresh memory, as published."""
        assert self._context is not None
        nope = q if isinstance(q, torch.Tensor) else q[0]
        rows, heads = nope.shape[:2]
        answer = torch.empty((rows, heads, self.path.d_v), dtype=torch.bfloat16, device=nope.device)
        lse = torch.empty((cached.stop, heads), dtype=torch.float32, device=nope.device)

        def partial(query: Query, part: slice, to: torch.Tensor, to_lse: torch.Tensor) -> None:
            stage = _Staging(self.path, scratch, query)
            to_lse.copy_(self._cached_rows(stage, part, cache, indices, metadata, None))
            to.copy_(stage.result)

        if cached.stop:
            buffers = self._context.buffers(cached.stop, nope.device)
            self._context.attend(
                _rows(q, cached), partial, buffers=buffers, out=answer[cached], lse=lse, attn_sink=attn_sink
            )
        if metadata.chunks:
            stage = _Staging(self.path, scratch, q)
            for chunk in metadata.chunks:
                self._chunk(stage, chunk, cache, indices, metadata, attn_sink, scratch)
                answer[chunk.tokens].copy_(stage.result[chunk.tokens])
        answer[max(metadata.num_tokens, cached.stop) :].zero_()
        if out is not None:
            out.copy_(answer)
            answer = out
        return answer, lse

    def _cached_rows(
        self,
        stage: _Staging,
        part: slice,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows attended straight from the cache or the hot buffer by the decode kernel; returns their lse."""
        padded = stage.query(part, self.path.decode_heads)
        sink = stage.sink(attn_sink, padded.shape[1])
        target = stage.output(part, self.path.decode_heads)
        if self._host is not None:
            _, lse = self._from_host(padded, part, indices, metadata, sink, target)
        else:
            assert cache is not None  # checked in forward
            _, lse = sparse_mla_attention(
                padded,
                cache,
                indices[part],
                softmax_scale=self.softmax_scale,
                block_table=metadata.block_table,
                request_ids=metadata.request_ids[part],
                context_shard=self._shard,
                attn_sink=sink,
                out=target,
            )
        stage.finish(part, target)
        return lse[:, : stage.heads]

    def _chunk(
        self,
        stage: _Staging,
        chunk: PrefillChunk,
        cache: PagedKVCache | None,
        indices: torch.Tensor,
        metadata: Metadata,
        attn_sink: torch.Tensor | None,
        scratch: dict[str, torch.Tensor],
    ) -> None:
        """Copies the context of a chunk's requests to bf16 and attends its rows over the copy."""
        copy = scratch["prefill_kv"][: chunk.rows]
        for index, (start, length) in enumerate(zip(chunk.starts, chunk.local_lens, strict=True)):
            self._copy_context(cache, metadata, chunk.first_request + index, length, copy[start:])
            # What fills up the page holds the last user's bytes; a position past the end must not read NaN from there.
            copy[start + length : chunk.ends[index]].zero_()
        padded = stage.query(chunk.tokens, self.path.prefill_heads)
        sink = stage.sink(attn_sink, padded.shape[1])
        target = stage.output(chunk.tokens, self.path.prefill_heads)
        if self.path.kind is PathKind.GATHERED:
            assert self._all_gather is not None  # checked in __init__
            gathered = scratch["gathered_kv"][: chunk.rows * self.path.context_world]
            self._all_gather(gathered, copy)
            keys = PagedKVCache.wrap(gathered.unsqueeze(1), KVFormat.BF16)
        else:
            page = copy_page_rows(self.path)
            keys = PagedKVCache.wrap(copy.view(-1, page, copy.shape[1]), KVFormat.BF16)
        sparse_mla_attention(
            padded,
            keys,
            indices[chunk.tokens],
            softmax_scale=self.softmax_scale,
            block_table=chunk.block_table,
            request_ids=chunk.request_ids,
            attn_sink=sink,
            out=target,
        )
        stage.finish(chunk.tokens, target)

    def _copy_context(
        self, cache: PagedKVCache | None, metadata: Metadata, request: int, length: int, target: torch.Tensor
    ) -> None:
        """The first `length` records this rank holds of a request, dequantised to bf16, into target[:length]."""
        layout = self._layout(cache)
        for begin, end, records in self._records(cache, metadata, request, length, _COPY_TILE):
            target[begin:end].copy_(unpack(records, layout.format, layout.d_qk))

    def _layout(self, cache: PagedKVCache | None) -> RecordLayout:
        if self._host is not None:
            return self._host.layout
        assert cache is not None  # checked in forward
        return cache.layout


def _rows(q: Query, part: slice) -> Query:
    if isinstance(q, torch.Tensor):
        return q[part]
    nope, rope = q
    return nope[part], None if rope is None else rope[part]


def _schedule_for(schedule: SplitSchedule | None, rows: int, step_rows: int) -> SplitSchedule | None:
    """The step's schedule for some of its rows: "do not split" stays so, a plan fits whole steps only."""
    if schedule is None or rows == step_rows:
        return schedule
    if not schedule.nothing_split:
        raise ValueError(
            f"schedule: got a plan for {step_rows} rows, accepted is None or one that splits nothing where a step's "
            f"rows are not attended together ({rows} at a time here)"
        )
    return SplitSchedule.unsplit(rows)


class _Staging:
    """The query and output of one step in the staging buffers of the published paths."""

    def __init__(self, path: Path, scratch: dict[str, torch.Tensor], q: Query) -> None:
        self._path = path
        self._scratch = scratch
        nope, rope = (q, None) if isinstance(q, torch.Tensor) else q
        rows, self.heads = nope.shape[:2]
        if self.heads > path.padded_heads:
            raise ValueError(f"q: got {self.heads} heads, accepted are at most {path.padded_heads} on path {path}")
        # Heads gathered over dcp ranks are more than the rank's own: they fill the padding.
        gathered = self.heads > path.heads
        name = "padded_query" if gathered and path.pads_query else "query_concat"
        self._query = scratch[name][:rows]
        whole = self._query[:, : self.heads]
        if rope is None:
            whole.copy_(nope)
        else:
            whole[..., : nope.shape[2]].copy_(nope)
            whole[..., nope.shape[2] :].copy_(rope)
        self.result = scratch["padded_output" if gathered else "compact_output"][:rows, : self.heads]

    def query(self, part: slice, heads: int) -> torch.Tensor:
        """(rows, heads, d_qk): the rows' query, its heads padded with zeros."""
        source = self._query[part]
        if heads == self.heads:
            return source[:, :heads]
        padded = source[:, :heads]
        if self._path.pads_query and self._query.shape[1] < heads:
            padded = self._scratch["padded_query"][part, :heads]
            padded[:, : self.heads].copy_(source[:, : self.heads])
        padded[:, self.heads :].zero_()
        return padded

    def output(self, part: slice, heads: int) -> torch.Tensor:
        """(rows, heads, 512): where the kernel writes."""
        if heads == self.heads:
            return self.result[part]
        return self._scratch["padded_output"][part, :heads]

    def finish(self, part: slice, written: torch.Tensor) -> None:
        """Drops the padded heads of what the kernel wrote."""
        if written.shape[1] != self.heads:
            self.result[part].copy_(written[:, : self.heads])

    def sink(self, attn_sink: torch.Tensor | None, heads: int) -> torch.Tensor | None:
        """The sink of that many heads; padded heads get 0, their answers are dropped."""
        if attn_sink is None or attn_sink.shape[0] == heads:
            return attn_sink
        return torch.nn.functional.pad(attn_sink, (0, heads - attn_sink.shape[0]))
