# SPDX-License-Identifier: Apache-2.0
"""Shares of guests and the times at which they are mounted.

The tests run on a host in memory and libvirt's mock-up. One real QEMU guest uses a share.
"""

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


def new_share(tag: str = "data", location: str = LOCATION) -> AttachedShare:
    return AttachedShare(ids.new(), tag, "NFS", location)


@pytest.fixture
def host(tmp_path: Path) -> LocalMounts:
    return LocalMounts(tmp_path / "mountinfo")


@pytest.fixture(params=["memory", "test"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, host: LocalMounts) -> Iterator[Rig]:
    created_rig = (
        virt_rigs.memory_rig(tmp_path) if request.param == "memory" else libvirt_rig(tmp_path, host)
    )
    yield created_rig
    created_rig.clean()


def libvirt_rig(folder: Path, host: LocalMounts) -> Rig:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    return Rig(
        "test",
        folder,
        lambda: LibvirtDriver("test:///default", folder, "test", mounts=host.mounts),
        b"image" * 1000,
        "raw",
    )


def mounted_shares(rig: Rig, host: LocalMounts, server: str) -> set[str]:
    """Return the ids of the shares that the host has mounted for the server."""
    if isinstance(rig.driver, MemoryDriver):
        return set(rig.driver.host.guests[server].mounted)
    return {folder.name for folder in host.folders if folder.parent.name == server}


def boot_and_stop(rig: Rig) -> str:
    server = rig.boot().server
    rig.driver.ensure_stopped(server, 2, 0, QUIET)
    return server


def test_shares_are_mounted_only_while_guest_runs(rig: Rig, host: LocalMounts) -> None:
    server, first, second = boot_and_stop(rig), new_share(), new_share("more")
    for attached in (first, second, first):
        assert rig.driver.attach_share(server, 3, attached, QUIET) == DomainState(
            server, SHUTDOWN, 3
        )
    assert mounted_shares(rig, host, server) == set()
    for fence in (4, 5):
        assert rig.driver.ensure_running(server, fence, QUIET).power_state == RUNNING
        assert mounted_shares(rig, host, server) == {first.share_id, second.share_id}
    rig.driver.reboot(server, 6, 0, QUIET)
    assert mounted_shares(rig, host, server) == {first.share_id, second.share_id}
    for fence in (7, 8):
        rig.driver.ensure_stopped(server, fence, 0, QUIET)
        assert mounted_shares(rig, host, server) == set()


def test_attach_and_detach_share_need_stopped_guest(rig: Rig, host: LocalMounts) -> None:
    server, first, second = boot_and_stop(rig), new_share(), new_share("more")
    for attached in (first, second):
        rig.driver.attach_share(server, 3, attached, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    for change in (rig.driver.attach_share, rig.driver.detach_share):
        with pytest.raises(VerbFailed, match="stop the server"):
            change(server, 5, first, QUIET)
    rig.driver.ensure_stopped(server, 5, 0, QUIET)
    for _ in range(2):
        rig.driver.detach_share(server, 6, first, QUIET)
    assert rig.state(server) == (SHUTDOWN, 6)
    rig.driver.ensure_running(server, 7, QUIET)
    assert mounted_shares(rig, host, server) == {second.share_id}


def test_resume_of_paused_guest_keeps_detached_share_until_next_start(
    rig: Rig, host: LocalMounts
) -> None:
    server, attached = boot_and_stop(rig), new_share()
    rig.driver.attach_share(server, 3, attached, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    rig.driver.ensure_paused(server, 5, QUIET)
    rig.driver.ensure_running(server, 6, QUIET, Belongings())
    assert mounted_shares(rig, host, server) == {attached.share_id}
    rig.driver.ensure_stopped(server, 7, 0, QUIET)
    rig.driver.ensure_running(server, 8, QUIET, Belongings())
    assert mounted_shares(rig, host, server) == set()


def test_share_is_mounted_in_rescue_and_at_start_after_unrescue(
    rig: Rig, host: LocalMounts
) -> None:
    spec, attached = rig.boot(), new_share()
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.attach_share(spec.server, 3, attached, QUIET)
    spec = replace(spec, shares=[attached.share_id])
    rig.driver.rescue(replace(spec, fence=4), rig.image, rig.read_image, QUIET)
    assert mounted_shares(rig, host, spec.server) == {attached.share_id}
    rig.driver.unrescue(replace(spec, fence=5), QUIET)
    rig.driver.ensure_stopped(spec.server, 6, 0, QUIET)
    rig.driver.ensure_running(spec.server, 7, QUIET)
    assert mounted_shares(rig, host, spec.server) == {attached.share_id}


@pytest.mark.parametrize("verb", ["ensure_running", "reboot", "rescue"])
def test_start_reboot_or_rescue_drops_share_detached_during_host_outage(
    rig: Rig, host: LocalMounts, verb: str
) -> None:
    """The host was unreachable during the detach.

    The command for the start contains the server's current shares.
    """
    spec, first, second = rig.boot(), new_share(), new_share("more")
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for attached in (first, second):
        rig.driver.attach_share(spec.server, 3, attached, QUIET)
    belongings = Belongings(shares=[second.share_id])
    if verb == "ensure_running":
        rig.driver.ensure_running(spec.server, 4, QUIET, belongings)
    elif verb == "reboot":
        rig.driver.reboot(spec.server, 4, 0, QUIET, belongings)
    else:
        spec = replace(spec, fence=4, shares=belongings.shares)
        rig.driver.rescue(spec, rig.image, rig.read_image, QUIET)
    assert rig.state(spec.server) == (RUNNING, 4)
    assert mounted_shares(rig, host, spec.server) == {second.share_id}
    if rig.kind == "test":
        domain_xml = rig.describe(spec.server, stored=True)
        assert "'more'" in domain_xml and "'data'" not in domain_xml


def test_restarted_driver_mounts_attached_share_at_start(rig: Rig, host: LocalMounts) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up forgets its guests with its connection")
    server, attached = boot_and_stop(rig), new_share()
    rig.driver.attach_share(server, 3, attached, QUIET)
    rig.restart().ensure_running(server, 4, QUIET)
    assert mounted_shares(rig, host, server) == {attached.share_id}


def test_ensure_absent_unmounts_shares_and_attach_fails_afterwards(
    rig: Rig, host: LocalMounts
) -> None:
    server, attached = boot_and_stop(rig), new_share()
    rig.driver.attach_share(server, 3, attached, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    rig.driver.ensure_absent(server, 5)
    assert host.folders == [] and rig.files(server) == []
    rig.driver.detach_share(server, 6, attached, QUIET)
    with pytest.raises(VerbFailed, match="no guest on this host"):
        rig.driver.attach_share(server, 6, attached, QUIET)


def test_start_fails_while_a_share_cannot_be_mounted(tmp_path: Path, host: LocalMounts) -> None:
    rig = libvirt_rig(tmp_path, host)
    server, good, bad = boot_and_stop(rig), new_share(), new_share("more", "192.0.2.9:/gone")
    host.refuses.add(bad.export_location)
    for attached in (good, bad):
        rig.driver.attach_share(server, 3, attached, QUIET)
    with pytest.raises(VerbFailed, match=f"could not mount share {bad.share_id}"):
        rig.driver.ensure_running(server, 4, QUIET)
    assert rig.state(server) == (SHUTDOWN, 3)
    rig.driver.detach_share(server, 5, bad, QUIET)
    assert rig.driver.ensure_running(server, 6, QUIET).power_state == RUNNING
    rig.clean()


def test_reboot_mounts_shares_again_after_reboot_of_host(tmp_path: Path, host: LocalMounts) -> None:
    rig = libvirt_rig(tmp_path, host)
    server, attached = boot_and_stop(rig), new_share()
    rig.driver.attach_share(server, 3, attached, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    rig.driver.pull_plug(server)
    assert host.folders == []
    rig.driver.ensure_running(server, 5, QUIET)
    host.reboot()
    rig.driver.reboot(server, 6, 0, QUIET)
    assert mounted_shares(rig, host, server) == {attached.share_id}
    rig.clean()


def test_ensure_absent_unmounts_share_lazily_when_unmount_fails_as_busy(
    tmp_path: Path, host: LocalMounts
) -> None:
    """If the file server prevents the unmount, the share is unmounted lazily."""
    rig = libvirt_rig(tmp_path, host)
    server, attached = boot_and_stop(rig), new_share()
    rig.driver.attach_share(server, 3, attached, QUIET)
    rig.driver.ensure_running(server, 4, QUIET)
    host.busy = True
    rig.driver.ensure_absent(server, 5)
    assert host.commands[-2:] == [
        ["umount", "--", str(tmp_path / "shares" / server / attached.share_id)],
        ["umount", "--lazy", "--", str(tmp_path / "shares" / server / attached.share_id)],
    ]
    rig.clean()


def build_user_data() -> str:
    """Return user data that prints a file of the share "data" and writes another file.

    The user data contains the virtiofs module, because the image does not.
    """
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
def test_real_guest_reads_and_writes_share(
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
    attached = new_share()
    assert {"COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE"} <= set(
        rig.driver.inventory().traits
    )
    spec = rig.boot(user_data=build_user_data(), paused=True)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    rig.driver.attach_share(spec.server, 3, attached, QUIET)
    rig.driver.ensure_running(spec.server, 4, QUIET)
    await_true(
        lambda: "share: done" in rig.console(spec.server),
        virt_rigs.BOOT_SECONDS,
        lambda: rig.console(spec.server)[-2000:],
    )
    assert "share: from the share" in rig.console(spec.server)
    place = folder / "shares" / spec.server / attached.share_id
    assert (place / "answer").read_text() == "written\n"
    rig.driver.ensure_stopped(spec.server, 5, 0, QUIET)
    assert not place.exists()
    rig.clean()
