# SPDX-License-Identifier: Apache-2.0
"""Run a Hugging Face DeepSeek-Sparse-Attention model on `sparse_mla_attention` and a paged, quantised KV cache.

::

    from sparsemla.integrations.transformers import attach, detach

    with torch.inference_mode(), attach(model, max_tokens=16384):
        model.generate(**inputs, max_new_tokens=64)

Served are `transformers`' GLM-MoE-DSA and DeepSeek-V3.2 classes (latent 512 + rotary 64), in inference, with the
dynamic cache that `generate` makes. Which keys are attended is decided by the model's own indexer; nothing of it is
replaced.

What `attach` changes: the ``forward`` of each attention module, as an attribute of the instance. Instead of expanding
the latents of every cached token into keys and values for every head, the query is taken into the latent space (the key
half W_UK of ``kv_b_proj`` is folded into q), attention runs on the latents where they lie in the paged cache, and the
value half W_UV is applied to the result. No weight is copied or altered, and `detach` removes the attribute again.

What the model's own cache object holds meanwhile: its indexer keys as ever, and one int64 a token and layer, the *slot*
where that token's record lies in our pool. So whatever generation does with a cache (reorder it for beams, crop it)
moves slots and stays correct. Such a cache object serves only the attachment that filled it.

Not served, and refused with a ValueError: gradients and training mode, other attention classes and widths, static,
quantised or offloaded caches, a cache that was filled elsewhere or copied, modules whose ``forward`` is replaced
already, and transformers before 5.20. Checked with transformers 5.20 and 5.24.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from sparsemla.attention import sparse_mla_attention
from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, ScaleStyle

__all__ = ["Attachment", "attach", "detach", "require_transformers"]

MIN_TRANSFORMERS = (5, 20)
"""Oldest release (major, minor) served; pyproject.toml says the same."""

LATENT, ROTARY = 512, 64
"""Columns of a record: the only widths the served models have been released with."""

ATTENTION_CLASSES = {
    "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa": "GlmMoeDsaAttention",
    "transformers.models.deepseek_v32.modeling_deepseek_v32": "DeepseekV32Attention",
}
"""Module and class name of what is served. Compared by name, so that neither has to be imported (or to exist)."""

_FORMATS = (KVFormat.FP8_DS_MLA, KVFormat.BF16)
_MARK = "_sparsemla_attachment"


def _is_served(module: torch.nn.Module) -> bool:
    cls = type(module)
    return ATTENTION_CLASSES.get(cls.__module__) == cls.__name__


@dataclass(eq=False)
class _Pages:
    """The pages of every layer's pool are handed out together: page p of one layer is page p of all."""

    num_pages: int
    block_size: int
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Taken from the end. The even pages come before the odd ones, so that a request's pages are never neighbours
        # and code that takes a request for one contiguous stretch is found out at once.
        order = [*range(0, self.num_pages, 2), *range(1, self.num_pages, 2)]
        self.free = order[::-1]

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise ValueError(
                f"max_tokens: the pool of {self.num_pages} pages of {self.block_size} tokens is full ({count} more "
                f"pages needed, {len(self.free)} free); accepted is attach(..., max_tokens=) of at least the prompts "
                "and the new tokens of all sequences, each rounded up to whole pages"
            )
        taken = self.free[-count:][::-1] if count else []
        del self.free[len(self.free) - count :]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self.free.extend(pages)
        pages.clear()


