# SPDX-License-Identifier: Apache-2.0
"""Record layouts of the KV cache: how many bytes a token takes, where they lie, how values become bytes and back.

This is the only module that knows a byte offset. A *record* is one token's bytes; a *page* is a block of records. All
formats hold one latent vector shared by every head (multi-query attention), ``d_qk`` columns wide, whose first 512
columns are also the value.

===============  =====  ==========================================================  ==========================
format           bytes  data of one record                                          scales of one record
===============  =====  ==========================================================  ==========================
``BF16``          1152  576 bf16 (512 latent, 64 rotary); 1024 with ``d_qk=512``    none
``FP8_DS_MLA``     656  512 e4m3, the scales, 64 bf16 rotary                        4 float32 (128 columns)
``FP8_NOPE``       528  512 e4m3, the scales                                        4 float32 (128 columns)
``FP8_V4``         584  448 e4m3, 64 bf16 rotary                                    7 e8m0 (64 columns), 1 pad
``FP8_V41``        528  512 e4m3, rotary columns quantised like the others          16 e8m0 (32 columns)
===============  =====  ==========================================================  ==========================

``FP8_V4`` and ``FP8_V41`` keep the data of all records of a page, then the scales of all its records, then padding
up to a multiple of 576 and 512 bytes. Everything is little-endian; a stored scale multiplies the e4m3 value.

Sources: the fp8 formats are the layouts that deepseek-ai/FlashMLA calls V32 (``FP8_DS_MLA``), V32 without RoPE
(``FP8_NOPE``), V4, earlier MODEL1 (``FP8_V4``), and V41 (``FP8_V41``): see ``csrc/kernels/kv_cache_format.h`` and
``tests/quant.py`` there, V4.1 since its pull request 221. vllm-project/vllm pull request 56893 describes the V4.1 page.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

ScaleStyle: TypeAlias = Literal["float32", "pow2"]

E4M3_MAX = 448.0
"""Largest finite magnitude of float8 e4m3fn."""

SCALE_MIN = 2.0**-126
"""Smallest scale ever stored (smallest normal float32): a group of zeros is never divided by zero."""

D_V = 512
"""Width of the value in every format."""


class KVFormat(enum.Enum):
    """Names of the cache formats; the value is the spelling used on the command line and in configurations."""

    BF16 = "bf16"
    FP8_DS_MLA = "fp8_ds_mla"
    FP8_NOPE = "fp8_nope"
    FP8_V4 = "fp8_v4"
    FP8_V41 = "fp8_v41"

    @classmethod
    def parse(cls, value: KVFormat | str) -> KVFormat:
        """`value` itself, or the format of that name (case-insensitive). ValueError for an unknown name."""
        if isinstance(value, cls):
            return value
        try:
            return cls(str(value).lower())
        except ValueError:
            names = ", ".join(fmt.value for fmt in cls)
            raise ValueError(f"format: got {value!r}, accepted are {names}") from None


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of one record lie. All offsets and sizes are bytes; columns count values of the latent vector.

    A record of a format with ``scales_after_page`` lies in two pieces: ``data_bytes`` in the page's data area and
    ``scale_bytes`` in its scale area. Written in one piece (a *logical record*, what `pack` returns) the scale bytes
    follow the data.
    """

    format: KVFormat
    d_qk: int
    """Columns of the latent vector: the unpacked width."""
    d_nope: int
    """Leading columns multiplied with q_nope: 512, or 448 for V4."""
    d_rope: int
    """Trailing columns multiplied with q_rope: 64 or 0. V4.1 counts its rotary columns in d_nope (stored alike)."""
    record_bytes: int
    """Bytes of one logical record: data and scales, without page padding."""
    data_bytes: int
    """Distance between neighbouring records of a page: record_bytes, less the scales where they follow the page."""
    nope_offset: int
    rope_offset: int
    scale_offset: int
    """Inside the record; with scales_after_page relative to the record's row in the page's scale area."""
    scale_count: int
    """Scales of one record; 0 for BF16."""
    scale_bytes: int
    """Bytes of one record's scales, pad bytes included."""
    scale_group: int
    """Columns one scale covers; 0 for BF16."""
    scale_dtype: Literal["float32", "e8m0"] | None
    scales_after_page: bool
    page_align: int
    """A page's size is rounded up to a multiple of this."""
    d_v: int = D_V
    """Leading columns that are the value."""

    @property
    def quantised_columns(self) -> int:
        """Leading columns stored as e4m3 (0 for BF16)."""
        return self.scale_count * self.scale_group

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` records, padding included."""
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}, accepted is at least 1")
        used = block_size * self.record_bytes
        return -(-used // self.page_align) * self.page_align

    def scale_area_offset(self, block_size: int) -> int:
        """Byte offset of a page's scale area. ValueError where the scales lie inside the record."""
        if not self.scales_after_page:
            raise ValueError(f"scale_area_offset: format {self.format.value} keeps its scales inside the record")
        return block_size * self.data_bytes


def _bf16(d_qk: int) -> RecordLayout:
    d_rope = d_qk - D_V
    return RecordLayout(
        format=KVFormat.BF16,
        d_qk=d_qk,
        d_nope=D_V,
        d_rope=d_rope,
        record_bytes=2 * d_qk,
        data_bytes=2 * d_qk,
        nope_offset=0,
        rope_offset=2 * D_V,
        scale_offset=0,
        scale_count=0,
        scale_bytes=0,
        scale_group=0,
        scale_dtype=None,
        scales_after_page=False,
        page_align=1,
    )


_LAYOUTS: dict[tuple[KVFormat, int], RecordLayout] = {
    (KVFormat.BF16, 576): _bf16(576),
    (KVFormat.BF16, 512): _bf16(512),
    (KVFormat.FP8_DS_MLA, 576): RecordLayout(
        format=KVFormat.FP8_DS_MLA,
        d_qk=576,
        d_nope=512,
        d_rope=64,
        record_bytes=656,
        data_bytes=656,
        nope_offset=0,
        rope_offset=528,
        scale_offset=512,
        scale_count=4,
        scale_bytes=16,
        scale_group=128,
        scale_dtype="float32",
        scales_after_page=False,
        page_align=1,
    ),
    (KVFormat.FP8_NOPE, 512): RecordLayout(
        format=KVFormat.FP8_NOPE,
        d_qk=512,
        d_nope=512,
        d_rope=0,
        record_bytes=528,
        data_bytes=528,
        nope_offset=0,
        rope_offset=528,
        scale_offset=512,
        scale_count=4,
        scale_bytes=16,
        scale_group=128,
        scale_dtype="float32",
        scales_after_page=False,
        page_align=1,
    ),
    (KVFormat.FP8_V4, 512): RecordLayout(
        format=KVFormat.FP8_V4,
        d_qk=512,
        d_nope=448,
        d_rope=64,
        record_bytes=584,
        data_bytes=576,
        nope_offset=0,
        rope_offset=448,
        scale_offset=0,
        scale_count=7,
        scale_bytes=8,
        scale_group=64,
        scale_dtype="e8m0",
        scales_after_page=True,
        page_align=576,
    ),
    (KVFormat.FP8_V41, 512): RecordLayout(
        format=KVFormat.FP8_V41,
        d_qk=512,
        d_nope=512,
        d_rope=0,
        record_bytes=528,
        data_bytes=512,
        nope_offset=0,
        rope_offset=512,
        scale_offset=0,
        scale_count=16,
        scale_bytes=16,
        scale_group=32,
        scale_dtype="e8m0",
        scales_after_page=True,
        page_align=512,
    ),
}


def every_layout() -> tuple[RecordLayout, ...]:
    """Every layout there is; BF16 has two."""
    return tuple(_LAYOUTS.values())


def record_layout(fmt: KVFormat | str, d_qk: int | None = None) -> RecordLayout:
    """The layout of a format.

    Args:
        fmt: a KVFormat or its name.
        d_qk: width of the latent vector. Only BF16 leaves a choice (576, the default, or 512); the others accept their
            own width.

    Raises:
        ValueError: unknown format, or a width the format does not have.
    """
    fmt = KVFormat.parse(fmt)
    widths = [width for known, width in _LAYOUTS if known is fmt]
    width = widths[0] if d_qk is None else d_qk
    if width not in widths:
        accepted = " or ".join(str(w) for w in widths)
        raise ValueError(f"d_qk: got {d_qk} for format {fmt.value}, accepted is {accepted}")
    return _LAYOUTS[fmt, width]


def e8m0_to_float32(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 e8m0 exponents → float32 2**(e - 127), exact: 255 is NaN, 0 is 2**-127 (a float32 subnormal)."""
    bits = exponents.to(torch.int32) << 23
    bits = torch.where(exponents == 0, 0x00400000, bits)
    bits = torch.where(exponents == 255, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def _pow2_ceil_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Positive normal float32 → int32 biased exponents of the smallest power of two not less. Exact, by the bits."""
    bits = scales.contiguous().view(torch.int32)
    return (bits >> 23) + ((bits & 0x007FFFFF) != 0).to(torch.int32)


def quantise_e4m3(
    values: torch.Tensor, group: int, scale_style: ScaleStyle = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of columns to e4m3fn with one scale a group.

    The scale is amax / 448 in float32 ("float32"), or the smallest power of two not below that ("pow2"); never less
    than SCALE_MIN. Values saturate at ±448 · scale. A non-finite value never enters a scale, so it cannot spoil its
    neighbours: NaN stays NaN, ±inf becomes ±448 · scale.

    Args:
        values: (n, columns) of any floating dtype, columns a multiple of `group`.
        group: columns one scale covers.
        scale_style: see above.

    Returns:
        (n, columns) float8_e4m3fn and (n, columns // group) float32 scales; value ≈ scale · e4m3.
    """
    n, columns = values.shape
    grouped = values.to(torch.float32).reshape(n, columns // group, group)
    magnitude = grouped.abs()
    amax = torch.where(magnitude < torch.inf, magnitude, 0.0).amax(dim=-1)
    # By a tensor: a GPU divides by a Python number through its reciprocal, which gives other scales than the CPU's.
    scales = (amax / amax.new_full((), E4M3_MAX)).clamp_min(SCALE_MIN)
    if scale_style == "pow2":
        scales = (_pow2_ceil_exponents(scales) << 23).view(torch.float32)
    # Division, not multiplication by a reciprocal: the stored scale is then the one the values were rounded with.
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).reshape(n, columns), scales


def _check_scale_style(scale_style: str) -> None:
    if scale_style not in ("float32", "pow2"):
        raise ValueError(f"scale_style: got {scale_style!r}, accepted are 'float32' and 'pow2'")


def pack(
    kv: torch.Tensor,
    fmt: KVFormat | str,
    *,
    scale_style: ScaleStyle = "float32",
    d_qk: int | None = None,
) -> torch.Tensor:
    """Latent vectors → logical records.

    Args:
        kv: (n, d_qk) of a floating dtype, on any device; the columns are [latent | rotary].
        fmt: format of the records.
        scale_style: how float32 scales are chosen, see `quantise_e4m3`. Formats with e8m0 scales hold only powers
            of two: they are always "pow2".
        d_qk: width, only to choose among the widths of BF16; by default the width of `kv`.

    Returns:
        (n, record_bytes) uint8, contiguous. Pad bytes are 0.

    Raises:
        ValueError: wrong shape, dtype, format, width or scale style.
    """
    if not isinstance(kv, torch.Tensor):
        raise ValueError(f"kv: got {type(kv).__name__}, accepted is a tensor (n, d_qk)")
    if kv.dim() != 2:
        raise ValueError(f"kv: got shape {tuple(kv.shape)}, accepted is (n, d_qk)")
    if not kv.dtype.is_floating_point:
        raise ValueError(f"kv: got dtype {kv.dtype}, accepted is a floating dtype")
    _check_scale_style(scale_style)
    layout = record_layout(fmt, kv.shape[1] if d_qk is None else d_qk)
    if kv.shape[1] != layout.d_qk:
        raise ValueError(f"kv: got {kv.shape[1]} columns, accepted is d_qk = {layout.d_qk}")
    if layout.scale_dtype is None:
        return kv.to(torch.bfloat16).contiguous().view(torch.uint8)

    columns = layout.quantised_columns
    style: ScaleStyle = "pow2" if layout.scale_dtype == "e8m0" else scale_style
    quantised, scales = quantise_e4m3(kv[:, :columns], layout.scale_group, style)
    records = torch.zeros((kv.shape[0], layout.record_bytes), dtype=torch.uint8, device=kv.device)
    records[:, layout.nope_offset : layout.nope_offset + columns] = quantised.view(torch.uint8)
    if layout.scale_dtype == "float32":
        scale_bytes = scales.contiguous().view(torch.uint8)
    else:
        scale_bytes = _pow2_ceil_exponents(scales).to(torch.uint8)
    scale_at = _logical_scale_offset(layout)
    records[:, scale_at : scale_at + scale_bytes.shape[1]] = scale_bytes
    if layout.d_rope:
        rope = kv[:, layout.d_nope :].to(torch.bfloat16).contiguous().view(torch.uint8)
        records[:, layout.rope_offset : layout.rope_offset + 2 * layout.d_rope] = rope
    return records


def unpack(
    records: torch.Tensor,
    fmt: KVFormat | str,
    d_qk: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logical records → latent vectors.

    Args:
        records: (n, record_bytes) uint8, as `pack` or `PagedKVCache.gather_bytes` returns them.
        fmt: their format.
        d_qk: width, only for BF16; by default what record_bytes implies.
        dtype: float32: scale · e4m3 rounded once to float32; float64: the exact product.

    Returns:
        (n, d_qk) of `dtype`; the columns are [latent | rotary].

    Raises:
        ValueError: wrong shape, dtype, format or width.
    """
    if not isinstance(records, torch.Tensor):
        raise ValueError(f"records: got {type(records).__name__}, accepted is a tensor (n, record_bytes)")
    if records.dim() != 2 or records.dtype != torch.uint8:
        got = f"{tuple(records.shape)} of {records.dtype}"
        raise ValueError(f"records: got shape {got}, accepted is (n, record_bytes) of torch.uint8")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: got {dtype}, accepted are torch.float32 and torch.float64")
    fmt = KVFormat.parse(fmt)
    layout = record_layout(fmt, records.shape[1] // 2 if fmt is KVFormat.BF16 and d_qk is None else d_qk)
    if records.shape[1] != layout.record_bytes:
        raise ValueError(f"records: got {records.shape[1]} bytes a record, accepted is {layout.record_bytes}")
    n = records.shape[0]
    if layout.scale_dtype is None:
        return records.contiguous().view(torch.bfloat16).to(dtype)

    columns = layout.quantised_columns
    out = torch.empty((n, layout.d_qk), dtype=dtype, device=records.device)
    codes = records[:, layout.nope_offset : layout.nope_offset + columns]
    scales = read_scales(records, layout).to(dtype)
    grouped = _e4m3_values(codes, dtype).view(n, layout.scale_count, layout.scale_group)
    torch.mul(grouped, scales.unsqueeze(-1), out=out[:, :columns].view(n, layout.scale_count, layout.scale_group))
    if layout.d_rope:
        rope = records[:, layout.rope_offset : layout.rope_offset + 2 * layout.d_rope].contiguous()
        out[:, columns:] = rope.view(torch.bfloat16).to(dtype)
    return out


def _e4m3_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(n, columns) uint8 e4m3fn codes → their values, exact, contiguous."""
    if codes.device.type != "cpu":
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
    # torch converts float8 value by value on the CPU; looking the 256 values up takes a third of the time.
    return torch.index_select(_e4m3_table(dtype), 0, codes.to(torch.int32).reshape(-1)).view(codes.shape)


@functools.cache
def _e4m3_table(dtype: torch.dtype) -> torch.Tensor:
    """(256,) the value of every e4m3fn code."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")  # whatever the default device is
    return codes.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def read_scales(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """The (n, scale_count) float32 scales of logical records (n, record_bytes) uint8; (n, 0) for BF16."""
    at = _logical_scale_offset(layout)
    if layout.scale_dtype is None:
        return torch.empty((records.shape[0], 0), dtype=torch.float32, device=records.device)
    if layout.scale_dtype == "float32":
        return records[:, at : at + 4 * layout.scale_count].contiguous().view(torch.float32)
    return e8m0_to_float32(records[:, at : at + layout.scale_count])


def _logical_scale_offset(layout: RecordLayout) -> int:
    """Byte offset of the scales in a logical record, where a page's scale row follows the data."""
    return layout.scale_offset + (layout.data_bytes if layout.scales_after_page else 0)
