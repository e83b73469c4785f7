# SPDX-License-Identifier: Apache-2.0
"""A memory plan: what one rank reserves under a policy, what of it is read, what is left for KV tokens.

Puts together what the other modules of this package decide; computes nothing of its own but differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from sparsemla.schedule import SM90, SM100, accumulator_bytes
from sparsemla.serving.capacity import (
    KVBudget,
    KVGeometry,
    MemoryProfile,
    WorkspaceSize,
    kv_budget,
    kv_geometry,
    workspace_size,
)
from sparsemla.serving.config import ServingConfig
from sparsemla.serving.paths import Path, PathKind, Policy, decide
from sparsemla.serving.reservations import (
    Reservation,
    align,
    exchange_shapes,
    new_record_reservations,
    reservations_for,
    taken_together,
)


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


@dataclass(frozen=True)
class Plan:
    """One policy's plan for one rank."""

    config: ServingConfig
    path: Path
    reservations: tuple[Reservation, ...]
    workspace: WorkspaceSize
    geometry: KVGeometry
    profile: MemoryProfile | None
    budget: KVBudget | None
    explicit_kv: bool
    """The cache's bytes were given, not derived from a utilisation."""

    @property
    def policy(self) -> Policy:
        """The policy this plan is made for."""
        return self.path.policy

    @property
    def never_read_bytes(self) -> int:
        """Bytes of reservations that nothing on the path reads."""
        return sum(reservation.nbytes for reservation in self.reservations if not reservation.ever_read)

    @property
    def wasted_bytes(self) -> int:
        """Bytes that tensors nobody reads add to the shared buffer (fewer where another user needs the room)."""
        live = self.workspace.attention_bytes - sum(align(r.nbytes) for r in self.reservations if not r.ever_read)
        return self.workspace.total_bytes - max(live, *(nbytes for _, nbytes in self.workspace.users[1:]), 0)

    @property
    def answer_bytes(self) -> int:
        """Bytes of one layer's answer to the largest step that lie outside the workspace: activations, while they live.

        In place: the output and its log-sum-exps. The published paths
        write the output into the workspace; the log-sum-exps of the heads their kernel runs remain.
        """
        tokens = self.config.limits.max_num_batched_tokens
        if self.path.kind is PathKind.IN_PLACE:
            return tokens * self.config.heads * (2 * self.path.d_v + 4)
        return tokens * self.path.padded_heads * 4

    @property
    def exchange_bytes(self) -> int:
        """Bytes that travel between the ranks of a shared cache in the largest step, in memory outside the workspace.

        Ours lie in the workspace, a tile of rows at a time. The published paths gather and merge whole steps in fresh
        memory; counted as the exchange here does it (`sparsemla.serving.context_parallel`).
        """
        path, limits = self.path, self.config.limits
        if path.kind is PathKind.IN_PLACE or path.context_world == 1:
            return 0
        decodes = limits.max_num_seqs * limits.decode_query_len
        rows = limits.max_num_batched_tokens if path.kind is PathKind.MIXED_FP8 else decodes
        shapes = exchange_shapes(self.config.parallel, path.heads, path.d_qk, rows).values()
        return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes)

    @property
    def kernel_bytes(self) -> int:
        """Bytes the kernel itself allocates in the largest step, outside the workspace.

        Ours: none. The peer's fp8 decode kernel: the accumulators of split-KV scheduling, read or not (see
        `sparsemla.schedule.memory_table`, measured on an H200).
        """
        path, limits = self.path, self.config.limits
        if path.kind in (PathKind.IN_PLACE, PathKind.BF16):
            return 0
        whole = path.kind is PathKind.MIXED_FP8
        requests = 1 if whole else limits.max_num_seqs
        rows = limits.max_num_batched_tokens if whole else limits.decode_query_len
        arch = SM100 if limits.arch == "sm100" else SM90
        parts = arch.num_parts(rows_per_request=rows, heads=path.decode_heads)
        return accumulator_bytes(requests=requests, rows_per_request=rows, heads=path.decode_heads, num_parts=parts)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        config, geometry, budget = self.config, self.geometry, self.budget
        return {
            "model": config.model.name,
            "model_source": config.model.source,
            "policy": self.policy.value,
            "path": self.path.kind.value,
            "path_reason": self.path.reason,
            "heads_per_rank": config.heads,
            "cache_format": config.cache_format.value,
            "parallel": {"tp": config.parallel.tp, "dcp": config.parallel.dcp, "pcp": config.parallel.pcp},
            "host_cache": config.host_cache,
            "limits": {
                "max_model_len": config.limits.max_model_len,
                "max_num_batched_tokens": config.limits.max_num_batched_tokens,
                "max_num_seqs": config.limits.max_num_seqs,
                "spec_tokens": config.limits.spec_tokens,
                "block_size": config.limits.block_size,
                "prefill_factor": config.limits.prefill_factor,
                "utilization": config.limits.utilization,
            },
            "workspace": {
                "total_bytes": self.workspace.total_bytes,
                "attention_bytes": self.workspace.attention_bytes,
                "never_read_bytes": self.never_read_bytes,
                "wasted_bytes": self.wasted_bytes,
                "answer_bytes_outside": self.answer_bytes,
                "exchange_bytes_outside": self.exchange_bytes,
                "kernel_bytes_outside": self.kernel_bytes,
                "decided_by": self.workspace.decided_by,
                "users": [{"name": name, "bytes": nbytes} for name, nbytes in self.workspace.users],
                "reservations": [
                    {
                        "name": reservation.name,
                        "shape": list(reservation.shape),
                        "dtype": reservation.dtype_name,
                        "bytes": reservation.nbytes,
                        "read_by": reservation.read_by,
                        "ever_read": reservation.ever_read,
                    }
                    for reservation in self.reservations
                ],
            },
            "memory": None
            if self.profile is None
            else {
                "source": self.profile.source,
                "total_bytes": self.profile.total_bytes,
                "weights_bytes": self.profile.weights_bytes,
                "activation_bytes": self.profile.activation_bytes,
                "overhead_bytes": self.profile.overhead_bytes,
            },
            "kv": {
                "bytes_per_token_per_rank": _number(geometry.bytes_per_token_per_rank),
                "bytes_per_request_per_rank": geometry.bytes_per_request,
                "bytes_per_page_per_rank": geometry.bytes_per_page,
                "tokens_per_page": geometry.tokens_per_page,
                "groups": [
                    {
                        "name": group.group.name,
                        "layers": group.layers,
                        "record_bytes": group.record_bytes,
                        "tokens_per_record": group.group.tokens_per_record,
                        "window": group.group.window,
                    }
                    for group in geometry.groups
                ],
                "bytes": None if budget is None else budget.nbytes,
                "pages": None if budget is None else budget.pages,
                "tokens": None if budget is None else budget.tokens,
                "concurrent_requests": None if budget is None else round(float(budget.concurrency), 4),
            },
            "warnings": list(config.warnings()),
        }


