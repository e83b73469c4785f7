# SPDX-License-Identifier: Apache-2.0
"""What an engine needs around the attention call: the decision, the scratch memory, the metadata, the forward.

:mod:`config` → :mod:`paths` (what is decided) → :mod:`reservations` → :mod:`workspace` → :mod:`capacity`, then a step
at a time :mod:`metadata` → :mod:`backend`.
"""
