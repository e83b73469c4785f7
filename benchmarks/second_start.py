# SPDX-License-Identifier: Apache-2.0
"""How long a process takes to its first result on a GPU. Run it twice: the second start finds the kernel on disk.

Run: ``python benchmarks/second_start.py``. Prints the seconds of each step; `first call` includes what the kernel's
registry imports, loading the machine code, and waiting for the answer (4 rows, 64 heads, topk 2048).
"""

from __future__ import annotations

import time

begin = time.time()
import torch  # noqa: E402

torch_there = time.time()
from sparsemla import KVFormat, PagedKVCache, sparse_mla_attention  # noqa: E402

ours_there = time.time()
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
context = time.time()
cache = PagedKVCache.allocate(64, 64, KVFormat.FP8_DS_MLA, device="cuda")
cache.write(torch.arange(4096, device="cuda"), torch.randn(4096, 576, device="cuda").bfloat16())
q = torch.randn(4, 64, 576, device="cuda").bfloat16()
indices = torch.randint(0, 4096, (4, 2048), device="cuda", dtype=torch.int32)
torch.cuda.synchronize()
inputs = time.time()
sparse_mla_attention(q, cache, indices, softmax_scale=0.04)
torch.cuda.synchronize()
print(
    f"import torch {torch_there - begin:.2f}, import sparsemla {ours_there - torch_there:.2f}, "
    f"CUDA context {context - ours_there:.2f}, inputs {inputs - context:.2f}, first call {time.time() - inputs:.2f} s"
)
