# SPDX-License-Identifier: Apache-2.0
"""``sparsemla audit``: run a script or a function and show which memory it allocates and never uses."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsemla.audit import Ledger, NotDeterministicError, Row, Run, run, run_script
from sparsemla.cli import UserError
from sparsemla.cli.plan import human_bytes, parse_bytes

CONTEXT_SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}
"""For the registration: what follows the script's name is the script's own."""


def audit(
    script: Annotated[Path | None, typer.Argument(help="A Python script; what follows it are its arguments.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    call: Annotated[
        str | None, typer.Option("--call", help="Instead of a script: module:function, called without arguments.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the script's own output goes to stderr.")
    ] = False,
    fail_over: Annotated[
        str | None,
        typer.Option("--fail-over", help="Exit status 1 when more bytes than this are dead, e.g. 16MiB or 0."),
    ] = None,
    passes: Annotated[int, typer.Option(help="2: run again with the inverted sentinel, exact to the byte.")] = 1,
    deep: Annotated[
        bool, typer.Option("--deep", help="Find what is written and never read: two more runs for every allocation.")
    ] = False,
    deep_min_bytes: Annotated[str, typer.Option(help="--deep leaves smaller allocations out.")] = "4KiB",
    deep_max: Annotated[int, typer.Option(help="--deep tests so many allocations, the largest first.")] = 200,
    top: Annotated[int, typer.Option(help="Rows to show (all of them in --json).")] = 20,
) -> int:
    """Run code and show what it allocates, what of it is never written and, with --deep, never read.

    Options come before the script: sparsemla audit --deep script.py --its-own option
    """
    if (script is None) == (call is None):
        raise UserError("audit: give either a script or --call module:function (sparsemla audit --help)")
    if top < 0:
        raise UserError(f"--top: got {top}, accepted is at least 0")
    limit = None if fail_over is None else parse_bytes(fail_over)
    options: dict[str, Any] = {"deep": deep, "deep_min_bytes": parse_bytes(deep_min_bytes), "deep_max": deep_max}
    with _progress(wanted=deep or passes > 1) as tell:
        options |= {"progress": tell, "passes": cast(Literal[1, 2], passes)}
        if script is not None:
            found = _guarded(str(script), lambda: _run_script(script, arguments or [], as_json, options))
        else:
            function = _find(str(call))
            found = _guarded(str(call), lambda: _run_call(function, as_json, options))
    ledger = found.ledger
    over = limit is not None and ledger.dead_bytes > limit
    if as_json:
        what = [str(script), *(arguments or [])] if script is not None else [str(call)]
        print(
            json.dumps(
                {"audited": what, "torch": torch.__version__, "fail_over": limit, "failed": over, **ledger.as_dict()}
            )
        )
    else:
        show(ledger, Console(), top=top)
        if over:
            Console(stderr=True).print(
                f"[bold red]{ledger.dead_bytes:,} dead bytes, more than --fail-over {limit:,}", highlight=False
            )
    return 1 if over else 0


def _run_script(script: Path, arguments: list[str], as_json: bool, options: dict[str, Any]) -> Run:
    return run_script(script, arguments, echo=sys.stderr if as_json else sys.stdout, **options)


def _run_call(function: Callable[[], Any], as_json: bool, options: dict[str, Any]) -> Run:
    if not as_json:
        return run(function, **options)
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        return run(function, **options)
    finally:
        sys.stdout = kept


def _guarded(name: str, work: Callable[[], Run]) -> Run:
    """What goes wrong in the audited code is shown in full and ends the audit with status 2."""
    try:
        return work()
    except NotDeterministicError as problem:
        raise UserError(f"{name}: {problem}") from None
    except SystemExit as leaving:
        raise UserError(f"{name} left with exit status {leaving.code}; nothing was audited") from None
    except Exception as problem:
        if isinstance(problem, ValueError) and str(problem).startswith(("script:", "passes:", "deep_min_bytes")):
            raise
        traceback.print_exc()
        raise UserError(f"{name} failed with {type(problem).__name__}; nothing was audited") from None


def _find(call: str) -> Callable[[], Any]:
    module, _, path = call.partition(":")
    if not module or not path:
        raise UserError(f"--call: got {call!r}, accepted is module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as problem:  # importing runs the module's own code
        raise UserError(f"--call: got {call!r}, which cannot be loaded: {type(problem).__name__}: {problem}") from None
    if not callable(found):
        raise UserError(f"--call: got {call!r}, which is a {type(found).__name__}, accepted is a function")
    return cast(Callable[[], Any], found)


@contextmanager
def _progress(*, wanted: bool) -> Iterator[Callable[[str], None]]:
    """One line on a terminal's standard error that says which run is on."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("audit") as status:
        yield lambda text: status.update(text)


# --- the report ------------------------------------------------------------------------------------------------------


def show(ledger: Ledger, console: Console, *, top: int = 20) -> None:
    """Print a ledger: rows with dead bytes first, then the largest; totals; what the audit could not see."""
    rows = ledger.rows()
    table = Table(title="Memory this run allocated", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("what", overflow="fold", ratio=5)
    table.add_column("who", overflow="fold", ratio=4)
    table.add_column("bytes", justify="right")
    table.add_column("never written", justify="right")
    table.add_column("never read", justify="right")
    for row in rows[:top]:
        table.add_row(*_cells(row, ledger.deep), style="red" if row.dead else None)
    console.print(table)
    if len(rows) > top:
        console.print(f"and {len(rows) - top} more rows (--top, --json)", style="dim")
    console.print()
    console.print(
        f"{len(ledger.allocations):,} allocations, at most {human_bytes(ledger.peak_bytes)} at once. Dead at once: "
        f"[bold {'red' if ledger.dead_bytes else 'green'}]{human_bytes(ledger.dead_bytes)}[/] "
        f"({ledger.dead_bytes:,} bytes); over the whole run {human_bytes(ledger.dead_bytes_total)}.",
        highlight=False,
    )
    for note in ledger.notes:
        console.print(f"Note: {note}.", style="yellow", highlight=False)
    if not ledger.deep:
        console.print("What is written and never read: --deep.", style="dim", highlight=False)
    console.print("Not covered:", style="dim")
    for line in ledger.not_covered():
        console.print(f"  · {line}", style="dim", highlight=False)


def _cells(row: Row, deep: bool) -> list[Text]:
    times = f"{row.count} × " if row.count > 1 else ""
    what = ("region " if row.kind == "region" else "") + row.brief
    if not deep or (row.read == "not tested" and row.never_written == row.bytes_all):
        never_read = "–"
    elif row.never_read:
        never_read = f"{row.never_read:,}"
    else:
        never_read = {"read": "0", "mixed": "0"}.get(row.read, row.read)
    return [
        Text(what),
        Text("\n".join(row.stack[:2]) or row.who, style="dim" if not row.dead else ""),
        Text(f"{times if row.kind == 'allocation' else ''}{row.bytes_each:,}"),
        Text(f"{row.never_written:,}" + (f" ({row.unexamined:,} not examined)" if row.unexamined else "")),
        Text(never_read),
    ]
