# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a cloud, planted by hand: one plant for each kind of finding that
``kilonova doctor --fix`` mends."""

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

NOBODY = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"
HOURS = 7200 * SECOND
Break = Callable[[Cloud, str], None]


@dataclass(frozen=True)
class Plant:
    """How a kind is planted. ``base``: the workflow before which the cloud stands; ``also``: kinds
    that cannot but be found with it, and are mended with it."""

    plant: Break
    base: str = "stop"
    also: frozenset[str] = frozenset()


def change(cloud: Cloud, table: sa.Table, where: Any, **values: Any) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.update(table).where(where).values(**values)))


def insert(cloud: Cloud, table: sa.Table, **values: Any) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.insert(table).values(**values)))


def delete(cloud: Cloud, table: sa.Table, where: Any) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.delete(table).where(where)))


def server(**values: Any) -> Break:
    """Its row says so."""
    return lambda cloud, name: change(cloud, schema.servers, schema.servers.c.id == name, **values)


def of_stop(**values: Any) -> Break:
    """A stop that was asked for has these values in its row."""

    def plant(cloud: Cloud, name: str) -> None:
        action = cloud.ask(name, "os-stop")
        change(cloud, schema.actions, schema.actions.c.id == action, **values)

    return plant


def here(cloud: Cloud, name: str) -> str:
    return str(cloud.show(name).host)


def elsewhere(cloud: Cloud, name: str) -> str:
    """The other of the two hosts."""
    return next(host for host in cloud.hosts if host != cloud.show(name).host)


def guest(where: Callable[[Cloud, str], str], **values: Any) -> Break:
    def plant(cloud: Cloud, name: str) -> None:
        host = where(cloud, name)
        of_it = sa.and_(schema.guests.c.server_id == name, schema.guests.c.host == host)
        change(cloud, schema.guests, of_it, **values)

    return plant


def port(**values: Any) -> Break:
    """The server's port."""

    def plant(cloud: Cloud, name: str) -> None:
        next(one for one in cloud.networks.held.values() if one["device_id"] == name).update(values)

    return plant


def together(*plants: Break) -> Break:
    def plant(cloud: Cloud, name: str) -> None:
        for one in plants:
            one(cloud, name)

    return plant


def without_domain(cloud: Cloud, name: str) -> None:
    """It was removed by hand at its host."""
    for host in cloud.hosts.values():
        host.driver.host.guests.pop(name, None)


def without_port(cloud: Cloud, name: str) -> None:
    for one in [one for one in cloud.networks.held.values() if one["device_id"] == name]:
        del cloud.networks.held[one["id"]]


def without_record(cloud: Cloud, name: str) -> None:
    delete(cloud, schema.guests, schema.guests.c.server_id == name)


def without_allocation(cloud: Cloud, name: str) -> None:
    cloud.store.write(lambda tx: allocations.release(tx, [(name, here(cloud, name))]))


def building(cloud: Cloud, name: str) -> None:
    """A server that nobody builds."""
    [made] = cloud.create(networks=[])
    delete(cloud, schema.actions, schema.actions.c.server_id == made)
    change(cloud, schema.servers, schema.servers.c.id == made, action=None, task_state=None)


def held_by_ended(cloud: Cloud, name: str) -> None:
    ended = sa.select(schema.actions.c.id).where(schema.actions.c.server_id == name)
    change(
        cloud, schema.servers, schema.servers.c.id == name, action=ended.limit(1).scalar_subquery()
    )


def lower_fence(cloud: Cloud, name: str) -> None:
    """Its row has a fence that its action does not know."""
    cloud.ask(name, "os-stop")
    server(fence=schema.servers.c.fence + 7)(cloud, name)


def holds_nothing(cloud: Cloud, name: str) -> None:
    cloud.ask(name, "os-stop")
    server(action=None, task_state=None)(cloud, name)


def never_sent(cloud: Cloud, name: str) -> None:
    cloud.lose = lambda kind: kind == "do"
    action = cloud.ask(name, "os-stop")
    cloud.advance()
    cloud.lose = lambda kind: False
    change(cloud, schema.actions, schema.actions.c.id == action, sent_at=None)


