# SPDX-License-Identifier: Apache-2.0
"""A shared file system service in memory, as the conductor uses it; see ``neighbours`` for what can
go wrong, and it can apply late, or fail to."""

from __future__ import annotations

from common.clients.shares import ACTIVE, FAILED
from common.domain import errors
from conductor.engine.external_services import ShareApi
from tests.workflows.neighbours import Neighbour


class Shares(Neighbour, interface=ShareApi):
    """Implements ``conductor.engine.external_services.ShareApi``. ``rules``: (share, address) ->
    looks until the rule is active."""

    def __init__(self) -> None:
        super().__init__("shared file system service")
        self.rules: dict[tuple[str, str], int] = {}
        self.applies_after = 0
        self.fails = self.going = False  # it cannot apply rules; what is there is on its way out
        self.gone: set[str] = set()

    def told(self) -> list[dict[str, str]]:
        """All rules, as the service tells them."""
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
