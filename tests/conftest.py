# SPDX-License-Identifier: Apache-2.0
"""Shared test set-up: the `gpu` marker, fixed seeds, few threads, a hypothesis profile without wall-clock failures."""

from __future__ import annotations

import os

# Before torch is imported: many small tests run slower, not faster, on many threads.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that wait by spinning take the cores from those that work wherever the machine does something else as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

from generators import GOLDEN_NAMES, Golden, load_golden

# Timing varies with the machine, and results must not: no deadlines, and the same examples on every run.
hypothesis.settings.register_profile("repo", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("repo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers for a test whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs a test on the CPU and, where there is one, on the GPU."""
    return torch.device(request.param)


@pytest.fixture(params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    """Each recorded call of the peer in turn."""
    return load_golden(request.param)
