# SPDX-License-Identifier: Apache-2.0
"""The benchmark room: cases, peers called through stand-ins, checks before times, reports, pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_results import FLOORS, entry, invented
from sparsemla.bench import floors, peers, plot, readme, report, runner, timing
from sparsemla.bench.shapes import Bank, Batch, Problem, cases, count_label, parse_count
from sparsemla.bench.watchdog import Watchdog
from sparsemla.formats import KVFormat
from sparsemla.integrations import flash_mla as our_flash_mla
from sparsemla.reference import reference_attention

CPU = torch.device("cpu")
FP8, BF16 = KVFormat.FP8_DS_MLA, KVFormat.BF16


# What is measured


@pytest.mark.parametrize(
    ("text", "batch", "s_q"), [("1", 1, 1), ("64", 64, 1), ("1024", 1, 1024), ("8192", 1, 8192), ("32x4", 32, 4)]
)
def test_batches_are_read_and_written_back(text: str, batch: int, s_q: int) -> None:
    made = Batch.parse(text)
    assert made == Batch(batch, s_q)
    assert made.label == text


def test_labels_that_need_both_numbers() -> None:
    assert Batch(1, 8).label == "1x8"
    assert Batch(8, 1024).label == "8x1024"


@pytest.mark.parametrize(("text", "value"), [("64", 64), ("32K", 32768), ("1m", 2**20)])
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value
    assert parse_count(count_label(value)) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1G", "x"])
def test_counts_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted is a whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("heads", "pools", "message"),
    [([129], [64], "heads: got 129"), ([0], [64], "heads: got 0"), ([8], [96], "pools: got 96")],
)
def test_cases_refused(heads: list[int], pools: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases(heads, [Batch(1, 1)], pools)


def test_the_tensors_of_a_case_are_views_and_the_caches_agree() -> None:
    grid = cases([4, 16], [Batch(3, 1), Batch(2, 2)], [128, 192], topk=32)
    bank = Bank(CPU, grid)
    problem = bank.problem(grid[0], [FP8, BF16])
    assert (problem.q.shape, problem.indices.shape, problem.out.shape) == ((3, 4, 576), (3, 32), (3, 4, 512))
    assert all(t.is_contiguous() for t in (problem.q, problem.indices, problem.out, problem.lse))
    assert problem.indices.min() >= 0 and problem.indices.max() < 128
    slots = torch.arange(128)
    exact, quantised = (problem.caches[fmt].read(slots) for fmt in (BF16, FP8))
    assert 0.01 < float((exact - quantised).norm() / exact.norm()) < 0.04  # the same vectors, quantised
    again = bank.problem(grid[1], [FP8])
    assert again.caches[FP8] is problem.caches[FP8]
    assert again.q.data_ptr() == problem.q.data_ptr()
    other = bank.problem(grid[-1], [FP8])
    assert other.case.pool == 192 and other.caches[FP8].num_slots == 192


# Peers, called through stand-ins with the signatures of what they stand in for


FA3_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
"""The operator's schema as the library of vllm 0.26.0 registers it."""


def fa3_stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    names = [part.strip().split()[-1] for part in FA3_SCHEMA[4:].split(") ->")[0].split(",")]
    given = dict(zip(names, (q, k, v, *rest), strict=True))
    table, used, q_v = given["page_table"], given["seqused_k"], given["q_v"]
    assert given["cu_seqlens_q"].tolist() == list(range(q.shape[0] + 1)) and given["max_seqlen_q"] == 1
    assert given["max_seqlen_k"] == table.shape[1] and given["cp_world_size"] == 1 and given["cp_rank"] == 0
    assert (given["window_size_left"], given["window_size_right"], given["softcap"]) == (-1, -1, 0.0)
    optional = ("k_new", "v_new", "out", "q_descale", "s_aux", "scheduler_metadata", "cp_tot_seqused_k", "rotary_cos")
    assert all(given[name] is None for name in optional)
    out = torch.empty(q.shape[0], q.shape[1], v.shape[-1])
    for row in range(q.shape[0]):
        pages = table[row, : used[row]].long()
        keys, values = k[pages, 0, 0].float(), v[pages, 0, 0].float()
        logits = q[row].float() @ keys.T + q_v[row].float() @ values.T
        out[row] = torch.softmax(logits * given["softmax_scale"], -1) @ values
    return [out.to(torch.bfloat16), torch.zeros(q.shape[1], q.shape[0])]


