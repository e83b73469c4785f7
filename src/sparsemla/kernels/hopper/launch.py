# SPDX-License-Identifier: Apache-2.0
"""Loads compiled kernels through the CUDA driver and launches them on torch's current stream."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from sparsemla.kernels.hopper.build import Variant, load_code
from sparsemla.kernels.hopper.params import Arguments


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or a RuntimeError that names it."""
    from cuda.bindings import driver

    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what}: {error.name}")
    return values[0] if values else None


@dataclass(frozen=True)
class Loaded:
    """A kernel ready to launch on one device.

    Attributes:
        function: the driver's handle.
        variant: what it is.
        shared_bytes, threads: launch shape of a CTA.
        active_clusters: clusters of this variant the device runs at once.
    """

    function: Any
    variant: Variant
    shared_bytes: int
    threads: int
    active_clusters: int

    def launch(self, clusters: int, arguments: Arguments, stream: int) -> None:
        """Enqueues `clusters` clusters on a stream; returns at once.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        from cuda.bindings import driver

        config = _config(self.variant.cluster, self.threads, self.shared_bytes)
        config.gridDimX = clusters * self.variant.cluster
        config.hStream = driver.CUstream(stream)
        _check(driver.cuLaunchKernelEx(config, self.function, arguments.address, 0), "cuLaunchKernelEx")


def _config(cluster: int, threads: int, shared_bytes: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cluster
    attribute.value.clusterDim.y = 1
    attribute.value.clusterDim.z = 1
    config = driver.CUlaunchConfig()
    config.gridDimX = cluster
    config.gridDimY = 1
    config.gridDimZ = 1
    config.blockDimX = threads
    config.blockDimY = 1
    config.blockDimZ = 1
    config.sharedMemBytes = shared_bytes
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


@functools.cache
def load(variant: Variant, device_index: int) -> Loaded:
    """The kernel of a variant on a device; compiled if it is not on disk.

    Raises:
        RuntimeError: the driver refused the image (a driver older than the compiler, say), or a graph is being
            captured: loading has no place there, see `sparsemla.kernels.hopper.prepare`.
    """
    from cuda.bindings import driver

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"kernel {variant.name} is first needed inside a graph capture: run the call once before, or load every "
            "variant of a head count with sparsemla.kernels.hopper.prepare(heads, cache_format=..., d_qk=...)"
        )
    code = load_code(variant)
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        library = _check(
            driver.cuLibraryLoadData(code.cubin, None, None, 0, None, None, 0), f"loading kernel {variant.name}"
        )
        kernel = _check(driver.cuLibraryGetKernel(library, code.entry.encode()), f"finding kernel {variant.name}")
        function = _check(driver.cuKernelGetFunction(kernel), f"kernel {variant.name}")
        attributes = driver.CUfunction_attribute
        _check(
            driver.cuFuncSetAttribute(
                function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, code.shared_bytes
            ),
            "shared memory",
        )
        if variant.cluster > 8:
            _check(
                driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
                "cluster size",
            )
        config = _config(variant.cluster, code.threads, code.shared_bytes)
        active = _check(driver.cuOccupancyMaxActiveClusters(function, config), "cuOccupancyMaxActiveClusters")
    return Loaded(function, variant, code.shared_bytes, code.threads, int(active))
