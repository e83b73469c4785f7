# SPDX-License-Identifier: Apache-2.0
"""What is measured: batches, cases, the fixed grid; and the tensors of a case, made once and used by all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, record_layout

D_V = 512
BLOCK = 64
"""Records of a cache page: what FlashMLA's decode accepts."""
ONE_REQUEST_FROM = 1024
"""A plain number of query tokens from here on is one request of that many (prefill), below as many requests of one."""
_CHUNK = 65536


def parse_count(text: str, name: str = "number") -> int:
    """``2048``, ``32K`` or ``1M`` (binary) → a whole number above 0. ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", text)
    value = int(match.group(1)) * {"": 1, "k": 1024, "m": 1024**2}[match.group(2).lower()] if match else 0
    if value < 1:
        raise ValueError(f"{name}: got {text!r}, accepted is a whole number above 0, with K or M for 1024 or 1024²")
    return value


def count_label(value: int) -> str:
    """The shortest text that `parse_count` reads back: 32768 → ``32K``."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


@dataclass(frozen=True, order=True)
class Batch:
    """`batch` requests of `s_q` query tokens each."""

    batch: int
    s_q: int

    @property
    def tokens(self) -> int:
        """Query tokens in all: rows of the call."""
        return self.batch * self.s_q

    @property
    def label(self) -> str:
        """What `parse` reads back: ``64``, ``8192``, ``32x4``."""
        plain = str(self.tokens)
        return plain if self == Batch.parse(plain) else f"{self.batch}x{self.s_q}"

    @classmethod
    def parse(cls, text: str) -> Batch:
        """``64`` is 64 requests of one token, ``8192`` (from 1024 on) one request, ``32x4`` 32 requests of 4.

        Raises:
            ValueError: anything else.
        """
        first, cross, second = text.strip().lower().partition("x")
        if cross:
            return cls(parse_count(first, "shapes"), parse_count(second, "shapes"))
        tokens = parse_count(first, "shapes")
        return cls(1, tokens) if tokens >= ONE_REQUEST_FROM else cls(tokens, 1)


@dataclass(frozen=True)
class Case:
    """One point of the grid, whatever the cache's format.

    Attributes:
        heads: query heads, 1 to 128.
        rows: the batch.
        pool: records of the cache; a multiple of 64.
        topk: keys of a query token, drawn uniformly from the pool.
        d_qk: columns of a key.
    """

    heads: int
    rows: Batch
    pool: int
    topk: int = 2048
    d_qk: int = 576

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.rows.tokens

    @property
    def flops(self) -> int:
        """Multiplications and additions: q · k over d_qk columns and p · v over 512."""
        return 2 * self.tokens * self.heads * self.topk * (self.d_qk + D_V)

    @property
    def records(self) -> int:
        """Records read, one for each key of each query token."""
        return self.tokens * self.topk

    def describe(self) -> str:
        """For one line of a log."""
        return f"{self.heads} heads, T {self.rows.label}, pool {count_label(self.pool)}"


def cases(
    heads: Sequence[int], rows: Sequence[Batch], pools: Sequence[int], *, topk: int = 2048, d_qk: int = 576
) -> list[Case]:
    """The product, pools outermost (their caches are the slowest to make), heads innermost.

    Raises:
        ValueError: heads outside 1 to 128, a pool that is no multiple of 64.
    """
    for count in heads:
        if not 1 <= count <= 128:
            raise ValueError(f"heads: got {count}, accepted are 1 to 128")
    for pool in pools:
        if pool < BLOCK or pool % BLOCK:
            raise ValueError(f"pools: got {pool}, accepted is a multiple of {BLOCK}")
    if topk < 1:
        raise ValueError(f"topk: got {topk}, accepted is at least 1")
    return [Case(count, batch, pool, topk, d_qk) for pool in pools for batch in rows for count in heads]


