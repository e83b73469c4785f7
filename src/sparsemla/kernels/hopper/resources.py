# SPDX-License-Identifier: Apache-2.0
"""What the compiled variants take of a multiprocessor, read from their machine code without a GPU.

`python -m sparsemla.kernels.hopper.resources` prints the table of every variant; `--write FILE` keeps it. A test
compiles every variant and
compares with the committed table, so that a change that spills or outgrows shared memory is seen where it is made.
Needs `cuobjdump` and `nvdisasm` (packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm) besides the compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sparsemla.formats import every_layout
from sparsemla.kernels.hopper import CLUSTERS, TILE_HEADS
from sparsemla.kernels.hopper.build import KINDS, Variant, compile_variant

VARIANTS: tuple[Variant, ...] = tuple(
    Variant(kind, heads, rope, cluster)
    for kind, rope in dict.fromkeys((KINDS[layout.format], layout.d_rope > 0) for layout in every_layout())
    for heads in TILE_HEADS
    for cluster in CLUSTERS
)
"""Every variant that `choose` can pick."""


def tool(name: str) -> Path | None:
    """A CUDA binary tool: on PATH, or where its package puts it; None when it is in neither place."""
    found = shutil.which(name)
    if found:
        return Path(found)
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / name
    return packaged if packaged.exists() else None


def measure(variant: Variant) -> dict[str, int]:
    """Compiles a variant and reads its resources.

    Returns:
        ``registers`` a thread at launch, ``stack`` bytes a thread, ``shared`` bytes a CTA, ``spills`` (instructions
        that touch the stack anywhere), ``matrix`` (warpgroup matrix instructions) and ``waits`` (places that wait for
        them: the assembler waits after each one when registers are short, and the compiler hides its note).

    Raises:
        RuntimeError: the binary tools are not there.
    """
    dump = tool("cuobjdump")
    disassembler = tool("nvdisasm")
    if dump is None or disassembler is None:
        raise RuntimeError("cuobjdump and nvdisasm are needed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    code = compile_variant(variant)
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "kernel.cubin"
        image.write_bytes(code.cubin)
        environment = {**os.environ, "PATH": f"{disassembler.parent}{os.pathsep}{os.environ.get('PATH', '')}"}

        def ask(option: str) -> str:
            command = [str(dump), option, str(image)]
            return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

        usage, listing = ask("-res-usage"), ask("--dump-sass")
    facts = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    return {
        "registers": int(facts["REG"]),
        "stack": int(facts["STACK"]),
        "shared": code.shared_bytes,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        "matrix": len(re.findall(r"\bHGMMA\b", listing)),
        "waits": len(re.findall(r"\bWARPGROUP\.DEPBAR\b", listing)),
    }


def table(variants: tuple[Variant, ...] = VARIANTS, processes: int = 2) -> dict[str, dict[str, int]]:
    """Resources of variants by name."""
    with ProcessPoolExecutor(processes) as pool:
        return {v.name: facts for v, facts in zip(variants, pool.map(measure, variants), strict=True)}


def main() -> None:
    """Prints or writes the table of every variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file to keep the table in")
    given = parser.parse_args()
    text = json.dumps(table(), indent=1, sort_keys=True) + "\n"
    if given.write:
        given.write.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
