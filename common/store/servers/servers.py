# SPDX-License-Identifier: Apache-2.0
"""Servers for the API: lists, single servers, and changes without an action.

State (vm_state, task_state, fence, action, host) is written by ``actions`` and the conductor only.
This file reads servers, inserts new rows, and changes the columns that no action guards, for
example name, metadata and tags. JSON columns are returned as text. ``views`` embeds the text, and
``loads`` parses it. The number of statements of a list does not depend on its length.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, states
from common.domain.models import Flavor, Interface
from common.domain.service_binaries import Binary
from common.domain.wire import from_wire, to_wire
from common.notifications.events import Notice
from common.service.json_text import to_json
from common.store.engine import for_update, insert_many, notification_settings, now
from common.store.notifications import outbox
from common.store.pagination import SortOrder, after
from common.store.regular_expressions import fetch, matches
from common.store.rows import (
    IdempotencyKeyRow,
    ServerPlace,
    ServerRecord,
    ShownServerRecord,
    Values,
)
from common.store.schema import (
    Json,
    heartbeats,
    hosts,
    idempotency_keys,
    server_group_members,
    servers,
    services,
)
from common.store.substrings import holds

C = servers.c
T = TypeVar("T")


#: Long columns that only views for admins show. Lists leave them out by default.
_HEAVY = ("user_data", "key_data")
_LIGHT_COLUMNS = [
    sa.type_coerce(column, sa.Text).label(column.name) if isinstance(column.type, Json) else column
    for column in C
    if column.name not in _HEAVY
]
_NAME_COLUMNS = [C.id, C.name]
_ALL_COLUMNS = [*_LIGHT_COLUMNS, *(C[name] for name in _HEAVY)]
_GROUP = sa.select(sa.func.min(server_group_members.c.group_id)).where(
    server_group_members.c.server_id == C.id
)
_SHOWN_COLUMNS = [*_ALL_COLUMNS, _GROUP.scalar_subquery().label("group_id")]


class _RowType:
    """The columns that a query reads, and the named tuple of a row.

    Rows are named tuples, because SQLAlchemy's rows take ten times as long to read.
    """

    def __init__(self, columns: Sequence[sa.ColumnElement[Any]]) -> None:
        self.columns = columns
        names = [str(column.key) for column in columns]
        self.make: Callable[[Iterable[object]], Any] = cast(Any, namedtuple("Server", names))._make


_NAMES, _LIGHT = _RowType(_NAME_COLUMNS), _RowType(_LIGHT_COLUMNS)
_ALL, _ONE = _RowType(_ALL_COLUMNS), _RowType(_SHOWN_COLUMNS)
loads = json.loads
#: Columns with a notification about each change.
_SHOWN = frozenset(("name", "tags"))
#: Fields of an interface that only the network service decides.
_NETWORK_FIELDS = ("addresses", "mtu", "label", "active", "groups")

#: API name of a sort key or filter -> column. An unknown sort key changes no order, and an unknown
#: filter matches no server.
COLUMNS: Mapping[str, sa.Column[object]] = {
    "access_ip_v4": C.access_ip_v4,
    "access_ip_v6": C.access_ip_v6,
    "auto_disk_config": C.disk_config,
    "availability_zone": C.availability_zone,
    "config_drive": C.config_drive,
    "created_at": C.created_at,
    "description": C.description,
    "display_description": C.description,
    "display_name": C.name,
    "name": C.name,
    "host": C.host,
    "node": C.host,
    "hostname": C.hostname,
    "image_ref": C.image_id,
    "image": C.image_id,
    "flavor": C.flavor_id,
    "instance_type_id": C.flavor_id,
    "key_name": C.key_name,
    "launch_index": C.launch_index,
    "launched_at": C.launched_at,
    "locked": C.locked,
    "locked_by": C.locked_by,
    "power_state": C.power_state,
    "progress": C.progress,
    "project_id": C.project_id,
    "tenant_id": C.project_id,
    "reservation_id": C.reservation_id,
    "root_device_name": C.root_device_name,
    "task_state": C.task_state,
    "terminated_at": C.terminated_at,
    "updated_at": C.updated_at,
    "user_id": C.user_id,
    "uuid": C.id,
    "vm_state": C.vm_state,
}
#: Filters with an index, in the order of a message. Lists with such a filter, in the default order,
#: cost the same however many other servers exist.
INDEXED = ("project_id", "user_id", "host", "image", "flavor", "status", "reservation_id")
_INDEXED_COLUMNS = {
    *("id", "created_at", "vm_state"),
    *(COLUMNS[name].name for name in INDEXED if name != "status"),
}
#: A whole reservation id. No id contains another, so that equality finds what a substring finds.
_RESERVATION = re.compile("r-[0-9a-z]{8}")
#: Text columns that are compared as a whole. Other text columns are matched as regular expressions.
_WHOLE = {
    "project_id",
    "tenant_id",
    "user_id",
    "image",
    "image_ref",
    "flavor",
    "uuid",
    "host",
    "task_state",
    "vm_state",
}
#: Filter -> permitted characters of such an address, and a pattern that only this IP version
#: matches.
_ADDRESSES = {"ip": "[0-9.]", "ip6": "[0-9a-f:.]"}
_TELLS = {"ip": "[.]", "ip6": ":"}


@dataclass(frozen=True)
class ServerFilters:
    """Conditions, order and page of a list of servers.

    Attributes:
        project_id: None means all projects.
        deleted: None means deleted and existing servers.
        soft_deleted: False leaves out soft-deleted servers.
        filters: Name in COLUMNS, "ip" or "ip6" -> a value or a list of values.
        states: Triples (vm_state, task states, excluded task states), of which one must match.
            Without task states, all but the excluded task states match. None: any state. An empty
            list matches no server.
        tags: One of the API's four tag filters -> tags.
        changed_since, changed_before: Times of the last change, inclusive, in µs.
        marker: Id of the last server of the previous page.
    """

    project_id: str | None = None
    deleted: bool | None = False
    soft_deleted: bool = True
    filters: Mapping[str, object] = field(default_factory=dict)
    states: Sequence[tuple[str, Sequence[str], Sequence[str]]] | None = None
    tags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    changed_since: int | None = None
    changed_before: int | None = None
    # (name, descending)
    sort: Sequence[tuple[str, bool]] = ()
    marker: str | None = None
    limit: int = 1000


def page(
    tx: Connection, filters: ServerFilters, heavy: bool = False, names_only: bool = False
) -> list[ServerRecord]:
    """Return one page of servers in the requested order, then newest first.

    JSON columns are text.

    Args:
        tx: The transaction.
        filters: Filters, sort order and page of the list.
        heavy: Include the columns user_data and key_data, which the rows otherwise do not have.
        names_only: Return rows with id and name only.

    Raises:
        BadRequest: The marker is not the id of a server (of ``filters.project_id``), or a filter's
            value is invalid.
    """
    row_type = _NAMES if names_only else _ALL if heavy else _LIGHT
    is_plain = (
        replace(filters, project_id=None, sort=tuple(filters.sort), marker=None, limit=_PLAIN.limit)
        == _PLAIN
    )
    if is_plain and filters.marker is None:
        values = {"project": filters.project_id, "most": filters.limit}
        plain_rows = tx.execute(_plain_page(row_type, filters.project_id is not None), values)
        return list(map(row_type.make, plain_rows))
    query = sa.select(*row_type.columns).where(*_conditions(filters))
    order = _order(filters.sort)
    if filters.marker is not None:
        keys = sa.select(*(key.value.label(f"k{i}") for i, key in enumerate(order))).where(
            C.id == filters.marker
        )
        if filters.project_id is not None:
            keys = keys.where(C.project_id == filters.project_id)
        last = tx.execute(keys).first()
        if last is None:
            raise errors.BadRequest(f"marker [{filters.marker}] not found")
        query = query.where(after(order, list(last)))
    if is_plain:
        # Otherwise MariaDB reads all pages before, because it expects half of the table.
        index = "ix_servers_all" if filters.project_id is None else "ix_servers_list"
        query = query.with_hint(servers, f"FORCE INDEX ({index})", "mysql")
    rows = fetch(tx, query.order_by(*(key.clause for key in order)).limit(filters.limit))
    return list(map(row_type.make, rows))


def list_unindexed(filters: ServerFilters) -> list[str]:
    """Return the filters and sort keys of a list that have no index of their own."""
    names = [*filters.filters, *(name for name, _ in filters.sort)]
    unindexed = [
        name
        for name in names
        if name in _ADDRESSES or (name in COLUMNS and COLUMNS[name].name not in _INDEXED_COLUMNS)
    ]
    return list(dict.fromkeys([*unindexed, *filters.tags]))


#: The filters of a list without parameters.
_PLAIN = ServerFilters(soft_deleted=False)


@cache
def _plain_page(row_type: _RowType, of_project: bool) -> sa.Select[Any]:
    """Return the statement of the first page without filters, cached because most clients use it.

    Its parameters are ``project`` and ``most``.
    """
    query = sa.select(*row_type.columns).where(*_conditions(_PLAIN))
    if of_project:
        query = query.where(C.project_id == sa.bindparam("project"))
    most = sa.bindparam("most", type_=sa.Integer)
    return query.order_by(*(key.clause for key in _order(()))).limit(most)


def _order(sort: Sequence[tuple[str, bool]]) -> list[SortOrder]:
    """Return the requested sort keys that exist, then created_at and id descending if missing."""
    keys = [SortOrder(COLUMNS[name], descending) for name, descending in sort if name in COLUMNS]
    seen = {key.column.key for key in keys}
    keys += [SortOrder(column, True) for column in (C.created_at, C.id) if column.key not in seen]
    return keys


def _conditions(filters: ServerFilters) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if filters.project_id is not None:
        conditions.append(C.project_id == filters.project_id)
    if filters.deleted is not None:
        conditions.append(C.deleted == int(filters.deleted))
    if not filters.soft_deleted:
        conditions.append(C.vm_state != states.SOFT_DELETED)
    if filters.changed_since is not None:
        conditions.append(C.updated_at >= filters.changed_since)
    if filters.changed_before is not None:
        conditions.append(C.updated_at <= filters.changed_before)
    if filters.states is not None:
        conditions.append(sa.or_(sa.false(), *(_state(*state) for state in filters.states)))
    conditions += [_filter(name, value) for name, value in filters.filters.items()]
    conditions += [_match_tags(kind, tags) for kind, tags in filters.tags.items()]
    return conditions


def _state(vm_state: str, tasks: Sequence[str], not_tasks: Sequence[str]) -> sa.ColumnElement[bool]:
    if tasks:
        return sa.and_(C.vm_state == vm_state, C.task_state.in_(tasks))
    if not_tasks:
        return sa.and_(
            C.vm_state == vm_state, C.task_state.is_(None) | C.task_state.not_in(not_tasks)
        )
    return C.vm_state == vm_state


def _filter(name: str, value: Any) -> sa.ColumnElement[bool]:
    """Return the condition of a filter, by the type of the column. Unknown names match no server.

    Of a list, any value must be equal. Text columns in ``_WHOLE`` must equal the value, and so must
    a whole reservation id. Other text columns must contain the value, or match it as a regular
    expression.

    Raises:
        BadRequest: The value is no number for a number column, or no valid regular expression.
    """
    if name in _ADDRESSES:
        return _match_address(name, str(value))
    column = COLUMNS.get(name)
    if column is None:
        return sa.false()
    if isinstance(value, (list, tuple)):
        return column.in_(value)
    if isinstance(column.type, sa.Boolean):
        return column.is_(bool(value))
    if isinstance(column.type, sa.Integer):
        number, most = (
            _number(name, value),
            2 ** (63 if isinstance(column.type, sa.BigInteger) else 31),
        )
        return column == number if -most <= number < most else sa.false()
    if name in _WHOLE or (name == "reservation_id" and _RESERVATION.fullmatch(str(value))):
        is_equal: sa.ColumnElement[bool] = column == value
        return is_equal
    if _is_pattern(str(value)):
        return matches(name, column, str(value))
    return holds(column, str(value))


def _match_address(name: str, text: str) -> sa.ColumnElement[bool]:
    """Return the condition that a fixed address of this IP version contains the text.

    ``^`` and ``$`` match the ends of the address, and ``.*`` any part. A text with characters that
    such an address cannot have matches no server. ``ip6`` also finds the text in an IPv4 address if
    the server has an IPv6 address too.
    """
    digits = _ADDRESSES[name]
    whole = re.fullmatch(r"(\^?)(.*?)(\$?)", text.lower().replace("\\.", "."), re.DOTALL)
    assert whole is not None
    start, middle, end = whole.groups()
    parts = middle.split(".*")
    if not re.fullmatch(f"{digits}*", "".join(parts)):
        return sa.false()
    address_part = f"{digits}*".join(part.replace(".", "[.]") for part in parts)
    pattern = (
        f'"address":"{"" if start else digits + "*"}{address_part}{"" if end else digits + "*"}"'
    )
    column = sa.type_coerce(C.interfaces, sa.Text)
    return sa.and_(
        matches(name, column, pattern), matches(name, column, f'"address":"{digits}*{_TELLS[name]}')
    )


def _number(name: str, value: Any) -> int:
    try:
        return int(value)
    except ValueError as problem:
        raise errors.BadRequest(f"Invalid filter field: {name}.") from problem


def _is_pattern(text: str) -> bool:
    return any(letter in text for letter in r".^$*+?{}[]\|()")


def _match_tags(kind: str, tags: Sequence[str]) -> sa.ColumnElement[bool]:
    """Return the condition of a tag filter: tags, tags-any, not-tags or not-tags-any."""
    text = sa.type_coerce(C.tags, sa.Text)
    each = [holds(text, to_json(tag).decode()) for tag in tags]
    conditions: dict[str, sa.ColumnElement[bool]] = {
        "tags": sa.and_(sa.true(), *each),
        "tags-any": sa.or_(sa.false(), *each),
        "not-tags": sa.not_(sa.and_(sa.true(), *each)),
        "not-tags-any": sa.not_(sa.or_(sa.false(), *each)),
    }
    return conditions[kind]


def show(
    tx: Connection, server_id: str, project_id: str | None = None, deleted: bool = False
) -> ShownServerRecord:
    """Return a server with all columns and ``group_id``. JSON columns are text.

    Args:
        tx: The transaction.
        server_id: Id of the server.
        project_id: Project of the server. None: any.
        deleted: Return deleted servers too.

    Raises:
        NotFound: The server does not exist, is in another project, or is deleted and ``deleted`` is
            False.
    """
    row = tx.execute(_SHOW, {"server": server_id}).first()
    server: ShownServerRecord | None = None if row is None else _ONE.make(row)
    if (
        server is None
        or project_id not in (None, server.project_id)
        or (server.deleted and not deleted)
    ):
        raise errors.NotFound(f"Instance {server_id} could not be found.")
    return server


_SHOW = sa.select(*_SHOWN_COLUMNS).where(C.id == sa.bindparam("server"))


def writable_columns(row: ServerRecord, names: Iterable[str]) -> Values:
    """Return the named columns of a server as values for an update, with JSON parsed."""
    values = {name: getattr(row, name) for name in names}
    return {
        name: loads(value) if value is not None and isinstance(C[name].type, Json) else value
        for name, value in values.items()
    }


def insert(tx: Connection, rows: list[Values]) -> None:
    """Insert new servers. All rows have the same columns, and each column without a default."""
    insert_many(tx, servers, rows, "created_at", "updated_at")


def is_there(tx: Connection, server_id: str) -> bool:
    """Return True if a row with this server id exists, even if the server is deleted."""
    return tx.scalar(sa.select(C.id).where(C.id == server_id)) is not None


def update(tx: Connection, server_id: str, values: Values) -> None:
    """Write columns of a server, and ``updated_at``. A deleted server stays unchanged.

    The columns are not checked against a running action. With notifications on, ``values`` with
    name or tags causes a notice instance.update.
    """
    is_notified = notification_settings(tx) is not None and not _SHOWN.isdisjoint(values)
    before = (
        tx.scalar(sa.select(C.name).where(C.id == server_id))
        if is_notified and "name" in values
        else None
    )
    tx.execute(
        sa.update(servers)
        .where(C.id == server_id, C.deleted == 0)
        .values(**values, updated_at=now())
    )
    if is_notified:
        renamed = {"old_display_name": before} if before != values.get("name", before) else {}
        outbox.add(tx, [Notice("instance.update", server_id, about=renamed)])


def change_json(tx: Connection, server_id: str, column: str, change: Callable[[T], T]) -> T:
    """Lock the server, replace ``meta`` or ``tags`` by ``change(old)``, and return the new value.

    Raises:
        NotFound: The server does not exist any more.
    """
    old = tx.execute(
        for_update(sa.select(C[column]).where(C.id == server_id, C.deleted == 0))
    ).first()
    if old is None:
        raise errors.NotFound(f"Instance {server_id} could not be found.")
    new = change(cast(T, old[0]))
    update(tx, server_id, {column: new})
    return new


def some(tx: Connection, server_ids: Iterable[str]) -> dict[str, ServerPlace]:
    """Return host and interfaces of these servers by id. Deleted servers are left out."""
    query = sa.select(C.id, C.host, C.interfaces).where(
        C.id.in_(sorted(set(server_ids))), C.deleted == 0
    )
    return {row.id: row for row in tx.execute(query)}


def refresh_interfaces(tx: Connection, server_id: str, ports: Iterable[Interface]) -> None:
    """Store the network service's data (``_NETWORK_FIELDS``) of those ports that the server has.

    Other ports are ignored, because only actions add and remove interfaces. A deleted server is
    ignored too.
    """
    by_port = {interface.port: to_wire(interface) for interface in ports}
    row = tx.execute(
        for_update(sa.select(C.interfaces).where(C.id == server_id, C.deleted == 0))
    ).first()
    old = (row.interfaces or []) if row is not None else []
    new = [
        {**interface, **{name: by_port[interface["port"]][name] for name in _NETWORK_FIELDS}}
        if interface["port"] in by_port
        else interface
        for interface in old
    ]
    if new != old:
        update(tx, server_id, {"interfaces": new})


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about a server's host for admins.

    ``status`` is the API's host_status: UP, DOWN, MAINTENANCE or UNKNOWN.
    """

    hypervisor_hostname: str
    status: str


