# SPDX-License-Identifier: Apache-2.0
"""Answer the conductor's requests for hosts.

``Proposals`` combines a recent snapshot, a selection per server, and the proposals that are not
claimed yet. The RPC server calls ``select`` and ``explain``, one call at a time.

Invariant: "no host" is only answered from a snapshot that was read after the request arrived, and
that ignores proposals to other requests. Because a proposal is not a claim, it never blocks a
request.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain.models import Explanation, RequestSpec, Selection
from scheduler.hosts import Hosts, RequestFacts
from scheduler.selection import Choice, SelectionOptions, explain, select


class Proposals:
    """The scheduler without threads and sockets."""

    def __init__(self, hosts: Hosts, options: SelectionOptions) -> None:
        self._hosts = hosts
        self.options = options

    def select(self, specs: Sequence[RequestSpec], fresh: bool = False) -> list[Selection]:
        """Return a selection of hosts for each request, in the order of ``specs``.

        Earlier proposals for these servers are dropped, and the first host of each selection is
        recorded as a proposal. A request without a host is tried once more with data that were read
        during this call, and without the proposals of other calls. If still no host fits, its
        selection has no hosts, and contains the reason.

        Args:
            specs: The requests.
            fresh: Read the database first, whatever the age of the last read.

        Raises:
            Unavailable: The database does not answer.
        """
        self._hosts.withdraw(spec.server for spec in specs)
        was_read = self._hosts.refresh(at_once=fresh)
        facts = self._hosts.read_request_facts(specs)
        choices = select(self._hosts.snapshot(facts), specs, self.options)
        if not all(choice.selection.hosts for choice in choices):
            if not was_read:
                self._hosts.refresh(at_once=True)
            choices = self._select_without_proposals(specs, choices, facts)
        for spec, choice in zip(specs, choices, strict=True):
            for host in choice.selection.hosts[:1]:
                self._hosts.propose(spec, host, choice.assignment)
        return [choice.selection for choice in choices]

    def explain(self, spec: RequestSpec) -> Explanation:
        """Explain how the scheduler would answer the request now, without recording a proposal.

        Unlike in ``select``, servers with recent proposals always count as placed.

        Raises:
            Unavailable: The database does not answer.
        """
        self._hosts.refresh(at_once=True)
        return explain(
            self._hosts.snapshot(self._hosts.read_request_facts([spec])), spec, self.options
        )

    def _select_without_proposals(
        self, specs: Sequence[RequestSpec], choices: list[Choice], facts: RequestFacts
    ) -> list[Choice]:
        """Select again for the servers without a host, and return the completed choices.

        This selection ignores the proposals of earlier calls. Before it, only servers of this call
        that have a host in ``choices`` count as placed. ``choices`` is changed.
        """
        snapshot = self._hosts.snapshot(facts, proposals=False)
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
