# SPDX-License-Identifier: Apache-2.0
"""Answer the heartbeats of idle hosts from memory, without a database query per host.

Once a second the conductor reads the session of each host, and the hosts with waiting commands or
pending cleanups. Until the next read, heartbeats are answered from this data. For a host without
waiting work, the answer renews the lease. Otherwise the host must send a report
(``conductor.engine.reports``). A command that is too new for the data is probably still in transit.

When a host reports all its domains, the conductor compares them with the records. A host must do
this when the digest in the heartbeat has changed, at regular intervals, and soon after the database
was set back (``compare_all``).
"""

from __future__ import annotations

import zlib

from common.domain.clock import Clock
from common.domain.models import Heartbeat
from common.store.engine import Connection, Store
from common.store.hosts import hosts

#: Time between two reads of the database. Less than ``reports.GRACE_MICROS``.
LOOK_INTERVAL_SECONDS = 1.0
#: Interval at which a host must report all its domains although they have not changed.
COMPARE_SECONDS = 1800.0
#: The same interval for domains that may differ from the records.
COMPARE_SOON_SECONDS = 60.0


class Heartbeats:
    """The conductor's data about all hosts. Only one thread may call ``answer``."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        #: Seconds until the next read. Tests shorten this.
        self.good_for = LOOK_INTERVAL_SECONDS
        self._looked_at = float("-inf")
        self._sessions: dict[str, int] = {}
        #: Hosts with waiting commands or pending cleanups.
        self._busy_hosts: set[str] = set()
        #: Host -> the digest of the domains, and the time of the next full report.
        self._summaries: dict[str, tuple[str, float]] = {}

    def answer(self, beat: Heartbeat) -> bool:
        """Return True if the host is idle, and False if the host must send a full report.

        A full report contains all domains. A host is not idle if its session has ended, if commands
        or removals wait for the host, if its domains have changed, or if a full report is due.
        Sessions and waiting work are those of the last read, ``LOOK_INTERVAL_SECONDS`` ago at most.

        Raises:
            Unavailable: The database does not answer.
        """
        moment = self._clock.monotonic()
        if moment - self._looked_at > self.good_for:
            self._look(moment)
        if self._sessions.get(beat.host) != beat.session or beat.host in self._busy_hosts:
            return False
        domains, until = self._summaries.setdefault(
            beat.host, (beat.domains, moment + _spread(beat.host))
        )
        if domains == beat.domains and moment < until:
            return True
        self._summaries[beat.host] = beat.domains, moment + COMPARE_SECONDS
        return False

    def compare_soon(self, host: str) -> None:
        """Make the next full report of a host due in ``COMPARE_SOON_SECONDS`` at the latest.

        The caller could not compare a reported domain, because an action has the server. A host
        without a heartbeat at this conductor, or since ``compare_all``, is ignored, because
        ``_spread`` makes its report due soon.
        """
        if host in self._summaries:
            domains, until = self._summaries[host]
            self._summaries[host] = (
                domains,
                min(until, self._clock.monotonic() + COMPARE_SOON_SECONDS),
            )

    def compare_all(self) -> None:
        """Make a full report of each host due within a minute after the host's next heartbeat.

        Call this when a fail-over or a restore has set the database back.
        """
        self._summaries = {}

    def _look(self, moment: float) -> None:
        def read(tx: Connection) -> tuple[dict[str, int], set[str]]:
            return hosts.all_sessions(tx), hosts.waited_for(tx)

        self._sessions, self._busy_hosts = self._store.read(read)
        self._looked_at = moment


def _spread(host: str) -> float:
    """Return the seconds after a host's first heartbeat here when its full report is due.

    After ``compare_all``, the next heartbeat counts as the first.

    The value depends on the name only, and spreads the hosts over ``COMPARE_SOON_SECONDS``.
    """
    return zlib.crc32(host.encode()) % int(COMPARE_SOON_SECONDS)
