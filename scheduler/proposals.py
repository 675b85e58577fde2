# SPDX-License-Identifier: Apache-2.0
"""Answers the conductor: a fresh enough snapshot, a selection for each server, and what was just proposed.

The RPC server calls ``Proposals.select``, one call at a time. "No host" is only said from a snapshot read
after the request arrived and without what others were merely proposed: a proposal is not a claim.
"""
from __future__ import annotations

from collections.abc import Sequence

from common.models import RequestSpec, Selection
from scheduler.hosts import Hosts
from scheduler.select import Options, select


class Proposals:
    """The scheduler without its threads and sockets."""

    def __init__(self, hosts: Hosts, options: Options) -> None:
        self._hosts = hosts
        self._options = options

    def select(self, specs: Sequence[RequestSpec], fresh: bool = False) -> list[Selection]:
        """Propose hosts for each server, in the order of the list.

        Args:
            fresh: read the database first, whatever the age of the snapshot.
        Raises:
            Unavailable: the database does not answer.
        """
        self._hosts.withdraw(spec.server for spec in specs)
        read = self._hosts.refresh(at_once=fresh)
        chosen = {answer.server: answer for answer in select(self._hosts.snapshot(), specs, self._options)}
        missing = [spec for spec in specs if not chosen[spec.server].hosts]
        if missing:
            if not read:
                self._hosts.refresh(at_once=True)
            chosen |= self._last_resort(specs, chosen, missing)
        for spec in specs:
            for host in chosen[spec.server].hosts[:1]:
                self._hosts.propose(spec, host)
        return [chosen[spec.server] for spec in specs]

    def _last_resort(self, specs: Sequence[RequestSpec], chosen: dict[str, Selection],
                     missing: Sequence[RequestSpec]) -> dict[str, Selection]:
        """Again for the servers that found none, on what is free less only this request's own choices."""
        snapshot = self._hosts.snapshot(proposals=False)
        for spec in specs:
            for host in chosen[spec.server].hosts[:1]:
                snapshot.take(host, spec.resources)
        return {answer.server: answer for answer in select(snapshot, missing, self._options)}
