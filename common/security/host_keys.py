# SPDX-License-Identifier: Apache-2.0
"""Keys that a host shares with the control plane, to authenticate and encrypt their messages.

A host has two keys: one with conductors (commands, reports), and one with processes that may query
the host. Each is derived from a secret of the control plane, the host's name and a number, the
generation. So conductors store no keys: they derive the keys of every host. A host stores its own.
A new generation invalidates the old key. The database holds the valid generations
(``common.store.hosts.host_keys``).

While a secret is changed, there are two of it. Each key then has an old and a new form: the form of
the first secret seals, and both open (docs/secrets.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.domain import errors
from common.domain.clock import Clock
from common.security import secret_lists

_NONCE_BYTES = 12
_NO_SECRET = "This process has no secret for keys of purpose {}; see [host_keys]."  # noqa: S105 - a message
_STRANGERS_SECONDS = 0.1
#: Seconds between attempts to read from a database that does not answer.
_SILENCE_SECONDS = 1.0
#: Seconds for which generations are cached.
GOOD_FOR_SECONDS = 5


class Purpose(StrEnum):
    """The purpose of a key. A key is valid only for messages of its purpose."""

    COMMAND = "command"
    QUERY = "query"
    #: The key of a join token, which requests the two others once (``common.security.host_joins``).
    JOIN = "join"


#: The purposes of a host's own keys.
OF_A_HOST = (Purpose.COMMAND, Purpose.QUERY)


class NotGenuine(Exception):
    """A message that was not made with the expected key, or not for this purpose."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """One key of one host. AES-256-GCM (NIST SP 800-38D) with random nonces.

    Attributes:
        host: Name of the host.
        generation: The generation of the host's keys.
        purpose: What the key is valid for.
        secret: The key that seals, and opens.
        others: Further keys that only open, while a secret is changed.
    """

    host: str
    generation: int
    purpose: Purpose
    secret: bytes = field(repr=False)
    others: tuple[bytes, ...] = field(default=(), repr=False)

    def seal(self, plain: bytes, header: bytes) -> bytes:
        """Return a new nonce and the encrypted text, for ``open``.

        The header is authenticated, but not part of the result.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + AESGCM(self.secret).encrypt(nonce, plain, header)

    def open(self, sealed: bytes, header: bytes) -> bytes:
        """Return the decrypted text.

        Raises:
            NotGenuine: Key or header differ from those of ``seal``, or the text was changed.
        """
        for secret in (self.secret, *self.others):
            with suppress(InvalidTag, ValueError):
                return AESGCM(secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], header)
        raise NotGenuine("the message was not made with this key, or was changed")


def mac(secret: str, *about: str | int) -> bytes:
    """Return 32 bytes that only a process with the secret can derive from the arguments."""
    return hmac.new(secret.encode(), json.dumps(about).encode(), hashlib.sha256).digest()


def derive(secrets: str, host: str, generation: int, purpose: Purpose) -> HostKey:
    """Return the key of a host. Each process with the secrets derives the same key.

    Args:
        secrets: The secrets of the purpose, separated by commas. The key of the first one seals.
        host: Name of the host.
        generation: The generation of the host's keys.
        purpose: What the key is for.
    """
    first, *others = (
        mac(secret, "host key", host, generation, purpose) for secret in secret_lists.split(secrets)
    )
    return HostKey(host, generation, purpose, first, tuple(others))


