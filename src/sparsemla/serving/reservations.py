# SPDX-License-Identifier: Apache-2.0
"""Every scratch tensor attention takes, by name: its shape, who reads it, on which path.

A :class:`Reservation` belongs to a path. Where the path never reads the tensor it cannot be made: the constructor
raises. The one exception is policy ``flashmla``, whose purpose is to reproduce what is published, dead tensors
included; there ``ever_read`` is False and reports say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from sparsemla.formats import D_V
from sparsemla.serving.config import Parallelism, ServingConfig
from sparsemla.serving.context_parallel.grid import RankGrid
from sparsemla.serving.paths import Path, PathKind, Policy

WORKSPACE_ALIGN = 256
"""Byte alignment of every tensor in the shared workspace."""

RECORD_ALIGN = 16
"""Byte alignment of a record that stands alone: every page of a cache starts at a multiple of it."""

NOBODY = "nobody"
"""Reader of a dead reservation."""

EXCHANGE_ROWS = 512
"""Query rows that travel between the ranks of a shared cache at a time: bounds what the exchange takes, and is enough
to fill a GPU and its links."""

_EVERY = frozenset(PathKind) - {PathKind.IN_PLACE}
_COPYING = frozenset({PathKind.SEPARATE, PathKind.GATHERED, PathKind.HOST})

# name -> who reads it on which path. The only place that knows.
_READERS: dict[str, dict[PathKind, str]] = {
    "query_concat": dict.fromkeys(_EVERY, "attention kernel"),
    "prefill_kv": {
        PathKind.SEPARATE: "bf16 prefill kernel",
        PathKind.HOST: "bf16 prefill kernel",
        PathKind.GATHERED: "DCP all-gather",
    },
    "gathered_kv": {PathKind.GATHERED: "bf16 prefill kernel"},
    "padded_query": dict.fromkeys(_EVERY, "attention kernel"),
    "padded_output": dict.fromkeys(_EVERY, "un-padding copy"),
    "compact_output": dict.fromkeys(_EVERY, "output projection"),
    "exchange_received": {PathKind.IN_PLACE: "DCP merge"},
    "exchange_sent": {PathKind.IN_PLACE: "DCP exchange"},
    "exchange_lse": {PathKind.IN_PLACE: "DCP merge"},
    "gathered_records": {PathKind.IN_PLACE: "attention kernel"},
    "new_records": {PathKind.IN_PLACE: "cache write"},
}


def align(nbytes: int, to: int = WORKSPACE_ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Reservation:
    """A named scratch tensor of a path.

    Attributes:
        path: the path it is reserved for.
        name: one of the names this module knows.
        shape: of the tensor.
        dtype: of the tensor.

    Raises (when constructed):
        ValueError: unknown name; or the path never reads the tensor and the policy is not the one that reproduces dead
            ones.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.name not in _READERS:
            raise ValueError(f"name: got {self.name!r}, accepted are {', '.join(_READERS)}")
        if not self.ever_read and self.path.policy is not Policy.FLASHMLA:
            kinds = ", ".join(sorted(kind.value for kind in _READERS[self.name]))
            raise ValueError(
                f"name: {self.name!r} is never read on path {self.path.kind.value} (policy {self.path.policy.value}), "
                f"accepted are paths {kinds}"
            )

    @property
    def ever_read(self) -> bool:
        """Whether anything on this path reads the tensor."""
        return self.path.kind in _READERS[self.name]

    @property
    def read_by(self) -> str:
        """Who reads it."""
        if self.name == "query_concat" and self.path.pads_query and self.ever_read:
            return "padding copy"
        return _READERS[self.name].get(self.path.kind, NOBODY)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype without torch's prefix, e.g. ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


def taken_together(reservations: Iterable[Reservation]) -> int:
    """Bytes of the tensors laid one after the other, each aligned."""
    return sum(align(reservation.nbytes) for reservation in reservations)


