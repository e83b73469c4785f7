# SPDX-License-Identifier: Apache-2.0
"""`sparsemla check`: the main job on this machine, end to end, with a report a newcomer can read.

Runs transformers' GLM-MoE-DSA and DeepSeek-V3.2 classes with random weights on their own eager attention and on ours
over a paged fp8 cache. `_check_run` says what is compared and why in those pieces, `_check_models` what the models are.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparsemla.cli import UserError
from sparsemla.cli import _check_run as run
from sparsemla.cli._check_models import FAMILIES, sizes_for
from sparsemla.cli._check_needle import needle_command
from sparsemla.cli._check_ranks import dcp_command
from sparsemla.cli._check_run import FamilyReport, Needle
from sparsemla.cli.profile_report import profile_command
from sparsemla.integrations.transformers import require_transformers


def check(
    device: Annotated[str, typer.Option(help="cpu: small models. cuda: the released models' attention sizes.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights and texts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Instead: planned against measured bytes of the serving layer, on a GPU.")
    ] = False,
    needle: Annotated[
        bool,
        typer.Option("--needle", help="Instead: needles in long contexts, cache on the device and in host memory."),
    ] = False,
    dcp: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Instead, under torchrun with N processes: needles, cache sharded over N ranks."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --needle on a CPU: 230,456 and 544,235 records, as on a GPU.")
    ] = False,
) -> None:
    """Generate with a model's own attention and with ours, and compare: tokens, logits, memory, needles.

    Exit status 1 where anything disagrees. Needs transformers 5.20 or newer; takes well under two minutes on
    two CPU cores.
    """
    if dcp is not None:
        with _threads(torch.device("cpu")):
            raise typer.Exit(dcp_command(device, dcp, seed=seed, full=full, as_json=as_json))
    where = _device(device)
    if profile:
        raise typer.Exit(profile_command(device, as_json=as_json))
    if needle:
        with _threads(where):
            raise typer.Exit(needle_command(where, seed=seed, full=full, as_json=as_json))
    require_transformers()
    sizes = sizes_for(where)
    started = time.monotonic()
    reports: list[FamilyReport] = []
    with _threads(where), _progress(len(FAMILIES) * run.forward_passes(sizes)) as tick:
        for family in FAMILIES:
            try:
                reports.append(run.run_family(family, sizes, device=where, seed=seed, tick=tick(family.name)))
            except torch.cuda.OutOfMemoryError:
                raise UserError(
                    f"--device: got {device!r}, whose memory does not hold the full-size check (about 40 GB); "
                    "accepted is a larger GPU, or cpu"
                ) from None
    about = _about(where, seed, time.monotonic() - started)
    agreed = all(all(report.checks.values()) for report in reports)
    if as_json:
        typer.echo(json.dumps(_as_json(reports, about, agreed), indent=2))
    else:
        _print(reports, about, agreed)
    raise typer.Exit(0 if agreed else 1)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device: got {name!r}, accepted are cpu, cuda and cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device: got {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    return device


@contextmanager
def _threads(device: torch.device) -> Iterator[None]:
    """One thread on the CPU. The operations are small: two threads gain little when the machine is idle, and on a busy
    one, where they wait for each other's time slices, they take ten times as long."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], Callable[[str], None]]]:
    """A bar on standard error (a line a family where that is no terminal); gives a tick function for each family."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)

        def for_family(family: str) -> Callable[[str], None]:
            if not console.is_terminal:
                console.print(f"checking {family} ...")
            return lambda doing: progress.update(task, advance=1, description=f"{family}: {doing}")

        yield for_family


def _about(device: torch.device, seed: int, seconds: float) -> dict[str, Any]:
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("sparsemla", "torch", "transformers")},
        "seed": seed,
        "seconds": round(seconds, 1),
    }


def _as_json(reports: list[FamilyReport], about: dict[str, Any], agreed: bool) -> dict[str, Any]:
    return {
        "agreed": agreed,
        **about,
        "limits": {
            "logit_difference_kernel": run.KERNEL_LIMIT,
            "logit_difference_quantisation": run.QUANTISATION_LIMIT,
            "record_error": run.RECORD_LIMIT,
            "split_difference": run.SPLIT_LIMIT,
        },
        "families": [{**dataclasses.asdict(report), "checks": report.checks} for report in reports],
    }


def _print(reports: list[FamilyReport], about: dict[str, Any], agreed: bool) -> None:
    console = Console(highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    kernels = ", ".join(sorted({name for report in reports for name in report.kernels}))
    console.print(f"\n[bold]sparsemla check[/bold] on {about['device_name']} ({about['device']}), kernel: {kernels}")
    console.print(f"{versions}; seed {about['seed']}\n")
    for report in reports:
        console.print(f"[bold]{report.family}[/bold]: transformers' {report.model_class}, {_size(report)}")
    console.print(_table(reports))
    console.print(_explanation())
    console.print()
    for report in reports:
        failed = [name for name, holds in report.checks.items() if not holds]
        if failed:
            console.print(f"[red]Disagreement[/red] in {report.family}: {', '.join(failed)}")
    if agreed:
        console.print(f"[green]Everything agrees.[/green] ({about['seconds']} s)")


_EXPLANATION = {
    "Next tokens": "Of the model on its own attention and on ours, both greedy. A near tie is a token whose two best "
    "logits lie closer than fp8 rounding moves them: it may go either way and is not counted as a disagreement.",
    "Logits": "The largest difference of any position and word, relative to the largest logit.",
    "  arithmetic": "Ours against the model's eager attention over the very values that our cache holds, with the same "
    "keys chosen. What is left is our kernel's arithmetic.",
    "  fp8": "Eager attention over those values against eager attention over a bf16 cache: what quantising costs, with "
    "no kernel of ours involved.",
    "  everything": "Against the untouched model, whose indexer then chooses another key now and then.",
    "Cache": "A latent is what the cache keeps of a token; its error is that of the fp8 values, root mean square.",
    "Scratch": "Bytes that one attention call (of one layer) allocates beyond its results while it runs. Bytes "
    "reserved and never touched are dead memory, a fault.",
    "Needle": "One planted key among random ones; retrieved if the model names it in the end.",
}


def _explanation() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for term, meaning in _EXPLANATION.items():
        grid.add_row(term, meaning)
    return grid


def _size(report: FamilyReport) -> str:
    prompts = " and ".join(f"{length:,}" for length in report.prompts)
    return (
        f"random weights, {report.layers} layers, {report.heads} heads; prompts of {prompts} tokens, "
        f"{report.tokens_compared // len(report.prompts)} generated for each; each token attends the "
        f"{report.topk:,} keys the model's indexer chooses"
    )


def _table(reports: list[FamilyReport]) -> Table:
    """What was looked at, what came out for each family, what is accepted."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(report.family, justify="right")
    table.add_column("accepted", justify="right")
    for line in zip(*(_lines(report) for report in reports), strict=True):
        first = line[0]
        if first.value is None:
            table.add_row(f"[bold]{first.what}[/bold]")
            continue
        cells = [f"{one.value} {_verdict(report.checks, one.check)}" for report, one in zip(reports, line, strict=True)]
        table.add_row(f"  {first.what}", *cells, first.accepted)
    return table


