# SPDX-License-Identifier: Apache-2.0
"""What each host and each role of the control plane may do at the broker: its user there, and its
permissions.

RabbitMQ then enforces that a host reads its own queue only, and speaks only to conductors and to
who has asked it, in its own name (``common.rpc.host_link``); that conductors alone declare the
queues of hosts; and that a role reads its own queues and answers only, and wakes only whom it has
to. RabbitMQ refuses anything else by closing the connection. docs/decisions/0035 names what
RabbitMQ cannot hold a role to.
Permissions: https://www.rabbitmq.com/docs/access-control
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.json_types import JsonObject

PREFIX = "kilonova"  #: begins every name at the broker
REPORTS, HEARTBEATS, ANSWERS = "reports", "heartbeats", "answers"
NOTHING = "^$"
#: What the broker lets a host's user have at a time. An agent has two connections, and two more
#: while a restarted one takes over. https://www.rabbitmq.com/docs/user-limits
HOST_LIMITS = {"max-connections": 8, "max-channels": 64}
API, CONSOLE, SCHEDULER, CONDUCTOR = "api", "console", "scheduler", "conductor"
ROLES = (API, CONSOLE, SCHEDULER, CONDUCTOR)
CALLS = "kilonova"  #: the exchange between processes of the control plane; begins the names of their topics
_DEFAULT = r"amq\.default"  #: RabbitMQ's name for the exchange that leads into each queue
_NUMBER = "[0-9a-f]{32}"


@dataclass(frozen=True, slots=True)
class Topic:
    """What a user may say to an exchange of type topic, and hear of it: regular expressions for
    routing keys."""

    exchange: str
    write: str = NOTHING
    read: str = NOTHING


@dataclass(frozen=True, slots=True)
class Identity:
    """A user of the broker, and what it may: regular expressions for names of queues and exchanges
    (configure, read, write), and for the routing keys of some exchanges."""

    user: str
    password: str = field(repr=False)
    configure: str
    write: str
    read: str
    topics: tuple[Topic, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)

    def permissions(self, virtual_host: str = "/") -> JsonObject:
        """As the broker's definitions have them."""
        return {
            "user": self.user,
            "vhost": virtual_host,
            "configure": self.configure,
            "write": self.write,
            "read": self.read,
        }

    def topic_permissions(self, virtual_host: str = "/") -> list[JsonObject]:
        """The same of routing keys."""
        return [
            {
                "user": self.user,
                "vhost": virtual_host,
                "exchange": topic.exchange,
                "write": topic.write,
                "read": topic.read,
            }
            for topic in self.topics
        ]


def of_host(host: str, password: str, prefix: str = PREFIX) -> Identity:
    """The identity of a host."""
    queue, name = f"^{re.escape(host_queue(prefix, host))}$", re.escape(host)
    return Identity(
        user_of(host, prefix),
        password,
        NOTHING,
        f"^{exchange(prefix)}$",
        queue,
        (Topic(exchange(prefix), rf"^({REPORTS}|{HEARTBEATS}|{ANSWERS}\.{_NUMBER})\.{name}$"),),
        HOST_LIMITS,
    )


def of_join(host: str, password: str, prefix: str = PREFIX) -> Identity:
    """The identity of who has a token with which this host joins: it asks conductors, and reads
    their answers."""
    queue = f"^{re.escape(join_queue(prefix, host))}$"
    said = Topic(exchange(prefix), rf"^{REPORTS}\.{re.escape(host)}$")
    return Identity(
        user_of_join(host, prefix),
        password,
        NOTHING,
        f"^{exchange(prefix)}$",
        queue,
        (said,),
        HOST_LIMITS,
    )


