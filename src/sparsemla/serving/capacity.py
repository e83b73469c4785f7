# SPDX-License-Identifier: Apache-2.0
"""From a GPU's memory to KV tokens.

memory · utilisation − weights − activations − workspace = bytes for the cache → whole pages on each rank → tokens over
all ranks that share a cache. Exact arithmetic throughout: integers and fractions, no rounding but the floor to whole
pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import torch

from sparsemla.serving.config import CacheGroup, ServingConfig
from sparsemla.serving.reservations import Reservation, align, taken_together

WINDOW_BLOCK = 64
"""Tokens of one page of a window group (vLLM's DeepseekV4SWACache)."""


@dataclass(frozen=True)
class GroupBytes:
    """What one group of layers costs a rank."""

    group: CacheGroup
    layers: int
    record_bytes: int
    bytes_per_page: int
    """Of all its layers, for one page of block_size tokens on one rank; 0 for a window."""
    bytes_per_request: int
    """Of all its layers, whatever the request's length; 0 except for a window."""


@dataclass(frozen=True)
class KVGeometry:
    """What the cache of a deployment costs.

    Attributes:
        block_size: tokens of one page on one rank.
        ranks: ranks that share the cache of a request.
        groups: the same, layer group by layer group.
    """

    block_size: int
    ranks: int
    groups: tuple[GroupBytes, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page on one rank, over all layers."""
        return sum(group.bytes_per_page for group in self.groups)

    @property
    def tokens_per_page(self) -> int:
        """Tokens that one page on each rank holds together."""
        return self.block_size * self.ranks

    @property
    def bytes_per_token_per_rank(self) -> Fraction:
        """Bytes of one token on one rank, on average over the ranks that share it, page padding included."""
        return Fraction(self.bytes_per_page, self.tokens_per_page)

    @property
    def bytes_per_request(self) -> int:
        """Bytes on one rank that a request takes whatever its length."""
        return sum(group.bytes_per_request for group in self.groups)

    def pages(self, nbytes: int) -> int:
        """Whole pages in that many bytes (0 when negative)."""
        return max(nbytes, 0) // self.bytes_per_page

    def tokens(self, nbytes: int) -> int:
        """Tokens held by that many bytes on each rank, whole pages only."""
        return self.pages(nbytes) * self.tokens_per_page

    def pages_for(self, tokens: int) -> int:
        """Pages on each rank for one request of that length."""
        return -(-tokens // self.tokens_per_page)


def kv_geometry(config: ServingConfig) -> KVGeometry:
    """Bytes of the cache, layer group by layer group.

    Raises:
        ValueError: the block size does not hold a whole number of records of a compressing group.
    """
    block = config.limits.block_size
    ratio = max(group.tokens_per_record for group in config.model.groups)
    if any(block % group.tokens_per_record for group in config.model.groups):
        raise ValueError(
            f"block_size: got {block} for {config.model.name}, whose records stand for up to {ratio} tokens; "
            f"accepted are multiples of {ratio}"
        )
    return KVGeometry(block, config.parallel.dcp, tuple(_group_bytes(config, group) for group in config.model.groups))


def _group_bytes(config: ServingConfig, group: CacheGroup) -> GroupBytes:
    layers = group.active_layers(config.mtp)
    if group.kind == "indexer":
        record = config.model.indexer_record_bytes
        per_page = layers * record * (config.limits.block_size // group.tokens_per_record)
        return GroupBytes(group, layers, record, per_page, 0)
    layout = config.layout
    if group.window is not None:
        # The newest query token sees `window` tokens; the oldest of the same step needs those before it as well.
        kept = group.window - 1 + config.limits.decode_query_len
        pages = -(-kept // WINDOW_BLOCK) + 1  # one more: a window rarely starts on a page's first token
        return GroupBytes(group, layers, layout.record_bytes, 0, layers * pages * layout.page_bytes(WINDOW_BLOCK))
    records = config.limits.block_size // group.tokens_per_record
    return GroupBytes(group, layers, layout.record_bytes, layers * layout.page_bytes(records), 0)


@dataclass(frozen=True)
class WorkspaceSize:
    """Who shares the scratch buffer, and how large that makes it."""

    attention_bytes: int
    """Attention's reservations, taken together."""
    users: tuple[tuple[str, int], ...]
    """Every user and its largest set, attention first, aligned bytes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffer: the largest set, not the sum."""
        return max((nbytes for _, nbytes in self.users), default=0)

    @property
    def decided_by(self) -> str:
        """The user with the largest set; "nobody" when there is no buffer."""
        return max(self.users, key=lambda user: user[1])[0] if self.total_bytes else "nobody"


def workspace_size(reservations: Sequence[Reservation], others: Mapping[str, int] | None = None) -> WorkspaceSize:
    """Size of the shared buffer for attention's reservations and other users' largest sets (indexer gather, MoE).

    Raises:
        ValueError: a negative size.
    """
    for name, nbytes in (others or {}).items():
        if nbytes < 0:
            raise ValueError(f"others: got {nbytes} bytes for {name}, accepted is at least 0")
    attention = taken_together(reservations)
    users = [("attention", attention), *((name, align(nbytes)) for name, nbytes in (others or {}).items())]
    return WorkspaceSize(attention, tuple(users))


@dataclass(frozen=True)
class MemoryProfile:
    """What one GPU has, and what is taken before workspace and cache.

    Attributes:
        total_bytes: memory of the GPU.
        weights_bytes: the model's weights on this rank.
        activation_bytes: peak of everything else a step allocates outside the workspace.
        overhead_bytes: taken outside the allocator (context, NCCL, other processes).
        source: "described", or the device it was measured on.
    """

    total_bytes: int
    weights_bytes: int
    activation_bytes: int = 0
    overhead_bytes: int = 0
    source: str = "described"

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ValueError(f"total_bytes: got {self.total_bytes}, accepted is at least 1")
        for name in ("weights_bytes", "activation_bytes", "overhead_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, accepted is at least 0")

    def left(self, utilization: float, workspace_bytes: int) -> int:
        """Bytes for the cache (may be negative). The utilisation is taken as the decimal it was written as."""
        allowed = floor(self.total_bytes * Fraction(repr(utilization)))
        return allowed - self.weights_bytes - self.activation_bytes - self.overhead_bytes - workspace_bytes


class MemoryMeter:
    """Measures a real GPU's MemoryProfile around a profile step.

    ::

        meter = MemoryMeter("cuda")      # after the weights are loaded
        backend = ...                    # reserves its workspace
        with meter.step():
            run_the_largest_step()
        profile = meter.profile(workspace_bytes=workspace.nbytes())

    Raises (when constructed):
        ValueError: the device is no CUDA device, or there is none.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device: got {self.device}, accepted is a CUDA device (describe the GPU instead)")
        if not torch.cuda.is_available():
            raise ValueError(f"device: got {self.device}, but torch sees no CUDA device here")
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self.weights_bytes = torch.cuda.memory_allocated(self.device)
        self.peak_bytes = self.weights_bytes

    def step(self) -> _Step:
        """A context around the largest step the engine will run; records the allocator's peak."""
        return _Step(self)

    def profile(self, *, workspace_bytes: int = 0) -> MemoryProfile:
        """What was measured. `workspace_bytes` of the peak are the shared workspace, which is planned separately."""
        free, total = torch.cuda.mem_get_info(self.device)
        outside = total - free - torch.cuda.memory_reserved(self.device)
        return MemoryProfile(
            total_bytes=total,
            weights_bytes=self.weights_bytes,
            activation_bytes=max(self.peak_bytes - self.weights_bytes - workspace_bytes, 0),
            overhead_bytes=max(outside, 0),
            source=torch.cuda.get_device_name(self.device),
        )


class _Step:
    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        torch.cuda.synchronize(self._meter.device)
        torch.cuda.reset_peak_memory_stats(self._meter.device)

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize(self._meter.device)
        self._meter.peak_bytes = max(self._meter.peak_bytes, torch.cuda.max_memory_allocated(self._meter.device))


@dataclass(frozen=True)
class KVBudget:
    """The cache that fits.

    Attributes:
        nbytes: bytes for the cache on one rank.
        window_bytes: of these, kept for max_num_seqs requests' windows.
        pages: whole pages on one rank.
        tokens: tokens over all ranks that share the cache.
        concurrency: requests of max_model_len that fit at once, as a fraction.
    """

    nbytes: int
    window_bytes: int
    pages: int
    tokens: int
    concurrency: Fraction

    @property
    def requests(self) -> int:
        """Whole requests of max_model_len at once."""
        return floor(self.concurrency)


def kv_budget(
    config: ServingConfig,
    *,
    profile: MemoryProfile | None = None,
    workspace_bytes: int = 0,
    kv_bytes: int | None = None,
) -> KVBudget:
    """The cache of one rank: from a profile and the utilisation, or from an explicit number of bytes.

    Raises:
        ValueError: neither is given, or not one request of max_model_len fits.
    """
    geometry = kv_geometry(config)
    if kv_bytes is not None:
        if kv_bytes < 0:
            raise ValueError(f"kv_bytes: got {kv_bytes}, accepted is at least 0")
        if profile is not None:
            left = profile.left(1.0, workspace_bytes)
            if kv_bytes > left:
                raise ValueError(
                    f"kv_bytes: got {kv_bytes:,}, accepted are at most the {max(left, 0):,} bytes left on the GPU"
                )
        nbytes = kv_bytes
    elif profile is not None:
        nbytes = profile.left(config.limits.utilization, workspace_bytes)
    else:
        raise ValueError("profile: got neither a memory profile nor kv_bytes, accepted is one of them")

    windows = geometry.bytes_per_request * config.limits.max_num_seqs
    pages = geometry.pages(nbytes - windows)
    needed = geometry.pages_for(config.limits.max_model_len)
    if pages < needed:
        needs = needed * geometry.bytes_per_page + windows
        raise ValueError(
            f"max_model_len: one request of {config.limits.max_model_len:,} tokens takes {needs:,} bytes of "
            f"cache a rank, and {nbytes:,} are left; accepted is up to {pages * geometry.tokens_per_page:,} tokens, "
            f"or more memory"
        )
    return KVBudget(
        nbytes=nbytes,
        window_bytes=windows,
        pages=pages,
        tokens=pages * geometry.tokens_per_page,
        concurrency=Fraction(pages, needed),
    )
