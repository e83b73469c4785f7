# SPDX-License-Identifier: Apache-2.0
"""The ``sparsemla`` console script.

Exit status: 0 when all is well, 1 when a command ran and found a disagreement, 2 when the user has to change
something (one line on standard error says what). ``SPARSEMLA_TRACEBACK=1`` shows the traceback of such a line.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sparsemla.cli import UserError, audit, bench, check, doctor, plan

app = typer.Typer(
    name="sparsemla",
    help="Sparse MLA attention from a paged, quantised KV cache: check it, plan its memory, audit a run, measure.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version() -> str:
    try:
        return importlib.metadata.version("sparsemla")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsemla {_version()}")
        raise typer.Exit(0)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("audit", context_settings=audit.CONTEXT_SETTINGS)(audit.audit)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script: run one command and return the exit status.

    ``argv`` excludes the program's name (default: ``sys.argv[1:]``), so a test calls ``main(["plan", "--json"])``.
    """
    try:
        status = app(args=list(sys.argv[1:] if argv is None else argv), prog_name="sparsemla", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped by the user", status=130)
    except (UserError, ValueError, ImportError, OSError) as error:
        if os.environ.get("SPARSEMLA_TRACEBACK"):
            raise
        return _fail(str(error))
    except Exception as error:
        # typer's own usage errors (unknown option, missing argument); their class moved between typer releases.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _fail(f"{message()} (sparsemla --help lists what is accepted)")
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int = 2) -> int:
    print("sparsemla: " + " ".join(message.split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
