# SPDX-License-Identifier: Apache-2.0
"""Answers the conductor: a fresh enough snapshot, a selection for each server, and what was just
proposed.

The RPC server calls ``Proposals.select`` and ``explain``, one call at a time. "No host" is only
said from a snapshot read after the request arrived and without what others were merely proposed: a
proposal is not a claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain.models import Explanation, RequestSpec, Selection
from scheduler.hosts import Hosts, RequestFacts
from scheduler.selection import Choice, SelectionOptions, explain, select


class Proposals:
    """The scheduler without its threads and sockets."""

    def __init__(self, hosts: Hosts, options: SelectionOptions) -> None:
        self._hosts = hosts
        self.options = options

    def select(self, specs: Sequence[RequestSpec], fresh: bool = False) -> list[Selection]:
        """Propose hosts for each server, in the order of the list.

        Args:
            fresh: read the database first, whatever the age of the snapshot.
        Raises:
            Unavailable: the database does not answer.
        """
        self._hosts.withdraw(spec.server for spec in specs)
        read = self._hosts.refresh(at_once=fresh)
        around = self._hosts.around(specs)
        choices = select(self._hosts.snapshot(around), specs, self.options)
        if not all(choice.selection.hosts for choice in choices):
            if not read:
                self._hosts.refresh(at_once=True)
            choices = self._last_resort(specs, choices, around)
        for spec, choice in zip(specs, choices, strict=True):
            for host in choice.selection.hosts[:1]:
                self._hosts.propose(spec, host, choice.assignment)
        return [choice.selection for choice in choices]

    def explain(self, spec: RequestSpec) -> Explanation:
        """What would become of such a server now. Nothing is remembered of it.

        Raises:
            Unavailable: the database does not answer.
        """
        self._hosts.refresh(at_once=True)
        return explain(self._hosts.snapshot(self._hosts.around([spec])), spec, self.options)

    def _last_resort(
        self, specs: Sequence[RequestSpec], choices: list[Choice], around: RequestFacts
    ) -> list[Choice]:
        """Again for the servers that found none, on what is free less only this request's own
        choices."""
        snapshot = self._hosts.snapshot(around, proposals=False)
        missing = []
        for number, choice in enumerate(choices):
            for host in choice.selection.hosts[:1]:
                snapshot.take(host, specs[number].resources, specs[number].group, choice.assignment)
            if not choice.selection.hosts:
                missing.append(number)
        for number, choice in zip(
            missing,
            select(snapshot, [specs[number] for number in missing], self.options),
            strict=True,
        ):
            choices[number] = choice
        return choices
