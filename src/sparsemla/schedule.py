# SPDX-License-Identifier: Apache-2.0
"""Split-KV scheduling: how (request, block of keys) work is cut over the parts of a GPU, and what that costs in memory.

A *part* is a group of SMs that works on one thing after another. The scheduler lays all requests end to end, each as
long as its blocks of 64 keys plus a fixed overhead (5 blocks: prologue and epilogue of a request), and cuts the line
into parts of equal payload. A request that a cut runs through is *split*: its pieces leave float32 partial outputs
and log-sum-exps (the *accumulators*) which a *combine* step merges. Where no cut runs through a request, nothing
reads the accumulators, so here they take 0 bytes.

The plan is the one FlashMLA publishes (github.com/deepseek-ai/FlashMLA,
``csrc/smxx/decode/get_decoding_sched_meta``; part counts from ``csrc/api/sparse_decode.h``), number for number, so a
plan made here can be handed to that library and back.

Everything here is host-side numpy: a plan is made once a batch and reused by every layer.
:meth:`SplitSchedule.tensors` gives the device form.

A plan says who does the work, never which keys count: the last piece of a request always reaches to the end of its
keys as they are when the kernel runs. A plan made from other lengths is therefore slower, not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]

BLOCK_KEYS = 64
"""Keys of one block of the plan (not of a cache page)."""
D_V = 512
"""Columns of an output row."""
META_COLUMNS = 8
"""Numbers of a part: begin request, end request (inclusive), begin block of the first, end block of the last
(exclusive), begin split, whether the first is split, whether the last is split, one unused."""
H200_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM: the default where no device is named."""

(
    BEGIN_REQUEST,
    END_REQUEST,
    BEGIN_BLOCK,
    END_BLOCK,
    BEGIN_SPLIT,
    FIRST_IS_SPLIT,
    LAST_IS_SPLIT,
    UNUSED,
) = range(META_COLUMNS)


@dataclass(frozen=True)
class ArchPolicy:
    """What one GPU architecture does with a plan.

    Attributes:
        name: "sm90" or "sm100".
        num_sms: SMs assumed where none are given.
        drops_unused_scheduling: what happens when nothing is split. False (SM90): scheduling stays on, only the
            accumulators and the combine are dropped. True (SM100): splitting itself is turned off where it is not
            mandatory and there is one part, because the kernel without it is another, faster one.
    """

    name: str
    num_sms: int
    drops_unused_scheduling: bool
    _parts: Callable[[int, int, int, int], int]
    _overhead: Callable[[int, int], int]

    def num_parts(self, *, rows_per_request: int, heads: int, num_sms: int | None = None, d_qk: int = 576) -> int:
        """Parts for requests of `rows_per_request` query tokens with `heads` query heads; at least 1."""
        _at_least("rows_per_request", rows_per_request, 1)
        _at_least("heads", heads, 1)
        sms = self.num_sms if num_sms is None else num_sms
        _at_least("num_sms", sms, 1)
        return max(self._parts(sms, rows_per_request, heads, d_qk), 1)

    def overhead_blocks(self, *, heads: int, d_qk: int = 576) -> int:
        """Blocks a request costs beyond its keys."""
        return self._overhead(heads, d_qk)

    def splitting(self, num_parts: int, *, mandatory: bool = False) -> bool:
        """Whether split scheduling is on for `num_parts` parts.

        Args:
            num_parts: parts of the plan.
            mandatory: the feature set of the call is only served by the splitting kernel (extra keys, lengths on the
                device).
        """
        return not self.drops_unused_scheduling or mandatory or num_parts > 1


def _sm90_parts(num_sms: int, rows: int, heads: int, d_qk: int) -> int:
    # Heads below 64 are one tile: the peer pads them, this library masks them. Neither gets more parts for it.
    return num_sms // rows // max(heads // 64, 1)


def _sm100_parts(num_sms: int, rows: int, heads: int, d_qk: int) -> int:
    # 128 heads of 512 columns run on pairs of SMs; of 576 columns as two passes of the 64-head kernel, which needs
    # no pair.
    return num_sms // rows // (2 if heads == 128 and d_qk == 512 else 1)


