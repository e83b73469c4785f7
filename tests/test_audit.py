# SPDX-License-Identifier: Apache-2.0
"""Truth tests of `audit.watch`: planted dead buffers are found to the byte, live ones are never accused."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from sparsemla import audit
from sparsemla.audit import Allocation, Ledger


def of(ledger: Ledger, nbytes: int) -> Allocation:
    """The one allocation of that size: planted buffers have sizes of their own."""
    found = [a for a in ledger.allocations if a.nbytes == nbytes]
    assert len(found) == 1, [(a.op, a.nbytes) for a in ledger.allocations]
    return found[0]


def test_never_written(device: torch.device) -> None:
    with audit.watch() as ledger:
        buffer = torch.empty(1001, dtype=torch.float32, device=device)
        other = torch.ones(7, device=device)
    found = of(ledger, 4004)
    assert found.never_written == found.dead == ledger.dead_bytes == 4004
    assert found.site.startswith("tests/test_audit.py:") or "test_audit.py:" in found.site
    assert "test_never_written" in found.site
    assert buffer.numel() == 1001 and bool((other == 1).all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.float64, torch.float8_e4m3fn])
def test_half_used(device: torch.device, dtype: torch.dtype) -> None:
    with audit.watch() as ledger:
        buffer = torch.empty(2000, dtype=dtype, device=device)
        buffer[:800].copy_(torch.ones(800, device=device).to(dtype))
    found = of(ledger, 2000 * dtype.itemsize)
    assert found.never_written == 1200 * dtype.itemsize
    assert found.runs.tolist() == [[800 * dtype.itemsize, 2000 * dtype.itemsize]]


def test_live_buffers_are_not_accused(device: torch.device) -> None:
    torch.manual_seed(3)
    with audit.watch() as ledger:
        x = torch.randn(300, 400, device=device)
        y = torch.empty(300, 300, device=device)
        torch.mm(x, x.t(), out=y)
        z = torch.softmax(y, -1)
        z.mul_(2).add_(1)
        torch.cat([z, y]).sort()
        torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
        torch.full((1000,), float("nan"), device=device)
        torch.zeros(999, device=device, dtype=torch.bool)
        torch.empty(300, 400, device=device).copy_(x)
    # On a GPU, libraries take workspaces of their own past the dispatcher, and leave parts of them unused.
    assert not [a for a in ledger.dead() if a.shape is not None]
    assert device.type == "cuda" or ledger.dead_bytes == ledger.dead_bytes_total == 0


def test_views_slices_and_noncontiguous_storage(device: torch.device) -> None:
    """Bytes of the storage count, whichever view wrote them."""
    with audit.watch() as ledger:
        matrix = torch.empty(64, 100, dtype=torch.float32, device=device)
        matrix[:, :40] = 1.0  # 60 columns of each row stay
        matrix.t()[90:, 3] = 2.0  # the last 10 of row 3 through a transposed view
        torch.empty_strided((10, 8), (16, 1), device=device).zero_()  # 9 gaps of 8 floats
        whole = torch.empty(4, 33, device=device)
        whole.view(-1).as_strided((132,), (1,)).fill_(0.0)
    assert of(ledger, 64 * 400).never_written == 64 * 60 * 4 - 10 * 4
    assert of(ledger, (9 * 16 + 8) * 4).never_written == 9 * 8 * 4
    assert of(ledger, 4 * 33 * 4).never_written == 0


def test_in_place_and_out_arguments(device: torch.device) -> None:
    x = torch.ones(50, device=device)
    with audit.watch() as ledger:
        torch.add(x, x, out=torch.empty(50, device=device))
        torch.add(x, x, out=torch.empty(0, device=device))  # grows inside the operator
        torch.empty(60, device=device)[:50].copy_(x).mul_(3)
        grown = torch.zeros(16, device=device)
        grown.resize_(64)
        grown[16:24] = 1
    assert of(ledger, 240).never_written == 40
    assert of(ledger, 256).never_written == (64 - 24) * 4
    assert [a.never_written for a in ledger.allocations if a.nbytes == 200] == [0, 0]


def test_freed_and_reused_memory_is_judged_anew(device: torch.device) -> None:
    """What the previous owner of an address wrote does not count for the next one, nor the other way round."""
    with audit.watch() as ledger:
        addresses = set()
        for round_ in range(6):
            buffer = torch.empty(1 << 20, dtype=torch.uint8, device=device)
            addresses.add(buffer.data_ptr())
            if round_ % 2 == 0:
                buffer.fill_(7)
            del buffer
    found = [a for a in ledger.allocations if a.nbytes == 1 << 20]
    assert [a.never_written for a in found] == [0, 1 << 20] * 3
    assert all(a.died is not None for a in found[:-1])
    assert ledger.dead_bytes == 1 << 20  # never two at a time
    assert ledger.dead_bytes_total == 3 << 20
    if device.type == "cuda":
        assert len(addresses) < 6  # the allocator was not kept from reusing


def test_memory_is_given_back_during_the_watch() -> None:
    """The audit's own references do not make the code hold more."""
    with audit.watch() as ledger:
        for _ in range(20):
            torch.empty(1 << 20, dtype=torch.uint8).fill_(1)
    assert ledger.peak_bytes < 3 << 20


