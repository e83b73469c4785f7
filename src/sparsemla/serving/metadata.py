# SPDX-License-Identifier: Apache-2.0
"""What one step's batch looks like to attention, built once and used by every layer.

A batch holds requests, *decodes first* (a request with at most 1 + spec_tokens query tokens) and *prefills after*. Its
query tokens lie one request after the other; rows beyond them pad the batch to the size a CUDA graph was captured with
and belong to no request.

Host integers (lengths) are given by the scheduler and stay on the host; device tensors are views of buffers that keep
their address from step to step, so that a captured graph reads the current step's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

from sparsemla.serving.config import ServingConfig
from sparsemla.serving.paths import Path, PathKind

COPY_PAGE_ROWS = 64
"""Rows of a page of the bf16 copy, at most: each request's copy starts on a page, so positions need no conversion."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What the scheduler decided for one step.

    Attributes:
        query_lens: query tokens of each request, decodes first.
        seq_lens: tokens of each request's context, its query tokens included.
        block_table: (at least that many requests, pages) int32 on the device: this rank's pages of each request.
        padded_tokens: rows the step runs with; None for the query tokens themselves.
        num_decodes: requests at the front that are decodes; None: judged by their query tokens. With PCP a rank's share
            of a prefill may be as short as a decode, so `PrefillSplit` says it.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_table: torch.Tensor
    padded_tokens: int | None = None
    num_decodes: int | None = None


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Prefill requests whose context is copied into the workspace together.

    Attributes:
        first_request, end_request: the requests, as rows of the batch's block table.
        tokens: their query rows.
        rows: rows of the copy on this rank.
        starts: row where each request's copy begins.
        ends: row where the next one's begins.
        local_lens: records of each request that this rank holds.
        request_ids: (query rows,) int32, counted from first_request.
        block_table: (requests, pages) int32: pages of the copy, of `copy_page_rows` rows. Where shards are gathered
            (requests, positions) int32: row of each position in the gathered copy (rank after rank), -1 past the end.
    """

    first_request: int
    end_request: int
    tokens: slice
    rows: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    local_lens: tuple[int, ...]
    request_ids: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class Metadata:
    """One step's batch, for a path. See Batch for the order of requests and rows."""

    path: Path
    num_requests: int
    num_decodes: int
    num_decode_tokens: int
    num_tokens: int
    padded_tokens: int
    max_query_len: int
    max_seq_len: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    request_ids: torch.Tensor
    """(padded_tokens,) int32: the request of each row, -1 for a padding row."""
    block_table: torch.Tensor
    """(requests, pages) int32: this rank's pages."""
    chunks: tuple[PrefillChunk, ...]
    """Empty unless the path copies the context of prefills."""

    @property
    def num_prefills(self) -> int:
        """Requests that are no decodes."""
        return self.num_requests - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        """Query rows of prefills."""
        return self.num_tokens - self.num_decode_tokens


def count_decodes(query_lens: Sequence[int], decode_query_len: int) -> int:
    """Leading requests that are decodes. What follows the first longer request is a prefill, however short it is."""
    for index, length in enumerate(query_lens):
        if length > decode_query_len:
            return index
    return len(query_lens)


def decodes_first(query_lens: Sequence[int], decode_query_len: int) -> list[int]:
    """The order in which requests form a batch: decodes, then prefills, each in the order given."""
    return sorted(range(len(query_lens)), key=lambda index: query_lens[index] > decode_query_len)


