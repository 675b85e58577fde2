# SPDX-License-Identifier: Apache-2.0
"""The interface of a connector: how a host reaches the volumes of one protocol.

``connectors`` has the table of the connectors. A connector returns where QEMU finds a volume
(``VolumeSource``) without accessing the volume, connects the volume before the first guest uses it,
and disconnects the volume after the last guest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from common.domain.models import AttachedVolume
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import VolumeLink

HOST = re.compile(r"[\w.:-]{1,253}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Found:
    """The size and serial that this host reads from a connected volume.

    ``serial`` identifies the device and is the same on every host. It is "" if the device has none.
    """

    size_bytes: int
    serial: str = ""


class Secrets(Protocol):
    """A store of credentials for QEMU, so that the definitions of guests contain no passwords."""

    def keep(self, key: str, kind: str, value: str) -> None:
        """Store or replace the secret ``value`` under a UUID until libvirtd ends.

        Args:
            key: UUID of the secret.
            kind: libvirt's type of the secret, a value of ``volume_xml.SECRETS``.
            value: The password.
        """

    def drop(self, key: str) -> None:
        """Remove the secret with the UUID ``key``, if there is one."""

    def read(self, key: str) -> bytes:
        """Return the value of the secret with the UUID ``key``, which the operator has defined.

        Raises:
            VerbFailed: The secret does not exist or cannot be read.
        """


class Connector(Protocol):
    """Reaches the volumes of one protocol.

    The argument ``link`` of the methods has the protocol and the parameters of the volume's
    connection, from ``virt.volumes.link``. ``secrets`` stores the passwords for QEMU.
    """

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        """Return where QEMU finds the volume. The volume is neither connected nor read.

        Args:
            volume: The volume.
            link: Protocol and parameters of the volume's connection, from ``virt.volumes.link``.

        Raises:
            VerbFailed: The connection data is not valid or not permitted on this host.
        """

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        """Connect the volume to this host, and return its size and serial. Repeatable.

        Args:
            volume: The volume.
            link: As for ``source``.
            secrets: Stores the password of the volume for QEMU.

        Raises:
            VerbFailed: The volume is not available, or ``source`` fails.
        """

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """Disconnect the volume, which no guest of this host uses any more. Repeatable.

        Args:
            volume: The volume.
            link: As for ``source``.
            secrets: The store that ``connect`` used.

        Raises:
            VerbFailed: The volume stays connected.
        """


class NoSecrets:
    """The ``Secrets`` of a hypervisor that cannot store credentials."""

    def keep(self, key: str, kind: str, value: str) -> None:
        raise VerbFailed(
            "The volume needs a password, and the hypervisor of this host cannot store passwords."
        )

    def drop(self, key: str) -> None:
        """Return at once, because no secret can exist."""

    def read(self, key: str) -> bytes:
        raise VerbFailed(
            "The volume needs a password, and the hypervisor of this host cannot store passwords."
        )


def not_there(volume: AttachedVolume, details: str) -> VerbFailed:
    """Return the error for a volume that this host does not find."""
    return VerbFailed(
        f"This host does not find volume {volume.volume_id}; check the volume service, and try again.",
        details=details,
        retryable=True,
    )
