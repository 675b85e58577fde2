# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a cloud and is not mended by ``kilonova doctor --fix``, planted by hand,
and why it is not."""

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
    attached,
    change,
    elsewhere,
    here,
    insert,
    stray_files,
)
from tests.workflows.scenarios import PINNED
from tests.workflows.simulator import Cloud
from tests.workflows.test_missing_network_service import unregister


@dataclass(frozen=True)
class ForOperators(Plant):
    """``why``: nobody else may mend it."""

    why: str = ""


def way_back(cloud: Cloud, name: str) -> None:
    """A resize where the server is keeps something for its way back, which it does not need."""
    move, row = cloud.migration(name), cloud.show(name)
    holder = {"type": "server", "project_id": row.project_id, "user_id": row.user_id}
    holds = {"VCPU": 1, "MEMORY_MB": 1, "DISK_GB": 1}
    cloud.store.write(lambda tx: allocations.put(tx, {**holder, "id": move.uuid}, row.host, holds))


def refused(cloud: Cloud, name: str) -> None:
    flavor = {**cloud.show(name).flavor, "extra_specs": {"hw:cpu_policy": "sometimes"}}
    change(cloud, schema.servers, schema.servers.c.id == name, flavor=flavor)


def fewer_parts(cloud: Cloud, name: str) -> None:
    """The host of a server with CPUs of its own has none any more."""
    [made] = cloud.create(networks=[], flavor=PINNED)
    cloud.settle()
    change(cloud, schema.hosts, schema.hosts.c.name == here(cloud, made), numa_nodes=[])


def side_by_side(cloud: Cloud, name: str) -> None:
    """A server that has to be alone, and another of its group, on one host."""
    [made] = cloud.create(networks=[], host=here(cloud, name), forced=True)
    cloud.settle()
    group = cloud.group("anti-affinity")
    for member in (name, made):
        insert(cloud, schema.server_group_members, group_id=group, server_id=member)


def two_zones(cloud: Cloud, name: str) -> None:
    for number, zone in enumerate(("az1", "az2"), 1):
        meta = {"availability_zone": zone}
        made = {"id": number, "uuid": ids.new(), "name": zone, "meta": meta, "created_at": now()}
        insert(cloud, schema.aggregates, **made)
        insert(cloud, schema.aggregate_hosts, aggregate_id=number, host="h1")


def without_key(cloud: Cloud, name: str) -> None:
    insert(cloud, schema.host_keys, host="h1", generation=1, changed_at=now())


def certificate_ends(cloud: Cloud, name: str) -> None:
    change(cloud, schema.hosts, schema.hosts.c.name == "h1", facts={"certificate_ends": 1})


def unsent(cloud: Cloud, name: str) -> None:
    said = {"event": "flavor.create", "key": "1", "publisher": "nova-api:a", "body": {}}
    insert(cloud, schema.notifications, **said, created_at=now() - outbox.LATE - SECOND)


def unplugged(cloud: Cloud, name: str) -> None:
    about = {"network_id": "n1", "device_id": name, "device_owner": "compute:nova"}
    cloud.networks.create([{**about, "binding:host_id": here(cloud, name)}])


def attachment_gone(cloud: Cloud, name: str) -> None:
    attached(cloud, name)
    cloud.volumes.state.held.clear()


def nobodys_files(cloud: Cloud, name: str) -> None:
    stray_files(cloud, name)
    host = cloud.hosts[elsewhere(cloud, name)].driver.host
    host.keep_files(NOBODY, host.files.pop(name))


def damaged_document(cloud: Cloud, name: str) -> None:
    insert(cloud, schema.aggregates, uuid=ids.new(), name="a", meta={}, created_at=now())
    cloud.store.write(lambda tx: tx.execute(sa.text("UPDATE aggregates SET meta = '[1,2'")))


def no_inventory_left(cloud: Cloud, name: str) -> None:
    change(cloud, schema.inventories, schema.inventories.c.resource_class == "VCPU", total=0)


def no_service(cloud: Cloud, name: str) -> None:
    unregister(cloud)


def _plant(plant: Break, why: str, base: str = "stop") -> ForOperators:
    return ForOperators(plant, base, why=why)


FOR_OPERATORS: dict[str, ForOperators] = {
    "allocation-of-way-back": _plant(
        way_back, "the resize ends one way or the other, and its user says which", "confirm_here"
    ),
    "flavor-refused": _plant(refused, "which flavor or image is meant is its user's"),
    "capacity": _plant(no_inventory_left, "which servers go, or what the host has, is not known"),
    "assignment-exact": _plant(fewer_parts, "a guest cannot lose what it runs on"),
    "group-policy": _plant(side_by_side, "which of them moves, and when, costs its user"),
    "one-zone": _plant(two_zones, "which zone is right is where the machine stands"),
    "document": _plant(damaged_document, "only an operator or a backup knows the lost content"),
    "host-without-key": _plant(without_key, "whether the host is to stay was somebody's intent"),
    "certificate-lasts": _plant(certificate_ends, "what keeps the agent from it is on its host"),
    "notifications-sent": _plant(unsent, "the broker is not Kilonova's"),
    "port-unplugged": _plant(unplugged, "it may be wanted: plug it in, or delete it"),
    "volume-without-attachment": _plant(
        attachment_gone, "another server may have the volume now, and write to it"
    ),
    "service-registered": _plant(no_service, "where the service is, is not known"),
    "files-of-nobody": _plant(nobodys_files, "they may be all that is left of a server"),
}
