# SPDX-License-Identifier: Apache-2.0
"""Which thread of the Hopper kernel reads what: every record and column once, and no two lanes in one bank."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL is not installed (extra `hopper`)", allow_module_level=True)

from sparsemla.kernels.hopper.kernel import SparseKernel

BANKS = 32


@pytest.fixture(params=[True, False], ids=["rope", "no rope"])
def kernel(request: pytest.FixtureRequest) -> SparseKernel:
    return SparseKernel(heads=16, rope=request.param, cluster=1)


def test_rows_of_a_fragment_are_the_records_of_a_granule(kernel: SparseKernel) -> None:
    assert sorted(kernel.record_of(line) + 8 * half for line in range(8) for half in range(2)) == list(range(16))


def test_both_products_agree_which_record_is_which(kernel: SparseKernel) -> None:
    """Columns of V^T's fragment (2 q, 2 q + 1, 2 q + 8, 2 q + 9) are rows of K's: records q, q + 4, q + 8, q + 12."""
    for quad in range(4):
        rows = [kernel.record_of(2 * quad), kernel.record_of(2 * quad + 1)]
        assert [*rows, *(row + 8 for row in rows)] == [quad + 4 * i for i in range(4)]


def test_lanes_have_every_column_of_a_group_once(kernel: SparseKernel) -> None:
    firsts = {kernel.column_of(quarter, 4 * line) for quarter in range(4) for line in range(8)}
    assert sorted(first + i for first in firsts for i in range(4)) == list(range(128))
    assert all(kernel.column_of(1, 4 * 3 + quad) == kernel.column_of(1, 4 * 3) for quad in range(4))


def test_value_reads_meet_no_bank_twice(kernel: SparseKernel) -> None:
    """32 lanes read four bytes each of records 0 to 3 (lane % 4)."""
    for quarter in range(4):
        words = [(lane % 4 * kernel.record_bytes + kernel.column_of(quarter, lane)) // 4 for lane in range(32)]
        assert len({word % BANKS for word in words}) == BANKS


def test_score_reads_meet_no_bank_twice(kernel: SparseKernel) -> None:
    """16 bytes a lane go eight lanes at a time: two rows of a fragment, four lanes each."""
    for lanes in (range(start, start + 8) for start in range(0, 32, 8)):
        words = [kernel.own_rows(lane) // 4 + i for lane in lanes for i in range(4)]
        assert len({word % BANKS for word in words}) == BANKS


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rope", [True, False])
def test_rooms_of_shared_memory_do_not_overlap(heads: int, rope: bool) -> None:
    kernel = SparseKernel(heads=heads, rope=rope, cluster=16)
    starts = sorted(value for name, value in vars(kernel).items() if name.startswith("off_") and name != "off_partial")
    assert starts[0] == 0 and kernel.off_ring == starts[-1] and kernel.depth >= 3
    assert kernel.off_ring + 4 * kernel.depth * kernel.granule_bytes <= kernel.shared_bytes
    assert kernel.off_barriers + (8 * kernel.depth + 8) * 8 <= kernel.off_mask
    assert kernel.off_ml + heads * 8 <= kernel.off_reduce and kernel.off_p + 2 * kernel.copies * heads * 128 <= min(
        start for start in starts if start > kernel.off_p
    )
    # What the other CTAs of a cluster read lies outside of the partial outputs.
    assert max(kernel.off_ml, kernel.off_p) < kernel.off_partial == kernel.off_q
    # The weights of 16 CTAs go over P.
    assert 16 * heads * 4 <= 2 * kernel.copies * heads * 128
    registers = 2 * kernel.value_registers + kernel.scorers * kernel.score_registers + kernel.gather_registers
    assert registers * 128 <= 65536 // kernel.threads // 8 * 8 * kernel.threads
