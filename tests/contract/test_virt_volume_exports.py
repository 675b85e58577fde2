# SPDX-License-Identifier: Apache-2.0
"""Volumes that another machine serves over NBD with TLS, and a guest that writes on one all the
time: while it comes, while its guest moves, until it goes. What it says that it has written is
there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import ids
from common.domain.models import AttachedVolume
from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING
from compute_agent.virt.libvirt.volumes import connectors
from compute_agent.virt.libvirt.xml import volume_xml
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.services.volume.exports import Export, Exports
from deploy.testing.servers import free_ports
from tests.contract.conftest import FOR_HOSTS, NEEDED
from tests.contract.virt_pairs import Machines, inside
from tests.contract.virt_rigs import BOOT_SECONDS, QUIET, Rig, guests_folder
from tests.contract.virt_travellers import Traveller
from tests.services import demand
from tests.waiting import await_true

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]

GIBIBYTE, SECTOR, PLACES = 1 << 30, 512, 2048
#: User data that writes numbered sectors on the disk whose serial is a volume's, and says of each
#: when it is on the disk.
WRITES = f"""#!/bin/sh
(n=0; while usleep 50000; do
    echo "tick $((t=t+1))"
    for disk in /sys/block/vd*; do
        case $(cat $disk/serial 2> /dev/null) in ????????-????-*) ;; *) continue ;; esac
        n=$((n + 1))
        printf 'block %08d' $n | dd of=/dev/${{disk##*/}} bs={SECTOR} seek=$((n % {PLACES})) \\
            conv=notrunc,fsync 2> /dev/null && echo "wrote $n"
    done
done) &
ping -q -i 0.005 127.0.0.1 > /dev/null &
ping -q -i 0.005 127.0.0.1 > /dev/null &
"""


class ServingWorld:
    """Two hosts of one authority; the first one serves volumes to both."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.authority = folder, Authority(folder / "ours")
        self.machines = Machines(folder, self.certified)
        self.address = self.machines.addresses[0]
        proofs = [
            self.authority.issue(f"host-{address}", address) for address in self.machines.addresses
        ]
        self.connectors = [self.reaching(at, proof) for at, proof in enumerate(proofs)]
        ports = (free_ports(1), 65535)
        tls = str(self.certified(self.address, "volumes"))
        (folder / "volumes").mkdir()
        self.exports = Exports(folder / "exports", self.address, ports, tls)
        self.guest = Traveller(
            self.machines,
            image,
            options=lambda at: {
                "tls": proofs[at],
                "native_tls": True,
                "plain_text": False,
                "connectors": self.connectors[at],
            },
            user_data=WRITES,
        )

    def reaching(self, at: int, proof: Tls) -> connectors.Connectors:
        """How the first host (0) or the second reaches volumes."""
        return connectors.of_host(connectors.Protocols(), proof, False, {})

    def certified(self, address: str, name: str) -> Path:
        place = self.folder / f"pki-{name}"
        certificates.install_qemu_files(place, self.authority, name, address)
        return place

    def path(self, volume_id: str) -> Path:
        return self.folder / "volumes" / f"volume-{volume_id}"

    def served(self, volume_id: str = "", key: str = "", **changed: Any) -> AttachedVolume:
        """A volume as a host is to reach it, by an attachment of its own."""
        volume_id, key = volume_id or ids.new(), key or ids.new()
        if not self.path(volume_id).exists():
            with self.path(volume_id).open("wb") as file:
                file.truncate(GIBIBYTE)
        with inside(Path("/run/netns", self.machines.names[0])):
            port = self.exports.free_port([])
            assert port is not None
            export = Export(key, volume_id, self.path(volume_id), port, readonly=False)
            assert self.exports.start(export)
        connection = {
            "driver_volume_type": "nbd",
            "host": self.address,
            "port": port,
            "export": volume_id,
            "tls": True,
            "attachment_id": key,
        }
        return replace(AttachedVolume(volume_id, "/dev/vdb", 1, connection), **changed)

    def end(self, volume: AttachedVolume) -> None:
        """The attachment is gone."""
        self.exports.end(volume.connection["attachment_id"])

    def clean(self) -> None:
        self.guest.clean()
        for key in self.exports.known():
            self.exports.end(key)
        self.machines.end()
        shutil.rmtree(self.folder)

    def wrote(self, rig: Rig) -> int:
        """How much the guest says that it has written."""
        said = re.findall(
            r"^wrote (\d+)\n", rig.console(self.guest.server).replace("\r", ""), re.MULTILINE
        )
        return int(said[-1]) if said else 0

    def writes(self, rig: Rig) -> int:
        """It goes on writing."""
        before = self.wrote(rig)
        await_true(
            lambda: self.wrote(rig) > before + 5,
            BOOT_SECONDS,
            lambda: rig.console(self.guest.server)[-1000:],
        )
        return self.wrote(rig)

    def holds(self, volume_id: str, count: int, since: int = 0) -> None:
        """Every block up to this one that no later one is written over is in the file; ``since``:
        what the guest had written elsewhere, and perhaps one more that a detach took away."""
        with self.path(volume_id).open("rb") as file:
            content = file.read(PLACES * SECTOR)
        for number in range(max(since + 2 if since else 1, count - PLACES + 2), count + 1):
            at = number % PLACES * SECTOR
            assert content[at : at + 14] == b"block %08d" % number


@pytest.fixture(scope="module")
def world(bootable: Path) -> Iterator[ServingWorld]:
    demand(*FOR_HOSTS, programs=(*NEEDED, "qemu-nbd"))
    made = ServingWorld(guests_folder("kn-"), bootable)
    yield made
    made.clean()


def test_a_guest_writes_on_an_export_while_it_moves(world: ServingWorld) -> None:
    guest = world.guest
    first = world.served()
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, first, QUIET)
    world.writes(guest.here)
    second = world.served(first.volume_id)
    to = guest.prepared(volumes=[second])
    assert set(to["volumes"]) == {first.volume_id}
    guest.leaves(to)
    source = guest.here
    guest.came()
    source.driver.ensure_absent(guest.server, guest.spec.fence)
    world.end(first)
    world.writes(guest.here)
    assert set(volume_xml.find_disks(guest.here.describe(guest.server, stored=True))) == {
        first.volume_id
    }
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, second, QUIET)
    count = world.wrote(guest.here)
    assert count > 10
    world.end(second)
    world.holds(first.volume_id, count)
    assert guest.here.state(guest.server) == (RUNNING, guest.spec.fence)
    guest.counts(guest.here)


