# SPDX-License-Identifier: Apache-2.0
"""Tickets: what a host shows the image gateway to read or write the images of its commands, and
nothing else.

The conductor makes one for each message that has commands with images, the gateway checks it; the
key is derived from a secret of these two, which no host has, and no API process. The verbs of
``common.domain.verbs`` name the images that they need. Must stay true: a ticket
opens no image that its commands do not name, a ticket for reading does not write, and the reverse;
it ends by itself, and is compared in constant time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from oslo_config import cfg

from common.domain import errors
from common.domain.models import Access, Command
from common.domain.verbs import Verb, decode
from common.security.vault import Vault

log = logging.getLogger(__name__)
PURPOSE = "image-gateway/1"
LIFETIME = 3600  #: seconds
MOST = 100  #: images of one ticket: it travels in a header, and servers bound these
LONGEST = 8000  #: characters
_BAD = "The ticket is not one of this cloud's, is too old, or does not open this image for that."


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket says: whose it is, what it opens, and until when (seconds since the epoch)."""

    host: str
    reads: frozenset[str]
    writes: frozenset[str]
    until: int


def images_read(verbs: Iterable[Verb]) -> list[str]:
    """Return the ids of the images that hosts may have to read for these verbs."""
    return _each(verb.image_to_read for verb in verbs)


def images_written(verbs: Iterable[Verb]) -> list[str]:
    """Return the ids of the images that these verbs write."""
    return _each(verb.image_to_write for verb in verbs)


def _each(found: Iterable[str | None]) -> list[str]:
    """Without repetition, in their order."""
    return [image for image in dict.fromkeys(found) if image]


def configured(conf: cfg.ConfigOpts) -> Tickets:
    """Made and checked with the secret that conductors and image gateways have."""
    own = conf.image_gateway.ticket_secret
    if not own.strip(", "):
        log.warning(
            "whoever has [DEFAULT] secret_key can make tickets for images: set [image_gateway] ticket_secret "
            "for conductors and image gateways"
        )
        own = conf.secret_key
    return Tickets(Vault(own))


class Tickets:
    """Makes and checks tickets. ``seconds`` tells the time of day."""

    def __init__(self, vault: Vault, seconds: Callable[[], float] = time.time) -> None:
        self._vault, self._seconds = vault, seconds

    def make(self, host: str, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> str:
        """A ticket for this host.

        Raises:
            Unavailable: this cloud has no secret to sign it with.
        """
        if len(reads) + len(writes) > MOST:
            raise ValueError(f"a ticket opens at most {MOST} images")
        says = [host, list(reads), list(writes), int(self._seconds()) + LIFETIME]
        body = base64.urlsafe_b64encode(json.dumps(says, separators=(",", ":")).encode()).decode()
        return f"{body}.{_signature(self._vault.derive(PURPOSE), body)}"

    def check(self, text: str) -> Ticket:
        """What the ticket says.

        Raises:
            Unauthorized: it is not one of this cloud's, or its time is over.
            Unavailable: this cloud has no secret.
        """
        body, _, signature = text[:LONGEST].partition(".")
        known = [
            hmac.compare_digest(_signature(key, body).encode(), signature.encode(errors="replace"))
            for key in self._vault.derive_all(PURPOSE)
        ]
        if not any(known):
            raise errors.Unauthorized(_BAD)
        try:
            host, reads, writes, until = json.loads(base64.urlsafe_b64decode(body))
        except (ValueError, binascii.Error) as problem:  # signed by us, by another release
            raise errors.Unauthorized(_BAD) from problem
        if self._seconds() >= until:
            raise errors.Unauthorized(_BAD)
        return Ticket(host, frozenset(reads), frozenset(writes), until)


@dataclass(frozen=True)
class Gateway:
    """The image gateway as conductors send it to hosts: its ``url`` as these reach it, and who
    makes tickets."""

    url: str
    tickets: Tickets

    def for_commands(self, host: str, commands: Sequence[Command]) -> Access | None:
        """Return the access for exactly the images of these commands, or None without images.

        Raises:
            Unavailable: this cloud has no secret to sign it with.
        """
        verbs = [decode(command) for command in commands]
        reads, writes = images_read(verbs), images_written(verbs)
        return Access(self.url, self.tickets.make(host, reads, writes)) if reads or writes else None

    def for_reading(self, host: str, images: Sequence[str]) -> Access:
        """Access for reading these images.

        Raises:
            Unavailable: as above.
        """
        return Access(self.url, self.tickets.make(host, images))


def _signature(key: str, body: str) -> str:
    return hmac.new(key.encode(), body.encode(errors="replace"), hashlib.sha256).hexdigest()
