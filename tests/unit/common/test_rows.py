# SPDX-License-Identifier: Apache-2.0
"""The shapes of the store's rows have the columns of their tables, with their types."""

from __future__ import annotations

import typing
from types import NoneType, UnionType

import pytest
import sqlalchemy as sa

from common.store import rows, schema
from common.store.schema import Json

#: One shape for each table whose rows leave their module.
TABLES: dict[type, sa.Table] = {
    rows.ActionRow: schema.actions,
    rows.AggregateRow: schema.aggregates,
    rows.CleanupRow: schema.cleanups,
    rows.ConsoleTokenRow: schema.console_tokens,
    rows.EventRow: schema.events,
    rows.FlavorRow: schema.flavors,
    rows.GuestRow: schema.guests,
    rows.HostActionRow: schema.host_actions,
    rows.IdempotencyKeyRow: schema.idempotency_keys,
    rows.InventoryRow: schema.inventories,
    rows.KeypairRow: schema.keypairs,
    rows.MigrationRow: schema.migrations,
    rows.NotificationRow: schema.notifications,
    rows.ProviderRow: schema.providers,
    rows.ServerGroupRow: schema.server_groups,
    rows.ServerRow: schema.servers,
    rows.ServiceRow: schema.services,
    rows.BlockDeviceRow: schema.block_devices,
    rows.ShareMappingRow: schema.share_mappings,
}
#: What is a part of one table's columns.
PARTS: dict[type, sa.Table] = {
    rows.AskedImage: schema.host_images,
    rows.FailedImage: schema.host_images,
    rows.RequestedControl: schema.migrations,
    rows.ServerKey: schema.servers,
    rows.ServerPlace: schema.servers,
    rows.ServerState: schema.servers,
    rows.ServerUserData: schema.servers,
}
#: Columns that are not null in the rows that are selected.
FILLED = {(rows.RequestedControl, "requested_control"), (rows.ServerUserData, "user_data")}


def kinds(hint: object) -> set[object]:
    """What a column may hold, without what its elements are."""
    parts = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return {typing.get_origin(part) or part for part in parts}


def held(column: sa.Column[object]) -> set[object]:
    kind = {dict, list} if isinstance(column.type, Json) else {column.type.python_type}
    return kind | ({NoneType} if column.nullable else set())


def named(shape: type) -> str:
    return shape.__name__


@pytest.mark.parametrize("shape", TABLES, ids=named)
def test_a_shape_has_the_columns_of_its_table(shape: type) -> None:
    assert list(typing.get_type_hints(shape)) == [column.name for column in TABLES[shape].c]


@pytest.mark.parametrize("shape", [*TABLES, *PARTS], ids=named)
def test_columns_hold_what_their_shape_says(shape: type) -> None:
    table = (TABLES | PARTS)[shape]
    for name, hint in typing.get_type_hints(shape).items():
        column = table.c[name]
        wanted = held(column) - ({NoneType} if (shape, name) in FILLED else set())
        found = kinds(hint)
        is_json = isinstance(column.type, Json)
        assert found <= wanted if is_json else found == wanted, name
        assert (NoneType in found) is (NoneType in wanted), name


def test_a_server_as_its_users_see_it_has_columns_of_its_table() -> None:
    for name, hint in typing.get_type_hints(rows.ServerRecord).items():
        column = schema.servers.c[name]
        kind = str if isinstance(column.type, Json) else column.type.python_type
        assert kinds(hint) == {kind} | ({NoneType} if column.nullable else set()), name


def test_every_shape_of_a_table_is_compared_with_it() -> None:
    """One that extends a table's, or joins many, is left to mypy."""
    shapes = {getattr(rows, name) for name in rows.__all__ if name.endswith("Row")}
    assert {shape for shape in shapes if shape.__bases__ == (typing.Protocol,)} == set(TABLES)
