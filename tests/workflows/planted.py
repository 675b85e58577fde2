# SPDX-License-Identifier: Apache-2.0
"""Planted faults: one for each kind of finding that ``kilonova doctor --fix`` mends.

Most plants write wrong values into the store. Others change hosts or external services.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from common.domain import ids, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.models import AssignedNumaNode, AttachedVolume, HardwareAssignment
from common.domain.statuses import MIGRATIONS_IN_PROGRESS
from common.domain.wire import to_wire
from common.store import cleanups, schema
from common.store.engine import now
from common.store.hosts import host_actions
from common.store.placement import allocations
from tests.workflows.scenarios import trial_of
from tests.workflows.simulator import Cloud
from tests.workflows.test_adopt import boot_lost_server
from tests.workflows.volumes import attach

#: The id of an object that does not exist.
NOBODY = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"
HOURS = 7200 * SECOND
#: A function that plants a fault, for the server with this id.
Break = Callable[[Cloud, str], None]


@dataclass(frozen=True)
class Plant:
    """A planted fault of one kind."""

    plant: Break
    #: The scenario whose preparation precedes the plant. "" leaves the cloud new, without server.
    base: str = "stop"
    #: Other kinds of findings that this fault necessarily causes. They are mended with it.
    also: frozenset[str] = frozenset()


def change(cloud: Cloud, table: sa.Table, where: Any, **values: Any) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.update(table).where(where).values(**values)))


def insert(cloud: Cloud, table: sa.Table, **values: Any) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.insert(table).values(**values)))


def delete(cloud: Cloud, table: sa.Table, where: Any) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.delete(table).where(where)))


def change_server(**values: Any) -> Break:
    """Return a function that writes these values into the server's row."""
    return lambda cloud, name: change(cloud, schema.servers, schema.servers.c.id == name, **values)


def change_stop(**values: Any) -> Break:
    """Return a function that requests a stop and writes these values into the action's row."""

    def plant(cloud: Cloud, name: str) -> None:
        action = cloud.ask(name, "os-stop")
        change(cloud, schema.actions, schema.actions.c.id == action, **values)

    return plant


def here(cloud: Cloud, name: str) -> str:
    """Return the server's host."""
    return str(cloud.show(name).host)


def elsewhere(cloud: Cloud, name: str) -> str:
    """Return the other of the cloud's two hosts."""
    return next(host for host in cloud.hosts if host != cloud.show(name).host)


def change_guest(where: Callable[[Cloud, str], str], **values: Any) -> Break:
    """Return a function that writes these values into the guest's record on a host."""

    def plant(cloud: Cloud, name: str) -> None:
        host = where(cloud, name)
        record = sa.and_(schema.guests.c.server_id == name, schema.guests.c.host == host)
        change(cloud, schema.guests, record, **values)

    return plant


def change_port(**values: Any) -> Break:
    """Return a function that changes the server's port in the network service."""

    def plant(cloud: Cloud, name: str) -> None:
        ports = cloud.networks.held.values()
        next(port for port in ports if port["device_id"] == name).update(values)

    return plant


def combine(*plants: Break) -> Break:
    """Return a function that plants several faults."""

    def plant(cloud: Cloud, name: str) -> None:
        for plant_part in plants:
            plant_part(cloud, name)

    return plant


def remove_domain(cloud: Cloud, name: str) -> None:
    """Remove the server's domain from all hosts, as an operator with virsh does."""
    for host in cloud.hosts.values():
        host.driver.host.guests.pop(name, None)


def remove_port(cloud: Cloud, name: str) -> None:
    for port in [port for port in cloud.networks.held.values() if port["device_id"] == name]:
        del cloud.networks.held[port["id"]]


def delete_guest_record(cloud: Cloud, name: str) -> None:
    delete(cloud, schema.guests, schema.guests.c.server_id == name)


def delete_allocation(cloud: Cloud, name: str) -> None:
    cloud.store.write(lambda tx: allocations.release(tx, [(name, here(cloud, name))]))


def create_server_without_action(cloud: Cloud, name: str) -> None:
    """Create a server that stays in BUILDING, because the create action is missing."""
    [new_server] = cloud.create(networks=[])
    delete(cloud, schema.actions, schema.actions.c.server_id == new_server)
    change(cloud, schema.servers, schema.servers.c.id == new_server, action=None, task_state=None)