def _verdict(checks: dict[str, bool], name: str) -> str:
    if not name:
        return "  "
    return "[green]ok[/green]" if checks[name] else "[red]NO[/red]"


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of the table; without a value a heading. `check`: which of the report's checks it shows."""

    what: str
    value: str | None = None
    accepted: str = ""
    check: str = ""


def _lines(report: FamilyReport) -> Iterator[_Line]:
    yield _Line("Next tokens")
    yield _Line("agreed", f"{report.tokens_agreed} of {report.tokens_compared}", "all but near ties", "tokens")
    yield _Line("near ties", str(report.near_ties))
    yield _Line("Logits")
    yield _Line("our kernel's arithmetic", *_share(report.logit_difference_kernel, run.KERNEL_LIMIT), "kernel")
    yield _Line(
        "fp8 instead of bf16 cache",
        *_share(report.logit_difference_quantisation, run.QUANTISATION_LIMIT),
        "quantisation",
    )
    yield _Line("everything together", f"{report.logit_difference_own:.2%}")
    yield _Line("keys chosen alike", f"{report.keys_chosen_alike:.2%}")
    yield _Line("Cache")
    yield _Line("bytes a token and layer", f"{report.cache_bytes_per_token_layer:,}")
    yield _Line("the same in bf16", f"{report.bf16_bytes_per_token_layer:,}")
    yield _Line("error of a latent (rms)", *_share(report.record_error, run.RECORD_LIMIT), "records")
    yield _Line("Scratch of one call, bytes")
    for one in report.scratch:
        yield _Line(f"{one.call}: reserved", f"{one.reserved_bytes:,}")
        yield _Line("  touched", f"{one.touched_bytes:,}", "all reserved", "scratch")
        yield _Line("  of them accumulators", f"{one.accumulator_bytes:,}")
    yield _Line("split against whole", *_share(report.split_difference, run.SPLIT_LIMIT), "split")
    yield _Line(f"Needle in {report.haystack:,} tokens")
    for needle in report.needles:
        yield _Line(f"at {needle.depth:.0%} of the text", _found(needle), "retrieved", "needles")
    yield _Line("After detaching")
    yield _Line("the model's own answers", "same bits" if report.restored else "changed", "same bits", "restored")


def _share(measured: float, limit: float) -> tuple[str, str]:
    return f"{measured:.3%}", f"up to {limit:.1%}"


def _found(needle: Needle) -> str:
    if needle.found:
        return "retrieved"
    return "missed" if needle.found_by_own else "missed, also by own"
