# SPDX-License-Identifier: Apache-2.0
"""Kernels are there before vLLM captures graphs: one call of every size that it will capture.

A kernel that is first needed inside a capture cannot be compiled or loaded there. vLLM runs a size once before it
captures it in most of its modes, not in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sparsemla.attention import MAX_HEADS, sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat


def heads_of_call(vllm_config: Any) -> int:
    """Query heads of a call: a rank's own, or those that vLLM's layer gathers under decode context parallelism."""
    parallel = vllm_config.parallel_config
    heads = int(vllm_config.model_config.get_num_attention_heads(parallel))
    dcp, pcp = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    if dcp == 1:
        return heads
    if pcp == 1:
        return heads * int(dcp)
    return heads * int(parallel.tensor_parallel_size) if dcp > pcp else heads


def warm_up(vllm_config: Any, kv_cache_spec: Any, device: torch.device) -> list[int]:
    """One call without keys for each size of `cudagraph_capture_sizes`; returns the sizes. Scratch is freed again."""
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", model.hf_config)
    packed = vllm_config.cache_config.cache_dtype == "fp8_ds_mla"
    cache = PagedKVCache.allocate(
        1,
        int(kv_cache_spec.block_size),
        KVFormat.FP8_DS_MLA if packed else KVFormat.BF16,
        d_qk=None if packed else int(kv_cache_spec.head_size),
        device=device,
    )
    dcp = int(vllm_config.parallel_config.decode_context_parallel_size)
    interleave = int(vllm_config.parallel_config.cp_kv_cache_interleave_size)
    heads = min(heads_of_call(vllm_config), MAX_HEADS)
    sizes = _sizes(getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or ())
    for rows in sizes:
        sparse_mla_attention(
            torch.zeros((rows, heads, cache.d_qk), dtype=torch.bfloat16, device=device),
            cache,
            torch.full((rows, int(text.index_topk)), -1, dtype=torch.int32, device=device),
            softmax_scale=1.0,
            block_table=torch.zeros((1, 1), dtype=torch.int32, device=device),
            request_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            context_shard=(0, dcp, interleave) if dcp > 1 else None,
        )
    return sizes


def _sizes(given: Iterable[int]) -> list[int]:
    return sorted({int(size) for size in given})
