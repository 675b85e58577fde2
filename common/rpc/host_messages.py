# SPDX-License-Identifier: Apache-2.0
"""Sealed messages between hosts and the control plane: packing, unpacking and refusals.

A message is a readable header (host, generation, purpose, method, id), a line break, and a body
that is sealed with a key of the host (``common.security.host_keys``). The seal covers the header.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, OrderedDict
from dataclasses import dataclass

import orjson

from common.domain.json_types import JsonObject
from common.security.host_keys import HostKey, Keys, NotGenuine, Purpose
from common.service import metrics
from common.service.json_text import to_json
from common.service.log import get_logger

log = get_logger(__name__)
MOST_BYTES = 16 * 1024 * 1024
_HEADER_MOST_BYTES = 2048
COMPLAIN_SECONDS = 60.0
#: Ids of messages and names of hosts that a process remembers.
REMEMBERED = 65536
REFUSED = metrics.Metric(
    metrics.COUNTER,
    "refused_messages",
    "Messages between hosts and the control plane that were refused; the log names the hosts.",
)


@dataclass(frozen=True, slots=True)
class Header:
    """The readable part of a message: the host, the key, the method and the request's id.

    ``answer_to`` is the name to which a host sends the answer. Empty: no answer is expected.
    """

    host: str
    generation: int
    purpose: str
    method: str
    id: str
    answer_to: str = ""

    @classmethod
    def read(cls, text: bytes) -> Header:
        """Parse a header.

        Raises:
            NotGenuine: The header is malformed.
        """
        try:
            header = cls(**orjson.loads(text[:_HEADER_MOST_BYTES]))
            Purpose(header.purpose)
        except (ValueError, TypeError) as problem:
            raise NotGenuine("the message's header is malformed") from problem
        if not (
            isinstance(header.generation, int)
            and all(
                isinstance(part, str) and len(part) < 256
                for part in (header.host, header.method, header.id, header.answer_to)
            )
        ):
            raise NotGenuine("the message's header is malformed")
        return header


def pack(
    key: HostKey, method: str, content: object, number: str = "", answer_to: str = ""
) -> tuple[Header, bytes]:
    """Return a sealed message as its header and its bytes.

    Args:
        key: The key that seals the message. The header names its host, generation and purpose.
        method: The method to call, or ``host_link.ANSWER``.
        content: A JSON value: the arguments, or the answer.
        number: The id of the request that this message answers. Empty: a new id.
        answer_to: The name to which the host sends its answer. Empty: no answer is expected.
    """
    header = Header(
        key.host, key.generation, key.purpose, method, number or uuid.uuid4().hex, answer_to
    )
    text = to_json({name: getattr(header, name) for name in Header.__slots__})
    return header, text + b"\n" + key.seal(to_json(content), text)


def unpack(keys: Keys, body: bytes) -> tuple[Header, JsonObject]:
    """Open a sealed message.

    Raises:
        NotGenuine: The message was not sealed with a valid key, is malformed, or is too long.
        Unavailable: The keys cannot be checked, for example while the database is unreachable.
    """
    text, _, sealed = body.partition(b"\n")
    if len(body) > MOST_BYTES:
        raise NotGenuine(f"the message has {len(body)} bytes, at most {MOST_BYTES} are allowed")
    header = Header.read(text)
    key = keys.find(header.host, header.generation, Purpose(header.purpose))
    try:
        content = orjson.loads(key.open(sealed, text))
    except ValueError as problem:
        raise NotGenuine("the message's content is not valid JSON") from problem
    if not isinstance(content, dict):
        raise NotGenuine("the message's content is not a JSON object")
    return header, content


def claimed_host(body: bytes) -> str:
    """Return the host that an unverified message names, or "(nobody)" for a malformed header."""
    try:
        return Header.read(body.partition(b"\n")[0]).host
    except NotGenuine:
        return "(nobody)"


class Refusals:
    """The numbers of refused messages by host. Thread-safe."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        self._logged: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def count(self, host: str, why: object) -> None:
        """Count a refused message, and log the reason at most once a minute for each host.

        Once ``REMEMBERED`` hosts have been counted, messages of further hosts are counted as
        "(others)".
        """
        REFUSED.add()
        with self._lock:
            if host not in self.counted and len(self.counted) >= REMEMBERED:
                host = "(others)"  # An attacker may invent any number of names.
            self.counted[host] += 1
            self._new[host] += 1
            if time.monotonic() - self._logged.get(host, float("-inf")) < COMPLAIN_SECONDS:
                return
            self._logged[host] = time.monotonic()
            if len(self._logged) > REMEMBERED:
                self._logged.popitem(last=False)
        log.warning(
            "a message in the name of a host is refused",
            host=host[:80],
            count=self.counted[host],
            problem=why,
        )

    def take(self) -> Counter[str]:
        """Return the number of refused messages of each host since the last call.

        The totals in ``counted`` stay.
        """
        with self._lock:
            counts, self._new = self._new, Counter()
        return counts
