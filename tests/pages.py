# SPDX-License-Identifier: Apache-2.0
"""What the tests of the documents share."""

from __future__ import annotations

import shlex

import pytest

from sparsemla.cli.app import main


def prints_what_is_shown(block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a block's command (``$ sparsemla ...``); every line shown is printed, in this order.

    "..." stands for lines left out.
    """
    monkeypatch.setenv("COLUMNS", "80")
    command, *shown = block.splitlines()
    main(shlex.split(command.removeprefix("$ sparsemla ")))
    captured = capsys.readouterr()
    printed = iter([line.rstrip() for line in (captured.out + captured.err).splitlines()])
    for line in shown:
        if line != "...":
            assert line.rstrip() in printed, line