def test_a_paused_guest_takes_its_export_along(world: ServingWorld) -> None:
    """And its local disk, which travels; it goes on writing when it goes on."""
    guest = world.guest
    first, since = world.served(), world.wrote(guest.here)
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, first, QUIET)
    world.writes(guest.here)
    guest.here.driver.ensure_paused(guest.server, guest.spec.fence, QUIET)
    second = world.served(first.volume_id)
    guest.leaves(guest.prepared(volumes=[second]))
    source = guest.here
    assert guest.there.driver.finish_incoming(guest.spec, QUIET).power_state == PAUSED
    source.driver.ensure_absent(guest.server, guest.spec.fence)
    world.end(first)
    guest.there.driver.ensure_running(guest.server, guest.spec.fence, QUIET)
    guest.came()
    count = world.writes(guest.here)
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, second, QUIET)
    world.end(second)
    world.holds(first.volume_id, count, since)


def test_a_guest_goes_on_at_another_export(world: ServingWorld) -> None:
    """Its volume is migrated while it writes: what it was told is written is at the new place."""
    guest = world.guest
    old, since = world.served(), world.wrote(guest.here)
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, old, QUIET)
    world.writes(guest.here)
    place = world.served()
    new = replace(old, name_id=place.volume_id, connection=place.connection)
    guest.here.driver.copy_volume(guest.server, guest.spec.fence, new, QUIET)
    guest.here.driver.switch_volume(guest.server, guest.spec.fence, new, QUIET)
    world.end(old)
    count = world.writes(guest.here)
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, new, QUIET)
    world.end(place)
    world.holds(place.volume_id, count, since)


def test_an_export_of_another_authority_is_not_taken(world: ServingWorld) -> None:
    others = Authority(world.folder / "others")
    place = world.folder / "pki-others"
    certificates.install_qemu_files(place, others, "others", world.address)
    mine = world.exports.tls
    world.exports.tls = str(place)
    try:
        bad = world.served()
    finally:
        world.exports.tls = mine
    guest = world.guest
    with pytest.raises(VerbFailed, match="does not answer this host"):
        guest.here.driver.attach_volume(guest.server, guest.spec.fence, bad, QUIET)
    plain = replace(bad, connection={**bad.connection, "tls": False})
    with pytest.raises(VerbFailed, match="would travel as plain text"):
        guest.here.driver.attach_volume(guest.server, guest.spec.fence, plain, QUIET)
    assert bad.volume_id not in volume_xml.find_disks(guest.here.describe(guest.server))
    world.end(bad)
