# SPDX-License-Identifier: Apache-2.0
"""``sparsemla bench --tune``: what it refuses and prints. test_triton_matrix.py runs the measuring itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsemla.cli.app import main
from sparsemla.formats import KVFormat
from sparsemla.kernels import registry


def test_without_a_gpu_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--tune"]) == 2
    assert (
        capsys.readouterr().err
        == f"sparsemla: --tune: times kernels on a GPU, and torch {torch.__version__} sees none\n"
    )
    assert main(["bench", "--tune", "--device", "cpu"]) == 2
    assert "--device is cpu" in capsys.readouterr().err
    assert main(["bench", "--tune", "--formats", "fp7"]) == 2
    assert "fp7" in capsys.readouterr().err


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(type(registry.kernel("triton")), "unavailable", lambda self: "triton is not there")
    assert main(["bench", "--tune"]) == 2
    assert "--tune: the triton kernel cannot run: triton is not there" in capsys.readouterr().err


def test_a_gpu_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from sparsemla.kernels import triton as portable

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(portable, "why_not_device", lambda device: "needs compute capability 8.0")
    assert main(["bench", "--tune"]) == 2
    assert "does not serve cuda: needs compute capability 8.0" in capsys.readouterr().err


def test_it_tunes_every_format_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from sparsemla.kernels import triton as portable
    from sparsemla.kernels.triton import shapes, tune

    given: list[dict[str, Any]] = []
    shape = shapes.Shape(32, 128, 8, 0, 1)

    def stand_in(*, progress: Callable[[tune.Trial], None], **arguments: Any) -> dict[int, list[tune.Trial]]:
        given.append(arguments)
        found = [tune.Trial(shape, 1234.5), tune.Trial(shape, None, "out of shared memory")]
        for trial in found:
            progress(trial)
        return {16: found, 128: found}

    monkeypatch.setenv(shapes.ENVIRONMENT, str(tmp_path / "mine.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(portable, "why_not_device", lambda device: None)
    monkeypatch.setattr(tune, "tune", stand_in)
    assert main(["bench", "--tune", "--formats", "bf16,fp8_v4", "--topk", "512", "--budget", "9"]) == 0
    shown = capsys.readouterr().out
    for words in ("1,234.5", "out of shared memory", "up to 16 heads, measured with 16", str(tmp_path / "mine.json")):
        assert words in shown.replace("\n", "")
    assert [one["fmt"] for one in given] == [KVFormat.BF16, KVFormat.FP8_V4]
    assert all(one["topk"] == 512 and one["path"] == tmp_path / "mine.json" for one in given)
    assert all(time.monotonic() < one["until"] <= time.monotonic() + 9 for one in given)


def test_the_classes_of_heads_share_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from sparsemla.kernels.triton import tune

    untils: list[float | None] = []

    def trials(call: Any, *, until: float | None, progress: Any) -> list[tune.Trial]:
        untils.append(until)
        return [tune.Trial(tune.setting_of(call.device, call.cache.format, call.num_heads).shape, 1.0)]

    monkeypatch.setattr(tune, "trials", trials)
    begin = time.monotonic()
    for until in (begin + 1000.0, None):
        tune.tune(device="cpu", rows=1, topk=4, records=64, until=until, path=tmp_path / "shapes.json")
    assert untils[0] is not None and begin + 499.0 < untils[0] < begin + 501.0
    assert untils[1:] == [pytest.approx(begin + 1000.0), None, None]


def test_trials_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that does not fit, one with another answer, and those that time does not allow."""
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    from sparsemla.kernels.triton import shapes, tune

    call = tune.sample_call(rows=2, heads=3, topk=4, records=64, fmt=KVFormat.FP8_DS_MLA, device=torch.device("cpu"))
    tried = [shapes.Shape(16, keys, 4, 0, 1) for keys in (16, 32, 64, 128)]

    def run(call: Any, *, shape: shapes.Shape) -> None:
        if shape.keys == 32:
            raise OutOfResources(120_000, 101_376, "shared memory")
        call.out.fill_(2.0 if shape.keys == 64 else 1.0)

    monkeypatch.setattr(tune, "run", run)
    found = tune.trials(call, tried)
    assert [trial.shape.keys for trial in found if trial.microseconds is not None] in ([16, 128], [128, 16])
    assert {trial.shape.keys: trial.note for trial in found[2:]}[64] == "another answer than the shape before"
    assert "shared memory" in {trial.shape.keys: trial.note for trial in found[2:]}[32]
    (only,) = tune.trials(call, tried, until=time.monotonic() - 1.0)
    assert only.shape == tried[0]
