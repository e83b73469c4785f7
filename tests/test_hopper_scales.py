# SPDX-License-Identifier: Apache-2.0
"""V4's and V4.1's scales in the Hopper kernel: what its threads make of real records, number by number.

The kernel's own code is run on the CPU, a lane at a time, over 64 records in a shared memory that holds NaN elsewhere:
fragments of K with the queries they meet, the table of scales that score warps leave, and fragments of V^T. All
numbers are powers of two times short ones, so most comparisons are exact.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL is not installed (extra `hopper`)", allow_module_level=True)

from hopper_lanes import BANKS, E4M3, PLAIN, Exchange, Shared, Statements, bf16s, bf16x2, f16s, f32, made, query_columns
from sparsemla.kernels.hopper import products, ptx, records, score, value
from sparsemla.kernels.hopper.kernel import SparseKernel

SCORE = Statements(
    SparseKernel.score, score, "rows = base + self.off_ring", "scales = rows - quad", "queries = [b_q", "ratio_place ="
)
"""Where a score thread reads and writes, and which query operand each of its products gets."""
BIAS = Statements(SparseKernel.score, score, "grow.append(ptx", "shift = Float32(exponents")
"""What one record's power of two does to sums (`grow`) and scores (`shift`)."""
WRITE = Statements(
    SparseKernel.score, score, "table = buffer * ", "if cutlass.const_expr(self.fine):\n    own = self.scale_bytes"
)
"""A score thread's scales into the table."""
VALUE = Statements(
    SparseKernel.value,
    value,
    "group0 = ",
    "column = group0 * 128",
    "ring = ",
    "mine = ",
    "row = group0",
    "ratios = ",
    "if cutlass.const_expr(self.kind == 'v4'):\n    rotary = ",
    "places = ",
    "table = ratios",
    "tables = ",
    "tails = places",
    "if cutlass.const_expr(self.kind == 'v4'):\n    tails = ",
)
"""Where a value thread reads records and scales."""
TRANSPOSE = Statements(
    SparseKernel.value,
    value,
    "scale.append(",
    "if cutlass.const_expr(self.kind == 'v4' and part0",
)
"""From records to a fragment of V^T."""


@dataclass(frozen=True)
class Block:
    """64 records in shared memory.

    Attributes:
        shared: the memory.
        scales: a record's scale bytes, without V4's pad byte.
        values: a record's 512 columns as numbers.
        codes: those of them that are e4m3, without their scales.
    """

    shared: Shared
    scales: list[list[int]]
    values: list[list[float]]
    codes: list[list[float]]

    def exponent(self, record: int) -> int:
        """What the record is to be relative to: its largest scale, or where its rotary columns are 2^9 of."""
        rotary = [abs(v) for v in self.values[record][len(self.codes[record]) :] if v]
        least = [math.frexp(max(rotary))[1] - 1 + 127 - 8] if rotary else []
        return min(max(27, *self.scales[record], *least), 247)


