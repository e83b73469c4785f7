# SPDX-License-Identifier: Apache-2.0
"""Batches as vLLM hands them to a backend, for the tests and the benchmark of its plugin. Needs vllm's Python files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, ScaleStyle
from sparsemla.serving.metadata import local_length

BLOCK = 64
TOPK = 96


def vllm_config(
    *,
    heads: int = 16,
    max_model_len: int = 4096,
    max_tokens: int = 128,
    max_seqs: int = 16,
    topk: int = TOPK,
    spec_tokens: int = 0,
    dcp: int = 1,
    pcp: int = 1,
    interleave: int = 1,
    rotary: int = 64,
    cache_dtype: str = "fp8_ds_mla",
    **attention: Any,
) -> Any:
    """What attention backends read of a VllmConfig. A real one wants a model on disk and the server's packages."""
    text = SimpleNamespace(
        qk_rope_head_dim=rotary,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        v_head_dim=128,
        q_lora_rank=1536,
        index_topk=topk,
    )
    speculative = SimpleNamespace(num_speculative_tokens=spec_tokens, parallel_drafting=False) if spec_tokens else None
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=interleave,
            tensor_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            hf_text_config=text,
            hf_config=text,
            dtype=torch.bfloat16,
            get_num_attention_heads=lambda _: heads,
        ),
        attention_config=SimpleNamespace(hisparse_config=None, sparse_mla_force_mqa=True, **attention),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(prefill_backend=None)}, custom_ops=[]
        ),
        use_v2_model_runner=True,
    )


@contextmanager
def context_group(rank: int, world: int) -> Iterator[None]:
    """vLLM's group of the ranks that share the cache, as a layer finds it when it is made."""
    before = parallel_state._DCP
    parallel_state._DCP = (
        SimpleNamespace(world_size=world, rank_in_group=rank, device_group=None) if world > 1 else None
    )
    try:
        yield
    finally:
        parallel_state._DCP = before


def cache_spec(head_size: int, cache_dtype: str, block_size: int = BLOCK) -> MLAAttentionSpec:
    """vLLM's specification of a layer's cache."""
    packed = cache_dtype == "fp8_ds_mla"
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=head_size,
        dtype=torch.uint8 if packed else torch.bfloat16,
        cache_dtype_str=cache_dtype,
    )


def make_impl(
    backend: Any, config: Any, buffer: torch.Tensor | None, *, heads: int, scale: float, rank: int = 0, **changes: Any
) -> Any:
    """A layer's impl, made as vLLM's MLAAttention makes it, but for `changes`."""
    text, parallel = config.model_config.hf_text_config, config.parallel_config
    given: dict[str, Any] = {
        "num_heads": heads,
        "head_size": 512 + text.qk_rope_head_dim,
        "scale": scale,
        "num_kv_heads": 1,
        "attn_type": "decoder",
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": text.qk_rope_head_dim,
        "qk_head_dim": 128 + text.qk_rope_head_dim,
        "v_head_dim": 128,
        "topk_indices_buffer": buffer,
        "indexer": None,
    }
    given |= dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_b_proj"))
    given |= {"kv_sharing_target_layer_name": None, **changes}
    with set_current_vllm_config(config), context_group(rank, parallel.decode_context_parallel_size):
        return backend.get_impl_cls()(**given)


def make_builder(backend: Any, config: Any, spec: Any, device: torch.device | str = "cpu") -> Any:
    """The metadata builder of the layers of a kind."""
    with set_current_vllm_config(config):
        return backend.get_builder_cls()(spec, ["layer"], config, torch.device(device))


def common_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    *,
    padded_rows: int | None = None,
    padded_requests: int | None = None,
    prefilling: Sequence[bool] | None = None,
    request_names: Sequence[int] | None = None,
    most_shards: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> CommonAttentionMetadata:
    """vLLM's description of a step: padding requests have no rows, padding rows come after all requests."""
    requests = len(query_lens) if padded_requests is None else padded_requests
    lens = [*query_lens, *[0] * (requests - len(query_lens))]
    ends = [*seq_lens, *[0] * (requests - len(seq_lens))]
    starts = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
    rows = int(starts[-1]) if padded_rows is None else padded_rows
    sequence = torch.tensor(ends, dtype=torch.int32)
    more: dict[str, Any] = {}
    if request_names is not None:
        more["req_idx"] = np.asarray(request_names)
    if most_shards is not None:
        more["dcp_local_seq_lens_cpu_upper_bound"] = torch.tensor(most_shards, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=sequence.to(device),
        num_reqs=requests,
        num_actual_tokens=rows,
        max_query_len=max(lens),
        max_seq_len=max(ends),
        block_table_tensor=block_table.to(device),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
        is_prefilling=None if prefilling is None else torch.tensor(prefilling),
        seq_lens_cpu_upper_bound=sequence,
        **more,
    )


