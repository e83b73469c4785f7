# SPDX-License-Identifier: Apache-2.0
"""The portable (Triton) kernel on one GPU, meant for an H200: checked against the oracle, timed beside FlashMLA.

Run: ``PYTHONPATH=src[:<folder with flash_mla>] python benchmarks/triton_h200.py --out benchmarks/results``. Heads 8 to
128, T = 1, 64 and 8192, topk 2048, the 656-byte cache, indices uniform over --pool records; FlashMLA's time includes
the copies that other numbers of heads than 64 and 128 cost it. Kernels are compiled first, in processes of their own.
Then, while --budget lasts: the other formats and other tile shapes than the table's, at the largest T. Writes
triton.json into --out, anew after every row, so that a run may be ended at any moment. What fails is a line, not the
end. Exit status: 0; 1 where an answer of ours is wrong or missing; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsemla import reference_attention
from sparsemla.bench import peers as peers_module
from sparsemla.bench import report, runner
from sparsemla.bench.shapes import Bank, Batch, Case, Problem, parse_count
from sparsemla.bench.timing import Effort, Timing, alternate, one_line, transient_bytes
from sparsemla.formats import KVFormat, record_layout
from sparsemla.kernels.triton.launch import run, setting_of
from sparsemla.kernels.triton.shapes import Shape
from sparsemla.schedule import SplitSchedule

FMT = KVFormat.FP8_DS_MLA
HEADS = (64, 16, 8, 32, 128)
ROWS = ("8192", "1", "64")
"""Most important first: what is compiled and measured before time runs out."""
OUT_TOLERANCE, LSE_TOLERANCE = 2.2e-3, 1e-5
CHECKED_ROWS = 3
COMPILING = 0.4
"""Of the budget, at most this may go into compiling."""

TRIALS: dict[int, tuple[Shape, ...]] = {
    64: (Shape(32, 128, 8, 0, 1), Shape(64, 16, 4, 0, 2, 256), Shape(32, 64, 8, 0, 1), Shape(64, 64, 8, 0, 1, 256)),
    16: (Shape(16, 32, 4, 0, 2), Shape(16, 64, 8, 0, 1)),
    32: (Shape(32, 128, 16, 128, 1), Shape(16, 64, 4, 0, 2), Shape(32, 64, 8, 0, 1)),
}
"""Tile shapes tried beside the table's, by number of heads, the likeliest first."""
OTHER_TRIALS = (Shape(32, 128, 8, 0, 1), Shape(32, 64, 8, 0, 1))
"""Those tried with 64 heads of the other formats."""


@dataclass(frozen=True)
class Job:
    """One variant to compile: a tiny call that needs it. shape None: the table's."""

    fmt: KVFormat
    heads: int
    shape: Shape | None
    split: bool


# --------------------------------------------------------------------------------------------- compiling


def jobs(heads: list[int], *, trials: bool) -> list[Job]:
    """Everything that will run, most important first."""
    found = [Job(FMT, count, None, split) for split in (False, True) for count in heads]
    if trials:
        longest = max(map(len, TRIALS.values()))
        tried = [(max(s[i].heads, 16), s[i]) for i in range(longest) for s in TRIALS.values() if i < len(s)]
        found += [Job(FMT, count, shape, False) for count, shape in dict.fromkeys(tried)]
    rest = [fmt for fmt in KVFormat if fmt is not FMT]
    found += [Job(fmt, count, None, False) for fmt in rest for count in (64, 16)]
    if trials:
        found += [Job(fmt, 64, shape, False) for fmt in rest for shape in OTHER_TRIALS]
    return found


def compile_one(job: Job) -> str:
    """Calls the variant on a tiny problem, so that its code is on disk. Returns why that failed, or nothing."""
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        tokens = 1 if job.split else 2
        case = Case(job.heads, Batch(tokens, 1), 4096, d_qk=record_layout(job.fmt).d_qk)
        problem = Bank(device, [case]).problem(case, [job.fmt])
        plan = None if job.split else SplitSchedule.unsplit(tokens, heads=job.heads)
        run(runner.call_of(problem, job.fmt, plan), shape=job.shape)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job.fmt.value}, {job.heads} heads, {job.shape}: {one_line(error)}"
    return ""


