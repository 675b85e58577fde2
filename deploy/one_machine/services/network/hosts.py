# SPDX-License-Identifier: Apache-2.0
"""What this process knows of the hosts while it runs: their last contacts and revisions. Nothing
here must last.

Requests wait here for what another request brings: a host for a change that concerns it, the
request that makes a port for the host's acknowledgement. A host is alive for 30 s after its last
contact. After a restart every host that the database knows counts as just in contact, for it was
this service that was away.
"""

import threading
import time
from collections.abc import Callable, Mapping

SILENCE_SECONDS = 30.0
CHECK_SECONDS = 0.5  # how soon a request that waits notices that the service is about to end


class HostRegistry:
    """Contacts and revisions, and the requests that wait for them. Thread-safe."""

    def __init__(
        self, known: Mapping[str, int], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._contacts = {name: monotonic() for name in known}
        self._revisions, self._acknowledged = dict(known), dict[str, int]()
        self._changed = threading.Condition()
        self._ending = False

    def note_contact(self, name: str) -> None:
        """This host has just sent a request."""
        self._contacts[name] = self._monotonic()

    def silence(self, name: str) -> float | None:
        """Seconds since the last contact of this host; None: never."""
        contact = self._contacts.get(name)
        return None if contact is None else self._monotonic() - contact

    def is_alive(self, name: str) -> bool:
        """Whether this host had contact within the last 30 s."""
        silence = self.silence(name)
        return silence is not None and silence < SILENCE_SECONDS

    def alive(self) -> list[str]:
        """All hosts that are alive, in the order of their names."""
        return sorted(name for name in list(self._contacts) if self.is_alive(name))

    def acknowledge(self, name: str, revision: int) -> None:
        """This host has applied this revision, and the database knows."""
        with self._changed:
            self._acknowledged[name] = revision
            self._changed.notify_all()

    def set_revisions(self, revisions: Mapping[str, int]) -> None:
        """These hosts got these revisions, and the database knows."""
        if revisions:
            with self._changed:
                self._revisions.update(revisions)
                self._changed.notify_all()

    def await_other_revision(self, name: str, seen: int, seconds: float) -> None:
        """Wait until the host's revision is another than `seen`."""
        self._await_until(seconds, lambda: self._revisions.get(name) != seen)

    def end(self) -> None:
        """Let all that wait go within half a second. Takes no lock: a signal handler may call
        it."""
        self._ending = True

    def await_acknowledged(self, revisions: Mapping[str, int], seconds: float) -> bool:
        """Wait until these hosts have applied these revisions; False when time ran out first."""
        return self._await_until(
            seconds,
            lambda: all(
                self._acknowledged.get(name, -1) >= revision for name, revision in revisions.items()
            ),
        )

    def _await_until(self, seconds: float, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` holds; False when time ran out first."""
        deadline = self._monotonic() + seconds
        with self._changed:
            while not condition():
                left = deadline - self._monotonic()
                if left <= 0 or self._ending:
                    return False
                self._changed.wait(min(left, CHECK_SECONDS))
        return True
