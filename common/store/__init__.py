# SPDX-License-Identifier: Apache-2.0
"""The one database: engine and schema, and one module for each noun.

Modules hold functions that take an open transaction (``Connection``) first, so that callers compose
them into one transaction; ``store.write`` and ``store.read`` in ``engine`` open one and repeat it
on deadlock. Lock order, always: project, server, action, migration, server group (ascending),
provider (ascending), children.
"""