class _Sequences:
    """Where the tokens of one transformers cache object go: pages by row of the batch, and a cursor by layer.

    The cursor only grows while the layer holds tokens. After a crop the cropped slots are therefore left behind until
    the cache object dies: another row may share them after a reorder, and records are never overwritten.
    """

    def __init__(self, pages: _Pages, batch: int) -> None:
        self.pages = pages
        self.batch = batch
        self.owned: list[int] = []
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.cursors: dict[int, int] = {}
        self._made: tuple[int, int, dict[torch.device, torch.Tensor]] | None = None

    def extend(self, layer: int, length: int, batch: int, count: int, device: torch.device) -> torch.Tensor:
        """Slots (batch, count) int64 for `count` more tokens a row of a layer that holds `length` of them."""
        if batch != self.batch:
            raise ValueError(
                f"cache: got a batch of {batch}, but this cache was begun with a batch of {self.batch}; accepted is "
                "one batch size for the life of a cache"
            )
        begin = self.cursors.get(layer, 0) if length else 0
        self.cursors[layer] = begin + count
        # Every layer asks for the same tokens one after the other: made once, kept for the others.
        if self._made is None or self._made[:2] != (begin, count):
            self._made = (begin, count, {})
        slots = self._made[2].get(device)
        if slots is None:
            slots = self._made[2][device] = self._slots(begin, count).to(device, non_blocking=True)
        return slots

    def _slots(self, begin: int, count: int) -> torch.Tensor:
        block = self.pages.block_size
        missing = -(-(begin + count) // block) - len(self.rows[0])
        if missing > 0:
            taken = self.pages.take(missing * self.batch)
            self.owned.extend(taken)
            for row, pages in enumerate(self.rows):
                pages.extend(taken[row :: self.batch])
        position = torch.arange(begin, begin + count)
        page = torch.tensor(self.rows, dtype=torch.int64)[:, position // block]
        return page * block + position % block


class _AbsorbedAttention:
    """The forward of one attention module while attached; signature and result of the class it stands in for."""

    def __init__(self, attention: Any, attachment: Attachment) -> None:
        self.attention = attention
        self.attachment = attachment
        self.pool = attachment.pools[attention.layer_idx]
        self.rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb_interleave
        # GLM hands the selection on to the next layer, which may share it; DeepSeek-V3.2 does not.
        self.returns_selection = type(attention).__name__ == "GlmMoeDsaAttention"

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        prev_topk_indices: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Shapes: hidden_states (B, S, hidden), attention_mask (B or 1, 1, S, keys) bool or additive.

        Returns:
            (output (B, S, hidden), None) and, for GLM, the selection (B, S, topk) int32.

        Raises:
            ValueError: gradients, training mode, a cache of another kind or filled elsewhere, a full pool.
        """
        attention = self.attention
        cache = past_key_values if cache is None else cache
        self._refuse(hidden_states)
        if attention_mask is None:
            raise ValueError("attention_mask: got None, accepted is the 4D mask the model makes for its indexer")
        batch, length = hidden_states.shape[:-1]
        rows = batch * length

        q_resid = attention.q_a_layernorm(attention.q_a_proj(hidden_states))
        q = attention.q_b_proj(q_resid).view(batch, length, -1, attention.qk_head_dim).transpose(1, 2)
        q_nope, q_rot = q.split([attention.qk_nope_head_dim, ROTARY], dim=-1)
        latent, k_rot = attention.kv_a_proj_with_mqa(hidden_states).split([LATENT, ROTARY], dim=-1)
        latent = attention.kv_a_layernorm(latent)
        q_rot, k_rot = self.rotate(q_rot, k_rot.unsqueeze(1), *position_embeddings)

        slots, all_slots, temporary = self._place(cache, batch, length, hidden_states.device)
        record = torch.cat((latent, k_rot.squeeze(1)), dim=-1).view(rows, LATENT + ROTARY).to(torch.bfloat16)
        self.pool.write(slots.reshape(rows), record, self.attachment.scale_style)

        mask = attention_mask[:, 0]
        if attention.indexer is not None:
            # The cache by position: releases before 5.24 call that argument past_key_values.
            selection = attention.indexer(hidden_states, q_resid, position_embeddings, mask, position_ids, cache)
        elif prev_topk_indices is not None:
            selection = prev_topk_indices
        else:
            raise ValueError("prev_topk_indices: got None, accepted is the selection of the last layer with an indexer")

        heads = q_nope.shape[1]
        w_uk, w_uv = self._halves()
        # (H, T, nope) @ (H, nope, 512): the transposed result is a view, the call reads it with its strides.
        q_latent = torch.matmul(q_nope.transpose(0, 1).reshape(heads, rows, -1), w_uk).transpose(0, 1)
        out, _ = sparse_mla_attention(
            (q_latent.to(torch.bfloat16), q_rot.transpose(1, 2).reshape(rows, heads, ROTARY).to(torch.bfloat16)),
            self.pool,
            _indices(selection, mask, all_slots).view(rows, -1),
            softmax_scale=float(attention.scaling),
        )
        if temporary is not None:
            self.attachment.pages.give_back(temporary.owned)
        value = torch.matmul(out.transpose(0, 1).to(hidden_states.dtype), w_uv.transpose(1, 2))
        output = attention.o_proj(value.transpose(0, 1).reshape(batch, length, -1))
        return (output, None, selection) if self.returns_selection else (output, None)

    def _refuse(self, hidden_states: torch.Tensor) -> None:
        if self.attention.training:
            raise ValueError("model: got training mode, accepted is inference: call model.eval()")
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise ValueError(
                "hidden_states: got gradients enabled, accepted is torch.inference_mode() or torch.no_grad()"
            )

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK (H, nope, 512) and W_UV (H, v, 512): views of ``kv_b_proj``, so a changed weight is seen."""
        attention = self.attention
        nope = attention.qk_nope_head_dim
        weight = attention.kv_b_proj.weight.view(-1, nope + attention.v_head_dim, LATENT)
        return weight[:, :nope], weight[:, nope:]

    def _place(
        self, cache: Any, batch: int, length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, _Sequences | None]:
        """Slots (B, S) of the new tokens, (B, keys) of all, and what to drop again where no cache is kept."""
        layer = self.attention.layer_idx
        if cache is None:
            temporary = _Sequences(self.attachment.pages, batch)
            slots = temporary.extend(layer, 0, batch, length, device)
            return slots, slots, temporary
        held = _held_tokens(cache, layer)
        sequences = self.attachment.sequences_of(cache, batch, held)
        slots = sequences.extend(layer, held, batch, length, device)
        as_keys = slots.view(batch, 1, length, 1)
        keys, _ = cache.update(as_keys, as_keys[..., :0], layer)
        return slots, keys[:, 0, :, 0], None


def _held_tokens(cache: Any, layer: int) -> int:
    """Tokens a transformers cache holds for a layer. ValueError where it is not of the served kind."""
    layers = cache.layers
    if layer >= len(layers) or type(layers[layer]).__name__ != "DynamicIndexedLayer" or cache.offloading:
        kind = type(layers[layer]).__name__ if layer < len(layers) else "no layer"
        raise ValueError(
            f"cache: got {type(cache).__name__} with {kind} at layer {layer}{', offloaded' * bool(cache.offloading)}; "
            "accepted is transformers.DynamicCache(config=model.config), not offloaded"
        )
    return int(layers[layer].get_seq_length())


def _indices(selection: torch.Tensor, mask: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Positions the indexer chose (B, S, topk) to slots (B, S, topk) int32, -1 where the mask forbids the key.

    The indexer always names topk keys: where fewer are visible the rest are masked ones, which its own model drops by
    adding the mask to the scores.
    """
    batch, length, _ = selection.shape
    chosen = selection.long()
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    visible = allowed.expand(batch, length, -1).gather(-1, chosen)
    found = slots.unsqueeze(1).expand(batch, length, -1).gather(-1, chosen)
    return torch.where(visible, found, -1).to(torch.int32)


class Attachment:
    """A model on our attention. Made by `attach`; ends with `detach`, or as a context manager.

    Attributes:
        model: the model.
        format: of the records.
        scale_style: how their scales are made.
        pools: the paged cache of each layer, by layer index.
        pages: which pages are free.
    """

    def __init__(self, model: Any, fmt: KVFormat, scale_style: ScaleStyle, pages: _Pages) -> None:
        self.model = model
        self.format = fmt
        self.scale_style: ScaleStyle = scale_style
        self.pages = pages
        self.pools: dict[int, PagedKVCache] = {}
        self._modules: list[Any] = []
        # Keyed by the cache object: its pages are free again once nobody can reach it.
        self._sequences: weakref.WeakKeyDictionary[Any, _Sequences] = weakref.WeakKeyDictionary()

    def add(self, attention: Any) -> None:
        """Give a layer its pool and its forward."""
        pool = PagedKVCache.allocate(
            self.pages.num_pages,
            self.pages.block_size,
            self.format,
            device=attention.kv_b_proj.weight.device,
            d_qk=LATENT + ROTARY,
        )
        self.pools[attention.layer_idx] = pool
        attention.forward = _AbsorbedAttention(attention, self)
        self._modules.append(attention)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in the pools of all layers together (indexer keys are the model's own, not counted)."""
        return sum(pool.layout.record_bytes for pool in self.pools.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools of all layers."""
        return sum(pool.data.numel() * pool.data.element_size() for pool in self.pools.values())

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into the free pages."""
        return len(self.pages.free) * self.pages.block_size

    def sequences_of(self, cache: Any, batch: int, held: int) -> _Sequences:
        """The bookkeeping of a cache object, begun where it is new. ValueError where it was filled elsewhere."""
        known = self._sequences.get(cache)
        if known is None or (known.batch != batch and not held):
            if held:
                raise ValueError(
                    f"cache: got one that holds {held} tokens this attachment did not write (filled before attach(), "
                    "by another attachment, or copied); accepted is a new cache, or one this attachment filled"
                )
            known = self._sequences[cache] = _Sequences(self.pages, batch)
            weakref.finalize(cache, self.pages.give_back, known.owned)
        return known

    def slots(self, cache: Any, layer: int) -> torch.Tensor:
        """Slots (B, tokens) int64 of the tokens a cache object holds for a layer."""
        return torch.as_tensor(cache.layers[layer].keys[:, 0, :, 0])

    def records(self, cache: Any, layer: int) -> torch.Tensor:
        """What our cache holds of them, dequantised: (B, tokens, 576) float32, columns [latent | rotary]."""
        slots = self.slots(cache, layer)
        return self.pools[layer].read(slots.reshape(-1)).view(*slots.shape, LATENT + ROTARY)

    def detach(self) -> None:
        """Give every module its own forward back and release the pools. ValueError where it was done already."""
        if self.model.__dict__.get(_MARK) is not self:
            raise ValueError("model: got one that is not attached, accepted is a model after attach()")
        for module in self._modules:
            del module.forward
        self._modules.clear()
        self.pools.clear()
        self._sequences.clear()
        del self.model.__dict__[_MARK]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.model.__dict__.get(_MARK) is self:
            self.detach()


def require_transformers() -> None:
    """Refuse a transformers that is missing or too old, without importing it.

    Raises:
        ValueError: it names the version found and the one needed.
    """
    least = ".".join(map(str, MIN_TRANSFORMERS))
    accepted = f"accepted is {least} or newer: pip install 'sparsemla[transformers]'"
    try:
        # What is imported counts: it need not be what is installed.
        found = getattr(sys.modules.get("transformers"), "__version__", None) or importlib.metadata.version(
            "transformers"
        )
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"transformers: not installed, {accepted}") from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MIN_TRANSFORMERS:
        raise ValueError(f"transformers: got version {found}, {accepted}")


def attach(
    model: torch.nn.Module,
    *,
    max_tokens: int,
    format: KVFormat | str = KVFormat.FP8_DS_MLA,
    block_size: int = 64,
    scale_style: ScaleStyle = "float32",
) -> Attachment:
    """Let a model generate with `sparse_mla_attention` over a paged cache of its own.

    Args:
        model: one whose attention layers are all GLM-MoE-DSA's or DeepSeek-V3.2's, in eval mode. Weights of any
            floating dtype; queries and latents are rounded to bfloat16 for the call and the cache.
        max_tokens: tokens the cache holds, all sequences together (prompts and what is generated), each sequence
            rounded up to whole pages. Its memory is taken here, on the device of each layer.
        format: "fp8_ds_mla" (656 bytes a token and layer) or "bf16" (1152).
        block_size: tokens of a page.
        scale_style: "float32" (amax / 448) or "pow2".

    Returns:
        The attachment, which is also a context manager that detaches at its end.

    Raises:
        ValueError: the model is attached already, is in training mode, has other attention classes, widths or weights,
            transformers is older than 5.20, or an argument is out of range. The model is unchanged then.
    """
    fmt = KVFormat.parse(format)
    if fmt not in _FORMATS:
        raise ValueError(f"format: got {fmt.value!r}, accepted are {[one.value for one in _FORMATS]}: 576 columns")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, accepted is at least 1")
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size}, accepted is at least 1")
    if scale_style not in ("float32", "pow2"):
        raise ValueError(f"scale_style: got {scale_style!r}, accepted are 'float32' and 'pow2'")
    if _MARK in model.__dict__:
        raise ValueError("model: got one that is attached already, accepted is a model after detach()")
    layers = _served_layers(model)
    require_transformers()
    attachment = Attachment(model, fmt, scale_style, _Pages(-(-max_tokens // block_size), block_size))
    model.__dict__[_MARK] = attachment
    try:
        for attention in layers:
            attachment.add(attention)
    except BaseException:
        attachment.detach()
        raise
    return attachment


def detach(model: torch.nn.Module) -> None:
    """Undo `attach`: the model is what it was. ValueError where it is not attached."""
    attachment = model.__dict__.get(_MARK)
    if attachment is None:
        raise ValueError("model: got one that is not attached, accepted is a model after attach()")
    attachment.detach()


def _served_layers(model: torch.nn.Module) -> list[Any]:
    """The attention modules to replace. ValueError where the model is not served."""
    names = " and ".join(ATTENTION_CLASSES.values())
    # Decoder layers name their attention `self_attn`; one of another class beside served ones must not be overlooked.
    others = {
        type(module).__name__
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "self_attn" and not _is_served(module)
    }
    layers: list[Any] = [module for module in model.modules() if _is_served(module)]
    if others or not layers:
        found = ", ".join(sorted(others)) or "no attention module"
        raise ValueError(f"model: got {type(model).__name__} with {found}; accepted are models with {names}")
    if model.training:
        raise ValueError("model: got training mode, accepted is inference: call model.eval()")
    for attention in layers:
        _check_layer(attention)
    return layers


def _check_layer(attention: Any) -> None:
    where = f"model: layer {attention.layer_idx}"
    checks: tuple[tuple[bool, Callable[[], str]], ...] = (
        (
            (attention.kv_lora_rank, attention.qk_rope_head_dim) == (LATENT, ROTARY),
            lambda: (
                f"got latent {attention.kv_lora_rank} + rotary {attention.qk_rope_head_dim} columns, "
                f"accepted is {LATENT} + {ROTARY}"
            ),
        ),
        (
            attention.num_heads <= 128,
            lambda: f"got {attention.num_heads} heads, accepted are 1 to 128",
        ),
        (
            type(attention.kv_b_proj) is torch.nn.Linear and attention.kv_b_proj.weight.is_floating_point(),
            lambda: (
                f"got {type(attention.kv_b_proj).__name__} as kv_b_proj, accepted is an unquantised torch.nn.Linear"
            ),
        ),
        (
            "forward" not in attention.__dict__,
            lambda: "got a replaced forward (device_map hooks do that), accepted is the class's own",
        ),
    )
    for holds, message in checks:
        if not holds:
            raise ValueError(f"{where}: {message()}")