@pytest.fixture(scope="module")
def fa3_operator() -> Iterator[None]:
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(FA3_SCHEMA)
    library.impl("fwd", fa3_stand_in, "CPU")
    yield
    library._destroy()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fa3_operator: None) -> list[tuple[int, ...]]:
    """Peers made of our own code, under the peers' names. The list collects the query shapes FlashMLA was given."""
    shapes: list[tuple[int, ...]] = []
    module: Any = types.ModuleType("flash_mla")

    def decode(q: torch.Tensor, *arguments: Any, use_legacy: bool) -> Any:
        assert use_legacy
        shapes.append(tuple(q.shape))
        assert q.shape[2] in (64, 128)
        return our_flash_mla.flash_mla_with_kvcache(q, *arguments)

    def prefill(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, *, use_legacy: bool) -> Any:
        assert use_legacy and q.shape[1] in (64, 128)
        return our_flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale)

    module.get_mla_metadata = our_flash_mla.get_mla_metadata
    module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd = decode, prefill
    module.has_legacy, module.__version__, module.__file__ = (lambda: True), "1.0.0", "flash_mla/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return shapes


def settings(peer_list: list[peers.Peer], **other: Any) -> runner.Settings:
    grid = other.pop("cases", None) or cases([8], [Batch(2, 2)], [256], topk=64)
    return runner.Settings(device=CPU, cases=grid, formats=other.pop("formats", [FP8]), peers=peer_list, **other)


