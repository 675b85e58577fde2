# SPDX-License-Identifier: Apache-2.0
"""JSON documents in the database that cannot be read.

``doctor.check`` calls ``check`` first, and ``until_damaged`` around its other parts. Reads only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.schema import (
    DamagedObject,
    Json,
    aggregates,
    flavors,
    guests,
    hosts,
    migrations,
    server_groups,
    servers,
)
from deploy.operator.doctor.finding import Finding

_INVARIANT = "document"
#: Table -> the column with the id or name of a row that findings show.
_KEYS = {
    aggregates: aggregates.c.id,
    flavors: flavors.c.flavorid,
    guests: guests.c.server_id,
    hosts: hosts.c.name,
    migrations: migrations.c.uuid,
    server_groups: server_groups.c.id,
    servers: servers.c.id,
}
_DOCUMENTS = {
    table: [column.name for column in table.c if isinstance(column.type, Json)] for table in _KEYS
}
#: Small tables, which no other part of the doctor has read.
_QUERIES = {
    table: sa.select(_KEYS[table], *(table.c[name] for name in _DOCUMENTS[table]))
    for table in (aggregates, flavors, hosts, server_groups)
}


def check(tx: Connection, rows: Mapping[sa.Table, Iterable[object]]) -> Iterator[Finding]:
    """Yield a finding for each damaged document in these rows and in the tables of ``_QUERIES``.

    A document is a JSON column. It is damaged unless the value is an object, a list or None.

    Args:
        tx: The transaction.
        rows: Rows that the doctor has read already, by table.
    """
    queried = {table: tx.execute(query).all() for table, query in _QUERIES.items()}
    for table, table_rows in {**rows, **queried}.items():
        for row in table_rows:
            for name in _DOCUMENTS[table]:
                value = getattr(row, name)
                if isinstance(value, DamagedObject) or not isinstance(value, dict | list | None):
                    key = getattr(row, _KEYS[table].name)
                    yield Finding(_INVARIANT, f"{table.name}/{key}", f"its {name} is damaged")


def until_damaged(
    name: str, findings: Iterable[Finding], damaged: Collection[Finding]
) -> Iterator[Finding]:
    """Yield the findings of a part of the doctor until they end or a damaged document raises.

    In that case the last finding is that this part ended early.

    Args:
        name: Name of the part.
        findings: The findings of the part.
        damaged: The findings about damaged documents.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: The part raised this error, and there are
            no damaged documents. This is a defect of the doctor.
    """
    try:
        yield from findings
    except (AttributeError, KeyError, TypeError, ValueError):
        if not damaged:
            raise
        yield Finding(_INVARIANT, f"check of {name}", "it ended early at a damaged document")
