# SPDX-License-Identifier: Apache-2.0
"""The portable (Triton) kernel on one GPU, meant for an H200: checked, then timed beside FlashMLA and the Hopper
kernel.

Run: ``PYTHONPATH=src[:<folder with flash_mla>] python benchmarks/triton_h200.py``. Heads 8, 16 and 64, T = 1, 64 and
8192, topk 2048, the 656-byte cache, indices uniform over 131,072 records. Kernels are compiled first, in parallel.
Prints one table: medians over CUDA-graph replays, all in turn in one process; FlashMLA's time includes the copies
that fewer than 64 heads cost it. Where time is left in --budget (55 s), other tile shapes are tried at T = 2048 and a
second table says what shapes.json should say. Exit status 1 where an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import torch
import triton

from sparsemla import reference_attention
from sparsemla.bench import peers
from sparsemla.bench.shapes import Bank, Batch, Case, Problem
from sparsemla.bench.timing import Effort, Timing, alternate
from sparsemla.formats import KVFormat
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall
from sparsemla.kernels.triton import tune
from sparsemla.kernels.triton.launch import run, setting_of
from sparsemla.kernels.triton.shapes import Shape
from sparsemla.schedule import SplitSchedule

FMT = KVFormat.FP8_DS_MLA
HEADS = (8, 16, 64)
ROWS = ("1", "64", "8192")
OUT_TOLERANCE, LSE_TOLERANCE = 2.2e-3, 1e-5
CHECKED_ROWS = 3


def call_of(problem: Problem, schedule: SplitSchedule | None = None) -> AttentionCall:
    """The checked call of a problem."""
    return AttentionCall(
        q_nope=problem.q[..., :512],
        q_rope=problem.q[..., 512:],
        cache=problem.caches[FMT],
        indices=problem.indices,
        softmax_scale=problem.softmax_scale,
        topk_lengths=None,
        block_table=None,
        request_ids=None,
        context_shard=None,
        attn_sink=None,
        extra=None,
        schedule=schedule,
        out=problem.out,
        lse=problem.lse,
    )


def extra_shapes(heads: int) -> list[Shape]:
    """Shapes tried beside the table's where time is left, the likeliest first."""
    if heads <= 16:
        return [
            Shape(16, 32, 4, 128, 4),
            Shape(16, 32, 4, 168, 3),
            Shape(16, 64, 8, 0, 1),
            Shape(16, 64, 4, 0, 2),
            Shape(16, 32, 4, 0, 2),
        ]
    return [
        Shape(32, 64, 8, 0, 1),
        Shape(32, 32, 4, 168, 3),
        Shape(64, 64, 8, 0, 1),
        Shape(64, 32, 8, 0, 1),
        Shape(32, 32, 4, 0, 2),
    ]


def compile_jobs(device: torch.device) -> list[tuple[int, Shape | None, bool]]:
    """(heads, shape or the table's, split) of everything that will run."""
    jobs: list[tuple[int, Shape | None, bool]] = [
        (16, None, False),
        (64, None, False),
        (16, None, True),
        (64, None, True),
    ]
    return jobs + [(heads, shape, False) for heads in (16, 64) for shape in extra_shapes(heads)]


def compile_one(job: int, device: torch.device) -> None:
    """Calls one variant on a tiny problem, so that its code is on disk."""
    heads, shape, split = compile_jobs(device)[job]
    rows = 1 if split else 2
    problem = Bank(device, [Case(heads, Batch(rows, 1), 4096)]).problem(Case(heads, Batch(rows, 1), 4096), [FMT])
    run(call_of(problem, None if split else SplitSchedule.unsplit(rows, heads=heads)), shape=shape)
    torch.cuda.synchronize()


def compile_all(device: torch.device, seconds: float) -> None:
    """All jobs, each in a process of its own."""
    begin = time.monotonic()
    waiting = list(range(len(compile_jobs(device))))
    running: list[subprocess.Popen[bytes]] = []
    most = max(min((os.cpu_count() or 2) - 1, 14), 1)
    while (waiting or running) and time.monotonic() - begin < seconds:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < most:
            running.append(subprocess.Popen([sys.executable, __file__, "--compile", str(waiting.pop(0))]))
        time.sleep(0.1)
    for process in running:
        process.kill()


