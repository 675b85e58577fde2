# SPDX-License-Identifier: Apache-2.0
"""Limits for messages of hosts, because a host's key may be stolen: their size and their rate.

``host_link`` first checks the allowance of the host in the routing key, before the message is
parsed. The broker enforces that a host uses its own name there. Then the length is checked before
decryption, and the content before records are created. Honest hosts stay far below the limits. An
agent waits for the answer to each report, and a report of 4,096 guests has 400 KB.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.security.host_keys import NotGenuine
from common.security.rate_limit import RateLimiter

MESSAGES_A_SECOND = 200
BYTES_A_SECOND = 2 * 1024 * 1024
MAX_MESSAGE_BYTES = 1024 * 1024
#: Entries of a list or an object.
MAX_ITEMS = 4096
MAX_TEXT_CHARS = 8192
MAX_DEPTH = 32
#: The largest number that fits a column of the database.
MAX_NUMBER = 2**63 - 1
#: A host floods when so many of its messages are above its allowance within these seconds. A
#: message counts once more for each 64 KiB. A busy conductor reads some hundred messages a second,
#: so a shorter time would hide a flood.
FLOOD_MESSAGES, FLOOD_SECONDS, FLOOD_UNIT_BYTES = 1000, 10.0, 64 * 1024
QUARANTINE_SECONDS, MAX_QUARANTINE_SECONDS = 60.0, 900.0
#: Time for messages that the broker accepted before the quarantine began.
DRAIN_SECONDS = 5.0
FORGIVEN_SECONDS = 3600.0


class Allowances:
    """The rate limits of each host: messages per second, and bytes per second."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._messages = RateLimiter(MESSAGES_A_SECOND, monotonic)
        self._bytes = RateLimiter(BYTES_A_SECOND, monotonic)

    def take(self, host: str, size: int) -> None:
        """Count a message against the host's allowance.

        Args:
            host: The sender.
            size: Bytes of the message.

        Raises:
            NotGenuine: The host has used up its messages or bytes per second, or the message is
                too long.
        """
        if self._messages.take(host)[0]:
            raise NotGenuine(f"the host sends more than {MESSAGES_A_SECOND} messages a second")
        if size > MAX_MESSAGE_BYTES:
            raise NotGenuine(
                f"the message has {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed"
            )
        if self._bytes.take(host, size)[0]:
            raise NotGenuine(f"the host sends more than {BYTES_A_SECOND} bytes a second")


@dataclass(slots=True)
class _Flooder:
    """A host that exceeded its allowance: its excess messages and its quarantines.

    A message counts once, and once more for each ``FLOOD_UNIT_BYTES``. Times are monotonic seconds.
    """

    #: Begin of the period in which ``counted`` messages arrived.
    counted_since: float
    counted: int = 0
    quarantines: int = 0
    #: Begin and end of the newest quarantine.
    begun: float = -math.inf
    until: float = -math.inf


class Quarantine:
    """Hosts that far exceeded their allowance. Their messages are ignored for a while.

    The first quarantine takes 60 seconds. A quarantine that begins within an hour after the end of
    the previous one takes twice as long, at most 15 minutes. Thread-safe.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._flooders: dict[str, _Flooder] = {}
        self._lock = threading.Lock()

    def count(self, host: str, size: int) -> float:
        """Count a message above the host's allowance, and begin a quarantine if the host floods.

        A host floods with ``FLOOD_MESSAGES`` such messages within ``FLOOD_SECONDS``. A message
        counts once more for each ``FLOOD_UNIT_BYTES``.

        Args:
            host: The sender.
            size: Bytes of the message.

        Returns:
            The seconds of the quarantine that begins with this message, otherwise 0.
        """
        with self._lock:
            now = self._monotonic()
            flooder = self._flooders.setdefault(host, _Flooder(now))
            if now - flooder.counted_since > FLOOD_SECONDS:
                flooder.counted_since, flooder.counted = now, 0
            flooder.counted += 1 + size // FLOOD_UNIT_BYTES
            if flooder.counted < FLOOD_MESSAGES or now - flooder.begun < DRAIN_SECONDS:
                return 0
            if now - flooder.until > FORGIVEN_SECONDS:
                flooder.quarantines = 0
            seconds = min(QUARANTINE_SECONDS * (1 << flooder.quarantines), MAX_QUARANTINE_SECONDS)
            flooder.quarantines = min(flooder.quarantines + 1, 8)
            flooder.begun, flooder.until, flooder.counted = now, now + seconds, 0
            return seconds

    def hosts(self) -> set[str]:
        """Return the hosts whose quarantine has not ended."""
        with self._lock:
            now = self._monotonic()
            self._flooders = {
                host: flooder
                for host, flooder in self._flooders.items()
                if now - max(flooder.until, flooder.counted_since) < FORGIVEN_SECONDS
            }
            return {host for host, flooder in self._flooders.items() if now < flooder.until}


def require_bounded(content: object, place: str = "the message", depth: int = 0) -> None:
    """Check the size of all lists, objects, texts and integers in a message, and their nesting.

    Args:
        content: A JSON value.
        place: The name of the value, for the error.
        depth: Number of lists and objects around the value.

    Raises:
        NotGenuine: A value is too long, too large, or nested too deeply.
    """
    if isinstance(content, str):
        _require_short(content, place)
    elif isinstance(content, int):
        if abs(content) > MAX_NUMBER:
            raise NotGenuine(f"{place} is a number beyond 64 bits")
    elif isinstance(content, (list, dict)):
        if depth > MAX_DEPTH:
            raise NotGenuine(f"{place} is nested more than {MAX_DEPTH} levels deep")
        if len(content) > MAX_ITEMS:
            raise NotGenuine(f"{place} has {len(content)} entries, at most {MAX_ITEMS} are allowed")
        if isinstance(content, dict):
            for name, part in content.items():
                _require_short(name, place)
                require_bounded(part, name[:80], depth + 1)
        else:
            for part in content:
                require_bounded(part, place, depth + 1)


def _require_short(text: str, place: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise NotGenuine(
            f"{place} has {len(text)} characters, at most {MAX_TEXT_CHARS} are allowed"
        )
