# SPDX-License-Identifier: Apache-2.0
"""Volumes that another machine exports over NBD with TLS.

A guest writes to a volume during attach, live migration and detach. Every write that the guest
reports must be in the volume.
"""

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
from tests.contract.virt_rigs import (
    BOOT_SECONDS,
    IN_TURNS,
    PAUSE_TENTH,
    QUIET,
    Rig,
    guests_folder,
)
from tests.contract.virt_travellers import Traveller
from tests.services import demand
from tests.waiting import await_true

pytestmark = [pytest.mark.kvm_or_tcg, pytest.mark.slice("moves")]

GIBIBYTE, SECTOR, PLACES = 1 << 30, 512, 2048
#: User data that writes numbered sectors to the disk with a volume's serial, and prints each number
#: after the write to the disk.
WRITE_BLOCKS = f"""#!/bin/sh
(n=0; while :; do
    {PAUSE_TENTH}
    echo "tick $((t=t+1))"
    for disk in /sys/block/vd*; do
        case $(cat $disk/serial 2> /dev/null) in ????????-????-*) ;; *) continue ;; esac
        n=$((n + 1))
        printf 'block %08d' $n | dd of=/dev/${{disk##*/}} bs={SECTOR} seek=$((n % {PLACES})) \\
            conv=notrunc,fsync 2> /dev/null && echo "wrote $n"
    done
done) &
{IN_TURNS}
"""