def local_length(tokens: int, rank: int, world: int, interleave: int) -> int:
    """Records of a request of `tokens` tokens that one rank holds."""
    rounds, rest = divmod(tokens, world * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def copy_page_rows(path: Path) -> int:
    """Rows of a page of the bf16 copy: they divide the copy's rows, so that the longest request always fits."""
    return gcd(path.prefill_rows, COPY_PAGE_ROWS)


def split_into_chunks(rows: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Consecutive requests that fit the workspace together, as [begin, end) pairs; as few as a greedy split gives.

    Raises:
        ValueError: one request alone does not fit.
    """
    chunks: list[tuple[int, int]] = []
    begin, total = 0, 0
    for index, need in enumerate(rows):
        if need > capacity:
            raise ValueError(f"seq_lens: a request takes {need} rows of the prefill workspace, accepted are {capacity}")
        if total + need > capacity:
            chunks.append((begin, index))
            begin, total = index, 0
        total += need
    if len(rows) > begin:
        chunks.append((begin, len(rows)))
    return chunks


class MetadataBuilder:
    """Builds a step's Metadata for one path.

    Args:
        config: the deployment, as at start.
        path: what was decided at start.
        device: where attention runs.
        rank: this rank among the ranks that share the cache.
    """

    def __init__(self, config: ServingConfig, path: Path, *, device: torch.device | str = "cpu", rank: int = 0) -> None:
        if not 0 <= rank < path.context_world:
            raise ValueError(f"rank: got {rank}, accepted are 0 to {path.context_world - 1}")
        self.config = config
        self.path = path
        self.device = torch.device(device)
        self.rank = rank
        self.request_ids_buffer = torch.full(
            (config.limits.max_num_batched_tokens,), -1, dtype=torch.int32, device=self.device
        )

    def build(self, batch: Batch) -> Metadata:
        """The step's metadata. Earlier metadata of this builder must not be used afterwards (the buffers are shared).

        Raises:
            ValueError: lengths that contradict each other or the limits.
        """
        query_lens, seq_lens = list(batch.query_lens), list(batch.seq_lens)
        tokens = self._check(query_lens, seq_lens, batch)
        padded = tokens if batch.padded_tokens is None else batch.padded_tokens
        requests = len(query_lens)
        decodes = batch.num_decodes
        if decodes is None:
            decodes = count_decodes(query_lens, self.config.limits.decode_query_len)
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)

        # A fresh host tensor each step: pinned memory is freed only after the copy that reads it.
        ids = torch.full((padded,), -1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for request in range(requests):
            ids[starts[request] : starts[request + 1]] = request
        request_ids = self.request_ids_buffer[:padded]
        request_ids.copy_(ids, non_blocking=True)
        chunks: tuple[PrefillChunk, ...] = ()
        if self.path.copies_prefill_kv and decodes < requests:
            chunks = self._chunks(seq_lens, starts, decodes, request_ids)
        return Metadata(
            path=self.path,
            num_requests=requests,
            num_decodes=decodes,
            num_decode_tokens=starts[decodes],
            num_tokens=tokens,
            padded_tokens=padded,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            request_ids=request_ids,
            block_table=batch.block_table[:requests],
            chunks=chunks,
        )

    def _check(self, query_lens: list[int], seq_lens: list[int], batch: Batch) -> int:
        limits, table = self.config.limits, batch.block_table
        if len(seq_lens) != len(query_lens):
            raise ValueError(
                f"seq_lens: got {len(seq_lens)} requests, accepted are the {len(query_lens)} of query_lens"
            )
        if table.dim() != 2 or table.dtype != torch.int32 or table.shape[0] < len(query_lens):
            raise ValueError(
                f"block_table: got shape {tuple(table.shape)} of {table.dtype}, accepted is (at least "
                f"{len(query_lens)}, pages) of torch.int32"
            )
        if table.device.type != self.device.type:
            raise ValueError(f"block_table: got device {table.device}, accepted is {self.device}")
        for query, sequence in zip(query_lens, seq_lens, strict=True):
            if not 0 <= query <= sequence or sequence > limits.max_model_len:
                raise ValueError(
                    f"seq_lens: got {sequence} tokens with {query} query tokens, accepted are at least the query "
                    f"tokens and at most max_model_len = {limits.max_model_len}"
                )
        if batch.num_decodes is not None and not 0 <= batch.num_decodes <= len(query_lens):
            raise ValueError(f"num_decodes: got {batch.num_decodes}, accepted are 0 to {len(query_lens)}")
        tokens = sum(query_lens)
        padded = tokens if batch.padded_tokens is None else batch.padded_tokens
        if not tokens <= padded <= limits.max_num_batched_tokens:
            raise ValueError(
                f"padded_tokens: got {padded} for {tokens} query tokens, accepted are {tokens} to "
                f"max_num_batched_tokens = {limits.max_num_batched_tokens}"
            )
        return tokens

    def _chunks(
        self, seq_lens: list[int], starts: list[int], decodes: int, request_ids: torch.Tensor
    ) -> tuple[PrefillChunk, ...]:
        path = self.path
        gathered = path.gathers_prefill
        world = path.context_world if gathered else 1
        # Gathered as stored, a request begins on a page of its own: whole pages are copied.
        page = copy_page_rows(path)
        if gathered:
            page = self.config.limits.block_size if path.kind is PathKind.IN_PLACE else 1
        # Every rank takes the rows of the rank that holds most, so that all shards gather alike.
        needs = [-(-local_length(tokens, 0, world, path.interleave) // page) * page for tokens in seq_lens[decodes:]]
        chunks = []
        for begin, end in split_into_chunks(needs, path.shard_rows // page * page):
            first, last = decodes + begin, decodes + end
            copy_starts = [0]
            for need in needs[begin:end]:
                copy_starts.append(copy_starts[-1] + need)
            query_rows = slice(starts[first], starts[last])
            chunks.append(
                PrefillChunk(
                    first_request=first,
                    end_request=last,
                    tokens=query_rows,
                    rows=copy_starts[-1],
                    starts=tuple(copy_starts[:-1]),
                    ends=tuple(copy_starts[1:]),
                    local_lens=tuple(
                        local_length(seq_lens[r], self.rank if gathered else 0, world, path.interleave)
                        for r in range(first, last)
                    ),
                    request_ids=request_ids[query_rows] - first,
                    block_table=self._gathered_rows(copy_starts, seq_lens[first:last])
                    if gathered
                    else self._to_device(_copy_pages(copy_starts, page)),
                )
            )
        return tuple(chunks)

    def _gathered_rows(self, starts: list[int], seq_lens: list[int]) -> torch.Tensor:
        """(requests, longest) int32: where the gathered copy holds each position. `starts` ends with a shard's rows."""
        world, interleave = self.path.context_world, self.path.interleave
        position = torch.arange(max(*seq_lens, 1), dtype=torch.int32, device=self.device)
        owner = position // interleave % world
        local = position // (interleave * world) * interleave + position % interleave
        begins, lengths = self._to_device(torch.tensor([starts[:-1], seq_lens], dtype=torch.int32)).unsqueeze(-1)
        return torch.where(position < lengths, owner * starts[-1] + begins + local, -1)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        """`host` on the device, without waiting for it."""
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def _copy_pages(starts: list[int], page: int) -> torch.Tensor:
    """(requests, pages) int32: the pages of each request's copy, -1 beyond. `starts` ends with the end of the last."""
    bounds = torch.tensor(starts, dtype=torch.int32) // page
    first, counts = bounds[:-1].unsqueeze(1), bounds.diff().unsqueeze(1)
    steps = torch.arange(int(counts.max()), dtype=torch.int32)
    return torch.where(steps < counts, first + steps, -1)
