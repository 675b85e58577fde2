# SPDX-License-Identifier: Apache-2.0
"""Planted faults: one for each kind of finding that ``doctor --fix`` leaves to an operator.

docs/reliability.md lists these kinds with the same reasons. test_doctor.py compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from common.domain import ids
from common.domain.clock import SECOND
from common.store import schema
from common.store.engine import now
from common.store.notifications import outbox
from common.store.placement import allocations
from tests.workflows.planted import (
    NOBODY,
    Break,
    Plant,
    attach_volume,
    change,
    elsewhere,
    here,
    insert,
    leave_stray_files,
)
from tests.workflows.scenarios import PINNED
from tests.workflows.simulator import Cloud
from tests.workflows.test_missing_network_service import unregister


@dataclass(frozen=True)
class ForOperators(Plant):
    """A planted fault that an operator must mend."""

    #: The reason why Kilonova does not mend the fault.
    why: str = ""


def allocate_for_revert(cloud: Cloud, name: str) -> None:
    """Allocate resources for the revert of a resize on the same host, which needs no more."""
    move, row = cloud.migration(name), cloud.show(name)
    holder = {"type": "server", "project_id": row.project_id, "user_id": row.user_id}
    amounts = {"VCPU": 1, "MEMORY_MB": 1, "DISK_GB": 1}
    cloud.store.write(
        lambda tx: allocations.put(tx, {**holder, "id": move.uuid}, row.host, amounts)
    )


def set_invalid_extra_spec(cloud: Cloud, name: str) -> None:
    flavor = {**cloud.show(name).flavor, "extra_specs": {"hw:cpu_policy": "sometimes"}}
    change(cloud, schema.servers, schema.servers.c.id == name, flavor=flavor)


def remove_numa_nodes(cloud: Cloud, name: str) -> None:
    """Remove the NUMA nodes from the host of a server with dedicated CPUs."""
    [pinned_server] = cloud.create(networks=[], flavor=PINNED)
    cloud.settle()
    change(cloud, schema.hosts, schema.hosts.c.name == here(cloud, pinned_server), numa_nodes=[])


def violate_anti_affinity(cloud: Cloud, name: str) -> None:
    """Put the server and another server of an anti-affinity group on the same host."""
    [other_server] = cloud.create(networks=[], host=here(cloud, name), forced=True)
    cloud.settle()
    group = cloud.group("anti-affinity")
    for member in (name, other_server):
        insert(cloud, schema.server_group_members, group_id=group, server_id=member)


def put_host_in_two_zones(cloud: Cloud, name: str) -> None:
    for number, zone in enumerate(("az1", "az2"), 1):
        meta = {"availability_zone": zone}
        row = {"id": number, "uuid": ids.new(), "name": zone, "meta": meta, "created_at": now()}
        insert(cloud, schema.aggregates, **row)
        insert(cloud, schema.aggregate_hosts, aggregate_id=number, host="h1")


def register_host_without_key(cloud: Cloud, name: str) -> None:
    insert(cloud, schema.host_keys, host="h1", generation=1, changed_at=now())


def expire_certificate(cloud: Cloud, name: str) -> None:
    change(cloud, schema.hosts, schema.hosts.c.name == "h1", facts={"certificate_ends": 1})


def delay_notification(cloud: Cloud, name: str) -> None:
    """Add a notification that has been unsent for longer than the doctor accepts."""
    values = {"event": "flavor.create", "key": "1", "publisher": "nova-api:a", "body": {}}
    insert(cloud, schema.notifications, **values, created_at=now() - outbox.LATE - SECOND)


def create_unplugged_port(cloud: Cloud, name: str) -> None:
    """Create a port of the server that the server does not have as an interface."""
    values = {"network_id": "n1", "device_id": name, "device_owner": "compute:nova"}
    cloud.networks.create([{**values, "binding:host_id": here(cloud, name)}])


def remove_attachment(cloud: Cloud, name: str) -> None:
    attach_volume(cloud, name)
    cloud.volumes.state.held.clear()


def leave_files_of_missing_server(cloud: Cloud, name: str) -> None:
    leave_stray_files(cloud, name)
    host = cloud.hosts[elsewhere(cloud, name)].driver.host
    host.keep_files(NOBODY, host.files.pop(name))


def damage_document(cloud: Cloud, name: str) -> None:
    """Store JSON that is cut off as the metadata of an aggregate."""
    insert(cloud, schema.aggregates, uuid=ids.new(), name="a", meta={}, created_at=now())
    cloud.store.write(lambda tx: tx.execute(sa.text("UPDATE aggregates SET meta = '[1,2'")))


def set_vcpu_total_to_zero(cloud: Cloud, name: str) -> None:
    change(cloud, schema.inventories, schema.inventories.c.resource_class == "VCPU", total=0)


def unregister_network_service(cloud: Cloud, name: str) -> None:
    unregister(cloud)


def _plant(plant: Break, why: str, base: str = "stop") -> ForOperators:
    return ForOperators(plant, base, why=why)


FOR_OPERATORS: dict[str, ForOperators] = {
    "allocation-of-way-back": _plant(
        allocate_for_revert, "the user decides between confirm and revert", "confirm_here"
    ),
    "flavor-refused": _plant(set_invalid_extra_spec, "the user chooses another flavor or image"),
    "capacity": _plant(
        set_vcpu_total_to_zero, "either servers must leave, or the inventory is wrong"
    ),
    "assignment-exact": _plant(
        remove_numa_nodes, "a running guest cannot lose the hardware that it uses"
    ),
    "group-policy": _plant(
        violate_anti_affinity, "a move interrupts the server, so the user must agree to it"
    ),
    "one-zone": _plant(put_host_in_two_zones, "only an operator knows where the machine is"),
    "document": _plant(damage_document, "only an operator or a backup knows the lost content"),
    "host-without-key": _plant(
        register_host_without_key, "only an operator knows if the host is to stay in the cloud"
    ),
    "certificate-lasts": _plant(
        expire_certificate, "the cause of the failed renewal is on the host"
    ),
    "notifications-sent": _plant(delay_notification, "the broker is outside Kilonova's control"),
    "port-unplugged": _plant(
        create_unplugged_port, "the user may need the port: attach it or delete it"
    ),
    "volume-without-attachment": _plant(
        remove_attachment, "another server may use the volume now and write to it"
    ),
    "service-registered": _plant(unregister_network_service, "the URL of the service is unknown"),
    "files-of-nobody": _plant(
        leave_files_of_missing_server, "they may be the only copy of a server's data"
    ),
}
