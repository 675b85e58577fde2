# SPDX-License-Identifier: Apache-2.0
"""Alembic's environment, with the connection that ``upgrade`` has opened."""

from alembic import context

from common.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
