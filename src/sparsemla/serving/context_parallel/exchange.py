# SPDX-License-Identifier: Apache-2.0
"""The round trip of DCP: this rank's query heads to the ranks that hold the cache, merged answers back.

Rows go in tiles, so what is exchanged takes memory for a tile, not for the largest step. A tile, with `k` ranks of
different heads and `c` ranks of the same heads sharing a cache (k · c = dcp):

1. queries are gathered over the k ranks (nothing moves where k is 1: all have the same);
2. the attention call runs over this rank's shard, with k · heads heads, without the sink;
3. partial answers are merged: over the k ranks each gets its own heads back, over the c ranks all get the same. The
   two stages are one merge because merging is associative.

Two forms of stage 3, ``dcp_comm``: ``ag_rs`` gathers the lse, weighs the partial output and sums it on the way
(reduce-scatter over k, all-reduce over c; sums in bfloat16); ``a2a`` sends partial outputs with their lse in one
message (all-to-all over k, all-gather over c) and merges where they arrive, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.formats import D_V
from sparsemla.serving.config import ServingConfig
from sparsemla.serving.context_parallel.merge import (
    columns_with_lse,
    merge_parts,
    sink_gate,
    total_lse,
    weight_of,
)
from sparsemla.serving.context_parallel.ranks import Ranks
from sparsemla.serving.paths import Path
from sparsemla.serving.reservations import EXCHANGE_ROWS, exchange_shapes

Query: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]

Partial: TypeAlias = Callable[[Query, slice, torch.Tensor, torch.Tensor], None]
"""partial(q, rows, out, lse): attends `rows` of the step over this rank's shard, for all of q's heads, without the
sink, into out (n, heads, 512) bfloat16 and lse (n, heads) float32."""


@dataclass(frozen=True)
class HeadExchange:
    """The round trip for one deployment.

    Attributes:
        ranks: the groups.
        heads: query heads of one rank.
        d_qk: columns of a query.
    """

    ranks: Ranks
    heads: int
    d_qk: int

    @property
    def heads_gathered(self) -> int:
        """Query heads of the attention call over the shard."""
        return self.heads * self.ranks.grid.head_ranks

    def buffers(self, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Fresh buffers for tiles of `rows` rows: for callers without a workspace."""
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in exchange_shapes(self.ranks.grid.parallel, self.heads, self.d_qk, rows).items()
        }

    def gather_shards(self, output: torch.Tensor, given: torch.Tensor) -> None:
        """Every shard's rows (n, ...) one after the other into output (dcp · n, ...)."""
        self.ranks.all_gather(output, given, "dcp")

    def attend(
        self,
        q: Query,
        partial: Partial,
        *,
        buffers: dict[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        attn_sink: torch.Tensor | None = None,
    ) -> None:
        """Attends this rank's rows and heads over the whole cache.

        Every rank of the cache calls this with the same number of rows, and the ranks of the same heads with the same
        queries.

        Args:
            q: (rows, heads, d_qk) bfloat16, or the pair (latent part, rotary part).
            partial: the attention over this rank's shard.
            buffers: from `buffers`, or the reservations of that name; their rows are the tile.
            out: (rows, heads, 512) bfloat16, written; contiguous.
            lse: (rows, heads) float32, written; contiguous, without the sink.
            attn_sink: (heads,) float32 of this rank's heads.

        Raises:
            RankLostError: a rank is gone.
        """
        rows = out.shape[0]
        tile = next(iter(buffers.values())).shape[0]
        for begin in range(0, rows, tile):
            part = slice(begin, min(begin + tile, rows))
            self._tile(_rows(q, part), partial, part, buffers, attn_sink, out[part], lse[part])

    def _tile(
        self,
        q: Query,
        partial: Partial,
        part: slice,
        buffers: dict[str, torch.Tensor],
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        grid = self.ranks.grid
        rows, heads, k, c = out.shape[0], self.heads, grid.head_ranks, grid.copy_ranks
        if k == 1:
            partial(q, part, out, lse)
        else:
            received, sent = buffers["exchange_received"].view(-1), buffers["exchange_sent"].view(-1)
            query = self._gather_query(q, rows, received, sent)
            partial_out = _take(received, (rows, k * heads, D_V))
            lses = buffers["exchange_lse"].view(-1)
            partial_lse = _take(lses, (rows, k * heads))
            partial(query, part, partial_out, partial_lse)
            last = sink if c == 1 else None
            if grid.parallel.dcp_comm == "a2a":
                self._scatter_a2a(partial_out, partial_lse, received, sent, last, out, lse)
            else:
                self._scatter_ag_rs(partial_out, partial_lse, lses, sent, last, out, lse)
        if c == 1:
            return
        if grid.parallel.dcp_comm == "a2a":
            received, sent = buffers["exchange_received"].view(-1), buffers["exchange_sent"].view(-1)
            self._share_a2a(received, sent, sink, out, lse)
        else:
            self._share_ag_rs(buffers["exchange_lse"].view(-1), sink, out, lse)

    def _gather_query(self, q: Query, rows: int, received: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """(rows, k · heads, d_qk): the queries of all k ranks, each row's heads together."""
        k = self.ranks.grid.head_ranks
        gathered = _take(received, (k, rows, self.heads, self.d_qk))
        mine = gathered[self.ranks.index("heads")]
        if isinstance(q, torch.Tensor):
            mine.copy_(q)
        else:
            nope, rope = q
            mine[..., : nope.shape[-1]].copy_(nope)
            if rope is not None:
                mine[..., nope.shape[-1] :].copy_(rope)
        self.ranks.all_gather(gathered, mine, "heads")
        # The attention call wants one head stride; ranks do not arrive between a row's heads.
        query = _take(sent, (rows, k, self.heads, self.d_qk))
        query.copy_(gathered.permute(1, 0, 2, 3))
        return query.view(rows, k * self.heads, self.d_qk)

    def _scatter_ag_rs(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        lses: torch.Tensor,
        sent: torch.Tensor,
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        rows, heads, k = out.shape[0], self.heads, self.ranks.grid.head_ranks
        everyone = _take(lses[partial_lse.numel() :], (k, rows, k * heads))
        self.ranks.all_gather(everyone, partial_lse, "heads")
        whole = total_lse(everyone)
        weight = weight_of(partial_lse, whole)
        by_rank = _take(sent, (k, rows, heads, D_V))
        torch.mul(
            partial_out.view(rows, k, heads, D_V).transpose(0, 1),
            weight.view(rows, k, heads, 1).transpose(0, 1),
            out=by_rank,
        )
        self.ranks.reduce_scatter(out, by_rank, "heads")
        lse.copy_(whole.view(rows, k, heads)[:, self.ranks.index("heads")])
        if sink is not None:
            out.mul_(sink_gate(lse, sink).unsqueeze(-1))

    def _scatter_a2a(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        received: torch.Tensor,
        sent: torch.Tensor,
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        rows, heads, k = out.shape[0], self.heads, self.ranks.grid.head_ranks
        by_rank = _take(sent, (k, rows, heads, columns_with_lse()))
        by_rank[..., :D_V].copy_(partial_out.view(rows, k, heads, D_V).transpose(0, 1))
        _lse_column(by_rank).copy_(partial_lse.view(rows, k, heads).transpose(0, 1))
        arrived = _take(received, (k, rows, heads, columns_with_lse()))
        self.ranks.all_to_all(arrived, by_rank, "heads")
        merge_parts(
            arrived[..., :D_V],
            _lse_column(arrived),
            sink=sink,
            scratch=_take(sent.view(torch.float32), (rows, heads, D_V)),
            out=out,
            lse=lse,
        )

    def _share_ag_rs(self, lses: torch.Tensor, sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> None:
        everyone = _take(lses, (self.ranks.grid.copy_ranks, *lse.shape))
        mine = everyone[self.ranks.index("copies")]
        mine.copy_(lse)
        self.ranks.all_gather(everyone, mine, "copies")
        whole = total_lse(everyone)
        weight = weight_of(lse, whole)
        if sink is not None:
            weight *= sink_gate(whole, sink)
        out.mul_(weight.unsqueeze(-1))
        self.ranks.all_reduce(out, "copies")
        lse.copy_(whole)

    def _share_a2a(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        arrived = _take(received, (self.ranks.grid.copy_ranks, *lse.shape, columns_with_lse()))
        mine = arrived[self.ranks.index("copies")]
        mine[..., :D_V].copy_(out)
        _lse_column(mine).copy_(lse)
        self.ranks.all_gather(arrived, mine, "copies")
        merge_parts(
            arrived[..., :D_V],
            _lse_column(arrived),
            sink=sink,
            scratch=_take(sent.view(torch.float32), (*lse.shape, D_V)),
            out=out,
            lse=lse,
        )


def facts_of(config: ServingConfig, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """What the ranks of one deployment must agree on beside their `Parallelism`, by name."""
    limits = config.limits
    return {
        "model": config.model.name,
        "policy": path.policy.value,
        "path": path.kind.value,
        "cache format": config.cache_format.value,
        "record bytes": config.layout.record_bytes,
        "heads": config.heads,
        "query columns": config.layout.d_qk,
        "query dtype": dtype,
        "block size": limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "spec_tokens": limits.spec_tokens,
        "prefill rows": path.prefill_rows,
        "host cache": config.host_cache,
    }


def exchange_for(
    ranks: Ranks, config: ServingConfig, path: Path, *, dtype: torch.dtype = torch.bfloat16
) -> HeadExchange:
    """The exchange of a deployment, once every rank has agreed on it.

    Args:
        ranks: connected for ``config.parallel``.
        config, path: the deployment and what was decided for it.
        dtype: of the queries.

    Raises:
        ConfigurationMismatchError: a rank was configured differently; it names what, the ranks and their values.
        RankLostError: a rank did not come, or stopped.
        ValueError: a dtype that attention does not take, or ranks of another deployment.
    """
    with ranks.watch():
        if ranks.grid.parallel != config.parallel:
            raise ValueError(f"ranks: got ranks for {ranks.grid.parallel}, accepted are those of {config.parallel}")
        ranks.agree(facts_of(config, path, dtype=dtype))
        if dtype is not torch.bfloat16:
            raise ValueError(f"dtype: got {dtype}, accepted is torch.bfloat16")
        return HeadExchange(ranks, config.heads, config.layout.d_qk)


def sharded_attention(
    ranks: Ranks,
    q: Query,
    cache: PagedKVCache,
    positions: torch.Tensor,
    *,
    softmax_scale: float,
    block_table: torch.Tensor,
    request_ids: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention call over a cache that is sharded over `ranks`, without an engine around it.

    Args:
        ranks: the groups; every rank calls this with the same rows and positions.
        q: (T, heads, d_qk) bfloat16, or the pair: this rank's own heads.
        cache: this rank's shard.
        positions: (T, topk) int32, positions in each row's request, whoever holds them.
        softmax_scale: multiplies q · k.
        block_table: (R, P) int32: this rank's pages of its local positions.
        request_ids: (T,) int32.
        attn_sink: (heads,) float32 of this rank's heads.

    Returns:
        out (T, heads, 512) bfloat16 and lse (T, heads) float32 over the whole cache.
    """
    nope = q if isinstance(q, torch.Tensor) else q[0]
    exchange = HeadExchange(ranks, nope.shape[1], cache.d_qk)
    out = torch.empty((*nope.shape[:2], D_V), dtype=torch.bfloat16, device=nope.device)
    lse = torch.empty(nope.shape[:2], dtype=torch.float32, device=nope.device)

    def partial(query: Query, part: slice, to: torch.Tensor, to_lse: torch.Tensor) -> None:
        sparse_mla_attention(
            query,
            cache,
            positions[part],
            softmax_scale=softmax_scale,
            block_table=block_table,
            request_ids=request_ids[part],
            context_shard=ranks.shard,
            out=to,
            lse=to_lse,
        )

    with ranks.watch():
        buffers = exchange.buffers(min(max(nope.shape[0], 1), EXCHANGE_ROWS), nope.device)
        exchange.attend(q, partial, buffers=buffers, out=out, lse=lse, attn_sink=attn_sink)
    return out, lse


def _take(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The start of a flat buffer in that shape."""
    return flat[: prod(shape)].view(shape)


def _lse_column(packed: torch.Tensor) -> torch.Tensor:
    """The float32 behind the 512 bfloat16 columns, as a view."""
    return packed.view(torch.float32)[..., D_V // 2]


def _rows(q: Query, part: slice) -> Query:
    if isinstance(q, torch.Tensor):
        return q[part]
    nope, rope = q
    return nope[part], None if rope is None else rope[part]
