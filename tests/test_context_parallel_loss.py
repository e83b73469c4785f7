# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, stops, hangs or never comes, and ranks configured differently: the others end with its name."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from context_cases import Spec, run_case
from context_ranks import Ended, run_ranks
from sparsemla import audit
from sparsemla.serving.config import Parallelism
from sparsemla.serving.context_parallel.exchange import exchange_for
from sparsemla.serving.context_parallel.ranks import Ranks
from sparsemla.serving.paths import decide

TIMEOUT_S = 3.0
"""Given to the ranks; they have to end within this and the grace for a last word, not long after."""
GRACE_S = 1.0
CPU = torch.device("cpu")


def lose_a_rank(rank: int, world: int, init_method: str, spec: Spec, loser: int, how: str) -> None:
    """Every rank runs steps; one is lost in the second."""
    config = spec.config()
    with Ranks.connect(
        config.parallel, init_method=init_method, rank=rank, world_size=world, timeout_s=TIMEOUT_S, grace_s=GRACE_S
    ) as ranks:
        run_case(spec, ranks, seed=0, device=CPU)
        exchange = exchange_for(ranks, config, decide(config, spec.policy))
        if rank == loser and how == "hangs":
            time.sleep(TIMEOUT_S + GRACE_S + 2)
            return
        q = torch.zeros(4, spec.heads, config.layout.d_qk, dtype=torch.bfloat16)
        out = torch.empty(4, spec.heads, 512, dtype=torch.bfloat16)

        def partial(*_: Any) -> None:
            if rank == loser and how == "dies":
                os._exit(1)
            if rank == loser and how == "stops":
                raise ArithmeticError("no luck")

        with ranks.watch():
            buffers = exchange.buffers(4, CPU)
            exchange.attend(q, partial, buffers=buffers, out=out, lse=torch.empty(4, spec.heads))


LOSSES = {
    "2 ranks, dies": (2, Spec(2, 2, 1), "dies"),
    "2 ranks, hangs": (2, Spec(2, 2, 1), "hangs"),
    "4 ranks, dies": (4, Spec(4, 4, 1, comm="a2a"), "dies"),
    "4 ranks, stops": (4, Spec(4, 4, 1), "stops"),
    "4 ranks of the same heads, dies": (4, Spec(1, 4, 4), "dies"),
    "4 ranks of the same and other heads, dies": (4, Spec(2, 4, 2), "dies"),
}


@pytest.mark.parametrize(("world", "spec", "how"), LOSSES.values(), ids=LOSSES)
def test_the_others_name_a_lost_rank(world: int, spec: Spec, how: str, tmp_path: Path) -> None:
    loser = world - 1
    ended = run_ranks(world, lose_a_rank, spec, loser, how, where=tmp_path, limit_s=30)
    said = {"dies": "is gone or does not answer", "stops": "stopped: ArithmeticError: no luck"}
    for rank, end in enumerate(ended):
        if rank == loser:
            assert end.error == {"dies": "died", "stops": "ArithmeticError", "hangs": ""}[how], end
            continue
        assert end.error == "RankLostError", end
        assert f"rank {loser} {said.get(how, 'is gone or does not answer')}" in end.message
        assert not [other for other in range(world) if other != loser and f"rank {other} is gone" in end.message]
        assert end.seconds < TIMEOUT_S + GRACE_S + 4, "the start, a step and the timeout take less"


def meet(rank: int, world: int, init_method: str, given: list[tuple[Spec, dict[str, Any]]]) -> None:
    spec, changes = given[rank]
    config = spec.config()
    facts = {name: changes.pop(name) for name in ("dtype",) if name in changes}
    world = changes.pop("world", world)
    if "max_model_len" in changes:
        config = dataclasses.replace(config, limits=dataclasses.replace(config.limits, **changes))
    with Ranks.connect(
        config.parallel, init_method=init_method, rank=rank, world_size=world, timeout_s=TIMEOUT_S, grace_s=GRACE_S
    ) as ranks:
        exchange_for(ranks, config, decide(config, spec.policy), **facts)