def compile_all(wanted: list[Job], seconds: float) -> list[str]:
    """All jobs, in processes forked from this one, which must not have touched the GPU yet; complaints."""
    deadline = time.monotonic() + seconds
    workers = max(min((os.cpu_count() or 2) - 1, 15), 1)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pending = [pool.apply_async(compile_one, (job,)) for job in wanted]
        complaints = []
        for job, answer in zip(wanted, pending, strict=True):
            try:
                complaints.append(answer.get(timeout=max(deadline - time.monotonic(), 0.05)))
            except multiprocessing.TimeoutError:
                complaints.append(f"{job}: not compiled in time")
        pool.terminate()
    return [line for line in complaints if line]


# --------------------------------------------------------------------------------------------- measuring


def errors(problem: Problem, fmt: KVFormat) -> tuple[float, float]:
    """Relative error of the output and largest error of lse (relative from 1 on) on a few rows, against float64."""
    rows = sorted({0, problem.q.shape[0] // 2, problem.q.shape[0] - 1})[:CHECKED_ROWS]
    if not bool(torch.isfinite(problem.out).all() and torch.isfinite(problem.lse).all()):
        return float("inf"), float("inf")
    want, want_lse = reference_attention(
        problem.q[rows], problem.caches[fmt], problem.indices[rows], softmax_scale=problem.softmax_scale
    )
    out, lse = problem.out[rows].double(), problem.lse[rows].double()
    error = float((out - want).norm() / want.norm())
    return error, float(((lse - want_lse).abs() / want_lse.abs().clamp_min(1.0)).max())


def row_of(problem: Problem, fmt: KVFormat, found: list[peers_module.Peer], device: torch.device) -> dict[str, Any]:
    """One line of the results: checked, then timed in turn with FlashMLA."""
    case = problem.case
    row: dict[str, Any] = {"format": fmt.value, "heads": case.heads, "batch": case.rows.batch, "s_q": case.rows.s_q}
    row |= {"pool": case.pool, "shape": str(setting_of(device, fmt, case.heads).shape)}
    call = runner.call_of(problem, fmt)
    problem.out.fill_(torch.nan)
    problem.lse.fill_(torch.nan)
    try:
        run(call)
        row["error"], row["lse_error"] = errors(problem, fmt)
    except Exception as error:
        return row | {"ours_us": None, "note": one_line(error)}
    if not (row["error"] <= OUT_TOLERANCE and row["lse_error"] <= LSE_TOLERANCE):
        return row | {"ours_us": None, "note": "wrong answer, not timed"}
    row["transient_bytes"] = transient_bytes(lambda: run(call), device)
    runs: dict[str, Any] = {"ours": lambda: run(call)}
    for peer in found:
        if peer.name in peers_module.FLASHMLA_FP8 and "peer" not in runs and fmt is FMT:
            try:
                theirs = peer.prepare(problem).run
                theirs()
                runs["peer"], row["peer"] = theirs, peer.name
            except Exception as error:
                row["peer_note"] = one_line(error)
    times = alternate(runs, Effort.of(case.tokens, device), device)
    ours, peer_time = times["ours"], times.get("peer")
    row["ours_us"] = ours.median_us if isinstance(ours, Timing) else None
    if isinstance(ours, Timing):
        row |= {"ours_low_us": ours.low_us, "ours_high_us": ours.high_us, "tflops": case.flops / ours.median_us / 1e6}
        if isinstance(peer_time, Timing):
            row |= {"peer_us": peer_time.median_us, "ratio": peer_time.median_us / ours.median_us}
    else:
        row["note"] = ours
    return row


def trial_of(
    problem: Problem, fmt: KVFormat, shape: Shape, want: torch.Tensor | None, device: torch.device
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The time of another tile shape, and its answer; no time where that differs from `want` by more than rounding."""
    trial: dict[str, Any] = {
        "format": fmt.value,
        "heads": problem.case.heads,
        "tokens": problem.case.tokens,
        "shape": str(shape),
    }
    call = runner.call_of(problem, fmt, SplitSchedule.unsplit(problem.case.tokens, heads=problem.case.heads))
    problem.out.fill_(torch.nan)
    try:
        run(call, shape=shape)
        got = problem.out[:: max(problem.case.tokens // 64, 1)].float()
        if want is not None and not float((got - want).norm() / want.norm()) < 5e-3:
            return trial | {"us": None, "note": "another answer than the first shape"}, None
        timing = alternate({"it": lambda: run(call, shape=shape)}, Effort(5, 1), device)["it"]
    except Exception as error:
        return trial | {"us": None, "note": one_line(error)}, None
    return trial | ({"us": timing.median_us} if isinstance(timing, Timing) else {"us": None, "note": timing}), got


def others(bank: Bank, case: Case) -> Iterator[tuple[Problem, KVFormat]]:
    """The same in the other formats."""
    for fmt in KVFormat:
        if fmt is not FMT:
            yield bank.problem(dataclasses.replace(case, d_qk=record_layout(fmt).d_qk), [fmt]), fmt


def _rounded(key: str, value: Any) -> Any:
    return round(value, 9 if "error" in key else 2) if isinstance(value, float) and math.isfinite(value) else value


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "-".rjust(int(form.split(".")[0]))


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    return (
        f"{row['format']:10} h {row['heads']:3} T {row['batch'] * row['s_q']:5}  ours {_number(row['ours_us'], '9.1f')}"
        f" µs {_number(row.get('tflops'), '6.1f')} TFLOPS  FlashMLA {_number(row.get('peer_us'), '9.1f')} µs"
        f"  ratio {_number(row.get('ratio'), '6.2f')}  error {_number(row.get('error'), '8.1e')}"
        f" lse {_number(row.get('lse_error'), '8.1e')}  {row.get('note', '')} {row.get('peer_note', '')}"
    )


def markdown(results: dict[str, Any]) -> str:
    """What docs/portable-kernel.md quotes of a triton.json: times, ratios to FlashMLA, the best shapes tried."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"`{results['command']}` on one {results['gpu']} ({versions}).", ""]
    rows = {(row["format"], row["heads"], row["batch"] * row["s_q"]): row for row in results["rows"]}
    tokens = sorted({key[2] for key in rows})
    lines += ["| cache | heads | " + " | ".join(f"T {count}" for count in tokens) + " |"]
    lines += ["| --- " * (2 + len(tokens)) + "|"]
    for fmt, heads in sorted({key[:2] for key in rows}, key=lambda key: (key[0] != FMT.value, *key)):
        cells = [rows.get((fmt, heads, count), {}) for count in tokens]
        texts = [f"{cell['ours_us']:,.1f}" if cell.get("ours_us") else "" for cell in cells]
        texts = [f"{a} ({b['ratio']:.2f} ×)" if "ratio" in b else a for a, b in zip(texts, cells, strict=True)]
        lines.append(f"| {fmt} | {heads} | " + " | ".join(texts) + " |")
    groups = sorted({(trial["format"], trial["heads"]) for trial in results["trials"]}, key=lambda key: key[::-1])
    for fmt, heads in groups:
        of_group = [trial for trial in results["trials"] if (trial["format"], trial["heads"]) == (fmt, heads)]
        tried = [trial for trial in of_group if trial["us"] is not None]
        best = min(tried, key=lambda trial: trial["us"])
        peer = rows.get((fmt, heads, best["tokens"]), {}).get("peer_us")
        against = "" if peer is None else f", {peer / best['us']:.2f} × FlashMLA"
        where = f"{fmt}, {heads} heads, T {best['tokens']}, best of {len(tried)} shapes"
        lines += ["", f"{where}: `{best['shape']}`, {best['us']:,.1f} µs{against}."]
    return "\n".join(lines)


def main() -> int:
    """Compiles, checks, times, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="128K", help="records of the cache")
    parser.add_argument("--heads", default=",".join(map(str, HEADS)))
    parser.add_argument("--rows", default=",".join(ROWS), help="query tokens")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds after which nothing more is begun")
    parser.add_argument("--peers", default="flash_mla", help="see `sparsemla bench --help`; none: without")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this, interpreted")
    parser.add_argument("--no-trials", action="store_true", help="only the shapes of the table")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="only print what documents quote of FILE")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    if given.markdown is not None:
        print(markdown(json.loads(given.markdown.read_text(encoding="utf-8"))))
        return 0
    begin = time.monotonic()
    pool = parse_count(given.pool, "pool")
    heads = [int(part) for part in given.heads.split(",")]
    results: dict[str, Any] = {"command": report.quotable(["python", "benchmarks/triton_h200.py", *sys.argv[1:]])}
    wanted = jobs(heads, trials=not given.no_trials)
    complaints = compile_all(wanted, COMPILING * given.budget) if given.device == "cuda" else []
    print(f"{time.monotonic() - begin:5.1f} s  {len(wanted)} variants compiled", flush=True)
    for line in complaints:
        print("not compiled:", line)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("triton_h200.py: torch sees no GPU", file=sys.stderr)
        return 2
    device = torch.device(given.device)
    found, missing = peers_module.find(given.peers)
    for line in missing:
        print("missing:", line)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    results |= {"gpu": gpu, "versions": runner.versions(found, device)}
    results |= {"missing": missing, "not_compiled": complaints, "rows": [], "trials": []}
    print(results["gpu"], results["versions"], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)

    def keep(group: str, row: dict[str, Any], text: str) -> None:
        results[group].append({key: _rounded(key, value) for key, value in row.items()})
        results["seconds"] = round(time.monotonic() - begin, 1)
        report.write_json(given.out / "triton.json", results)
        print(f"{results['seconds']:5.1f} s  {text}", flush=True)

    def late() -> bool:
        return time.monotonic() - begin > given.budget

    cases = [Case(count, Batch.parse(rows), pool, given.topk) for rows in given.rows.split(",") for count in heads]
    bank = Bank(device, cases)
    for case in cases:
        if late():
            print("out of time:", case.describe())
            continue
        row = row_of(bank.problem(case, [FMT]), FMT, found, device)
        keep("rows", row, line_of(row))
    failed = any(row["ours_us"] is None for row in results["rows"])
    largest = [case for case in cases if case.tokens == max(case.tokens for case in cases) and case.heads in TRIALS]
    for case in largest:
        for problem, fmt in others(bank, case):
            if not late():
                row = row_of(problem, fmt, [], device)
                failed |= row["ours_us"] is None
                keep("rows", row, line_of(row))
    tried = [] if given.no_trials else [(bank.problem(case, [FMT]), FMT, TRIALS[case.heads]) for case in largest]
    for case in [] if given.no_trials else [case for case in largest if case.heads == 64]:
        tried += [(problem, fmt, OTHER_TRIALS) for problem, fmt in others(bank, case)]
    for problem, fmt, candidates in tried:
        want: torch.Tensor | None = None
        for shape in dict.fromkeys((setting_of(device, fmt, problem.case.heads).shape, *candidates)):
            if late():
                break
            trial, got = trial_of(problem, fmt, shape, want, device)
            want = got if want is None else want
            text = f"{fmt.value:10} h {problem.case.heads:3} {_number(trial['us'], '9.1f')} µs  {shape}"
            keep("trials", trial, f"{text} {trial.get('note', '')}")
    print(f"{time.monotonic() - begin:.0f} s in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
