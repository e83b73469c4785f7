# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention on Hopper (SM90), written in the CuTe DSL. `registry.py` calls `why_not` and `run`.

Nothing is allocated: a token that is cut over several SMs is cut over a thread-block cluster and combined in
distributed shared memory.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels.hopper.build import KINDS, Variant
from sparsemla.kernels.hopper.launch import Loaded, load
from sparsemla.kernels.hopper.params import Arguments, magic

if TYPE_CHECKING:
    from sparsemla.kernels.call import AttentionCall

BLOCK = 64
TILE_HEADS = (8, 16, 32, 64)
# For measuring and checking only: where traced variants leave their cycles, and whether variants for racecheck run.
TRACE = 0
CHECKED = False
CLUSTERS = (1, 2, 4, 8, 16)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def why_not(call: AttentionCall) -> str | None:
    """Why this kernel does not serve a call; None when it does."""
    index = call.device.index if call.device.index is not None else torch.cuda.current_device()
    if _capability(index) != (9, 0):
        return f"needs compute capability 9.0, device {index} has {'.'.join(map(str, _capability(index)))}"
    layout = call.cache.layout
    if call.extra is not None and call.extra.cache.layout.format is not layout.format:
        return "serves an extra cache of the cache's own format only"
    for name, tensor in (("q_nope", call.q_nope), ("q_rope", call.q_rope)):
        if tensor is not None and (tensor.data_ptr() % 16 or tensor.stride(0) % 8 or tensor.stride(1) % 8):
            return f"needs {name} aligned to 16 bytes in every row, its strides are {tuple(tensor.stride())}"
    if call.out.data_ptr() % 16 or call.out.stride(0) % 8 or call.out.stride(1) % 8:
        return f"needs out aligned to 16 bytes in every row, its strides are {tuple(call.out.stride())}"
    return None


def scratch_bytes(call: AttentionCall) -> int:
    """Global memory beyond out and lse: none, split or not."""
    return 0


# Microseconds on an H200, from the runs in docs/kernel-log.md, by the heads of a tile: its start and end, a block of 64
# keys, and what combining 16 CTAs adds.
_FIXED = {8: 7.0, 16: 9.0, 32: 10.0, 64: 14.0}
_FIXED_UPRIGHT = 11.5
"""The same for 64 heads over bf16 records, whose blocks go in pairs."""
_BLOCK = {
    "sparse": {8: 1.25, 16: 1.35, 32: 1.6, 64: 2.5},
    "wide": {8: 1.55, 16: 1.8, 32: 2.1, 64: 1.75},
    "v4": {8: 1.4, 16: 1.5, 32: 1.75, 64: 2.35},
    "v41": {8: 1.15, 16: 1.2, 32: 1.5, 64: 2.25},
}
_COMBINE = {8: 0.5, 16: 1.5, 32: 3.0, 64: 3.0}


