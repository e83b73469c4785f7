# SPDX-License-Identifier: Apache-2.0
"""A cache whose records live in host memory, with a hot buffer of each request's records on the device.

=============  ====================================================================================
``memory.py``  pinned host memory
``lanes.py``   which part of the hot buffers belongs to which request; shared by all layers
``hot.py``     which records are hot, least recently used first; which must come
``moving.py``  copies of records between pools
``staging.py`` contexts of prefills brought as a whole, ahead of their use
``cache.py``   `HostCache`: one layer's cache, made of these
``attend.py``  attention of a batch over a host cache
=============  ====================================================================================
"""

from __future__ import annotations

from sparsemla.serving.host_cache.cache import HostCache, HostCacheStats
from sparsemla.serving.host_cache.lanes import RequestLanes
from sparsemla.serving.host_cache.memory import host_pool
from sparsemla.serving.host_cache.staging import StagingRing

__all__ = ["HostCache", "HostCacheStats", "RequestLanes", "StagingRing", "host_pool"]
