# SPDX-License-Identifier: Apache-2.0
"""vLLM's real classes (metadata builder and impl of a layer, no server) on random batches: SPARSEMLA beside vLLM's own
FLASHMLA_SPARSE, and what each reserves in vLLM's workspace.

Run: ``PYTHONPATH=src:<folder with vllm 0.26.0 and its _flashmla_C> python benchmarks/vllm_forward.py --out <file>``.
All rows of every answer are compared with float64 (relative error below 3e-3) and the two with each other (the same
limit), on inputs that both are specified for: a row's keys come first and -1 behind them, as vLLM's indexer leaves
them, and every row has keys. FLASHMLA_SPARSE counts a row's keys, and its bf16 kernel reads that many columns: a line
"keys anywhere" shows it. Ours is run a second time with the same keys anywhere, garbage between them and a row without
keys; in a CUDA graph replayed with another batch; and as the shards of a context-parallel group, which are merged.

fp8_ds_mla has scales that are powers of two, as FlashMLA's own tests have. With vLLM's, amax/448, FLASHMLA_SPARSE
rounds keys to bf16 (its decode kernel the scales first): where the two then differ by more than the limit, its answer
is compared with float64 over keys rounded like that, and "peer rounds keys" says that this explains it; all else is
WRONG. Times are of CUDA graph replays, in turn, over a warm L2; without the concatenation of the query that
FLASHMLA_SPARSE needs. ``--device cpu`` runs ours alone on small batches. Exit status: 0; 1 where an answer is wrong; 2
without a GPU.
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
from sparsemla import PagedKVCache, reference_attention
from sparsemla.bench.timing import Effort, Timing, alternate, one_line
from sparsemla.cache import slots_from_positions
from sparsemla.integrations.vllm.plugin import NAME, register
from sparsemla.integrations.vllm.versions import installed
from vllm_batches import (
    Requests,
    cache_spec,
    common_metadata,
    context_group,
    make_builder,
    make_impl,
    merged,
    vllm_config,
)

TOLERANCE = 3e-3
SCALE = 192**-0.5
AMAX = "fp8_ds_mla amax/448"
CACHES = {"fp8_ds_mla": ("fp8_ds_mla", "pow2"), "bf16": ("auto", "float32"), AMAX: ("fp8_ds_mla", "float32")}
"""vLLM's name of the cache's type, and how scales are chosen."""

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
    """Lines for a reader, rows for a program; written after each, so that a run may end at any moment."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wrong = 0
        self.path, self.about = path, about

    def add(self, **row: Any) -> None:
        """One row, printed as it comes."""
        row = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}
        self.rows.append(row)
        print("  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
        if self.path is not None:
            about = json.dumps({**self.about, "wrong": self.wrong})[:-1]
            rows = ",\n".join(map(json.dumps, self.rows))
            self.path.write_text(f'{about}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")

    def check(self, *errors: float) -> str:
        """The word "ok", or "WRONG", which counts. NaN is wrong."""
        if all(error < TOLERANCE for error in errors):
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


class Keys:
    """The requests of one batch with their cache, on the device.

    Attributes:
        indices: a row's keys first, -1 behind them.
        anywhere: the same keys at random columns, garbage between them; none in row 0.
    """

    def __init__(self, batch: tuple[list[int], list[int], int], topk: int, device: torch.device) -> None:
        query_lens, self.seq_lens, self.spec_tokens = batch
        self.device, self.topk = device, topk
        self.requests = Requests.draw(query_lens, self.seq_lens, 576, topk=topk, lonely=False)
        drawn = self.requests.indices
        self.rows = drawn.shape[0]
        named = (drawn >= 0) & (drawn < max(self.seq_lens))
        order = named.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        self.indices = torch.where(named, drawn, -1).gather(1, order).to(device)
        self.anywhere = drawn.to(device)
        self.anywhere[0] = -1
        self.owners = self.requests.owners.to(device)
        self.counts = named.sum(dim=1)

    def store(self, cache: str) -> None:
        """Writes the requests into a cache of that name."""
        self.kind, self.style = CACHES[cache]
        fmt = "fp8_ds_mla" if self.kind == "fp8_ds_mla" else "bf16"
        self.cache, table = self.requests.store(fmt, spare_pages=0, scale_style=self.style, device=self.device)
        self.table = table.clamp_min(0).to(self.device)

    def config(self, heads: int, **changes: Any) -> Any:
        """vLLM's configuration for it."""
        return vllm_config(
            heads=heads,
            topk=self.topk,
            max_tokens=max(self.rows, 64),
            max_model_len=max(self.seq_lens),
            spec_tokens=self.spec_tokens,
            cache_dtype=self.kind,
            **changes,
        )

    def query(self, heads: int) -> torch.Tensor:
        """(rows, heads, 576) bfloat16."""
        return (torch.randn(self.rows, heads, 576, device=self.device) * 0.3).to(torch.bfloat16)

    def forward(self, backend: Any, q: torch.Tensor, query: Any, buffer: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A layer's forward over the batch, ready to run. `query` is `q` or its parts."""
        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(self.device)
        config = self.config(q.shape[1])
        metadata = make_builder(backend, config, cache_spec(576, self.kind), self.device).build(
            0, common_metadata(self.requests.query_lens, self.seq_lens, self.table, device=self.device)
        )
        impl = make_impl(backend, config, buffer, heads=q.shape[1], scale=SCALE)
        return lambda: impl.forward_mqa(query, self.cache.data, metadata, SimpleNamespace())[0]

    def exact(self, q: torch.Tensor, cache: PagedKVCache | None = None, **changes: Any) -> torch.Tensor:
        """The float64 answers, over the cache or another one of the same pages."""
        given = {"indices": self.indices, "block_table": self.table, "request_ids": self.owners, **changes}
        return reference_attention(q, cache or self.cache, softmax_scale=SCALE, **given)[0]

    def rounded(self) -> list[PagedKVCache]:
        """The cache as FLASHMLA_SPARSE rounds it: value · bf16(scale) in its fp8 kernel, value · scale where it copies
        prefills."""
        data = self.cache.data
        values = data[..., :512].view(torch.float8_e4m3fn).to(torch.bfloat16).unflatten(-1, (4, 128))
        scales = data[..., 512:528].contiguous().view(torch.float32).unsqueeze(-1)
        rotary = data[..., 528:].contiguous().view(torch.bfloat16)
        return [
            PagedKVCache.wrap(torch.cat(((values * by).to(torch.bfloat16).flatten(-2), rotary), dim=-1), "bf16")
            for by in (scales.to(torch.bfloat16), scales)
        ]

    def worst(self, got: torch.Tensor, want: torch.Tensor) -> str:
        """The row that differs most, and how many are beyond the limit."""
        errors = row_errors(got, want).nan_to_num(nan=torch.inf)
        row = int(errors.argmax())
        return (
            f"{float(errors[row]):.1e} in row {row} of request {int(self.owners[row])}, {int(self.counts[row])} keys "
            f"({int((errors >= TOLERANCE).sum())} rows beyond)"
        )


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """(rows,) relative errors."""
    return (got.double() - want.double()).flatten(1).norm(dim=1) / want.double().flatten(1).norm(dim=1)


def error_anywhere(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The error with `Keys.anywhere`, whose row 0 must be 0."""
    return float("nan") if bool((got[0] != 0).any()) else relative_error(got[1:], exact[1:])


def compare(report: Report, name: str, cache: str, keys: Keys, heads: int, ours: Any, peer: Any) -> None:
    """Both forwards over one batch."""
    q = keys.query(heads)
    exact = keys.exact(q)
    buffer = keys.anywhere.clone()
    runs = {"ours": keys.forward(ours, q, (q[..., :512], q[..., 512:]), buffer)}
    anywhere = error_anywhere(runs["ours"](), exact)
    buffer.copy_(keys.indices)
    out = runs["ours"]()
    error = relative_error(out, exact)
    row: dict[str, Any] = {"batch": name, "heads": heads, "cache": cache, "rows": keys.rows, "ours_error": error}
    row |= {"anywhere_error": anywhere, "ours": report.check(error, anywhere)}
    if row["ours"] != "ok":
        row["ours_worst"] = keys.worst(out, exact)
    if peer is not None:
        try:
            theirs = keys.forward(peer, q, q, keys.indices)
            _upconvert.used = False  # type: ignore[attr-defined]
            answer = theirs()
            torch.cuda.synchronize()
            row["peer_error"], row["difference"] = relative_error(answer, exact), relative_error(out, answer.double())
            row["worst"] = keys.worst(out, answer)
            if cache == AMAX and row["difference"] >= TOLERANCE:
                near = torch.stack([keys.exact(q, as_read) for as_read in keys.rounded()])
                nearer = torch.stack([row_errors(answer, want) for want in near]).argmin(dim=0)
                row["peer_error_rounded"] = relative_error(
                    answer, near[nearer, torch.arange(keys.rows, device=keys.device)]
                )
                word = report.check(row["peer_error_rounded"])
                row["same"] = "no, peer rounds keys" if word == "ok" else word
            else:
                row["same"] = report.check(row["difference"])
            if not _upconvert.used:  # type: ignore[attr-defined]
                runs["peer"] = theirs
        except (NotImplementedError, AssertionError, RuntimeError, AttributeError) as error_:
            row["peer"] = one_line(error_)
    if keys.device.type == "cuda":
        for who, timing in alternate(runs, Effort.of(keys.rows, keys.device), keys.device).items():
            row[f"{who}_us"] = timing.median_us if isinstance(timing, Timing) else timing
    report.add(**row)


def columns(report: Report, keys: Keys, heads: int, peer: Any) -> None:
    """What FLASHMLA_SPARSE's bf16 kernel makes of keys that do not come first. Not judged."""
    keys.store("bf16")
    q = keys.query(heads)
    spread = torch.where((keys.anywhere < 0) | (keys.anywhere >= max(keys.seq_lens)), -1, keys.anywhere)
    spread[0] = keys.indices[0]
    answer = keys.forward(peer, q, q, spread)()
    first = keys.exact(q, indices=spread, topk_lengths=keys.counts.to(keys.device))
    report.add(
        batch="keys anywhere",
        cache="bf16",
        peer_error=relative_error(answer, keys.exact(q)),
        peer_error_over_as_many_columns=relative_error(answer, first),
    )


def replay(report: Report, heads: int, topk: int, device: torch.device, ours: Any) -> None:
    """A graph captured with one padded batch answers for another."""
    tokens, padded = 4000, 8
    keys = Keys(([1] * 5, [tokens] * 5, 0), topk, device)
    keys.store(AMAX)
    builder = make_builder(ours, keys.config(heads), cache_spec(576, "fp8_ds_mla"), device)
    buffer = torch.full((padded, topk), -1, dtype=torch.int32, device=device)
    impl = make_impl(ours, keys.config(heads), buffer, heads=heads, scale=SCALE)
    table = torch.zeros((padded, keys.table.shape[1]), dtype=torch.int32, device=device)
    q = torch.zeros((padded, heads, 576), dtype=torch.bfloat16, device=device)
    starts = torch.zeros(padded + 1, dtype=torch.int32, device=device)

    def build(count: int) -> Any:
        common = common_metadata(
            [1] * count, [tokens] * count, table, padded_rows=padded, padded_requests=padded, device=device
        )
        starts.copy_(common.query_start_loc)
        return builder.build_for_cudagraph_capture(common.replace(query_start_loc=starts))

    metadata = build(2)
    impl.forward_mqa((q[..., :512], q[..., 512:]), keys.cache.data, metadata, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = impl.forward_mqa((q[..., :512], q[..., 512:]), keys.cache.data, metadata, None)
    out.fill_(torch.nan)
    buffer[:5], q[:5], table[:5] = keys.anywhere, keys.query(heads), keys.table
    build(5)
    graph.replay()
    torch.cuda.synchronize()
    error = error_anywhere(out[:5], keys.exact(q[:5]))
    padding = bool((out[5:] == 0).all())
    word = report.check(error if padding else float("nan"))
    report.add(batch="graph replay", heads=heads, rows=padded, ours_error=error, ours=word, padding_zero=padding)


def shards(report: Report, keys: Keys, heads: int, world: int, ours: Any) -> None:
    """A context-parallel group's answers, one rank after the other on one device, merged by their log-sum-exp."""
    keys.store(AMAX)
    q = keys.query(heads)
    config = keys.config(heads, dcp=world)
    parts = []
    for rank in range(world):
        cache, table = keys.requests.store("fp8_ds_mla", shard=(rank, world, 1), spare_pages=1, device=keys.device)
        with context_group(rank, world):
            builder = make_builder(ours, config, cache_spec(576, "fp8_ds_mla"), keys.device)
        impl = make_impl(ours, config, keys.anywhere, heads=heads, scale=SCALE, rank=rank)
        common = common_metadata(keys.requests.query_lens, keys.seq_lens, table.to(keys.device), device=keys.device)
        parts.append(impl.forward_mqa(q, cache.data, builder.build(0, common), None))
    error = error_anywhere(merged(parts), keys.exact(q))
    report.add(batch=f"shards of {world}", heads=heads, rows=keys.rows, ours_error=error, ours=report.check(error))


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
    begin = time.monotonic()
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    ours = own_backend()
    peer, note = peer_backend(device)
    beside = "FLASHMLA_SPARSE" if peer is not None else "nothing, without FLASHMLA_SPARSE"
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {gpu}; {NAME} beside {beside}. {note}")
    about = {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": gpu, "note": note}
    report = Report(given.out, about)
    heads_list = [int(part) for part in given.heads.split(",")]
    for heads in heads_list:
        config = vllm_config(heads=heads, topk=given.topk, max_tokens=8192, max_seqs=256, max_model_len=163840)
        bytes_of = {NAME: reserved(ours, config, heads, device)}
        if peer is not None:
            bytes_of["FLASHMLA_SPARSE"] = reserved(peer, config, heads, device)
        report.wrong += bytes_of[NAME] != 0
        report.add(workspace_bytes=f"{heads} heads, 8192 rows, 163840 tokens", **bytes_of)
    if device.type == "cuda":
        for heads in heads_list:
            replay(report, heads, given.topk, device, ours)
    drawn = {
        name: Keys(batch, given.topk, device) for name, batch in (BATCHES if device.type == "cuda" else SMALL).items()
    }
    for heads, world in ((16, 2), (128, 8)):
        shards(report, drawn["mixed"], heads, world, ours)
    skipped = 0
    for cache in CACHES:
        for name, keys in drawn.items():
            keys.store(cache)
            for heads in heads_list:
                if time.monotonic() - begin < given.budget:
                    compare(report, name, cache, keys, heads, ours, peer)
                else:
                    skipped += 1
    if peer is not None:
        columns(report, drawn["decode"], 64, peer)
    seconds = round(time.monotonic() - begin)
    report.add(result="all right" if not report.wrong else f"{report.wrong} WRONG", skipped=skipped, seconds=seconds)
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
