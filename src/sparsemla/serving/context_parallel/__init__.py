# SPDX-License-Identifier: Apache-2.0
"""A request's cache, or a prefill's rows, spread over several GPUs (DCP, PCP), on ``torch.distributed``.

:mod:`grid` (which rank is what) → :mod:`ranks` (process groups, agreement, loss of a rank) → :mod:`exchange` (query
heads out, partial answers back and merged by :mod:`merge`), :mod:`records` (quantised records between ranks),
:mod:`prefill` (which rows of a prefill a rank runs). The forward that uses them is ``serving.backend``.
"""
