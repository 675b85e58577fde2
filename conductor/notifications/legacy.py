# SPDX-License-Identifier: Apache-2.0
"""Unversioned notifications: the legacy names and flat payloads of the same events."""

from __future__ import annotations

from common.domain.clock import iso
from common.domain.json_types import JsonMapping, JsonObject
from common.notifications import periods
from common.notifications.events import EXISTS
from conductor.notifications.instance import states
from conductor.notifications.objects import architecture

#: Event without its phase -> its legacy name, or None if the event has no legacy notification.
#: Other events get the prefix "compute.".
NAMES: dict[str, str | None] = {
    "instance.lock": None,
    "instance.unlock": None,
    "instance.interface_attach": None,
    "instance.interface_detach": None,
    "instance.volume_attach": "compute.instance.volume.attach",
    "instance.volume_detach": "compute.instance.volume.detach",
    "instance.resize_prep": "compute.instance.resize.prep",
    "instance.resize_finish": "compute.instance.finish_resize",
    "instance.resize_confirm": "compute.instance.resize.confirm",
    "instance.resize_revert": "compute.instance.resize.revert",
    "instance.live_migration_abort": "compute.instance.live.migration.abort",
    "instance.live_migration_force_complete": "compute.instance.live.migration.force.complete",
    "instance.live_migration_pre": "compute.instance.live_migration.pre",
    "instance.live_migration_post": "compute.instance.live_migration._post",
    "instance.live_migration_post_dest": "compute.instance.live_migration.post.dest",
    "instance.live_migration_rollback": "compute.instance.live_migration._rollback",
}


def name(event: str) -> str | None:
    """Return the legacy name of a server's event, or None if the event has no legacy name."""
    noun, verb, *phase = event.split(".")
    event_name = f"{noun}.{verb}"
    legacy_name = NAMES.get(event_name, f"compute.{event_name}")
    return None if legacy_name is None else ".".join([legacy_name, *phase])


def server(event: str, of: JsonMapping, about: JsonMapping) -> JsonObject:
    """Return the flat legacy payload of a server.

    Args:
        event: For example "instance.create.end".
        of: The snapshot of the server's row in the outbox.
        about: Further data from the notice.
    """
    size, image = of["flavor"], of["image"] or {}
    properties = image.get("properties") or {}
    return {
        "tenant_id": of["project_id"],
        "user_id": of["user_id"],
        "instance_id": of["id"],
        "display_name": of["name"],
        "reservation_id": of["reservation_id"],
        "hostname": of["hostname"],
        "instance_type": size["name"],
        "instance_type_id": size["id"],
        "instance_flavor_id": size["id"],
        "architecture": architecture(properties),
        "memory_mb": size["memory_mb"],
        "vcpus": size["vcpus"],
        "disk_gb": size["root_gb"] + size.get("ephemeral_gb", 0),
        "root_gb": size["root_gb"],
        "ephemeral_gb": size.get("ephemeral_gb", 0),
        "host": of["host"],
        "node": of["node"],
        "cell_name": "",
        "availability_zone": of["availability_zone"] or of["pinned_availability_zone"],
        "created_at": (iso(of["created_at"]) or "").replace("T", " ").replace("Z", "+00:00"),
        **{
            when: iso(of[when], fraction=True) or ""
            for when in ("terminated_at", "deleted_at", "launched_at")
        },
        "image_ref_url": of["image_id"],
        "image_meta": properties,
        "os_type": properties.get("os_type"),
        "kernel_id": properties.get("kernel_id", ""),
        "ramdisk_id": properties.get("ramdisk_id", ""),
        "state": of["vm_state"],
        "state_description": of["task_state"] or "",
        "progress": of["progress"] or "",
        "access_ip_v4": of["access_ip_v4"],
        "access_ip_v6": of["access_ip_v6"],
        "fixed_ips": _list_fixed_addresses(of["interfaces"]),
        "metadata": of["meta"],
        **_event_fields(event, of, about),
    }


def _list_fixed_addresses(interfaces: list[JsonObject] | None) -> list[JsonObject]:
    return [
        {
            "address": address["address"],
            "version": address.get("version", 4),
            "type": "fixed",
            "meta": {},
            "label": interface.get("label", ""),
            "vif_mac": interface.get("mac", ""),
            "floating_ips": list(address.get("floating") or ()),
        }
        for interface in interfaces or ()
        for address in interface.get("addresses") or ()
    ]


def _event_fields(event: str, of: JsonMapping, about: JsonMapping) -> JsonObject:
    fields: JsonObject = {}
    if fault := about.get("fault"):
        fields.update(message=fault["message"], code=500, exception=fault["exception"])
    if event == "instance.create.end":
        fields["message"] = "Success"
    if image := about.get("snapshot_image_id"):
        fields["image_id"] = image
    if image := about.get("rescue_image_ref"):
        fields["rescue_image_name"] = image
    if new := about.get("new_flavor"):
        fields.update(new_instance_type=new["name"], new_instance_type_id=new["id"])
    if event == EXISTS:
        fields.update(
            zip(
                ("audit_period_beginning", "audit_period_ending"),
                (
                    (iso(end) or "").replace("T", " ").replace("Z", "")
                    for end in periods.audit_period(about, of["updated_at"])
                ),
                strict=True,
            ),
            bandwidth={},
        )
    if event == "instance.update":
        begin, end = periods.audit_period(about, of["updated_at"])
        fields.update(
            states(of, about),
            audit_period_beginning=iso(begin, fraction=True),
            audit_period_ending=iso(end, fraction=True),
        )
        if about.get("old_display_name"):
            fields["old_display_name"] = about["old_display_name"]
    return fields