GRID_HEADS = (8, 16, 32, 64, 128)
GRID_ROWS = tuple(Batch.parse(text) for text in ("1", "8", "64", "128", "32x4", "8192"))
GRID_POOLS = (32 * 1024, 1024 * 1024)
"""The fixed grid of the Hopper benchmark: 60 cases."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The tensors of one case; whoever is measured reads the same ones.

    Attributes:
        q: (T, H, d_qk) bfloat16, contiguous.
        indices: (T, topk) int32, all of them keys.
        caches: the same latent vectors in each format asked for.
        out: (T, H, 512) bfloat16, lse: (T, H) float32: where our kernel writes.
    """

    case: Case
    q: torch.Tensor
    indices: torch.Tensor
    softmax_scale: float
    caches: Mapping[KVFormat, PagedKVCache]
    out: torch.Tensor
    lse: torch.Tensor

    def bf16_rows(self) -> torch.Tensor:
        """(pool, d_qk) bfloat16: the bf16 cache as one matrix."""
        return self.caches[KVFormat.BF16].data.view(-1, self.case.d_qk)


class Bank:
    """Makes the tensors of cases out of a few large buffers: nothing is drawn or allocated twice.

    Queries, outputs and indices of a case are contiguous views of the first elements of a buffer that fits the largest
    case. Caches of one pool at a time are kept.
    """

    def __init__(self, device: torch.device, grid: Iterable[Case], *, seed: int = 0) -> None:
        every = list(grid)
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._topk = max(case.topk for case in every)
        self._tokens = max(case.tokens for case in every)
        rows = max(case.tokens * case.heads for case in every)
        columns = max(case.d_qk for case in every)
        self._q = torch.randn(rows * columns, generator=self._generator, dtype=torch.bfloat16, device=device)
        self._out = torch.empty(rows * D_V, dtype=torch.bfloat16, device=device)
        self._lse = torch.empty(rows, dtype=torch.float32, device=device)
        self._pool = 0
        self._indices = torch.empty(0)
        self._latents: dict[int, torch.Tensor] = {}
        self._caches: dict[tuple[KVFormat, int], PagedKVCache] = {}

    def problem(self, case: Case, formats: Iterable[KVFormat]) -> Problem:
        """The tensors of `case`, with a cache for each of `formats` that has d_qk columns."""
        if case.pool != self._pool:
            self._pool, self._latents, self._caches = case.pool, {}, {}
            shape = (self._tokens, self._topk)
            self._indices = torch.randint(
                case.pool, shape, generator=self._generator, dtype=torch.int32, device=self.device
            )
        count = case.tokens * case.heads
        return Problem(
            case=case,
            q=self._q[: count * case.d_qk].view(case.tokens, case.heads, case.d_qk),
            indices=self._indices.view(-1)[: case.records].view(case.tokens, case.topk),
            softmax_scale=case.d_qk**-0.5,
            caches={fmt: self._cache(fmt, case.d_qk) for fmt in formats},
            out=self._out[: count * D_V].view(case.tokens, case.heads, D_V),
            lse=self._lse[:count].view(case.tokens, case.heads),
        )

    def _cache(self, fmt: KVFormat, d_qk: int) -> PagedKVCache:
        made = self._caches.get((fmt, d_qk))
        if made is None:
            made = self._caches[fmt, d_qk] = self._filled(fmt, d_qk)
        return made

    def _filled(self, fmt: KVFormat, d_qk: int) -> PagedKVCache:
        latents = self._latents.get(d_qk)
        if latents is None:
            shape = (self._pool, d_qk)
            latents = torch.randn(shape, generator=self._generator, dtype=torch.bfloat16, device=self.device)
            self._latents[d_qk] = latents
        if fmt is KVFormat.BF16:
            return PagedKVCache.wrap(latents.view(-1, BLOCK, d_qk), fmt)
        layout = record_layout(fmt)
        if layout.d_qk != d_qk:
            raise ValueError(f"formats: got {fmt.value} of {layout.d_qk} columns, accepted is one of {d_qk}")
        cache = PagedKVCache.allocate(self._pool // BLOCK, BLOCK, fmt, device=self.device)
        for start in range(0, self._pool, _CHUNK):
            slots = torch.arange(start, min(start + _CHUNK, self._pool), device=self.device)
            # Plain float32 scales (amax / 448) are what engines store; powers of two would flatter kernels that
            # round the scale to bf16.
            cache.write(slots, latents[start : start + _CHUNK], scale_style="float32")
        return cache
