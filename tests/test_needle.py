# SPDX-License-Identifier: Apache-2.0
"""Needles in long contexts: `sparsemla check --needle`, small and at the real lengths, on one rank and on two."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import time

import pytest
import torch

from sparsemla.cli import _check_needle as needle
from sparsemla.cli.app import main
from sparsemla.serving.host_cache.cache import HostCache

CPU = torch.device("cpu")


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
    sizes = dataclasses.replace(needle.SMALL, lengths=(3_001,))
    first, second = (needle.run_needle(CPU, sizes=sizes, seed=seed) for seed in (1, 2))
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
    report = needle.run_needle(CPU, sizes=dataclasses.replace(needle.SMALL, lengths=(3_001,)))
    assert not report.agrees and report.runs[0].agrees and not report.runs[1].agrees


def test_a_needle_that_is_not_chosen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle, "_index_scores", lambda queries, weights, keys: -(queries[:, 0] @ keys.T))
    report = needle.run_needle(CPU, sizes=dataclasses.replace(needle.SMALL, lengths=(3_001,)))
    assert not any(report.runs[0].retrieved) and not report.agrees


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--needle"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("3 of 3") == 4 and "Everything agrees." in printed
    assert main(["check", "--needle", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agreed"] and len(report["runs"]) == 4 and report["depths"] == [0.1, 0.5, 0.9]


RANK = """
import sys, torch
torch.set_num_threads(1)
from sparsemla.cli import _check_needle as needle
from sparsemla.serving.config import Parallelism
from sparsemla.serving.context_parallel.ranks import Ranks
rank, port, comm = int(sys.argv[1]), sys.argv[2], sys.argv[3]
parallel = Parallelism(tp=2, dcp=2, interleave=16, dcp_comm=comm)
with Ranks.connect(
    parallel, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout_s=60
) as ranks:
    report = needle.run_needle(torch.device("cpu"), dcp_group=ranks)
for run in report.runs:
    assert run.agrees, run
    assert all(run.retrieved) and run.replays_equal
ways = [run.way for run in report.runs[:4]]
assert ways == ["one rank", "host cache", "dcp 2", "dcp 2, host cache"], ways
assert report.agrees
"""


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_two_ranks_share_the_context(comm: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(port), comm], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    deadline = time.monotonic() + 120
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=deadline - time.monotonic())
            assert rank.returncode == 0, errors[-3000:]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()


@pytest.mark.gpu
def test_the_real_lengths_on_a_gpu() -> None:
    report = needle.run_needle(torch.device("cuda"))
    for run in report.runs:
        assert run.agrees, run
    assert report.agrees and len(report.runs) == 4
