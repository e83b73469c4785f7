# SPDX-License-Identifier: Apache-2.0
"""vLLM's real classes (metadata builder and impl of a layer, no server) on random batches: SPARSEMLA beside vLLM's own
FLASHMLA_SPARSE, and what each reserves in vLLM's workspace.

Run: ``PYTHONPATH=src:<folder with vllm 0.26.0 and its _flashmla_C> python benchmarks/vllm_forward.py --out <file>``.
Both get the same cache, indices, query and batch. Each answer is compared with float64 on some rows, and the two with
each other on all: relative error below 3e-3, where the peer's own distance from float64 does not explain more. Ours is
captured in a CUDA graph too and replayed with another batch, and run as the shards of a context-parallel group, which
are merged. Where FLASHMLA_SPARSE cannot be had or refuses, that is
a line. ``--device cpu`` runs ours alone on small batches. Exit status: 0; 1 where an answer is wrong; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import vllm
from vllm.v1.worker import workspace

from generators import relative_error
from sparsemla import reference_attention
from sparsemla.integrations.vllm.plugin import NAME, register
from sparsemla.integrations.vllm.versions import installed
from vllm_batches import (
    Requests,
    cache_spec,
    common_metadata,
    context_group,
    make_builder,
    make_impl,
    vllm_config,
)

TOLERANCE = 3e-3
CHECKED_ROWS = 5
SCALE = 192**-0.5

BATCHES: dict[str, tuple[list[int], list[int], int]] = {
    "decode": ([1] * 8, [8192, 5000, 2049, 2048, 3000, 640, 64, 6000], 0),
    "mtp": ([4] * 6, [8192, 4099, 2050, 2048, 700, 64], 3),
    "prefill": ([300, 212], [4300, 212], 0),
    "mixed": ([1, 1, 1, 256], [8192, 2500, 900, 3000], 0),
}
"""Query rows and tokens of each request, and speculative tokens."""
SMALL: dict[str, tuple[list[int], list[int], int]] = {
    "decode": ([1, 1], [300, 64], 0),
    "mixed": ([2, 20], [130, 90], 1),
}


class Report:
    """Lines for a reader and rows for a program, written anew after each, so that a run may end at any moment."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wrong = 0
        self.path, self.about = path, about

    def add(self, **row: Any) -> None:
        """One row, printed as it comes."""
        self.rows.append(row)
        print("  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
        self.save()

    def save(self) -> None:
        """Everything so far, if there is a file for it."""
        if self.path is not None:
            written = {**self.about, "wrong": self.wrong, "rows": self.rows}
            self.path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    def check(self, error: float, limit: float = TOLERANCE) -> str:
        """The word "ok", or "WRONG", which counts. NaN is wrong."""
        if error < limit:
            return "ok"
        self.wrong += 1
        return "WRONG"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if abs(value) < 0.1 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def own_backend() -> Any:
    """SPARSEMLA, found as vLLM finds it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[installed().flag].get_class()


def peer_backend(device: torch.device) -> tuple[Any, str]:
    """vLLM's FLASHMLA_SPARSE, or None and why not; with ours in place of an operator that is not in this folder (steps
    that use it are not timed)."""
    if device.type != "cuda":
        return None, "needs a GPU"
    try:
        from vllm.v1.attention.backends.mla import flashmla_sparse
        from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported
    except Exception as error:  # whatever is missing in a folder put together by hand
        return None, f"{type(error).__name__}: {error}"
    usable, why = is_flashmla_sparse_supported()
    if not usable:
        return None, str(why)
    note = ""
    if not hasattr(torch.ops._C_cache_ops, "cp_gather_and_upconvert_fp8_kv_cache"):
        flashmla_sparse.ops.cp_gather_and_upconvert_fp8_kv_cache = _upconvert
        note = "vLLM's copy of prefills to bf16 is not in this folder: PyTorch's arithmetic stands in for it"
    return flashmla_sparse.FlashMLASparseBackend, note


def _upconvert(
    cache: torch.Tensor, target: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, requests: int
) -> None:
    """Each request's records as bf16, from its start row to the next one's."""
    from sparsemla import PagedKVCache
    from sparsemla.cache import slots_from_positions

    _upconvert.used = True  # type: ignore[attr-defined]
    keys = PagedKVCache.wrap(cache, "fp8_ds_mla")
    bounds = [*starts[:requests].tolist(), target.shape[0]]
    for request in range(requests):
        position = torch.arange(bounds[request + 1] - bounds[request], device=cache.device)
        slots = slots_from_positions(table, torch.full_like(position, request), position, keys.block_size)
        target[bounds[request] : bounds[request + 1]].copy_(keys.read(slots))


def reserved(backend: Any, config: Any, heads: int, device: torch.device) -> int:
    """Bytes that a layer's impl leaves reserved in vLLM's workspace."""
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(device)
    try:
        buffer = torch.zeros((1, config.model_config.hf_text_config.index_topk), dtype=torch.int32, device=device)
        make_impl(backend, config, buffer, heads=heads, scale=SCALE)
        manager = workspace.current_workspace_manager()
        return sum(manager._workspace_size_bytes(held) for held in manager._current_workspaces)
    finally:
        workspace.reset_workspace_manager()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def microseconds(call: Callable[[], Any]) -> float:
    """Median of 20, by events around each."""
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return round(sorted(times)[10], 1)


class Step:
    """One random batch, on the device and, for float64, on the host."""

    def __init__(
        self,
        name: str,
        batch: tuple[list[int], list[int], int],
        heads: int,
        cache_dtype: str,
        topk: int,
        device: torch.device,
    ) -> None:
        query_lens, seq_lens, spec_tokens = batch
        self.requests = Requests.draw(query_lens, seq_lens, 576, topk=topk, lonely=False)
        # -1 alone, and every record written: what the peer is meant for. Garbage and poison are in the tests.
        self.requests.indices.clamp_(min=-1)
        self.requests.indices[self.requests.indices >= max(seq_lens)] = -1
        self.fmt = "fp8_ds_mla" if cache_dtype == "fp8_ds_mla" else "bf16"
        self.host_cache, self.host_table = self.requests.store(self.fmt, spare_pages=0)
        self.heads, self.topk, self.device, self.cache_dtype = heads, topk, device, cache_dtype
        rows = self.requests.indices.shape[0]
        self.config = vllm_config(
            heads=heads,
            topk=topk,
            max_tokens=max(rows, 64),
            max_seqs=16,
            max_model_len=max(seq_lens),
            spec_tokens=spec_tokens,
            cache_dtype=cache_dtype,
        )
        self.host_q = (torch.randn(rows, heads, 576) * 0.3).to(torch.bfloat16)
        self.q = self.host_q.to(device)
        self.cache = self.host_cache.data.to(device)
        self.buffer = self.requests.indices.to(device)
        self.table = self.host_table.clamp_min(0).to(device)
        self.name = name

    def common(self, **changes: Any) -> Any:
        """vLLM's description of the batch."""
        return common_metadata(
            self.requests.query_lens, self.requests.seq_lens, self.table, device=self.device, **changes
        )

    def forward(self, backend: Any, q: Any) -> Callable[[], torch.Tensor]:
        """A layer's forward over the batch, ready to run."""
        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(self.device)
        builder = make_builder(backend, self.config, cache_spec(576, self.cache_dtype), self.device)
        impl = make_impl(backend, self.config, self.buffer, heads=self.heads, scale=SCALE)
        metadata = builder.build(0, self.common())
        return lambda: impl.forward_mqa(q, self.cache, metadata, SimpleNamespace())[0]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, their float64 answers) of some rows."""
        rows = torch.randperm(self.host_q.shape[0])[:CHECKED_ROWS]
        out, _ = reference_attention(
            self.host_q[rows],
            self.host_cache,
            self.requests.indices[rows],
            softmax_scale=SCALE,
            block_table=self.host_table,
            request_ids=self.requests.owners[rows],
        )
        return rows, out


def compare(report: Report, step: Step, ours: Any, peer: Any) -> None:
    """Both forwards over one batch."""
    rows, exact = step.exact()
    run = step.forward(ours, (step.q[..., :512], step.q[..., 512:]))
    out = run()
    error = relative_error(out[rows.to(step.device)].cpu(), exact)
    row: dict[str, Any] = {
        "batch": step.name,
        "heads": step.heads,
        "cache": step.fmt,
        "rows": step.q.shape[0],
        "ours_error": error,
        "ours": report.check(error),
    }
    if step.device.type == "cuda":
        row["ours_us"] = microseconds(run)
    if peer is not None:
        try:
            theirs = step.forward(peer, step.q)  # its concatenation of the query's parts is not counted
            _upconvert.used = False  # type: ignore[attr-defined]
            answer = theirs()
            torch.cuda.synchronize()
            row["peer_error"] = relative_error(answer[rows.to(step.device)].cpu(), exact)
            row["difference"] = relative_error(out, answer.double())
            if row["difference"] >= TOLERANCE and row["difference"] < row["ours_error"] + row["peer_error"]:
                row["same"] = "no more than both differ from float64"
            else:
                row["same"] = report.check(row["difference"])
            row["peer_us"] = None if _upconvert.used else microseconds(theirs)  # type: ignore[attr-defined]
        except (NotImplementedError, AssertionError, RuntimeError, AttributeError) as error_:
            row["peer"] = f"{type(error_).__name__}: {error_}".splitlines()[0][:160]
    report.add(**row)


def replay(report: Report, heads: int, topk: int, device: torch.device, ours: Any) -> None:
    """A graph captured with one padded batch answers for another."""
    tokens, padded = 4000, 8
    step = Step("graph", ([1] * 5, [tokens] * 5, 0), heads, "fp8_ds_mla", topk, device)
    builder = make_builder(ours, step.config, cache_spec(576, "fp8_ds_mla"), device)
    buffer = torch.full((padded, topk), -1, dtype=torch.int32, device=device)
    impl = make_impl(ours, step.config, buffer, heads=heads, scale=SCALE)
    table = torch.zeros((padded, step.table.shape[1]), dtype=torch.int32, device=device)
    q = torch.zeros((padded, heads, 576), dtype=torch.bfloat16, device=device)
    starts = torch.zeros(padded + 1, dtype=torch.int32, device=device)

    def build(count: int) -> Any:
        common = common_metadata(
            [1] * count, [tokens] * count, table, padded_rows=padded, padded_requests=padded, device=device
        )
        starts.copy_(common.query_start_loc)
        return builder.build_for_cudagraph_capture(common.replace(query_start_loc=starts))

    metadata = build(2)
    impl.forward_mqa((q[..., :512], q[..., 512:]), step.cache, metadata, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = impl.forward_mqa((q[..., :512], q[..., 512:]), step.cache, metadata, None)
    out.fill_(torch.nan)
    buffer[:5], q[:5], table[:5] = step.buffer, step.q, step.table
    build(5)
    graph.replay()
    torch.cuda.synchronize()
    rows, exact = step.exact()
    error = relative_error(out[rows.to(device)].cpu(), exact)
    padding = bool((out[5:] == 0).all())
    report.wrong += not padding
    report.add(
        batch="graph replay", heads=heads, rows=padded, ours_error=error, ours=report.check(error), padding_zero=padding
    )


def shards(report: Report, heads: int, world: int, topk: int, device: torch.device, ours: Any) -> None:
    """A context-parallel group's answers, one rank after the other on one device, merged by their log-sum-exp."""
    batch = BATCHES["mixed"] if device.type == "cuda" else SMALL["mixed"]
    step = Step("shards", batch, heads, "fp8_ds_mla", topk, device)
    rows, exact = step.exact()
    config = vllm_config(
        heads=heads, topk=topk, max_tokens=step.q.shape[0], max_model_len=max(batch[1]), dcp=world, spec_tokens=batch[2]
    )
    outs, lses = [], []
    for rank in range(world):
        cache, table = step.requests.store("fp8_ds_mla", shard=(rank, world, 1), spare_pages=1)
        with context_group(rank, world):
            builder = make_builder(ours, config, cache_spec(576, "fp8_ds_mla"), device)
        impl = make_impl(ours, config, step.buffer, heads=heads, scale=SCALE, rank=rank)
        metadata = builder.build(0, common_metadata(batch[0], batch[1], table.to(device), device=device))
        out, lse = impl.forward_mqa(step.q, cache.data.to(device), metadata, None)
        outs.append(out.double())
        lses.append(lse.double())
    weights = torch.softmax(torch.stack(lses), dim=0).nan_to_num(0.0)
    merged = (torch.stack(outs) * weights.unsqueeze(-1)).sum(dim=0)
    error = relative_error(merged[rows.to(device)].cpu(), exact)
    report.add(
        batch=f"shards of {world}", heads=heads, rows=step.q.shape[0], ours_error=error, ours=report.check(error)
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", default="8,16,64,128")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no case begins")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; --device cpu runs ours alone, in small")
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    ours = own_backend()
    peer, note = peer_backend(device)
    print(
        f"vLLM {vllm.__version__}, torch {torch.__version__}, {gpu}; {NAME} beside "
        + ("FLASHMLA_SPARSE" if peer is not None else f"nothing: FLASHMLA_SPARSE: {note}")
    )
    if peer is not None and note:
        print(note)
    about = {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": gpu, "note": note}
    report = Report(given.out, about)
    begin = time.monotonic()
    heads_list = [int(part) for part in given.heads.split(",")]
    for heads in heads_list:
        config = vllm_config(heads=heads, topk=given.topk, max_tokens=8192, max_seqs=256, max_model_len=163840)
        bytes_of = {NAME: reserved(ours, config, heads, device)}
        if peer is not None:
            bytes_of["FLASHMLA_SPARSE"] = reserved(peer, config, heads, device)
        report.wrong += bytes_of[NAME] != 0
        report.add(workspace_bytes=f"{heads} heads, 8192 rows, 163840 tokens", **bytes_of)
    batches = BATCHES if device.type == "cuda" else SMALL
    for name, batch in batches.items():
        for heads in heads_list:
            for cache_dtype in ("fp8_ds_mla", "auto"):
                if time.monotonic() - begin < given.budget:
                    compare(report, Step(name, batch, heads, cache_dtype, given.topk, device), ours, peer)
    if device.type == "cuda":
        for heads in heads_list:
            replay(report, heads, given.topk, device, ours)
    for heads, world in ((16, 2), (128, 8)):
        shards(report, heads, world, given.topk, device, ours)
    report.save()
    print("all right" if not report.wrong else f"{report.wrong} WRONG")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
