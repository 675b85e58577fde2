# SPDX-License-Identifier: Apache-2.0
"""Keys that a host shares with the control plane: what proves, and hides, each message between
both.

A host has two: one with conductors (commands, reports), one with whoever may ask it something
(queries). Each is made of a secret of the control plane, the host's name and a number, the
generation, so nothing has to be kept of it: a conductor makes the keys of every host, a host has
its own. A new generation makes the old key worthless. Which generations count is in the database
(``common.store.hosts.host_keys``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.domain import errors
from common.domain.clock import Clock

_NONCE_BYTES = 12
_NO_SECRET = "This process has no secret for keys of purpose {}; see [host_keys]."  # noqa: S105 - a message
_STRANGERS_SECONDS = 0.1
_SILENCE_SECONDS = 1.0  #: after which a database that was silent is asked again
GOOD_FOR_SECONDS = 5  #: for which what was read of generations is believed


class Purpose(StrEnum):
    """What a key is good for."""

    COMMAND = "command"
    QUERY = "query"
    JOIN = "join"  #: of a token: asks once for the two others (``common.security.host_joins``)


#: What a host has.
OF_A_HOST = (Purpose.COMMAND, Purpose.QUERY)


class NotGenuine(Exception):
    """A message that was not made with the expected key, or not for this purpose."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """One key of one host. AES-256-GCM (NIST SP 800-38D) with random nonces."""

    host: str
    generation: int
    purpose: Purpose
    secret: bytes = field(repr=False)

    def seal(self, plain: bytes, header: bytes) -> bytes:
        """Encrypt a text, and bind it to a header, which stays readable for anybody."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + AESGCM(self.secret).encrypt(nonce, plain, header)

    def open(self, sealed: bytes, header: bytes) -> bytes:
        """Return the text.

        Raises:
            NotGenuine: The key or the header is another one, or the text was changed.
        """
        try:
            return AESGCM(self.secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], header)
        except (InvalidTag, ValueError) as problem:
            raise NotGenuine("it was not made with this key") from problem


def mac(secret: str, *about: str | int) -> bytes:
    """Return 32 bytes that only a process with the secret can make for these words and numbers."""
    return hmac.new(secret.encode(), json.dumps(about).encode(), hashlib.sha256).digest()


def derive(secret: str, host: str, generation: int, purpose: Purpose) -> HostKey:
    """Return the key of a host, which is the same in each process with the secret."""
    return HostKey(host, generation, purpose, mac(secret, "host key", host, generation, purpose))


class Keys(Protocol):
    """The keys that one process has."""

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        """The key for a message to or of this host; raises Unavailable when there is none."""

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        """The key with which a message was made; raises NotGenuine when it does not count (any
        more)."""


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """The keys of an agent. ``transport_url``: the broker, in the host's own name; empty: as
    configured."""

    host: str
    generation: int
    secrets: Mapping[str, str] = field(repr=False)
    transport_url: str = field(default="", repr=False)

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        return self.find(host, self.generation, purpose)

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        if (host, generation) != (self.host, self.generation):
            raise NotGenuine(f"it is for host {host}, generation {generation} of its keys")
        if purpose not in self.secrets:
            raise NotGenuine(f"no host has a key of purpose {purpose}")
        return HostKey(host, generation, purpose, bytes.fromhex(self.secrets[purpose]))

    def text(self) -> str:
        """The host's key file."""
        return (
            json.dumps(
                {
                    "host": self.host,
                    "generation": self.generation,
                    "keys": dict(self.secrets),
                    "transport_url": self.transport_url,
                },
                indent=1,
            )
            + "\n"
        )

    @classmethod
    def read(cls, path: Path, host: str) -> OwnKeys:
        """The host's key file.

        Raises:
            ValueError: it is missing, readable for others, or not this host's; the text says what
            to do.
        """
        again = (
            f"make it with: kilonova host add {host} (or rotate), on a machine of the control plane"
        )
        try:
            mode = path.stat().st_mode
            content = json.loads(path.read_text())
            own = cls(
                content["host"],
                int(content["generation"]),
                {purpose: content["keys"][purpose] for purpose in OF_A_HOST},
                content.get("transport_url", ""),
            )
            assert all(len(bytes.fromhex(secret)) == 32 for secret in own.secrets.values())
        except FileNotFoundError as problem:
            raise ValueError(f"this host has no key file {path}: {again}") from problem
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as problem:
            raise ValueError(
                f"the key file {path} cannot be used ({type(problem).__name__}): {again}"
            ) from problem
        if mode & 0o077:
            raise ValueError(f"others may read the key file {path}: chmod 600 {path}")
        if own.host != host:
            raise ValueError(
                f"the key file {path} is of host {own.host}, and this is {host}: {again}"
            )
        return own


