# SPDX-License-Identifier: Apache-2.0
"""docs/vllm.md shows what the commands print and what the plugin says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sparsemla.cli.app import main
from sparsemla.integrations.vllm.plugin import NAME
from sparsemla.integrations.vllm.versions import TESTED, UnsupportedVllmError, release_of

PAGE = (Path(__file__).parent.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_three_deployments_are_shown() -> None:
    assert len(COMMANDS) == 3 and all("--compare flashmla,sparsemla" in block for block in COMMANDS)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.split(" --max-model-len")[0][17:])
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


def test_the_page_names_releases_flags_and_the_refusal() -> None:
    for release in TESTED.values():
        assert release.version in PAGE and f'{{"backend": "{release.flag}"}}' in PAGE
    assert NAME in PAGE
    with pytest.raises(UnsupportedVllmError) as refusal:
        release_of("0.30.1")
    assert f"```\n{refusal.value}\n```" in PAGE
