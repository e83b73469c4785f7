# SPDX-License-Identifier: Apache-2.0
"""``sparsemla bench --tune``: tile shapes of the portable kernel, measured on the GPU at hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import typer
from rich.console import Console
from rich.table import Table

from sparsemla.cli import UserError
from sparsemla.formats import KVFormat
from sparsemla.kernels import registry

if TYPE_CHECKING:
    from sparsemla.kernels.triton.tune import Trial


def tune(*, formats: Sequence[KVFormat], device: str, topk: int, budget: float | None) -> None:
    """Measures each format's shapes, prints their times, and writes the best into the user's table.

    Args:
        formats: cache formats; each gets an entry of its own.
        device: "auto" or "cuda" (with or without an index).
        topk: keys of a query row of the call measured.
        budget: seconds for each format, after which no further shape is tried; None: all are.

    Raises:
        UserError: there is no GPU, or the portable kernel does not serve it.
    """
    where = torch.device("cuda" if device == "auto" else device)
    if where.type != "cuda" or not torch.cuda.is_available():
        seen = f"torch {torch.__version__} sees none" if where.type == "cuda" else f"--device is {device}"
        raise UserError(f"--tune: times kernels on a GPU, and {seen}")
    reason = registry.kernel("triton").unavailable()
    if reason is not None:
        raise UserError(f"--tune: the triton kernel cannot run: {reason} (`sparsemla doctor` says what to do)")
    from sparsemla.kernels import triton as portable  # imports triton, which not every machine has
    from sparsemla.kernels.triton import shapes
    from sparsemla.kernels.triton import tune as measuring

    reason = portable.why_not_device(where)
    if reason is not None:
        raise UserError(f"--tune: the triton kernel does not serve {where}: {reason}")
    path = shapes.user_table()
    console = Console(highlight=False)

    def progress(trial: Trial) -> None:
        console.print(f"{_time(trial)}  {trial.shape} {trial.note}", markup=False)

    for fmt in formats:
        until = None if budget is None else time.monotonic() + budget
        found = measuring.tune(device=where, fmt=fmt, topk=topk, until=until, path=path, progress=progress)
        for up_to, trials in found.items():
            console.print(_table(f"{fmt.value}, up to {up_to} heads, measured with {_heads(up_to)}", trials))
        typer.echo(f"written: the best shapes for {fmt.value}, {path}")


def _heads(up_to: int) -> int:
    from sparsemla.kernels.triton.tune import MEASURED_HEADS

    return MEASURED_HEADS[up_to]


def _time(trial: Trial) -> str:
    return "        -   " if trial.microseconds is None else f"{trial.microseconds:9,.1f} µs"


def _table(title: str, trials: Sequence[Trial]) -> Table:
    table = Table("µs", "heads", "keys", "warps", "registers", "an SM", title=title, title_justify="left")
    for trial in trials:
        if trial.microseconds is not None:
            shape = trial.shape
            numbers = (shape.heads, shape.keys, shape.warps, shape.registers or "any", shape.per_sm)
            table.add_row(f"{trial.microseconds:,.1f}", *map(str, numbers))
    return table
