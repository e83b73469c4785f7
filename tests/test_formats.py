# SPDX-License-Identifier: Apache-2.0
"""Record layouts: byte offsets against recorded caches, and quantisation error bounds as properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generators import ALL_FORMATS, Golden, format_id, load_golden, random_kv
from sparsemla.cache import PagedKVCache
from sparsemla.formats import (
    E4M3_MAX,
    SCALE_MIN,
    KVFormat,
    ScaleStyle,
    e8m0_to_float32,
    pack,
    quantise_e4m3,
    read_scales,
    record_layout,
    unpack,
)

FP8_FORMATS = [fmt for fmt, _ in ALL_FORMATS if fmt is not KVFormat.BF16]
STYLES: list[ScaleStyle] = ["float32", "pow2"]


# ------------------------------------------------------------------------------------------------ geometry


@pytest.mark.parametrize(
    ("fmt", "d_qk", "record", "d_nope", "d_rope"),
    [
        (KVFormat.BF16, 576, 1152, 512, 64),
        (KVFormat.BF16, 512, 1024, 512, 0),
        (KVFormat.FP8_DS_MLA, 576, 656, 512, 64),
        (KVFormat.FP8_NOPE, 512, 528, 512, 0),
        (KVFormat.FP8_V4, 512, 584, 448, 64),
        (KVFormat.FP8_V41, 512, 528, 512, 0),
    ],
    ids=format_id,
)
def test_widths(fmt: KVFormat, d_qk: int, record: int, d_nope: int, d_rope: int) -> None:
    layout = record_layout(fmt, d_qk)
    assert (layout.record_bytes, layout.d_nope, layout.d_rope, layout.d_v) == (record, d_nope, d_rope, 512)
    assert layout.d_nope + layout.d_rope == layout.d_qk == d_qk
    assert record_layout(fmt.value.upper(), d_qk) is layout


@pytest.mark.parametrize(
    ("fmt", "pages"),
    [
        (KVFormat.BF16, {1: 1152, 2: 2304, 61: 70272, 64: 73728, 576: 663552}),
        (KVFormat.FP8_DS_MLA, {1: 656, 2: 1312, 61: 40016, 64: 41984, 576: 377856}),
        (KVFormat.FP8_NOPE, {1: 528, 2: 1056, 61: 32208, 64: 33792, 576: 304128}),
        (KVFormat.FP8_V4, {1: 1152, 2: 1728, 61: 35712, 64: 37440, 576: 336384}),
        (KVFormat.FP8_V41, {1: 1024, 2: 1536, 61: 32256, 64: 33792, 576: 304128}),
    ],
    ids=format_id,
)
def test_page_bytes(fmt: KVFormat, pages: dict[int, int]) -> None:
    layout = record_layout(fmt)
    assert {block: layout.page_bytes(block) for block in pages} == pages


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_parts_of_a_record_do_not_overlap_and_fill_it(fmt: KVFormat, d_qk: int) -> None:
    layout = record_layout(fmt, d_qk)
    nope_bytes = layout.quantised_columns or 2 * layout.d_nope
    scale_at = layout.scale_offset + (layout.data_bytes if layout.scales_after_page else 0)
    parts = sorted(
        [
            (layout.nope_offset, nope_bytes),
            (layout.rope_offset, 2 * layout.d_rope),
            (scale_at, layout.scale_bytes),
        ]
    )
    end = 0
    for start, size in parts:
        if size:
            assert start == end
            end += size
    assert end == layout.record_bytes


def test_kernels_may_load_sixteen_bytes_at_a_time() -> None:
    for fmt, d_qk in ALL_FORMATS:
        layout = record_layout(fmt, d_qk)
        for block in (1, 2, 61, 64, 576):
            assert layout.page_bytes(block) % 16 == 0
        assert layout.data_bytes % 16 == 0


# ------------------------------------------------------------------------------------------------ recorded bytes


def independent_decode(raw: dict[str, np.ndarray], cache_key: str, block_key: str) -> np.ndarray:
    """(slots, d_qk) float32 from a recorded cache with numpy alone: its own e4m3 table, offsets written out again."""
    codes = np.arange(256)
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    e4m3 = np.where(sign == 1, -magnitude, magnitude)
    cache, block = raw[cache_key], int(raw[block_key])

    def bf16(data: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    if cache.ndim == 3:
        rows = cache.reshape(-1, 656)
        scales = np.ascontiguousarray(rows[:, 512:528]).view(np.float32)
        return np.concatenate([e4m3[rows[:, :512]] * scales.repeat(128, axis=1), bf16(rows[:, 528:])], axis=1)
    rows = cache[:, : block * 576].reshape(-1, 576)
    exponents = cache[:, block * 576 : block * 584].reshape(-1, 8)[:, :7].astype(np.float64)
    latent = e4m3[rows[:, :448]] * (2.0 ** (exponents - 127)).repeat(64, axis=1)
    return np.concatenate([latent, bf16(rows[:, 448:])], axis=1)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("v32_h64_mixed", ("cache", "block")),
        ("v32_h128_split", ("cache", "block")),
        ("v4_h64_extra_topklen", ("cache", "block")),
        ("v4_h64_extra_topklen", ("extra_cache", "extra_block")),
    ],
)
def test_recorded_caches_decode_as_they_do_independently(name: str, keys: tuple[str, str]) -> None:
    golden = load_golden(name)
    cache = golden.call.cache if keys[0] == "cache" else golden.call.kwargs["extra"][0]
    want = torch.from_numpy(independent_decode(golden.raw, *keys)).to(torch.float64)
    got = cache.read(torch.arange(cache.num_slots), dtype=torch.float64)
    assert torch.equal(got.nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))


def test_requantising_a_recorded_cache_gives_its_bytes(golden: Golden) -> None:
    """The peer's scales are powers of two: decoding and packing again must give the same values, and the same bytes.

    One exception: where a group's largest value was rounded down to exactly 224, half of the recorded scale serves too.
    """
    cache = golden.call.cache
    layout = cache.layout
    before = cache.gather_bytes(torch.arange(cache.num_slots))
    values = unpack(before, cache.format)
    assert values.isfinite().all()
    after = pack(values, cache.format, scale_style="pow2")
    assert torch.equal(unpack(after, cache.format), values)
    differs = (before != after).any(dim=1)
    if layout.scale_count:
        codes = before[:, : layout.quantised_columns].contiguous().view(torch.float8_e4m3fn).float().abs()
        largest = codes.view(-1, layout.scale_count, layout.scale_group).amax(dim=-1)
        differs &= (largest > 224).all(dim=1)
    assert not differs.any()


@pytest.mark.parametrize("block_size", [1, 2, 61, 64, 576])
@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_page_bytes_are_where_the_layout_says(fmt: KVFormat, d_qk: int, block_size: int) -> None:
    cache = PagedKVCache.allocate(2, block_size, fmt, d_qk=d_qk)
    kv = random_kv(cache.num_slots, d_qk)
    cache.write(torch.arange(cache.num_slots), kv)
    records = pack(kv, fmt, d_qk=d_qk).view(2, block_size, -1)
    layout = cache.layout
    pages = cache.data.view(torch.uint8).reshape(2, -1)
    assert pages.shape[1] == layout.page_bytes(block_size)
    if not layout.scales_after_page:
        assert torch.equal(pages, records.reshape(2, -1))
        return
    data_end = block_size * layout.data_bytes
    scale_end = block_size * layout.record_bytes
    assert torch.equal(pages[:, :data_end], records[:, :, : layout.data_bytes].reshape(2, -1))
    assert torch.equal(pages[:, data_end:scale_end], records[:, :, layout.data_bytes :].reshape(2, -1))
    assert not pages[:, scale_end:].any()


# ------------------------------------------------------------------------------------------------ quantisation


def group_tensors(columns: int = 32) -> st.SearchStrategy[torch.Tensor]:
    """(n, columns) float32 of wildly different magnitudes, zeros and subnormals included."""
    value = st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(min_value=-1000.0, max_value=1000.0, width=32),
        st.just(0.0),
    )
    rows = st.lists(st.lists(value, min_size=columns, max_size=columns), min_size=1, max_size=3)
    return rows.map(lambda data: torch.tensor(data, dtype=torch.float32))


@pytest.mark.parametrize("style", STYLES)
@given(values=group_tensors())
def test_quantisation_error_bound(style: ScaleStyle, values: torch.Tensor) -> None:
    """Half a unit in the last of e4m3's three bits, or half its smallest step, times the scale."""
    quantised, scales = quantise_e4m3(values, 16, style)
    assert quantised.shape == values.shape
    assert scales.shape == (values.shape[0], 2)
    restored = quantised.to(torch.float64) * scales.to(torch.float64).repeat_interleave(16, dim=1)
    bound = torch.maximum(
        values.to(torch.float64).abs() * 2.0**-4 * (1 + 1e-6),
        scales.to(torch.float64).repeat_interleave(16, dim=1) * 2.0**-10,
    )
    # A quotient below float32's normal range loses bits of its own before it is rounded to e4m3.
    assert ((restored - values.to(torch.float64)).abs() <= bound + 2.0**-149).all()