def put(cloud: Cloud, name: str, host: str) -> None:
    """It holds resources there."""
    row = cloud.show(name)
    holder = {"id": name, "type": "server", "project_id": row.project_id, "user_id": row.user_id}
    amounts = {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1}
    cloud.store.write(lambda tx: allocations.put(tx, holder, host, amounts))


def debt_ahead(cloud: Cloud, name: str) -> None:
    host = elsewhere(cloud, name)
    put(cloud, name, host)
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


def held_by_move(cloud: Cloud, name: str) -> None:
    """What its guest holds where it is now is the migration's."""
    move = cloud.migration(name)
    change(
        cloud, schema.allocations, schema.allocations.c.consumer_id == name, consumer_id=move.uuid
    )
    delete(cloud, schema.consumers, schema.consumers.c.id == name)
    guest(here, holder=move.uuid)(cloud, name)


def second_move(cloud: Cloud, name: str) -> None:
    row = cloud.store.read(
        lambda tx: (
            tx.execute(sa.select(schema.migrations).where(schema.migrations.c.server_id == name))
            .mappings()
            .one()
        )
    )
    insert(cloud, schema.migrations, **{**row, "id": row["id"] + 1, "uuid": ids.new()})


def ended_move(cloud: Cloud, name: str) -> None:
    """The migration is over, and what it kept is there."""
    change(cloud, schema.migrations, schema.migrations.c.server_id == name, status="confirmed")
    flavor = cloud.show(name).flavor
    values = {"vcpus": flavor["vcpus"], "memory_mb": flavor["memory_mb"]}
    server(vm_state=states.ACTIVE, **values)(cloud, name)


def twin(cloud: Cloud, name: str) -> None:
    """It runs on another host too."""
    found = deepcopy(cloud.hosts[here(cloud, name)].driver.host.guests[name])
    cloud.hosts[elsewhere(cloud, name)].driver.host.guests[name] = found


def share(cloud: Cloud, name: str, status: str) -> None:
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


def strange_rule(cloud: Cloud, name: str) -> None:
    """A call to the service was given up, and done later."""
    change(cloud, schema.hosts, schema.hosts.c.name == here(cloud, name), host_ip="192.0.2.7")
    cloud.shares.rules[NOBODY, "192.0.2.7"] = 0


def stray_files(cloud: Cloud, name: str) -> None:
    """The other host has kept what it had of it."""
    found = deepcopy(cloud.hosts[here(cloud, name)].driver.host.guests[name])
    cloud.hosts[elsewhere(cloud, name)].driver.host.keep_files(name, found)


def share_of_gone(cloud: Cloud, name: str) -> None:
    share(cloud, ids.new(), "inactive")


def share_in_transit(cloud: Cloud, name: str) -> None:
    share(cloud, name, "attaching")
    server(shares=1)(cloud, name)


def block_device(cloud: Cloud, server_id: str, volume: str) -> None:
    """A row of a volume that its server has."""
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


def volume_of_gone(cloud: Cloud, name: str) -> None:
    volume, gone = cloud.volumes.make(), ids.new()
    cloud.volumes.attach(volume, gone)
    block_device(cloud, gone, volume)


def strange_attachment(cloud: Cloud, name: str) -> None:
    cloud.volumes.attach(cloud.volumes.make(), name)


def half_attached(cloud: Cloud, name: str) -> None:
    attach(cloud, name, cloud.volumes.make())
    cloud.settle()
    [held] = cloud.volumes.state.held.values()
    held.attachment = replace(held.attachment, status="attaching")


def attached(cloud: Cloud, name: str, **values: Any) -> None:
    """It has a volume, whose row says so."""
    attach(cloud, name, cloud.volumes.make())
    cloud.settle()
    if values:
        change(cloud, schema.block_devices, sa.true(), **values)


def volume_nowhere(cloud: Cloud, name: str) -> None:
    """It was reserved on the way back of an action, and not connected again."""
    attached(cloud, name, status="reserved", connection=None)
    [held] = cloud.volumes.state.held.values()
    held.attachment, held.host = replace(held.attachment, status="reserved", connection={}), None
    cloud.hosts[here(cloud, name)].driver.disconnect_volumes(name, cloud.show(name).fence)


