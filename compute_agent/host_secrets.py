# SPDX-License-Identifier: Apache-2.0
"""Renewal of the host's keys, its password at the broker, and the broker's addresses.

Each answer of a conductor contains the digest of the host's secrets. If the digest is not that of
the host's key file, the agent fetches the secrets, replaces the file, and uses them at once. So an
operator changes a secret without visiting hosts (docs/secrets.md).

Invariant: the file is complete at any moment, and names only a broker to which the agent could
connect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from oslo_config import cfg

from common.domain import errors
from common.domain.clock import Clock
from common.domain.json_types import JsonObject
from common.rpc.broker import Connect, address_of, look_in, opener, url_as
from common.rpc.host_credentials import HostSecrets, HostSecretsClient
from common.security import private_files
from common.security.host_keys import GOOD_FOR_SECONDS, HostKey, NotGenuine, OwnKeys, Purpose
from common.service.log import get_logger

log = get_logger(__name__)
#: Pauses before the agent fetches the secrets again: after a failure, and after a success, because
#: conductors answer differently while an operator restarts one after the other.
PAUSE_SECONDS, SETTLE_SECONDS = 30.0, 10.0
#: Time for which messages with the previous keys are accepted. Processes of the control plane may
#: use these keys for ``GOOD_FOR_SECONDS``.
PREVIOUS_SECONDS = 2 * GOOD_FOR_SECONDS
BY_HAND = "see the steps for this secret in docs/secrets.md"


class LiveKeys:
    """The keys of this host (``Keys``), which may be replaced while the agent runs."""

    def __init__(self, own: OwnKeys, clock: Clock) -> None:
        self.own = own
        self._clock = clock
        self._previous, self._replaced_at = own, float("-inf")

    def replace(self, own: OwnKeys) -> None:
        """Use these keys for new messages. Accept the previous keys for ``PREVIOUS_SECONDS``."""
        self._previous, self._replaced_at = self.own, self._clock.monotonic()
        self.own = own

    def newest(self, host: str, purpose: Purpose) -> HostKey:
        return self.own.newest(host, purpose)

    def find(self, host: str, generation: int, purpose: Purpose) -> HostKey:
        is_recent = self._clock.monotonic() - self._replaced_at < PREVIOUS_SECONDS
        if is_recent and generation == self._previous.generation != self.own.generation:
            return self._previous.find(host, generation, purpose)
        return self.own.find(host, generation, purpose)


@dataclass(frozen=True)
class KeyFile:
    """The host's key file, and the configuration that says how to reach the broker."""

    path: Path
    conf: cfg.ConfigOpts

    def connect(self, own: OwnKeys) -> Connect:
        """Return the connections to the broker with these keys.

        Raises:
            ConfigError: The URL of the broker cannot be used.
        """
        return opener(self.conf, own.transport_url or None, own.other_passwords)

    def update(self, own: OwnKeys, secrets: HostSecrets) -> OwnKeys:
        """Write the secrets to the file, and return the host's new keys.

        The passwords are ignored if the present one is not among them, because then the operator
        has made the host's user at the broker.

        Raises:
            ConfigError, Unavailable: The broker cannot be reached with a new address or password.
            OSError: The file cannot be written.
        """
        changed = replace(
            own,
            generation=secrets.generation,
            secrets={purpose: keys[0] for purpose, keys in secrets.keys.items()},
            others={purpose: tuple(keys[1:]) for purpose, keys in secrets.keys.items() if keys[1:]},
            fetched=secrets.digest(),
        )
        if own.transport_url:
            user, *_ = address_of(self.conf, own.transport_url).hosts
            passwords = [user.password]
            if user.password in secrets.passwords:
                passwords = list(secrets.passwords)
            url = url_as(
                self.conf, user.username, passwords[0], own.transport_url, at=secrets.brokers
            )
            changed = replace(changed, transport_url=url, other_passwords=tuple(passwords[1:]))
            if broker_of(changed) != broker_of(own):
                look_in(self.conf, url, "the broker for hosts", changed.other_passwords)
        private_files.replace(self.path, changed.text())
        return changed


class SecretsKeeper:
    """Keeps this host's secrets those of today.

    Args:
        file: The host's key file.
        keys: The keys that the agent uses.
        client: Fetches the secrets from conductors.
        change_broker: Lets the agent use a new broker, or a new password there.
        clock: The clock.
    """

    def __init__(
        self,
        file: KeyFile,
        keys: LiveKeys,
        client: HostSecretsClient,
        change_broker: Callable[[Connect], None],
        clock: Clock,
    ) -> None:
        self._file, self._keys, self._client = file, keys, client
        self._change_broker, self._clock = change_broker, clock
        self._not_before = float("-inf")

    def compare(self, digest: str) -> bool:
        """Fetch and use the secrets if the host has others than those with this digest.

        Afterwards nothing is fetched for ``SETTLE_SECONDS``. A failure is logged, and nothing is
        fetched for ``PAUSE_SECONDS``.

        Args:
            digest: ``secrets`` of a conductor's answer. Empty: the conductor does not know it.

        Returns:
            True if the host has new secrets, so that ``facts`` has changed.
        """
        if digest in ("", self._keys.own.fetched) or self._clock.monotonic() < self._not_before:
            return False
        self._not_before = self._clock.monotonic() + SETTLE_SECONDS
        try:
            self._renew()
        except (errors.Problem, errors.ConfigError, NotGenuine, OSError, ValueError) as problem:
            self._not_before = self._clock.monotonic() + PAUSE_SECONDS
            log.warning(
                "the keys of this host are not renewed, and the agent goes on with those it has",
                path=self._file.path,
                problem=problem,
                remedy=BY_HAND,
            )
            return False
        return True

    def _renew(self) -> None:
        before, secrets = self._keys.own, self._client.fetch()
        after = self._file.update(before, secrets)
        self._keys.replace(after)
        if broker_of(after) != broker_of(before):
            self._change_broker(self._file.connect(after))
        log.info("the keys of this host are renewed", generation=after.generation)

    def facts(self) -> JsonObject:
        """Return the fact ``secrets`` for the inventory: the digest of this host's secrets."""
        return {"secrets": self._keys.own.fetched} if self._keys.own.fetched else {}


def broker_of(own: OwnKeys) -> tuple[str, tuple[str, ...]]:
    """Return the broker's URL and the further passwords."""
    return own.transport_url, own.other_passwords
