# SPDX-License-Identifier: Apache-2.0
"""The users of hosts and of the control plane's roles at the broker, with their permissions.

RabbitMQ enforces these rules, and closes the connection of a user that breaks them:

* A host reads only the host's queue, and sends only under the host's name, to conductors and to
  processes that sent a request to the host.
* Only conductors declare the queues of hosts.
* A role reads only its own queues and answers.

docs/decisions/0035 describes the limits of this. Permissions:
https://www.rabbitmq.com/docs/access-control
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.domain.json_types import JsonObject
from common.security import broker_names
from common.security.broker_names import (
    ANSWERS,
    CALLS,
    CONDUCTOR,
    HEARTBEATS,
    PREFIX,
    REPORTS,
    SCHEDULER,
    answers_queue,
    exchange,
    host_queue,
    join_queue,
    reply_queue,
    user_of,
    user_of_join,
    user_of_role,
)

NOTHING = "^$"
#: Limits of a host's user. An agent has two connections, and two more while a restarted one takes
#: over. https://www.rabbitmq.com/docs/user-limits
HOST_LIMITS = {"max-connections": 8, "max-channels": 64}
#: RabbitMQ's name for the default exchange, which leads into each queue.
_DEFAULT = r"amq\.default"
_NUMBER = "[0-9a-f]{32}"
#: The end of the further names of a queue (``broker_names.names_of``).
_FURTHER = rf"(/[1-{broker_names.NAMES - 1}])?"


@dataclass(frozen=True, slots=True)
class Topic:
    """The permissions of a user at a topic exchange, as patterns of routing keys.

    The user may send messages whose key matches ``write``, and bind queues to keys that match
    ``read``.
    """

    exchange: str
    write: str = NOTHING
    read: str = NOTHING


@dataclass(frozen=True, slots=True)
class Identity:
    """A user of the broker and its permissions: patterns for queues, exchanges and routing keys."""

    user: str
    password: str = field(repr=False)
    configure: str
    write: str
    read: str
    topics: tuple[Topic, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)

    def permissions(self, virtual_host: str = "/") -> JsonObject:
        """Return the permissions for queues and exchanges, in RabbitMQ's format of definitions."""
        return {
            "user": self.user,
            "vhost": virtual_host,
            "configure": self.configure,
            "write": self.write,
            "read": self.read,
        }

    def topic_permissions(self, virtual_host: str = "/") -> list[JsonObject]:
        """Return the permissions for routing keys, in RabbitMQ's format of definitions."""
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
    """Return the broker's user of a host, which reads the host's queue and sends under its name."""
    sends = rf"^({REPORTS}|{HEARTBEATS}|{ANSWERS}\.{_NUMBER})\.{re.escape(host)}$"
    return _of_machine(user_of(host, prefix), password, host_queue(prefix, host), sends, prefix)


def of_join(host: str, password: str, prefix: str = PREFIX) -> Identity:
    """Return the broker's user in a join token, which sends requests and reads the answers."""
    sends = rf"^{REPORTS}\.{re.escape(host)}$"
    user, queue = user_of_join(host, prefix), join_queue(prefix, host)
    return _of_machine(user, password, queue, sends, prefix)


def _of_machine(user: str, password: str, queue: str, sends: str, prefix: str) -> Identity:
    topic = Topic(exchange(prefix), sends)
    write, read = f"^{exchange(prefix)}$", f"^{re.escape(queue)}{_FURTHER}$"
    return Identity(user, password, NOTHING, write, read, (topic,), HOST_LIMITS)


