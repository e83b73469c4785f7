# SPDX-License-Identifier: Apache-2.0
"""The comparison a sceptic can rerun: our kernels and every peer found here, on the same tensors, in one process.

`shapes` says what is measured and holds the tensors, `peers` whom we compare with, `timing` how, `floors` what this
machine can do at all, `runner` puts them together, `report` writes it down, `readme` quotes it, `plot` draws it.
"""
