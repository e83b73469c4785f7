# SPDX-License-Identifier: Apache-2.0
"""A step's batch for all layers of a kind, built from vLLM's own description of it.

Attention here needs three things of a batch: vLLM's block tables, which request each row belongs to, and how many rows
there are. Everything else is there because vLLM's layer reads it. The request of each row comes from the device's
`query_start_loc`, into a buffer that keeps its address: nothing waits for the device, and a captured graph reads the
current step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from sparsemla.integrations.vllm.context import Gather, gathers_prefills, longest_shard, plan_gathers
from sparsemla.integrations.vllm.warmup import warm_up


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    """One step's batch. Decodes first, prefills after; T rows, of which a CUDA graph's padding is some."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    """T."""
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    """(num_reqs, pages) int32."""
    req_id_per_token: torch.Tensor
    """(T,) int32; num_reqs, which has no row in the block table and so no keys, for a row that pads the batch."""
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    prefill_max_seq_len: int
    block_size: int
    cp_kv_cache_interleave_size: int
    gathers: tuple[Gather, ...] = ()
    """How prefill rows see the other ranks' records, under prefill and decode context parallelism together."""
    topk_tokens: int = 0
    """The longest prefill for which vLLM's layer computes dense attention itself instead of asking the backend
    (0.26.0 compares `prefill_max_seq_len` with it): none."""
    prefill: None = None
    """What dense attention over prefills would need."""
    causal: bool = True


class SparseMLAMetadataBuilder(AttentionMetadataBuilder[SparseMLAMetadata]):
    """Builds `SparseMLAMetadata`; see vLLM's base class for the arguments.

    Raises:
        UnsupportedVllmError: prefill and decode context parallelism together where this vLLM's layer cannot.
    """

    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        self.pcp = parallel.prefill_context_parallel_size > 1
        self.dcp_world = int(parallel.decode_context_parallel_size)
        self.interleave = int(parallel.cp_kv_cache_interleave_size)
        self.gather_rows = longest_shard(vllm_config) if gathers_prefills(vllm_config) else 0
        # Rows of one request may differ in number under context parallelism too: the indices say who sees what.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.rows = torch.arange(rows, dtype=torch.int32, device=device)
        self.request_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        if device.type == "cuda":
            warm_up(vllm_config, kv_cache_spec, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any batch, one size a graph; under prefill context parallelism only decodes, as prefills are exchanged."""
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_BATCH
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMLAMetadata:
        """The step's metadata. Earlier metadata of this builder must not be used afterwards (buffers are shared)."""
        common = common_attn_metadata
        requests, rows = common.num_reqs, common.num_actual_tokens
        decodes, decode_tokens = self._split(common)
        longest = 0
        if decodes < requests:
            bound = common.seq_lens_cpu_upper_bound
            longest = int(bound[decodes:requests].max()) if bound is not None else common.max_seq_len
        metadata = SparseMLAMetadata(
            num_reqs=requests,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=rows,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor[:requests],
            req_id_per_token=self.request_ids[:rows],
            num_decodes=decodes,
            num_prefills=requests - decodes,
            num_decode_tokens=decode_tokens,
            prefill_max_seq_len=longest,
            block_size=self.kv_cache_spec.block_size,
            cp_kv_cache_interleave_size=self.interleave,
        )
        self._write_request_ids(metadata)
        if self.gather_rows and decodes < requests:
            metadata.gathers = plan_gathers(
                common,
                first_request=decodes,
                block_size=self.kv_cache_spec.block_size,
                world=self.dcp_world,
                interleave=self.interleave,
                most_rows=self.gather_rows,
            )
        return metadata

    def update_block_table(
        self, metadata: SparseMLAMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SparseMLAMetadata:
        """The same batch over another group's pages."""
        return replace(metadata, block_table=blk_table[: metadata.num_reqs], slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: SparseMLAMetadata) -> None:
        """Brings the device tensors of `metadata` up to date; may be captured in a graph."""
        self._write_request_ids(metadata)

    def _write_request_ids(self, metadata: SparseMLAMetadata) -> None:
        """The request of row t is the number of requests that end at or before it: padding requests, of no rows, are
        skipped, and rows behind the last request belong to none."""
        torch.searchsorted(
            metadata.query_start_loc[1 : metadata.num_reqs + 1],
            self.rows[: metadata.num_actual_tokens],
            right=True,
            out_int32=True,
            out=metadata.req_id_per_token,
        )

    def _split(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """(requests, rows) that are decodes, as vLLM's prefill context parallelism counts them: it exchanges the
        others. A prefill's short tail is a decode except there."""
        threshold = self.reorder_batch_threshold or 1
        whole = common.num_reqs, common.num_actual_tokens
        if common.max_query_len <= threshold and not self.pcp:
            return whole
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        prefill = starts.diff() > threshold
        if self.pcp and common.is_prefilling is not None:
            prefill = prefill | common.is_prefilling[: common.num_reqs]
        if not bool(prefill.any()):
            return whole
        first = int(prefill.int().argmax())
        return first, int(starts[first])
