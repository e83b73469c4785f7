# SPDX-License-Identifier: Apache-2.0
"""Which thread of the Hopper kernel reads what: every record and column once, and no two lanes in one bank.

The kernel's own index arithmetic is run on the CPU, a lane at a time, with instructions replaced by ones that return
addresses; what it must agree with is the order of operands in registers that the PTX manual gives for WGMMA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL is not installed (extra `hopper`)", allow_module_level=True)

from hopper_lanes import (
    ADDRESS_OF,
    BANKS,
    BRING,
    COPY,
    PLAIN,
    Statements,
    bf16x2,
    f32,
    made,
    query_columns,
    store_row,
)
from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels.hopper import gather, ptx, value
from sparsemla.kernels.hopper import products as module
from sparsemla.kernels.hopper.kernel import SparseKernel
from sparsemla.kernels.hopper.layout import SHARED_LIMIT

PLAIN_RECORDS = ["sparse-rope", "sparse-no rope", "wide-rope", "wide-no rope"]
RECORDS = [*PLAIN_RECORDS, "v4-rope", "v41-no rope"]
TILES = [(name, heads) for name in RECORDS for heads in (8, 16, 32, 64) if heads < 64 or not name.startswith("wide")]
"""64 heads over bf16 records: test_hopper_upright.py."""


def kernel_of(name: str, heads: int = 16, cluster: int = 1) -> SparseKernel:
    kind, rope = name.split("-")
    return made(kind, heads, rope == "rope", cluster)


VALUE_PLACES = Statements(SparseKernel.value, value, "mine = ")
"""Where a value thread's first records lie."""


@pytest.fixture(params=RECORDS)
def kernel(request: pytest.FixtureRequest) -> SparseKernel:
    return kernel_of(request.param)


@pytest.fixture(params=PLAIN_RECORDS)
def plain_kernel(request: pytest.FixtureRequest) -> SparseKernel:
    """Of records whose scales are not taken up by K; test_hopper_scales.py has the others."""
    return kernel_of(request.param)


def test_rows_of_a_fragment_are_the_records_of_a_granule(kernel: SparseKernel) -> None:
    assert sorted(kernel.record_of(line) + 8 * half for line in range(8) for half in range(2)) == list(range(16))


def test_both_products_agree_which_record_is_which(kernel: SparseKernel) -> None:
    """Columns of V^T's fragment (2 q, 2 q + 1, 2 q + 8, 2 q + 9) are rows of K's: in most kinds records q, q + 4, q + 8
    and q + 12."""
    stride = kernel.record_stride
    for quad in range(4):
        rows = [kernel.record_of(2 * quad), kernel.record_of(2 * quad + 1)]
        lane = 20 + quad
        starts = VALUE_PLACES.run(kernel, ring=0, lane=lane, quad=quad).mine
        places = kernel.record_places(starts)
        assert places == [record * stride for record in (*rows, rows[0] + 8, rows[1] + 8)]
        if kernel.kind != "v4":
            assert rows == [quad, quad + 4]


def test_lanes_have_every_column_of_a_group_once(kernel: SparseKernel) -> None:
    firsts = [kernel.column_of(quarter, 4 * line) for quarter in range(4) for line in range(8)]
    assert sorted(first + i for first in firsts for i in range(4)) == list(range(128))
    assert all(kernel.column_of(1, 4 * 3 + quad) == kernel.column_of(1, 4 * 3) for quad in range(4))


def test_no_warp_has_e4m3_and_rotary_columns_of_a_group() -> None:
    """V4's last group: 448 - 384 columns of e4m3, then rotary ones."""
    kernel = made("v4", 16, True)
    for quarter in range(4):
        assert {kernel.column_of(quarter, lane) + i >= 64 for lane in range(32) for i in range(4)} == {quarter >= 2}


