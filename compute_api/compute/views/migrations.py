# SPDX-License-Identifier: Apache-2.0
"""Migrations in responses: in the list of all migrations, and live migrations below their server.

Rows come from ``store.servers.migrations``. Without permission to see hosts, the fields of hosts
are null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.domain.json_types import JsonObject
from common.domain.statuses import MigrationStatus, MigrationType
from common.store.rows import ShownMigrationRow
from compute_api.compute.request.links import Links
from compute_api.compute.views.fields import OMITTED, Field, render, render_readable, visible_fields
from compute_api.compute.views.times import format_micros

#: Statuses of live migrations in progress, which are available below their server.
ON_ITS_WAY = (
    MigrationStatus.QUEUED,
    MigrationStatus.PREPARING,
    MigrationStatus.RUNNING,
    MigrationStatus.POST_MIGRATING,
)


@dataclass
class MigrationView:
    """The data that the migrations of a response share.

    ``with_hosts`` is True if the caller may see hosts. Otherwise the fields of hosts are null.
    """

    links: Links
    with_hosts: bool = False


def is_on_its_way(row: ShownMigrationRow) -> bool:
    """Return whether the row is a live migration in progress."""
    return row.type == MigrationType.LIVE and row.status in ON_ITS_WAY


def _make_host_getter(column: str) -> Callable[[ShownMigrationRow, MigrationView], object]:
    return lambda row, view: getattr(row, column) if view.with_hosts else None


def _make_number_getter(column: str) -> Callable[[ShownMigrationRow, MigrationView], int | None]:
    """Return the getter of a flavor's number, the id of its database row.

    The number comes from the copy of the flavor in the migration (``column``), so a deleted flavor
    still has the number.
    """
    return lambda row, view: getattr(row, column).get("number")


def _make_bytes_getter(name: str) -> Callable[[ShownMigrationRow, MigrationView], int | None]:
    """Return the getter of a progress value in bytes. Zero or a missing value is None."""
    return lambda row, view: (row.progress or {}).get(name) or None


def _get_links(row: ShownMigrationRow, view: MigrationView) -> object:
    """Return the links of a live migration in progress, or OMITTED for other migrations."""
    return (
        view.links.of(f"servers/{row.server_id}/migrations", str(row.id))
        if is_on_its_way(row)
        else OMITTED
    )


_COMMON: tuple[Field, ...] = (
    Field("id", "id"),
    Field("status", "status"),
    Field("source_compute", _make_host_getter("source_host")),
    Field("source_node", _make_host_getter("source_node")),
    Field("dest_compute", _make_host_getter("dest_host")),
    Field("dest_host", _make_host_getter("dest_ip")),
    Field("dest_node", _make_host_getter("dest_node")),
    Field("created_at", lambda row, view: format_micros(row.created_at)),
    Field("updated_at", lambda row, view: format_micros(row.updated_at)),
    Field("uuid", "uuid", since="2.59"),
    Field("user_id", "user_id", since="2.80"),
    Field("project_id", "project_id", since="2.80"),
)
FIELDS: tuple[Field, ...] = (
    *_COMMON,
    Field("instance_uuid", "server_id"),
    Field("old_instance_type_id", _make_number_getter("old_flavor")),
    Field("new_instance_type_id", _make_number_getter("new_flavor")),
    Field("migration_type", "type", since="2.23"),
    Field("links", _get_links, since="2.23", optional=True),
)
BELOW_SERVER: tuple[Field, ...] = (
    *_COMMON,
    Field("server_uuid", "server_id"),
    *(
        Field(f"{name}_bytes", _make_bytes_getter(name))
        for name in (
            "memory_total",
            "memory_processed",
            "memory_remaining",
            "disk_total",
            "disk_processed",
            "disk_remaining",
        )
    ),
)


def many(rows: Sequence[ShownMigrationRow], view: MigrationView, version: int) -> list[JsonObject]:
    """Return the items of the list of all migrations."""
    getters = visible_fields(FIELDS, version)
    return [render_readable(getters, row, view) for row in rows]


def below_server(row: ShownMigrationRow, view: MigrationView, version: int) -> JsonObject:
    """Return the body of one migration below its server."""
    return render(visible_fields(BELOW_SERVER, version), row, view)
