# SPDX-License-Identifier: Apache-2.0
"""The rooms of docs/architecture.md: who may import whom, and how large a file may grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "sparsemla"

MAY_IMPORT: dict[str, set[str]] = {
    "formats": set(),
    "schedule": set(),
    "cache": {"formats"},
    "reference": {"formats", "cache"},
    "kernels": {"formats", "cache", "schedule"},
    "attention": {"formats", "cache", "schedule", "kernels"},
    "serving": {"formats", "cache", "schedule", "kernels", "attention"},
    "audit": set(),
    "integrations": {"formats", "cache", "schedule", "kernels", "attention", "serving"},
    "bench": {"formats", "cache", "schedule", "reference", "kernels", "attention"},
    "cli": {
        "formats",
        "cache",
        "schedule",
        "reference",
        "kernels",
        "attention",
        "serving",
        "audit",
        "integrations",
        "bench",
    },
}
"""Room → the rooms it may import (itself always). The package's __init__ looks names up lazily and is no room."""

MOST_LINES = 600
"""A file above this is missing a room."""

MOST_KERNEL_LINES = 900
"""For device code: a kernel is one function for its compiler, and its warps' roles are best read side by side."""


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    """Rooms named by any import statement of a file, those inside functions and TYPE_CHECKING blocks included."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["sparsemla", *path.relative_to(PACKAGE).parent.parts]
            prefix = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*prefix, *([node.module] if node.module else [])])
            names = [f"sparsemla.{alias.name}" for alias in node.names] if module == "sparsemla" else [module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("sparsemla.")}
    return rooms


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in sources()} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_one_way(path: Path) -> None:
    room = room_of(path)
    surplus = imported_rooms(path) - MAY_IMPORT[room] - {room}
    assert not surplus, f"{room} imports {sorted(surplus)}; it may import {sorted(MAY_IMPORT[room])}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_a_room_of_its_own(path: Path) -> None:
    device_code = path.parent.parent == PACKAGE / "kernels"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (MOST_KERNEL_LINES if device_code else MOST_LINES)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_licence_header(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
