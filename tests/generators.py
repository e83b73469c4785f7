# SPDX-License-Identifier: Apache-2.0
"""Random caches, queries and indices, and the recorded calls of the peer, for tests of any part.

Everything a test must not read is poisoned: records that no index names, page padding and the gaps between strided
pages hold bytes that decode to NaN, so a kernel that touches one, even with weight zero, shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, ScaleStyle, record_layout

GOLDEN_DIR = Path(__file__).parent / "golden"
GOLDEN_NAMES = sorted(path.stem for path in GOLDEN_DIR.glob("*.npz"))

NAN_BYTE = 0xFF
"""Decodes to NaN as e4m3, as e8m0, and in pairs as bf16, in fours as float32."""

ALL_FORMATS: list[tuple[KVFormat, int]] = [
    (KVFormat.BF16, 576),
    (KVFormat.BF16, 512),
    (KVFormat.FP8_DS_MLA, 576),
    (KVFormat.FP8_NOPE, 512),
    (KVFormat.FP8_V4, 512),
    (KVFormat.FP8_V41, 512),
]
"""(format, d_qk) of every layout."""

GARBAGE_INDICES = (-1, -2, -(2**31), 2**31 - 1, 0x7FC00000, -123456)
"""What an upstream top-k has been seen to leave behind: -1, the limits of int32, the bits of a NaN."""


def format_id(value: object) -> str:
    """Readable pytest ids for formats: ``ids=format_id``."""
    return value.value if isinstance(value, KVFormat) else str(value)


def random_kv(n: int, d_qk: int, *, generator: torch.Generator | None = None, device: Any = "cpu") -> torch.Tensor:
    """(n, d_qk) bf16 latent vectors whose columns differ in size, so that groups get different scales."""
    kv = torch.randn((n, d_qk), generator=generator)
    kv *= torch.exp2(torch.randint(-3, 4, (n, d_qk // 32), generator=generator)).repeat_interleave(32, dim=1)
    return kv.to(torch.bfloat16).to(device)


def poisoned_cache(
    num_pages: int,
    block_size: int,
    fmt: KVFormat | str,
    *,
    d_qk: int | None = None,
    page_gap_bytes: int = 0,
    device: Any = "cpu",
) -> PagedKVCache:
    """A cache every byte of which decodes to NaN. `page_gap_bytes` (a multiple of 16) lie between pages."""
    layout = record_layout(fmt, d_qk)
    page_bytes = layout.page_bytes(block_size)
    storage = torch.full((num_pages, page_bytes + page_gap_bytes), NAN_BYTE, dtype=torch.uint8, device=device)
    if layout.format is KVFormat.BF16:
        data = storage.view(torch.bfloat16)[:, : page_bytes // 2].unflatten(1, (block_size, layout.d_qk))
        return PagedKVCache.wrap(data, fmt)
    if layout.scales_after_page:
        return PagedKVCache.wrap(storage[:, :page_bytes], fmt, block_size)
    return PagedKVCache.wrap(storage[:, :page_bytes].unflatten(1, (block_size, layout.record_bytes)), fmt)


def random_cache(
    num_pages: int,
    block_size: int,
    fmt: KVFormat | str,
    *,
    d_qk: int | None = None,
    slots: torch.Tensor | None = None,
    scale_style: ScaleStyle = "float32",
    page_gap_bytes: int = 0,
    generator: torch.Generator | None = None,
    device: Any = "cpu",
) -> PagedKVCache:
    """A poisoned cache with random records in `slots` (every slot by default)."""
    cache = poisoned_cache(num_pages, block_size, fmt, d_qk=d_qk, page_gap_bytes=page_gap_bytes, device=device)
    if slots is None:
        slots = torch.arange(cache.num_slots)
    slots = slots.unique().to(device)
    cache.write(slots, random_kv(slots.shape[0], cache.d_qk, generator=generator, device=device), scale_style)
    return cache


def random_query(
    rows: int, heads: int, d_qk: int, *, generator: torch.Generator | None = None, device: Any = "cpu"
) -> torch.Tensor:
    """(rows, heads, d_qk) bf16, small enough to spread the softmax over several keys."""
    return (torch.randn((rows, heads, d_qk), generator=generator) * 0.5).to(torch.bfloat16).to(device)


def random_indices(
    rows: int,
    topk: int,
    num_slots: int,
    *,
    masked: float = 0.0,
    garbage: bool = False,
    generator: torch.Generator | None = None,
    device: Any = "cpu",
) -> torch.Tensor:
    """(rows, topk) int32 slots without repeats in a row (while topk <= num_slots).

    A share `masked` of the entries is "no key": -1, or with `garbage` any of GARBAGE_INDICES and num_slots itself.
    """
    if topk <= num_slots:
        draw = torch.rand((rows, num_slots), generator=generator)
        indices = draw.argsort(dim=1)[:, :topk]
    else:
        indices = torch.randint(0, num_slots, (rows, topk), generator=generator)
    if masked:
        choices = torch.tensor([*GARBAGE_INDICES, num_slots] if garbage else [-1])
        nothing = choices[torch.randint(0, len(choices), (rows, topk), generator=generator)]
        indices = torch.where(torch.rand((rows, topk), generator=generator) < masked, nothing, indices)
    return indices.to(torch.int32).to(device)


@dataclass(frozen=True)
class Call:
    """Arguments of `sparse_mla_attention`: ``sparse_mla_attention(*call.args, **call.kwargs)``."""

    q: torch.Tensor
    cache: PagedKVCache
    indices: torch.Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[torch.Tensor, PagedKVCache, torch.Tensor]:
        """The positional arguments."""
        return self.q, self.cache, self.indices


def random_call(
    *,
    rows: int = 3,
    heads: int = 16,
    topk: int = 100,
    num_pages: int = 5,
    block_size: int = 64,
    fmt: KVFormat | str = KVFormat.FP8_DS_MLA,
    d_qk: int | None = None,
    masked: float = 0.1,
    garbage: bool = True,
    lengths: bool = False,
    sink: bool = False,
    extra_topk: int = 0,
    page_gap_bytes: int = 0,
    scale_style: ScaleStyle = "float32",
    seed: int = 0,
    device: Any = "cpu",
) -> Call:
    """A random call whose cache holds NaN wherever no index points.

    With `lengths` the rows get random lengths, one of them 0; with `sink` a sink with ±inf among its values; with
    `extra_topk` a second cache of the same format and another block size.
    """
    gen = torch.Generator().manual_seed(seed)

    def keys(pages: int, block: int, columns: int) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor | None]:
        indices = random_indices(rows, columns, pages * block, masked=masked, garbage=garbage, generator=gen)
        row_lengths = None
        counted = torch.ones_like(indices, dtype=torch.bool)
        if lengths:
            row_lengths = torch.randint(0, columns + 1, (rows,), generator=gen).to(torch.int32)
            row_lengths[0] = 0
            counted = torch.arange(columns) < row_lengths.unsqueeze(1)
        named = indices[counted & (indices >= 0) & (indices < pages * block)].to(torch.int64)
        cache = random_cache(
            pages,
            block,
            fmt,
            d_qk=d_qk,
            slots=named,
            scale_style=scale_style,
            page_gap_bytes=page_gap_bytes,
            generator=gen,
            device=device,
        )
        return cache, indices.to(device), None if row_lengths is None else row_lengths.to(device)

    cache, indices, row_lengths = keys(num_pages, block_size, topk)
    kwargs: dict[str, Any] = {"softmax_scale": cache.d_qk**-0.5, "topk_lengths": row_lengths}
    if sink:
        values = torch.randn(heads, generator=gen)
        values[0] = -torch.inf
        if heads > 1:
            values[1] = torch.inf
        kwargs["attn_sink"] = values.to(device)
    if extra_topk:
        kwargs["extra"] = keys(2, block_size + 3, extra_topk)
    return Call(random_query(rows, heads, cache.d_qk, generator=gen, device=device), cache, indices, kwargs)


def pages_for_positions(
    lengths: list[int], block_size: int, num_pages: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """(R, P) int32 block table of requests with `lengths` local positions; no page twice.

    Entries past a request's pages are -1.
    """
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(num_pages, generator=generator)[: sum(counts)].to(torch.int32)
    table = torch.full((len(lengths), max([1, *counts])), -1, dtype=torch.int32)
    for row, pages in enumerate(order.split(counts)):
        table[row, : pages.shape[0]] = pages
    return table


@dataclass(frozen=True)
class Golden:
    """One recorded call of the peer, in the shapes of `sparse_mla_attention`. T = b · s_q rows of a decode."""

    name: str
    raw: dict[str, np.ndarray]
    """The arrays as recorded; see tests/golden/README.md."""
    call: Call
    out: torch.Tensor
    """(T, H, 128) float32, bf16 values: every fourth of the 512 columns; see `kept`."""
    lse: torch.Tensor
    """(T, H) float32; -inf for a row without keys (the peer's +inf turned into ours)."""


def load_golden(name: str) -> Golden:
    """A recorded call by its file name without suffix."""
    with np.load(GOLDEN_DIR / f"{name}.npz") as archive:
        raw = {key: archive[key] for key in archive.files}
    tensors = {key: torch.from_numpy(value) for key, value in raw.items() if value.dtype.kind in "iuf"}
    decode = str(raw["kind"]) == "decode"
    q = tensors["q"].view(torch.bfloat16)
    query_rows = q.shape[1] if decode else 1
    q = q.flatten(0, 1) if decode else q
    rows, heads, d_qk = q.shape

    def row_lengths(key: str) -> torch.Tensor | None:
        return tensors[key].repeat_interleave(query_rows) if key in tensors else None

    if decode:
        fmt = KVFormat.FP8_DS_MLA if d_qk == 576 else KVFormat.FP8_V4
        cache = PagedKVCache.wrap(tensors["cache"], fmt, int(raw["block"]))
        lse = tensors["lse"].transpose(1, 2).reshape(rows, heads)
    else:
        fmt = KVFormat.BF16
        cache = PagedKVCache.wrap(tensors["kv"].view(torch.bfloat16), fmt)
        lse = tensors["lse"]
    kwargs: dict[str, Any] = {
        "softmax_scale": float(raw["softmax_scale"]),
        "topk_lengths": row_lengths("topk_length"),
        "attn_sink": tensors.get("attn_sink"),
    }
    if "extra_cache" in tensors:
        extra_cache = PagedKVCache.wrap(tensors["extra_cache"], fmt, int(raw["extra_block"]))
        kwargs["extra"] = (extra_cache, tensors["extra_indices"].reshape(rows, -1), row_lengths("extra_topk_length"))
    call = Call(q, cache, tensors["indices"].reshape(rows, -1), kwargs)
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return Golden(name, raw, call, tensors["out"].reshape(rows, heads, 128), lse)


def kept(out: torch.Tensor) -> torch.Tensor:
    """The columns of an output that the recorded answers keep."""
    return out[..., ::4]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of `want`; the plain norm of the difference where `want` is zero."""
    want = want.to(torch.float64)
    difference = float((got.to(torch.float64) - want).norm())
    size = float(want.norm())
    return difference / size if size else difference
