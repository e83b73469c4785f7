# SPDX-License-Identifier: Apache-2.0
"""The attention backend ``SPARSEMLA`` of vLLM: a plugin that vLLM finds by its entry point. See docs/vllm.md.

``versions.py``  what differs between the vLLM releases served
``plugin.py``    the entry point: registers the backend, imports nothing heavy
``backend.py``   what vLLM asks before it starts: capabilities, cache shape
``metadata.py``  what a step's batch looks like, once a step
``context.py``   prefill and decode context parallelism together: the records of a prefill, gathered
``warmup.py``    kernels compiled and loaded before graphs are captured
``impl.py``      the forward of one layer

Importing this package imports no vllm.
"""
