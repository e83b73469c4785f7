# SPDX-License-Identifier: Apache-2.0
"""The algebra of partial answers: attention over disjoint sets of keys, merged exactly by log-sum-exp.

A partial answer is (out, lse): the softmax-weighted mean of its keys' values, and the logarithm of the sum of their
exp(logit). Of parts i the whole is ``lse = log Σ exp(lse_i)``, ``out = Σ exp(lse_i - lse) · out_i``. A part without
keys (out 0, lse -inf) is the identity; all parts without keys give out 0, lse -inf. An attention sink is no key of any
part: it is applied once, to the whole, as ``out · exp(lse) / (exp(lse) + exp(sink))``.

Everything here is float32, in place where it can be, and never waits for the device.
"""

from __future__ import annotations

import torch

from sparsemla.formats import D_V


def total_lse(parts: torch.Tensor) -> torch.Tensor:
    """(parts, ...) float32 → (...): the lse of all keys; -inf where no part has any."""
    top = parts.amax(dim=0)
    reference = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN for good
    return (parts - reference).exp_().sum(dim=0).log_().add_(reference)


def weight_of(part: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """exp(part - total): what a part counts in the whole, in [0, 1]; 0 for a part without keys, whatever the total."""
    return (part - total).exp_().masked_fill_(part == -torch.inf, 0.0)


def sink_gate(lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """exp(lse) / (exp(lse) + exp(sink)), for lse (..., heads) and sink (heads,), ±inf allowed; 0 without keys."""
    return torch.sigmoid(lse - sink).masked_fill_(lse == -torch.inf, 0.0)


def merge_parts(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sink: torch.Tensor | None,
    scratch: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Parts that all lie here → the whole, summed in float32 and rounded once.

    Args:
        outs: (parts, rows, heads, 512) bfloat16, any strides.
        lses: (parts, rows, heads) float32, any strides.
        sink: (heads,) float32 or None.
        scratch: (rows, heads, 512) float32, overwritten.
        out: (rows, heads, 512) bfloat16, written.
        lse: (rows, heads) float32, written; without the sink.
    """
    whole = total_lse(lses)
    weights = weight_of(lses, whole)
    if sink is not None:
        weights *= sink_gate(whole, sink)
    for part in range(outs.shape[0]):
        # A part without keys holds zeros (the attention call says so), so 0 · NaN cannot arise.
        weight = weights[part].unsqueeze(-1)
        if part == 0:
            torch.mul(outs[part], weight, out=scratch)
        else:
            scratch.addcmul_(outs[part].to(torch.float32), weight)
    out.copy_(scratch)
    lse.copy_(whole)


def columns_with_lse() -> int:
    """bfloat16 columns of a partial output with its float32 lse behind it, so that one message carries both."""
    return D_V + 2
