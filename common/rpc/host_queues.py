# SPDX-License-Identifier: Apache-2.0
"""The queues through which hosts and the control plane exchange messages.

This is the only file that declares them. Each host has one queue, which a conductor declares
(docs/decisions/0081). The conductors share one queue for reports and one for heartbeats. Each
process that calls hosts has a queue for their answers.
"""

from __future__ import annotations

import uuid

from kombu.transport.pyamqp import Transport as AmqpTransport

from common.rpc.broker import Channel, Connection
from common.security.broker_names import ANSWERS, answers_queue, exchange, host_queue, join_queue
from common.security.host_keys import Purpose
from common.service.log import get_logger

log = get_logger(__name__)
#: Time after which the broker removes an unread queue of a host.
FORGOTTEN_SECONDS = 3600
#: Maximum number of messages that wait for a host.
QUEUED = 10_000
QUEUE_ARGUMENTS = {"x-expires": FORGOTTEN_SECONDS * 1000, "x-max-length": QUEUED}
#: Reply codes of AMQP.
ACCESS_REFUSED, PRECONDITION_FAILED = 403, 406


def name_of(prefix: str, host: str, purpose: Purpose) -> str:
    """Return the name of the queue for messages that are sealed with a key of this purpose."""
    return join_queue(prefix, host) if purpose == Purpose.JOIN else host_queue(prefix, host)


def declare(connection: Connection, queue: str) -> None:
    """Declare the queue of a host.

    An existing queue with other arguments is deleted first, with the messages in it.

    Raises:
        AmqpTransport.channel_errors: The broker refuses.
    """
    for deletes in (True, False):
        with connection.channel() as channel:
            try:
                channel.queue_declare(
                    queue, durable=True, auto_delete=False, arguments=QUEUE_ARGUMENTS
                )
                return
            except AmqpTransport.channel_errors as problem:
                if not deletes or getattr(problem, "reply_code", None) != PRECONDITION_FAILED:
                    raise
        log.warning("a queue with wrong arguments is deleted and declared again", queue=queue)
        with connection.channel() as channel:
            channel.queue_delete(queue)


def exists(connection: Connection, queue: str) -> bool:
    """Return True if the broker has the queue, and this user may see it."""
    with connection.channel() as channel:
        try:
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


def declare_door(channel: Channel, prefix: str, door: str) -> str:
    """Declare the conductors' queue ``door`` (REPORTS or HEARTBEATS), and return its name.

    The queue gets the messages of all hosts whose routing keys begin with ``door``.
    """
    queue = f"{prefix}-{door}"
    channel.queue_declare(queue, durable=True, auto_delete=False)
    channel.queue_bind(queue, exchange(prefix), f"{door}.#")
    return queue


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
