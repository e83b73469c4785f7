# SPDX-License-Identifier: Apache-2.0
"""Truth tests of `audit.run`: what is written and never read, two passes, and code that cannot be rerun."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from sparsemla import audit
from sparsemla.audit import Allocation, Ledger, NotDeterministicError


def of(ledger: Ledger, nbytes: int) -> Allocation:
    found = [a for a in ledger.allocations if a.nbytes == nbytes]
    assert len(found) == 1, [(a.op, a.nbytes) for a in ledger.allocations]
    return found[0]


def test_written_never_read(device: torch.device) -> None:
    def code() -> torch.Tensor:
        x = torch.linspace(0, 1, 100, device=device)
        unused = torch.empty(101, device=device)
        unused[:100].copy_(x)  # written, never read; one element never written
        zeroed = torch.zeros(77, device=device)  # written by zero_, never read
        assert zeroed.numel()
        used = torch.empty(103, device=device)
        used[:100].copy_(x)
        return used[:100].sum()

    plain = code()
    run = audit.run(code, deep=True)
    assert torch.equal(run.result, plain)
    unused, zeroed, used = of(run.ledger, 404), of(run.ledger, 308), of(run.ledger, 412)
    assert (unused.never_written, unused.never_read, unused.read) == (4, 400, "never read")
    assert (zeroed.never_written, zeroed.never_read) == (0, 308)
    assert (used.never_written, used.never_read, used.read) == (12, 0, "read")
    assert run.ledger.deep and run.ledger.dead_bytes >= 404 + 308 + 12


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_reads_by_every_way_in_count(device: torch.device, dtype: torch.dtype) -> None:
    """Views, slices, in-place operators, out=, indices: a read through any of them saves a buffer."""

    def code() -> list[torch.Tensor]:
        source = (torch.arange(48, device=device) % 2).to(dtype)
        through_view = torch.empty(6, 8, dtype=dtype, device=device)
        through_view.view(-1).copy_(source)
        strided = torch.empty(48, 2, dtype=dtype, device=device)
        strided[:, 1] = source
        as_index = torch.zeros(50, dtype=torch.int64, device=device)
        as_index[3] = 1
        accumulated = torch.zeros(51, dtype=torch.float32, device=device)
        accumulated.add_(1).mul_(2)
        out = torch.empty(52, dtype=torch.float32, device=device)
        torch.add(accumulated[:50], torch.arange(50, device=device), out=out[:50])
        return [through_view.t()[3].clone(), strided[:, 1].clone(), out[as_index]]

    ledger = audit.run(code, deep=True).ledger
    accused = [a for a in ledger.allocations if a.read == "never read" or (a.read == "unknown" and a.dead)]
    assert not accused, accused
    tensors = [a for a in ledger.allocations if a.shape is not None and a.op != "aten::lift_fresh"]
    inner = [a for a in tensors if any(name.startswith("aten::") for name in a.via)]  # parts of PyTorch's own
    assert {a.read for a in tensors if a not in inner} == {"read"}
    assert {a.read for a in inner} <= {"read", "unknown"}
    assert of(ledger, 52 * 4).never_written == 2 * 4
    assert of(ledger, 96 * dtype.itemsize).never_written == 48 * dtype.itemsize  # every other element, pass by pass


def test_a_corruption_that_permutes_values_does_not_hide_a_read(device: torch.device) -> None:
    """Flipping a low bit makes a range of indices, a mask half set and flags a permutation of what they were."""

    def code() -> list[torch.Tensor]:
        table = torch.arange(1000.0, device=device)
        indices = torch.arange(1000, device=device)
        mask = torch.arange(104, device=device) % 2 == 0
        flags = (torch.arange(107, device=device) % 2)[:106].clone().to(torch.int16)
        levels = torch.arange(256, device=device).to(torch.uint8)
        offsets = torch.arange(109, device=device) * 656  # of bytes, of which only the row is used
        rows = table[(offsets // 16) % 1000]
        return [rows, table[indices].sum(), mask.sum(), flags.sum(), (flags != 0).sum(), torch.bincount(levels)]

    ledger = audit.run(code, deep=True).ledger
    assert not [a for a in ledger.allocations if a.read == "never read"]
    assert of(ledger, 8000).read == of(ledger, 104).read == of(ledger, 212).read == of(ledger, 256).read == "read"
    assert {a.read for a in ledger.allocations if a.nbytes == 8 * 109} == {"read"}


class _Slotted:
    __slots__ = ("answer",)

    def __init__(self, answer: torch.Tensor) -> None:
        self.answer = answer


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.ones(100), persistent=False)
        self.kept = torch.ones(101)


@pytest.mark.parametrize(
    "code",
    [
        lambda: torch.ones(100).numpy().sum(),  # a numpy scalar
        lambda: bytearray(torch.ones(100).numpy()),
        lambda: memoryview(torch.ones(100).numpy()),
        lambda: deque([torch.ones(100)]),
        lambda: _Slotted(torch.ones(100)),
        _Layer,
    ],
    ids=["numpy scalar", "bytearray", "memoryview", "deque", "slots", "module"],
)
def test_results_of_every_kind_are_compared(code: Callable[[], object]) -> None:
    ledger = audit.run(code, deep=True).ledger
    assert ledger.allocations and not ledger.dead_bytes, ledger.allocations


def test_two_passes_are_exact_to_the_byte(device: torch.device) -> None:
    def code() -> torch.Tensor:
        gaps = torch.empty(1000, 3, dtype=torch.uint8, device=device)
        gaps[:, :2] = torch.arange(2000, device=device).to(torch.uint8).view(1000, 2)
        torch.empty((), dtype=torch.bool, device=device)
        return gaps[:, :2].sum()

    assert of(audit.run(code).ledger, 3000).never_written == 0  # gaps of one byte: below the sentinel's word
    ledger = audit.run(code, passes=2).ledger
    assert of(ledger, 3000).never_written == 1000
    assert of(ledger, 1).never_written == 1
    assert not ledger.notes


def test_uninitialised_reads_are_noted(device: torch.device) -> None:
    ledger = audit.run(lambda: torch.empty(10, device=device).sum(), passes=2).ledger
    assert any("never wrote" in note for note in ledger.notes)


def test_random_numbers_and_changed_surroundings_are_put_back() -> None:
    """Reruns see the same generator states, arguments and in-place state, and leave the latter as one run would."""
    counter = torch.zeros(5)
    history: list[float] = []

    def code(argument: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        argument.mul_(2)
        history.append(random.random())
        noise = torch.rand(9)
        return noise + counter.sum() + argument.sum()

    argument = torch.full((3,), 1.5)
    torch.manual_seed(5)
    torch.rand(9)
    one_run_later = torch.get_rng_state()
    torch.manual_seed(5)
    run = audit.run(code, (argument,), deep=True)
    assert set(history) == {history[0]} and len(history) > 4
    assert counter.tolist() == [1.0] * 5
    assert argument.tolist() == [3.0] * 3
    assert torch.equal(torch.get_rng_state(), one_run_later)
    assert {a.read for a in run.ledger.allocations} == {"read"}


def test_output_arguments_count_as_results() -> None:
    out = torch.zeros(40)

    def code(out: torch.Tensor) -> None:
        scratch = torch.empty(41)
        scratch[:40] = 2.0
        torch.mul(scratch[:40], 3.0, out=out)

    ledger = audit.run(code, (out,), deep=True).ledger
    assert of(ledger, 164).read == "read"
    assert out.tolist() == [6.0] * 40


@dataclass
class Answer:
    value: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


def test_results_inside_objects_count() -> None:
    def code() -> Answer:
        return Answer(torch.zeros(11), {"a": [torch.ones(12)]})

    ledger = audit.run(code, deep=True).ledger
    assert of(ledger, 44).read == of(ledger, 48).read == "read"


def make_unsteady() -> Callable[[], torch.Tensor]:
    calls = [0]

    def code() -> torch.Tensor:
        calls[0] += 1
        return torch.full((4,), float(calls[0]))

    return code


def make_growing() -> Callable[[], torch.Tensor]:
    calls = [0]

    def code() -> torch.Tensor:
        calls[0] += 1
        torch.empty(100 + calls[0])
        return torch.ones(1)

    return code


@pytest.mark.parametrize(("make", "what"), [(make_unsteady, "results"), (make_growing, "different memory")])
def test_code_that_is_not_deterministic_is_refused(make: Callable[[], Callable[[], torch.Tensor]], what: str) -> None:
    with pytest.raises(NotDeterministicError, match=what):
        audit.run(make(), deep=True)


def test_warm_up_is_not_a_difference() -> None:
    cache: dict[str, torch.Tensor] = {}

    def code() -> torch.Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(30.0)
        return cache["table"] * 2

    ledger = audit.run(code, deep=True).ledger
    assert {a.nbytes for a in ledger.allocations} == {120}
    assert {a.read for a in ledger.allocations} == {"read"}


def test_a_corrupted_run_that_fails_is_a_read() -> None:
    def code() -> torch.Tensor:
        index = torch.zeros(3, dtype=torch.int64)
        return torch.ones(1)[index]  # the flipped index is outside

    assert of(audit.run(code, deep=True).ledger, 24).read == "read"


def test_limits_and_thresholds() -> None:
    def code() -> torch.Tensor:
        return torch.ones(100).sum() + torch.ones(50).sum() + torch.ones(20).sum()

    ledger = audit.run(code, deep=True, deep_min_bytes=100, deep_max=1).ledger
    assert [of(ledger, n).read for n in (400, 200, 80)] == ["read", "not tested", "not tested"]
    assert "beyond the 1 largest" in of(ledger, 200).read_note


def test_errors_of_the_code_come_through() -> None:
    def code() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        audit.run(code, deep=True)
    assert not audit.is_watching()


@pytest.mark.parametrize(("name", "value"), [("passes", 3), ("deep_min_bytes", 0), ("deep_max", 0)])
def test_arguments_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        audit.run(lambda: None, **{name: value})  # type: ignore[arg-type]
