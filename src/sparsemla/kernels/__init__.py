# SPDX-License-Identifier: Apache-2.0
"""Kernels: who computes one attention call. See :mod:`sparsemla.kernels.registry` for the table."""
