# SPDX-License-Identifier: Apache-2.0
"""`sparsemla check`: agrees on sound code, names what disagrees on broken code, and the command line around it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparsemla.cli.check as command
import sparsemla.integrations.transformers as integration
from sparsemla.cache import PagedKVCache
from sparsemla.cli import _check_models as models
from sparsemla.cli import _check_run as run
from sparsemla.cli.app import main
from sparsemla.kernels import cpu

pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

CPU = torch.device("cpu")
QUICK = dataclasses.replace(
    models.SMALL, layers=2, prompts=(170, 131), new_tokens=4, chunk=90, haystack=256, haystack_chunk=128
)
"""128 keys kept of up to 173: still sparse, and enough keys for a split."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the command does: many small operations, slower on two threads of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `sparsemla check` run one family at a size of about a second."""
    monkeypatch.setattr(command, "sizes_for", lambda _device: QUICK)
    monkeypatch.setattr(command, "FAMILIES", models.FAMILIES[:1])


def report(family: models.Family = models.FAMILIES[0], seed: int = 0) -> run.FamilyReport:
    return run.run_family(family, QUICK, device=CPU, seed=seed, tick=lambda _doing: None)


def failed(found: run.FamilyReport) -> set[str]:
    return {name for name, holds in found.checks.items() if not holds}


@pytest.mark.slow
def test_the_whole_check_agrees() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparsemla.cli.app", "check", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agreed"] is True
    assert [family["family"] for family in found["families"]] == ["GLM-MoE-DSA", "DeepSeek-V3.2"]
    for family in found["families"]:
        assert family["tokens_agreed"] == family["tokens_compared"] == 48
        assert family["logit_difference_kernel"] <= 1e-3 < family["logit_difference_quantisation"]
        assert family["cache_bytes_per_token_layer"] == 656
        assert family["topk"] < min(family["prompts"]), "every prompt must be longer than what is attended"
        assert [(one["depth"], one["found"]) for one in family["needles"]] == [(0.1, True), (0.5, True), (0.9, True)]
        assert family["scratch"][1]["accumulator_bytes"] == 0 < family["scratch"][2]["accumulator_bytes"]
    assert done.stderr == "checking GLM-MoE-DSA ...\nchecking DeepSeek-V3.2 ...\n"


