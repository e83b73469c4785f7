# SPDX-License-Identifier: Apache-2.0
"""Contexts brought to the device as a whole, the next one on its way while one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch

from sparsemla.cache import check_count

T = TypeVar("T")


class StagingRing:
    """Two buffers on the device, filled in turn on a stream of their own. One ring serves all layers.

    On the CPU the same code fills them in place, without overlap.

    Args:
        nbytes: of one buffer.
        device: where.
    """

    def __init__(self, nbytes: int, *, device: torch.device | str = "cpu") -> None:
        check_count("nbytes", nbytes, 1)
        self.device = torch.device(device)
        self.buffers = torch.zeros((2, -(-nbytes // 256) * 256), dtype=torch.uint8, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._stream = _new_stream(self.device) if on_gpu else None
        self._free = [_new_event() for _ in range(2)] if on_gpu else []
        self._ready = [_new_event() for _ in range(2)] if on_gpu else []
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self.buffers.shape[1]

    def run(self, pieces: Sequence[T], fill: Callable[[T, torch.Tensor], None]) -> Iterator[tuple[T, torch.Tensor]]:
        """(piece, buffer filled for it), in order; a buffer is valid until the next is taken.

        `fill` runs on the ring's stream and sees what the current stream was given before this call. The first piece
        is filled before this returns.
        """
        if self._stream is not None:
            # What the current stream does up to here (the records just written, the last user of a buffer) comes first.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        first = self._fill(pieces[0], fill, wait=False) if pieces else 0
        return self._rest(pieces, fill, first)

    def _rest(
        self, pieces: Sequence[T], fill: Callable[[T, torch.Tensor], None], turn: int
    ) -> Iterator[tuple[T, torch.Tensor]]:
        for number, piece in enumerate(pieces):
            # The other buffer's last user came before this piece was asked for.
            following = self._fill(pieces[number + 1], fill, wait=number > 0) if number + 1 < len(pieces) else turn
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_event(self._ready[turn])
            try:
                yield piece, self.buffers[turn]
            finally:
                if self._stream is not None:
                    self._free[turn].record(torch.cuda.current_stream(self.device))
            turn = following

    def _fill(self, piece: T, fill: Callable[[T, torch.Tensor], None], *, wait: bool) -> int:
        turn, self._turn = self._turn, 1 - self._turn
        if self._stream is not None and wait:
            self._stream.wait_event(self._free[turn])
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            fill(piece, self.buffers[turn])
            if self._stream is not None:
                self._ready[turn].record(self._stream)
        return turn


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
