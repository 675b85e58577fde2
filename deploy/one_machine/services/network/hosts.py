# SPDX-License-Identifier: Apache-2.0
"""The state of the hosts in this process: last contacts and revisions, which need no storage.

Requests wait here for other requests: the poll of a host for a change, and the request that creates
a port for the host's acknowledgement. A host is alive for 30 s after its last contact. After a
restart all hosts of the database count as just in contact, because the service itself was away.
"""

import threading
import time
from collections.abc import Callable, Mapping

SILENCE_SECONDS = 30.0
# How soon a waiting request notices that the service ends.
CHECK_SECONDS = 0.5


class HostRegistry:
    """Contacts and revisions of hosts, and the requests that wait for them.

    The class is thread-safe.

    Args:
        known: Host -> revision, from the database at the start of the service.
        monotonic: Returns the present time in seconds.
    """

    def __init__(
        self, known: Mapping[str, int], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._contacts = {name: monotonic() for name in known}
        self._revisions, self._acknowledged = dict(known), dict[str, int]()
        self._changed = threading.Condition()
        self._ending = False

    def note_contact(self, name: str) -> None:
        """Record that the host is in contact now."""
        self._contacts[name] = self._monotonic()

    def silence(self, name: str) -> float | None:
        """Return the seconds since the host's last contact, or None if there was no contact.

        Hosts that were in the database when the service started count as in contact at that moment.
        """
        contact = self._contacts.get(name)
        return None if contact is None else self._monotonic() - contact

    def is_alive(self, name: str) -> bool:
        """Return True if the host had contact within the last 30 s."""
        silence = self.silence(name)
        return silence is not None and silence < SILENCE_SECONDS

    def alive(self) -> list[str]:
        """Return the names of all living hosts, sorted."""
        return sorted(name for name in list(self._contacts) if self.is_alive(name))

    def acknowledge(self, name: str, revision: int) -> None:
        """Record that the host has applied this revision, and wake `await_acknowledged`.

        The caller has already stored the revision in the database.
        """
        with self._changed:
            self._acknowledged[name] = revision
            self._changed.notify_all()

    def set_revisions(self, revisions: Mapping[str, int]) -> None:
        """Record the new revisions of hosts, and wake their calls of `await_other_revision`.

        The caller has already committed the revisions to the database.
        """
        if revisions:
            with self._changed:
                self._revisions.update(revisions)
                self._changed.notify_all()

    def await_other_revision(self, name: str, seen: int, seconds: float) -> None:
        """Wait until the host's revision differs from `seen`.

        The wait also ends when the time is up or the service ends.
        """
        self._await_until(seconds, lambda: self._revisions.get(name) != seen)

    def end(self) -> None:
        """Release all waiting requests within half a second.

        A signal handler may call this, so it takes no lock.
        """
        self._ending = True

    def await_acknowledged(self, revisions: Mapping[str, int], seconds: float) -> bool:
        """Wait until each host has applied the given revision or a higher revision.

        Returns:
            False if the time is up first, or the service ends.
        """
        return self._await_until(
            seconds,
            lambda: all(
                self._acknowledged.get(name, -1) >= revision for name, revision in revisions.items()
            ),
        )

    def _await_until(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` is true.

        Returns:
            False if the time is up first, or the service ends.
        """
        deadline = self._monotonic() + seconds
        with self._changed:
            while not condition():
                remaining = deadline - self._monotonic()
                if remaining <= 0 or self._ending:
                    return False
                self._changed.wait(min(remaining, CHECK_SECONDS))
        return True
