# SPDX-License-Identifier: Apache-2.0
"""What each variant takes of a processor, read from code compiled for GPUs that are not there.

``python -m sparsemla.kernels.triton.resources`` compiles every variant of the table of shapes for every architecture
and prints what it takes; ``--write FILE`` keeps that, with a fingerprint of what it was made from; ``--only sm_89``
limits it. Exit status 1 where a variant exceeds a card's limits, or spills more than we accept. A test compares the
committed table with the fingerprint and with the limits, and compiles a part of it again, so that a variant that cannot
launch fails there and not at a user.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsemla.formats import KVFormat, every_layout, record_layout
from sparsemla.kernels.triton import combine as _combine
from sparsemla.kernels.triton import kernel as _kernel
from sparsemla.kernels.triton.launch import (
    COMBINE_COLUMNS,
    COMBINE_PIECES,
    COMBINE_WARPS,
    conversion,
    format_constants,
    launch_options,
    parts_of,
)
from sparsemla.kernels.triton.launch import Setting as _Setting
from sparsemla.kernels.triton.shapes import ARCHITECTURES, COMMITTED, SHARED_BYTES, Shape, shapes_of

LAYOUTS: tuple[tuple[KVFormat, int], ...] = tuple((layout.format, layout.d_qk) for layout in every_layout())
"""(format, d_qk) of every layout."""
PARTNERS: dict[tuple[KVFormat, int], tuple[KVFormat, int]] = {
    (KVFormat.BF16, 576): (KVFormat.FP8_DS_MLA, 576),
    (KVFormat.BF16, 512): (KVFormat.FP8_NOPE, 512),
    (KVFormat.FP8_DS_MLA, 576): (KVFormat.BF16, 576),
    (KVFormat.FP8_NOPE, 512): (KVFormat.FP8_V41, 512),
    (KVFormat.FP8_V4, 512): (KVFormat.FP8_V4, 512),
    (KVFormat.FP8_V41, 512): (KVFormat.BF16, 512),
}
"""The extra cache of a full variant: another format of the same columns where there is one."""

SM_SHARED_BYTES: dict[str, int] = {
    "sm_80": 164 * 1024,
    "sm_89": 100 * 1024,
    "sm_90": 228 * 1024,
    "sm_100": 228 * 1024,
    "sm_120": 100 * 1024,
    "gfx942": 64 * 1024,
}
"""Shared memory of a whole SM; each block takes 1 KiB besides its own. Source as for shapes.SHARED_BYTES."""
SM_REGISTERS = 65_536
"""32-bit registers of an SM, all NVIDIA architectures here."""
CDNA_REGISTERS = 512
"""Vector registers (architectural and accumulation) of a work-item at one wavefront a SIMD, CDNA 3."""
STACK_BYTES = {False: 384, True: 1536}
"""Stack a thread of a plain and of a full variant may take, which is what the compiler spilled. A limit of ours: the
measured variants stay below it, and ptxas now and then gives a variant up with 32 registers and 9 KB of stack."""


@dataclass(frozen=True)
class Variant:
    """One compilation.

    Attributes:
        arch: architecture, such as "sm_90".
        layout: (format, d_qk) of the cache.
        shape: tile sizes; None: the combine kernel.
        full: with everything a call can have (a plan's table, positions, shards, lengths, sink, extra keys); otherwise
            with nothing of it.
    """

    arch: str
    layout: tuple[KVFormat, int]
    shape: Shape | None
    full: bool

    @property
    def name(self) -> str:
        """Unique and readable."""
        fmt, width = self.layout
        if self.shape is None:
            return f"{self.arch} combine {fmt.value}-{width}"
        shape = self.shape
        sizes = f"{shape.heads}x{shape.keys} {shape.warps}w r{shape.registers}"
        if shape.columns < 512:
            sizes += f" c{shape.columns}"
        return f"{self.arch} {fmt.value}-{width} {sizes} {'full' if self.full else 'plain'}"


@dataclass(frozen=True)
class Taken:
    """What a variant takes: bytes of shared memory a block, registers and bytes of stack (spills) a thread."""

    shared: int
    registers: int
    stack: int


def variants(architectures: Sequence[str] = ARCHITECTURES) -> Iterator[Variant]:
    """Every variant of the committed shapes."""
    for arch in architectures:
        for layout in LAYOUTS:
            for shape in shapes_of(arch, layout[0]):
                yield Variant(arch, layout, shape, False)
                yield Variant(arch, layout, shape, True)
        for layout in ((KVFormat.FP8_DS_MLA, 576), (KVFormat.FP8_V4, 512)):
            yield Variant(arch, layout, None, True)


def excess(variant: Variant, taken: Taken) -> str | None:
    """Why the variant cannot launch, or not as often at once as its shape says, or spills too much; None when it is
    fit for use."""
    shared = SHARED_BYTES[variant.arch]
    if taken.shared > shared:
        return f"takes {taken.shared} bytes of shared memory, {variant.arch} has {shared} for a block"
    if taken.stack > STACK_BYTES[variant.full]:
        return f"takes {taken.stack} bytes of stack a thread, {STACK_BYTES[variant.full]} are accepted"
    if not variant.arch.startswith("sm_"):
        if taken.registers > CDNA_REGISTERS:
            return f"takes {taken.registers} vector registers, {variant.arch} has {CDNA_REGISTERS}"
        return None
    shape = variant.shape
    warps, per_sm = (COMBINE_WARPS, 1) if shape is None else (shape.warps, shape.per_sm)
    allocated = -(-taken.registers // 8) * 8 * 32 * warps
    if allocated * per_sm > SM_REGISTERS:
        return f"takes {allocated} registers a block, {per_sm} of them exceed {SM_REGISTERS}"
    whole = SM_SHARED_BYTES[variant.arch]
    if (taken.shared + 1024) * per_sm > whole:
        return f"takes {taken.shared} bytes of shared memory, {per_sm} of them exceed {whole}"
    return None


def compile_variant(variant: Variant) -> Any:
    """The compiled kernel (`triton.compiler.CompiledKernel`); its `asm` holds every stage."""
    arch = variant.arch
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    fmt, width = variant.layout
    layout = record_layout(fmt, width)
    constants: dict[str, Any] = {"NOPE": layout.d_nope, "ROPE": layout.d_rope, "INTERPRETED": False}
    absent = set() if layout.d_rope else {"q_rope"}
    options: dict[str, Any] = {"num_warps": COMBINE_WARPS}
    function = _combine.combine
    if variant.shape is None:
        constants |= {"WORK": _kernel.TABLE.value, "PIECES": COMBINE_PIECES, "COLUMNS": COMBINE_COLUMNS}
    else:
        function = _kernel.attend
        partner = record_layout(*PARTNERS[variant.layout]) if variant.full else layout
        setting = _Setting(arch, variant.shape, 1)
        options = launch_options(setting)
        constants |= {
            **format_constants("", layout),
            **format_constants("EXTRA_", partner),
            "WORK": (_kernel.TABLE if variant.full else _kernel.WHOLE).value,
            "POSITIONS": variant.full,
            "SHARDED": variant.full,
            "SCALED": any(side.format is not KVFormat.BF16 for side in (layout, partner)),
            "HEADS": variant.shape.heads,
            "KEYS": variant.shape.keys,
            "PARTS": parts_of(variant.shape, layout.format),
            "CONVERT": conversion(arch),
        }
        if not variant.full:
            absent |= {"accumulators", "sink", "lengths", "block_table", "request_ids"}
            absent |= {"extra_pool", "extra_indices", "extra_lengths"}
    signature, attributes = _signature(function, constants, absent, table=variant.full)
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


_POINTERS = {
    **dict.fromkeys(("q_nope", "q_rope", "out"), "*bf16"),
    **dict.fromkeys(("lse", "accumulators", "sink"), "*fp32"),
    **dict.fromkeys(("pool", "extra_pool"), "*u8"),
    **dict.fromkeys(
        ("indices", "lengths", "block_table", "request_ids", "extra_indices", "extra_lengths"),
        "*i32",
    ),
}
_STRIDES = ("q_nope_row", "q_nope_head", "q_rope_row", "q_rope_head", "out_row", "out_head")


def _signature(
    function: Any, constants: dict[str, Any], absent: set[str], *, table: bool
) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Argument types and alignments as a launch with contiguous tensors has them; adds absent arguments to
    constants."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(function.arg_names):
        if name in absent:
            constants[name] = None
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = _POINTERS.get(name, "fp32" if name == "scale_log2" else "i32")
        signature[name] = "*i32" if name == "pieces" and table else kind
        if signature[name].startswith("*") or name in _STRIDES:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, attributes


def measure(variant: Variant) -> Taken:
    """Compiles a variant and reads what it takes."""
    compiled = compile_variant(variant)
    if "cubin" in compiled.asm:
        registers, stack = _cuda_usage(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        stack = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return Taken(int(compiled.metadata.shared), registers, stack)


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as image:
        image.write(cubin)
        image.flush()
        done = subprocess.run([tool, "-res-usage", image.name], capture_output=True, text=True, check=True)
    return _number(r"REG:(\d+)", done.stdout), _number(r"STACK:(\d+)", done.stdout)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's output has no {pattern!r}")
    return int(found.group(1))


def fingerprint() -> str:
    """Of all that compiled code is made from, except the compiler."""
    here = Path(__file__).parent
    device_code = ("keys.py", "query.py", "softmax.py", "kernel.py", "combine.py", "resources.py")
    digest = hashlib.sha256()
    for path in (*(here / name for name in device_code), COMMITTED):
        digest.update(path.read_bytes())
    for layout in LAYOUTS:
        digest.update(repr(sorted(format_constants("", record_layout(*layout)).items())).encode())
    return digest.hexdigest()


def measure_all(wanted: Sequence[Variant], jobs: int = 2) -> dict[str, Taken]:
    """Name → what it takes, compiled in `jobs` processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(zip((variant.name for variant in wanted), pool.map(measure, wanted), strict=True))


def read_table(path: Path) -> tuple[dict[str, str], dict[str, Taken]]:
    """What a table was made with (triton, fingerprint), and its rows."""
    table = json.loads(path.read_text(encoding="utf-8"))
    rows = {name: Taken(*numbers) for name, numbers in table["variants"].items()}
    return {"triton": table["triton"], "fingerprint": table["fingerprint"]}, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ARCHITECTURES, action="append", help="this architecture (may be repeated)")
    parser.add_argument("--write", type=Path, help="keep the table in this file")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    given = parser.parse_args(arguments)
    wanted = list(variants(given.only or ARCHITECTURES))
    rows = measure_all(wanted, given.jobs)
    status = 0
    for variant in wanted:
        taken = rows[variant.name]
        reason = excess(variant, taken)
        status |= reason is not None
        numbers = f"shared {taken.shared:6}  registers {taken.registers:3}  stack {taken.stack:4}"
        print(f"{variant.name:44} {numbers}  {reason or ''}", flush=True)
    if given.write is not None and status == 0:
        lines = ",\n".join(f'  "{n}": [{t.shared}, {t.registers}, {t.stack}]' for n, t in rows.items())
        head = f' "triton": "{triton.__version__}",\n "fingerprint": "{fingerprint()}"'
        columns = ' "columns": ["shared bytes a block", "registers a thread", "stack bytes a thread"]'
        given.write.write_text(f'{{\n{head},\n{columns},\n "variants": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