@pytest.mark.parametrize("style", STYLES)
@given(values=group_tensors())
def test_scales_are_the_smallest_that_fit(style: ScaleStyle, values: torch.Tensor) -> None:
    _, scales = quantise_e4m3(values, 16, style)
    amax = values.view(-1, 2, 16).abs().amax(dim=-1)
    wanted = (amax / E4M3_MAX).clamp_min(SCALE_MIN)
    if style == "float32":
        assert torch.equal(scales, wanted)
    else:
        mantissa, _ = torch.frexp(scales)
        assert (mantissa == 0.5).all()
        assert (scales >= wanted).all()
        assert (scales.to(torch.float64) / 2 < wanted.to(torch.float64)).all()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=format_id)
@given(seed=st.integers(0, 2**31 - 1), exponent=st.integers(-60, 60), n=st.integers(0, 4))
def test_pack_then_unpack_is_close(fmt: KVFormat, style: ScaleStyle, seed: int, exponent: int, n: int) -> None:
    layout = record_layout(fmt)
    kv = random_kv(n, layout.d_qk, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    records = pack(kv, fmt, scale_style=style)
    assert records.shape == (n, layout.record_bytes)
    restored = unpack(records, fmt)
    columns = layout.quantised_columns
    groups = kv[:, :columns].float().view(n, layout.scale_count, layout.scale_group)
    amax = groups.abs().amax(dim=-1, keepdim=True)
    error = (restored[:, :columns].view_as(groups) - groups).abs()
    # Relative 1/16 where e4m3 is normal; below, half its smallest step (2**-10) times a scale of up to 2 · amax / 448.
    assert (error <= torch.maximum(groups.abs() / 16 * (1 + 1e-6), amax / 448 * 2 * 2.0**-10)).all()
    assert torch.equal(restored[:, columns:], kv[:, columns:].float())


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
@pytest.mark.parametrize("style", STYLES)
def test_packing_is_idempotent_in_value(fmt: KVFormat, d_qk: int, style: ScaleStyle, device: torch.device) -> None:
    kv = random_kv(33, d_qk, device=device)
    once = unpack(pack(kv, fmt, scale_style="pow2", d_qk=d_qk), fmt)
    again = unpack(pack(once, fmt, scale_style="pow2", d_qk=d_qk), fmt)
    assert torch.equal(once, again)
    assert unpack(pack(kv, fmt, scale_style=style, d_qk=d_qk), fmt).device.type == device.type


def test_bf16_is_kept_bit_by_bit() -> None:
    kv = torch.randint(-(2**15), 2**15, (7, 576), dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(pack(kv, "bf16").view(torch.int16), kv.view(torch.int16))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=format_id)
def test_zeros_stay_zeros(fmt: KVFormat, style: ScaleStyle) -> None:
    layout = record_layout(fmt)
    records = pack(torch.zeros(2, layout.d_qk), fmt, scale_style=style)
    assert torch.equal(read_scales(records, layout), torch.full((2, layout.scale_count), SCALE_MIN))
    assert torch.equal(unpack(records, fmt), torch.zeros(2, layout.d_qk))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=format_id)
