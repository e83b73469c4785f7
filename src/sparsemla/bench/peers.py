# SPDX-License-Identifier: Apache-2.0
"""Whom we compare with: other implementations found on this machine at run time, called as their users call them.

Nothing is vendored and nothing is built: a peer that is not here, or refuses, is one line of the report. Each is given
what favours it: plans and padding buffers are made once and reused, as over the layers of a model. What it needs for
each call is timed: for FlashMLA with fewer than 64 heads that is the copy into the padded query and the copy out of
the padded output.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsemla.bench.shapes import D_V, Problem
from sparsemla.bench.timing import one_line
from sparsemla.formats import KVFormat

FAMILIES = ("flash_mla", "fa3", "vllm", "flashinfer", "tilelang")
COMPILING = ("flashinfer", "tilelang")
"""These compile at first use, for minutes: measured only where named."""
FLASHMLA_FP8 = ("flashmla_fp8", "vllm_flashmla_fp8")
"""The names under which FlashMLA's fp8 decode appears, the shipped one first."""
_FA3_NAME = "_vllm_fa3_C.abi3.so"


@dataclass(frozen=True)
class Prepared:
    """A peer ready to be called on one problem.

    Attributes:
        run: one call; returns the output, viewable as (T, H, 512) bfloat16.
        workspace_bytes: what it holds between calls beyond inputs and results.
        results_bytes: of the results (out and lse), those that `run` allocates itself.
    """

    run: Callable[[], torch.Tensor]
    workspace_bytes: int
    results_bytes: int


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        name: in results; says which cache it reads.
        family: what `--peers` calls it.
        reads: the cache's format.
        version: of its package, or of the file it came from.
        prepare: makes it ready for a problem; raises where it does not serve it.
    """

    name: str
    family: str
    reads: KVFormat
    version: str
    prepare: Callable[[Problem], Prepared]


def find(wanted: str | Sequence[str] = "auto", *, fa3_library: Path | None = None) -> tuple[list[Peer], list[str]]:
    """The peers that can be called here, and a line for each family that cannot.

    Args:
        wanted: "auto" (all but those that compile for minutes), "none", or names of families or peers.
        fa3_library: FlashAttention-3's library; by default looked for in an installed vllm and on the import path.

    Raises:
        ValueError: an unknown name.
    """
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    names = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if names == ["none"]:
        return [], []
    automatic = names == ["auto"]
    found: list[Peer] = []
    lines: list[str] = []
    known = {*FAMILIES, *(peer for peers in _MEMBERS.values() for peer in peers)}
    for name in names:
        if not automatic and name not in known:
            raise ValueError(f"peers: got {name!r}, accepted are auto, none, {', '.join(sorted(known))}")
    for family in FAMILIES:
        chosen = [n for n in names if n == family or n in _MEMBERS[family]]
        if not automatic and not chosen:
            continue
        if automatic and family in COMPILING:
            if _is_there(family):
                lines.append(f"{family}: it compiles for minutes at first use; --peers {family} includes it")
            else:
                lines.append(f"{family}: not installed")
            continue
        try:
            members = list(_FINDERS[family](fa3_library))
        except Exception as error:  # whatever an import of a foreign library does, it costs one line
            lines.append(f"{family}: {one_line(error)}")
            continue
        found += [peer for peer in members if automatic or family in chosen or peer.name in chosen]
    return found, lines


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(package: str, default: str = "unknown") -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return default


# FlashMLA, as shipped by sgl-flash-mla and as built into vLLM


def _flash_mla(_: Path | None) -> Iterator[Peer]:
    module = importlib.import_module("flash_mla")
    if "sparsemla" in str(getattr(module, "__file__", "")):
        raise ImportError("the module flash_mla is sparsemla's own stand-in")
    # The kernels for SM90 and this record format are the "legacy" half of sgl-flash-mla; other builds have one half.
    legacy = {"use_legacy": True} if callable(getattr(module, "has_legacy", None)) and module.has_legacy() else {}
    version = str(getattr(module, "__version__", "unknown"))
    yield from _flash_mla_peers(module, "", "flash_mla", version, legacy)


def _vllm(_: Path | None) -> Iterator[Peer]:
    if not _is_there("vllm"):
        raise ImportError("not installed")
    try:
        module = importlib.import_module("vllm.v1.attention.ops.flashmla")
    except ImportError:
        module = importlib.import_module("vllm.attention.ops.flashmla")  # before 2026
    yield from _flash_mla_peers(module, "vllm_", "vllm", _version("vllm"), {})


def _flash_mla_peers(module: Any, prefix: str, family: str, version: str, legacy: dict[str, bool]) -> Iterator[Peer]:
    def decode(problem: Problem) -> Prepared:
        meta, _ = module.get_mla_metadata()
        rows = problem.case.rows
        cache = problem.caches[KVFormat.FP8_DS_MLA]
        k_cache = cache.data.view(cache.num_pages, cache.block_size, 1, cache.layout.record_bytes)
        indices = problem.indices.view(rows.batch, rows.s_q, -1)

        def call(q: torch.Tensor) -> torch.Tensor:
            out, _lse = module.flash_mla_with_kvcache(
                q.view(rows.batch, rows.s_q, q.shape[1], q.shape[2]),
                k_cache,
                None,
                None,
                D_V,
                meta,
                None,
                problem.softmax_scale,
                False,
                True,
                indices,
                **legacy,
            )
            return cast_out(out, q.shape[1])

        return _padded(problem, call)

    def prefill(problem: Problem) -> Prepared:
        kv = problem.bf16_rows().unsqueeze(1)
        indices = problem.indices.unsqueeze(1)

        def call(q: torch.Tensor) -> torch.Tensor:
            return cast_out(module.flash_mla_sparse_fwd(q, kv, indices, problem.softmax_scale, **legacy)[0], q.shape[1])

        return _padded(problem, call)

    yield Peer(f"{prefix}flashmla_fp8", family, KVFormat.FP8_DS_MLA, version, decode)
    yield Peer(f"{prefix}flashmla_bf16", family, KVFormat.BF16, version, prefill)


def cast_out(out: Any, heads: int) -> torch.Tensor:
    """An output of any leading shape as (T, heads, 512)."""
    made: torch.Tensor = out
    return made.reshape(-1, heads, D_V)


def _padded(problem: Problem, call: Callable[[torch.Tensor], torch.Tensor]) -> Prepared:
    """Calls a kernel that serves 64 or 128 heads only, with the copies that other numbers cost."""
    case = problem.case
    kernel_heads = 64 if case.heads <= 64 else 128
    lse_bytes = _rounded(case.tokens * case.heads * 4)
    out_bytes = _rounded(case.tokens * case.heads * D_V * 2)
    if kernel_heads == case.heads:
        return Prepared(lambda: call(problem.q), 0, out_bytes + lse_bytes)
    padded_q = problem.q.new_zeros((case.tokens, kernel_heads, case.d_qk))
    compact = torch.empty_like(problem.out)

    def run() -> torch.Tensor:
        padded_q[:, : case.heads].copy_(problem.q)
        compact.copy_(call(padded_q)[:, : case.heads])
        return compact

    return Prepared(run, padded_q.nbytes, lse_bytes)


def _rounded(nbytes: int) -> int:
    """As torch's allocator counts: in pieces of 512 bytes."""
    return -(-nbytes // 512) * 512


# FlashAttention-3, the library built into vLLM


def find_fa3_library() -> Path | None:
    """`_vllm_fa3_C.abi3.so` of an installed vllm, or lying in a folder of the import path."""
    for folder in map(Path, sys.path):
        for candidate in (folder / _FA3_NAME, folder / "vllm" / "vllm_flash_attn" / _FA3_NAME):
            if candidate.is_file():
                return candidate
    return None


def _fa3(library: Path | None) -> Iterator[Peer]:
    path = find_fa3_library() if library is None else library
    if path is None:
        raise ImportError(f"no {_FA3_NAME} in an installed vllm or on the import path; --fa3-library names one")
    if not path.is_file():
        raise ImportError(f"--fa3-library {path.name}: no such file")
    ops: Any = torch.ops
    ops.load_library(str(path))
    forward = ops._vllm_fa3_C.fwd
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    version = f"vllm {_version('vllm')}" if "vllm_flash_attn" in path.parts else f"{path.name} sha256 {digest}"

    def prepare(problem: Problem) -> Prepared:
        case, q, rows = problem.case, problem.q, problem.bf16_rows()
        # The rotary columns are keys of width 64, the latent columns values of width 512 and, through q_v, the rest
        # of the keys; a page is one record and the page table is the top-k.
        keys, values = rows[:, D_V:][:, None, None], rows[:, :D_V][:, None, None]
        starts = torch.arange(case.tokens + 1, dtype=torch.int32, device=q.device)
        used = torch.full((case.tokens,), case.topk, dtype=torch.int32, device=q.device)
        appended: tuple[None, ...] = (None,) * 2
        rotary_and_scales: tuple[None, ...] = (None,) * 8

        def run() -> torch.Tensor:
            results = forward(
                *(q[..., D_V:], keys, values, *appended, q[..., :D_V], None),
                *(starts, None, None, None, used, 1, case.topk, problem.indices),
                *rotary_and_scales,
                *(problem.softmax_scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None),
            )
            return cast_out(results[0], case.heads)

        results = _rounded(case.tokens * case.heads * D_V * 2) + _rounded(case.tokens * case.heads * 4)
        return Prepared(run, 0, results)

    yield Peer("fa3_bf16", "fa3", KVFormat.BF16, version, prepare)


# Those that compile


def _flashinfer(_: Path | None) -> Iterator[Peer]:
    mla = importlib.import_module("flashinfer.mla")

    def prepare(problem: Problem) -> Prepared:
        case, q = problem.case, problem.q
        rows = problem.bf16_rows()
        latent, rotary = rows[:, :D_V].unsqueeze(1), rows[:, D_V:].unsqueeze(1)
        workspace = torch.empty(128 * 1024**2, dtype=torch.int8, device=q.device)
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
        starts = torch.arange(case.tokens + 1, dtype=torch.int32, device=q.device)
        lengths = torch.full((case.tokens,), case.topk, dtype=torch.int32, device=q.device)
        wrapper.plan(
            *(starts, starts * case.topk, problem.indices.reshape(-1), lengths),
            *(case.heads, D_V, case.d_qk - D_V, 1, False, problem.softmax_scale, q.dtype, rows.dtype),
        )
        out = torch.empty_like(problem.out)
        q_latent, q_rotary = q[..., :D_V].contiguous(), q[..., D_V:].contiguous()

        def run() -> torch.Tensor:
            wrapper.run(q_latent, q_rotary, latent, rotary, out=out)
            return out

        return Prepared(run, workspace.nbytes, 0)

    yield Peer("flashinfer_bf16", "flashinfer", KVFormat.BF16, _version("flashinfer-python"), prepare)


def _tilelang(_: Path | None) -> Iterator[Peer]:
    importlib.import_module("tilelang")
    try:
        module = importlib.import_module("sparse_mla_fwd_pipelined")
    except ImportError:
        raise ImportError(
            "its sparse MLA kernel is an example of its repository, not part of the package: "
            "put examples/deepseek_v32 on PYTHONPATH to include it"
        ) from None

    def prepare(problem: Problem) -> Prepared:
        case = problem.case
        q, kv = problem.q.unsqueeze(0), problem.bf16_rows()[None, :, None]
        indices = problem.indices[None, :, None]
        # The example masks keys beyond the query's position: from the pool's end on every key is visible.
        first = torch.tensor([case.pool], dtype=torch.int32, device=q.device)
        kernel = module.sparse_mla_fwd_interface(
            q, kv, indices, case.pool, 1, sm_scale=problem.softmax_scale, return_kernel=True
        )
        results = _rounded(case.tokens * case.heads * D_V * 2) + _rounded(case.tokens * case.heads * 4)
        return Prepared(lambda: cast_out(kernel(q, kv, indices, first)[0], case.heads), 0, results)

    yield Peer("tilelang_bf16", "tilelang", KVFormat.BF16, _version("tilelang"), prepare)


_FINDERS: dict[str, Callable[[Path | None], Iterator[Peer]]] = {
    "flash_mla": _flash_mla,
    "fa3": _fa3,
    "vllm": _vllm,
    "flashinfer": _flashinfer,
    "tilelang": _tilelang,
}
_MEMBERS: dict[str, tuple[str, ...]] = {
    "flash_mla": ("flashmla_fp8", "flashmla_bf16"),
    "fa3": ("fa3_bf16",),
    "vllm": ("vllm_flashmla_fp8", "vllm_flashmla_bf16"),
    "flashinfer": ("flashinfer_bf16",),
    "tilelang": ("tilelang_bf16",),
}
