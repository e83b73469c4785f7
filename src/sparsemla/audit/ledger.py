# SPDX-License-Identifier: Apache-2.0
"""What a watch saw, as plain values: allocations, regions, totals, and the rows a report shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .sentinel import EMPTY, Runs, size

Read = Literal["read", "never read", "unknown", "not tested"]

NOT_COVERED: tuple[str, ...] = (
    "allocations made on other threads, in other processes, or outside PyTorch (numpy, malloc, cudaMalloc)",
    "on the CPU: scratch that compiled code takes past the dispatcher (at::detail::empty_cpu, malloc); on CUDA the "
    "caching allocator reports it",
    "the content of memory allocated or handed out while a CUDA graph is captured, and everything a replay does",
    "torch.compile: compiled functions run eagerly under the audit",
    "sparse, quantised, nested and meta tensors, and devices other than cpu and cuda",
    "gaps shorter than 8 to 15 bytes between written bytes (with two passes every byte counts)",
)
"""What the audit does not see. Printed under every report."""

NOT_COVERED_DEEP: tuple[str, ...] = (
    "reads that change no result (multiplied by zero, masked out, below a threshold) count as no read",
    "results are the returned values, tensors given as arguments, and tensors changed in place through PyTorch "
    "operators; files, sockets and tensors changed by kernels launched outside PyTorch's dispatcher are not compared",
    "one verdict an allocation: a buffer of which one byte is read is read",
)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One storage that the watched code allocated.

    `nbytes` are the bytes of the storage (what was asked for, before the allocator rounds up). `never_written` is None
    where the content was not examined, and `why_not` says why. `born` and `died` order events inside one watch; `died`
    is None for what was alive at the end.
    """

    index: int
    op: str
    via: tuple[str, ...]
    stack: tuple[str, ...]
    device: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    born: int
    died: int | None
    never_written: int | None
    runs: Runs = field(default_factory=lambda: EMPTY, repr=False, compare=False)
    why_not: str = ""
    read: Read = "not tested"
    read_note: str = ""

    @property
    def site(self) -> str:
        """The innermost line of Python outside PyTorch that led here."""
        return self.stack[0] if self.stack else "(no Python frame)"

    @property
    def never_read(self) -> int:
        """Bytes that were written and, as `--deep` proved, never read."""
        return self.nbytes - (self.never_written or 0) if self.read == "never read" else 0

    @property
    def dead(self) -> int:
        """Bytes never written, plus bytes written and never read."""
        return (self.never_written or 0) + self.never_read


@dataclass(frozen=True, kw_only=True)
class Region:
    """A named part of a larger buffer (a reservation of a workspace), over all the times it was handed out.

    A byte counts as written if it was written after any of the hand-outs. `inside` is the index of the watched
    allocation it lies in; a region of a buffer that is older than the watch has None there and counts towards the
    totals on its own.
    """

    name: str
    nbytes: int
    handouts: int
    stack: tuple[str, ...]
    device: str
    dtype: str
    inside: int | None
    never_written: int | None
    runs: Runs = field(default_factory=lambda: EMPTY, repr=False, compare=False)
    why_not: str = ""
    read: Read = "not tested"
    read_note: str = ""

    @property
    def site(self) -> str:
        return self.stack[0] if self.stack else "(no Python frame)"

    @property
    def never_read(self) -> int:
        return self.nbytes - (self.never_written or 0) if self.read == "never read" else 0

    @property
    def dead(self) -> int:
        return (self.never_written or 0) + self.never_read


