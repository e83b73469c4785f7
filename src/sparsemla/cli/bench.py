# SPDX-License-Identifier: Apache-2.0
"""``sparsemla bench``: our kernels and every peer found here, on the same tensors, checked and then timed in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sparsemla.bench import peers as peers_module
from sparsemla.bench import plot as plot_module
from sparsemla.bench import readme as readme_module
from sparsemla.bench import report, runner, shapes
from sparsemla.cli import UserError, tuning
from sparsemla.formats import KVFormat, record_layout

_GPU = ("16,64,128", "1,8,64,8192", "32K,1M")
_CPU = ("16", "1,8", "4K")


def bench(
    heads: Annotated[str | None, typer.Option(help=f"Query heads (default {_GPU[0]}; on a CPU {_CPU[0]}).")] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            help="Query tokens: 64 is 64 requests of one, 8192 (from 1024 on) one request, 32x4 is 32 of 4 "
            f"(default {_GPU[1]}; on a CPU {_CPU[1]}).",
        ),
    ] = None,
    pools: Annotated[
        str | None, typer.Option(help=f"Records of the cache (default {_GPU[2]}; on a CPU {_CPU[2]}).")
    ] = None,
    formats: Annotated[str, typer.Option(help=f"Of our cache: {', '.join(f.value for f in KVFormat)}.")] = "fp8_ds_mla",
    topk: Annotated[int, typer.Option(help="Keys of a query token.")] = 2048,
    peers: Annotated[
        str, typer.Option(help=f"auto (all found here), none, or a list of {', '.join(peers_module.FAMILIES)}.")
    ] = "auto",
    fa3_library: Annotated[
        Path | None, typer.Option(help="FlashAttention-3's library, _vllm_fa3_C.abi3.so (default: looked for).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cold: Annotated[bool, typer.Option("--cold", help="Overwrite the L2 before each call.")] = False,
    budget: Annotated[float | None, typer.Option(help="Begin no case after so many seconds.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline into this image file.")] = None,
    readme: Annotated[
        bool,
        typer.Option(
            "--readme", help="Measure nothing: write the figures in README.md and docs/ anew from benchmarks/results/."
        ),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Only time tile shapes of the Triton kernel on this GPU, for --formats and --topk within --budget, "
            "and write the best into your own table, which is used from then on.",
        ),
    ] = False,
) -> None:
    """Time our kernels against every peer found here: same tensors, same process, in turn, after a check in float64.

    A wrong result gets no time. Exit status 1 where a result of ours is wrong.
    """
    if readme:
        changed = readme_module.update(Path.cwd())
        typer.echo("\n".join(f"written: {path}" for path in changed) or "nothing to change")
        return
    if tune:
        tuning.tune(formats=[KVFormat.parse(text) for text in _parts(formats)], device=device, topk=topk, budget=budget)
        return
    where = _device(device)
    defaults = _GPU if where.type == "cuda" else _CPU
    given = [a if a is not None else b for a, b in zip((heads, rows, pools), defaults, strict=True)]
    cases = shapes.cases(
        [shapes.parse_count(text, "heads") for text in _parts(given[0])],
        [shapes.Batch.parse(text) for text in _parts(given[1])],
        [shapes.parse_count(text, "pools") for text in _parts(given[2])],
        topk=topk,
    )
    if plot is not None:
        plot_module.check_target(plot)
    if json_file is not None and not json_file.parent.is_dir():
        raise UserError(f"--json: the folder of {str(json_file)!r} does not exist")
    if where.type == "cpu" and peers == "auto":
        peers = "none"
    found, missing = peers_module.find(peers, fa3_library=fa3_library)
    chosen = tuple(dict.fromkeys(KVFormat.parse(text) for text in _parts(formats)))
    settings = runner.Settings(
        device=where,
        cases=cases,
        formats=chosen,
        peers=found,
        missing=missing,
        budget_s=budget,
        cold=cold,
        command=report.quotable(["sparsemla", *sys.argv[1:]]),
    )

    def save(results: report.Results) -> None:
        if json_file is not None:
            report.write_json(json_file, results.to_json())

    steps = len(cases) * len({record_layout(fmt).d_qk for fmt in chosen})
    with _progress(steps) as tick:
        results = runner.run(settings, on_rows=save, tick=tick)
    _print(results)
    if plot is not None:
        plot_module.roofline(results, plot)
        typer.echo(f"roofline written to {plot}")
    raise typer.Exit(1 if any(row.ours.note.startswith("wrong") for row in results.rows) else 0)


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"--device: got {name!r}, accepted are auto, cpu and cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device: got 'cuda', but torch {torch.__version__} sees no GPU")
    return torch.device(name)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; a line a case where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    begun = -1  # the floors come before the first case
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)

        def tick(what: str) -> None:
            nonlocal begun
            if not console.is_terminal:
                console.print(f"[{max(begun + 1, 0)}/{total}] {what}", markup=False)
            progress.update(task, completed=max(begun, 0), description=what)
            begun += 1

        yield tick


def _print(results: report.Results) -> None:
    console = Console(highlight=False)
    floors = results.floors
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    console.print(f"\n[bold]sparsemla bench[/bold] on {results.gpu or 'a CPU'}\n{versions}")
    gathers = ", ".join(f"{rate:,.0f} ({key})" for key, rate in floors.gather_gbs.items())
    launch = f", empty launch {floors.launch_us:.1f} µs" if results.gpu else ""
    console.print(
        f"floors: copy {floors.copy_gbs:,.0f} GB/s, matrix product {floors.matrix_tflops:,.3g} TFLOPS{launch}; "
        f"gather GB/s (bytes a record/records): {gathers}"
    )
    for table in report.tables(results):
        console.print(table)
    console.print(Text(report.LEGEND, style="dim"))
    for row in results.rows:
        for entry in (row.ours, *row.peers):
            if entry.timing is None:
                console.print(Text(f"no time for {entry.name} at {row.heads} heads, T {row.rows.label}: {entry.note}"))
    for fmt in dict.fromkeys(row.format for row in results.rows):
        short = report.summary(results.rows, fmt)
        if short["geomean_ratio"] is not None:
            against = short["geomean_ratio_flashmla"]
            console.print(
                f"[bold]{fmt}[/bold]: {short['geomean_ratio']:.2f} × the best peer in the geometric mean, "
                f"{short['min_ratio']:.2f} × at least"
                + ("" if against is None else f"; {against:.2f} × FlashMLA over the same fp8 cache")
            )
    for note in results.notes:
        console.print(Text(f"note: {note}", style="yellow"))
