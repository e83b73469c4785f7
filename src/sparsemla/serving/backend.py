# SPDX-License-Identifier: Apache-2.0
"""The forward of one attention layer, for every path.

A backend is built for a path, reserves what that path reads (policy ``flashmla``: what is published) in the shared
workspace, and runs steps whose metadata was built for the same path. Nothing in a forward waits for the device (a host
cache may, see :mod:`sparsemla.serving.host_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.formats import KVFormat, unpack
from sparsemla.schedule import SplitSchedule
from sparsemla.serving.config import ServingConfig
from sparsemla.serving.host_cache import HostRecords
from sparsemla.serving.metadata import Metadata, PrefillChunk, copy_page_rows
from sparsemla.serving.paths import Path, PathKind, require_same
from sparsemla.serving.reservations import reservations_for
from sparsemla.serving.workspace import SharedWorkspace

Query: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]

AllGather: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""all_gather(output (world · n, ...), input (n, ...)): every rank's input, in rank order, on every rank."""

_COPY_TILE = 2048
"""Records dequantised at a time while a context is copied: bounds what the copy takes beyond the workspace."""


class SparseMLABackend:
    """Attention of one layer on one rank.

    Args:
        config: the deployment.
        path: what was decided for it.
        workspace: the shared scratch buffer; this backend's reservations are made here, at once.
        softmax_scale: multiplies q·k.
        owner: name of the reservations in the workspace's ledger. Layers that use it one after the other share it.
        rank: this rank among those that share the cache.
        all_gather: for the gathered path: gathers bf16 rows from those ranks.
        host: for a host cache: where the records are.

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
        host: HostRecords | None = None,
    ) -> None:
        if not 0 <= rank < path.context_world:
            raise ValueError(f"rank: got {rank}, accepted are 0 to {path.context_world - 1}")
        if path.kind is PathKind.GATHERED and all_gather is None:
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
            q: (padded_tokens, heads, d_qk) bfloat16, or the pair (latent part, rotary part). Under DCP the heads are
                those gathered over the ranks that share the cache.
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
            every shard already); None where the policy returns none.

        Raises:
            PathMismatchError: the metadata was built for another path; the message names both.
            ValueError: wrong shapes.
        """
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
        if self.path.kind is PathKind.IN_PLACE:
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
        if self._host is not None:
            return self._from_host(q, indices, metadata.request_ids, attn_sink, out)
        assert cache is not None  # checked in forward
        return sparse_mla_attention(
            q,
            cache,
            indices,
            softmax_scale=self.softmax_scale,
            block_table=metadata.block_table,
            request_ids=metadata.request_ids,
            context_shard=self._shard,
            attn_sink=attn_sink,
            schedule=schedule,
            out=out,
        )

    def _from_host(
        self,
        q: Query,
        indices: torch.Tensor,
        request_ids: torch.Tensor,
        attn_sink: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in groups whose records fit the hot buffer."""
        assert self._host is not None  # checked in __init__
        nope, rope = (q, None) if isinstance(q, torch.Tensor) else q
        rows, heads = nope.shape[:2]
        if out is None:
            out = torch.empty((rows, heads, self.path.d_v), dtype=torch.bfloat16, device=nope.device)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=nope.device)
        step = self._host.rows_at_once(indices.shape[1])
        for begin in range(0, rows, step):
            part = slice(begin, min(begin + step, rows))
            hot, slots = self._host.bring(self._held(indices[part]), request_ids[part])
            sparse_mla_attention(
                nope[part] if isinstance(q, torch.Tensor) else (nope[part], None if rope is None else rope[part]),
                hot,
                slots,
                softmax_scale=self.softmax_scale,
                attn_sink=attn_sink,
                out=out[part],
                lse=lse[part],
            )
        return out, lse

    def _held(self, indices: torch.Tensor) -> torch.Tensor:
        """Global positions → this rank's local positions, -1 where another rank holds them."""
        if self._shard is None:
            return indices
        rank, world, interleave = self._shard
        held = (indices >= 0) & (indices // interleave % world == rank)
        local = indices // (interleave * world) * interleave + indices % interleave
        return torch.where(held, local, -1)

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
        stage = _Staging(self.path, scratch, q)
        whole = self.path.kind in (PathKind.MIXED_FP8, PathKind.BF16)
        end = metadata.padded_tokens if whole else metadata.num_decode_tokens
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
            _, lse = self._from_host(padded, indices[part], metadata.request_ids[part], sink, target)
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
            rows = _gathered_rows(self.path, chunk, indices[chunk.tokens])
            keys = PagedKVCache.wrap(gathered.unsqueeze(0), KVFormat.BF16)
            sparse_mla_attention(padded, keys, rows, softmax_scale=self.softmax_scale, attn_sink=sink, out=target)
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
        for begin in range(0, length, _COPY_TILE):
            end = min(begin + _COPY_TILE, length)
            if self._host is not None:
                layout = self._host.layout
                rows = unpack(self._host.stage(request, begin, end), layout.format, layout.d_qk)
            else:
                assert cache is not None  # checked in forward
                positions = torch.arange(begin, end, device=cache.device)
                ids = torch.full_like(positions, request)
                slots = slots_from_positions(
                    metadata.block_table, ids, positions, cache.block_size, num_slots=cache.num_slots
                )
                rows = cache.read(slots)
            target[begin:end].copy_(rows)


def _gathered_rows(path: Path, chunk: PrefillChunk, indices: torch.Tensor) -> torch.Tensor:
    """(rows, topk) int32: global positions → rows of the gathered copy (rank after rank); -1 for no key."""
    world, interleave = path.context_world, path.interleave
    owner = indices // interleave % world
    local = indices // (interleave * world) * interleave + indices % interleave
    of_row = chunk.block_table[chunk.request_ids.long()]
    start, tokens = of_row[:, :1], of_row[:, 1:]
    return torch.where((indices >= 0) & (indices < tokens), owner * chunk.rows + start + local, -1)


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