def test_non_finite_values_do_not_spoil_their_group(fmt: KVFormat, style: ScaleStyle) -> None:
    layout = record_layout(fmt)
    kv = random_kv(3, layout.d_qk).float()
    clean = unpack(pack(kv.index_fill(1, torch.tensor([1, 2, 3]), 0.0), fmt, scale_style=style), fmt)
    kv[:, 1], kv[:, 2], kv[:, 3] = torch.nan, torch.inf, -torch.inf
    records = pack(kv, fmt, scale_style=style)
    restored = unpack(records, fmt)
    assert restored[:, 1].isnan().all()
    limit = E4M3_MAX * read_scales(records, layout)[:, 0]
    assert torch.equal(restored[:, 2], limit)
    assert torch.equal(restored[:, 3], -limit)
    assert torch.equal(restored[:, 4:], clean[:, 4:])


@pytest.mark.parametrize("style", STYLES)
def test_largest_and_smallest_floats(style: ScaleStyle) -> None:
    largest = torch.finfo(torch.float32).max
    kv = torch.full((1, 576), largest)
    restored = unpack(pack(kv, "fp8_ds_mla", scale_style=style), "fp8_ds_mla", dtype=torch.float64)
    assert restored[:, :512].isfinite().all()
    assert ((restored[:, :512] / largest - 1).abs() <= 1 / 16).all()
    tiny = unpack(pack(torch.full((1, 576), 2.0**-149), "fp8_ds_mla", scale_style=style), "fp8_ds_mla")
    assert tiny.isfinite().all()


