# SPDX-License-Identifier: Apache-2.0
"""Volumes that QEMU reaches over the network by itself: iSCSI by libiscsi, Ceph by librbd.

Made by ``connectors.of_host`` if the operator names the protocol in [agent] qemu_volume_protocols.
The host's kernel is not involved and no privilege is needed. QEMU gets a password from a secret of
libvirt.

Invariant: values of the volume service enter XML or options of qemu-img only if they consist of
permitted characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from common.domain.models import AttachedVolume
from compute_agent.verb_context import VerbFailed
from compute_agent.virt import volumes
from compute_agent.virt.libvirt.disks import qemu_img
from compute_agent.virt.libvirt.volumes import iscsi
from compute_agent.virt.libvirt.volumes.connector import HOST, Found, Secrets, not_there
from compute_agent.virt.libvirt.xml import volume_xml
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import VolumeLink

#: RFC 7143 limits a name to 223 bytes.
TARGET = re.compile(r"[\w.:-]{1,223}", re.ASCII)
USER = re.compile(r"[\w.:@/-]{1,255}", re.ASCII)
IMAGE = re.compile(r"[\w.-]{1,100}(?:/[\w.-]{1,100})?/[\w.-]{1,100}", re.ASCII)
SECRET = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
MOST_MONITORS, CEPH_PORT = 16, 6789


@dataclass(frozen=True)
class IscsiConnector:
    """Reaches logical units of iSCSI targets. ``initiator`` is this host's iSCSI name."""

    initiator: str

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        target = self._parse_target(volume, link)
        return VolumeSource(
            volume_xml.NETWORK,
            host=target.host,
            port=target.port,
            export=f"{target.name}/{target.lun}",
            protocol=volume_xml.ISCSI,
            user=target.user,
            secret=volume.volume_id if target.user else "",
            initiator=self.initiator,
        )

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        target = self._parse_target(volume, link)
        try:
            unit = iscsi.look_at(target)
        except iscsi.UnitRefused as problem:
            raise VerbFailed(
                f"The iSCSI target of volume {volume.volume_id} at {target.host}:{target.port} refuses this host; "
                "check the volume service, and attach the volume again.",
                details=str(problem),
                retryable=True,
            ) from problem
        except (OSError, ValueError) as problem:
            raise not_there(
                volume, f"iSCSI portal {target.host}:{target.port}: {problem}"
            ) from problem
        if target.user:
            # The secret is lost when libvirtd ends, and stored again before each start of the
            # guest.
            secrets.keep(volume.volume_id, volume_xml.SECRETS[volume_xml.ISCSI], target.password)
        return Found(unit.size_bytes, unit.serial)

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        secrets.drop(volume.volume_id)

    def _parse_target(self, volume: AttachedVolume, link: VolumeLink) -> iscsi.UnitAddress:
        data = link.data
        name, lun = str(data.get("target_iqn") or ""), data.get("target_lun")
        user, password = (str(data.get(f"auth_{part}") or "") for part in ("username", "password"))
        if data.get("auth_method") not in (None, "", "None", "CHAP"):
            raise volumes.unreadable(
                volume.volume_id, f"auth_method {data['auth_method']!s:.40} is not CHAP"
            )
        try:
            host, port = iscsi.address(str(data.get("target_portal") or ""))
        except ValueError as problem:
            raise volumes.unreadable(volume.volume_id, f"target_portal: {problem}") from problem
        if (
            not HOST.fullmatch(host)
            or not TARGET.fullmatch(name)
            or not isinstance(lun, int)
            or not 0 <= lun < iscsi.LONGEST_LUN
            or (user and (not USER.fullmatch(user) or not password))
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"target_portal {host[:80]!r}, target_iqn {name[:80]!r}, target_lun {lun!s:.20} or auth_username "
                f"{user[:80]!r} is not valid",
            )
        return iscsi.UnitAddress(host, port, name, lun, self.initiator, user, password)


@dataclass(frozen=True)
class RbdConnector:
    """Reaches images of a Ceph cluster.

    The operator defines the key of the cluster's user as a secret of libvirt on this host.
    """

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        data = link.data
        name = str(data.get("name") or "")
        hosts, ports = data.get("hosts") or [], data.get("ports") or []
        user, secret = (str(data.get(part) or "") for part in ("auth_username", "secret_uuid"))
        needs_key = data.get("auth_enabled") is True
        monitors = [
            (str(host).strip("[]"), int(port))
            for host, port in zip(hosts, [*ports, *[CEPH_PORT] * len(hosts)], strict=False)
            if str(port).isdecimal()
        ]
        if (
            not IMAGE.fullmatch(name)
            or volume.volume_id not in name
            or not 0 < len(monitors) <= MOST_MONITORS
            or not all(HOST.fullmatch(host) and 0 < port < 1 << 16 for host, port in monitors)
            or (needs_key and not (USER.fullmatch(user) and SECRET.fullmatch(secret)))
        ):
            raise volumes.unreadable(
                volume.volume_id,
                f"name {name[:120]!r}, {len(monitors)} hosts, auth_username {user[:40]!r} or secret_uuid "
                f"{secret[:40]!r} is not valid for this volume",
            )
        (host, port), *other_monitors = monitors
        place = VolumeSource(volume_xml.NETWORK, "", host, port, name, protocol=volume_xml.RBD)
        return replace(
            place,
            beside=[f"{host}:{port}" for host, port in other_monitors],
            user=user if needs_key else "",
            secret=secret if needs_key else "",
        )

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        source = self.source(volume, link)
        key = secrets.read(source.secret) if source.secret else b""
        try:
            return Found(qemu_img.size_of_rbd(source, key))
        except OSError as problem:
            raise not_there(volume, str(problem)) from problem

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        """Return at once: only QEMU had the volume open, and the secret belongs to the operator."""
