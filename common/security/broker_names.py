# SPDX-License-Identifier: Apache-2.0
"""The names of users, queues and exchanges at the broker."""

from __future__ import annotations

#: The prefix of every name at the broker.
PREFIX = "kilonova"
REPORTS, HEARTBEATS, ANSWERS = "reports", "heartbeats", "answers"
API, CONSOLE, SCHEDULER, CONDUCTOR = "api", "console", "scheduler", "conductor"
ROLES = (API, CONSOLE, SCHEDULER, CONDUCTOR)
#: How many names a queue of hosts or for their messages may have (``names_of``).
NAMES = 4
#: The exchange between processes of the control plane, and the prefix of their topics.
CALLS = "kilonova"


def user_of_role(role: str, prefix: str = PREFIX) -> str:
    """Return the name of the broker's user for processes of a role."""
    return f"{prefix}-{role}"


def answers_queue(prefix: str, role: str, number: str) -> str:
    """Return the name of the queue for hosts' answers to a process of this role.

    ``number`` identifies the connection that reads the queue.
    """
    return f"{prefix}-{ANSWERS}-{role}.{number}"


def reply_queue(role: str, number: str) -> str:
    """Return the name of the queue for other processes' answers to a process of this role.

    ``number`` identifies the process.
    """
    return f"reply_{PREFIX}-{role}_{number}"


def user_of(host: str, prefix: str = PREFIX) -> str:
    """Return the name of the broker's user for a host."""
    return f"{prefix}-host-{host}"


def host_queue(prefix: str, host: str) -> str:
    """Return the name of the queue from which a host reads messages."""
    return f"{prefix}-host.{host}"


def names_of(queue: str) -> tuple[str, ...]:
    """Return the names that this queue may have: ``queue``, ``queue``/1, ``queue``/2 and so on.

    Why: while a node of a RabbitMQ cluster is down, RabbitMQ refuses to declare its queues at
    another node under the same name. A host's name contains no slash.
    """
    return (queue, *(f"{queue}/{number}" for number in range(1, NAMES)))


def user_of_join(host: str, prefix: str = PREFIX) -> str:
    """Return the name of the broker's user in the join token of a host."""
    return f"{prefix}-join-{host}"


def join_queue(prefix: str, host: str) -> str:
    """Return the name of the queue from which a machine that joins as this host reads answers."""
    return f"{prefix}-join.{host}"


def exchange(prefix: str) -> str:
    """Return the name of the exchange to which hosts send. Routing keys end in the host's name."""
    return f"{prefix}-hosts"
