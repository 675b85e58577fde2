# SPDX-License-Identifier: Apache-2.0
"""Volumes that the host itself reaches: devices of os-brick, and files of NFS exports.

Made by ``connectors.of_host`` if the operator names the protocols in [agent] host_volume_protocols.
The agent itself makes no device and no mount: ``kilonova-volumes``
(``compute_agent.privileged.volume_helper``) makes devices and systemd mounts exports.

Invariant: QEMU finds a device by the volume's id, not by the kernel's device name.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from common.domain.json_types import JsonObject
from common.domain.models import AttachedVolume
from compute_agent.privileged.volume_helper import DEVICES, NotDone, VolumeHelper
from compute_agent.verb_context import VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.libvirt.disks import qcow2
from compute_agent.virt.libvirt.disks.images import GIBIBYTE
from compute_agent.virt.libvirt.volumes.connector import Found, Secrets, not_there
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.mounts import Mounts, host_mounts
from compute_agent.virt.volumes import VolumeLink

NO_HELPER = (
    "kilonova-volumes, which connects volumes for the agent, does not run on this host. Run: systemctl enable --now "
    "kilonova-volumes.socket, and try again."
)
FILE_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
FORMATS = (volume_xml.RAW, volume_xml.QCOW2)
#: Limit of the files in a backing chain.
MOST_FILES = 256


@dataclass(frozen=True)
class DeviceConnector:
    """Reaches volumes as devices that os-brick makes in the host's kernel.

    With ``multipath``, all paths of a device are used.
    """

    helper: VolumeHelper = field(default_factory=VolumeHelper)
    multipath: bool = False

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        return VolumeSource(volume_xml.BLOCK, str(DEVICES / volume.volume_id))

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        arguments = {"at_least": volume.size_gb * GIBIBYTE}
        reply = self._call_helper("connect", volume, link, arguments)
        return Found(int(str(reply["size_bytes"])), str(reply["serial"]))

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        self._call_helper("disconnect", volume, link, {})

    def _call_helper(
        self, verb: str, volume: AttachedVolume, link: VolumeLink, arguments: JsonObject
    ) -> JsonObject:
        request = {
            "verb": verb,
            "volume": volume.volume_id,
            "protocol": link.protocol,
            "data": link.data,
            "multipath": self.multipath,
        }
        try:
            return self.helper.ask(request | arguments)
        except FileNotFoundError as problem:
            raise VerbFailed(NO_HELPER, retryable=True) from problem
        except (NotDone, OSError) as problem:
            raise VerbFailed(
                f"This host could not {verb} volume {volume.volume_id} over {link.protocol}; see the journal of "
                "kilonova-volumes on this host, and try again.",
                details=str(problem),
                retryable=True,
            ) from problem


@dataclass(frozen=True)
class NfsConnector:
    """Reaches volumes that are files of NFS exports, mounted below ``folder``.

    A mount stays until the host restarts, because other volumes may be on the same export.
    """

    folder: Path
    mounts: Mounts = field(default_factory=host_mounts)

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        export, name = (str(link.data.get(part) or "") for part in ("export", "name"))
        disk_format = str(link.data.get("format") or volume_xml.RAW)
        if (
            not export
            or not FILE_NAME.fullmatch(name)
            or volume.volume_id not in name
            or disk_format not in FORMATS
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"export {export[:80]!r}, name {name[:80]!r} or format {disk_format:.20} is not valid: the name must "
                f"contain the id, and the format must be {' or '.join(FORMATS)}",
            )
        return VolumeSource(
            volume_xml.FILE, str(self._mount_point(export) / name), format=disk_format
        )

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        path, export = Path(self.source(volume, link).path), str(link.data["export"])
        self.folder.mkdir(mode=0o711, exist_ok=True)
        self.mounts.mount("NFS", export, self._mount_point(export))
        try:
            status = path.lstat()
        except OSError as problem:
            raise not_there(volume, str(problem)) from problem
        if not stat.S_ISREG(status.st_mode):
            raise not_there(volume, f"{path} is not a regular file")
        if self.source(volume, link).format == volume_xml.RAW:
            return Found(status.st_size)
        try:
            return Found(check_chain(path, volume.volume_id))
        except (OSError, ValueError) as problem:
            raise not_there(volume, f"{path}: {problem}") from problem

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """Do nothing: only QEMU had the volume's file open, and the export stays mounted."""

    def _mount_point(self, export: str) -> Path:
        return self.folder / hashlib.sha256(export.encode()).hexdigest()[:32]


def check_chain(path: Path, volume_id: str) -> int:
    """Check the backing chain of a qcow2 volume, and return the virtual size in bytes.

    Every backing file must be in the same folder, with the volume's id in the name. The header
    that names a backing file must record its format, raw or qcow2.

    Raises:
        ValueError: A header is malformed or names a file that does not fit these rules, a file is
            not regular, or the chain has a loop or more than ``MOST_FILES`` files.
        OSError: A file cannot be read.
    """
    size, names = 0, set[str]()
    while len(names) < MOST_FILES:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or path.name in names:
            raise ValueError(f"{path.name} is not a regular file, or is its own backing file")
        names.add(path.name)
        header = qcow2.read(path)
        size = size or header.virtual_size
        if not header.backing:
            return size
        if (
            not FILE_NAME.fullmatch(header.backing)
            or volume_id not in header.backing
            or header.backing_format not in FORMATS
        ):
            raise ValueError(
                f"{path.name} has the backing file {header.backing[:200]!r} of format "
                f"{header.backing_format[:20]!r}"
            )
        path = path.with_name(header.backing)
        if header.backing_format == volume_xml.RAW:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise ValueError(f"{path.name} is not a regular file")
            return size
    raise ValueError(f"the backing chain has more than {MOST_FILES} files")


def describe_by_helper(helper: VolumeHelper, properties: JsonObject, multipath: bool) -> JsonObject:
    """Return ``properties``, updated with the properties that os-brick reports for this host.

    Args:
        helper: Client of ``kilonova-volumes``, which calls os-brick.
        properties: Connector properties, with at least "host" and "ip".
        multipath: True to report multipath support.

    Raises:
        NotDone: The helper failed.
        OSError: The helper is not reachable.
    """
    request = {
        "verb": "host",
        "host": properties["host"],
        "ip": properties["ip"],
        "multipath": multipath,
    }
    return {**properties, **helper.ask(request)}
