# SPDX-License-Identifier: Apache-2.0
"""Connections of tests to a real RabbitMQ."""

from __future__ import annotations

from kombu.connection import Connection


def broker_connection(url: str) -> Connection:
    """Return a connection that waits for a busy broker longer than kombu's five seconds.

    Args:
        url: Address with user and password, for kombu (amqp://) or for oslo.messaging (rabbit://).
    """
    return Connection(url.replace("rabbit://", "amqp://"), connect_timeout=60)
