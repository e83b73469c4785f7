# SPDX-License-Identifier: Apache-2.0
"""DCP, PCP and both on 2 and 4 ranks: every rank's answer is the single-rank oracle's."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path

import pytest

from context_cases import BATCHES, Spec, run_cases
from context_ranks import run_ranks

FORMATS = ("fp8_ds_mla", "bf16", "fp8_nope", "fp8_v4", "fp8_v41")
LAYOUTS = {
    2: [(2, 2, 1), (1, 2, 2), (1, 1, 2), (2, 1, 1)],
    4: [(4, 4, 1), (4, 2, 1), (2, 2, 2), (2, 4, 2), (1, 4, 4), (1, 2, 4), (2, 1, 2)],
}
"""world → (tp, dcp, pcp): DCP alone, PCP alone, both; shards on ranks with the same heads, with others, with both."""


def matrix(world: int) -> list[Spec]:
    """Every layout with every form and kind of batch; formats, heads, interleaves and the rest in turn over them."""
    specs = []
    formats, heads, interleaves = cycle(FORMATS), cycle((8, 1, 16, 5)), cycle((1, 4, 16))
    odd = cycle(
        ({}, {"sink": True}, {"pair": True}, {"unsplit": True, "sink": True}, {"pair": True, "sink": True}, {}, {})
    )
    for (tp, dcp, pcp), comm, batch in product(LAYOUTS[world], ("ag_rs", "a2a"), BATCHES):
        if dcp == 1 and comm == "a2a":
            continue
        specs.append(
            Spec(tp, dcp, pcp, next(interleaves), comm, "sparsemla", next(formats), next(heads), batch, **next(odd))
        )
    # No refusal for 32 heads a rank and more.
    specs += [Spec(world, world, 1, 4, comm, heads=32, batch="padded mtp") for comm in ("ag_rs", "a2a")]
    specs += [Spec(1, world, world, 1, comm, heads=64, sink=True) for comm in ("ag_rs", "a2a")]
    policies = cycle(("flashmla", "flashmla-gated"))
    for (tp, dcp, pcp), batch in product(LAYOUTS[world], BATCHES):
        specs.append(Spec(tp, dcp, pcp, next(interleaves), policy=next(policies), heads=8, batch=batch, **next(odd)))
    return [spec for spec in specs if spec.policy == "sparsemla" or not spec.unsplit]


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gives_the_oracles_answer(world: int, tmp_path: Path) -> None:
    specs = matrix(world)
    for rank, ended in enumerate(run_ranks(world, run_cases, specs, "cpu", where=tmp_path, limit_s=100)):
        assert not ended.error, f"rank {rank}: {ended}"
        assert not ended.result, f"rank {rank} of {world}: {ended.result}"
