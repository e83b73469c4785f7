# SPDX-License-Identifier: Apache-2.0
"""What differs between the vLLM releases that are served; everything else in this package is the same for all.

Read in vLLM's sources at the tags of `TESTED`: ``vllm/v1/attention/backends/registry.py`` (names),
``vllm/model_executor/layers/attention/mla_attention.py`` (what a layer asks of backend, metadata and impl) and
``vllm/v1/attention/backends/mla/`` (what its own sparse backends do).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


class UnsupportedVllmError(RuntimeError):
    """This vLLM release, or what is asked of it, is not served. No ImportError: vLLM hides the message of those."""


@dataclass(frozen=True)
class VllmRelease:
    """One tested release.

    Attributes:
        version: its version, without a local part.
        flag: what ``--attention-config '{"backend": ...}'`` is given.
        rope_free_fp8: its cache writer fills the rotary columns of a fp8_ds_mla record with zeros for models without
            them; before, such models have bf16 caches only.
        gathers_prefills: under prefill and decode context parallelism together its layer merges decode rows only and
            takes prefill rows as finished. Before, it would add up rows of different tokens.
    """

    version: str
    flag: str
    rope_free_fp8: bool
    gathers_prefills: bool


TESTED: dict[str, VllmRelease] = {
    "0.26.0": VllmRelease("0.26.0", flag="CUSTOM", rope_free_fp8=False, gathers_prefills=False),
    "0.33.0": VllmRelease("0.33.0", flag="SPARSEMLA", rope_free_fp8=True, gathers_prefills=True),
}
"""The registry of 0.26.0 takes no new names; its member CUSTOM is meant for backends from outside."""


def release_of(version: str) -> VllmRelease:
    """The release of a version string such as ``0.33.0`` or ``0.33.0+cu130``.

    Raises:
        UnsupportedVllmError: it is none of `TESTED`; names it and them.
    """
    found = TESTED.get(version.partition("+")[0])
    if found is None:
        raise UnsupportedVllmError(
            f"sparsemla: got vLLM {version}, accepted are {' and '.join(TESTED)}; install one of them, or start vLLM "
            "with an attention backend of its own"
        )
    return found


@cache
def installed() -> VllmRelease:
    """The release of the vLLM that is imported here.

    Raises:
        UnsupportedVllmError: see `release_of`.
    """
    import vllm

    return release_of(str(vllm.__version__))
