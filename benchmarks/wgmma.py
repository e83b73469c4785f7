# SPDX-License-Identifier: Apache-2.0
"""What a warpgroup matrix product (WGMMA) costs on Hopper: cycles until the next one of the same warpgroup.

Run: ``python benchmarks/wgmma.py`` on a Hopper GPU with Triton (its ptxas assembles) and cuda-bindings. One CTA an SM;
1 to 3 warpgroups do the same products, f16, 64 x N x 16, a loop of two groups of `products` with `pending` groups left
running. RS: first operand from registers, SS: both from shared memory. ``waits 72 of 72``: places that wait, of
products in the machine code; as many as products means that the assembler serialised them (its note C7511).
``--assemble`` needs no GPU. The table of docs/kernel-log.md is from an earlier form of this script; this form has been
assembled only.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

LOOPS = 200
SHARED = 200 * 1024
DESCRIPTOR = (1 << 62) | (64 << 32) | (1 << 16)
"""128-byte swizzle, 1024 bytes between groups of eight rows (PTX ISA, matrix descriptor)."""


def product(kind: str, n: int, k: int) -> str:
    """One instruction; operands rotate over four places."""
    accumulators = ",".join(f"%acc{i}" for i in range(n // 2))
    first = "{" + ",".join(f"%a{4 * (k % 4) + i}" for i in range(4)) + "}" if kind == "RS" else f"%ad{k % 4}"
    transposes = ", 0" if kind == "RS" else ", 0, 0"
    shape = f"m64n{n}k16.f32.f16.f16"
    return f"wgmma.mma_async.sync.aligned.{shape} {{{accumulators}}}, {first}, %bd{k % 4}, 1, 1, 1{transposes};"


def source(kind: str, n: int, warpgroups: int, products: int, pending: int) -> str:
    """PTX of one kernel: thread 0 of each warpgroup leaves its cycles at out[warpgroup]."""
    lines = [
        ".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 sm[];",
        f".visible .entry k(.param .u64 outp)\n.maxntid {128 * warpgroups}, 1, 1\n.minnctapersm 1\n{{",
        ".reg .pred %p, %q; .reg .b32 %it, %tt, %wg, %s, %sb; .reg .b64 %t0, %t1, %o, %x;",
        ".reg .f32 %acc<256>; .reg .b32 %a<16>; .reg .b64 %ad<4>, %bd<4>; .reg .f32 %sum;",
        "mov.u32 %tt, %tid.x; mov.u32 %sb, sm; shr.u32 %wg, %tt, 7;",
        *(f"mov.u32 %a{i}, 0;" for i in range(16)),
        *(f"mov.f32 %acc{i}, 0f00000000;" for i in range(256)),
        "mov.u32 %it, %tt;\nZERO: shl.b32 %s, %it, 4; add.u32 %s, %s, %sb; st.shared.v4.b32 [%s], {%a0,%a0,%a0,%a0};",
        f"add.u32 %it, %it, {128 * warpgroups}; setp.lt.u32 %p, %it, 10240; @%p bra ZERO;",
        "fence.proxy.async; bar.sync 0;",
    ]
    for k in range(4):
        for name, offset in (("bd", 0), ("ad", 81920)):
            lines.append(f"add.u32 %s, %sb, {offset + 32 * k}; shr.u32 %s, %s, 4; cvt.u64.u32 %x, %s;")
            lines.append(f"or.b64 %{name}{k}, %x, {DESCRIPTOR};")
    lines.append("mov.u32 %it, 0; mov.u64 %t0, %clock64;\nLOOP: wgmma.fence.sync.aligned;")
    for _ in range(2):
        lines += [product(kind, n, k) for k in range(products)]
        lines.append(f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {pending};")
    lines += [
        f"add.u32 %it, %it, 1; setp.lt.u32 %p, %it, {LOOPS}; @%p bra LOOP;",
        "wgmma.wait_group.sync.aligned 0; mov.u64 %t1, %clock64; sub.u64 %t1, %t1, %t0; mov.f32 %sum, 0f00000000;",
        *(f"add.f32 %sum, %sum, %acc{i};" for i in range(n // 2)),
        "ld.param.u64 %o, [outp]; mul.wide.u32 %x, %wg, 8; add.u64 %o, %o, %x;",
        "setp.gt.f32 %q, %sum, 0f3F000000; @%q st.global.u64 [%o+64], %t0;",
        "and.b32 %s, %tt, 127; setp.eq.u32 %p, %s, 0; @%p st.global.u64 [%o], %t1; ret;\n}",
    ]
    return "\n".join(lines)


def assemble(text: str) -> tuple[bytes, str]:
    """Machine code, and how many waits and products it holds."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        ptx.write_text(text)
        subprocess.run([tools / "ptxas", "-arch=sm_90a", "-o", cubin, ptx], check=True)
        listing = subprocess.run(
            [tools / "cuobjdump", "--dump-sass", cubin],
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": str(tools)},
        ).stdout
        waits, count = (len(re.findall(name, listing)) for name in (r"WARPGROUP\.DEPBAR", r"\bHGMMA\b"))
        return cubin.read_bytes(), f"{waits} of {count}"


def cycles(code: bytes, warpgroups: int, products: int) -> float:
    """Cycles a product, measured on the current GPU."""
    import torch
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(result[0].name)
        return result[1] if len(result) > 1 else None

    out = torch.zeros(32, dtype=torch.int64, device="cuda")
    function = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(code)), b"k"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, attribute, SHARED))
    count = torch.cuda.get_device_properties().multi_processor_count
    for _ in range(3):
        arguments = ((out.data_ptr(),), (ctypes.c_void_p,))
        checked(driver.cuLaunchKernel(function, count, 1, 1, 128 * warpgroups, 1, 1, SHARED, 0, arguments, 0))
        torch.cuda.synchronize()
    return int(out[:warpgroups].max()) / (LOOPS * 2 * products)


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assemble", action="store_true", help="only assemble and count the waits: needs no GPU")
    given = parser.parse_args()
    cases = [(kind, n, w, 4, 0) for n in (8, 16, 32, 64, 128, 256) for kind in ("RS", "SS") for w in (1, 2, 3)]
    cases = [case for case in cases if case[1] < 256 or case[2] < 3]  # their accumulators would not fit
    cases += [
        (kind, n, w, p, q) for n in (16, 64) for kind in ("RS", "SS") for w in (1, 2) for p, q in ((36, 0), (4, 1))
    ]
    for kind, n, warpgroups, products, pending in cases:
        code, waits = assemble(source(kind, n, warpgroups, products, pending))
        what = f"{kind} n={n:3d} warpgroups={warpgroups} products={products:2d} pending={pending} waits {waits}"
        print(what if given.assemble else f"{what} {cycles(code, warpgroups, products):6.1f} cycles", flush=True)


if __name__ == "__main__":
    main()
