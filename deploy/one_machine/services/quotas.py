# SPDX-License-Identifier: Apache-2.0
"""Limits that were set for projects, in the place of a service's defaults.

A service has one table of them; what is counted against a limit is the service's own.
"""

from collections.abc import Mapping

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, delete, select
from sqlalchemy.dialects.sqlite import insert


class SetLimits:
    """The table, and what reads and writes it."""

    def __init__(self, metadata: MetaData) -> None:
        self.table = Table(
            "quotas",
            metadata,
            Column("project_id", String, primary_key=True),
            Column("resource", String, primary_key=True),
            Column("limit", Integer, nullable=False),
        )

    def of(
        self, connection: Connection, project_id: str, defaults: Mapping[str, int]
    ) -> dict[str, int]:
        """All limits of a project; those of resources without a default are none."""
        own = connection.execute(select(self.table).where(self.table.c.project_id == project_id))
        return {**defaults, **{row.resource: row.limit for row in own if row.resource in defaults}}

    def change(self, connection: Connection, project_id: str, limits: Mapping[str, int]) -> None:
        """Set these; others stay."""
        for resource, limit in limits.items():
            row = insert(self.table).values(project_id=project_id, resource=resource, limit=limit)
            connection.execute(
                row.on_conflict_do_update(
                    index_elements=["project_id", "resource"], set_={"limit": limit}
                )
            )

    def forget(self, connection: Connection, project_id: str) -> None:
        """The defaults are in force again."""
        connection.execute(delete(self.table).where(self.table.c.project_id == project_id))
