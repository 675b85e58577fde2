# SPDX-License-Identifier: Apache-2.0
"""Payloads about services, aggregates, flavors, key pairs and server groups, from their rows."""

from __future__ import annotations

from common.domain.clock import iso
from common.domain.json_types import JsonMapping, JsonObject
from conductor.notifications import objects
from conductor.notifications.objects import versioned

PROGRESS = "aggregate.cache_images.progress"


def service(of: JsonMapping) -> JsonObject:
    """Return the payload of a service, from the row."""
    return versioned(
        "ServiceStatusPayload",
        "1.1",
        {
            "uuid": of["uuid"],
            "host": of["host"],
            "binary": of["binary"],
            "topic": of["binary"].removeprefix("nova-"),
            "disabled": bool(of["disabled"]),
            "disabled_reason": of["disabled_reason"],
            "forced_down": bool(of["forced_down"]),
            "last_seen_up": iso(of["seen_at"]),
            "report_count": 0,
            "version": 0,
            "availability_zone": None,
        },
    )


def aggregate(of: JsonMapping) -> JsonObject:
    """Return the payload of an aggregate with the hosts, from the aggregate's row."""
    return versioned(
        "AggregatePayload",
        "1.1",
        {
            "id": of["id"],
            "uuid": of["uuid"],
            "name": of["name"],
            "metadata": of["meta"],
            "hosts": of["hosts"],
        },
    )


def cache_progress(of: JsonMapping) -> JsonObject:
    """Return the payload about a host that has cached, or failed to cache, each requested image.

    ``of`` is the aggregate's row with the host, the progress and the host's images.
    """
    return versioned(
        "AggregateCachePayload",
        "1.0",
        {
            name: of[name]
            for name in (
                "id",
                "uuid",
                "name",
                "host",
                "index",
                "total",
                "images_cached",
                "images_failed",
            )
        },
    )


def flavor(of: JsonMapping) -> JsonObject:
    """Return the payload of a flavor's row."""
    return objects.flavor({**of, "id": of["flavorid"]})


def server_group(of: JsonMapping) -> JsonObject:
    """Return the payload of a server group with the members, from the row. The hosts are null."""
    return versioned(
        "ServerGroupPayload",
        "1.1",
        {
            "uuid": of["id"],
            "name": of["name"],
            "project_id": of["project_id"],
            "user_id": of["user_id"],
            "policies": [of["policy"]],
            "policy": of["policy"],
            "rules": {name: str(value) for name, value in (of["rules"] or {}).items()},
            "members": of["members"],
            "hosts": None,
        },
    )


#: First word of an event -> its payload.
PAYLOADS = {
    "service": service,
    "aggregate": aggregate,
    "flavor": flavor,
    "keypair": objects.keypair,
    "server_group": server_group,
}
#: Events with another legacy name.
_OLDER = {
    "aggregate.add_host": "aggregate.addhost",
    "aggregate.remove_host": "aggregate.removehost",
    "aggregate.update_prop": "aggregate.updateprop",
    "aggregate.update_metadata": "aggregate.updatemetadata",
    "server_group.create": "servergroup.create",
    "server_group.delete": "servergroup.delete",
    "server_group.add_member": "servergroup.addmember",
}


def payload(event: str, of: JsonMapping) -> JsonObject:
    """Return the versioned payload of an event, from the snapshot ``of`` of its object."""
    return cache_progress(of) if event == PROGRESS else PAYLOADS[event.split(".")[0]](of)


def older(event: str, of: JsonMapping) -> tuple[str, JsonObject] | None:
    """Return the legacy name and payload of an event, or None without a legacy notification.

    Services, flavors and ``aggregate.cache_images`` have no legacy notification.

    Args:
        event: Name of the versioned notification, for example aggregate.add_host.start.
        of: The snapshot of the event's object.
    """
    noun, verb, *phase = event.split(".")
    if verb == "cache_images":
        return None
    name = ".".join([_OLDER.get(f"{noun}.{verb}", f"{noun}.{verb}"), *phase])
    if noun == "keypair":
        return name, {"user_id": of["user_id"], "tenant_id": None, "key_name": of["name"]}
    if noun == "aggregate":
        return name, {
            "aggregate_id": of["id"],
            "name": of["name"],
            "meta_data": of["meta"],
            "hosts": of["hosts"],
        }
    if noun == "server_group":
        return name, {
            "server_group_id": of["id"],
            "name": of["name"],
            "policies": [of["policy"]],
            "rules": of["rules"],
            "instance_uuids": of["members"],
        }
    return None