@pytest.fixture(autouse=True)
def _quick_floors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors take a second; tests of other things take them as given."""
    if "floors" not in request.node.name:
        rates = {
            f"{size}/{count_label(pool)}": 10.0 for size in (528, 584, 656, 1152) for pool in (128, 192, 256, 4096)
        }
        made = floors.Floors(10.0, 0.1, 0.0, rates, "invented")
        monkeypatch.setattr(floors, "measure", lambda device, wanted: made)


@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (64, 64), (96, 128)])
def test_every_peer_is_called_as_it_wants_to_be(stand_ins: list[tuple[int, ...]], heads: int, padded: int) -> None:
    found, missing = peers.find(["flash_mla", "fa3"])
    assert [peer.name for peer in found] == ["flashmla_fp8", "flashmla_bf16", "fa3_bf16"] and not missing
    results = runner.run(settings(found, cases=cases([heads], [Batch(2, 2)], [256], topk=64), formats=[FP8, BF16]))
    assert set(stand_ins) == {(2, 2, padded, 576)}
    fp8, bf16 = results.rows
    assert [peer.name for peer in fp8.peers] == ["flashmla_fp8", "flashmla_bf16", "fa3_bf16"]
    assert [peer.name for peer in bf16.peers] == ["flashmla_bf16", "fa3_bf16"]
    for made in (fp8.ours, bf16.ours, *fp8.peers, *bf16.peers):
        assert made.note == "" and made.us is not None and made.us > 0
        assert made.error is not None and made.error < 2.5e-3
    assert fp8.ours.kernel == "cpu" and fp8.ratio is not None and fp8.ratio_flashmla is not None
    assert results.versions["flash_mla"] == "1.0.0" and "sha256" in results.versions["fa3"]


def test_peers_that_are_missing_are_one_line_each() -> None:
    found, missing = peers.find("auto")
    assert not found or torch.cuda.is_available()
    assert (
        len({line.split(":")[0] for line in missing})
        == len(missing)
        == len(peers.FAMILIES) - len({peer.family for peer in found})
    )
    assert all("\n" not in line for line in missing)


def test_our_own_stand_in_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", our_flash_mla)
    found, missing = peers.find("flash_mla")
    assert not found and "own stand-in" in missing[0]


def test_names_of_peers(stand_ins: list[tuple[int, ...]]) -> None:
    assert peers.find("none") == ([], [])
    assert [peer.name for peer in peers.find("flashmla_bf16, fa3")[0]] == ["flashmla_bf16", "fa3_bf16"]
    with pytest.raises(ValueError, match="peers: got 'flashmla'"):
        peers.find("flashmla")
    _, missing = peers.find("fa3", fa3_library=Path("nowhere.so"))
    assert missing == ["fa3: ImportError: --fa3-library nowhere.so: no such file"]


# Checked, then timed


def peer_that(run: Callable[[Problem], torch.Tensor], name: str = "odd") -> peers.Peer:
    return peers.Peer(name, "odd", FP8, "0", lambda problem: peers.Prepared(lambda: run(problem), 0, 0))


def right(problem: Problem) -> torch.Tensor:
    out, _ = reference_attention(problem.q, problem.caches[FP8], problem.indices, softmax_scale=problem.softmax_scale)
    return out.to(torch.bfloat16)


def test_a_wrong_result_gets_no_time() -> None:
    def last_row_wrong(problem: Problem) -> torch.Tensor:
        out = right(problem)
        out[-1] *= 1.1
        return out

    def one_nan(problem: Problem) -> torch.Tensor:
        out = right(problem)
        out[1, 2, 3] = torch.nan
        return out

    def raises(problem: Problem) -> torch.Tensor:
        raise RuntimeError("no kernel image\nis available")

    odd = [peer_that(right, "right"), peer_that(last_row_wrong, "wrong"), peer_that(one_nan, "nan")]
    (row,) = runner.run(settings([*odd, peer_that(raises, "raises")])).rows
    by_name = {peer.name: peer for peer in row.peers}
    assert by_name["right"].us is not None
    assert row.best is not None and row.best.name == "right"
    assert {name for name, peer in by_name.items() if peer.us is None} == {"wrong", "nan", "raises"}
    assert by_name["wrong"].note.startswith("wrong: relative error") and by_name["nan"].note.startswith("wrong")
    assert by_name["raises"].note == "RuntimeError: no kernel image is available"
    assert "raises: RuntimeError" in report.line(row)


def test_a_wrong_result_of_ours_gets_no_time_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, *_: Any, out: torch.Tensor, lse: torch.Tensor, **__: Any) -> Any:
        return out.zero_(), lse.zero_()

    monkeypatch.setattr(runner, "sparse_mla_attention", wrong)
    (row,) = runner.run(settings([peer_that(right)])).rows
    assert row.ours.us is None and row.ours.note.startswith("wrong") and row.ratio is None
    assert "no time: wrong" in report.line(row)
    (short,) = report.short_form(invented_with(row))["rows"]
    assert short["ours_us"] is None and short["ratio"] is None and short["peer"] == "odd"


def invented_with(*rows: report.Row) -> report.Results:
    return dataclasses.replace(invented(()), rows=rows)


def test_every_format_is_measured() -> None:
    made = runner.run(settings([], formats=list(KVFormat), cases=cases([3], [Batch(1, 1)], [128], topk=16)))
    assert {row.format for row in made.rows} == {fmt.value for fmt in KVFormat}
    assert all(row.ours.us is not None for row in made.rows)
    assert any("on a CPU" in note for note in made.notes)


def test_a_budget_leaves_the_rest_and_says_so() -> None:
    saved: list[int] = []
    grid = cases([1, 2, 3], [Batch(1, 1)], [128], topk=16)
    made = runner.run(settings([], cases=grid, budget_s=-1.0), on_rows=lambda results: saved.append(len(results.rows)))
    assert made.rows == () and "3 of 3 cases not measured" in made.notes[-1] and saved == [0]
    runner.run(settings([], cases=grid), on_rows=lambda results: saved.append(len(results.rows)))
    assert saved[1:4] == [1, 2, 3]


def test_samples_alternate() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    made = timing.alternate(runs, timing.Effort(3, 1), CPU)
    assert order == list("ababab")
    assert all(isinstance(t, timing.Timing) and t.samples == 3 for t in made.values())


class FakeCuda:
    """Enough of torch.cuda to follow what is captured and replayed; a replay takes as many ms as it has calls."""

    def __init__(self) -> None:
        self.clock, self.log, self.capturing = 0.0, [], None
        self.CUDAGraph, self.Event, self.Stream = lambda: FakeGraph(self), lambda **_: FakeEvent(self), lambda: self
        self.stream = contextlib.nullcontext

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    def synchronize(self, device: Any = None) -> None:
        self.log.append("wait")

    def wait_stream(self, stream: Any) -> None:
        pass

    def current_stream(self) -> FakeCuda:
        return self

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.calls = cuda, []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert not gc.isenabled() and pool == (0, 1)
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None

    def replay(self) -> None:
        self.cuda.clock += len(self.calls)
        self.cuda.log.append("".join(sorted(set(self.calls))))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self) -> None:
        self.at = self.cuda.clock

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_graphs_are_replayed_in_turn_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(timing, "_cuda", cuda)

    def refuses() -> None:
        raise ValueError("cannot be captured")

    runs: dict[str, timing.Run] = {
        "a": lambda: cuda.capturing.calls.append("a"),
        "b": lambda: cuda.capturing.calls.extend("bb"),
        "c": refuses,
    }
    made = timing.alternate(runs, timing.Effort(3, 5), torch.device("cuda"))
    assert made["c"] == "no graph: ValueError: cannot be captured"
    a, b = made["a"], made["b"]
    assert isinstance(a, timing.Timing) and isinstance(b, timing.Timing)
    assert (a.median_us, b.median_us, a.samples, a.calls) == (1000, 2000, 3, 5)
    assert cuda.log[-8:] == ["sleep", *"abbaab", "wait"]
    assert cuda.capturing is None and gc.isenabled()


@pytest.mark.gpu
def test_on_a_gpu_with_its_floors() -> None:
    """Ours, the peers that are there, floors: on the device, in graphs."""
    device = torch.device("cuda")
    found, missing = peers.find("auto")
    grid = cases([16, 64], [Batch(1, 1), Batch(4, 2)], [4096], topk=512)
    settings_ = runner.Settings(device=device, cases=grid, formats=[FP8], peers=found, missing=missing)
    for row in runner.run(settings_).rows:
        assert row.ours.timing is not None or row.ours.note.startswith("no compiled kernel"), row.ours.note
        assert row.ours.transient_bytes in (0, None)
        for peer in row.peers:
            assert peer.us is not None, peer


def test_median_and_spread() -> None:
    made = timing.summarise([float(n) for n in (9, 1, 2, 3, 4, 5, 6, 7, 8, 0, 10)], 4)
    assert (made.median_us, made.low_us, made.high_us, made.samples, made.calls) == (5, 1, 9, 11, 4)
    assert timing.summarise([1.0, 2.0], 1).median_us == 1.5


@pytest.mark.parametrize(("tokens", "calls", "samples"), [(1, 20, 20), (128, 10, 20), (8192, 1, 7)])
def test_small_calls_are_repeated_inside_the_graph(tokens: int, calls: int, samples: int) -> None:
    assert timing.Effort.of(tokens, torch.device("cuda")) == timing.Effort(samples, calls)
    assert timing.Effort.of(tokens, torch.device("cuda"), cold=True).calls == 1


def test_a_step_that_hangs_is_given_up() -> None:
    said: list[str] = []
    ended = threading.Event()

    def on_timeout(message: str) -> None:
        said.append(message)
        ended.set()

    watchdog = Watchdog(on_timeout=on_timeout, interval=0.01)
    with watchdog.step("a quick step", 60):
        pass
    with watchdog.step("a kernel", 0.02):
        assert ended.wait(10)
    assert said == ["gave up: a kernel did not end within 0 s"]


def test_floors_of_this_machine() -> None:
    made = floors.measure(CPU, [(656, 128)])
    assert made.copy_gbs > 0 and made.matrix_tflops > 0 and made.gather_gbs["656/128"] > 0
    assert "index_select" in made.gather_method


def test_the_floor_of_a_case() -> None:
    (case,) = cases([64], [Batch(1, 8192)], [32768])
    bound = FLOORS.bound(case, 656)
    assert bound.gather_us == pytest.approx(8192 * 2048 * 656 / 5000e9 * 1e6)
    assert bound.matrix_us == pytest.approx(2 * 8192 * 2048 * 64 * 1088 / 708e12 * 1e6)
    assert bound.us == bound.matrix_us and bound.by == "matrix"
    assert FLOORS.upconversion_us(case, 656) == pytest.approx(32768 * 1808 / 4254e9 * 1e6)


# Reports


def test_the_short_form_has_the_keys_that_are_quoted() -> None:
    results = invented()
    short = report.short_form(results)
    assert set(short) == {
        *("command", "gpu", "versions", "rows", "geomean_ratio", "min_ratio", "geomean_ratio_flashmla"),
    }
    keys = {
        "format",
        "heads",
        "batch",
        "s_q",
        "pool",
        "ours_us",
        "peer_us",
        "ratio",
        "error",
        "transient_bytes",
        "peer",
    }
    assert all(set(row) == keys | {"flashmla_fp8_us"} for row in short["rows"])
    assert len(short["rows"]) == 120
    timed = [row for row in short["rows"] if row["format"] == "fp8_ds_mla" and row["ratio"] is not None]
    assert len(timed) == 59
    for row in timed:
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"], rel=1e-2)
        assert row["peer"] in ("flashmla_fp8", "fa3_bf16") and row["peer_us"] <= row["flashmla_fp8_us"]
    assert short["min_ratio"] == min(row["ratio"] for row in timed) < 1
    assert short["geomean_ratio"] == pytest.approx(report.geomean([row["ratio"] for row in timed]), rel=1e-3)
    against = [row["flashmla_fp8_us"] / row["ours_us"] for row in timed]
    assert short["geomean_ratio_flashmla"] == pytest.approx(report.geomean(against), rel=1e-2)


def test_prefill_counts_the_copy_the_bf16_peer_needs() -> None:
    prefill = next(row for row in invented().rows if (row.heads, row.s_q, row.pool) == (64, 8192, 2**20))
    fa3 = next(peer.us for peer in prefill.peers if peer.name == "fa3_bf16")
    assert fa3 is not None and prefill.ours.us is not None
    assert prefill.ratio_prefill == pytest.approx((fa3 + prefill.upconversion_us) / prefill.ours.us)
    assert all(row.ratio_prefill is None for row in invented().rows if row.s_q == 1 or row.format == "bf16")


def alike(read: Any, written: Any) -> None:
    """The same, numbers to what quotients of five digits keep."""
    if isinstance(written, dict):
        assert read.keys() == written.keys()
        for name in written:
            alike(read[name], written[name])
    elif isinstance(written, (list, tuple)):
        assert len(read) == len(written)
        for got, given in zip(read, written, strict=True):
            alike(got, given)
    else:
        assert read == (pytest.approx(written, rel=2e-4) if isinstance(written, float) else written)


def test_results_survive_the_file(tmp_path: Path) -> None:
    results = invented()
    path = tmp_path / "new" / "details.json"
    report.write_json(path, results.to_json())
    read = report.Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    alike(read.to_json(), results.to_json())
    assert [p.name for p in path.parent.iterdir()] == ["details.json"]
    with pytest.raises(ValueError, match="schema"):
        report.Results.from_json({"schema": 0})


def test_merging_keeps_what_was_not_measured_again() -> None:
    results = invented()
    again = dataclasses.replace(results.rows[3], ours=entry(report.OURS, "fp8_ds_mla", 1.0))
    merged = results.merged(dataclasses.replace(results, rows=(again,), command="another"))
    assert len(merged.rows) == len(results.rows)
    assert {row.key: row for row in merged.rows}[again.key].ours.us == 1.0
    assert merged.command == f"{results.command} && another"
    assert [row.key for row in merged.rows] == [row.key for row in results.rows]  # in the grid's order
    with pytest.raises(ValueError, match="gpu was Invented GPU and is Another"):
        results.merged(dataclasses.replace(results, gpu="Another"))


def test_a_quoted_command_names_no_folder_of_this_machine() -> None:
    command = ["python", "benchmarks/hopper.py", "--out", "/tmp/x", "--fa3-library", "/opt/site/lib.so", "--heads", "8"]
    assert report.quotable(command) == "python benchmarks/hopper.py --fa3-library lib.so --heads 8"


def test_tables_fit_eighty_columns() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    for table in report.tables(invented()):
        console.print(table)
    printed = console.export_text()
    assert "…" not in printed and "FA3 bf16" in printed and "none" in printed and "8192" in printed


def test_pictures(tmp_path: Path) -> None:
    for draw in (plot.speedups, plot.roofline):
        draw(invented(), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="plot: no row"):
            draw(invented_with(), tmp_path / "picture.png")
        with pytest.raises(ValueError, match="accepted are files ending in"):
            draw(invented(), tmp_path / "picture.doc")
        with pytest.raises(ValueError, match="does not exist"):
            draw(invented(), tmp_path / "nowhere" / "picture.png")


def test_the_slowest_case_has_a_bar() -> None:
    from matplotlib.figure import Figure

    rows = [row for row in invented().rows if row.format == "fp8_ds_mla" and row.pool == 32768 and row.ratio]
    timing = rows[0].ours.timing
    assert timing is not None
    slow = dataclasses.replace(timing, median_us=20 * timing.median_us)
    rows[0] = dataclasses.replace(rows[0], ours=dataclasses.replace(rows[0].ours, timing=slow))
    axis = Figure().add_subplot()
    plot._draw_speedups(axis, "fp8_ds_mla", 32768, rows)
    least = min(row.ratio for row in rows if row.ratio is not None)
    assert least < 0.2 and axis.get_ylim()[0] < least
    assert all(axis.get_ylim()[0] < float(text.get_position()[1]) < least * 1.1 for text in axis.texts)


# Figures in documents


def write_results(root: Path, results: report.Results) -> None:
    report.write_json(root / readme.RESULTS / readme.SHORT_FORM, report.short_form(results))
    report.write_json(root / readme.RESULTS / readme.DETAILS, results.to_json())


def test_quoted_figures(tmp_path: Path) -> None:
    assert readme.short_block(tmp_path) == readme.full_block(tmp_path) == readme.NOT_MEASURED + "\n"
    results = invented()
    write_results(tmp_path, results)
    short, full = readme.short_block(tmp_path), readme.full_block(tmp_path)
    headline = report.short_form(results)
    for value in (headline["geomean_ratio"], headline["min_ratio"], headline["geomean_ratio_flashmla"]):
        assert f"{value:.2f} ×" in short
    assert "Slower than the best peer at 1 of 60 shapes: 64 heads, T 8, pool 32K" in short
    assert "Without a time (no kernel, or a wrong result): 128 heads, T 1, pool 1M." in short
    assert "hopper.png" not in short
    assert full.count("\n| 64 | 8192 |") == 4 and "tilelang: not installed" in full


def test_documents_are_written_between_their_markers(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for path, kind in zip(readme.DOCUMENTS, ("short", "full"), strict=True):
        text = f"before\n<!-- performance:{kind}, generated -->\nold\n<!-- /performance -->\nafter\n"
        (tmp_path / path).write_text(text, encoding="utf-8")
    assert readme.update(tmp_path) == list(readme.DOCUMENTS)
    assert readme.update(tmp_path) == []
    for path in readme.DOCUMENTS:
        lines = (tmp_path / path).read_text(encoding="utf-8").splitlines()
        assert lines[0] == "before" and lines[2] == readme.NOT_MEASURED and lines[-1] == "after"
    write_results(tmp_path, invented())
    assert readme.update(tmp_path) == list(readme.DOCUMENTS)
    (tmp_path / "README.md").write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README\.md without"):
        readme.update(tmp_path)


@pytest.mark.parametrize("name", readme.DOCUMENTS, ids=str)
def test_the_documents_quote_the_results_that_are_there(name: Path) -> None:
    """Fails where a figure was typed by hand or results changed: `sparsemla bench --readme` puts it right."""
    root = Path(__file__).parent.parent
    text = (root / name).read_text(encoding="utf-8")
    assert "<!-- performance:" in text
    assert readme.render(text, root) == text