def set_ended_action(cloud: Cloud, name: str) -> None:
    """Let the server's row name an ended action as the running action."""
    ended = sa.select(schema.actions.c.id).where(schema.actions.c.server_id == name)
    change(
        cloud, schema.servers, schema.servers.c.id == name, action=ended.limit(1).scalar_subquery()
    )


def raise_server_fence(cloud: Cloud, name: str) -> None:
    """Request a stop and raise the fence of the server's row above that of the action."""
    cloud.ask(name, "os-stop")
    change_server(fence=schema.servers.c.fence + 7)(cloud, name)


def clear_action(cloud: Cloud, name: str) -> None:
    """Request a stop and remove the action from the server's row."""
    cloud.ask(name, "os-stop")
    change_server(action=None, task_state=None)(cloud, name)


def unset_sent_at(cloud: Cloud, name: str) -> None:
    """Lose the command of a stop, and remove the sending time from the action's row."""
    cloud.lose = lambda kind: kind == "do"
    action = cloud.ask(name, "os-stop")
    cloud.advance()
    cloud.lose = lambda kind: False
    change(cloud, schema.actions, schema.actions.c.id == action, sent_at=None)


def add_allocation(cloud: Cloud, name: str, host: str) -> None:
    """Add an allocation of the server on this host."""
    row = cloud.show(name)
    holder = {"id": name, "type": "server", "project_id": row.project_id, "user_id": row.user_id}
    amounts = {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1}
    cloud.store.write(lambda tx: allocations.put(tx, holder, host, amounts))


def delay_guest_removal(cloud: Cloud, name: str) -> None:
    """Add a guest to remove on the other host, with a command that was sent in the future."""
    host = elsewhere(cloud, name)
    add_allocation(cloud, name, host)
    insert(
        cloud,
        schema.guests,
        server_id=name,
        host=host,
        fence=cloud.show(name).fence,
        wanted="absent",
        may_run=False,
        keeps_files=False,
        changed_at=now(),
        sent_at=now() + HOURS,
    )


def transfer_allocation_to_migration(cloud: Cloud, name: str) -> None:
    """Transfer the allocation of the server's guest to the migration."""
    move = cloud.migration(name)
    change(
        cloud, schema.allocations, schema.allocations.c.consumer_id == name, consumer_id=move.uuid
    )
    delete(cloud, schema.consumers, schema.consumers.c.id == name)
    change_guest(here, holder=move.uuid)(cloud, name)


def add_second_migration(cloud: Cloud, name: str) -> None:
    row = cloud.store.read(
        lambda tx: (
            tx.execute(sa.select(schema.migrations).where(schema.migrations.c.server_id == name))
            .mappings()
            .one()
        )
    )
    insert(cloud, schema.migrations, **{**row, "id": row["id"] + 1, "uuid": ids.new()})


def confirm_only_migration(cloud: Cloud, name: str) -> None:
    """Set the rows as after a confirm, but keep record and allocation on the source."""
    change(cloud, schema.migrations, schema.migrations.c.server_id == name, status="confirmed")
    flavor = cloud.show(name).flavor
    values = {"vcpus": flavor["vcpus"], "memory_mb": flavor["memory_mb"]}
    change_server(vm_state=states.ACTIVE, **values)(cloud, name)


def run_guest_on_both_hosts(cloud: Cloud, name: str) -> None:
    """Run the server's guest on the other host, too."""
    guest_copy = deepcopy(cloud.hosts[here(cloud, name)].driver.host.guests[name])
    cloud.hosts[elsewhere(cloud, name)].driver.host.guests[name] = guest_copy


def add_share(cloud: Cloud, name: str, status: str) -> None:
    """Add a share of the server with this status, and the access rule of the share."""
    insert(
        cloud,
        schema.share_mappings,
        uuid=ids.new(),
        server_id=name,
        share_id=NOBODY,
        tag="data",
        status=status,
        protocol="NFS",
        export_location="192.0.2.9:/one",
        access_to="192.0.2.1",
        created_at=now(),
        updated_at=now(),
    )
    cloud.shares.rules[NOBODY, "192.0.2.1"] = 0