def reservations_for(config: ServingConfig, path: Path) -> tuple[Reservation, ...]:
    """The scratch tensors of one rank, in the order they are laid out. All are taken together by one forward.

    Policy ``sparsemla`` takes what travels between ranks: with DCP the exchanged heads of EXCHANGE_ROWS rows, with PCP
    and DCP the gathered records of one request. On one rank it takes none. The others take, for every query token of a
    step: the concatenated query, the query and the output padded to the heads the kernels want (only where that is more
    than the rank has), and the compact output; and a bf16 copy of the context for prefills: where it is read
    (``flashmla-gated``), or for every fp8 cache (``flashmla``).
    """
    if path.kind is PathKind.IN_PLACE:
        return _between_ranks(config, path)
    tokens = config.limits.max_num_batched_tokens
    padded = path.padded_heads
    names: list[tuple[str, tuple[int, ...]]] = []
    if path.kind is PathKind.BF16:
        # The published bf16 path concatenates straight into the padded query.
        names.append(("query_concat", (tokens, padded, path.d_qk)))
    else:
        names.append(("query_concat", (tokens, path.heads, path.d_qk)))
        if path.kind in _COPYING or path.policy is Policy.FLASHMLA:
            names.append(("prefill_kv", (path.shard_rows, path.d_qk)))
        if path.kind is PathKind.GATHERED:
            names.append(("gathered_kv", (path.prefill_rows, path.d_qk)))
        if path.pads_query:
            names.append(("padded_query", (tokens, padded, path.d_qk)))
    if padded > path.heads:
        names.append(("padded_output", (tokens, padded, path.d_v)))
    names.append(("compact_output", (tokens, path.heads, path.d_v)))
    return tuple(Reservation(path, name, shape) for name, shape in names)


def _between_ranks(config: ServingConfig, path: Path) -> tuple[Reservation, ...]:
    if path.context_world == 1:
        return ()
    rows = min(EXCHANGE_ROWS, config.limits.max_num_batched_tokens)
    exchange = exchange_shapes(config.parallel, path.heads, path.d_qk, rows)
    items = [Reservation(path, name, shape, dtype) for name, (shape, dtype) in exchange.items()]
    if path.gathers_prefill:
        stride = align(config.layout.record_bytes, RECORD_ALIGN)
        items.append(Reservation(path, "gathered_records", (path.prefill_rows, stride), torch.uint8))
    return tuple(items)


def exchange_shapes(
    parallel: Parallelism, heads: int, d_qk: int, rows: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the exchange of DCP takes for `rows` query rows: name → (shape, dtype). See context_parallel.exchange.

    ``exchange_received`` holds, one after the other, the gathered queries, the partial output and (a2a) the partial
    outputs of the other ranks; ``exchange_sent`` the queries as the kernel reads them, what is sent back, and (a2a)
    the float32 sum.
    """
    grid = RankGrid(parallel, 0)
    k, c = grid.head_ranks, grid.copy_ranks
    by_message = parallel.dcp_comm == "a2a"
    packed = D_V + 2  # an output with its float32 lse
    received, sent, lse = [0], [0], [0]
    if k > 1:
        received += [k * d_qk, k * D_V]
        sent += [k * d_qk, k * D_V]
        lse.append(k if by_message else k + k * k)
        if by_message:
            received.append(k * packed)
            sent.append(k * packed)
    if by_message:
        sent.append(2 * D_V)
    if c > 1:
        (received if by_message else lse).append(c * packed if by_message else c)
    sizes = {
        "exchange_received": (max(received), torch.bfloat16),
        "exchange_sent": (max(sent), torch.bfloat16),
        "exchange_lse": (max(lse), torch.float32),
    }
    return {name: ((rows, heads, size), dtype) for name, (size, dtype) in sizes.items() if size}


def new_record_reservations(config: ServingConfig, path: Path) -> tuple[Reservation, ...]:
    """What a step's new records take while the PCP ranks share them: taken before attention, not together with it.

    Policy ``sparsemla`` only; the published form gathers bf16 rows into fresh memory.
    """
    if path.kind is not PathKind.IN_PLACE or path.prefill_world == 1:
        return ()
    rows = path.prefill_world * most_rank_rows(config, path.prefill_world)
    return (Reservation(path, "new_records", (rows, config.layout.record_bytes), torch.uint8),)


def most_rank_rows(config: ServingConfig, world: int) -> int:
    """Prefill rows one of `world` PCP ranks gets of a step at most: its share, and rounding for every request."""
    tokens, requests = config.limits.max_num_batched_tokens, config.limits.max_num_seqs
    return min(tokens, -(-tokens // world) + 2 * requests)
