# SPDX-License-Identifier: Apache-2.0
"""From a variant to machine code: compiled once, kept on disk.

The compiler is only imported where the code is not on disk yet; a process that finds it there loads a few hundred
kilobytes through the
driver instead. The key is the text of this package and the compiler's version, so a stale entry cannot be loaded.

Environment: SPARSEMLA_CACHE names the directory (default: $XDG_CACHE_HOME/sparsemla or ~/.cache/sparsemla).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsemla.formats import KVFormat

SOURCES = (
    *("gather", "kernel", "layout", "params", "products", "ptx", "query", "records", "score", "value"),
    *("upright", "upright_gather", "upright_layout", "upright_math"),
)
"""Modules whose text decides the machine code."""
KINDS = {
    KVFormat.FP8_DS_MLA: "sparse",
    KVFormat.FP8_NOPE: "sparse",
    KVFormat.BF16: "wide",
    KVFormat.FP8_V4: "v4",
    KVFormat.FP8_V41: "v41",
}
"""Kind of records of a cache format, see `Layout`."""


@dataclass(frozen=True)
class Variant:
    """What makes one compiled kernel differ from another.

    Attributes:
        kind: what records are, see `Layout`.
        heads: query heads a tile.
        rope: whether records carry rotary columns.
        cluster: CTAs that share a token.
        trace: whether the first CTA reports the cycles of each phase.
        checked: whether it is built for compute-sanitizer's racecheck, see `Layout`.
    """

    kind: str
    heads: int
    rope: bool
    cluster: int
    trace: bool = False
    checked: bool = False

    @property
    def name(self) -> str:
        """Short and unique."""
        tail = ("_trace" if self.trace else "") + ("_checked" if self.checked else "")
        return f"{self.kind}_h{self.heads}_{'rope' if self.rope else 'norope'}_c{self.cluster}{tail}"


@dataclass(frozen=True)
class Code:
    """Machine code of a variant.

    Attributes:
        cubin: the ELF image for sm_90a.
        entry: name of the kernel in it.
        shared_bytes: dynamic shared memory of a CTA.
        threads: threads of a CTA.
    """

    cubin: bytes
    entry: str
    shared_bytes: int
    threads: int


@functools.cache
def _fingerprint() -> str:
    """Hash of everything the machine code depends on besides the variant."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    try:
        digest.update(importlib.metadata.version("nvidia-cutlass-dsl").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"unknown")
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """Where compiled kernels are kept."""
    given = os.environ.get("SPARSEMLA_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsemla"


def make_kernel(variant: Variant) -> Any:
    """The kernel object of a variant (imports the compiler).

    Raises:
        ValueError: no such kind of records.
    """
    if variant.kind not in KINDS.values():
        accepted = ", ".join(dict.fromkeys(KINDS.values()))
        raise ValueError(f"variant.kind: got {variant.kind!r}, accepted are {accepted}")
    if variant.kind == "wide" and variant.heads == 64:
        from sparsemla.kernels.hopper.upright import UprightKernel

        return UprightKernel(rope=variant.rope, cluster=variant.cluster, trace=variant.trace, checked=variant.checked)
    from sparsemla.kernels.hopper.kernel import SparseKernel

    return SparseKernel(
        heads=variant.heads,
        rope=variant.rope,
        cluster=variant.cluster,
        kind=variant.kind,
        trace=variant.trace,
        checked=variant.checked,
    )


def compile_variant(variant: Variant) -> Code:
    """Compiles for sm_90a; needs no GPU and no driver, and does not care who imported the compiler before."""
    import cutlass
    import cutlass.cute as cute

    from sparsemla.kernels.hopper.params import placeholders

    kernel = make_kernel(variant)
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir={scratch}"
        compiled = cute.compile(kernel, placeholders(), cutlass.Int32(1), options=options)
        ptx = compiled.artifacts.PTX
        text = ptx.decode() if isinstance(ptx, bytes) else str(ptx)
        cubin = bytes(compiled.artifacts.CUBIN)
    entry = text.split(".entry", 1)[1].split("(", 1)[0].strip()
    return Code(cubin, entry, kernel.shared_bytes, kernel.threads)


def load_code(variant: Variant) -> Code:
    """Machine code of a variant, from disk or newly compiled. A directory that cannot be written costs only the next
    start."""
    folder = cache_directory() / f"hopper-{_fingerprint()}"
    image, facts = folder / f"{variant.name}.cubin", folder / f"{variant.name}.json"
    try:
        known = json.loads(facts.read_text())
        cubin = image.read_bytes()
        if hashlib.sha256(cubin).hexdigest() == known["sha256"]:
            return Code(cubin, known["entry"], known["shared_bytes"], known["threads"])
    except (OSError, ValueError, KeyError):
        pass
    code = compile_variant(variant)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in (
            (image, code.cubin),
            (
                facts,
                json.dumps(
                    {
                        "variant": asdict(variant),
                        "entry": code.entry,
                        "shared_bytes": code.shared_bytes,
                        "threads": code.threads,
                        "sha256": hashlib.sha256(code.cubin).hexdigest(),
                    }
                ).encode(),
            ),
        ):
            handle, name = tempfile.mkstemp(dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
    except OSError:
        pass
    return code
