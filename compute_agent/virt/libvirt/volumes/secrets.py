# SPDX-License-Identifier: Apache-2.0
"""libvirt's secrets, by which QEMU gets what a volume's server asks of it.

Called by the connectors. A secret of ours is private (nobody reads it back) and ephemeral (on no
disk); it is kept again before each start of a guest.
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
    """Of one libvirtd."""

    def __init__(self, libvirt: Connection) -> None:
        self._libvirt = libvirt

    def keep(self, key: str, kind: str, value: str) -> None:
        """Under this UUID, in place of what was there."""
        root = Element("secret", ephemeral="yes", private="yes")
        SubElement(root, "uuid").text = key
        usage = SubElement(root, "usage", type=kind)
        SubElement(usage, USAGES[kind]).text = f"kilonova-{key}"
        described = ElementTree.tostring(root, encoding="unicode")
        self._libvirt.ask(
            "keep a secret",
            lambda connection: connection.secretDefineXML(described, 0).setValue(value.encode(), 0),
        )

    def drop(self, key: str) -> None:
        """One that is gone is fine."""
        for secret in self._found(key):
            self._libvirt.ask("forget a secret", functools.partial(_undefine, secret))

    def read(self, key: str) -> bytes:
        """One that the operator has made. VerbFailed when there is none."""
        found = self._found(key)
        if not found:
            raise VerbFailed(
                f"libvirt on this host has no secret {key}, which the volume's cluster asks for; define it "
                "(virsh secret-define, secret-set-value), and try again.",
                retryable=True,
            )
        return bytes(self._libvirt.ask("read a secret", lambda _: found[0].value(0)))

    def _found(self, key: str) -> list[Any]:
        return self._libvirt.ask(
            "look for a secret",
            lambda connection: [
                one for one in connection.listAllSecrets(0) if one.UUIDString() == key
            ],
        )


def _undefine(secret: Secret, connection: LibvirtConnection) -> None:
    secret.undefine()
