# SPDX-License-Identifier: Apache-2.0
"""The models that `sparsemla check` runs: transformers' real classes with small seeded random weights.

Small is the number of layers, experts and words. What our attention sees is not: latent 512 + rotary 64, the true
record of 656 bytes, an indexer that keeps fewer keys than there are. ``FULL`` has the released models' attention
geometry.

Two choices keep the comparison about attention. Every expert is used (k of k), so that a difference in the tenth digit
cannot send a token to another expert. And each attention and MLP block adds `SHARE` of the residual stream's size:
about what a trained layer adds, and enough that a wrong attention moves the logits by many times what is accepted.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparsemla.cli import UserError

SHARE = 0.07
"""Size (root mean square) of what one attention or MLP block adds, relative to the stream it is added to."""

QUESTION = 1
ANSWERS = tuple(range(2, 18))
FILLERS = (32, 512)
"""Words of the needle test: the question, the possible answers (a needle is one of them), the range of the haystack."""

NEEDLE_LOGIT = 40.0
"""Attention logit between question and needle; other keys reach about half of it by chance."""
ANSWER_LOGIT = 12.0
"""Output logit of the answer that came through; the best of the other words reaches about 3 by chance."""


@dataclass(frozen=True)
class Family:
    """One model family of transformers."""

    name: str
    module: str
    config: str
    model: str


FAMILIES = (
    Family("GLM-MoE-DSA", "transformers.models.glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    Family("DeepSeek-V3.2", "transformers.models.deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM"),
)


@dataclass(frozen=True)
class Sizes:
    """What is run. Lengths in tokens.

    Attributes:
        geometry: config entries of the attention (heads, head sizes, indexer); empty: the released model's.
        topk: keys the indexer keeps. Shorter than the prompts.
        prompts: length of each prompt; the shorter ones are padded on the left.
        new_tokens: generated per prompt.
        chunk: prompt tokens a forward pass takes.
        haystack: tokens of the needle test.
        haystack_chunk: of them a forward pass takes.
    """

    geometry: dict[str, int]
    layers: int
    topk: int
    prompts: tuple[int, ...]
    new_tokens: int
    chunk: int
    haystack: int
    haystack_chunk: int


SMALL = Sizes(
    geometry={
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_n_heads": 4,
    },
    layers=3,
    topk=128,
    prompts=(288, 197),
    new_tokens=24,
    chunk=160,
    haystack=1024,
    haystack_chunk=256,
)
FULL = Sizes(
    geometry={},
    layers=3,
    topk=2048,
    prompts=(4096, 3001),
    new_tokens=24,
    chunk=512,
    haystack=16384,
    haystack_chunk=128,
)


def sizes_for(device: torch.device) -> Sizes:
    """Full size on a GPU, small on a CPU."""
    return FULL if device.type == "cuda" else SMALL


def config_of(family: Family, sizes: Sizes) -> Any:
    """The transformers configuration. UserError where transformers does not import or has no such model."""
    try:
        module = importlib.import_module(family.module)
        config_class = getattr(module, family.config)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"check needs transformers with {family.model} ({error}): pip install 'sparsemla[transformers]'"
        ) from None
    return config_class(
        **sizes.geometry,
        vocab_size=FILLERS[1],
        num_hidden_layers=sizes.layers,
        intermediate_size=512,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_topk=sizes.topk,
        # GLM only: every other layer reuses the selection of the one before it.
        **({"index_topk_freq": 2, "index_skip_topk_offset": 1} if "Glm" in family.config else {}),
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )


def make_model(family: Family, sizes: Sizes, *, device: torch.device, seed: int) -> Any:
    """The model in float32, in eval mode, with random weights that depend on the seed (and the device) alone."""
    config = config_of(family, sizes)
    model_class = getattr(importlib.import_module(family.module), family.model)
    with _seeded(seed, device), device, torch.no_grad():
        model = model_class(config).eval().requires_grad_(False)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_()
            elif type(module).__name__.endswith("Experts"):
                module.gate_up_proj.normal_(std=module.gate_up_proj.shape[-1] ** -0.5)
                module.down_proj.normal_(std=module.down_proj.shape[-1] ** -0.5)
        _balance(model, torch.randint(*FILLERS, (1, min(sizes.topk, 256)), device=device))
    return model


def random_prompts(sizes: Sizes, *, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both (prompts, longest) int64, shorter prompts padded on the left."""
    longest = max(sizes.prompts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(*FILLERS, (len(sizes.prompts), longest), generator=generator)
    mask = torch.stack([torch.arange(longest) >= longest - length for length in sizes.prompts]).long()
    return (ids * mask).to(device), mask.to(device)


def plant_needles(model: Any) -> None:
    """Teach the model one thing: asked `QUESTION`, it repeats the one of `ANSWERS` that stands somewhere in its text.

    Done by hand in the first layer, whose input is the bare embedding. The answers share a direction in the embedding.
    The question's query, in the indexer and in the attention, is turned to that direction by a rank-one change of the
    projection that makes it; the output matrix reads off which answer came through. The rest stays random.
    """
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        layer = model.model.layers[0]
        attention, indexer = layer.self_attn, layer.self_attn.indexer
        answers = torch.tensor(ANSWERS, device=embedding.device)
        embedding[answers] += embedding[QUESTION + 1 + len(ANSWERS)]  # a word used nowhere: a random direction
        asked = layer.input_layernorm(embedding[QUESTION])
        told = layer.input_layernorm(embedding[answers])
        resid = attention.q_a_layernorm(attention.q_a_proj(asked))
        read = resid / resid.square().sum()

        heads, nope = attention.num_heads, attention.qk_nope_head_dim
        latents = attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(told)[:, :512])
        by_head = attention.kv_b_proj(latents).view(len(ANSWERS), heads, -1)
        target = by_head[..., :nope].mean(0)
        target = target / target.square().sum(-1, keepdim=True) * (NEEDLE_LOGIT / attention.scaling)
        attention.q_b_proj.weight.view(heads, -1, resid.shape[0])[:, :nope] += target.unsqueeze(-1) * read

        # The indexer rotates its first 64 columns by position; the others are the same wherever the needle lies.
        keys = indexer.k_norm(indexer.wk(told))[:, 64:].mean(0)
        wanted = NEEDLE_LOGIT * keys / keys.square().sum() / indexer.softmax_scale
        indexer.wq_b.weight.view(indexer.n_heads, -1, resid.shape[0])[:, 64:] += wanted.unsqueeze(-1) * read
        # An indexer head counts with a weight that may be negative; for the question it must not be.
        indexer.weights_proj.weight += 4 * asked / asked.square().sum()

        said = attention.o_proj(by_head[..., nope:].reshape(len(ANSWERS), -1))
        size = (embedding[QUESTION] + said).square().mean(-1, keepdim=True).sqrt()
        # Rows that see their own answer and neither the others nor the question, in a final state of that size.
        rows = torch.linalg.pinv(torch.cat((said, embedding[QUESTION : QUESTION + 1]))).T[:-1]
        model.lm_head.weight[answers] = ANSWER_LOGIT * size * rows


