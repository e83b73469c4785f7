# SPDX-License-Identifier: Apache-2.0
"""Planned bytes against measured bytes: builds a plan's backend on a GPU and runs it.

Two steps are run: the *profile step* (one prefill of max_num_batched_tokens) and a *mixed step* (decodes, one prefill).
What the GPU's allocator counts is compared with what was planned for the workspace and for the peak. Both have to agree
within 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparsemla.cache import PagedKVCache
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.metadata import Batch, Metadata, MetadataBuilder
from sparsemla.serving.paths import PathKind, Policy
from sparsemla.serving.plan import Plan, make_plan
from sparsemla.serving.reservations import reservations_for
from sparsemla.serving.workspace import SharedWorkspace

TOLERANCE = 0.01
"""Largest relative difference of planned and measured bytes that counts as agreement."""

POOL_TOKENS = 65_536
"""Tokens of the cache that the steps run on: enough for one long request, little beside what is measured."""

_ALLOCATION = 512
"""Bytes the CUDA allocator rounds an allocation up to."""


@dataclass(frozen=True)
class StepBytes:
    """One step: planned and measured peak."""

    name: str
    planned_peak: int
    measured_peak: int

    @property
    def agrees(self) -> bool:
        """Within TOLERANCE."""
        return _agree(self.planned_peak, self.measured_peak)


@dataclass(frozen=True)
class ProfileReport:
    """What one plan's run took.

    Attributes:
        policy, path: of the plan.
        kernel: which kernel served the steps.
        device: name of the GPU.
        planned_workspace, measured_workspace: bytes of the shared buffer; the latter is what the allocator counts.
        steps: peaks, in the order they were run.
    """

    policy: str
    path: str
    kernel: str
    device: str
    planned_workspace: int
    measured_workspace: int
    steps: tuple[StepBytes, ...]

    @property
    def agrees(self) -> bool:
        """Workspace and every peak within TOLERANCE."""
        return _agree(self.planned_workspace, self.measured_workspace) and all(step.agrees for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        data = asdict(self)
        for step, source in zip(data["steps"], self.steps, strict=True):
            step["agrees"] = source.agrees
        return data | {"agrees": self.agrees}


def _agree(planned: int, measured: int) -> bool:
    return abs(measured - planned) <= TOLERANCE * max(planned, 1)


def published_config() -> ServingConfig:
    """The deployment of the published memory table: GLM-5.3, TP 4, DCP 4, 786,432 tokens a request."""
    return ServingConfig(
        ModelGeometry.preset("glm-5.3"),
        Parallelism(tp=4, dcp=4),
        ServingLimits(max_model_len=786_432, max_num_batched_tokens=8192, max_num_seqs=32, spec_tokens=3),
    )


def run_profile(plans: Sequence[Plan] | None = None, *, device: torch.device | str = "cuda") -> list[ProfileReport]:
    """Build and run each plan on a GPU.

    Args:
        plans: by default the published deployment under each policy.
        device: a CUDA device.

    Raises:
        ValueError: the device is no CUDA device (a CPU counts no memory that could be compared), or a plan needs other
            GPUs or a host cache.
    """
    target = torch.device(device)
    if target.type != "cuda":
        raise ValueError(f"device: got {target}, accepted is a CUDA device: a profile measures the memory of a GPU")
    if not torch.cuda.is_available():
        raise ValueError(f"device: got {target}, but torch sees no CUDA device here")
    if plans is None:
        plans = [make_plan(published_config(), policy) for policy in Policy]
    return [_profile(plan, target) for plan in plans]


def _profile(plan: Plan, device: torch.device) -> ProfileReport:
    steps = step_batches(plan.config)
    with torch.cuda.device(device):
        # Once for what stays after the first call whatever the plan: compiled kernels, library workspaces.
        run = _Run(plan, device)
        for _, queries, sequences in steps:
            run.step(queries, sequences)
        kernel = run.kernel_name()
        del run
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        workspace = _workspace(plan, device)
        measured_workspace = torch.cuda.memory_allocated() - start
        run = _Run(plan, device, workspace)
        measured = []
        for name, queries, sequences in steps:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            metadata = run.step(queries, sequences)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - start
            measured.append(StepBytes(name, run.planned_peak(metadata), peak))
    return ProfileReport(
        policy=plan.policy.value,
        path=plan.path.kind.value,
        kernel=kernel,
        device=torch.cuda.get_device_name(device),
        planned_workspace=plan.workspace.total_bytes,
        measured_workspace=measured_workspace,
        steps=tuple(measured),
    )


def step_batches(config: ServingConfig) -> list[tuple[str, list[int], list[int]]]:
    """(name, query lengths, sequence lengths) of the steps that are run."""
    limits = config.limits
    longest = min(limits.max_model_len, POOL_TOKENS // 2)
    whole = min(limits.max_num_batched_tokens, longest)
    decodes = min(limits.max_num_seqs - 1, 8)
    queries = [limits.decode_query_len] * decodes
    rest = min(whole - sum(queries), longest)
    context = min(longest, POOL_TOKENS // (4 * max(decodes, 1)))
    steps = [("profile step", [whole], [whole])]
    if decodes and rest > 0:
        steps.append(("mixed step", [*queries, rest], [max(context, limits.decode_query_len)] * decodes + [longest]))
    return steps


def _workspace(plan: Plan, device: torch.device) -> SharedWorkspace:
    """The plan's buffer, reserved and locked."""
    workspace = SharedWorkspace(device)
    workspace.reserve("attention", reservations_for(plan.config, plan.path))
    others = [nbytes for _, nbytes in plan.workspace.users[1:]]
    if others:
        workspace.reserve_bytes("other users", max(others))
    workspace.lock()
    return workspace


