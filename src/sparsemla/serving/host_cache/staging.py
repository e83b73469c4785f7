# SPDX-License-Identifier: Apache-2.0
"""Contexts brought to the device as a whole, the next one on its way while one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sparsemla.cache import check_count

Piece = tuple[int, int, int]
"""(request, begin, end): the records of a request's positions (under DCP: this rank's local positions) begin to end."""
Fill = Callable[[Piece, torch.Tensor], None]


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
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._free, self._ready = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self.buffers.shape[1]

    def run(self, pieces: Sequence[Piece], fill: Fill) -> Iterator[tuple[Piece, torch.Tensor]]:
        """(piece, buffer filled for it), in order; a buffer is valid until the next is taken.

        `fill` runs on the ring's stream and sees what the current stream was given before this call. The first piece
        is filled before this returns.
        """
        if self._stream is not None:
            # What the current stream does up to here (the records just written, the last user of a buffer) comes first.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        first = self._fill(pieces[0], fill, wait=False) if pieces else 0
        return self._rest(pieces, fill, first)

    def _rest(self, pieces: Sequence[Piece], fill: Fill, turn: int) -> Iterator[tuple[Piece, torch.Tensor]]:
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

    def _fill(self, piece: Piece, fill: Fill, *, wait: bool) -> int:
        turn, self._turn = self._turn, 1 - self._turn
        if self._stream is None:
            fill(piece, self.buffers[turn])
            return turn
        if wait:
            self._stream.wait_event(self._free[turn])
        with torch.cuda.stream(self._stream):
            fill(piece, self.buffers[turn])
            self._ready[turn].record(self._stream)
        return turn
