# SPDX-License-Identifier: Apache-2.0
"""Servers as answers: one row a field.

``ServerView`` holds what a page needs besides its rows, read once. A list of a thousand must cost
milliseconds: JSON columns are embedded as the text they are, and what repeats (flavor, image,
times) is made once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import orjson

from common.domain import states
from common.domain.hardware.options import OWN
from common.domain.instance_data import group_names
from common.domain.json_types import JsonObject
from common.security.vault import Vault
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

log = logging.getLogger(__name__)
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
    """What the rows of one answer share."""

    links: Links
    is_admin: bool = False
    allowed: frozenset[str] = frozenset()  #: policy rules that hold for the caller
    hosts: dict[str, HostFacts] = field(default_factory=dict)  #: by name, for admins
    groups: list[str] = field(default_factory=list)  #: of the one server shown
    vault: Vault | None = None  #: decrypts user data
    #: parts that several servers have
    made: dict[tuple[str, str | None], object] = field(default_factory=dict)
    #: by server, of those that have some
    volumes: dict[str, list[BlockDeviceRow]] = field(default_factory=dict)

    def volumes_of(self, row: ServerRecord) -> list[BlockDeviceRow]:
        """A server's, as far as they are made."""
        return [one for one in self.volumes.get(row.id, ()) if one.volume_id]


@functools.lru_cache(maxsize=8192)
def host_id(project_id: str, host: str | None) -> str:
    """A hash of project and host: the project can compare it and learns no name."""
    return hashlib.sha224((project_id + host).encode()).hexdigest() if host else ""


@functools.lru_cache(maxsize=4096)
def _raw(text: str | None) -> orjson.Fragment:
    """Return the document of a column for an answer. Raises ValueError if it is damaged."""
    if text:
        orjson.loads(text)
    return orjson.Fragment(text or "null")


def _user_data(row: ServerRecord, view: ServerView) -> str | None:
    kept: str | None = row.user_data
    return view.vault.open_text(kept) if kept and view.vault is not None else kept


def _links(row: ServerRecord, view: ServerView) -> list[dict[str, str]]:
    return [
        {"rel": "self", "href": f"{view.links.root}servers/{row.id}"},
        {"rel": "bookmark", "href": f"{view.links.bookmark_root}servers/{row.id}"},
    ]


def _flavor_link(row: ServerRecord, view: ServerView) -> object:
    return {"id": row.flavor_id, "links": [view.links.bookmark("flavors", row.flavor_id)]}


def _flavor(row: ServerRecord, view: ServerView) -> object:
    key = ("flavor", row.flavor)
    if key not in view.made:
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
        view.made[key] = orjson.Fragment(orjson.dumps(body))
    return view.made[key]


def _image(row: ServerRecord, view: ServerView) -> object:
    return _image_link(row.image_id, view) if row.image_id else ""


def _image_link(image_id: str, view: ServerView) -> JsonObject:
    key = ("image", image_id)
    if key not in view.made:
        view.made[key] = {"id": image_id, "links": [view.links.bookmark("images", image_id)]}
    return cast(JsonObject, view.made[key])


def _image_with_properties(row: ServerRecord, view: ServerView) -> object:
    if not row.image_id:
        return ""
    key = ("image with properties", row.image)
    if key not in view.made:
        properties = loads(row.image or "{}").get("properties", {})
        view.made[key] = {**_image_link(row.image_id, view), "properties": properties}
    return view.made[key]


_status = functools.lru_cache(maxsize=1024)(states.status)


def status(row: ServerRecord, view: object = None) -> str:
    """The API's status."""
    return _status(row.vm_state, row.task_state)


def _progress(row: ServerRecord, view: ServerView) -> object:
    return row.progress if status(row) in _PROGRESS else OMITTED


def _fault(row: ServerRecord, view: ServerView) -> object:
    """Of what has failed; and, while an action is stuck, why it is, whatever the server's
    status."""
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


def _property(name: str) -> Get:
    def get(row: ServerRecord, view: ServerView) -> object:
        return loads(row.image or "{}").get("properties", {}).get(name, "")

    return get


def _host_status(row: ServerRecord, view: ServerView) -> str:
    if not row.host:
        return ""
    facts = view.hosts.get(row.host)
    return facts.status if facts else "UNKNOWN"


def _hypervisor(row: ServerRecord, view: ServerView) -> str | None:
    facts = view.hosts.get(row.host or "")
    return facts.hypervisor_hostname if facts else None


@functools.lru_cache(maxsize=4096)
def _group_list(interfaces: str, asked: str) -> orjson.Fragment | None:
    found = group_names(orjson.loads(interfaces), orjson.loads(asked))
    return orjson.Fragment(orjson.dumps([{"name": name} for name in found])) if found else None


def _groups(row: ServerRecord, view: ServerView) -> object:
    """Those of its ports; nothing is said of a server that has none."""
    return _group_list(row.interfaces or "[]", row.security_groups) or OMITTED


def _zone(row: ServerRecord) -> str:
    """The zone of the server's host; before it has one, the zone that the request asked for. A
    server that was offloaded is in no zone, as in Nova."""
    if row.vm_state == states.SHELVED_OFFLOADED:
        return ""
    return str(row.availability_zone or row.pinned_availability_zone or "")


