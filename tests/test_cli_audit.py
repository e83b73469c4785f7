# SPDX-License-Identifier: Apache-2.0
"""``sparsemla audit``: scripts, callables, JSON, the CI threshold, and what a user can get wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sparsemla.cli.app import main

SCRIPT = """
import sys, torch
dead = torch.empty(5000)
unread = torch.zeros(3000)
live = torch.ones(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
print("hello", sys.argv[1:], float(live.sum()))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "demo.py"
    path.write_text(SCRIPT)
    (tmp_path / "audit_demo_module.py").write_text(
        "import torch\n\n\ndef step():\n    print('step')\n    torch.empty(5000)\n    return torch.ones(2000)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    return path


def found(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    assert main(["audit", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def test_a_script_with_arguments_of_its_own(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "demo.py", "1234", "--deep", "--json"]) == 0
    out = capsys.readouterr().out
    assert "hello ['1234', '--deep', '--json'] 1234.0" in out
    line = next(line for line in out.splitlines() if "empty float32[5000]" in line)
    assert "demo.py:3 in <module>" in line and "20,000" in line
    assert "Dead at once: 19.53 KiB (20,000 bytes)" in out
    assert "Not covered" in out and "other threads" in out


def test_json_and_the_threshold(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, "--fail-over", "20000", "demo.py")
    assert report["totals"]["dead_bytes"] == 20_000 and not report["failed"]
    assert report["rows"][0]["never_written"] == 20_000
    assert report["rows"][0]["who"] == "demo.py:3 in <module>"
    assert report["not_covered"]
    report = found(capsys, "--fail-over", "19.5KiB", "demo.py", status=1)
    assert report["failed"] and report["fail_over"] == 19_968
    assert main(["audit", "--fail-over", "0", "demo.py"]) == 1
    assert "20,000 dead bytes, more than --fail-over 0" in capsys.readouterr().err


def test_deep_counts_what_a_script_prints_as_its_result(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, "--deep", "demo.py")
    rows = {row["bytes_each"]: row for row in report["rows"]}
    assert rows[12_000]["never_read"] == 12_000
    assert rows[8_000]["read"] == "read"
    assert report["totals"]["dead_bytes"] == 32_000


def test_a_callable(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, "--call", "audit_demo_module:step", "--passes", "2", "--fail-over", "1MB")
    assert report["totals"]["never_written"] == 20_000
    assert main(["audit", "--call", "audit_demo_module:step"]) == 0
    assert "audit_demo_module.py:6 in step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "either a script or --call"),
        (["--call", "a:b", "demo.py"], "either a script or --call"),
        (["missing.py"], "missing.py"),
        (["--call", "audit_demo_module"], "module:function"),
        (["--call", "audit_demo_module:absent"], "absent"),
        (["--call", "no_such_module_here:f"], "no_such_module_here"),
        (["--call", "os:sep"], "accepted is a function"),
        (["--fail-over", "lots", "demo.py"], "lots"),
        (["--passes", "3", "demo.py"], "passes"),
        (["--deep", "--deep-max", "0", "demo.py"], "deep_max"),
        (["--no-such-option", "demo.py"], "--no-such-option"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    assert main(["audit", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and what in err


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("raise OSError('disk full')", "failed with OSError"),
        ("raise SystemExit(7)", "exit status 7"),
        ("import this_does_not_exist", "failed with ModuleNotFoundError"),
    ],
)
def test_a_failing_script_ends_with_status_2(
    script: Path, capsys: pytest.CaptureFixture[str], source: str, what: str
) -> None:
    script.write_text(source)
    assert main(["audit", "demo.py"]) == 2
    assert what in capsys.readouterr().err.splitlines()[-1]


def test_a_script_may_leave_in_peace_and_unsteady_ones_are_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("import torch\ntorch.empty(77)\nraise SystemExit(0)")
    assert found(capsys, "demo.py")["totals"]["dead_bytes"] == 308
    script.write_text("import time\nprint(time.perf_counter_ns())")
    assert main(["audit", "--deep", "demo.py"]) == 2
    assert "does the same twice" in capsys.readouterr().err
