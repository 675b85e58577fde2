# SPDX-License-Identifier: Apache-2.0
"""The destination of a live migration: preparation and completion.

Called by ``virt.libvirt.driver``. ``live_migration`` is the source. Before the migration begins,
this module refuses every guest that cannot arrive, with the reason. Then the files that the
migration does not transfer are prepared: the backing file, the config drive and empty disks.

Invariant: no guest is started from a disk here, and the files of a running guest are not changed.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from common.domain.command_progress import CommandPhase
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import GuestSpec, HardwareAssignment
from common.domain.server_facts import facts_of
from common.domain.wire import from_wire, to_wire
from compute_agent.verb_context import Cancelled, ImageReader, Peer, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, required_hardware
from compute_agent.virt.interfaces import plugs
from compute_agent.virt.libvirt.disks import disks, local_disks
from compute_agent.virt.libvirt.disks.images import ImageCache
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import (
    BASELINE_CPU_EXPAND_FEATURES,
    Connection,
    GuestDomain,
)
from compute_agent.virt.libvirt.guests.guests import (
    HostDetails,
    LibvirtGuests,
    build_definition,
    open_folder,
    root_disk,
    write_facts,
)
from compute_agent.virt.libvirt.host import capabilities, host
from compute_agent.virt.libvirt.migration import cold_migration, live_migration
from compute_agent.virt.libvirt.migration.incoming.records import Arrival
from compute_agent.virt.libvirt.xml import nova_xml, running_domain
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from compute_agent.virt.libvirt.xml.hardware_xml import HostPlacement
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import boots_from_volume

#: Seconds after the end of a migration in which the guest must have arrived.
SETTLE_SECONDS, LOOK_SECONDS = 10.0, 0.2


def prepare(
    libvirt: Connection,
    guests: LibvirtGuests,
    images: ImageCache,
    options: live_migration.MigrationOptions,
    spec: GuestSpec,
    peer: Peer,
    shared: bool,
    cpu: JsonObject,
    read_image: ImageReader,
    context: VerbContext,
) -> JsonObject:
    """Check that the guest can come here, and prepare what the migration does not transfer.

    With ``shared`` the disks on the shared storage are verified. Otherwise empty disks are made,
    and the backing file and the config drive are fetched. A definition of the guest from an earlier
    time on this host is removed. The guest's volumes are connected. For the arguments see
    ``Driver.prepare_incoming``.

    Returns:
        The facts about this host that ``live_migrate`` at the source needs.

    Raises:
        VerbFailed: The guest cannot come here, or the preparation failed.
        Unavailable: This host may not start guests now, or the source or the image service does not
            answer.
        Cancelled: The verb was cancelled.
    """
    home = guests.home(spec)
    _check_arrival(libvirt, guests, options, spec, cpu)
    if context.cancelled():
        raise Cancelled
    if shared:
        own = [] if boots_from_volume(spec.volumes) else [disks.ROOT_DISK]
        for name in (*own, *(disk.name for disk in spec.disks)):
            disks.verify(disks.existing(home.folder, name), context)
    else:
        _prepare_files(home.folder, images, spec, peer, read_image, context)
    # Remove the definition from an earlier time on this host.
    libvirt.undefine(spec.server)
    libvirt.ensure_bridges(plug.bridge for plug in plugs(spec.interfaces))
    guests.volumes.keep(spec.server, spec.volumes)
    guests.volumes.connect(spec.server, context)
    context.require_lease()
    place = home.place
    return {
        **options.facts,
        "folder": str(home.folder),
        "virt_type": home.virt_type,
        "config_drive_is_disk": home.config_drive_is_disk,
        "spice": home.spice,
        "cpus": list(place.cpus),
        "shared_cpus": {str(numa_node): list(cpus) for numa_node, cpus in place.shared.items()},
        "most_shares": place.most_shares,
        "volumes": {volume.volume_id: to_wire(source) for volume, source in home.volumes},
    }


def build_arrival(
    guests: LibvirtGuests,
    options: live_migration.MigrationOptions,
    spec: GuestSpec,
    source: str,
    shared: bool,
) -> Arrival:
    """Return the record that permits the prepared guest to come from the host at ``source``.

    The caller stores the record with ``Incoming.expect``.

    Args:
        guests: The guests of this host.
        options: This host's options for migrations.
        spec: The guest as it will be on this host.
        source: Address of the source, as in the source's certificate.
        shared: True if the hosts share storage.

    Raises:
        VerbFailed: The prepared root disk is missing, or the guest cannot be defined.
    """
    home = guests.home(spec)
    return Arrival(
        spec.server,
        spec.fence,
        source,
        build_definition(spec, home, root_disk(home.folder, spec), made=0),
        live_migration.in_url(options.address),
        shared,
        options.native_tls,
    )


def describe_at_destination(
    spec: GuestSpec, to: JsonMapping, running: str, domain: GuestDomain
) -> str:
    """Return the domain XML of the running guest for the destination. Called at the source.

    Args:
        spec: The guest as it will be at the destination.
        to: The result of ``prepare`` at the destination.
        running: The running domain's XML.
        domain: State of the running domain.

    Raises:
        VerbFailed: The destination uses another hypervisor type, for example qemu instead of kvm,
            or ``spec`` has hardware that is not supported.
    """
    kind = running_domain.virt_type(running)
    if kind != to["virt_type"]:
        raise VerbFailed(
            f"The server runs under {kind} and the destination runs servers under {to['virt_type']}; use a cold "
            "migration.",
            retryable=True,
        )
    assignment = spec.assignment or HardwareAssignment()
    place = HostPlacement(
        tuple(assignment.numa_nodes),
        tuple(assignment.devices),
        {int(numa_node): tuple(cpus) for numa_node, cpus in to["shared_cpus"].items()},
        tuple(to["cpus"]),
        to["most_shares"],
    )
    volume_sources = to.get("volumes", {})
    home = HostDetails(
        Path(to["folder"]),
        kind,
        place,
        to["config_drive_is_disk"],
        to.get("spice", False),
        tuple(
            (volume, from_wire(VolumeSource, volume_sources[volume.volume_id]))
            for volume in spec.volumes
            if volume.volume_id in volume_sources
        ),
    )
    own = (
        disk for disk in running_domain.disks(running).values() if disk.path.name == disks.ROOT_DISK
    )
    root = None if boots_from_volume(spec.volumes) else _move_to_folder(next(own), home.folder)
    return running_domain.at_destination(
        build_definition(spec, home, root, domain.marks.made),
        running,
        replace(domain.marks, fence=spec.fence),
    )


def _move_to_folder(disk: Disk, folder: Path) -> Disk:
    """Return the disk with its paths changed to ``folder``. No file is moved."""
    base = folder / disk.base.name if disk.base else None
    return replace(disk, path=folder / disk.path.name, base=base)


def finish(
    libvirt: Connection, guests: LibvirtGuests, spec: GuestSpec, context: VerbContext
) -> GuestDomain:
    """Complete the arrival: resume a guest that ran before, and define the domain by ``spec``.

    The definition has the volumes of this host's record. A guest that is still arriving is awaited
    for ``SETTLE_SECONDS``, and then removed from here.

    Returns:
        The guest's domain.

    Raises:
        VerbFailed: The guest did not arrive, or cannot be resumed or defined.
        Unavailable: This host may not start guests now, and the guest must be resumed.
        Cancelled: The verb was cancelled while the arrival was awaited.
    """
    domain, deadline = libvirt.find(spec.server), time.monotonic() + SETTLE_SECONDS
    while domain is not None and domain.is_incoming and time.monotonic() < deadline:
        if context.cancelled():
            raise Cancelled
        time.sleep(LOOK_SECONDS)
        domain = libvirt.find(spec.server)
    if domain is not None and domain.is_incoming:
        # The guest never ran here. The source has the guest.
        libvirt.destroy(spec.server)
        domain = None
    if domain is None:
        raise VerbFailed(
            "The server did not arrive on this host.",
            details=f"libvirt has no domain {spec.server}",
        )
    running = libvirt.describe(spec.server)
    host.give_to_guest(libvirt, [own.path for own in running_domain.disks(running).values()])
    if domain.power_state == PAUSED and domain.marks.resumes:
        context.require_lease()
        libvirt.resume(spec.server)
    spec = replace(spec, volumes=guests.volumes.of(spec.server))
    home = guests.home(spec)
    disk = root_disk(home.folder, spec)
    libvirt.define(
        running_domain.with_addresses(
            build_definition(spec, home, disk, domain.marks.made), running
        )
    )
    libvirt.mark(
        spec.server, fence=spec.fence, moving=0, resumes=0, facts=write_facts(facts_of(spec))
    )
    libvirt.change_metadata(
        spec.server, lambda old_metadata: nova_xml.write(nova_xml.instance(spec))
    )
    return power.find(libvirt, spec.server)


def _check_arrival(
    libvirt: Connection,
    guests: LibvirtGuests,
    options: live_migration.MigrationOptions,
    spec: GuestSpec,
    cpu: JsonObject,
) -> None:
    """Raise VerbFailed if it is already known that the migration cannot succeed.

    A guest with a lower fence that is still arriving, from an earlier attempt, is removed from this
    host before the check whether the guest is active here.
    """
    if not options.port:
        raise VerbFailed(
            "The destination does not accept live migrations.",
            retryable=True,
            details="set [migration] live_migration_port in the configuration of this host",
        )
    required_hardware(spec)
    plugs(spec.interfaces)
    if spec.assignment and spec.assignment.devices:
        raise VerbFailed(
            "The server uses a PCI device of its host and cannot be live migrated; use a cold migration.",
            details=", ".join(spec.assignment.devices),
        )
    domain = libvirt.find(spec.server)
    if domain and domain.is_incoming and domain.fence < spec.fence:
        # An attempt that was given up may still be ending. The guest never ran here.
        libvirt.destroy(spec.server)
        domain = libvirt.find(spec.server)
    if domain and domain.active:
        raise VerbFailed(
            "A guest of the server is already active on the destination.",
            retryable=True,
            details=f"power state {domain.power_state}, fence {domain.fence}",
        )
    if missing_features := lacks(libvirt, cpu):
        raise VerbFailed(
            f"The destination's CPU lacks {', '.join(missing_features)}, which the server may use.",
            retryable=True,
        )
    guests.check(spec)


def lacks(libvirt: Connection, cpu: JsonObject) -> list[str]:
    """Return the CPU features of the source that this host lacks, sorted.

    If the architectures differ, the result is only, for example, ["the architecture aarch64"].

    Args:
        libvirt: Connection to this host's libvirtd.
        cpu: ``cpu_info`` of the source, with the features and the model that the guest may use.
            A feature of the model counts only if this host's libvirt knows the feature. {} requires
            no features.

    Raises:
        VerbFailed: libvirt refused a query.
        NoAnswer: libvirtd does not answer.
    """
    if not cpu:
        return []
    ours = capabilities.cpu_info(
        libvirt.ask("describe its CPU", lambda connection: str(connection.getCapabilities()))
    )
    if cpu.get("arch") != ours.get("arch"):
        return [f"the architecture {cpu.get('arch')}"]
    return sorted(_list_features(libvirt, cpu) - _list_features(libvirt, ours))


def _list_features(libvirt: Connection, cpu: JsonObject) -> set[str]:
    """Return the features in ``cpu``, and all features of its model by this host's libvirt.

    Args:
        libvirt: Connection to this host's libvirtd.
        cpu: A result of ``cpu_info``.
    """
    named = set(cpu.get("features", ()))
    if not cpu.get("model"):
        return named
    model = capabilities.cpu_xml(cpu)
    return named | set(
        capabilities.GuestCpu("").features(
            libvirt.ask(
                f"list the features of the CPU {cpu.get('model')}",
                lambda connection: connection.baselineCPU([model], BASELINE_CPU_EXPAND_FEATURES),
            )
        )
    )


def _prepare_files(
    folder: Path,
    images: ImageCache,
    spec: GuestSpec,
    peer: Peer,
    read_image: ImageReader,
    context: VerbContext,
) -> None:
    """Fetch the backing file and the config drive, and make empty disks of the sizes in ``spec``.

    Disks of an earlier attempt are replaced, because the migration writes only blocks that the
    guest has written.

    Raises:
        VerbFailed: There is not enough space, or a file cannot be fetched or made.
        Unavailable: The source or the image service does not answer.
        Cancelled: The verb was cancelled.
    """
    disks.require_space(folder, local_disks.room(spec))
    open_folder(folder)
    copy = cold_migration.Copy(
        peer, spec.server, context, (cold_migration.CONFIG,) if spec.config_drive else ()
    )
    own = not boots_from_volume(spec.volumes)
    image = cold_migration.fetch_base(images, spec, copy, read_image) if own else None
    context.phase(CommandPhase.MAKING_DISKS)
    disk, drive = disks.plan(folder, image), folder / cold_migration.CONFIG
    try:
        if own:
            disks.prepare(disk, image, spec.flavor.root_gb)
        if spec.config_drive:
            copy.fetch(cold_migration.CONFIG, disks.aside(drive))
            os.replace(disks.aside(drive), drive)
        if own:
            disks.adopt(disk)
        local_disks.lay_out(folder, spec)
    finally:
        disks.abandon(folder)
        local_disks.abandon(folder, spec)
        disks.aside(drive).unlink(missing_ok=True)
