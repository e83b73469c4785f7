# SPDX-License-Identifier: Apache-2.0
"""A small matrix of the Hopper kernel, for compute-sanitizer.

Run: ``compute-sanitizer --tool memcheck python benchmarks/sanitize.py`` and ``compute-sanitizer --tool racecheck python
benchmarks/sanitize.py --checked``. ``--checked`` takes the variants in which every lane arrives at barriers itself:
racecheck does not follow the order from a warp's lanes through their meeting to the one lane that arrives for them,
and reports accesses that are ordered (run it without ``--checked`` to see them).

Each line is a case: output error and largest LSE difference against the float64 oracle. Exit status 1 where one is
beyond 2.2e-3 or 1e-5.
"""

from __future__ import annotations

import argparse
import sys

import torch

from sparsemla import PagedKVCache, reference_attention, sparse_mla_attention
from sparsemla.formats import KVFormat
from sparsemla.kernels import hopper


def main() -> int:
    """Runs the matrix; the exit status says whether every answer is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checked", action="store_true", help="variants for racecheck")
    parser.add_argument("--formats", default=",".join(fmt.value for fmt in KVFormat), help="cache formats")
    parser.add_argument("--heads", default="8,64", help="head counts, each a tile of its own: 8, 16, 32, 64")
    given = parser.parse_args()
    hopper.CHECKED = given.checked
    choose, wrong = hopper.choose, 0
    for name in given.formats.split(","):
        cache = PagedKVCache.allocate(16, 64, KVFormat.parse(name))
        cache.write(torch.arange(1024), torch.randn(1024, cache.d_qk).bfloat16())
        on_device = PagedKVCache.wrap(cache.data.cuda(), cache.format, 64)
        for heads in map(int, given.heads.split(",")):
            for rows, cluster in ((2, 1), (1, 2)):
                q = torch.randn(rows, heads, cache.d_qk).bfloat16()
                indices = torch.randint(0, 1024, (rows, 200), dtype=torch.int32)
                indices[torch.rand(rows, 200) < 0.2] = -1
                picked = (heads, cluster)
                hopper.choose = lambda *_args, _picked=picked, **_options: _picked
                out, lse = sparse_mla_attention(q.cuda(), on_device, indices.cuda(), softmax_scale=cache.d_qk**-0.5)
                hopper.choose = choose
                want, want_lse = reference_attention(q, cache, indices, softmax_scale=cache.d_qk**-0.5)
                error = float((out.cpu().double() - want).norm() / want.norm())
                beyond = float((lse.cpu().double() - want_lse).abs().max())
                wrong += not (error <= 2.2e-3 and beyond <= 1e-5 * float(want_lse.abs().max()))
                print(
                    f"{name} heads={heads} rows={rows} cluster={cluster} error={error:.2e} lse={beyond:.2e}", flush=True
                )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
