# SPDX-License-Identifier: Apache-2.0
"""A guest that comes while it runs: what must be here before, and what it becomes when it is here.

Called by ``virt.libvirt.driver``; ``live_migration`` is the other end. Before the migration begins
whatever could keep it from ending well is refused with its reason, and what it does not bring is
laid out: base image, config drive, a disk to be filled. Must stay true: nothing here starts a guest
from its disk, and files under a running guest are not touched.
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
    described,
    open_folder,
    root_disk,
    written,
)
from compute_agent.virt.libvirt.host import capabilities, host
from compute_agent.virt.libvirt.migration import cold_migration, live_migration
from compute_agent.virt.libvirt.migration.incoming.records import Arrival
from compute_agent.virt.libvirt.xml import nova_xml, running_domain
from compute_agent.virt.libvirt.xml.domain_xml import Disk
from compute_agent.virt.libvirt.xml.hardware_xml import HostPlacement
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import boots_from_volume

#: Seconds in which a guest whose migration is over must be here, whole.
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
    """Whether the guest can come; if so its files are here but for what the migration brings.
    Returns what the source needs to know."""
    home = guests.home(spec)
    _refuse(libvirt, guests, options, spec, cpu)
    if context.cancelled():
        raise Cancelled
    if shared:
        own = [] if boots_from_volume(spec.volumes) else [disks.ROOT_DISK]
        for name in (*own, *(one.name for one in spec.disks)):
            disks.verify(disks.existing(home.folder, name), context)
    else:
        _lay_out(home.folder, images, spec, peer, read_image, context)
    libvirt.undefine(spec.server)  # a description of when it was here before
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
        "volumes": {one.volume_id: to_wire(source) for one, source in home.volumes},
    }


def expected(
    guests: LibvirtGuests,
    options: live_migration.MigrationOptions,
    spec: GuestSpec,
    source: str,
    shared: bool,
) -> Arrival:
    """The guest that was prepared, as it may come from the host whose address is ``source``."""
    home = guests.home(spec)
    return Arrival(
        spec.server,
        spec.fence,
        source,
        described(spec, home, root_disk(home.folder, spec), made=0),
        live_migration.in_url(options.address),
        shared,
        options.native_tls,
    )


def describe_at_destination(
    spec: GuestSpec, to: JsonMapping, running: str, found: GuestDomain
) -> str:
    """The guest that runs here as the host which said ``to`` shall have it. VerbFailed when it
    cannot."""
    kind = running_domain.virt_type(running)
    if kind != to["virt_type"]:
        raise VerbFailed(
            f"The server runs under {kind} and the destination runs servers under {to['virt_type']}; it "
            "can be moved without live migration.",
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
    there = to.get("volumes", {})
    home = HostDetails(
        Path(to["folder"]),
        kind,
        place,
        to["config_drive_is_disk"],
        to.get("spice", False),
        tuple(
            (one, from_wire(VolumeSource, there[one.volume_id]))
            for one in spec.volumes
            if one.volume_id in there
        ),
    )
    own = (
        one for one in running_domain.disks(running).values() if one.path.name == disks.ROOT_DISK
    )
    disk = None if boots_from_volume(spec.volumes) else _there(next(own), home.folder)
    return running_domain.at_destination(
        described(spec, home, disk, found.marks.made),
        running,
        replace(found.marks, fence=spec.fence),
    )


def _there(disk: Disk, folder: Path) -> Disk:
    """The disk as its destination has it in this folder."""
    base = folder / disk.base.name if disk.base else None
    return replace(disk, path=folder / disk.path.name, base=base)


def finish(
    libvirt: Connection, guests: LibvirtGuests, spec: GuestSpec, context: VerbContext
) -> GuestDomain:
    """The guest that came runs here, or waits as it did there, and is defined as ``spec`` says."""
    found, deadline = libvirt.find(spec.server), time.monotonic() + SETTLE_SECONDS
    while found is not None and found.is_incoming and time.monotonic() < deadline:
        if context.cancelled():
            raise Cancelled
        time.sleep(LOOK_SECONDS)
        found = libvirt.find(spec.server)
    if found is not None and found.is_incoming:
        libvirt.destroy(spec.server)  # it never ran here: its source has it, whole
        found = None
    if found is None:
        raise VerbFailed(
            "The server did not arrive on this host.",
            details=f"libvirt knows no domain {spec.server}",
        )
    running = libvirt.describe(spec.server)
    host.give_to_guest(libvirt, [one.path for one in running_domain.disks(running).values()])
    if found.power_state == PAUSED and found.marks.resumes:
        context.require_lease()
        libvirt.resume(spec.server)
    spec = replace(spec, volumes=guests.volumes.of(spec.server))
    home = guests.home(spec)
    disk = root_disk(home.folder, spec)
    libvirt.define(running_domain.placed(described(spec, home, disk, found.marks.made), running))
    libvirt.mark(spec.server, fence=spec.fence, moving=0, resumes=0, facts=written(facts_of(spec)))
    libvirt.change_metadata(spec.server, lambda known: nova_xml.write(nova_xml.instance(spec)))
    return power.find(libvirt, spec.server)


def _refuse(
    libvirt: Connection,
    guests: LibvirtGuests,
    options: live_migration.MigrationOptions,
    spec: GuestSpec,
    cpu: JsonObject,
) -> None:
    """All that could be known now to go wrong later."""
    if not options.port:
        raise VerbFailed(
            "The host takes no servers in while they run.",
            retryable=True,
            details="set [migration] live_migration_port in its configuration",
        )
    required_hardware(spec)
    plugs(spec.interfaces)
    if spec.assignment and spec.assignment.devices:
        raise VerbFailed(
            "The server holds a device of its host and cannot be moved while it runs.",
            details=", ".join(spec.assignment.devices),
        )
    found = libvirt.find(spec.server)
    if found and found.is_incoming and found.fence < spec.fence:
        # an attempt that was given up, and may still be ending; it never ran here
        libvirt.destroy(spec.server)
        found = libvirt.find(spec.server)
    if found and found.active:
        raise VerbFailed(
            "A guest of the server is on the host already.",
            retryable=True,
            details=f"power state {found.power_state}, fence {found.fence}",
        )
    if lacking := lacks(libvirt, cpu):
        raise VerbFailed(
            f"The host's CPU lacks {', '.join(lacking)}, which the server may use.", retryable=True
        )
    guests.check(spec)


def lacks(libvirt: Connection, cpu: JsonObject) -> list[str]:
    """What a CPU, as ``cpu_info`` describes it, has and this host's has not; sorted. Of the
    features of its model only those that libvirt knows of count."""
    if not cpu:
        return []
    ours = capabilities.cpu_info(
        libvirt.ask("describe its CPU", lambda connection: str(connection.getCapabilities()))
    )
    if cpu.get("arch") != ours.get("arch"):
        return [f"the architecture {cpu.get('arch')}"]
    return sorted(_features(libvirt, cpu) - _features(libvirt, ours))


def _features(libvirt: Connection, cpu: JsonObject) -> set[str]:
    """Those that are named, and those of the model."""
    named = set(cpu.get("features", ()))
    if not cpu.get("model"):
        return named
    model = capabilities.cpu_xml(cpu)
    return named | set(
        capabilities.GuestCpu("").features(
            libvirt.ask(
                f"spell out the CPU {cpu.get('model')}",
                lambda connection: connection.baselineCPU([model], BASELINE_CPU_EXPAND_FEATURES),
            )
        )
    )


def _lay_out(
    folder: Path,
    images: ImageCache,
    spec: GuestSpec,
    peer: Peer,
    read_image: ImageReader,
    context: VerbContext,
) -> None:
    """Base, empty disks of their sizes, and the config drive as the guest knows it. What an earlier
    try has left of the disks goes: the migration fills in only what the guest has written."""
    disks.require_space(folder, local_disks.room(spec))
    open_folder(folder)
    copy = cold_migration.Copy(
        peer, spec.server, context, (cold_migration.CONFIG,) if spec.config_drive else ()
    )
    own = not boots_from_volume(spec.volumes)
    image = cold_migration.fetch_base(images, spec, copy, read_image) if own else None
    context.phase(CommandPhase.MAKING_DISKS)
    disk, drive = disks.planned(folder, image), folder / cold_migration.CONFIG
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