@dataclass(frozen=True, slots=True)
class Generations:
    """Of one host: the newest generation of its keys, and whether the one before counts still."""

    newest: int
    accepts_previous: bool = False


class AllKeys:
    """The keys of all hosts, for a process of the control plane. ``secrets``: for each purpose that
    it may have; ``look`` reads which generations count, at most every ``good_for`` seconds."""

    def __init__(
        self,
        secrets: Mapping[Purpose, str],
        look: Callable[[], Mapping[str, Generations]],
        clock: Clock,
        good_for: float = GOOD_FOR_SECONDS,
    ) -> None:
        self._secrets = {purpose: secret for purpose, secret in secrets.items() if secret}
        if Purpose.COMMAND in self._secrets:
            self._secrets[Purpose.JOIN] = self._secrets[Purpose.COMMAND]
        self._look, self._clock, self._good_for = look, clock, good_for
        self._found: Mapping[str, Generations] = {}
        self._looked_at = self._rests_until = float("-inf")
        self._made: dict[tuple[str, int, Purpose], HostKey] = {}
        self._lock = threading.Lock()

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        generations = self._generations(host)
        if generations is None:
            raise errors.Unavailable(f"Host {host} has no key: kilonova host add {host}")
        return self._make(host, generations.newest, purpose)

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        known = self._generations(host)
        if known is None:
            raise NotGenuine("this host has no key (any more): kilonova host add")
        if generation != known.newest and not (
            known.accepts_previous and generation == known.newest - 1
        ):
            raise NotGenuine(
                f"generation {generation} of its key does not count: it is {known.newest}"
            )
        return self._make(host, generation, purpose)

    def hosts(self) -> list[str]:
        """Return all hosts that have a key, and may speak; raises Unavailable."""
        with self._lock:
            self._found = self._look()
            self._looked_at = self._clock.monotonic()
            return list(self._found)

    def _generations(self, host: str) -> Generations | None:
        """A host that is not known is looked for at once, but a stranger who makes names up has the
        database asked ten times a second at most."""
        with self._lock:
            moment = self._clock.monotonic()
            age = moment - self._looked_at
            if age > self._good_for or (host not in self._found and age > _STRANGERS_SECONDS):
                if moment < self._rests_until:
                    raise errors.Unavailable("The database does not say which keys of hosts count.")
                # for those that come while it is away
                self._rests_until = moment + _SILENCE_SECONDS
                self._found = self._look()
                self._looked_at, self._rests_until = self._clock.monotonic(), moment
            return self._found.get(host)

    def _make(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        key = self._made.get((host, generation, purpose))
        if key is None:
            if purpose not in self._secrets:
                raise errors.Unavailable(_NO_SECRET.format(purpose))
            key = self._made[host, generation, purpose] = derive(
                self._secrets[purpose], host, generation, purpose
            )
        return key

    def for_host(self, host: str, transport_url: str = "", generation: int = 0) -> OwnKeys:
        """What the host's key file has; ``generation``: of these keys, 0: of the newest."""
        number = generation or self.newest(host, Purpose.COMMAND).generation
        made = {
            str(purpose): self._make(host, number, purpose).secret.hex() for purpose in OF_A_HOST
        }
        return OwnKeys(host, number, made, transport_url)

    def broker_password(self, host: str, generation: int) -> str:
        """The password of the host's user at the broker. It follows from the secret as the keys do,
        so that it is the same for who makes the user and for who tells the host."""
        if Purpose.COMMAND not in self._secrets:
            raise errors.Unavailable(_NO_SECRET.format(Purpose.COMMAND))
        return mac(self._secrets[Purpose.COMMAND], "broker password", host, generation).hex()[:48]
