# SPDX-License-Identifier: Apache-2.0
"""What the oracle says: one broken invariant."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Finding:
    """One broken invariant: which, of what, and how. ``case``: which kind of it, where an invariant
    can be broken in several ways (``kinds.KINDS``); ``facts``: what else its remedy must know, and
    what tells it from another of the same subject: a host, an action."""

    invariant: str
    subject: str
    text: str
    case: str = field(default="", compare=False)
    facts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def kind(self) -> str:
        """The row of ``kinds.KINDS``."""
        return self.case or self.invariant

    @property
    def id(self) -> str:
        """By which an operator names it; the same at every look."""
        return "/".join((self.kind, self.subject, *self.facts))
