# SPDX-License-Identifier: Apache-2.0
"""``sparsemla check --profile``: planned against measured bytes on a GPU."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsemla.cli import UserError
from sparsemla.serving.profile import ProfileReport, run_profile


def profile_command(device: str, *, as_json: bool = False) -> int:
    """Profile the published deployment under each policy; exit status 0 when all agree within 1 %, else 1.

    Raises:
        UserError: `device` is no CUDA device that is there.
    """
    try:
        reports = run_profile(device=device)
    except ValueError as error:
        raise UserError(f"--profile: {error}") from None
    if as_json:
        typer.echo(json.dumps({"profile": [report.to_json() for report in reports]}, indent=2))
    else:
        Console().print(render_profile(reports))
    return 0 if all(report.agrees for report in reports) else 1


def render_profile(reports: list[ProfileReport]) -> Table:
    """The reports as a table for a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for title in ("policy", "path", "kernel", "what"):
        table.add_column(title, no_wrap=True)
    for title in ("planned", "measured", "off"):
        table.add_column(title, justify="right", no_wrap=True)
    for report in reports:
        rows = [("workspace", report.planned_workspace, report.measured_workspace)]
        rows += [(step.name, step.planned_peak, step.measured_peak) for step in report.steps]
        for index, (what, planned, measured) in enumerate(rows):
            off = (measured - planned) / max(planned, 1)
            names = (report.policy, report.path, report.kernel) if index == 0 else ("", "", "")
            mark = Text(f"{off:+.2%}", style="green" if abs(off) <= 0.01 else "bold red")
            table.add_row(*names, what, f"{planned:,}", f"{measured:,}", mark)
    return table
