# SPDX-License-Identifier: Apache-2.0
"""docs/serving.md shows what the commands print and what the example does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsemla.cli.app import main

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.splitlines()[0][17:45])
def test_commands_print_what_the_page_shows(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line shown is printed, in this order; "..." stands for lines left out."""
    monkeypatch.setenv("COLUMNS", "80")
    command, *shown = block.splitlines()
    main(shlex.split(command.removeprefix("$ sparsemla ")))
    captured = capsys.readouterr()
    printed = iter([line.rstrip() for line in (captured.out + captured.err).splitlines()])
    for line in shown:
        if line != "...":
            assert line.rstrip() in printed, line


def test_the_example_runs() -> None:
    (example,) = blocks("python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == (32, 8, 512) and names["lse"].shape == (32, 8)
    assert not names["out"][21:].any() and torch.isneginf(names["lse"][21:]).all()
    assert names["workspace"].nbytes() == 0 and names["budget"].tokens > 4096
