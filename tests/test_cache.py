# SPDX-License-Identifier: Apache-2.0
"""PagedKVCache: writing, reading, wrapping an engine's tensor; block tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generators import ALL_FORMATS, NAN_BYTE, format_id, pages_for_positions, poisoned_cache, random_cache, random_kv
from sparsemla.cache import PagedKVCache, check_context_shard, slots_from_positions
from sparsemla.formats import KVFormat, pack, record_layout, unpack

every_format = pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)


# ------------------------------------------------------------------------------------------------ write and read


@every_format
@pytest.mark.parametrize("block_size", [1, 2, 61, 64, 576])
@pytest.mark.parametrize("gap", [0, 16, 4096])
def test_what_was_written_is_read_back_and_nothing_else_is_touched(
    fmt: KVFormat, d_qk: int, block_size: int, gap: int, device: torch.device
) -> None:
    cache = poisoned_cache(3, block_size, fmt, d_qk=d_qk, page_gap_bytes=gap, device=device)
    slots = torch.randperm(cache.num_slots)[: cache.num_slots // 2 + 1].to(device)
    kv = random_kv(slots.shape[0], d_qk, device=device)
    cache.write(slots, kv)

    assert torch.equal(cache.read(slots), unpack(pack(kv, fmt, d_qk=d_qk), fmt))
    untouched = torch.ones(cache.num_slots, dtype=torch.bool, device=device)
    untouched[slots] = False
    others = untouched.nonzero().flatten()
    assert (cache.gather_bytes(others) == NAN_BYTE).all()
    written = slots.shape[0] * cache.layout.record_bytes
    assert int((storage_bytes(cache) != NAN_BYTE).sum()) <= written


def storage_bytes(cache: PagedKVCache) -> torch.Tensor:
    """Every byte of the storage behind a cache, gaps and padding included."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.data.untyped_storage())


@every_format
def test_slots_outside_the_pool_are_skipped_and_read_as_zeros(fmt: KVFormat, d_qk: int, device: torch.device) -> None:
    cache = random_cache(2, 5, fmt, d_qk=d_qk, device=device)
    all_slots = torch.arange(10, device=device)
    before = cache.gather_bytes(all_slots)
    outside = torch.tensor([-1, 10, 2**31 - 1, -(2**31), 2**40, -(2**62)], device=device)
    cache.write(outside, random_kv(6, d_qk, device=device))
    assert torch.equal(cache.gather_bytes(all_slots), before)
    assert not cache.read(outside).any()

    mixed = torch.tensor([-1, 3, 10, 0, 99], device=device)
    kv = random_kv(5, d_qk, device=device)
    cache.write(mixed, kv)
    after = cache.gather_bytes(all_slots)
    records = pack(kv, fmt, d_qk=d_qk)
    assert torch.equal(after[[3, 0]], records[[1, 3]])
    rest = [1, 2, 4, 5, 6, 7, 8, 9]
    assert torch.equal(after[rest], before[rest])


@every_format
def test_empty_pools_and_empty_writes(fmt: KVFormat, d_qk: int) -> None:
    cache = PagedKVCache.allocate(0, 64, fmt, d_qk=d_qk)
    assert (cache.num_slots, cache.byte_view.shape[0]) == (0, 0)
    cache.write(torch.tensor([0, 1]), random_kv(2, d_qk))
    assert not cache.read(torch.tensor([0, -1])).any()
    cache = PagedKVCache.allocate(1, 64, fmt, d_qk=d_qk)
    cache.write(torch.empty(0, dtype=torch.int32), torch.empty(0, d_qk))
    assert cache.read(torch.empty(0, dtype=torch.int64)).shape == (0, d_qk)
    assert not storage_bytes(cache).any()


def test_int32_slots_and_scale_styles() -> None:
    cache = PagedKVCache.allocate(2, 7, "fp8_ds_mla")
    kv = random_kv(3, 576)
    slots = torch.tensor([13, 0, 6], dtype=torch.int32)
    cache.write(slots, kv, scale_style="pow2")
    assert torch.equal(cache.gather_bytes(slots), pack(kv, "fp8_ds_mla", scale_style="pow2"))


