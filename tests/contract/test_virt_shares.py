# SPDX-License-Identifier: Apache-2.0
"""Shares of guests, on the same hypervisors: who has which, and when they are mounted. A real guest
reads one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain import ids
from common.domain.models import AttachedShare, Belongings, DomainState
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING, SHUTDOWN
from compute_agent.virt.memory.driver import MemoryDriver
from deploy.images import boot_disk
from tests.contract import virt_rigs
from tests.contract.local_mounts import LocalMounts
from tests.contract.virt_rigs import QUIET, Rig
from tests.waiting import await_true

LOCATION = "192.0.2.9:/shares/one"


def share(tag: str = "data", location: str = LOCATION) -> AttachedShare:
    return AttachedShare(ids.new(), tag, "NFS", location)


@pytest.fixture
def host(tmp_path: Path) -> LocalMounts:
    return LocalMounts(tmp_path / "mountinfo")


@pytest.fixture(params=["memory", "test"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, host: LocalMounts) -> Iterator[Rig]:
    made = (
        virt_rigs.memory_rig(tmp_path) if request.param == "memory" else libvirt_rig(tmp_path, host)
    )
    yield made
    made.clean()


def libvirt_rig(folder: Path, host: LocalMounts) -> Rig:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    return Rig(
        "test",
        folder,
        lambda: LibvirtDriver("test:///default", folder, "test", mounts=host.mounts),
        b"image" * 1000,
        "raw",
    )


def mounted(rig: Rig, host: LocalMounts, server: str) -> set[str]:
    """The ids of the shares that the host has mounted for the server."""
    if isinstance(rig.driver, MemoryDriver):
        return set(rig.driver.host.guests[server].mounted)
    return {folder.name for folder in host.folders if folder.parent.name == server}


def stopped(rig: Rig) -> str:
    server = rig.boot().server
    rig.driver.ensure_stopped(server, 2, 0, QUIET)
    return server


def test_shares_are_mounted_while_the_guest_runs(rig: Rig, host: LocalMounts) -> None:
    server, one, two = stopped(rig), share(), share("more")
    for given in (one, two, one):
        assert rig.driver.attach_share(server, 3, given, QUIET) == DomainState(server, SHUTDOWN, 3)
    assert mounted(rig, host, server) == set()
    for fence in (4, 5):
        assert rig.driver.ensure_running(server, fence, QUIET).power_state == RUNNING
        assert mounted(rig, host, server) == {one.share_id, two.share_id}
    rig.driver.reboot(server, 6, 0, QUIET)
    assert mounted(rig, host, server) == {one.share_id, two.share_id}
    for fence in (7, 8):
        rig.driver.ensure_stopped(server, fence, 0, QUIET)
        assert mounted(rig, host, server) == set()


def test_a_share_goes_when_its_guest_is_off(rig: Rig, host: LocalMounts) -> None:
    server, one, two = stopped(rig), share(), share("more")
    for given in (one, two):
        rig.driver.attach_share(server, 3, given, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    for change in (rig.driver.attach_share, rig.driver.detach_share):
        with pytest.raises(VerbFailed, match="stop it"):
            change(server, 5, one, QUIET)
    rig.driver.ensure_stopped(server, 5, 0, QUIET)
    for _ in range(2):
        rig.driver.detach_share(server, 6, one, QUIET)
    assert rig.state(server) == (SHUTDOWN, 6)
    rig.driver.ensure_running(server, 7, QUIET)
    assert mounted(rig, host, server) == {two.share_id}


def test_a_rescued_guest_keeps_its_shares(rig: Rig, host: LocalMounts) -> None:
    spec, one = rig.boot(), share()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.attach_share(spec.server, 3, one, QUIET)
    spec = replace(spec, shares=[one.share_id])
    rig.driver.rescue(replace(spec, fence=4), rig.image, rig.read_image, QUIET)
    assert mounted(rig, host, spec.server) == {one.share_id}
    rig.driver.unrescue(replace(spec, fence=5), QUIET)
    rig.driver.ensure_stopped(spec.server, 6, 0, QUIET)
    rig.driver.ensure_running(spec.server, 7, QUIET)
    assert mounted(rig, host, spec.server) == {one.share_id}


@pytest.mark.parametrize("verb", ["ensure_running", "reboot", "rescue"])
def test_what_was_detached_elsewhere_is_not_mounted(rig: Rig, host: LocalMounts, verb: str) -> None:
    """The host was away meanwhile; who rescues the guest describes it anew."""
    spec, one, two = rig.boot(), share(), share("more")
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for given in (one, two):
        rig.driver.attach_share(spec.server, 3, given, QUIET)
    has = Belongings(shares=[two.share_id])
    if verb == "ensure_running":
        rig.driver.ensure_running(spec.server, 4, QUIET, has)
    elif verb == "reboot":
        rig.driver.reboot(spec.server, 4, 0, QUIET, has)
    else:
        spec = replace(spec, fence=4, shares=has.shares)
        rig.driver.rescue(spec, rig.image, rig.read_image, QUIET)
    assert rig.state(spec.server) == (RUNNING, 4)
    assert mounted(rig, host, spec.server) == {two.share_id}
    if rig.kind == "test":
        described = rig.describe(spec.server, stored=True)
        assert "'more'" in described and "'data'" not in described


def test_an_agent_that_begins_anew_knows_them(rig: Rig, host: LocalMounts) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up forgets its guests with its connection")
    server, one = stopped(rig), share()
    rig.driver.attach_share(server, 3, one, QUIET)
    rig.restart().ensure_running(server, 4, QUIET)
    assert mounted(rig, host, server) == {one.share_id}


def test_a_guest_that_is_gone_has_none(rig: Rig, host: LocalMounts) -> None:
    server, one = stopped(rig), share()
    rig.driver.attach_share(server, 3, one, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    rig.driver.ensure_absent(server, 5)
    assert host.folders == [] and rig.files(server) == []
    rig.driver.detach_share(server, 6, one, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        rig.driver.attach_share(server, 6, one, QUIET)


def test_a_share_that_cannot_be_mounted_keeps_its_guest_off(
    tmp_path: Path, host: LocalMounts
) -> None:
    rig = libvirt_rig(tmp_path, host)
    server, one, bad = stopped(rig), share(), share("more", "192.0.2.9:/gone")
    host.refuses.add(bad.export_location)
    for given in (one, bad):
        rig.driver.attach_share(server, 3, given, QUIET)
    with pytest.raises(VerbFailed, match=f"could not mount share {bad.share_id}"):
        rig.driver.ensure_running(server, 4, QUIET)
    assert rig.state(server) == (SHUTDOWN, 3)
    rig.driver.detach_share(server, 5, bad, QUIET)
    assert rig.driver.ensure_running(server, 6, QUIET).power_state == RUNNING
    rig.clean()


def test_after_a_reboot_of_the_host_they_are_mounted_again(
    tmp_path: Path, host: LocalMounts
) -> None:
    rig = libvirt_rig(tmp_path, host)
    server, one = stopped(rig), share()
    rig.driver.attach_share(server, 3, one, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    rig.driver.pull_plug(server)
    assert host.folders == []
    rig.driver.ensure_running(server, 5, QUIET)
    host.reboot()
    rig.driver.reboot(server, 6, 0, QUIET)
    assert mounted(rig, host, server) == {one.share_id}
    rig.clean()


def test_a_host_never_removes_what_is_on_a_share(tmp_path: Path, host: LocalMounts) -> None:
    """Of a file server that does not let go, all that goes is the mount."""
    rig = libvirt_rig(tmp_path, host)
    server, one = stopped(rig), share()
    rig.driver.attach_share(server, 3, one, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    host.busy = True
    rig.driver.ensure_absent(server, 5)
    assert host.asked[-2:] == [
        ["umount", "--", str(tmp_path / "shares" / server / one.share_id)],
        ["umount", "--lazy", "--", str(tmp_path / "shares" / server / one.share_id)],
    ]
    rig.clean()


def reading() -> str:
    """User data that says what is on the share "data", and writes to it; the image has no virtiofs
    of its own."""
    folder = boot_disk.modules_of(boot_disk.newest_kernel()) / "kernel/fs/fuse"
    modules = [folder / f"{name}.ko" for name in ("fuse", "virtiofs")]
    load = "".join(
        f"base64 -d > /tmp/m.ko << 'END'\n{base64.encodebytes(path.read_bytes()).decode()}END\n"
        "insmod /tmp/m.ko\n"
        for path in modules
    )
    return (
        f"#!/bin/sh\n{load}mkdir -p /tmp/share && mount -t virtiofs data /tmp/share && "
        'echo "share: $(cat /tmp/share/hello)" && echo written > /tmp/share/answer && sync && '
        "echo 'share: done'\n"
    )


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
def test_a_guest_reads_and_writes_a_share(
    tmp_path: Path, private_libvirtd: Path, host: LocalMounts
) -> None:
    from compute_agent.virt.libvirt.driver import LibvirtDriver
    from deploy.one_machine.machine import libvirtd

    folder = private_libvirtd / "agent"
    image = virt_rigs.tiny_image(tmp_path)
    rig = Rig(
        "qemu",
        folder,
        lambda: LibvirtDriver(libvirtd.uri(private_libvirtd), folder, mounts=host.mounts),
        image.read_bytes(),
        "qcow2",
        private_libvirtd,
    )
    one = share()
    assert {"COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE"} <= set(
        rig.driver.inventory().traits
    )
    spec = rig.boot(user_data=reading(), paused=True)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.attach_share(spec.server, 3, one, QUIET)
    rig.driver.ensure_running(spec.server, 4, QUIET)
    await_true(
        lambda: "share: done" in rig.console(spec.server),
        virt_rigs.BOOT_SECONDS,
        lambda: rig.console(spec.server)[-2000:],
    )
    assert "share: from the share" in rig.console(spec.server)
    place = folder / "shares" / spec.server / one.share_id
    assert (place / "answer").read_text() == "written\n"
    rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
    assert not place.exists()
    rig.clean()
