# SPDX-License-Identifier: Apache-2.0
"""The client that carries the messages of hosts: ``Listener`` reads queues, ``Sender`` publishes.

kombu connects, fails over, retries, confirms and returns. This file adds the parts that kombu
lacks: a listener that can be woken, heartbeats on a busy connection, and limits on each wait.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from kombu import exceptions
from kombu.transport.pyamqp import Transport as AmqpTransport

from common.rpc.broker import BROKEN, LOST_MESSAGES, Channel, Connect, Connection
from common.service.log import get_logger

log = get_logger(__name__)
#: Time limit for sending a message to the broker.
SEND_SECONDS = 2.0
#: Maximum seconds between two checks of a connection's heartbeats.
IDLE = 1.0
#: Processes a message: its body, and its routing key.
Take = Callable[[bytes, str], None]


class Listener:
    """A thread that reads queues, and passes each message to a function, one after the other.

    After a failure of the connection the thread opens a new connection, until ``close``.

    Why not kombu's ConsumerMixin: ConsumerMixin sends no heartbeat while messages arrive, so
    RabbitMQ would close a busy connection. A stop or a reconnect would also be noticed late.

    Args:
        connect: Opens connections to the broker.
        name: Name of the thread, which log lines contain.
        declare: Called with the channel of each new connection. Returns the names of the queues to
            read, and for each queue the function that gets its messages.
    """

    def __init__(
        self, connect: Connect, name: str, declare: Callable[[Channel], dict[str, Take]]
    ) -> None:
        self._connect, self._name, self._declare = connect, name, declare
        self._stop, self.is_ready = threading.Event(), threading.Event()
        self._reconnects = threading.Event()
        #: A byte in this pair ends the wait for the next message.
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake()
        self._thread.join(timeout=5)

    def reconnect(self) -> None:
        """Let the thread replace the connection and call ``declare`` again. Do not wait for it."""
        self._reconnects.set()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # The pair is full, or the thread has ended.
            self._waker.send(b"\0")

    def _run(self) -> None:
        with self._waker, self._woken:
            while not self._stop.is_set():
                try:
                    with self._connect() as connection:
                        self._serve(connection)
                except BROKEN as problem:
                    log.warning(
                        "a connection to the broker failed and is opened again",
                        listener=self._name,
                        problem=problem,
                    )
                    self.is_ready.clear()
                    self._stop.wait(self._connect.retry_seconds)

    def _serve(self, connection: Connection) -> None:
        self._reconnects.clear()
        channel = connection.default_channel
        for queue, take in self._declare(channel).items():
            channel.basic_consume(
                queue, no_ack=True, callback=lambda message, take=take: self._take(take, message)
            )
        self.is_ready.set()
        checked_at = time.monotonic()
        while not (self._stop.is_set() or self._reconnects.is_set()):
            if self._await_message(connection.connection.sock):
                with contextlib.suppress(TimeoutError):  # The rest of a message comes later.
                    connection.drain_events(timeout=IDLE)
            if time.monotonic() - checked_at >= IDLE:
                connection.heartbeat_check()
                checked_at = time.monotonic()
        if self._reconnects.is_set():  # An orderly close would last as long as a flood.
            connection.collect(socket_timeout=1)

    def _await_message(self, broker: socket.socket) -> bool:
        """Wait for the broker, for ``_wake``, or until ``IDLE`` is over.

        Returns:
            True if the broker has sent data or closed the connection.
        """
        if isinstance(broker, ssl.SSLSocket) and broker.pending():
            return True
        ready = select.poll()
        for end in (broker, self._woken):
            ready.register(end, select.POLLIN)
        readable = {descriptor for descriptor, _ in ready.poll(IDLE * 1000)}
        if self._woken.fileno() in readable:
            self._woken.recv(1024)
        return broker.fileno() in readable

    def _take(self, take: Take, message: Any) -> None:  # noqa: ANN401 - kombu declares no types
        """Call ``take`` with the message. If that raises, log the error. The message is lost."""
        body = message.body
        try:
            text = body if isinstance(body, bytes) else str(body).encode()
            take(text, str(message.delivery_info["routing_key"]))
        except Exception:
            log.exception(
                "a message from the broker cannot be processed and is lost", listener=self._name
            )


class Sender:
    """Sends messages from any thread over one connection.

    kombu opens the connection again when it breaks. After a failure, ``send`` and ``run`` return
    False at once during ``retry_seconds`` of ``connect``, so that many callers do not wait one
    after the other. The connection has no heartbeat, because the sender reads only while it sends.

    Args:
        connect: Opens connections to the broker.
        confirms: Wait until the broker has put each message into a queue. Without this, a message
            to a missing queue counts as sent.
    """

    def __init__(self, connect: Connect, confirms: bool = False) -> None:
        self._confirms, self._retry_seconds = confirms, connect.retry_seconds
        self._connection = connect(
            heartbeat=0,
            confirm_publish=confirms,
            read_timeout=SEND_SECONDS,
            write_timeout=SEND_SECONDS,
        )
        self._producer = self._connection.Producer(on_return=self._note_return)
        self._lock, self._is_returned = threading.Lock(), False
        self._rests_until = 0.0

    def send(self, exchange: str, key: str, body: bytes, seconds: float) -> bool:
        """Send a message.

        Args:
            exchange: Name of the exchange. "" is the default exchange, whose keys are queue names.
            key: The routing key.
            body: The message.
            seconds: Seconds after which the broker drops the message if it is still unread.

        Returns:
            False if the broker is unreachable or refuses the message, during the pause after a
            failure, or, with confirms, if no queue takes the message.
        """

        def publish() -> bool:
            # Producer.publish would take half as much CPU time again.
            self._is_returned, channel = False, self._producer.channel
            message = channel.prepare_message(
                body,
                content_type="application/octet-stream",
                content_encoding="binary",
                properties={"delivery_mode": 1, "expiration": str(int(seconds * 1000))},
            )
            channel.basic_publish(
                message,
                exchange=exchange,
                routing_key=key,
                mandatory=self._confirms,
                confirm_timeout=SEND_SECONDS,
            )
            return not self._is_returned

        is_sent = self._run(f"a message to {key}", publish)
        if not is_sent:
            LOST_MESSAGES.add("hosts")
        return is_sent

    def run(self, what: str, work: Callable[[Connection], None]) -> bool:
        """Call ``work`` with the connection, and once more with a new one if the first is broken.

        After a timeout ``work`` is not called again.

        Args:
            what: The name of the work in the log.
            work: The function to call. Exceptions that are no errors of the broker are raised to
                the caller.

        Returns:
            False if the broker is unreachable or refuses the work, or during the pause after a
            failure.
        """

        def run() -> bool:
            work(self._connection)
            return True

        return self._run(what, run)

    def _run(self, what: str, work: Callable[[], bool]) -> bool:
        """Call ``work``, and once more over a new connection if the first is broken.

        After a timeout ``work`` is not called again. Return the result of ``work``, or False after
        a failure and during the pause that follows.
        """

        def attempt() -> bool:
            try:
                return work()
            except TimeoutError as problem:  # A silent broker would be silent again.
                raise exceptions.OperationalError(
                    f"the broker did not answer in time: {problem}"
                ) from problem
            except AmqpTransport.channel_errors as problem:  # kombu would keep the closed channel.
                raise ConnectionResetError(str(problem)) from problem

        with self._lock:
            if time.monotonic() < self._rests_until:
                return False
            try:
                ensured = self._connection.ensure(
                    self._producer, attempt, max_retries=1, interval_start=0
                )
                return bool(ensured())
            except BROKEN as problem:
                log.info("a message to the broker was lost", target=what, problem=problem)
                self._connection.collect(socket_timeout=1)
                self._connection.maybe_switch_next()
                self._producer.revive(self._connection)
                self._rests_until = time.monotonic() + self._retry_seconds
                return False

    def _note_return(self, *message: object) -> None:
        self._is_returned = True

    def close(self) -> None:
        with self._lock:
            self._connection.collect(socket_timeout=1)
