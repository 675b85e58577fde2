# SPDX-License-Identifier: Apache-2.0
"""Makes, rebuilds, rescues and removes the guests of this host.

Called by ``virt.libvirt.driver``, which repeats a verb after libvirtd was away. A guest is a domain
and the folder ``<instances>/<id>/``. Without both, the server is not on this host.

Invariant: a verb removes an old disk only when the verified replacement is complete. The domain's
metadata records whether the replacement is in use, so that a verb interrupted at any line can be
repeated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.hardware import Hardware
from common.domain.models import (
    AttachedVolume,
    Belongings,
    DomainState,
    GuestSpec,
    HardwareAssignment,
    ImageRef,
    Interface,
)
from common.domain.server_facts import HostedServer, facts_of
from common.domain.wire import from_wire, to_wire
from compute_agent.verb_context import (
    Cancelled,
    ImageReader,
    VerbContext,
    VerbFailed,
    before_guest_is_touched,
)
from compute_agent.virt.driver import required_hardware
from compute_agent.virt.interfaces import plugs
from compute_agent.virt.libvirt.disks import disks, local_disks
from compute_agent.virt.libvirt.disks.images import GIBIBYTE, CachedImage, ImageCache
from compute_agent.virt.libvirt.disks.local_disks import LocalDisks
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import Connection, GuestDomain
from compute_agent.virt.libvirt.guests import interfaces
from compute_agent.virt.libvirt.guests.config_drive import ConfigDrives
from compute_agent.virt.libvirt.guests.shares import GuestShares
from compute_agent.virt.libvirt.volumes.volumes import GuestVolumes
from compute_agent.virt.libvirt.xml import interface_xml, nova_xml, volume_xml
from compute_agent.virt.libvirt.xml.domain_xml import (
    RESCUE_BUSES,
    RESCUE_DEVICES,
    Disk,
    Domain,
    Rescue,
    domain_xml,
)
from compute_agent.virt.libvirt.xml.hardware_xml import HostPlacement
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import boots_from_volume

RESCUE = "rescue"
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: libvirt's name for the format of QEMU's command line.
COMMAND_LINE = "qemu-argv"


@dataclass(frozen=True, slots=True)
class HostDetails:
    """The host's part of a guest's definition.

    Attributes:
        folder: The server's folder.
        virt_type: Domain type: kvm, qemu or test.
        place: CPUs and devices of the host that the guest gets.
        config_drive_is_disk: True if config drives are disks, False for CD-ROMs.
        spice: True if guests get a SPICE screen in addition to VNC.
        volumes: The guest's volumes, each with the place at which QEMU on this host finds it.
    """

    folder: Path
    virt_type: str
    place: HostPlacement = HostPlacement()
    config_drive_is_disk: bool = False
    spice: bool = False
    volumes: tuple[tuple[AttachedVolume, VolumeSource], ...] = ()


class LibvirtGuests:
    """The guests in the folder ``instances``. Thread-safe for different servers.

    Args:
        libvirt: Connection to libvirtd.
        images: The image cache.
        instances: Folder of the guests' folders.
        virt_type: Returns the domain type. Called when a domain is defined.
        place: Returns the CPUs and devices of the host for an assignment. Called when a domain is
            defined.
        config_drives: Builds config drives.
        local: Makes ephemeral and swap disks.
        shares: The shares of the guests.
        volumes: The volumes of the guests.
        spice: True if guests defined from now on get a SPICE screen in addition to VNC.
    """

    def __init__(
        self,
        libvirt: Connection,
        images: ImageCache,
        instances: Path,
        virt_type: Callable[[], str],
        place: Callable[[HardwareAssignment], HostPlacement],
        config_drives: ConfigDrives,
        local: LocalDisks,
        shares: GuestShares,
        volumes: GuestVolumes,
        *,
        spice: bool = False,
    ) -> None:
        self._libvirt = libvirt
        self._images = images
        self._instances = instances
        self._virt_type = virt_type
        self._place = place
        self._config_drives = config_drives
        self.local = local
        self.shares = shares
        self.volumes = volumes
        self.spice = spice

    def folder(self, server: str) -> Path:
        """Return the server's folder, which need not exist.

        Raises:
            VerbFailed: The id is not a UUID. Therefore an id cannot name another path.
        """
        try:
            if str(uuid.UUID(server)) == server:
                return self._instances / server
        except ValueError:
            pass
        raise VerbFailed("The server's id is not a UUID.", details=f"id {server!r}")

    def folders(self) -> set[str]:
        """Return the ids of all servers that have a folder here, even an empty one."""
        return {name for name in os.listdir(self._instances) if _UUID.fullmatch(name)}

    def make(self, spec: GuestSpec, read_image: ImageReader, context: VerbContext) -> DomainState:
        """Make and start the server's guest, and return its state. Existing disks are kept.

        An active or suspended guest is not defined anew. A paused guest is resumed, unless
        ``spec.paused``. An active guest gets exactly the interfaces of ``spec``. A suspended guest
        loses shares that ``spec`` does not contain.

        Raises:
            VerbFailed: The guest could not be made, or is paused or suspended with a volume that
                ``spec`` does not contain. Domain and files were removed, unless the id or the
                hardware of ``spec`` is invalid.
            Cancelled: The verb was cancelled. Domain and files stay.
            Unavailable: This host may not start guests now, or the image service does not answer.
                Domain and files stay.
            NoAnswer: libvirtd does not answer, or the removal failed. The outcome is unknown.
        """
        self.folder(spec.server)
        required_hardware(spec)
        with self._make_failure_definite(spec.server, self.remove):
            return self._make(spec, read_image, context)

    def install(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        """Define the domain with the files that are here, and start the guest if ``runs``.

        The result is the guest's state. Saved memory is dropped. A guest that is active with the
        fence of ``spec`` is not defined anew and not stopped.

        Raises:
            VerbFailed: The guest does not run. Exceptions: a guest that is active with another
                fence, or that has invalid hardware or a damaged root disk, is not changed.
            Cancelled: The verb was cancelled.
            Unavailable: This host may not start guests now.
            NoAnswer: libvirtd does not answer, or the guest could not be stopped after a failure.
                The outcome is unknown.
        """
        required_hardware(spec)
        if (disk := root_disk(self.folder(spec.server), spec)) is not None:
            disks.verify(disk, context)
        domain = self._libvirt.find(spec.server)
        if domain and domain.active and domain.fence != spec.fence:
            raise VerbFailed(
                "The server's guest was started on this host meanwhile; stop the guest first.",
                details=f"the guest has fence {domain.fence}, not {spec.fence}",
            )
        with self._make_failure_definite(spec.server, self._stop):
            return self._install(spec, domain, runs, context)

    def check(self, spec: GuestSpec, rescue: Rescue | None = None) -> None:
        """Raise VerbFailed if libvirt cannot make the guest's hardware on this host.

        The check builds the definition, and libvirt builds QEMU's command line from the definition.
        No domain or file is changed. With libvirt's test driver only the definition is built.

        Args:
            spec: The guest.
            rescue: The disk from which the guest would boot in a rescue, or None.
        """
        home = self.home(spec)
        # Secrets of volumes are defined when the volumes are connected, which has not happened yet.
        volumes_without_secrets = tuple(
            (volume, replace(source, secret="")) for volume, source in home.volumes
        )
        home = replace(home, volumes=volumes_without_secrets)
        planned = None if boots_from_volume(spec.volumes) else Disk(home.folder / disks.ROOT_DISK)
        xml = build_definition(spec, home, planned, made=0, rescue=rescue)
        if self._virt_type() == "test":
            # libvirt's test driver builds no command line of QEMU.
            return
        try:
            self._libvirt.ask(
                "build the command line of QEMU",
                lambda libvirt: libvirt.domainXMLToNative(COMMAND_LINE, xml, 0),
            )
        except VerbFailed as error:
            raise VerbFailed(
                "The host does not support the hardware of the server.",
                details=error.details,
                retryable=True,
            ) from error

    def rebuild(
        self,
        spec: GuestSpec,
        read_image: ImageReader,
        runs: bool,
        context: VerbContext,
        keep_ephemeral: bool,
    ) -> DomainState:
        """Replace disks and config drive by new ones, once for this fence, and start if ``runs``.

        A missing guest is made. If the disks were already replaced under this fence, the guest is
        only started if ``runs``. With ``keep_ephemeral`` the ephemeral disks that exist are kept.
        Replaced disks end a rescue. The result is the guest's state.

        Raises:
            VerbFailed: The image cannot be used, or a disk or the domain cannot be made. The guest
                keeps the old disks if a new disk could not be made.
            OSError: The config drive cannot be made. The guest keeps the old disks.
            Cancelled: The verb was cancelled, before the guest was stopped or before the start.
            Unavailable: The image service does not answer, or this host may not start guests now.
        """
        folder = self.folder(spec.server)
        domain = self._libvirt.find(spec.server)
        if domain is None or domain.marks.made != spec.fence:
            required_hardware(spec)
            plugs(spec.interfaces)
            self.volumes.placed(spec.volumes)
            open_folder(folder)
            drive = folder / "config.new"
            try:
                new_disks = [
                    *self._prepare_root_disks(spec, read_image, context),
                    *self.local.prepare(
                        folder,
                        spec,
                        [
                            disk
                            for disk in spec.disks
                            if not (
                                keep_ephemeral
                                and (folder / disk.name).exists()
                                and local_disks.is_ephemeral(disk.name)
                            )
                        ],
                    ),
                ]
                if spec.config_drive:
                    self._config_drives.build(spec, drive)
                self._stop(spec.server)
                for disk in new_disks:
                    disks.adopt(disk)
            finally:
                disks.abandon(folder)
                local_disks.abandon(folder, spec)
            if spec.config_drive:
                os.replace(drive, folder / "config")
            self._define(spec, made=spec.fence)
            disks.discard(folder, RESCUE)
        if runs:
            self.volumes.connect(spec.server, context)
            return power.start(self._libvirt, spec.server, spec.fence, context)
        return power.state(power.find(self._libvirt, spec.server))

    def rescue(
        self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        """Boot the guest from a disk made from ``image``, once for this fence. Return the state.

        The root disk becomes the second disk, or stays the first if the image has the property
        hw_rescue_bus or hw_rescue_device. A guest that is rescued under this fence already is not
        stopped, and only started or resumed.

        Raises:
            VerbFailed: The guest does not exist, or the rescue failed. A rescue that failed before
                the guest was stopped has the reason UNTOUCHED.
            Cancelled: The verb was cancelled, before the guest was stopped or before the start.
            Unavailable: The image service does not answer, or this host may not start guests now.
        """
        folder = self.folder(spec.server)
        marks = power.find(self._libvirt, spec.server).marks
        if marks.rescue != spec.fence:
            with before_guest_is_touched():
                device, bus = _rescue_place(image, required_hardware(spec))
                plugs(spec.interfaces)
                self.check(spec, Rescue(Disk(folder / RESCUE), device, bus))
            try:
                with before_guest_is_touched():
                    disk = self._prepare(spec, image, RESCUE, read_image, context)
                self._stop(spec.server)
                disks.adopt(disk)
            finally:
                disks.abandon(folder, RESCUE)
            self._define(spec, made=marks.made, rescue=Rescue(disk, device, bus))
        self.shares.mount(spec.server, context)
        self.volumes.connect(spec.server, context)
        return power.start(self._libvirt, spec.server, spec.fence, context)

    def unrescue(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        """Boot from the root disk again, remove the rescue disk, and return the guest's state.

        A guest that is not rescued is not stopped, and only started or resumed.

        Raises:
            VerbFailed: The guest does not exist, or cannot be defined or started.
            Cancelled: The verb was cancelled, before the guest was stopped or before the start.
            Unavailable: This host may not start guests now.
        """
        marks = power.find(self._libvirt, spec.server).marks
        if marks.rescue:
            required_hardware(spec)
            plugs(spec.interfaces)
            self.volumes.placed(spec.volumes)
            if context.cancelled():
                raise Cancelled
            self._stop(spec.server)
            self._define(spec, made=marks.made)
        disks.discard(self.folder(spec.server), RESCUE)
        self.shares.mount(spec.server, context)
        self.volumes.connect(spec.server, context)
        return power.start(self._libvirt, spec.server, spec.fence, context)

    def keep_only(self, server: str, has: Belongings | None) -> None:
        """Remove volumes and shares that are not in ``has``. None: remove none.

        A running guest is not changed. A paused guest keeps its shares.

        Raises:
            VerbFailed: The guest does not exist, or is paused or suspended with a volume that is
                not in ``has``, or a volume or share cannot be disconnected.
        """
        if has is not None:
            self.volumes.keep_only(self._libvirt, server, has.volumes)
            self.shares.keep_only(self._libvirt, server, has.shares)

    def settle(self, server: str, has: Belongings | None, context: VerbContext) -> None:
        """Remove volumes and shares that are not in ``has``, and attach missing needed volumes.

        Called before a start. With ``has`` None nothing is changed. Only volumes of ``has.needed``
        are attached, and only to a guest that is off.

        Raises:
            VerbFailed: As for ``keep_only``, or a needed volume cannot be attached.
            Cancelled: The verb was cancelled. Some volumes may be attached.
        """
        self.keep_only(server, has)
        if has is not None and has.needed:
            self.volumes.complete(self._libvirt, server, has.needed, context)

    def facts(self, server: str) -> HostedServer:
        """Return the facts about the server from the domain's metadata.

        The volumes and whether the server is suspended or rescued are the present ones.

        Raises:
            VerbFailed: There is no domain, or the metadata cannot be read.
        """
        domain = power.find(self._libvirt, server)
        return replace(
            _read_facts(domain.marks.facts),
            is_suspended=domain.saved,
            is_rescued=bool(domain.marks.rescue),
            volumes=[volume.volume_id for volume in self.volumes.of(server)],
        )

    def remember(self, server: str, changed: Callable[[HostedServer], HostedServer]) -> None:
        """Replace the facts in the domain's metadata with ``changed(present facts)``.

        Raises:
            VerbFailed: There is no domain, or the facts cannot be read.
        """
        text = power.find(self._libvirt, server).marks.facts
        self._libvirt.mark(server, facts=write_facts(changed(_read_facts(text))))

    def record_interface(self, server: str, interface: Interface) -> None:
        """Add an attached interface to the domain's metadata of Kilonova and of Nova.

        Raises:
            VerbFailed: There is no domain, or its metadata is missing or cannot be read.
        """
        self.remember(server, lambda facts: facts.with_interface(interface))
        self._libvirt.change_metadata(server, lambda text: nova_xml.with_interface(text, interface))

    def forget_interface(self, server: str, port_id: str) -> None:
        """Remove the interface of a port from the domain's metadata of Kilonova and of Nova."""
        self.remember(server, lambda facts: facts.without_interface(port_id))
        self._libvirt.change_metadata(
            server, lambda text: nova_xml.without_interface(text, port_id)
        )

    def pull_plug(self, server: str) -> None:
        """Destroy the domain, if there is one, drop the saved memory, and unmount the shares."""
        self._libvirt.destroy(server)
        self._libvirt.drop_saved(server)
        self.shares.unmount(server)

    def remove(self, server: str, keep_files: bool = False) -> None:
        """Remove domain, saved memory, disks and files, and disconnect the volumes. Repeatable.

        With ``keep_files`` the folder stays, because another host uses the files on shared storage.

        Raises:
            VerbFailed: A volume or share cannot be disconnected, or libvirt refuses.
        """
        folder = self.folder(server)
        self.pull_plug(server)
        self._libvirt.undefine(server)
        self.volumes.keep(server, [])
        if folder.exists() and not keep_files:
            shutil.rmtree(folder)

    def _make(self, spec: GuestSpec, read_image: ImageReader, context: VerbContext) -> DomainState:
        folder = self.folder(spec.server)
        domain, interface_plugs = self._libvirt.find(spec.server), plugs(spec.interfaces)
        if domain is None or not (domain.active or domain.saved):
            self.volumes.placed(spec.volumes)
            open_folder(folder)
            self.volumes.keep(spec.server, spec.volumes)
            self.volumes.connect(spec.server, context)
            if boots_from_volume(spec.volumes):
                context.phase(CommandPhase.MAKING_DISKS)
            else:
                image = self._fetch_image(spec, spec.image, read_image, context)
                context.phase(CommandPhase.MAKING_DISKS)
                disks.make(folder, image, spec.flavor.root_gb)
            self.local.make(folder, spec)
            if spec.config_drive:
                self._config_drives.build(spec, folder / "config")
            self._define(spec, made=domain.marks.made if domain else 0)
        else:
            self.keep_only(spec.server, spec.belongings)
            if domain.active:
                interfaces.settle(self._libvirt, spec.server, spec.fence, interface_plugs, context)
        return power.start(self._libvirt, spec.server, spec.fence, context, spec.paused)

    def _install(
        self, spec: GuestSpec, domain: GuestDomain | None, runs: bool, context: VerbContext
    ) -> DomainState:
        interface_plugs = plugs(spec.interfaces)
        if domain is None or not domain.active:
            # Saved memory does not fit the new definition.
            self._stop(spec.server)
            self.local.fit(self.folder(spec.server), spec)
            drive = self.folder(spec.server) / "config"
            if spec.config_drive and not drive.exists():
                self._config_drives.build(spec, drive)
            self._define(spec, made=domain.marks.made if domain else 0)
        elif runs:
            interfaces.settle(self._libvirt, spec.server, spec.fence, interface_plugs, context)
        if runs:
            self.volumes.connect(spec.server, context)
            return power.start(self._libvirt, spec.server, spec.fence, context, spec.paused)
        return power.state(power.find(self._libvirt, spec.server))

    def _prepare_root_disks(
        self, spec: GuestSpec, read_image: ImageReader, context: VerbContext
    ) -> list[Disk]:
        """Make the new root disk under its temporary name, and return it in a list.

        The list is empty if the server boots from a volume.
        """
        if boots_from_volume(spec.volumes):
            return []
        return [self._prepare(spec, spec.image, disks.ROOT_DISK, read_image, context)]

    def _prepare(
        self,
        spec: GuestSpec,
        image: ImageRef | None,
        name: str,
        read_image: ImageReader,
        context: VerbContext,
    ) -> Disk:
        """Fetch the image, make the disk ``name`` under its temporary name, and return the disk.

        The caller renames the disk with ``disks.adopt``.

        Raises:
            VerbFailed: The image cannot be used, or the disk cannot be made.
            Cancelled: The verb was cancelled. The caller has not stopped the guest yet.
            Unavailable: The image service does not answer.
        """
        cached = self._fetch_image(spec, image, read_image, context)
        context.phase(CommandPhase.MAKING_DISKS)
        disk = disks.plan(self.folder(spec.server), cached, name)
        disks.prepare(disk, cached, spec.flavor.root_gb)
        if context.cancelled():
            raise Cancelled
        return disk

    def _fetch_image(
        self, spec: GuestSpec, image: ImageRef | None, read_image: ImageReader, context: VerbContext
    ) -> CachedImage | None:
        return (
            self._images.fetch(image, spec.flavor.root_gb * GIBIBYTE, read_image, context)
            if image
            else None
        )

    def home(self, spec: GuestSpec) -> HostDetails:
        """Return the host's part of the server's definition. Nothing is changed on the host.

        Raises:
            VerbFailed: The id is not a UUID, libvirt refuses, or this host cannot use the
                connection, QoS or block sizes of a volume.
            NoAnswer: libvirtd does not answer.
        """
        return HostDetails(
            self.folder(spec.server),
            self._virt_type(),
            self._place(spec.assignment or HardwareAssignment()),
            self._config_drives.is_disk,
            self.spice,
            self.volumes.placed(spec.volumes),
        )

    def _define(self, spec: GuestSpec, made: int, rescue: Rescue | None = None) -> None:
        old_xml = self._libvirt.describe(spec.server, stored=True)
        addresses = {**interface_xml.addresses(old_xml), **volume_xml.addresses(old_xml)}
        home = self.home(spec)
        self.volumes.keep(spec.server, spec.volumes)
        self.shares.keep(spec.server, spec.shares)
        xml = build_definition(spec, home, root_disk(home.folder, spec), made, rescue, addresses)
        self._libvirt.define(self.shares.dress(spec.server, xml))

    def _stop(self, server: str) -> None:
        """Destroy the domain, if there is one, and drop the saved memory."""
        if self._libvirt.find(server) is not None:
            power.pull_plug(self._libvirt, server)

    @contextmanager
    def _make_failure_definite(self, server: str, undo: Callable[[str], None]) -> Iterator[None]:
        """Turn an exception into VerbFailed after a call of ``undo(server)``.

        Cancelled and Unavailable are raised unchanged and without ``undo``.

        Raises:
            NoAnswer: ``undo`` failed, so that the outcome is unknown and the verb must be repeated.
        """
        try:
            yield
        except (Cancelled, errors.Unavailable):
            raise
        except Exception as error:
            try:
                undo(server)
            except (VerbFailed, OSError) as undo_error:
                raise errors.NoAnswer(
                    f"The command for the guest of server {server} failed: {error} The undo failed too: {undo_error}"
                ) from undo_error
            if isinstance(error, VerbFailed):
                raise
            raise VerbFailed(
                "The host could not make the server's guest; see the log of the host.",
                retryable=True,
                details=f"{type(error).__name__}: {error}",
            ) from error


