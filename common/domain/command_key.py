# SPDX-License-Identifier: Apache-2.0
"""The key of a command. Only this module builds and parses the text of a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

#: The prefix of a step's name where logs and spans name the undo of the step.
UNDO = "undo-"
#: Digits of an attempt. A larger number fits into no column.
_MAX_DIGITS = 18


class CommandKind(StrEnum):
    """The purpose of a command."""

    #: Does a step of an action.
    DO = "do"
    #: Undoes a step of an action.
    UNDO = "undo"
    #: Controls the live migration of an action.
    CONTROL = "control"
    #: Removes the guest that a server left on a host. The owner is the server.
    CLEANUP = "cleanup"


@dataclass(frozen=True, slots=True)
class CommandKey:
    """Identifies a command.

    A host that has recorded a result for a key answers with this result, and does not carry out the
    command again. The fence is no part of the key of an action's command: the host checks the
    fence.

    >>> str(CommandKey(CommandKind.DO, "7f3c", "stop", 2))
    'do/7f3c/stop/2'
    """

    kind: CommandKind
    #: Id of the action. For a cleanup the id of the server.
    owner: str
    #: Name of the step. For a control the control, for a cleanup the verb.
    step: str
    #: Attempt of the action. For a cleanup the fence.
    attempt: int

    @classmethod
    def parse(cls, text: str) -> CommandKey:
        """Parse the text of a key, ``KIND/OWNER/STEP/ATTEMPT``.

        Raises:
            ValueError: The text is not a key.
        """
        kind, owner, step, attempt = text.split("/")
        if not (attempt.isascii() and attempt.isdigit() and len(attempt) <= _MAX_DIGITS):
            raise ValueError(f"{text!r} is not the key of a command")
        return cls(CommandKind(kind), owner, step, int(attempt))

    @classmethod
    def parse_each(cls, texts: Iterable[str]) -> dict[str, CommandKey]:
        """Parse texts, and return text -> key.

        Texts that are not keys are left out, because a host may send any text.
        """
        keys = {}
        for text in texts:
            try:
                keys[text] = cls.parse(text)
            except (ValueError, AttributeError):
                continue
        return keys

    def __str__(self) -> str:
        return f"{self.kind}/{self.owner}/{self.step}/{self.attempt}"

    @property
    def is_of_action(self) -> bool:
        """True if the command does or undoes a step of an action. False for control and cleanup."""
        return self.kind in (CommandKind.DO, CommandKind.UNDO)

    @property
    def label(self) -> str:
        """The name of the step in logs and spans, with the prefix "undo-" for an undo."""
        return f"{UNDO}{self.step}" if self.kind is CommandKind.UNDO else self.step
