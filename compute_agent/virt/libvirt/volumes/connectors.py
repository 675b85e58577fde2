# SPDX-License-Identifier: Apache-2.0
"""How this host reaches volumes: a connector for each protocol that it knows.

Called by ``volumes``. A connector says where QEMU finds a volume, which needs no look at it, and
verifies that it is there and the right one, before a guest sees it. Must stay true: what the volume
service says names a volume by its id, and never another file of this host.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.domain.errors import ConfigError
from common.domain.models import AttachedVolume
from common.security.tls import Tls, is_loopback
from compute_agent.privileged.volume_helper import NotDone, VolumeHelper
from compute_agent.verb_context import VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.libvirt.disks.images import GIBIBYTE
from compute_agent.virt.libvirt.volumes import nbd
from compute_agent.virt.libvirt.volumes.connector import (
    HOST,
    Connector,
    Found,
    NoSecrets,
    Secrets,
    not_there,
)
from compute_agent.virt.libvirt.volumes.host_connectors import (
    DeviceConnector,
    NfsConnector,
    described_by_helper,
)
from compute_agent.virt.libvirt.volumes.network_connectors import IscsiConnector, RbdConnector
from compute_agent.virt.libvirt.xml import volume_tuning, volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import VolumeLink

LOG = logging.getLogger(__name__)

#: Where open-iscsi has this host's name.
INITIATOR = Path("/etc/iscsi/initiatorname.iscsi")
EXPORT = re.compile(r"[\w.:@/-]{1,255}", re.ASCII)


@dataclass(frozen=True)
class LocalConnector:
    """Files and block devices of this host, below ``folders`` alone."""

    folders: Sequence[Path]

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        path = Path(str(link.data.get("device_path") or ""))
        there = Path(os.path.realpath(path.parent))
        if (
            not path.is_absolute()
            or ".." in path.parts
            or volume.stored_id not in path.name
            or not any(there.is_relative_to(folder.resolve()) for folder in self.folders)
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"device_path {str(path)[:200]!r} does not name it in one of [agent] volume_folders",
            )
        is_block = path.is_block_device()
        return VolumeSource(
            volume_xml.BLOCK if is_block else volume_xml.FILE, str(path), direct=_is_direct(path)
        )

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        source = self.source(volume, link)
        try:
            # A symbolic link may be a logical volume's name, but a file's own name is no link.
            about = os.stat(source.path, follow_symlinks=source.kind == volume_xml.BLOCK)
            if stat.S_ISREG(about.st_mode):
                return Found(about.st_size)
            if stat.S_ISBLK(about.st_mode):
                with open(source.path, "rb") as device:
                    return Found(device.seek(0, os.SEEK_END))
        except OSError as problem:
            raise not_there(volume, str(problem)) from problem
        raise not_there(volume, f"{source.path} is neither a file nor a block device")

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """It was QEMU alone that had it open."""


@dataclass(frozen=True)
class NbdConnector:
    """Exports of NBD servers, which QEMU reaches by itself. ``tls``: with what this host proves
    itself; ``plain_text``: whether data may travel without TLS to other machines."""

    tls: Tls | None = None
    plain_text: bool = False

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        data = link.data
        host, export, port = (
            str(data.get("host") or ""),
            str(data.get("export") or ""),
            data.get("port"),
        )
        encrypted = data.get("tls") is True
        if (
            not HOST.fullmatch(host)
            or not EXPORT.fullmatch(export)
            or volume.stored_id not in export
            or not isinstance(port, int)
            or not 0 < port < 1 << 16
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"host {host[:80]!r}, port {str(port)[:20]!r}, export {export[:80]!r} do not name it",
            )
        if encrypted and self.tls is None:
            raise VerbFailed(
                f"Volume {volume.volume_id} is served over TLS and this host has no certificate; set [tls] "
                "ca_file, cert_file and key_file.",
                retryable=True,
            )
        if not encrypted and not (self.plain_text or is_loopback(host)):
            raise VerbFailed(
                f"Volume {volume.volume_id} would travel as plain text; give its service certificates, or "
                "set [tls] allow_plain_text = true where nobody else reaches that network.",
                retryable=True,
            )
        return VolumeSource(volume_xml.NETWORK, "", host, port, export, encrypted)

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        source = self.source(volume, link)
        return Found(
            nbd.export_size(
                source.host, source.port, source.export, self.tls if source.tls else None
            )
        )

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """It was QEMU alone that had it open."""


@dataclass(frozen=True)
class Connectors:
    """Those of this host, by what the volume service calls their protocols. ``about``: who the host
    is to that service; ``secrets``: libvirt's."""

    table: Mapping[str, Connector] = field(default_factory=lambda: {volumes.NBD: NbdConnector()})
    about: Mapping[str, object] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=NoSecrets)

    def source(self, volume: AttachedVolume) -> VolumeSource:
        """Where QEMU finds it. VerbFailed when this host cannot reach it."""
        link = volumes.link(volume, self.table)
        found = self.table[link.protocol].source(volume, link)
        return replace(
            found,
            limits=volume_tuning.rates(volume.volume_id, link),
            block_sizes=volume_tuning.block_sizes(volume.volume_id, link),
        )

    def connect(self, volume: AttachedVolume) -> Found:
        """Reach it and verify that it is the one."""
        link = volumes.link(volume, self.table)
        found = self.table[link.protocol].connect(volume, link, self.secrets)
        if found.size_bytes < volume.size_gb * GIBIBYTE:
            raise VerbFailed(
                f"What this host found as volume {volume.volume_id} is not that volume: it has "
                f"{found.size_bytes} bytes, not {volume.size_gb} GiB. The server does not get it.",
                details=f"over {link.protocol}",
            )
        return found

    def disconnect(self, volume: AttachedVolume) -> None:
        """No guest of this host has it any more. VerbFailed when the host does not let go of it."""
        if volume.connection.get("driver_volume_type") in self.table:
            link = volumes.link(volume, self.table)
            self.table[link.protocol].disconnect(volume, link, self.secrets)


