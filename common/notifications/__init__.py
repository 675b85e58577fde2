# SPDX-License-Identifier: Apache-2.0
"""What is told to others of what happens: names of events, payloads in Nova's words, options. Pure
but for the options.

A transition writes a ``Notice`` and a picture of its object into the outbox (``store.outbox``) in
its own transaction; a conductor makes messages of it (``messages``) and sends them. See
docs/decisions/0029.
"""
