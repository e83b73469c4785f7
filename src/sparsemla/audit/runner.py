# SPDX-License-Identifier: Apache-2.0
"""Running code under the audit: once, twice with opposite sentinels, or again and again with one allocation
corrupted."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from . import state
from .deep import Outcome, Probe, Surroundings, Target, outcome_of
from .dispatch import cuda_in_use, quiet, tensors_in
from .ledger import Allocation, Ledger, Read, Region, with_runs, with_verdict
from .sentinel import EMPTY, intersect, size
from .tracker import LIFT, Live, Tracker, _unused

Progress = Callable[[str], None]

_NEVER: Final = "no result changed in two runs in which its bytes were flipped after every write"


class NotDeterministicError(RuntimeError):
    """`deep` was asked for code that does not do the same thing twice."""


@dataclass
class Run:
    """What `run` gives back."""

    result: Any
    ledger: Ledger


@contextlib.contextmanager
def watch() -> Iterator[Ledger]:
    """Audit every tensor allocation inside the block.

    Yields the ledger, which is filled when the block ends (also when it ends with an exception). Allocations of this
    thread are seen, on CPU and CUDA, compiled operators included. Fresh memory is filled with the sentinel, so the code
    runs slower, and code that reads memory it never wrote reads the sentinel instead of chance. Raises RuntimeError
    inside another watch.
    """
    tracker = Tracker()
    with _open(tracker):
        yield tracker.ledger


@contextlib.contextmanager
def _open(tracker: Tracker) -> Iterator[None]:
    state.enter(tracker)
    try:
        if cuda_in_use():
            tracker.open_trace()
        with tracker.mode:
            yield
    finally:
        state.leave(tracker)
        tracker.close()


@dataclass
class _Code:
    """A callable with its arguments, the state around it, and what one run of it leaves behind."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    around: Surroundings = field(init=False)

    def __post_init__(self) -> None:
        self.around = Surroundings.now(tensors_in(self.args, self.kwargs))

    def _audited(self) -> Any:  # the name ends the call stacks in a report
        return self.fn(*self.args, **self.kwargs)

    def once(self, tracker: Tracker, *, keep_outside: bool, may_fail: bool) -> tuple[Any, Ledger, Outcome]:
        """One run, from the same state every time."""
        with quiet():
            self.around.restore()
        if keep_outside:
            tracker.outside = dict(self.around.tensors)
        result: Any = None
        error = ""
        with _open(tracker):
            try:
                result = self._audited()
            except (Exception, SystemExit) as problem:
                if not may_fail:
                    raise
                error = f"{type(problem).__name__}: {problem}"
        if keep_outside and tracker.outside is not None:
            self._join(tracker)
        with quiet():
            outcome = outcome_of(result, self.around.contents(tracker.scratch) if not error else None)
        outcome.error = error
        return result, tracker.ledger, outcome

    def _join(self, tracker: Tracker) -> None:
        """Take over tensors that this run was the first to change, unless the code itself made and dropped them."""
        fresh = dict(tracker.outside or {})
        tracker.outside = None
        for address in [a for a in fresh if a not in self.around.tensors]:
            storage, before = fresh.pop(address)
            holder = Live(0, storage, "", (), (), torch.uint8, None, 0, 0, 0, EMPTY)
            del storage
            if not _unused(holder, held=0):
                self.around.tensors[address] = (holder.storage, before)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: Literal[1, 2] = 1,
    deep: bool = False,
    deep_min_bytes: int = 1,
    deep_max: int = 200,
    progress: Progress | None = None,
) -> Run:
    """Call `fn` under the audit.

    `passes=2` runs it again with the inverted sentinel: never-written bytes are then exact to the byte, and a result
    that depends on uninitialised memory is noted. `deep` (three plain runs, then two for each allocation and region of
    at least `deep_min_bytes`, largest first, `deep_max` of them at most) finds what is written and never read. Reruns
    start from the same random number states, arguments and, where PyTorch operators changed them in place, outside
    tensors. Raises NotDeterministicError where `deep` is asked for and two plain runs differ in their results or
    allocations; ValueError for arguments out of range. Exceptions of `fn` in a plain run come through.
    """
    if passes not in (1, 2):
        raise ValueError(f"passes: given {passes!r}, accepted 1 or 2")
    if deep_min_bytes < 1 or deep_max < 1:
        raise ValueError(f"deep_min_bytes and deep_max: given {deep_min_bytes} and {deep_max}, accepted 1 or more")
    tell = progress or (lambda _: None)
    code = _Code(fn, args, kwargs or {})
    if deep:
        return _deep(code, deep_min_bytes, deep_max, tell)
    if passes == 1:
        tell("running")
        result, ledger, _ = code.once(Tracker(), keep_outside=False, may_fail=False)
        return Run(result, ledger)
    result, ledger, _ = _two_passes(code, tell)
    return Run(result, ledger)


