# SPDX-License-Identifier: Apache-2.0
"""The checked arguments of one attention call: what every kernel receives, and nothing else.

`sparse_mla_attention` validates what the user gave and builds an :class:`AttentionCall`; a kernel may rely on every
statement made here without looking again. All tensors of a call lie on one device.

Symbols: T query rows, H heads, ``topk`` index columns, ``R`` requests, ``P`` pages a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparsemla.cache import PagedKVCache
    from sparsemla.schedule import SplitSchedule


@dataclass(frozen=True, eq=False)
class ExtraKeys:
    """A second set of keys, attended together with the first under one softmax.

    Its indices are always slots of its own cache; block table and context shard of the call do not apply to them.
    """

    cache: PagedKVCache
    """A cache whose layout has the widths (d_qk, d_nope, d_rope) of the call's cache; format and block size are
    free."""
    indices: torch.Tensor
    """(T, topk2) int32, last dimension contiguous, row stride free; outside [0, num_slots) means "no key"."""
    topk_lengths: torch.Tensor | None
    """(T,) int32 or None: only the leftmost entries count. Values below 0 count as 0, above topk2 as topk2."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall:
    """One attention call, checked.

    The values inside `indices`, `topk_lengths`, `block_table` and `request_ids` are *not* checked (that would
    synchronise with the device): a kernel treats whatever does not name a key as "no key" and never reads outside
    the cache.
    """

    q_nope: torch.Tensor
    """(T, H, d_nope) bfloat16; last dimension contiguous, row and head strides free."""
    q_rope: torch.Tensor | None
    """(T, H, 64) bfloat16, strided as q_nope; None where the layout has no rotary columns."""
    cache: PagedKVCache
    indices: torch.Tensor
    """(T, topk) int32, last dimension contiguous, row stride free. Slots, or positions when `block_table` is given."""
    softmax_scale: float
    """Finite. Multiplies q·k before the softmax."""
    topk_lengths: torch.Tensor | None = None
    """(T,) int32 contiguous or None: only the leftmost entries count; clamped to [0, topk]."""
    block_table: torch.Tensor | None = None
    """(R, P) int32, last dimension contiguous, row stride free: page of (request, position // block_size)."""
    request_ids: torch.Tensor | None = None
    """(T,) int32 contiguous, given exactly when block_table is; outside [0, R): the row has no keys of the first
    set."""
    context_shard: tuple[int, int, int] | None = None
    """(rank, world, interleave), only with block_table: position p is held by rank (p // interleave) % world."""
    attn_sink: torch.Tensor | None = None
    """(H,) float32 contiguous: out *= exp(lse) / (exp(lse) + exp(sink)); lse is returned without it. ±inf allowed."""
    extra: ExtraKeys | None = None
    schedule: SplitSchedule | None = None
    """None: the kernel plans for itself. Given without splits: do not split (batch invariant)."""
    out: torch.Tensor
    """(T, H, 512) bfloat16; last dimension contiguous, row and head strides free."""
    lse: torch.Tensor
    """(T, H) float32, natural logarithm, any strides; -inf for a row without keys."""

    @classmethod
    def plain(
        cls,
        q: torch.Tensor,
        cache: PagedKVCache,
        indices: torch.Tensor,
        *,
        softmax_scale: float = 1.0,
        schedule: SplitSchedule | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> AttentionCall:
        """A call without options, to ask the registry about or to time a kernel with; nothing is checked.

        Args:
            q: (T, H, d_qk) bfloat16, split here into its two parts.
            cache, indices, softmax_scale, schedule, out, lse: as the attributes; new results where none are given.
        """
        layout = cache.layout
        rows, heads, _ = q.shape
        if out is None:
            out = torch.empty((rows, heads, layout.d_v), dtype=torch.bfloat16, device=q.device)
        if lse is None:
            lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        return cls(
            q_nope=q[..., : layout.d_nope] if layout.d_rope else q,
            q_rope=q[..., layout.d_nope :] if layout.d_rope else None,
            cache=cache,
            indices=indices,
            softmax_scale=softmax_scale,
            schedule=schedule,
            out=out,
            lse=lse,
        )

    @property
    def num_rows(self) -> int:
        """T: query rows of the call."""
        return self.q_nope.shape[0]

    @property
    def num_heads(self) -> int:
        """H: query heads, 1 to 128."""
        return self.q_nope.shape[1]

    @property
    def topk(self) -> int:
        """Columns of `indices`."""
        return self.indices.shape[1]

    @property
    def extra_topk(self) -> int:
        """Columns of the extra indices, 0 without extra keys."""
        return 0 if self.extra is None else self.extra.indices.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of every tensor of the call."""
        return self.q_nope.device
