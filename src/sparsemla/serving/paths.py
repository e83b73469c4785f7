# SPDX-License-Identifier: Apache-2.0
"""The one decision: which way a batch takes through attention, and therefore which scratch memory is ever read.

:func:`decide` is a pure function of the configuration. Its result, an immutable :class:`Path`, is handed as a value to
the reservations, the backend's constructor, the metadata builder and, with the metadata, to every forward. Nothing
downstream asks the configuration again, so the memory that is reserved and the memory that is read cannot drift apart.

Policies:

``flashmla``
    What vLLM's FLASHMLA_SPARSE backend is published to do (``vllm/v1/attention/backends/mla/flashmla_sparse.py``,
    versions of September 2026): an fp8 decode kernel that wants 64 or 128 heads, a bf16 prefill kernel that wants a
    multiple of 64 (128 on SM100). Few heads: the whole batch goes through the fp8 kernel. Many heads, a host-resident
    cache, or a KV gather under PCP + DCP: decodes through the fp8 kernel, prefills over a bf16 copy. The same
    refusals, and the same reservations even where the path never reads them.
``flashmla-gated``
    The same paths and refusals; only what the path reads is reserved.
``sparsemla``
    The cache is read in place, whatever the head count, format or sharding. One call a batch; nothing is reserved,
    except for what travels between the ranks that share a cache.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields

from sparsemla.formats import D_V, KVFormat
from sparsemla.serving.config import ServingConfig

MIN_HEADS_FOR_BF16_PREFILL = 32
"""Policy flashmla: from this many heads a rank, prefills are worth the bf16 kernel."""


class Policy(enum.Enum):
    """Whose behaviour is planned and run."""

    FLASHMLA = "flashmla"
    FLASHMLA_GATED = "flashmla-gated"
    SPARSEMLA = "sparsemla"

    @classmethod
    def parse(cls, value: Policy | str) -> Policy:
        """`value` itself, or the policy of that name. ValueError for an unknown name."""
        if isinstance(value, cls):
            return value
        try:
            return cls(str(value).strip().lower())
        except ValueError:
            raise ValueError(f"policy: got {value!r}, accepted are {', '.join(p.value for p in cls)}") from None


class PathKind(enum.Enum):
    """The ways through attention."""

    MIXED_FP8 = "mixed_fp8"
    """The whole batch in one fp8 call over the cache."""
    SEPARATE = "separate"
    """Decodes in an fp8 call, prefills over a bf16 copy of their context."""
    GATHERED = "gathered"
    """As SEPARATE, but each rank copies its shard and the shards are gathered from the dcp ranks."""
    HOST = "host"
    """As SEPARATE, but the copy comes from host memory and decodes read the GPU's hot buffer."""
    BF16 = "bf16"
    """A bf16 cache, read in place by the bf16 kernel."""
    IN_PLACE = "in_place"
    """The whole batch in one call over the cache as it is stored."""


@dataclass(frozen=True)
class Path:
    """The decision, as a value. Two equal paths reserve, build and read the same things."""

    policy: Policy
    kind: PathKind
    cache_format: KVFormat
    heads: int
    """Query heads of one rank."""
    d_qk: int
    decode_heads: int
    """Heads the decode kernel runs: `heads`, or padded to what it accepts."""
    prefill_heads: int
    """Heads the prefill kernel runs: `heads`, or padded."""
    context_world: int
    """Ranks the cache of a request is sharded over; 1: none."""
    interleave: int
    host_cache: bool
    prefill_rows: int
    """Rows of a bf16 copy of prefill_factor requests of max_model_len (whether or not this path makes one)."""
    reason: str = field(compare=False)
    """Why this kind, in one clause. Not part of the comparison."""
    prefill_world: int = 1
    """Ranks that share the rows of a prefill; 1: none."""

    @property
    def d_v(self) -> int:
        """Columns of the output."""
        return D_V

    @property
    def padded_heads(self) -> int:
        """The most heads any kernel of this path runs."""
        return max(self.decode_heads, self.prefill_heads)

    @property
    def pads_query(self) -> bool:
        """Whether the concatenated query is copied once more to pad its heads (a bf16 cache's needs no second copy)."""
        return self.padded_heads > self.heads and self.kind is not PathKind.BF16

    @property
    def copies_prefill_kv(self) -> bool:
        """Whether prefills read a copy of their context: in bf16, or gathered from the shards as it is stored."""
        return self.kind in (PathKind.SEPARATE, PathKind.HOST) or self.gathers_prefill

    @property
    def gathers_prefill(self) -> bool:
        """Whether the shards of a prefill's context come together on every rank: rows and cache are both split."""
        both = self.prefill_world > 1 and self.context_world > 1
        return self.kind is PathKind.GATHERED or (self.kind is PathKind.IN_PLACE and both)

    @property
    def shard_rows(self) -> int:
        """Rows of the copy one rank makes of its own records."""
        return self.prefill_rows // self.context_world if self.gathers_prefill else self.prefill_rows

    @property
    def returns_lse(self) -> bool:
        """Whether the caller has to combine this rank's result with other ranks'."""
        return self.context_world > 1

    def __str__(self) -> str:
        shard = f", 1 of {self.context_world} shards, interleave {self.interleave}" if self.context_world > 1 else ""
        host = ", host cache" if self.host_cache else ""
        padded = "" if self.decode_heads == self.heads else f" padded to {self.decode_heads}"
        return (
            f"{self.policy.value}/{self.kind.value} ({self.cache_format.value}, "
            f"{self.heads} heads{padded}{shard}{host}, {self.prefill_rows} prefill rows)"
        )


class PathMismatchError(ValueError):
    """Metadata built for one path met a backend built for another."""


