# SPDX-License-Identifier: Apache-2.0
"""The configuration files that the embedded cloud writes for its own libvirtd."""

from __future__ import annotations

from pathlib import Path

from deploy.one_machine.machine import libvirtd


def test_libvirtd_configure_keeps_lines_of_operator(tmp_path: Path) -> None:
    before = {"libvirtd.conf": "max_clients = 7\n", "qemu.conf": 'max_files = 9\nuser = "kvm"\n'}
    (tmp_path / "etc").mkdir()
    for name, text in before.items():
        (tmp_path / "etc" / name).write_text(text)
    for _ in range(2):
        libvirtd.configure(tmp_path, "192.0.2.1", "/pki")
        daemon, qemu = ((tmp_path / "etc" / name).read_text().splitlines() for name in before)
        assert "max_clients = 7" in daemon and "max_files = 9" in qemu
        assert (
            'migration_address = "192.0.2.1"' in qemu
            and 'migrate_tls_x509_cert_dir = "/pki"' in qemu
        )
        assert [line for line in qemu if line.startswith("user ")] == ['user = "kvm"']
