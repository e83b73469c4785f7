# SPDX-License-Identifier: Apache-2.0
"""The figures that documents quote, generated from `benchmarks/results/`: between two markers, never typed by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsemla.bench.report import Results, Row, geomean, human_bytes, human_us
from sparsemla.bench.shapes import Batch, count_label
from sparsemla.formats import KVFormat

RESULTS = Path("benchmarks") / "results"
SHORT_FORM = "hopper.json"
DETAILS = "hopper-details.json"
PICTURE = "hopper.png"
ROOFLINE = "hopper-roofline.png"
NOT_MEASURED = "Not measured on a GPU yet: there are no results to quote."
PEER_NAMES = {
    "flashmla_fp8": "FlashMLA fp8",
    "flashmla_bf16": "FlashMLA bf16",
    "fa3_bf16": "FlashAttention-3 bf16",
    "vllm_flashmla_fp8": "vLLM's FlashMLA fp8",
    "vllm_flashmla_bf16": "vLLM's FlashMLA bf16",
    "flashinfer_bf16": "FlashInfer bf16",
    "tilelang_bf16": "TileLang bf16",
}
_FP8 = KVFormat.FP8_DS_MLA.value
_MARKS = re.compile(r"(<!-- performance:(\w+)[^>]*-->\n).*?(<!-- /performance -->)", re.DOTALL)
_MOST_NAMED = 8


def short_block(root: Path) -> str:
    """For the README: the headline, a table a pool, where we lose; from the short form alone."""
    path = root / RESULTS / SHORT_FORM
    if not path.exists():
        return NOT_MEASURED + "\n"
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if row["format"] == _FP8]
    parts = [_source(data["gpu"], data["versions"], data["command"], len(rows)), _headline(data, rows)]
    if (root / RESULTS / PICTURE).exists():
        parts.append(f"![Speed-up by shape, with this GPU's floors]({(RESULTS / PICTURE).as_posix()})")
    for pool in sorted({row["pool"] for row in rows}):
        parts.append(
            f"Microseconds a call over a pool of {count_label(pool)} records, and in brackets how many times the best "
            f"peer takes:\n\n{_by_shape([row for row in rows if row['pool'] == pool])}"
        )
    parts.append(_losses(rows))
    bf16 = [row["ratio"] for row in data["rows"] if row["format"] == KVFormat.BF16.value and row["ratio"] is not None]
    if bf16:
        parts.append(
            f"Our kernel over a bf16 cache, against the best peer over it: {geomean(bf16):.2f} × in the geometric mean "
            f"of {len(bf16)} shapes, {min(bf16):.2f} × at least."
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def full_block(root: Path) -> str:
    """For the performance page: every row, with each peer and the floors; from the details."""
    path = root / RESULTS / DETAILS
    if not path.exists():
        return NOT_MEASURED + "\n"
    results = Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    floors = results.floors
    gathers = ", ".join(
        f"{rate:,.0f} at {key.split('/')[0]} bytes a record from {key.split('/')[1]} records"
        for key, rate in floors.gather_gbs.items()
    )
    parts = [
        _source(results.gpu, results.versions, results.command, len(results.rows)),
        f"Floors of that GPU in that run: copy {floors.copy_gbs:,.0f} GB/s (read plus written); matrix product "
        f"{floors.matrix_tflops:,.0f} TFLOPS; an empty kernel in a graph {floors.launch_us:.1f} µs; gather in GB/s: "
        f"{gathers} ({floors.gather_method}).",
    ]
    for fmt in dict.fromkeys(row.format for row in results.rows):
        rows = [row for row in results.rows if row.format == fmt]
        parts.append(f"Ours over `{fmt}`:\n\n{_every_row(rows)}")
        prefill = [row for row in rows if row.ratio_prefill is not None]
        if prefill:
            listed = ", ".join(
                f"{row.heads} heads, pool {count_label(row.pool)}: {row.ratio_prefill:.2f} ×" for row in prefill
            )
            parts.append(
                "Prefill from the fp8 cache, against the best bf16 peer plus the least its bf16 copy of the pool takes "
                f"(the bytes at the copy's rate): {listed}."
            )
    for name in (PICTURE, ROOFLINE):
        if (root / RESULTS / name).exists():
            parts.append(f"![{name}](../{(RESULTS / name).as_posix()})")
    if results.notes:
        parts.append("\n".join(["Notes of the run:", "", *(f"- {note}" for note in results.notes)]))
    return "\n\n".join(parts) + "\n"


BLOCKS: dict[str, Callable[[Path], str]] = {"short": short_block, "full": full_block}
DOCUMENTS = (Path("README.md"), Path("docs") / "performance.md")


def render(text: str, root: Path) -> str:
    """`text` with every marked block written anew."""
    return _MARKS.sub(lambda m: m.group(1) + BLOCKS[m.group(2)](root) + m.group(3), text)


def update(root: Path) -> list[Path]:
    """Writes the blocks of the documents under `root`; the documents, relative to it, that changed.

    Raises:
        ValueError: a document is missing or has no marked block.
    """
    changed = []
    for name in DOCUMENTS:
        path = root / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not _MARKS.search(text):
            raise ValueError(
                f"readme: got {path.name} without <!-- performance:... --> markers, accepted is one with them"
            )
        made = render(text, root)
        if made != text:
            path.write_text(made, encoding="utf-8")
            changed.append(name)
    return changed


def _source(gpu: str, versions: dict[str, str], command: str, rows: int) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{rows} shapes on one {gpu or 'CPU'}, measured by `{command}` ({listed})."


def _headline(data: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    ratios = [row for row in rows if row["ratio"] is not None]
    if not ratios:
        return ""
    least = min(ratios, key=lambda row: row["ratio"])
    lines = [
        "| our kernel over the fp8 cache | geometric mean | least |",
        "| --- | --- | --- |",
        f"| against the fastest peer at each shape, whatever cache it reads | {data['geomean_ratio']:.2f} × "
        f"| {data['min_ratio']:.2f} × ({_where(least)}) |",
    ]
    flashmla = [row for row in rows if row["flashmla_fp8_us"] and row["ours_us"]]
    if flashmla:
        slowest = min(flashmla, key=lambda row: row["flashmla_fp8_us"] / row["ours_us"])
        lines.append(
            f"| against FlashMLA over the same fp8 cache | {data['geomean_ratio_flashmla']:.2f} × "
            f"| {slowest['flashmla_fp8_us'] / slowest['ours_us']:.2f} × ({_where(slowest)}) |"
        )
    errors = max(row["error"] for row in ratios)
    transient = [row["transient_bytes"] for row in ratios if row["transient_bytes"] is not None]
    memory = ""
    if transient:
        most = max(transient)
        memory = f", and allocates {f'at most {human_bytes(most)}' if most else 'nothing'} beyond its results"
    return "\n".join(lines) + f"\n\nIt is within {errors:.1e} of float64 over the cache it reads{memory}."


def _batch(row: dict[str, Any]) -> Batch:
    return Batch(row["batch"], row["s_q"])


def _where(row: dict[str, Any]) -> str:
    return f"{row['heads']} heads, T {_batch(row).label}, pool {count_label(row['pool'])}"


def _by_shape(rows: Sequence[dict[str, Any]]) -> str:
    columns = sorted({_batch(row) for row in rows}, key=lambda b: (b.tokens, b.s_q))
    cells = {(row["heads"], _batch(row)): row for row in rows}
    lines = ["| heads | " + " | ".join(f"T {column.label}" for column in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for heads in sorted({row["heads"] for row in rows}):
        lines.append(f"| {heads} | " + " | ".join(_cell(cells.get((heads, column))) for column in columns) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["ours_us"] is None:
        return "no time"
    return human_us(row["ours_us"]) + (f" ({row['ratio']:.2f} ×)" if row["ratio"] is not None else "")


def _losses(rows: Sequence[dict[str, Any]]) -> str:
    lost = sorted((row for row in rows if row["ratio"] is not None and row["ratio"] < 1), key=lambda row: row["ratio"])
    untimed = [row for row in rows if row["ours_us"] is None]
    said = []
    if lost:
        named = "; ".join(
            f"{_where(row)} ({row['ratio']:.2f} ×, {PEER_NAMES.get(row['peer'], row['peer'])})"
            for row in lost[:_MOST_NAMED]
        )
        more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
        said.append(f"Slower than the best peer at {len(lost)} of {len(rows)} shapes: {named}{more}.")
    elif any(row["ratio"] is not None for row in rows):
        said.append("Slower than the best peer: nowhere on this grid.")
    if untimed:
        said.append(f"Without a time (no kernel, or a wrong result): {'; '.join(map(_where, untimed[:_MOST_NAMED]))}.")
    return " ".join(said)


def _every_row(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(peer.name for row in rows for peer in row.peers))
    titles = ["heads", "T", "pool", "ours µs", *(f"{PEER_NAMES.get(name, name)} µs" for name in names)]
    titles += ["ratio", "of the floor", "floor", "error", "transient"]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join(["---"] * len(titles)) + " |"]
    for row in rows:
        times = {peer.name: peer.us for peer in row.peers}
        cells = [str(row.heads), row.rows.label, count_label(row.pool), human_us(row.ours.us)]
        cells += [human_us(times.get(name)) for name in names]
        cells.append("-" if row.ratio is None else f"{row.ratio:.2f}" if row.ratio >= 1 else f"**{row.ratio:.2f}**")
        cells += ["-" if row.of_floor is None else f"{100 * row.of_floor:.0f} %", row.bound_by]
        cells += ["-" if row.ours.error is None else f"{row.ours.error:.1e}", human_bytes(row.ours.transient_bytes)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