def add_unknown_share_rule(cloud: Cloud, name: str) -> None:
    """Allow the server's host access to a share that no server has, as a late call does."""
    change(cloud, schema.hosts, schema.hosts.c.name == here(cloud, name), host_ip="192.0.2.7")
    cloud.shares.rules[NOBODY, "192.0.2.7"] = 0


def leave_stray_files(cloud: Cloud, name: str) -> None:
    """Leave files of the server on the other host."""
    guest_copy = deepcopy(cloud.hosts[here(cloud, name)].driver.host.guests[name])
    cloud.hosts[elsewhere(cloud, name)].driver.host.keep_files(name, guest_copy)


def plant_share_of_missing_server(cloud: Cloud, name: str) -> None:
    add_share(cloud, ids.new(), "inactive")


def leave_share_attaching(cloud: Cloud, name: str) -> None:
    add_share(cloud, name, "attaching")
    change_server(shares=1)(cloud, name)


def add_block_device(cloud: Cloud, server_id: str, volume: str) -> None:
    """Add the row of an attached volume."""
    insert(
        cloud,
        schema.block_devices,
        uuid=ids.new(),
        server_id=server_id,
        volume_id=volume,
        status="attached",
        source_type="volume",
        device_name="/dev/vdb",
        created_at=now(),
        updated_at=now(),
    )


def plant_volume_of_missing_server(cloud: Cloud, name: str) -> None:
    volume, missing_server = cloud.volumes.make(), ids.new()
    cloud.volumes.attach(volume, missing_server)
    add_block_device(cloud, missing_server, volume)


def add_unknown_attachment(cloud: Cloud, name: str) -> None:
    """Attach a volume to the server in the block storage service only."""
    cloud.volumes.attach(cloud.volumes.make(), name)


def leave_attachment_incomplete(cloud: Cloud, name: str) -> None:
    """Attach a volume, and set the attachment back to the status attaching."""
    attach(cloud, name, cloud.volumes.make())
    cloud.settle()
    [held] = cloud.volumes.state.held.values()
    held.attachment = replace(held.attachment, status="attaching")


def attach_volume(cloud: Cloud, name: str, **values: Any) -> None:
    """Attach a volume to the server and write these values into the volume's row."""
    attach(cloud, name, cloud.volumes.make())
    cloud.settle()
    if values:
        change(cloud, schema.block_devices, sa.true(), **values)


def disconnect_volume(cloud: Cloud, name: str) -> None:
    """Attach a volume and disconnect it, as an undo that does not connect the volume again."""
    attach_volume(cloud, name, status="reserved", connection=None)
    [held] = cloud.volumes.state.held.values()
    held.attachment, held.host = replace(held.attachment, status="reserved", connection={}), None
    cloud.hosts[here(cloud, name)].driver.disconnect_volumes(name, cloud.show(name).fence)


def remove_volume_from_guest(cloud: Cloud, name: str) -> None:
    """Attach a volume and remove it from the guest by hand."""
    attach_volume(cloud, name)
    guest = cloud.hosts[here(cloud, name)].driver.host.guests[name]
    guest.volumes, guest.connected = [], []


def connect_unknown_volume(cloud: Cloud, name: str) -> None:
    """Connect another volume to the guest, as if the guest ran on while the host was down."""
    other = AttachedVolume(cloud.volumes.make(), "/dev/vdb", 1, {"driver_volume_type": "nbd"})
    guest = cloud.hosts[here(cloud, name)].driver.host.guests[name]
    guest.volumes = [*guest.volumes, other]
    guest.connect()


def add_consumer_without_allocation(cloud: Cloud, name: str) -> None:
    values = {"type": "server", "project_id": "p", "user_id": "u", "generation": 0}
    insert(cloud, schema.consumers, id=ids.new(), created_at=now(), **values)


def add_provider_without_host(cloud: Cloud, name: str) -> None:
    uuid = ids.new()
    values = {"uuid": uuid, "root_uuid": uuid, "name": "h9", "host": "h9"}
    insert(cloud, schema.providers, **values, created_at=now(), changed_at=now())


def delete_inventories(cloud: Cloud, name: str) -> None:
    """Delete the inventories of the host without the server."""
    providers = sa.select(schema.providers.c.id).where(
        schema.providers.c.host == elsewhere(cloud, name)
    )
    delete(cloud, schema.inventories, schema.inventories.c.provider_id.in_(providers))


