# SPDX-License-Identifier: Apache-2.0
"""The certificates of a cloud whose hosts have addresses of their own.

``prepare`` in deploy/one_machine/cloud/lifecycle.py uses this module. All certificates are in the
cloud's home. A cloud on loopback (``Cloud.is_joined`` is False) uses plain text. Invariant: only
``make`` imports more than the standard library, because ``./deploy/up`` imports this module before
it installs the other packages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.machine.libvirtd import QEMU_GROUP

if TYPE_CHECKING:
    from common.security.tls import Tls
    from deploy.one_machine.cloud.authority import Authority

CONTROL, BROKER = "control", "broker"
#: Kind of file -> QEMU's names for the file, in the folder from QEMU's configuration.
QEMU = {
    "cert": ("server-cert.pem", "client-cert.pem"),
    "key": ("server-key.pem", "client-key.pem"),
    "ca": ("ca-cert.pem",),
}


class Files(NamedTuple):
    """Paths of PEM files: the certificate, the key, and the certificate of the authority."""

    cert: str
    key: str
    ca: str


def of(cloud: Cloud, name: str) -> Files | None:
    """Return the paths of a certificate's files, or None for a cloud on loopback.

    ``make`` creates the files.

    Args:
        cloud: The cloud.
        name: CONTROL, BROKER or the name of a host.
    """
    folder = cloud.home / "tls"
    return (
        Files(*(str(folder / f"{stem}.pem") for stem in (name, f"{name}-key", "ca")))
        if cloud.is_joined
        else None
    )


def section(cloud: Cloud, name: str) -> dict[str, object]:
    """Return the options of [tls] in a configuration file, without files on loopback.

    Plain text is permitted if the operator configured an external broker or database.

    Args:
        cloud: The cloud.
        name: CONTROL or the name of a host.
    """
    files = of(cloud, name)
    plain = {"allow_plain_text": True} if cloud.broker_url or cloud.database_url else {}
    return (
        {"ca_file": files.ca, "cert_file": files.cert, "key_file": files.key, **plain}
        if files
        else {**plain}
    )


def of_qemu(cloud: Cloud, host: str) -> Path:
    """Return the folder with the certificates of a host's QEMU."""
    return cloud.home / "tls" / f"libvirt-{host}"


def of_volumes(cloud: Cloud) -> Path | None:
    """Return the folder with the certificates of the volume service's qemu-nbd.

    For a cloud on loopback return None.
    """
    return cloud.home / "tls" / "volumes" if cloud.is_joined else None


def make(cloud: Cloud) -> None:
    """Issue the certificates that are missing, expire soon, or are for other addresses.

    The certificates of QEMU and qemu-nbd are also copied into their folders. For a cloud on
    loopback do nothing.
    """
    if not cloud.is_joined:
        return
    from deploy.one_machine.cloud import authority as authorities

    authority = authorities.Authority(cloud.home / "tls", f"cloud in {cloud.home}"[:60])
    # QEMU's user reaches the folder with the copies through this folder.
    (cloud.home / "tls").chmod(0o711)
    control = authority.issue(CONTROL, cloud.address, "127.0.0.1")
    folder = of_volumes(cloud)
    if cloud.volumes and folder is not None:
        install_files(folder, control, QEMU)
    authority.issue(BROKER, cloud.address)
    for number, host in enumerate(cloud.hosts, 1):
        authority.issue(host, cloud.host_address(number))
        install_qemu_files(of_qemu(cloud, host), authority, host, cloud.host_address(number))


def install_qemu_files(folder: Path, authority: Authority, host: str, address: str) -> None:
    """Issue a certificate for a host's QEMU if necessary, and copy its files into the folder.

    QEMU cannot use the agent's certificate, because QEMU runs as another user without access to the
    key.
    """
    install_files(folder, authority.issue(f"qemu-{host}", address), QEMU, QEMU_GROUP)


def install_files(
    folder: Path, files: Tls, names: Mapping[str, tuple[str, ...]], group: str = ""
) -> None:
    """Copy a certificate's files into a folder, under the names that a program expects.

    Args:
        folder: The folder, which is created if necessary, below an existing folder. With ``group``
            all users may pass through this folder.
        files: The certificate.
        names: Kind of file, as in ``QEMU`` -> the names of the copies.
        group: A group that may read the copies, or "" if only their owner may. Only root can set
            the group. Another process leaves its own group.
    """
    folder.mkdir(exist_ok=True)
    if group:
        # The umask may be narrower.
        folder.chmod(0o711)
    for kind, file_names in names.items():
        for name in file_names:
            shutil.copyfile(getattr(files, kind), folder / f"{name}.new")
            os.chmod(folder / f"{name}.new", 0o640 if group else 0o600)
            if group and os.geteuid() == 0:
                shutil.chown(folder / f"{name}.new", group=group)
            (folder / f"{name}.new").replace(folder / name)
