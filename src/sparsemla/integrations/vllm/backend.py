# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks a backend before a server starts: name, classes, what it can serve, the shape of a layer's cache.

Importing this module with a vLLM that is not served raises `UnsupportedVllmError`: what one sees who asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from sparsemla.formats import KVFormat, record_layout
from sparsemla.integrations.vllm.plugin import NAME
from sparsemla.integrations.vllm.versions import installed

if TYPE_CHECKING:
    from sparsemla.integrations.vllm.impl import SparseMLAImpl
    from sparsemla.integrations.vllm.metadata import SparseMLAMetadataBuilder

RELEASE = installed()

FP8_DS_MLA = "fp8_ds_mla"
"""vLLM's name of the 656-byte record."""

PAGE = 64
"""Records of a page, or a multiple: what vLLM's indexer, which shares the block table, accepts."""

LATENT = 512
ROTARY = 64


class SparseMLABackend(AttentionBackend):
    """The backend ``SPARSEMLA``: sparse MLA over vLLM's own paged caches, for prefill, decode and mixed batches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", FP8_DS_MLA]
    """Not "fp8": vLLM turns that into fp8_ds_mla for its own backends by name, and keeps per-tensor fp8 for others."""

    @staticmethod
    def get_name() -> str:
        """The name in logs and metrics."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        """The forward of a layer."""
        from sparsemla.integrations.vllm.impl import SparseMLAImpl

        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        """The metadata of a step."""
        from sparsemla.integrations.vllm.metadata import SparseMLAMetadataBuilder

        return SparseMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(pages, records, bytes or columns) of a layer's cache. 0.33.0 takes it from its cache specification."""
        width = record_layout(KVFormat.FP8_DS_MLA).record_bytes if cache_dtype_str == FP8_DS_MLA else head_size
        return num_blocks, block_size, width

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any multiple of 64 records."""
        return [MultipleOf(PAGE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Columns of a key."""
        return [LATENT + ROTARY, LATENT]

    @classmethod
    def is_mla(cls) -> bool:
        """It is."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """It is."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """8.0 and later: bfloat16 matrix units."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why these do not go together, or None."""
        if head_size != LATENT:
            return None
        if kv_cache_dtype == FP8_DS_MLA and not RELEASE.rope_free_fp8:
            return f"vLLM {RELEASE.version} writes no fp8_ds_mla records without rotary columns; use a bf16 cache"
        from vllm.config import get_current_vllm_config

        model = get_current_vllm_config().model_config
        if model is not None and getattr(model.hf_text_config, "qk_rope_head_dim", ROTARY) != 0:
            return f"keys of {LATENT} columns are served for models without rotary columns only"
        return None
