# SPDX-License-Identifier: Apache-2.0
"""Results: rows as data, as a document with everything, as the short form quoted elsewhere, as a table to read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sparsemla.bench.floors import Floors
from sparsemla.bench.peers import FLASHMLA_FP8
from sparsemla.bench.shapes import Batch, count_label
from sparsemla.bench.timing import Timing
from sparsemla.formats import KVFormat

OURS = "sparsemla"
SCHEMA = 2


@dataclass(frozen=True)
class Entry:
    """One implementation on one case.

    Attributes:
        name: OURS or a peer's name.
        reads: format of the cache it reads.
        kernel: which of our kernels served; "" for a peer.
        timing: None where there is none; `note` says why.
        error: relative error of the output over the rows checked, against float64 over the cache that it reads.
        lse_error: largest absolute error of the log-sum-exp there; of ours only.
        transient_bytes: taken during a call, or held for calls, beyond inputs and results; None where unknown.
    """

    name: str
    reads: str
    kernel: str = ""
    timing: Timing | None = None
    error: float | None = None
    lse_error: float | None = None
    transient_bytes: int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that are not left at their default; of the timing its five numbers, in the order of `Timing`."""
        left = {f.name: f.default for f in dataclasses.fields(self)}
        timing = None if self.timing is None else list(dataclasses.astuple(self.timing))
        fields = {**dataclasses.asdict(self), "timing": timing}
        return {name: value for name, value in fields.items() if value != left[name]}

    @property
    def us(self) -> float | None:
        """Median microseconds a call."""
        return None if self.timing is None else self.timing.median_us


