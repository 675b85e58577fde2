# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of idle hosts, answered from memory: a host that has nothing to tell costs the
database nothing.

Once a second, for the whole cloud, it is read which session each host has and for which hosts
something waits: commands, debts. Until the next look a heartbeat is answered by that: either
nothing waits for the host, which renews its lease, or it is to sync
(``conductor.engine.reports``). A command that is not seen yet is so young that it may still be on
its way.

What hosts and records say is compared when a host syncs with all its domains. It is told to when
its heartbeat says that they have changed, from time to time, and soon after the database was set
back (``compare_all``).
"""

from __future__ import annotations

import zlib

from common.domain.clock import Clock
from common.domain.models import Heartbeat
from common.store.engine import Connection, Store
from common.store.hosts import hosts

LOOK_INTERVAL_SECONDS = 1.0  #: for which a look is good; less than ``reports.GRACE_MICROS``
#: after which a host is to report all its domains although they have not changed
COMPARE_SECONDS = 1800.0
COMPARE_SOON_SECONDS = 60.0  #: the same where they may differ from the records


class Heartbeats:
    """What one conductor remembers of all hosts. ``answer`` is called by one thread."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self.good_for = LOOK_INTERVAL_SECONDS  #: seconds until the next look; a test shortens it
        self._looked_at = float("-inf")
        self._sessions: dict[str, int] = {}
        self._waited_for: set[str] = set()
        #: Host -> what its heartbeat said of its domains, and until when it need not tell them.
        self._summaries: dict[str, tuple[str, float]] = {}

    def answer(self, beat: Heartbeat) -> bool:
        """Does nothing wait for this host? Else it is to sync, with all its domains.

        Raises:
            Unavailable: the database does not answer, so that nobody knows.
        """
        moment = self._clock.monotonic()
        if moment - self._looked_at > self.good_for:
            self._look(moment)
        if self._sessions.get(beat.host) != beat.session or beat.host in self._waited_for:
            return False
        domains, until = self._summaries.setdefault(
            beat.host, (beat.domains, moment + _spread(beat.host))
        )
        if domains == beat.domains and moment < until:
            return True
        self._summaries[beat.host] = beat.domains, moment + COMPARE_SECONDS
        return False

    def compare_soon(self, host: str) -> None:
        """What this host told of its domains could not be compared with the records: an action has
        the server."""
        if host in self._summaries:
            domains, until = self._summaries[host]
            self._summaries[host] = (
                domains,
                min(until, self._clock.monotonic() + COMPARE_SOON_SECONDS),
            )

    def compare_all(self) -> None:
        """The database was set back, by a fail-over or a restore: all hosts report what they have
        within a minute."""
        self._summaries = {}

    def _look(self, moment: float) -> None:
        def read(tx: Connection) -> tuple[dict[str, int], set[str]]:
            return hosts.all_sessions(tx), hosts.waited_for(tx)

        self._sessions, self._waited_for = self._store.read(read)
        self._looked_at = moment


def _spread(host: str) -> float:
    """Seconds until a host that this conductor does not know tells all its domains: not all hosts
    at once."""
    return zlib.crc32(host.encode()) % int(COMPARE_SOON_SECONDS)
