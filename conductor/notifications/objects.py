# SPDX-License-Identifier: Apache-2.0
"""The objects in payloads of versioned notifications. Each function is free of effects.

Names, versions and keys are those of Nova's samples. tests/contract/test_notification_samples.py
compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.domain.clock import iso
from common.domain.json_types import JsonMapping, JsonObject

POWER = {0: "pending", 1: "running", 3: "paused", 4: "shutdown", 6: "crashed", 7: "suspended"}


def versioned(name: str, version: str, data: JsonObject) -> JsonObject:
    """Return an object in the format of oslo.versionedobjects."""
    return {
        "nova_object.name": name,
        "nova_object.namespace": "nova",
        "nova_object.version": version,
        "nova_object.data": data,
    }


def flavor(of: JsonMapping) -> JsonObject:
    """Return the ``FlavorPayload`` of a flavor's record, or of the flavor stored in a server."""
    return versioned(
        "FlavorPayload",
        "1.4",
        {
            "flavorid": of["id"],
            "name": of["name"],
            "memory_mb": of["memory_mb"],
            "vcpus": of["vcpus"],
            "root_gb": of["root_gb"],
            "ephemeral_gb": of.get("ephemeral_gb", 0),
            "swap": of.get("swap_mb", 0),
            "rxtx_factor": float(of.get("rxtx_factor", 1)),
            "vcpu_weight": 0,
            "disabled": False,
            "is_public": of.get("is_public", True),
            "extra_specs": of.get("extra_specs") or {},
            "projects": of.get("projects"),
            "description": of.get("description"),
        },
    )


def keypair(of: JsonMapping) -> JsonObject:
    """Return the ``KeypairPayload`` of a key pair. Only the public key is included.

    Args:
        of: user_id, name, type, fingerprint and public_key of the key pair.
    """
    return versioned(
        "KeypairPayload",
        "1.0",
        {
            "user_id": of["user_id"],
            "name": of["name"],
            "type": of["type"],
            "fingerprint": of["fingerprint"],
            "public_key": of["public_key"],
        },
    )


def fault(of: JsonMapping | None) -> JsonObject | None:
    """Return the ``ExceptionPayload`` of a failed action, or None without a failure.

    The field ``exception_message`` contains the text for users, and ``traceback`` the details for
    operators.
    """
    if of is None:
        return None
    return versioned(
        "ExceptionPayload",
        "1.1",
        {
            "exception": of["exception"],
            "exception_message": of["message"],
            "module_name": "conductor.workflows",
            "function_name": of["step"],
            "traceback": of["details"],
        },
    )


def addresses(interfaces: list[JsonObject] | None) -> list[JsonObject]:
    """Return one ``IpPayload`` for each fixed address."""
    return [
        versioned(
            "IpPayload",
            "1.0",
            {
                "label": interface.get("label", ""),
                "mac": interface.get("mac", ""),
                "meta": {},
                "port_uuid": interface["port"],
                "version": address.get("version", 4),
                "address": address["address"],
                "device_name": interface.get("device") or None,
            },
        )
        for interface in interfaces or ()
        for address in interface.get("addresses") or ()
    ]


def server(of: JsonMapping, request: Mapping[str, str]) -> JsonObject:
    """Return the fields that all payloads of servers contain.

    ``block_devices`` and ``shares`` are always empty.

    Args:
        of: The snapshot of the server's row in the outbox.
        request: Id, user and project of the request.
    """
    properties = (of["image"] or {}).get("properties") or {}
    user = request.get("user") or None
    return {
        "uuid": of["id"],
        "user_id": of["user_id"],
        "tenant_id": of["project_id"],
        "reservation_id": of["reservation_id"],
        "display_name": of["name"],
        "display_description": of["description"],
        "host_name": of["hostname"],
        "host": of["host"],
        "node": of["node"],
        "os_type": properties.get("os_type"),
        "architecture": architecture(properties),
        "availability_zone": of["availability_zone"] or of["pinned_availability_zone"],
        "flavor": flavor(of["flavor"]),
        "image_uuid": of["image_id"] or "",
        "key_name": of["key_name"],
        "kernel_id": properties.get("kernel_id", ""),
        "ramdisk_id": properties.get("ramdisk_id", ""),
        **{
            name: iso(of[name])
            for name in ("created_at", "launched_at", "terminated_at", "deleted_at", "updated_at")
        },
        "state": of["vm_state"],
        "power_state": POWER.get(of["power_state"], "pending"),
        "task_state": of["task_state"],
        "progress": of["progress"],
        "ip_addresses": addresses(of["interfaces"]),
        "block_devices": [],
        "shares": [],
        "metadata": of["meta"],
        "locked": bool(of["locked"]),
        "locked_reason": of["locked_reason"],
        "auto_disk_config": of["disk_config"],
        "request_id": request.get("id") if user else None,
        "action_initiator_user": user,
        "action_initiator_project": request.get("project") or None,
    }


def architecture(properties: Mapping[str, str]) -> str | None:
    """Return the CPU architecture that an image names, or None."""
    return properties.get("hw_architecture") or properties.get("architecture")