def test_write_bytes_moves_records_between_caches() -> None:
    source = random_cache(2, 64, "fp8_v4")
    target = PagedKVCache.allocate(3, 61, "fp8_v4")
    slots = torch.randperm(128)[:20]
    target.write_bytes(slots, source.gather_bytes(slots))
    assert torch.equal(target.read(slots), source.read(slots))


def test_a_pool_past_two_gigabytes_is_addressed_right() -> None:
    """Offsets past 2^31 bytes. Only the pages touched are committed: numpy's zeros are lazy, torch's are not."""
    num_pages, block_size = 52_000, 64
    storage = np.zeros((num_pages, block_size, 656), dtype=np.uint8)
    assert storage.nbytes > 2**31
    cache = PagedKVCache.wrap(torch.from_numpy(storage), "fp8_ds_mla")
    slots = torch.tensor([0, cache.num_slots // 2, cache.num_slots - 1])
    kv = random_kv(3, 576)
    cache.write(slots, kv)
    assert torch.equal(cache.read(slots), unpack(pack(kv, "fp8_ds_mla"), "fp8_ds_mla"))
    assert storage[-1, -1].any()
    assert not cache.read(slots - 1).any()


@pytest.mark.gpu
@every_format
def test_nothing_waits_for_the_device_and_a_graph_can_capture_it(fmt: KVFormat, d_qk: int) -> None:
    cache = poisoned_cache(4, 61, fmt, d_qk=d_qk, device="cuda")
    slots = torch.tensor([0, -1, 243, 244, 17], dtype=torch.int32, device="cuda")
    table = torch.arange(4, dtype=torch.int32, device="cuda").flip(0).unsqueeze(0)
    requests = torch.zeros(5, dtype=torch.int32, device="cuda")
    kv = random_kv(5, d_qk, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        cache.write(slots, kv)
        return cache.read(slots), slots_from_positions(
            table, requests, slots, 61, (0, 2, 16), num_slots=cache.num_slots
        )

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, _ = step()
    kv.copy_(random_kv(5, d_qk))
    graph.replay()
    want = unpack(pack(kv, fmt, d_qk=d_qk), fmt)
    want[[1, 3]] = 0.0
    assert torch.equal(values, want)


# ------------------------------------------------------------------------------------------------ wrapping


@every_format
def test_wrapping_copies_nothing(fmt: KVFormat, d_qk: int) -> None:
    own = random_cache(3, 64, fmt, d_qk=d_qk)
    view = PagedKVCache.wrap(own.data, fmt, 64)
    assert view.data.data_ptr() == own.data.data_ptr()
    view.write(torch.tensor([5]), random_kv(1, d_qk))
    slots = torch.arange(own.num_slots)
    assert torch.equal(view.gather_bytes(slots), own.gather_bytes(slots))
    assert view.byte_view.data_ptr() == own.data.data_ptr()


def test_shapes_that_engines_use() -> None:
    records = torch.zeros((4, 64, 656), dtype=torch.uint8)
    for data in (records, records.unsqueeze(2), records.view(torch.float8_e4m3fn), records.flatten(1)):
        cache = PagedKVCache.wrap(data, "fp8_ds_mla", 64)
        assert (cache.block_size, cache.num_pages, cache.page_stride_bytes) == (64, 4, 64 * 656)
        assert cache.data.dtype == torch.uint8
    bf16 = PagedKVCache.wrap(torch.zeros((4, 61, 1, 576), dtype=torch.bfloat16), "bf16")
    assert (bf16.block_size, bf16.d_qk, bf16.record_stride_bytes) == (61, 576, 1152)
    assert PagedKVCache.wrap(torch.zeros((4, 2, 512), dtype=torch.bfloat16), "bf16").d_qk == 512


@pytest.mark.parametrize(("fmt", "record"), [("fp8_v4", 584), ("fp8_v41", 528)])
def test_pages_with_trailing_scales_in_the_peers_four_dimensional_shape(fmt: str, record: int) -> None:
    """The peer passes (pages, block, 1, record_bytes) whose page stride is the padded page: bytes count, not rows."""
    page_bytes = record_layout(fmt).page_bytes(61)
    storage = torch.zeros((3, page_bytes), dtype=torch.uint8)
    by_page = PagedKVCache.wrap(storage, fmt, 61)
    by_record = PagedKVCache.wrap(storage[:, : 61 * record].unflatten(1, (61, 1, record)), fmt)
    kv = random_kv(3 * 61, 512)
    by_page.write(torch.arange(183), kv)
    assert by_record.page_stride_bytes == by_page.page_stride_bytes == page_bytes
    assert torch.equal(by_record.read(torch.arange(183)), by_page.read(torch.arange(183)))


def test_one_layer_of_a_pool_interleaved_by_layers() -> None:
    layers = torch.full((5, 4, 64, 656), NAN_BYTE, dtype=torch.uint8)  # (pages, layers, block, record)
    caches = [PagedKVCache.wrap(layers[:, layer], "fp8_ds_mla") for layer in range(4)]
    assert caches[0].page_stride_bytes == 4 * 64 * 656
    kv = random_kv(10, 576)
    slots = torch.randperm(320)[:10]
    caches[2].write(slots, kv)
    assert torch.equal(caches[2].read(slots), unpack(pack(kv, "fp8_ds_mla"), "fp8_ds_mla"))
    assert all((caches[layer].gather_bytes(torch.arange(320)) == NAN_BYTE).all() for layer in (0, 1, 3))


def test_wrap_errors() -> None:
    u8 = torch.uint8
    with pytest.raises(ValueError, match=r"data: got dtype torch.float32 for format fp8_ds_mla, accepted is"):
        PagedKVCache.wrap(torch.zeros((1, 64, 656)), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"data: got dtype torch.uint8 for format bf16, accepted is torch.bfloat16"):
        PagedKVCache.wrap(torch.zeros((1, 64, 1152), dtype=u8), "bf16")
    with pytest.raises(ValueError, match=r"data: got shape \(1, 64, 655\) for format fp8_ds_mla"):
        PagedKVCache.wrap(torch.zeros((1, 64, 655), dtype=u8), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"data: got shape \(1, 64, 2, 656\)"):
        PagedKVCache.wrap(torch.zeros((1, 64, 2, 656), dtype=u8), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"data: got shape \(64, 576\) for format bf16"):
        PagedKVCache.wrap(torch.zeros((64, 576), dtype=torch.bfloat16), "bf16")
    with pytest.raises(ValueError, match=r"data: got shape \(\)"):
        PagedKVCache.wrap(torch.zeros((), dtype=u8), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"block_size: got 32, but data of shape \(1, 64, 656\) has 64 records a page"):
        PagedKVCache.wrap(torch.zeros((1, 64, 656), dtype=u8), "fp8_ds_mla", 32)
    with pytest.raises(ValueError, match=r"block_size: got None, required"):
        PagedKVCache.wrap(torch.zeros((1, 37440), dtype=u8), "fp8_v4")
    with pytest.raises(ValueError, match=r"accepted is at least 37376 bytes a page for block_size 64"):
        PagedKVCache.wrap(torch.zeros((1, 37000), dtype=u8), "fp8_v4", 64)
    with pytest.raises(ValueError, match=r"d_qk: got 300 for format bf16"):
        PagedKVCache.wrap(torch.zeros((1, 64, 300), dtype=torch.bfloat16), "bf16")
    with pytest.raises(ValueError, match=r"data: got strides"):
        PagedKVCache.wrap(torch.zeros((2, 128, 656), dtype=u8)[:, ::2], "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"data: got a page stride of 41992 bytes, accepted is a multiple of 16"):
        PagedKVCache.wrap(torch.zeros((2, 41992), dtype=u8)[:, :41984].unflatten(1, (64, 656)), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"data: got a page stride of 0 bytes"):
        PagedKVCache.wrap(torch.zeros((1, 64, 656), dtype=u8).expand(2, 64, 656), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"data: got the address"):
        PagedKVCache.wrap(torch.zeros(656 * 64 + 8, dtype=u8)[8:].view(1, 64, 656), "fp8_ds_mla")
    for data, words in (
        ([1], "data: got list, accepted is a tensor"),
        (torch.zeros((1, 64, 656), dtype=u8).to_sparse(), "data: got layout torch.sparse_coo, accepted is a dense"),
    ):
        with pytest.raises(ValueError, match=words):
            PagedKVCache.wrap(data, "fp8_ds_mla")  # type: ignore[arg-type]
    for block_size in ("64", 2.5, 0):
        with pytest.raises(ValueError, match=r"block_size: got .*, accepted is an integer of at least 1"):
            PagedKVCache.wrap(torch.zeros((1, 656 * 64), dtype=u8), "fp8_ds_mla", block_size)  # type: ignore[arg-type]


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"num_pages: got -1"):
        PagedKVCache.allocate(-1, 64, "bf16")
    with pytest.raises(ValueError, match=r"block_size: got 0"):
        PagedKVCache.allocate(1, 0, "bf16")
    for pages, block, name in ((1.5, 64, "num_pages"), (True, 64, "num_pages"), (1, None, "block_size")):
        with pytest.raises(ValueError, match=rf"{name}: got .*, accepted is an integer of at least"):
            PagedKVCache.allocate(pages, block, "bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"device: got 'abacus', accepted is a device of this machine"):
        PagedKVCache.allocate(1, 64, "bf16", device="abacus")
    assert PagedKVCache.allocate(np.int64(2), np.int64(3), "bf16").num_slots == 6
    cache = PagedKVCache.allocate(1, 64, "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"slots: got shape \(1, 1\) of torch.int64"):
        cache.read(torch.zeros((1, 1), dtype=torch.int64))
    with pytest.raises(ValueError, match=r"slots: got shape \(1,\) of torch.float32"):
        cache.read(torch.zeros(1))
    with pytest.raises(ValueError, match=r"kv: got shape \(1, 512\), accepted is \(1, 576\)"):
        cache.write(torch.tensor([0]), torch.zeros(1, 512))
    with pytest.raises(ValueError, match=r"records: got shape \(1, 655\)"):
        cache.write_bytes(torch.tensor([0]), torch.zeros((1, 655), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"slots: got device meta"):
        cache.read(torch.zeros(1, dtype=torch.int64, device="meta"))
    slot, one = torch.tensor([0]), [1]
    no_tensor: tuple[tuple[str, Callable[[], object]], ...] = (
        ("slots", lambda: cache.read(one)),  # type: ignore[arg-type]
        ("kv", lambda: cache.write(slot, one)),  # type: ignore[arg-type]
        ("records", lambda: cache.write_bytes(slot, one)),  # type: ignore[arg-type]
        ("kv", lambda: pack(one, "bf16")),  # type: ignore[arg-type]
        ("records", lambda: unpack(one, "bf16")),  # type: ignore[arg-type]
    )
    for name, call in no_tensor:
        with pytest.raises(ValueError, match=f"{name}: got list, accepted is a tensor"):
            call()
    with pytest.raises(ValueError, match=r"records: got device meta"):
        cache.write_bytes(slot, torch.zeros((1, 656), dtype=torch.uint8, device="meta"))


# ------------------------------------------------------------------------------------------------ block tables


def test_positions_become_slots() -> None:
    table = torch.tensor([[7, 2, -1], [0, 5, 9]], dtype=torch.int32)
    positions = torch.tensor([[0, 63, 64, 127, 128], [191, 192, -1, 5, 64]], dtype=torch.int32)
    got = slots_from_positions(table, torch.tensor([0, 1], dtype=torch.int32), positions, 64)
    assert got.dtype == torch.int64
    assert got.tolist() == [[448, 511, 128, 191, -1], [639, -1, -1, 5, 320]]
    one = slots_from_positions(table, torch.tensor([0, 1]), torch.tensor([64, 64]), 64)
    assert one.tolist() == [128, 320]


def test_whatever_names_no_record_is_minus_one() -> None:
    table = torch.tensor([[7, 2**31 - 1], [-5, 1]], dtype=torch.int32)
    positions = torch.tensor([0, 64, 0, 64, 0, 0, -(2**31), 2**31 - 1], dtype=torch.int32)
    requests = torch.tensor([0, 0, 1, 1, 2, -1, 0, 0], dtype=torch.int32)
    got = slots_from_positions(table, requests, positions, 64, num_slots=512)
    assert got.tolist() == [448, -1, -1, 64, -1, -1, -1, -1]
    empty = torch.empty((0, 4), dtype=torch.int32)
    assert slots_from_positions(empty, requests, positions, 64).eq(-1).all()


@given(
    world=st.integers(1, 5),
    interleave=st.sampled_from([1, 2, 16, 64, 100]),
    block_size=st.sampled_from([1, 2, 61, 64]),
    length=st.integers(1, 700),
)
def test_every_position_is_held_by_one_rank_in_order(world: int, interleave: int, block_size: int, length: int) -> None:
    """The ranks partition the positions; each rank's local positions are 0, 1, 2, … without holes."""
    positions = torch.arange(length)
    requests = torch.zeros(length, dtype=torch.int64)
    table = torch.arange(-(-length // block_size) + 1).unsqueeze(0)  # pages in order: slot = local position
    holders = torch.zeros(length, dtype=torch.int64)
    for rank in range(world):
        local = slots_from_positions(table, requests, positions, block_size, (rank, world, interleave))
        held = local >= 0
        holders += held
        assert torch.equal(local[held], torch.arange(int(held.sum())))
        assert ((positions[held] // interleave) % world == rank).all()
    assert (holders == 1).all()


def test_block_table_round_trip_through_a_cache() -> None:
    lengths = [1, 64, 130]
    table = pages_for_positions(lengths, 61, 9)
    cache = poisoned_cache(9, 61, "fp8_ds_mla")
    requests = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    slots = slots_from_positions(table, requests, positions, 61, num_slots=cache.num_slots)
    assert slots.min() >= 0
    assert slots.unique().shape[0] == sum(lengths)
    kv = random_kv(sum(lengths), 576)
    cache.write(slots, kv)
    assert cache.read(slots).isfinite().all()


def test_block_table_errors() -> None:
    table, requests = torch.zeros((1, 2), dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    positions = torch.zeros((3, 4), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table: got list, accepted is a tensor"):
        slots_from_positions([0], requests, positions, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"positions: got dtype torch.float32, accepted is an integer dtype"):
        slots_from_positions(table, requests, positions.float(), 64)
    with pytest.raises(ValueError, match=r"request_ids: got device meta, accepted is that of positions, cpu"):
        slots_from_positions(table, requests.to("meta"), positions, 64)
    with pytest.raises(ValueError, match=r"num_slots: got 'x', accepted is an integer of at least 0"):
        slots_from_positions(table, requests, positions, 64, num_slots="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block_table: got shape \(2,\)"):
        slots_from_positions(table[0], requests, positions, 64)
    with pytest.raises(ValueError, match=r"positions: got shape \(3, 4, 1\)"):
        slots_from_positions(table, requests, positions.unsqueeze(2), 64)
    with pytest.raises(ValueError, match=r"request_ids: got shape \(2,\), accepted is \(3,\)"):
        slots_from_positions(table, requests[:2], positions, 64)
    with pytest.raises(ValueError, match=r"block_size: got 0"):
        slots_from_positions(table, requests, positions, 0)
    for shard in [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)]:
        with pytest.raises(ValueError, match="context_shard: got"):
            check_context_shard(shard)
