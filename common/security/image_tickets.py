# SPDX-License-Identifier: Apache-2.0
"""Tickets with which a host reads or writes images at the image gateway.

A conductor makes a ticket for each message with commands that need images, and the gateway checks
it. The key is derived from a secret that only conductors and gateways have. The verbs of
``common.domain.verbs`` name their images.

Invariant: a ticket opens only the images of its commands. A ticket for reading does not write, and
the reverse. A ticket expires, and is compared in constant time.
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
from common.security import secret_lists
from common.security.vault import Vault

log = logging.getLogger(__name__)
PURPOSE = "image-gateway/1"
LIFETIME = 3600  #: seconds
#: The limit of images of one ticket, because servers limit the size of a header.
MOST = 100
#: Characters of a ticket.
LONGEST = 8000
_BAD = "The ticket is not valid: it was not made by this cloud, or has expired."


@dataclass(frozen=True, slots=True)
class Ticket:
    """The content of a ticket: host, images and end (seconds since the epoch)."""

    host: str
    reads: frozenset[str]
    writes: frozenset[str]
    until: int


def images_read(verbs: Iterable[Verb]) -> list[str]:
    """Return the ids of the images that hosts may have to read for these verbs."""
    return _distinct(verb.image_to_read for verb in verbs)


def images_written(verbs: Iterable[Verb]) -> list[str]:
    """Return the ids of the images that these verbs write."""
    return _distinct(verb.image_to_write for verb in verbs)


def _distinct(images: Iterable[str | None]) -> list[str]:
    """Return the ids in order, without repetition, None and empty texts."""
    return [image for image in dict.fromkeys(images) if image]


def configured(conf: cfg.ConfigOpts) -> Tickets:
    """Return the maker and checker of tickets.

    Without [image_gateway] ticket_secret, use [DEFAULT] secret_key and log a warning.
    """
    secret = conf.image_gateway.ticket_secret
    if not secret_lists.split(secret):
        log.warning(
            "every process with [DEFAULT] secret_key can make tickets for images: set "
            "[image_gateway] ticket_secret for conductors and image gateways"
        )
        secret = conf.secret_key
    return Tickets(Vault(secret))


class Tickets:
    """Makes and checks tickets. ``seconds`` returns the present time in seconds since 1970."""

    def __init__(self, vault: Vault, seconds: Callable[[], float] = time.time) -> None:
        self._vault, self._seconds = vault, seconds

    def make(self, host: str, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> str:
        """Return a ticket for this host, valid for ``LIFETIME`` seconds.

        Args:
            host: Name of the host.
            reads: Ids of the images that the host may read.
            writes: Ids of the images that the host may write.

        Raises:
            Unavailable: This cloud has no secret to sign with.
            ValueError: There are more than ``MOST`` images.
        """
        if len(reads) + len(writes) > MOST:
            raise ValueError(f"the ticket for host {host} would permit more than {MOST} images")
        content = [host, list(reads), list(writes), int(self._seconds()) + LIFETIME]
        body = base64.urlsafe_b64encode(
            json.dumps(content, separators=(",", ":")).encode()
        ).decode()
        return f"{body}.{_signature(self._vault.derive(PURPOSE), body)}"

    def check(self, text: str) -> Ticket:
        """Return the content of a ticket. The caller checks that the image is in the content.

        Raises:
            Unauthorized: The ticket is not of this cloud, or has expired.
            Unavailable: This cloud has no secret.
        """
        body, _, signature = text[:LONGEST].partition(".")
        matches = [
            hmac.compare_digest(_signature(key, body).encode(), signature.encode(errors="replace"))
            for key in self._vault.derive_all(PURPOSE)
        ]
        if not any(matches):
            raise errors.Unauthorized(_BAD)
        try:
            host, reads, writes, until = json.loads(base64.urlsafe_b64decode(body))
        except (
            ValueError,
            binascii.Error,
        ) as problem:  # Another release signed it in another form.
            raise errors.Unauthorized(_BAD) from problem
        if self._seconds() >= until:
            raise errors.Unauthorized(_BAD)
        return Ticket(host, frozenset(reads), frozenset(writes), until)


@dataclass(frozen=True)
class Gateway:
    """The image gateway for conductors: the URL for hosts, and the maker of tickets."""

    url: str
    tickets: Tickets

    def for_commands(self, host: str, commands: Sequence[Command]) -> Access | None:
        """Return the URL and a ticket for exactly the images of these commands.

        Return None if the commands have no images.

        Raises:
            Unavailable: This cloud has no secret to sign with.
            ValueError, TypeError: There are more than ``MOST`` images, or ``decode`` refuses a
                command.
        """
        verbs = [decode(command) for command in commands]
        reads, writes = images_read(verbs), images_written(verbs)
        return Access(self.url, self.tickets.make(host, reads, writes)) if reads or writes else None

    def for_reading(self, host: str, images: Sequence[str]) -> Access:
        """Return the URL and a ticket for reading these images.

        Raises:
            Unavailable: This cloud has no secret to sign with.
            ValueError: There are more than ``MOST`` images.
        """
        return Access(self.url, self.tickets.make(host, images))


def _signature(key: str, body: str) -> str:
    return hmac.new(key.encode(), body.encode(errors="replace"), hashlib.sha256).hexdigest()
