# SPDX-License-Identifier: Apache-2.0
"""The virt driver: the operations of a host on its guests.

``compute_agent.verbs`` calls the verbs, and other parts of the agent the queries. The two
implementations, ``virt.memory`` and ``virt.libvirt``, pass the same contract tests
(tests/contract/test_virt_*.py).

Invariant: every method with an effect can be repeated, unless the docstring excludes this. Called
again after a crash at any line, the method leads to the same state.

Invariant: every verb that defines or starts a domain writes the fence into the metadata, and
``domains`` reports this fence.

Invariant: no CPUs of a guest are started without ``VerbContext.require_lease`` right before.

All methods raise ``errors.Unavailable`` if the hypervisor or an image service does not answer. Then
the outcome is unknown, and the verb is repeated. ``VerbFailed`` is a definite failure.
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
    """A merge of files of a volume, given by name. Each file is an overlay of the next lower file.

    With ``into``, the data of ``file`` is merged into ``into``, the file directly below. Without
    ``into``, all files between ``file`` and the guest's active file are merged into the active
    file, which then has ``file`` as backing file. ``file`` None stands for no backing file.
    """

    file: str | None
    into: str | None


class Driver(Protocol):
    """The interface that every hypervisor implements."""

    def inventory(self) -> HostInventory:
        """Return the resources of this host."""

    def boot_id(self) -> str:
        """Return a text that differs for every boot of the host."""

    def domains(self) -> list[DomainState]:
        """Return the states of all domains with Kilonova's metadata. This call is cheap."""

    def guests_volumes(self) -> dict[str, list[str]]:
        """Return the ids of the volumes of each running or paused guest, by server.

        The ids come from the hypervisor's live state, and not from stored definitions or records.
        """

    def files_alone(self) -> list[str]:
        """Return the servers of which this host has files and no domain. This call is cheap.

        On shared storage the result also contains servers whose domains are on other hosts.
        """

    def server_facts(self, server: str) -> HostedServer:
        """Return the facts about a server from the metadata of the domain.

        They date from the last verb that defined the domain, and include interfaces that were
        attached or detached since.

        Raises:
            VerbFailed: There is no domain.
        """

    def ensure_image(self, image: ImageRef, read_image: ImageReader, context: VerbContext) -> None:
        """Fetch an image to this host for later guests."""

    def ensure_guest(
        self, spec: GuestSpec, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Fetch the image, make disks and config drive, and define and start the domain.

        With ``spec.paused`` the CPUs stay stopped until ``ensure_running``. After VerbFailed the
        guest does not run.
        """

    def ensure_running(
        self, server: str, fence: int, context: VerbContext, has: Belongings | None = None
    ) -> DomainState:
        """Start a domain that is off, and resume a paused or suspended domain.

        Every start waits for a missing bridge, at most as long as ``virt.interfaces`` allows.

        Args:
            server: Id of the server.
            fence: Fence of the command.
            context: Context of the verb.
            has: Volumes and shares that the guest may have, or None to leave them as they are. A
                domain that is off loses all others before the start, and gets the missing ones of
                ``has.needed``.

        Raises:
            VerbFailed: The domain does not exist, lacks a needed volume that cannot be attached, or
                is paused or suspended with a volume that is not in ``has``.
        """

    def ensure_stopped(
        self, server: str, fence: int, timeout: float, context: VerbContext
    ) -> DomainState:
        """Shut the guest down, and destroy the domain after ``timeout`` seconds.

        With 0 the domain is destroyed at once.
        """

    def pull_plug(self, server: str) -> None:
        """Destroy the domain and delete the saved memory. Fence and files remain.

        Conductors decide that a guest must not run here. Without a domain nothing happens.
        """

    def reboot(
        self,
        server: str,
        fence: int,
        timeout: float,
        context: VerbContext,
        has: Belongings | None = None,
    ) -> DomainState:
        """Restart the domain once for this fence: by ACPI, or hard after ``timeout`` seconds.

        A running domain with this fence has been rebooted already, and stays as it is. A domain
        that is off is started. For ``has`` see ``ensure_running``.
        """

    def ensure_paused(self, server: str, fence: int, context: VerbContext) -> DomainState:
        """Stop the CPUs of the domain, whose memory remains.

        Raises:
            VerbFailed: The domain does not run.
        """

    def ensure_suspended(self, server: str, fence: int, context: VerbContext) -> DomainState:
        """Save the memory of the domain to disk and stop the domain.

        ``ensure_running`` restores the memory. An interrupted save leaves the guest unchanged.
        """

    def rebuild(
        self,
        spec: GuestSpec,
        read_image: ImageReader,
        runs: bool,
        context: VerbContext,
        keep_ephemeral: bool = False,
    ) -> DomainState:
        """Replace the disks by new ones from ``spec.image``, once for this fence.

        The old disks are kept until the new image is on this host and verified.

        Args:
            spec: The guest with the new image.
            read_image: Opens the image.
            runs: True to start the guest afterwards, False to leave the guest off.
            context: Context of the verb.
            keep_ephemeral: True to keep existing ephemeral disks.
        """

    def rescue(
        self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Boot from a disk made from ``image``, with the root disk as the second disk.

        ``spec`` is the guest without the rescue. The root disk is not changed.
        """

    def unrescue(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """Boot from the root disk again and delete the rescue disk."""

    def attach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        """Attach an interface to the running domain and to the stored definition.

        The MAC address identifies the interface.
        """

    def detach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        """Detach an interface from the running domain and from the stored definition.

        Raises:
            VerbFailed: The guest does not release the interface within 20 seconds. Both keep it.
        """

    def attach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> DomainState:
        """Add a share, under its tag, to a guest that is off.

        The host mounts the share while the guest runs.
        """

    def detach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> None:
        """Remove a share from a guest that is off, and unmount it. A missing guest is ignored.

        Raises:
            VerbFailed: The guest runs.
        """

    def attach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Connect a volume, verify the identity, and attach the volume to the domain.

        Both the running domain and the stored definition get the volume.

        Raises:
            VerbFailed: The volume cannot be connected or is another one. The host disconnects it
                again.
        """

    def detach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Detach a volume from the running domain and the stored definition, and disconnect it.

        Returns:
            The state of the domain. None if the guest is not on this host. The volume is
            disconnected in both cases.

        Raises:
            VerbFailed: The guest does not release the volume within 20 seconds. Both keep it.
        """

    def disconnect_volumes(self, server: str, fence: int) -> None:
        """Disconnect and forget all volumes of a guest that is off and leaves this host.

        Raises:
            VerbFailed: The guest runs.
        """

    def extend_volume(self, server: str, volume: AttachedVolume, context: VerbContext) -> None:
        """Make the new size of a volume, ``volume.size_gb``, visible to the guest.

        Raises:
            VerbFailed: The guest does not have the volume, or the host does not see the new size.
        """

    def copy_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Copy the data of an active guest's volume to the new location in ``volume``.

        ``volume`` has the id of the present volume and the connection of the new one. When this
        method returns, both have the same data, and each later write of the guest goes to both
        before the guest gets the confirmation. ``context.phase`` reports the percentage.

        Raises:
            VerbFailed: The guest is unchanged.
        """

    def switch_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Switch the guest to the copy made by ``copy_volume``, and disconnect the old location.

        If the copy has ended meanwhile, the method copies again.

        Returns:
            The state of the domain, or None if the guest is not on this host.
        """

    def keep_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Undo ``copy_volume``: keep the old location of the volume and disconnect the new one.

        Returns:
            The state of the domain, or None if the guest is not on this host.
        """

    def snapshot_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Make a snapshot of a volume: the guest continues in the new file that ``volume`` names.

        The file exists, is empty, and has the guest's present file as backing file. The present
        file does not change any more. If the guest's agent can, it freezes the file systems for
        this moment.

        Raises:
            VerbFailed: The guest is unchanged.
        """

    def merge_volume(
        self,
        server: str,
        fence: int,
        volume: AttachedVolume,
        merge: VolumeMerge,
        context: VerbContext,
    ) -> DomainState:
        """Merge files of a volume while the guest is active and continues in the active file.

        ``context.phase`` reports the percentage.

        Raises:
            VerbFailed: The files are unchanged or partly copied. The guest reads the same data in
                both cases.
        """

    def snapshot(
        self, server: str, fence: int, write_image: ImageWriter, context: VerbContext
    ) -> int:
        """Write the guest's disk of one moment to ``write_image``, as a qcow2 without backing file.

        The guest continues. If the guest's agent can, it freezes the file systems for this moment.
        No file remains on the host. ``context.phase`` reports the phases of copy and upload.

        Returns:
            The number of bytes written.
        """

    def inject_nmi(self, server: str) -> None:
        """Inject an NMI, which makes the guest's kernel write a dump. Never repeated.

        Raises:
            VerbFailed: The guest does not run.
        """

    def set_password(self, server: str, user: str, password: str) -> None:
        """Set the password of a user inside the guest, through the guest agent. Never repeated.

        Raises:
            VerbFailed: There is no agent, or it refuses.
        """

    def diagnostics(self, server: str) -> JsonObject:
        """Return the guest's counters in the format of API microversion 2.48.

        The keys are state, driver, hypervisor, hypervisor_os, uptime, config_drive, num_cpus,
        num_disks, num_nics, memory_details, cpu_details, disk_details and nic_details.

        Raises:
            VerbFailed: The guest does not run.
        """

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        """Destroy and undefine the domain if it exists, and delete its disks and files.

        With ``keep_files`` the files remain, because the guest on another host uses them on shared
        storage.
        """

    # --- Moves of a guest that is off ---
    def offer(self, server: str, fence: int, secret: str, context: VerbContext) -> JsonObject:
        """Let other hosts with the secret read the guest's files.

        The offer ends when the files are offered with another secret, or the guest is started or
        removed. Of a running guest only files that the guest cannot change are offered.

        Returns:
            {"bytes": number of bytes of data}.
        """

    def parts(self, server: str, secret: str) -> list[Part]:
        """Return the files that are offered under this secret.

        Raises:
            errors.Forbidden: No files are offered under this secret.
        """

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield the data of one of ``parts``, as in ``Peer.read``.

        Raises:
            errors.NotFound: There is no such part.
        """

    def prepare(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        """Check, before the guest stops at the source, that this host can receive it.

        The check covers ``receive`` and ``install``.

        The backing file of the guest's disk is fetched. No guest is made.

        Args:
            spec: The guest as it will be on this host.
            peer: The source, which names the backing file. None if the disk is on shared storage.
            read_image: Opens an image.
            context: Context of the verb.

        Raises:
            VerbFailed: The host lacks hardware or space, for example.
        """

    def receive(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        """Copy the guest's files from the source, and grow the disk to ``spec.flavor``.

        No domain is defined. A cancelled copy stops within five seconds.

        Args:
            spec: The guest as it will be on this host.
            peer: The source. None if the files are on shared storage.
            read_image: Opens an image.
            context: Context of the verb.

        Returns:
            {"bytes": number of bytes copied}.
        """

    def install(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Define the domain of ``spec`` with the files on this host, and start it if ``runs``.

        With ``spec.paused`` the CPUs stay stopped. After VerbFailed the guest does not run.
        """

    # --- Snapshots of a guest's volumes ---
    def quiesce(self, server: str, seconds: float) -> None:
        """Flush and freeze the guest's file systems until ``unquiesce``, for at most ``seconds``.

        The limit holds even if the agent restarts meanwhile.

        Raises:
            VerbFailed: The guest does not run, or the guest's agent cannot freeze file systems.
        """

    def unquiesce(self, server: str) -> None:
        """Thaw the guest's file systems. Without a ``quiesce`` before, nothing happens."""

    # --- Resize on the same host ---
    def resize_here(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Resize a guest that is off to ``spec``, once for this fence.

        Copies of the disks are kept. The root disk grows, the domain is defined anew, and is
        started if ``runs``. After VerbFailed the guest does not run.
        """

    def settle_resize(
        self, spec: GuestSpec, back: bool, resized: int, context: VerbContext
    ) -> DomainState:
        """Complete or revert a ``resize_here`` that ran under the fence ``resized``.

        With ``back`` False the kept disks are deleted, and the guest stays as it is. With ``back``
        True the guest is off: the kept disks are restored, the domain is defined by ``spec``, and
        it stays off.

        If no disks are kept under that fence, the present disks are right. Disks that an older
        resize has kept are never restored, and the next resize deletes them.
        """

    # --- Live migration ---
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
        """Check at the destination that the running guest can come here, and prepare the arrival.

        The preparation makes everything that the migration does not transfer. Without shared
        storage this includes an empty disk.

        Args:
            spec: The guest as it will be on this host.
            peer: The source's files.
            shared: True if both hosts share the storage of the disks.
            cpu: ``cpu_info`` of the CPU that the guest runs on.
            read_image: Opens an image.
            context: Context of the verb.
            source: Address of the only host that may send the guest.

        Returns:
            The details of this host that ``live_migrate`` needs.

        Raises:
            VerbFailed: The guest cannot come here. The text contains the reason.
        """

    def live_migrate(
        self, spec: GuestSpec, to: JsonObject, shared: bool, context: VerbContext
    ) -> JsonObject:
        """Migrate a running or paused guest away from this host, the source.

        A migration that was begun before a crash is joined. The method obeys
        ``context.requested_control``. When cancelled, the method aborts the job.

        Args:
            spec: The guest as it will be at the destination.
            to: The result of ``prepare_incoming``.
            shared: True if both hosts share the storage of the disks.
            context: Context of the verb.

        Returns:
            {"bytes", "job_seconds"} once the guest is no longer on this host.

        Raises:
            VerbFailed: The guest is still on this host and unchanged.
        """

    def finish_incoming(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """Define the guest that has arrived here by ``spec``, with the new fence.

        The guest runs or is paused.

        Raises:
            VerbFailed: The guest is not on this host and does not run here.
        """

    def console_output(self, server: str, limit: int) -> str:
        """Return the last ``limit`` bytes of the serial console, decoded with replacement.

        This also works for a domain that is off.

        Raises:
            VerbFailed: The server has no console log on this host.
        """

    def console_kinds(self, server: str) -> list[str]:
        """Return the kinds of consoles of a running guest.

        Raises:
            VerbFailed: The guest does not run.
        """

    def console(self, server: str, kind: str) -> socket.socket:
        """Open a connection to a console of the guest.

        Args:
            server: Id of the server.
            kind: VNC for RFB without a password, SPICE for one channel without a password, or
                SERIAL for the first serial port, which has one reader at a time.

        Raises:
            VerbFailed: The guest does not run, or has no such console.
        """

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call ``changed(server)`` from a thread of the driver when a domain changes state."""

    def close(self) -> None:
        """Close the connection to the hypervisor. Guests continue to run."""


def required_hardware(spec: GuestSpec) -> Hardware:
    """Return the hardware requirements of a guest, from flavor and image.

    Called before the verb makes or deletes anything. A guest with dedicated parts of the host runs
    on the parts that the claim holds, or not at all.

    Raises:
        VerbFailed: The requirements are invalid, or the guest needs dedicated parts and the command
            assigns none.
    """
    try:
        requirements = hardware(spec.flavor, spec.image.properties if spec.image else {})
    except errors.Problem as refused:
        raise VerbFailed(refused.text) from refused
    if requirements.needs_assignment and spec.assignment is None:
        raise VerbFailed(
            "The server needs CPUs, memory or devices of its own, and none are claimed for it here; "
            "rebuild or move it.",
            details=f"no assignment in the command for {spec.server}",
        )
    return requirements


def quiesce_failed() -> VerbFailed:
    """Return the failure of a snapshot without frozen file systems that the image requires."""
    return VerbFailed(
        "The guest's file systems could not be frozen, and its image requires that "
        "(os_require_quiesce); see whether qemu-guest-agent runs in it."
    )