def test_python_references_keep_a_storage_alive() -> None:
    with audit.watch() as ledger:
        storage = torch.empty(777, dtype=torch.uint8).untyped_storage()
        array = torch.empty(555, dtype=torch.uint8).numpy()
        for _ in range(100):
            torch.ones(3)
        storage.fill_(1)
        array[:] = 1
    assert of(ledger, 777).never_written == 0
    assert of(ledger, 555).never_written == 0
    assert of(ledger, 777).died is None


def test_results_are_unchanged(device: torch.device) -> None:
    def work() -> list[torch.Tensor]:
        torch.manual_seed(11)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device).eval()
        x = torch.randn(2, 9, 32, device=device)
        with torch.no_grad():
            y = layer(x)
        ints = torch.arange(7, device=device) + 1.5  # type promotion of plain numbers
        conv = torch.nn.functional.conv2d(
            torch.randn(1, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
        )
        return [y, ints, conv, y.topk(3).values, y[y > 0], torch.einsum("bij,bkj->bik", y, y)]

    plain = work()
    with audit.watch():
        audited = work()
    for a, b in zip(plain, audited, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_off(context: type) -> None:
    with context(), audit.watch() as ledger:
        out = torch.empty(100)
        out[:50] = torch.ones(50).exp()
    assert of(ledger, 400).never_written == 200
    assert not out.requires_grad


def test_default_device_and_other_modes_stay_in_force() -> None:
    with torch.device("meta"), audit.watch() as ledger:
        unreal = torch.empty(1000)
        real = torch.empty(250, device="cpu")
    assert unreal.device.type == "meta" and real.device.type == "cpu"
    assert [a.nbytes for a in ledger.allocations] == [1000]


def test_tensor_subclasses_pass_through() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(3), torch.ones(3))
    with audit.watch() as ledger:
        result = pair + 1
    assert isinstance(result, TwoTensor) and bool((result.a == 2).all())
    assert sorted(a.nbytes for a in ledger.allocations) == [12, 12]


def test_an_exception_comes_through_and_the_ledger_is_filled() -> None:
    with pytest.raises(KeyError, match="mine"), audit.watch() as ledger:
        torch.empty(333)
        raise KeyError("mine")
    assert of(ledger, 1332).never_written == 1332
    assert not audit.is_watching()


def test_watches_do_not_nest() -> None:
    with audit.watch():
        with pytest.raises(RuntimeError, match="do not nest"), audit.watch():
            pass
        assert audit.is_watching()
    assert not audit.is_watching()


def test_other_threads_are_not_seen_and_not_disturbed() -> None:
    seen = []
    with audit.watch() as ledger:
        thread = threading.Thread(target=lambda: seen.append(torch.empty(4321)))
        thread.start()
        thread.join()
    assert seen and not [a for a in ledger.allocations if a.nbytes == 4 * 4321]
    assert any("other threads" in line for line in ledger.not_covered())


def test_numpy_and_scalars() -> None:
    with audit.watch() as ledger:
        given = torch.from_numpy(np.arange(100.0))
        assert float(given.sum()) == 4950.0
        assert torch.tensor([1, 2]).tolist() == [1, 2]
        torch.empty(())  # four bytes, never written
        torch.empty((), dtype=torch.bool)  # one byte: too little to accuse in one pass
    assert ledger.dead_bytes == 4


def test_rows_group_by_call_site_and_the_ledger_prints() -> None:
    with audit.watch() as ledger:
        kept = [torch.empty(500) for _ in range(3)]
    row = ledger.rows()[0]
    assert (row.count, row.bytes_each, row.bytes_all, row.dead) == (3, 2000, 6000, 6000)
    assert "test_rows_group_by_call_site" in row.who
    assert "6,000 dead of 6,000" in str(ledger)
    assert ledger.as_dict()["totals"]["dead_bytes"] == 6000
    assert len(kept) == 3


@pytest.mark.gpu
def test_side_streams() -> None:
    stream = torch.cuda.Stream()
    with audit.watch() as ledger:
        with torch.cuda.stream(stream):
            work = torch.empty(1 << 22, device="cuda")
            for _ in range(20):
                work.fill_(1.0)
        dead = torch.empty(12_288, device="cuda", dtype=torch.uint8)
    assert of(ledger, 4 << 22).never_written == 0
    assert of(ledger, 12_288).never_written == 12_288
    assert dead.numel()


@pytest.mark.gpu
def test_the_allocators_hook_sees_what_the_dispatcher_does_not() -> None:
    with audit.watch() as ledger:
        raw = torch.cuda.caching_allocator_alloc(123_456)
        torch.cuda.caching_allocator_delete(raw)
    found = of(ledger, 123_456)
    assert found.never_written == 123_456 and "dispatcher" in found.read_note
    assert not [note for note in ledger.notes if "hook" in note]


@pytest.mark.gpu
def test_graph_capture_is_named_not_judged() -> None:
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with audit.watch() as ledger:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = torch.empty(1000, device="cuda")
            y.copy_(x)
        graph.replay()
    assert bool((y == 1).all())
    assert ledger.dead_bytes == 0
    assert any("graph capture" in line for line in ledger.not_covered())