def test_float64_is_the_exact_product_and_float32_its_rounding() -> None:
    kv = random_kv(64, 576)
    records = pack(kv, "fp8_ds_mla")
    exact = unpack(records, "fp8_ds_mla", dtype=torch.float64)
    layout = record_layout("fp8_ds_mla")
    codes = records[:, :512].contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    assert torch.equal(exact[:, :512], codes * read_scales(records, layout).to(torch.float64).repeat_interleave(128, 1))
    assert torch.equal(unpack(records, "fp8_ds_mla"), exact.to(torch.float32))


def test_e8m0_of_every_byte(device: torch.device) -> None:
    values = e8m0_to_float32(torch.arange(256, dtype=torch.uint8, device=device)).cpu()
    assert values.dtype == torch.float32
    assert torch.equal(values[:255].to(torch.float64), torch.exp2(torch.arange(255, dtype=torch.float64) - 127))
    assert values[255].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_cuda_gives_the_bytes_of_the_cpu(fmt: KVFormat, d_qk: int, style: ScaleStyle) -> None:
    """Each rank may quantise what another one reads, so a scale's last bit counts: large, small and zero latents."""
    exponents = torch.randint(-40, 41, (4096, 1))
    kv = random_kv(len(exponents), d_qk).float() * torch.exp2(exponents.float())
    kv[::64, : d_qk // 2] = 0.0
    for values in (kv, kv.to(torch.bfloat16)):
        on_cpu = pack(values, fmt, scale_style=style, d_qk=d_qk)
        on_gpu = pack(values.cuda(), fmt, scale_style=style, d_qk=d_qk)
        differ = int((on_gpu.cpu() != on_cpu).any(dim=1).sum())
        assert not differ, f"{differ} of {len(values)} records"
        assert torch.equal(unpack(on_gpu, fmt).cpu(), unpack(on_cpu, fmt))


# ------------------------------------------------------------------------------------------------ errors


def test_errors_name_the_argument_what_was_given_and_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"format: got 'fp4', accepted are bf16, fp8_ds_mla"):
        KVFormat.parse("fp4")
    with pytest.raises(ValueError, match=r"d_qk: got 512 for format fp8_ds_mla, accepted is 576"):
        record_layout("fp8_ds_mla", 512)
    with pytest.raises(ValueError, match=r"d_qk: got 7 for format bf16, accepted is 576 or 512"):
        record_layout("bf16", 7)
    with pytest.raises(ValueError, match=r"block_size: got 0"):
        record_layout("bf16").page_bytes(0)
    with pytest.raises(ValueError, match=r"scale_area_offset: format bf16"):
        record_layout("bf16").scale_area_offset(64)
    with pytest.raises(ValueError, match=r"kv: got shape \(576,\), accepted is \(n, d_qk\)"):
        pack(torch.zeros(576), "bf16")
    with pytest.raises(ValueError, match=r"kv: got dtype torch.int32"):
        pack(torch.zeros(1, 576, dtype=torch.int32), "bf16")
    with pytest.raises(ValueError, match=r"kv: got 512 columns, accepted is d_qk = 576"):
        pack(torch.zeros(1, 512), "bf16", d_qk=576)
    with pytest.raises(ValueError, match=r"d_qk: got 100 for format fp8_v4"):
        pack(torch.zeros(1, 100), "fp8_v4")
    with pytest.raises(ValueError, match=r"scale_style: got 'log'"):
        pack(torch.zeros(1, 576), "fp8_ds_mla", scale_style="log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"records: got shape \(1, 655\) of torch.float32"):
        unpack(torch.zeros(1, 655), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"records: got 655 bytes a record, accepted is 656"):
        unpack(torch.zeros(1, 655, dtype=torch.uint8), "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"dtype: got torch.float16"):
        unpack(torch.zeros(1, 656, dtype=torch.uint8), "fp8_ds_mla", dtype=torch.float16)
