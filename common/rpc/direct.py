# SPDX-License-Identifier: Apache-2.0
"""Small questions over RabbitMQ that cost as little as they can: the heartbeats of hosts.

A question is one unconfirmed message to a queue that several processes may answer, its answer one message to RabbitMQ's
direct reply-to, so that nobody has a queue for answers (https://www.rabbitmq.com/docs/direct-reply-to). Both may be
lost, and then the one who asks has no answer in its time. A question that nobody took in for ``FRESH`` seconds is
dropped by the broker. What must not be lost, or may take longer, goes through ``common.rpc.transport``.
"""
from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kombu import exceptions
from kombu.transport.pyamqp import Transport

from common import errors

log = logging.getLogger(__name__)
FRESH = 2.0                  #: seconds
RETRY = 1.0                  #: seconds before a connection is tried again
REPLIES = "amq.rabbitmq.reply-to"
Connection = Any             #: kombu's, which declares no types
Connect = Callable[[], Connection]
_BROKEN = (*Transport.connection_errors, *Transport.channel_errors, exceptions.KombuError, OSError)


class Server:
    """A thread that answers the questions of one queue, from memory or at least soon: one after the other."""

    def __init__(self, connect: Connect, queue: str, answer: Callable[[Any], Any]) -> None:
        self._connect, self._queue, self._answer = connect, queue, answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=queue, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    self._serve(connection)
            except _BROKEN as problem:
                log.info("the connection for %s is gone and will be made again: %s", self._queue, problem)
                self._stop.wait(RETRY)

    def _serve(self, connection: Connection) -> None:
        channel = connection.default_channel
        channel.queue_declare(self._queue, durable=True, auto_delete=False)
        channel.basic_consume(self._queue, no_ack=True, callback=lambda message: self._take(channel, message))
        while not self._stop.is_set():
            _listen(connection, 1.0)

    def _take(self, channel: Any, message: Any) -> None:
        """Whatever fails here is a question without an answer."""
        properties = message.properties
        try:
            answer = json.dumps(self._answer(json.loads(message.body)))
        except errors.Problem as problem:
            log.warning("a question to %s stays without an answer: %s", self._queue, problem)
            return
        except Exception:
            log.exception("a question to %s stays without an answer", self._queue)
            return
        if "reply_to" in properties:
            _send(channel, properties["reply_to"], answer, correlation_id=properties.get("correlation_id", ""))


class Client:
    """Asks; used by one thread. The connection is made with the first question, and again when it broke."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._number, self._answers = 0, dict[str, Any]()

    def ask(self, queue: str, question: Any, timeout: float) -> Any | None:
        """The answer; None when there is none within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        for is_new in sorted({self._connection is None, True}):     # one that broke while nobody asked is made again
            try:
                return self._ask(queue, question, until)
            except _BROKEN as problem:
                log.info("the connection for %s is gone%s: %s", queue, "" if is_new else " and made again", problem)
                self.close()
        return None

    def _ask(self, queue: str, question: Any, until: float) -> Any | None:
        self._answers.clear()
        self._number += 1
        number = str(self._number)
        connection = self._connection = self._connection or self._opened()
        _send(connection.default_channel, queue, json.dumps(question), reply_to=REPLIES, correlation_id=number,
              expiration=str(int(FRESH * 1000)))
        while number not in self._answers and (left := until - time.monotonic()) > 0:
            _listen(connection, left)
        return self._answers.get(number)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect(socket_timeout=1)

    def _opened(self) -> Connection:
        connection = self._connect()
        connection.default_channel.basic_consume(REPLIES, no_ack=True, callback=self._take)
        return connection

    def _take(self, message: Any) -> None:
        try:
            self._answers[message.properties.get("correlation_id", "")] = json.loads(message.body)
        except ValueError as problem:
            log.warning("an answer cannot be read: %s", problem)


def _send(channel: Any, queue: str, text: str, **properties: str) -> None:
    """A message that no broker writes to its disk."""
    message = channel.prepare_message(text, content_type="application/json", content_encoding="utf-8",
                                      properties={**properties, "delivery_mode": 1})
    channel.basic_publish(message, exchange="", routing_key=queue)


def _listen(connection: Connection, seconds: float) -> None:
    """Take in what comes next, within this time; when nothing does, see whether the broker is there."""
    try:
        connection.drain_events(timeout=seconds)
    except TimeoutError:
        connection.heartbeat_check()
