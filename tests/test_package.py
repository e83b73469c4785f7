# SPDX-License-Identifier: Apache-2.0
"""The package itself: what importing it pulls in, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sparsemla

OPTIONAL = ("transformers", "triton", "cutlass", "matplotlib")


@pytest.mark.parametrize(
    "statement",
    [
        "import sparsemla",
        "from sparsemla import KVFormat, PagedKVCache, reference_attention, sparse_mla_attention",
        "import sparsemla; sparsemla.audit",
    ],
)
def test_import_leaves_optional_packages_alone(statement: str) -> None:
    code = f"import sys\n{statement}\nprint(sorted(set({OPTIONAL!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_bare_import_does_not_import_torch() -> None:
    code = "import sys, sparsemla; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", [name for name in sparsemla.__all__ if name != "__version__"])
def test_every_export_is_there(name: str) -> None:
    assert getattr(sparsemla, name) is not None
    assert name in dir(sparsemla)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sparsemla.nonsense
