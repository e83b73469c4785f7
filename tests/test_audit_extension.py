# SPDX-License-Identifier: Apache-2.0
"""Allocations inside compiled code: registered operators, the stable ABI, unregistered functions."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsemla import audit
from sparsemla.audit import Allocation, Ledger

SOURCES = Path(__file__).parent / "extension"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler (g++)"),
    pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja to build a C++ extension"),
]


def build(name: str, **options: Any) -> Any:
    from torch.utils.cpp_extension import load

    return load(name=name, sources=[str(SOURCES / f"{name}.cpp")], extra_cflags=["-O0"], **options)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return build("audit_probe", build_directory=str(tmp_path_factory.mktemp("audit_probe")))


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> None:
    where = str(tmp_path_factory.mktemp("audit_stable"))
    build("audit_stable", build_directory=where, is_python_module=False)


def of(ledger: Ledger, nbytes: int) -> Allocation:
    found = [a for a in ledger.allocations if a.nbytes == nbytes]
    assert len(found) == 1, [(a.op, a.nbytes) for a in ledger.allocations]
    return found[0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_scratch_of_a_registered_operator(compiled: ModuleType, context: type) -> None:
    with context():
        x = torch.ones(3)
        plain = torch.ops.audit_probe.scratch(x, 1000, 300)
        with audit.watch() as ledger:
            audited = torch.ops.audit_probe.scratch(x, 1000, 300)
    assert torch.equal(plain, audited)
    found = of(ledger, 4000)
    assert found.never_written == 2800 and found.runs.tolist() == [[1200, 4000]]
    assert found.via == ("audit_probe::scratch",)
    assert "test_scratch_of_a_registered_operator" in found.site
    assert of(ledger, 12).never_written == 0


def test_scratch_of_a_pybind_function(compiled: ModuleType) -> None:
    x = torch.ones(3)
    with audit.watch() as ledger:
        audited = compiled.scratch(x, 1000, 300)
    assert torch.equal(audited, compiled.scratch(x, 1000, 300))
    assert of(ledger, 4000).never_written == 2800
    assert "test_scratch_of_a_pybind_function" in of(ledger, 4000).site


def test_scratch_over_the_stable_abi(stable: None) -> None:
    x = torch.ones(3)
    with audit.watch() as ledger:
        audited = torch.ops.audit_stable.scratch(x, 1000, 300)
    assert torch.equal(audited, torch.ops.audit_stable.scratch(x, 1000, 300))
    assert of(ledger, 4000).never_written == 2800
    assert of(ledger, 4000).via == ("audit_stable::scratch", "aten::new_empty")


@pytest.mark.parametrize("parts", [1, 2])
def test_accumulators_that_nothing_reads(compiled: ModuleType, parts: int) -> None:
    """The fault that this tool was built for, in small: dead with one part, alive with two."""
    q = torch.ones(64)
    with audit.watch() as ledger:
        torch.ops.audit_probe.decode(q, parts)
    accumulators = (64 + parts) * 513 * 4
    assert ledger.dead_bytes == (accumulators if parts == 1 else 0)
    assert {a.via for a in ledger.dead()} == ({("audit_probe::decode",)} if parts == 1 else set())


def test_composite_operators_and_nested_writes(compiled: ModuleType) -> None:
    x = torch.ones(3)
    ledger = audit.run(lambda: torch.ops.audit_probe.wasteful(x, 500), deep=True).ledger
    found = of(ledger, 2000)
    assert (found.never_written, found.read, found.dead) == (0, "never read", 2000)


def test_reads_inside_one_compiled_call_are_never_denied(compiled: ModuleType) -> None:
    """Written and read where no operator of PyTorch comes between: the audit says that it cannot tell."""
    x = torch.ones(3)

    def code() -> list[torch.Tensor]:
        return [torch.ops.audit_probe.scratch(x, 1000, 300), torch.ops.audit_probe.decode(x, 2)]

    ledger = audit.run(code, deep=True).ledger
    assert of(ledger, 4000).read == "unknown" and "audit_probe::scratch" in of(ledger, 4000).read_note
    assert of(ledger, 5 * 512 * 4).read == "unknown"
    assert ledger.dead_bytes == 2800  # the never-written part stays proven
    assert {a.read for a in ledger.allocations if a.nbytes == 12} == {"read"}


def test_writers_and_readers_the_dispatcher_does_not_see(compiled: ModuleType) -> None:
    def code() -> list[float]:
        poked = torch.empty(100)
        compiled.poke(poked, 3.0)  # written by a stranger, read by an operator
        peeked = torch.full((101,), 4.0)  # written by an operator, read by a stranger
        both = torch.empty(102)
        compiled.poke(both, 5.0)
        value = compiled.peek(both)  # written and read by strangers
        stranded = torch.empty(103)
        compiled.poke(stranded, 6.0)  # written by a stranger, read by nobody: not accused either
        return [float(poked.sum()), compiled.peek(peeked), value]

    ledger = audit.run(code, deep=True).ledger
    assert [of(ledger, 4 * n).read for n in (100, 101, 102, 103)] == ["read", "read", "unknown", "unknown"]
    assert of(ledger, 400).never_written == of(ledger, 408).never_written == 0


def test_what_is_out_of_sight_is_named(compiled: ModuleType) -> None:
    with audit.watch() as ledger:
        torch.ops.audit_probe.hidden(torch.ones(3), 999)
    assert not [a for a in ledger.allocations if a.nbytes == 4 * 999]
    assert any("empty_cpu" in line for line in ledger.not_covered())
