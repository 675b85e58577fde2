# SPDX-License-Identifier: Apache-2.0
"""Servers in responses, with one ``Field`` per key.

``ServerView`` has the additional data of a page, which is read once. A list of a thousand servers
must cost only milliseconds. Therefore JSON columns are embedded as text, and repeated parts, such
as flavors, images and times, are built once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import orjson

from common.domain import states
from common.domain.hardware.options import OWN
from common.domain.instance_data import group_names
from common.domain.json_types import JsonObject
from common.security.vault import Vault
from common.service.log import get_logger
from common.store.rows import BlockDeviceRow, ServerRecord
from common.store.servers.servers import HostFacts, loads
from compute_api.compute.request.links import Links
from compute_api.compute.views.fields import (
    OMITTED,
    Field,
    Get,
    VisibleFields,
    render,
    rules,
    visible_fields,
)
from compute_api.compute.views.servers import addresses
from compute_api.compute.views.times import format_micros, format_seconds

log = get_logger(__name__)
_API = "os_compute_api:"
ATTRIBUTES = _API + "os-extended-server-attributes"
HOST_STATUS = _API + "servers:show:host_status"
USER_DATA = "OS-EXT-SRV-ATTR:user_data"
EXTRA_SPECS = _API + "servers:show:flavor-extra-specs"
_PROGRESS = frozenset(
    ("ACTIVE", "BUILD", "DELETED", "REBUILD", "RESIZE", "VERIFY_RESIZE", "MIGRATING")
)
_FAULTY = frozenset(("ERROR", "DELETED"))


@dataclass
class ServerView:
    """The data that the servers of a response share."""

    links: Links
    is_admin: bool = False
    #: Policy rules that the caller passes.
    allowed: frozenset[str] = frozenset()
    #: Facts by name of the host, if the caller may see them.
    hosts: dict[str, HostFacts] = field(default_factory=dict)
    #: Decrypts user data.
    vault: Vault | None = None
    #: Cache of parts that several servers share.
    parts: dict[tuple[str, str | None], object] = field(default_factory=dict)
    #: Volumes by id of the server. Servers without volumes are missing.
    volumes: dict[str, list[BlockDeviceRow]] = field(default_factory=dict)

    def volumes_of(self, row: ServerRecord) -> list[BlockDeviceRow]:
        """Return the volumes of a server. Volumes that are still being created are left out."""
        return [volume for volume in self.volumes.get(row.id, ()) if volume.volume_id]


@functools.lru_cache(maxsize=8192)
def host_id(project_id: str, host: str | None) -> str:
    """Return a hash of project and host, or "" without a host.

    Tenants can compare the hashes of their servers, but do not learn the name of the host.
    """
    return hashlib.sha224((project_id + host).encode()).hexdigest() if host else ""


@functools.lru_cache(maxsize=4096)
def _embed_json(text: str | None) -> orjson.Fragment:
    """Return a JSON column as text for the response, "null" for an empty column.

    Raises:
        ValueError: The column is damaged.
    """
    if text:
        orjson.loads(text)
    return orjson.Fragment(text or "null")


def _get_user_data(row: ServerRecord, view: ServerView) -> str | None:
    """Return the decrypted user data, or unencrypted user data unchanged.

    Without the vault, encrypted user data is returned as stored.

    Raises:
        Unavailable: No key of the vault opens the user data.
    """
    stored: str | None = row.user_data
    return view.vault.open_text(stored) if stored and view.vault is not None else stored


def _get_links(row: ServerRecord, view: ServerView) -> list[dict[str, str]]:
    return [
        {"rel": "self", "href": f"{view.links.root}servers/{row.id}"},
        {"rel": "bookmark", "href": f"{view.links.bookmark_root}servers/{row.id}"},
    ]


def _get_flavor_link(row: ServerRecord, view: ServerView) -> object:
    return {"id": row.flavor_id, "links": [view.links.bookmark("flavors", row.flavor_id)]}


def _get_flavor(row: ServerRecord, view: ServerView) -> object:
    key = ("flavor", row.flavor)
    if key not in view.parts:
        flavor = loads(row.flavor)
        body = {
            "vcpus": flavor["vcpus"],
            "ram": flavor["memory_mb"],
            "disk": flavor["root_gb"],
            "ephemeral": flavor["ephemeral_gb"],
            "swap": flavor["swap_mb"],
            "original_name": flavor["name"],
        }
        if EXTRA_SPECS in view.allowed:
            body["extra_specs"] = {
                key: value
                for key, value in flavor["extra_specs"].items()
                if not key.startswith(OWN)
            }
        view.parts[key] = orjson.Fragment(orjson.dumps(body))
    return view.parts[key]


def _get_image(row: ServerRecord, view: ServerView) -> object:
    return _make_image_link(row.image_id, view) if row.image_id else ""


def _make_image_link(image_id: str, view: ServerView) -> JsonObject:
    key = ("image", image_id)
    if key not in view.parts:
        view.parts[key] = {"id": image_id, "links": [view.links.bookmark("images", image_id)]}
    return cast(JsonObject, view.parts[key])


def _get_image_with_properties(row: ServerRecord, view: ServerView) -> object:
    if not row.image_id:
        return ""
    key = ("image with properties", row.image)
    if key not in view.parts:
        properties = loads(row.image or "{}").get("properties", {})
        view.parts[key] = {**_make_image_link(row.image_id, view), "properties": properties}
    return view.parts[key]


_compute_status = functools.lru_cache(maxsize=1024)(states.status)


def status(row: ServerRecord, view: object = None) -> str:
    """Return the status that the API shows for a server."""
    return _compute_status(row.vm_state, row.task_state)


def _get_progress(row: ServerRecord, view: ServerView) -> object:
    """Return the progress, or OMITTED in statuses without a progress."""
    return row.progress if status(row) in _PROGRESS else OMITTED


def _get_fault(row: ServerRecord, view: ServerView) -> object:
    """Return the fault of a server in ERROR or DELETED, or the fault of its stuck action.

    The result is OMITTED without such a fault. With code 500 only administrators see the details.
    """
    if row.fault is None or (row.action is None and status(row) not in _FAULTY):
        return OMITTED
    fault = loads(row.fault)
    if status(row) not in _FAULTY and fault.get("action") != row.action:
        return OMITTED
    body = {
        "code": fault["code"],
        "created": format_seconds(fault["created"]),
        "message": fault["message"],
    }
    if fault.get("details") and (view.is_admin or fault["code"] != 500):
        body["details"] = fault["details"]
    return body


def _make_property_getter(name: str) -> Get:
    def get(row: ServerRecord, view: ServerView) -> object:
        return loads(row.image or "{}").get("properties", {}).get(name, "")

    return get


def _get_host_status(row: ServerRecord, view: ServerView) -> str:
    if not row.host:
        return ""
    facts = view.hosts.get(row.host)
    return facts.status if facts else "UNKNOWN"


def _get_hypervisor(row: ServerRecord, view: ServerView) -> str | None:
    facts = view.hosts.get(row.host or "")
    return facts.hypervisor_hostname if facts else None


@functools.lru_cache(maxsize=4096)
def _build_group_list(interfaces: str, requested: str) -> orjson.Fragment | None:
    names = group_names(orjson.loads(interfaces), orjson.loads(requested))
    return orjson.Fragment(orjson.dumps([{"name": name} for name in names])) if names else None


def _get_groups(row: ServerRecord, view: ServerView) -> object:
    """Return the security groups of the server's ports, or OMITTED if there are none.

    If the groups of a port are unknown, return those of the server's create request.
    """
    return _build_group_list(row.interfaces or "[]", row.security_groups) or OMITTED


def _get_zone(row: ServerRecord) -> str:
    """Return the zone of the server's host, or without a host the requested zone, or "".

    For an offloaded server the result is "", as in Nova.
    """
    if row.vm_state == states.SHELVED_OFFLOADED:
        return ""
    return str(row.availability_zone or row.pinned_availability_zone or "")


#: The first version with all fields in responses to PUT and rebuild.
LATER = "2.75"

#: All fields of a server, in the order of the API reference.
FIELDS: tuple[Field, ...] = (
    Field("id", "id"),
    Field("name", "name"),
    Field("status", status),
    Field("tenant_id", "project_id"),
    Field("user_id", "user_id"),
    Field("metadata", lambda row, view: _embed_json(row.meta)),
    Field("hostId", lambda row, view: host_id(row.project_id, row.host)),
    Field("image", _get_image, until="2.97"),
    Field("image", _get_image_with_properties, since="2.98"),
    Field("flavor", _get_flavor_link, until="2.46"),
    Field("flavor", _get_flavor, since="2.47"),
    Field("created", lambda row, view: format_seconds(row.created_at)),
    Field("updated", lambda row, view: format_seconds(row.updated_at)),
    Field(
        "addresses",
        lambda row, view: addresses.of_server(row.interfaces),
        in_updates_since=LATER,
        in_update=lambda row, view: addresses.grouped(row.interfaces),
    ),
    Field("accessIPv4", lambda row, view: row.access_ip_v4 or ""),
    Field("accessIPv6", lambda row, view: row.access_ip_v6 or ""),
    Field("links", _get_links),
    Field("OS-DCF:diskConfig", "disk_config"),
    Field("progress", _get_progress, optional=True),
    Field("fault", _get_fault, optional=True),
    Field(
        "OS-EXT-AZ:availability_zone",
        lambda row, view: _get_zone(row),
        in_updates_since=LATER,
    ),
    Field(
        "config_drive", lambda row, view: "True" if row.config_drive else "", in_updates_since=LATER
    ),
    Field("key_name", "key_name", in_updates_since=LATER),
    Field(
        "OS-SRV-USG:launched_at",
        lambda row, view: format_micros(row.launched_at),
        in_updates_since=LATER,
    ),
    Field(
        "OS-SRV-USG:terminated_at",
        lambda row, view: format_micros(row.terminated_at),
        in_updates_since=LATER,
    ),
    Field("security_groups", _get_groups, optional=True, in_updates_since=LATER),
    Field("OS-EXT-STS:task_state", "task_state", in_updates_since=LATER),
    Field("OS-EXT-STS:vm_state", "vm_state", in_updates_since=LATER),
    Field("OS-EXT-STS:power_state", "power_state", in_updates_since=LATER),
    Field(
        "os-extended-volumes:volumes_attached",
        lambda row, view: [{"id": volume.volume_id} for volume in view.volumes_of(row)],
        until="2.2",
        in_updates_since=LATER,
    ),
    Field(
        "os-extended-volumes:volumes_attached",
        lambda row, view: [
            {"id": volume.volume_id, "delete_on_termination": bool(volume.delete_on_termination)}
            for volume in view.volumes_of(row)
        ],
        since="2.3",
        in_updates_since=LATER,
    ),
    Field("OS-EXT-SRV-ATTR:host", "host", rule=ATTRIBUTES, in_updates_since=LATER),
    Field(
        "OS-EXT-SRV-ATTR:instance_name",
        lambda row, view: "instance-" + row.id,
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:hypervisor_hostname",
        _get_hypervisor,
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:reservation_id",
        "reservation_id",
        since="2.3",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:launch_index",
        "launch_index",
        since="2.3",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:kernel_id",
        _make_property_getter("kernel_id"),
        since="2.3",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:ramdisk_id",
        _make_property_getter("ramdisk_id"),
        since="2.3",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:root_device_name",
        "root_device_name",
        since="2.3",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(USER_DATA, _get_user_data, since="2.3", rule=ATTRIBUTES, in_updates_since=LATER),
    Field(
        "OS-EXT-SRV-ATTR:hostname",
        "hostname",
        since="2.3",
        until="2.89",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field("OS-EXT-SRV-ATTR:hostname", "hostname", since="2.90"),
    Field("locked", "locked", since="2.9"),
    Field("host_status", _get_host_status, since="2.16", rule=HOST_STATUS, in_updates_since=LATER),
    Field("description", "description", since="2.19"),
    Field("tags", lambda row, view: _embed_json(row.tags), since="2.26"),
    Field(
        "trusted_image_certificates",
        lambda row, view: _embed_json(row.trusted_image_certificates),
        since="2.63",
    ),
    Field("locked_reason", "locked_reason", since="2.73"),
    Field("pinned_availability_zone", "pinned_availability_zone", since="2.96"),
    Field("scheduler_hints", lambda row, view: _embed_json(row.scheduler_hints), since="2.100"),
)
#: Fields of a single server.
ONE: tuple[Field, ...] = (
    *FIELDS,
    Field("server_groups", lambda row, view: [row.group_id] if row.group_id else [], since="2.71"),
)
#: Additional fields of the response to a rebuild, including versions before ``LATER``.
REBUILT: tuple[Field, ...] = (
    Field("key_name", "key_name", since="2.54"),
    Field("user_data", _get_user_data, since="2.57"),
)
NAMES: tuple[Field, ...] = (Field("id", "id"), Field("name", "name"), Field("links", _get_links))
#: Fields of a server whose row cannot be rendered.
_PARTIAL = visible_fields(
    (
        Field("id", "id"),
        Field("status", lambda row, view: "UNKNOWN"),
        Field("tenant_id", "project_id"),
        Field("created", lambda row, view: format_seconds(row.created_at)),
        Field("links", _get_links),
    ),
    1,
)
RULES = rules(FIELDS) | {EXTRA_SPECS}


def shows_user_data(version: int, allowed: frozenset[str]) -> bool:
    """Return whether responses show user data, for which rows need the column ``user_data``."""
    return USER_DATA in dict(visible_fields(FIELDS, version, allowed).computed)


def shows_hosts(allowed: frozenset[str]) -> bool:
    """Return whether the response needs ``ServerView.hosts``, the facts of the servers' hosts."""
    return bool(allowed & {ATTRIBUTES, HOST_STATUS})


