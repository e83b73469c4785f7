# SPDX-License-Identifier: Apache-2.0
"""The command line: ``sparsemla check | plan | audit | bench``.

Each command lives in a module of its own; :mod:`sparsemla.cli.app` registers them and turns what a user did wrong
into one line on standard error and exit status 2.
"""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Something the user can put right. Printed as one line without a traceback; the exit status is 2.

    Commands may also let a ``ValueError`` of the package through: it names the argument, what was given and what is
    accepted, and is printed the same way.
    """
