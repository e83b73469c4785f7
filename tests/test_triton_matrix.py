# SPDX-License-Identifier: Apache-2.0
"""The portable kernel in the matrix of test_attention.py, and in what its own ideas could get wrong.

On a GPU all of it runs (SPARSEMLA_SHARD=0/8 to 7/8: an eighth of it each, in processes of their own). Without one,
Triton's interpreter runs it on the CPU; that needs TRITON_INTERPRET=1 before triton is imported, so this module is then
only collected in processes of its own, which test_triton.py starts for a part of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import test_attention as matrix
from generators import ALL_FORMATS, Call, format_id, random_call, random_query, relative_error
from sparsemla import PagedKVCache, reference_attention
from sparsemla.formats import KVFormat, pack
from sparsemla.kernels import registry
from sparsemla.schedule import SplitSchedule
from test_attention import *  # noqa: F403 - the tests themselves
from test_attention import Runner, attend, check, check_call, to

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("runs inside test_triton.py, in the interpreter", allow_module_level=True)

# About the blockwise kernel or the registry, not about whoever answers.
del test_accumulators_exist_only_when_something_is_split  # noqa: F821
del test_memory_grows_neither_with_the_pool_nor_with_topk  # noqa: F821
del test_scratch_bytes_of_the_kernels  # noqa: F821

pytestmark = [] if INTERPRETED else pytest.mark.gpu
SHARE, _, SHARES = os.environ.get("SPARSEMLA_SHARD", "0/1").partition("/")


@pytest.fixture(autouse=True)
def _shard(request: pytest.FixtureRequest) -> None:
    """Skips what another process runs: on a GPU each test compiles kernels of its own, one after the other."""
    if zlib.crc32(request.node.nodeid.encode()) % int(SHARES) != int(SHARE):
        pytest.skip(f"not of share {SHARE} of {SHARES}")


@pytest.fixture(autouse=True)
def _the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "select", lambda call: registry.kernel("triton"))


@pytest.fixture
def runner() -> Runner:
    """The device where the portable kernel answers."""
    return Runner(torch.device("cpu" if INTERPRETED else "cuda"), "triton")


SCALED_FORMATS = [KVFormat.FP8_DS_MLA, KVFormat.FP8_NOPE]


def scaled_call(fmt: KVFormat, factors: torch.Tensor, *, topk: int = 80, heads: int = 5, seed: int = 0) -> Call:
    """A call over records whose keys are multiplied by `factors` (n,) or (n, 4) (groups of 128 columns), exactly:
    powers of two move the scales alone."""
    gen = torch.Generator().manual_seed(seed)
    layout = PagedKVCache.allocate(0, 64, fmt).layout
    n = factors.shape[0]
    kv = torch.randn((n, layout.d_qk), generator=gen)
    groups = factors if factors.dim() == 2 else factors[:, None].expand(n, 4)
    kv[:, :512] *= groups.repeat_interleave(128, dim=1)
    kv[:, 512:] = 0.0  # the rotary columns would drown the small and be drowned by the large
    cache = PagedKVCache.allocate(-(-n // 16), 16, fmt)
    cache.write_bytes(torch.arange(n), pack(kv, fmt))
    indices = torch.randint(n, (2, topk), generator=gen).to(torch.int32)
    largest = float(groups.abs().max())
    return Call(
        random_query(2, heads, layout.d_qk, generator=gen),
        cache,
        indices,
        {"softmax_scale": 0.05 / max(largest, 1e-30)},
    )


@pytest.mark.parametrize("exponent", [-110, -60, -20, 20, 60, 100])
@pytest.mark.parametrize("fmt", SCALED_FORMATS, ids=format_id)
def test_scales_of_any_size(exponent: int, fmt: KVFormat, runner: Runner) -> None:
    """Weights times scales neither leave float16's range nor lose bits in it."""
    call = scaled_call(fmt, torch.full((96,), 2.0**exponent))
    check_scaled(call, runner)


