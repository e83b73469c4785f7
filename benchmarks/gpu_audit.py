# SPDX-License-Identifier: Apache-2.0
"""Audits the two faults this project started from, on the machine at hand, and our own call beside them.

1. The peer's split-KV decode (package sgl-flash-mla 1.0.0, `use_legacy=True`), 8192 query tokens, 64 heads: two
   accumulators, 2052 MiB together, that nothing writes or reads.
2. Our own `sparse_mla_attention` under the same inputs: no dead byte, and the same result audited or not.
3. The serving layer under policy `flashmla`, 786,432 tokens a request: the 1.69 GiB prefill buffer is dead on the mixed
   path (16 heads a rank) and alive to the last byte on the separate one (32 heads a rank).

Run: ``python benchmarks/gpu_audit.py [--peer-path DIR] [--json FILE] [--parts peer,ours,mixed,separate]`` on a Hopper
GPU. Prints a JSON of what was seen; exit status 1 when anything is not as expected, with the reasons in `unexpected`.
``--parts`` leaves slow parts out (`mixed` and `separate` are part 3). ``--device cpu --small`` runs parts 2 and 3 in
small on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparsemla import KVFormat, PagedKVCache, sparse_mla_attention
from sparsemla.audit import Ledger, watch
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.metadata import Batch, MetadataBuilder
from sparsemla.serving.paths import decide
from sparsemla.serving.workspace import SharedWorkspace

BLOCK = 64
D_QK, D_V = 576, 512


@dataclass(frozen=True)
class Size:
    """How large the audited calls are."""

    tokens: int
    heads: int
    topk: int
    pool: int
    max_model_len: int
    prefill_tokens: int


FULL = Size(tokens=8192, heads=64, topk=2048, pool=32_768, max_model_len=786_432, prefill_tokens=4092)
PARTS = ("peer", "ours", "mixed", "separate")
SMALL = Size(tokens=16, heads=64, topk=64, pool=1024, max_model_len=1024, prefill_tokens=8)


def parts_of(text: str) -> tuple[str, ...]:
    """``ours,mixed`` → those parts, in the order they run. argparse reports a name that is none."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted are {', '.join(PARTS)}, separated by commas")
    return tuple(name for name in PARTS if name in wanted)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts asked for; 0 when all is as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a size for machines without a GPU")
    parser.add_argument("--peer-path", type=Path, help="folder that holds the unpacked flash_mla package")
    parser.add_argument("--json", type=Path, help="also write the report here")
    parser.add_argument("--parts", type=parts_of, default=PARTS, help="which of peer,ours,mixed,separate (default all)")
    given = parser.parse_args(argv)
    if given.peer_path is not None:
        sys.path.insert(0, str(given.peer_path))
    device, size = torch.device(given.device), SMALL if given.small else FULL
    torch.manual_seed(0)

    unexpected: list[str] = []
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/gpu_audit.py", *(sys.argv[1:] if argv is None else argv)]),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "size": asdict(size),
    }
    with torch.no_grad():
        call = Inputs(size, device)
        for name, part in (
            ("peer", lambda: peer(call, unexpected)),
            ("ours", lambda: ours(call, unexpected)),
            ("mixed", lambda: serving(size, device, tp=4, dead=True, unexpected=unexpected)),
            ("separate", lambda: serving(size, device, tp=2, dead=False, unexpected=unexpected)),
        ):
            if name not in given.parts:
                continue
            begin = time.perf_counter()
            print(f"{name} ...", file=sys.stderr, flush=True)
            report[name] = part()
            report[name]["seconds"] = round(time.perf_counter() - begin, 1)
    report["parts"] = list(given.parts)
    report["unexpected"] = unexpected
    report["ok"] = not unexpected
    text = json.dumps(report, indent=2)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0 if report["ok"] else 1


