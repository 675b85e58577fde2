# SPDX-License-Identifier: Apache-2.0
"""The queues through which hosts and the control plane exchange messages.

This is the only file that declares them. Each host has one queue, which a conductor declares
(docs/decisions/0081). The conductors share one queue for reports and one for heartbeats. Each
process that calls hosts has a queue for their answers.

A queue is stored at one node of the broker. While this node is down, RabbitMQ refuses to declare
the queue again elsewhere, or does not answer. So a queue has several names (``names_of``). Readers
and writers use the first name that exists, and return to it when its node is back.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from kombu.transport.pyamqp import Transport as AmqpTransport

from common.rpc.broker import ACCESS_REFUSED, REPLY_SECONDS, Channel, Connection
from common.rpc.broker_client import new_channel
from common.rpc.silent_names import SilentNames
from common.security.broker_names import (
    ANSWERS,
    answers_queue,
    exchange,
    host_queue,
    join_queue,
    names_of,
)
from common.security.host_keys import Purpose
from common.service.log import get_logger

log = get_logger(__name__)
#: Time after which the broker removes an unread queue of a host.
FORGOTTEN_SECONDS = 3600
#: Maximum number of messages that wait for a host.
QUEUED = 10_000
QUEUE_ARGUMENTS = {"x-expires": FORGOTTEN_SECONDS * 1000, "x-max-length": QUEUED}
#: Arguments of the conductors' queues under further names. The broker removes them after a minute
#: without a reader.
DOOR_ARGUMENTS = {"x-expires": 60_000, "x-max-length": 10 * QUEUED}
#: Reply codes of AMQP.
NOT_FOUND, PRECONDITION_FAILED = 404, 406


def name_of(prefix: str, host: str, purpose: Purpose) -> str:
    """Return the first name of the queue for messages sealed with a key of this purpose."""
    return join_queue(prefix, host) if purpose == Purpose.JOIN else host_queue(prefix, host)


def declare(connection: Connection, names: Sequence[str]) -> str:
    """Declare the queue of a host under the first name that the broker accepts, and return it.

    An existing queue with other arguments is deleted first, with the messages in it.

    Raises:
        AmqpTransport.channel_errors: The broker refuses each name.
    """
    *others, last = names
    for name in others:
        try:
            _declare(connection, name)
            return name
        except AmqpTransport.channel_errors as problem:
            if getattr(problem, "reply_code", None) != NOT_FOUND:
                raise
            log.info("a queue's node is down, and the queue gets another name", queue=name)
    _declare(connection, last)
    return last


def _declare(connection: Connection, queue: str) -> None:
    for deletes in (True, False):
        try:
            with new_channel(connection) as channel:
                channel.queue_declare(
                    queue, durable=True, auto_delete=False, arguments=QUEUE_ARGUMENTS
                )
            return
        except AmqpTransport.channel_errors as problem:
            if not deletes or getattr(problem, "reply_code", None) != PRECONDITION_FAILED:
                raise
        log.warning("a queue with wrong arguments is deleted and declared again", queue=queue)
        with new_channel(connection) as channel:
            channel.queue_delete(queue)


def exists(connection: Connection, queue: str, silent: SilentNames) -> bool:
    """Return True if the broker has the queue at a running node, and this user may see it.

    Args:
        connection: A connection with ``REPLY_SECONDS`` as limit of each reply.
        queue: The name of the queue.
        silent: Notes the name if the broker does not answer.

    Raises:
        TimeoutError: The broker does not answer, and the connection cannot be used any more.
    """
    try:
        with new_channel(connection) as channel, silent.request(queue, REPLY_SECONDS):
            channel.queue_declare(queue, passive=True)
        return True
    except AmqpTransport.channel_errors:
        return False


def declare_answers(channel: Channel, prefix: str, role: str, name: str) -> str:
    """Declare the queue for hosts' answers to a process, and return the queue's name.

    RabbitMQ 4 deprecates transient queues that are not exclusive. Each connection has its own
    queue, because an exclusive queue stays locked until the broker notices that its connection is
    gone.

    Args:
        channel: Channel of the connection that reads the queue.
        prefix: Prefix of every name at the broker.
        role: The broker user of the process.
        name: The name to which hosts answer, ``Header.answer_to`` of the requests.
    """
    _ensure_exchange(channel, exchange(prefix))
    queue = answers_queue(prefix, role, uuid.uuid4().hex)
    channel.queue_declare(queue, durable=False, exclusive=True, auto_delete=True)
    channel.queue_bind(queue, exchange(prefix), f"{ANSWERS}.{name}.#")
    return queue


def declare_door(channel: Channel, prefix: str, door: str, silent: SilentNames) -> str:
    """Declare the conductors' queue ``door`` (REPORTS or HEARTBEATS), and return its name.

    The queue gets the first name that the broker accepts, and the messages of all hosts whose
    routing keys begin with ``door``.

    Args:
        channel: Channel of the connection that reads the queue.
        prefix: Prefix of every name at the broker.
        door: The first part of the routing keys.
        silent: Notes the name if the broker does not answer.

    Raises:
        AmqpTransport.channel_errors: The broker refuses each name.
        TimeoutError: The broker does not answer, and the connection cannot be used any more.
    """
    doors = door_names(prefix, door)
    names = silent.list_usable(doors)
    for name in names:
        # The first name had no arguments in 0.1.0, so it has none.
        arguments = None if name == doors[0] else DOOR_ARGUMENTS
        try:
            with (
                new_channel(channel.connection) as own,
                silent.request(name, REPLY_SECONDS),
            ):
                own.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
            break
        except AmqpTransport.channel_errors as problem:
            code = getattr(problem, "reply_code", None)
            if name == names[-1] or code not in (NOT_FOUND, ACCESS_REFUSED):
                silent.forget()
                raise
            log.info(
                "the broker refuses a queue of the conductors, and the queue gets another name",
                queue=name,
                problem=problem,
            )
    channel.queue_bind(name, exchange(prefix), f"{door}.#")
    return name


def door_names(prefix: str, door: str) -> tuple[str, ...]:
    """Return the names that the conductors' queue ``door`` may have."""
    return names_of(f"{prefix}-{door}")


def _ensure_exchange(channel: Channel, name: str) -> None:
    """Declare the exchange if it is missing.

    Raises:
        AmqpTransport.channel_errors: The exchange is missing, and this process is no conductor, so
            that the broker refuses the declaration.
    """
    with channel.connection.channel() as probe:
        try:
            probe.exchange_declare(name, "topic", passive=True)
        except AmqpTransport.channel_errors:
            channel.exchange_declare(name, "topic", durable=True, auto_delete=False)
