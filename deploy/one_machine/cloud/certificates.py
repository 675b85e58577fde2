# SPDX-License-Identifier: Apache-2.0
"""The certificates of a cloud whose hosts have addresses of their own: an authority in its home,
and what it signs.

Used by ``prepare`` in deploy/one_machine/cloud/lifecycle.py. On loopback there are none, and
connections are plain text. Must stay
true: only what ``make`` does needs more than Python's own library, for ``./deploy/up`` installs
that first.
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
#: What QEMU calls the files of a folder, which its configuration names.
QEMU = {
    "cert": ("server-cert.pem", "client-cert.pem"),
    "key": ("server-key.pem", "client-key.pem"),
    "ca": ("ca-cert.pem",),
}


class Files(NamedTuple):
    """Paths of PEM files: certificate, its key, the authority of all."""

    cert: str
    key: str
    ca: str


def of(cloud: Cloud, name: str) -> Files | None:
    """The files of CONTROL, BROKER or a host; None where none are used."""
    folder = cloud.home / "tls"
    return (
        Files(*(str(folder / f"{one}.pem") for one in (name, f"{name}-key", "ca")))
        if cloud.is_joined
        else None
    )


def section(cloud: Cloud, name: str) -> dict[str, object]:
    """[tls] of a configuration file. Whoever names a broker or a database of their own gets plain
    text to it."""
    files = of(cloud, name)
    plain = {"allow_plain_text": True} if cloud.broker_url or cloud.database_url else {}
    return (
        {"ca_file": files.ca, "cert_file": files.cert, "key_file": files.key, **plain}
        if files
        else {**plain}
    )


def of_qemu(cloud: Cloud, host: str) -> Path:
    """The folder that a host's QEMU has its own in."""
    return cloud.home / "tls" / f"libvirt-{host}"


def of_volumes(cloud: Cloud) -> Path | None:
    """The folder that the volume service's qemu-nbd has its own in; None where none are used."""
    return cloud.home / "tls" / "volumes" if cloud.is_joined else None


def make(cloud: Cloud) -> None:
    """What is missing, or about to expire."""
    if not cloud.is_joined:
        return
    from deploy.one_machine.cloud import authority as authorities

    authority = authorities.Authority(cloud.home / "tls", f"cloud in {cloud.home}"[:60])
    (cloud.home / "tls").chmod(0o711)  # QEMU's user goes through to its own
    control = authority.issue(CONTROL, cloud.address, "127.0.0.1")
    folder = of_volumes(cloud)
    if cloud.volumes and folder is not None:
        lay(folder, control, QEMU)
    authority.issue(BROKER, cloud.address)
    for number, host in enumerate(cloud.hosts, 1):
        authority.issue(host, cloud.host_address(number))
        lay_for_qemu(of_qemu(cloud, host), authority, host, cloud.host_address(number))


def lay_for_qemu(folder: Path, authority: Authority, host: str, address: str) -> None:
    """Another one than the agent shows: QEMU runs as a user of its own, and may read no other."""
    lay(folder, authority.issue(f"qemu-{host}", address), QEMU, QEMU_GROUP)


def lay(folder: Path, files: Tls, names: Mapping[str, tuple[str, ...]], group: str = "") -> None:
    """Copies under the names that a program looks for; also ``group`` may read them."""
    folder.mkdir(exist_ok=True)
    if group:
        folder.chmod(0o711)  # whatever the umask is
    for kind, called in names.items():
        for name in called:
            shutil.copyfile(getattr(files, kind), folder / f"{name}.new")
            os.chmod(folder / f"{name}.new", 0o640 if group else 0o600)
            if group and os.geteuid() == 0:
                shutil.chown(folder / f"{name}.new", group=group)
            (folder / f"{name}.new").replace(folder / name)