def needle_prompts(sizes: Sizes, depths: tuple[float, ...], *, device: torch.device, seed: int) -> torch.Tensor:
    """A haystack a depth, (depths, haystack) int64: random words, an answer there, a question at the end.

    Row i hides ``ANSWERS[i]``.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(*FILLERS, (len(depths), sizes.haystack), generator=generator)
    ids[:, -1] = QUESTION
    for row, depth in enumerate(depths):
        ids[row, int(depth * (sizes.haystack - 2))] = ANSWERS[row]
    return ids.to(device)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _balance(model: Any, ids: torch.Tensor) -> None:
    """Scale each block's last projection so that on `ids` the block adds `SHARE` of the stream's size."""
    stream: dict[str, torch.Tensor] = {}

    def remember(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream["size"] = (args[0] if args else kwargs["hidden_states"]).square().mean().sqrt()

    def scale(module: Any, _args: Any, output: Any) -> Any:
        added = output[0] if isinstance(output, tuple) else output
        factor = SHARE * stream["size"] / added.square().mean().sqrt()
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(factor)
        return (added * factor, *output[1:]) if isinstance(output, tuple) else added * factor

    hooks: list[Any] = []
    for layer in model.model.layers:
        hooks += [
            layer.input_layernorm.register_forward_pre_hook(remember, with_kwargs=True),
            layer.self_attn.register_forward_hook(scale),
            layer.post_attention_layernorm.register_forward_pre_hook(remember, with_kwargs=True),
            layer.mlp.register_forward_hook(scale),
        ]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
