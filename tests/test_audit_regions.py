# SPDX-License-Identifier: Apache-2.0
"""Named regions of larger buffers: by hand, and as the serving layer's workspace reports them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sparsemla import audit
from sparsemla.serving.workspace import SharedWorkspace, TensorSpec


def test_nothing_happens_without_a_watch() -> None:
    tensor = torch.ones(10)
    audit.register_region("x", tensor)
    assert bool((tensor == 1).all())


def test_regions_of_an_older_buffer(device: torch.device) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8, device=device)
    with audit.watch() as ledger:
        audit.register_region("dead", buffer[:1000])
        audit.register_region("live", buffer[1024:2048].view(torch.float32))
        audit.register_region("half", buffer[2048:3072].view(torch.bfloat16).view(16, 32))
        buffer[1024:2048].view(torch.float32).fill_(1.0)
        buffer[2048:3072].view(torch.bfloat16).view(16, 32)[:8] = 2.0
    assert [ledger.region(name).never_written for name in ("dead", "live", "half")] == [1000, 0, 512]
    assert ledger.region("half").runs.tolist() == [[512, 1024]]
    assert ledger.dead_bytes == 1512 and ledger.region("dead").inside is None
    assert bool((buffer[3072:] == 0).all())  # what was not handed out keeps its content
    with pytest.raises(KeyError, match="'half'"):
        ledger.region("other")


def test_regions_of_a_watched_buffer_are_not_counted_twice() -> None:
    with audit.watch() as ledger:
        buffer = torch.empty(4096, dtype=torch.uint8)
        buffer[:100] = 1  # written before it is handed out: the buffer's byte is alive, the region's is not
        audit.register_region("a", buffer[:1024])
        buffer[1024:2048] = 2
    assert ledger.region("a").never_written == 1024
    assert ledger.region("a").inside == 0
    assert ledger.allocations[0].never_written == 4096 - 100 - 1024
    assert ledger.dead_bytes == 4096 - 100 - 1024


def test_one_byte_written_in_any_handout_is_alive() -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    with audit.watch() as ledger:
        for part in range(3):
            audit.register_region("a", buffer[:128])
            buffer[part * 16 : part * 16 + 16] = 5
    region = ledger.region("a")
    assert (region.handouts, region.never_written) == (3, 128 - 48)


def test_handing_out_again_keeps_the_content_and_overlaps_end_it() -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    with audit.watch() as ledger:
        audit.register_region("a", buffer[:128])
        buffer[:128] = 5
        audit.register_region("a", buffer[:128])
        assert bool((buffer[:128] == 5).all())
        audit.register_region("b", buffer[64:192])
        assert not bool((buffer[64:192] == 5).any())
        buffer[128:192] = 6
        audit.register_region("a", buffer[:128])
    assert ledger.region("a").never_written == 0
    assert ledger.region("b").never_written == 64
    assert ledger.dead_bytes == 0  # the 64 bytes that b never writes are a's


def workspace(device: torch.device) -> SharedWorkspace:
    shared = SharedWorkspace(device)
    specs = [TensorSpec("query", (8, 100), torch.bfloat16), TensorSpec("prefill_kv", (1000, 576), torch.bfloat16)]
    shared.reserve("attention", specs)
    shared.reserve("indexer", [TensorSpec("gather", (100, 132), torch.uint8)])
    shared.lock()
    return shared


def test_workspace_reservations_report_by_name(device: torch.device) -> None:
    shared = workspace(device)

    def step(prefill: bool) -> torch.Tensor:
        shared.take("indexer")["gather"].fill_(1)
        scratch = shared.take("attention")
        scratch["query"].fill_(1.0)
        if prefill:
            scratch["prefill_kv"].fill_(2.0)
            return scratch["prefill_kv"].sum(dtype=torch.float32) + scratch["query"].sum()
        return scratch["query"].sum()

    for prefill in (False, True):
        with audit.watch() as ledger:
            for _ in range(2):
                step(prefill)
        assert ledger.region("attention/query").never_written == 0
        assert ledger.region("attention/prefill_kv").never_written == (0 if prefill else 1000 * 576 * 2)
        assert ledger.region("attention/prefill_kv").handouts == 2
        # The indexer's bytes lie under the attention's; they are not dead although this user leaves them alone.
        assert ledger.dead_bytes <= ledger.region("attention/prefill_kv").dead

    deep = audit.run(step, (True,), deep=True).ledger
    assert {deep.region(f"attention/{name}").read for name in ("query", "prefill_kv")} == {"read"}
    assert deep.region("indexer/gather").read == "never read"
    assert deep.region("indexer/gather").never_read == 13_200


def test_lanes_have_names_of_their_own() -> None:
    shared = SharedWorkspace(lanes=2)
    for lane in range(2):
        with shared.on_lane(lane):
            shared.reserve("a", [TensorSpec("x", (64,), torch.float32)])
    with audit.watch() as ledger, shared.on_lane(1):
        shared.take("a")["x"].fill_(1)
    assert [region.name for region in ledger.regions] == ["a/x (lane 1)"]


def test_the_workspace_does_not_load_the_audit() -> None:
    code = (
        "import sys, torch; from sparsemla.serving.workspace import SharedWorkspace, TensorSpec;"
        "w = SharedWorkspace(); w.reserve('a', [TensorSpec('x', (4,), torch.float32)]); w.take('a');"
        "assert 'sparsemla.audit' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