def lease_drain_for_hours(cloud: Cloud, name: str) -> None:
    """Begin a drain of h2 that a missing conductor has leased for hours."""
    context = RequestContext.of_ourselves("")
    action = cloud.store.write(
        lambda tx: host_actions.begin(
            tx, "h2", host_actions.Name.DRAIN, host_actions.Arguments(), context
        )
    )
    row = schema.host_actions.c.id == action.id
    change(cloud, schema.host_actions, row, locked_by="c9/1", locked_until=now() + HOURS)


def delay_cleanup(cloud: Cloud, name: str) -> None:
    """Record a cleanup that is due only after 60 hours."""
    cloud.store.write(lambda tx: cleanups.ask(tx, cleanups.IMAGE, NOBODY, name))
    change(cloud, schema.cleanups, sa.true(), due_at=now() + 30 * HOURS)


def add_port_of_missing_server(cloud: Cloud, name: str) -> None:
    values = {"network_id": "n1", "device_id": NOBODY, "device_owner": "compute:nova"}
    cloud.networks.create([{**values, "binding:host_id": "h1"}])


def bind_port_to_both_hosts(cloud: Cloud, name: str) -> None:
    ports = cloud.networks.held.values()
    server_port = next(port for port in ports if port["device_id"] == name)
    cloud.networks.bind_also(server_port, elsewhere(cloud, name))


def create_image_without_data(cloud: Cloud, name: str) -> None:
    cloud.images.create({"id": NOBODY, "instance_uuid": name})


def boot_server_without_rows(cloud: Cloud, name: str) -> None:
    """Run a guest whose server's rows were lost in a fail-over of the database."""
    boot_lost_server(cloud)


def remove_server_from_host(cloud: Cloud, name: str) -> None:
    """Remove domain, record, allocation and host of the server, and unbind the server's port."""
    remove_domain(cloud, name)
    delete_guest_record(cloud, name)
    delete_allocation(cloud, name)
    change_server(host=None)(cloud, name)
    change_port(**{"binding:host_id": ""})(cloud, name)


_CPU = to_wire(HardwareAssignment([AssignedNumaNode(0, [0], {"0": 16}, 4, 0)]))
_OFFLOADED = change_server(vm_state=states.SHELVED_OFFLOADED, host=None)
_UNBOUND = change_port(**{"binding:host_id": ""})
_H2 = schema.services.c.host == "h2"
_BEAT = sa.and_(schema.heartbeats.c.host == "h2", schema.heartbeats.c.binary == "nova-compute")
_VCPU = schema.allocations.c.resource_class == "VCPU"