def check_scaled(call: Call, runner: Runner, **more: Any) -> None:
    """As check_call, without bfloat16's own underflow counting as ours."""
    out, lse = attend(call, runner, **more)
    want_out, want_lse = reference_attention(*call.args, **call.kwargs)
    size = want_out.abs().max()
    assert relative_error(out.double() / size, want_out / size) <= matrix.OUT_TOLERANCE
    difference = (lse.double() - want_lse).abs()
    assert (difference <= matrix.LSE_TOLERANCE * want_lse.abs().clamp_min(1.0)).all()


@pytest.mark.parametrize("fmt", SCALED_FORMATS, ids=format_id)
@pytest.mark.parametrize("outlier", [2.0**-40, 2.0**12, 2.0**40])
def test_one_record_of_another_size(outlier: float, fmt: KVFormat, runner: Runner) -> None:
    """Some heads give it all their weight and some none: what is small beside it must not be rounded away in these."""
    factors = torch.ones(96)
    factors[7] = outlier
    call = scaled_call(fmt, factors)
    call.indices[:, 3] = 7
    call.kwargs["softmax_scale"] = 0.05
    out, lse = attend(call, runner)
    want_out, want_lse = reference_attention(*call.args, **call.kwargs)
    for row in range(2):
        for head in range(5):
            assert relative_error(out[row, head], want_out[row, head]) <= 4e-3
    assert ((lse.double() - want_lse).abs() <= matrix.LSE_TOLERANCE * want_lse.abs().clamp_min(1.0)).all()


@pytest.mark.parametrize("ratio", [2.0**-10, 2.0**-25])
def test_groups_of_columns_of_different_size(ratio: float, runner: Runner) -> None:
    """A group that is small in every record is as accurate as the others, beside which it is nothing."""
    factors = torch.tensor([1.0, ratio, 1.0, ratio**0.5]).expand(96, 4)
    call = scaled_call(KVFormat.FP8_NOPE, factors)
    out, _ = attend(call, runner)
    want, _ = reference_attention(*call.args, **call.kwargs)
    for group in range(4):
        columns = slice(128 * group, 128 * group + 128)
        assert relative_error(out[..., columns].double(), want[..., columns]) <= 2.5e-3


@pytest.mark.parametrize(
    "groups", [(0, 1, 0, 2**-100), (2**-100, 1, 1, 0), (1, 2**-100, 0, 1), (2**-60, 2**-30, 1, 2**40)]
)
@pytest.mark.parametrize("fmt", SCALED_FORMATS, ids=format_id)
def test_scores_of_groups_far_apart(groups: tuple[float, ...], fmt: KVFormat, runner: Runner) -> None:
    """One accumulator goes from one group's unit to the next one's: up, down, and through scales of 0, which divide."""
    factors = torch.tensor(groups).expand(96, 4).clone()
    factors[::3] = factors[::3].flip(1)
    factors[5] = 0.0
    check_scaled(scaled_call(fmt, factors), runner)


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_records_never_written_are_zeros(fmt: KVFormat, d_qk: int, runner: Runner) -> None:
    """A slot that is named but was never written counts, as a key of zeros (its scales are zeros too)."""
    cache = PagedKVCache.allocate(3, 64, fmt, d_qk=d_qk)
    kv = torch.randn((100, d_qk)).to(torch.bfloat16)
    cache.write(torch.arange(100), kv)
    indices = torch.arange(60, 160, dtype=torch.int32).expand(2, -1).contiguous()
    indices[1] = torch.arange(100, 192, dtype=torch.int32).repeat(2)[:100]
    call = Call(random_query(2, 3, d_qk), cache, indices, {"softmax_scale": 0.05})
    out, lse = attend(call, runner)
    want_out, want_lse = reference_attention(*call.args, **call.kwargs)
    check(out[:1], lse[:1], want_out[:1], want_lse[:1])
    assert not out[1].any() and torch.allclose(lse[1].double(), want_lse[1], atol=1e-5)


