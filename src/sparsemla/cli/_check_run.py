# SPDX-License-Identifier: Apache-2.0
"""What `sparsemla check` measures for one model family.

The model's own eager attention and ours run over the same text. Their logits differ for three reasons, measured apart:

* the cache is quantised. Eager attention over a bf16 cache against eager attention over what our fp8 cache holds,
  dequantised: same text, same keys chosen, no kernel of ours involved.
* our kernel computes otherwise. Eager attention over the dequantised cache against ours over the fp8 cache: same text,
  same keys chosen, same cached values, so what is left is arithmetic (bf16 query and output, order of sums).
* the indexer, fed with slightly other numbers, now and then prefers another key at the edge of its selection. Counted.

The model computes in float32 throughout, so that its own rounding does not hide any of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from sparsemla import audit
from sparsemla.cli import _check_models as models
from sparsemla.formats import KVFormat, record_layout
from sparsemla.integrations.transformers import attach
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall
from sparsemla.schedule import SplitSchedule

DEPTHS = (0.1, 0.5, 0.9)

KERNEL_LIMIT = 1e-3
"""Largest logit difference between ours and eager attention over the same cached values, relative to the largest."""
QUANTISATION_LIMIT = 2e-2
"""The same between an fp8 and a bf16 cache. e4m3 has 3 mantissa bits: about 8e-3 where attention adds `SHARE`."""
RECORD_LIMIT = 4e-2
"""Root mean square error of cached latents, relative. e4m3 under amax scaling: about 2.7e-2."""
SPLIT_LIMIT = 4e-3
"""Difference of one attention output with and without splitting, relative: both are rounded to bf16."""

Tick = Callable[[str], None]
"""Called after every forward pass with what is being done."""


@dataclass(frozen=True)
class Scratch:
    """Memory one attention call takes beyond its results, while it runs."""

    call: str
    query_rows: int
    accumulator_bytes: int
    reserved_bytes: int
    touched_bytes: int


@dataclass(frozen=True)
class Needle:
    """One needle, at `depth` of the haystack."""

    depth: float
    found: bool
    found_by_own: bool


@dataclass(frozen=True, kw_only=True)
class FamilyReport:
    """The figures of one model family; logit differences are relative to the largest logit."""

    family: str
    model_class: str
    layers: int
    heads: int
    topk: int
    prompts: tuple[int, ...]
    kernels: tuple[str, ...]
    tokens_compared: int
    tokens_agreed: int
    near_ties: int
    near_tie_margin: float
    largest_logit: float
    logit_difference_kernel: float
    logit_difference_quantisation: float
    logit_difference_own: float
    record_error: float
    keys_chosen_alike: float
    cache_bytes_per_token_layer: int
    cache_bytes_per_token: int
    bf16_bytes_per_token_layer: int
    scratch: tuple[Scratch, ...]
    split_difference: float
    haystack: int
    needles: tuple[Needle, ...]
    restored: bool

    @property
    def checks(self) -> dict[str, bool]:
        """Every statement that decides the exit status, and whether it holds."""
        return {
            "tokens": self.tokens_agreed + self.near_ties == self.tokens_compared,
            "kernel": self.logit_difference_kernel <= KERNEL_LIMIT,
            "quantisation": self.logit_difference_quantisation <= QUANTISATION_LIMIT,
            "records": self.record_error <= RECORD_LIMIT,
            "scratch": all(one.touched_bytes == one.reserved_bytes for one in self.scratch),
            "split": self.split_difference <= SPLIT_LIMIT,
            "needles": all(one.found for one in self.needles),
            "restored": self.restored,
        }


def forward_passes(sizes: models.Sizes) -> int:
    """How often `run_family` ticks."""
    chunks = -(-max(sizes.prompts) // sizes.chunk)
    return 5 * (chunks + sizes.new_tokens - 1) + 2 * -(-sizes.haystack // sizes.haystack_chunk) + 1


@torch.inference_mode()
def run_family(
    family: models.Family, sizes: models.Sizes, *, device: torch.device, seed: int, tick: Tick
) -> FamilyReport:
    """Everything for one family. ValueError and UserError as the model and the attachment raise them."""
    model = models.make_model(family, sizes, device=device, seed=seed)
    text = _Text(model, sizes, *models.random_prompts(sizes, device=device, seed=seed), tick)

    before = text.generate("own attention")
    with _record_calls() as calls, attach(model, max_tokens=_pool_tokens(sizes.prompts, sizes)) as attachment:
        cache = text.new_cache()
        with _Selections(model) as chosen:
            ours = text.generate("sparsemla", cache=cache)
        records = {layer: attachment.records(cache, layer) for layer in attachment.pools}
        bytes_per_token = attachment.bytes_per_token
        scratch, split_difference = _scratch(calls)
        tick("scratch")
        bytes_per_layer = next(iter(attachment.pools.values())).layout.record_bytes

    errors: list[float] = []
    with _Selections(model, replay=chosen):
        held = text.generate(
            "own attention, our cache", cache=_replaying(text.new_cache(), records, text.real, errors), follow=ours
        )
    with _Selections(model, replay=chosen):
        bf16 = text.generate("own attention, bf16 cache", cache=_rounding(text.new_cache()), follow=ours)
    with _Selections(model) as own_chosen:
        own = text.generate("own attention, same text", follow=ours)

    scale = text.largest(held)
    quantisation = text.difference(held, bf16)
    differs = own.tokens != ours.tokens
    ties = differs & (text.margins(own) <= 2 * quantisation)
    untouched = not any("forward" in module.__dict__ for module in model.modules())
    prompt = text.mask.bool()
    restored = untouched and torch.equal(
        before.logits[:, : prompt.shape[1]][prompt], own.logits[:, : prompt.shape[1]][prompt]
    )
    del model, before, text.model
    return FamilyReport(
        family=family.name,
        model_class=family.model,
        layers=sizes.layers,
        heads=calls.heads,
        topk=sizes.topk,
        prompts=sizes.prompts,
        kernels=tuple(sorted(calls.kernels)),
        tokens_compared=differs.numel(),
        tokens_agreed=int((~differs).sum()),
        near_ties=int(ties.sum()),
        near_tie_margin=2 * quantisation,
        largest_logit=scale,
        logit_difference_kernel=text.difference(ours, held) / scale,
        logit_difference_quantisation=quantisation / scale,
        logit_difference_own=text.difference(ours, own) / scale,
        record_error=max(errors),
        keys_chosen_alike=chosen.shared_with(own_chosen),
        cache_bytes_per_token_layer=bytes_per_layer,
        cache_bytes_per_token=bytes_per_token,
        bf16_bytes_per_token_layer=record_layout(KVFormat.BF16).record_bytes,
        scratch=scratch,
        split_difference=split_difference,
        haystack=sizes.haystack,
        needles=find_needles(family, sizes, device=device, seed=seed, tick=tick),
        restored=restored,
    )


@torch.inference_mode()
def find_needles(
    family: models.Family, sizes: models.Sizes, *, device: torch.device, seed: int, tick: Tick
) -> tuple[Needle, ...]:
    """Ask a model with planted answers for the one hidden in each haystack, with its own attention and with ours."""
    model = models.make_model(family, dataclasses.replace(sizes, layers=2), device=device, seed=seed)
    models.plant_needles(model)
    ids = models.needle_prompts(sizes, DEPTHS, device=device, seed=seed)
    answers = torch.tensor(models.ANSWERS[: len(DEPTHS)], device=device)

    def ask(doing: str) -> list[bool]:
        cache = _new_cache(model)
        logits = ids.new_zeros(0)
        for part in torch.split(ids, sizes.haystack_chunk, dim=1):
            logits = model(input_ids=part, use_cache=True, logits_to_keep=1, **{_cache_name(model): cache}).logits
            tick(doing)
        found: list[bool] = (logits[:, -1].argmax(-1) == answers).tolist()
        return found

    own = ask("needles, own attention")
    with attach(model, max_tokens=_pool_tokens((sizes.haystack,) * len(DEPTHS), sizes)):
        ours = ask("needles, sparsemla")
    return tuple(Needle(depth, *pair) for depth, *pair in zip(DEPTHS, ours, own, strict=True))


@dataclass
class Generation:
    """logits (B, prompt + new - 1, vocabulary) of every position, tokens (B, new) chosen at the last `new` of them."""

    logits: torch.Tensor
    tokens: torch.Tensor


@dataclass
class _Text:
    """A model, its prompts and the way to run it over them."""

    model: Any
    sizes: models.Sizes
    ids: torch.Tensor
    mask: torch.Tensor
    tick: Tick

    def new_cache(self) -> Any:
        return _new_cache(self.model)

    def generate(self, doing: str, *, cache: Any = None, follow: Generation | None = None) -> Generation:
        """Greedily, prompt in chunks, then token by token; with `follow` its tokens are taken instead of the chosen."""
        cache = self.new_cache() if cache is None else cache
        mask = self.mask
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        begin, length = 0, self.ids.shape[1]
        step = self.ids[:, : self.sizes.chunk]
        while len(tokens) < self.sizes.new_tokens:
            end = begin + step.shape[1]
            output = self.model(
                input_ids=step,
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                use_cache=True,
                **{_cache_name(self.model): cache},
            )
            logits.append(output.logits)
            self.tick(doing)
            begin = end
            if begin < length:
                step = self.ids[:, begin : begin + self.sizes.chunk]
                continue
            tokens.append(output.logits[:, -1].argmax(-1))
            taken = tokens[-1] if follow is None else follow.tokens[:, len(tokens) - 1]
            step = taken.unsqueeze(1)
            mask = torch.cat((mask, torch.ones_like(step)), dim=1)
            positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
        return Generation(torch.cat(logits, dim=1), torch.stack(tokens, dim=1))

    @property
    def real(self) -> torch.Tensor:
        """(B, prompt + new - 1) bool: which tokens of a run are not padding."""
        added = self.sizes.new_tokens - 1
        return torch.cat((self.mask, self.mask.new_ones(self.mask.shape[0], added)), dim=1).bool()

    def _real(self, run: Generation) -> torch.Tensor:
        """Logits (n, vocabulary) of them."""
        return run.logits[self.real]

    def largest(self, run: Generation) -> float:
        return float(self._real(run).abs().max())

    def difference(self, one: Generation, other: Generation) -> float:
        """Largest absolute logit difference."""
        return float((self._real(one) - self._real(other)).abs().max())

    def margins(self, run: Generation) -> torch.Tensor:
        """(B, new): by how much the best logit leads the second where a token was chosen."""
        best = run.logits[:, -self.sizes.new_tokens :].topk(2).values
        return best[..., 0] - best[..., 1]


class _Selections:
    """Hooks on a model's indexers: notes what they choose, or makes them choose what another instance has noted."""

    def __init__(self, model: Any, replay: _Selections | None = None) -> None:
        self.notes: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._hooks: list[Any] = []
        for layer in model.model.layers:
            if getattr(layer.self_attn, "indexer", None) is None:
                continue
            said = None if replay is None else iter(replay.notes[len(self.notes)])
            self.notes.append([])
            self._hooks.append(layer.self_attn.indexer.register_forward_hook(self._hook(self.notes[-1], said)))

    @staticmethod
    def _hook(
        notes: list[tuple[torch.Tensor, torch.Tensor]], said: Iterator[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], chosen: torch.Tensor) -> torch.Tensor | None:
            if said is not None:
                return next(said)[0]
            mask = args[3]
            allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            visible = allowed.expand(*chosen.shape[:2], -1).gather(-1, chosen.long())
            notes.append((chosen, visible))
            return None

        return hook

    def shared_with(self, other: _Selections) -> float:
        """Share of the visible keys chosen here that the other chose too."""
        both = mine = 0
        for layer, their_layer in zip(self.notes, other.notes, strict=True):
            for (chosen, visible), (theirs, their_visible) in zip(layer, their_layer, strict=True):
                marks = chosen.new_zeros(
                    (*chosen.shape[:2], int(max(chosen.max(), theirs.max())) + 1), dtype=torch.bool
                )
                marks.scatter_(-1, theirs.long(), their_visible)
                both += int((marks.gather(-1, chosen.long()) & visible).sum())
                mine += int(visible.sum())
        return both / mine

    def __enter__(self) -> _Selections:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _replaying(cache: Any, records: dict[int, torch.Tensor], real: torch.Tensor, errors: list[float]) -> Any:
    """A transformers cache that keeps `records` (B, tokens, 576) in place of the model's values.

    Notes in `errors` how far the records of `real` (B, tokens) tokens are from those values: padding attends to nothing
    in one attention and to everything in the other.
    """

    def change(latent: torch.Tensor, rotary: torch.Tensor, layer: int, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        new = slice(begin, begin + latent.shape[2])
        held = records[layer][:, None, new].to(latent.dtype)
        wrong, right = ((x * real[:, None, new, None]).norm() for x in (held[..., :512] - latent, latent))
        errors.append(float(wrong / right))
        return held[..., :512], held[..., 512:]

    return _changing(cache, change)


def _rounding(cache: Any) -> Any:
    """A transformers cache that keeps its values rounded to bfloat16."""
    return _changing(cache, lambda latent, rotary, *_: (_bf16(latent), _bf16(rotary)))


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _changing(cache: Any, change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    store = cache.update

    def update(latent: torch.Tensor, rotary: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        return store(*change(latent, rotary, layer, cache.get_seq_length(layer)), layer, *args, **kwargs)

    cache.update = update
    return cache


@dataclass
class _Calls:
    """Attention calls seen: the last with many query rows a prompt, the last of a decode step, and who served them."""

    kernels: set[str] = field(default_factory=set)
    heads: int = 0
    prefill: tuple[registry.Kernel, AttentionCall] | None = None
    decode: tuple[registry.Kernel, AttentionCall] | None = None


@contextlib.contextmanager
def _record_calls() -> Iterator[_Calls]:
    """Note every attention call and the kernel chosen for it, inside the block."""
    calls = _Calls()
    select = registry.select

    def noting(call: AttentionCall) -> registry.Kernel:
        kernel = select(call)
        calls.kernels.add(kernel.name)
        calls.heads = call.num_heads
        if calls.prefill is None or call.num_rows >= calls.prefill[1].num_rows:
            calls.prefill = (kernel, call)
        calls.decode = (kernel, call)
        return kernel

    registry.select = noting
    try:
        yield calls
    finally:
        registry.select = select


def _scratch(calls: _Calls) -> tuple[tuple[Scratch, ...], float]:
    """Scratch of a prefill call, of a decode call, and of that decode call split; and how far the last two differ."""
    if calls.prefill is None or calls.decode is None:
        raise ValueError("check: the model made no attention call")
    whole, _ = _audited(f"{calls.prefill[1].num_rows:,} queries", *calls.prefill)
    single, plain = _audited(f"{calls.decode[1].num_rows:,} queries", *calls.decode)
    kernel, call = calls.decode
    plan = SplitSchedule.plan(requests=call.num_rows, heads=call.num_heads, topk=call.topk)
    cut, merged = _audited(f"{call.num_rows:,} queries split", kernel, dataclasses.replace(call, schedule=plan))
    return (whole, single, cut), float((merged - plain).norm() / plain.norm())


def _audited(name: str, kernel: registry.Kernel, call: AttentionCall) -> tuple[Scratch, torch.Tensor]:
    """Run a call once more, into results of its own, with every allocation watched."""
    call = dataclasses.replace(call, out=torch.empty_like(call.out), lse=torch.empty_like(call.lse))
    with audit.watch() as ledger:
        kernel.run(call)
    reserved = ledger.peak_bytes
    scratch = Scratch(name, call.num_rows, kernel.scratch_bytes(call), reserved, reserved - ledger.dead_bytes)
    return scratch, call.out.float()


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _cache_name(model: Any) -> str:
    """The argument transformers calls the cache by: `cache`, or `past_key_values` in earlier releases."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _pool_tokens(prompts: tuple[int, ...], sizes: models.Sizes) -> int:
    """Tokens of the pool: every row as long as the longest, in whole pages."""
    return len(prompts) * (-(-(max(prompts) + sizes.new_tokens) // 64) * 64)
