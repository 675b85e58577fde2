# SPDX-License-Identifier: Apache-2.0
"""Notifications to other systems about changes: names of events, payloads as in Nova, options.

Free of effects except for the options. A transaction that changes an object writes a ``Notice`` and
a snapshot of the object into the outbox (``common.store.notifications.outbox``). A conductor builds
messages from that and sends them (``conductor.notifications``).
"""