class Keys(Protocol):
    """The keys with which one process seals and opens messages of hosts."""

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        """Return the key of the newest generation, for a new message to or from this host.

        A process of the control plane may return the previous generation for a few seconds after a
        rotation.

        Raises:
            Unavailable: A process of the control plane has no key of this host or purpose, or the
                database does not answer.
            NotGenuine: An agent has no key of this host or purpose.
        """

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        """Return the key of a received message, from the fields of the message's header.

        Raises:
            NotGenuine: The key is unknown or no longer valid.
            Unavailable: A process of the control plane has no secret for this purpose, or the
                database does not answer.
        """


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """The keys of an agent, or of a machine with a join token.

    Attributes:
        secrets: The key of each purpose, in hexadecimal digits.
        transport_url: URL of the broker with the host's own user. Empty: as configured.
        others: Further keys of a purpose that only open, while a secret is changed.
        other_passwords: Further passwords of the host's user at the broker, which the broker may
            have instead of the password in ``transport_url``.
        fetched: ``HostSecrets.digest`` of the conductors' answer from which these keys are. Empty:
            the keys came in a file.
    """

    host: str
    generation: int
    secrets: Mapping[str, str] = field(repr=False)
    transport_url: str = field(default="", repr=False)
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    other_passwords: tuple[str, ...] = field(default=(), repr=False)
    fetched: str = ""

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        return self.find(host, self.generation, purpose)

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        if (host, generation) != (self.host, self.generation):
            raise NotGenuine(
                f"the message is for generation {generation} of the keys of host {host}, and this process "
                f"has generation {self.generation} of host {self.host}"
            )
        if purpose not in self.secrets:
            raise NotGenuine(f"this process has no key of purpose {purpose}")
        others = tuple(bytes.fromhex(other) for other in self.others.get(purpose, ()))
        return HostKey(host, generation, purpose, bytes.fromhex(self.secrets[purpose]), others)

    def text(self) -> str:
        """Return the content of the host's key file."""
        content = {
            "host": self.host,
            "generation": self.generation,
            "keys": dict(self.secrets),
            "transport_url": self.transport_url,
            "other_keys": {purpose: list(keys) for purpose, keys in self.others.items()},
            "other_passwords": list(self.other_passwords),
            "fetched": self.fetched,
        }
        return f"{json.dumps(content, indent=1)}\n"

    @classmethod
    def read(cls, path: Path, host: str) -> OwnKeys:
        """Read the host's key file.

        Raises:
            ValueError: The file is missing, unusable, readable for others, or of another host. The
                text has the remedy.
        """
        remedy = (
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
                {purpose: tuple(keys) for purpose, keys in content.get("other_keys", {}).items()},
                tuple(content.get("other_passwords", ())),
                content.get("fetched", ""),
            )
            keys = [*own.secrets.values(), *(key for keys in own.others.values() for key in keys)]
            assert all(len(bytes.fromhex(key)) == 32 for key in keys)
        except FileNotFoundError as problem:
            raise ValueError(f"this host has no key file {path}: {remedy}") from problem
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as problem:
            raise ValueError(
                f"the key file {path} cannot be used ({type(problem).__name__}): {remedy}"
            ) from problem
        if mode & 0o077:
            raise ValueError(f"others may read the key file {path}: chmod 600 {path}")
        if own.host != host:
            raise ValueError(
                f"the key file {path} is of host {own.host}, and this host is {host}: {remedy}"
            )
        return own


@dataclass(frozen=True, slots=True)
class Generations:
    """The valid generations of a host's keys: the newest, and the previous if still accepted."""

    newest: int
    accepts_previous: bool = False


