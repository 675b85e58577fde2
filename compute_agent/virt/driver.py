# SPDX-License-Identifier: Apache-2.0
"""The virt driver: what a host can do with guests.

Called by ``compute_agent.verbs`` only. Two implementations, ``virt.memory`` and ``virt.libvirt``,
pass one contract suite (tests/contract/test_virt_*.py). Every method that changes something is
repeatable: called again after a crash at any line, it ends in the same state. Every verb that
defines or starts a domain writes the fence into its metadata, and ``domains`` reports it. Nothing
is started or resumed without ``VerbContext.require_lease`` right before. A hypervisor or image
service that does not answer is ``errors.Unavailable``: the outcome is not known, and the verb is
repeated.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from common.domain import errors
from common.domain.hardware import Hardware, hardware
from common.domain.json_types import JsonObject
from common.domain.models import (
    AttachedShare,
    AttachedVolume,
    Belongings,
    DomainState,
    GuestSpec,
    HostInventory,
    ImageRef,
    Interface,
)
from common.domain.server_facts import HostedServer
from compute_agent.verb_context import (
    ImageReader,
    ImageWriter,
    Part,
    Peer,
    VerbContext,
    VerbFailed,
)

#: Power states as the Compute API numbers them.
NOSTATE, RUNNING, PAUSED, SHUTDOWN, CRASHED, SUSPENDED = 0, 1, 3, 4, 6, 7


#: Kinds of consoles.
VNC, SERIAL, SPICE = "vnc", "serial", "spice"


@dataclass(frozen=True, slots=True)
class VolumeMerge:
    """Files of a volume, by their names: ``file`` goes into ``into``, upon which it is made.
    Without ``into`` all between ``file`` and the guest's own one goes into that, which then lies
    upon ``file``; None: upon nothing."""

    file: str | None
    into: str | None


class Driver(Protocol):
    """What every hypervisor implements."""

    def inventory(self) -> HostInventory:
        """The resources of this host."""

    def boot_id(self) -> str:
        """A text that differs for every boot of the host."""

    def domains(self) -> list[DomainState]:
        """The states of all domains that carry our metadata; cheap."""

    def guests_volumes(self) -> dict[str, list[str]]:
        """The ids of the volumes that each guest has as the hypervisor runs it, whatever is written
        of it elsewhere; of every guest that runs or is paused, by server."""

    def files_alone(self) -> list[str]:
        """The servers of which files are here and no domain; cheap. On shared storage also those
        whose domains other hosts have."""

    def server_facts(self, server: str) -> HostedServer:
        """What our metadata on the domain says of its server, as of the last verb that defined the
        domain, and of interfaces that came and went since. VerbFailed when there is no domain."""

    def ensure_image(self, image: ImageRef, read_image: ImageReader, context: VerbContext) -> None:
        """Fetch the image to this host, for later guests. Repeatable."""

    def ensure_guest(
        self, spec: GuestSpec, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Fetch the image, make disks and config drive, define and start the domain. With
        ``spec.paused`` its CPUs stay stopped until ``ensure_running``. After VerbFailed nothing of
        it runs."""

    def ensure_running(
        self, server: str, fence: int, context: VerbContext, has: Belongings | None = None
    ) -> DomainState:
        """Start the domain if it does not run, resume it if it is paused. VerbFailed when it does
        not exist. Every start waits for a bridge that is not there yet, as long as
        ``virt.interfaces`` says. ``has``: a domain that is off loses every volume and share that
        is not among these before it starts, and one that is paused or suspended with such a volume
        does not go on (VerbFailed); verbs with a spec do the same. A domain that is off gets
        what it lacks of ``has.needed`` before it starts, or does not start (VerbFailed)."""

    def ensure_stopped(
        self, server: str, fence: int, timeout: float, context: VerbContext
    ) -> DomainState:
        """Ask the guest to power off; after ``timeout`` seconds (0: at once) destroy the domain."""

    def pull_plug(self, server: str) -> None:
        """Destroy the domain, and drop its saved memory; fence and files stay. The conductor says
        that it must not run here. Without a domain nothing is done. Repeatable."""

    def reboot(
        self,
        server: str,
        fence: int,
        timeout: float,
        context: VerbContext,
        has: Belongings | None = None,
    ) -> DomainState:
        """Restart the domain once for this fence: ACPI shutdown for ``timeout`` seconds, then hard.

        A domain that runs and carries this fence has been rebooted: nothing is done.
        A domain that is off is started. ``has``: as of ``ensure_running``.
        """

    def ensure_paused(self, server: str, fence: int, context: VerbContext) -> DomainState:
        """Stop the domain's CPUs; its memory stays. VerbFailed when it does not run."""

    def ensure_suspended(self, server: str, fence: int, context: VerbContext) -> DomainState:
        """Save the domain's memory to disk and stop it; ``ensure_running`` restores it. An
        interrupted save leaves the guest as it was before."""

    def rebuild(
        self,
        spec: GuestSpec,
        read_image: ImageReader,
        runs: bool,
        context: VerbContext,
        keep_ephemeral: bool = False,
    ) -> DomainState:
        """Replace the disks by new ones from ``spec.image``, once for this fence. ``runs``: start
        the guest afterwards, else leave it off. ``keep_ephemeral``: ephemeral disks that are here
        stay. Nothing of the old guest is given up before the image is here and verified."""

    def rescue(
        self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Boot from a disk made from ``image``, with the root disk as the second one. ``spec`` is
        the guest as it is; its root disk is not changed. Repeatable."""

    def unrescue(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """Boot from the root disk again and remove the rescue disk. Repeatable."""

    def attach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        """Attach the interface, identified by its MAC address, to the running domain and to its
        stored definition. Repeatable."""

    def detach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        """Detach the interface from both. VerbFailed when the running guest does not release it
        within 20 seconds: then it stays in both. Repeatable."""

    def attach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> DomainState:
        """Add the share to the guest, which is off, under its tag. The host mounts it as long as
        the guest runs. Repeatable."""

    def detach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> None:
        """Remove the share from the guest and unmount it. VerbFailed while the guest runs. A guest
        that is not here has no share. Repeatable."""

    def attach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Connect the volume, verify that it is the one, and attach it to the running domain and to
        its stored definition. VerbFailed: it is not there; what was connected is let go of.
        Repeatable."""

    def detach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Detach the volume from both, and let go of it. VerbFailed when the running guest does not
        release it within 20 seconds: then it stays in both. Of a guest that is not here the host
        lets go of the volume; None. Repeatable."""

    def disconnect_volumes(self, server: str, fence: int) -> None:
        """Let go of all volumes of the guest, which is off and goes elsewhere, and forget them.
        VerbFailed while it runs. Repeatable."""

    def extend_volume(self, server: str, volume: AttachedVolume, context: VerbContext) -> None:
        """The volume has grown to ``volume.size_gb``: let the guest see it. VerbFailed when the
        guest does not have it, or the host does not see the new size. Repeatable."""

    def copy_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Copy the data of the guest's volume of this id, while the guest is active, to where
        ``volume`` says that it will be. When this returns both have the same data, and whatever the
        guest writes from then on is on both before it hears that it is written. VerbFailed: the
        guest is as before. ``context.phase`` tells "copying the volume 40 %". Repeatable."""

    def switch_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """After ``copy_volume``: the guest has the volume where ``volume`` says, and no more where
        it was, of which the host lets go. A copy that has ended meanwhile is made again. None: the
        guest is not here. Repeatable."""

    def keep_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Instead of ``switch_volume``: the guest has the volume where it was, and the host lets
        go of where ``volume`` says. None: the guest is not here. Repeatable."""

    def snapshot_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """The guest goes on in the file that ``volume`` names, which is there, empty, and made
        upon the one that the guest has; what that one has does not change any more. The guest's
        file systems are still for the moment itself when its agent can. VerbFailed: the guest is as
        before. Repeatable."""

    def merge_volume(
        self,
        server: str,
        fence: int,
        volume: AttachedVolume,
        merge: VolumeMerge,
        context: VerbContext,
    ) -> DomainState:
        """Merge files of the volume while the guest is active; it goes on in the one that it has.
        VerbFailed: the files are as before, or partly copied, which changes nothing of what the
        guest reads. ``context.phase`` tells "merging a snapshot of the volume 40 %". Repeatable."""

    def snapshot(
        self, server: str, fence: int, write_image: ImageWriter, context: VerbContext
    ) -> int:
        """Give the bytes of the guest's disk as one moment saw it, a qcow2 that refers to nothing,
        to ``write_image``; returns their number. The guest goes on (its file systems are frozen for
        the moment itself when its agent can). Nothing is left on the host. ``context.phase`` tells
        "copying disk 40 %", "uploading 70 %"."""

    def inject_nmi(self, server: str) -> None:
        """Inject an NMI, so that the guest's kernel dumps. Never repeated. VerbFailed when it does
        not run."""

    def set_password(self, server: str, user: str, password: str) -> None:
        """Set a password inside the guest, through its agent. Never repeated. VerbFailed when there
        is no agent or it refuses."""

    def diagnostics(self, server: str) -> JsonObject:
        """The guest's counters in the shape of the API's 2.48: state, driver, hypervisor,
        hypervisor_os, uptime, config_drive, num_cpus, num_disks, num_nics, memory_details,
        cpu_details, disk_details, nic_details. VerbFailed when it does not run."""

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        """Destroy and undefine the domain, if there is one, and remove its disks and files.
        ``keep_files``: they belong to the guest on another host, on shared storage."""

    # --- a guest that moves while it is off ---
    def offer(self, server: str, fence: int, secret: str, context: VerbContext) -> JsonObject:
        """Let a peer with the secret read the guest's files, until they are offered with another
        secret or the guest is started or removed; returns {"bytes": of data}. Of a running guest
        only files that it cannot change are offered. Repeatable."""

    def parts(self, server: str, secret: str) -> list[Part]:
        """The files that were offered under this secret; errors.Forbidden when none were."""

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        """The data of one of ``parts``, as of ``Peer.read``; errors.NotFound when there is no such
        part."""

    def prepare(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        """Before the guest is stopped at its source: VerbFailed when ``receive`` or ``install``
        could not succeed here (hardware, space). The backing file of its disk is fetched as the
        source, the ``peer``, names it; None: it is on shared storage. No guest is made.
        Repeatable."""

    def receive(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        """Copy the guest's files from the ``peer``, and grow its disk to ``spec.flavor``; None:
        they are here, on shared storage. No domain is made. Returns {"bytes": copied}. Stops within
        five seconds when cancelled. Repeatable."""

    def install(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Define the domain of ``spec`` with the files that are here, and start it if ``runs``
        (with ``spec.paused`` its CPUs stay stopped). Repeatable. After VerbFailed nothing of it
        runs."""

    # --- a guest whose volumes are snapshotted ---
    def quiesce(self, server: str, seconds: float) -> None:
        """Write out the guest's file systems and hold them still, until ``unquiesce``, and for at
        most so many seconds, also when the agent is restarted meanwhile. VerbFailed: the guest does
        not run, or its agent cannot do that."""

    def unquiesce(self, server: str) -> None:
        """Let them go on; without ``quiesce`` nothing happens."""

    # --- a guest that is resized where it is ---
    def resize_here(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Resize the guest, which is off, to ``spec``, once for this fence: keep copies of its
        disks, grow the root disk, define the domain anew, and start it if ``runs``. Repeatable.
        After VerbFailed nothing runs."""

    def settle_resize(
        self, spec: GuestSpec, back: bool, resized: int, context: VerbContext
    ) -> DomainState:
        """After ``resize_here`` under the fence ``resized``. ``back`` False: drop the kept disks;
        the guest stays as it is. True: restore the kept disks of the guest, which is off, and
        define its domain by ``spec``; it stays off.
        Repeatable: without disks kept under that fence the present ones are right. Disks that an
        older resize has kept are never restored; the next resize drops them."""

    # --- a guest that moves while it runs ---
    def prepare_incoming(
        self,
        spec: GuestSpec,
        peer: Peer,
        shared: bool,
        cpu: JsonObject,
        read_image: ImageReader,
        context: VerbContext,
        source: str = "",
    ) -> JsonObject:
        """At the destination: check that the guest, which runs on the CPU ``cpu`` (the ``cpu_info``
        of a host), can come here, and prepare what the migration does not transfer; without
        ``shared`` storage also an empty disk. Only the host at the address ``source`` may send it.
        Returns what ``live_migrate`` must know of this host. VerbFailed says why it cannot come.
        Repeatable."""

    def live_migrate(
        self, spec: GuestSpec, to: JsonObject, shared: bool, context: VerbContext
    ) -> JsonObject:
        """At the source: migrate the running or paused guest. ``spec`` is the guest as it will be
        at the destination, ``to`` what ``prepare_incoming`` returned. Returns {"bytes",
        "job_seconds"} when it is not here any more.
        VerbFailed: it is here, as before. A migration that was begun before a crash is joined.
        Obeys ``context.requested_control``; when cancelled the job is aborted."""

    def finish_incoming(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """At the destination: the guest runs (or is paused) here; define it by ``spec``, with its
        fence. VerbFailed: it is not here, and nothing of it runs. Repeatable."""

    def console_output(self, server: str, limit: int) -> str:
        """The last ``limit`` bytes of the serial console, decoded with replacement; also of a
        domain that is off. VerbFailed when the server has no console log here."""

    def console_kinds(self, server: str) -> list[str]:
        """The kinds of consoles that the guest which runs has. VerbFailed when it does not run."""

    def console(self, server: str, kind: str) -> socket.socket:
        """A connection to the guest's console. ``kind`` VNC: RFB without a password; SPICE: one of
        its channels, without a password; SERIAL: the first serial port, for one reader at a time.
        VerbFailed when the guest does not run, or has no such console."""

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call ``changed(server)`` from a thread of the driver whenever a domain's state
        changed."""

    def close(self) -> None:
        """Close the connection to the hypervisor; guests run on."""


def required_hardware(spec: GuestSpec) -> Hardware:
    """What flavor and image ask for, before anything of a guest is made or given up: one with
    dedicated parts of its host runs on those that its claim holds, or not at all. VerbFailed when
    that is impossible, or the command assigns no parts of the host."""
    try:
        found = hardware(spec.flavor, spec.image.properties if spec.image else {})
    except errors.Problem as refused:
        raise VerbFailed(refused.text) from refused
    if found.needs_assignment and spec.assignment is None:
        raise VerbFailed(
            "The server needs CPUs, memory or devices of its own, and none are claimed for it here; "
            "rebuild or move it.",
            details=f"no assignment in the command for {spec.server}",
        )
    return found


def quiesce_failed() -> VerbFailed:
    """The failure of a snapshot whose file systems cannot be frozen although the image requires
    it."""
    return VerbFailed(
        "The guest's file systems could not be frozen, and its image requires that "
        "(os_require_quiesce); see whether qemu-guest-agent runs in it."
    )
