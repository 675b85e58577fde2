# SPDX-License-Identifier: Apache-2.0
"""Limits of projects that differ from a service's defaults.

Each service has one such table. The service itself counts the usage.
"""

from collections.abc import Mapping

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, delete, select
from sqlalchemy.dialects.sqlite import insert


class SetLimits:
    """The table of limits, and the queries."""

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
        """Return the limit of each resource in `defaults`: the project's own, or the default.

        Stored limits of other resources are left out.
        """
        own = connection.execute(select(self.table).where(self.table.c.project_id == project_id))
        return {**defaults, **{row.resource: row.limit for row in own if row.resource in defaults}}

    def change(self, connection: Connection, project_id: str, limits: Mapping[str, int]) -> None:
        """Store these limits for a project. Its other limits stay."""
        for resource, limit in limits.items():
            row = insert(self.table).values(project_id=project_id, resource=resource, limit=limit)
            connection.execute(
                row.on_conflict_do_update(
                    index_elements=["project_id", "resource"], set_={"limit": limit}
                )
            )

    def forget(self, connection: Connection, project_id: str) -> None:
        """Remove the limits of a project, so that the defaults apply."""
        connection.execute(delete(self.table).where(self.table.c.project_id == project_id))
