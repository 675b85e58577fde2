# SPDX-License-Identifier: Apache-2.0
"""The interface of a connector: how a host reaches the volumes of one protocol.

``connectors`` has the table of the connectors. A connector returns the place of a volume for QEMU
without accessing the volume, connects the volume before the first guest, and disconnects the volume
after the last.
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
    """A connected volume. ``serial`` is the same on every host, or "" without one."""

    size_bytes: int
    serial: str = ""


class Secrets(Protocol):
    """A store of credentials for QEMU, so that the definitions of guests contain no passwords."""

    def keep(self, key: str, kind: str, value: str) -> None:
        """Store the secret under this UUID until libvirtd ends."""

    def drop(self, key: str) -> None:
        """Remove the secret, if there is one."""

    def read(self, key: str) -> bytes:
        """Return the value of a secret that the operator has defined, or raise VerbFailed."""


class Connector(Protocol):
    """Reaches the volumes of one protocol."""

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        """Return the place of the volume for QEMU.

        Raises:
            VerbFailed: The connection data is not valid or not permitted on this host.
        """

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        """Connect the volume. Repeatable.

        Raises:
            VerbFailed: The volume is not available.
        """

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """Disconnect the volume, which no guest of this host uses any more. Repeatable.

        Raises:
            VerbFailed: The volume stays connected.
        """


class NoSecrets:
    """The store of a hypervisor without secrets."""

    def keep(self, key: str, kind: str, value: str) -> None:
        raise VerbFailed("This hypervisor keeps no secrets, which the volume needs.")

    def drop(self, key: str) -> None:
        """Return at once, because no secret can exist."""

    def read(self, key: str) -> bytes:
        raise VerbFailed("This hypervisor keeps no secrets, which the volume needs.")


def not_there(volume: AttachedVolume, details: str) -> VerbFailed:
    """Return the error for a volume that this host does not find."""
    return VerbFailed(
        f"This host does not find volume {volume.volume_id}; see the volume service, and try again.",
        details=details,
        retryable=True,
    )