@dataclass(frozen=True)
class Requests:
    """Random requests, their keys and what the indexer chose.

    Attributes:
        query_lens, seq_lens: query rows and tokens of each request.
        latents: (tokens, d_qk) bfloat16 of each request.
        indices: (rows, topk) int32 positions, each at most the row's own; -1 or garbage otherwise.
        owners: (rows,) int64.
    """

    query_lens: list[int]
    seq_lens: list[int]
    latents: list[torch.Tensor]
    indices: torch.Tensor
    owners: torch.Tensor

    @classmethod
    def draw(
        cls, query_lens: Sequence[int], seq_lens: Sequence[int], d_qk: int, *, topk: int = TOPK, lonely: bool = True
    ) -> Requests:
        """With `lonely` the last row of the first request has no keys."""
        nothing = torch.tensor([-1, -(2**31), 0x7FC00000, 2**31 - 1])
        owners, rows = [], []
        for request, (rows_here, tokens) in enumerate(zip(query_lens, seq_lens, strict=True)):
            for row in range(rows_here):
                last = tokens - rows_here + row
                chosen = torch.randperm(last + 1)[:topk]
                fill = nothing[torch.randint(0, len(nothing), (topk,))]
                fill[torch.randperm(topk)[: chosen.shape[0]]] = chosen
                rows.append(fill)
                owners.append(request)
        indices = torch.stack(rows).to(torch.int32)
        if lonely:
            indices[query_lens[0] - 1] = -1
        scales = torch.exp2(torch.randint(-2, 3, (d_qk // 32,)).float()).repeat_interleave(32)
        latents = [(torch.randn(tokens, d_qk) * scales).to(torch.bfloat16) for tokens in seq_lens]
        return cls(list(query_lens), list(seq_lens), latents, indices, torch.tensor(owners))

    def store(
        self,
        fmt: KVFormat | str,
        *,
        block_size: int = BLOCK,
        spare_pages: int = 3,
        gap_bytes: int = 0,
        shard: tuple[int, int, int] = (0, 1, 1),
        rope_free: bool = False,
        scale_style: ScaleStyle = "float32",
        device: torch.device | str = "cpu",
    ) -> tuple[PagedKVCache, torch.Tensor]:
        """A rank's cache with its part of every request, and its block table. All other bytes decode to NaN."""
        from generators import pages_for_positions, poisoned_cache

        rank, world, interleave = shard
        lengths = [local_length(tokens, rank, world, interleave) for tokens in self.seq_lens]
        pages = sum(-(-length // block_size) for length in lengths) + spare_pages
        table = pages_for_positions(lengths, block_size, pages)
        width = 576 if rope_free else self.latents[0].shape[1]
        cache = poisoned_cache(pages, block_size, fmt, d_qk=width, page_gap_bytes=gap_bytes)
        for request, latents in enumerate(self.latents):
            position = torch.arange(latents.shape[0])
            held = position // interleave % world == rank
            local = position // (interleave * world) * interleave + position % interleave
            slots = table[request, local[held] // block_size] * block_size + local[held] % block_size
            if rope_free:
                latents = torch.nn.functional.pad(latents, (0, 64))
            cache.write(slots, latents[held], scale_style)
        if torch.device(device).type != "cpu":
            cache = PagedKVCache.wrap(cache.data.to(device), fmt)
        return cache, table


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Ranks' answers by their log-sum-exp, as vLLM's kernel merges them: natural base, NaN and +inf as nothing."""
    lse = torch.stack([part[1].to(torch.float64) for part in parts])
    lse = torch.where(lse.isnan() | (lse == torch.inf), -torch.inf, lse)
    most = lse.amax(dim=0).nan_to_num(neginf=0.0)
    weight = torch.exp(lse - most)
    weight = weight / weight.sum(dim=0).clamp_min(1e-300)
    return sum((part[0].to(torch.float64) * w.unsqueeze(-1) for part, w in zip(parts, weight, strict=True)))  # type: ignore[return-value]
