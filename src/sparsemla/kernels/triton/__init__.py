# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention in Triton: the portable kernel, one source for decode and prefill, any GPU Triton serves.

`registry.py` calls `why_not`, `run`, `scratch_bytes` and `plan`. Importing this package imports triton.

==============  =====================================================================
``keys.py``     device code: index → record → matrix operands
``query.py``    device code: queries of any magnitude as matrix operands
``softmax.py``  device code: online softmax and products with float32 scales
``kernel.py``   device code: the attention kernel
``combine.py``  device code: merging the pieces of split rows
``work.py``     host: how work is cut
``shapes.py``   host: tile sizes by architecture (`shapes.json`)
``launch.py``   host: from a call to launches
``resources.py`` host: what compiled variants take, for GPUs that are not there
``tune.py``     host: measures shapes and writes the best
==============  =====================================================================
"""

from __future__ import annotations

import torch
import triton

from sparsemla.formats import KVFormat
from sparsemla.kernels.call import AttentionCall
from sparsemla.kernels.triton.launch import (
    INTERPRETED,
    architecture,
    device_index,
    pieces_for,
    run,
    scratch_bytes,
)
from sparsemla.kernels.triton.work import blocks_of, even_schedule
from sparsemla.schedule import SplitSchedule

OLDEST = (3, 4)
"""Triton releases before this one are not tried."""


def why_not(call: AttentionCall) -> str | None:
    """Why this kernel does not serve a call; None when it does. It serves every call on a GPU new enough."""
    return why_not_device(call.device)


def why_not_device(device: torch.device) -> str | None:
    """Why this kernel does not serve a device; None when it does."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or later, {triton.__version__} is installed"
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET is set"
    if device.type != "cuda":
        return f"serves cuda, the call is on {device.type}"
    arch = architecture(device_index(device))
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"needs compute capability 8.0 (bfloat16 matrix units), the device is {arch}"
    return None


def plan(
    *,
    rows: int,
    heads: int,
    topk: int,
    extra_topk: int = 0,
    fmt: KVFormat | str = KVFormat.FP8_DS_MLA,
    device: torch.device | str = "cuda",
) -> SplitSchedule:
    """The plan this kernel makes for itself: every row in the same number of pieces, one where there are rows
    enough."""
    pieces = pieces_for(
        torch.device(device), KVFormat.parse(fmt), rows=rows, heads=heads, topk=topk, extra_topk=extra_topk
    )
    return even_schedule(rows=rows, heads=heads, blocks=blocks_of(topk, extra_topk), pieces=pieces)


__all__ = ["OLDEST", "plan", "run", "scratch_bytes", "why_not", "why_not_device"]
