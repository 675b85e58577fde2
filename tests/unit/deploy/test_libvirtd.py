# SPDX-License-Identifier: Apache-2.0
"""How a libvirtd of our own is configured."""

from __future__ import annotations

from pathlib import Path

from deploy import libvirtd


def test_what_let_it_listen_goes_and_an_operators_lines_stay(tmp_path: Path) -> None:
    before = {
        "libvirtd.conf": 'listen_tls = 1\nlisten_tcp = 0\nlisten_addr = "192.0.2.1"\nauth_tls = "none"\n'
        'cert_file = "/old/cert.pem"\nmax_clients = 7\n',
        "qemu.conf": 'user = "root"\nmax_files = 9\n',
    }
    (tmp_path / "etc").mkdir()
    for name, text in before.items():
        (tmp_path / "etc" / name).write_text(text)
    for _ in range(2):
        libvirtd.configure(tmp_path, "192.0.2.1", "/pki")
        daemon, qemu = ((tmp_path / "etc" / name).read_text().splitlines() for name in before)
        assert [
            line for line in daemon if line.startswith(("listen", "auth_t", "cert", "key", "ca_"))
        ] == []
        assert "max_clients = 7" in daemon and "max_files = 9" in qemu
        assert (
            'migration_address = "192.0.2.1"' in qemu
            and 'migrate_tls_x509_cert_dir = "/pki"' in qemu
        )
        assert [line for line in qemu if line.startswith("user ")] == ['user = "libvirt-qemu"']
