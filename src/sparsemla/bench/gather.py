# SPDX-License-Identifier: Apache-2.0
"""A kernel that only gathers rows: the floor under every attention over keys that lie anywhere. Needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CONFIGS = ((4, 4, 16), (8, 4, 8), (8, 4, 12), (16, 8, 4))
"""(rows a step, warps, programs an SM) tried in turn; the floor is the fastest."""


# Triton reads the annotations too, and knows none but its own.
def _sum_of_rows(rows, indices, sums, count, WORDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up the int32 words of the rows named; each program takes ROWS of them at a time."""
    column = tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.int32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        which = start + tl.arange(0, ROWS)
        inside = which < count
        row = tl.load(indices + which, mask=inside, other=0).to(tl.int64)
        # WORDS is a multiple of 4 and so is every boundary of the mask: these are 16-byte loads.
        wanted = inside[:, None] & (column[None, :] < WORDS)
        total += tl.load(rows + row[:, None] * WORDS + column[None, :], mask=wanted, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


_kernel: Any = triton.jit(_sum_of_rows)


def gather(
    rows: torch.Tensor, indices: torch.Tensor, sums: torch.Tensor, *, rows_a_step: int, warps: int, programs: int
) -> None:
    """Reads rows[indices] once.

    Args:
        rows: (n, words) int32, words a multiple of 4.
        indices: (count,) int32.
        sums: (programs,) int32: the sum of the words each program read, so that nothing is optimised away.
    """
    words = rows.shape[1]
    _kernel[(programs,)](
        rows,
        indices,
        sums,
        indices.shape[0],
        WORDS=words,
        WIDTH=triton.next_power_of_2(words),
        ROWS=rows_a_step,
        num_warps=warps,
    )