class ServingWorld:
    """Two hosts with certificates of one authority. The first host exports volumes to both."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.authority = folder, Authority(folder / "ours")
        self.machines = Machines(folder, self.lay_certificates)
        self.address = self.machines.addresses[0]
        proofs = [
            self.authority.issue(f"host-{address}", address) for address in self.machines.addresses
        ]
        self.connectors = [self.create_connectors(at, proof) for at, proof in enumerate(proofs)]
        ports = (free_ports(1), 65535)
        tls = str(self.lay_certificates(self.address, "volumes"))
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
            user_data=WRITE_BLOCKS,
        )

    def create_connectors(self, at: int, proof: Tls) -> connectors.Connectors:
        """Return the connectors of the first host (0) or the second one."""
        return connectors.of_host(connectors.Protocols(), proof, False, {})

    def lay_certificates(self, address: str, name: str) -> Path:
        place = self.folder / f"pki-{name}"
        certificates.install_qemu_files(place, self.authority, name, address)
        return place

    def path(self, volume_id: str) -> Path:
        return self.folder / "volumes" / f"volume-{volume_id}"

    def serve_volume(self, volume_id: str = "", key: str = "", **changed: Any) -> AttachedVolume:
        """Export a volume for one attachment of a host."""
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

    def end_export(self, volume: AttachedVolume) -> None:
        """End the export of an attachment."""
        self.exports.end(volume.connection["attachment_id"])

    def clean(self) -> None:
        self.guest.clean()
        for key in self.exports.known():
            self.exports.end(key)
        self.machines.end()
        shutil.rmtree(self.folder)

    def count_written(self, rig: Rig) -> int:
        """Return the last block number that the guest reports as written."""
        numbers = re.findall(
            r"^wrote (\d+)\n", rig.console(self.guest.server).replace("\r", ""), re.MULTILINE
        )
        return int(numbers[-1]) if numbers else 0

    def await_more_writes(self, rig: Rig) -> int:
        """Wait until the guest has written more blocks."""
        before = self.count_written(rig)
        await_true(
            lambda: self.count_written(rig) > before + 5,
            BOOT_SECONDS,
            lambda: rig.console(self.guest.server)[-1000:],
        )
        return self.count_written(rig)

    def check_blocks(self, volume_id: str, count: int, since: int = 0) -> None:
        """Check that the file contains every block up to ``count`` that no later block overwrites.

        ``since`` is the number of blocks that the guest wrote to another volume before. One more
        block may be lost, because a detach interrupted its write.
        """
        with self.path(volume_id).open("rb") as file:
            content = file.read(PLACES * SECTOR)
        for number in range(max(since + 2 if since else 1, count - PLACES + 2), count + 1):
            at = number % PLACES * SECTOR
            assert content[at : at + 14] == b"block %08d" % number


@pytest.fixture(scope="module")
def world(bootable: Path) -> Iterator[ServingWorld]:
    demand(*FOR_HOSTS, programs=(*NEEDED, "qemu-nbd"))
    serving_world = ServingWorld(guests_folder("kn-"), bootable)
    yield serving_world
    serving_world.clean()


def test_live_migration_of_writing_guest_with_nbd_volume_loses_no_data(world: ServingWorld) -> None:
    guest = world.guest
    first = world.serve_volume()
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, first, QUIET)
    world.await_more_writes(guest.here)
    second = world.serve_volume(first.volume_id)
    to = guest.prepare(volumes=[second])
    assert set(to["volumes"]) == {first.volume_id}
    guest.migrate(to)
    source = guest.here
    guest.check_arrived()
    source.driver.ensure_absent(guest.server, guest.spec.fence)
    world.end_export(first)
    world.await_more_writes(guest.here)
    assert set(volume_xml.find_disks(guest.here.describe(guest.server, stored=True))) == {
        first.volume_id
    }
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, second, QUIET)
    count = world.count_written(guest.here)
    assert count > 10
    world.end_export(second)
    world.check_blocks(first.volume_id, count)
    assert guest.here.state(guest.server) == (RUNNING, guest.spec.fence)
    guest.check_counts(guest.here)


def test_paused_guest_with_nbd_volume_migrates_live_and_writes_on_resume(
    world: ServingWorld,
) -> None:
    """The local disk is copied, too. After the resume the guest continues to write."""
    guest = world.guest
    first, since = world.serve_volume(), world.count_written(guest.here)
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, first, QUIET)
    world.await_more_writes(guest.here)
    guest.here.driver.ensure_paused(guest.server, guest.spec.fence, QUIET)
    second = world.serve_volume(first.volume_id)
    guest.migrate(guest.prepare(volumes=[second]))
    source = guest.here
    assert guest.there.driver.finish_incoming(guest.spec, QUIET).power_state == PAUSED
    source.driver.ensure_absent(guest.server, guest.spec.fence)
    world.end_export(first)
    guest.there.driver.ensure_running(guest.server, guest.spec.fence, QUIET)
    guest.check_arrived()
    count = world.await_more_writes(guest.here)
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, second, QUIET)
    world.end_export(second)
    world.check_blocks(first.volume_id, count, since)


def test_copy_and_switch_volume_between_nbd_exports_lose_no_data(world: ServingWorld) -> None:
    """The volume is migrated during the writes.

    Every write that the guest reports is in the new place.
    """
    guest = world.guest
    old, since = world.serve_volume(), world.count_written(guest.here)
    guest.here.driver.attach_volume(guest.server, guest.spec.fence, old, QUIET)
    world.await_more_writes(guest.here)
    place = world.serve_volume()
    new = replace(old, name_id=place.volume_id, connection=place.connection)
    guest.here.driver.copy_volume(guest.server, guest.spec.fence, new, QUIET)
    guest.here.driver.switch_volume(guest.server, guest.spec.fence, new, QUIET)
    world.end_export(old)
    count = world.await_more_writes(guest.here)
    guest.here.driver.detach_volume(guest.server, guest.spec.fence, new, QUIET)
    world.end_export(place)
    world.check_blocks(place.volume_id, count, since)


def test_attach_nbd_volume_without_tls_of_own_authority_is_refused(world: ServingWorld) -> None:
    other_authority = Authority(world.folder / "others")
    place = world.folder / "pki-others"
    certificates.install_qemu_files(place, other_authority, "others", world.address)
    own_tls = world.exports.tls
    world.exports.tls = str(place)
    try:
        bad = world.serve_volume()
    finally:
        world.exports.tls = own_tls
    guest = world.guest
    with pytest.raises(VerbFailed, match="does not answer this host"):
        guest.here.driver.attach_volume(guest.server, guest.spec.fence, bad, QUIET)
    plain = replace(bad, connection={**bad.connection, "tls": False})
    with pytest.raises(VerbFailed, match="would be transferred as plain text"):
        guest.here.driver.attach_volume(guest.server, guest.spec.fence, plain, QUIET)
    assert bad.volume_id not in volume_xml.find_disks(guest.here.describe(guest.server))
    world.end_export(bad)
