# SPDX-License-Identifier: Apache-2.0
"""The sentinel: bytes laid into fresh memory, and the search for those still there afterwards.

The pattern is a block of 131,071 random 8-byte words (a prime, so no power-of-two stride falls on its period), repeated
and started at another word for every allocation. Each byte is in 0x21..0x5e, so that no float, half, bfloat16 or fp8
read of it is NaN, infinity, zero or a power of two; the inverted pattern (every bit flipped) has the same property and
a set sign bit.

A byte counts as never written when it still holds the sentinel *and* lies in a run that contains a whole aligned 8-byte
word of it. Chance makes one written word look unwritten with probability 2**-64 (written bytes uniform) to 2**-47
(written bytes from the sentinel's own range). The ends of a run are widened byte by byte, then narrowed to whole
elements of the tensor's dtype. Runs shorter than one aligned word are taken as written. With both patterns tried
(`exact`), single bytes are told apart and the comparison of the two runs leaves no room for chance in code that writes
the same bytes both times.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Runs = npt.NDArray[np.int64]
"""(n, 2) int64: half-open byte intervals, sorted, disjoint, not touching."""

WORDS: Final = 131_071
_SEED: Final = 0x5EED_A0D1
_LOW, _HIGH = 0x21, 0x5E
_ROWS: Final = 32  # rows of WORDS words compared at once: 32 MiB of data, 4 MiB of temporary memory

EMPTY: Final[Runs] = np.empty((0, 2), dtype=np.int64)


@functools.lru_cache(maxsize=1)
def _host_block() -> npt.NDArray[np.int64]:
    """Two periods of the pattern, so that a period can start at any word. (2 * WORDS,) int64."""
    rng = np.random.Generator(np.random.PCG64(_SEED))
    one = rng.integers(_LOW, _HIGH, size=WORDS * 8, dtype=np.uint8, endpoint=True)
    return np.concatenate([one, one]).view(np.int64)


class Pattern:
    """The sentinel on one device, in one polarity."""

    def __init__(self, device: torch.device, *, inverted: bool = False) -> None:
        block = _host_block()
        self.inverted = inverted
        self._block = torch.from_numpy(~block if inverted else block.copy()).to(device)
        self._bytes = self._block.view(torch.uint8)

    def _period(self, key: int, first_word: int) -> torch.Tensor:
        """One period as it stands from word `first_word` of an allocation with `key`. (WORDS,) int64."""
        start = (key + first_word) % WORDS
        return self._block[start : start + WORDS]

    def _byte_at(self, key: int, offsets: torch.Tensor) -> torch.Tensor:
        """Pattern bytes at byte offsets (any shape, int64) of an allocation with `key`."""
        words = (offsets // 8 + key) % WORDS
        return self._bytes[words * 8 + offsets % 8]

    def fill(self, data: torch.Tensor, key: int, *, offset: int = 0) -> None:
        """Lay the pattern into `data` ((n,) uint8, contiguous), which starts `offset` bytes into its storage."""
        head, words = _split(data.numel(), offset)
        if words == 0:
            if data.numel():
                data.copy_(self._byte_at(key, _offsets(data, offset)))
            return
        first = (offset + head) // 8
        body = data[head : head + 8 * words].view(torch.int64)
        whole = words // WORDS * WORDS
        period = self._period(key, first)
        if whole:
            body[:whole].view(-1, WORDS).copy_(period)
        if whole < words:
            body[whole:].copy_(period[: words - whole])
        for low, high in ((0, head), (head + 8 * words, data.numel())):
            if low < high:
                part = data[low:high]
                part.copy_(self._byte_at(key, _offsets(part, offset + low)))

    def unwritten(
        self, data: torch.Tensor, key: int, *, offset: int = 0, itemsize: int = 1, exact: bool = False
    ) -> Runs:
        """Runs of `data` ((n,) uint8) that still hold the pattern, as byte offsets into `data`.

        `itemsize` is the element size in bytes to which the ends of a run are narrowed. `exact` returns every run of
        equal bytes, however short: only meaningful when intersected with a run of the code under the inverted pattern.
        """
        n = data.numel()
        if n == 0:
            return EMPTY
        if exact:
            return self._equal_bytes(data, key, offset)
        head, words = _split(n, offset)
        if words == 0:
            same = bool((data == self._byte_at(key, _offsets(data, offset))).all())
            return np.array([[0, n]], dtype=np.int64) if same and n >= 4 else EMPTY
        runs = self._equal_words(data[head : head + 8 * words].view(torch.int64), key, (offset + head) // 8)
        runs = runs * 8 + head
        if len(runs) and not (len(runs) == 1 and runs[0, 0] == 0 and runs[0, 1] == n):
            runs = self._widen(data, key, offset, runs)
            runs = _narrow(runs, itemsize, n)
        tail = n - head - 8 * words
        if tail >= 4 and (len(runs) == 0 or runs[-1, 1] < n):  # a short end without a whole word of its own
            part = data[n - tail :]
            if bool((part == self._byte_at(key, _offsets(part, offset + n - tail))).all()):
                runs = normalise(np.concatenate([runs, [[n - tail, n]]]))
        return runs

    def _equal_words(self, body: torch.Tensor, key: int, first: int) -> Runs:
        found: list[Runs] = []
        step = _ROWS * WORDS
        for low in range(0, body.numel(), step):
            chunk = body[low : low + step]
            whole = chunk.numel() // WORDS * WORDS
            period = self._period(key, first)  # low is a multiple of WORDS: the phase does not move
            equal = torch.empty(chunk.numel(), dtype=torch.bool, device=chunk.device)
            if whole:
                torch.eq(chunk[:whole].view(-1, WORDS), period, out=equal[:whole].view(-1, WORDS))
            if whole < chunk.numel():
                torch.eq(chunk[whole:], period[: chunk.numel() - whole], out=equal[whole:])
            found.append(_runs_of(equal) + low)
        return normalise(np.concatenate(found))

    def _equal_bytes(self, data: torch.Tensor, key: int, offset: int) -> Runs:
        found: list[Runs] = []
        step = _ROWS * WORDS
        for low in range(0, data.numel(), step):
            chunk = data[low : low + step]
            found.append(_runs_of(chunk == self._byte_at(key, _offsets(chunk, offset + low))) + low)
        return normalise(np.concatenate(found))

    def _widen(self, data: torch.Tensor, key: int, offset: int, runs: Runs) -> Runs:
        """Extend each run by the up to 7 equal bytes on either side."""
        n = data.numel()
        ends = torch.from_numpy(runs.copy()).to(data.device)
        steps = torch.arange(7, device=data.device)
        grown = []
        for positions in (ends[:, :1] - 1 - steps, ends[:, 1:] + steps):
            inside = (positions >= 0) & (positions < n)
            clamped = positions.clamp(0, n - 1)
            equal = inside & (data[clamped] == self._byte_at(key, clamped + offset))
            grown.append(equal.to(torch.int64).cumprod(dim=1).sum(dim=1).cpu().numpy())
        return normalise(np.stack([runs[:, 0] - grown[0], runs[:, 1] + grown[1]], axis=1))


def _split(n: int, offset: int) -> tuple[int, int]:
    """Bytes before the first aligned word, and the whole words after them, in n bytes that start `offset` into a
    storage."""
    head = min(-offset % 8, n)
    return head, (n - head) // 8


def _offsets(data: torch.Tensor, offset: int) -> torch.Tensor:
    return torch.arange(offset, offset + data.numel(), device=data.device, dtype=torch.int64)


def _runs_of(equal: torch.Tensor) -> Runs:
    """Intervals of True in a 1-D bool tensor."""
    n = equal.numel()
    count = int(equal.sum())
    if count == 0:
        return EMPTY
    if count == n:
        return np.array([[0, n]], dtype=np.int64)
    edges = (torch.nonzero(equal[1:] != equal[:-1]).flatten() + 1).cpu().numpy()
    parts = [edges]
    if bool(equal[0]):
        parts.insert(0, np.zeros(1, dtype=np.int64))
    if bool(equal[-1]):
        parts.append(np.full(1, n, dtype=np.int64))
    return np.concatenate(parts).reshape(-1, 2)


def _narrow(runs: Runs, itemsize: int, n: int) -> Runs:
    """Whole elements only; the true end of the memory counts as an element's end."""
    if itemsize == 1 or not len(runs):
        return runs
    low = -(-runs[:, 0] // itemsize) * itemsize
    high = np.where(runs[:, 1] == n, n, runs[:, 1] // itemsize * itemsize)
    keep = low < high
    return np.stack([low[keep], high[keep]], axis=1)


def normalise(runs: Runs) -> Runs:
    """Sort, drop empty, merge overlapping and touching intervals."""
    runs = runs[runs[:, 0] < runs[:, 1]]
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    fresh = np.concatenate([[True], runs[1:, 0] > reach[:-1]])
    starts = runs[fresh, 0]
    last = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(runs) - 1]])
    return np.stack([starts, reach[last]], axis=1)


def intersect(a: Runs, b: Runs) -> Runs:
    """Bytes in both."""
    if not len(a) or not len(b):
        return EMPTY
    points = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    steps = np.concatenate([np.ones(len(a) + len(b), np.int64), -np.ones(len(a) + len(b), np.int64)])
    order = np.lexsort((steps, points))  # ends before starts at the same point
    depth = np.cumsum(steps[order])
    inside = np.flatnonzero(depth == 2)
    at = points[order]
    return normalise(np.stack([at[inside], at[inside + 1]], axis=1)) if len(inside) else EMPTY


def complement(runs: Runs, n: int) -> Runs:
    """Bytes of [0, n) in no run."""
    edges = np.concatenate([[0], runs.reshape(-1), [n]]).reshape(-1, 2)
    return normalise(edges.astype(np.int64))


def union(a: Runs, b: Runs) -> Runs:
    """Bytes in either."""
    return normalise(np.concatenate([a, b]))


def size(runs: Runs) -> int:
    """Bytes covered."""
    return int((runs[:, 1] - runs[:, 0]).sum())
