# SPDX-License-Identifier: Apache-2.0
"""The fixed grid on a Hopper GPU: our kernel, FlashMLA and FlashAttention-3 in one process, in turn.

Run: ``python benchmarks/hopper.py [--formats fp8_ds_mla,bf16] [--heads 8,64] [--rows 1,8192,32x4] [--pools 32K]``.
Without arguments all 60 cases of the fp8 cache: heads 8 to 128, six batches, pools of 32K and 1M records, topk 2048.
Writes into --out (default benchmarks/results), anew after every case, so that a run may be ended at any moment:

* hopper.json: the short form that the README's figures come from;
* hopper-details.json: everything: each peer, spread, floors, notes;
* hopper.png: speed-ups with the floors drawn in; hopper-roofline.png.

``--prepare`` first compiles our kernels in one process a head count, at once; the budget does not count that.
``--merge`` keeps the rows of an earlier run of the same GPU and versions that this one does not measure again.
Peers are found on PYTHONPATH; each that is missing or fails is one line. Exit status: 0; 1 when a result of ours is
wrong or has no time; 2 for a wrong argument; 124 when a step hung and the process ended itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from sparsemla import sparse_mla_attention
from sparsemla.bench import peers, plot, readme, report, runner, shapes
from sparsemla.formats import KVFormat

_LONGEST_COMPILATION = 300.0


def main(argv: list[str] | None = None) -> int:
    """Measures, saves, draws, prints a line a row and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=",".join(map(str, shapes.GRID_HEADS)))
    parser.add_argument("--rows", default=",".join(batch.label for batch in shapes.GRID_ROWS), help="64, 8192, 32x4")
    parser.add_argument("--pools", default=",".join(map(shapes.count_label, shapes.GRID_POOLS)))
    parser.add_argument("--formats", default=KVFormat.FP8_DS_MLA.value, help="fp8_ds_mla, bf16 or both")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--peers", default="auto", help="auto, none, or a list: flash_mla,fa3,vllm,flashinfer,tilelang")
    parser.add_argument("--fa3-library", type=Path, help="_vllm_fa3_C.abi3.so; default: looked for on PYTHONPATH")
    parser.add_argument("--out", type=Path, default=Path(readme.RESULTS))
    parser.add_argument("--merge", action="store_true", help="keep rows of the earlier run in --out")
    parser.add_argument("--cold", action="store_true", help="overwrite the L2 before each call")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no case is begun")
    parser.add_argument("--step", type=float, default=90, help="seconds after which a step counts as hung")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try the script")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--prepare", action="store_true", help="compile our kernels first, in parallel")
    parser.add_argument("--prepare-only", action="store_true", help="compile our kernels, measure nothing")
    given = parser.parse_args(argv)
    try:
        return _run(given, ["python", "benchmarks/hopper.py", *(sys.argv[1:] if argv is None else argv)])
    except ValueError as error:
        print(f"hopper.py: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace, command: list[str]) -> int:
    begin = time.monotonic()
    formats = [KVFormat.parse(part) for part in given.formats.split(",")]
    grid = shapes.cases(
        [shapes.parse_count(part, "heads") for part in given.heads.split(",")],
        [shapes.Batch.parse(part) for part in given.rows.split(",")],
        [shapes.parse_count(part, "pools") for part in given.pools.split(",")],
        topk=given.topk,
    )
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: torch sees no GPU, accepted is a machine with one (or --device cpu, to try)")
    if given.prepare_only:
        return _compile(grid, formats, torch.device(given.device))
    if given.prepare:
        _compile_at_once(given, sorted({case.heads for case in grid}))
    details = given.out / readme.DETAILS
    earlier = None
    if given.merge and details.exists():
        earlier = report.Results.from_json(json.loads(details.read_text(encoding="utf-8")))
    found, missing = peers.find(given.peers, fa3_library=given.fa3_library)
    print("peers:", ", ".join(f"{peer.name} ({peer.version})" for peer in found) or "none", flush=True)
    for line in missing:
        print("missing:", line, flush=True)
    printed = 0

    def save(results: report.Results) -> None:
        nonlocal printed
        for row in results.rows[printed:]:
            print(f"{time.monotonic() - begin:6.1f} s  {report.line(row)}", flush=True)
        printed = len(results.rows)
        _write(given.out, results if earlier is None else earlier.merged(results))

    settings = runner.Settings(
        device=torch.device(given.device),
        cases=grid,
        formats=formats,
        peers=found,
        missing=missing,
        budget_s=given.budget,
        step_s=given.step,
        cold=given.cold,
        command=report.quotable(command),
    )
    results = runner.run(settings, on_rows=save)
    merged = results if earlier is None else earlier.merged(results)
    _summarise(merged, time.monotonic() - begin)
    if not given.no_plots:
        for draw, name in ((plot.speedups, readme.PICTURE), (plot.roofline, readme.ROOFLINE)):
            try:
                draw(merged, given.out / name)
            except ValueError as error:
                print(f"not drawn: {error}", flush=True)
    return 1 if any(row.ours.us is None for row in results.rows) else 0


def _compile(grid: list[shapes.Case], formats: list[KVFormat], device: torch.device) -> int:
    """Calls our kernel once for each case, over a small pool, so that its code is on disk."""
    small = [dataclasses.replace(case, pool=shapes.BLOCK) for case in grid]
    bank = shapes.Bank(device, small)
    for case in dict.fromkeys(small):
        problem = bank.problem(case, formats)
        for fmt in formats:
            if runner.serving_kernel(problem, fmt)[0] != "cpu":
                cache, scale = problem.caches[fmt], problem.softmax_scale
                sparse_mla_attention(problem.q, cache, problem.indices, softmax_scale=scale, out=problem.out)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 0


def _compile_at_once(given: argparse.Namespace, heads: list[int]) -> None:
    begin = time.monotonic()
    common = [sys.executable, __file__, "--prepare-only", "--device", given.device, "--formats", given.formats]
    common += ["--rows", given.rows, "--pools", "64", "--topk", str(given.topk)]
    running = [subprocess.Popen([*common, "--heads", str(count)]) for count in heads]
    for process in running:
        try:
            process.wait(timeout=max(_LONGEST_COMPILATION - (time.monotonic() - begin), 1))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"prepared in {time.monotonic() - begin:.0f} s", flush=True)


def _write(folder: Path, results: report.Results) -> None:
    report.write_json(folder / readme.DETAILS, results.to_json())
    report.write_json(folder / readme.SHORT_FORM, report.short_form(results))


def _summarise(results: report.Results, seconds: float) -> None:
    floors = results.floors
    gathers = ", ".join(f"{key}: {rate:,.0f}" for key, rate in floors.gather_gbs.items())
    print(
        f"floors: copy {floors.copy_gbs:,.0f} GB/s, matrix product {floors.matrix_tflops:,.0f} TFLOPS, "
        f"launch {floors.launch_us:.2f} us; gather GB/s {gathers}"
    )
    for fmt in dict.fromkeys(row.format for row in results.rows):
        print(f"{fmt}: {json.dumps(report.summary(results.rows, fmt))}")
    for note in results.notes:
        print("note:", note)
    print(f"{len(results.rows)} rows, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
