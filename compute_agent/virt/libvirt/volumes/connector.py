# SPDX-License-Identifier: Apache-2.0
"""What a connector is: how a host reaches the volumes of one protocol.

``connectors`` has the table of them. A connector says where QEMU finds a volume, which needs no
look at it; it reaches the volume before a guest sees it, and lets go of it when no guest has it.
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
    """What this host sees of a volume. ``serial``: by what its device is known wherever it is seen;
    "" where it has none."""

    size_bytes: int
    serial: str = ""


class Secrets(Protocol):
    """What libvirt keeps for QEMU, so that no description of a guest has it."""

    def keep(self, key: str, kind: str, value: str) -> None:
        """Under this UUID, until libvirtd ends."""

    def drop(self, key: str) -> None:
        """One that is gone is fine."""

    def read(self, key: str) -> bytes:
        """One that the operator has made. VerbFailed when there is none."""


class Connector(Protocol):
    """One protocol."""

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        """Where QEMU finds the volume. VerbFailed when that is none that this host may use."""

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        """Reach it. VerbFailed when it is not there. Repeatable."""

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """No guest of this host has it any more. VerbFailed when the host does not let go of it.
        Repeatable."""


class NoSecrets:
    """Of a hypervisor that keeps none."""

    def keep(self, key: str, kind: str, value: str) -> None:
        raise VerbFailed("This hypervisor keeps no secrets, which the volume needs.")

    def drop(self, key: str) -> None:
        """There are none."""

    def read(self, key: str) -> bytes:
        raise VerbFailed("This hypervisor keeps no secrets, which the volume needs.")


def not_there(volume: AttachedVolume, details: str) -> VerbFailed:
    """The failure of a volume that this host was told of and does not see."""
    return VerbFailed(
        f"This host does not find volume {volume.volume_id}; see the volume service, and try again.",
        details=details,
        retryable=True,
    )