@pytest.mark.parametrize(("fmt", "group"), [(KVFormat.FP8_V4, 64), (KVFormat.FP8_V41, 32)], ids=format_id)
def test_power_of_two_scales_of_any_size(fmt: KVFormat, group: int, runner: Runner) -> None:
    """Groups of one record up to 2**20 apart are exact in float16; all of them together may be of any size."""
    for size in (2.0**-80, 1.0, 2.0**80):
        gen = torch.Generator().manual_seed(1)
        kv = torch.randn((64, 512), generator=gen)
        columns = 448 if fmt is KVFormat.FP8_V4 else 512
        powers = torch.exp2(torch.randint(-20, 1, (64, columns // group), generator=gen).float())
        kv[:, :columns] *= powers.repeat_interleave(group, dim=1) * size
        kv[:, columns:] *= size
        cache = PagedKVCache.allocate(1, 64, fmt)
        cache.write(torch.arange(64), kv)
        indices = torch.arange(64, dtype=torch.int32).expand(2, -1)
        q = random_query(2, 3, 512, generator=gen)
        check_scaled(Call(q, cache, indices, {"softmax_scale": 0.2 / size}), runner)


def test_a_nan_scale_spoils_only_its_own_rows(runner: Runner) -> None:
    for fmt in (KVFormat.FP8_V4, KVFormat.FP8_V41, KVFormat.FP8_NOPE):
        cache = PagedKVCache.allocate(1, 32, fmt)
        cache.write(torch.arange(32), torch.randn((32, 512)))
        records = cache.gather_bytes(torch.tensor([5]))
        start = cache.layout.scale_offset + (cache.layout.data_bytes if cache.layout.scales_after_page else 0)
        records[0, start : start + 4] = 0xFF
        cache.write_bytes(torch.tensor([5]), records)
        indices = torch.arange(32, dtype=torch.int32).expand(2, -1).clone()
        indices[1, 5] = -1
        out, lse = attend(Call(random_query(2, 3, 512), cache, indices, {"softmax_scale": 0.05}), runner)
        assert lse[0].isnan().all() and not lse[1].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("size", [1e30, 3e38])
def test_pieces_of_queries_of_any_size(size: float, runner: Runner) -> None:
    """Logits past float32: pieces still know which of them weighs more."""
    call = random_call(rows=2, heads=4, topk=300, num_pages=6, masked=0.3)
    big = (call.q.float() / call.q.float().abs().amax() * size).to(torch.bfloat16)
    plan = SplitSchedule.plan(requests=2, heads=4, topk=300, num_sms=6)
    assert not plan.nothing_split
    out, lse = attend(Call(big, call.cache, call.indices, call.kwargs), runner, schedule=plan)
    want_out, _ = reference_attention(big, call.cache, call.indices, **call.kwargs)
    assert not lse.isnan().any() and relative_error(out, want_out) <= matrix.OUT_TOLERANCE


def test_scratch_is_the_accumulators_and_nothing_else(runner: Runner) -> None:
    """Accumulators of a plan that splits, of the kernel's own cut, and none where nothing is split."""
    from sparsemla.kernels import triton as portable

    call = to(random_call(rows=1, heads=5, topk=400, num_pages=8), runner.device)
    many = to(random_call(rows=700, heads=5, topk=16, num_pages=2), runner.device)
    split = SplitSchedule.plan(requests=1, heads=5, topk=400, num_sms=3)
    own = portable.plan(rows=1, heads=5, topk=400, device=runner.device)
    assert not split.nothing_split and not own.nothing_split and own.num_rows == 1
    expected = [
        (call, split, split.accumulator_bytes),
        (call, None, own.accumulator_bytes),
        (call, SplitSchedule.unsplit(1), 0),
    ]
    if not INTERPRETED:
        expected.append((many, None, 0))
    for made, schedule, taken in expected:
        attend(Call(*made.args, made.kwargs), runner, schedule=schedule)  # tables are copied, kernels compiled
        outputs = matrix.poisoned_outputs(made.q.shape[0], 5, runner.device)
        with matrix.Allocations() as seen:
            matrix.sparse_mla_attention(*made.args, **made.kwargs, **outputs, schedule=schedule)
        assert seen.largest_bytes == taken


def test_the_kernel_s_own_plan_as_a_plan(runner: Runner) -> None:
    """What `plan` returns is the cut that a call without a plan makes, and may be given to a call."""
    from sparsemla.kernels import triton as portable

    call = random_call(rows=2, heads=3, topk=300, num_pages=6, lengths=True, extra_topk=70)
    plan = portable.plan(rows=2, heads=3, topk=300, extra_topk=70, device=runner.device)
    assert sorted({(item.begin_block, item.end_block) for item in plan.work() if item.first_request == 0})[0][0] == 0
    check_call(call, runner, schedule=plan)


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
@pytest.mark.parametrize("planned", [False, True], ids=["uniform", "plan"])
def test_two_programs_share_the_output_s_columns(
    fmt: KVFormat, d_qk: int, planned: bool, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has half of the columns and all of the scores: whole rows and pieces, a sink, a second cache."""
    from sparsemla.kernels.triton import launch

    setting = launch.setting_of(runner.device, fmt, 18)
    halves = dataclasses.replace(setting.shape, heads=16, keys=32, columns=256)
    monkeypatch.setattr(launch, "setting_of", lambda *_: launch.Setting(setting.arch, halves, setting.slots))
    assert launch.parts_of(halves, fmt) == (1 if fmt is KVFormat.FP8_V4 else 2)
    call = random_call(
        rows=3, heads=18, topk=200, num_pages=6, fmt=fmt, d_qk=d_qk, lengths=True, sink=True, extra_topk=70
    )
    plan = SplitSchedule.plan(requests=3, heads=18, topk=200, extra_topk=70, num_sms=8) if planned else None
    check_call(call, runner, schedule=plan)


def test_tuning_writes_the_fastest_shape(runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole of it, over two shapes and a small call; the entry is what the kernel takes from then on."""
    from sparsemla.kernels.triton import launch, shapes, tune

    one, two = (shapes.Shape(16, keys, 4, 0, 1) for keys in (16, 32))
    table = tmp_path / "shapes.json"
    monkeypatch.setenv(shapes.ENVIRONMENT, str(table))
    monkeypatch.setattr(tune, "candidates", lambda arch, heads: [one, two])
    monkeypatch.setattr(tune, "time_call", lambda action: (action(), 1.0 if len(seen) == 1 else 2.0)[1])
    seen: list[tune.Trial] = []
    found = tune.tune(device=runner.device, fmt=KVFormat.FP8_V41, rows=1, topk=40, records=70, progress=seen.append)
    assert [trial.note for trial in seen] == [""] * 6 and set(found) == {16, 128}
    assert found[16][0].shape == one and [trial.microseconds for trial in found[16]] == [1.0, 2.0, 2.0]
    arch = launch.setting_of(runner.device, KVFormat.FP8_V41, 1).arch
    few, many = json.loads(table.read_text())[arch]["fp8_v41"]
    assert few == {"up_to": 16, **dataclasses.asdict(one)}
    assert many == {"up_to": 128, **dataclasses.asdict(found[128][0].shape)}


@pytest.mark.gpu
def test_a_plan_first_met_under_capture(runner: Runner) -> None:
    """Its table cannot be copied from host memory then: a replay would read what lies there later."""
    if INTERPRETED:
        pytest.skip("about CUDA graphs")
    host = random_call(rows=3, heads=4, topk=400, num_pages=8)
    call = to(host, runner.device)
    outputs = matrix.poisoned_outputs(3, 4, runner.device)

    def run(schedule: SplitSchedule) -> None:
        matrix.sparse_mla_attention(*call.args, **call.kwargs, **outputs, schedule=schedule)

    run(SplitSchedule.plan(requests=3, heads=4, topk=400, num_sms=8))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(SplitSchedule.plan(requests=3, heads=4, topk=400, num_sms=8))
    outputs["out"].fill_(torch.nan)
    for _ in range(2):
        graph.replay()
    check(outputs["out"].cpu(), outputs["lse"].cpu(), *reference_attention(*host.args, **host.kwargs))
