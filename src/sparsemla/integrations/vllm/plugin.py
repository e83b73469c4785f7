# SPDX-License-Identifier: Apache-2.0
"""The entry point of group ``vllm.general_plugins``: vLLM calls `register` in every process it starts.

It adds a name to vLLM's table of backends and changes nothing else: unless the flag names the backend, nothing of
sparsemla runs. It never raises, since a plugin that does takes the server down; a release that is not served is
refused when its backend is asked for (`backend.py`), in the same words as the warning here.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "SPARSEMLA"
BACKEND = "sparsemla.integrations.vllm.backend.SparseMLABackend"

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the backend to vLLM's registry; a second call changes nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from sparsemla.integrations.vllm.versions import UnsupportedVllmError, installed

    try:
        installed()
    except UnsupportedVllmError as error:
        logger.warning("%s", error)
    if hasattr(AttentionBackendEnum, "register"):
        if NAME not in AttentionBackendEnum.__members__:
            register_backend(NAME, BACKEND)
            # Pickled by its value, a member made at run time is unknown to a spawned worker, which unpickles the
            # configuration before it loads plugins. Pickled like this, it is registered there first.
            AttentionBackendEnum[NAME].__reduce_ex__ = _reduce
        return
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        logger.warning(
            "sparsemla: vLLM's backend CUSTOM is taken by %s; SPARSEMLA is not registered", custom.get_path()
        )


def member() -> Any:
    """vLLM's enum member of this backend, registered if need be."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[NAME]


def _reduce(protocol: int) -> tuple[Any, tuple[()]]:
    return member, ()
