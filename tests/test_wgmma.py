# SPDX-License-Identifier: Apache-2.0
"""benchmarks/wgmma.py assembles without a GPU, and shows what docs/kernel-log.md says of the assembler."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton, whose ptxas assembles, is not installed (extra `triton`)", allow_module_level=True)


@pytest.mark.parametrize(("products", "serialised"), [(4, False), (36, True)])
def test_a_long_chain_from_registers_is_serialised(products: int, serialised: bool) -> None:
    file = Path(__file__).parent.parent / "benchmarks" / "wgmma.py"
    spec = importlib.util.spec_from_file_location("wgmma", file)
    assert spec is not None and spec.loader is not None
    wgmma = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wgmma)
    code, counted = wgmma.assemble(wgmma.source("RS", 16, 1, products, 0))
    waits, count = map(int, counted.split(" of "))
    assert code[:4] == b"\x7fELF" and (waits >= count) == serialised