class AllKeys:
    """The keys of all hosts, for a process of the control plane.

    Args:
        secrets: The secrets of each purpose that the process may use, separated by commas. The keys
            of purpose JOIN are derived from the secrets of COMMAND.
        look: Reads the valid generations of all hosts from the database.
        clock: The clock.
        good_for: Seconds for which the result of ``look`` is cached.
    """

    def __init__(
        self,
        secrets: Mapping[Purpose, str],
        look: Callable[[], Mapping[str, Generations]],
        clock: Clock,
        good_for: float = GOOD_FOR_SECONDS,
    ) -> None:
        self._secrets = {
            purpose: text for purpose, text in secrets.items() if secret_lists.split(text)
        }
        if Purpose.COMMAND in self._secrets:
            self._secrets[Purpose.JOIN] = self._secrets[Purpose.COMMAND]
        self._look, self._clock, self._good_for = look, clock, good_for
        self._by_host: Mapping[str, Generations] = {}
        self._read_at = self._retry_at = float("-inf")
        self._keys: dict[tuple[str, int, Purpose], HostKey] = {}
        self._lock = threading.Lock()

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        generations = self.generations(host)
        if generations is None:
            raise errors.Unavailable(f"Host {host} has no key; run: kilonova host add {host}")
        return self._make(host, generations.newest, purpose)

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        valid = self.generations(host)
        if valid is None:
            raise NotGenuine(f"host {host} has no valid key; run: kilonova host add {host}")
        if generation != valid.newest and not (
            valid.accepts_previous and generation == valid.newest - 1
        ):
            raise NotGenuine(
                f"generation {generation} of the key of host {host} is not valid, the newest is {valid.newest}"
            )
        return self._make(host, generation, purpose)

    def hosts(self) -> list[str]:
        """Return the names of all hosts with a key, read from the database and not from the cache.

        Raises:
            Unavailable: The database does not answer.
        """
        with self._lock:
            self._by_host = self._look()
            self._read_at = self._clock.monotonic()
            return list(self._by_host)

    def generations(self, host: str) -> Generations | None:
        """Return the valid generations of a host, from the cache or the database.

        Return None if the host has no key.

        A host that is missing in the cache causes a read at once, but at most ten reads a second.

        Raises:
            Unavailable: The database does not answer, or did not answer within the last second.
        """
        with self._lock:
            moment = self._clock.monotonic()
            age = moment - self._read_at
            if age > self._good_for or (host not in self._by_host and age > _STRANGERS_SECONDS):
                if moment < self._retry_at:
                    raise errors.Unavailable(
                        "The database does not answer, so the valid keys of hosts are unknown; try again later."
                    )
                # Other callers fail at once while the database is away.
                self._retry_at = moment + _SILENCE_SECONDS
                self._by_host = self._look()
                self._read_at, self._retry_at = self._clock.monotonic(), moment
            return self._by_host.get(host)

    @property
    def has_all_purposes(self) -> bool:
        """True if this process has the secrets of all keys of a host."""
        return self._secrets.keys() >= set(OF_A_HOST)

    def _make(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        key = self._keys.get((host, generation, purpose))
        if key is None:
            if purpose not in self._secrets:
                raise errors.Unavailable(_NO_SECRET.format(purpose))
            key = self._keys[host, generation, purpose] = derive(
                self._secrets[purpose], host, generation, purpose
            )
        return key

    def for_host(self, host: str, transport_url: str = "", generation: int = 0) -> OwnKeys:
        """Return the keys of a host, for the host's key file.

        Args:
            host: Name of the host.
            transport_url: URL of the broker with the host's own user. Empty: as configured on the
                host.
            generation: The generation of the keys, which is not checked. 0: the newest.

        Raises:
            Unavailable: This process lacks a secret. Or for generation 0, the host has no key or
                the database does not answer.
        """
        number = generation or self.newest(host, Purpose.COMMAND).generation
        keys = {str(purpose): self._make(host, number, purpose) for purpose in OF_A_HOST}
        return OwnKeys(
            host,
            number,
            {purpose: key.secret.hex() for purpose, key in keys.items()},
            transport_url,
            {
                purpose: tuple(other.hex() for other in key.others)
                for purpose, key in keys.items()
                if key.others
            },
        )

    def broker_password(self, host: str, generation: int) -> str:
        """Return the password of the host's user at the broker.

        The password is derived from the first secret, so the creator of the user and the sender of
        the key file get the same one.

        Raises:
            Unavailable: This process has no secret for the purpose COMMAND.
        """
        return self._broker_passwords(host, generation)[0]

    def broker_passwords(self, host: str) -> list[str]:
        """Return the passwords that the host's user at the broker may have, the newest first.

        Raises:
            Unavailable: This process has no secret for the purpose COMMAND, the host has no key, or
                the database does not answer.
        """
        newest = self.newest(host, Purpose.COMMAND).generation
        valid = self.generations(host)
        previous = [newest - 1] if valid and valid.accepts_previous else []
        return [
            password
            for generation in (newest, *previous)
            for password in self._broker_passwords(host, generation)
        ]

    def _broker_passwords(self, host: str, generation: int) -> list[str]:
        if Purpose.COMMAND not in self._secrets:
            raise errors.Unavailable(_NO_SECRET.format(Purpose.COMMAND))
        return [
            mac(secret, "broker password", host, generation).hex()[:48]
            for secret in secret_lists.split(self._secrets[Purpose.COMMAND])
        ]
