# SPDX-License-Identifier: Apache-2.0
"""From a checked call to launches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, RecordLayout
from sparsemla.kernels.call import AttentionCall
from sparsemla.kernels.triton import combine as _combine
from sparsemla.kernels.triton import kernel as _kernel
from sparsemla.kernels.triton import keys as _keys
from sparsemla.kernels.triton.shapes import Shape, shape_for
from sparsemla.kernels.triton.work import Table, accumulator_bytes, blocks_of, pieces_a_row, table_on

INTERPRETED = not isinstance(_kernel.attend, triton.runtime.JITFunction)
"""Triton's interpreter runs the kernels (TRITON_INTERPRET=1 when this was imported): on the CPU, slowly, for tests."""

KINDS: dict[KVFormat, int] = {
    KVFormat.BF16: _keys.BF16.value,
    KVFormat.FP8_DS_MLA: _keys.FLOAT32_SCALES.value,
    KVFormat.FP8_NOPE: _keys.FLOAT32_SCALES.value,
    KVFormat.FP8_V4: _keys.V4.value,
    KVFormat.FP8_V41: _keys.V41.value,
}
"""How device code sees a format."""

_INDEX_MAX = 2**31 - 1
_SCALE_MAX = 3.0e38
COMBINE_PIECES = 16
COMBINE_COLUMNS = 128
COMBINE_WARPS = 4


@functools.cache
def architecture(index: int) -> str:
    """ "sm_90" or "gfx942": the architecture of CUDA or HIP device `index`."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


@functools.cache
def processors(index: int) -> int:
    """SMs (compute units) of a device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def device_index(device: torch.device) -> int:
    """The index of a CUDA device, the current one's where it names none."""
    return device.index if device.index is not None else torch.cuda.current_device()


def conversion(arch: str) -> int:
    """How e4m3 becomes float16 on an architecture (see keys.py)."""
    if not arch.startswith("sm_"):
        return int(_keys.PLAIN.value)
    return int(_keys.NATIVE.value if int(arch[3:]) >= 89 else _keys.PACKED.value)


def magic(divisor: int) -> tuple[int, int]:
    """Multiplier and shift that divide by `divisor`: n // divisor == (umulhi(n, multiplier) + n) >> shift, 0 <= n <
    2**31.

    The round-up method of Granlund and Montgomery, "Division by invariant integers using multiplication" (PLDI 1994),
    figure 4.1. The multiplier is returned as the int32 with the same bits.
    """
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return multiplier - (1 << 32) if multiplier >= 1 << 31 else multiplier, shift


@dataclass(frozen=True)
class Setting:
    """Where a call runs: architecture, shape, and how many programs the device takes at once."""

    arch: str
    shape: Shape
    slots: int


def setting_of(device: torch.device, fmt: KVFormat, heads: int) -> Setting:
    """The setting of a device; the interpreter's is small, so that tests meet several tiles and pieces."""
    if device.type != "cuda":
        return Setting("interpreter", Shape(heads=16, keys=32, warps=1, registers=0, per_sm=1), 16)
    index = device_index(device)
    arch = architecture(index)
    shape = shape_for(arch, fmt, heads)
    return Setting(arch, shape, processors(index) * shape.per_sm)


