# SPDX-License-Identifier: Apache-2.0
"""The sentinel and the interval arithmetic under the audit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemla.audit.sentinel import WORDS, Pattern, complement, intersect, normalise, size, union

CPU = torch.device("cpu")


def mask_of(runs: np.ndarray, n: int) -> np.ndarray:
    mask = np.zeros(n, dtype=bool)
    for low, high in runs:
        mask[low:high] = True
    return mask


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8).map(
    lambda pairs: np.array(pairs, dtype=np.int64).reshape(-1, 2)
)


@given(intervals, intervals)
def test_interval_arithmetic_against_masks(a: np.ndarray, b: np.ndarray) -> None:
    left, right = normalise(a), normalise(b)
    want_left, want_right = mask_of(a, 60), mask_of(b, 60)
    for runs, want in (
        (left, want_left),
        (intersect(left, right), want_left & want_right),
        (union(left, right), want_left | want_right),
        (complement(left, 60), ~want_left),
    ):
        assert (mask_of(runs, 60) == want).all()
        assert size(runs) == want.sum()
        assert (runs[1:, 0] > runs[:-1, 1]).all()  # sorted, disjoint, not touching


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("n", [4, 5, 8, 12, 100, 8 * WORDS + 3, 33 * 8 * WORDS + 21])
@pytest.mark.parametrize("offset", [0, 3, 16])
def test_an_untouched_fill_is_found_whole_and_under_its_own_key_only(n: int, offset: int, inverted: bool) -> None:
    pattern = Pattern(CPU, inverted=inverted)
    data = torch.zeros(offset + n, dtype=torch.uint8)[offset:]
    pattern.fill(data, 77, offset=offset)
    assert pattern.unwritten(data, 77, offset=offset).tolist() == [[0, n]]
    assert pattern.unwritten(data, 77, offset=offset, exact=True).tolist() == [[0, n]]
    assert size(pattern.unwritten(data, 78, offset=offset)) == 0
    assert size(Pattern(CPU, inverted=not inverted).unwritten(data, 77, offset=offset)) == 0


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_no_float_sees_nan_infinity_or_zero(dtype: torch.dtype, inverted: bool) -> None:
    data = torch.empty(8 * WORDS, dtype=torch.uint8)
    Pattern(CPU, inverted=inverted).fill(data, 0)
    values = data.view(dtype).to(torch.float64)
    assert torch.isfinite(values).all()
    assert (values != 0).all()


@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 700)), max_size=12), st.integers(0, 2**32 - 1))
def test_random_writes_of_whole_words_are_found_to_the_byte(writes: list[tuple[int, int]], seed: int) -> None:
    pattern = Pattern(CPU)
    data = torch.empty(8 * 4096, dtype=torch.uint8)
    pattern.fill(data, 5)
    rng = np.random.default_rng(seed)
    written = np.zeros(8 * 4096, dtype=bool)
    for word, words in writes:
        low, high = 8 * word, min(8 * (word + words), 8 * 4096)
        data[low:high] = torch.from_numpy(rng.integers(0, 256, high - low, dtype=np.uint8))
        written[low:high] = True
    found = mask_of(pattern.unwritten(data, 5, itemsize=8), 8 * 4096)
    assert (found == ~written).all()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_edges_are_exact_to_the_element(itemsize: int) -> None:
    pattern = Pattern(CPU)
    data = torch.empty(4096, dtype=torch.uint8)
    pattern.fill(data, 9)
    low, high = 40 + itemsize, 2048 - itemsize
    data[low:high] = 0  # a byte the pattern does not have
    assert pattern.unwritten(data, 9, itemsize=itemsize).tolist() == [[0, low], [high, 4096]]


def test_two_polarities_leave_nothing_to_chance() -> None:
    """Bytes taken from the sentinel itself look unwritten under one polarity, never under both."""
    found = []
    for inverted in (False, True):
        pattern = Pattern(CPU, inverted=inverted)
        data = torch.empty(4096, dtype=torch.uint8)
        Pattern(CPU).fill(data, 3)
        adversary = data[100:200].clone()
        pattern.fill(data, 3)
        data[100:200] = adversary
        found.append(pattern.unwritten(data, 3, exact=True))
    assert size(found[0]) == 4096  # fooled
    assert intersect(*found).tolist() == [[0, 100], [200, 4096]]
