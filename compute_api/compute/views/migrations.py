# SPDX-License-Identifier: Apache-2.0
"""Migrations as answers: in the list of all of them, and below their server while they are on their
way.

Rows are those of ``store.migrations``. For callers who may not know hosts these fields are null.
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

#: Live migrations that are shown below their server, and can be found there.
ON_ITS_WAY = (
    MigrationStatus.QUEUED,
    MigrationStatus.PREPARING,
    MigrationStatus.RUNNING,
    MigrationStatus.POST_MIGRATING,
)


@dataclass
class MigrationView:
    """What the rows of one answer share. ``with_hosts``: the caller may know the hosts."""

    links: Links
    with_hosts: bool = False


def is_on_its_way(row: ShownMigrationRow) -> bool:
    """Is it a live migration that has not ended?"""
    return row.type == MigrationType.LIVE and row.status in ON_ITS_WAY


def _host(column: str) -> Callable[[ShownMigrationRow, MigrationView], object]:
    return lambda row, view: getattr(row, column) if view.with_hosts else None


def _number(column: str) -> Callable[[ShownMigrationRow, MigrationView], int | None]:
    """As it was frozen into the server: a flavor that is gone keeps its number."""
    return lambda row, view: getattr(row, column).get("number")


def _bytes(name: str) -> Callable[[ShownMigrationRow, MigrationView], int | None]:
    """Nothing is null: the API has no zeros here."""
    return lambda row, view: (row.progress or {}).get(name) or None


def _links(row: ShownMigrationRow, view: MigrationView) -> object:
    return (
        view.links.of(f"servers/{row.server_id}/migrations", str(row.id))
        if is_on_its_way(row)
        else OMITTED
    )


_COMMON: tuple[Field, ...] = (
    Field("id", "id"),
    Field("status", "status"),
    Field("source_compute", _host("source_host")),
    Field("source_node", _host("source_node")),
    Field("dest_compute", _host("dest_host")),
    Field("dest_host", _host("dest_ip")),
    Field("dest_node", _host("dest_node")),
    Field("created_at", lambda row, view: format_micros(row.created_at)),
    Field("updated_at", lambda row, view: format_micros(row.updated_at)),
    Field("uuid", "uuid", since="2.59"),
    Field("user_id", "user_id", since="2.80"),
    Field("project_id", "project_id", since="2.80"),
)
FIELDS: tuple[Field, ...] = (
    *_COMMON,
    Field("instance_uuid", "server_id"),
    Field("old_instance_type_id", _number("old_flavor")),
    Field("new_instance_type_id", _number("new_flavor")),
    Field("migration_type", "type", since="2.23"),
    Field("links", _links, since="2.23", optional=True),
)
BELOW_SERVER: tuple[Field, ...] = (
    *_COMMON,
    Field("server_uuid", "server_id"),
    *(
        Field(f"{name}_bytes", _bytes(name))
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
    """The items of the list of all migrations."""
    getters = visible_fields(FIELDS, version)
    return [render_readable(getters, row, view) for row in rows]


def below_server(row: ShownMigrationRow, view: MigrationView, version: int) -> JsonObject:
    """One migration below its server."""
    return render(visible_fields(BELOW_SERVER, version), row, view)
