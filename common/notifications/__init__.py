# SPDX-License-Identifier: Apache-2.0
"""Notifications to other systems about changes: events, notices, messages and audit periods.

Free of effects. A transaction that changes an object writes a ``Notice`` and
a snapshot of the object into the outbox (``common.store.notifications.outbox``). A conductor builds
messages from that and sends them (``conductor.notifications``).
"""
