# SPDX-License-Identifier: Apache-2.0
"""A number that a row had is never given to another one: SQLite gave the highest one again after a
delete."""

from alembic import op

revision = "0006"
down_revision = "0005"

_NUMBERED = ("aggregates", "flavors", "keypairs", "migrations", "providers", "services")


def upgrade() -> None:
    """Make SQLite's tables again; PostgreSQL and MariaDB count on by themselves."""
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in _NUMBERED:
        with op.batch_alter_table(
            name, recreate="always", table_kwargs={"sqlite_autoincrement": True}
        ):
            pass
