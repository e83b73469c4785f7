# SPDX-License-Identifier: Apache-2.0
"""`sparsemla check --dcp N`: the needles once more, over a cache that is sharded over N ranks, each a process."""

from __future__ import annotations

import os

import torch

from sparsemla.cli import UserError
from sparsemla.cli._check_needle import needle_command

TIMEOUT_S = 120.0
"""Seconds after which a rank that does not come, or a collective that does not end, is an error."""


def dcp_command(device: str, dcp: int, *, seed: int, full: bool, as_json: bool) -> int:
    """Joins the other ranks, runs the needles on each, and gives the same exit status on all of them.

    Started by torchrun, one process a GPU (or, with gloo, a CPU process); rank 0 prints.

    Raises:
        UserError: not started by torchrun, with another number of processes than `dcp`, or a rank was lost.
        ValueError: the ranks were started with different options.
    """
    from sparsemla.serving.config import Parallelism
    from sparsemla.serving.context_parallel.ranks import RankLostError, Ranks

    kind = device.partition(":")[0]
    if dcp < 2 or 64 % dcp:
        raise UserError(f"--dcp: got {dcp}, accepted are 2, 4, 8, 16, 32 and 64")
    if kind not in ("cpu", "cuda") or ":" in device:
        raise UserError(f"--device: got {device!r} with --dcp, accepted are cpu and cuda: each rank takes its own GPU")
    started = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not started or int(os.environ["WORLD_SIZE"]) != dcp:
        there = f"{os.environ['WORLD_SIZE']} processes" if started else "no torchrun around it"
        raise UserError(
            f"--dcp: got {dcp} with {there}, accepted is torchrun --nproc-per-node {dcp} -m sparsemla.cli.app check "
            f"--device {device} --dcp {dcp}"
        )
    where = torch.device(kind)
    if kind == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise UserError(
                f"--dcp: rank {local} of this machine has no GPU, torch {torch.__version__} sees "
                f"{torch.cuda.device_count()}"
            )
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    # Merged where they arrive, in float32: the form that rounds least.
    parallel = Parallelism(tp=dcp, dcp=dcp, dcp_comm="a2a")
    facts = {"seed": seed, "full": full, "kind of device": kind}
    try:
        with Ranks.connect(parallel, device=where, timeout_s=TIMEOUT_S, facts=facts) as ranks:
            status = needle_command(where, dcp_group=ranks, seed=seed, full=full, as_json=as_json)
            return max(int(said) for said in ranks.tell(str(status)))
    except RankLostError as error:
        raise UserError(f"--dcp: {error}") from None
