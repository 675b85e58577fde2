# SPDX-License-Identifier: Apache-2.0
"""The record of a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Finding:
    """A broken invariant, with the object for which it is broken."""

    #: The name of the invariant.
    invariant: str
    #: The id or name of the server, host or other object.
    subject: str
    #: What is wrong, as a predicate of the subject or as a sentence.
    text: str
    #: The kind of finding (``kinds.KINDS``) if the invariant can be broken in several ways.
    case: str = field(default="", compare=False)
    #: Ids that the remedy needs, for example of a host or an action. They also distinguish findings
    #: with the same subject.
    facts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def kind(self) -> str:
        """The key of the finding in ``kinds.KINDS``."""
        return self.case or self.invariant

    @property
    def id(self) -> str:
        """The name of the finding for operators, which is the same at every check."""
        return "/".join((self.kind, self.subject, *self.facts))