def volume_not_seen(cloud: Cloud, name: str) -> None:
    attached(cloud, name)
    guest = cloud.hosts[here(cloud, name)].driver.host.guests[name]
    guest.volumes, guest.connected = [], []


def foreign_volume(cloud: Cloud, name: str) -> None:
    """Its guest ran on while its host counted as dead."""
    other = AttachedVolume(cloud.volumes.make(), "/dev/vdb", 1, {"driver_volume_type": "nbd"})
    guest = cloud.hosts[here(cloud, name)].driver.host.guests[name]
    guest.volumes = [*guest.volumes, other]
    guest.connect()


def consumer(cloud: Cloud, name: str) -> None:
    values = {"type": "server", "project_id": "p", "user_id": "u", "generation": 0}
    insert(cloud, schema.consumers, id=ids.new(), created_at=now(), **values)


def provider(cloud: Cloud, name: str) -> None:
    uuid = ids.new()
    values = {"uuid": uuid, "root_uuid": uuid, "name": "h9", "host": "h9"}
    insert(cloud, schema.providers, **values, created_at=now(), changed_at=now())


def no_inventory(cloud: Cloud, name: str) -> None:
    found = sa.select(schema.providers.c.id).where(
        schema.providers.c.host == elsewhere(cloud, name)
    )
    delete(cloud, schema.inventories, schema.inventories.c.provider_id.in_(found))


def drain(cloud: Cloud, name: str) -> None:
    context = RequestContext.of_ourselves("")
    action = cloud.store.write(
        lambda tx: host_actions.begin(
            tx, "h2", host_actions.Name.DRAIN, host_actions.Arguments(), context
        )
    )
    mine = schema.host_actions.c.id == action.id
    change(cloud, schema.host_actions, mine, locked_by="c9/1", locked_until=now() + HOURS)


def late_cleanup(cloud: Cloud, name: str) -> None:
    cloud.store.write(lambda tx: cleanups.ask(tx, cleanups.IMAGE, NOBODY, name))
    change(cloud, schema.cleanups, sa.true(), due_at=now() + 30 * HOURS)


def strange_port(cloud: Cloud, name: str) -> None:
    about = {"network_id": "n1", "device_id": NOBODY, "device_owner": "compute:nova"}
    cloud.networks.create([{**about, "binding:host_id": "h1"}])


def bound_twice(cloud: Cloud, name: str) -> None:
    found = next(one for one in cloud.networks.held.values() if one["device_id"] == name)
    cloud.networks.bind_also(found, elsewhere(cloud, name))


def half_an_image(cloud: Cloud, name: str) -> None:
    cloud.images.create({"id": NOBODY, "instance_uuid": name})


def forgotten(cloud: Cloud, name: str) -> None:
    """A fail-over has lost the server, and its guest runs."""
    boot_lost_server(cloud)


def places_lost(cloud: Cloud, name: str) -> None:
    """The server is nowhere, and nothing is left of it."""
    without_domain(cloud, name)
    without_record(cloud, name)
    without_allocation(cloud, name)
    server(host=None)(cloud, name)
    port(**{"binding:host_id": ""})(cloud, name)


_CPU = to_wire(HardwareAssignment([AssignedNumaNode(0, [0], {"0": 16}, 4, 0)]))
_OFFLOADED = server(vm_state=states.SHELVED_OFFLOADED, host=None)
_UNBOUND = port(**{"binding:host_id": ""})
_H2 = schema.services.c.host == "h2"
_BEAT = sa.and_(schema.heartbeats.c.host == "h2", schema.heartbeats.c.binary == "nova-compute")
_VCPU = schema.allocations.c.resource_class == "VCPU"