def choose(
    rows: int, heads: int, blocks: int, sms: int, *, kind: str = "sparse", split: bool = True
) -> tuple[int, int]:
    """Heads a tile and CTAs a tile: the least estimated time.

    Few rows leave most of the GPU idle: then small tiles of heads that each read the records again are faster than
    one large tile, and a
    tile is cut over a cluster. Many rows fill it: then the largest tile that the heads fill reads the records least
    often.

    Args:
        rows: query rows.
        heads: query heads.
        blocks: key blocks of 64 a row.
        sms: multiprocessors of the device.
        kind: of `KINDS`.
        split: whether a row's keys may be cut at all.
    """
    # Clusters that run at once: measured on 132 multiprocessors, where 16 CTAs need a whole partition of the chip.
    active = {1: sms, 2: sms // 2, 4: sms * 30 // 132, 8: sms * 15 // 132, 16: sms * 7 // 132}

    def time(option: tuple[int, int]) -> tuple[float, int, int]:
        tile, cluster = option
        waves = -(-rows * -(-heads // tile) // active[cluster])
        each = -(-blocks // cluster)
        fixed = _FIXED[tile]
        if kind == "wide" and tile == 64:
            fixed, each = _FIXED_UPRIGHT, -(-each // 2) * 2
        once = fixed + _BLOCK[kind][tile] * each + (_COMBINE[tile] if cluster == 16 else 0.0)
        return waves * once, cluster, tile

    if not split:  # the same bits whatever else is in the batch: the tile depends on the heads alone
        return next(t for t in TILE_HEADS if heads <= t or t == TILE_HEADS[-1]), 1
    return min(
        ((t, c) for t in TILE_HEADS if t < 2 * heads or t == TILE_HEADS[0] for c in CLUSTERS if active[c]), key=time
    )


def prepare(
    heads: int,
    *,
    cache_format: KVFormat | str = KVFormat.FP8_DS_MLA,
    d_qk: int | None = None,
    device: int | None = None,
) -> list[Variant]:
    """Compiles (where they are not on disk) and loads every variant that calls with this many heads can need.

    An engine that captures CUDA graphs for many batch sizes calls it once at start: a variant that is first needed
    inside a capture cannot be loaded there.

    Args:
        heads: query heads of the calls, 1 to 128.
        cache_format: of the cache, a KVFormat or its name.
        d_qk: columns of its records, where the format leaves a choice (BF16: 576, the default, or 512).
        device: CUDA device index, the current one by default.

    Raises:
        ValueError: heads outside 1 to 128, an unknown format, or a width that it does not have.
        RuntimeError: the driver refused a kernel.
    """
    if not 1 <= heads <= 128:
        raise ValueError(f"heads: got {heads}, accepted are 1 to 128")
    layout = record_layout(cache_format, d_qk)
    kind, rope = KINDS[layout.format], layout.d_rope > 0
    index = torch.cuda.current_device() if device is None else device
    variants = [
        Variant(kind, tile, rope, cluster)
        for tile in TILE_HEADS
        if tile < 2 * heads or tile == TILE_HEADS[0]
        for cluster in CLUSTERS
    ]
    for variant in variants:
        load(variant, index)
    return variants


@functools.cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def run(call: AttentionCall) -> None:
    """Fills call.out and call.lse."""
    rows, heads = call.num_rows, call.num_heads
    if rows == 0:
        return
    index = call.device.index if call.device.index is not None else torch.cuda.current_device()
    kind, rope = KINDS[call.cache.layout.format], call.q_rope is not None
    blocks = -(-call.topk // BLOCK) + -(-call.extra_topk // BLOCK)
    split = call.schedule is None or not call.schedule.nothing_split
    tile_heads, cluster = choose(rows, heads, blocks, _sms(index), kind=kind, split=split)
    head_tiles = -(-heads // tile_heads)
    tiles = rows * head_tiles
    kernel = load(Variant(kind, tile_heads, rope, cluster, bool(TRACE), CHECKED), index)
    while kernel.active_clusters == 0 and cluster > 1:  # a device whose partitions are too small for so large a cluster
        cluster //= 2
        kernel = load(Variant(kind, tile_heads, rope, cluster, bool(TRACE), CHECKED), index)
    clusters = min(tiles, kernel.active_clusters) if cluster == 1 else tiles
    kernel.launch(clusters, arguments(call, head_tiles, tiles), torch.cuda.current_stream(index).cuda_stream)


def arguments(call: AttentionCall, head_tiles: int, tiles: int) -> Arguments:
    """The parameter list of one launch."""
    cache, extra = call.cache, call.extra
    shard_rank, shard_world, interleave = call.context_shard or (0, 1, 1)
    block = cache.block_size
    extra_block = 1 if extra is None else extra.cache.block_size
    q_rope = call.q_nope if call.q_rope is None else call.q_rope

    def address(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    return Arguments(
        {
            "q_nope": call.q_nope.data_ptr(),
            "q_nope_token": call.q_nope.stride(0) * 2,
            "q_nope_head": call.q_nope.stride(1) * 2,
            "q_rope": q_rope.data_ptr(),
            "q_rope_token": q_rope.stride(0) * 2,
            "q_rope_head": q_rope.stride(1) * 2,
            "out": call.out.data_ptr(),
            "out_token": call.out.stride(0) * 2,
            "out_head": call.out.stride(1) * 2,
            "lse": call.lse.data_ptr(),
            "lse_token": call.lse.stride(0) * 4,
            "lse_head": call.lse.stride(1) * 4,
            "cache": cache.data.data_ptr(),
            "page_stride": cache.page_stride_bytes,
            "indices": call.indices.data_ptr(),
            "indices_stride": call.indices.stride(0) * 4,
            "topk_lengths": address(call.topk_lengths),
            "block_table": address(call.block_table),
            "table_stride": 0 if call.block_table is None else call.block_table.stride(0) * 4,
            "request_ids": address(call.request_ids),
            "sink": address(call.attn_sink),
            "extra_cache": 0 if extra is None else extra.cache.data.data_ptr(),
            "extra_page_stride": 0 if extra is None else extra.cache.page_stride_bytes,
            "extra_indices": 0 if extra is None else extra.indices.data_ptr(),
            "extra_indices_stride": 0 if extra is None else extra.indices.stride(0) * 4,
            "extra_lengths": 0 if extra is None else address(extra.topk_lengths),
            "block_size": block,
            "block_magic": magic(block)[0],
            "block_shift": magic(block)[1],
            "slots": cache.num_slots,
            "pages": cache.num_pages,
            "record_bytes": cache.record_stride_bytes,
            "topk": call.topk,
            "table_columns": 0 if call.block_table is None else call.block_table.shape[1],
            "num_requests": 0 if call.block_table is None else call.block_table.shape[0],
            "shard_rank": shard_rank,
            "shard_world": shard_world,
            "shard_interleave": interleave,
            "extra_block": extra_block,
            "extra_magic": magic(extra_block)[0],
            "extra_shift": magic(extra_block)[1],
            "extra_slots": 0 if extra is None else extra.cache.num_slots,
            "extra_topk": call.extra_topk,
            "heads": call.num_heads,
            "head_tiles": head_tiles,
            "tiles": tiles,
            "scale_log2": call.softmax_scale * math.log2(math.e),
            "trace": TRACE,
        }
    )


__all__ = ["KINDS", "Loaded", "arguments", "choose", "prepare", "run", "scratch_bytes", "why_not"]
