# SPDX-License-Identifier: Apache-2.0
"""Process groups of one replica: made, agreed upon, and given up by name when a rank is lost.

Everything that moves tensors is ``torch.distributed``'s. Beside it its key-value store carries three small things:
what each rank was configured with (compared before anything is sent), why a rank stopped, and that a rank is still
there after a collective failed. So the ranks that are left say which rank is gone, and why if it could say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from sparsemla.serving.config import Parallelism
from sparsemla.serving.context_parallel.grid import GROUP_NAMES, RankGrid, all_groups

_untyped: Any = dist
"""For names that torch.distributed has but does not declare."""

Store: TypeAlias = Any
"""A torch.distributed key-value store."""

GRACE_S = 5.0
"""Seconds given to ranks that are still there to say so after a collective failed."""
_POLL_S = 0.02


class ConfigurationMismatchError(ValueError):
    """Ranks that should agree were configured differently."""


class RankLostError(RuntimeError):
    """A rank died, stopped or did not answer in time; the message names it."""


@dataclass
class Ranks:
    """This process among the ranks of its replica. Make one with `connect` or `over`.

    Attributes:
        grid: its place.
        device: where the tensors that are exchanged live.
        world_rank, world_size: in the whole world (replicas included).
        timeout_s: seconds after which a collective, or waiting for another rank, fails.
        grace_s: seconds given to other ranks to say that they are still there, after a collective failed.
    """

    grid: RankGrid
    device: torch.device
    world_rank: int
    world_size: int
    timeout_s: float
    grace_s: float
    _store: Store
    _groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict)
    _owns_world: bool = False
    _hosts_store: bool = False
    _meetings: int = 0
    received_bytes: int = 0
    """Bytes that collectives have brought to this rank from others so far (a reduction counted as its ring does it)."""

    # -- start and end ------------------------------------------------------------------------------------------------

    @classmethod
    def connect(
        cls,
        parallel: Parallelism,
        *,
        device: torch.device | str = "cpu",
        init_method: str = "env://",
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 300.0,
        grace_s: float = GRACE_S,
        facts: Mapping[str, object] | None = None,
    ) -> Ranks:
        """Joins a new world: gloo for the CPU, NCCL for CUDA.

        Args:
            parallel: the deployment's sizes; the world is a whole number of replicas of tp · pcp ranks.
            device: of the tensors; under CUDA the process's own GPU.
            init_method: ``env://`` (as torchrun sets it), ``tcp://host:port`` or ``file:///path``.
            rank, world_size: of this process; by default RANK and WORLD_SIZE of the environment.
            timeout_s, grace_s: see the class.
            facts: what all ranks must agree on beside `parallel`, e.g. `facts_of` a configuration.

        Raises:
            ConfigurationMismatchError: the ranks differ in the world's size, in `parallel` or in a fact.
            RankLostError: a rank did not come in time.
            ValueError: an argument is impossible on this rank.
        """
        rank = _from_environment("rank", "RANK", rank)
        world_size = _from_environment("world_size", "WORLD_SIZE", world_size)
        device = torch.device(device)
        grid = RankGrid(parallel, rank % parallel.world)
        store, hosts = _make_store(init_method, rank, timeout_s)
        ranks = cls(
            grid=grid,
            device=device,
            world_rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            grace_s=min(grace_s, timeout_s),
            _store=_untyped.PrefixStore("sparsemla", store),
            _owns_world=True,
            _hosts_store=hosts,
        )
        try:
            ranks.agree(facts or {})
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=_untyped.PrefixStore("world", store),
                rank=rank,
                world_size=world_size,
                timeout=ranks._collective_timeout,
            )
            ranks._make_groups()
        except BaseException as error:
            ranks._stop(error)
            raise
        return ranks

    @classmethod
    def over(
        cls,
        parallel: Parallelism,
        store: Store,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 300.0,
        grace_s: float = GRACE_S,
        facts: Mapping[str, object] | None = None,
    ) -> Ranks:
        """Groups inside the default process group that an engine has initialised, with a store all ranks share.

        Every rank of the world calls this, in the same order. Raises as `connect`.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ranks = cls(
            grid=RankGrid(parallel, rank % parallel.world),
            device=torch.device(device),
            world_rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            grace_s=min(grace_s, timeout_s),
            _store=_untyped.PrefixStore("sparsemla", store),
        )
        try:
            ranks.agree(facts or {})
            ranks._make_groups()
        except BaseException as error:
            ranks._stop(error)
            raise
        return ranks

    def regroup(self, parallel: Parallelism, facts: Mapping[str, object] | None = None) -> Ranks:
        """Other groups in the same world (collective over all of it). Close it before the one it came from."""
        other = Ranks(
            grid=RankGrid(parallel, self.world_rank % parallel.world),
            device=self.device,
            world_rank=self.world_rank,
            world_size=self.world_size,
            timeout_s=self.timeout_s,
            grace_s=self.grace_s,
            _store=_untyped.PrefixStore(f"again{self._meetings}", self._store),
            _hosts_store=self._hosts_store,
        )
        self._meetings += 1
        other.agree(facts or {})
        other._make_groups()
        return other

    def close(self) -> None:
        """Leaves the groups (and the world, if `connect` joined it).

        Drop the CUDA graphs that hold collectives of these ranks first: NCCL waits for them, for ever.
        """
        groups, self._groups = self._distinct_groups(), {}
        if self._owns_world:
            if dist.is_initialized():
                dist.destroy_process_group()
        else:
            for group in groups:
                dist.destroy_process_group(group)

    def _distinct_groups(self) -> list[dist.ProcessGroup]:
        """Two names may stand for one group."""
        return list({id(group): group for group in self._groups.values() if group is not None}.values())

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._stop(error)
        self.close()

    def _make_groups(self) -> None:
        parallel = self.grid.parallel
        replicas = range(0, self.world_size, parallel.world)
        made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        for name in GROUP_NAMES:
            groups = tuple(
                tuple(first + r for r in group) for first in replicas for group in all_groups(parallel, name)
            )
            if len(groups[0]) == 1:
                self._groups[name] = None
                continue
            if groups not in made:
                made[groups], _ = _untyped.new_subgroups_by_enumeration(
                    [list(group) for group in groups], timeout=self._collective_timeout
                )
            self._groups[name] = made[groups]

    @property
    def _collective_timeout(self) -> timedelta:
        # NCCL's own watchdog ends the process without naming anybody: `synchronize` comes first.
        cuda = self.device.type == "cuda"
        return timedelta(seconds=2 * self.timeout_s + self.grace_s if cuda else self.timeout_s)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compares what the ranks were configured with. Nothing of it touches a device.

        Raises:
            ConfigurationMismatchError: naming what differs, the ranks and their values.
            RankLostError: a rank did not answer in time.
        """
        parallel = self.grid.parallel
        mine: dict[str, Any] = {"world size": self.world_size}
        mine |= {name: getattr(parallel, name) for name in ("tp", "dcp", "pcp", "interleave", "dcp_comm")}
        mine |= {name: value if isinstance(value, int | float) else str(value) for name, value in facts.items()}
        wrong = self.world_size % parallel.world
        theirs = self._meet(json.dumps(mine), differently=_differently)
        for rank, said in enumerate(theirs):
            words = _differently(0, theirs[0], rank, said)
            if words:
                raise ConfigurationMismatchError(words)
        if wrong:
            raise ConfigurationMismatchError(
                f"world size: got {self.world_size} ranks, accepted are multiples of tp · pcp = {parallel.world}"
            )

    def _meet(self, message: str, *, differently: Any) -> list[str]:
        """Leaves a message and returns everybody's, in the order of ranks."""
        number, self._meetings = self._meetings, self._meetings + 1
        deadline = time.monotonic() + self.timeout_s
        self._store.set(f"meet/{number}/{self.world_rank}", message)
        messages = []
        try:
            # Rank 0 first: a rank that expects more ranks than there are learns so from it, not from waiting for them.
            for rank in (0, *range(self.world_size)):
                messages.append(self._wait(f"meet/{number}/{rank}", rank, deadline))
                words = differently(0, messages[0], rank, messages[-1])
                if words:
                    raise ConfigurationMismatchError(words)
        finally:
            self._leave(f"met/{number}")
        return messages[1:]

    def _wait(self, key: str, rank: int, deadline: float) -> str:
        while not self._store.check([key]):
            stopped = self._read(f"stopped/{rank}")
            if stopped is not None:
                raise RankLostError(f"rank {rank} stopped: {stopped}")
            if time.monotonic() > deadline:
                raise RankLostError(f"rank {rank} did not come within {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())

    def _leave(self, place: str) -> None:
        """The process that keeps the store goes last, so that the others can still read."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{place}/{self.world_rank}", "")
            if self._hosts_store:
                end = time.monotonic() + self.grace_s
                keys = [f"{place}/{rank}" for rank in range(self.world_size)]
                while not self._store.check(keys) and time.monotonic() < end:
                    time.sleep(_POLL_S)

    def tell(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Over the store: no tensor moves, no device waits.

        Raises:
            RankLostError: a rank did not answer in time.
        """
        return self._meet(text, differently=lambda *_: "")

    # -- collectives --------------------------------------------------------------------------------------------------

    @property
    def shard(self) -> tuple[int, int, int]:
        """(rank, world, interleave) as `sparse_mla_attention` takes it for `context_shard`."""
        parallel = self.grid.parallel
        return self.grid.shard, parallel.dcp, parallel.interleave

    def size(self, name: str) -> int:
        """Ranks of a group."""
        return len(self.grid.members(name))

    def index(self, name: str) -> int:
        """This rank's number in a group."""
        return self.grid.members(name).index(self.grid.rank)

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, name: str) -> None:
        """Every rank's `given` (n, ...) one after the other into output (ranks · n, ...), both contiguous.

        `given` may be this rank's own part of `output`: then nothing is copied on this rank.
        """
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._count(output, name)
        self._collective("all-gather", name, function, output.view(-1), given.view(-1))

    def reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, name: str) -> None:
        """The sum over ranks of part i of `given` (ranks · n, ...) into output (n, ...) of rank i, both contiguous."""
        function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._count(given, name)
        self._collective("reduce-scatter", name, function, output.view(-1), given.view(-1))

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor, name: str) -> None:
        """Part i of `given` (ranks · n, ...) to rank i; output (ranks · n, ...) in the order of senders."""
        self._count(output, name)
        self._collective("all-to-all", name, dist.all_to_all_single, output.view(-1), given.view(-1))

    def all_reduce(self, tensor: torch.Tensor, name: str) -> None:
        """The sum over ranks, in place."""
        self._count(tensor, name, times=2)
        self._collective("all-reduce", name, dist.all_reduce, tensor)

    def synchronize(self) -> None:
        """Waits for the work queued on the device, and watches the other ranks meanwhile.

        A collective of NCCL is only queued by the call, so the loss of a rank shows where a result is waited for. An
        engine that waits here, and not by asking a tensor for its value, hears who is gone.

        Raises:
            RankLostError: another rank stopped (within moments), or the device did not get through in time.
        """
        if self.device.type == "cpu":
            return
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        started = time.monotonic()
        first = self.world_rank - self.grid.rank
        others = [first + rank for rank in range(self.grid.parallel.world) if rank != self.grid.rank]
        while not done.query():
            waited = time.monotonic() - started
            if waited > self.timeout_s or (waited > _POLL_S and any(self._read(f"stopped/{r}") for r in others)):
                raise self._lost("a step", "", RuntimeError("the device waits for another rank"), started)
            time.sleep(0 if waited < _POLL_S else _POLL_S)

    def _count(self, tensor: torch.Tensor, name: str, times: int = 1) -> None:
        size = self.size(name)
        self.received_bytes += times * tensor.numel() * tensor.element_size() * (size - 1) // size

    def _collective(self, what: str, name: str, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        group = self._groups.get(name)
        if group is None:
            raise RuntimeError(f"{what} over {name} ranks: the group is of one rank, or closed")
        started = time.monotonic()
        try:
            function(*tensors, group=group)
        except RuntimeError as error:
            # gloo closes its connections when nobody holds the group any more; the frames that failed do.
            group = None
            traceback.clear_frames(error.__traceback__)
            raise self._lost(what, name, error, started) from error

    # -- loss of a rank -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Where an error leaves this block, the other ranks are told why before their timeout."""
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        """Tells why this rank stops, and closes its connections, so that nobody waits for it."""
        if isinstance(error, RankLostError | ConfigurationMismatchError):
            return
        with contextlib.suppress(Exception):
            self._store.set(f"stopped/{self.world_rank}", f"{type(error).__name__}: {error}")
        self._drop_connections()

    def _drop_connections(self) -> None:
        groups, self._groups = self._distinct_groups(), {}
        for group in groups:
            with contextlib.suppress(Exception):
                if self.device.type == "cpu":
                    dist.destroy_process_group(group)
                else:
                    _untyped.distributed_c10d._abort_process_group(group)  # ends kernels that wait for a lost rank

    def _lost(self, what: str, name: str, error: RuntimeError, started: float) -> RankLostError:
        """After a failed collective: who of the group is still there, who said why it stopped, who is gone."""
        first = self.world_rank - self.grid.rank
        members = self.grid.members(name) if name else range(self.grid.parallel.world)
        others = [first + member for member in members if member != self.grid.rank]
        seconds = time.monotonic() - started
        try:
            self._store.set(f"alive/{self.world_rank}", "")
            self._drop_connections()
            signs = self._until(self.grace_s, lambda: {rank: self._sign(rank) for rank in others})
            words = [f"rank {rank} stopped: {sign}" for rank, sign in signs.items() if sign not in (None, "alive")]
            words += [
                f"rank {rank} is gone or does not answer (no sign of it in {self.grace_s:g} s)"
                for rank, sign in signs.items()
                if sign is None
            ]
            if not words:
                # All are there: one of them gave up because of a rank that is none of this group.
                said = self._until(2 * self.grace_s, lambda: {rank: self._read(f"verdict/{rank}") for rank in others})
                words = [f"rank {rank} gave up: {verdict}" for rank, verdict in said.items() if verdict]
            named = "; ".join(words)
            self._store.set(f"verdict/{self.world_rank}", named)
            self._leave("left")
        except RuntimeError:
            named = "the rank that keeps the rendezvous (0, unless a launcher keeps it) is gone"
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RankLostError(
            f"{what}{name and f' over {name} ranks'} failed on rank {self.world_rank} after {seconds:.1f} s: "
            f"{named or f'no rank of {others} is missing'} ({detail})"
        )

    def _until(self, limit_s: float, look: Callable[[], dict[int, str | None]]) -> dict[int, str | None]:
        """What `look` finds once nothing is missing, or when the time is over."""
        end = time.monotonic() + limit_s
        found = look()
        while None in found.values() and time.monotonic() < end:
            time.sleep(_POLL_S)
            found = look()
        return found

    def _sign(self, rank: int) -> str | None:
        return self._read(f"stopped/{rank}") or ("alive" if self._store.check([f"alive/{rank}"]) else None)

    def _read(self, key: str) -> str | None:
        return str(self._store.get(key).decode()) if self._store.check([key]) else None


def _from_environment(name: str, variable: str, given: int | None) -> int:
    value = os.environ.get(variable) if given is None else str(given)
    if value is None:
        raise ValueError(f"{name}: got None and no {variable} in the environment, accepted is an integer (torchrun)")
    return int(value)


def _make_store(init_method: str, rank: int, timeout_s: float) -> tuple[Store, bool]:
    """The store of a rendezvous, and whether this process keeps it. Nobody waits here for the others."""
    url = urllib.parse.urlparse(init_method)
    timeout = timedelta(seconds=timeout_s)
    if url.scheme == "file" and url.path:
        return _untyped.FileStore(url.path, -1), False
    launcher = False
    if url.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if host is None or port is None:
            raise ValueError("init_method: got 'env://' without MASTER_ADDR and MASTER_PORT, accepted under torchrun")
        address, number = host, int(port)
    elif url.scheme == "tcp" and url.hostname and url.port:
        address, number = url.hostname, url.port
    else:
        raise ValueError(
            f"init_method: got {init_method!r}, accepted are env://, tcp://host:port and file:///absolute/path"
        )
    hosts = rank == 0 and not launcher
    return _untyped.TCPStore(address, number, None, hosts, timeout, wait_for_workers=False), hosts


def _differently(first: int, one: str, second: int, other: str) -> str:
    """What two ranks' facts differ in, in words; empty: nothing."""
    ours, theirs = json.loads(one), json.loads(other)
    different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(
        f"{name}: rank {second} has {theirs.get(name)!r}, rank {first} has {ours.get(name)!r}, accepted is the same on "
        f"every rank"
        for name in different
    )


__all__: Sequence[str] = ("GRACE_S", "ConfigurationMismatchError", "RankLostError", "Ranks")
