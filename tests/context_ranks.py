# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a process, and brings back what every one returned or raised."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
# Importing torch takes seconds of a core: once, in the server that the ranks are forked from.
_CONTEXT.set_forkserver_preload(["torch", "sparsemla.serving.backend", "sparsemla.serving.context_parallel.exchange"])


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its result, or the error's class and message; neither where it died without a word."""

    result: Any = None
    error: str = ""
    message: str = ""
    seconds: float = 0.0


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, where: Path, limit_s: float = 60.0
) -> list[Ended]:
    """function(rank, world, init_method, *arguments) on every rank, with a rendezvous in a file of directory `where`.

    A rank that is still running after `limit_s` is killed, and the test fails: nothing may hang.
    """
    init_method = f"file://{where}/rendezvous-{time.monotonic_ns()}"
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_main, args=(theirs, function, rank, world, init_method, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline = time.monotonic() + limit_s
    ended, hung = [], []
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        try:
            there = pipe.poll(max(deadline - time.monotonic(), 0.0))
            ended.append(pipe.recv() if there else Ended(error="hung"))
        except EOFError:
            ended.append(Ended(error="died"))
            there = True
        if not there:
            hung.append(rank)
            process.kill()
    for process in processes:
        process.join(max(deadline - time.monotonic(), 1.0))
        if process.is_alive():
            process.kill()
            process.join()
    assert not hung, f"ranks {hung} did not end within {limit_s} s; the others: {ended}"
    return ended


def _main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    init_method: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        result = function(rank, world, init_method, *arguments)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Ended(None, type(error).__name__, str(error), time.monotonic() - started))
    else:
        pipe.send(Ended(result, seconds=time.monotonic() - started))
    pipe.close()
