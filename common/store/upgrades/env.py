# SPDX-License-Identifier: Apache-2.0
"""Alembic's environment, with the connection that ``upgrade`` has opened."""

from alembic import context

from common.store.schema import metadata
from common.store.version import UPGRADED_TO

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    version_table=UPGRADED_TO,
)
with context.begin_transaction():
    context.run_migrations()