def _two_passes(code: _Code, tell: Progress) -> tuple[Any, Ledger, Outcome]:
    tell("pass 1 of 2")
    result, first, before = code.once(Tracker(exact=True), keep_outside=True, may_fail=False)
    tell("pass 2 of 2, inverted sentinel")
    result, second, after = code.once(Tracker(exact=True, inverted=True), keep_outside=True, may_fail=False)
    if _shape_of(first) != _shape_of(second):
        tell("one more pass")
        result, ledger, outcome = code.once(Tracker(), keep_outside=True, may_fail=False)
        ledger.notes.append(
            "two passes allocated differently: never-written bytes are those of one pass, in 8-byte words"
        )
        return result, ledger, outcome
    ledger = _both(first, second)
    if not before.same_as(after):
        ledger.notes.append(
            "the two passes gave different results: the code reads memory that it never wrote, or is not deterministic"
        )
    return result, ledger, after


def _shape_of(ledger: Ledger) -> list[tuple[object, ...]]:
    """What two runs of the same code must agree on."""
    found: list[tuple[object, ...]] = [(a.index, a.op, a.nbytes, a.dtype, a.device) for a in ledger.allocations]
    return found + [(r.name, r.nbytes, r.handouts) for r in ledger.regions]


def _both(first: Ledger, second: Ledger) -> Ledger:
    """Bytes that were unwritten under the sentinel and under its inverse."""
    joined = replace(second, notes=list(dict.fromkeys(first.notes + second.notes)))
    joined.allocations = [
        b if a.never_written is None or b.never_written is None else with_runs(b, intersect(a.runs, b.runs))
        for a, b in zip(first.allocations, second.allocations, strict=True)
    ]
    joined.regions = []
    for a, b in zip(first.regions, second.regions, strict=True):
        runs = intersect(a.runs, b.runs)
        both = a.never_written is not None and b.never_written is not None
        joined.regions.append(replace(b, runs=runs, never_written=size(runs)) if both else b)
    joined.shared_dead = min(first.shared_dead, second.shared_dead)
    return joined


# --- deep -------------------------------------------------------------------------------------------------------------


def _deep(code: _Code, min_bytes: int, most: int, tell: Progress) -> Run:
    result, ledger, _ = _two_passes(code, tell)
    tell("plain run")
    result, plain, base = code.once(Tracker(), keep_outside=True, may_fail=False)
    if _shape_of(plain) != _shape_of(ledger):
        ledger = plain  # the first runs warmed something up
    tell("plain run again")
    result, again, repeat = code.once(Tracker(), keep_outside=True, may_fail=False)
    if _shape_of(plain) != _shape_of(again):
        raise NotDeterministicError(
            "two plain runs allocated different memory: --deep needs code that does the same twice"
        )
    if not base.same_as(repeat):
        raise NotDeterministicError("two plain runs gave different results: --deep needs code that does the same twice")
    ledger.deep = True
    afterwards = code.around.again()
    try:
        _corrupt_each(code, ledger, base, min_bytes, most, tell)
    finally:
        with quiet():
            afterwards.restore()  # corrupted runs leave nothing behind
    return Run(result, ledger)


