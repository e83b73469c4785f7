# SPDX-License-Identifier: Apache-2.0
"""Which part (*lane*) of the hot buffers belongs to which request. One object serves all layers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from sparsemla.cache import check_count


class _Layer(Protocol):
    def drop(self, lane: int) -> None: ...


class RequestLanes:
    """Lanes by request. A lane lives from `admit` to `release`; between steps requests may change their order.

    Until `bind` is called, row i of the block table has lane i.

    Args:
        max_requests: lanes, and rows of a block table.
        max_len: positions of a request (a rank's local ones under DCP), whole pages included: columns of the block
            table times its block size are at most that.
        device: where the hot buffers are.
    """

    def __init__(self, *, max_requests: int, max_len: int, device: torch.device | str = "cpu") -> None:
        check_count("max_requests", max_requests, 1)
        check_count("max_len", max_len, 1)
        self.max_requests = max_requests
        self.max_len = max_len
        self.device = torch.device(device)
        self.of_request = torch.arange(max_requests, dtype=torch.int32, device=self.device)
        """(max_requests,) int32: lane of each row of the block table, -1: none."""
        self.directory = torch.zeros(max_requests * max_len + 1, dtype=torch.int32, device=self.device)
        """Scratch: where in its lane a position may be hot. Never trusted, always compared with what the slot holds, so
        every layer writes over it and nobody clears it. The last element takes what belongs nowhere."""
        self._lanes: dict[Hashable, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._layers: list[weakref.ReferenceType[_Layer]] = []

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return (self.directory.numel() + self.of_request.numel()) * 4

    def attach(self, layer: _Layer) -> None:
        """A layer to tell when a lane changes hands."""
        self._layers.append(weakref.ref(layer))

    def admit(self, request: Hashable) -> int:
        """Gives a request a lane, with nothing hot in it.

        Raises:
            ValueError: it has one already, or all are taken.
        """
        if request in self._lanes:
            raise ValueError(f"request: got {request!r}, which has lane {self._lanes[request]} already")
        if not self._free:
            raise ValueError(f"request: got {request!r}, accepted are {self.max_requests} requests at a time")
        lane = self._free.pop()
        self._lanes[request] = lane
        self._drop(lane)
        return lane

    def release(self, request: Hashable) -> None:
        """The request ended or was preempted. What was hot of it is forgotten; its records stay in host memory.

        Raises:
            ValueError: it has no lane.
        """
        if request not in self._lanes:
            raise ValueError(f"request: got {request!r}, accepted are {sorted(map(repr, self._lanes))}")
        lane = self._lanes.pop(request)
        self._free.append(lane)
        self._drop(lane)

    def bind(self, requests: Sequence[Hashable]) -> None:
        """The requests of this step, in the order of the block table's rows. Does not wait for the device.

        Raises:
            ValueError: one was not admitted, or is named twice.
        """
        unknown = [request for request in requests if request not in self._lanes]
        if unknown or len(set(requests)) != len(requests):
            raise ValueError(f"requests: got {list(requests)!r}, accepted are admitted ones, each once")
        rows = torch.full((self.max_requests,), -1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        rows[: len(requests)] = torch.tensor([self._lanes[request] for request in requests], dtype=torch.int32)
        self.of_request.copy_(rows, non_blocking=True)

    def _drop(self, lane: int) -> None:
        for reference in self._layers:
            layer = reference()
            if layer is not None:
                layer.drop(lane)
