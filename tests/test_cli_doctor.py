# SPDX-License-Identifier: Apache-2.0
"""`sparsemla doctor`: who serves what here, and what to do where a better kernel could."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from sparsemla.cli import doctor
from sparsemla.cli.app import main
from sparsemla.cli.doctor import Gpu, Report, Service, Shortfall, shortfalls
from sparsemla.kernels import registry


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert len(said["services"]) == 6
    assert (
        said["versions"]["torch"] == torch.__version__.split("+")[0] or said["versions"]["torch"] == torch.__version__
    )
    if torch.cuda.is_available():
        assert said["gpus"] and status == said["blockwise"]
        return
    assert status == 0 and said["gpus"] == [] and said["device"] == "cpu"
    for service in said["services"]:
        assert service["kernel"] == "cpu"
        assert list(service["reasons"]) == [kernel.name for kernel in registry.KERNELS[:-1]]
    assert len(said["shortfalls"]) == 1
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "fp8_ds_mla" in shown and "[1] hopper: serves cuda" in shown and "mend:" in shown


def advice(architecture: str | None = "sm_90", environment: dict[str, str] | None = None, **reasons: str) -> list[str]:
    """The fixes for one layout that is refused for `reasons`."""
    service = Service("fp8_ds_mla", 576, "cpu", reasons)
    found = shortfalls([service, service], architecture=architecture, accelerator="13.0", environment=environment or {})
    return [item.fix for item in found]


def test_advice() -> None:
    assert advice(hopper="cutlass is not there") == ["pip install 'sparsemla[hopper]'"]
    assert advice("sm_89", hopper="cutlass is not there") == []
    assert advice(hopper="serves an extra cache of the cache's own format only") == []
    (fix,) = advice(hopper="import of sparsemla.kernels.hopper failed: OSError: libcuda")
    assert "--force-reinstall 'sparsemla[hopper]'" in fix
    assert advice(triton="triton is not there") == ["pip install 'sparsemla[triton]'"]
    assert advice(triton="needs triton 3.4 or later, 3.1.0 is installed") == ["pip install --upgrade 'triton>=3.4'"]
    assert advice("gfx942", {"TRITON_INTERPRET": "1"}, triton="TRITON_INTERPRET is set") == ["unset TRITON_INTERPRET"]
    assert "Ampere" in advice("sm_75", triton="needs compute capability 8.0, the device is sm_75")[0]
    assert "force-reinstall 'sparsemla[triton]'" in advice(triton="import of it failed: ImportError: x")[0]
    assert advice(triton="something new") == [] and advice(other="whatever") == []
    assert len(advice(hopper="cutlass is not there", triton="triton is not there")) == 2
    (fix,) = advice(None)
    assert "driver serves 13.0" in fix
    (item,) = shortfalls([], architecture=None, accelerator=None, environment={})
    assert item.what == "torch is a CPU build"


def test_a_gpu_that_runs_blockwise() -> None:
    gpu = Gpu(0, "Some GPU", "sm_86", 84, 24 * 2**30, 99 * 1024, 65536, 6 * 2**20)
    report = Report(
        versions={"torch": "2.13.0"},
        driver="580.1",
        device="cuda:0",
        gpus=[gpu, dataclasses.replace(gpu, index=1, shared_memory_a_block=None, registers_a_processor=None, l2=None)],
        services=[Service("bf16", 576, "cpu", {"triton": "triton is not there"})],
        shortfalls=[Shortfall("triton: triton is not there", "pip install 'sparsemla[triton]'")],
        notes=["a note"],
        blockwise=True,
    )
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(doctor.render(report))
    shown = console.export_text()
    for words in ("Some GPU", "sm_86", "99 KiB", "65,536", "6 MiB", "pip install 'sparsemla[triton]'", "a note"):
        assert words in shown


def test_status_1_where_a_gpu_runs_blockwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Any = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda: dataclasses.replace(made, blockwise=True, shortfalls=[]))
    assert main(["doctor"]) == 1
    assert "nothing to mend" in capsys.readouterr().out


def test_where_tile_shapes_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("SPARSEMLA_TRITON_SHAPES", str(tmp_path / "shapes.json"))
    assert doctor.notes("sm_90") == ["tile shapes of the triton kernel: the committed ones for sm_90"]
    assert "those of sm_89, the nearest to sm_86; `sparsemla bench --tune`" in doctor.notes("sm_86")[0]
    (tmp_path / "shapes.json").write_text("{}")
    assert str(tmp_path) in doctor.notes("sm_90")[0]