def one(row: ServerRecord, view: ServerView, version: int, change: bool = False) -> JsonObject:
    """Return the body of a single server, or a partial body if the row is damaged.

    Args:
        row: The server.
        view: The data that the servers of the response share.
        version: The microversion of the request.
        change: Whether the body is a response to PUT or rebuild.
    """
    return {"server": _show_server(visible_fields(ONE, version, view.allowed, change), row, view)}


def rebuilt(row: ServerRecord, view: ServerView, version: int, password: str) -> JsonObject:
    """Return the body of the response to a rebuild, with the new password.

    Since 2.57 all callers see the user data, as ``user_data`` and not as ``USER_DATA``.
    """
    server = one(row, view, version, change=True)["server"]
    # All callers see the user data, under its name in REBUILT.
    server.pop(USER_DATA, None)
    return {
        "server": {
            **server,
            **render(visible_fields(REBUILT, version), row, view),
            "adminPass": password,
        }
    }


def many(
    rows: Sequence[ServerRecord], view: ServerView, version: int, names_only: bool = False
) -> list[JsonObject]:
    """Return the items of a list of servers. A damaged row gets a partial item.

    With ``names_only`` an item has the fields ``NAMES`` only.
    """
    getters = visible_fields(NAMES if names_only else FIELDS, version, view.allowed)
    return [_show_server(getters, row, view) for row in rows]


def _show_server(getters: VisibleFields, row: ServerRecord, view: ServerView) -> JsonObject:
    """Return the body of a server. If the row is damaged, log this and return a partial body.

    The partial body has the fields of Nova for unreachable servers (microversion 2.69). So a
    damaged row stays visible and does not make the whole list fail.
    """
    try:
        return render(getters, row, view)
    except Exception:
        log.exception(
            "the record of a server cannot be shown; see its row in the table servers",
            server=row.id,
        )
        return render(_PARTIAL, row, view)
