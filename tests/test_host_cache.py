# SPDX-License-Identifier: Apache-2.0
"""The host cache: what is hot follows a plain model of LRU; answers are those over the whole cache, bit for bit."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from generators import ALL_FORMATS, GARBAGE_INDICES, format_id, pages_for_positions, random_cache, random_kv
from sparsemla import reference_attention, sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.host_cache import HostCache, RequestLanes, StagingRing, host_pool
from sparsemla.serving.host_cache.attend import attend_from_host
from sparsemla.serving.host_cache.hot import HotSet, held_positions
from sparsemla.serving.metadata import Batch, MetadataBuilder
from sparsemla.serving.paths import decide

BLOCK = 16
LENGTHS = [150, 40, 97]
TOPK = 24
SCALE = 0.06
Pair = tuple[torch.Tensor, torch.Tensor]


class Model:
    """One lane in plain Python: positions in the order of their last use, as `HotSet` describes it."""

    def __init__(self, hot: int) -> None:
        self.slots: list[int] = list(range(hot))
        self.holds: dict[int, int] = {}

    def step(self, wanted: list[int]) -> tuple[list[int], int]:
        """(slot of each wanted position, records brought)."""
        used = {self.holds[p] for p in wanted if p in self.holds}
        missing = list(dict.fromkeys(p for p in wanted if p not in self.holds))
        unused = [slot for slot in self.slots if slot not in used]
        victims, rest = unused[: len(missing)], unused[len(missing) :]
        self.holds = {p: s for p, s in self.holds.items() if s not in victims}
        self.holds |= dict(zip(missing, victims, strict=True))
        self.slots = rest + [slot for slot in self.slots if slot in used] + victims
        return [self.holds[p] for p in wanted], len(missing)


class Bench:
    """A pool of a few requests in host memory, the same records in a cache on the device, and a host cache."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        fmt: KVFormat = KVFormat.FP8_DS_MLA,
        d_qk: int | None = None,
        hot: int = 3 * TOPK,
        max_rows: int = 12,
        staged: int = 32,
    ) -> None:
        self.device = torch.device(device)
        table = pages_for_positions(LENGTHS, BLOCK, 30)
        self.table = table.to(self.device)
        slots = torch.cat([self.slots(r, *range(n)) for r, n in enumerate(LENGTHS)])
        filled = random_cache(30, BLOCK, fmt, d_qk=d_qk, slots=slots)
        self.pool = host_pool(30, BLOCK, fmt, d_qk=d_qk)
        self.pool.byte_view.copy_(filled.byte_view)
        data = filled.data.clone().to(self.device)
        self.whole = PagedKVCache.wrap(data, fmt, BLOCK if data.dim() == 2 else None)
        self.lanes = RequestLanes(max_requests=3, max_len=table.shape[1] * BLOCK, device=self.device)
        ring = StagingRing(self.pool.layout.page_bytes(staged), device=self.device)
        self.host = HostCache(self.pool, self.lanes, hot_records=hot, topk=TOPK, max_rows=max_rows, staging=ring)

    def slots(self, request: int, *positions: int) -> torch.Tensor:
        """Slots of the pool."""
        at = torch.tensor(positions)
        return self.table.cpu()[request, at // BLOCK].long() * BLOCK + at % BLOCK

    def int32(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def attend(self, q: torch.Tensor, indices: torch.Tensor, ids: torch.Tensor) -> Pair:
        hot, slots = self.host.bring(indices, ids, self.table)
        out = torch.full((*q.shape[:2], 512), torch.nan, dtype=torch.bfloat16, device=self.device)
        return sparse_mla_attention(q, hot, slots, softmax_scale=SCALE, out=out)

    def over_whole(self, q: torch.Tensor, indices: torch.Tensor, ids: torch.Tensor) -> Pair:
        whole, table = self.whole, self.table
        return sparse_mla_attention(q, whole, indices, softmax_scale=SCALE, block_table=table, request_ids=ids)

    def check(self, q: torch.Tensor, indices: torch.Tensor, ids: torch.Tensor) -> Pair:
        """The answer, which has the bits of that over the whole cache."""
        got = self.attend(q, indices, ids)
        assert same(got, self.over_whole(q, indices, ids))
        return got

    def check_bytes(self) -> None:
        """Host memory and the whole cache hold the same."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        every = torch.arange(self.pool.num_slots)
        assert torch.equal(self.pool.gather_bytes(every), self.whole.gather_bytes(every.to(self.device)).cpu())

    def query(self, rows: int, heads: int = 5) -> torch.Tensor:
        return torch.randn(rows, heads, self.pool.d_qk, device=self.device).bfloat16()

    def rows(self, ids: list[int], *, spread: int = 200) -> Pair:
        """Indices with repeats, -1 and garbage, up to the end of each request; and the request ids."""
        indices = torch.randint(0, spread, (len(ids), TOPK), dtype=torch.int32)
        for row, request in enumerate(ids):
            indices[row] %= LENGTHS[request] if 0 <= request < 3 else 200
        indices[:, 1] = indices[:, 0].clone()
        if len(ids) > 1:
            indices[1, 5:9] = indices[0, 5:9] % 40  # rows of a request share keys
        indices[torch.rand(indices.shape) < 0.1] = -1
        indices[:, -len(GARBAGE_INDICES) :] = torch.tensor(GARBAGE_INDICES, dtype=torch.int32)
        return indices.to(self.device), self.int32(*ids)


def same(got: Pair, want: Pair) -> bool:
    return torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def check_plan(device: torch.device | str, *, steps: int = 30) -> None:
    """HotSet against Model over random steps: slots, who brings, counts."""
    hot, block, max_len = 40, 16, 96
    lanes = RequestLanes(max_requests=3, max_len=max_len, device=device)
    hot_set = HotSet(lanes, host_pool(18, block, "fp8_ds_mla"), hot_records=hot, entries=100)
    models = [Model(hot) for _ in range(3)]
    table = torch.randperm(18).to(torch.int32).view(3, 6)
    table[1, 5], table[2, 0] = -1, 99  # pages that are not there
    hits = misses = appended = 0
    for step in range(steps):
        rows = int(torch.randint(1, 6, ()))
        ids = torch.tensor([0, 0, 1, 2, -1] if step % 3 else [2, 0, 7, 0, 1], dtype=torch.int32)[:rows]
        indices = torch.randint(-2, 100 if step % 2 else 40, (rows, 9), dtype=torch.int32)
        indices[0, 0], indices[-1, 1] = 2**31 - 1, -(2**31)
        indices[:, 4:7] = indices[0, 4:7].clone()
        shard = (1, 2, 3) if step % 4 == 3 else None
        append = step % 5 == 4
        on_device = (x.to(device) for x in (indices, ids, table))
        slots, fetch = hot_set.plan(*on_device, shard=shard, append=append)
        local = held_positions(indices, shard)
        want = torch.full_like(indices, -1)
        for lane in range(3):
            entries = []
            for row, column in itertools.product(range(rows), range(9)):
                position = int(local[row, column])
                inside = int(ids[row]) == lane and 0 <= position < max_len
                if inside and 0 <= int(table[lane, position // block]) < 18:
                    entries.append((row, column, position))
            wanted = [position for _, _, position in entries]
            found, brought = models[lane].step(wanted)
            for (row, column, _), slot in zip(entries, found, strict=True):
                want[row, column] = lane * hot + slot
            if append:
                appended += len(wanted)
            else:
                hits, misses = hits + len(wanted) - brought, misses + brought
        assert torch.equal(slots.cpu(), want), step
        if append:
            for row, column in (fetch.cpu() >= 0).nonzero().tolist():
                position = int(local[row, column])
                page = int(table[ids[row], position // block])
                assert int(fetch[row, column]) == page * block + position % block
    assert hot_set.counters.sum(0).tolist() == [hits, misses, appended, 0]
    assert hits and misses > 2 * hot and appended


def test_what_is_hot_follows_the_model(device: torch.device) -> None:
    check_plan(device)


def test_the_device_code_follows_the_model_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = """
import torch, test_host_cache as t
from sparsemla.serving.host_cache import hot, moving
assert moving.device_code("cpu") is not None
torch.manual_seed(1)
t.check_plan("cpu", steps=20)
hot._BLOCK, hot._SLOT_BLOCK, hot._ROW_BLOCK = 4, 16, 2  # several blocks of each
t.check_plan("cpu", steps=20)
t.check_steps(t.Bench())
t.check_new_records(t.Bench(fmt=t.KVFormat.FP8_V4, d_qk=512))
"""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def check_steps(bench: Bench) -> None:
    """Decodes with several query tokens: the bits of the whole cache, cold, replayed, displaced and dropped."""
    batches = [[0, 0, 1, 2], [1, 2, 2, 0, -1, 9], [0], [2, 2, 2]]
    steps = []
    for step in range(8):
        indices, ids = bench.rows(batches[step % 4], spread=60 if step % 2 else 200)
        q = bench.query(len(ids))
        got = bench.check(q, indices, ids)
        before = bench.host.stats().misses
        assert same(bench.attend(q, indices, ids), got)
        assert bench.host.stats().misses == before  # a replay brings nothing
        assert not got[0].isnan().any()
        steps.append((q, indices, ids, got))
    q, indices, ids, got = steps[0]
    for lane in range(3):
        bench.host.drop(lane)
    before = bench.host.stats()
    assert same(bench.attend(q, indices, ids), got)
    after = bench.host.stats()
    keys = {(int(i), int(p)) for i, row in zip(ids, indices, strict=True) for p in row if 0 <= p < LENGTHS[int(i)]}
    assert after.misses - before.misses == len(keys)
    assert after.bytes_to_device - before.bytes_to_device == len(keys) * bench.pool.layout.record_bytes
    assert after.overflowed == 0
    table = {"block_table": bench.table.cpu(), "request_ids": ids.cpu()}
    want, _ = reference_attention(q.cpu(), bench.pool, indices.cpu(), softmax_scale=SCALE, **table)
    assert (got[0].cpu().double() - want).norm() <= 3e-3 * want.norm()


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_answers_are_those_over_the_whole_cache(fmt: KVFormat, d_qk: int, device: torch.device) -> None:
    check_steps(Bench(device, fmt=fmt, d_qk=d_qk))


def check_new_records(bench: Bench) -> None:
    """Appended records are in host memory and hot; a position written again (rejected tokens) is the new one in both;
    prefill writes go to host memory and drop what was hot."""
    device, record = bench.device, bench.pool.layout.record_bytes
    new = torch.cat([bench.slots(0, 148, 149), bench.slots(2, 5), bench.slots(1, 39)]).to(device)
    for turn in range(3):
        positions = bench.int32(148, 149, 5, 39, -1, 2**31 - 1)
        kv = random_kv(6, bench.pool.d_qk, device=device)
        before = bench.host.stats()
        bench.host.append(kv, positions, bench.int32(0, 0, 2, 1, 1, 0), bench.table)
        bench.whole.write(new, kv[:4])
        after = bench.host.stats()
        assert (after.appended - before.appended, after.misses - before.misses) == (4, 0)
        indices = torch.full((3, TOPK), -1, dtype=torch.int32, device=device)
        indices[0, :2], indices[1, 0], indices[2, 0] = positions[:2], 39, 5
        bench.check(bench.query(3), indices, bench.int32(0, 1, 2))
        assert bench.host.stats().misses == before.misses  # all hot
        bench.check_bytes()
        # A prefill writes over some of them, and over more than the hot buffer holds.
        many = torch.arange(30 + turn, 130 + turn, dtype=torch.int32, device=device)
        kv = random_kv(100, bench.pool.d_qk, device=device)
        bench.host.write(kv, many, torch.zeros_like(many), bench.table)
        bench.whole.write(bench.slots(0, *many.tolist()).to(device), kv)
        bench.check_bytes()
        bench.check(bench.query(3), *bench.rows([0, 0, 0]))
    stats = bench.host.stats()
    assert (stats.appended, stats.written, stats.bytes_to_host) == (12, 300, 312 * record)


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_new_records_are_written_through(fmt: KVFormat, d_qk: int, device: torch.device) -> None:
    check_new_records(Bench(device, fmt=fmt, d_qk=d_qk))


def test_requests_come_and_go(device: torch.device) -> None:
    """Lanes change hands, rows change order, a preempted request comes back: always the answers of the whole cache."""
    bench = Bench(device)
    names = ["a", "b", "c"]  # rows of the table, by request
    running: list[str] = []
    for step in range(14):
        if step % 3 == 2:
            gone = running.pop(0)
            bench.lanes.release(gone)
        for name in names:
            if name not in running and (step + names.index(name)) % 2 == 0:
                bench.lanes.admit(name)
                running.append(name)
        if not running:
            continue
        order = running[::-1] if step % 2 else running
        bench.lanes.bind(order)
        rows = [names.index(name) for name in order]
        table = bench.table[rows]
        indices, _ = bench.rows(rows, spread=70)
        ids = torch.arange(len(rows), dtype=torch.int32, device=device)
        q = bench.query(len(rows))
        hot, slots = bench.host.bring(indices, ids, table)
        got = sparse_mla_attention(q, hot, slots, softmax_scale=SCALE)
        assert same(got, bench.over_whole(q, indices, bench.int32(*rows)))
    stats = bench.host.stats()
    assert stats.hits and stats.overflowed == 0


def test_a_new_request_finds_nothing_of_the_last(device: torch.device) -> None:
    bench = Bench(device)
    bench.lanes.admit("first")
    indices, ids = bench.rows([0])
    bench.host.bring(indices, ids, bench.table)
    lane = bench.lanes.admit("second")
    bench.lanes.release("first")
    assert bench.lanes.admit("third") != lane
    bench.host.reset_stats()
    bench.host.bring(indices, ids, bench.table)
    keys = {int(p) for p in indices[0] if 0 <= p < LENGTHS[0]}
    assert bench.host.stats().misses == len(keys)


@pytest.mark.parametrize(("fmt", "d_qk"), ALL_FORMATS, ids=format_id)
def test_staged_contexts_hold_the_records(fmt: KVFormat, d_qk: int, device: torch.device) -> None:
    bench = Bench(device, fmt=fmt, d_qk=d_qk)
    pieces = [(0, 0, 32), (1, 3, 4), (0, 32, 57), (2, 10, 42), (1, 0, 32)]
    assert bench.host.staged_records == 32
    for (request, begin, end), page in zip(pieces, bench.host.stage(pieces, bench.table), strict=True):
        assert page.num_slots == end - begin
        want = bench.pool.gather_bytes(bench.slots(request, *range(begin, end)))
        assert torch.equal(page.gather_bytes(torch.arange(end - begin, device=device)).cpu(), want)
    assert bench.host.stats().staged == sum(end - begin for _, begin, end in pieces)
    assert list(bench.host.stage([], bench.table)) == []
    unfinished = bench.host.stage(pieces, bench.table)
    next(unfinished)
    del unfinished  # given up half-way: the next one is right all the same
    for (request, begin, _), page in zip(pieces, bench.host.stage(pieces, bench.table), strict=True):
        want = bench.pool.gather_bytes(bench.slots(request, begin))
        assert torch.equal(page.gather_bytes(torch.zeros(1, dtype=torch.int64, device=device)).cpu(), want)


@pytest.mark.parametrize("staged", [8, 64, 160])
def test_any_part_of_a_batch(staged: int, device: torch.device) -> None:
    """Decodes with two query tokens, prefills staged or through the hot buffer, padding; in parts, as ranks do."""
    bench = Bench(device, staged=staged, max_rows=16)
    config = ServingConfig(
        ModelGeometry.preset("glm-5.3"),
        Parallelism(tp=8),
        ServingLimits(max_model_len=160, max_num_batched_tokens=16, max_num_seqs=3, spec_tokens=1, block_size=BLOCK),
        host_cache=True,
    )
    builder = MetadataBuilder(config, decide(config, "sparsemla"), device=device)
    metadata = builder.build(Batch([2, 5, 6], LENGTHS, bench.table, 15))
    indices, ids = bench.rows([0] * 2 + [1] * 5 + [2] * 6 + [-1] * 2)
    q = bench.query(15)
    want = bench.over_whole(q, indices, ids)
    for cuts in ([0, 15], [0, 1, 2, 9, 13, 15], [0, 3, 14, 15]):
        out = torch.full((15, 5, 512), torch.nan, dtype=torch.bfloat16, device=device)
        lse = torch.full((15, 5), torch.nan, device=device)
        for begin, end in itertools.pairwise(cuts):
            part = slice(begin, end)
            target = {"out": out[part], "lse": lse[part]}
            attend_from_host(bench.host, q[part], part, indices, metadata, softmax_scale=SCALE, **target)
        torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out.float(), want[0].float(), atol=8e-3, rtol=8e-3)
    stats = bench.host.stats()
    assert stats.overflowed == 0
    assert stats.staged == {8: 0, 64: 4 * 40, 160: 4 * 40 + 4 * 97}[staged]  # in how many parts each has rows


@pytest.mark.gpu
def test_staging_runs_beside_the_current_stream() -> None:
    bench = Bench("cuda", staged=64)
    busy = torch.cuda.Event()
    list(bench.host.stage([(0, 0, 64)], bench.table))
    torch.cuda.synchronize()
    staged = bench.host.stage([(0, 0, 64), (0, 64, 128)], bench.table)
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    cast(torch.cuda.Stream, bench.host.staging._stream).synchronize()
    assert not busy.query(), "staging waited for the stream that attends"
    assert len(list(staged)) == 2


@pytest.mark.gpu
def test_a_step_takes_no_memory_and_never_waits() -> None:
    bench = Bench("cuda")
    indices, ids = bench.rows([0, 0, 1, 2])
    records = bench.pool.gather_bytes(torch.arange(2)).cuda()
    positions, owners = bench.int32(3, 4), bench.int32(0, 2)

    def step() -> None:
        bench.host.append(records, positions, owners, bench.table)
        bench.host.bring(indices, ids, bench.table)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() == before
    assert sum(bench.host.reservations().values()) <= before


@pytest.mark.gpu
def test_a_captured_step_replays_other_keys() -> None:
    bench = Bench("cuda")
    indices, ids = bench.rows([0, 0, 1, 2])
    q = bench.query(4)
    out = torch.empty((4, 5, 512), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty((4, 5), device="cuda")

    def step() -> None:
        hot, slots = bench.host.bring(indices, ids, bench.table)
        sparse_mla_attention(q, hot, slots, softmax_scale=SCALE, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(6):
        other, _ = bench.rows([0, 0, 1, 2])
        indices.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        assert same((out, lse), bench.over_whole(q, indices, ids))
    assert bench.host.stats().overflowed == 0


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    bench = Bench(device)
    host, pool, lanes, table = bench.host, bench.pool, bench.lanes, bench.table
    assert host.rows_at_once(TOPK, of_one_request=3, longest=150) == 12
    assert host.rows_at_once(TOPK, of_one_request=4, longest=150) == 3
    assert host.rows_at_once(TOPK, of_one_request=9, longest=64) == 12
    for name in "abc":
        lanes.admit(name)
    indices, ids = bench.rows([0] * 13)
    many = torch.arange(100, dtype=torch.int32, device=device)
    records = torch.zeros((100, pool.layout.record_bytes), dtype=torch.uint8, device=device)
    refused: dict[str, Callable[[], object]] = {
        "hot_records: got 8, accepted are at least topk = 9": lambda: HostCache(
            pool, lanes, hot_records=8, topk=9, max_rows=1
        ),
        "topk: got 25, accepted are at most 24": lambda: host.rows_at_once(25, of_one_request=1, longest=10),
        "indices: got shape (13, 24), accepted are at most 12 rows of 24": lambda: host.bring(indices, ids, table),
        "block_table: got 3 requests of 1584 positions": lambda: host.bring(
            indices[:2], ids[:2], torch.zeros((3, 99), dtype=torch.int32, device=device)
        ),
        "request_ids: got torch.int64": lambda: host.bring(indices[:2], ids[:2].long(), table),
        "pieces: got positions 0 to 33": lambda: host.stage([(0, 0, 33)], table),
        "kv: got 100 records, accepted are at most 72 at once": lambda: host.append(records, many, many, table),
        "kv: got records of shape (99, 656), accepted is (100, 656)": lambda: host.write(
            records[1:], many, many, table
        ),
        "accepted are 3 requests at a time": lambda: lanes.admit("d"),
        "has lane": lambda: lanes.admit("a"),
        "request: got 'd', accepted are": lambda: lanes.release("d"),
        "each once": lambda: lanes.bind(["a", "a"]),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_nothing_is_pinned_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="pinned: got True"):
        host_pool(1, 16, "bf16", pinned=True)


def test_more_keys_than_fit_are_counted_not_hidden(device: torch.device) -> None:
    """A caller that breaks its promise: what found no place is no key, and the count says so."""
    bench = Bench(device, hot=TOPK)
    indices = torch.arange(3 * TOPK, dtype=torch.int32, device=device).view(3, TOPK)
    _, slots = bench.host.bring(indices, torch.zeros(3, dtype=torch.int32, device=device), bench.table)
    assert int((slots >= 0).sum()) == TOPK
    assert bench.host.stats().overflowed == 2 * TOPK


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "host-cache.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == (3, 16, 512) and not names["out"].isnan().any()
    assert "appended=3" in capsys.readouterr().out
