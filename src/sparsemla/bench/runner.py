# SPDX-License-Identifier: Apache-2.0
"""One run: for each case the tensors, each implementation checked against float64, then timed in turn."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.bench import floors as floors_module
from sparsemla.bench.peers import Peer
from sparsemla.bench.report import OURS, Entry, Results, Row
from sparsemla.bench.shapes import D_V, Bank, Case, Problem
from sparsemla.bench.timing import Effort, Run, Timing, alternate, one_line, transient_bytes
from sparsemla.bench.watchdog import Watchdog
from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall
from sparsemla.reference import reference_attention
from sparsemla.schedule import SplitSchedule

TOLERANCE = 6e-3
"""Relative error above which a result is wrong and gets no time. bf16 rounding alone is 2e-3; FlashMLA, which rounds
scales to bf16, is at 4e-3."""
LSE_TOLERANCE = 1e-3
CHECKED_ROWS = 4
"""Query tokens compared with the oracle, spread over the batch."""


@dataclass(frozen=True)
class Settings:
    """What to measure, and how.

    Attributes:
        device: where.
        cases: the grid, over keys of 576 columns; formats of another width take the same cases with theirs.
        formats: of our cache.
        peers: from `peers.find`.
        missing: its lines.
        budget_s: no case is begun after so many seconds, compiling our kernels not counted; None: no limit.
        step_s: the process ends when one step takes longer.
        cold: overwrite the L2 before each call.
    """

    device: torch.device
    cases: Sequence[Case]
    formats: Sequence[KVFormat]
    peers: Sequence[Peer] = ()
    missing: Sequence[str] = ()
    budget_s: float | None = None
    step_s: float = 180.0
    cold: bool = False
    command: str = ""
    watchdog: Watchdog | None = field(default=None, compare=False)


@dataclass
class _Candidate:
    """An implementation on its way from called to timed."""

    entry: Entry
    run: Run | None = None


@dataclass
class _Clock:
    """Adds up first calls of ours that took so long that they must have compiled."""

    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds if seconds > 1 else 0.0


def run(
    settings: Settings,
    *,
    on_rows: Callable[[Results], None] = lambda results: None,
    tick: Callable[[str], None] = lambda what: None,
) -> Results:
    """Measures the grid.

    Args:
        on_rows: called after each case with everything so far; save it there.
        tick: called before each case with what is about to be measured.

    Raises:
        RuntimeError: the device failed (an illegal access of any implementation); what was measured before it has gone
            to `on_rows`.
    """
    device = settings.device
    watchdog = settings.watchdog or Watchdog()
    started = time.monotonic()
    widths: dict[int, list[KVFormat]] = {}
    for fmt in settings.formats:
        widths.setdefault(record_layout(fmt).d_qk, []).append(fmt)
    groups = [(replace(case, d_qk=d_qk), formats) for d_qk, formats in widths.items() for case in settings.cases]
    gathers = {
        (record_layout(fmt).record_bytes, case.pool)
        for case, formats in groups
        for fmt in (*formats, *(peer.reads for peer in settings.peers if _comparable(formats, peer)))
    }
    tick("floors of this machine")
    with watchdog.step("measuring the floors", settings.step_s):
        measured = floors_module.measure(device, gathers)
    results = Results(
        command=settings.command,
        device=device.type,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        versions=versions(settings.peers, device),
        floors=measured,
        state="cold" if settings.cold else "warm",
        notes=(*settings.missing, *_remarks(settings)),
    )
    bank = Bank(device, [case for case, _ in groups])
    compiling = _Clock()
    for done, (case, formats) in enumerate(groups):
        if settings.budget_s is not None and time.monotonic() - started - compiling.seconds > settings.budget_s:
            left = f"stopped after {settings.budget_s:.0f} s: {len(groups) - done} of {len(groups)} cases not measured"
            results = replace(results, notes=(*results.notes, left))
            break
        tick(case.describe())
        rows = _measure(settings, watchdog, bank, case, formats, measured, compiling)
        results = replace(results, rows=(*results.rows, *rows))
        on_rows(results)
    if compiling.seconds:
        results = replace(results, notes=(*results.notes, f"our kernels compiled for {compiling.seconds:.0f} s"))
    on_rows(results)
    return results


def _remarks(settings: Settings) -> Iterator[str]:
    if settings.device.type == "cpu":
        yield "on a CPU: this is the blockwise torch kernel, made to be right on any machine; no peer runs here"
    if settings.cold:
        yield "cold: the L2 is overwritten before each call, and a call is timed alone"


def _measure(
    settings: Settings,
    watchdog: Watchdog,
    bank: Bank,
    case: Case,
    formats: Sequence[KVFormat],
    measured: floors_module.Floors,
    compiling: _Clock,
) -> list[Row]:
    """A row for each format; everything that takes part is timed in one alternation."""
    peers = [peer for peer in settings.peers if _comparable(formats, peer)]
    with watchdog.step(f"making the tensors of {case.describe()}", settings.step_s):
        problem = bank.problem(case, {*formats, *(peer.reads for peer in peers)})
        oracle = _Oracle(problem)
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)
    candidates: dict[str, _Candidate] = {}
    for fmt in formats:
        # Compiling at first use may take a while; nothing else may.
        with watchdog.step(f"our kernel over {fmt.value}, {case.describe()}", 4 * settings.step_s):
            begin = time.monotonic()
            candidates[f"{OURS}/{fmt.value}"] = _guarded(OURS, fmt.value, partial(_ours, problem, fmt, oracle))
            compiling.add(time.monotonic() - begin)
    for peer in peers:
        with watchdog.step(f"{peer.name}, {case.describe()}", settings.step_s):
            candidates[peer.name] = _guarded(peer.name, peer.reads.value, partial(_theirs, problem, peer, oracle))
    runs = {name: made.run for name, made in candidates.items() if made.run is not None}
    effort = Effort.of(case.tokens, settings.device, cold=settings.cold)
    with watchdog.step(f"timing {', '.join(runs)}, {case.describe()}", settings.step_s):
        times = alternate(runs, effort, settings.device, cold=settings.cold)
    entries = {name: _timed(made.entry, times.get(name)) for name, made in candidates.items()}
    del candidates, runs
    if settings.device.type == "cuda" and case.tokens >= 1024:
        torch.cuda.empty_cache()  # the peers' large buffers, which the next case has in other sizes
    return [_row(case, fmt, entries, peers, measured) for fmt in formats]


def _comparable(formats: Sequence[KVFormat], peer: Peer) -> bool:
    """Peers read 576 columns. All compare with fp8_ds_mla, those over bf16 also with bf16."""
    return KVFormat.FP8_DS_MLA in formats or (KVFormat.BF16 in formats and peer.reads is KVFormat.BF16)


def _guarded(name: str, reads: str, make: Callable[[], _Candidate]) -> _Candidate:
    """A candidate, or one with the reason why it cannot be measured. A device that has failed ends the run."""
    try:
        return make()
    except Exception as error:
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise RuntimeError(f"{name} made the device fail, nothing more can run: {one_line(error)}") from error
        return _Candidate(Entry(name, reads, note=one_line(error)))


def _ours(problem: Problem, fmt: KVFormat, oracle: _Oracle) -> _Candidate:
    cache = problem.caches[fmt]
    kernel, why_not_better = serving_kernel(problem, fmt)
    if kernel == registry.KERNELS[-1].name and problem.q.device.type == "cuda":
        return _Candidate(
            Entry(OURS, fmt.value, kernel=kernel, note=f"no compiled kernel serves this ({why_not_better})")
        )

    def call() -> torch.Tensor:
        return sparse_mla_attention(
            problem.q,
            cache,
            problem.indices,
            softmax_scale=problem.softmax_scale,
            out=problem.out,
            lse=problem.lse,
        )[0]

    problem.out.fill_(torch.nan)
    problem.lse.fill_(torch.nan)
    error = oracle.error(call(), fmt)
    lse_error = oracle.lse_error(problem.lse, fmt)
    taken = transient_bytes(call, problem.q.device)
    entry = Entry(OURS, fmt.value, kernel, error=error, lse_error=lse_error, transient_bytes=taken)
    if not lse_error <= LSE_TOLERANCE:
        return _Candidate(replace(entry, note=f"wrong: log-sum-exp off by {lse_error:.1e}"))
    return _checked(entry, call)


def _theirs(problem: Problem, peer: Peer, oracle: _Oracle) -> _Candidate:
    prepared = peer.prepare(problem)
    error = oracle.error(prepared.run(), peer.reads)
    taken = transient_bytes(prepared.run, problem.q.device)
    if taken is not None:
        taken = max(taken + prepared.workspace_bytes - prepared.results_bytes, 0)
    return _checked(Entry(peer.name, peer.reads.value, error=error, transient_bytes=taken), prepared.run)


def _checked(entry: Entry, run: Run) -> _Candidate:
    """A wrong result gets no time."""
    if entry.error is None or not entry.error <= TOLERANCE:
        return _Candidate(replace(entry, note=f"wrong: relative error {entry.error:.1e}, accepted is {TOLERANCE:.0e}"))
    return _Candidate(entry, run)


def _timed(entry: Entry, timing: Timing | str | None) -> Entry:
    if isinstance(timing, Timing):
        return replace(entry, timing=timing)
    return entry if timing is None else replace(entry, note=timing)


def _row(
    case: Case, fmt: KVFormat, entries: dict[str, Entry], peers: Sequence[Peer], measured: floors_module.Floors
) -> Row:
    record_bytes = record_layout(fmt).record_bytes
    bound = measured.bound(case, record_bytes)
    return Row(
        format=fmt.value,
        heads=case.heads,
        batch=case.rows.batch,
        s_q=case.rows.s_q,
        pool=case.pool,
        topk=case.topk,
        d_qk=case.d_qk,
        record_bytes=record_bytes,
        flops=case.flops,
        ours=entries[f"{OURS}/{fmt.value}"],
        peers=tuple(entries[peer.name] for peer in peers if _comparable([fmt], peer)),
        gather_us=bound.gather_us,
        matrix_us=bound.matrix_us,
        bound_us=bound.us,
        bound_by=bound.by,
        upconversion_us=measured.upconversion_us(case, record_bytes),
    )


class _Oracle:
    """The float64 answer for a few rows of a problem, one for each format that is read."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        tokens = problem.case.tokens
        wanted = {round(i * (tokens - 1) / max(CHECKED_ROWS - 1, 1)) for i in range(CHECKED_ROWS)}
        self._rows = torch.tensor(sorted(wanted), device=problem.q.device)
        self._answers: dict[KVFormat, tuple[torch.Tensor, torch.Tensor]] = {}

    def _answer(self, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
        if fmt not in self._answers:
            made = self._problem
            self._answers[fmt] = reference_attention(
                made.q[self._rows],
                made.caches[fmt],
                made.indices[self._rows],
                softmax_scale=made.softmax_scale,
            )
        return self._answers[fmt]

    def error(self, out: torch.Tensor, fmt: KVFormat) -> float:
        """Relative error over the rows checked; inf where anything in the whole output is not finite."""
        case = self._problem.case
        whole = out.reshape(case.tokens, case.heads, D_V)
        if not bool(torch.isfinite(whole).all()):
            return float("inf")
        want = self._answer(fmt)[0]
        return float((whole[self._rows].double() - want).norm() / want.norm())

    def lse_error(self, lse: torch.Tensor, fmt: KVFormat) -> float:
        """Largest absolute error over the rows checked."""
        return float((lse[self._rows].double() - self._answer(fmt)[1]).abs().max())


def call_of(problem: Problem, fmt: KVFormat, schedule: SplitSchedule | None = None) -> AttentionCall:
    """The checked call of a problem over its cache of one format."""
    scale, out, lse = problem.softmax_scale, problem.out, problem.lse
    return AttentionCall.plain(
        problem.q, problem.caches[fmt], problem.indices, softmax_scale=scale, schedule=schedule, out=out, lse=lse
    )


def serving_kernel(problem: Problem, fmt: KVFormat) -> tuple[str, str]:
    """Which of our kernels serves the problem, and why those before it in the table do not."""
    call = call_of(problem, fmt)
    reasons: list[str] = []
    for kernel in registry.KERNELS:
        reason = kernel.why_not(call)
        if reason is None:
            return kernel.name, "; ".join(reasons)
        reasons.append(f"{kernel.name}: {reason}")
    raise ValueError("no kernel serves this; " + "; ".join(reasons))


def versions(peers: Sequence[Peer], device: torch.device) -> dict[str, str]:
    """Everything that takes part, and its version."""
    import sparsemla

    found = {"sparsemla": str(sparsemla.__version__), "python": platform.python_version(), "torch": torch.__version__}
    for package in ("nvidia-cutlass-dsl", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["driver"] = _driver()
    else:
        found["machine"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return found | {peer.family: peer.version for peer in peers}


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (answer.stdout.split() or ["unknown"])[0]
