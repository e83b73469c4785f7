# SPDX-License-Identifier: Apache-2.0
"""A request's records, page after page, laid out as one run of bytes to be sent."""

from __future__ import annotations

import torch

from sparsemla.cache import PagedKVCache

_WORD = 8
"""Bytes of the int64 words pages are copied in."""


def in_whole_pages(cache: PagedKVCache, width: int) -> bool:
    """Whether a page's bytes are its records one after the other, each of `width` bytes, so that pages copy whole."""
    return not cache.layout.scales_after_page and cache.layout.record_bytes == width


def lay_out_pages(cache: PagedKVCache, pages: torch.Tensor, target: torch.Tensor) -> None:
    """Copies pages of a pool, in the order of `pages`, in one launch and without memory of its own.

    Args:
        cache: a pool that is `in_whole_pages`.
        pages: (n,) int32 on the cache's device; what names no page is read from the pool's ends.
        target: (n · block_size, record_bytes) uint8, contiguous, written.
    """
    words = cache.block_size * cache.layout.record_bytes // _WORD
    strides = (cache.page_stride_bytes // _WORD, 1)
    source = cache.byte_view.view(torch.int64)
    source = source.as_strided((cache.num_pages, words), strides, source.storage_offset())
    into = target.view(-1).view(torch.int64).view(pages.shape[0], words)
    torch.index_select(source, 0, pages.clamp(0, cache.num_pages - 1), out=into)
