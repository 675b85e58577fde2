# SPDX-License-Identifier: Apache-2.0
"""The file modes of the certificates that a cloud on one machine issues for QEMU."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.cloud.certificates import install_qemu_files


def test_install_qemu_files_makes_files_readable_by_owner_and_group_only(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = tmp_path / "libvirt-h1"
        install_qemu_files(folder, Authority(tmp_path / "tls", "a cloud"), "h1", "192.0.2.1")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o711
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {
        "ca-cert.pem": 0o640,
        "server-cert.pem": 0o640,
        "server-key.pem": 0o640,
        "client-cert.pem": 0o640,
        "client-key.pem": 0o640,
    }
