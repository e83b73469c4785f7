# SPDX-License-Identifier: Apache-2.0
"""Documents say what is so: files they name exist, the rooms they list are the rooms there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from generators import relative_error
from sparsemla.cli.app import main
from sparsemla.reference import reference_attention
from test_architecture import MAY_IMPORT, PACKAGE, imported_rooms, room_of, sources

ROOT = PACKAGE.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md|toml|txt|npz|json|sh))`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """A file in backticks exists: from the root, in the package, or anywhere in the package by its bare name."""
    bare = {path.name for path in sources()}
    missing = [
        name
        for name in NAMED_FILE.findall(document.read_text(encoding="utf-8"))
        if not ((ROOT / name).exists() or (PACKAGE / name).exists() or name in bare)
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert not [link for link in links if not (document.parent / link).exists()]


def test_the_architecture_page_lists_the_rooms() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| room |")[1].split("\n\n")[0]
    listed = {name.rstrip("/").removesuffix(".py") for name in re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)}
    assert listed == set(MAY_IMPORT)
    assert listed >= {room_of(path) for path in sources()}


def test_arrows_of_the_picture_are_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    imports: dict[str, set[str]] = {}
    for path in sources():
        imports.setdefault(room_of(path), set()).update(imported_rooms(path))
    arrows = re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE)
    assert len(arrows) >= 9
    assert not [(start, end) for start, end in arrows if end not in imports[start]]


def code_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_readme_example_runs() -> None:
    (example,) = code_blocks("python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert (names["out"].shape, names["out"].dtype) == ((4, 16, 512), torch.bfloat16)
    assert (names["lse"].shape, names["lse"].dtype) == ((4, 16), torch.float32)
    want, want_lse = reference_attention(names["q"], names["cache"], names["indices"], softmax_scale=576**-0.5)
    assert relative_error(names["out"], want) < 2.2e-3
    torch.testing.assert_close(names["lse"].double(), want_lse, rtol=0, atol=1e-5)


def test_the_readme_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of the example: the command of the README, its numbers looked up in what it prints."""
    (session,) = code_blocks("console")
    command, *shown = session.splitlines()
    arguments = command.split("sparsemla ", 1)[1].split()
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    numbers = {str(value) for value in leaves(printed)}
    quoted = [number.replace(",", "") for line in shown for number in re.findall(r"\d[\d,]{6,}", line)]
    assert len(quoted) >= 7
    assert not [number for number in quoted if number not in numbers]


def leaves(tree: Any) -> list[Any]:
    """The values of nested lists and dicts."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]
