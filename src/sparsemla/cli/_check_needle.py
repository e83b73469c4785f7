# SPDX-License-Identifier: Apache-2.0
"""A needle in a context of hundreds of thousands of records, through every way the cache can be kept.

A haystack is a context of noise: for each token a record and an indexer key. Three needles lie at `DEPTHS` of it. Each
question's indexer query resembles one needle's key, and half of its attention heads look for what that needle's record
says of itself. The rest of the record is one of `ANSWERS` code words. A small indexer with real arithmetic (e4m3 keys,
sum over heads of weighted relu products, top-k) chooses the keys of each question; attention runs over them; a needle
is retrieved if the indexer chose it and every looking head's output is nearest to its code word.

Three requests share the context's pages, each with two query tokens (as with one speculated token). Runs: one rank
with the cache on the device; the host cache; with several ranks the sharded cache on devices and in host memory.
Each is run cold, replayed, and (host cache) after other questions have displaced the hot records and after the hot
buffer was dropped; all of these must give the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from sparsemla.cache import PagedKVCache
from sparsemla.formats import quantise_e4m3
from sparsemla.reference import reference_attention
from sparsemla.serving.backend import SparseMLABackend
from sparsemla.serving.config import ModelGeometry, Parallelism, ServingConfig, ServingLimits
from sparsemla.serving.host_cache import HostCache, RequestLanes, host_pool
from sparsemla.serving.metadata import Batch, MetadataBuilder, local_length
from sparsemla.serving.paths import decide
from sparsemla.serving.workspace import SharedWorkspace

if TYPE_CHECKING:
    from sparsemla.serving.context_parallel.ranks import Ranks

DEPTHS = (0.1, 0.5, 0.9)
LENGTHS = (230_456, 544_235)
"""Records of the contexts, at full size."""
QUESTIONS = 2
"""Query tokens a request."""
ASKED = [(request + token) % len(DEPTHS) for request in range(len(DEPTHS)) for token in range(QUESTIONS)]
"""Which needle each row asks for."""

OUTPUT_LIMIT = 1e-3
"""Largest difference of an output from the single rank's. Outputs stay below 0.25, where a step of bfloat16 is at most
2^-10: ranks round their partial outputs to bfloat16 before they are merged, which moves a result by up to one step. A
needle missed or counted twice moves it by a hundred."""
ORACLE_LIMIT = 4e-3
"""Output of the single rank against float64, relative norm: bfloat16 takes about 1.7e-3."""

ANSWERS = 16
INDEX_HEADS, INDEX_DIM = 4, 128
_LATENT = 0.05
"""Standard deviation of a latent column."""
_LEAD = 4.0
"""Weight of a needle over that of all other chosen keys together, for a head that looks for it: the noise counts, so
that ranks have something to merge."""
_TILE = 16_384
"""Tokens made at a time."""
_BLOCK = 64


@dataclass(frozen=True)
class NeedleSizes:
    """Lengths of the contexts in records, keys a question chooses, hot records a request (host cache)."""

    lengths: tuple[int, ...]
    topk: int
    hot_records: int


FULL = NeedleSizes(LENGTHS, topk=2048, hot_records=5120)
SMALL = NeedleSizes((3_001, 8_200), topk=128, hot_records=320)


@dataclass(frozen=True, kw_only=True)
class NeedleRun:
    """One length through one way of keeping the cache.

    Attributes:
        way: "one rank", "host cache", "dcp 2" or "dcp 2, host cache".
        length: records of the context.
        retrieved: for each of DEPTHS, whether every question and looking head found the needle, in every repetition.
        output_difference: largest, from the single rank's cold run; 0 for itself.
        lse_difference: the same of the log-sum-exp.
        replays_equal: whether all repetitions gave the same bits.
        same_bits_as_single: whether these are the single rank's too.
        misses: records brought from host memory by the cold run, the replay, the run after other questions.
        bytes_to_device: by all of them.
        seconds: of the runs.
    """

    way: str
    length: int
    retrieved: tuple[bool, ...]
    output_difference: float
    lse_difference: float
    replays_equal: bool
    same_bits_as_single: bool
    misses: tuple[int, ...] = ()
    bytes_to_device: int = 0
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """All retrieved, close to the single rank, replays bit for bit; a replay of the host cache misses nothing."""
        return (
            all(self.retrieved)
            and self.output_difference <= OUTPUT_LIMIT
            and self.lse_difference <= OUTPUT_LIMIT
            and self.replays_equal
            and (not self.misses or (self.misses[0] > 0 and self.misses[1] == 0))
        )


@dataclass(frozen=True)
class NeedleReport:
    """Every run on this rank, and how far the single rank's is from float64."""

    runs: tuple[NeedleRun, ...]
    oracle_errors: dict[int, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """All runs, and the single rank with the oracle."""
        return all(run.agrees for run in self.runs) and max(self.oracle_errors.values(), default=0.0) <= ORACLE_LIMIT

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "agreed": self.agrees,
            "limits": {"output": OUTPUT_LIMIT, "oracle": ORACLE_LIMIT},
            "depths": DEPTHS,
            "oracle_errors": {str(length): error for length, error in self.oracle_errors.items()},
            "runs": [dataclasses.asdict(run) | {"agrees": run.agrees} for run in self.runs],
        }