SM90 = ArchPolicy("sm90", H200_SMS, False, _sm90_parts, lambda heads, d_qk: 5)
"""Hopper."""
SM100 = ArchPolicy("sm100", 148, True, _sm100_parts, lambda heads, d_qk: 3 if heads == 128 and d_qk == 512 else 5)
"""Blackwell (B200: 148 SMs)."""


def accumulator_bytes(*, requests: int, rows_per_request: int, heads: int, num_parts: int, d_v: int = D_V) -> int:
    """Bytes of the two float32 accumulators as the peer sizes them, read or not.

    ``(requests + num_parts) · rows_per_request · heads · (d_v + 1) · 4``: a cut adds at most one piece a part, so
    requests + num_parts bounds the pieces without knowing the lengths; d_v columns of output and one log-sum-exp each.
    """
    return (requests + num_parts) * rows_per_request * heads * (d_v + 1) * 4


@dataclass(frozen=True)
class MemoryRow:
    """Bytes one call takes beyond inputs and outputs: one request of `tokens` query tokens."""

    heads: int
    tokens: int
    num_parts: int
    peer_bytes: int
    """Accumulators allocated whenever split scheduling is on."""
    gated_bytes: int
    """The same with the accumulators left out where there is one part: nothing can be split."""

    @property
    def peer_mib(self) -> float:
        """peer_bytes in MiB."""
        return self.peer_bytes / 2**20


PUBLISHED_SHAPES: tuple[tuple[int, int], ...] = (
    *((64, tokens) for tokens in (1, 8, 128, 1024, 8192, 32768)),
    *((128, tokens) for tokens in (1, 8, 128, 1024, 8192)),
)
"""(heads, tokens) of the table "memory taken during one call" measured on an H200 with two builds of the peer."""


def memory_table(
    shapes: Sequence[tuple[int, int]] = PUBLISHED_SHAPES,
    *,
    policy: ArchPolicy = SM90,
    num_sms: int | None = None,
    d_qk: int = 576,
) -> list[MemoryRow]:
    """The memory a split-KV call takes for accumulators, (heads, tokens) by (heads, tokens), as one mixed batch (one
    request).

    With the defaults these are the figures measured on an H200 (16.7 MiB at 64 heads and one token, 2052 MiB at 8192
    tokens).
    """
    rows = []
    for heads, tokens in shapes:
        parts = policy.num_parts(rows_per_request=tokens, heads=heads, num_sms=num_sms, d_qk=d_qk)
        size = accumulator_bytes(requests=1, rows_per_request=tokens, heads=heads, num_parts=parts)
        rows.append(MemoryRow(heads, tokens, parts, size, 0 if parts == 1 else size))
    return rows


@dataclass(frozen=True)
class WorkItem:
    """A piece of one part's work: whole requests in a row, or one piece of one split request.

    Attributes:
        first_request: first request of the item.
        end_request: one past the last; more than one request only where all are whole.
        begin_block: first block of 64 keys.
        end_block: one past the last; None: to the end of the row's keys, however many there are when the kernel runs.
        slot: row of the accumulators this piece writes; None: the item is whole and writes the output itself.
    """

    first_request: int
    end_request: int
    begin_block: int
    end_block: int | None
    slot: int | None


