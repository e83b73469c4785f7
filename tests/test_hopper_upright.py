# SPDX-License-Identifier: Apache-2.0
"""Where the Hopper kernel of 64 heads over bf16 records puts records, queries and P, and where the matrix units look.

The kernel's own index arithmetic is run on the CPU, a lane at a time (see `hopper_lanes.py`). What it must agree with
is the 128-byte swizzle of operands in shared memory and the PTX manual's order of WGMMA's registers and of stmatrix.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL is not installed (extra `hopper`)", allow_module_level=True)

from hopper_lanes import BANKS, LOAD_QUERY, PLAIN, STORE_QUERY, Statements, in_python, max_u16x2
from sparsemla.kernels.hopper import build, ptx, query, upright, upright_gather, upright_math
from sparsemla.kernels.hopper.kernel import SparseKernel
from sparsemla.kernels.hopper.upright import UprightKernel

BASE = 2**18
"""Address of shared memory."""
STEPS = "for t in cutlass.range_constexpr(STEPS):\n    "
DELIVER = in_python(UprightKernel.deliver, upright_gather)
STORE_COLUMNS = in_python(UprightKernel.store_columns, upright_math)
BARRIERS = Statements(
    UprightKernel.kernel, upright, "for i in cutlass.range_constexpr(4)", "for i in cutlass.range_constexpr(2)"
)
PAIRS = Statements(UprightKernel.math, upright_math, "pairs = ")
MASK = Statements(UprightKernel.math, upright_math, "if valid[0]")
"""What becomes of the scores of records that are not there."""
WEIGHTS = Statements(
    UprightKernel.math,
    upright_math,
    *("p_row = ", "p_piece = ", STEPS + "for h", STEPS + "target", "for n, t in enumerate"),
)
"""P to registers and to shared memory."""


def patch(monkeypatch: pytest.MonkeyPatch, target: Any, **fakes: Any) -> None:
    for name, fake in fakes.items():
        monkeypatch.setattr(target, name, fake)


@pytest.fixture(params=["rope", "no rope"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> UprightKernel:
    made = UprightKernel(rope=request.param == "rope", cluster=1)
    patch(monkeypatch, made, _barrier=lambda base, kind, index=0: kind + index)
    for module in (query, upright_gather):
        patch(monkeypatch, module, cutlass=PLAIN, Int32=int, Int64=int)
    return made


def swizzled(row: int, column: int) -> int:
    """Byte of a bf16 in tiles of 64 rows of 64 columns: of its address, bits 4 to 6 are exchanged by bits 7 to 9."""
    linear = column // 64 * 8192 + row * 128 + column % 64 * 2
    return linear ^ (linear >> 3 & 0x70)


def masks(missing: list[int]) -> list[int]:
    """A word for 16 records: their bits, twice."""
    return [sum((16 * word + bit % 16 not in missing) << bit for bit in range(32)) for word in range(4)]


def no_bank_twice(addresses: Sequence[int]) -> bool:
    return len({(address // 4 + i) % BANKS for address in addresses for i in range(4)}) == 4 * len(addresses)


def inits(kernel: UprightKernel) -> list[tuple[int, int]]:
    """Every mbarrier that is set up, and the arrivals it waits for."""
    found: list[tuple[int, int]] = []
    arch = SimpleNamespace(mbarrier_init=lambda barrier, count: found.append((barrier, count)))
    BARRIERS.run(kernel, arch=arch, each=1)
    return found


@pytest.mark.parametrize("missing", [[], [0, 21, 42, 63]])
@pytest.mark.parametrize("count", [0, 7])
def test_records_arrive_once_swizzled_and_announced_by_their_half(
    kernel: UprightKernel, count: int, missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of block `count`, in buffer count % 2. Of a missing record no byte is read; the cache's start stands for it."""
    pool, buffer = 2**40, count % 2
    records = [0 if record in missing else 2**30 - 4096 * record for record in range(64)]
    arrived: dict[int, tuple[int, int, int]] = {}  # place -> half, source, size
    targets: list[list[int]] = []  # of a lane, in their order
    arrivals: Counter[int] = Counter()
    left: dict[int, int] = {}  # masks
    warp = lane = 0
    half = -1  # the one that is free

    def shuffle(source: int, of: int) -> int:
        sources = [record or pool for record in records[16 * warp : 16 * warp + 16]]
        assert source == sources[lane % 16]
        return sources[of % 16]

    def ballot(mine: bool) -> int:
        assert mine == masks(missing)[warp] >> lane & 1
        return masks(missing)[warp]

    def wait(barrier: int, phase: int) -> None:
        nonlocal half
        half = barrier - kernel.K_EMPTY - 2 * buffer
        assert half in (0, 1) and phase == (count // 2 + 1) % 2  # a new mbarrier lets phase 1 pass

    def copy(target: int, source: int, size: int) -> None:
        assert target not in arrived
        arrived[target] = half, source, size
        targets[-1].append(target)

    def arrive(barrier: int) -> None:
        assert barrier == kernel.K_FULL + 2 * buffer + half
        arrivals[barrier] += 1

    arch = {"mbarrier_wait": wait, "mbarrier_arrive": arrive, "cp_async_mbarrier_arrive_noinc": arrive}
    arch |= {"shuffle_sync": shuffle, "vote_ballot_sync": ballot}
    patch(monkeypatch, upright_gather, arch=SimpleNamespace(**arch))
    patch(monkeypatch, ptx, opaque=int, cp_async16_some=copy, sts_i32=left.__setitem__)
    for warp, lane in itertools.product(range(4), range(32)):
        targets.append([])
        slot, before = kernel.place_in_ring(count, warp)
        DELIVER(kernel, BASE, slot, before, records[16 * warp + lane % 16], 0, lane, pool)
    assert arrived == {
        BASE + kernel.keys(buffer) + swizzled(record, column): (
            column // 256 if column < 512 else 1 - buffer,
            (records[record] or pool) + 2 * column,
            0 if record in missing else 16,
        )
        for record in range(64)
        for column in range(0, 576 if kernel.rope else 512, 8)
    }
    for start in range(0, 128, 8):
        assert all(no_bank_twice(together) for together in zip(*targets[start : start + 8], strict=True))
    assert left == {BASE + kernel.off_mask + 16 * buffer + 4 * i: mask for i, mask in enumerate(masks(missing))}
    full = kernel.K_FULL + 2 * buffer
    assert arrivals == {barrier: count for barrier, count in inits(kernel) if full <= barrier < full + 2}


def test_rotary_columns_come_when_p_over_them_was_read(kernel: UprightKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warpgroup that is given a buffer's P frees the half that the test above asks of the rotary columns."""
    freed: list[int] = []
    patch(monkeypatch, kernel, signal=lambda base, kind, index, lane: freed.append(kind + index - kernel.K_EMPTY))
    for buffer in range(2):
        kernel.free(BASE, 1 - buffer, buffer, 0)
    assert freed == [1, 2]


def test_scores_of_missing_records_are_masked(kernel: UprightKernel) -> None:
    missing = [0, 9, 21, 38, 42, 63]
    for quad in range(4):
        x = dict.fromkeys(range(32), 0.0)
        MASK.run(kernel, valid=masks(missing), quad=quad, x=x, Float32=float)
        for e, value in x.items():
            assert (value < 0) == (8 * (e // 4) + 2 * quad + e % 2 in missing)


def test_queries_arrive_once_swizzled(kernel: UprightKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight warps over 64 heads; a word of the query is its address here, a bf16 that of its byte."""
    latent, rotary = 2**20, 2**21
    stored: dict[int, int] = {}
    factors: list[int] = []

    def store(target: int, *words: tuple[int, int]) -> None:
        for i, byte in enumerate(itertools.chain(*words)):
            assert target + 2 * i not in stored
            stored[target + 2 * i] = byte

    patch(
        monkeypatch,
        ptx,
        ldg128=lambda address, wanted: [address + 4 * word if wanted else -1 for word in range(4)],
        bf16_to_f32=lambda word, half: word + 2 * half,
        bits_to_f32=lambda bits: 3,  # what a row is multiplied with
        pack_bf16x2=lambda low, high: (low, high),
        sts128=store,
        sts_f32=lambda address, value: factors.append(address),
    )
    patch(monkeypatch, ptx, max_u16x2=max_u16x2, fmin=min, fmax=max)
    arch = SimpleNamespace(shuffle_sync_bfly=lambda value, distance: value)
    cute = SimpleNamespace(make_rmem_tensor=lambda shape, dtype: {})
    patch(monkeypatch, query, arch=arch, cute=cute, Uint32=int, Float32=float)
    patch(monkeypatch, kernel, store_query=functools.partial(STORE_QUERY, kernel))
    patch(monkeypatch, kernel, store_columns=functools.partial(STORE_COLUMNS, kernel))
    strides = {"q_nope_token": 0, "q_nope_head": 1024, "q_rope_token": 0, "q_rope_head": 128}
    p = SimpleNamespace(scale_log2=1.0, heads=64, q_nope=latent, q_rope=rotary, **strides)
    for warp, lane in itertools.product(range(8), range(32)):
        LOAD_QUERY(kernel, p, BASE, 0, 0, warp, lane, kernel.loaders)
    assert stored == {
        BASE + kernel.off_q + swizzled(head, column): 3 * (start + 2 * (columns * head + column - first))
        for head in range(64)
        for start, first, columns in ((latent, 0, 512), (rotary, 512, 64 * kernel.rope))
        for column in range(first, first + columns)
    }
    assert sorted(factors) == [BASE + kernel.off_q_factor + 4 * head for head in range(64)]


def test_p_lies_where_both_products_read_it(kernel: UprightKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score is its head and record here. Element 4 j + 2 i + c of an accumulator is row line + 8 i, column 8 j + 2
    quad + c; register r of A is row line + 8 (r % 2), column 8 (r // 2) + 2 quad and the next; of stmatrix's matrix m,
    lane l holds columns 2 (l % 4) and the next of row l // 4, whose address is lane 8 m + l // 4's."""
    shared: dict[int, Any] = {}
    places: list[list[int]] = []  # of a lane, in their order
    words: list[list[tuple[Any, ...]]] = []

    def store(address: int, *matrices: Any) -> None:
        places[-1].append(address)
        words[-1].append(matrices)

    patch(monkeypatch, ptx, stmatrix_x4=store, pack_bf16x2=lambda low, high: (0, low, high))
    patch(monkeypatch, kernel, term=lambda number, low, high: (number, low, high))
    for me, warp in itertools.product(range(2), range(4)):
        places, words = [], []
        for lane in range(32):
            places.append([])
            words.append([])
            head, quad = 16 * warp + lane // 4, lane % 4
            x = {e: (head + 8 * (e // 2 % 2), 8 * (e // 4) + 2 * quad + e % 2) for e in range(32)}
            filled: tuple[dict[int, Any], dict[int, Any]] = {}, {}
            arch = SimpleNamespace(barrier=lambda **given: None)
            names = {"me": me, "warp": warp, "lane": lane, "x": x, "arch": arch, "base": BASE}
            WEIGHTS.run(kernel, main_words=filled[0], low_words=filled[1], **names)
            for number, first in ((0, 0), (1, 2 * me)):  # which term, and its first product of 16 records
                assert len(filled[number]) == (16, 8)[number]
                for at, word in filled[number].items():
                    row, record = head + 8 * (at % 2), 16 * (first + at // 4) + 8 * (at // 2 % 2) + 2 * quad
                    assert word == (number, (row, record), (row, record + 1))
        for addresses, stored in zip(zip(*places, strict=True), zip(*words, strict=True), strict=True):
            for matrix in range(4):
                assert no_bank_twice(addresses[8 * matrix : 8 * matrix + 8])
                for lane in range(32):
                    target = addresses[8 * matrix + lane // 4] + 4 * (lane % 4)
                    assert target not in shared
                    shared[target] = stored[lane][matrix]
    # Both blocks' first terms; of second ones the first block's left half and the second block's right one.
    tiles = [(0, kernel.main_terms(0)), (0, kernel.main_terms(1)), (1, kernel.off_low)]
    assert shared == {
        BASE + tile + swizzled(head, record): (number, (head, record), (head, record + 1))
        for number, tile in tiles
        for head in range(64)
        for record in range(0, 64, 2)
    }


@pytest.mark.parametrize("cluster", [1, 16])
@pytest.mark.parametrize("rope", [True, False])
def test_rooms_of_shared_memory_do_not_overlap(rope: bool, cluster: int) -> None:
    kernel, tiles = UprightKernel(rope=rope, cluster=cluster), 9 if rope else 8
    vectors = {"max": 1, "decay": 2, "q_factor": 1, "sums": 2, "ml": 2}  # words a head
    operands = {"low": 1, "q": tiles, "ring": 2 * tiles} | ({} if rope else {"main": 2})  # tiles of 64 x 64 bf16
    sizes = {"barriers": 14 * 8, "mask": 2 * 16, "flag": 2 * 16}
    sizes |= {name: 64 * 4 * words for name, words in vectors.items()}
    sizes |= {name: 8192 * count for name, count in operands.items()}
    named = {name.removeprefix("off_") for name in vars(kernel) if name.startswith("off_")}
    assert named == sizes.keys() | {"p", "q_rope", "partial", "main"}
    rooms = sorted((getattr(kernel, f"off_{name}"), size) for name, size in sizes.items())
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(rooms))
    assert rooms[0][0] >= 0 and sum(rooms[-1]) <= kernel.shared_bytes <= 227 * 1024
    # The swizzle acts on bits of the address.
    assert all(getattr(kernel, f"off_{name}") % (1024 if name in operands else 16) == 0 for name in sizes)
    # P lies over a buffer's last tile, the rotary one, or has a room of its own.
    first, step = (kernel.off_ring + 8 * 8192, 9 * 8192) if rope else (kernel.off_main, 8192)
    assert [kernel.main_terms(buffer) for buffer in range(2)] == [first, first + step]
    # The end of a token that is cut: a weight for every CTA and head, and partial outputs clear of what others read.
    assert kernel.off_low <= kernel.off_p and kernel.off_p + cluster * 64 * 4 <= kernel.off_low + 8192
    assert max(kernel.off_ml + 64 * 8, kernel.off_p + cluster * 64 * 4) <= kernel.off_partial
    assert kernel.off_partial + 64 * (512 + 4) * 4 <= kernel.shared_bytes
    # A thread starts with 168 registers.
    assert (2 * kernel.math_registers + kernel.gather_registers) * 128 <= 168 * 384 <= 65536


def test_every_mbarrier_is_set_up_once(kernel: UprightKernel) -> None:
    assert sorted(barrier for barrier, _ in inits(kernel)) == list(range(14))
    assert kernel.off_barriers + 14 * 8 <= kernel.off_mask


def test_second_terms_are_halves(kernel: UprightKernel) -> None:
    first, second = (set(kernel.low_steps(buffer)) for buffer in range(2))
    assert len(first) == len(second) == 2 and first | second == set(range(4))


def test_buffers_take_turns(kernel: UprightKernel) -> None:
    """A buffer's fillings alternate in parity; the granules of all warps have a number of their own."""
    filled: Counter[int] = Counter()
    for count, granule in itertools.product(range(12), range(4)):
        slot, before = kernel.place_in_ring(count, granule)
        assert slot // 4 == count % 2 and before == filled[slot] % 2
        filled[slot] += 1
    assert filled == dict.fromkeys(range(8), 6)


def test_odd_blocks_get_a_partner(kernel: UprightKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather and math agree on the number of blocks."""
    for blocks in range(9):
        patch(monkeypatch, kernel, my_blocks=lambda *args, blocks=blocks: blocks)
        pairs = PAIRS.run(kernel, length=0, extra=0, rank=0).pairs
        assert kernel.blocks_to_bring(blocks) == 2 * pairs and 0 <= 2 * pairs - blocks <= 1


def test_64_heads_over_bf16_records_have_this_kernel() -> None:
    for kind, heads in itertools.product(("sparse", "wide", "v4", "v41"), (8, 16, 32, 64)):
        made = build.make_kernel(build.Variant(kind, heads, kind != "v41", 2))
        assert type(made) is (UprightKernel if (kind, heads) == ("wide", 64) else SparseKernel)
