# SPDX-License-Identifier: Apache-2.0
"""libvirt's secrets: credentials that QEMU needs to reach volumes.

Called by the connectors. Our secrets are private (libvirt returns them to no client) and ephemeral
(never on a disk). They are defined again before each start of a guest.
"""

from __future__ import annotations

import functools
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.domains.connection import Connection, LibvirtConnection, Secret

USAGES = {"iscsi": "target", "ceph": "name"}


class LibvirtSecrets:
    """The secrets of one libvirtd. Implements ``connector.Secrets``."""

    def __init__(self, libvirt: Connection) -> None:
        self._libvirt = libvirt

    def keep(self, key: str, kind: str, value: str) -> None:
        """Define the secret with the UUID ``key`` until libvirtd ends, or replace the value."""
        root = Element("secret", ephemeral="yes", private="yes")
        SubElement(root, "uuid").text = key
        usage = SubElement(root, "usage", type=kind)
        SubElement(usage, USAGES[kind]).text = f"kilonova-{key}"
        xml = ElementTree.tostring(root, encoding="unicode")
        self._libvirt.ask(
            "store a secret",
            lambda connection: connection.secretDefineXML(xml, 0).setValue(value.encode(), 0),
        )

    def drop(self, key: str) -> None:
        """Remove the secret with the UUID ``key``, if there is one."""
        for secret in self._find(key):
            self._libvirt.ask("remove a secret", functools.partial(_undefine, secret))

    def read(self, key: str) -> bytes:
        """Return the value of the secret with the UUID ``key``, which the operator has defined.

        Raises:
            VerbFailed: The secret does not exist, or libvirt does not return the value.
        """
        secrets = self._find(key)
        if not secrets:
            raise VerbFailed(
                f"libvirt on this host has no secret {key}, which the Ceph cluster of the volume requires; define the "
                "secret (virsh secret-define, secret-set-value), and try again.",
                retryable=True,
            )
        return bytes(self._libvirt.ask("read a secret", lambda _: secrets[0].value(0)))

    def _find(self, key: str) -> list[Any]:
        return self._libvirt.ask(
            "look for a secret",
            lambda connection: [
                secret for secret in connection.listAllSecrets(0) if secret.UUIDString() == key
            ],
        )


def _undefine(secret: Secret, connection: LibvirtConnection) -> None:
    secret.undefine()