@pytest.mark.parametrize("family", models.FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("seed", [0, 11])
def test_sound_code_agrees(family: models.Family, seed: int) -> None:
    found = report(family, seed)
    assert failed(found) == set()
    assert found.kernels == ("cpu",)
    assert found.tokens_compared == 8
    assert found.keys_chosen_alike > 0.98
    assert found.logit_difference_own > found.logit_difference_kernel


@pytest.mark.gpu
@pytest.mark.parametrize("family", models.FAMILIES, ids=lambda family: family.name)
def test_sound_code_agrees_on_a_gpu(family: models.Family) -> None:
    found = run.run_family(family, QUICK, device=torch.device("cuda"), seed=0, tick=lambda _doing: None)
    assert failed(found) == set()


def test_every_pass_ticks() -> None:
    ticks: list[str] = []
    run.run_family(models.FAMILIES[0], QUICK, device=CPU, seed=0, tick=ticks.append)
    assert len(ticks) == run.forward_passes(QUICK)


def test_a_wrong_kernel_is_told_from_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = integration.sparse_mla_attention

    def off_by_two_percent(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = sound(*args, **kwargs)
        return out * 1.02, lse

    with monkeypatch.context() as patch:
        patch.setattr(integration, "sparse_mla_attention", off_by_two_percent)
        found = failed(report())
    assert "kernel" in found
    assert not found & {"records", "quantisation", "restored"}

    write = PagedKVCache.write
    with monkeypatch.context() as patch:
        patch.setattr(PagedKVCache, "write", lambda self, slots, kv, style: write(self, slots, kv * 1.1, style))
        found = failed(report())
    assert "records" in found
    assert "kernel" not in found


def test_one_key_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = integration._indices
    monkeypatch.setattr(integration, "_indices", lambda *args: sound(*args).index_fill(-1, torch.tensor([0]), -1))
    assert "kernel" in failed(report())


def test_dead_scratch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = cpu.run

    def wasteful(call: Any) -> None:
        unused = torch.empty(1 << 24)
        sound(call)
        del unused

    monkeypatch.setattr(cpu, "run", wasteful)
    found = report()
    assert failed(found) == {"scratch"}
    assert all(one.reserved_bytes - one.touched_bytes == 4 << 24 for one in found.scratch)


def test_a_model_left_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = integration.Attachment.detach

    def careless(self: integration.Attachment) -> None:
        weight = self.model.model.layers[0].self_attn.o_proj.weight
        sound(self)
        weight += 1e-3

    monkeypatch.setattr(integration.Attachment, "detach", careless)
    assert "restored" in failed(report())


def test_a_needle_that_is_not_there_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = models.needle_prompts

    def without(*args: Any, **kwargs: Any) -> torch.Tensor:
        ids = planted(*args, **kwargs)
        return torch.where((ids >= min(models.ANSWERS)) & (ids <= max(models.ANSWERS)), 40, ids)

    monkeypatch.setattr(models, "needle_prompts", without)
    needles = run.find_needles(models.FAMILIES[0], QUICK, device=CPU, seed=0, tick=lambda _doing: None)
    assert [(one.found, one.found_by_own) for one in needles] == [(False, False)] * 3


def test_ties_are_no_disagreement_but_other_tokens_are() -> None:
    found = report()
    assert dataclasses.replace(found, tokens_agreed=6, near_ties=2).checks["tokens"]
    assert not dataclasses.replace(found, tokens_agreed=6, near_ties=1).checks["tokens"]


@pytest.mark.usefixtures("quick")
def test_the_report_reads(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    for said in (
        r"sparsemla check on CPU \(cpu\), kernel: cpu",
        r"GLM-MoE-DSA: transformers' GlmMoeDsaForCausalLM, random weights, 2 layers, 8 heads",
        r"agreed +8 of 8 ok +all but near ties",
        r"our kernel's arithmetic +0\.0\d+% ok +up to 0\.1%",
        r"fp8 instead of bf16 cache +\d\.\d+% ok +up to 2\.0%",
        r"bytes a token and layer +656",
        r"touched +[\d,]+ ok +all reserved",
        r"at 90% of the text +retrieved ok",
        r"Everything agrees\.",
    ):
        assert re.search(said, text), (said, text)


@pytest.mark.usefixtures("quick")
def test_disagreement_is_exit_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "KERNEL_LIMIT", 1e-9)
    assert main(["check", "--json", "--seed", "5"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["agreed"] is False
    assert found["seed"] == 5
    assert found["limits"]["logit_difference_kernel"] == 1e-9
    assert found["families"][0]["checks"]["kernel"] is False

    assert main(["check"]) == 1
    text = capsys.readouterr().out
    assert "Disagreement in GLM-MoE-DSA: kernel" in text
    assert "Everything agrees" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--device", "tpu"], "--device: got 'tpu', accepted are cpu, cuda and cuda:N"),
        (["check", "--device", "cuda:99"], "--device: got 'cuda:99', but torch"),
        (["check", "--profile"], "--profile: device: got cpu, accepted is a CUDA device"),
        (["check", "--seed", "-1"], "--seed"),
        (["check", "--depth", "3"], "No such option: --depth"),
        (["bake"], "No such command 'bake'"),
    ],
)
def test_user_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sparsemla: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, models.FAMILIES[0].module, None)  # type: ignore[arg-type]
    assert main(["check"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "sparsemla: check needs transformers with GlmMoeDsaForCausalLM (import of transformers.models.glm_moe_dsa "
        "halted; None in sys.modules): pip install 'sparsemla[transformers]'"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_old_transformers_is_one_line(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_device", torch.device)  # no GPU is needed to be refused
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.17.0"))
    assert main(["check", "--device", device]) == 2
    assert capsys.readouterr() == (
        "",
        "sparsemla: transformers: got version 5.17.0, accepted is 5.20 or newer: pip install "
        "'sparsemla[transformers]'\n",
    )


def test_version_help_and_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"sparsemla \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in ("check", "plan", "audit"))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_family", interrupted)
    assert main(["check"]) == 130


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEMLA_TRACEBACK", "1")
    with pytest.raises(Exception, match="accepted are cpu"):
        main(["check", "--device", "tpu"])


def test_console_script() -> None:
    script = Path(sys.executable).parent / "sparsemla"
    if not script.exists():
        pytest.skip("the package is not installed with its console script")
    done = subprocess.run(
        [script, "check", "--device", "tpu"], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
