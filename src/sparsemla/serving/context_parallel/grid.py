# SPDX-License-Identifier: Apache-2.0
"""Which rank is what: pure arithmetic over the ranks of one replica.

Ranks of a replica are numbered ``pcp_rank · tp + tp_rank``; replicas follow each other in the world. The ranks that
share a cache are first the PCP ranks (which have the same query heads), beyond them the TP ranks:

* ``dcp``: the ranks whose shards make up a cache, in the order of their shards;
* ``heads``: those of them with different query heads (one PCP rank): queries are gathered over these;
* ``copies``: those of them with the same query heads (one TP rank): they attend different shards for the same queries;
* ``pcp``: the ranks that share the rows of a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsemla.serving.config import Parallelism

GROUP_NAMES = ("dcp", "heads", "copies", "pcp")


@dataclass(frozen=True)
class RankGrid:
    """One rank's place in its replica.

    Attributes:
        parallel: the deployment's sizes.
        rank: this rank in its replica, 0 to tp · pcp - 1.

    Raises (when constructed):
        ValueError: no such rank; or the dcp ranks cannot be taken from the pcp ranks first: neither of dcp and pcp
            divides the other, or what remains does not divide tp.
    """

    parallel: Parallelism
    rank: int

    def __post_init__(self) -> None:
        tp, dcp, pcp = self.parallel.tp, self.parallel.dcp, self.parallel.pcp
        if not 0 <= self.rank < tp * pcp:
            raise ValueError(f"rank: got {self.rank}, accepted are 0 to {tp * pcp - 1} (tp {tp} · pcp {pcp})")
        if (pcp % dcp and dcp % pcp) or tp % self.head_ranks:
            raise ValueError(
                f"dcp: got {dcp} with tp {tp} and pcp {pcp}, accepted is a divisor of pcp, or pcp times a divisor of "
                f"tp: ranks share a cache with the pcp ranks first"
            )

    @property
    def copy_ranks(self) -> int:
        """Ranks of one cache that have the same query heads."""
        return min(self.parallel.dcp, self.parallel.pcp)

    @property
    def head_ranks(self) -> int:
        """Ranks of one cache that have different query heads."""
        return max(self.parallel.dcp // self.parallel.pcp, 1)

    @property
    def tp_rank(self) -> int:
        """Which heads of the model this rank has."""
        return self.rank % self.parallel.tp

    @property
    def pcp_rank(self) -> int:
        """Which rows of a prefill this rank runs."""
        return self.rank // self.parallel.tp

    @property
    def shard(self) -> int:
        """Which shard of a cache this rank holds, 0 to dcp - 1."""
        # In the order of ranks, which is the order torch.distributed gives the members of a group.
        return self.pcp_rank % self.copy_ranks * self.head_ranks + self.tp_rank % self.head_ranks

    def members(self, name: str) -> tuple[int, ...]:
        """Ranks of the replica in this rank's group of that name (see the module), ascending: the group's order."""
        everyone = [RankGrid(self.parallel, rank) for rank in range(self.parallel.world)]
        if name == "pcp":
            return tuple(other.rank for other in everyone if other.tp_rank == self.tp_rank)
        cache = [other for other in everyone if other._cache == self._cache]
        if name == "heads":
            cache = [other for other in cache if other.pcp_rank == self.pcp_rank]
        elif name == "copies":
            cache = [other for other in cache if other.tp_rank == self.tp_rank]
        elif name != "dcp":
            raise ValueError(f"name: got {name!r}, accepted are {', '.join(GROUP_NAMES)}")
        return tuple(other.rank for other in cache)

    @property
    def _cache(self) -> tuple[int, int]:
        """Names the cache this rank holds a shard of: ranks with the same value share one."""
        return self.pcp_rank // self.copy_ranks, self.tp_rank // self.head_ranks


def all_groups(parallel: Parallelism, name: str) -> tuple[tuple[int, ...], ...]:
    """Every group of that name in one replica, without repetition, in the order of their first ranks."""
    seen: dict[tuple[int, ...], None] = {}
    for rank in range(parallel.world):
        seen.setdefault(RankGrid(parallel, rank).members(name))
    return tuple(seen)
