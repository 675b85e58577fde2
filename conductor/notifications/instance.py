# SPDX-License-Identifier: Apache-2.0
"""Payloads of the notifications ``instance.*``, by the event without its phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from common.domain.clock import iso
from common.domain.json_types import JsonMapping, JsonObject
from common.notifications import periods
from common.notifications.events import EXISTS
from conductor.notifications import objects
from conductor.notifications.objects import versioned


class Kind(NamedTuple):
    """Name and version of a payload, and a function for its additional fields.

    ``more`` gets the server's snapshot and the notice's ``about``.
    """

    name: str
    version: str
    more: Callable[[JsonMapping, JsonMapping], JsonObject]


def _no_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {}


def _certificate_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"trusted_image_certificates": server["trusted_image_certificates"]}


def _create_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    keys = (
        [
            objects.keypair(
                {
                    "user_id": server["user_id"],
                    "name": server["key_name"],
                    "type": server["key_type"] or "ssh",
                    "fingerprint": server["key_fingerprint"] or "",
                    "public_key": server["key_data"],
                }
            )
        ]
        if server["key_data"]
        else []
    )
    return {
        "keypairs": keys,
        "tags": server["tags"],
        "instance_name": f"instance-{server['id']}",
        **_certificate_fields(server, about),
    }


def _resize_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    new = about.get("new_flavor")
    return {"new_flavor": objects.flavor(new) if new else None}


def _snapshot_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"snapshot_image_id": about.get("snapshot_image_id")}


def _rescue_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"rescue_image_ref": about.get("rescue_image_ref")}


def _share_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"share_id": about.get("share_id")}


def _volume_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"volume_id": about.get("volume_id")}


def _swap_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {name: about.get(name) for name in ("old_volume_id", "new_volume_id")}


PLAIN = Kind("InstanceActionPayload", "1.9", _no_fields)
KINDS = {
    "instance.create": Kind("InstanceCreatePayload", "1.13", _create_fields),
    "instance.rebuild": Kind("InstanceActionRebuildPayload", "1.10", _certificate_fields),
    "instance.rescue": Kind("InstanceActionRescuePayload", "1.4", _rescue_fields),
    "instance.resize_prep": Kind("InstanceActionResizePrepPayload", "1.4", _resize_fields),
    **dict.fromkeys(
        ("instance.share_attach", "instance.share_detach"),
        Kind("InstanceActionSharePayload", "1.0", _share_fields),
    ),
    "instance.snapshot": Kind("InstanceActionSnapshotPayload", "1.10", _snapshot_fields),
    **dict.fromkeys(
        ("instance.volume_attach", "instance.volume_detach"),
        Kind("InstanceActionVolumePayload", "1.7", _volume_fields),
    ),
    "instance.volume_swap": Kind("InstanceActionVolumeSwapPayload", "1.9", _swap_fields),
}


def payload(
    event: str, server: JsonMapping, request: Mapping[str, str], about: JsonMapping
) -> JsonObject:
    """Return the versioned payload of an event of a server.

    Args:
        event: For example "instance.create.end".
        server: The snapshot of the server's row in the outbox.
        request: Id, user and project of the request.
        about: Further data from the notice.
    """
    common = objects.server(server, request)
    if event == "instance.update":
        return versioned(
            "InstanceUpdatePayload", "2.1", {**common, **_update_fields(server, about)}
        )
    if event == EXISTS:
        return versioned(
            "InstanceExistsPayload", "2.1", {**common, **_period_fields(server, about)}
        )
    name, version, more = KINDS.get(".".join(event.split(".")[:2]), PLAIN)
    return versioned(
        name, version, {**common, "fault": objects.fault(about.get("fault")), **more(server, about)}
    )


def states(server: JsonMapping, about: JsonMapping) -> JsonObject:
    """Return the old and new vm_state and task_state.

    An old state that is missing in ``about`` counts as unchanged.
    """
    return {
        "old_state": about.get("old_state", server["vm_state"]),
        "state": server["vm_state"],
        "old_task_state": about.get("old_task_state", server["task_state"]),
        "new_task_state": server["task_state"],
    }


def _period_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    begin, end = periods.audit_period(about, server["updated_at"])
    return {
        "audit_period": versioned(
            "AuditPeriodPayload",
            "1.0",
            {"audit_period_beginning": iso(begin), "audit_period_ending": iso(end)},
        )
    }


def _update_fields(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {
        "state_update": versioned("InstanceStateUpdatePayload", "1.0", states(server, about)),
        **_period_fields(server, about),
        "old_display_name": about.get("old_display_name"),
        "tags": server["tags"],
    }
