# SPDX-License-Identifier: Apache-2.0
"""`sparse_mla_attention` against the float64 oracle, on every device and kernel there is.

Unused records, page padding, gaps between pages and the outputs before the call hold NaN: whoever reads what no
index names, or leaves a row unwritten, fails. Tolerances: output 2.2e-3 relative (one rounding to bfloat16 is
1.7e-3), lse 1e-5.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from generators import (
    ALL_FORMATS,
    Call,
    format_id,
    pages_for_positions,
    random_cache,
    random_call,
    random_indices,
    random_query,
    relative_error,
)
from sparsemla import PagedKVCache, reference_attention, sparse_mla_attention
from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall, ExtraKeys
from sparsemla.schedule import SplitSchedule

OUT_TOLERANCE = 2.2e-3
LSE_TOLERANCE = 1e-5
GPU = pytest.mark.gpu


@dataclass(frozen=True)
class Runner:
    """A device and the kernel that must answer there."""

    device: torch.device
    name: str


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU), pytest.param("cuda-blockwise", marks=GPU)])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The CPU; the GPU with whatever kernel the registry picks; the GPU with the blockwise torch kernel."""
    if request.param == "cuda-blockwise":
        monkeypatch.setattr(registry, "select", lambda call: registry.kernel("cpu"))
    return Runner(torch.device(request.param.split("-")[0]), request.param)


def to(value: Any, device: torch.device) -> Any:
    """A call, cache, tensor or nest of them on `device`, strides and gaps included."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, PagedKVCache):
        if value.device == device:
            return value
        data = value.data
        span = value.data.untyped_storage().nbytes() // data.element_size()
        whole = data.as_strided((span,), (1,), 0).to(device)
        moved = whole.as_strided(data.shape, data.stride(), data.storage_offset())
        return dataclasses.replace(value, data=moved)
    if isinstance(value, Call):
        parts = (to(part, device) for part in (value.q, value.cache, value.indices, value.kwargs))
        return Call(*parts)
    if isinstance(value, dict):
        return {key: to(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(to(item, device) for item in value)
    return value


def poisoned_outputs(rows: int, heads: int, device: torch.device) -> dict[str, torch.Tensor]:
    """out and lse full of NaN."""
    return {
        "out": torch.full((rows, heads, 512), torch.nan, dtype=torch.bfloat16, device=device),
        "lse": torch.full((rows, heads), torch.nan, dtype=torch.float32, device=device),
    }


def attend(call: Call, runner: Runner, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Our answer to a call that was made on the CPU, brought back there."""
    moved = to(Call(call.q, call.cache, call.indices, {**call.kwargs, **more}), runner.device)
    q = moved.q[0] if isinstance(moved.q, tuple) else moved.q
    outputs = poisoned_outputs(q.shape[0], q.shape[1], runner.device)
    for name, tensor in outputs.items():
        moved.kwargs.setdefault(name, tensor)
    out, lse = sparse_mla_attention(*moved.args, **moved.kwargs)
    assert out is moved.kwargs["out"] and lse is moved.kwargs["lse"]
    return out.cpu(), lse.cpu()


def check(out: torch.Tensor, lse: torch.Tensor, want_out: torch.Tensor, want_lse: torch.Tensor) -> None:
    """Both answers within the tolerances; rows without keys exactly 0 and -inf."""
    assert not out.isnan().any() and not lse.isnan().any()
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any()
    assert relative_error(out, want_out) <= OUT_TOLERANCE
    difference = (lse.double() - want_lse)[~empty].abs()
    assert (difference <= LSE_TOLERANCE * want_lse[~empty].abs().clamp_min(1.0)).all()