def require_same(backend: Path, metadata: Path) -> None:
    """Raise PathMismatchError, naming both, unless the two are equal."""
    if backend != metadata:
        different = [
            f"{f.name} {_plain(getattr(metadata, f.name))} against {_plain(getattr(backend, f.name))}"
            for f in fields(Path)
            if f.compare and getattr(metadata, f.name) != getattr(backend, f.name)
        ]
        raise PathMismatchError(
            f"metadata: built for {metadata}, accepted is the backend's path {backend}; they differ in "
            + "; ".join(different)
        )


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


def decide(config: ServingConfig, policy: Policy | str) -> Path:
    """The path of a deployment under a policy.

    Raises:
        ValueError: the policy refuses the deployment; the message says what it accepts.
    """
    policy = Policy.parse(policy)
    if policy is Policy.SPARSEMLA:
        return _decide_sparsemla(config)
    return _decide_flashmla(config, policy)


def _padded(heads: int, multiple: int) -> int:
    return -(-heads // multiple) * multiple


def _fp8_envelope(heads: int) -> int:
    """Head count the fp8 decode kernel runs for `heads`."""
    return 64 if heads <= 64 else 128


def _decide_sparsemla(config: ServingConfig) -> Path:
    where = "the host cache's hot buffer" if config.host_cache else "the cache"
    reason = f"one call reads {where} as it is stored, at any head count"
    prefill_rows = config.limits.prefill_rows
    if config.gathers_prefill_kv:
        reason += "; prefill rows read the dcp ranks' records, gathered as they are stored"
        # The longest request and no more: requests are gathered one after the other.
        # The block size is a multiple of the interleave.
        prefill_rows = _padded(config.limits.max_model_len, config.parallel.dcp * config.limits.block_size)
    return Path(
        policy=Policy.SPARSEMLA,
        kind=PathKind.IN_PLACE,
        cache_format=config.cache_format,
        heads=config.heads,
        d_qk=config.layout.d_qk,
        decode_heads=config.heads,
        prefill_heads=config.heads,
        context_world=config.parallel.dcp,
        interleave=config.parallel.interleave,
        host_cache=config.host_cache,
        prefill_rows=prefill_rows,
        reason=reason,
        prefill_world=config.parallel.pcp,
    )


def _decide_flashmla(config: ServingConfig, policy: Policy) -> Path:
    fmt, heads, parallel = config.cache_format, config.heads, config.parallel
    if fmt not in (KVFormat.FP8_DS_MLA, KVFormat.BF16):
        raise ValueError(
            f"policy: {policy.value} does not serve cache format {fmt.value}, accepted are fp8_ds_mla and bf16 "
            f"(policy sparsemla serves {fmt.value})"
        )
    few = heads < MIN_HEADS_FOR_BF16_PREFILL
    if fmt is KVFormat.BF16:
        kind, reason = PathKind.BF16, "a bf16 cache is read in place by the bf16 kernel"
    elif config.gathers_prefill_kv:
        kind, reason = PathKind.GATHERED, "PCP + DCP: prefill rows need the shards of every dcp rank"
    elif config.host_cache:
        kind, reason = PathKind.HOST, "the context of a prefill lies in host memory"
    elif few:
        kind = PathKind.MIXED_FP8
        reason = f"{heads} heads a rank are fewer than {MIN_HEADS_FOR_BF16_PREFILL}: the whole batch is one fp8 call"
    else:
        kind = PathKind.SEPARATE
        reason = f"{heads} heads a rank are at least {MIN_HEADS_FOR_BF16_PREFILL}: prefills take the bf16 kernel"
    if parallel.dcp > 1:
        _refuse_unsound_dcp(config, policy, kind)

    multiple = 128 if config.limits.arch == "sm100" else 64
    prefill_heads = _padded(heads, multiple)
    return Path(
        policy=policy,
        kind=kind,
        cache_format=fmt,
        heads=heads,
        d_qk=config.layout.d_qk,
        decode_heads=prefill_heads if kind is PathKind.BF16 else _fp8_envelope(heads),
        prefill_heads=prefill_heads,
        context_world=parallel.dcp,
        interleave=parallel.interleave,
        host_cache=config.host_cache,
        prefill_rows=config.limits.prefill_rows,
        reason=reason,
        prefill_world=parallel.pcp,
    )


def _refuse_unsound_dcp(config: ServingConfig, policy: Policy, kind: PathKind) -> None:
    """The published backend shards a cache only where it returns a log-sum-exp for every row that is combined."""
    name, dcp = policy.value, config.parallel.dcp
    if config.parallel.dcp_comm != "ag_rs":
        raise ValueError(f"dcp_comm: got {config.parallel.dcp_comm!r}, accepted under policy {name} is 'ag_rs'")
    if kind is PathKind.BF16:
        raise ValueError(f"dcp: got {dcp} with a bf16 cache, accepted under policy {name} is an fp8_ds_mla cache")
    if kind not in (PathKind.MIXED_FP8, PathKind.GATHERED):
        cause = "a host cache" if kind is PathKind.HOST else f"{config.heads} heads a rank"
        raise ValueError(
            f"dcp: got {dcp} with {cause}, accepted under policy {name} is DCP on the mixed fp8 path (fewer than "
            f"{MIN_HEADS_FOR_BF16_PREFILL} heads a rank, no host cache) or together with PCP: the separate path "
            f"returns the LSE of decode rows only, and the combination needs it for every row"
        )
    local, gathered = _fp8_envelope(config.heads), _fp8_envelope(config.heads_gathered)
    if local != gathered:
        raise ValueError(
            f"dcp: {config.heads} heads a rank pad to {local}, the {config.heads_gathered} heads gathered over {dcp} "
            f"ranks to {gathered}; accepted under policy {name} are equal paddings"
        )