SAME = Spec(2, 2, 1, 4)
DIFFERENT: dict[str, tuple[Spec, dict[str, Any], str]] = {
    "interleave": (Spec(2, 2, 1, 8), {}, "interleave: rank 1 has 8, rank 0 has 4"),
    "dcp": (Spec(2, 1, 1, 4), {}, "dcp: rank 1 has 1, rank 0 has 2"),
    "form": (Spec(2, 2, 1, 4, "a2a"), {}, "dcp_comm: rank 1 has 'a2a', rank 0 has 'ag_rs'"),
    "world size": (SAME, {"world": 4}, "world size: rank 1 has 4, rank 0 has 2"),
    "format": (Spec(2, 2, 1, 4, fmt="bf16"), {}, "cache format: rank 1 has 'bf16', rank 0 has 'fp8_ds_mla'"),
    "heads": (Spec(2, 2, 1, 4, heads=16), {}, "heads: rank 1 has 16, rank 0 has 8"),
    "dtype": (SAME, {"dtype": torch.float16}, "query dtype: rank 1 has 'torch.float16', rank 0 has 'torch.bfloat16'"),
    "policy": (Spec(2, 2, 1, 4, policy="flashmla"), {}, "policy: rank 1 has 'flashmla', rank 0 has 'sparsemla'"),
    "length": (SAME, {"max_model_len": 100}, "max_model_len: rank 1 has 100, rank 0 has 200"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_configured_differently_say_what_differs(what: str, tmp_path: Path) -> None:
    spec, changes, words = DIFFERENT[what]
    for end in run_ranks(2, meet, [(SAME, {}), (spec, changes)], where=tmp_path, limit_s=30):
        assert end.error == "ConfigurationMismatchError", end
        assert words in end.message and "accepted is the same on every rank" in end.message
        assert end.seconds < TIMEOUT_S


def test_a_mismatch_of_one_rank_of_four_is_named_by_all(tmp_path: Path) -> None:
    given: list[tuple[Spec, dict[str, Any]]] = [(Spec(4, 4, 1, 4), {})] * 4
    given[2] = (Spec(4, 4, 1, 1), {})
    for end in run_ranks(4, meet, given, where=tmp_path, limit_s=30):
        assert end.error == "ConfigurationMismatchError", end
        assert "interleave: rank 2 has 1, rank 0 has 4" in end.message


def test_a_rank_that_is_refused_tells_the_others(tmp_path: Path) -> None:
    """Policy flashmla refuses DCP with 32 heads: only rank 1 runs it, and rank 0 hears why it stopped."""
    refused = Spec(2, 2, 1, 4, policy="flashmla", heads=32)
    ended = run_ranks(2, meet, [(Spec(2, 2, 1, 4, heads=32), {}), (refused, {})], where=tmp_path, limit_s=30)
    assert ended[1].error == "ValueError" and "dcp: got 2 with 32 heads" in ended[1].message
    assert ended[0].error == "RankLostError" and "rank 1 stopped: ValueError: dcp: got 2" in ended[0].message


def come_late(rank: int, world: int, init_method: str) -> None:
    if rank == 1:
        time.sleep(TIMEOUT_S + 1)
        return
    Ranks.connect(Parallelism(tp=2), init_method=init_method, rank=rank, world_size=world, timeout_s=TIMEOUT_S)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    end: Ended = run_ranks(2, come_late, where=tmp_path, limit_s=30)[0]
    assert (end.error, end.message) == ("RankLostError", "rank 1 did not come within 3 s")


def over_tcp(rank: int, world: int, _file: str, port: int, spec: Spec) -> tuple[list[str], dict[str, tuple[int, int]]]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    with Ranks.connect(spec.config().parallel, timeout_s=20) as ranks:
        with audit.watch() as ledger:
            run_case(spec, ranks, seed=3, device=CPU)
        regions = {name: ledger.region(f"attention/{name}") for name in ("exchange_received", "exchange_sent")}
        return ranks.tell(f"done {rank}"), {name: (each.nbytes, each.dead) for name, each in regions.items()}


def test_a_tcp_rendezvous_and_what_the_audit_sees(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for end in run_ranks(2, over_tcp, port, Spec(2, 2, 1), where=tmp_path):
        assert not end.error, end
        said, regions = end.result
        assert said == ["done 0", "done 1"]
        for nbytes, dead in regions.values():
            assert nbytes == 40 * 2 * 8 * 576 * 2  # a tile is the largest step here: 40 rows, 8 heads of each rank
            assert 0 < dead < nbytes  # the step has 19 rows


def test_arguments_of_the_rendezvous() -> None:
    with pytest.raises(ValueError, match="init_method: got 'http://x', accepted are env://, tcp://host:port and file"):
        Ranks.connect(Parallelism(), init_method="http://x", rank=0, world_size=1)
    with pytest.raises(ValueError, match="rank: got None and no RANK in the environment"):
        Ranks.connect(Parallelism(), init_method="tcp://127.0.0.1:1")