def root_disk(folder: Path, spec: GuestSpec) -> Disk | None:
    """Return the server's root disk on this host, or None if the server boots from a volume.

    Raises:
        VerbFailed: The disk or its backing file is missing, or the header of the disk is not
            acceptable, as in ``disks.existing``.
    """
    return None if boots_from_volume(spec.volumes) else disks.existing(folder)


def open_folder(folder: Path) -> None:
    """Make a server's folder if missing. All users, so also QEMU's user, can enter the folder."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)


def build_definition(
    spec: GuestSpec,
    home: HostDetails,
    disk: Disk | None,
    made: int,
    rescue: Rescue | None = None,
    addresses: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """Return the XML of a server's domain on a host.

    Args:
        spec: The guest.
        home: The host's part of the definition.
        disk: The root disk, or None if the server boots from a volume.
        made: Fence of the last rebuild, 0 without one.
        rescue: The disk from which a rescued guest boots, or None.
        addresses: Device addresses to keep, by MAC address or volume id.

    Raises:
        VerbFailed: The hardware or an interface of ``spec`` is not supported.
    """
    folder = home.folder
    return domain_xml(
        Domain(
            spec.server,
            spec.fence,
            spec.name,
            spec.flavor.vcpus,
            spec.flavor.memory_mb,
            home.virt_type,
            disk,
            folder / "console.log",
            folder / "config" if spec.config_drive else None,
            made,
            rescue,
            home.config_drive_is_disk,
            plugs(spec.interfaces),
            addresses or {},
            required_hardware(spec),
            home.place,
            tuple(Disk(folder / local_disk.name) for local_disk in spec.disks),
            write_facts(facts_of(spec)),
            home.spice,
            home.volumes,
            nova_xml.qualify(nova_xml.instance(spec)),
        )
    )


def write_facts(facts: HostedServer) -> str:
    """Return the facts as text for the domain's metadata.

    The text is ASCII JSON, because a tenant may use letters that XML cannot contain.
    """
    return json.dumps(to_wire(facts), separators=(",", ":"))


def _read_facts(text: str) -> HostedServer:
    try:
        return from_wire(HostedServer, json.loads(text))
    except (ValueError, TypeError, AttributeError) as problem:
        raise VerbFailed(
            "The facts about the server in the domain's metadata cannot be read.",
            details=str(problem),
        ) from problem


def _rescue_place(image: ImageRef, hardware: Hardware) -> tuple[str, str]:
    """Return (device, bus) of a rescue disk, or ("disk", "") if the image specifies neither.

    A value that the image leaves out gets a default for the machine.

    Raises:
        VerbFailed: The image's values do not fit the machine.
    """
    device, bus = (
        image.properties.get("hw_rescue_device", ""),
        image.properties.get("hw_rescue_bus", ""),
    )
    if not device and not bus:
        return "disk", ""
    device = device or "disk"
    is_q35 = hardware.options.get("machine_type") == "q35"
    bus = bus or (("sata" if is_q35 else "ide") if device == "cdrom" else "virtio")
    buses = [bus_name for bus_name in RESCUE_BUSES if bus_name != "ide" or not is_q35]
    if device not in RESCUE_DEVICES or bus not in buses or (device, bus) == ("cdrom", "virtio"):
        raise VerbFailed(
            f"A rescue disk cannot be a {device} on {bus}; set the image's hw_rescue_device to one "
            f"of {', '.join(RESCUE_DEVICES)} and hw_rescue_bus to one of {', '.join(buses)}."
        )
    return device, bus
