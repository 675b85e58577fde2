# SPDX-License-Identifier: Apache-2.0
"""Guests that move while they run over TLS: encrypted between hosts that prove themselves, and
otherwise not at all."""

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


#: What libvirt's own client tries at a libvirtd; it tells what succeeds.
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
    """Two hosts of one authority, and a guest at the first one."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.ours, self.others = Authority(folder / "ours"), Authority(folder / "others")
        self.machines = Machines(folder, self.certified)
        self.hosts = [
            self.ours.issue(f"host-{address}", address) for address in self.machines.addresses
        ]
        self.guest = Traveller(
            self.machines,
            image,
            options=lambda at: {"tls": self.hosts[at], "native_tls": True, "plain_text": False},
        )

    def certified(self, address: str, name: str) -> Path:
        """What QEMU has there."""
        place = self.ours.folder.parent / f"pki-{name}"
        certificates.install_qemu_files(place, self.ours, name, address)
        return place

    def succeeds(self, shows: Tls, port: int = PORT) -> set[str]:
        """Of what is tried at the destination's libvirtd from the source, with this certificate."""
        proof = live_migration.lay_proof(self.ours.folder.parent / "pki-thief", shows)
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
    made = World(folder, bootable)
    yield made
    made.guest.clean()
    made.machines.end()
    shutil.rmtree(folder)


@pytest.mark.parametrize("shown", ["another authority's", "another name", "expired"])
def test_memory_does_not_go_to_a_qemu_that_is_not_proved(world: World, shown: str) -> None:
    name, address = world.machines.names[1][:3], world.machines.addresses[1]
    by, names, more = {
        "another authority's": (world.others, address, {}),
        "another name": (world.ours, "10.251.7.77", {}),
        "expired": (world.ours, address, {"valid": -datetime.timedelta(hours=1)}),
    }[shown]
    place = world.ours.folder.parent / f"pki-{name}"
    certificates.install_files(
        place, by.issue(f"wrong-{shown[:7]}", names, **more), certificates.QEMU, QEMU_GROUP
    )
    try:
        with pytest.raises(VerbFailed) as failed:
            world.guest.leaves()
        assert "ertificate" in failed.value.details
    finally:
        world.certified(address, name)
    world.guest.stayed()


@pytest.mark.parametrize("shown", ["another host's", "another authority's"])
def test_nobody_leaves_in_another_hosts_name(world: World, shown: str) -> None:
    address = world.machines.addresses[0]
    wrong = {
        "another host's": world.ours.issue("third", "10.251.7.3"),
        "another authority's": replace(
            world.others.issue("wrong", address), ca=str(world.ours.path)
        ),
    }[shown]
    with pytest.raises(VerbFailed) as failed:
        world.guest.leaves(tls=wrong)
    assert "move the guest" in str(failed.value)
    world.guest.stayed()


def test_nobody_goes_where_nobody_is_proved(world: World) -> None:
    before = world.hosts[1]
    world.hosts[1] = world.ours.issue("third", "10.251.7.3")
    world.guest.there.restart()
    try:
        with pytest.raises(VerbFailed) as failed:
            world.guest.leaves()
        assert "ertificate" in failed.value.details
    finally:
        world.hosts[1] = before
        world.guest.there.restart()
    world.guest.stayed()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"native_tls": False}, "native_tls is false"),
        ({"tls": None}, "ca_file is not set here"),
        ({"uri": "qemu+tcp"}, "ca_file is not set there"),
    ],
)
def test_nothing_moves_as_plain_text(world: World, more: dict[str, Any], says: str) -> None:
    guest = world.guest
    to, scheme = guest.prepared(), more.pop("uri", "qemu+tls")
    with pytest.raises(VerbFailed) as failed:
        guest.leaves(
            {**to, "uri": f"{scheme}://{world.machines.addresses[1]}:{PORT}/system"}, **more
        )
    assert says in failed.value.details
    guest.stayed()


def test_what_is_not_encrypted_is_not_taken(world: World) -> None:
    """Whatever the source believes of its network."""
    with pytest.raises(VerbFailed):
        world.guest.leaves(native_tls=False, plain_text=True)
    world.guest.stayed()


def test_the_source_commands_nothing_but_its_guests_arrival(world: World) -> None:
    world.guest.prepared()
    assert world.succeeds(world.hosts[0]) == {"open"}
    assert world.succeeds(world.ours.issue("third", "10.251.7.3")) == set()
    world.guest.stayed()
    world.guest.there.driver.ensure_absent(world.guest.server, world.guest.spec.fence)
    for port in (PORT, 16514, 16509):
        assert world.succeeds(world.hosts[0], port) == set()
    world.guest.stayed()


def test_a_guest_goes_on_where_it_came_to_through_tls(world: World) -> None:
    world.guest.leaves()
    world.guest.came()