@dataclass(frozen=True)
class Protocols:
    """What the operator allows beside NBD. ``by_qemu`` and ``by_host``: names of protocols, as the
    volume service has them; ``mounts``: where exports are mounted."""

    folders: Sequence[str] = ()
    by_qemu: Collection[str] = ()
    by_host: Collection[str] = ()
    multipath: bool = False
    mounts: Path = Path("volume-mounts")
    helper: VolumeHelper = field(default_factory=VolumeHelper)


def of_host(
    allowed: Protocols, tls: Tls | None, plain_text: bool, about: Mapping[str, object]
) -> Connectors:
    """As the operator allows them.

    Raises:
        ConfigError: one protocol is to be spoken by both QEMU and the host.
    """
    if both := set(allowed.by_qemu) & set(allowed.by_host):
        raise ConfigError(
            f"[agent] qemu_volume_protocols and host_volume_protocols both name {', '.join(sorted(both))}; "
            "take one of them out"
        )
    table: dict[str, Connector] = {volumes.NBD: NbdConnector(tls, plain_text)}
    if allowed.folders:
        table[volumes.LOCAL] = LocalConnector([Path(folder) for folder in allowed.folders])
    if volumes.ISCSI in allowed.by_qemu:
        about = {"initiator": initiator_of(str(about["host"])), **about}
        table[volumes.ISCSI] = IscsiConnector(str(about["initiator"]))
    if volumes.RBD in allowed.by_qemu:
        table[volumes.RBD] = RbdConnector()
    for name in allowed.by_host:
        table[name] = (
            NfsConnector(allowed.mounts)
            if name == volumes.NFS
            else DeviceConnector(allowed.helper, allowed.multipath)
        )
    if set(allowed.by_host) - {volumes.NFS}:
        about = _as_helper_says(allowed, about)
    return Connectors(table, about)


def _as_helper_says(allowed: Protocols, about: Mapping[str, object]) -> Mapping[str, object]:
    try:
        return described_by_helper(allowed.helper, dict(about), allowed.multipath)
    except (NotDone, OSError) as problem:
        LOG.warning("kilonova-volumes does not say who this host is to volumes: %s", problem)
        return about


def initiator_of(name: str) -> str:
    """A name in iSCSI for a host that open-iscsi has given none."""
    return f"iqn.2026-11.org.kilonova:{re.sub(r'[^a-z0-9.-]', '-', name.lower())}"


def describe_host(name: str, address: str) -> dict[str, object]:
    """Who a host is to the volume service, in os-brick's words; the name is the service's own for a
    host whose files it serves."""
    about: dict[str, object] = {
        "host": name,
        "ip": address,
        "platform": os.uname().machine,
        "os_type": "linux",
        "multipath": False,
        "do_local_attach": False,
    }
    try:
        text = INITIATOR.read_text()
    except OSError:
        return about
    found = re.search(r"^InitiatorName=(\S+)$", text, re.MULTILINE)
    return about | ({"initiator": found[1]} if found else {})


def _is_direct(path: Path) -> bool:
    """Can it be opened past the host's cache? Not on every file system."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        return path.is_block_device()
    return True