@dataclass(frozen=True)
class Row:
    """Our kernel on one format at one case, the peers it is compared with, and the floors under it.

    Peers of a row: all of them for `fp8_ds_mla`, whatever cache they read; those over bf16 for `bf16`.
    """

    format: str
    heads: int
    batch: int
    s_q: int
    pool: int
    topk: int
    d_qk: int
    record_bytes: int
    flops: int
    ours: Entry
    peers: tuple[Entry, ...]
    gather_us: float
    matrix_us: float
    bound_us: float
    bound_by: str
    upconversion_us: float
    """The least that a bf16 copy of the whole pool costs, which a bf16 peer needs where the cache is fp8."""

    @property
    def key(self) -> tuple[str, int, int, int, int, int]:
        """What tells rows apart: (format, heads, batch, s_q, pool, topk)."""
        return self.format, self.heads, self.batch, self.s_q, self.pool, self.topk

    @property
    def rows(self) -> Batch:
        """The batch."""
        return Batch(self.batch, self.s_q)

    @property
    def best(self) -> Entry | None:
        """The fastest peer."""
        timed = [peer for peer in self.peers if peer.us is not None]
        return min(timed, key=lambda peer: peer.us or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """Best peer's time over ours: above 1 we are faster."""
        return None if self.best is None else _over(self.best.us, self.ours.us)

    @property
    def flashmla_us(self) -> float | None:
        """FlashMLA's fp8 decode, in the first build measured."""
        times = {peer.name: peer.us for peer in self.peers}
        return next((times[name] for name in FLASHMLA_FP8 if times.get(name) is not None), None)

    @property
    def ratio_flashmla(self) -> float | None:
        """FlashMLA's fp8 decode over ours."""
        return _over(self.flashmla_us, self.ours.us)

    @property
    def ratio_prefill(self) -> float | None:
        """From the fp8 cache in prefill: the best bf16 peer plus the least its copy costs, over ours."""
        if self.s_q < 1024 or self.format == KVFormat.BF16.value:
            return None
        times = [p.us + self.upconversion_us for p in self.peers if p.us is not None and p.reads == KVFormat.BF16.value]
        return _over(min(times, default=None), self.ours.us)

    @property
    def of_floor(self) -> float | None:
        """The floor over our time: 1 cannot be beaten."""
        return _over(self.bound_us, self.ours.us)

    def to_json(self) -> dict[str, Any]:
        """Every field, and what follows from them; of an entry what it does not leave at its default."""
        follows = ("ratio", "ratio_flashmla", "ratio_prefill", "of_floor")
        best = None if self.best is None else self.best.name
        entries = {"ours": self.ours.to_json(), "peers": [peer.to_json() for peer in self.peers]}
        derived = {name: getattr(self, name) for name in follows}
        return {**dataclasses.asdict(self), **entries, "best_peer": best, **derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        known = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        return cls(**{**known, "ours": _entry(data["ours"]), "peers": tuple(map(_entry, data["peers"]))})


def _over(other: float | None, ours: float | None) -> float | None:
    return None if other is None or not ours else other / ours


def _entry(data: dict[str, Any]) -> Entry:
    timing = data.get("timing")
    return Entry(**{**data, "timing": None if timing is None else Timing(*timing)})


@dataclass(frozen=True)
class Results:
    """A run, or several merged.

    Attributes:
        command: what was typed.
        device: "cuda" or "cpu"; gpu: its name, "" on a CPU.
        versions: of everything that took part.
        state: what the tensors were like ("warm", "cold").
        notes: a line for each peer that is missing, each case not reached, each thing to know.
    """

    command: str
    device: str
    gpu: str
    versions: dict[str, str]
    floors: Floors
    rows: tuple[Row, ...] = ()
    state: str = "warm"
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The document with everything."""
        head = {"schema": SCHEMA, **{n: getattr(self, n) for n in ("command", "device", "gpu", "versions", "state")}}
        return {
            **head,
            "floors": dataclasses.asdict(self.floors),
            "notes": list(self.notes),
            "summaries": {name: summary(self.rows, name) for name in dict.fromkeys(row.format for row in self.rows)},
            "rows": [row.to_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        """What `to_json` wrote.

        Raises:
            ValueError: it is no such document.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"results: got schema {data.get('schema')!r}, accepted is {SCHEMA}")
        fields = {name: data[name] for name in ("command", "device", "gpu", "versions", "state")}
        rows = tuple(Row.from_json(row) for row in data["rows"])
        return cls(**fields, floors=Floors(**data["floors"]), rows=rows, notes=tuple(data["notes"]))

    def merged(self, newer: Results) -> Results:
        """These rows, replaced where `newer` measured them again.

        Raises:
            ValueError: the two were not measured with the same GPU, versions and state, and must not be mixed.
        """
        for name in ("gpu", "versions", "state"):
            ours, theirs = getattr(self, name), getattr(newer, name)
            if ours != theirs:
                raise ValueError(f"merge: {name} was {ours} and is {theirs}, accepted are results of the same")
        again = {row.key for row in newer.rows}
        kept = [row for row in self.rows if row.key not in again]
        command = self.command if not newer.rows else f"{self.command} && {newer.command}"
        gathers = {**self.floors.gather_gbs, **newer.floors.gather_gbs}
        return dataclasses.replace(
            newer,
            command=newer.command if self.command == newer.command or not kept else command,
            floors=dataclasses.replace(newer.floors, gather_gbs=gathers),
            rows=tuple(sorted([*kept, *newer.rows], key=_order)),
            notes=tuple(dict.fromkeys([*self.notes, *newer.notes])) if kept else newer.notes,
        )


def _order(row: Row) -> tuple[Any, ...]:
    # By format, pool and batch, as the grid runs; 128 tokens of 128 requests before 128 of 32.
    return row.format != KVFormat.FP8_DS_MLA.value, row.format, row.pool, row.rows.tokens, row.s_q, row.heads


def summary(rows: Iterable[Row], fmt: str) -> dict[str, Any]:
    """The ratios of one format's rows in short. A row without a time counts in `untimed`, and in nothing else."""
    ours = [row for row in rows if row.format == fmt]
    ratios = [row.ratio for row in ours if row.ratio is not None]
    return {
        "rows": len(ours),
        "untimed": sum(row.ours.us is None for row in ours),
        "geomean_ratio": geomean(ratios),
        "min_ratio": min(ratios, default=None),
        "geomean_ratio_flashmla": geomean([r.ratio_flashmla for r in ours if r.ratio_flashmla is not None]),
        "min_ratio_prefill": min((r.ratio_prefill for r in ours if r.ratio_prefill is not None), default=None),
        "largest_error": max((r.ours.error for r in ours if r.ours.error is not None), default=None),
        "largest_transient_bytes": max(
            (r.ours.transient_bytes for r in ours if r.ours.transient_bytes is not None), default=None
        ),
    }


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def short_form(results: Results) -> dict[str, Any]:
    """The form that is quoted: the three headline numbers, of the fp8_ds_mla rows, and a line of figures a row.

    `ratio` is peer over ours, `peer` the fastest of those the row is compared with; null where there is no time.
    """
    headline = summary(results.rows, KVFormat.FP8_DS_MLA.value)
    names = ("geomean_ratio", "min_ratio", "geomean_ratio_flashmla")
    return {
        "command": results.command,
        "gpu": results.gpu,
        "versions": results.versions,
        "rows": [
            {
                "format": row.format,
                "heads": row.heads,
                "batch": row.batch,
                "s_q": row.s_q,
                "pool": row.pool,
                "ours_us": _rounded(row.ours.us),
                "peer_us": None if row.best is None else _rounded(row.best.us),
                "ratio": _rounded(row.ratio),
                "error": row.ours.error,
                "transient_bytes": row.ours.transient_bytes,
                "peer": None if row.best is None else row.best.name,
                "flashmla_fp8_us": _rounded(row.flashmla_us),
            }
            for row in results.rows
        ],
        **{name: _rounded(headline[name]) for name in names},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def quotable(command: Sequence[str]) -> str:
    """A command line without the folders of this machine, and without where its files went."""
    shown: list[str] = []
    for word in command:
        if shown and shown[-1] == "--out":
            shown.pop()
        else:
            shown.append(word.rsplit("/", 1)[-1] if word.startswith(("/", "..", "~")) else word)
    return shlex.join(shown)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes the whole file or leaves the one that is there: a run may be ended at any moment.

    Numbers keep five digits, which is more than any measurement has; of a list (the rows) each element is a line.
    """
    lines = ",\n".join(f" {json.dumps(name)}: {_lines(_five_digits(value))}" for name, value in document.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    beside.replace(path)


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n ]"
    return json.dumps(value)


def _five_digits(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _five_digits(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_five_digits(item) for item in value]
    return value


def human_bytes(nbytes: int | None) -> str:
    """``0``, ``96 B``, ``2052 MiB``."""
    if nbytes is None:
        return "?"
    if nbytes < 1024:
        return f"{nbytes} B" if nbytes else "0"
    return f"{nbytes / 1024:.0f} KiB" if nbytes < 1024**2 else f"{nbytes / 1024**2:.0f} MiB"


def human_us(value: float | None) -> str:
    """Three or four digits of microseconds."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def line(row: Row) -> str:
    """A row for a log."""
    ours = row.ours
    head = f"{row.format} h={row.heads} T={row.rows.label} pool={count_label(row.pool)}:"
    if ours.us is None:
        return f"{head} no time: {ours.note}"
    against = "no peer" if row.best is None else f"{row.best.name} {human_us(row.best.us)} us, ratio {row.ratio:.2f}"
    failed = "".join(f"; {peer.name}: {peer.note}" for peer in row.peers if peer.us is None)
    return f"{head} {human_us(ours.us)} us ({ours.kernel}, error {ours.error:.1e}), {against}{failed}"


def tables(results: Results) -> list[Table]:
    """For a terminal of 80 columns and more: a table a format and pool, with peers' columns where there are peers."""
    grouped: dict[tuple[str, int], list[Row]] = {}
    for row in results.rows:
        grouped.setdefault((row.format, row.pool), []).append(row)
    return [_table(fmt, pool, rows) for (fmt, pool), rows in grouped.items()]


def _table(fmt: str, pool: int, rows: Sequence[Row]) -> Table:
    compared = any(row.peers for row in rows)
    made = Table(
        title=f"ours over {fmt}, pool of {count_label(pool)} records",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    titles = ["T", "h", "ours µs", "±"]
    titles += ["best µs", "by", "ratio", "FM"] if compared else []
    for title in [*titles, "floor", "limit", "error", "extra"]:
        made.add_column(title, justify="left" if title in ("by", "limit") else "right", no_wrap=True)
    for row in rows:
        made.add_row(*_cells(row, compared))
    return made


_SHORT_NAMES = {"flashmla_fp8": "FM fp8", "flashmla_bf16": "FM bf16", "fa3_bf16": "FA3 bf16"}


def _cells(row: Row, compared: bool) -> list[str]:
    ours, best, timing = row.ours, row.best, row.ours.timing
    cells = [row.rows.label, str(row.heads), human_us(ours.us) if timing is not None else "[red]none[/red]"]
    cells.append("-" if timing is None else human_us((timing.high_us - timing.low_us) / 2))
    if compared:
        ratio = "-"
        if row.ratio is not None:
            colour = "green" if row.ratio >= 1 else "red"
            ratio = f"[{colour}]{row.ratio:.2f}[/{colour}]"
        name = "-" if best is None else _SHORT_NAMES.get(best.name, best.name)
        cells += [human_us(None if best is None else best.us), name, ratio]
        cells.append("-" if row.ratio_flashmla is None else f"{row.ratio_flashmla:.2f}")
    cells += ["-" if row.of_floor is None else f"{100 * row.of_floor:.0f} %", row.bound_by]
    cells.append("-" if ours.error is None else f"{ours.error:.1e}".replace("e-0", "e-"))
    return [*cells, human_bytes(ours.transient_bytes)]


LEGEND = (
    "T: query tokens. h: heads. ±: half the span from the 10th to the 90th percentile. ratio: best peer over ours. FM: "
    "FlashMLA's fp8 decode over ours. FA3: FlashAttention-3. floor: the least time this machine allows, by the limit "
    "named, over ours. error: relative, against float64. extra: bytes one call takes beyond its results."
)
