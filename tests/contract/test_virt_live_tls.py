# SPDX-License-Identifier: Apache-2.0
"""Live migrations over TLS between hosts with certificates of one authority.

Without valid certificates no guest moves.
"""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.migration import live_migration
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.machine.libvirtd import QEMU_GROUP
from tests.contract.conftest import FOR_HOSTS, NEEDED
from tests.contract.virt_pairs import PORT, Machines
from tests.contract.virt_rigs import guests_folder
from tests.contract.virt_travellers import Traveller
from tests.services import demand

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]


#: A program that tries calls of libvirt's client and prints the successful calls.
ATTEMPTS = textwrap.dedent("""
    import sys, uuid, libvirt
    libvirt.registerErrorHandler(lambda context, error: None, None)
    domain = ("<domain type='qemu'><name>thief</name><memory>16384</memory><os><type arch='x86_64'>hvm</type></os>"
              "</domain>")
    attempts = {
        "list": lambda libvirtd: libvirtd.listAllDomains(), "name": lambda libvirtd: libvirtd.getHostname(),
        "define": lambda libvirtd: libvirtd.defineXML(domain), "create": lambda libvirtd: libvirtd.createXML(domain),
        "capabilities": lambda libvirtd: libvirtd.getCapabilities(),
        "look up": lambda libvirtd: libvirtd.lookupByUUIDString(str(uuid.uuid4())),
        "pools": lambda libvirtd: libvirtd.listAllStoragePools(),
        "networks": lambda libvirtd: libvirtd.listAllNetworks(),
        "events": lambda libvirtd: libvirtd.domainEventRegisterAny(None, 0, print, None)}
    libvirt.virEventRegisterDefaultImpl()
    for name, attempt in attempts.items():
        try:
            libvirtd = libvirt.open(sys.argv[1])
            print("open")
            attempt(libvirtd)
            print(name)
        except libvirt.libvirtError as refused:
            assert refused.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN, "it was looked for"
""")


class World:
    """Two hosts with certificates of one authority, and a guest on the first host."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.authority, self.other_authority = (
            Authority(folder / "ours"),
            Authority(folder / "others"),
        )
        self.machines = Machines(folder, self.lay_certificates)
        self.hosts = [
            self.authority.issue(f"host-{address}", address) for address in self.machines.addresses
        ]
        self.guest = Traveller(
            self.machines,
            image,
            options=lambda at: {"tls": self.hosts[at], "native_tls": True, "plain_text": False},
        )

    def lay_certificates(self, address: str, name: str) -> Path:
        """Write the certificates of QEMU on this host, and return their folder."""
        place = self.authority.folder.parent / f"pki-{name}"
        certificates.install_qemu_files(place, self.authority, name, address)
        return place

    def successful_calls(self, shows: Tls, port: int = PORT) -> set[str]:
        """Try the calls from the source at the destination's libvirtd with this certificate.

        Return the successful calls.
        """
        proof = live_migration.lay_proof(self.authority.folder.parent / "pki-thief", shows)
        uri = f"qemu+tls://{self.machines.addresses[1]}:{port}/system?pkipath={proof}"
        tried = subprocess.run(
            ["ip", "netns", "exec", self.machines.names[0], sys.executable, "-c", ATTEMPTS, uri],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return set(tried.stdout.splitlines())


@pytest.fixture(scope="module")
def world(bootable: Path) -> Iterator[World]:
    demand(*FOR_HOSTS, programs=NEEDED)
    folder = guests_folder("kn-")
    created_world = World(folder, bootable)
    yield created_world
    created_world.guest.clean()
    created_world.machines.end()
    shutil.rmtree(folder)


@pytest.mark.parametrize("certificate", ["another authority's", "another name", "expired"])
def test_live_migration_fails_when_qemu_at_destination_is_not_verified(
    world: World, certificate: str
) -> None:
    name, address = world.machines.names[1][:3], world.machines.addresses[1]
    authority, addresses, options = {
        "another authority's": (world.other_authority, address, {}),
        "another name": (world.authority, "10.251.7.77", {}),
        "expired": (world.authority, address, {"valid": -datetime.timedelta(hours=1)}),
    }[certificate]
    place = world.authority.folder.parent / f"pki-{name}"
    certificates.install_files(
        place,
        authority.issue(f"wrong-{certificate[:7]}", addresses, **options),
        certificates.QEMU,
        QEMU_GROUP,
    )
    try:
        with pytest.raises(VerbFailed) as failure:
            world.guest.migrate()
        assert "ertificate" in failure.value.details
    finally:
        world.lay_certificates(address, name)
    world.guest.check_stayed()


@pytest.mark.parametrize("certificate", ["another host's", "another authority's"])
def test_live_migration_fails_when_source_has_foreign_certificate(
    world: World, certificate: str
) -> None:
    address = world.machines.addresses[0]
    wrong_certificate = {
        "another host's": world.authority.issue("third", "10.251.7.3"),
        "another authority's": replace(
            world.other_authority.issue("wrong", address), ca=str(world.authority.path)
        ),
    }[certificate]
    with pytest.raises(VerbFailed) as failure:
        world.guest.migrate(tls=wrong_certificate)
    assert "migrate the guest" in str(failure.value)
    world.guest.check_stayed()


def test_live_migration_fails_when_destination_has_foreign_certificate(world: World) -> None:
    before = world.hosts[1]
    world.hosts[1] = world.authority.issue("third", "10.251.7.3")
    world.guest.there.restart()
    try:
        with pytest.raises(VerbFailed) as failure:
            world.guest.migrate()
        assert "ertificate" in failure.value.details
    finally:
        world.hosts[1] = before
        world.guest.there.restart()
    world.guest.check_stayed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"native_tls": False}, "native_tls is false"),
        ({"tls": None}, "ca_file is not set at the source"),
        ({"uri": "qemu+tcp"}, "ca_file is not set at the destination"),
    ],
)
def test_live_migration_over_plain_text_is_refused_with_reason(
    world: World, options: dict[str, Any], message: str
) -> None:
    guest = world.guest
    to, scheme = guest.prepare(), options.pop("uri", "qemu+tls")
    with pytest.raises(VerbFailed) as failure:
        guest.migrate(
            {**to, "uri": f"{scheme}://{world.machines.addresses[1]}:{PORT}/system"}, **options
        )
    assert message in failure.value.details
    guest.check_stayed()


def test_destination_refuses_unencrypted_live_migration(world: World) -> None:
    """The source permits plain text here."""
    with pytest.raises(VerbFailed):
        world.guest.migrate(native_tls=False, plain_text=True)
    world.guest.check_stayed()


def test_migration_port_refuses_other_calls_and_closes_afterwards(world: World) -> None:
    world.guest.prepare()
    assert world.successful_calls(world.hosts[0]) == {"open"}
    assert world.successful_calls(world.authority.issue("third", "10.251.7.3")) == set()
    world.guest.check_stayed()
    world.guest.there.driver.ensure_absent(world.guest.server, world.guest.spec.fence)
    for port in (PORT, 16514, 16509):
        assert world.successful_calls(world.hosts[0], port) == set()
    world.guest.check_stayed()


def test_live_migration_over_tls_moves_guest(world: World) -> None:
    world.guest.migrate()
    world.guest.check_arrived()
