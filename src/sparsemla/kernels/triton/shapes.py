# SPDX-License-Identifier: Apache-2.0
"""Which tile sizes a GPU architecture runs with: a small table, no tuning at run time.

The committed table is `shapes.json` beside this file. ``sparsemla bench --tune`` (see tune.py) writes entries to a
user's own table, which is looked into first: the file named by the environment variable SPARSEMLA_TRITON_SHAPES, by
default ``~/.cache/sparsemla/triton_shapes.json``. Both look like this::

    {"sm_90": {"*": [{"up_to": 16, "heads": 16, "keys": 64, "warps": 8, "registers": 128, "per_sm": 2}]}}

that is architecture, cache format ("*": any), and shapes by the number of heads they serve, fewest first; the last one
serves all above.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsemla.formats import KVFormat

COMMITTED = Path(__file__).with_name("shapes.json")
ENVIRONMENT = "SPARSEMLA_TRITON_SHAPES"

SHARED_BYTES: dict[str, int] = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
"""Architecture → shared memory a block may take (LDS of a workgroup), bytes. Sources: CUDA programming guide, table of
technical specifications per compute capability; AMD CDNA 3 ISA, section 3.9."""
ARCHITECTURES = tuple(SHARED_BYTES)
"""Those with shapes of their own."""
REGISTERS_PER_THREAD = 255
"""NVIDIA, every architecture. CDNA 3 has 512."""


@dataclass(frozen=True)
class Shape:
    """How one launch is cut.

    Attributes:
        heads: query heads of a program, a power of two from 16.
        keys: keys of a tile, a power of two from 16.
        warps: warps of a program (wavefronts on AMD).
        registers: registers a thread may take; 0: the compiler's choice.
        per_sm: programs an SM holds at once.
        columns: output columns of a program, 512 or 256. Of two programs that share them each computes all scores. A
            call with an FP8_V4 cache always has 512: its rotary columns are values, too.
    """

    heads: int
    keys: int
    warps: int
    registers: int
    per_sm: int
    columns: int = 512

    def __post_init__(self) -> None:
        for name, least in (("heads", 16), ("keys", 16), ("warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name}: got {value}, accepted is a power of two of at least {least}")
        if not (self.registers == 0 or 32 <= self.registers <= REGISTERS_PER_THREAD) or self.per_sm < 1:
            raise ValueError(
                f"registers, per_sm: got {self.registers} and {self.per_sm}, accepted are 0 or 32 to "
                f"{REGISTERS_PER_THREAD}, and at least 1"
            )
        if self.columns not in (256, 512):
            raise ValueError(f"columns: got {self.columns}, accepted are 256 and 512")


def nearest(architecture: str) -> str:
    """The architecture of the table whose shapes serve `architecture`: of the same kind, with no more shared memory."""
    if architecture in SHARED_BYTES:
        return architecture
    if architecture.startswith("gfx"):
        return "gfx942"
    major, minor = divmod(int(architecture.removeprefix("sm_")), 10)
    if major == 8:
        return "sm_80" if minor in (0, 7) else "sm_89"
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_120")


def user_table() -> Path:
    """Where the user's own entries lie."""
    return Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "sparsemla" / "triton_shapes.json")


@functools.cache
def _table(path: Path) -> dict[str, dict[str, list[dict[str, int]]]]:
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}: got {path}, which is not JSON ({error})") from None
    return dict(table)


@functools.cache
def shape_for(architecture: str, fmt: KVFormat, heads: int) -> Shape:
    """The shape that `heads` query heads over a cache of `fmt` run with.

    Raises:
        ValueError: the user's table cannot be read.
    """
    for table, name in ((_table(user_table()), architecture), (_table(COMMITTED), nearest(architecture))):
        entries = table.get(name, {})
        rows = entries.get(fmt.value) or entries.get("*") or []
        for row in rows:
            if heads <= row["up_to"] or row is rows[-1]:
                return Shape(**{key: value for key, value in row.items() if key != "up_to"})
    raise ValueError(f"architecture: got {architecture!r}, of which {COMMITTED.name} knows nothing")


def shapes_of(architecture: str, fmt: KVFormat) -> list[Shape]:
    """The committed shapes of an architecture and format, each once."""
    entries = _table(COMMITTED)[architecture]
    rows = entries.get(fmt.value) or entries["*"]
    return list(dict.fromkeys(Shape(**{k: v for k, v in row.items() if k != "up_to"}) for row in rows))


def write_entry(path: Path, *, architecture: str, fmt: KVFormat | None, shapes: list[tuple[int, Shape]]) -> None:
    """Writes the shapes of an architecture and format (None: any) into a table, keeping what else it holds.

    Args:
        path: the table; made if it is not there.
        architecture: such as "sm_90".
        fmt: the cache format the entry is for.
        shapes: (most heads, shape), fewest heads first.
    """
    table: dict[str, Any] = dict(_table(path)) if path.is_file() else {}
    entries = dict(table.get(architecture, {}))
    entries["*" if fmt is None else fmt.value] = [{"up_to": up_to, **asdict(shape)} for up_to, shape in shapes]
    table[architecture] = entries
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    _table.cache_clear()
    shape_for.cache_clear()
