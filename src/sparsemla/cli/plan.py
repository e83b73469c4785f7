# SPDX-License-Identifier: Apache-2.0
"""``sparsemla plan``: what each rank reserves, who reads it, what is left for KV tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sparsemla.cli import UserError
from sparsemla.formats import KVFormat
from sparsemla.serving.capacity import MemoryProfile
from sparsemla.serving.config import PRESETS, ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.paths import Policy
from sparsemla.serving.plan import Comparison, Plan, make_plan

_UNITS: dict[str, int] = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_bytes(text: str | int) -> int:
    """``150754820096``, ``141GiB`` or ``1.5 GB`` → bytes. UserError for anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise UserError(
            f"bytes: got {text!r}, accepted are a whole number or one with KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        )
    number = match.group(1).replace("_", "")
    if len(number.partition(".")[0].lstrip("0")) > 18:
        raise UserError(f"bytes: got a number of {len(number)} characters, accepted are at most 18 digits")
    if "." in number and unit in ("", "b"):
        raise UserError(f"bytes: got {text!r}, accepted is a whole number of bytes")
    size = _UNITS[unit]
    return int(number) * size if "." not in number else round(float(number) * size)


def human_bytes(nbytes: int) -> str:
    """Bytes with a binary unit, for people: ``1.69 GiB``."""
    value, sign = float(abs(nbytes)), "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} TiB"


def plan(
    model: Annotated[
        str, typer.Option(help=f"A preset ({', '.join(sorted(PRESETS))}) or the path of a Hugging Face config.json.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    dcp: Annotated[int, typer.Option(help="Ranks the KV cache is sharded over (decode context parallel).")] = 1,
    pcp: Annotated[
        int, typer.Option(help="Ranks the rows of a prefill are split over (prefill context parallel).")
    ] = 1,
    interleave: Annotated[int, typer.Option(help="Consecutive positions one dcp rank holds.")] = 1,
    dcp_comm: Annotated[str, typer.Option(help="How dcp ranks combine results: ag_rs or a2a.")] = "ag_rs",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request in tokens (default: what the model was published for).")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Query tokens of one step at most.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Requests of one step at most.")] = 256,
    spec_tokens: Annotated[
        int, typer.Option(help="Speculated tokens a step; above 0 the MTP layers hold caches too.")
    ] = 0,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a cache page on one rank (default 64; V4: 256).")
    ] = None,
    cache_format: Annotated[
        str | None, typer.Option(help=f"{', '.join(f.value for f in KVFormat)} (default: the model's usual one).")
    ] = None,
    prefill_factor: Annotated[
        int | None,
        typer.Option(help="Rows of the bf16 prefill buffer per token of max-model-len (default 5; 2 above 262144)."),
    ] = None,
    arch: Annotated[str, typer.Option(help="Head padding of policy flashmla: sm90 or sm100.")] = "sm90",
    host_cache: Annotated[bool, typer.Option("--host-cache", help="The full cache lives in host memory.")] = False,
    gpu_memory_bytes: Annotated[
        str | None, typer.Option(help="Memory of one GPU, e.g. 150754820096 or 140GiB.")
    ] = None,
    utilization: Annotated[float, typer.Option(help="Share of that memory the engine may use.")] = 0.9,
    weights_bytes: Annotated[str | None, typer.Option(help="Weights of one rank.")] = None,
    activation_bytes: Annotated[str, typer.Option(help="Peak of one step outside the workspace.")] = "0",
    kv_bytes: Annotated[
        str | None, typer.Option(help="Bytes of the cache of one rank, instead of a utilization.")
    ] = None,
    other_workspace_bytes: Annotated[
        str | None, typer.Option(help="Largest set of tensors any other user of the workspace takes (indexer, MoE).")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(p.value for p in Policy)} (default sparsemla, or the first compared)."),
    ] = None,
    compare: Annotated[str | None, typer.Option(help="POLICY,POLICY: what the second saves over the first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory map of a rank into this image file.")] = None,
) -> None:
    """Plan the memory of one rank: what is reserved, who reads it, what is never read, how many tokens fit."""
    geometry = ModelGeometry.load(model)
    config = ServingConfig(
        model=geometry,
        parallel=Parallelism(tp, dcp, pcp, interleave, dcp_comm),  # type: ignore[arg-type]  # checked by the class
        limits=ServingLimits(
            max_model_len=geometry.max_position_embeddings if max_model_len is None else max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            spec_tokens=spec_tokens,
            block_size=geometry.default_block_size if block_size is None else block_size,
            cache_format=None if cache_format is None else KVFormat.parse(cache_format),
            utilization=utilization,
            prefill_factor=prefill_factor,
            arch=arch,  # type: ignore[arg-type]
        ),
        host_cache=host_cache,
    )
    if (gpu_memory_bytes is None) != (weights_bytes is None):
        raise UserError("--gpu-memory-bytes and --weights-bytes are needed together (or --kv-bytes alone)")
    activations = parse_bytes(activation_bytes)
    if activations and gpu_memory_bytes is None:
        raise UserError("--activation-bytes: needs --gpu-memory-bytes and --weights-bytes")
    profile = None
    if gpu_memory_bytes is not None and weights_bytes is not None:
        profile = MemoryProfile(parse_bytes(gpu_memory_bytes), parse_bytes(weights_bytes), activation_bytes=activations)
    others = None if other_workspace_bytes is None else {"other users": parse_bytes(other_workspace_bytes)}
    explicit = None if kv_bytes is None else parse_bytes(kv_bytes)

    def make(name: Policy) -> Plan:
        return make_plan(config, name, profile=profile, kv_bytes=explicit, other_users=others)

    pair = None if compare is None else _parse_compare(compare)
    chosen = Policy.parse(policy) if policy is not None else pair[0] if pair else Policy.SPARSEMLA
    made = make(chosen)
    comparison = None if pair is None else Comparison(make(pair[0]), make(pair[1]))

    if plot is not None:
        from sparsemla.cli.plan_plot import draw_memory_map

        plans = [made] if comparison is None else [comparison.before, comparison.after]
        draw_memory_map(plans, plot)
    if as_json:
        data: dict[str, Any] = made.to_json()
        if comparison is not None:
            data["compare"] = comparison.to_json()
        typer.echo(json.dumps(data, indent=2))
        return
    console = Console()
    console.print(render_plan(made, width=console.width))
    if comparison is not None:
        console.print(render_comparison(comparison))
    if plot is not None:
        console.print(Text(f"memory map written to {plot}"))


