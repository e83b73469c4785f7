# SPDX-License-Identifier: Apache-2.0
"""The host cache's device code compiles for GPUs that are not there, and keeps its values in registers."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsemla.kernels.triton import residency
from sparsemla.serving.host_cache import hot

POINTERS = {
    **dict.fromkeys(("source", "target", "counters", "fetch", "host_list", "source_slots"), "*i64"),
    **dict.fromkeys(
        ("indices", "request_ids", "lane_of_request", "block_table", "directory", "position_of", "order", "used"),
        "*i32",
    ),
    **dict.fromkeys(("unused_list", "used_list", "brought", "clock", "slots", "target_slots", "counts"), "*i32"),
}
PLAN = {"BLOCK": hot._BLOCK, "SLOT_BLOCK": hot._SLOT_BLOCK, "ROW_BLOCK": hot._ROW_BLOCK}
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "plan": ("plan", {**PLAN, "APPEND": False, "world": 1, "interleave": 1}, 16),
    "plan-append-sharded": ("plan", {**PLAN, "APPEND": True}, 16),
    "bring": ("move", {"WORDS": 82, "PADDED": 128}, 4),
    "write": ("move", {"WORDS": 82, "PADDED": 128, "source_slots": None, "counts": None}, 4),
    "stage-one-word": ("move", {"WORDS": 1, "PADDED": 1, "target_slots": None, "counts": None}, 1),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles(variant: str, capability: int) -> None:
    name, constants, warps = VARIANTS[variant]
    function = getattr(residency, name)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = POINTERS.get(argument, "i32")
        if argument in POINTERS:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
    ptx = compiled.asm["ptx"]
    assert ".local" not in ptx  # nothing spilled by the front end, no stack
    if name == "plan":
        # Barriers between steps that read what other threads wrote, beside those of the prefix sums.
        assert len(re.findall(r"bar\.sync|barrier\.sync", ptx)) >= 5
    else:
        # Neighbouring threads take neighbouring words: one load of 8 bytes a thread, none wider or strided.
        assert len(re.findall(r"ld\.global\S*\.b64", ptx)) <= 2