def sizes_for(device: torch.device, *, full: bool = False) -> NeedleSizes:
    """The real lengths on a GPU or on request, small ones on a CPU."""
    return FULL if full or device.type == "cuda" else SMALL


@torch.inference_mode()
def run_needle(
    device: torch.device,
    *,
    dcp_group: Ranks | None = None,
    sizes: NeedleSizes | None = None,
    seed: int = 0,
) -> NeedleReport:
    """All lengths through every way that is there.

    Args:
        device: of this rank.
        dcp_group: ranks that share the cache, tp = dcp = their number; every one of them calls this with the same
            arguments. None: this rank alone.
        sizes: None: full on a GPU, small on a CPU.
        seed: of the haystack.

    Raises:
        ValueError: a group whose tensor parallel ranks are not those that share the cache.
        RankLostError: another rank is gone.
    """
    sizes = sizes or sizes_for(device)
    world = 1
    if dcp_group is not None:
        parallel = dcp_group.grid.parallel
        world = parallel.dcp
        if parallel.tp != parallel.dcp or parallel.pcp != 1:
            raise ValueError(f"dcp_group: got {parallel}, accepted are tp = dcp and pcp = 1")
    ways: list[tuple[str, Ranks | None, bool]] = [("host cache", None, True)]
    if dcp_group is not None:
        ways += [(f"dcp {world}", dcp_group, False), (f"dcp {world}, host cache", dcp_group, True)]
    runs: list[NeedleRun] = []
    oracle: dict[int, float] = {}
    for length in sizes.lengths:
        haystack = _Haystack.make(length, sizes, device, heads=64 // world, rank=_rank(dcp_group), seed=seed)
        single = _Way("one rank", haystack, sizes)
        runs.append(single.run(single))
        oracle[length] = haystack.oracle_error(single.out)
        runs += [_Way(name, haystack, sizes, ranks=ranks, host=host).run(single) for name, ranks, host in ways]
    return NeedleReport(tuple(runs), oracle)


def _rank(group: Ranks | None) -> int:
    return 0 if group is None else group.grid.tp_rank


def needle_command(
    device: torch.device, *, dcp_group: Ranks | None = None, seed: int = 0, full: bool = False, as_json: bool = False
) -> int:
    """Runs it and prints; the exit status. With `dcp_group` every rank runs, the first one prints."""
    first = _rank(dcp_group) == 0
    report = run_needle(device, dcp_group=dcp_group, sizes=sizes_for(device, full=full), seed=seed)
    if first and as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    elif first:
        _print(report, device)
    return 0 if report.agrees else 1


def _print(report: NeedleReport, device: torch.device) -> None:
    console = Console(highlight=False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    depths = ", ".join(f"{depth:.0%}" for depth in DEPTHS)
    console.print(f"\n[bold]Needles[/bold] on {name} ({device}), at {depths} of the text")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("records", "cache", "retrieved", "off by", "replay", "brought*", ""):
        table.add_column(title, justify="left" if title == "cache" else "right")
    for run in report.runs:
        table.add_row(
            f"{run.length:,}",
            run.way,
            f"{sum(run.retrieved)} of {len(run.retrieved)}",
            "same bits" if run.same_bits_as_single else f"{run.output_difference:.1e}",
            "same bits" if run.replays_equal else "[red]differs[/red]",
            " / ".join(f"{count:,}" for count in run.misses),
            "[green]ok[/green]" if run.agrees else "[red]NO[/red]",
        )
    console.print(table)
    worst = max(report.oracle_errors.values())
    console.print("* records from host memory: cold / replayed / after other questions displaced them")
    console.print(f"off by: largest difference of an output from one rank's, up to {OUTPUT_LIMIT:.0e} is accepted")
    console.print(f"one rank against float64: {worst:.2%} (up to {ORACLE_LIMIT:.1%}; rounding to bfloat16 is 0.17%)")
    console.print("[green]Everything agrees.[/green]" if report.agrees else "[red]Disagreement.[/red]")


@dataclass(frozen=True, eq=False)
class _Haystack:
    """A context on the device, its questions and what the indexer chose for them.

    q: (rows, heads, 576); chosen and other: (rows, topk) positions, for the questions and for others that
    ask for nothing. Heads are this rank's; of the model's 64 heads the even ones look for needles.
    """

    cache: PagedKVCache
    table: torch.Tensor
    length: int
    needles: torch.Tensor
    codes: torch.Tensor
    q: torch.Tensor
    chosen: torch.Tensor
    other: torch.Tensor
    scale: float

    @classmethod
    def make(
        cls, length: int, sizes: NeedleSizes, device: torch.device, *, heads: int, rank: int, seed: int
    ) -> _Haystack:
        """Everything depends on the seed and the kind of device alone; `rank` says which heads are kept."""
        gen = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen, device=device)

        pages = -(-length // _BLOCK)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(torch.int32).to(device)
        table = order.repeat(len(DEPTHS), 1)
        cache = PagedKVCache.allocate(pages, _BLOCK, "fp8_ds_mla", device=device)
        needles = torch.tensor([int(depth * (length - 1)) for depth in DEPTHS], device=device)
        codes = normal(ANSWERS, 256) * _LATENT
        names = normal(len(DEPTHS), 256) * _LATENT  # what a needle's record says of itself
        keys = normal(len(DEPTHS), INDEX_DIM)
        asked = torch.tensor(ASKED, device=device)
        # Questions of the indexer: like the needle's key, with as much noise. Others: noise.
        question = keys[asked].unsqueeze(1) + normal(len(asked), INDEX_HEADS, INDEX_DIM)
        other = normal(len(asked), INDEX_HEADS, INDEX_DIM) * math.sqrt(2)
        weights = torch.rand((len(asked), INDEX_HEADS), generator=gen, device=device) + 0.5
        scores: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for begin in range(0, length, _TILE):
            positions = torch.arange(begin, min(begin + _TILE, length), device=device)
            latents = normal(len(positions), 576) * _LATENT
            index_keys = normal(len(positions), INDEX_DIM)
            for needle, position in enumerate(needles.tolist()):
                if begin <= position < begin + len(positions):
                    latents[position - begin, :256] = names[needle]
                    latents[position - begin, 256:512] = codes[needle]
                    index_keys[position - begin] = keys[needle]
            slots = order[positions // _BLOCK].long() * _BLOCK + positions % _BLOCK
            cache.write(slots, latents)
            stored = _as_stored(index_keys)
            for queries, tiles in zip((question, other), scores, strict=True):
                tiles.append(_index_scores(queries, weights, stored))
        looking = torch.zeros(64, dtype=torch.bool, device=device)
        looking[::2] = True
        scale = 576**-0.5
        towards = torch.zeros((len(asked), 576), device=device)
        lead = math.log(_LEAD * sizes.topk) / scale
        towards[:, :256] = names[asked] * (lead / names[asked].square().sum(1, keepdim=True))
        q = normal(len(asked), 64, 576) + looking[None, :, None] * towards[:, None]
        return cls(
            cache=cache,
            table=table,
            length=length,
            needles=needles,
            codes=codes,
            q=q[:, rank * heads : (rank + 1) * heads].to(torch.bfloat16).contiguous(),
            chosen=_best(scores[0], sizes.topk),
            other=_best(scores[1], sizes.topk),
            scale=scale,
        )

    def found(self, out: torch.Tensor) -> list[bool]:
        """For each needle: chosen, and named by every looking head of every row that asks for it."""
        answers = (out[:, ::2, 256:].float() @ self.codes.T).argmax(-1)
        result = [True] * len(DEPTHS)
        for row, needle in enumerate(ASKED):
            chosen = bool((self.chosen[row] == self.needles[needle]).any())
            result[needle] &= chosen and bool((answers[row] == needle).all())
        return result

    def oracle_error(self, out: torch.Tensor) -> float:
        """Relative norm of the difference from float64, over the same keys."""
        ids = torch.arange(len(ASKED), device=out.device, dtype=torch.int32) // QUESTIONS
        want, _ = reference_attention(
            self.q, self.cache, self.chosen, softmax_scale=self.scale, block_table=self.table, request_ids=ids
        )
        return float((out.double() - want).norm() / want.norm())

    def shard(self, rank: int, world: int, interleave: int) -> tuple[PagedKVCache, torch.Tensor]:
        """A rank's records and its block table."""
        mine = local_length(self.length, rank, world, interleave)
        device = self.table.device
        cache = PagedKVCache.allocate(-(-mine // _BLOCK), _BLOCK, self.cache.format, device=device)
        for begin in range(0, mine, _TILE):
            local = torch.arange(begin, min(begin + _TILE, mine), device=device)
            position = local // interleave * interleave * world + rank * interleave + local % interleave
            slots = self.table[0][position // _BLOCK].long() * _BLOCK + position % _BLOCK
            cache.write_bytes(local, self.cache.gather_bytes(slots))
        return cache, torch.arange(cache.num_pages, dtype=torch.int32, device=device).repeat(len(DEPTHS), 1)


def _best(tiles: list[torch.Tensor], topk: int) -> torch.Tensor:
    """(rows, topk) int32: positions of the best scores, in the order of the context."""
    return torch.cat(tiles, dim=1).topk(topk, dim=1).indices.sort(dim=1).values.to(torch.int32)


def _as_stored(keys: torch.Tensor) -> torch.Tensor:
    """Indexer keys as a cache of e4m3 values with one float32 scale a key gives them back."""
    values, scales = quantise_e4m3(keys, keys.shape[1])
    return values.float() * scales


def _index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(rows, keys): sum over heads of weight · relu(query · key), DeepSeek-V3.2's indexer (arXiv 2512.02556, eq. 1)."""
    return torch.einsum("rhk,rh->rk", torch.relu(queries @ keys.T), weights)


class _Way:
    """One way of keeping the cache: its backend, and the questions run through it."""

    def __init__(
        self, name: str, haystack: _Haystack, sizes: NeedleSizes, *, ranks: Ranks | None = None, host: bool = False
    ) -> None:
        self.name = name
        self.haystack = haystack
        device = haystack.table.device
        heads = haystack.q.shape[1]
        parallel = Parallelism(tp=64 // heads) if ranks is None else ranks.grid.parallel
        rows = len(ASKED)
        limits = ServingLimits(
            max_model_len=haystack.length,
            max_num_batched_tokens=rows,
            max_num_seqs=len(DEPTHS),
            spec_tokens=QUESTIONS - 1,
            block_size=_BLOCK,
            cache_format=haystack.cache.format,
        )
        config = ServingConfig(ModelGeometry.preset("glm-5.3"), parallel, limits, host_cache=host)
        path = decide(config, "sparsemla")
        cache, table = haystack.cache, haystack.table
        shard = 0
        exchange = None
        if ranks is not None:
            from sparsemla.serving.context_parallel.exchange import HeadExchange

            shard = ranks.grid.shard
            exchange = HeadExchange(ranks, heads, config.layout.d_qk)
            cache, table = haystack.shard(shard, parallel.dcp, parallel.interleave)
        self.host: HostCache | None = None
        if host:
            pool = host_pool(cache.num_pages, _BLOCK, cache.format)
            pool.byte_view.copy_(cache.byte_view)
            lanes = RequestLanes(max_requests=len(DEPTHS), max_len=table.shape[1] * _BLOCK, device=device)
            self.host = HostCache(pool, lanes, hot_records=sizes.hot_records, topk=sizes.topk, max_rows=rows)
        self.cache = None if host else cache
        workspace = SharedWorkspace(device)
        self._backend = SparseMLABackend(
            config, path, workspace, softmax_scale=haystack.scale, rank=shard, host=self.host, context=exchange
        )
        workspace.lock()
        batch = Batch([QUESTIONS] * len(DEPTHS), [haystack.length] * len(DEPTHS), table)
        self._metadata = MetadataBuilder(config, path, device=device, rank=shard).build(batch)
        self.out = torch.full((rows, heads, 512), torch.nan, dtype=torch.bfloat16, device=device)
        self.lse = torch.full((rows, heads), torch.nan, device=device)  # both until `run`

    def ask(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step over the chosen positions."""
        out = torch.full_like(self.out, torch.nan)
        out, lse = self._backend.forward(self.haystack.q, self.cache, positions, self._metadata, out=out)
        assert lse is not None  # the in-place path gives one
        return out, lse

    def run(self, single: _Way) -> NeedleRun:
        """Cold, replayed, after other questions, and with a host cache after the hot buffer was dropped."""
        started = time.monotonic()
        haystack, host = self.haystack, self.host
        answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        misses: list[int] = []

        def repeat() -> None:
            before = host.stats().misses if host else 0
            answers.append(self.ask(haystack.chosen))
            misses.append(host.stats().misses - before if host else 0)

        repeat()
        repeat()
        # Two sets of other records displace what the hot buffer holds of the first.
        self.ask(haystack.other)
        self.ask(haystack.other.flip(0))
        repeat()
        if host:
            for lane in range(len(DEPTHS)):
                host.drop(lane)
            repeat()
            if host.stats().overflowed:
                raise RuntimeError("needle: keys found no place in the hot buffer")
        self.out, self.lse = answers[0]
        found = [haystack.found(out) for out, _ in answers]
        return NeedleRun(
            way=self.name,
            length=haystack.length,
            retrieved=tuple(all(each) for each in zip(*found, strict=True)),
            output_difference=max(_difference(out, single.out) for out, _ in answers),
            lse_difference=max(_difference(lse, single.lse) for _, lse in answers),
            replays_equal=all(torch.equal(out, self.out) and torch.equal(lse, self.lse) for out, lse in answers),
            same_bits_as_single=torch.equal(self.out, single.out) and torch.equal(self.lse, single.lse),
            misses=tuple(misses[:3]) if host else (),
            bytes_to_device=host.stats().bytes_to_device if host else 0,
            seconds=round(time.monotonic() - started, 3),
        )


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest; infinite where one is not a number."""
    difference = (got.float() - want.float()).abs().max()
    return float(torch.where(difference.isnan(), torch.inf, difference))