def make_plan(
    config: ServingConfig,
    policy: Policy | str,
    *,
    profile: MemoryProfile | None = None,
    kv_bytes: int | None = None,
    other_users: Mapping[str, int] | None = None,
) -> Plan:
    """Plan one rank.

    Args:
        config: the deployment.
        policy: whose behaviour.
        profile: the GPU's memory; without it (and without kv_bytes) tokens are not planned.
        kv_bytes: explicit bytes for the cache, instead of a utilisation.
        other_users: largest sets of the workspace's other users, by name.

    Raises:
        ValueError: the policy refuses the deployment, or the memory does not hold one request.
    """
    path = decide(config, policy)
    reservations = reservations_for(config, path)
    new_records = taken_together(new_record_reservations(config, path))
    users = dict(other_users or {}) | ({"new records of pcp ranks": new_records} if new_records else {})
    workspace = workspace_size(reservations, users)
    budget = None
    if profile is not None or kv_bytes is not None:
        budget = kv_budget(config, profile=profile, workspace_bytes=workspace.total_bytes, kv_bytes=kv_bytes)
    return Plan(
        config, path, reservations, workspace, kv_geometry(config), profile, budget, explicit_kv=kv_bytes is not None
    )


@dataclass(frozen=True)
class Comparison:
    """What plan `after` saves over plan `before`."""

    before: Plan
    after: Plan

    @property
    def bytes_saved(self) -> int:
        """Workspace bytes of one rank (negative when `after` takes more)."""
        return self.before.workspace.total_bytes - self.after.workspace.total_bytes

    @property
    def kv_tokens_gained(self) -> int:
        """Tokens that the saved bytes hold on all ranks together, in whole pages; 0 where the cache's size is given.

        Independent of how much other memory there is. The tokens of two finished plans can differ by one page more,
        when the remainders below a page add up to one.
        """
        if self.before.explicit_kv or self.after.explicit_kv:
            return 0
        tokens = self.after.geometry.tokens(abs(self.bytes_saved))
        return tokens if self.bytes_saved >= 0 else -tokens

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""

        def side(plan: Plan) -> dict[str, Any]:
            return {
                "policy": plan.policy.value,
                "path": plan.path.kind.value,
                "workspace_bytes": plan.workspace.total_bytes,
                "attention_bytes": plan.workspace.attention_bytes,
                "never_read_bytes": plan.never_read_bytes,
                "answer_bytes_outside": plan.answer_bytes,
                "exchange_bytes_outside": plan.exchange_bytes,
                "kernel_bytes_outside": plan.kernel_bytes,
                "kv_tokens": None if plan.budget is None else plan.budget.tokens,
            }

        return {
            "policies": [self.before.policy.value, self.after.policy.value],
            "bytes_saved": self.bytes_saved,
            "kv_tokens_gained": self.kv_tokens_gained,
            "before": side(self.before),
            "after": side(self.after),
        }
