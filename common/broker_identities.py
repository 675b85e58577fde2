# SPDX-License-Identifier: Apache-2.0
"""What each host may do at the broker: its user there, its permissions, and how an administrator makes them.

RabbitMQ then enforces that a host reads its own queue only, and speaks only to conductors and to who has asked it, in
its own name (``common.rpc.host_link``). What it may not do is refused by closing its connection.
Permissions: https://www.rabbitmq.com/docs/access-control
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

PREFIX = "kilonova"          #: begins every name at the broker
REPORTS, HEARTBEATS, ANSWERS = "reports", "heartbeats", "answers"
NOTHING = "^$"


@dataclass(frozen=True, slots=True)
class Identity:
    """A user of the broker, and what it may: regular expressions for names of queues and exchanges (configure, read,
    write), and for the routing keys of one exchange."""

    user: str
    password: str = field(repr=False)
    configure: str
    write: str
    read: str
    exchange: str = ""
    topic_write: str = NOTHING
    topic_read: str = NOTHING

    def permissions(self, virtual_host: str = "/") -> dict[str, Any]:
        """As the broker's definitions have them."""
        return {"user": self.user, "vhost": virtual_host, "configure": self.configure, "write": self.write,
                "read": self.read}

    def topic_permissions(self, virtual_host: str = "/") -> dict[str, Any]:
        """The same of routing keys."""
        return {"user": self.user, "vhost": virtual_host, "exchange": self.exchange, "write": self.topic_write,
                "read": self.topic_read}


def of_host(host: str, password: str, prefix: str = PREFIX) -> Identity:
    """The identity of a host."""
    queue, name = f"^{re.escape(host_queue(prefix, host))}$", re.escape(host)
    return Identity(user_of(host, prefix), password, queue, f"^{exchange(prefix)}$", queue, exchange(prefix),
                    rf"^({REPORTS}|{HEARTBEATS}|{ANSWERS}\.[0-9a-f]{{32}})\.{name}$")


def user_of(host: str, prefix: str = PREFIX) -> str:
    """The name of a host's user."""
    return f"{prefix}-host-{host}"


def host_queue(prefix: str, host: str) -> str:
    """The queue of a host."""
    return f"{prefix}-host.{host}"


def exchange(prefix: str) -> str:
    """Where hosts speak to the control plane; the routing key says to whom, and ends in the host's name."""
    return f"{prefix}-hosts"