PLANTS: dict[str, Plant] = {
    "task-state": Plant(server(task_state=states.POWERING_OFF)),
    "building-idle": Plant(building),
    "nowhere": Plant(places_lost),
    "shelved-without-image": Plant(server(shelved_image_id=None), "unshelve"),
    "resting-since": Plant(server(shelved_at=None), "unshelve_here"),
    "lock": Plant(server(locked=True)),
    "held-by-ended": Plant(held_by_ended),
    "fence-of-action": Plant(lower_fence),
    "holds-nothing": Plant(holds_nothing),
    "due": Plant(of_stop(due_at=None)),
    "never-sent": Plant(never_sent),
    "lease-of-action": Plant(of_stop(owner="c9/1", lease_until=now() + HOURS)),
    "stuck": Plant(of_stop(state="stuck", due_at=None, cause="odd", failures=10)),
    "overdue": Plant(of_stop(due_at=now() - 700 * SECOND, workflow="of_old")),
    "one-guest": Plant(
        guest(elsewhere, may_run=True), "confirm_resize", frozenset({"kept-may-run"})
    ),
    "guest-of-gone-server": Plant(together(without_port, server(deleted=1))),
    "guest-elsewhere": Plant(together(_OFFLOADED, _UNBOUND)),
    "no-guest-record": Plant(
        without_record, also=frozenset({"allocation-of-nothing", "domain-known"})
    ),
    "guest-of-no-move": Plant(ended_move, "confirm_resize", frozenset({"allocation-exact"})),
    "kept-may-run": Plant(
        together(guest(elsewhere, may_run=True), guest(here, may_run=False)), "confirm_resize"
    ),
    "held-by-no-migration": Plant(held_by_move, "confirm_resize"),
    "one-move": Plant(second_move, "confirm_resize"),
    "move-without-action": Plant(
        lambda cloud, name: change(
            cloud, schema.migrations, sa.true(), status=MIGRATIONS_IN_PROGRESS[0]
        ),
        "confirm_resize",
    ),
    "resized-without-move": Plant(server(vm_state=states.RESIZED)),
    "debt-sent": Plant(debt_ahead),
    "domain-known": Plant(forgotten, "", frozenset({"port-of-nobody"})),
    "two-domains": Plant(twin, also=frozenset({"domain-known"})),
    "guest-there": Plant(without_domain),
    "counted": Plant(server(vcpus=7)),
    "shares": Plant(server(shares=2)),
    "shares-of-gone": Plant(share_of_gone),
    "volumes": Plant(server(volumes=3)),
    "volumes-of-gone": Plant(volume_of_gone),
    "attachment-of-server": Plant(strange_attachment),
    "attachment-incomplete": Plant(half_attached),
    "volume-of-another": Plant(foreign_volume),
    "volume-in-error": Plant(lambda cloud, name: attached(cloud, name, status="error")),
    "volume-elsewhere": Plant(volume_nowhere, "start"),
    "volume-not-in-guest": Plant(volume_not_seen),
    "share-in-transit": Plant(share_in_transit),
    "allocation-of-nothing": Plant(lambda cloud, name: put(cloud, name, elsewhere(cloud, name))),
    "guest-without-allocation": Plant(without_allocation),
    "allocation-exact": Plant(lambda cloud, name: change(cloud, schema.allocations, _VCPU, used=2)),
    "consumer-of-nothing": Plant(consumer),
    "no-consumer": Plant(lambda cloud, name: delete(cloud, schema.consumers, sa.true())),
    "assignment-not-asked-for": Plant(guest(here, assignment=_CPU)),
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
    "host-without-provider": Plant(no_inventory),
    "provider-without-host": Plant(provider),
    "heartbeat": Plant(
        lambda cloud, name: change(cloud, schema.heartbeats, _BEAT, seen_at=now() + HOURS)
    ),
    "host-action-lease": Plant(drain),
    "cleanup": Plant(late_cleanup),
    "duty": Plant(
        lambda cloud, name: insert(
            cloud, schema.leases, name="notifications", owner="c9/1", until=now() + HOURS
        )
    ),
    "port-of-nobody": Plant(strange_port),
    "port-elsewhere": Plant(_UNBOUND),
    "port-twice": Plant(bound_twice),
    "interface-of-server": Plant(without_port),
    "image-in-transit": Plant(half_an_image),
    "files-elsewhere": Plant(stray_files),
    "share-rule-of-nobody": Plant(strange_rule),
}


def plant_kind(cloud: Cloud, kind: str, plants: Mapping[str, Plant] = PLANTS) -> str:
    """The cloud has just this wrong with it; the server that it is about."""
    plant = plants[kind]
    name = trial_of(cloud, plant.base).server if plant.base else ""
    plant.plant(cloud, name)
    return name
