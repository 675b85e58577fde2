# SPDX-License-Identifier: Apache-2.0
"""The row protocols in ``common.store.rows`` against the tables of the schema."""

from __future__ import annotations

import typing
from types import NoneType, UnionType

import pytest
import sqlalchemy as sa

from common.store import rows, schema
from common.store.schema import Json

#: Row protocol -> its table, for each table whose rows leave their module.
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
#: Row protocol with some columns of a table -> the table.
PARTS: dict[type, sa.Table] = {
    rows.AskedImage: schema.host_images,
    rows.FailedImage: schema.host_images,
    rows.RequestedControl: schema.migrations,
    rows.ServerKey: schema.servers,
    rows.ServerPlace: schema.servers,
    rows.ServerState: schema.servers,
}
#: Nullable columns that are never null in the rows of the protocol.
FILLED = {(rows.RequestedControl, "requested_control")}


def hint_types(hint: object) -> set[object]:
    """Return the types of a hint, without the types of elements."""
    parts = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return {typing.get_origin(part) or part for part in parts}


def column_types(column: sa.Column[object]) -> set[object]:
    kind = {dict, list} if isinstance(column.type, Json) else {column.type.python_type}
    return kind | ({NoneType} if column.nullable else set())


def name_of(shape: type) -> str:
    return shape.__name__


@pytest.mark.parametrize("shape", TABLES, ids=name_of)
def test_row_protocol_has_the_columns_of_its_table(shape: type) -> None:
    assert list(typing.get_type_hints(shape)) == [column.name for column in TABLES[shape].c]


@pytest.mark.parametrize("shape", [*TABLES, *PARTS], ids=name_of)
def test_row_protocol_has_the_types_of_the_columns(shape: type) -> None:
    table = (TABLES | PARTS)[shape]
    for name, hint in typing.get_type_hints(shape).items():
        column = table.c[name]
        expected_types = column_types(column) - ({NoneType} if (shape, name) in FILLED else set())
        declared_types = hint_types(hint)
        is_json = isinstance(column.type, Json)
        assert declared_types <= expected_types if is_json else declared_types == expected_types, (
            name
        )
        assert (NoneType in declared_types) is (NoneType in expected_types), name


def test_server_record_has_the_types_of_the_servers_table() -> None:
    for name, hint in typing.get_type_hints(rows.ServerRecord).items():
        column = schema.servers.c[name]
        kind = str if isinstance(column.type, Json) else column.type.python_type
        assert hint_types(hint) == {kind} | ({NoneType} if column.nullable else set()), name


def test_row_protocols_of_tables_are_all_compared() -> None:
    """Protocols that extend another protocol or join tables are checked by mypy only."""
    shapes = {getattr(rows, name) for name in rows.__all__ if name.endswith("Row")}
    assert {shape for shape in shapes if shape.__bases__ == (typing.Protocol,)} == set(TABLES)
