# SPDX-License-Identifier: Apache-2.0
"""The virt driver: the operations of a host on its guests.

``compute_agent.verbs`` calls the verbs, and other parts of the agent the queries. The two
implementations, ``virt.memory`` and ``virt.libvirt``, pass the same contract tests
(tests/contract/test_virt_*.py).

Invariant: every method with an effect can be repeated, unless the docstring excludes this. Called
again after a crash at any line, the method leads to the same state.

Invariant: every verb that defines or starts a domain writes the fence into the metadata, and
``domains`` reports this fence.

Invariant: no CPUs of a guest are started without ``VerbContext.require_lease`` right before. The
only exception is a guest that a failed live migration left paused at the source.

All methods raise ``errors.Unavailable`` if the hypervisor or an image service does not answer, or
if this host may not start guests now. Then the outcome is unknown, and the verb is repeated.
``VerbFailed`` is a definite failure.
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
    """A merge of files in the backing chain of a volume. The fields are names of files.

    The guest writes to the active file, the top of the chain. Each file has the next lower file as
    backing file.

    With ``into``, the data of ``file`` is merged into ``into``, the file directly below. With
    ``into`` None, all files between ``file`` and the active file are merged into the active file,
    which then has ``file`` as backing file, or no backing file if ``file`` is None.
    """

    file: str | None
    into: str | None


class Driver(Protocol):
    """The interface that every hypervisor implements.

    Arguments of many methods: ``server`` is the id of the server. ``fence`` is the fence of the
    command, which the domain's metadata gets. ``spec`` describes the guest as it will be, and
    contains both. ``read_image`` opens an image for reading. ``volume`` is a volume with the
    connection for this host. ``context`` takes reports of progress, and shows a cancellation.

    A guest is active if running or paused, else off. A suspended guest counts as off, unless a
    docstring names suspended guests. A result ``DomainState`` is the state after the method.
    """

    def inventory(self) -> HostInventory:
        """Return the resources of this host, and further facts about the host."""

    def boot_id(self) -> str:
        """Return a text that differs for every boot of the host."""

    def domains(self) -> list[DomainState]:
        """Return the states of all domains with Kilonova's metadata. This call is cheap.

        A guest that is still arriving by live migration is left out.
        """

    def guests_volumes(self) -> dict[str, list[str]]:
        """Return the ids of the volumes of each running or paused guest, by server.

        Guests that are off, suspended, or still arriving by live migration are left out. The ids
        come from the hypervisor's live state, and not from stored definitions or records.
        """

    def files_alone(self) -> list[str]:
        """Return the ids of the servers of which this host has files and no domain.

        This call is cheap. On shared storage the result also contains servers whose domains are on
        other hosts.
        """

    def server_facts(self, server: str) -> HostedServer:
        """Return the facts about a server from the metadata of the domain.

        The facts date from the last verb that defined the domain, and include interfaces that were
        attached or detached since. The volumes and whether the server is suspended or rescued are
        the present ones.

        Raises:
            VerbFailed: There is no domain, or the metadata cannot be read.
        """

    def ensure_image(self, image: ImageRef, read_image: ImageReader, context: VerbContext) -> None:
        """Fetch an image into this host's cache for later guests, unless the image is there.

        Raises:
            VerbFailed: The image does not exist, or cannot be used or stored.
        """

    def ensure_guest(
        self, spec: GuestSpec, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Fetch the image, make disks and config drive, and define and start the domain.

        Existing disks are kept. A guest that is active or suspended is not made anew, only resumed.
        With ``spec.paused`` the CPUs stay stopped until ``ensure_running``. After VerbFailed the
        guest does not run, and the driver may have deleted its disks.
        """

    def ensure_running(
        self, server: str, fence: int, context: VerbContext, has: Belongings | None = None
    ) -> DomainState:
        """Start a domain that is off, and resume a paused or suspended domain.

        Every start waits for a missing bridge, for at most
        ``virt.interfaces.BRIDGE_TIMEOUT_SECONDS``.

        Args:
            server: Id of the server.
            fence: Fence of the command, which the domain gets.
            context: Context of the verb.
            has: Volumes and shares that the guest may have, or None to leave them as they are. A
                domain that is off loses all others before the start, and gets the missing ones of
                ``has.needed``.

        Raises:
            VerbFailed: The domain does not exist or cannot be started, lacks a needed volume that
                cannot be attached, or is paused or suspended with a volume that is not in ``has``.
            errors.Unavailable: This host may not start guests now.
        """

    def ensure_stopped(
        self, server: str, fence: int, timeout: float, context: VerbContext
    ) -> DomainState:
        """Shut the guest down by ACPI, and destroy the domain if it runs after ``timeout`` seconds.

        With ``timeout`` 0, or if the guest is paused, the domain is destroyed at once. The saved
        memory of a suspended guest is deleted. The domain gets the fence.

        Raises:
            VerbFailed: The domain does not exist.
        """

    def pull_plug(self, server: str) -> None:
        """Destroy the domain, delete the saved memory and unmount the shares.

        Definition, fence and files remain. The agent calls this for guests that must not run on
        this host. A missing domain is no error.
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
        that is off is started. A suspended domain loses its saved memory. A domain is stopped only
        if this host has a lease. For ``has`` and the exceptions see ``ensure_running``.
        """

    def ensure_paused(self, server: str, fence: int, context: VerbContext) -> DomainState:
        """Pause the domain: stop the CPUs and keep the memory. A paused domain only gets the fence.

        Raises:
            VerbFailed: The domain is off or does not exist.
        """

    def ensure_suspended(self, server: str, fence: int, context: VerbContext) -> DomainState:
        """Save the memory of the domain to disk and stop the domain.

        ``ensure_running`` restores the memory. A cancelled save leaves the guest unchanged. A
        suspended domain is reported with the power state SHUTDOWN. Called again, only the fence is
        recorded.

        Raises:
            VerbFailed: The domain is off without saved memory, or does not exist.
        """

    def rebuild(
        self,
        spec: GuestSpec,
        read_image: ImageReader,
        runs: bool,
        context: VerbContext,
        keep_ephemeral: bool = False,
    ) -> DomainState:
        """Replace the disks and the config drive by new ones, once for this fence.

        The root disk is made from ``spec.image``. A server that boots from a volume has no root
        disk. A missing guest is made, and a rescue ends. The old disks are kept until the new image
        is on this host and verified. If the disks were already replaced under this fence, the
        method only starts the guest if ``runs``.

        Args:
            spec: The guest with the new image.
            read_image: Opens the image.
            runs: True to start the guest afterwards, False to leave the guest off.
            context: Context of the verb.
            keep_ephemeral: True to keep existing ephemeral disks.

        Raises:
            VerbFailed: The image cannot be used, or a disk or the domain cannot be made.
        """

    def rescue(
        self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Boot from a disk made from ``image``, with the root disk as the second disk.

        If the image has the property hw_rescue_device or hw_rescue_bus, all disks keep their places
        and the rescue disk is added. ``spec`` is the guest without the rescue. A guest that was
        rescued under this fence is not stopped, only started if off, and resumed if paused or
        suspended.

        Raises:
            VerbFailed: The guest does not exist, or the rescue failed. Then the reason is UNTOUCHED
                if the guest is unchanged.
        """

    def unrescue(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """Boot from the root disk again and delete the rescue disk.

        A guest that is not rescued is not stopped, only started if off, and resumed if paused or
        suspended.

        Raises:
            VerbFailed: The guest does not exist or cannot be started.
        """

    def attach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        """Attach an interface to the stored definition, and to the domain if active.

        The MAC address identifies the interface. An interface that is present is not attached
        again. The domain gets the fence.

        Raises:
            VerbFailed: The guest does not exist or is suspended, this host does not support the
                interface, or the bridge does not appear in time.
        """

    def detach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        """Detach an interface from the domain if active, and from the stored definition.

        A missing interface is ignored. The domain gets the fence.

        Raises:
            VerbFailed: The guest does not exist, is suspended or paused, or does not release the
                interface within 160 seconds. The interface stays in the domain and the definition.
        """

    def attach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> DomainState:
        """Add a share, under its tag, to a guest that is off. The domain gets the fence.

        The host mounts the share while the guest runs.

        Raises:
            VerbFailed: The guest is active or does not exist.
        """

    def detach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> None:
        """Unmount a share, and remove it from a guest that is off. A missing guest is ignored.

        Raises:
            VerbFailed: The guest is active, or the share cannot be unmounted.
        """

    def attach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Connect a volume, verify its identity, and attach it to the guest.

        The stored definition gets the volume, and the domain if active. The domain gets the fence.

        Raises:
            VerbFailed: The volume cannot be connected or is another volume, the bus of an active
                guest does not support hot plug, or the server is suspended or has no guest here. If
                the guest lacks the volume, the host disconnects it again.
        """

    def detach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Detach a volume from the domain if active and the stored definition, and disconnect it.

        A multiattach volume stays connected while another guest of this host has it.

        Returns:
            The state of the domain, or None if the guest is not on this host. Then only a remaining
            connection is closed.

        Raises:
            VerbFailed: The guest is paused or does not release the volume within 160 seconds, its
                bus does not support hot plug, or the server is suspended. Then the volume stays
                attached. Or the volume was detached and cannot be disconnected.
        """

    def disconnect_volumes(self, server: str, fence: int) -> None:
        """Disconnect all volumes of a guest that is off, and remove them from its definition.

        Called before the guest leaves this host. Without a guest the remaining connections are
        closed. A multiattach volume stays connected while another guest of this host has it.

        Raises:
            VerbFailed: The guest is active, or a volume cannot be disconnected.
        """

    def extend_volume(self, server: str, volume: AttachedVolume, context: VerbContext) -> None:
        """Make the new size of a volume, ``volume.size_gb``, visible to the guest.

        A guest that is off sees the size at its next start.

        Raises:
            VerbFailed: The guest does not exist, does not have the volume or is suspended, or the
                host does not see the new size.
        """

    def copy_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Copy the data of an active guest's volume to the new location in ``volume``.

        ``volume`` has the id of the present volume and the connection of the new one. When this
        method returns, both have the same data, and each later write of the guest goes to both
        before the guest gets the confirmation. ``context.phase`` reports the percentage.

        Raises:
            VerbFailed: The guest is off or suspended or lacks the volume, the sizes differ, or the
                copy failed. The guest is unchanged.
        """

    def switch_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Switch the guest to the copy made by ``copy_volume``, and disconnect the old location.

        If the copy of an active guest has ended meanwhile, the method copies again. A guest that is
        off is switched if the copy was complete.

        Returns:
            The state of the domain, or None if the guest is not on this host.

        Raises:
            VerbFailed: The guest is off and the copy was not complete, the guest is suspended or
                lacks the volume, the repeated copy failed, or the old location stays connected.
        """

    def keep_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        """Undo ``copy_volume``: keep the old location of the volume and disconnect the new one.

        Returns:
            The state of the domain, or None if the guest is not on this host. The new location is
            disconnected in both cases.

        Raises:
            VerbFailed: The copy does not end, or the new location stays connected.
        """

    def snapshot_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        """Make a snapshot of a volume: the guest continues in the new file that ``volume`` names.

        The volume service has made the new file, which is empty and has the guest's present file as
        backing file. The present file does not change any more. If the guest's agent can, it
        freezes the file systems for this moment. For a guest that is off, only the definition
        changes.

        Raises:
            VerbFailed: The guest does not exist, lacks the volume or is suspended, the volume is
                not a file, the new file does not fit, or the hypervisor refuses. The guest is
                unchanged.
            Cancelled: The verb was cancelled before the guest was changed.
        """

    def merge_volume(
        self,
        server: str,
        fence: int,
        volume: AttachedVolume,
        merge: VolumeMerge,
        context: VerbContext,
    ) -> DomainState:
        """Merge files of an active guest's volume, as deleting a snapshot requires.

        The guest continues in its active file. ``context.phase`` reports the percentage. If the
        files are merged already, only the fence is recorded.

        Raises:
            VerbFailed: The guest is off, suspended or lacks the volume, ``merge`` does not fit the
                files, or the merge failed. The files are unchanged or partly copied. The guest
                reads the same data in both cases.
        """

    def snapshot(
        self, server: str, fence: int, write_image: ImageWriter, context: VerbContext
    ) -> int:
        """Write the root disk as of one moment to ``write_image``, as qcow2 without a backing file.

        A running guest continues. If the guest's agent can, it freezes the file systems for this
        moment. No file remains on the host. ``context.phase`` reports the phases of copy and
        upload.

        Returns:
            The number of bytes written.

        Raises:
            VerbFailed: The server has no root disk here, the copy or upload failed, the image
                service refuses the image, or the guest is active and its image requires a freeze
                (os_require_quiesce), which failed.
        """

    def inject_nmi(self, server: str) -> None:
        """Inject an NMI, after which the guest's kernel may write a dump.

        The driver makes one attempt only, because a second NMI would have a second effect.

        Raises:
            VerbFailed: The guest is off or does not exist.
        """

    def set_password(self, server: str, user: str, password: str) -> None:
        """Set the password of a user inside the guest, through the guest agent.

        The driver makes one attempt only.

        Raises:
            VerbFailed: The guest does not run, has no agent that answers, or the agent refuses.
        """

    def diagnostics(self, server: str) -> JsonObject:
        """Return the guest's counters in the format of API microversion 2.48.

        The keys are state, driver, hypervisor, hypervisor_os, uptime, config_drive, num_cpus,
        num_disks, num_nics, memory_details, cpu_details, disk_details and nic_details.

        Raises:
            VerbFailed: The guest is off or does not exist.
        """

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        """Destroy and undefine the domain if it exists, and delete its disks and files.

        The volumes of the guest are disconnected. With ``keep_files`` the files remain, because the
        guest on another host uses them on shared storage.

        Raises:
            VerbFailed: A volume cannot be disconnected, or the hypervisor refuses.
        """

    # --- Moves of a guest that is off ---
    def offer(self, server: str, fence: int, secret: str, context: VerbContext) -> JsonObject:
        """Permit other hosts that have the secret to read the guest's files.

        The offer ends when the files are offered with another secret, and at the latest when a
        later command starts or removes the guest. Of an active guest, only files that the guest
        cannot change are offered.

        Returns:
            {"bytes": number of bytes of data in these files}.

        Raises:
            VerbFailed: The server is suspended or has no guest here.
            errors.Forbidden: A later command has raised the guest's fence.
        """

    def parts(self, server: str, secret: str) -> list[Part]:
        """Return the files that are offered under this secret.

        Raises:
            errors.Forbidden: No files are offered under this secret.
        """

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield the data of the part ``name`` of ``parts``, as in ``Peer.read``.

        Raises:
            errors.NotFound: There is no such part.
            errors.Forbidden: No files are offered under this secret, or the offer ended meanwhile.
            OSError: The file cannot be read.
        """

    def prepare(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        """Check, before the guest stops at the source, that this host can receive it.

        The check covers the later ``receive`` and ``install``. The libvirt driver also fetches the
        backing file of the guest's disk. No guest is made.

        Args:
            spec: The guest as it will be on this host.
            peer: The source, which names the backing file. None if the disk is on shared storage.
            read_image: Opens an image.
            context: Context of the verb.

        Returns:
            {}.

        Raises:
            VerbFailed: The host lacks hardware or space, for example.
        """

    def receive(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        """Copy the guest's files from the source, and grow the disk to ``spec.flavor``.

        A swap disk is made anew. No domain is defined. A cancelled copy stops within five seconds.

        Args:
            spec: The guest as it will be on this host.
            peer: The source. None if the files are on shared storage.
            read_image: Opens an image.
            context: Context of the verb.

        Returns:
            {"bytes": number of bytes copied}. 0 if the files are on shared storage.

        Raises:
            VerbFailed: The guest is active on this host, space is missing, or a file is missing or
                damaged.
        """

    def install(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Define the domain of ``spec`` with the files on this host, and start it if ``runs``.

        With ``spec.paused`` the CPUs stay stopped. A guest that is active with this fence is not
        defined anew. Saved memory of a suspended guest is deleted.

        Raises:
            VerbFailed: The guest does not run. Exceptions: a guest that is active with another
                fence, or whose hardware is invalid or root disk damaged, is not changed.
        """

    # --- Snapshots of a guest's volumes ---
    def quiesce(self, server: str, seconds: float) -> None:
        """Flush and freeze the guest's file systems until ``unquiesce``, for at most ``seconds``.

        The freeze lasts longer if the hypervisor or the guest's agent does not answer. If the agent
        restarts meanwhile, the file systems are thawed at the restart.

        Raises:
            VerbFailed: The guest does not run, or the guest's agent cannot freeze file systems.
        """

    def unquiesce(self, server: str) -> None:
        """Thaw the file systems that ``quiesce`` has frozen, if any.

        A failure of the guest's agent is only logged.
        """

    # --- Resize on the same host ---
    def resize_here(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Resize a guest that is off to ``spec``, once for this fence.

        Copies of the disks before the resize are kept until ``settle_resize``. The root disk grows,
        the domain is defined anew, and is started if ``runs``. A guest that is active with this
        fence has been resized already.

        Raises:
            VerbFailed: The guest does not exist, or is active with another fence and is not
                changed, or the resize failed and the guest does not run.
        """

    def settle_resize(
        self, spec: GuestSpec, back: bool, resized: int, context: VerbContext
    ) -> DomainState:
        """Confirm or revert a ``resize_here`` that ran under the fence ``resized``.

        With ``back`` False the copies of the old disks are deleted, and the domain gets the new
        fence.

        With ``back`` True the guest must be off and stays off. The copies made under the fence
        ``resized`` replace the disks, and the domain is defined by ``spec``. If that resize made no
        copies, the disks are not changed. Copies of another resize are deleted and never restored.

        In both cases ephemeral and swap disks that ``spec`` does not contain are deleted.

        Raises:
            VerbFailed: The guest does not exist, or is active and ``back`` is True.
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
        storage this includes empty disks.

        Args:
            spec: The guest as it will be on this host.
            peer: The source's files.
            shared: True if both hosts share the storage of the disks.
            cpu: ``cpu_info`` of the CPU that the guest runs on.
            read_image: Opens an image.
            context: Context of the verb.
            source: Address of the only host that may send the guest, as in its certificate.

        Returns:
            The details of this host that ``live_migrate`` needs.

        Raises:
            VerbFailed: The guest cannot come here. The text contains the reason.
        """

    def live_migrate(
        self, spec: GuestSpec, to: JsonObject, shared: bool, context: VerbContext
    ) -> JsonObject:
        """Migrate a running or paused guest away from this host, the source.

        A migration that was begun under this fence before a crash of the agent is joined. The
        method obeys ``context.requested_control``. If the verb is cancelled, the method aborts the
        migration, and may raise Cancelled before the abort is complete.

        Args:
            spec: The guest as it will be at the destination.
            to: The result of ``prepare_incoming``.
            shared: True if both hosts share the storage of the disks.
            context: Context of the verb.

        Returns:
            {"bytes", "job_seconds"} once the guest is no longer on this host.

        Raises:
            VerbFailed: The guest is still on this host and unchanged.
            MigrationAborted: As VerbFailed, because a user aborted the migration.
            errors.Unavailable: It is not known which host has the guest, or this host has no lease
                and has not begun the migration.
        """

    def finish_incoming(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """Complete the arrival of a guest: define its domain by ``spec``, with the new fence.

        The guest runs or is paused, as at the source.

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
        """Return the kinds of consoles of an active guest: its screens (VNC, SPICE), and SERIAL.

        Raises:
            VerbFailed: The guest is off or does not exist.
        """

    def console(self, server: str, kind: str) -> socket.socket:
        """Open a connection to a console of the guest.

        Args:
            server: Id of the server.
            kind: VNC for RFB without a password, SPICE for one channel without a password, or
                SERIAL for the first serial port, which has one reader at a time.

        Raises:
            VerbFailed: The guest is off, or has no such console.
        """

    def watch(self, changed: Callable[[str], None]) -> None:
        """From now on, call ``changed(server)`` when a domain changes state.

        Any thread may call, but holds no lock of the driver. Calls without a change are possible.
        """

    def close(self) -> None:
        """Close the connection to the hypervisor. Guests continue to run."""


def required_hardware(spec: GuestSpec) -> Hardware:
    """Return the hardware requirements of a guest, from flavor and image.

    Verbs call this before they make or delete anything. A guest that needs dedicated parts of the
    host runs only on the parts that its claim assigned.

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
            "The server needs dedicated CPUs, memory or devices of the host, and no claim assigns them; "
            "rebuild or move the server.",
            details=f"no assignment in the command for {spec.server}",
        )
    return requirements


def quiesce_failed() -> VerbFailed:
    """Return the failure of a snapshot whose image requires a freeze, which was not possible."""
    return VerbFailed(
        "The guest's file systems could not be frozen for the snapshot, which its image requires "
        "(os_require_quiesce); check that qemu-guest-agent runs in the guest."
    )