def check(problem: Problem) -> tuple[float, float]:
    """Relative error of the output and largest error of lse on a few rows, against float64."""
    rows = sorted({0, problem.q.shape[0] // 2, problem.q.shape[0] - 1})[:CHECKED_ROWS]
    want, want_lse = reference_attention(
        problem.q[rows], problem.caches[FMT], problem.indices[rows], softmax_scale=problem.softmax_scale
    )
    out, lse = problem.out[rows].double(), problem.lse[rows].double()
    error = float((out - want).norm() / want.norm())
    return error, float(((lse - want_lse).abs() / want_lse.abs().clamp_min(1.0)).max())


def microseconds(timing: Timing | str | None) -> str:
    """A time for the table."""
    return f"{timing.median_us:9.1f}" if isinstance(timing, Timing) else f"{'-':>9}"


def ratio(timing: Timing | str | None, ours: Timing | str | None) -> str:
    """How much faster we are."""
    if isinstance(timing, Timing) and isinstance(ours, Timing):
        return f"{timing.median_us / ours.median_us:6.2f}"
    return f"{'-':>6}"


def main() -> int:
    """Compiles, checks, times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=131072)
    parser.add_argument("--budget", type=float, default=55.0, help="seconds after which nothing more is begun")
    parser.add_argument("--peers", default="flash_mla", help="see `sparsemla bench --help`; none: without")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    begin = time.monotonic()
    if not torch.cuda.is_available():
        print("triton_h200.py: torch sees no GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if given.compile is not None:
        compile_one(given.compile, device)
        return 0
    compile_all(device, 40.0)
    found, missing = peers.find(given.peers)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, pool {given.pool}")
    for line in missing:
        print("missing:", line)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)

    hopper = registry.kernel("hopper")
    cases = [Case(heads, Batch.parse(rows), given.pool) for rows in ROWS for heads in HEADS]
    bank = Bank(device, cases)
    formats = [FMT, *([KVFormat.BF16] if any(peer.reads is KVFormat.BF16 for peer in found) else [])]
    print("  h      T |   ours µs  TFLOPS    error  lse err | FlashMLA µs  ratio | Hopper µs  ratio")
    status = 0
    for case in cases:
        problem = bank.problem(case, formats)
        problem.out.fill_(torch.nan)
        problem.lse.fill_(torch.nan)
        call = call_of(problem)
        run(call)
        error, lse_error = check(problem)
        wrong = not (error <= OUT_TOLERANCE and lse_error <= LSE_TOLERANCE)
        status |= wrong
        runs = {"ours": lambda call=call: run(call)}
        for peer in found:
            if peer.name == "flashmla_fp8":
                try:
                    runs["peer"] = peer.prepare(problem).run
                    runs["peer"]()
                except Exception as reason:
                    runs.pop("peer", None)
                    print(f"{peer.name}: {str(reason).splitlines()[0][:100]}")
        if hopper.why_not(call) is None:
            runs["hopper"] = lambda call=call: hopper.run(call)
            runs["hopper"]()
        times = alternate(runs, Effort.of(case.tokens, device), device)
        ours = times["ours"]
        speed = f"{case.flops / ours.median_us / 1e6:7.1f}" if isinstance(ours, Timing) else str(ours)
        print(
            f"{case.heads:3} {case.tokens:6} | {microseconds(ours)} {speed} {error:8.1e} {lse_error:8.1e} |"
            f"   {microseconds(times.get('peer'))} {ratio(times.get('peer'), ours)} |"
            f" {microseconds(times.get('hopper'))} {ratio(times.get('hopper'), ours)}{'  WRONG' if wrong else ''}",
            flush=True,
        )

    print("\nshapes at T = 2048, µs (the first is the table's)")
    for heads in (16, 64):
        case = Case(heads, Batch.parse("2048"), given.pool)
        call = call_of(bank.problem(case, [FMT]), SplitSchedule.unsplit(2048, heads=heads))
        shapes = [setting_of(device, FMT, heads).shape, *extra_shapes(heads)]
        for shape in dict.fromkeys(shapes):
            if time.monotonic() - begin > given.budget:
                break
            trial = tune.trials(call, [shape])[0]
            taken = f"{trial.microseconds:9.1f}" if trial.microseconds is not None else f"{'-':>9} {trial.note[:60]}"
            print(f"{heads:3} {taken}  {json.dumps(asdict(shape))}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