def host_facts(tx: Connection, names: Iterable[str]) -> dict[str, HostFacts]:
    """Return hypervisor hostname and API status of these hosts by name, without unknown hosts."""
    return {
        row.name: HostFacts(row.hypervisor_hostname, _host_status(row))
        for row in tx.execute(_HOST_FACTS, {"names": sorted(set(names))})
    }


_HOST_FACTS = (
    sa.select(
        hosts.c.name,
        hosts.c.hypervisor_hostname,
        services.c.disabled,
        services.c.forced_down,
        heartbeats.c.up,
    )
    .join(
        services,
        (services.c.host == hosts.c.name) & (services.c.binary == Binary.COMPUTE),
        isouter=True,
    )
    .join(
        heartbeats,
        (heartbeats.c.host == hosts.c.name) & (heartbeats.c.binary == Binary.COMPUTE),
        isouter=True,
    )
    .where(hosts.c.name.in_(sa.bindparam("names", expanding=True)))
)


def _host_status(row: Any) -> str:
    if row.forced_down:
        return "DOWN"
    if row.disabled:
        return "MAINTENANCE"
    return "UP" if row.up else "UNKNOWN"


def on_hosts(tx: Connection, names: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """Return name and uuid of the servers on these hosts, by host, oldest first, in one query.

    Hosts without servers are left out.
    """
    by_host: dict[str, list[dict[str, str]]] = {}
    query = sa.select(C.host, C.name, C.id).where(C.host.in_(sorted(set(names))), C.deleted == 0)
    for host, name, uuid in tx.execute(query.order_by(C.created_at, C.id)):
        by_host.setdefault(host, []).append({"name": name, "uuid": uuid})
    return by_host


class FlavorCount(NamedTuple):
    """Number of servers of a flavor in a project."""

    project_id: str
    flavor: Flavor
    number: int


def flavors_on(tx: Connection, host: str) -> list[FlavorCount]:
    """Count the servers on a host by project and stored flavor, in one query."""
    query = sa.select(C.project_id, C.flavor, sa.func.count()).where(C.host == host, C.deleted == 0)
    return [
        FlavorCount(project, from_wire(Flavor, flavor), number)
        for project, flavor, number in tx.execute(
            query.group_by(C.project_id, C.flavor).order_by(C.project_id)
        )
    ]


def idempotent(
    tx: Connection, project_id: str, keys: Sequence[str]
) -> dict[str, IdempotencyKeyRow]:
    """Return Idempotency-Key -> row. Keys that the project has not used are left out."""
    names = {_stored_key(key): key for key in keys}
    query = sa.select(idempotency_keys).where(
        idempotency_keys.c.project_id == project_id, idempotency_keys.c.key.in_(sorted(names))
    )
    return {names[row.key]: row for row in tx.execute(query)}


def remember(tx: Connection, rows: list[dict[str, str]]) -> None:
    """Store Idempotency-Keys. Each row has project_id, key, digest, reservation_id, server_id."""
    stored = [{**row, "key": _stored_key(row["key"])} for row in rows]
    insert_many(tx, idempotency_keys, stored, "created_at")


def _stored_key(key: str) -> str:
    """Return the key as stored.

    MariaDB's collation ignores case. Therefore a key with capital letters is stored as a hash.
    """
    return key if key == key.lower() else "sha256:" + hashlib.sha256(key.encode()).hexdigest()