LATER = "2.75"  # answers to PUT and rebuild say everything only from here on

#: Every field of a server, in the order of the API's documents.
FIELDS: tuple[Field, ...] = (
    Field("id", "id"),
    Field("name", "name"),
    Field("status", status),
    Field("tenant_id", "project_id"),
    Field("user_id", "user_id"),
    Field("metadata", lambda row, view: _raw(row.meta)),
    Field("hostId", lambda row, view: host_id(row.project_id, row.host)),
    Field("image", _image, until="2.97"),
    Field("image", _image_with_properties, since="2.98"),
    Field("flavor", _flavor_link, until="2.46"),
    Field("flavor", _flavor, since="2.47"),
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
    Field("links", _links),
    Field("OS-DCF:diskConfig", "disk_config"),
    Field("progress", _progress, optional=True),
    Field("fault", _fault, optional=True),
    Field(
        "OS-EXT-AZ:availability_zone",
        lambda row, view: _zone(row),
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
    Field("security_groups", _groups, optional=True, in_updates_since=LATER),
    Field("OS-EXT-STS:task_state", "task_state", in_updates_since=LATER),
    Field("OS-EXT-STS:vm_state", "vm_state", in_updates_since=LATER),
    Field("OS-EXT-STS:power_state", "power_state", in_updates_since=LATER),
    Field(
        "os-extended-volumes:volumes_attached",
        lambda row, view: [{"id": one.volume_id} for one in view.volumes_of(row)],
        until="2.2",
        in_updates_since=LATER,
    ),
    Field(
        "os-extended-volumes:volumes_attached",
        lambda row, view: [
            {"id": one.volume_id, "delete_on_termination": bool(one.delete_on_termination)}
            for one in view.volumes_of(row)
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
        "OS-EXT-SRV-ATTR:hypervisor_hostname", _hypervisor, rule=ATTRIBUTES, in_updates_since=LATER
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
        _property("kernel_id"),
        since="2.3",
        rule=ATTRIBUTES,
        in_updates_since=LATER,
    ),
    Field(
        "OS-EXT-SRV-ATTR:ramdisk_id",
        _property("ramdisk_id"),
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
    Field(USER_DATA, _user_data, since="2.3", rule=ATTRIBUTES, in_updates_since=LATER),
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
    Field("host_status", _host_status, since="2.16", rule=HOST_STATUS, in_updates_since=LATER),
    Field("description", "description", since="2.19"),
    Field("tags", lambda row, view: _raw(row.tags), since="2.26"),
    Field(
        "trusted_image_certificates",
        lambda row, view: _raw(row.trusted_image_certificates),
        since="2.63",
    ),
    Field("locked_reason", "locked_reason", since="2.73"),
    Field("pinned_availability_zone", "pinned_availability_zone", since="2.96"),
    Field("scheduler_hints", lambda row, view: _raw(row.scheduler_hints), since="2.100"),
)
#: A single server says its group too.
ONE: tuple[Field, ...] = (
    *FIELDS,
    Field("server_groups", lambda row, view: view.groups, since="2.71"),
)
#: The answer to a rebuild says these as well, also before an answer to a change said everything.
REBUILT: tuple[Field, ...] = (
    Field("key_name", "key_name", since="2.54"),
    Field("user_data", _user_data, since="2.57"),
)
NAMES: tuple[Field, ...] = (Field("id", "id"), Field("name", "name"), Field("links", _links))
#: What can be said of a server whose record cannot be read.
_PARTIAL = visible_fields(
    (
        Field("id", "id"),
        Field("status", lambda row, view: "UNKNOWN"),
        Field("tenant_id", "project_id"),
        Field("created", lambda row, view: format_seconds(row.created_at)),
        Field("links", _links),
    ),
    1,
)
RULES = rules(FIELDS) | {EXTRA_SPECS}


def shows_user_data(version: int, allowed: frozenset[str]) -> bool:
    """Does a view of this version need the long columns?"""
    return USER_DATA in dict(visible_fields(FIELDS, version, allowed).made)


def shows_hosts(allowed: frozenset[str]) -> bool:
    """Does the view say more of hosts than their name?"""
    return bool(allowed & {ATTRIBUTES, HOST_STATUS})


def one(row: ServerRecord, view: ServerView, version: int, change: bool = False) -> JsonObject:
    """The body of a single server."""
    return {"server": _shown(visible_fields(ONE, version, view.allowed, change), row, view)}


def rebuilt(row: ServerRecord, view: ServerView, version: int, password: str) -> JsonObject:
    """The body that answers a rebuild, the only one with its password."""
    server = one(row, view, version, change=True)["server"]
    server.pop(USER_DATA, None)  # said to everybody, under the name in REBUILT
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
    """The items of a list."""
    getters = visible_fields(NAMES if names_only else FIELDS, version, view.allowed)
    return [_shown(getters, row, view) for row in rows]


def _shown(getters: VisibleFields, row: ServerRecord, view: ServerView) -> JsonObject:
    """A server; of one whose record cannot be read only what Nova says of a server that it cannot
    reach (microversion 2.69), so that it can be seen, and hides no other one."""
    try:
        return render(getters, row, view)
    except Exception:
        log.exception(
            "the record of server %s cannot be shown; see its row in the table servers", row.id
        )
        return render(_PARTIAL, row, view)
