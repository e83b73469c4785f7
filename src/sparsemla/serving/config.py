# SPDX-License-Identifier: Apache-2.0
"""What is served, on how many ranks, within which limits: the inputs of every decision in this package.

Three values and their combination, all immutable and checked when they are made: :class:`ModelGeometry` (the model,
from a preset or a Hugging Face ``config.json``), :class:`Parallelism` (how it is spread over GPUs),
:class:`ServingLimits` (what the engine promised) and :class:`ServingConfig`. A value that exists is possible in
itself; what one policy refuses is decided in :mod:`sparsemla.serving.paths`.

A *rank* is one GPU. Sizes are bytes, lengths are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, Literal

from sparsemla.formats import D_V, KVFormat, RecordLayout, record_layout

PREFILL_FACTOR_SHORT = 5
"""Prefill workspace rows per token of max_model_len, up to PREFILL_FACTOR_LIMIT."""
PREFILL_FACTOR_LONG = 2
"""The same above PREFILL_FACTOR_LIMIT."""
PREFILL_FACTOR_LIMIT = 262_144
"""Longest max_model_len (tokens) that still gets PREFILL_FACTOR_SHORT."""

MAX_HEADS = 128
"""Most query heads one attention call takes."""
_LARGEST = 1 << 40
"""No count of tokens, heads or ranks is larger; keeps every figure a plan prints within a float."""
_MAX_LAYERS = 10_000
_MAX_LISTED = 4096
"""Largest number whose divisors a message lists."""


def _positive(name: str, value: int, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}: got {value!r}, accepted is an integer of at least {at_least}")
    if value > _LARGEST:
        raise ValueError(f"{name}: got more than 2^40, accepted is an integer of at most {_LARGEST}")


def _divisors(number: int) -> str:
    if number > _MAX_LISTED:
        return f"divisors of {number}"
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same kind of cache.

    Attributes:
        name: what reports call it.
        kind: ``attention`` (records of the chosen cache format) or ``indexer`` (one e4m3 key and its float32 scales).
        layers: layers of the model proper.
        mtp_layers: layers of the multi-token-prediction head; their caches exist only when tokens are speculated.
        tokens_per_record: tokens one record stands for: 1, or the ratio of a compressing layer.
        window: None where every token is kept; else only the last `window` tokens of a request are, so the group
            costs a fixed number of bytes a request and nothing a token.
    """

    name: str
    kind: Literal["attention", "indexer"]
    layers: int
    mtp_layers: int = 0
    tokens_per_record: int = 1
    window: int | None = None

    def active_layers(self, mtp: bool) -> int:
        """Layers that hold a cache, with or without the prediction head."""
        return self.layers + (self.mtp_layers if mtp else 0)


