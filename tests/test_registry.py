# SPDX-License-Identifier: Apache-2.0
"""The table of kernels: first match wins, modules load when asked, a broken install is a reason and not a crash."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsemla import PagedKVCache, sparse_mla_attention
from sparsemla.kernels import registry
from sparsemla.kernels.registry import Kernel


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Fake kernel modules by name: "good" fills 7, "picky" serves nothing, "broken" fails to import."""
    made: dict[str, ModuleType] = {}
    for name in ("good", "picky"):
        module = made[name] = ModuleType(name)
        module.run = lambda call: (call.out.fill_(7.0), call.lse.fill_(7.0))  # type: ignore[attr-defined]
        module.scratch_bytes = lambda call: 5  # type: ignore[attr-defined]
        module.plan = lambda **shape: shape  # type: ignore[attr-defined]
    made["picky"].why_not = lambda call: f"{call.num_heads} heads"  # type: ignore[attr-defined]

    def load(name: str) -> ModuleType:
        if name == "broken":
            raise RuntimeError("driver too old")
        return made[name]

    monkeypatch.setattr(registry.importlib, "import_module", load)
    monkeypatch.setattr(registry, "_missing", lambda name: "absent is not there" if name == "absent" else None)
    registry._load.cache_clear()
    yield made
    registry._load.cache_clear()


def attend(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A small call."""
    cache = PagedKVCache.allocate(1, 8, "fp8_nope", device=device)
    q = torch.zeros((2, 3, 512), dtype=torch.bfloat16, device=device)
    return sparse_mla_attention(q, cache, torch.zeros((2, 4), dtype=torch.int32, device=device), softmax_scale=1.0)


def test_the_first_kernel_that_serves_is_taken(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [
        Kernel("elsewhere", "good", ("cuda",)),
        Kernel("absent", "good", ("cpu",), requires=("absent",)),
        Kernel("broken", "broken", ("cpu",)),
        Kernel("picky", "picky", ("cpu",)),
        Kernel("good", "good", ("cpu",)),
    ]
    monkeypatch.setattr(registry, "KERNELS", tuple(table))
    out, lse = attend()
    assert (out == 7).all() and (lse == 7).all()
    monkeypatch.setattr(registry, "KERNELS", tuple(table[:4]))
    with pytest.raises(ValueError, match="q: no kernel serves device cpu") as error:
        attend()
    for reason in (
        "elsewhere: serves cuda, the call is on cpu",
        "absent: absent is not there",
        "broken: import of broken failed: RuntimeError: driver too old",
        "picky: 3 heads",
    ):
        assert reason in str(error.value)


def test_what_a_module_may_leave_out(modules: Any) -> None:
    good = Kernel("good", "good", ("cpu",))
    assert good.scratch_bytes(None) == 5  # type: ignore[arg-type]
    assert good.plan(rows=3) == {"rows": 3}
    del modules["good"].plan, modules["good"].scratch_bytes
    assert good.plan(rows=3) is None
    with pytest.raises(ImportError, match="kernel 'broken': import of broken failed"):
        Kernel("broken", "broken", ("cpu",)).implementation()


def test_the_reasons_for_the_slow_kernel_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "_told", set())
    with caplog.at_level(logging.WARNING, logger="sparsemla.kernels.registry"):
        for _ in range(3):
            registry._tell(["hopper: cutlass is not there"])
        registry._tell(["hopper: 129 heads"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "blockwise" in lines[0] and "cutlass is not there" in lines[0]


def test_a_device_that_nobody_serves() -> None:
    with pytest.raises(ValueError, match="q: no kernel serves device meta"):
        attend("meta")


def test_the_table() -> None:
    assert [entry.name for entry in registry.KERNELS] == ["hopper", "triton", "cpu"]
    assert registry.kernel("cpu").unavailable() is None
    assert Kernel("x", "sparsemla.kernels.nothing", ("cpu",)).unavailable() == "sparsemla.kernels.nothing is not there"
    assert Kernel("x", "no_such_package.nothing", ("cpu",)).unavailable() == "no_such_package.nothing is not there"


def test_a_call_on_the_cpu_imports_no_compiler() -> None:
    code = (
        "import sys, torch; from sparsemla import PagedKVCache, sparse_mla_attention as f; "
        "c = PagedKVCache.allocate(1, 8, 'fp8_nope'); "
        "f(torch.zeros(1, 1, 512, dtype=torch.bfloat16), c, torch.zeros(1, 1, dtype=torch.int32), softmax_scale=1.0); "
        "print([m for m in ('cutlass', 'triton', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
