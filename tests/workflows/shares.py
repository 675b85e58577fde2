# SPDX-License-Identifier: Apache-2.0
"""A shared file system service in memory.

For the errors that a test can cause see ``service_doubles``. Rules can become active late
or fail.
"""

from __future__ import annotations

from common.clients.shares import ACTIVE, FAILED
from common.domain import errors
from conductor.engine.external_services import ShareApi
from tests.workflows.service_doubles import ServiceDouble


class Shares(ServiceDouble, interface=ShareApi):
    """Implement ``conductor.engine.external_services.ShareApi`` in memory."""

    def __init__(self) -> None:
        super().__init__("shared file system service")
        #: (share, address) -> calls of ``allow`` until the rule is active.
        self.rules: dict[tuple[str, str], int] = {}
        #: The initial number of these calls for a new rule.
        self.applies_after = 0
        #: True if rules go to error.
        self.fails = False
        #: True if existing rules are still being removed.
        self.going = False
        #: Shares that are deleted.
        self.gone: set[str] = set()

    def list_rules(self) -> list[dict[str, str]]:
        """Return all rules in the service's format."""
        return [
            {"share_id": share, "access_to": address, "state": ACTIVE}
            for share, address in self.rules
        ]

    def allow(self, share_id: str, access_to: str) -> str:
        self._speak("allow", share_id)
        if share_id in self.gone:
            raise errors.NotFound(f"Share {share_id} could not be found.")
        left = self.rules.setdefault((share_id, access_to), self.applies_after)
        self.rules[share_id, access_to] = max(0, left - 1)
        return self._answer(
            "denying" if self.going else FAILED if self.fails else "applying" if left else ACTIVE
        )

    def deny(self, share_id: str, access_to: str) -> None:
        self._speak("deny", share_id)
        self.rules.pop((share_id, access_to), None)
        self._answer(None)
