# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_audit.py in small on the CPU, and the figures that docs/audit.md takes from its recorded run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def gpu_audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_audit", ROOT / "benchmarks" / "gpu_audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("parts", [["ours"], ["separate", "mixed"], ["peer", "ours", "mixed", "separate"]])
def test_only_the_parts_asked_for_run(
    gpu_audit: ModuleType, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.json"
    chosen = [] if len(parts) == 4 else ["--parts", ",".join(parts)]  # the default is all
    assert gpu_audit.main(["--device", "cpu", "--small", "--json", str(file), *chosen]) == 0, capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["ok"] and report["unexpected"] == []
    assert set(report) & set(gpu_audit.PARTS) == set(parts) == set(report["parts"])
    if "ours" in parts:
        assert report["ours"]["dead_bytes"] == 0 and report["ours"]["same_result"]
    if "mixed" in parts:
        assert report["mixed"]["prefill_kv_dead"] == report["mixed"]["prefill_kv_bytes"] > 0
        assert report["separate"]["prefill_kv_dead"] == 0


@pytest.mark.parametrize("text", ["", "ours,theirs", ","])
def test_unknown_parts_are_refused(gpu_audit: ModuleType, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        gpu_audit.main(["--device", "cpu", "--small", "--parts", text])
    assert left.value.code == 2 and "accepted are peer, ours, mixed, separate" in capsys.readouterr().err


def test_the_page_quotes_the_recorded_run() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "gpu_audit.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    peer = report["peer"]
    assert peer["dead_bytes"] == peer["accumulator_dead_bytes"] == 2_151_677_952
    assert report["ours"]["dead_bytes"] == 0 and peer["same_result"] and report["ours"]["same_result"]
    for figure in (peer["dead_bytes"], *(entry["dead"] for entry in peer["dead"])):
        assert f"{figure:,}" in page
    assert f"{peer['accumulator_mib']:.0f} MiB" in page and report["command"] in page
    mixed, separate = report["mixed"], report["separate"]
    assert mixed["path"] == "mixed_fp8" and mixed["prefill_kv_dead"] == mixed["prefill_kv_bytes"] == 1_811_939_328
    assert separate["path"] == "separate" and separate["prefill_kv_dead"] == separate["dead_bytes"] == 0
    assert f"{mixed['prefill_kv_dead']:,}" in page and mixed["same_result"] and separate["same_result"]