@dataclass(frozen=True)
class ModelGeometry:
    """The shape of a sparse-MLA model, as far as attention and its memory depend on it."""

    name: str
    heads: int
    """Query heads of the whole model."""
    d_qk: int
    """Columns of a query head and of a record after absorption: 576, or 512 where there is no separate rotary part."""
    rope_dim: int
    topk: int
    """Keys attended per query token (index_topk)."""
    index_heads: int
    index_head_dim: int
    layers: int
    mtp_layers: int
    max_position_embeddings: int
    groups: tuple[CacheGroup, ...]
    formats: tuple[KVFormat, ...]
    """Cache formats that fit, the usual one first."""
    source: str = ""
    """Where the figures come from."""
    notes: tuple[str, ...] = ()
    """What the model keeps in GPU memory that no group counts."""

    def __post_init__(self) -> None:
        for name in ("heads", "d_qk", "topk", "index_head_dim", "layers", "max_position_embeddings"):
            _positive(f"{self.name}: {name}", getattr(self, name))
        for name in ("rope_dim", "mtp_layers", "index_heads"):
            _positive(f"{self.name}: {name}", getattr(self, name), at_least=0)
        if not any(group.kind == "attention" for group in self.groups):
            raise ValueError(f"{self.name}: groups: got none of kind 'attention', accepted is at least one")

    @property
    def indexer_record_bytes(self) -> int:
        """Bytes of one indexer key: e4m3 values and one float32 scale for every 128 of them."""
        return self.index_head_dim + 4 * -(-self.index_head_dim // 128)

    @property
    def default_block_size(self) -> int:
        """Tokens of a cache page where none is asked for: 64, or twice the largest ratio of a compressing layer."""
        ratio = max(group.tokens_per_record for group in self.groups)
        return max(64, 2 * ratio if ratio > 1 else 64)

    def attention_layers(self, mtp: bool = True) -> int:
        """Layers whose attention this package serves (windows included once), with or without the prediction head."""
        return self.layers + (self.mtp_layers if mtp else 0)

    def indexer_layers(self, mtp: bool = True) -> int:
        """Layers that keep an indexer cache, with or without the prediction head."""
        return sum(group.active_layers(mtp) for group in self.groups if group.kind == "indexer")

    @classmethod
    def preset(cls, name: str) -> ModelGeometry:
        """The preset of that name (see PRESETS). ValueError lists what there is."""
        try:
            config, source = PRESETS[name.lower()]
        except KeyError:
            raise ValueError(
                f"model: got {name!r}, accepted are {', '.join(sorted(PRESETS))} or the path of a config.json"
            ) from None
        return cls.from_config(config, name=name.lower(), source=source)

    @classmethod
    def load(cls, model: str) -> ModelGeometry:
        """A preset's name, a ``config.json``, or a directory that holds one → geometry.

        Raises:
            ValueError: neither, or a file that describes no sparse-MLA model.
        """
        if model.lower() in PRESETS:
            return cls.preset(model)
        path = FilePath(model)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            return cls.preset(model)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number too long
            raise ValueError(f"model: {path} cannot be read as JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"model: {path} holds a JSON {type(config).__name__}, accepted is an object")
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return cls.from_config(config, name=name, source=str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "", source: str = "") -> ModelGeometry:
        """Geometry of a Hugging Face configuration (the parsed ``config.json``).

        Raises:
            ValueError: a key is missing, or the model selects no keys (no ``index_topk``), naming what is needed.
        """
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        kind = str(config.get("model_type", ""))
        label = name or kind or "model"
        if "index_topk" not in config:
            raise ValueError(
                f"model: {label} ({kind or 'no model_type'}) has no index_topk, accepted are models with "
                f"DeepSeek sparse attention (deepseek_v32, glm_moe_dsa, deepseek_v4, glm5_next)"
            )
        if kind == "deepseek_v4" or "compress_ratios" in config:
            return _geometry_v4(config, label, source)
        return _geometry_dsa(config, label, source)


def _need(config: Mapping[str, Any], key: str, label: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"model: {label}: {key} in config.json is {value!r}, accepted is an integer")
    return value


def _layers(config: Mapping[str, Any], label: str) -> int:
    layers = _need(config, "num_hidden_layers", label)
    if not 1 <= layers <= _MAX_LAYERS:
        raise ValueError(f"model: {label}: num_hidden_layers {layers}, accepted are 1 to {_MAX_LAYERS}")
    return layers


def _optional(config: Mapping[str, Any], key: str, label: str, default: int, at_least: int = 0) -> int:
    """As `_need`; `default` where the key is missing or null."""
    if config.get(key) is None:
        return default
    value = _need(config, key, label)
    if value < at_least:
        raise ValueError(
            f"model: {label}: {key} in config.json is {value}, accepted is an integer of at least {at_least}"
        )
    return value


def _full_indexers(config: Mapping[str, Any], layers: int, label: str) -> list[bool]:
    """Which layers run their own indexer (the others reuse the selection of the last one that did).

    The rule of transformers' configuration classes: an explicit list, else a pattern of F and S, else every
    ``index_topk_freq``-th layer after ``index_skip_topk_offset``.
    """
    key = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    types: Any = config.get(key)
    if types is not None and not isinstance(types, (list, tuple, str)):
        raise ValueError(f"model: {label}: {key} in config.json is {types!r}, accepted is a list of {layers} entries")
    if key == "index_topk_pattern" and types is not None:
        types = [{"F": "full", "S": "shared"}.get(str(c), c) for c in types]
    if types is None:
        period = _optional(config, "index_topk_freq", label, 1, at_least=1)
        offset = _optional(config, "index_skip_topk_offset", label, 2)
        return [max(layer - offset + 1, 0) % period == 0 for layer in range(layers)]
    if len(types) != layers or any(kind not in ("full", "shared") for kind in types):
        raise ValueError(
            f"model: {label}: {key}: got {len(types)} entries {sorted(set(map(str, types)))}, accepted are "
            f"{layers} entries of 'full' or 'shared'"
        )
    return [kind == "full" for kind in types]


def _geometry_dsa(config: Mapping[str, Any], label: str, source: str) -> ModelGeometry:
    """DeepSeek-V3.2, GLM-5.x and their hybrids: one latent of 512 columns a token, with 64 rotary columns or none."""
    layers = _layers(config, label)
    mtp = _optional(config, "num_nextn_predict_layers", label, 0)
    latent = _need(config, "kv_lora_rank", label)
    rope = _need(config, "qk_rope_head_dim", label)
    if latent != D_V or rope not in (0, 64):
        raise ValueError(
            f"model: {label}: kv_lora_rank {latent} with qk_rope_head_dim {rope}, accepted is 512 with 64 or 0"
        )
    pool = _optional(config, "index_kpool", label, 1, at_least=1)
    full = _full_indexers(config, layers, label)
    types = config.get("layer_types")
    notes: tuple[str, ...] = ()
    sparse = [True] * layers
    if isinstance(types, list) and len(types) == layers:
        sparse = [kind != "linear_attention" for kind in types]
        if not all(sparse):
            notes = (f"the states of {layers - sum(sparse)} linear-attention layers are not counted",)
    if not any(sparse):
        raise ValueError(f"model: {label}: layer_types names no layer with sparse attention, accepted is at least one")
    indexers = sum(1 for own, here in zip(full, sparse, strict=True) if own and here)
    return ModelGeometry(
        name=label,
        heads=_need(config, "num_attention_heads", label),
        d_qk=latent + rope,
        rope_dim=rope,
        topk=_need(config, "index_topk", label),
        index_heads=_optional(config, "index_n_heads", label, 0),
        index_head_dim=_need(config, "index_head_dim", label),
        layers=sum(sparse),
        mtp_layers=mtp,
        max_position_embeddings=_need(config, "max_position_embeddings", label),
        groups=(
            CacheGroup("attention", "attention", sum(sparse), mtp),
            CacheGroup("indexer", "indexer", indexers, mtp, tokens_per_record=pool),
        ),
        formats=(KVFormat.FP8_DS_MLA, KVFormat.BF16) if rope else (KVFormat.FP8_NOPE, KVFormat.BF16),
        source=source,
        notes=notes,
    )


_V4_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _geometry_v4(config: Mapping[str, Any], label: str, source: str) -> ModelGeometry:
    """DeepSeek-V4: every layer keeps a window of raw tokens; most also keep one record for every 4 or 128 tokens."""
    layers = _layers(config, label)
    mtp = _optional(config, "num_nextn_predict_layers", label, 0)
    if _need(config, "head_dim", label) != D_V:
        raise ValueError(f"model: {label}: head_dim {config['head_dim']}, accepted is {D_V}")
    ratios = config.get("compress_ratios")
    if ratios is None:
        types = config.get("layer_types")
        if not isinstance(types, list) or any(str(kind) not in _V4_LAYER_TYPES for kind in types):
            raise ValueError(f"model: {label}: neither compress_ratios nor layer_types names the ratio of every layer")
        ratios = [_V4_LAYER_TYPES[kind] for kind in types]
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise ValueError(f"model: {label}: compress_ratios: accepted is a list of at least {layers} ratios")
    unknown = sorted({repr(r) for r in ratios[: layers + mtp] if type(r) is not int or r not in (0, 4, 128)})
    if unknown:
        raise ValueError(f"model: {label}: compress_ratios: got [{', '.join(unknown)}], accepted are 0, 4 and 128")
    own, extra = ratios[:layers], ratios[layers : layers + mtp]
    extra = extra + [0] * (mtp - len(extra))

    def count(ratio: int) -> tuple[int, int]:
        return own.count(ratio), extra.count(ratio)

    window = _need(config, "sliding_window", label)
    if window < 1:
        raise ValueError(f"model: {label}: sliding_window {window}, accepted is an integer of at least 1")
    return ModelGeometry(
        name=label,
        heads=_need(config, "num_attention_heads", label),
        d_qk=D_V,
        rope_dim=_optional(config, "qk_rope_head_dim", label, 64),
        topk=_need(config, "index_topk", label),
        index_heads=_optional(config, "index_n_heads", label, 0),
        index_head_dim=_need(config, "index_head_dim", label),
        layers=layers,
        mtp_layers=mtp,
        max_position_embeddings=_need(config, "max_position_embeddings", label),
        groups=(
            CacheGroup("attention 1:4", "attention", *count(4), tokens_per_record=4),
            CacheGroup("attention 1:128", "attention", *count(128), tokens_per_record=128),
            CacheGroup("window", "attention", layers, mtp, window=window),
            CacheGroup("indexer 1:4", "indexer", *count(4), tokens_per_record=4),
        ),
        formats=(KVFormat.FP8_V4, KVFormat.FP8_V41),
        source=source,
        notes=("the running states of the compressors are not counted",),
    )


# The public config.json of each model, reduced to the keys that are read here. GLM-5.1 and later share one geometry;
# the "full" layers of 5.2 and 5.3 are 0, 1, 2 and then every fourth from 6 on.
_GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
}
_GLM_SHARED_INDEX: dict[str, Any] = {
    **_GLM,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1_048_576,
}
_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_nextn_predict_layers": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "max_position_embeddings": 1_048_576,
}

PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek-v3.2": (
        {
            "model_type": "deepseek_v32",
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_topk": 2048,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "max_position_embeddings": 163_840,
        },
        "config.json of deepseek-ai/DeepSeek-V3.2 (also the defaults of transformers' DeepseekV32Config)",
    ),
    "glm-5": (
        {**_GLM, "max_position_embeddings": 202_752},
        "config.json of zai-org/GLM-5 (also the defaults of transformers' GlmMoeDsaConfig)",
    ),
    "glm-5.2": (_GLM_SHARED_INDEX, "config.json of zai-org/GLM-5.2"),
    "glm-5.3": (_GLM_SHARED_INDEX, "config.json of GLM-5.3 releases (model_type glm_moe_dsa)"),
    "deepseek-v4": (
        {
            **_V4,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "index_topk": 512,
            "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
        },
        "config.json of deepseek-ai/DeepSeek-V4-Flash",
    ),
    "deepseek-v4-pro": (
        {
            **_V4,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "index_topk": 1024,
            "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
        },
        "config.json of deepseek-ai/DeepSeek-V4-Pro",
    ),
}
"""name → (configuration, where it was published). ``deepseek-v4`` is the Flash model."""


@dataclass(frozen=True)
class Parallelism:
    """How one replica is spread over GPUs.

    Attributes:
        tp: tensor-parallel ranks; they share the query heads.
        dcp: ranks the KV cache of a request is sharded over (decode context parallel). They are the same GPUs, taken
            from the tp · pcp ranks.
        pcp: ranks that share the query rows of a prefill (prefill context parallel); their heads are whole, and they do
            not add shards to the cache.
        interleave: consecutive positions a rank holds before the next rank's begin.
        dcp_comm: how partial results of dcp ranks are combined: all-gather + reduce-scatter, or all-to-all.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    dcp_comm: Literal["ag_rs", "a2a"] = "ag_rs"

    def __post_init__(self) -> None:
        for name in ("tp", "dcp", "pcp", "interleave"):
            _positive(name, getattr(self, name))
        if self.dcp_comm not in ("ag_rs", "a2a"):
            raise ValueError(f"dcp_comm: got {self.dcp_comm!r}, accepted are 'ag_rs' and 'a2a'")
        ranks = self.tp * self.pcp
        if ranks % self.dcp:
            given = f"tp {self.tp}" if self.pcp == 1 else f"tp · pcp = {ranks}"
            raise ValueError(f"dcp: got {self.dcp}, which does not divide {given}; accepted are {_divisors(ranks)}")

    @property
    def world(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pcp


@dataclass(frozen=True)
class ServingLimits:
    """What the engine promised its users and its scheduler.

    Attributes:
        max_model_len: longest request, prompt and answer, in tokens.
        max_num_batched_tokens: query tokens of one step at most.
        max_num_seqs: requests of one step at most.
        spec_tokens: tokens speculated a step (a decode has 1 + spec_tokens query tokens).
        block_size: tokens of one cache page on one rank.
        cache_format: format of the attention cache; None takes the model's usual one (settled by ServingConfig).
        utilization: share of the GPU's memory the engine may use.
        prefill_factor: rows of the bf16 prefill workspace per token of max_model_len. None takes 5, or 2 above 262,144
            tokens. It is settled once, here: `lowered` keeps it, so that a workspace sized at start stays large enough
            and no smaller than what is chunked for it later.
        arch: kernel generation that policy ``flashmla`` pads heads for (64 on sm90, 128 on sm100 prefill).
    """

    max_model_len: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    spec_tokens: int = 0
    block_size: int = 64
    cache_format: KVFormat | None = None
    utilization: float = 0.9
    prefill_factor: int | None = None
    arch: Literal["sm90", "sm100"] = "sm90"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"):
            _positive(name, getattr(self, name))
        _positive("spec_tokens", self.spec_tokens, at_least=0)
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization: got {self.utilization}, accepted is above 0 and at most 1")
        if self.arch not in ("sm90", "sm100"):
            raise ValueError(f"arch: got {self.arch!r}, accepted are 'sm90' and 'sm100'")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, accepted is at least max_num_seqs = "
                f"{self.max_num_seqs} (every request of a step has a query token)"
            )
        if self.max_num_batched_tokens <= self.spec_tokens:
            raise ValueError(
                f"spec_tokens: got {self.spec_tokens}, accepted is at most max_num_batched_tokens - 1 = "
                f"{self.max_num_batched_tokens - 1} (a decode has 1 + spec_tokens query tokens of one step)"
            )
        if self.prefill_factor is None:
            short = self.max_model_len <= PREFILL_FACTOR_LIMIT
            object.__setattr__(self, "prefill_factor", PREFILL_FACTOR_SHORT if short else PREFILL_FACTOR_LONG)
        else:
            _positive("prefill_factor", self.prefill_factor)
        if self.cache_format is not None:
            object.__setattr__(self, "cache_format", KVFormat.parse(self.cache_format))

    @property
    def prefill_rows(self) -> int:
        """Rows of a bf16 workspace that holds prefill_factor requests of the longest length."""
        return (self.prefill_factor or 0) * self.max_model_len  # the factor is settled in __post_init__

    @property
    def decode_query_len(self) -> int:
        """Query tokens of one decode."""
        return 1 + self.spec_tokens

    def lowered(self, max_model_len: int) -> ServingLimits:
        """The same limits for a shorter max_model_len (an engine that found less memory); the factor stays.

        Raises:
            ValueError: the new length is longer.
        """
        if max_model_len > self.max_model_len:
            raise ValueError(f"max_model_len: got {max_model_len}, accepted is at most {self.max_model_len}")
        return replace(self, max_model_len=max_model_len)


@dataclass(frozen=True)
class ServingConfig:
    """One deployment. What is impossible whatever the policy is refused here.

    Attributes:
        host_cache: the full cache lives in host memory; the GPU holds a hot buffer of records per request.
    """

    model: ModelGeometry
    parallel: Parallelism
    limits: ServingLimits
    host_cache: bool = False
    layout: RecordLayout = field(init=False)
    """Records of the attention cache."""

    def __post_init__(self) -> None:
        model, parallel = self.model, self.parallel
        if model.heads % parallel.tp:
            raise ValueError(
                f"tp: got {parallel.tp}, which does not divide the {model.heads} heads of {model.name}; "
                f"accepted are {_divisors(model.heads)}"
            )
        if self.heads > MAX_HEADS:
            raise ValueError(
                f"tp: got {parallel.tp}, which leaves a rank {self.heads} heads; accepted are at most {MAX_HEADS}"
            )
        fmt = self.limits.cache_format or model.formats[0]
        if fmt not in model.formats:
            accepted = ", ".join(f.value for f in model.formats)
            raise ValueError(f"cache_format: got {fmt.value} for {model.name}, accepted are {accepted}")
        if self.limits.block_size % parallel.interleave:
            raise ValueError(
                f"interleave: got {parallel.interleave}, accepted are divisors of the block size "
                f"{self.limits.block_size}"
            )
        if parallel.dcp > 1 and self.heads_gathered > MAX_HEADS:
            raise ValueError(
                f"dcp: {parallel.dcp} ranks gather {self.heads_gathered} heads, accepted are at most {MAX_HEADS}"
            )
        object.__setattr__(self, "limits", replace(self.limits, cache_format=fmt))
        object.__setattr__(self, "layout", record_layout(fmt, model.d_qk if fmt is KVFormat.BF16 else None))

    @property
    def cache_format(self) -> KVFormat:
        """The settled cache format."""
        return self.layout.format

    @property
    def heads(self) -> int:
        """Query heads of one rank."""
        return self.model.heads // self.parallel.tp

    @property
    def heads_gathered(self) -> int:
        """Query heads that attend one rank's shard: its own, and those of the dcp ranks that hold other heads.

        With pcp, dcp ranks are first the pcp ranks (same heads) and only beyond that the tp ranks.
        """
        dcp, pcp = self.parallel.dcp, self.parallel.pcp
        if dcp == 1:
            return self.heads
        if pcp > 1:
            return self.heads * (dcp // pcp) if dcp > pcp else self.heads
        return self.heads * dcp

    @property
    def mtp(self) -> bool:
        """Whether the caches of the prediction layers exist."""
        return self.limits.spec_tokens > 0

    @property
    def gathers_prefill_kv(self) -> bool:
        """Prefill rows and KV shards are both split over ranks: the shards must come together for a prefill."""
        return self.parallel.pcp > 1 and self.parallel.dcp > 1

    def warnings(self) -> tuple[str, ...]:
        """What is possible but deserves a word."""
        words = list(self.model.notes)
        if self.limits.max_model_len > self.model.max_position_embeddings:
            words.append(
                f"max_model_len {self.limits.max_model_len} is beyond the "
                f"{self.model.max_position_embeddings} positions {self.model.name} was published for"
            )
        return tuple(words)
