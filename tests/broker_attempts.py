# SPDX-License-Identifier: Apache-2.0
"""Attempts of a thief with the RabbitMQ user of one host. RabbitMQ must refuse each attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.security.broker_names import PREFIX, exchange, host_queue

#: A function that makes the attempt on an open channel.
Attempt = Callable[[Any], Any]


def attempts(mine: str, other: str) -> dict[str, Attempt]:
    """Return the attempts by their purpose.

    Args:
        mine: The host of the stolen RabbitMQ user.
        other: Another host.
    """
    own_queue, others_queue, hosts = (
        host_queue(PREFIX, mine),
        host_queue(PREFIX, other),
        exchange(PREFIX),
    )

    def consume(queue: str) -> Attempt:
        return lambda channel: channel.basic_consume(queue, no_ack=True)

    def publish(exchange_name: str, key: str) -> Attempt:
        def attempt(channel: Any) -> None:
            channel.basic_publish(
                channel.prepare_message(b"x", content_encoding="binary"),
                exchange=exchange_name,
                routing_key=key,
            )
            # RabbitMQ reports a refused publish before the reply to the next method.
            channel.queue_declare(own_queue, passive=True)

        return attempt

    def declare_own(arguments: dict[str, Any]) -> Attempt:
        return lambda channel: channel.queue_declare(
            own_queue, durable=True, auto_delete=False, arguments=arguments
        )

    return {
        "read another host's queue": consume(others_queue),
        "read another host's queue under a further name": consume(f"{others_queue}/1"),
        "declare its own queue under a further name": lambda channel: channel.queue_declare(
            f"{own_queue}/1", durable=True
        ),
        "read the hosts' reports": consume(f"{PREFIX}-reports"),
        "get a message from another host's queue": lambda channel: channel.basic_get(others_queue),
        "declare another host's queue": lambda channel: channel.queue_declare(
            others_queue, durable=True
        ),
        "delete another host's queue": lambda channel: channel.queue_delete(others_queue),
        "purge another host's queue": lambda channel: channel.queue_purge(others_queue),
        "bind its queue to the messages of all hosts": lambda channel: channel.queue_bind(
            own_queue, hosts, "#"
        ),
        "delete the hosts' exchange": lambda channel: channel.exchange_delete(hosts),
        "declare an exchange": lambda channel: channel.exchange_declare("mine", "topic"),
        "declare a queue": lambda channel: channel.queue_declare("mine"),
        "declare a queue with a generated name": lambda channel: channel.queue_declare(""),
        **{
            f"declare its own queue {change}": declare_own(arguments)
            for change, arguments in {
                "without arguments": {},
                "to dead-letter in another host's name": {
                    "x-dead-letter-exchange": hosts,
                    "x-dead-letter-routing-key": f"reports.{other}",
                    "x-message-ttl": 1,
                },
                "to dead-letter into another host's queue": {
                    "x-dead-letter-exchange": "",
                    "x-dead-letter-routing-key": others_queue,
                },
                "as a stream": {"x-queue-type": "stream"},
                "as a quorum queue": {"x-queue-type": "quorum"},
                "without a limit": {"x-max-length": 10**9},
                "with many priorities": {"x-max-priority": 255},
            }.items()
        },
        "delete its own queue": lambda channel: channel.queue_delete(own_queue),
        "publish to another host's queue": publish("", others_queue),
        "publish to a queue of the control plane": publish("", f"{PREFIX}-reports"),
        "report in another host's name": publish(hosts, f"reports.{other}"),
        "report in a name with the prefix of its own": publish(hosts, f"reports.{mine}.{other}"),
        "send a heartbeat in another host's name": publish(hosts, f"heartbeats.{other}"),
        "wake the conductors": publish("kilonova", "kilonova-conductor"),
        "answer in another host's name": publish(hosts, f"answers.{'0' * 32}.{other}"),
        "publish to RabbitMQ's own exchange": publish("amq.topic", "x"),
    }