def _corrupt_each(code: _Code, ledger: Ledger, base: Outcome, min_bytes: int, most: int, tell: Progress) -> None:
    targets = _targets(ledger, min_bytes)
    left_out = targets[most:]
    for entry in left_out:
        _set(ledger, entry, "not tested", f"beyond the {most} largest")
    for number, entry in enumerate(targets[:most], 1):
        tell(f"corrupting {number} of {min(len(targets), most)}: {entry.nbytes:,} bytes of {entry.site}")
        read, note = _verdict(code, entry, base)
        _set(ledger, entry, read, note)
        if not _cuda_alive():
            ledger.notes.append(
                f"CUDA stopped working when {entry.site} was corrupted, so it is read; what is left was not tested"
            )
            break


def _targets(ledger: Ledger, min_bytes: int) -> list[Allocation | Region]:
    """What is worth corrupting, largest first."""
    found: list[Allocation | Region] = []
    for a in ledger.allocations:
        if a.nbytes >= min_bytes and a.never_written != a.nbytes and a.op != LIFT and a.shape is not None:
            found.append(a)
    found += [r for r in ledger.regions if r.nbytes >= min_bytes and r.never_written != r.nbytes]
    return sorted(found, key=lambda entry: -entry.nbytes)


def _verdict(code: _Code, entry: Allocation | Region, base: Outcome) -> tuple[Read, str]:
    target = Target(index=entry.index) if isinstance(entry, Allocation) else Target(region=entry.name)
    opaque, flipped = "", False
    attempts: tuple[Literal[0, 1], ...] = (0, 1)
    for attempt in attempts:
        tracker = Tracker()
        tracker.probe = Probe(target, attempt=attempt)
        try:
            _, _, outcome = code.once(tracker, keep_outside=False, may_fail=True)
            same = base.same_as(outcome)
        except RuntimeError as problem:  # the device refused to go on
            return "read", f"corrupted, the run ended with: {problem}"
        if not same:
            return "read", ""
        opaque, flipped = opaque or tracker.probe.opaque, flipped or tracker.probe.flipped
    if not flipped:
        return "unknown", "nothing was seen to write it"
    return ("unknown", opaque) if opaque else ("never read", _NEVER)


def _set(ledger: Ledger, entry: Allocation | Region, read: Read, note: str) -> None:
    if isinstance(entry, Allocation):
        ledger.allocations = [with_verdict(a, read, note) if a.index == entry.index else a for a in ledger.allocations]
    else:
        ledger.regions = [replace(r, read=read, read_note=note) if r.name == entry.name else r for r in ledger.regions]


def _cuda_alive() -> bool:
    if not cuda_in_use():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


# --- scripts ----------------------------------------------------------------------------------------------------------


def run_script(
    path: Path,
    argv: Sequence[str] = (),
    *,
    echo: io.TextIOBase | Any | None = None,
    **options: Any,
) -> Run:
    """Run a Python script as `__main__` under the audit; options as for `run`.

    Its results, as far as `deep` is concerned, are what it prints and a global named `result`, if it sets one. `echo`
    gets what its first run prints (None: the process's standard output).
    """
    if not path.is_file():
        raise ValueError(f"script: given {str(path)!r}, accepted an existing Python file")
    out = sys.stdout if echo is None else echo
    runs = 0

    def script() -> tuple[str, Any]:
        nonlocal runs
        runs += 1
        printed = _Tee(out if runs == 1 else None)
        kept_argv, kept_path = sys.argv, list(sys.path)
        sys.argv, sys.path[:0] = [str(path), *argv], [str(path.resolve().parent)]
        try:
            with contextlib.redirect_stdout(printed):
                names = _as_main(path)
        finally:
            sys.argv, sys.path[:] = kept_argv, kept_path
        return printed.getvalue(), names.get("result")

    return run(script, **options)


def _as_main(path: Path) -> dict[str, Any]:
    try:
        return runpy.run_path(str(path), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        return {}


class _Tee(io.StringIO):
    """Keeps what is written and passes it on."""

    def __init__(self, onward: Any) -> None:
        super().__init__()
        self._onward = onward

    def write(self, text: str) -> int:
        if self._onward is not None:
            self._onward.write(text)
        return super().write(text)