def pieces_for(device: torch.device, fmt: KVFormat, *, rows: int, heads: int, topk: int, extra_topk: int) -> int:
    """Pieces a row of a call without a plan."""
    setting = setting_of(device, fmt, heads)
    tiles = rows * -(-heads // setting.shape.heads) * parts_of(setting.shape, fmt)
    return pieces_a_row(tiles, blocks_of(topk, extra_topk), setting.slots)


def scratch_bytes(call: AttentionCall) -> int:
    """Bytes of accumulators a call takes: 0 unless something is split."""
    if call.num_rows == 0:
        return 0
    if call.schedule is not None:
        return call.schedule.accumulator_bytes
    return accumulator_bytes(call.num_rows, _own_pieces(call), call.num_heads)


def run(call: AttentionCall, *, shape: Shape | None = None) -> None:
    """Fills call.out and call.lse; with `shape` instead of the table's (see tune.py)."""
    if call.num_rows == 0:
        return
    setting = setting_of(call.device, call.cache.format, call.num_heads)
    if shape is not None:
        setting = Setting(setting.arch, shape, setting.slots)
    schedule = call.schedule
    table: Table | None = None
    pieces = 1
    if schedule is None:
        pieces = _own_pieces(call)
    elif not schedule.nothing_split:
        table = table_on(schedule, call.device)
    rows_per_request = 1 if table is None or schedule is None else schedule.rows_per_request

    items = call.num_rows * pieces if table is None else table.items.shape[0] * rows_per_request
    split = table is not None or pieces > 1
    work = _kernel.TABLE if table is not None else _kernel.UNIFORM if pieces > 1 else _kernel.WHOLE
    accumulators = None
    if split:
        taken = scratch_bytes(call)
        accumulators = torch.empty(taken // 4, dtype=torch.float32, device=call.device)
    common = {
        **_query_and_output(call),
        "accumulators": accumulators,
        "rows_per_request": rows_per_request,
        "WORK": work.value,
    }
    head_tiles = -(-call.num_heads // setting.shape.heads)
    constants = variant(call, setting)
    _kernel.attend[(items * head_tiles * constants["PARTS"],)](
        **common,
        **_keys_of("", call.cache, call.indices, call.topk_lengths),
        **_extra_keys(call),
        **_translation(call),
        pieces=pieces if table is None else table.items,
        head_tiles=head_tiles,
        **constants,
        **launch_options(setting),
    )
    if split:
        merged = call.num_rows if table is None else table.splits.shape[0] * rows_per_request
        _combine.combine[(merged * call.num_heads * (512 // COMBINE_COLUMNS),)](
            **common,
            pieces=pieces if table is None else table.splits,
            PIECES=COMBINE_PIECES,
            COLUMNS=COMBINE_COLUMNS,
            INTERPRETED=INTERPRETED,
            num_warps=COMBINE_WARPS,
        )


def _own_pieces(call: AttentionCall) -> int:
    return pieces_for(
        call.device,
        call.cache.format,
        rows=call.num_rows,
        heads=call.num_heads,
        topk=call.topk,
        extra_topk=call.extra_topk,
    )


def launch_options(setting: Setting) -> dict[str, Any]:
    """What the compiler is told besides the arguments."""
    options: dict[str, Any] = {"num_warps": setting.shape.warps, "num_stages": 1}
    if setting.shape.registers and setting.arch.startswith("sm_"):
        options["maxnreg"] = setting.shape.registers
    return options


def format_constants(prefix: str, layout: RecordLayout) -> dict[str, int]:
    """The constants that make device code for a format: the one place where its byte offsets enter."""
    return {
        f"{prefix}KIND": KINDS[layout.format],
        f"{prefix}RECORD": layout.data_bytes,
        f"{prefix}ROPE_AT": layout.rope_offset,
        f"{prefix}SCALE_AT": layout.scale_offset,
        f"{prefix}SCALE_BYTES": layout.scale_bytes if layout.scales_after_page else 0,
    }


def parts_of(shape: Shape, fmt: KVFormat) -> int:
    """Programs that share the output's columns. FP8_V4, which mixes with no other format, has rotary columns in it."""
    return 1 if fmt is KVFormat.FP8_V4 else 512 // shape.columns


def variant(call: AttentionCall, setting: Setting) -> dict[str, Any]:
    """The compile-time constants of the attention kernel for a call (WORK aside)."""
    extra = call.cache if call.extra is None else call.extra.cache
    return {
        **format_constants("", call.cache.layout),
        **format_constants("EXTRA_", extra.layout),
        "POSITIONS": call.block_table is not None,
        "SHARDED": call.context_shard is not None,
        "SCALED": any(cache.format is not KVFormat.BF16 for cache in (call.cache, extra)),
        "HEADS": setting.shape.heads,
        "KEYS": setting.shape.keys,
        "PARTS": parts_of(setting.shape, call.cache.format),
        "CONVERT": int(_keys.PLAIN.value) if INTERPRETED else conversion(setting.arch),
        "INTERPRETED": INTERPRETED,
    }


def _query_and_output(call: AttentionCall) -> dict[str, Any]:
    rope = call.q_rope
    layout = call.cache.layout
    scale = max(-_SCALE_MAX, min(call.softmax_scale * math.log2(math.e), _SCALE_MAX))
    return {
        "q_nope": call.q_nope,
        "q_nope_row": call.q_nope.stride(0),
        "q_nope_head": call.q_nope.stride(1),
        "q_rope": rope,
        "q_rope_row": 0 if rope is None else rope.stride(0),
        "q_rope_head": 0 if rope is None else rope.stride(1),
        "out": call.out,
        "out_row": call.out.stride(0),
        "out_head": call.out.stride(1),
        "lse": call.lse,
        "lse_row": call.lse.stride(0),
        "lse_head": call.lse.stride(1),
        "sink": call.attn_sink,
        "num_heads": call.num_heads,
        "scale_log2": float(scale),
        "NOPE": layout.d_nope,
        "ROPE": layout.d_rope,
    }


def _keys_of(prefix: str, cache: PagedKVCache, indices: torch.Tensor, lengths: torch.Tensor | None) -> dict[str, Any]:
    multiplier, shift = magic(cache.block_size)
    return {
        f"{prefix}pool": cache.data,
        f"{prefix}page_stride": cache.page_stride_bytes,
        f"{prefix}last_slot": min(cache.num_slots - 1, _INDEX_MAX),
        f"{prefix}block_size": cache.block_size,
        f"{prefix}block_magic": multiplier,
        f"{prefix}block_shift": shift,
        f"{prefix}indices": indices,
        f"{prefix}indices_row": indices.stride(0),
        f"{prefix}topk": indices.shape[1],
        f"{prefix}lengths": lengths,
    }


def _extra_keys(call: AttentionCall) -> dict[str, Any]:
    if call.extra is not None:
        return _keys_of("extra_", call.extra.cache, call.extra.indices, call.extra.topk_lengths)
    numbers = ("page_stride", "last_slot", "block_size", "block_magic", "block_shift", "indices_row", "topk")
    return {
        **{f"extra_{name}": 0 for name in numbers},
        **{f"extra_{name}": None for name in ("pool", "indices", "lengths")},
    }


def _translation(call: AttentionCall) -> dict[str, Any]:
    table = call.block_table
    rank, world, interleave = call.context_shard or (0, 1, 1)
    return {
        "block_table": table,
        "table_stride": 0 if table is None else table.stride(0),
        "table_columns": 0 if table is None else table.shape[1],
        "request_ids": call.request_ids,
        "num_requests": 0 if table is None else table.shape[0],
        "num_pages": call.cache.num_pages,
        "shard_rank": rank,
        "shard_world": world,
        "shard_interleave": interleave,
    }
