# SPDX-License-Identifier: Apache-2.0
"""The payloads of instance.*: a table, by the event without its phase."""

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
    """Name and version of a payload, and what it has besides what all have: of the picture and of
    the notice."""

    name: str
    version: str
    more: Callable[[JsonMapping, JsonMapping], JsonObject]


def _nothing(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {}


def _certificates(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"trusted_image_certificates": server["trusted_image_certificates"]}


def _created(server: JsonMapping, about: JsonMapping) -> JsonObject:
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
        **_certificates(server, about),
    }


def _resized(server: JsonMapping, about: JsonMapping) -> JsonObject:
    new = about.get("new_flavor")
    return {"new_flavor": objects.flavor(new) if new else None}


def _copied(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"snapshot_image_id": about.get("snapshot_image_id")}


def _rescued(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"rescue_image_ref": about.get("rescue_image_ref")}


def _shared(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"share_id": about.get("share_id")}


def _with_volume(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {"volume_id": about.get("volume_id")}


def _with_volumes(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {name: about.get(name) for name in ("old_volume_id", "new_volume_id")}


PLAIN = Kind("InstanceActionPayload", "1.9", _nothing)
KINDS = {
    "instance.create": Kind("InstanceCreatePayload", "1.13", _created),
    "instance.rebuild": Kind("InstanceActionRebuildPayload", "1.10", _certificates),
    "instance.rescue": Kind("InstanceActionRescuePayload", "1.4", _rescued),
    "instance.resize_prep": Kind("InstanceActionResizePrepPayload", "1.4", _resized),
    **dict.fromkeys(
        ("instance.share_attach", "instance.share_detach"),
        Kind("InstanceActionSharePayload", "1.0", _shared),
    ),
    "instance.snapshot": Kind("InstanceActionSnapshotPayload", "1.10", _copied),
    **dict.fromkeys(
        ("instance.volume_attach", "instance.volume_detach"),
        Kind("InstanceActionVolumePayload", "1.7", _with_volume),
    ),
    "instance.volume_swap": Kind("InstanceActionVolumeSwapPayload", "1.9", _with_volumes),
}


def payload(
    event: str, server: JsonMapping, request: Mapping[str, str], about: JsonMapping
) -> JsonObject:
    """The payload of an event of a server."""
    common = objects.server(server, request)
    if event == "instance.update":
        return versioned("InstanceUpdatePayload", "2.1", {**common, **_updated(server, about)})
    if event == EXISTS:
        return versioned("InstanceExistsPayload", "2.1", {**common, **_period(server, about)})
    name, version, more = KINDS.get(".".join(event.split(".")[:2]), PLAIN)
    return versioned(
        name, version, {**common, "fault": objects.fault(about.get("fault")), **more(server, about)}
    )


def states(server: JsonMapping, about: JsonMapping) -> JsonObject:
    """From which state to which; what did not change is the same in both."""
    return {
        "old_state": about.get("old_state", server["vm_state"]),
        "state": server["vm_state"],
        "old_task_state": about.get("old_task_state", server["task_state"]),
        "new_task_state": server["task_state"],
    }


def _period(server: JsonMapping, about: JsonMapping) -> JsonObject:
    begin, end = periods.audit_period(about, server["updated_at"])
    return {
        "audit_period": versioned(
            "AuditPeriodPayload",
            "1.0",
            {"audit_period_beginning": iso(begin), "audit_period_ending": iso(end)},
        )
    }


def _updated(server: JsonMapping, about: JsonMapping) -> JsonObject:
    return {
        "state_update": versioned("InstanceStateUpdatePayload", "1.0", states(server, about)),
        **_period(server, about),
        "old_display_name": about.get("old_display_name"),
        "tags": server["tags"],
    }