def _parse_compare(text: str) -> tuple[Policy, Policy]:
    names = [part for part in text.split(",") if part.strip()]
    if len(names) != 2:
        raise UserError(f"--compare: got {text!r}, accepted are two policies separated by a comma")
    return Policy.parse(names[0]), Policy.parse(names[1])


def _bar(part: int, whole: int, style: str, cells_in_all: int) -> Text:
    """A bar in steps of an eighth of a cell: `part` of `whole`, of which all takes `cells_in_all` cells."""
    eighths = round(8 * cells_in_all * part / whole) if whole else 0
    cells, rest = divmod(eighths, 8)
    return Text("█" * cells + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style=style)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for title, justify in columns:
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _section(title: str) -> Rule:
    return Rule(Text(title, style="bold"), align="left", style="dim")


def render_plan(made: Plan, *, width: int = 100) -> RenderableType:
    """The plan for a terminal of that many columns."""
    config = made.config
    parallel = f"TP {config.parallel.tp}, DCP {config.parallel.dcp}, PCP {config.parallel.pcp}"
    head = Text.assemble(
        (f"{config.model.name}", "bold"),
        f" on {config.parallel.world} GPU{'s' if config.parallel.world > 1 else ''} ({parallel}): "
        f"{config.heads} heads a rank, ",
        f"cache {config.cache_format.value}, {config.limits.max_model_len:,} tokens a request at most\n",
        ("policy ", "dim"),
        (made.policy.value, "bold cyan"),
        ("   path ", "dim"),
        (made.path.kind.value, "bold cyan"),
        f"   {made.path.reason}",
    )
    parts: list[RenderableType] = [
        head,
        _section("Scratch of one rank"),
        _render_workspace(made, max(6, min(40, width - 70))),
    ]
    parts += [_section("KV cache"), _render_kv(made)]
    if made.profile is not None and made.budget is not None:
        parts += [_section("Memory of one GPU"), _render_memory(made, max(10, min(60, width - 45)))]
    parts += [Text(f"note: {warning}", style="yellow") for warning in config.warnings()]
    return Group(*parts)


