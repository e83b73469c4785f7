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

from sparsemla.serving.config import ServingConfig
from sparsemla.serving.paths import Path, PathKind, Policy

WORKSPACE_ALIGN = 256
"""Byte alignment of every tensor in the shared workspace."""

NOBODY = "nobody"
"""Reader of a dead reservation."""

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

    Policy ``sparsemla`` takes none. The others take, for every query token of a step: the concatenated query, the
    query and the output padded to the heads the kernels want (only where that is more than the rank has), and the
    compact output; and a bf16 copy of the context for prefills: where it is read (``flashmla-gated``), or for every
    fp8 cache (``flashmla``).
    """
    if path.kind is PathKind.IN_PLACE:
        return ()
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
