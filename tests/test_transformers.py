# SPDX-License-Identifier: Apache-2.0
"""Attaching to transformers' real classes: same answers, restored exactly, everything else refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparsemla.integrations.transformers as integration
from sparsemla import KVFormat, pack, unpack
from sparsemla.cli._check_models import FAMILIES, SMALL, Family, make_model, random_prompts
from sparsemla.integrations.transformers import attach, detach

transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

CPU = torch.device("cpu")
SIZES = dataclasses.replace(SMALL, topk=48, prompts=(120, 83), new_tokens=6)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family.name: make_model(family, SIZES, device=CPU, seed=1) for family in FAMILIES}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    return models[request.param.name]


@pytest.fixture
def glm(models: dict[str, Any]) -> Any:
    return models["GLM-MoE-DSA"]


@pytest.fixture(autouse=True)
def _inference(models: dict[str, Any]) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations, slower on two threads of a busy machine
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
    for one in models.values():
        assert "_sparsemla_attachment" not in one.__dict__, "a test left a model attached"


def test_the_oldest_transformers_served(glm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert declared["optional-dependencies"]["transformers"] == [
        f"transformers>={'.'.join(map(str, integration.MIN_TRANSFORMERS))}"
    ]
    for version in ("5.20.0", "5.20.0.dev0", "5.100.1", "6.0.0rc1"):
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
        integration.require_transformers()
    for version in ("5.19.9", "4.99.0", "5.2.0", "unknown"):
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
        with pytest.raises(ValueError, match=f"transformers: got version {version}, accepted is 5.20 or newer"):
            attach(glm, max_tokens=64)


def test_transformers_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"transformers: not installed, accepted is 5\.20 or newer"):
        integration.require_transformers()


def prompts() -> dict[str, torch.Tensor]:
    ids, mask = random_prompts(SIZES, device=CPU, seed=3)
    return {"input_ids": ids, "attention_mask": mask}


def new_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def generate(model: Any, **kwargs: Any) -> Any:
    return model.generate(
        **prompts(),
        max_new_tokens=SIZES.new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max())


def test_generate_with_a_bf16_cache_is_the_models_own_answer(model: Any) -> None:
    own = generate(model)
    with attach(model, max_tokens=2048, format="bf16"):
        ours = generate(model)
    assert torch.equal(ours.sequences, own.sequences)
    assert relative(torch.stack(ours.logits), torch.stack(own.logits)) < 1e-2


@pytest.mark.parametrize("scale_style", ["float32", "pow2"])
def test_generate_with_an_fp8_cache_is_close(model: Any, scale_style: Any) -> None:
    own = generate(model)
    with attach(model, max_tokens=2048, scale_style=scale_style) as attachment:
        assert attachment.bytes_per_token == 3 * 656
        assert attachment.pool_bytes == 2048 * 3 * 656
        ours = generate(model)
    assert relative(ours.logits[0], own.logits[0]) < 5e-2


def test_beam_search_moves_slots_not_records(model: Any) -> None:
    own = generate(model, num_beams=3)
    with attach(model, max_tokens=4096, format="bf16"):
        ours = generate(model, num_beams=3)
    assert torch.equal(ours.sequences, own.sequences)


def test_sdpa_masks_are_understood(glm: Any) -> None:
    with attach(glm, max_tokens=2048):
        eager = glm(**prompts()).logits
        glm.set_attn_implementation("sdpa")
        try:
            sdpa = glm(**prompts()).logits
        finally:
            glm.set_attn_implementation("eager")
    assert torch.equal(sdpa, eager)


def test_bfloat16_weights(models: dict[str, Any]) -> None:
    model = copy.deepcopy(models["DeepSeek-V3.2"]).to(torch.bfloat16)
    own = model(**prompts()).logits.float()
    with attach(model, max_tokens=2048, format="bf16"):
        ours = model(**prompts()).logits.float()
    assert ours.isfinite().all()
    assert relative(ours[0], own[0]) < 0.1


def test_the_selection_is_sparse_and_shared_by_glm(glm: Any) -> None:
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda _module, _args, found: chosen.append(found))
        for layer in glm.model.layers
        if layer.self_attn.indexer is not None
    ]
    try:
        with attach(glm, max_tokens=2048):
            glm(**prompts())
    finally:
        for hook in hooks:
            hook.remove()
    assert len(chosen) == 2 < len(glm.model.layers)
    assert all(one.shape == (2, 120, 48) for one in chosen)


def test_records_are_the_packed_latents(model: Any) -> None:
    latents: list[torch.Tensor] = []
    attention = model.model.layers[0].self_attn
    hook = attention.kv_a_layernorm.register_forward_hook(lambda _module, _args, out: latents.append(out))
    try:
        with attach(model, max_tokens=2048) as attachment:
            cache = new_cache(model)
            model(**prompts(), cache=cache)
            records = attachment.records(cache, 0)
            slots = attachment.slots(cache, 0)
    finally:
        hook.remove()
    assert records.shape == (2, 120, 576)
    assert slots.unique().numel() == 240, "no two tokens share a slot"
    wide = torch.cat((latents[0], records[..., 512:]), dim=-1).to(torch.bfloat16)
    expected = unpack(pack(wide.view(-1, 576), KVFormat.FP8_DS_MLA), KVFormat.FP8_DS_MLA).view_as(records)
    assert torch.equal(records, expected)


def test_chunks_and_padding_change_nothing(model: Any) -> None:
    ids, mask = prompts().values()
    with attach(model, max_tokens=4096):
        whole = model(input_ids=ids, attention_mask=mask).logits
        cache = new_cache(model)
        parts = [
            model(input_ids=ids[:, a:b], attention_mask=mask[:, :b], cache=cache).logits
            for a, b in ((0, 50), (50, 51), (51, 120))
        ]
        alone = model(input_ids=ids[1:, 37:]).logits
    assert relative(torch.cat(parts, dim=1)[mask.bool()], whole[mask.bool()]) < 2e-2
    # The row padded by 37 tokens, alone and unpadded: rotary embeddings are relative, so only rounding is left.
    assert relative(alone[0], whole[1, 37:]) < 5e-2


def test_crop_then_continue(model: Any) -> None:
    ids = prompts()["input_ids"][:1]
    with attach(model, max_tokens=4096):
        cache = new_cache(model)
        model(input_ids=ids[:, :100], cache=cache)
        model(input_ids=ids[:, :9], cache=cache)
        cache.crop(-9)
        cropped = model(input_ids=ids[:, 100:], cache=cache).logits
        plain_cache = new_cache(model)
        model(input_ids=ids[:, :100], cache=plain_cache)
        plain = model(input_ids=ids[:, 100:], cache=plain_cache).logits
    assert torch.equal(cropped, plain)


def test_without_a_cache(model: Any) -> None:
    with attach(model, max_tokens=2048) as attachment:
        with_cache = model(**prompts()).logits
        without = model(**prompts(), use_cache=False).logits
        assert attachment.free_tokens == 2048
    assert torch.equal(with_cache, without)


def test_pages_come_back_with_the_cache_object(glm: Any) -> None:
    with attach(glm, max_tokens=1000, block_size=61) as attachment:
        assert attachment.free_tokens == 17 * 61
        cache = new_cache(glm)
        glm(**prompts(), cache=cache)
        assert attachment.free_tokens == 13 * 61
        first = attachment.slots(cache, 0)[0] // 61
        assert first.unique().numel() == 2
        del cache
        assert attachment.free_tokens == 17 * 61
        for _ in range(5):  # more than fits at once
            glm(**prompts())


def test_reset_begins_again(glm: Any) -> None:
    with attach(glm, max_tokens=256) as attachment:
        cache = new_cache(glm)
        first = glm(**prompts(), cache=cache).logits
        cache.reset()
        assert torch.equal(glm(**prompts(), cache=cache).logits, first)
        assert attachment.free_tokens == 0


def test_detach_restores(model: Any) -> None:
    before = model(**prompts()).logits
    attachment = attach(model, max_tokens=512)
    assert all("forward" in layer.self_attn.__dict__ for layer in model.model.layers)
    detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not attachment.pools
    assert torch.equal(model(**prompts()).logits, before)
    with pytest.raises(RuntimeError, match="from inside"), attach(model, max_tokens=512):
        raise RuntimeError("from inside")
    assert torch.equal(model(**prompts()).logits, before)


def test_detach_inside_the_block_is_fine(glm: Any) -> None:
    with attach(glm, max_tokens=512) as attachment:
        attachment.detach()
    with pytest.raises(ValueError, match=r"^model: got one that is not attached"):
        attachment.detach()
    with pytest.raises(ValueError, match=r"^model: got one that is not attached"):
        detach(glm)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: got 0, accepted is at least 1"),
        ({"block_size": 0}, "block_size: got 0, accepted is at least 1"),
        ({"format": "fp8_v4"}, "format: got 'fp8_v4', accepted are"),
        ({"format": "int4"}, "format: got 'int4', accepted are"),
        ({"scale_style": "amax"}, "scale_style: got 'amax', accepted are"),
    ],
)
def test_attach_refuses_arguments(glm: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        attach(glm, **{"max_tokens": 64, **changed})


def test_attach_refuses_models(glm: Any) -> None:
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    with pytest.raises(ValueError, match=r"^model: got LlamaForCausalLM with LlamaAttention; accepted are models with"):
        attach(llama, max_tokens=64)
    with pytest.raises(ValueError, match=r"^model: got Linear with no attention module"):
        attach(torch.nn.Linear(2, 2), max_tokens=64)

    with attach(glm, max_tokens=64), pytest.raises(ValueError, match=r"^model: got one that is attached already"):
        attach(glm, max_tokens=64)

    glm.train()
    try:
        with pytest.raises(ValueError, match=r"^model: got training mode"):
            attach(glm, max_tokens=64)
    finally:
        glm.eval()

    attention = glm.model.layers[1].self_attn
    attention.forward = attention.forward
    try:
        with pytest.raises(ValueError, match=r"^model: layer 1: got a replaced forward"):
            attach(glm, max_tokens=64)
    finally:
        del attention.forward

    whole = attention.kv_b_proj
    attention.kv_b_proj = torch.nn.Sequential(whole)
    try:
        with pytest.raises(ValueError, match=r"^model: layer 1: got Sequential as kv_b_proj"):
            attach(glm, max_tokens=64)
    finally:
        attention.kv_b_proj = whole
    attach(glm, max_tokens=64).detach()


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"kv_lora_rank": 256}, r"^model: layer 0: got latent 256 \+ rotary 64 columns, accepted is 512 \+ 64"),
        (
            {"num_attention_heads": 129, "num_key_value_heads": 129},
            "^model: layer 0: got 129 heads, accepted are 1 to 128",
        ),
    ],
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attach_refuses_widths(family: Family, geometry: dict[str, int], message: str) -> None:
    config_class = getattr(transformers, family.config)
    config = config_class(
        **{
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "index_n_heads": 1,
            "vocab_size": 16,
            "num_hidden_layers": 1,
            "intermediate_size": 16,
            "pad_token_id": 0,
            **geometry,
        }
    )
    model = getattr(transformers, family.model)(config).eval()
    with pytest.raises(ValueError, match=message):
        attach(model, max_tokens=64)
    assert "forward" not in model.model.layers[0].self_attn.__dict__


def test_forward_refuses_training_and_gradients(models: dict[str, Any]) -> None:
    with torch.inference_mode(False):
        model = copy.deepcopy(models["GLM-MoE-DSA"])
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        with attach(model, max_tokens=512):
            with torch.enable_grad(), pytest.raises(ValueError, match=r"^hidden_states: got gradients enabled"):
                model(**prompts())
            model.train()
            with torch.no_grad(), pytest.raises(ValueError, match=r"^model: got training mode"):
                model(**prompts())
            model.eval()
            with torch.no_grad():
                model(**prompts())


def test_forward_refuses_caches(glm: Any) -> None:
    filled = new_cache(glm)
    glm(**prompts(), cache=filled)
    with attach(glm, max_tokens=1024):
        with pytest.raises(ValueError, match=r"^cache: got one that holds 120 tokens this attachment did not write"):
            glm(**prompts(), cache=filled)
        ours = new_cache(glm)
        glm(**prompts(), cache=ours)
        with pytest.raises(ValueError, match=r"^cache: got one that holds 120 tokens this attachment did not write"):
            glm(input_ids=torch.ones((2, 1), dtype=torch.int64), cache=copy.deepcopy(ours))
        ours.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match=r"^cache: got a batch of 4, but this cache was begun with a batch of 2"):
            glm(input_ids=torch.ones((4, 1), dtype=torch.int64), cache=ours)
        static = transformers.StaticCache(config=glm.config, max_cache_len=128)
        with pytest.raises(
            ValueError, match=r"^cache: got StaticCache with StaticIndexedLayer at layer 0; accepted is"
        ):
            glm(**prompts(), cache=static)


def test_forward_refuses_a_full_pool(glm: Any) -> None:
    with attach(glm, max_tokens=200) as attachment:
        cache = new_cache(glm)
        with pytest.raises(ValueError, match=r"^max_tokens: the pool of 4 pages of 64 tokens is full \(2 more pages"):
            for _ in range(3):
                glm(input_ids=prompts()["input_ids"][:, :60], cache=cache)
        del cache
        assert attachment.free_tokens == 256


def test_importing_it_imports_no_transformers() -> None:
    code = "import sys, sparsemla.integrations.transformers; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
