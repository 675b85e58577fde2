# SPDX-License-Identifier: Apache-2.0
"""The database: engine, schema, and one module per noun.

Functions take an open transaction (``Connection``) first, so that callers can combine them.
``Store.write`` and ``Store.read`` in ``engine`` open transactions, and repeat writes after
deadlocks.

Invariant: the lock order is project, server, action, migration, server group (ascending), provider
(ascending), children.
"""
