# SPDX-License-Identifier: Apache-2.0
"""The portable kernel where there is no GPU: in Triton's interpreter, and its host side.

The interpreter's tests are those of test_triton_matrix.py, in processes of their own (TRITON_INTERPRET=1 must be set
before triton is imported). What compiled code takes is looked at in test_triton_resources.py.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from generators import random_call
from sparsemla.formats import KVFormat
from sparsemla.kernels import registry
from sparsemla.kernels import triton as portable
from sparsemla.kernels.call import AttentionCall
from sparsemla.kernels.triton import launch, shapes, tune, work
from sparsemla.schedule import SplitSchedule

FORMATS = ("bf16-576", "bf16-512", "fp8_ds_mla-576", "fp8_nope-512", "fp8_v4-512", "fp8_v41-512")
PARTS: dict[str, list[str]] = {
    "formats": [
        *(f"test_heads_and_formats[{fmt}-{heads}]" for fmt in FORMATS for heads in (1, 7)),
        *(f"test_everything_at_once[3-{fmt}]" for fmt in FORMATS),
        *(f"test_block_sizes[{fmt}-61]" for fmt in FORMATS),
        "test_heads_and_formats[fp8_ds_mla-576-64]",
        "test_extra_of_another_format",
        "test_query_as_a_pair",
        "test_query_pair_without_rotary_columns",
        "test_records_never_written_are_zeros",
        "test_a_nan_scale_spoils_only_its_own_rows",
    ],
    "masks": [
        *(f"test_masked_blocks[2-6-masked_blocks{n}]" for n in range(7)),
        "test_garbage_indices_are_no_keys",
        "test_masked_entries_that_point_at_nan_do_not_count",
        "test_a_nan_key_spoils_only_its_own_rows",
        "test_lengths_out_of_range_are_clamped",
        "test_sink_on_rows_without_keys",
        "test_no_rows",
        "test_no_columns",
        "test_no_pages",
        "test_strides_of_everything",
        "test_the_same_indices_for_every_row",
        "test_positions_equal_slots",
        "test_a_block_table_with_wider_rows",
        "test_positions_that_name_nothing",
        "test_context_shards_together_are_the_whole[3-16]",
    ],
    "numbers and pieces": [
        *(f"test_queries_of_any_size[4-{size}]" for size in ("1e-30", "1e+30", "3e+38")),
        "test_softmax_scales",
        "test_scales_of_any_size",
        "test_one_record_of_another_size",
        "test_groups_of_columns_of_different_size",
        "test_scores_of_groups_far_apart",
        "test_power_of_two_scales_of_any_size",
        *(f"test_a_nan_query_spoils_only_its_own_head[2-8-{spoilt}]" for spoilt in (0, 3)),
        "test_pieces_of_queries_of_any_size",
        "test_split_plans[3-7]",
        "test_a_plan_made_from_other_lengths_is_slower_not_wrong[64]",
        "test_scratch_is_the_accumulators_and_nothing_else",
        "test_the_kernel_s_own_plan_as_a_plan",
        *(f"test_two_programs_share_the_output_s_columns[uniform-{fmt}]" for fmt in FORMATS[1:4]),
        "test_two_programs_share_the_output_s_columns[plan-fp8_ds_mla-576]",
        "test_two_programs_share_the_output_s_columns[plan-fp8_v4-512]",
        "test_tuning_writes_the_fastest_shape",
    ],
}
"""What the interpreter runs, in three processes, two at a time. The whole matrix takes it several minutes."""


def interpret(part: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-rN"]
    return subprocess.run(
        [*command, *(f"{here / 'test_triton_matrix.py'}::{name}" for name in PARTS[part])],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=here.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    with ThreadPoolExecutor(2) as pool:
        yield {part: pool.submit(interpret, part) for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part: str, parts: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    done = parts[part].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_the_page_quotes_the_results() -> None:
    """Its times are what the benchmark makes of benchmarks/results/triton.json."""
    root = Path(__file__).parent.parent
    source = root / "benchmarks" / "triton_h200.py"
    names = runpy.run_path(str(source))
    quoted = names["markdown"](json.loads((root / "benchmarks" / "results" / "triton.json").read_text()))
    assert quoted in (root / "docs" / "portable-kernel.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ how work is cut


@pytest.mark.parametrize(
    ("requests", "rows_per_request", "lengths", "num_sms"),
    [(1, 1, [2048], 132), (3, 1, [2048, 64, 700], 132), (6, 1, [0, 5, 900, 64, 65, 2048], 7), (2, 3, [1000, 1], 9)],
)
def test_a_plan_as_a_table(requests: int, rows_per_request: int, lengths: list[int], num_sms: int) -> None:
    """Every block of every request exactly once; every accumulator written once and merged once."""
    plan = SplitSchedule.plan(
        requests=requests,
        heads=8,
        topk=2048,
        rows_per_request=rows_per_request,
        topk_lengths=lengths,
        num_sms=num_sms,
    )
    items, splits = work.pieces_of(plan)
    for request, length in enumerate(lengths):
        pieces = items[items[:, 0] == request]
        blocks = max(-(-length // 64), 1)
        covered = np.concatenate([np.arange(begin, min(end, blocks)) for begin, end in pieces[:, 1:3]])
        assert sorted(covered.tolist()) == list(range(blocks))
        assert pieces[-1, 2] == work.TO_THE_END
        merged = splits[splits[:, 0] == request]
        assert len(merged) == (len(pieces) > 1)
        if len(merged):
            assert pieces[:, 3].tolist() == list(range(merged[0, 1], merged[0, 1] + merged[0, 2]))
        else:
            assert pieces[0, 3] == -1
    assert sorted(items[items[:, 3] >= 0, 3].tolist()) == list(range(plan.accumulator_slots))
    device = torch.device("cpu")
    table = work.table_on(plan, device)
    assert work.table_on(plan, device) is table
    assert torch.equal(table.items, torch.from_numpy(items)) and torch.equal(table.splits, torch.from_numpy(splits))
    assert torch.equal(work._as_constants(items, device), table.items)


def test_an_even_cut_as_a_plan() -> None:
    plan = work.even_schedule(rows=3, heads=5, blocks=32, pieces=5)
    assert plan.accumulator_bytes == work.accumulator_bytes(3, 5, 5) == 3 * 5 * 5 * 513 * 4
    items, splits = work.pieces_of(plan)
    assert splits.tolist() == [[0, 0, 5], [1, 5, 5], [2, 10, 5]]
    assert [begin for _, begin, _, _ in items[:5].tolist()] == [piece * 32 // 5 for piece in range(5)]
    whole = work.even_schedule(rows=3, heads=5, blocks=32, pieces=1)
    assert whole.nothing_split and work.accumulator_bytes(3, 1, 5) == 0


def test_rows_are_cut_where_there_are_few() -> None:
    assert work.pieces_a_row(1, 32, 264) == 32
    assert work.pieces_a_row(8192, 32, 264) == 1
    assert work.pieces_a_row(1, 1, 264) == 1
    for tiles in (1, 8, 64, 128, 200, 264, 300):
        pieces = work.pieces_a_row(tiles, 32, 264)
        assert 1 <= pieces <= 32 and (pieces == 1 or tiles * pieces <= 2 * 264)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 61, 64, 65, 576, 1000, 2**30, 2**31 - 1])
def test_division_by_magic(divisor: int) -> None:
    multiplier, shift = launch.magic(divisor)
    multiplier %= 2**32
    draw = random.Random(divisor)
    for n in (0, 1, divisor - 1, divisor, 2**31 - 1, *(draw.randrange(2**31) for _ in range(1000))):
        assert ((n * multiplier >> 32) + n) % 2**32 >> shift == n // divisor


# ------------------------------------------------------------------------------------------------------- the tables


def test_every_gpu_finds_a_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(shapes.ENVIRONMENT, str(tmp_path / "none.json"))
    shapes.shape_for.cache_clear()
    near = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_103": "sm_100", "sm_121": "sm_120", "gfx950": "gfx942"}
    for arch in (*shapes.ARCHITECTURES, *near, "sm_130"):
        for fmt in KVFormat:
            for heads in (1, 16, 17, 128):
                shape = shapes.shape_for(arch, fmt, heads)
                assert shape in shapes.shapes_of(near.get(arch, arch) if arch != "sm_130" else "sm_120", fmt)
    assert launch.conversion("sm_80") == 2 and launch.conversion("sm_89") == 1 and launch.conversion("gfx942") == 0


def test_the_user_s_table_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "shapes.json"
    monkeypatch.setenv(shapes.ENVIRONMENT, str(path))
    shapes.shape_for.cache_clear()
    committed = shapes.shape_for("sm_90", KVFormat.FP8_V4, 8)
    mine = shapes.Shape(heads=16, keys=16, warps=2, registers=96, per_sm=5)
    shapes.write_entry(path, architecture="sm_90", fmt=KVFormat.FP8_V4, shapes=[(8, mine), (128, committed)])
    shapes.write_entry(path, architecture="sm_86", fmt=None, shapes=[(128, mine)])
    assert shapes.shape_for("sm_90", KVFormat.FP8_V4, 8) == mine
    assert shapes.shape_for("sm_90", KVFormat.FP8_V4, 9) == committed
    assert shapes.shape_for("sm_90", KVFormat.BF16, 8) != mine
    assert shapes.shape_for("sm_86", KVFormat.BF16, 100) == mine
    assert set(json.loads(path.read_text())) == {"sm_90", "sm_86"}
    path.write_text("{")
    shapes._table.cache_clear()
    shapes.shape_for.cache_clear()
    with pytest.raises(ValueError, match=r"SPARSEMLA_TRITON_SHAPES: got .*, which is not JSON"):
        shapes.shape_for("sm_90", KVFormat.BF16, 8)
    shapes._table.cache_clear()
    shapes.shape_for.cache_clear()


@pytest.mark.parametrize(
    "wrong", [{"heads": 8}, {"keys": 48}, {"warps": 3}, {"registers": 300}, {"per_sm": 0}, {"columns": 128}]
)
def test_shapes_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        shapes.Shape(**{"heads": 16, "keys": 32, "warps": 4, "registers": 0, "per_sm": 1, **wrong})


@pytest.mark.parametrize("arch", shapes.ARCHITECTURES)
def test_candidates_fit_the_register_file(arch: str) -> None:
    for heads in (8, 32, 64):
        tried = tune.candidates(arch, heads)
        assert len(tried) == len(set(tried)) >= 4
        for shape in tried:
            assert shape.heads <= max(heads, 16)
            assert (shape.registers or 255) * 32 * shape.warps * shape.per_sm <= 65536 or not arch.startswith("sm_")


# ------------------------------------------------------------------------------------------------------ the registry


def _call(device: str = "cpu") -> AttentionCall:
    call = random_call(rows=2, heads=4, topk=70)
    return AttentionCall.plain(call.q, call.cache, call.indices)


def test_who_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "serves cuda, the call is on cpu" in str(registry.kernel("triton").why_not(_call()))
    monkeypatch.setattr(portable, "INTERPRETED", False)
    assert portable.why_not(_call()) == "serves cuda, the call is on cpu"
    monkeypatch.setattr(portable, "architecture", lambda index: "sm_75")
    monkeypatch.setattr(portable, "device_index", lambda device: 0)
    assert "needs compute capability 8.0" in str(portable.why_not_device(torch.device("cuda")))
    monkeypatch.setattr(portable, "architecture", lambda index: "gfx942")
    assert portable.why_not_device(torch.device("cuda")) is None
    monkeypatch.setattr(portable.triton, "__version__", "3.3.1")
    assert portable.why_not_device(torch.device("cuda")) == "needs triton 3.4 or later, 3.3.1 is installed"
    monkeypatch.setattr(portable.triton, "__version__", "3.10.0+git")
    monkeypatch.setattr(portable, "INTERPRETED", True)
    assert portable.why_not_device(torch.device("cuda")) == "TRITON_INTERPRET is set"
