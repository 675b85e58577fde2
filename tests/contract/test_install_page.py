# SPDX-License-Identifier: Apache-2.0
"""The configuration files that the commands of docs/install.md write.

The tests run the page's own commands below a folder, without the programs of a machine, and load
the result with the product. The ring ``install`` runs the page on real machines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.security import tls
from common.service import config
from deploy.operator.hosts.join import CA, CERTIFICATE
from deploy.packages import ROOT
from tests.install.documentation import commands

PAGE = ROOT / "docs/install.md"
#: Commands of the page that change the machine but no file. runuser is replaced too, and
#: prints the path of PostgreSQL's host list.
SILENT = (
    *("apt-get", "openstack", "rabbitmq-plugins", "rabbitmqctl", "systemctl", "chgrp", "kilonova"),
)
#: absolute paths of a machine in the page's commands
FOLDERS = re.compile(r"(?<![\w.])/(?=(etc|root|var)/)")
CONTROLLER, SECOND = "192.0.2.10", "192.0.2.11"


class Place:
    """The files of one machine."""

    def __init__(self, root: Path) -> None:
        self.root, self._programs = root, root / "programs"
        for folder in ("etc/kilonova/tls", "etc/kilonova/secrets", "root/kilonova"):
            (root / folder).mkdir(parents=True, mode=0o750)
        for folder in ("etc/rabbitmq", "etc/postgresql", "var/lib/kilonova-agent", "programs"):
            (root / folder).mkdir(parents=True)
        for name in SILENT:
            self._program(name, "exit 0")
        self._program("runuser", f"echo {root}/hba")
        # Drop owner and group, because the packages with these users are not installed.
        self._program(
            "install", 'set -- $(echo "$*" | sed "s/-[og] [^ ]*//g"); exec /usr/bin/install "$@"'
        )

    def _program(self, name: str, text: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def type(self, heading: str) -> None:
        """Run the page's commands below this heading."""
        script = FOLDERS.sub(f"{self.root}/", commands(PAGE, heading))
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"umask 027\n{script}"],
            env={"PATH": f"{self._programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr

    def carry(self, other: Place, folder: str) -> None:
        shutil.copytree(self.root / folder, other.root / folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("first"))
    place.type("On the controller")
    place.type("On the first")
    return place


@pytest.fixture(autouse=True)
def options() -> Iterator[None]:
    """Restore the options for other tests."""
    yield
    config.load(os.devnull)


def test_install_page_gives_first_controller_certificates_and_secrets(first: Place) -> None:
    conf = config.load(str(first.root / "etc/kilonova/kilonova.conf"))
    assert tls.of(conf) and tls.protecting(conf, "my_ip", [CONTROLLER], listens=True)
    assert conf.host_keys.management_url and conf.host_keys.command_secret
    assert conf.image_gateway.url == f"https://{CONTROLLER}:9293"
    verify(first, "etc/kilonova/tls/ca.pem", "etc/postgresql/controller.pem", CONTROLLER)


def test_install_page_gives_second_controller_secrets_and_own_address(
    first: Place, tmp_path: Path
) -> None:
    second = Place(tmp_path)
    first.carry(second, "root/second")
    second.type("On the second")
    conf = config.load(str(first.root / "etc/kilonova/kilonova.conf"))
    secrets = (conf.secret_key, conf.host_keys.command_secret, conf.host_keys.query_secret)
    conf = config.load(str(tmp_path / "etc/kilonova/kilonova.conf"))
    assert (conf.secret_key, conf.host_keys.command_secret, conf.host_keys.query_secret) == secrets
    assert tls.of(conf) and not conf.host_keys.management_url
    assert (conf.my_ip, conf.api.host, conf.placement.host) == (SECOND, SECOND, SECOND)
    assert conf.image_gateway.url == f"https://{CONTROLLER}:9293"
    assert f"@{CONTROLLER}/kilonova" in conf.database.url
    verify(second, "etc/kilonova/tls/ca.pem", "etc/kilonova/tls/own.pem", SECOND)


def test_install_page_gives_qemu_certificate_of_joined_host(first: Place, tmp_path: Path) -> None:
    host = Place(tmp_path)
    shutil.copy(first.root / "etc/kilonova/tls/ca.pem", tmp_path / "etc/kilonova" / CA)
    shutil.copy(
        first.root / "etc/kilonova/tls/own.pem", tmp_path / "var/lib/kilonova-agent" / CERTIFICATE
    )
    (tmp_path / "etc/kilonova/agent.conf").write_text("[migration]\n")
    host.type("Live migration")
    conf = config.load(str(tmp_path / "etc/kilonova/agent.conf"), config.AGENT)
    assert conf.migration.live_migration_with_native_tls
    assert conf.migration.live_migration_port == 16598
    for side in ("server", "client"):
        verify(host, "etc/pki/qemu/ca-cert.pem", f"etc/pki/qemu/{side}-cert.pem", CONTROLLER)
        key = (tmp_path / f"etc/pki/qemu/{side}-key.pem").read_text()
        assert "PRIVATE KEY" in key and "CERTIFICATE" not in key


def verify(place: Place, authority: str, certificate: str, address: str) -> None:
    """Check that the authority signed the certificate for this address."""
    subprocess.run(
        [
            *("openssl", "verify", "-verify_ip", address),
            *("-CAfile", place.root / authority, place.root / certificate),
        ],
        check=True,
        capture_output=True,
    )