def of_role(
    role: str,
    password: str,
    prefix: str = PREFIX,
    calls: str = CALLS,
    notifications: str = "nova",
    topics: Sequence[str] = ("notifications", "versioned_notifications"),
) -> Identity:
    """The identity of API, CONSOLE, SCHEDULER or CONDUCTOR. ``calls``: the exchange between these;
    ``notifications`` and ``topics``: the exchange and the topics that notifications go to."""
    hosts, called, begin = re.escape(exchange(prefix)), re.escape(calls), re.escape(CALLS)
    answers, replies = (
        rf"{re.escape(answers_queue(prefix, role, ''))}{_NUMBER}",
        rf"{reply_queue(role, '')}{_NUMBER}",
    )
    asks = Topic(exchange(prefix), read=rf"^{ANSWERS}\.{_NUMBER}\.#$")
    served = rf"{begin}-{role}(\..+|_fanout.*)?"
    if role == CONSOLE:  # it asks hosts only
        return _identity(
            role, password, prefix, [answers], [answers, _DEFAULT], [answers, hosts], asks
        )
    if role == API:
        wakes = Topic(calls, write=rf"^{begin}-({CONDUCTOR}|nobody)$")
        return _identity(
            role,
            password,
            prefix,
            [answers, replies, called],
            [answers, _DEFAULT, called],
            [answers, replies, hosts],
            asks,
            wakes,
        )
    heard = rf"^{begin}-{role}(\..+)?$"
    if role == SCHEDULER:  # it answers only
        return _identity(
            role,
            password,
            prefix,
            [served, called],
            [served, _DEFAULT],
            [served, called],
            Topic(calls, read=heard),
        )
    doors = rf"{re.escape(prefix)}-({REPORTS}|{HEARTBEATS})"
    queues = rf"({re.escape(host_queue(prefix, ''))}|{re.escape(join_queue(prefix, ''))}).+"
    outbox = rf"({'|'.join(map(re.escape, topics))})\..+"
    return _identity(
        role,
        password,
        prefix,
        [served, doors, answers, replies, called, hosts, queues, re.escape(notifications), outbox],
        [served, doors, answers, _DEFAULT, called, re.escape(notifications), outbox],
        [served, doors, answers, replies, called, hosts, re.escape(notifications)],
        # It hears each host by its name while another host is in quarantine.
        Topic(exchange(prefix), read=rf"^(({REPORTS}|{HEARTBEATS})\..+|{ANSWERS}\.{_NUMBER}\.#)$"),
        Topic(
            calls,
            *_sides(
                calls == notifications,
                rf"{begin}-({CONDUCTOR}(\..+)?|{SCHEDULER}|nobody)",
                heard,
                outbox,
            ),
        ),
    )


def _sides(both: bool, asked: str, heard: str, outbox: str) -> tuple[str, str]:
    """What a conductor says and hears where calls travel; also notifications where they travel
    there too."""
    return (
        (f"^({asked}|{outbox})$", f"^({heard[1:-1]}|{outbox})$")
        if both
        else (f"^({asked})$", heard)
    )


def _identity(
    role: str,
    password: str,
    prefix: str,
    configure: list[str],
    write: list[str],
    read: list[str],
    *topics: Topic,
) -> Identity:
    may: dict[str, Any] = {
        name: f"^({'|'.join(names)})$"
        for name, names in (("configure", configure), ("write", write), ("read", read))
    }
    return Identity(user_of_role(role, prefix), password, topics=topics, **may)


def user_of_role(role: str, prefix: str = PREFIX) -> str:
    """The name of a role's user."""
    return f"{prefix}-{role}"


def answers_queue(prefix: str, role: str, number: str) -> str:
    """Where hosts' answers come to a process of this role."""
    return f"{prefix}-{ANSWERS}-{role}.{number}"


def reply_queue(role: str, number: str) -> str:
    """Where the answers of other processes of the control plane come to one of this role."""
    return f"reply_{PREFIX}-{role}_{number}"


def user_of(host: str, prefix: str = PREFIX) -> str:
    """The name of a host's user."""
    return f"{prefix}-host-{host}"


def host_queue(prefix: str, host: str) -> str:
    """The queue of a host."""
    return f"{prefix}-host.{host}"


def user_of_join(host: str, prefix: str = PREFIX) -> str:
    """The name of the user of who joins as this host."""
    return f"{prefix}-join-{host}"


def join_queue(prefix: str, host: str) -> str:
    """The queue of who joins as this host."""
    return f"{prefix}-join.{host}"


def exchange(prefix: str) -> str:
    """Where hosts speak to the control plane; the routing key says to whom, and ends in the host's
    name."""
    return f"{prefix}-hosts"
