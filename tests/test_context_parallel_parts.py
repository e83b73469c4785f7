# SPDX-License-Identifier: Apache-2.0
"""The parts without ranks: who is what, the algebra of partial answers, which rows of a prefill a rank runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemla.cli.app import main
from sparsemla.serving.config import Parallelism
from sparsemla.serving.context_parallel.grid import GROUP_NAMES, RankGrid, all_groups
from sparsemla.serving.context_parallel.merge import merge_parts, sink_gate, total_lse, weight_of
from sparsemla.serving.context_parallel.prefill import PrefillSplit
from sparsemla.serving.metadata import Batch, count_decodes

INF = float("inf")


def grids() -> list[Parallelism]:
    found = []
    for tp in (1, 2, 4):
        for pcp in (1, 2, 4):
            for dcp in (1, 2, 4, 8):
                if (tp * pcp) % dcp == 0 and (pcp % dcp == 0 or dcp % pcp == 0) and tp % max(dcp // pcp, 1) == 0:
                    found.append(Parallelism(tp=tp, dcp=dcp, pcp=pcp))
    return found


@pytest.mark.parametrize("parallel", grids(), ids=lambda p: f"tp{p.tp}-dcp{p.dcp}-pcp{p.pcp}")
def test_ranks_fall_into_groups(parallel: Parallelism) -> None:
    ranks = [RankGrid(parallel, rank) for rank in range(parallel.world)]
    for name, size in zip(
        GROUP_NAMES, (parallel.dcp, ranks[0].head_ranks, ranks[0].copy_ranks, parallel.pcp), strict=True
    ):
        groups = all_groups(parallel, name)
        assert sorted(rank for group in groups for rank in group) == list(range(parallel.world))
        assert {len(group) for group in groups} == {size} and all(list(group) == sorted(group) for group in groups)
    for grid in ranks:
        # torch.distributed numbers the members of a group by their rank: gathered shards come in the order of shards.
        assert [ranks[member].shard for member in grid.members("dcp")] == list(range(parallel.dcp))
        assert {ranks[member].tp_rank for member in grid.members("copies")} == {grid.tp_rank}
        assert {ranks[member].pcp_rank for member in grid.members("heads")} == {grid.pcp_rank}
        assert set(grid.members("heads")) | set(grid.members("copies")) <= set(grid.members("dcp"))
        assert grid.head_ranks * grid.copy_ranks == parallel.dcp


def test_ranks_that_cannot_share_a_cache() -> None:
    with pytest.raises(ValueError, match="dcp: got 3 with tp 3 and pcp 2, accepted is a divisor of pcp, or pcp times"):
        RankGrid(Parallelism(tp=3, dcp=3, pcp=2), 0)
    with pytest.raises(ValueError, match=r"rank: got 4, accepted are 0 to 3 \(tp 2 · pcp 2\)"):
        RankGrid(Parallelism(tp=2, pcp=2), 4)
    with pytest.raises(ValueError, match="name: got 'all', accepted are dcp, heads, copies, pcp"):
        RankGrid(Parallelism(), 0).members("all")


def merged(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    out = torch.full(outs.shape[1:], torch.nan, dtype=torch.bfloat16)
    lse = torch.full(lses.shape[1:], torch.nan)
    merge_parts(outs, lses, sink=sink, scratch=torch.full(outs.shape[1:], torch.nan), out=out, lse=lse)
    return out, lse


def test_parts_merge_to_the_softmax_over_all_keys() -> None:
    logits, values = torch.randn(3, 5, 40, dtype=torch.float64) * 4, torch.randn(40, 512, dtype=torch.float64)
    cuts = [slice(0, 1), slice(1, 30), slice(30, 40)]
    lses = torch.stack([logits[..., cut].logsumexp(-1) for cut in cuts]).float()
    outs = torch.stack([logits[..., cut].softmax(-1) @ values[cut] for cut in cuts]).bfloat16()
    sink = torch.randn(5)
    want = logits.softmax(-1) @ values
    whole = logits.logsumexp(-1)
    out, lse = merged(outs, lses)
    assert (out.double() - want).norm() < 4e-3 * want.norm()
    torch.testing.assert_close(lse.double(), whole, atol=1e-6, rtol=1e-6)
    gated, same = merged(outs, lses, sink)
    expected = want * (whole.exp() / (whole.exp() + sink.double().exp())).unsqueeze(-1)
    assert (gated.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(same, lse)  # the sink is no key


def test_a_part_without_keys_is_the_identity_and_no_keys_at_all_are_nothing() -> None:
    outs = torch.randn(2, 3, 4, 512).bfloat16()
    lses = torch.randn(2, 3, 4) * 200  # exp of these overflows and vanishes
    lses[1] = -INF
    outs[1] = 0
    out, lse = merged(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])
    lses[0, 1] = -INF
    outs[0, 1] = 0
    for sink in (None, torch.tensor([0.0, INF, -INF, 3.0])):
        out, lse = merged(outs, lses, sink)
        assert not out[1].any() and bool(torch.isneginf(lse[1]).all()) and not out.isnan().any()
    assert not out[:, 1].any()  # a sink of +inf takes everything
    assert torch.equal(out[:, 2], outs[0, :, 2])  # one of -inf nothing


def test_weights_and_gates_at_the_edges() -> None:
    parts = torch.tensor([[0.0, -INF, -INF, 1e30], [0.0, 5.0, -INF, -1e30]])
    total = total_lse(parts)
    assert total.tolist() == [pytest.approx(0.6931472), 5.0, -INF, pytest.approx(1e30)]
    assert weight_of(parts[0], total).tolist() == [pytest.approx(0.5), 0.0, 0.0, 1.0]
    assert weight_of(parts[1], total).tolist() == [pytest.approx(0.5), 1.0, 0.0, 0.0]
    gates = sink_gate(torch.tensor([[0.0, -INF, 0.0]]), torch.tensor([0.0, -INF, -INF]))
    assert gates.tolist() == [[0.5, 0.0, 1.0]]


@given(
    decodes=st.lists(st.integers(0, 3), max_size=4),
    prefills=st.lists(st.integers(4, 40), max_size=4),
    world=st.sampled_from([1, 2, 3, 4]),
)
def test_prefill_rows_are_dealt_out_evenly(decodes: list[int], prefills: list[int], world: int) -> None:
    query_lens = decodes + prefills
    table = torch.zeros((len(query_lens), 1), dtype=torch.int32)
    batch = Batch(query_lens, [100] * len(query_lens), table, padded_tokens=None)
    splits = [PrefillSplit.of(batch, decode_query_len=3, rank=rank, world=world) for rank in range(world)]
    count, tokens = sum(decodes), sum(query_lens)
    padded = {split.batch.padded_tokens for split in splits}
    assert len(padded) == 1 and padded == {max(len(split.rows) for split in splits)}
    rows = [row for split in splits for row in split.rows[count:].tolist()]
    assert sorted(rows) == list(range(count, tokens))
    whole = torch.randperm(tokens)
    gathered = torch.cat([split.select(whole) for split in splits])
    for rank, split in enumerate(splits):
        assert split.rows[:count].tolist() == list(range(count))
        assert split.batch.num_decodes == count_decodes(query_lens, 3) == len(decodes)
        assert sum(split.batch.query_lens) == len(split.rows)
        assert torch.equal(gathered[split.source], whole)
        without = torch.cat([other.select(whole)[count:] for other in splits])
        assert torch.equal(without[split.prefill_source], whole[count:])
        # Two consecutive chunks a request, an early and a late one, of lengths that differ by at most one.
        at = count
        start = count
        for length, mine in zip(prefills, split.batch.query_lens[len(decodes) :], strict=True):
            cuts = [start + length * i // (2 * world) for i in range(2 * world + 1)]
            late = 2 * world - 1 - rank
            want = [*range(cuts[rank], cuts[rank + 1]), *range(cuts[late], cuts[late + 1])]
            assert split.rows[at : at + mine].tolist() == want
            assert abs(mine - length / world) <= 2
            at, start = at + mine, start + length


def test_a_captured_decode_batch_keeps_its_rows() -> None:
    table = torch.zeros((2, 1), dtype=torch.int32)
    split = PrefillSplit.of(Batch([1, 3], [9, 9], table, 16), decode_query_len=3, rank=1, world=2)
    assert (split.batch.padded_tokens, split.batch.num_decodes, split.rows.tolist()) == (16, 2, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="rank: got 2, accepted are 0 to 1"):
        PrefillSplit.of(Batch([1], [1], table), decode_query_len=1, rank=2, world=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--dcp", "2"],
            "--dcp: got 2 with no torchrun around it, accepted is torchrun --nproc-per-node 2",
        ),
        (["--dcp", "3"], "--dcp: got 3, accepted are 2, 4, 8, 16, 32 and 64"),
        (["--dcp", "2", "--device", "cuda:1"], "--device: got 'cuda:1' with --dcp, accepted are cpu and cuda"),
    ],
)
def test_check_over_ranks_says_how_it_is_started(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_check_over_two_ranks_agrees() -> None:
    """`torchrun ... sparsemla check --device cpu --dcp 2`: one report, exit status 0 on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "sparsemla.cli.app", "check", "--device", "cpu", "--dcp", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Everything agrees.") == 1 and "dcp 2" in done.stdout
