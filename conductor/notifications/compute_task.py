# SPDX-License-Identifier: Apache-2.0
"""Payloads of ``compute_task.*``: no host was found for a server, with the request spec."""

from __future__ import annotations

from common.domain.json_types import JsonMapping, JsonObject
from conductor.notifications import legacy, objects
from conductor.notifications.objects import versioned


def payload(server: JsonMapping, about: JsonMapping) -> JsonObject:
    """Return the versioned payload: the server's id, vm_state and request spec, and the failure.

    Args:
        server: The snapshot of the server's row in the outbox.
        about: Further data from the notice, with the failure.
    """
    return versioned(
        "ComputeTaskPayload",
        "1.0",
        {
            "instance_uuid": server["id"],
            "request_spec": _request_spec(server),
            "state": server["vm_state"],
            "reason": objects.fault(about["fault"]),
        },
    )


def older(event: str, server: JsonMapping, about: JsonMapping) -> tuple[str, JsonObject]:
    """Return the name and payload of an event's legacy (unversioned) notification.

    Args:
        event: Name of the versioned notification. The legacy name is its first two words.
        server: The snapshot of the server's row in the outbox.
        about: Further data from the notice, with the failure.
    """
    noun, method = event.split(".")[:2]
    facts = legacy.server(event, server, {})
    spec = {
        "instance_properties": facts,
        "instance_type": server["flavor"],
        "image": server["image"] or {},
        "num_instances": 1,
    }
    return f"{noun}.{method}", {
        "request_spec": spec,
        "instance_properties": facts,
        "instance_id": server["id"],
        "state": server["vm_state"],
        "method": method,
        "reason": about["fault"]["message"],
    }


def _request_spec(server: JsonMapping) -> JsonObject:
    """Return the ``RequestSpecPayload`` of a server. Fields that are not stored are constant."""
    empty_fields: JsonObject = dict.fromkeys(
        (
            "ignore_hosts",
            "force_hosts",
            "force_nodes",
            "instance_group",
            "retry",
            "requested_destination",
            "numa_topology",
        )
    )
    groups = [
        group["name"] if isinstance(group, dict) else group
        for group in server["security_groups"] or ()
    ]
    return versioned(
        "RequestSpecPayload",
        "1.1",
        {
            **empty_fields,
            "instance_uuid": server["id"],
            "project_id": server["project_id"],
            "user_id": server["user_id"],
            "availability_zone": server["pinned_availability_zone"],
            "flavor": objects.flavor(server["flavor"]),
            "image": _image(server["image"] or {}),
            "num_instances": 1,
            "pci_requests": versioned(
                "InstancePCIRequestsPayload", "1.0", {"instance_uuid": server["id"], "requests": []}
            ),
            "scheduler_hints": {
                name: value if isinstance(value, list) else [value]
                for name, value in (server["scheduler_hints"] or {}).items()
            },
            "security_groups": groups,
        },
    )


def _image(image: JsonMapping) -> JsonObject:
    """Return the ``ImageMetaPayload`` of an image. Fields that are not stored are constant."""
    empty_fields: JsonObject = dict.fromkeys(
        (
            "checksum",
            "created_at",
            "direct_url",
            "name",
            "owner",
            "status",
            "updated_at",
            "virtual_size",
            "visibility",
        )
    )
    return versioned(
        "ImageMetaPayload",
        "1.0",
        {
            **empty_fields,
            "id": image.get("id"),
            "container_format": "bare",
            "disk_format": image.get("disk_format"),
            "size": image.get("size"),
            "min_disk": 0,
            "min_ram": 0,
            "protected": False,
            "tags": [],
            "properties": versioned(
                "ImageMetaPropsPayload", "1.20", dict(image.get("properties") or {})
            ),
        },
    )
