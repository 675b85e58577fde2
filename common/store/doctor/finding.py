# SPDX-License-Identifier: Apache-2.0
"""What the oracle says: one broken invariant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """One broken invariant: which, of what, and how."""

    invariant: str
    subject: str
    text: str