@dataclass(frozen=True, eq=False)
class SplitSchedule:
    """A plan: who attends which blocks of keys, and where pieces of split requests meet again.

    Make one with :meth:`plan` or :meth:`unsplit`.

    Attributes:
        sched_meta: (parts, 8) int32, a part a row; columns in :data:`META_COLUMNS`. The end request is inclusive: an
            idle part has end request < begin request.
        num_splits: (requests + 1,) int32, cumulative pieces: request i has ``num_splits[i + 1] - num_splits[i]`` of
            them.
        rows_per_request: query tokens of a request; row t of the call belongs to request t // rows_per_request.
        heads: query heads the plan was made for.
        splitting: whether the architecture keeps split scheduling on for this plan (see :class:`ArchPolicy`).
    """

    sched_meta: IntArray
    num_splits: IntArray
    rows_per_request: int
    heads: int
    splitting: bool = True

    @classmethod
    def plan(
        cls,
        *,
        requests: int,
        heads: int,
        topk: int,
        rows_per_request: int = 1,
        topk_lengths: Any = None,
        extra_topk: int = 0,
        extra_topk_lengths: Any = None,
        num_sms: int | None = None,
        policy: ArchPolicy = SM90,
        mandatory: bool = False,
        d_qk: int = 576,
    ) -> SplitSchedule:
        """The published plan for a batch.

        Args:
            requests: requests of the batch, 0 allowed.
            heads: query heads, 1 to 128.
            topk: index columns.
            rows_per_request: query tokens of each request.
            topk_lengths: keys that count, per request, or per row (requests · rows_per_request of them, the
                longest row of a request counts): a sequence, a numpy array or a CPU tensor of integers; clamped to
                [0, topk]. None: topk.
            extra_topk: index columns of the second cache, 0 without one.
            extra_topk_lengths: as topk_lengths, for the second cache.
            num_sms: SMs of the device; None: the policy's.
            policy: SM90 or SM100.
            mandatory: see :meth:`ArchPolicy.splitting`.
            d_qk: width of a key (SM100 plans 512 and 576 differently).

        Raises:
            ValueError: a number out of range, or lengths that lie on a device (reading them would synchronise).
        """
        _at_least("requests", requests, 0)
        _at_least("topk", topk, 0)
        _at_least("extra_topk", extra_topk, 0)
        parts = policy.num_parts(rows_per_request=rows_per_request, heads=heads, num_sms=num_sms, d_qk=d_qk)
        keys = _lengths("topk_lengths", topk_lengths, topk, requests, rows_per_request)
        # A request without keys still takes one (masked) block: its rows have an answer, out = 0 and lse = -inf.
        blocks = _blocks(np.maximum(keys, 1))
        if extra_topk:
            blocks += _blocks(
                _lengths("extra_topk_lengths", extra_topk_lengths, extra_topk, requests, rows_per_request)
            )
        elif extra_topk_lengths is not None:
            raise ValueError(
                "extra_topk_lengths: got lengths with extra_topk 0; give extra_topk, or no extra_topk_lengths"
            )
        splitting = policy.splitting(parts, mandatory=mandatory)
        meta, splits = _cut(blocks.tolist(), parts, policy.overhead_blocks(heads=heads, d_qk=d_qk))
        return cls(meta, splits, rows_per_request, heads, splitting)

    @classmethod
    def unsplit(cls, requests: int, *, rows_per_request: int = 1, heads: int = 1) -> SplitSchedule:
        """The plan that splits nothing: one part, every request whole. Given to a call, it means "do not split".

        A row's answer then has the same bits whatever other rows are in the batch.

        Raises:
            ValueError: a number out of range.
        """
        _at_least("requests", requests, 0)
        _at_least("rows_per_request", rows_per_request, 1)
        _at_least("heads", heads, 1)
        meta, splits = _cut([1] * requests, 1, 0)
        return cls(meta, splits, rows_per_request, heads, False)

    @property
    def num_parts(self) -> int:
        """Parts of the plan, idle ones included."""
        return int(self.sched_meta.shape[0])

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return int(self.num_splits.shape[0]) - 1

    @property
    def num_rows(self) -> int:
        """Query rows (tokens) of the batch: T of the call the plan is for."""
        return self.num_requests * self.rows_per_request

    @property
    def splits_per_request(self) -> IntArray:
        """(requests,) int32: pieces of each request, at least 1."""
        return np.diff(self.num_splits).astype(np.int32)

    @property
    def nothing_split(self) -> bool:
        """No request is in more than one piece: no accumulators, no combine."""
        return int(self.num_splits[-1]) == self.num_requests

    @property
    def accumulator_slots(self) -> int:
        """Pieces that leave a partial result: all pieces of the split requests, none of the whole ones."""
        pieces = self.splits_per_request
        return int(pieces[pieces > 1].sum())

    @property
    def accumulator_shape(self) -> tuple[int, int, int, int]:
        """(slots, rows_per_request, heads, 513): 512 columns of partial output and its log-sum-exp, float32."""
        return (self.accumulator_slots, self.rows_per_request, self.heads, D_V + 1)

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the accumulators a splitting kernel takes for this plan: 0 when nothing is split."""
        slots, rows, heads, columns = self.accumulator_shape
        return slots * rows * heads * columns * 4

    @property
    def peer_accumulator_bytes(self) -> int:
        """What the peer allocates for the same plan, split or not (see :func:`accumulator_bytes`)."""
        return accumulator_bytes(
            requests=self.num_requests,
            rows_per_request=self.rows_per_request,
            heads=self.heads,
            num_parts=self.num_parts,
        )

    def slots(self) -> IntArray:
        """(requests,) int32: first accumulator row of each split request, -1 for a whole one."""
        pieces = self.splits_per_request
        taken = np.where(pieces > 1, pieces, 0)
        first = np.cumsum(taken) - taken
        return np.where(pieces > 1, first, -1).astype(np.int32)

    def work(self) -> Iterator[WorkItem]:
        """The work of all parts, part by part. Every block of every request appears exactly once."""
        pieces = self.splits_per_request
        slots = self.slots()
        for part in self.sched_meta:
            begin, end = int(part[BEGIN_REQUEST]), int(part[END_REQUEST])
            request = begin
            while request <= end:
                if pieces[request] == 1:
                    stop = request
                    while stop <= end and pieces[stop] == 1:
                        stop += 1
                    yield WorkItem(request, stop, 0, None, None)
                    request = stop
                    continue
                piece = int(part[BEGIN_SPLIT]) if request == begin else 0
                first_block = int(part[BEGIN_BLOCK]) if request == begin else 0
                last = piece + 1 == pieces[request]
                yield WorkItem(
                    request,
                    request + 1,
                    first_block,
                    None if last else int(part[END_BLOCK]),
                    int(slots[request]) + piece,
                )
                request += 1

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """The device form: (sched_meta (parts, 8), num_splits (requests + 1,)), int32, freshly copied to `device`."""
        return (
            torch.from_numpy(self.sched_meta.copy()).to(device, non_blocking=True),
            torch.from_numpy(self.num_splits.copy()).to(device, non_blocking=True),
        )


def _cut(blocks: list[int], num_parts: int, overhead: int) -> tuple[IntArray, IntArray]:
    """Cuts requests of `blocks` blocks over `num_parts` parts of equal payload: (sched_meta, num_splits)."""
    requests = len(blocks)
    payload = -(-(sum(blocks) + overhead * requests) // num_parts) + overhead
    meta = np.zeros((num_parts, META_COLUMNS), dtype=np.int32)
    splits = np.zeros(requests + 1, dtype=np.int32)
    request = block = piece = 0
    for part in range(num_parts):
        begin_request, begin_block, begin_piece = request, block, piece
        left = payload
        while request < requests:
            remaining = blocks[request] - block
            if left >= remaining + overhead:
                left -= remaining + overhead
                splits[request + 1] = splits[request] + piece + 1
                request, block, piece = request + 1, 0, 0
                continue
            if left > overhead:
                block += left - overhead
                piece += 1
            break
        # Block is 0 exactly where the cut falls between two requests: then the last one of the part is the one before.
        last = request if block > 0 else request - 1
        end_block = block if block > 0 else (blocks[last] if last >= 0 else 0)
        first_split = begin_block != 0
        last_split = last >= 0 and end_block != blocks[last]
        if begin_request == last:
            first_split = last_split = first_split or last_split
        meta[part, :UNUSED] = (begin_request, last, begin_block, end_block, begin_piece, first_split, last_split)
    return meta, splits


def _blocks(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-keys // BLOCK_KEYS)


def _lengths(name: str, given: Any, limit: int, requests: int, rows: int) -> npt.NDArray[np.int64]:
    """(requests,) int64 lengths, clamped to [0, limit]."""
    if given is None:
        return np.full(requests, limit, dtype=np.int64)
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise ValueError(
                f"{name}: got a tensor on {given.device}, accepted is host data (a plan is made on the host), "
                f"or None to plan for full length ({limit})"
            )
        given = given.detach().numpy()
    array = np.asarray(given)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.shape[0] not in (requests, requests * rows):
        raise ValueError(
            f"{name}: got shape {array.shape} of {array.dtype}, accepted is ({requests},) integers"
            + (f" or ({requests * rows},)" if rows > 1 else "")
        )
    lengths = np.clip(array.astype(np.int64), 0, limit)
    return lengths if array.shape[0] == requests else lengths.reshape(requests, rows).max(axis=1)


def _at_least(name: str, given: int, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise ValueError(f"{name}: got {given!r}, accepted is an integer of at least {least}")