def of_role(
    role: str,
    password: str,
    prefix: str = PREFIX,
    calls: str = CALLS,
    notifications: str = "nova",
    topics: Sequence[str] = ("notifications", "versioned_notifications"),
) -> Identity:
    """Return the broker's user of a role of the control plane.

    Args:
        role: API, CONSOLE, SCHEDULER or CONDUCTOR.
        password: The user's password.
        prefix: The prefix of every name at the broker.
        calls: The exchange between these roles.
        notifications: The exchange of notifications.
        topics: The topics of notifications.
    """
    from_hosts, begin = exchange(prefix), re.escape(CALLS)
    hosts, called, notified = map(re.escape, (from_hosts, calls, notifications))
    answers = re.escape(answers_queue(prefix, role, "")) + _NUMBER
    replies = reply_queue(role, "") + _NUMBER
    served = rf"{begin}-{role}(\..+|_fanout.*)?"
    answer_keys = rf"{ANSWERS}\.{_NUMBER}\.#"
    binds, wakes = [rf"{begin}-{role}(\..+)?"], rf"{begin}-({CONDUCTOR}|nobody)"
    match role:
        # The console service sends requests only to hosts.
        case broker_names.CONSOLE:
            permissions = [answers], [answers, _DEFAULT], [answers, hosts]
            routes = [Topic(from_hosts, read=_any([answer_keys]))]
        case broker_names.API:
            permissions = (
                [answers, replies, called],
                [answers, _DEFAULT, called],
                [answers, replies, hosts],
            )
            routes = [
                Topic(from_hosts, read=_any([answer_keys])),
                Topic(calls, write=_any([wakes])),
            ]
        # The scheduler only answers.
        case broker_names.SCHEDULER:
            permissions = [served, called], [served, _DEFAULT], [served, called]
            routes = [Topic(calls, read=_any(binds))]
        case _:
            doors = rf"{re.escape(prefix)}-({REPORTS}|{HEARTBEATS}){_FURTHER}"
            queues = [re.escape(name(prefix, "")) + ".+" for name in (host_queue, join_queue)]
            outbox = rf"({'|'.join(map(re.escape, topics))})\..+"
            own = [served, doors, answers]
            permissions = (
                [*own, replies, called, hosts, *queues, notified, outbox],
                [*own, _DEFAULT, called, notified, outbox],
                [*own, replies, called, hosts, notified],
            )
            asks = [rf"{begin}-({CONDUCTOR}(\..+)?|{SCHEDULER}|nobody)"]
            if calls == notifications:
                asks, binds = [*asks, outbox], [*binds, outbox]
            # A conductor binds each host by name while another host is in quarantine.
            keys = [rf"({REPORTS}|{HEARTBEATS})\..+", answer_keys]
            routes = [Topic(from_hosts, read=_any(keys)), Topic(calls, _any(asks), _any(binds))]
    configure, write, read = map(_any, permissions)
    user = user_of_role(role, prefix)
    return Identity(user, password, configure, write, read, tuple(routes))


def of_operator(user: str, password: str) -> Identity:
    """Return a user of the broker with all rights."""
    return Identity(user, password, ".*", ".*", ".*")


def definitions(identities: Sequence[Identity], virtual_host: str = "/") -> JsonObject:
    """Return the users and their rights in RabbitMQ's format of definitions.

    Passwords are salted hashes. The salt is derived from user and password, so equal identities
    have equal definitions. Format: https://www.rabbitmq.com/docs/definitions
    """
    return {
        # Importing an existing virtual host would reset its description, and "/" always exists.
        "vhosts": [] if virtual_host == "/" else [{"name": virtual_host}],
        "users": [
            {
                "name": identity.user,
                "password_hash": _hash_password(identity),
                "tags": [],
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "limits": dict(identity.limits),
            }
            for identity in identities
        ],
        "permissions": [identity.permissions(virtual_host) for identity in identities],
        "topic_permissions": [
            topic for identity in identities for topic in identity.topic_permissions(virtual_host)
        ],
    }


def _hash_password(identity: Identity) -> str:
    salt = hashlib.sha256(f"{identity.user} {identity.password}".encode()).digest()[:4]
    return base64.b64encode(
        salt + hashlib.sha256(salt + identity.password.encode()).digest()
    ).decode()


def _any(patterns: Iterable[str]) -> str:
    return f"^({'|'.join(patterns)})$"
