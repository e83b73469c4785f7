# SPDX-License-Identifier: Apache-2.0
"""Every variant of the portable kernel fits the cards it is for; said by code compiled for them without a GPU.

The committed table was made by ``python -m sparsemla.kernels.triton.resources --write
tests/data/triton_resources.json``, which compiles all variants for all architectures (some minutes on two cores).
Its fingerprint ties it to the device code and to the table of shapes, so whoever changes either has to make it again.
Here a part is compiled again, on every architecture; with SPARSEMLA_COMPILE_ALL=1, as in CI, all are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from sparsemla.formats import KVFormat
from sparsemla.kernels.triton import resources, shapes
from sparsemla.kernels.triton.resources import Taken, Variant

TABLE = Path(__file__).parent / "data" / "triton_resources.json"
MADE_WITH, KNOWN = resources.read_table(TABLE)
EVERY = {variant.name: variant for variant in resources.variants()}


def test_the_table_is_of_this_code() -> None:
    assert MADE_WITH["fingerprint"] == resources.fingerprint(), "make tests/data/triton_resources.json again"
    assert set(KNOWN) == set(EVERY)


@pytest.mark.parametrize("arch", shapes.ARCHITECTURES)
def test_every_variant_fits(arch: str) -> None:
    mine = [name for name, variant in EVERY.items() if variant.arch == arch]
    assert len(mine) >= 14
    assert not {name: reason for name in mine if (reason := resources.excess(EVERY[name], KNOWN[name]))}


def test_what_does_not_fit_is_found() -> None:
    variant = next(v for v in EVERY.values() if v.arch == "sm_89" and v.shape is not None)
    assert resources.excess(variant, Taken(99 * 1024, 128, 0)) is None
    assert "shared memory" in str(resources.excess(variant, Taken(99 * 1024 + 1, 128, 0)))
    twice = Variant("sm_90", variant.layout, shapes.Shape(16, 64, 8, 128, 2), False)
    assert resources.excess(twice, Taken(113 * 1024, 128, 0)) is None
    assert "of them exceed" in str(resources.excess(twice, Taken(114 * 1024, 128, 0)))
    assert "registers a block" in str(resources.excess(twice, Taken(1024, 129, 0)))
    amd = next(v for v in EVERY.values() if v.arch == "gfx942" and v.shape is not None)
    assert "vector registers" in str(resources.excess(amd, Taken(0, 513, 0)))
    assert "shared memory" in str(resources.excess(amd, Taken(65537, 100, 0)))
    assert "bytes of stack" in str(resources.excess(variant, Taken(1024, 255, resources.STACK_BYTES[False] + 1)))
    full = Variant("sm_90", variant.layout, variant.shape, True)
    assert resources.excess(full, Taken(1024, 255, resources.STACK_BYTES[False] + 1)) is None
    assert "bytes of stack" in str(resources.excess(full, Taken(1024, 255, resources.STACK_BYTES[True] + 1)))


PLANTED = {
    "shared memory": Variant("sm_89", (KVFormat.FP8_DS_MLA, 576), shapes.Shape(32, 64, 8, 0, 1), False),
    "bytes of stack": Variant("sm_90", (KVFormat.FP8_V41, 512), shapes.Shape(64, 32, 4, 0, 1), False),
}
"""Shapes that compile and may not be used: too large for consumer cards; more output than a thread has registers."""


def sample() -> list[Variant]:
    """Plain variants of two formats on each architecture, others on the next, and full ones where room is scarce."""
    if os.environ.get("SPARSEMLA_COMPILE_ALL"):
        return list(EVERY.values())
    chosen = [Variant("sm_80", resources.LAYOUTS[2], None, True)]
    for place, arch in enumerate(shapes.ARCHITECTURES):
        for further in (2, 5):
            layout = resources.LAYOUTS[(further + place) % len(resources.LAYOUTS)]
            chosen.append(Variant(arch, layout, shapes.shapes_of(arch, layout[0])[-1], False))
    for arch, layout in (("sm_89", resources.LAYOUTS[2]), ("sm_120", resources.LAYOUTS[0])):
        chosen.append(Variant(arch, layout, shapes.shapes_of(arch, layout[0])[-1], True))
    return chosen


@pytest.mark.timeout(1200)  # with all of them four minutes on two cores
def test_compiled_again_it_takes_the_same() -> None:
    wanted = sample()
    taken = resources.measure_all([*wanted, *PLANTED.values()])
    for complaint, variant in PLANTED.items():
        assert complaint in str(resources.excess(variant, taken[variant.name]))
    for variant in wanted:
        assert resources.excess(variant, taken[variant.name]) is None
        if MADE_WITH["triton"] == triton.__version__:
            assert taken[variant.name] == KNOWN[variant.name]
