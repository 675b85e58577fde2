# SPDX-License-Identifier: Apache-2.0
"""What is accepted from a host, whose key may be stolen: how much a message holds, and how many
messages come in a second.

Checked in this order by ``host_link``: the allowance of the host that the routing key names (the
broker holds a host to its own name), before anything is read; the length, before the key is tried;
and the content, before it becomes records. Honest hosts stay far below: an agent waits for the
answer to each exchange, and reports of 4,096 guests have 400 KB.
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
MAX_ITEMS = 4096  #: of a list or an object
MAX_TEXT_CHARS = 8192
MAX_DEPTH = 32
MAX_NUMBER = 2**63 - 1  #: what a column of the database holds
#: A host floods when so many of its messages are above its allowance within these seconds. A
#: message counts once more for each 64 KiB. A busy conductor reads some hundred messages a second,
#: so a shorter time would hide a flood.
FLOOD_MESSAGES, FLOOD_SECONDS, FLOOD_UNIT_BYTES = 1000, 10.0, 64 * 1024
QUARANTINE_SECONDS, MAX_QUARANTINE_SECONDS = 60.0, 900.0
DRAIN_SECONDS = 5.0  #: for messages that the broker took in before the quarantine began
FORGIVEN_SECONDS = 3600.0


class Allowances:
    """How much each host may still say."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._messages = RateLimiter(MESSAGES_A_SECOND, monotonic)
        self._bytes = RateLimiter(BYTES_A_SECOND, monotonic)

    def take(self, host: str, size: int) -> None:
        """Let a message of ``size`` bytes pass.

        Raises:
            NotGenuine: the host has used up its allowance, or the message is too long.
        """
        if self._messages.take(host)[0]:
            raise NotGenuine(f"it sends more than {MESSAGES_A_SECOND} messages a second")
        if size > MAX_MESSAGE_BYTES:
            raise NotGenuine(f"{size} bytes, at most {MAX_MESSAGE_BYTES}")
        if self._bytes.take(host, size)[0]:
            raise NotGenuine(f"it sends more than {BYTES_A_SECOND} bytes a second")


@dataclass(slots=True)
class _Flooder:
    """What is known of a host that sent more than its allowance."""

    counted_since: float  #: begin of the time in which ``counted`` messages came
    counted: int = 0
    quarantines: int = 0
    begun: float = -math.inf  #: of its newest quarantine
    until: float = -math.inf


class Quarantine:
    """Which hosts sent far more than their allowance, and are not heard for a while.

    The first quarantine takes 60 seconds, each further one within an hour twice as long as the one
    before, at most 15 minutes. Thread-safe.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._flooders: dict[str, _Flooder] = {}
        self._lock = threading.Lock()

    def count(self, host: str, size: int) -> float:
        """Count a message of ``size`` bytes that was above the host's allowance.

        Returns:
            The seconds of the quarantine that begins with this message, or 0.
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
    """Check the lengths of all lists, objects, texts and numbers in a message from a host.

    Args:
        content: what JSON holds.
        place: where it stands, for the refusal.
        depth: in how many lists and objects it stands.

    Raises:
        NotGenuine: something is too long or too large.
    """
    if depth > MAX_DEPTH:
        raise NotGenuine(f"{place}: more than {MAX_DEPTH} levels")
    match content:
        case str() if len(content) > MAX_TEXT_CHARS:
            raise NotGenuine(f"{place}: {len(content)} characters, at most {MAX_TEXT_CHARS}")
        case int() if abs(content) > MAX_NUMBER:
            raise NotGenuine(f"{place}: a number beyond 64 bits")
        case list() | dict() if len(content) > MAX_ITEMS:
            raise NotGenuine(f"{place}: {len(content)} entries, at most {MAX_ITEMS}")
        case list():
            for part in content:
                require_bounded(part, place, depth + 1)
        case dict():
            for name, part in content.items():
                require_bounded(name, place)
                require_bounded(part, name[:80], depth + 1)