def check_call(call: Call, runner: Runner, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a call and compares it with the oracle."""
    got = attend(call, runner, **more)
    check(*got, *reference_attention(*call.args, **call.kwargs))
    return got


# ---------------------------------------------------------------------------------------------- shapes and formats


@pytest.mark.parametrize("heads", [1, 7, 8, 16, 64, 128])
@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_heads_and_formats(heads: int, fmt: KVFormat, d_qk: int, runner: Runner) -> None:
    check_call(random_call(rows=3, heads=heads, topk=130, fmt=fmt, d_qk=d_qk, seed=heads), runner)


@pytest.mark.parametrize("block_size", [1, 2, 61, 64, 576])
@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_block_sizes(block_size: int, fmt: KVFormat, d_qk: int, runner: Runner) -> None:
    pages = max(160 // block_size, 2)
    check_call(random_call(topk=100, num_pages=pages, block_size=block_size, fmt=fmt, d_qk=d_qk), runner)


@pytest.mark.parametrize("topk", [1, 2, 63, 64, 65, 128, 500, 513, 2048])
@pytest.mark.parametrize("heads", [5, 64])
def test_topk(topk: int, heads: int, runner: Runner) -> None:
    check_call(random_call(rows=2, heads=heads, topk=topk, num_pages=6, seed=topk), runner)


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("topk", [32, 600])
def test_row_counts(rows: int, topk: int, runner: Runner) -> None:
    check_call(random_call(rows=rows, heads=8, topk=topk, num_pages=12, lengths=True), runner)


@pytest.mark.parametrize("scale_style", ["float32", "pow2"])
@pytest.mark.parametrize("fmt", [KVFormat.FP8_DS_MLA, KVFormat.FP8_NOPE], ids=format_id)
def test_scale_styles_are_equally_accurate(scale_style: Any, fmt: KVFormat, runner: Runner) -> None:
    check_call(random_call(heads=64, fmt=fmt, scale_style=scale_style), runner)


# ------------------------------------------------------------------------------------------------------ features


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
@pytest.mark.parametrize("heads", [3, 64])
def test_everything_at_once(fmt: KVFormat, d_qk: int, heads: int, runner: Runner) -> None:
    call = random_call(
        rows=5, heads=heads, topk=150, fmt=fmt, d_qk=d_qk, lengths=True, sink=True, extra_topk=90, page_gap_bytes=48
    )
    check_call(call, runner)


@pytest.mark.parametrize("feature", ["lengths", "sink", "extra_topk", "page_gap_bytes"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_one_feature(feature: str, heads: int, runner: Runner) -> None:
    value = {"extra_topk": 70, "page_gap_bytes": 1024}.get(feature, True)
    check_call(random_call(rows=4, heads=heads, topk=140, **{feature: value}), runner)


def test_lengths_out_of_range_are_clamped(runner: Runner) -> None:
    call = random_call(rows=6, topk=100)
    lengths = torch.tensor([-5, 0, 1, 100, 101, 2**31 - 1], dtype=torch.int32)
    _, lse = check_call(Call(*call.args, {**call.kwargs, "topk_lengths": lengths}), runner)
    assert (lse[:2] == -torch.inf).all()


def test_extra_of_another_format(runner: Runner) -> None:
    """Formats may mix where the columns agree: a bfloat16 cache beside a quantised one."""
    call = random_call(heads=16)
    extra_call = random_call(heads=16, topk=80, fmt=KVFormat.BF16, d_qk=576, num_pages=3, block_size=5, seed=9)
    lengths = torch.tensor([80, 0, 33], dtype=torch.int32)
    for row_lengths in (None, lengths):
        extra = (extra_call.cache, extra_call.indices, row_lengths)
        check_call(Call(*call.args, {**call.kwargs, "extra": extra}), runner)
    whole = attend(Call(*call.args, {**call.kwargs, "extra": (extra_call.cache, extra_call.indices, None)}), runner)
    short = attend(Call(*call.args, {**call.kwargs, "extra": (extra_call.cache, extra_call.indices)}), runner)
    assert torch.equal(whole[0], short[0])
    if runner.name == "cpu":
        named = ExtraKeys(extra_call.cache, extra_call.indices, None)
        assert torch.equal(sparse_mla_attention(*call.args, **call.kwargs, extra=named)[0], whole[0])


def test_sink_on_rows_without_keys(runner: Runner) -> None:
    call = random_call(rows=3, heads=4, sink=True)
    call.indices[1] = -1
    out, lse = check_call(call, runner)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert not out[:, 1].any(), "a sink of +inf takes everything"


@pytest.mark.parametrize("masked_blocks", [[0], [0, 1], [0, 1, 2, 3], [1], [5], [0, 2, 4], list(range(6))])
@pytest.mark.parametrize("heads", [6, 16, 32, 64])
@pytest.mark.parametrize("rows", [2, 140])
def test_masked_blocks(masked_blocks: list[int], heads: int, rows: int, runner: Runner) -> None:
    """A fully masked first block once made exp(-inf - -inf) = NaN for good, and once took the next block's scores.

    140 rows fill a GPU, so that one part sees all blocks of a row, in their order.
    """
    if rows > 2 and (runner.name != "cuda" or masked_blocks not in ([0], [0, 1, 2, 3], [0, 2, 4])):
        pytest.skip("only a GPU's kernels cut a row by how many there are; three cases say it all")
    call = random_call(rows=rows, heads=heads, topk=384, num_pages=4)
    for block in masked_blocks:
        call.indices[0, 64 * block : 64 * block + 64] = -1
    check_call(call, runner)


@pytest.mark.parametrize("index", [-1, -(2**31), 2**31 - 1, 0x7FC00000, 320, 321])
def test_garbage_indices_are_no_keys(index: int, runner: Runner) -> None:
    call = random_call(rows=3, topk=70, garbage=False, masked=0.0)
    call.indices[0] = index
    call.indices[1, ::2] = index
    _, lse = check_call(call, runner)
    assert (lse[0] == -torch.inf).all() and (lse[1:] > -torch.inf).all()


def test_masked_entries_that_point_at_nan_do_not_count(runner: Runner) -> None:
    """Past topk_lengths lie indices of real records full of NaN."""
    call = random_call(rows=4, topk=128, lengths=True, garbage=False, masked=0.0, num_pages=8)
    named = torch.zeros(call.cache.num_slots, dtype=torch.bool)
    lengths = call.kwargs["topk_lengths"]
    for row, length in enumerate(lengths.tolist()):
        named[call.indices[row, :length].long()] = True
    unused = (~named).nonzero()[0].to(torch.int32)
    for row, length in enumerate(lengths.tolist()):
        call.indices[row, length:] = unused
    assert call.cache.read(unused).isnan().any()
    check_call(call, runner)


@pytest.mark.parametrize("heads", [2, 64])
def test_a_key_named_twice_counts_twice(heads: int, runner: Runner) -> None:
    call = random_call(heads=heads, topk=64)
    call.indices[:, 1::2] = call.indices[:, ::2]
    check_call(call, runner)


def test_a_nan_key_spoils_only_its_own_rows(runner: Runner) -> None:
    call = random_call(rows=3, heads=4, masked=0.0, num_pages=6, topk=100)
    named = torch.zeros(call.cache.num_slots, dtype=torch.bool)
    named[call.indices.long().flatten()] = True
    call.indices[1, 3] = (~named).nonzero()[0].to(torch.int32)
    out, lse = attend(call, runner)
    assert lse[1].isnan().all() and not lse[[0, 2]].isnan().any() and not out[[0, 2]].isnan().any()


# ------------------------------------------------------------------------------------------- empty in some direction


def test_no_rows(runner: Runner) -> None:
    call = random_call(rows=3)
    out, lse = attend(Call(call.q[:0], call.cache, call.indices[:0], {"softmax_scale": 1.0}), runner)
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


def test_no_columns(runner: Runner) -> None:
    call = random_call(rows=3, extra_topk=50, sink=True)
    kwargs = {**call.kwargs, "topk_lengths": None}
    check_call(Call(call.q, call.cache, call.indices[:, :0], kwargs), runner)
    check_call(Call(call.q, call.cache, call.indices[:, :0], {**kwargs, "extra": None}), runner)


def test_no_pages(runner: Runner) -> None:
    call = random_call(rows=2)
    empty = PagedKVCache.allocate(0, 64, call.cache.format)
    check_call(Call(call.q, empty, call.indices, call.kwargs), runner)


# ------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("fmt", [KVFormat.FP8_DS_MLA, KVFormat.FP8_V4, KVFormat.BF16], ids=format_id)
def test_query_as_a_pair(fmt: KVFormat, runner: Runner) -> None:
    call = random_call(fmt=fmt, heads=9)
    layout = call.cache.layout
    pair = (call.q[..., : layout.d_nope].clone(), call.q[..., layout.d_nope :].clone())
    whole = check_call(call, runner)
    parts = attend(Call(pair, call.cache, call.indices, call.kwargs), runner)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_query_pair_without_rotary_columns(runner: Runner) -> None:
    call = random_call(fmt=KVFormat.FP8_NOPE)
    check_call(Call((call.q, None), call.cache, call.indices, call.kwargs), runner)


def test_strides_of_everything(runner: Runner) -> None:
    """q as a batched product leaves it (heads outermost), outputs inside wider tensors, indices as a slice of
    columns."""
    call = to(random_call(rows=5, heads=6, topk=90, lengths=True), runner.device)
    want = reference_attention(*to(call, torch.device("cpu")).args, **to(call.kwargs, torch.device("cpu")))
    layout = call.cache.layout
    q_nope = call.q[..., : layout.d_nope].transpose(0, 1).contiguous().transpose(0, 1)
    wide_rope = torch.full((5, 6, 200), torch.nan, dtype=torch.bfloat16, device=runner.device)
    wide_rope[..., 40:104] = call.q[..., layout.d_nope :]
    wide_indices = torch.full((5, 131), 2**31 - 1, dtype=torch.int32, device=runner.device)
    wide_indices[:, 16:106] = call.indices
    wide_out = torch.full((5, 8, 1024), -7.0, dtype=torch.bfloat16, device=runner.device)
    wide_lse = torch.full((6, 5), torch.nan, device=runner.device)
    out, lse = sparse_mla_attention(
        (q_nope, wide_rope[..., 40:104]),
        call.cache,
        wide_indices[:, 16:106],
        **call.kwargs,
        out=wide_out[:, 1:7, 512:],
        lse=wide_lse.T,
    )
    assert out.data_ptr() == wide_out[:, 1:7, 512:].data_ptr() and lse.data_ptr() == wide_lse.data_ptr()
    check(wide_out[:, 1:7, 512:].cpu(), wide_lse.T.cpu(), *want)
    untouched = wide_out.clone()
    untouched[:, 1:7, 512:] = -7.0
    assert (untouched == -7.0).all()


def test_the_same_indices_for_every_row(runner: Runner) -> None:
    call = random_call(rows=4)
    check_call(Call(call.q, call.cache, call.indices[:1].expand(4, -1), {"softmax_scale": 0.05}), runner)


# ---------------------------------------------------------------------------------------- positions and block tables


def _positions_call(seed: int = 0, rows: int = 7, topk: int = 60) -> tuple[Call, torch.Tensor, torch.Tensor, list[int]]:
    """A call whose indices are positions in three requests; its block table; request ids; the requests' lengths."""
    gen = torch.Generator().manual_seed(seed)
    lengths, block = [130, 64, 75], 16
    table = pages_for_positions(lengths, block, 24, generator=gen)
    requests = torch.randint(0, 3, (rows,), generator=gen).to(torch.int32)
    limit = torch.tensor(lengths)[requests.long()].unsqueeze(1)
    positions = (torch.rand((rows, topk), generator=gen) * limit).to(torch.int32)
    positions[torch.rand(positions.shape, generator=gen) < 0.1] = -1
    slots = torch.tensor(
        [
            [int(table[int(requests[t]), int(p) // block]) * block + int(p) % block if p >= 0 else -1 for p in row]
            for t, row in enumerate(positions)
        ]
    )
    cache = random_cache(24, block, KVFormat.FP8_DS_MLA, slots=slots[slots >= 0], generator=gen)
    call = Call(random_query(rows, 8, 576, generator=gen), cache, positions, {"softmax_scale": 0.05})
    return call, slots.to(torch.int32), table, lengths, requests


def test_positions_equal_slots(runner: Runner) -> None:
    call, slots, table, _, requests = _positions_call()
    by_slot = check_call(Call(call.q, call.cache, slots, call.kwargs), runner)
    by_position = attend(call, runner, block_table=table, request_ids=requests)
    assert torch.equal(by_slot[0], by_position[0]) and torch.equal(by_slot[1], by_position[1])


def test_a_block_table_with_wider_rows(runner: Runner) -> None:
    call, slots, table, _, requests = _positions_call(seed=1)
    wide = torch.full((3, table.shape[1] + 5), 2**31 - 1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    moved = to(wide, runner.device)[:, : table.shape[1]]
    got = attend(call, runner, block_table=moved, request_ids=requests)
    check(*got, *reference_attention(call.q, call.cache, slots, **call.kwargs))


def test_positions_that_name_nothing(runner: Runner) -> None:
    """Past the block table, pages outside the pool, request ids out of range."""
    call, slots, table, _, requests = _positions_call(seed=2)
    call.indices[0, :5] = torch.tensor([table.shape[1] * 16, 2**31 - 1, -(2**31), 0x7FC00000, -2], dtype=torch.int32)
    slots[0, :5] = -1
    victim = int(requests[1])
    page = int(table[victim, 0])
    for garbage in (-1, 24, 2**31 - 1, -(2**31)):
        bad = table.clone()
        bad[victim, 0] = garbage
        rows = requests == victim
        hidden = slots.clone()
        hidden[rows] = torch.where(hidden[rows] // 16 == page, -1, hidden[rows])
        got = attend(call, runner, block_table=bad, request_ids=requests)
        check(*got, *reference_attention(call.q, call.cache, hidden, **call.kwargs))
    ids = requests.clone()
    ids[3], ids[4], ids[5] = -1, 3, 2**31 - 1
    slots[3:6] = -1
    got = attend(call, runner, block_table=table, request_ids=ids)
    check(*got, *reference_attention(call.q, call.cache, slots, **call.kwargs))
    assert (got[1][3:6] == -torch.inf).all()


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (4, 1), (3, 16), (4, 64)])
def test_context_shards_together_are_the_whole(world: int, interleave: int, runner: Runner) -> None:
    """Each rank attends what it holds; merged by their lse the ranks' answers are the answer."""
    gen = torch.Generator().manual_seed(3)
    lengths, block, heads, rows, topk = [200, 90], 8, 4, 5, 70
    kv = [torch.randn((length, 576), generator=gen).to(torch.bfloat16) for length in lengths]
    requests = torch.tensor([0, 1, 0, 1, 0], dtype=torch.int32)
    limit = torch.tensor(lengths)[requests.long()].unsqueeze(1)
    positions = (torch.rand((rows, topk), generator=gen) * limit).to(torch.int32)
    positions[:, 5] = -1
    q = random_query(rows, heads, 576, generator=gen)

    outs, lses = [], []
    for rank in range(world):
        held = [[p for p in range(n) if p // interleave % world == rank] for n in lengths]
        local_lengths = [len(p) for p in held]
        # Whole runs: a rank may have room for positions its request has not reached.
        local = [[p // (interleave * world) * interleave + p % interleave for p in ps] for ps in held]
        assert [sorted(p) for p in local] == [list(range(n)) for n in local_lengths]
        table = pages_for_positions(local_lengths, block, 64, generator=gen)
        cache = random_cache(64, block, KVFormat.FP8_DS_MLA, slots=torch.empty(0, dtype=torch.int64))
        for request, (ps, ls) in enumerate(zip(held, local, strict=True)):
            slots = torch.tensor([int(table[request, n // block]) * block + n % block for n in ls], dtype=torch.int64)
            cache.write(slots, kv[request][ps])
        shard = {"block_table": table, "request_ids": requests, "context_shard": (rank, world, interleave)}
        out, lse = attend(Call(q, cache, positions, {"softmax_scale": 0.05}), runner, **shard)
        outs.append(out.double())
        lses.append(lse.double())

    whole = random_cache(400, 1, KVFormat.FP8_DS_MLA, slots=torch.empty(0, dtype=torch.int64))
    for request, vectors in enumerate(kv):
        whole.write(torch.arange(len(vectors)) + 200 * request, vectors)
    slots = torch.where(positions >= 0, positions + 200 * requests.unsqueeze(1), -1).to(torch.int32)
    want_out, want_lse = reference_attention(q, whole, slots, softmax_scale=0.05)
    merged_lse = torch.stack(lses).logsumexp(dim=0)
    weights = (torch.stack(lses) - merged_lse).exp().unsqueeze(-1)
    check((weights * torch.stack(outs)).sum(dim=0), merged_lse, want_out, want_lse)


# ------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
@pytest.mark.parametrize("rows_per_request", [1, 3])
def test_split_plans(num_sms: int, rows_per_request: int, runner: Runner) -> None:
    rows, heads = 6, 16
    call = random_call(rows=rows, heads=heads, topk=400, num_pages=8, lengths=True, sink=True, extra_topk=150)
    plan = SplitSchedule.plan(
        requests=rows // rows_per_request,
        heads=heads,
        topk=400,
        rows_per_request=rows_per_request,
        topk_lengths=call.kwargs["topk_lengths"],
        extra_topk=150,
        extra_topk_lengths=call.kwargs["extra"][2],
        num_sms=num_sms,
    )
    assert plan.nothing_split or num_sms > 1
    assert num_sms < 132 or not plan.nothing_split
    check_call(call, runner, schedule=plan)


def test_a_long_context_over_many_parts(runner: Runner) -> None:
    """Partial reductions past the first few pieces were once lost: 35K keys over 132 parts."""
    call = random_call(rows=1, heads=8, topk=35000, num_pages=40, masked=0.02)
    plan = SplitSchedule.plan(requests=1, heads=8, topk=35000)
    assert plan.accumulator_slots > 60
    check_call(call, runner, schedule=plan)


@pytest.mark.parametrize("planned", [0, 64, 100, 399, 400])
def test_a_plan_made_from_other_lengths_is_slower_not_wrong(planned: int, runner: Runner) -> None:
    call = random_call(rows=4, heads=4, topk=400, num_pages=8, lengths=True, extra_topk=150)
    plan = SplitSchedule.plan(
        requests=4,
        heads=4,
        topk=400,
        topk_lengths=[planned] * 4,
        extra_topk=150,
        extra_topk_lengths=[150 - planned // 3] * 4,
    )
    check_call(call, runner, schedule=plan)


def test_unsplit_rows_have_the_same_bits_in_every_batch(runner: Runner) -> None:
    for topk in (40, 700):
        call = random_call(rows=19, heads=16, topk=topk, num_pages=12, lengths=True)
        kwargs = call.kwargs
        whole = attend(call, runner, schedule=SplitSchedule.unsplit(19))
        for first, end in ((0, 1), (4, 5), (3, 11), (1, 19)):
            cut = {**kwargs, "topk_lengths": kwargs["topk_lengths"][first:end]}
            part = attend(
                Call(call.q[first:end], call.cache, call.indices[first:end], cut),
                runner,
                schedule=SplitSchedule.unsplit(end - first),
            )
            assert torch.equal(part[0], whole[0][first:end]) and torch.equal(part[1], whole[1][first:end])


def test_the_same_inputs_give_the_same_bits(runner: Runner) -> None:
    call = random_call(rows=5, heads=16, topk=300, num_pages=8)
    for schedule in (None, SplitSchedule.plan(requests=5, heads=16, topk=300)):
        first = attend(call, runner, schedule=schedule)
        again = attend(call, runner, schedule=schedule)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


# ------------------------------------------------------------------------------------------------ extreme numbers


@pytest.mark.parametrize("size", [1e-30, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("heads", [4, 64])
def test_queries_of_any_size(size: float, heads: int, runner: Runner) -> None:
    call = random_call(rows=2, heads=heads, topk=100, masked=0.3)
    big = (call.q.float() / call.q.float().abs().amax() * size).to(torch.bfloat16)
    assert big.isfinite().all()
    out, lse = attend(Call(big, call.cache, call.indices, call.kwargs), runner)
    assert not out.isnan().any() and not lse.isnan().any()
    want_out, want_lse = reference_attention(big, call.cache, call.indices, **call.kwargs)
    assert relative_error(out, want_out) <= OUT_TOLERANCE
    finite = want_lse.abs() < 3e38
    assert (lse.double() - want_lse)[finite].abs().le(LSE_TOLERANCE * want_lse[finite].abs().clamp_min(1.0)).all()


@pytest.mark.parametrize("spoilt", [0, 3])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("rows", [2, 140])
def test_a_nan_query_spoils_only_its_own_head(rows: int, heads: int, spoilt: int, runner: Runner) -> None:
    """A tile's first head once decided for the others whether a block had a key: what they kept of earlier blocks was
    dropped.

    140 rows fill a GPU, so that one part sees all blocks of a row.
    """
    if rows > 2 and runner.name != "cuda":
        pytest.skip("only a GPU's kernels cut a row by how many there are")
    call = random_call(rows=rows, heads=heads, topk=500, num_pages=8)
    want_out, want_lse = reference_attention(*call.args, **call.kwargs)
    call.q[:, spoilt, 5] = torch.nan
    out, lse = attend(call, runner)
    assert out[:, spoilt].isnan().all()
    others = torch.arange(heads) != spoilt
    check(out[:, others], lse[:, others], want_out[:, others], want_lse[:, others])


@pytest.mark.parametrize("scale", [0.0, -0.05, 1.0, 1e-20])
def test_softmax_scales(scale: float, runner: Runner) -> None:
    call = random_call(rows=2, heads=8)
    check_call(Call(*call.args, {**call.kwargs, "softmax_scale": scale}), runner)


def test_an_integer_scale(runner: Runner) -> None:
    call = random_call(rows=1, heads=2)
    check_call(Call(*call.args, {**call.kwargs, "softmax_scale": 1}), runner)


# ------------------------------------------------------------------------------------------- what a call allocates


class Allocations(TorchDispatchMode):
    """Remembers the sizes of all tensors that operators return and that are no views of what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.shapes.append(tuple(tensor.shape))
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


def _accumulators(allocations: Allocations) -> list[tuple[int, ...]]:
    return [shape for shape in allocations.shapes if len(shape) == 4 and shape[-1] == 513]


def test_accumulators_exist_only_when_something_is_split() -> None:
    call = random_call(rows=4, heads=16, topk=640, num_pages=12)
    cpu = Runner(torch.device("cpu"), "cpu")
    split = SplitSchedule.plan(requests=4, heads=16, topk=640)
    whole = SplitSchedule.plan(requests=1, rows_per_request=4, heads=16, topk=640, num_sms=4)
    assert whole.nothing_split and whole.splitting and not split.nothing_split
    with Allocations() as seen:
        attend(call, cpu, schedule=split)
    assert _accumulators(seen) == [split.accumulator_shape]
    for schedule in (whole, SplitSchedule.unsplit(4), None):
        with Allocations() as seen:
            attend(call, cpu, schedule=schedule)
        assert _accumulators(seen) == []


def test_memory_grows_neither_with_the_pool_nor_with_topk() -> None:
    """Nothing larger than one tile of keys: 1024 records of float32, whatever the pool (13 MB here) and topk are."""
    largest = []
    for topk in (1100, 4000):
        call = random_call(rows=2, heads=16, topk=topk, num_pages=320)
        outputs = poisoned_outputs(2, 16, torch.device("cpu"))
        with Allocations() as seen:
            sparse_mla_attention(*call.args, **call.kwargs, **outputs)
        largest.append(seen.largest_bytes)
    assert largest[0] == largest[1] <= 1024 * 576 * 4


def test_scratch_bytes_of_the_kernels() -> None:
    call = random_call(rows=4, heads=16, topk=640)
    plan = SplitSchedule.plan(requests=4, heads=16, topk=640)
    made = AttentionCall.plain(call.q, call.cache, call.indices, schedule=plan)
    blockwise = registry.kernel("cpu")
    assert blockwise.scratch_bytes(made) == plan.accumulator_bytes > 0
    assert blockwise.scratch_bytes(dataclasses.replace(made, schedule=None)) == 0
    assert blockwise.plan(requests=4) is None
    assert registry.select(made) is blockwise
    assert "the call is on cpu" in str(registry.kernel("hopper").why_not(made))
    with pytest.raises(ValueError, match="kernel: got 'none'"):
        registry.kernel("none")


# ------------------------------------------------------------------------------------------------------- GPU only


def _cuda_call(runner: Runner) -> Call:
    if runner.device.type != "cuda":
        pytest.skip("about CUDA")
    return random_call(rows=6, heads=16, topk=300, num_pages=8, lengths=True, sink=True, extra_topk=100)


@pytest.mark.gpu
def test_no_host_synchronisation(runner: Runner) -> None:
    call = to(_cuda_call(runner), runner.device)
    plan = SplitSchedule.plan(requests=6, heads=16, topk=300, extra_topk=100)
    for schedule in (None, plan):
        sparse_mla_attention(*call.args, **call.kwargs, schedule=schedule)  # compilation may synchronise
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sparse_mla_attention(*call.args, **call.kwargs, schedule=schedule)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_graph_replay_after_everything_changed_in_place(runner: Runner) -> None:
    """A replay sees new lengths, indices and queries; padded rows with stale garbage stay without keys."""
    host = _cuda_call(runner)
    call = to(host, runner.device)
    outputs = poisoned_outputs(6, 16, runner.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sparse_mla_attention(*call.args, **call.kwargs, **outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_attention(*call.args, **call.kwargs, **outputs)

    gen = torch.Generator().manual_seed(5)
    named = host.cache.read(torch.arange(host.cache.num_slots)).isfinite().all(dim=1).nonzero().flatten()
    indices = named[torch.randint(0, len(named), (6, 300), generator=gen)].to(torch.int32)
    indices[4:] = 0x7FC00000
    lengths = torch.tensor([300, 1, 64, 299, 300, 2**31 - 1], dtype=torch.int32)
    host.q.copy_(random_query(6, 16, 576, generator=gen))
    host.indices.copy_(indices)
    host.kwargs["topk_lengths"].copy_(lengths)
    host.kwargs["extra"][2].zero_()
    for moved, kept in ((call.q, host.q), (call.indices, host.indices)):
        moved.copy_(kept)
    call.kwargs["topk_lengths"].copy_(host.kwargs["topk_lengths"])
    call.kwargs["extra"][2].zero_()
    outputs["out"].fill_(torch.nan)
    outputs["lse"].fill_(torch.nan)
    graph.replay()
    check(outputs["out"].cpu(), outputs["lse"].cpu(), *reference_attention(*host.args, **host.kwargs))


@pytest.mark.gpu
def test_nothing_but_the_outputs_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond out and lse no device memory is taken but the scratch that the kernel names, whoever answers."""
    select, named = registry.select, []

    def remember(call: AttentionCall) -> registry.Kernel:
        chosen = select(call)
        named.append(chosen.scratch_bytes(call))
        return chosen

    monkeypatch.setattr(registry, "select", remember)
    call = to(random_call(rows=64, heads=16, topk=512, num_pages=16), torch.device("cuda"))
    outputs = poisoned_outputs(64, 16, torch.device("cuda"))
    sparse_mla_attention(*call.args, **call.kwargs, **outputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sparse_mla_attention(*call.args, **call.kwargs, **outputs)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    rounding = 2 * 512 if named[-1] else 0  # two tensors of accumulators, each rounded up by the allocator
    assert named[-1] <= taken <= named[-1] + rounding, f"{taken} bytes of device memory, {named[-1]} named"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("fmt", [KVFormat.FP8_DS_MLA, KVFormat.BF16], ids=format_id)
def test_caches_past_two_to_the_31(fmt: KVFormat) -> None:
    """656 bytes · 4M records pass 2^31 bytes; 576 columns · 4M pass 2^31 elements."""
    runner = Runner(torch.device("cuda"), "cuda")
    layout = record_layout(fmt)
    records = 2**31 // min(layout.record_bytes, layout.d_qk) + 4096
    cache = PagedKVCache.allocate(-(-records // 64), 64, fmt, device=runner.device)
    ends = torch.cat((torch.arange(100), torch.arange(cache.num_slots - 100, cache.num_slots)))
    kv = torch.randn((200, cache.d_qk)).to(torch.bfloat16)
    cache.write(ends.to(runner.device), kv.to(runner.device))
    # The same bytes: a device may round a scale differently when it quantises.
    small = PagedKVCache.allocate(4, 50, fmt)
    small.data.view(torch.uint8).view(200, -1).copy_(cache.gather_bytes(ends.to(runner.device)).cpu().view(200, -1))
    choice = random_indices(5, 128, 200, masked=0.1)
    far = torch.where(choice >= 0, ends[choice.clamp_min(0).long()], -1).to(torch.int32)
    q = random_query(5, 16, cache.d_qk)
    out, lse = sparse_mla_attention(q.cuda(), cache, far.cuda(), softmax_scale=0.05)
    check(out.cpu(), lse.cpu(), *reference_attention(q, small, choice, softmax_scale=0.05))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("rows", [70_000, 2**20 + 3])
def test_more_rows_than_a_grid_dimension_holds(rows: int) -> None:
    """65,535 blocks in y and z; a million query rows."""
    host = random_call(rows=8, heads=2, topk=64)
    call = to(host, torch.device("cuda"))
    repeats = -(-rows // 8)
    q, indices = call.q.repeat(repeats, 1, 1)[:rows], call.indices.repeat(repeats, 1)[:rows]
    out, lse = sparse_mla_attention(q, call.cache, indices, softmax_scale=0.05)
    want_out, want_lse = reference_attention(*host.args, softmax_scale=0.05)
    check(out[:8].cpu(), lse[:8].cpu(), want_out, want_lse)
    assert torch.equal(out[-8:], out[rows % 8 :][:8]) and torch.equal(lse[-8:], lse[rows % 8 :][:8])
    assert torch.equal(out[8 : rows // 8 * 8].view(-1, 8, 2, 512), out[:8].expand(rows // 8 - 1, 8, 2, 512))