class _Run:
    """A plan's backend with random inputs of the largest step."""

    def __init__(self, plan: Plan, device: torch.device, workspace: SharedWorkspace | None = None) -> None:
        config, path = plan.config, plan.path
        if path.kind is PathKind.GATHERED or path.host_cache:
            raise ValueError(f"plans: got path {path}, accepted are paths that run on one GPU without a host cache")
        self.plan = plan
        self.device = device
        self.workspace = workspace or _workspace(plan, device)
        self.backend = SparseMLABackend(config, path, self.workspace, softmax_scale=config.model.d_qk**-0.5)
        self.builder = MetadataBuilder(config, path, device=device)
        block = config.limits.block_size
        self.pages = -(-POOL_TOKENS // block)
        self.cache = PagedKVCache.allocate(
            self.pages, block, config.cache_format, device=device, d_qk=config.layout.d_qk
        )
        heads = config.heads_gathered if path.context_world > 1 else config.heads
        tokens = config.limits.max_num_batched_tokens
        rope = config.layout.d_rope
        self.nope = torch.zeros((tokens, heads, config.layout.d_nope), dtype=torch.bfloat16, device=device)
        self.rope = torch.zeros((tokens, heads, rope), dtype=torch.bfloat16, device=device) if rope else None
        self.indices = torch.randint(
            0, min(POOL_TOKENS // 2, config.limits.max_model_len), (tokens, config.model.topk), device=device
        ).to(torch.int32)
        self.table = torch.empty((0, 0), dtype=torch.int32, device=device)
        self.answer: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def step(self, queries: list[int], sequences: list[int]) -> Metadata:
        """Runs one step and keeps its answer, as a layer would."""
        self.answer = None
        block = self.plan.config.limits.block_size
        width = -(-max(sequences) // block)
        table = torch.arange(len(queries) * width, dtype=torch.int32, device=self.device) % self.pages
        self.table = table.view(len(queries), width)
        metadata = self.builder.build(Batch(queries, sequences, self.table))
        rows = metadata.padded_tokens
        query = (self.nope[:rows], None if self.rope is None else self.rope[:rows])
        self.answer = self.backend.forward(query, self.cache, self.indices[:rows], metadata)
        return metadata

    def planned_peak(self, metadata: Metadata) -> int:
        """Bytes planned for a step: workspace, cache, inputs and what the call returns."""
        rows, heads = metadata.padded_tokens, self.nope.shape[1]
        path = self.plan.path
        held = [self.cache.data, self.nope, self.indices, self.table, self.builder.request_ids_buffer]
        held += [] if self.rope is None else [self.rope]
        sizes = [tensor.numel() * tensor.element_size() for tensor in held]
        if path.kind is PathKind.IN_PLACE:
            sizes += [rows * heads * path.d_v * 2, rows * heads * 4]
        else:
            sizes.append(rows * path.decode_heads * 4)  # the log-sum-exps; outputs lie in the workspace
        return self.plan.workspace.total_bytes + sum(-(-size // _ALLOCATION) * _ALLOCATION for size in sizes)

    def kernel_name(self) -> str:
        """Which kernel serves this plan's calls."""
        rows, heads = 1, self.plan.path.decode_heads if self.plan.path.context_world == 1 else self.nope.shape[1]
        call = AttentionCall(
            q_nope=torch.zeros((rows, heads, self.nope.shape[2]), dtype=torch.bfloat16, device=self.device),
            q_rope=None
            if self.rope is None
            else torch.zeros((rows, heads, self.rope.shape[2]), dtype=torch.bfloat16, device=self.device),
            cache=self.cache,
            indices=self.indices[:rows],
            softmax_scale=1.0,
            out=torch.empty((rows, heads, 512), dtype=torch.bfloat16, device=self.device),
            lse=torch.empty((rows, heads), dtype=torch.float32, device=self.device),
        )
        return registry.select(call).name
