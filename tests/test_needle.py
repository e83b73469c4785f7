# SPDX-License-Identifier: Apache-2.0
"""Needles in long contexts: `sparsemla check --needle`, small and at the real lengths, on one rank and on two."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from context_ranks import run_ranks
from sparsemla.cli import _check_needle as needle
from sparsemla.cli.app import main
from sparsemla.serving.config import Parallelism
from sparsemla.serving.context_parallel.ranks import Ranks
from sparsemla.serving.host_cache import HostCache

CPU = torch.device("cpu")
ONE = dataclasses.replace(needle.SMALL, lengths=(3_001,))


def test_small_contexts_on_one_rank() -> None:
    report = needle.run_needle(CPU)
    assert report.agrees
    assert [(run.length, run.way) for run in report.runs] == [
        (length, way) for length in needle.SMALL.lengths for way in ("one rank", "host cache")
    ]
    for run in report.runs:
        assert run.retrieved == (True, True, True) and run.same_bits_as_single
        if run.way == "host cache":
            cold, replay, displaced = run.misses
            assert cold > 2 * needle.SMALL.topk and replay == 0 and displaced > cold // 2
            assert run.bytes_to_device % 656 == 0


def test_another_seed_is_another_haystack() -> None:
    first, second = (needle.run_needle(CPU, sizes=ONE, seed=seed) for seed in (1, 2))
    assert first.agrees and second.agrees
    assert first.oracle_errors != second.oracle_errors


@pytest.mark.slow
def test_the_real_lengths_on_one_rank() -> None:
    report = needle.run_needle(CPU, sizes=needle.FULL)
    assert report.agrees and {run.length for run in report.runs} == {230_456, 544_235}


def test_a_wrong_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is no formality: a host cache that brings one wrong byte a record fails it."""
    bring = HostCache.bring

    def wrong(self: HostCache, *args, **kwargs):
        hot, slots = bring(self, *args, **kwargs)
        hot.data[0, 7, 300] ^= 0x40
        return hot, slots

    monkeypatch.setattr(HostCache, "bring", wrong)
    report = needle.run_needle(CPU, sizes=ONE)
    assert not report.agrees and report.runs[0].agrees and not report.runs[1].agrees


def test_a_needle_that_is_not_chosen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle, "_index_scores", lambda queries, weights, keys: -(queries[:, 0] @ keys.T))
    report = needle.run_needle(CPU, sizes=ONE)
    assert not any(report.runs[0].retrieved) and not report.agrees


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--needle"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("3 of 3") == 4 and "Everything agrees." in printed
    assert main(["check", "--needle", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agreed"] and len(report["runs"]) == 4 and report["depths"] == [0.1, 0.5, 0.9]


def over_ranks(rank: int, world: int, init_method: str, comm: str) -> needle.NeedleReport:
    parallel = Parallelism(tp=world, dcp=world, interleave=16, dcp_comm=comm)
    with Ranks.connect(parallel, init_method=init_method, rank=rank, world_size=world, timeout_s=60) as ranks:
        return needle.run_needle(CPU, dcp_group=ranks)


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_two_ranks_share_the_context(comm: str, tmp_path: Path) -> None:
    for ended in run_ranks(2, over_ranks, comm, where=tmp_path):
        assert not ended.error, ended
        ways = [run.way for run in ended.result.runs[:4]]
        assert ways == ["one rank", "host cache", "dcp 2", "dcp 2, host cache"]
        for run in ended.result.runs:
            assert run.agrees and all(run.retrieved) and run.replays_equal, run
        assert ended.result.agrees


@pytest.mark.gpu
def test_the_real_lengths_on_a_gpu() -> None:
    report = needle.run_needle(torch.device("cuda"))
    for run in report.runs:
        assert run.agrees, run
    assert report.agrees and len(report.runs) == 4
