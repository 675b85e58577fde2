# SPDX-License-Identifier: Apache-2.0
"""The connectors of this host, by protocol.

Called by ``volumes``. A connector returns where QEMU finds a volume without accessing the volume,
and connects and checks the volume before a guest uses it.

Invariant: connection data of the volume service can never name another file of this host. For
example, a local path must be in a configured folder and contain the volume's id.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.domain.errors import ConfigError
from common.domain.models import AttachedVolume
from common.security.tls import Tls, is_loopback
from common.service.log import get_logger
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
    describe_by_helper,
)
from compute_agent.virt.libvirt.volumes.network_connectors import IscsiConnector, RbdConnector
from compute_agent.virt.libvirt.xml import volume_tuning, volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import VolumeLink

LOG = get_logger(__name__)

#: The file with this host's iSCSI name, of open-iscsi.
INITIATOR = Path("/etc/iscsi/initiatorname.iscsi")
EXPORT = re.compile(r"[\w.:@/-]{1,255}", re.ASCII)


@dataclass(frozen=True)
class LocalConnector:
    """Reaches volumes that are files or block devices of this host, only in ``folders``."""

    folders: Sequence[Path]

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        path = Path(str(link.data.get("device_path") or ""))
        real_folder = Path(os.path.realpath(path.parent))
        if (
            not path.is_absolute()
            or ".." in path.parts
            or volume.stored_id not in path.name
            or not any(real_folder.is_relative_to(folder.resolve()) for folder in self.folders)
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"device_path {str(path)[:200]!r} is not in [agent] volume_folders, or does not contain the id",
            )
        is_block = path.is_block_device()
        return VolumeSource(
            volume_xml.BLOCK if is_block else volume_xml.FILE,
            str(path),
            direct=_supports_direct_io(path),
        )

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        source = self.source(volume, link)
        try:
            # The name of a logical volume may be a symbolic link. The name of a file may not.
            status = os.stat(source.path, follow_symlinks=source.kind == volume_xml.BLOCK)
            if stat.S_ISREG(status.st_mode):
                return Found(status.st_size)
            if stat.S_ISBLK(status.st_mode):
                with open(source.path, "rb") as device:
                    return Found(device.seek(0, os.SEEK_END))
        except OSError as problem:
            raise not_there(volume, str(problem)) from problem
        raise not_there(volume, f"{source.path} is neither a file nor a block device")

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """Return at once, because only QEMU had the volume open."""


@dataclass(frozen=True)
class NbdConnector:
    """Reaches exports of NBD servers, to which QEMU itself connects.

    Attributes:
        tls: This host's certificates and key, or None.
        plain_text: True if data may be transferred to other machines without TLS.
    """

    tls: Tls | None = None
    plain_text: bool = False

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        data = link.data
        host, export, port = (
            str(data.get("host") or ""),
            str(data.get("export") or ""),
            data.get("port"),
        )
        is_encrypted = data.get("tls") is True
        if (
            not HOST.fullmatch(host)
            or not EXPORT.fullmatch(export)
            or volume.stored_id not in export
            or not isinstance(port, int)
            or not 0 < port < 1 << 16
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"host {host[:80]!r}, port {str(port)[:20]!r} or export {export[:80]!r} is not valid for this volume",
            )
        if is_encrypted and self.tls is None:
            raise VerbFailed(
                f"Volume {volume.volume_id} is served over TLS, and this host has no certificate; set [tls] ca_file, "
                "cert_file and key_file in the configuration of the host.",
                retryable=True,
            )
        if not is_encrypted and not (self.plain_text or is_loopback(host)):
            raise VerbFailed(
                f"Volume {volume.volume_id} would be transferred as plain text; set up TLS at the volume service, or "
                "set [tls] allow_plain_text = true on an isolated network.",
                retryable=True,
            )
        return VolumeSource(volume_xml.NETWORK, "", host, port, export, is_encrypted)

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        source = self.source(volume, link)
        return Found(
            nbd.export_size(
                source.host, source.port, source.export, self.tls if source.tls else None
            )
        )

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """Return at once, because only QEMU had the volume open."""


@dataclass(frozen=True)
class Connectors:
    """The connectors of this host, by the volume service's names of protocols.

    Attributes:
        table: The connectors by protocol.
        about: This host's connector properties for the volume service.
        secrets: libvirt's store of credentials.
    """

    table: Mapping[str, Connector] = field(default_factory=lambda: {volumes.NBD: NbdConnector()})
    about: Mapping[str, object] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=NoSecrets)

    def source(self, volume: AttachedVolume) -> VolumeSource:
        """Return where QEMU finds the volume, with QoS limits and block sizes.

        The volume is neither connected nor read.

        Raises:
            VerbFailed: This host cannot use the volume's connection, QoS or block sizes.
        """
        link = volumes.link(volume, self.table)
        place = self.table[link.protocol].source(volume, link)
        return replace(
            place,
            limits=volume_tuning.rates(volume.volume_id, link),
            block_sizes=volume_tuning.block_sizes(volume.volume_id, link),
        )

    def connect(self, volume: AttachedVolume) -> Found:
        """Connect the volume, check the size, and return size and serial. Repeatable.

        Raises:
            VerbFailed: This host cannot use the volume's connection, for example because the volume
                is encrypted. Or the volume is not available, or is smaller than
                ``volume.size_gb``. A volume that is too small may stay connected.
        """
        link = volumes.link(volume, self.table)
        device = self.table[link.protocol].connect(volume, link, self.secrets)
        if device.size_bytes < volume.size_gb * GIBIBYTE:
            raise VerbFailed(
                f"The device that this host found for volume {volume.volume_id} is not that volume: it has "
                f"{device.size_bytes} bytes, not {volume.size_gb} GiB. The device is not attached to the server.",
                details=f"over {link.protocol}",
            )
        return device

    def disconnect(self, volume: AttachedVolume) -> None:
        """Disconnect the volume, which no guest of this host uses any more.

        If this host does not support the volume's protocol, nothing happens.

        Raises:
            VerbFailed: The volume stays connected.
        """
        if volume.connection.get("driver_volume_type") in self.table:
            link = volumes.link(volume, self.table)
            self.table[link.protocol].disconnect(volume, link, self.secrets)


@dataclass(frozen=True)
class Protocols:
    """The protocols that the operator permits in addition to NBD.

    Attributes:
        folders: Folders of local volumes.
        by_qemu: Protocols that QEMU speaks, by the volume service's names.
        by_host: Protocols that the host's kernel speaks, by the same names.
        multipath: True to use all paths of a device.
        mounts: Folder of the mount points of NFS exports.
        helper: Client of ``kilonova-volumes``.
    """

    folders: Sequence[str] = ()
    by_qemu: Collection[str] = ()
    by_host: Collection[str] = ()
    multipath: bool = False
    mounts: Path = Path("volume-mounts")
    helper: VolumeHelper = field(default_factory=VolumeHelper)


def of_host(
    allowed: Protocols, tls: Tls | None, plain_text: bool, about: Mapping[str, object]
) -> Connectors:
    """Return this host's connectors for NBD and the permitted protocols.

    The result also has the connector properties ``about``. If QEMU speaks iSCSI and ``about`` has
    no iSCSI name, ``initiator_of`` makes the name. If ``allowed.by_host`` has a protocol other than
    NFS, ``kilonova-volumes`` reports further properties. If this fails, a warning is logged and
    these properties are left out.

    Args:
        allowed: The protocols that the operator permits.
        tls: This host's certificates and key, or None.
        plain_text: True if NBD may be used without TLS.
        about: This host's connector properties, from ``describe_host``.

    Raises:
        ConfigError: A protocol is configured for both QEMU and the host.
    """
    if duplicates := set(allowed.by_qemu) & set(allowed.by_host):
        raise ConfigError(
            f"[agent] qemu_volume_protocols and host_volume_protocols both name {', '.join(sorted(duplicates))}; "
            "remove each protocol from one of the two options"
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
        about = _add_helper_properties(allowed, about)
    return Connectors(table, about)


def _add_helper_properties(allowed: Protocols, about: Mapping[str, object]) -> Mapping[str, object]:
    try:
        return describe_by_helper(allowed.helper, dict(about), allowed.multipath)
    except (NotDone, OSError) as problem:
        LOG.warning(
            "kilonova-volumes does not report this host's connector properties", problem=problem
        )
        return about


def initiator_of(name: str) -> str:
    """Return an iSCSI name made from the host's name, for a host without a name of open-iscsi."""
    return f"iqn.2026-11.org.kilonova:{re.sub(r'[^a-z0-9.-]', '-', name.lower())}"


def describe_host(name: str, address: str) -> dict[str, object]:
    """Return this host's connector properties for the volume service, in os-brick's format.

    The iSCSI name is included if open-iscsi has one.

    Args:
        name: The host's name at the volume service.
        address: The host's IP address.
    """
    properties: dict[str, object] = {
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
        return properties
    match = re.search(r"^InitiatorName=(\S+)$", text, re.MULTILINE)
    return properties | ({"initiator": match[1]} if match else {})


def _supports_direct_io(path: Path) -> bool:
    """Return True if the file can be opened with O_DIRECT, which some file systems do not support.

    If the open fails, return True only for a block device.
    """
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        return path.is_block_device()
    return True