def _render_workspace(made: Plan, cells: int) -> RenderableType:
    total = made.workspace.total_bytes
    outside = f"\noutside the buffer, in the largest step: a layer's answer, {made.answer_bytes:,} bytes"
    if made.exchange_bytes:
        outside += f"; what travels between ranks, {made.exchange_bytes:,} bytes"
    if made.kernel_bytes:
        outside += f"; the decode kernel's accumulators, {made.kernel_bytes:,} bytes"
    if not total:
        words = Text("0 bytes: attention reserves nothing, and nobody else was named", style="green")
        return words.append(outside, style="default")
    widest = max([*(r.nbytes for r in made.reservations), *(n for _, n in made.workspace.users[1:]), 1])
    rows = _table(("tensor", "left"), ("shape", "left"), ("bytes", "right"), ("", "left"), ("read by", "left"))
    for item in made.reservations:
        style = "green" if item.ever_read else "red"
        reader = Text(item.read_by) if item.ever_read else Text("nobody, ever", style="bold red")
        shape = " x ".join(f"{n}" for n in item.shape)
        rows.add_row(item.name, shape, f"{item.nbytes:,}", _bar(item.nbytes, widest, style, cells), reader)
    if not made.reservations:
        rows.add_row(Text("attention", style="green"), "", "0", "", Text("reserves nothing", style="green"))
    for name, nbytes in made.workspace.users[1:]:
        rows.add_row(Text(name, style="blue"), "", f"{nbytes:,}", _bar(nbytes, widest, "blue", cells), "themselves")
    words = Text.assemble(
        "attention takes ",
        (f"{made.workspace.attention_bytes:,}", "bold"),
        f" bytes together; the shared buffer is its users' largest set ({made.workspace.decided_by}): ",
        (f"{total:,} bytes", "bold"),
        f" ({human_bytes(total)})",
    )
    if made.never_read_bytes:
        words.append(
            f"\nnever read: {made.never_read_bytes:,} bytes ({human_bytes(made.never_read_bytes)})", style="bold red"
        )
    words.append(outside)
    return Group(rows, words)


def _render_kv(made: Plan) -> RenderableType:
    geometry, budget = made.geometry, made.budget
    rows = _table(("layers", "left"), ("count", "right"), ("bytes a record", "right"), ("a record for", "left"))
    for group in geometry.groups:
        each = f"{group.group.tokens_per_record} token{'s' if group.group.tokens_per_record > 1 else ''}"
        if group.group.window is not None:
            each = f"each of the last {group.group.window} tokens"
        rows.add_row(group.group.name, f"{group.layers}", f"{group.record_bytes}", each)
    per_token = geometry.bytes_per_token_per_rank
    figure = f"{per_token.numerator:,}" if per_token.denominator == 1 else f"{float(per_token):,.2f}"
    words = Text.assemble("bytes a token a rank: ", (figure, "bold"))
    if geometry.ranks > 1:
        words.append(f" (sharded over {geometry.ranks} ranks)")
    if geometry.bytes_per_request:
        words.append(f", and {geometry.bytes_per_request:,} bytes a request")
    if budget is None:
        words.append("\ntokens: unknown without --gpu-memory-bytes and --weights-bytes, or --kv-bytes", style="dim")
        return Group(rows, words)
    words.append("\ntokens: ")
    words.append(f"{budget.tokens:,}", style="bold")
    words.append(f" in {budget.pages:,} pages of {geometry.tokens_per_page} tokens; ")
    words.append(f"{float(budget.concurrency):.2f}", style="bold")
    words.append(f" requests of {made.config.limits.max_model_len:,} tokens at once")
    return Group(rows, words)


