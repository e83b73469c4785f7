# SPDX-License-Identifier: Apache-2.0
"""The forward of one layer: vLLM's tensors, as they are, handed to `sparse_mla_attention`.

What vLLM's own sparse backends do around their kernels is not here because the call does it: positions become slots
where keys are read (no converted copy of the indices), the two parts of a query are read from where they lie (no
concatenation), any number of heads is served (no padding), a record is dequantised where it is used (no bf16 copy of a
prefill's context), and every row has its log-sum-exp. So nothing is taken from vLLM's workspace.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from sparsemla.attention import sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat
from sparsemla.integrations.vllm.backend import FP8_DS_MLA, LATENT, ROTARY
from sparsemla.integrations.vllm.context import gathered_cache, gathers_prefills, longest_shard, reserve
from sparsemla.integrations.vllm.metadata import SparseMLAMetadata
from sparsemla.integrations.vllm.versions import UnsupportedVllmError
from sparsemla.serving.backend import Query


class SparseMLAImpl(MLAAttentionImpl[SparseMLAMetadata]):
    """Attention of one layer; see vLLM's base class for the arguments.

    Args:
        topk_indices_buffer: (max_num_batched_tokens, topk) int32, which the indexer of this layer or of an earlier one
            fills with positions in each row's request. With an indexer its buffer counts, whichever that is at the
            time.
        index_group_builder: how vLLM's own backends share converted indices over layers. Nothing is converted here.

    Raises:
        ValueError: what is asked for is not sparse attention over a cache that is served.
        UnsupportedVllmError: a host-resident cache, or parallelism that this vLLM's layer cannot do.
    """

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_pcp: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    masked_mha_available: bool = False
    """0.33.0's layer asks where it has dense prefill metadata; there is none."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        for name, given in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
            ("kv_sharing_target_layer_name", kv_sharing_target_layer_name),
        ):
            if given:
                raise ValueError(f"{name}: got {given!r}, accepted is None")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type: got {attn_type!r}, accepted is {AttentionType.DECODER.value!r}")
        if (kv_lora_rank, head_size) not in ((LATENT, LATENT), (LATENT, LATENT + ROTARY)):
            raise ValueError(
                f"kv_lora_rank, head_size: got {kv_lora_rank}, {head_size}, accepted are {LATENT}, {LATENT} and "
                f"{LATENT}, {LATENT + ROTARY}"
            )
        if kv_cache_dtype not in ("auto", "bfloat16", FP8_DS_MLA):
            raise ValueError(f"kv_cache_dtype: got {kv_cache_dtype!r}, accepted are 'auto', 'bfloat16', {FP8_DS_MLA!r}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_head_dim
        self.v_head_dim = v_head_dim
        self.kv_b_proj = kv_b_proj
        self.format = KVFormat.FP8_DS_MLA if kv_cache_dtype == FP8_DS_MLA else KVFormat.BF16
        self._indexer = indexer
        self._buffer = topk_indices_buffer
        self._wrapped: tuple[tuple[object, ...], PagedKVCache] | None = None
        self._no_rotary: torch.Tensor | None = None
        self._gather_rows = self._longest_gather()

    @property
    def topk_indices_buffer(self) -> torch.Tensor | None:
        """(rows, topk) int32; looked up at every use, as vLLM repoints the indexers of a draft model after this."""
        return self._buffer if self._indexer is None else self._indexer.topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor | None) -> None:
        self._indexer, self._buffer = None, buffer

    def record_logical_topk_ready(self) -> None:
        """0.33.0's layer says when the indices are there; the stream's order is enough here."""

    def reserve_workspace(self) -> None:
        """vLLM's memory profile: nothing, but for `context.py`."""
        if self._gather_rows and self.topk_indices_buffer is not None:
            record = 656 if self.format is KVFormat.FP8_DS_MLA else 2 * self.head_size
            reserve(record, self._gather_rows, self.dcp_world_size, self.topk_indices_buffer.device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend the first rows of a step.

        Args:
            q: (T, H, columns) bfloat16, or the pair (latent part (T, H, 512), rotary part (T, H, 64 or 0)). H counts
                the heads that vLLM gathered over ranks under decode context parallelism.
            kv_c_and_k_pe_cache: (pages, records, 656) bytes or (pages, records, columns) bfloat16; pages may be
                strided.
            attn_metadata: of this step.
            layer: not used.

        Returns:
            (T, H, 512) bfloat16, rows without keys are 0; and under decode context parallelism this rank's log-sum-exp
            (T, H) float32, natural logarithm, -inf for a row without keys here. Under prefill and decode context
            parallelism together only decode rows have one, the others are finished.

        Raises:
            ValueError: shapes that do not go together, or no buffer of indices.
        """
        buffer = self.topk_indices_buffer
        if buffer is None:
            raise ValueError("topk_indices_buffer: got None, accepted is the indexer's (rows, topk) int32")
        cache = self._cache(kv_c_and_k_pe_cache)
        query = self._query(q, cache)
        rows = (query if isinstance(query, torch.Tensor) else query[0]).shape[0]
        sharded = self.dcp_world_size > 1
        shard = (self.dcp_rank, self.dcp_world_size, attn_metadata.cp_kv_cache_interleave_size) if sharded else None
        if attn_metadata.gathers and sharded:
            return self._gathered(query, cache, buffer, attn_metadata, shard, rows)
        out, lse = sparse_mla_attention(
            query,
            cache,
            buffer[:rows],
            softmax_scale=self.scale,
            block_table=attn_metadata.block_table,
            request_ids=attn_metadata.req_id_per_token[:rows],
            context_shard=shard,
        )
        return out, lse if self.need_to_return_lse_for_decode else None

    def _gathered(
        self,
        query: Query,
        cache: PagedKVCache,
        indices: torch.Tensor,
        metadata: SparseMLAMetadata,
        shard: tuple[int, int, int] | None,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode rows over this rank's records, prefill rows over all ranks'."""
        nope = query if isinstance(query, torch.Tensor) else query[0]
        heads = nope.shape[1]
        out = nope.new_empty((rows, heads, LATENT))
        decodes = slice(0, metadata.num_decode_tokens)
        lse = torch.empty((metadata.num_decode_tokens, heads), dtype=torch.float32, device=nope.device)
        if metadata.num_decode_tokens:
            sparse_mla_attention(
                _rows(query, decodes),
                cache,
                indices[decodes],
                softmax_scale=self.scale,
                block_table=metadata.block_table,
                request_ids=metadata.req_id_per_token[decodes],
                context_shard=shard,
                out=out[decodes],
                lse=lse,
            )
        for gather in metadata.gathers:
            sparse_mla_attention(
                _rows(query, gather.tokens),
                gathered_cache(cache, gather, self.dcp_world_size, self._all_gather),
                indices[gather.tokens],
                softmax_scale=self.scale,
                block_table=gather.block_table,
                request_ids=gather.request_ids,
                out=out[gather.tokens],
            )
        out[metadata.gathers[-1].tokens.stop :].zero_()
        return out, lse

    def _all_gather(self, pool: torch.Tensor, shard: torch.Tensor) -> None:
        """Every rank's records, among the ranks that share the cache."""
        from vllm.distributed.parallel_state import get_dcp_group

        torch.distributed.all_gather_into_tensor(pool, shard, group=get_dcp_group().device_group)

    def _cache(self, data: torch.Tensor) -> PagedKVCache:
        """The layer's cache as ours: the same bytes. A layer has one, so the checks run once."""
        key = (data.data_ptr(), data.shape, data.stride(), data.dtype)
        if self._wrapped is None or self._wrapped[0] != key:
            self._wrapped = key, PagedKVCache.wrap(data, self.format)
        return self._wrapped[1]

    def _query(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], cache: PagedKVCache) -> Query:
        """The query with the columns that records have: zeros where a model has no rotary ones and its cache does."""
        if isinstance(q, torch.Tensor):
            if q.shape[-1] == cache.d_qk or cache.layout.d_rope == 0:
                return q
            nope = q
        else:
            nope, rope = q
            if rope.shape[-1]:
                return nope, rope
            if cache.layout.d_rope == 0:
                return nope, None
        if self._no_rotary is None or self._no_rotary.device != nope.device:
            self._no_rotary = nope.new_zeros(ROTARY)
        return nope, self._no_rotary.expand(*nope.shape[:2], ROTARY)

    def _longest_gather(self) -> int:
        """Records in a gather at most, 0 where nothing is gathered. Checks what the configuration asks for."""
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        if getattr(config.attention_config, "hisparse_config", None) is not None:
            raise UnsupportedVllmError(
                "sparsemla: got hisparse_config (a cache in host memory), accepted is None: a cache on the device"
            )
        return longest_shard(config) if gathers_prefills(config) else 0


def _rows(query: Query, rows: slice) -> Query:
    if isinstance(query, torch.Tensor):
        return query[rows]
    nope, rope = query
    return nope[rows], None if rope is None else rope[rows]