class Inputs:
    """One call's tensors: random queries, a random fp8 cache with power-of-two scales, uniformly drawn keys."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.q = torch.randn((size.tokens, size.heads, D_QK), device=device).to(torch.bfloat16)
        self.cache = PagedKVCache.allocate(size.pool // BLOCK, BLOCK, KVFormat.FP8_DS_MLA, device=device)
        for start in range(0, size.pool, 8192):
            slots = torch.arange(start, min(start + 8192, size.pool), device=device)
            self.cache.write(slots, torch.randn((len(slots), D_QK), device=device), scale_style="pow2")
        self.indices = torch.randint(0, size.pool, (size.tokens, size.topk), device=device, dtype=torch.int32)
        self.scale = D_QK**-0.5


def audited(code: Callable[[], torch.Tensor], name: str, unexpected: list[str]) -> tuple[Ledger, dict[str, Any]]:
    """Runs code twice plainly (warm-up, reference) and once under the audit; the answers must be the same bits."""
    code()
    plain = code().clone()
    with watch() as ledger:
        answer = code()
    same = torch.equal(plain.view(torch.int16), answer.view(torch.int16))
    if not same:
        unexpected.append(f"{name}: the audited answer differs from the plain one")
    return ledger, summary(ledger) | {"same_result": same}


def summary(ledger: Ledger) -> dict[str, Any]:
    """The part of a ledger that a reader wants to see in the JSON."""
    return {
        "allocations": len(ledger.allocations),
        "peak_bytes": ledger.peak_bytes,
        "dead_bytes": ledger.dead_bytes,
        "dead": [
            {"op": a.op, "via": a.via, "shape": a.shape, "bytes": a.nbytes, "dead": a.dead, "who": a.site}
            for a in ledger.dead()
        ],
        "regions": [
            {"name": r.name, "bytes": r.nbytes, "never_written": r.never_written, "handouts": r.handouts}
            for r in ledger.regions
        ],
        "notes": ledger.notes,
        "uncovered": ledger.uncovered,
    }


def peer(call: Inputs, unexpected: list[str]) -> dict[str, Any]:
    """The peer's decode: (b + parts) · tokens · heads · (512 + 1) float32 that nobody touches, b = parts = 1."""
    if call.q.device.type != "cuda":
        return {"skipped": "the peer needs a Hopper GPU"}
    try:
        import flash_mla
    except ImportError as problem:
        unexpected.append(f"peer: flash_mla cannot be imported: {problem}")
        return {"skipped": str(problem)}
    q = call.q.unsqueeze(0)
    k_cache = call.cache.data.view(call.size.pool // BLOCK, BLOCK, 1, -1)
    indices = call.indices.unsqueeze(0)

    def code() -> torch.Tensor:
        meta, _ = flash_mla.get_mla_metadata()
        out, _ = flash_mla.flash_mla_with_kvcache(
            q, k_cache, None, None, D_V, meta, softmax_scale=call.scale, indices=indices, use_legacy=True
        )
        return out

    ledger, found = audited(code, "peer", unexpected)
    expected = 2 * call.size.tokens * call.size.heads * (D_V + 1) * 4
    accumulators = [a for a in ledger.dead() if any("sparse_decode_fwd" in name for name in (*a.via, a.op))]
    dead = sum(a.dead for a in accumulators)
    found |= {"expected_dead_bytes": expected, "accumulator_dead_bytes": dead, "accumulator_mib": dead / 2**20}
    if len(accumulators) != 2 or dead != expected or any(a.dead != a.nbytes for a in accumulators):
        unexpected.append(f"peer: expected 2 accumulators, {expected:,} dead bytes; saw {len(accumulators)}, {dead:,}")
    return found


def ours(call: Inputs, unexpected: list[str]) -> dict[str, Any]:
    """Our call under the same inputs: nothing dead."""
    from sparsemla.kernels import registry

    chosen: list[str] = []
    select = registry.select

    def code() -> torch.Tensor:
        out, _ = sparse_mla_attention(call.q, call.cache, call.indices, softmax_scale=call.scale)
        return out

    def noting(attention_call: Any) -> Any:
        kernel = select(attention_call)
        chosen.append(kernel.name)
        return kernel

    registry.select = noting
    try:
        ledger, found = audited(code, "ours", unexpected)
    finally:
        registry.select = select
    if ledger.dead_bytes:
        unexpected.append(f"ours: expected no dead bytes, saw {ledger.dead_bytes:,}")
    return found | {"kernel": sorted(set(chosen))}


def serving(size: Size, device: torch.device, *, tp: int, dead: bool, unexpected: list[str]) -> dict[str, Any]:
    """One mixed step of a GLM-5.3 rank under policy `flashmla`: 8 decodes, two prefills over the longest context."""
    config = ServingConfig(
        ModelGeometry.preset("glm-5.3"),
        Parallelism(tp=tp),
        ServingLimits(
            max_model_len=size.max_model_len,
            max_num_batched_tokens=size.tokens,
            max_num_seqs=min(32, size.tokens),
            block_size=BLOCK,
            prefill_factor=2,
            cache_format=KVFormat.FP8_DS_MLA,
        ),
    )
    path = decide(config, "flashmla")
    workspace = SharedWorkspace(device)
    backend = SparseMLABackend(config, path, workspace, softmax_scale=D_QK**-0.5)
    workspace.lock()
    query_lens = [1] * min(8, size.tokens - 2 * size.prefill_tokens) + [size.prefill_tokens] * 2
    seq_lens = [100] * (len(query_lens) - 2) + [size.max_model_len] * 2
    cache = PagedKVCache.allocate(size.pool // BLOCK, BLOCK, KVFormat.FP8_DS_MLA, device=device)
    slots = torch.arange(size.pool, device=device)
    cache.write(slots, torch.randn((size.pool, D_QK), device=device))
    pages = size.max_model_len // BLOCK
    table = (torch.arange(len(query_lens) * pages, device=device, dtype=torch.int32) % cache.num_pages).view(-1, pages)
    metadata = MetadataBuilder(config, path, device=device).build(Batch(query_lens, seq_lens, table))
    rows = metadata.padded_tokens
    q = torch.randn((rows, config.heads, D_QK), device=device).to(torch.bfloat16)
    indices = torch.randint(0, size.max_model_len, (rows, size.topk), device=device, dtype=torch.int32)

    def code() -> torch.Tensor:
        return backend.forward(q, cache, indices, metadata)[0]

    name = f"policy flashmla, {config.heads} heads a rank, path {path.kind.value}"
    ledger, found = audited(code, name, unexpected)
    region = ledger.region(f"{backend.owner}/prefill_kv")
    expected = region.nbytes if dead else 0
    if region.nbytes != 2 * size.max_model_len * D_QK * 2:
        unexpected.append(f"{name}: the prefill buffer has {region.nbytes:,} bytes")
    if region.never_written != expected:
        unexpected.append(f"{name}: expected {expected:,} bytes of prefill_kv dead, saw {region.never_written:,}")
    others = {r.name: r.never_written for r in ledger.regions if r.name != region.name and r.never_written}
    if others:
        unexpected.append(f"{name}: expected every other reservation in full use, saw unwritten bytes in {others}")
    return found | {
        "path": path.kind.value,
        "heads": config.heads,
        "prefill_kv_bytes": region.nbytes,
        "prefill_kv_gib": region.nbytes / 2**30,
        "prefill_kv_dead": region.never_written,
    }


if __name__ == "__main__":
    sys.exit(main())
