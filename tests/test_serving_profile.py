# SPDX-License-Identifier: Apache-2.0
"""Planned against measured bytes: on a GPU within 1 %, elsewhere one clear refusal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparsemla.cli import UserError
from sparsemla.cli.profile_report import profile_command, render_profile
from sparsemla.kernels import registry
from sparsemla.serving import profile
from sparsemla.serving.config import ServingLimits
from sparsemla.serving.paths import Policy
from sparsemla.serving.plan import Plan, make_plan
from sparsemla.serving.profile import ProfileReport, StepBytes, run_profile, step_batches


def small_plan(policy: Policy) -> Plan:
    config = profile.published_config()
    limits = ServingLimits(max_model_len=512, max_num_batched_tokens=48, max_num_seqs=4, spec_tokens=1)
    config = replace(config, limits=limits, model=replace(config.model, topk=64))
    return make_plan(config, policy, other_users={"other users": 100_000})


def test_a_cpu_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="a profile measures the memory of a GPU"):
        run_profile(device="cpu")
    with pytest.raises(UserError, match=r"^--profile: device: got cpu, accepted is a CUDA device"):
        profile_command("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device here"):
            profile_command("cuda")


def test_steps_stay_within_limits_and_pool() -> None:
    config = profile.published_config()
    (first, queries, sequences), (second, mixed, contexts) = step_batches(config)
    assert (first, second) == ("profile step", "mixed step")
    assert queries == sequences == [8192]
    assert mixed == [4] * 8 + [8192 - 32] and sum(mixed) == 8192
    assert sum(contexts) <= profile.POOL_TOKENS and all(q <= s for q, s in zip(mixed, contexts, strict=True))


@pytest.mark.parametrize("policy", list(Policy))
def test_a_run_computes_its_plan(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps themselves, on the CPU at a small size; what they take is measured on a GPU only."""
    monkeypatch.setattr(profile, "POOL_TOKENS", 1024)
    plan = small_plan(policy)
    run = profile._Run(plan, torch.device("cpu"))
    assert run.workspace.nbytes() == plan.workspace.total_bytes
    for _, queries, sequences in step_batches(plan.config):
        metadata = run.step(queries, sequences)
        assert run.planned_peak(metadata) > plan.workspace.total_bytes
        assert run.answer is not None and run.answer[0].shape == (sum(queries), 64, 512)
    assert run.kernel_name() == registry.KERNELS[-1].name


def test_reports() -> None:
    good = ProfileReport("flashmla", "mixed_fp8", "hopper", "GPU", 1000, 1009, (StepBytes("profile step", 100, 100),))
    assert good.agrees and good.to_json()["agrees"]
    assert not replace(good, measured_workspace=1011).agrees
    assert not replace(good, steps=(StepBytes("profile step", 100, 102),)).agrees
    assert replace(good, planned_workspace=0, measured_workspace=0).agrees
    assert json.dumps(good.to_json())
    assert render_profile([good]).row_count == 2


@pytest.mark.gpu
def test_planned_and_measured_agree_on_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    reports = run_profile()
    assert [report.planned_workspace for report in reports] == [3_238_002_688, 1_426_063_360, 76_152_832]
    for report in reports:
        assert report.measured_workspace == pytest.approx(report.planned_workspace, rel=0.01)
        if report.kernel != registry.KERNELS[-1].name:  # the fallback allocates its tiles
            assert report.agrees, report