def block(kernel: SparseKernel, stage: int, case: str) -> Block:
    """Random records: `case` is what all exponents are near to, or "far", or "rotary" (V4's large beside e4m3)."""
    rng = random.Random(case)
    shared = Shared(kernel.shared_bytes)
    base = {"far": 240, "rotary": 100}.get(case) or int(case)
    columns = 64 * kernel.narrow_blocks
    count = columns // 64 * (2 if kernel.kind == "v41" else 1)
    finite = [code for code in range(256) if code & 0x7F != 0x7F and (base != 254 or abs(E4M3[code]) <= 4)]
    data = Block(shared, [], [], [])
    for record in range(64):
        codes = rng.choices(finite, k=columns)
        # The largest is at every place in turn. "far": some need f16's last digits, and others lie far below.
        spread = rng.choice((45, 241)) if case == "far" else 12
        scales = [min(max(base - rng.randrange(spread), 0), 254) for _ in range(count)]
        scales[record % count] = base
        group = columns // count
        values = [E4M3[code] * 2.0 ** (scales[i // group] - 127) for i, code in enumerate(codes)]
        raw = bytes(codes)
        if kernel.rope:
            # Largest: below, and up to 2^6 above what the scales alone would do, at every place.
            top = base - 127 + (rng.randrange(9, 15) if case == "rotary" else rng.randrange(-6, 8))
            numbers = [rng.uniform(-1, 1) * 2.0 ** min(top, 126) for _ in range(64)]
            numbers[record % 64] = 1.5 * 2.0 ** min(top, 126)
            words = [bf16x2(*numbers[i : i + 2]) for i in range(0, 64, 2)]
            values += [v for word in words for v in bf16s(word)]
            raw += b"".join(word.to_bytes(4, "little") for word in words)
        at = kernel.off_ring + (record // 16 * kernel.depth + stage) * kernel.granule_bytes
        at += record % 16 * kernel.record_stride
        shared.bytes[at : at + len(raw)] = raw
        shared.bytes[at + kernel.record_bytes : at + kernel.record_bytes + count] = bytes(scales)
        data.scales.append(scales)
        data.values.append(values)
        data.codes.append([E4M3[code] for code in codes])
    return data


class Fragment(dict[int, int]):
    """A set of registers that products read after they are started: until then waited for, nothing is written."""

    busy = False

    def __setitem__(self, register: Any, word: int) -> None:
        assert not self.busy
        super().__setitem__(register, word)

    def __getitem__(self, at: Any) -> Any:
        return (self, at[2]) if isinstance(at, tuple) else super().__getitem__(at)


class Products:
    """Stands for the matrix units: keeps what every product was given."""

    def __init__(self) -> None:
        self.started: list[tuple[str, list[int], int, bool]] = []
        self.open: list[Fragment] = []
        self.groups: list[list[Fragment]] = []
        self.Field = SimpleNamespace(ACCUMULATE=None)

    def unit(self, kind: str) -> SimpleNamespace:
        unit = SimpleNamespace(kind=kind, accumulate=False)
        unit.set = lambda field, given: setattr(unit, "accumulate", given)
        return unit

    def fence(self) -> None:
        pass

    def gemm(self, unit: Any, x: Any, fragment: tuple[Fragment, int], query: int, out: Any) -> None:
        assert x is out
        held, k = fragment
        self.started.append((unit.kind, [held[4 * k + r] for r in range(4)], query, unit.accumulate))
        held.busy = True
        self.open.append(held)

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for held in self.groups.pop(0):
                held.busy = any(held is other for group in self.groups for other in group)


class Places:
    """Stands for the query's fragments: product k has the places from 16 k on."""

    def __getitem__(self, at: tuple[None, None, int]) -> int:
        return 16 * at[2]


@dataclass(frozen=True)
class Scored:
    """What one score thread had and left: its products, factors of its two records' rows, and their exponents."""

    products: list[tuple[str, list[int], int, bool]]
    rows: list[float]
    exponents: list[int]


def score_granule(
    kernel: SparseKernel, warp: int, stage: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> list[Scored]:
    """Score warp `warp` over its granule; leaves the scales for V in the table."""
    exchange = Exchange()
    monkeypatch.setattr(products, "cutlass", PLAIN)
    monkeypatch.setattr(products, "arch", SimpleNamespace(shuffle_sync_bfly=exchange.shuffle))
    for name in ("Int32", "Uint32"):
        monkeypatch.setattr(products, name, int)

    def body(lane: int) -> Scored:
        work = Products()
        monkeypatch.setattr(products, "warpgroup", work)
        monkeypatch.setattr(
            products, "cute", SimpleNamespace(gemm=work.gemm, recast_tensor=lambda fragment, kind: fragment)
        )
        names = {"warp": warp, "lane": lane, "line": lane // 4, "quad": lane % 4, "buffer": buffer}
        rotary = [512 + 16 * k for k in range(4)] if kernel.rope else []
        at = SCORE.run(kernel, **names, slot=warp * kernel.depth + stage, b_q=Places(), rotary_b=rotary)
        sets = [Fragment() for _ in range(kernel.sets)]
        x = [1.0] * (kernel.heads // 2)
        exponents = kernel.multiply_fine(
            at.rows, at.scales, lane % 4, work.unit("f16"), work.unit("bf16"), x, sets, sets, at.queries
        )
        assert not work.open and not work.groups
        ratio = kernel.fine_ratios(at.scales, lane % 4, exponents)
        WRITE.run(kernel, **names, ratio=ratio, ratio_place=at.ratio_place)
        assert all(x[e] == x[e // 2 % 2 * 2] for e in range(len(x)))
        return Scored(work.started, [x[0], x[2]], exponents)

    return exchange.run(range(32), body)


def check_keys(kernel: SparseKernel, data: Block, warp: int, lanes: list[Scored], held: Any) -> None:
    """Every column of a granule's records once, times the right scale, against the same column of the query."""
    seen = set()
    for lane, mine in enumerate(lanes):
        line, quad = lane // 4, lane % 4
        assert [accumulate for *_, accumulate in mine.products] == [False] + [True] * (len(mine.products) - 1)
        for kind, registers, place, _ in mine.products:
            for r, word in enumerate(registers):
                record = 16 * warp + kernel.record_of(line) + 8 * (r % 2)
                exponent = data.exponent(record)
                assert mine.exponents[r % 2] == exponent
                assert mine.rows[r % 2] == 2.0 ** (exponent - 127 - 6)
                query_kind, columns = held[place + 8 * (r // 2) + 2 * quad]
                assert query_kind == kind
                for column, got in zip(columns, (f16s if kind == "f16" else bf16s)(word), strict=True):
                    seen.add((record, column))
                    expected = data.values[record][column] * 2.0 ** (127 + 6 - exponent)
                    assert (kind == "bf16") == (column >= len(data.codes[record]))
                    if kind == "bf16":
                        assert got == expected and abs(got) < 2**15
                        continue
                    below = exponent - scale_of(data, record, column)
                    assert abs(got) <= 2**15
                    # f16 is exact down to 2^-24, a code to 2^-9.
                    assert got == expected if below <= 21 else abs(got - expected) <= 2.0**-25 or below > 30
                    assert below <= 30 or got == 0
    assert len(seen) == 16 * 512


def scale_of(data: Block, record: int, column: int) -> int:
    return data.scales[record][column * len(data.scales[record]) // len(data.codes[record])]


def value_fragments(
    kernel: SparseKernel, stage: int, buffer: int, tid: int
) -> Iterator[tuple[int, int, tuple[float, float]]]:
    """Of a value thread: record of the first value, output column, and two records' values there."""
    names = {"warp": tid // 32, "lane": tid % 32, "quad": tid % 4, "slot": stage, "buffer": buffer}
    at = VALUE.run(kernel, **names)
    for granule in range(4):
        for part in range(kernel.parts):
            ahead = kernel.unit_columns(at.places, at.tails, granule * kernel.parts + part)
            for pair in range(2):
                registers: dict[int, int] = {}
                unit = {"part0": part, "i": 0, "f": pair, "number": 0, "kept": 1, "scale": [], "granule": granule}
                TRANSPOSE.run(kernel, **(vars(at) | unit), ahead=ahead, words=[registers])
                assert sorted(registers) == [0, 1, 2, 3]
                for r, word in registers.items():
                    column = kernel.own_column(tid, part) + 2 * pair + r % 2
                    yield granule * 16 + 8 * (r // 2), column, f16s(word)


CASES = ["127", "1", "27", "247", "254", "far", "rotary"]


@pytest.mark.parametrize(
    ("kind", "case"), [*(("v4", case) for case in CASES), *(("v41", case) for case in CASES if case != "rotary")]
)
def test_both_products_see_every_column_of_a_block_times_its_scale(
    kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = CASES.index(case)
    kernel = made(kind, (8, 16, 32, 64)[number % 4], kind == "v4")
    stage, buffer = number % 2, number // 2 % 2
    sixteen = made(kind, 16, kind == "v4")
    with monkeypatch.context() as patch:
        held = query_columns(sixteen, 3, patch)
    data = block(kernel, stage, case)
    data.shared.patch(monkeypatch)
    monkeypatch.setattr(records, "Int32", int)
    exponents = {}
    for warp in range(4):
        lanes = score_granule(kernel, warp, stage, buffer, monkeypatch)
        check_keys(kernel, data, warp, lanes, held)
        for lane, mine in enumerate(lanes):
            for i in range(2):
                exponents[16 * warp + kernel.record_of(lane // 4) + 8 * i] = mine.exponents[i]
    assert len(exponents) == 64
    seen = set()
    for tid in range(256):
        for first, column, values in value_fragments(kernel, stage, buffer, tid):
            for i, got in enumerate(values):
                record = first + kernel.record_of(tid % 4 * 2 + i)
                seen.add((record, column))
                expected = data.values[record][column] * 2.0 ** (127 - exponents[record])
                assert abs(got) <= 512
                if column >= len(data.codes[record]):
                    assert abs(got - expected) <= max(2.0**-25, abs(expected) * 2.0**-11)
                    continue
                below = exponents[record] - scale_of(data, record, column)
                assert got == expected if below <= 15 else abs(got - expected) <= 2.0**-25 or below > 24
                assert below <= 24 or got == 0
    assert len(seen) == 64 * 512


@pytest.mark.parametrize("exponent", [27, 127, 247])
def test_a_records_power_of_two_leaves_sums_and_scores(exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P is 2^shift times what it is, so sums are multiplied with 2^-shift; both are normal float32."""
    monkeypatch.setattr(ptx, "bits_to_f32", f32)
    at = BIAS.run(made("v41", 8, False), grow=[], exponents=[exponent], i=0, Float32=float)
    assert at.grow == [2.0**-at.shift] and at.shift == exponent - 127
    assert at.grow[0] >= 2.0**-126


def test_rotary_columns_of_values_meet_a_bank_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """V4's last group: of e4m3 32 lanes read a word each, of bf16 every other word, in each of two halves."""
    kernel = made("v4", 16, True)
    monkeypatch.setattr(ptx, "lds_u32", lambda address: address)
    for warp in range(8):
        lanes = []
        for lane in range(32):
            at = VALUE.run(kernel, warp=warp, lane=lane, quad=lane % 4, slot=0, buffer=0)
            lanes.append(
                [place for four in kernel.unit_columns(at.places, at.tails, 1) for two in four for place in two]
            )
        rotary = warp >= 6
        for addresses in list(zip(*lanes, strict=True))[:: 1 if rotary else 2]:
            banks = [address // 4 % BANKS for address in addresses]
            assert max(map(banks.count, banks)) == (2 if rotary else 1)