@dataclass(frozen=True, kw_only=True)
class Row:
    """Allocations of one call site, operator and type together, or one region."""

    kind: Literal["allocation", "region"]
    what: str
    brief: str  # `what` without the steps inside PyTorch's own operators
    who: str
    stack: tuple[str, ...]
    device: str
    count: int
    bytes_each: int  # the largest one
    bytes_all: int
    never_written: int
    never_read: int
    dead: int
    unexamined: int  # bytes whose content was not examined
    read: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class Ledger:
    """The result of a watch. Empty until the `with` block ends."""

    allocations: list[Allocation] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deep: bool = False
    uncovered: dict[str, int] = field(default_factory=dict)
    shared_dead: int = 0  # bytes of older buffers that were handed out by name and never written after any hand-out

    @property
    def dead_bytes(self) -> int:
        """The most dead bytes that existed at one time: the memory that could be had back."""
        return self._regions_dead() + _peak((a.born, a.died, a.dead) for a in self.allocations)

    def _regions_dead(self) -> int:
        """Dead bytes of regions in buffers that are not in the ledger themselves; overlapping ones count once."""
        return self.shared_dead + sum(region.never_read for region in self.regions if region.inside is None)

    @property
    def dead_bytes_total(self) -> int:
        """Dead bytes of every allocation added up, also of those that never existed at the same time."""
        return self._regions_dead() + sum(a.dead for a in self.allocations)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the recorded allocations held at one time."""
        return _peak((a.born, a.died, a.nbytes) for a in self.allocations)

    @property
    def total_bytes(self) -> int:
        return sum(a.nbytes for a in self.allocations)

    def region(self, name: str) -> Region:
        """The region of that name; KeyError with the known names where there is none."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(f"no region {name!r} in the ledger; it has {[r.name for r in self.regions]}")

    def dead(self) -> list[Allocation]:
        """Allocations with any dead byte, most dead bytes first."""
        return sorted((a for a in self.allocations if a.dead), key=lambda a: -a.dead)

    def rows(self) -> list[Row]:
        """What a report shows, most dead bytes first, then largest first."""
        groups: dict[tuple[object, ...], list[Allocation]] = {}
        for a in self.allocations:
            groups.setdefault((a.stack, a.op, a.via, a.dtype, a.device), []).append(a)
        rows = [_region_row(region) for region in self.regions]
        rows += [_row(members) for members in groups.values()]
        return sorted(rows, key=lambda row: (-row.dead, row.kind != "region", -row.bytes_all))

    def not_covered(self) -> list[str]:
        """What this audit could not see: the general limits, then what was met in this run."""
        limits = [*NOT_COVERED, *(NOT_COVERED_DEEP if self.deep else ())]
        return limits + [f"met in this run: {what}, {nbytes:,} bytes" for what, nbytes in self.uncovered.items()]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`. Byte counts are plain integers."""
        return {
            "totals": {
                "allocations": len(self.allocations),
                "bytes": self.total_bytes,
                "peak_bytes": self.peak_bytes,
                "dead_bytes": self.dead_bytes,
                "dead_bytes_total": self.dead_bytes_total,
                "never_written": sum(a.never_written or 0 for a in self.allocations),
                "never_read": sum(a.never_read for a in self.allocations),
            },
            "deep": self.deep,
            "rows": [row.as_dict() for row in self.rows()],
            "notes": list(self.notes),
            "not_covered": self.not_covered(),
        }

    def __str__(self) -> str:
        lines = [
            f"{len(self.allocations)} allocations, {self.total_bytes:,} bytes, at most {self.peak_bytes:,} at once; "
            f"dead at once: {self.dead_bytes:,} bytes"
        ]
        for row in self.rows():
            if row.dead:
                lines.append(f"  {row.dead:>16,} dead of {row.bytes_all:,}: {row.brief} by {row.who}")
        return "\n".join(lines)


def _peak(spans: Iterable[tuple[int, int | None, int]]) -> int:
    def steps() -> Iterator[tuple[int, int]]:
        for born, died, nbytes in spans:
            if nbytes:
                yield born, nbytes
                if died is not None:
                    yield died, -nbytes

    level = peak = 0
    for _, step in sorted(steps()):  # at one event what dies (negative) comes before what is born
        level += step
        peak = max(peak, level)
    return peak


def _region_row(region: Region) -> Row:
    note = f"inside allocation {region.inside}" if region.inside is not None else "in a buffer older than the watch"
    return Row(
        kind="region",
        what=f"{region.name} ({region.dtype})",
        brief=f"{region.name} ({region.dtype})",
        who=region.site,
        stack=region.stack,
        device=region.device,
        count=region.handouts,
        bytes_each=region.nbytes,
        bytes_all=region.nbytes,
        never_written=region.never_written or 0,
        never_read=region.never_read,
        dead=region.dead,
        unexamined=region.nbytes if region.never_written is None else 0,
        read=region.read,
        notes=tuple(note for note in (note, region.why_not, region.read_note) if note),
    )


def _row(members: list[Allocation]) -> Row:
    first = max(members, key=lambda a: a.nbytes)
    verdicts = {a.read for a in members}
    shape = "x".join(map(str, first.shape)) if first.shape is not None else "raw"
    return Row(
        kind="allocation",
        what=f"{' > '.join((*first.via, first.op))} {first.dtype}[{shape}]",
        brief=f"{_brief((*first.via, first.op))} {first.dtype}[{shape}]",
        who=first.site,
        stack=first.stack,
        device=first.device,
        count=len(members),
        bytes_each=first.nbytes,
        bytes_all=sum(a.nbytes for a in members),
        never_written=sum(a.never_written or 0 for a in members),
        never_read=sum(a.never_read for a in members),
        dead=sum(a.dead for a in members),
        unexamined=sum(a.nbytes for a in members if a.never_written is None),
        read=verdicts.pop() if len(verdicts) == 1 else "mixed",
        notes=tuple(dict.fromkeys(note for a in members for note in (a.why_not, a.read_note) if note)),
    )


def _brief(chain: tuple[str, ...]) -> str:
    """The outermost of PyTorch's own operators, or the innermost foreign one and its callee: `ext::decode > empty`."""
    foreign = [i for i, name in enumerate(chain) if not name.startswith("aten::")]
    kept = chain[:1] if not foreign else chain[foreign[-1] : foreign[-1] + 2]
    return " > ".join(name.removeprefix("aten::").split(".")[0] for name in kept)


def with_verdict(entry: Allocation, read: Read, note: str) -> Allocation:
    """The same allocation with what `--deep` found."""
    return replace(entry, read=read, read_note=note)


def with_runs(entry: Allocation, runs: Runs) -> Allocation:
    """The same allocation with never-written runs of two passes together."""
    return replace(entry, runs=runs, never_written=size(runs))