PLANTS: dict[str, Plant] = {
    "task-state": Plant(change_server(task_state=states.POWERING_OFF)),
    "building-idle": Plant(create_server_without_action),
    "nowhere": Plant(remove_server_from_host),
    "shelved-without-image": Plant(change_server(shelved_image_id=None), "unshelve"),
    "resting-since": Plant(change_server(shelved_at=None), "unshelve_here"),
    "lock": Plant(change_server(locked=True)),
    "held-by-ended": Plant(set_ended_action),
    "fence-of-action": Plant(raise_server_fence),
    "holds-nothing": Plant(clear_action),
    "due": Plant(change_stop(due_at=None)),
    "never-sent": Plant(unset_sent_at),
    "lease-of-action": Plant(change_stop(owner="c9/1", lease_until=now() + HOURS)),
    "stuck": Plant(change_stop(state="stuck", due_at=None, cause="odd", failures=10)),
    "overdue": Plant(change_stop(due_at=now() - 700 * SECOND, workflow="of_old")),
    "one-guest": Plant(
        change_guest(elsewhere, may_run=True), "confirm_resize", frozenset({"kept-may-run"})
    ),
    "guest-of-gone-server": Plant(combine(remove_port, change_server(deleted=1))),
    "guest-elsewhere": Plant(combine(_OFFLOADED, _UNBOUND)),
    "no-guest-record": Plant(
        delete_guest_record, also=frozenset({"allocation-of-nothing", "domain-known"})
    ),
    "guest-of-no-move": Plant(
        confirm_only_migration, "confirm_resize", frozenset({"allocation-exact"})
    ),
    "kept-may-run": Plant(
        combine(change_guest(elsewhere, may_run=True), change_guest(here, may_run=False)),
        "confirm_resize",
    ),
    "held-by-no-migration": Plant(transfer_allocation_to_migration, "confirm_resize"),
    "one-move": Plant(add_second_migration, "confirm_resize"),
    "move-without-action": Plant(
        lambda cloud, name: change(
            cloud, schema.migrations, sa.true(), status=MIGRATIONS_IN_PROGRESS[0]
        ),
        "confirm_resize",
    ),
    "resized-without-move": Plant(change_server(vm_state=states.RESIZED)),
    "removal-sent": Plant(delay_guest_removal),
    "domain-known": Plant(boot_server_without_rows, "", frozenset({"port-of-nobody"})),
    "two-domains": Plant(run_guest_on_both_hosts, also=frozenset({"domain-known"})),
    "guest-there": Plant(remove_domain),
    "counted": Plant(change_server(vcpus=7)),
    "shares": Plant(change_server(shares=2)),
    "shares-of-gone": Plant(plant_share_of_missing_server),
    "volumes": Plant(change_server(volumes=3)),
    "volumes-of-gone": Plant(plant_volume_of_missing_server),
    "attachment-of-server": Plant(add_unknown_attachment),
    "attachment-incomplete": Plant(leave_attachment_incomplete),
    "volume-of-another": Plant(connect_unknown_volume),
    "volume-in-error": Plant(lambda cloud, name: attach_volume(cloud, name, status="error")),
    "volume-elsewhere": Plant(disconnect_volume, "start"),
    "volume-not-in-guest": Plant(remove_volume_from_guest),
    "share-in-transit": Plant(leave_share_attaching),
    "allocation-of-nothing": Plant(
        lambda cloud, name: add_allocation(cloud, name, elsewhere(cloud, name))
    ),
    "guest-without-allocation": Plant(delete_allocation),
    "allocation-exact": Plant(lambda cloud, name: change(cloud, schema.allocations, _VCPU, used=2)),
    "consumer-of-nothing": Plant(add_consumer_without_allocation),
    "no-consumer": Plant(lambda cloud, name: delete(cloud, schema.consumers, sa.true())),
    "assignment-not-asked-for": Plant(change_guest(here, assignment=_CPU)),
    "group-member": Plant(
        lambda cloud, name: insert(
            cloud, schema.server_group_members, group_id=NOBODY, server_id=name
        )
    ),
    "disabled-trait": Plant(lambda cloud, name: change(cloud, schema.services, _H2, disabled=True)),
    "aggregate-host": Plant(
        lambda cloud, name: insert(cloud, schema.aggregate_hosts, aggregate_id=9, host="h1")
    ),
    "host-without-service": Plant(lambda cloud, name: delete(cloud, schema.heartbeats, _BEAT)),
    "host-without-provider": Plant(delete_inventories),
    "provider-without-host": Plant(add_provider_without_host),
    "heartbeat": Plant(
        lambda cloud, name: change(cloud, schema.heartbeats, _BEAT, seen_at=now() + HOURS)
    ),
    "host-action-lease": Plant(lease_drain_for_hours),
    "cleanup": Plant(delay_cleanup),
    "duty": Plant(
        lambda cloud, name: insert(
            cloud, schema.leases, name="notifications", owner="c9/1", until=now() + HOURS
        )
    ),
    "port-of-nobody": Plant(add_port_of_missing_server),
    "port-elsewhere": Plant(_UNBOUND),
    "port-twice": Plant(bind_port_to_both_hosts),
    "interface-of-server": Plant(remove_port),
    "image-in-transit": Plant(create_image_without_data),
    "files-elsewhere": Plant(leave_stray_files),
    "share-rule-of-nobody": Plant(add_unknown_share_rule),
}


def plant_kind(cloud: Cloud, kind: str, plants: Mapping[str, Plant] = PLANTS) -> str:
    """Prepare the cloud, which must be new, plant a fault and return the server's id."""
    plant = plants[kind]
    name = trial_of(cloud, plant.base).server if plant.base else ""
    plant.plant(cloud, name)
    return name
