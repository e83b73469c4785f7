# SPDX-License-Identifier: Apache-2.0
"""PCP: which rows of a prefill a rank runs, and how the ranks' new records reach every cache.

A request's n query tokens are cut into 2 · world consecutive chunks that differ by at most one token; rank r runs
chunks r and 2 · world - 1 - r. Later tokens see more keys, so an early and a late chunk together are an even share of
the work. Decodes are not split: every rank runs all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import ScaleStyle, pack
from sparsemla.serving.context_parallel.ranks import Ranks
from sparsemla.serving.metadata import Batch, count_decodes
from sparsemla.serving.paths import Path, PathKind


@dataclass(frozen=True, eq=False)
class PrefillSplit:
    """One step's rows over the PCP ranks.

    Attributes:
        batch: this rank's batch: the same requests, its own query tokens, as many rows as the rank with most has.
        rows: (this rank's rows) int64: which rows of the whole step they are, in order.
        source: (rows of the whole step) int64: where each is found among all ranks' rows, one rank after the other,
            ``batch.padded_tokens`` rows each.
        prefill_source: (prefill rows of the step) int64: the same among the ranks' prefill rows alone.
        num_decode_tokens: rows at the front that every rank has.

    The tensors lie where the batch's block table does.
    """

    batch: Batch
    rows: torch.Tensor
    source: torch.Tensor
    prefill_source: torch.Tensor
    num_decode_tokens: int

    @classmethod
    def of(cls, batch: Batch, *, decode_query_len: int, rank: int, world: int) -> PrefillSplit:
        """Splits a step.

        Args:
            batch: the whole step; its padded_tokens count only where there is no prefill (a captured decode batch).
            decode_query_len: query tokens of a decode at most.
            rank, world: among the PCP ranks.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank: got {rank}, accepted are 0 to {world - 1}")
        query_lens = list(batch.query_lens)
        decodes = batch.num_decodes
        if decodes is None:
            decodes = count_decodes(query_lens, decode_query_len)
        decode_tokens, tokens = sum(query_lens[:decodes]), sum(query_lens)
        rows_of: list[list[range]] = [[range(decode_tokens)] for _ in range(world)]
        lens_of: list[list[int]] = [query_lens[:decodes] for _ in range(world)]
        start = decode_tokens
        for length in query_lens[decodes:]:
            cuts = [start + length * i // (2 * world) for i in range(2 * world + 1)]
            for other in range(world):
                chunks = [range(cuts[i], cuts[i + 1]) for i in (other, 2 * world - 1 - other)]
                rows_of[other] += chunks
                lens_of[other].append(sum(map(len, chunks)))
            start += length
        most = max(map(sum, lens_of))
        padded = most if decodes < len(query_lens) or batch.padded_tokens is None else batch.padded_tokens
        source = torch.empty(tokens, dtype=torch.int64)
        chosen = torch.empty(0, dtype=torch.int64)
        for other in range(world):
            rows = torch.tensor([row for part in rows_of[other] for row in part], dtype=torch.int64)
            source[rows] = torch.arange(len(rows)) + other * padded
            if other == rank:
                chosen = rows
        source[:decode_tokens] = torch.arange(decode_tokens) + rank * padded  # every rank's copy would do
        prefills = source[decode_tokens:]
        prefill_source = prefills // max(padded, 1) * (padded - decode_tokens) + prefills % max(padded, 1)
        mine = Batch(lens_of[rank], batch.seq_lens, batch.block_table, padded, decodes)
        device = batch.block_table.device
        return cls(
            batch=mine,
            rows=_on(device, chosen),
            source=_on(device, source),
            prefill_source=_on(device, prefill_source - decode_tokens),
            num_decode_tokens=decode_tokens,
        )

    def select(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of (rows of the step, ...), with rows of zeros up to `batch.padded_tokens`."""
        padded = self.batch.padded_tokens or 0
        part = whole.new_zeros((padded, *whole.shape[1:]))
        part[: len(self.rows)] = whole[self.rows]
        return part


def share_new_records(
    ranks: Ranks,
    path: Path,
    split: PrefillSplit,
    latents: torch.Tensor,
    cache: PagedKVCache,
    slots: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    scale_style: ScaleStyle = "float32",
) -> None:
    """Brings the new tokens' records of every PCP rank into this rank's cache.

    Policy ``sparsemla`` quantises where a latent was made and gathers records; the published policies gather bf16
    latents and quantise on every rank. The cache holds the same bytes either way.

    Args:
        ranks: with a pcp group.
        path: what was decided.
        split: of this step.
        latents: (at least this rank's rows, d_qk) bfloat16, in the order of `split.rows`.
        cache: this rank's pool.
        slots: (rows of the step,) integer: where each row's record goes here; -1 where another rank holds it.
        scratch: (rows, record_bytes) uint8, the reservation ``new_records``; None: fresh memory.
        scale_style: see `sparsemla.formats.pack`.

    Raises:
        RankLostError: a rank is gone.
    """
    with ranks.watch():
        world, decodes = ranks.size("pcp"), split.num_decode_tokens
        padded = (split.batch.padded_tokens or 0) - decodes
        rows = len(split.rows)
        as_stored = path.kind is PathKind.IN_PLACE
        if decodes:
            cache.write(slots[:decodes], latents[:decodes], scale_style)
        if len(split.source) == decodes:
            return
        mine = latents[decodes:rows]
        if as_stored:
            sent = pack(mine, cache.format, scale_style=scale_style, d_qk=cache.d_qk)
            if scratch is None:
                scratch = sent.new_empty((world * padded, cache.layout.record_bytes))
        else:
            sent = mine.to(torch.bfloat16)
            scratch = sent.new_empty((world * padded, cache.d_qk))
        gathered = scratch[: world * padded]
        own = gathered[ranks.index("pcp") * padded :][:padded]
        own[: rows - decodes].copy_(sent)
        own[rows - decodes :].zero_()
        ranks.all_gather(gathered, own, "pcp")
        found = gathered[split.prefill_source]
        if as_stored:
            cache.write_bytes(slots[decodes:], found)
        else:
            cache.write(slots[decodes:], found, scale_style)


def _on(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    """`host` on the device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
