# SPDX-License-Identifier: Apache-2.0
"""Two pictures of a run: the speed-up by shape with the floors drawn in, and the roofline. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsemla.bench.readme import PEER_NAMES
from sparsemla.bench.report import OURS, Results, Row
from sparsemla.bench.shapes import count_label
from sparsemla.formats import KVFormat, record_layout

_HEADS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08306b")
_PEERS = ("#e6550d", "#31a354", "#756bb1", "#636363", "#de9ed6", "#8c6d31", "#ce6dbd")
_OURS = "#08519c"
_OURS_ALL = (_OURS, "#4292c6", "#9ecae1", "#08306b")


def _pyplot(target: Path) -> Any:
    """matplotlib without a display.

    Raises:
        ValueError: it is missing, or `target` is no file it can write.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("plot: matplotlib is missing, accepted is: pip install 'sparsemla[plot]'") from None
    figure = pyplot.figure()
    known = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    if target.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"plot: got {target.name!r}, accepted are files ending in {', '.join(sorted(known))}")
    if not target.parent.is_dir():
        raise ValueError(f"plot: the folder of {str(target)!r} does not exist")
    return pyplot


def check_target(target: Path) -> None:
    """ValueError unless a picture can be written there: asked before hours of measuring, not after."""
    _pyplot(target)


def speedups(results: Results, target: Path) -> None:
    """Bars: the best peer's time over ours, by batch and heads. Above each, what the floor would allow.

    Raises:
        ValueError: nothing to draw, matplotlib is missing, or `target` cannot be written.
    """
    pyplot = _pyplot(target)
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in results.rows:
        if row.ratio is not None:
            panels.setdefault((row.format, row.pool), []).append(row)
    if not panels:
        raise ValueError("plot: no row has both our time and a peer's, accepted are results with peers")
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(13, 0.7 + 3.4 * len(panels)), squeeze=False, layout="constrained"
    )
    for axis, ((fmt, pool), rows) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_speedups(axis, fmt, pool, rows)
    figure.suptitle(
        f"Sparse MLA attention on {results.gpu or 'a CPU'}: times faster than the fastest peer", fontsize=12
    )
    figure.savefig(target, dpi=100)
    pyplot.close(figure)


