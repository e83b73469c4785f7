# SPDX-License-Identifier: Apache-2.0
"""The shared workspace: taken together, aligned, grows until locked, lanes, ledger."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from sparsemla.serving.workspace import SharedWorkspace, TensorSpec, WorkspaceLockedError


def spec(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def test_tensors_taken_together_do_not_overlap_and_are_aligned(device: torch.device) -> None:
    workspace = SharedWorkspace(device)
    nbytes = workspace.reserve("attention", [spec("a", 3, 5), spec("b", 7, dtype=torch.float32), spec("c", 300)])
    assert nbytes == 256 + 256 + 768 == workspace.nbytes()
    taken = workspace.take("attention")
    for value, tensor in enumerate(taken.values(), start=1):
        tensor.fill_(value)
        assert tensor.data_ptr() % 256 == 0
    assert taken["a"].shape == (3, 5) and taken["b"].dtype == torch.float32
    assert [int(tensor.min()) for tensor in taken.values()] == [1, 2, 3]
    assert [int(tensor.max()) for tensor in taken.values()] == [1, 2, 3]


def test_users_share_the_largest_set(device: torch.device) -> None:
    workspace = SharedWorkspace(device)
    workspace.reserve("attention", [spec("a", 1024)])
    workspace.reserve("moe", [spec("x", 4096)])
    workspace.reserve("indexer", [spec("k", 100, dtype=torch.uint8)])
    assert workspace.nbytes() == 8192
    assert workspace.take("attention")["a"].data_ptr() == workspace.take("moe")["x"].data_ptr()
    assert [(entry.owner, entry.names, entry.nbytes, entry.grew_by) for entry in workspace.ledger()] == [
        ("attention", ("a",), 2048, 2048),
        ("moe", ("x",), 8192, 6144),
        ("indexer", ("k",), 256, 0),
    ]


def test_never_grows_once_locked() -> None:
    workspace = SharedWorkspace()
    workspace.reserve("attention", [spec("a", 1024)])
    workspace.lock()
    workspace.reserve("attention", [spec("a", 1024)])  # what is there already
    workspace.reserve("small", [spec("s", 10)])  # fits
    with pytest.raises(WorkspaceLockedError, match=r"moe asks for 8192 bytes on lane 0, there are 2048 bytes"):
        workspace.reserve("moe", [spec("x", 4096)])
    assert workspace.nbytes() == 2048
    workspace.unlock()
    assert workspace.reserve("moe", [spec("x", 4096)]) == workspace.nbytes() == 8192


def test_growing_frees_the_outgrown_buffer() -> None:
    workspace = SharedWorkspace()
    workspace.reserve("a", [spec("a", 8)])
    outgrown = weakref.ref(workspace._buffers[0])
    workspace.reserve("b", [spec("b", 1 << 20)])
    gc.collect()
    assert outgrown() is None
    assert workspace.take("a")["a"].untyped_storage().nbytes() >= 1 << 21


def test_lanes_have_buffers_of_their_own() -> None:
    workspace = SharedWorkspace(lanes=2)
    workspace.reserve("attention", [spec("a", 128)])
    with workspace.on_lane(1):
        with pytest.raises(ValueError, match="'attention', which reserved nothing on lane 1"):
            workspace.take("attention")
        workspace.reserve("attention", [spec("a", 128)])
        workspace.take("attention")["a"].fill_(1)
    workspace.take("attention")["a"].fill_(2)
    with workspace.on_lane(1):
        assert int(workspace.take("attention")["a"].max()) == 1
    assert workspace.nbytes() == 512 and workspace.nbytes(0) == workspace.nbytes(1) == 256
    assert [entry.lane for entry in workspace.ledger()] == [0, 1]
    with pytest.raises(ValueError, match="lane: got 2, accepted are 0 to 1"), workspace.on_lane(2):
        pass


def test_a_lane_belongs_to_its_thread() -> None:
    workspace = SharedWorkspace(lanes=2)
    for lane in range(2):
        with workspace.on_lane(lane):
            workspace.reserve("a", [spec("a", 4)])
    seen: dict[int, int] = {}

    def use(lane: int) -> None:
        with workspace.on_lane(lane):
            barrier.wait()
            seen[lane] = workspace.take("a")["a"].data_ptr()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=use, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] != seen[1]


def test_nothing_reserved_takes_nothing() -> None:
    workspace = SharedWorkspace()
    assert workspace.reserve("attention", []) == 0
    assert workspace.nbytes() == 0 and workspace.take("attention") == {}
    workspace.lock()
    assert workspace.reserve("other", []) == 0


def test_listeners_hear_what_is_handed_out() -> None:
    workspace = SharedWorkspace()
    workspace.reserve("attention", [spec("a", 4)])
    heard: list[tuple[str, int, tuple[str, ...]]] = []
    stop = workspace.listen(lambda owner, lane, tensors: heard.append((owner, lane, tuple(tensors))))
    workspace.take("attention")
    stop()
    workspace.take("attention")
    assert heard == [("attention", 0, ("a",))]


def test_errors() -> None:
    workspace = SharedWorkspace()
    with pytest.raises(ValueError, match="lanes: got 0"):
        SharedWorkspace(lanes=0)
    with pytest.raises(ValueError, match="accepted are distinct names"):
        workspace.reserve("a", [spec("x", 1), spec("x", 2)])
    workspace.reserve("a", [spec("x", 1)])
    with pytest.raises(
        ValueError, match=r"a asks for x \(2,\) on lane 0, accepted is what it reserved before: x \(1,\)"
    ):
        workspace.reserve("a", [spec("x", 2)])
    with pytest.raises(ValueError, match=r"accepted are \['a'\]"):
        workspace.take("b")
