# SPDX-License-Identifier: Apache-2.0
"""docs/serving.md shows what the commands print and what the example does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pages import prints_what_is_shown

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.splitlines()[0][17:45])
def test_commands_print_what_the_page_shows(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prints_what_is_shown(block, capsys, monkeypatch)


def test_the_example_runs() -> None:
    (example,) = blocks("python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == (32, 8, 512) and names["lse"].shape == (32, 8)
    assert not names["out"][21:].any() and torch.isneginf(names["lse"][21:]).all()
    assert names["workspace"].nbytes() == 0 and names["budget"].tokens > 4096
