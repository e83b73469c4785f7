# SPDX-License-Identifier: Apache-2.0
"""Model geometry, parallelism, limits: presets, config.json, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsemla.formats import KVFormat
from sparsemla.serving.config import PRESETS, ModelGeometry, Parallelism, ServingConfig, ServingLimits


def serving(model: str = "glm-5.3", *, host_cache: bool = False, limits: ServingLimits | None = None, **parallel: int):
    limits = limits or ServingLimits(max_model_len=65_536, max_num_seqs=32)
    return ServingConfig(ModelGeometry.preset(model), Parallelism(**parallel), limits, host_cache=host_cache)


@pytest.mark.parametrize(
    ("name", "heads", "attention", "indexers", "d_qk", "topk", "fmt"),
    [
        ("deepseek-v3.2", 128, 62, 62, 576, 2048, KVFormat.FP8_DS_MLA),
        ("glm-5", 64, 79, 79, 576, 2048, KVFormat.FP8_DS_MLA),
        ("glm-5.2", 64, 79, 22, 576, 2048, KVFormat.FP8_DS_MLA),
        ("glm-5.3", 64, 79, 22, 576, 2048, KVFormat.FP8_DS_MLA),
        ("deepseek-v4", 64, 44, 21, 512, 512, KVFormat.FP8_V4),
        ("deepseek-v4-pro", 128, 62, 30, 512, 1024, KVFormat.FP8_V4),
    ],
)
def test_presets(name: str, heads: int, attention: int, indexers: int, d_qk: int, topk: int, fmt: KVFormat) -> None:
    model = ModelGeometry.preset(name)
    assert (model.heads, model.d_qk, model.topk) == (heads, d_qk, topk)
    assert model.attention_layers() == attention
    assert model.indexer_layers() == indexers
    assert model.formats[0] is fmt
    assert model.indexer_record_bytes == 132
    assert model.source


def test_prediction_layers_count_only_when_tokens_are_speculated() -> None:
    model = ModelGeometry.preset("glm-5.3")
    assert (model.attention_layers(mtp=False), model.indexer_layers(mtp=False)) == (78, 21)
    assert not serving().mtp
    assert serving(limits=ServingLimits(max_model_len=1000, spec_tokens=1)).mtp


@pytest.mark.parametrize(
    ("model_class", "preset"), [("DeepseekV32Config", "deepseek-v3.2"), ("GlmMoeDsaConfig", "glm-5")]
)
def test_presets_agree_with_transformers_defaults(model_class: str, preset: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, model_class)().to_dict()
    config["num_nextn_predict_layers"] = 1  # transformers drops the prediction layer
    ours, theirs = ModelGeometry.preset(preset), ModelGeometry.from_config(config, name=preset)
    assert (ours.groups, ours.heads, ours.topk, ours.d_qk) == (theirs.groups, theirs.heads, theirs.topk, theirs.d_qk)


def test_v4_agrees_with_transformers_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config().to_dict()
    theirs = ModelGeometry.from_config(config)
    assert theirs.heads == 64 and theirs.topk == 512
    assert (
        sum(group.layers for group in theirs.groups if group.tokens_per_record > 1 and group.kind == "attention") == 43
    )


def test_config_json_file_and_directory(tmp_path: Path) -> None:
    config, _ = PRESETS["glm-5.3"]
    folder = tmp_path / "my-glm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for given in (str(folder), str(folder / "config.json")):
        model = ModelGeometry.load(given)
        assert model.name == "my-glm"
        assert model.groups == ModelGeometry.preset("glm-5.3").groups


def test_indexer_types_pattern_and_list_agree_with_the_frequency() -> None:
    config = dict(PRESETS["glm-5.3"][0])
    kinds = ["full"] * 3 + ["shared"] * 3 + ["full", "shared", "shared", "shared"] * 18
    expected = ModelGeometry.from_config(config).groups
    assert ModelGeometry.from_config({**config, "indexer_types": kinds}).groups == expected
    pattern = "".join(kind[0].upper() for kind in kinds)
    assert ModelGeometry.from_config({**config, "index_topk_pattern": pattern}).groups == expected


def test_hybrid_counts_only_its_sparse_layers_and_says_so() -> None:
    config = {
        "model_type": "glm5_next",
        "text_config": {
            **PRESETS["glm-5"][0],
            "model_type": "glm5_next_text",
            "num_hidden_layers": 8,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"] * 2,
            "index_kpool": 4,
        },
    }
    model = ModelGeometry.from_config(config)
    assert (model.layers, model.d_qk, model.formats[0]) == (2, 512, KVFormat.FP8_NOPE)
    assert [group.layers for group in model.groups] == [2, 2]
    assert model.groups[1].tokens_per_record == 4
    assert "6 linear-attention layers" in model.notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, "has no index_topk"),
        ({**PRESETS["glm-5"][0], "kv_lora_rank": 256}, "kv_lora_rank 256"),
        ({k: v for k, v in PRESETS["glm-5"][0].items() if k != "num_attention_heads"}, "num_attention_heads"),
        ({**PRESETS["glm-5"][0], "indexer_types": ["full"]}, "indexer_types: got 1 entries"),
        ({**PRESETS["deepseek-v4"][0], "compress_ratios": [8] * 44}, r"got \[8\]"),
        ({**PRESETS["deepseek-v4"][0], "compress_ratios": [4]}, "at least 43 ratios"),
    ],
)
def test_unusable_configurations(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelGeometry.from_config(config, name="it")


def test_unreadable_files(tmp_path: Path) -> None:
    bad = tmp_path / "config.json"
    bad.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        ModelGeometry.load(str(bad))
    bad.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="JSON list"):
        ModelGeometry.load(str(bad))
    with pytest.raises(ValueError, match=r"accepted are deepseek-v3\.2, .*glm-5\.3"):
        ModelGeometry.load("gpt-2")


def test_prefill_factor_is_settled_at_start() -> None:
    assert ServingLimits(max_model_len=262_144).prefill_rows == 5 * 262_144
    assert ServingLimits(max_model_len=262_145).prefill_rows == 2 * 262_145
    assert ServingLimits(max_model_len=262_145, prefill_factor=3).prefill_rows == 3 * 262_145
    lowered = ServingLimits(max_model_len=300_000).lowered(200_000)
    assert lowered.prefill_factor == 2  # not 5: the workspace would have to grow as the model length shrinks
    assert lowered.prefill_rows == 400_000
    with pytest.raises(ValueError, match="accepted is at most 200000"):
        lowered.lowered(300_000)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Parallelism(tp=4, dcp=3), "dcp: got 3, which does not divide tp 4; accepted are 1, 2, 4"),
        (lambda: Parallelism(tp=2, pcp=2, dcp=8), "does not divide tp · pcp = 4"),
        (lambda: Parallelism(tp=0), "tp: got 0"),
        (lambda: Parallelism(dcp_comm="ring"), "dcp_comm: got 'ring'"),
        (lambda: ServingLimits(max_model_len=0), "max_model_len: got 0"),
        (lambda: ServingLimits(max_model_len=10, utilization=1.5), "utilization: got 1.5"),
        (lambda: ServingLimits(max_model_len=10, spec_tokens=-1), "spec_tokens: got -1"),
        (
            lambda: ServingLimits(max_model_len=10, max_num_batched_tokens=8, max_num_seqs=9),
            "at least max_num_seqs = 9",
        ),
        (lambda: ServingLimits(max_model_len=10, prefill_factor=0), "prefill_factor: got 0"),
        (lambda: ServingLimits(max_model_len=10, arch="sm80"), "arch: got 'sm80'"),
        (lambda: serving(tp=5), "tp: got 5, which does not divide the 64 heads of glm-5.3"),
        (lambda: serving(tp=2, dcp=2, interleave=3), "interleave: got 3"),
        (
            lambda: serving(limits=ServingLimits(max_model_len=10, max_num_seqs=1, cache_format=KVFormat.FP8_V4)),
            "cache_format: got fp8_v4 for glm-5.3, accepted are fp8_ds_mla, bf16",
        ),
    ],
)
def test_refusals(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_heads_gathered() -> None:
    assert serving(tp=4).heads_gathered == 16
    assert serving(tp=4, dcp=4).heads_gathered == 64
    assert serving(tp=8, dcp=2).heads_gathered == 16
    assert serving(tp=2, pcp=2, dcp=2).heads_gathered == 32  # dcp ranks are the pcp ranks: they hold the same heads
    assert serving(tp=2, pcp=2, dcp=4).heads_gathered == 64
