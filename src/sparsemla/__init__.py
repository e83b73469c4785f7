# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over a paged, quantised KV cache.

The names below are looked up on first use, so that ``import sparsemla`` costs nothing and pulls in none of the optional
packages (transformers, triton, cutlass, matplotlib).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsemla import audit
    from sparsemla.attention import sparse_mla_attention
    from sparsemla.cache import PagedKVCache, slots_from_positions
    from sparsemla.formats import KVFormat, RecordLayout, pack, record_layout, unpack
    from sparsemla.reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "KVFormat",
    "PagedKVCache",
    "RecordLayout",
    "__version__",
    "audit",
    "pack",
    "record_layout",
    "reference_attention",
    "slots_from_positions",
    "sparse_mla_attention",
    "unpack",
]

# name -> (module, attribute); attribute None means the module itself
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "KVFormat": ("sparsemla.formats", "KVFormat"),
    "PagedKVCache": ("sparsemla.cache", "PagedKVCache"),
    "RecordLayout": ("sparsemla.formats", "RecordLayout"),
    "audit": ("sparsemla.audit", None),
    "pack": ("sparsemla.formats", "pack"),
    "record_layout": ("sparsemla.formats", "record_layout"),
    "reference_attention": ("sparsemla.reference", "reference_attention"),
    "slots_from_positions": ("sparsemla.cache", "slots_from_positions"),
    "sparse_mla_attention": ("sparsemla.attention", "sparse_mla_attention"),
    "unpack": ("sparsemla.formats", "unpack"),
}


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