def _draw_speedups(axis: Any, fmt: str, pool: int, rows: Sequence[Row]) -> None:
    batches = sorted({row.rows for row in rows}, key=lambda batch: (batch.tokens, batch.s_q))
    heads = sorted({row.heads for row in rows})
    width = 0.84 / len(heads)
    colours = _HEADS[-len(heads) :] if len(heads) <= len(_HEADS) else [_OURS] * len(heads)
    labelled: set[str] = set()

    def once(label: str) -> str:
        fresh = label not in labelled
        labelled.add(label)
        return label if fresh else "_"

    highest = 1.0
    floor = min(0.5, 0.75 * min(row.ratio for row in rows if row.ratio))  # the smallest bar is one, too
    for row in rows:
        place = batches.index(row.rows) + (heads.index(row.heads) - (len(heads) - 1) / 2) * width
        ratio, best = row.ratio or 0.0, row.best
        colour = colours[heads.index(row.heads)]
        axis.bar(place, ratio, width * 0.92, color=colour, label=once(f"{row.heads} heads"), zorder=2)
        ink = "white" if colours.index(colour) >= len(colours) - 2 else "black"
        axis.text(place, 1.04 * floor, f"{ratio:.2f}", ha="center", va="bottom", fontsize=6, color=ink, zorder=5)
        if best is not None and best.us is not None:
            allowed = best.us / row.bound_us
            line = [place - width * 0.46, place + width * 0.46]
            axis.plot(
                line, [allowed, allowed], color="black", linewidth=1.4, label=once("what the floor allows"), zorder=3
            )
            highest = max(highest, ratio, allowed)
        if fmt == KVFormat.FP8_DS_MLA.value and row.ratio_flashmla is not None:
            label = once("ours against FlashMLA fp8")
            axis.plot(place, row.ratio_flashmla, "D", color="#e6550d", markersize=3.2, label=label, zorder=4)
            highest = max(highest, row.ratio_flashmla)
    axis.axhline(1, color="#444444", linewidth=1, linestyle="--", zorder=1)
    axis.set_yscale("log")
    axis.set_ylim(floor, max(4.0, min(highest * 1.5, 64.0)))
    known = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 16, 32, 64)
    ticks = [tick for tick in known if floor <= tick <= axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks(range(len(batches)), [f"T = {batch.label.replace('x', ' × ')}" for batch in batches])
    axis.set_xlim(-0.5, len(batches) - 0.5)
    peers = "the fastest peer over any cache" if fmt != KVFormat.BF16.value else "the fastest peer over bf16"
    axis.set_title(f"ours over {fmt}, pool of {count_label(pool)} records, against {peers}", loc="left", fontsize=10)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def roofline(results: Results, target: Path) -> None:
    """Arithmetic over bytes gathered against TFLOPS, ours and the peers', under this machine's own roofs.

    Raises:
        ValueError: nothing to draw, matplotlib is missing, or `target` cannot be written.
    """
    pyplot = _pyplot(target)
    pools = sorted({row.pool for row in results.rows if row.ours.us is not None or row.best is not None})
    if not pools:
        raise ValueError("plot: no row has a time, accepted are results with times")
    figure, axes = pyplot.subplots(
        1, len(pools), figsize=(1.5 + 6 * len(pools), 5.4), squeeze=False, layout="constrained"
    )
    for axis, pool in zip(axes[0], pools, strict=True):
        _draw_roofline(axis, results, [row for row in results.rows if row.pool == pool])
        axis.set_title(f"pool of {count_label(pool)} records", loc="left", fontsize=10)
    figure.suptitle(f"Sparse MLA attention on {results.gpu or 'a CPU'}, under its measured floors", fontsize=12)
    figure.savefig(target, dpi=100)
    pyplot.close(figure)


def _draw_roofline(axis: Any, results: Results, rows: Sequence[Row]) -> None:
    points: dict[str, list[tuple[float, float, int]]] = {}
    seen: set[tuple[str, int, str, int]] = set()
    for row in rows:
        for entry in (row.ours, *row.peers):
            mark = (entry.name, row.heads, entry.reads, row.batch * 10**7 + row.s_q)
            if entry.us is None or mark in seen:  # a peer appears in the row of each format
                continue
            seen.add(mark)
            name = f"ours, {entry.reads}" if entry.name == OURS else PEER_NAMES.get(entry.name, entry.name)
            nbytes = row.batch * row.s_q * row.topk * _record_bytes(entry.reads, row)
            points.setdefault(name, []).append((row.flops / nbytes, row.flops / entry.us / 1e6, row.batch * row.s_q))
    largest = max(tokens for values in points.values() for _, _, tokens in values)
    ours, peers = iter(_OURS_ALL * 2), iter(_PEERS * 2)
    for name, values in sorted(points.items(), key=_ours_first):
        mine = name.startswith("ours")
        axis.scatter(
            *([value[i] for value in values] for i in (0, 1)),
            s=[14 + 50 * (tokens / largest) ** 0.25 for _, _, tokens in values],
            color=next(ours if mine else peers),
            marker="o" if mine else "^",
            alpha=0.85,
            label=name,
            zorder=3 if mine else 2,
        )
    peak, label = results.floors.matrix_tflops, count_label(rows[0].pool)
    rates = [(int(k.split("/")[0]), v) for k, v in results.floors.gather_gbs.items() if k.split("/")[1] == label]
    ridges = [peak / rate * 1e3 for _, rate in rates]
    flops = [x for values in points.values() for x, _, _ in values]
    least, most = min([*flops, *(ridge / 2 for ridge in ridges)]) / 1.6, max([*flops, *ridges]) * 1.6
    for (record_bytes, rate), ridge, style in zip(rates, ridges, ("-", "--", ":", "-.") * 2, strict=False):
        roof = f"gather of {record_bytes} B: {rate:,.0f} GB/s"
        axis.plot([least, ridge], [least * rate / 1e3, peak], color="black", linewidth=1.1, linestyle=style, label=roof)
    axis.plot([min(ridges, default=least), most], [peak, peak], color="black", linewidth=1.1)
    axis.annotate(
        f"matrix product: {peak:,.3g} TFLOPS", (most, peak), (0, 3), textcoords="offset points", ha="right", fontsize=7
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("arithmetic a byte gathered (FLOP/B): more heads, more to the right")
    axis.set_ylabel("TFLOPS; larger marks: more query tokens")
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _ours_first(item: tuple[str, object]) -> tuple[bool, bool, str]:
    name = item[0]
    return not name.startswith("ours"), KVFormat.BF16.value in name, name


def _record_bytes(reads: str, row: Row) -> int:
    """Bytes of a record in the cache that an implementation reads."""
    if reads == KVFormat.BF16.value:
        return 2 * row.d_qk
    return record_layout(reads).record_bytes
