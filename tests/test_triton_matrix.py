# SPDX-License-Identifier: Apache-2.0
"""The portable kernel in the matrix of test_attention.py: on a GPU whole, else its core in Triton's interpreter.

The interpreter needs TRITON_INTERPRET=1 before triton is imported, so without a GPU this module is only collected in a
process of its own, which test_triton.py starts.
"""

from __future__ import annotations

import os

import pytest
import torch

import test_attention as matrix
from sparsemla.kernels import registry
from test_attention import *  # noqa: F403 - the tests themselves

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("runs inside test_triton.py, in the interpreter", allow_module_level=True)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> matrix.Runner:
    """The portable kernel, whatever the registry would pick."""
    monkeypatch.setattr(registry, "select", lambda call: registry.kernel("triton"))
    return matrix.Runner(torch.device("cpu" if INTERPRETED else "cuda"), "triton")
