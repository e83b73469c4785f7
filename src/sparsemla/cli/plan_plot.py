# SPDX-License-Identifier: Apache-2.0
"""The memory map of a rank, drawn with matplotlib (imported here only, and only when asked for)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsemla.cli import UserError
from sparsemla.cli.plan import human_bytes, memory_segments
from sparsemla.serving.plan import Plan

_COLOURS = {
    "weights": "#4c72b0",
    "activations": "#64b5cd",
    "outside": "#8c8c8c",
    "workspace": "#dda63a",
    "never read": "#c44e52",
    "KV cache": "#55a868",
    "unused": "#dddddd",
}
_READ, _DEAD, _OTHER = "#dda63a", "#c44e52", "#8172b3"
_GIB = 1 << 30


def draw_memory_map(plans: Sequence[Plan], target: Path) -> None:
    """Draw one bar a plan: the workspace tensor by tensor, and (with memory figures) the whole GPU.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written as an image.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'sparsemla[plot]'") from None
    known = pyplot.figure().canvas.get_supported_filetypes()
    pyplot.close("all")
    if target.suffix.lstrip(".").lower() not in known:
        raise UserError(f"--plot: got {str(target)!r}, accepted are files ending in {', '.join(sorted(known))}")
    if not target.parent.is_dir():
        raise UserError(f"--plot: the directory {str(target.parent)!r} does not exist")

    whole = all(memory_segments(plan) for plan in plans)
    heights = [1.3 + 1.0 * len(plans)] * (2 if whole else 1)
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(11, sum(heights) + 0.6), squeeze=False, layout="constrained", height_ratios=heights
    )
    config = plans[0].config
    figure.suptitle(
        f"{config.model.name}, one of {config.parallel.world} GPUs (TP {config.parallel.tp}, "
        f"DCP {config.parallel.dcp}, PCP {config.parallel.pcp}), {config.limits.max_model_len:,} tokens a request",
        fontsize=12,
    )
    rows = list(axes[:, 0])
    if whole:
        _draw_gpu(rows.pop(0), plans)
    _draw_workspace(rows.pop(0), plans)
    figure.savefig(target, dpi=140)
    pyplot.close(figure)


def _bars(axis: Any, plans: Sequence[Plan], title: str) -> None:
    axis.set_yticks(range(len(plans)), [plan.policy.value for plan in plans])
    axis.set_ylim(len(plans) - 0.4, -0.6)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel("GiB")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _segment(
    axis: Any, row: int, start: float, nbytes: int, scale: float, colour: str, label: str, dead: bool
) -> float:
    """One piece of a bar, labelled inside where the label fits; returns where it ends."""
    width = nbytes / _GIB
    hatch = {"hatch": "///", "edgecolor": "white"} if dead else {"edgecolor": "white"}
    axis.barh(row, width, left=start, height=0.62, color=colour, linewidth=0.8, **hatch)
    lines = label.split("\n")
    if width > scale * 0.0115 * max(len(line) for line in lines):
        box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0} if dead else None
        text = "black" if colour in ("#dddddd", "#dda63a") else "white"
        axis.text(start + width / 2, row, label, ha="center", va="center", fontsize=8, color=text, bbox=box)
    elif not dead and width > scale * 0.015:
        axis.text(start + width / 2, row, lines[0], ha="center", va="center", fontsize=6, rotation=90, color="black")
    return start + width


def _draw_gpu(axis: Any, plans: Sequence[Plan]) -> None:
    from matplotlib.patches import Patch

    _bars(axis, plans, "Memory of one GPU")
    seen: dict[str, str] = {}
    scale = max(plan.profile.total_bytes for plan in plans if plan.profile is not None) / _GIB
    for row, plan in enumerate(plans):
        start = 0.0
        for name, nbytes, _ in memory_segments(plan):
            seen.setdefault(name, _COLOURS[name])
            label = f"{name}\n{human_bytes(nbytes)}"
            if name == "KV cache" and plan.budget is not None:
                words = f"{human_bytes(nbytes)}: {plan.budget.tokens:,} tokens"
                axis.text(start + nbytes / _GIB / 2, row - 0.34, words, ha="center", va="bottom", fontsize=8)
                label = "KV"
            start = _segment(axis, row, start, nbytes, scale, _COLOURS[name], label, name == "never read")
    axis.set_xlim(0, scale)
    handles = [Patch(facecolor=colour, label=name) for name, colour in seen.items()]
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False)


def _draw_workspace(axis: Any, plans: Sequence[Plan]) -> None:
    from matplotlib.patches import Patch

    _bars(axis, plans, "Shared workspace: attention's tensors, taken together")
    scale = max(max(plan.workspace.total_bytes for plan in plans) / _GIB, 1e-3)
    others = False
    for row, plan in enumerate(plans):
        start = 0.0
        for item in plan.reservations:
            label = f"{item.name}\n{human_bytes(item.nbytes)}"
            colour = _READ if item.ever_read else _DEAD
            if not item.ever_read:
                label += "\nnever read"
            start = _segment(axis, row, start, item.nbytes, scale, colour, label, not item.ever_read)
        if start < scale * 0.1:  # nothing, or pieces too narrow for their names
            taken = human_bytes(sum(item.nbytes for item in plan.reservations)) if plan.reservations else "0 bytes"
            axis.text(start + scale * 0.005, row, taken, va="center", fontsize=9, color="#2e7d32")
        if len(plan.workspace.users) > 1:
            others = True
            need = max(nbytes for _, nbytes in plan.workspace.users[1:]) / _GIB
            axis.plot([need, need], [row - 0.4, row + 0.4], color=_OTHER, linewidth=2.5)
        total = plan.workspace.total_bytes
        if total:
            axis.plot([0, total / _GIB], [row + 0.4, row + 0.4], color="black", linewidth=1.2, clip_on=False)
    axis.set_xlim(0, scale * 1.02)
    handles = [Patch(facecolor=_READ, label="read"), Patch(facecolor=_DEAD, hatch="///", label="never read")]
    if others:
        handles.append(Patch(facecolor=_OTHER, label="other users' need"))
    handles.append(Patch(facecolor="black", label="buffer's size"))
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=8, frameon=False)
