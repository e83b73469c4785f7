# SPDX-License-Identifier: Apache-2.0
"""``sparsemla bench`` and `benchmarks/hopper.py`, end to end on the CPU; the gather kernel in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparsemla.bench import floors, readme, report
from sparsemla.cli.app import main

ROOT = Path(__file__).parent.parent
SMALL = ["--heads", "4", "--topk", "32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _quick_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {f"{size}/{pool}": 10.0 for size in (656, 1152) for pool in ("128", "256")}
    monkeypatch.setattr(floors, "measure", lambda device, wanted: floors.Floors(10.0, 0.1, 0.0, rates, "invented"))
    monkeypatch.setenv("COLUMNS", "80")


def test_the_command_measures_the_cpu_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert (
        main(["bench", *SMALL, "--shapes", "1,2x2", "--pools", "128,256", "--formats", "fp8_ds_mla,bf16", *files]) == 0
    )
    captured = capsys.readouterr()
    assert "on a CPU: this is the blockwise torch kernel" in " ".join(captured.out.split())
    assert "[4/4]" in captured.err
    data = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert len(data["rows"]) == 8 and data["device"] == "cpu" and data["gpu"] == ""
    assert all(row["ours"]["kernel"] == "cpu" and row["ours"]["error"] < 2.2e-3 for row in data["rows"])
    assert {(row["batch"], row["s_q"]) for row in data["rows"]} == {(1, 1), (2, 2)}
    assert (tmp_path / "r.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "0"], "accepted is a whole number above 0"),
        (["--heads", "200"], "heads: got 200"),
        (["--shapes", "4y4"], "shapes: got '4y4'"),
        (["--pools", "100"], "pools: got 100"),
        (["--formats", "fp7"], "fp7"),
        (["--peers", "nobody"], "peers: got 'nobody'"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--plot", "x.doc"], "accepted are files ending in"),
        (["--json", "nowhere/x.json"], "--json: the folder of"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_writing_the_documents_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--readme"]) == 2
    assert "README.md without" in capsys.readouterr().err
    monkeypatch.chdir(ROOT)
    assert main(["bench", "--readme"]) == 0
    assert capsys.readouterr().out == "nothing to change\n"


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hopper_benchmark", ROOT / "benchmarks" / "hopper.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fixed_grid_in_small(hopper: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [*SMALL, "--peers", "none", "--out", str(tmp_path)]
    assert hopper.main([*common, "--rows", "1", "--pools", "128"]) == 0
    assert hopper.main([*common, "--rows", "1,2x2", "--pools", "256", "--formats", "fp8_ds_mla,bf16", "--merge"]) == 0
    short = json.loads((tmp_path / readme.SHORT_FORM).read_text(encoding="utf-8"))
    assert [(row["format"], row["pool"], row["batch"], row["s_q"]) for row in short["rows"]] == [
        ("fp8_ds_mla", 128, 1, 1),
        ("fp8_ds_mla", 256, 1, 1),
        ("fp8_ds_mla", 256, 2, 2),
        ("bf16", 256, 1, 1),
        ("bf16", 256, 2, 2),
    ]
    assert short["geomean_ratio"] is None and short["command"].count("benchmarks/hopper.py") == 2
    assert str(tmp_path) not in short["command"]
    details = json.loads((tmp_path / readme.DETAILS).read_text(encoding="utf-8"))
    assert len(report.Results.from_json(details).rows) == 5
    printed = capsys.readouterr().out
    assert "fp8_ds_mla h=4 T=2x2 pool=256:" in printed and "not drawn: plot: no row has both" in printed
    assert (tmp_path / "hopper-roofline.png").exists()


def test_preparing_measures_nothing(hopper: ModuleType, tmp_path: Path) -> None:
    prepare = [*SMALL, "--rows", "1,2x2", "--out", str(tmp_path), "--prepare-only"]
    assert hopper.main(prepare) == 0
    assert not list(tmp_path.iterdir())


def test_the_script_refuses_in_one_line(hopper: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert hopper.main([*SMALL, "--rows", "none"]) == 2
    assert capsys.readouterr().err.startswith("hopper.py: shapes: got 'none'")
    if not torch.cuda.is_available():
        assert hopper.main([]) == 2
        assert "torch sees no GPU" in capsys.readouterr().err


GATHER = """
import torch
from sparsemla.bench import gather
rows = torch.randint(-2**31, 2**31, (100, 164), dtype=torch.int32)
indices = torch.randint(0, 100, (37,), dtype=torch.int32)
sums = torch.zeros(5, dtype=torch.int32)
gather.gather(rows, indices, sums, rows_a_step=4, warps=4, programs=5)
assert sums.sum().item() % 2**32 == rows[indices.long()].sum().item() % 2**32
"""


def test_the_gather_kernel_reads_every_row_named_once() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", GATHER], check=True, env=environment, timeout=120)


def test_importing_the_room_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom sparsemla.bench import floors, peers, plot, readme, runner\n"
        "bad = [m for m in ('matplotlib', 'triton', 'cutlass', 'transformers', 'vllm') if m in sys.modules]\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