def _render_memory(made: Plan, cells: int) -> RenderableType:
    rows = _table(("", "left"), ("bytes", "right"), ("", "right"), ("", "left"))
    segments = memory_segments(made)
    total = sum(nbytes for _, nbytes, _ in segments)
    for name, nbytes, style in segments:
        rows.add_row(name, f"{nbytes:,}", human_bytes(nbytes), _bar(nbytes, total, style, cells))
    return rows


def memory_segments(made: Plan) -> list[tuple[str, int, str]]:
    """(name, bytes, colour) of the parts of one GPU's memory in the order a map shows them; they add up to it."""
    profile, budget = made.profile, made.budget
    if profile is None or budget is None:
        return []
    workspace, dead = made.workspace.total_bytes, made.wasted_bytes
    parts = [("weights", profile.weights_bytes, "blue")]
    if profile.activation_bytes:
        parts.append(("activations", profile.activation_bytes, "cyan"))
    if profile.overhead_bytes:
        parts.append(("outside", profile.overhead_bytes, "bright_black"))
    if workspace - dead:
        parts.append(("workspace", workspace - dead, "yellow"))
    if dead:
        parts.append(("never read", dead, "red"))
    parts.append(("KV cache", budget.nbytes, "green"))
    parts.append(("unused", profile.total_bytes - sum(nbytes for _, nbytes, _ in parts), "bright_black"))
    return parts


def render_comparison(comparison: Comparison) -> RenderableType:
    """The difference of two plans for a terminal."""
    before, after = comparison.before, comparison.after
    rows = _table(("", "left"), (before.policy.value, "right"), (after.policy.value, "right"), ("difference", "right"))

    def row(name: str, a: int | None, b: int | None) -> None:
        if a is not None and b is not None:
            rows.add_row(name, f"{a:,}", f"{b:,}", f"{b - a:+,}")

    row("attention bytes", before.workspace.attention_bytes, after.workspace.attention_bytes)
    row("never read bytes", before.never_read_bytes, after.never_read_bytes)
    row("answer outside", before.answer_bytes, after.answer_bytes)
    if before.exchange_bytes or after.exchange_bytes:
        row("exchange outside", before.exchange_bytes, after.exchange_bytes)
    row("kernel outside", before.kernel_bytes, after.kernel_bytes)
    row("workspace bytes", before.workspace.total_bytes, after.workspace.total_bytes)
    if before.budget is not None and after.budget is not None:
        row("KV tokens", before.budget.tokens, after.budget.tokens)
    saved, gained = comparison.bytes_saved, comparison.kv_tokens_gained
    verb = "saves" if saved >= 0 else "costs"
    words = Text.assemble(
        f"{after.policy.value} {verb} ",
        (f"{abs(saved):,} bytes", "bold"),
        f" ({human_bytes(abs(saved))}) a rank",
        ("" if before.explicit_kv else ": "),
    )
    if before.explicit_kv:
        words.append("; the cache's size was given, so they stay free")
    else:
        words.append(f"{abs(gained):,} KV tokens", style="bold")
        words.append(f" {'more' if saved >= 0 else 'fewer'}, in whole pages")
    title = f"{before.policy.value} against {after.policy.value}"
    return Group(_section(title), rows, words)