def test_value_reads_meet_no_bank_twice(kernel: SparseKernel) -> None:
    """32 lanes read four bytes each of four records, or 16 lanes at a time eight bytes of bf16."""
    size, together = (2, 16) if kernel.wide else (1, 32)
    for quarter in range(4):
        for start in range(0, 32, together):
            lanes = []
            for lane in range(start, start + together):
                starts = VALUE_PLACES.run(kernel, ring=0, lane=lane, quad=lane % 4).mine
                column = kernel.column_of(quarter, lane) * size
                lanes.append([(place + column) // 4 for place in kernel.record_places(starts)])
            for words in zip(*lanes, strict=True):
                assert len({(word + i) % BANKS for word in words for i in range(size)}) == BANKS


def test_score_reads_meet_no_bank_twice(kernel: SparseKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes a lane go eight lanes at a time: two rows of a fragment, four lanes each."""
    monkeypatch.setattr(ptx, "lds128", lambda address: address)
    rotary = kernel.record_bytes - 128 if kernel.rope else 0
    reads: list[tuple[Callable[[int, int], list[Any]], int]] = [(kernel.wide_rows, rotary)]
    for block in range(kernel.narrow_blocks or 8):
        reads.append((kernel.wide_rows, 128 * block) if kernel.wide else (kernel.latent_rows, block))
    for read, where in reads:
        for start in range(0, 32, 8):
            lanes = [read(kernel.own_rows(lane), where) for lane in range(start, start + 8)]
            for together in zip(*lanes, strict=True):
                words = [address // 4 + i for address in together for i in range(4)]
                assert len({word % BANKS for word in words}) == BANKS


@pytest.mark.parametrize("row", [0, 13])
def test_fragments_of_keys_and_queries_agree_on_every_column(
    plain_kernel: SparseKernel, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fragment's register r of product k holds row line + 8 (r % 2), columns 16 k + 8 (r // 2) + 2 quad and the next
    (PTX: matrix A of wgmma.m64nNk16 in registers)."""
    kernel = plain_kernel
    held = query_columns(kernel, row, monkeypatch)
    monkeypatch.setattr(ptx, "lds128", lambda address: [address + 4 * i for i in range(4)])
    monkeypatch.setattr(ptx, "e4m3x4_to_f16x4", lambda address: [address, address + 2])
    for block in range(9 if kernel.rope else 8):
        seen = set()
        wide = kernel.wide or block == 8
        first = 0 if kernel.wide else 512 + 16  # byte of a record where its bf16 columns start
        for lane in range(32):
            line, quad = lane // 4, lane % 4
            registers: dict[int, int] = {}
            if wide:
                offset = 128 * block if kernel.wide else first
                kernel.fill_wide(kernel.wide_rows(kernel.own_rows(lane), offset), registers)
            else:
                loaded = kernel.latent_rows(kernel.own_rows(lane), block)
                for w in range(4):
                    kernel.to_fragment(loaded, w, registers)
            assert sorted(registers) == list(range(16))
            for register, address in registers.items():
                product, r = register // 4, register % 4
                record, at = divmod(address, kernel.record_stride)
                column = (at - first) // 2 + (512 if not kernel.wide else 0) if wide else at
                assert record == kernel.record_of(line) + 8 * (r % 2)
                kind, columns = held[64 * block + 16 * product + 8 * (r // 2) + 2 * quad]
                assert columns == (column, column + 1)
                assert kind == ("bf16" if wide else "f16")
                seen.add((record, column))
        assert seen == {(record, column) for record in range(16) for column in range(64 * block, 64 * block + 64, 2)}


def test_queries_are_scaled_by_a_power_of_two(kernel: SparseKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for exponent in (8, 60, 127, 200, 254):
        latent = 448 if kernel.kind == "v4" else 512
        bits = [exponent << 7 | column % 128 for column in range(576)]
        stored = store_row(kernel, 3, bits[:latent], bits[512:], monkeypatch)
        factor = stored.pop(kernel.off_q_factor + 3 * 4)
        values = [value for _, *pair in stored.values() for value in pair]
        assert len(values) == (576 if kernel.rope else 512)
        assert min(value for value in values if value) == 128 and max(values) == 255
        assert values.count(0) == 512 - latent
        assert factor == min(f32(exponent << 23) / 128, 1e28)


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("rope", [True, False])
def test_products_of_wide_records_overwrite_no_fragment_in_flight(
    heads: int, rope: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of 64 columns is multiplied once, with its own queries, and all are done at the end."""
    kernel = made("wide", heads, rope)
    blocks = 9 if rope else 8
    filled: dict[int, int] = {}  # fragment set -> block
    groups: list[set[int]] = []  # sets that products in flight read
    started: set[int] = set()
    products: list[tuple[int, int, str]] = []
    accumulates: list[bool] = []

    class Fragments:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getitem__(self, at: tuple[None, None, int]) -> tuple[int, int]:
            return self.number, at[2]

    def fill(block: int, words: int) -> None:
        assert not any(words in group for group in groups)
        filled[words] = block

    def multiply(mma: Any, x: str, fragment: tuple[int, int], operand: str, out: str) -> None:
        assert x == out
        started.add(fragment[0])
        products.append((filled[fragment[0]], fragment[1], operand))

    def commit() -> None:
        groups.append(set(started))
        started.clear()

    def wait(pending: int) -> None:
        del groups[: max(0, len(groups) - pending)]

    issue = SimpleNamespace(
        wait_group=wait, commit_group=commit, fence=lambda: None, Field=SimpleNamespace(ACCUMULATE="accumulate")
    )
    monkeypatch.setattr(module, "warpgroup", issue)
    monkeypatch.setattr(module, "cute", SimpleNamespace(gemm=multiply))
    monkeypatch.setattr(kernel, "wide_rows", lambda rows, offset: offset // 128)
    monkeypatch.setattr(kernel, "fill_wide", fill)
    mma = SimpleNamespace(set=lambda field, value: accumulates.append(value))
    sets = [Fragments(i) for i in range(kernel.sets)]
    queries = [f"query {k}" for k in range(4 * blocks)]
    kernel.multiply_wide(0, mma, "x", sets, list(range(kernel.sets)), queries)
    assert products == [(k // 4, k % 4, f"query {k}") for k in range(4 * blocks)]
    assert accumulates == [False, *[True] * (4 * blocks - 1)]
    assert not groups and not started


def test_fragments_of_values_hold_the_columns_that_are_written(
    plain_kernel: SparseKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Register r of a fragment of V^T holds row line + 8 (r % 2), an output column, and columns 2 quad + 8 (r // 2) and
    the next, which are rows of K's fragment."""
    kernel = plain_kernel
    monkeypatch.setattr(ptx, "lds_u32", lambda address: address)
    monkeypatch.setattr(ptx, "lds_v2u32", lambda address: [address, address + 4])
    monkeypatch.setattr(ptx, "interleave_halves", lambda a, b, half: (a + 2 * half, b + 2 * half))
    monkeypatch.setattr(ptx, "interleave", lambda a, b, half: [(a + 2 * half + i, b + 2 * half + i) for i in range(2)])
    monkeypatch.setattr(ptx, "e4m3x4_to_f16x4", lambda pairs: pairs)
    size = 2 if kernel.wide else 1
    seen = set()
    for tid in range(256):
        lane, quad = tid % 32, tid % 4
        first = tid // 128 * kernel.parts * 128 + kernel.column_of(tid // 32 % 4, lane)
        place = first * size + quad * kernel.record_stride
        for part in range(kernel.parts):
            for granule in range(2):
                words = kernel.latent_columns([place], granule, part)
                for pair in range(2):
                    registers: dict[int, tuple[int, int]] = {}
                    kernel.transpose(words, [], pair, registers)
                    assert sorted(registers) == [0, 1, 2, 3]
                    for r, addresses in registers.items():
                        column = kernel.own_column(tid, part) + 2 * pair + r % 2
                        for i, address in enumerate(addresses):
                            start = granule * kernel.depth * kernel.granule_bytes
                            at, byte = divmod(address - start, kernel.record_stride)
                            assert byte == column * size
                            assert at == kernel.record_of(2 * quad + i) + 8 * (r // 2)
                            seen.add((granule, at, column))
    assert len(seen) == 2 * 16 * 512


def test_copies_bring_every_byte_of_a_granule_once(kernel: SparseKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records `start` to 15, 16 bytes an instruction; bulk copies bring those before."""
    copied: dict[int, int] = {}

    def copy(to: int, source: int, wanted: int) -> None:
        assert to not in copied and wanted == 1
        copied[to] = source

    monkeypatch.setattr(gather, "cutlass", PLAIN)
    monkeypatch.setattr(gather, "arch", SimpleNamespace(shuffle_sync=lambda values, lane: values[lane]))
    for name in ("Int32", "Int64"):
        monkeypatch.setattr(gather, name, int)
    monkeypatch.setattr(ptx, "cp_async16", copy)
    sources = [2**20 * (16 - record) for record in range(16)]
    for start in (0, kernel.bulk):
        copied.clear()
        for lane in range(32):
            COPY(kernel, 0, sources, [1] * 16, lane, start)
        assert copied == {
            record * kernel.record_stride + at: sources[record] + at
            for record in range(start, 16)
            for at in range(0, kernel.record_bytes, 16)
        }


@pytest.mark.parametrize("missing", [[], [0, 5, 15]])
@pytest.mark.parametrize("kind", RECORDS)
def test_a_granule_gets_every_byte_of_its_records_and_their_scales_once(
    kind: str, missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 records, of which some may be missing: nothing of those is read."""
    kernel = kernel_of(kind)
    copied: dict[int, int | None] = {}
    expected: list[int] = []
    pool = 2**40
    records = [0 if i in missing else 2**20 * (16 - i) for i in range(16)]
    scales = [0 if i in missing else 2**30 + kernel.scale_bytes * (16 - i) for i in range(16)]
    present = [int(i not in missing) for i in range(16)]
    now = 0

    def shuffle(given: int, lane: int) -> int:
        return present[lane] if given in (0, 1) else records[lane] or pool

    def copy(to: int, source: int, wanted: int, size: int = 16) -> None:
        assert to % min(size, 16) == source % min(size, 16) == 0
        for at in range(0, size, 4):
            assert to + at not in copied
            copied[to + at] = source + at if wanted else None

    def bulk(to: int, source: int, size: int, barrier: int) -> None:
        if now == 0:  # one lane is elected
            expected[0] -= size
            copy(to, source, 1, size)

    fakes: dict[str, Any] = {
        "shuffle_sync": shuffle,
        "vote_ballot_sync": lambda mine: -1 if not missing else sum(bit << i for i, bit in enumerate(present * 2)),
        "mbarrier_arrive_and_expect_tx": lambda barrier, size: expected.append(size),
        "mbarrier_arrive": lambda barrier: expected.append(0),
        "sync_warp": lambda: None,
        "elect_one": nullcontext,
        "cp_async_mbarrier_arrive_noinc": lambda barrier: None,
    }
    monkeypatch.setattr(gather, "arch", SimpleNamespace(**fakes))
    monkeypatch.setattr(gather, "cutlass", PLAIN)
    for name in ("Int32", "Int64"):
        monkeypatch.setattr(gather, name, int)
    masks: list[int] = []
    for name, fake in {
        "cp_async16": copy,
        "cp_async": copy,
        "bulk_copy": bulk,
        "opaque": int,
        "sts_i32": lambda address, mask: masks.append(mask),
    }.items():
        monkeypatch.setattr(ptx, name, fake)
    monkeypatch.setattr(kernel, "_barrier", lambda *args: 0)
    monkeypatch.setattr(kernel, "copy", lambda *args: COPY(kernel, *args))
    for now in range(32):
        BRING(kernel, 0, 0, records[now % 16], scales[now % 16], now, pool)
    assert expected == [0]  # one arrival of a lane, and as many bytes announced as the bulk copies bring
    assert [mask & 0xFFFF for mask in masks] == [sum(bit << i for i, bit in enumerate(present))]
    ring = kernel.off_ring
    assert copied == {
        ring + record * kernel.record_stride + at: None if record in missing else source + at - start
        for record in range(16)
        for start, size, source in (
            (0, kernel.record_bytes, records[record]),
            (kernel.record_bytes, kernel.scale_bytes, scales[record]),
        )
        for at in range(start, start + size, 4)
    }


@pytest.mark.parametrize("fmt", [KVFormat.FP8_V4, KVFormat.FP8_V41])
def test_scales_are_found_behind_the_data_of_a_page(fmt: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = record_layout(fmt)
    kernel = made(fmt.value.removeprefix("fp8_"), 8, layout.d_rope > 0)
    assert (kernel.record_bytes, kernel.scale_bytes) == (layout.data_bytes, layout.scale_bytes)
    monkeypatch.setattr(gather, "cutlass", PLAIN)
    for name in ("Int32", "Int64"):
        monkeypatch.setattr(gather, name, int)
    sizes = {"cache": 64, "extra_cache": 48}
    starts = {"cache": 2**30, "extra_cache": 2**40}
    p = SimpleNamespace(
        **starts,
        page_stride=layout.page_bytes(64) + 512,
        extra_page_stride=layout.page_bytes(48),
        block_size=64,
        extra_block=48,
        pages=10,
        record_bytes=layout.data_bytes,
    )
    for name, block in (("cache", 1), ("extra_cache", 2)):  # two blocks of the cache, then those of the extra one
        page = starts[name] + 7 * (p.page_stride if name == "cache" else p.extra_page_stride)
        assert ADDRESS_OF(kernel, p, 65, block, 7, 5) == (
            page + 5 * layout.data_bytes,
            page + layout.scale_area_offset(sizes[name]) + 5 * layout.scale_bytes,
        )
        assert ADDRESS_OF(kernel, p, 65, block, -1, 5) == (0, 0)
    assert ADDRESS_OF(kernel, p, 65, 1, 10, 5) == (0, 0)


def test_two_bf16_hold_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """P of wide records: the sum of its two terms is as good as f16's 11 bits, and better."""
    kernel = made("wide", 8, True)
    monkeypatch.setattr(ptx, "pack_bf16x2", bf16x2)
    monkeypatch.setattr(ptx, "bits_to_f32", f32)
    monkeypatch.setattr(ptx, "Uint32", int)
    values = (torch.rand(200) * 64).tolist()
    for low, high in zip(values[::2], values[1::2], strict=True):
        words = [kernel.term(number, low, high) for number in range(2)]
        assert sum(f32(word << 16) for word in words) == pytest.approx(low, rel=2**-16)
        assert sum(f32(word & 0xFFFF0000) for word in words) == pytest.approx(high, rel=2**-16)


@pytest.mark.parametrize(("name", "heads"), TILES)
def test_a_slot_of_the_ring_is_filled_once_a_lap(name: str, heads: int) -> None:
    """Granules on their way or in use are the last `slots` at most; a slot's fillings alternate in parity."""
    kernel = kernel_of(name, heads)
    filled: dict[int, list[int]] = {}
    order: list[int] = []
    for count in range(40):
        for granule in range(4):
            slot, before = kernel.place_in_ring(count, granule)
            assert 0 <= slot < kernel.slots and before == len(filled.setdefault(slot, [])) % 2
            filled[slot].append(4 * count + granule)
            order.append(slot)
    assert len(filled) == kernel.slots
    # The value side counts on the distance of a block's granules.
    assert all(order[4 * c + g] - order[4 * c] == g * kernel.depth for c in range(40) for g in range(4))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 2047, 2048])
def test_blocks_of_a_length(length: int) -> None:
    assert kernel_of(RECORDS[0], 8).blocks_of(length) == -(-length // 64)


@pytest.mark.parametrize(("name", "heads"), TILES)
def test_rooms_of_shared_memory_do_not_overlap(name: str, heads: int) -> None:
    kernel = kernel_of(name, heads, cluster=16)
    wide, rope = kernel.wide, kernel.rope
    starts = sorted(value for name, value in vars(kernel).items() if name.startswith("off_") and name != "off_partial")
    assert starts[0] == 0 and kernel.off_ring == starts[-1]
    # Granules in flight: two blocks at least, or as many as fit.
    assert kernel.slots >= (8 if wide else 12)
    assert kernel.off_ring + kernel.slots * kernel.granule_bytes <= kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.granule_bytes == 16 * kernel.record_stride and kernel.record_bytes % 16 == 0
    assert kernel.record_bytes + kernel.scale_bytes <= kernel.record_stride
    assert kernel.record_stride % 128 == (96 if kernel.kind == "v4" else 16)
    assert kernel.off_barriers + (2 * kernel.slots + 8) * 8 <= kernel.off_mask
    assert kernel.off_mask + kernel.slots * 4 <= kernel.off_q
    assert kernel.off_q + heads * 512 * 2 <= kernel.off_q_rope <= kernel.off_ring - (heads * 128 if rope else 0)
    weights = 2 * kernel.copies * heads * 128
    assert kernel.off_p + weights <= min(start for start in starts if start > kernel.off_p)
    assert kernel.off_ml + heads * 8 <= kernel.off_reduce
    assert kernel.off_ratio + (2 * kernel.scale_rows * 64 * 2 if kernel.scaled_values else 0) <= kernel.off_decay
    # What the other CTAs of a cluster read lies outside of the partial outputs.
    assert max(kernel.off_ml, kernel.off_p) < kernel.off_partial == kernel.off_q
    # The weights of 16 CTAs go over P.
    assert 16 * heads * 4 <= weights
    assert kernel.off_partial + heads * 516 * 4 <= kernel.shared_bytes
    registers = 2 * kernel.value_registers + kernel.scorers * kernel.score_registers + kernel.gather_registers
    assert registers * 128 <= 65536 // kernel.threads // 8 * 8 * kernel.threads
