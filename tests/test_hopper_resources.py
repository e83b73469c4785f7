# SPDX-License-Identifier: Apache-2.0
"""Every variant of the Hopper kernel compiles for sm_90a without a GPU, within the table of resources that is
committed."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from generators import random_call
from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels.call import AttentionCall

TABLE = Path(__file__).parent / "data" / "hopper_resources.json"
SHARED_LIMIT = 232_448
"""Bytes of dynamic shared memory a CTA may have on SM90 (227 KiB)."""
KNOWN: dict[str, dict[str, int]] = json.loads(TABLE.read_text())

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL is not installed (extra `hopper`)", allow_module_level=True)

from sparsemla.kernels import hopper  # noqa: E402
from sparsemla.kernels.hopper import build, params, resources  # noqa: E402

ROPES = {"sparse": (True, False), "wide": (True, False), "v4": (True,), "v41": (False,)}
"""Kinds of records, and whether they have rotary columns apart from the others."""
SERVED = [
    (KVFormat.FP8_DS_MLA, 576, "sparse"),
    (KVFormat.FP8_NOPE, 512, "sparse"),
    (KVFormat.BF16, 576, "wide"),
    (KVFormat.BF16, 512, "wide"),
    (KVFormat.FP8_V4, 512, "v4"),
    (KVFormat.FP8_V41, 512, "v41"),
]
"""Formats, columns of the query, and kind."""


@pytest.mark.timeout(900)  # three minutes on two idle cores
def test_every_variant_stays_within_the_committed_table() -> None:
    if resources.tool("cuobjdump") is None or resources.tool("nvdisasm") is None:
        pytest.skip("cuobjdump and nvdisasm are not installed")
    found = resources.table()
    assert set(found) == set(KNOWN)
    for name, facts in found.items():
        known = KNOWN[name]
        assert facts["shared"] == known["shared"] <= SHARED_LIMIT, name
        threads = 384 if name.startswith("wide_h64") else 512 if "h64" in name else 640
        assert facts["registers"] <= 65536 // threads // 8 * 8, name
        assert facts["stack"] <= known["stack"], name
        assert facts["spills"] <= known["spills"], name
        assert facts["matrix"] == known["matrix"], name
        assert facts["waits"] == known["waits"] < known["matrix"] / 2, name


def test_a_compiled_variant_is_read_back_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEMLA_CACHE", str(tmp_path))
    variant = build.Variant("sparse", 8, True, 1)
    first = build.load_code(variant)

    def fail(_: build.Variant) -> build.Code:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "compile_variant", fail)
    assert build.load_code(variant) == first
    # A damaged entry is not loaded.
    (image,) = tmp_path.glob("*/*.cubin")
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    with pytest.raises(AssertionError, match="compiled again"):
        build.load_code(variant)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 61, 64, 65, 576, 1000, 2**30, 2**31 - 1])
def test_magic_divides(divisor: int) -> None:
    multiplier, shift = params.magic(divisor)
    multiplier %= 2**32
    rng = random.Random(divisor)
    for n in (0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1, *(rng.randrange(2**31) for _ in range(2000))):
        if 0 <= n < 2**31:
            assert ((n * multiplier >> 32) + n) % 2**32 >> shift == n // divisor


def test_arguments_are_laid_out_in_the_order_of_the_fields() -> None:
    values = {name: 1000 + i for i, name in enumerate(params.FIELDS)}
    arguments = params.Arguments(values)
    pointers = ctypes.cast(arguments.address, ctypes.POINTER(ctypes.c_void_p))
    kinds = {params.INT64: ctypes.c_int64, params.INT32: ctypes.c_int32, params.FLOAT32: ctypes.c_float}
    for i, (name, kind) in enumerate(params.FIELDS.items()):
        address = pointers[i]
        assert address is not None
        assert kinds[kind].from_address(address).value == values[name]


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 16, 33, 64, 65, 128])
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 128, 160, 8192, 2**20 + 3])
@pytest.mark.parametrize("kind", list(ROPES))
def test_choose_covers_the_heads_and_fits_the_device(rows: int, heads: int, kind: str) -> None:
    tile, cluster = hopper.choose(rows, heads, 32, 132, kind=kind)
    for rope in ROPES[kind]:
        assert build.Variant(kind, tile, rope, cluster) in resources.VARIANTS
    assert tile == 8 or tile < 2 * heads  # no more than half a tile of unused heads beyond the smallest
    if rows >= 132:
        assert cluster <= 2


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 128])
@pytest.mark.parametrize("kind", list(ROPES))
def test_an_unsplit_row_is_served_alike_in_every_batch(heads: int, kind: str) -> None:
    picks = {hopper.choose(rows, heads, 32, 132, kind=kind, split=False) for rows in (1, 2, 100, 8192)}
    assert len(picks) == 1
    assert picks.pop()[1] == 1


@pytest.mark.parametrize("heads", [1, 8, 20, 128])
@pytest.mark.parametrize(("fmt", "d_qk", "kind"), SERVED)
def test_prepare_loads_whatever_choose_can_pick(
    heads: int, fmt: KVFormat, d_qk: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = record_layout(fmt, d_qk).d_rope > 0
    loaded: set[build.Variant] = set()
    monkeypatch.setattr(hopper, "load", lambda variant, index: loaded.add(variant))
    assert set(hopper.prepare(heads, cache_format=fmt, d_qk=d_qk, device=0)) == loaded <= set(resources.VARIANTS)
    for rows in (1, 2, 3, 8, 31, 64, 128, 160, 1000, 8192):
        for blocks in (0, 1, 2, 32, 100):
            for split in (True, False):
                tile, cluster = hopper.choose(rows, heads, blocks, 132, kind=kind, split=split)
                assert build.Variant(kind, tile, rope, cluster) in loaded


@pytest.mark.parametrize("heads", [0, 129])
def test_prepare_refuses_head_counts_that_no_call_has(heads: int) -> None:
    with pytest.raises(ValueError, match=f"heads: got {heads}"):
        hopper.prepare(heads, device=0)


def test_prepare_refuses_records_that_no_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "load", lambda variant, index: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="format: got 'narrow', accepted are bf16, fp8_ds_mla"):
        hopper.prepare(8, cache_format="narrow", device=0)
    with pytest.raises(ValueError, match="d_qk: got 512 for format fp8_ds_mla"):
        hopper.prepare(8, d_qk=512, device=0)
    with pytest.raises(ValueError, match="kind: got 'narrow', accepted are "):
        build.make_kernel(build.Variant("narrow", 8, True, 1))


def test_every_format_has_variants_in_the_table() -> None:
    assert {fmt for fmt, _, _ in SERVED} == set(hopper.KINDS) == set(KVFormat)
    for fmt, d_qk, kind in SERVED:
        rope = record_layout(fmt, d_qk).d_rope > 0
        assert hopper.KINDS[fmt] == kind and rope in ROPES[kind]
        for tile in hopper.TILE_HEADS:
            for cluster in hopper.CLUSTERS:
                variant = build.Variant(kind, tile, rope, cluster)
                assert variant in resources.VARIANTS and variant.name in KNOWN
    assert len({variant.name for variant in resources.VARIANTS}) == len(resources.VARIANTS)


class _Loaded:
    """Stands for a loaded kernel and keeps what was launched."""

    def __init__(self, variant: build.Variant, limit: int, launched: list[tuple[build.Variant, int]]) -> None:
        self.variant, self.launched = variant, launched
        self.active_clusters = 132 // variant.cluster if variant.cluster <= limit else 0

    def launch(self, clusters: int, arguments: params.Arguments, stream: int) -> None:
        assert self.active_clusters > 0
        self.launched.append((self.variant, clusters))


@pytest.mark.parametrize(("limit", "expected"), [(16, 16), (8, 8), (1, 1)])
@pytest.mark.parametrize(("fmt", "d_qk", "kind"), SERVED)
def test_a_device_without_large_clusters_gets_smaller_ones(
    limit: int, expected: int, fmt: KVFormat, d_qk: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call(rows=1, heads=8, topk=2048, fmt=fmt, d_qk=d_qk)
    checked = AttentionCall.plain(call.q, call.cache, call.indices)
    launched: list[tuple[build.Variant, int]] = []
    monkeypatch.setattr(hopper, "load", lambda variant, index: _Loaded(variant, limit, launched))
    monkeypatch.setattr(hopper, "_sms", lambda index: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0))
    hopper.run(checked)
    assert launched == [(build.Variant(kind, 8, record_layout(fmt, d_qk).d_rope > 0, expected), 1)]
