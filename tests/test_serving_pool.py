# SPDX-License-Identifier: Apache-2.0
"""A pool that grows: by whole pages, no record moves, earlier caches stay valid."""

from __future__ import annotations

import pytest
import torch

from sparsemla.formats import KVFormat
from sparsemla.serving.pool import GrowingPool


@pytest.mark.parametrize("fmt", list(KVFormat))
def test_growing_moves_nothing(fmt: KVFormat, device: torch.device) -> None:
    pool = GrowingPool(5000, 64, fmt, device=device)
    assert pool.cache.num_pages == 0
    first = pool.extend(2)
    slots = torch.arange(100, device=device)
    values = torch.randn(100, first.d_qk, device=device)
    first.write(slots, values)
    stored, address = first.read(slots), first.data.data_ptr()
    second = pool.extend(3000)
    assert second.num_pages == 3002 and second.data.data_ptr() == address
    assert torch.equal(second.read(slots), stored)
    last = torch.arange(3002 * 64 - 4, 3002 * 64, device=device)
    assert not second.gather_bytes(last).any()
    second.write(last, values[:4])
    second.write(slots[:1], values[1:2])
    assert torch.equal(second.read(last), stored[:4])
    assert torch.equal(first.read(slots[:1]), second.read(slots[:1]))  # the earlier cache is a view of the same pages
    assert pool.pages * pool.page_bytes <= pool.committed_bytes


def test_memory_outlives_the_pool_while_a_cache_needs_it(device: torch.device) -> None:
    pool = GrowingPool(4, 16, "fp8_ds_mla", device=device)
    cache = pool.extend(4)
    del pool
    slots = torch.arange(64, device=device)
    cache.write(slots, torch.ones(64, 576, device=device))
    assert cache.read(slots).isfinite().all()


def test_address_space_is_not_memory() -> None:
    pool = GrowingPool(1 << 23, 64, "fp8_ds_mla")  # 352 GB of addresses
    cache = pool.extend(10)
    last = torch.tensor([cache.num_slots - 1])
    cache.write(last, torch.ones(1, 576))
    assert cache.read(last).max() == 1


def test_refusals() -> None:
    with pytest.raises(ValueError, match="max_pages: got 0"):
        GrowingPool(0, 64, "bf16")
    pool = GrowingPool(4, 64, "bf16")
    pool.extend(3)
    for pages in (-1, 2):
        with pytest.raises(ValueError, match=f"pages: got {pages}, accepted are 0 to 1"):
            pool.extend(pages)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            GrowingPool(4, 64, "bf16", device="cuda")


@pytest.mark.gpu
def test_memory_comes_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    pool = GrowingPool(100_000, 64, "fp8_ds_mla", device="cuda")
    pool.extend(50_000)
    assert before - torch.cuda.mem_get_info()[0] >= 50_000 * 64 * 656
    del pool
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)
