# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode context parallelism together: a rank has prefill rows of its own, and a part of the keys.

vLLM's layer merges the parts of decode rows, which all ranks share, by their log-sum-exp; prefill rows it takes as
finished. So for a group of prefills each rank hands over its records as they are stored, and attends its rows over all
ranks' records. They are there for one layer's call; the group is as large as the longest request allowed, so what is
taken for a moment is bounded, and `reserve` shows that to vLLM's memory profile.

Gathered records lie rank after rank. Position p of a request is record ``p // (interleave · world) · interleave +
p % interleave`` of rank ``p // interleave % world``; with pages of `interleave` records that is an ordinary block
table, and no index is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from sparsemla.cache import PagedKVCache, slots_from_positions
from sparsemla.formats import KVFormat
from sparsemla.integrations.vllm.backend import RELEASE
from sparsemla.integrations.vllm.versions import UnsupportedVllmError
from sparsemla.serving.metadata import local_length, split_into_chunks

AllGather: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""all_gather(output (world · n, ...), input (n, ...)): every rank's input, in rank order, on every rank."""


@dataclass(frozen=True, eq=False)
class Gather:
    """Prefills whose records are gathered together.

    Attributes:
        tokens: their query rows.
        slots: (rows,) int64: this rank's records, in the order they are handed over.
        block_table: (requests, pages) int32 of the gathered records, in pages of the interleave.
        request_ids: (query rows,) int32, rows of block_table.
        interleave: records of a page.
    """

    tokens: slice
    slots: torch.Tensor
    block_table: torch.Tensor
    request_ids: torch.Tensor
    interleave: int


def plan_gathers(
    common: Any, *, first_request: int, block_size: int, world: int, interleave: int, most_rows: int
) -> tuple[Gather, ...]:
    """The gathers of one step.

    Every rank of the group makes the same number of them, of the same sizes: they follow from numbers that vLLM makes
    the same on all (`dcp_local_seq_lens_cpu_upper_bound`, `req_idx`).

    Args:
        common: vLLM's CommonAttentionMetadata. Neighbouring rows of its table with one `req_idx` are two chunks of one
            request and share its records.
        first_request: the first prefill.
        block_size: records of a page of the cache.
        world: ranks that share the cache.
        interleave: consecutive positions on a rank.
        most_rows: records of a rank in one gather; a request has no more.
    """
    device = common.block_table_tensor.device
    count = common.num_reqs - first_request
    if common.req_idx is None:  # a dummy batch: one row a request
        names = np.arange(count)
    else:
        names = np.asarray(common.req_idx)[first_request : common.num_reqs]
    first_rows = np.flatnonzero(np.diff(names, prepend=names[0] - 1))
    bounds = [*first_rows.tolist(), count]
    shards = _shard_rows(common, world, interleave)
    # A page is whole: what fills up the last one is handed over too, and no position names it.
    rows = [-(-shards[first_request + row] // interleave) * interleave for row in bounds[:-1]]
    starts = common.query_start_loc_cpu
    gathers = []
    for begin, end in split_into_chunks(rows, max(most_rows, *rows)):
        tokens = [int(starts[first_request + row]) for row in bounds[begin : end + 1]]
        offsets = np.cumsum([0, *rows[begin:end]]).tolist()
        # Positions of this rank's records within each request, and the row of vLLM's table that has its pages.
        positions = torch.cat([torch.arange(length, device=device) for length in rows[begin:end]])
        lengths = torch.tensor(rows[begin:end])
        owners = torch.tensor([first_request + row for row in bounds[begin:end]]).repeat_interleave(lengths)
        entries = torch.arange(end - begin, dtype=torch.int32).repeat_interleave(torch.tensor(tokens).diff())
        gathers.append(
            Gather(
                tokens=slice(tokens[0], tokens[-1]),
                slots=slots_from_positions(
                    common.block_table_tensor, _to(owners, device), positions, block_size=block_size
                ),
                block_table=_to(_gathered_pages(offsets, world, interleave), device),
                request_ids=_to(entries, device),
                interleave=interleave,
            )
        )
    return tuple(gathers)


def gathered_cache(cache: PagedKVCache, gather: Gather, world: int, all_gather: AllGather) -> PagedKVCache:
    """The records of a gather's requests on every rank, as a cache that `gather.block_table` names."""
    shard = cache.gather_bytes(gather.slots)
    pool = shard.new_empty((world * shard.shape[0], shard.shape[1]))
    all_gather(pool, shard)
    records = pool.view(torch.bfloat16) if cache.format is KVFormat.BF16 else pool
    return PagedKVCache.wrap(records.view(-1, gather.interleave, records.shape[1]), cache.format)


def reserve(record_bytes: int, rows: int, world: int, device: torch.device) -> None:
    """Takes, for a moment, what one gather takes at most, so that a memory profile sees it."""
    shard = torch.empty(rows * record_bytes, dtype=torch.uint8, device=device)
    pool = torch.empty(world * rows * record_bytes, dtype=torch.uint8, device=device)
    del shard, pool


def gathers_prefills(vllm_config: Any) -> bool:
    """Whether prefill and decode context parallelism are used together.

    Raises:
        UnsupportedVllmError: they are, and this vLLM's layer cannot.
    """
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size == 1 or parallel.decode_context_parallel_size == 1:
        return False
    if not RELEASE.gathers_prefills:
        raise UnsupportedVllmError(
            f"sparsemla: got prefill_context_parallel_size {parallel.prefill_context_parallel_size} with "
            f"decode_context_parallel_size {parallel.decode_context_parallel_size} on vLLM {RELEASE.version}, whose "
            "layer merges prefill rows of different ranks; accepted is one of them alone, or vLLM 0.33.0"
        )
    return True


def longest_shard(vllm_config: Any) -> int:
    """Records of the longest request that one rank holds at most, in whole runs of the interleave."""
    run = vllm_config.parallel_config.cp_kv_cache_interleave_size
    rounds = -(
        -vllm_config.model_config.max_model_len // (run * vllm_config.parallel_config.decode_context_parallel_size)
    )
    return int(rounds * run)


def _shard_rows(common: Any, world: int, interleave: int) -> list[int]:
    """Records that the rank with most has of each request."""
    bound = common.dcp_local_seq_lens_cpu_upper_bound
    if bound is not None:
        return [int(length) for length in bound]
    return [local_length(int(tokens), 0, world, interleave) for tokens in common.seq_lens_cpu_upper_bound]


def _gathered_pages(offsets: list[int], world: int, interleave: int) -> torch.Tensor:
    """(requests, pages) int32: the page of each run of positions; -1 behind a request's last."""
    bounds = torch.tensor(offsets) // interleave
    first, counts = bounds[:-1].unsqueeze(1), bounds.diff().unsqueeze(1)
    run = torch.arange(int(counts.max()) * world)
    page = run % world * bounds[-1] + first + run // world
    return torch.where(run // world < counts, page, -1).to(torch.int32)


def _to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on the device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
