# SPDX-License-Identifier: Apache-2.0
"""Prove that no reserved byte is dead: what a run allocated, what of it was ever written, what of it was ever read.

```python
from sparsemla import audit

with audit.watch() as ledger:
    model(batch)
print(ledger)                   # dead bytes by call site
ledger.dead_bytes               # at one time
```

`audit.run(fn, deep=True)` also finds what is written and never read. `docs/audit.md` says how it works and what it does
not see.
"""

from __future__ import annotations

from .ledger import Allocation, Ledger, Region, Row
from .runner import NotDeterministicError, Run, run, run_script, watch
from .state import is_watching, register_region

__all__ = [
    "Allocation",
    "Ledger",
    "NotDeterministicError",
    "Region",
    "Row",
    "Run",
    "is_watching",
    "register_region",
    "run",
    "run_script",
    "watch",
]
