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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kombu import exceptions
from kombu.transport.pyamqp import Transport as AmqpTransport

from common.rpc.broker import ACCESS_REFUSED, BROKEN, LOST_MESSAGES, Channel, Connect, Connection
from common.rpc.silent_names import SilentNames
from common.service.log import get_logger

log = get_logger(__name__)
#: Time limit for sending a message to the broker.
SEND_SECONDS = 2.0
#: How long a sender leaves out a key about which the broker did not answer.
LEFT_OUT_SECONDS = 15.0
#: Maximum seconds between two checks of a connection's heartbeats.
IDLE = 1.0
#: Processes a message: its body, and its routing key.
Take = Callable[[bytes, str], None]


@contextlib.contextmanager
def close_at_once_after_timeout(connection: Connection) -> Iterator[None]:
    """Close the connection if the context ends with a timeout, without an orderly end.

    Why: a node that hangs would not answer to the end of the connection either.
    """
    try:
        yield
    except TimeoutError:
        connection.collect(socket_timeout=1)
        raise


@contextlib.contextmanager
def new_channel(connection: Connection) -> Iterator[Channel]:
    """Yield a new channel, and close it unless the broker does not answer.

    py-amqp opens a channel again that the broker has closed after an error.
    """
    channel = connection.channel()
    try:
        yield channel
    except AmqpTransport.channel_errors:
        channel.close()
        raise
    channel.close()


class Probe:
    """A connection for checks, which stays open between them.

    After a failure the next check uses another node of the broker. Not thread-safe.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect, self._turn = connect, 0
        self._connection: Connection | None = None

    def open(self) -> Connection:
        """Return a connection whose node answers. Each reply has ``Connect.reply_seconds``.

        Raises:
            An error of ``BROKEN``: The node does not answer. Call ``close``.
        """
        if self._connection is None:
            self._turn += 1
            self._connection = self._connect(
                heartbeat=0, turn=self._turn, read_timeout=self._connect.reply_seconds
            )
            self._connection.default_channel  # noqa: B018  # connects
        with new_channel(self._connection):
            return self._connection

    def close(self) -> None:
        """Close the connection at once, so that ``open`` uses another node."""
        if self._connection is not None:
            self._connection.collect(socket_timeout=1)
            self._connection = None


class Listener:
    """A thread that reads queues, and passes each message to a function, one after the other.

    After a failure of the connection the thread opens a new connection, to another node of the
    broker if there are several, until ``close``.

    Why not kombu's ConsumerMixin: ConsumerMixin sends no heartbeat while messages arrive, so
    RabbitMQ would close a busy connection. A stop or a reconnect would also be noticed late.

    Args:
        connect: Opens connections to the broker.
        name: Name of the thread, which log lines contain.
        declare: Called with the channel of each new connection. Returns the names of the queues to
            read, and for each queue the function that gets its messages.
        look: Called about once a second with the connection. Returns False to have the connection
            replaced. None: the connection is replaced only after a failure.
        refused: Called when this process has no rights to read a queue.
    """

    def __init__(
        self,
        connect: Connect,
        name: str,
        declare: Callable[[Channel], dict[str, Take]],
        look: Callable[[Connection], bool] | None = None,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect, self._name, self._declare = connect, name, declare
        self._look, self._refused = look, refused
        self._turn = 0
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
                    self._turn += 1
                    limit = self._connect.reply_seconds
                    with (
                        self._connect(turn=self._turn, read_timeout=limit) as connection,
                        close_at_once_after_timeout(connection),
                    ):
                        self._serve(connection)
                except BROKEN as problem:
                    log.warning(
                        "a connection to the broker failed and is opened again",
                        listener=self._name,
                        problem=problem,
                    )
                except Exception:
                    log.exception("a connection to the broker is opened again", listener=self._name)
                else:
                    continue
                self.is_ready.clear()
                self._stop.wait(self._connect.retry_seconds)

    def _serve(self, connection: Connection) -> None:
        self._reconnects.clear()
        channel = connection.default_channel
        takes = self._declare(channel)
        try:
            for queue, take in takes.items():
                channel.basic_consume(
                    queue,
                    no_ack=True,
                    callback=lambda message, take=take: self._take(take, message),
                )
        except AmqpTransport.channel_errors as problem:
            if getattr(problem, "reply_code", None) == ACCESS_REFUSED:
                self._refused()
            raise
        self.is_ready.set()
        checked_at = time.monotonic()
        while not (self._stop.is_set() or self._reconnects.is_set()):
            if self._await_message(connection.connection.sock):
                with contextlib.suppress(TimeoutError):  # The rest of a message comes later.
                    connection.drain_events(timeout=IDLE)
            if time.monotonic() - checked_at >= IDLE:
                connection.heartbeat_check()
                if self._look is not None and not self._look(connection):
                    self._reconnects.set()
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
        self._connect = connect
        self._confirms, self._retry_seconds = confirms, connect.retry_seconds
        self._turn = -1
        self._connect_anew()
        self._lock, self._is_returned = threading.Lock(), False
        self._silent = SilentNames(connect.has_nodes, LEFT_OUT_SECONDS)
        self._moves = threading.Event()
        self._rests_until = 0.0

    def send(
        self,
        exchange: str,
        keys: Sequence[str],
        body: bytes,
        seconds: float,
        to_each: bool = False,
    ) -> bool:
        """Send a message.

        Args:
            exchange: Name of the exchange. "" is the default exchange, whose keys are queue names.
            keys: The routing key. With confirms, further keys may follow, and the message gets the
                first key that leads to a queue. A key about which the broker did not answer is left
                out for a while.
            to_each: Send the message with each key that leads to a queue.
            body: The message.
            seconds: Seconds after which the broker drops the message if it is still unread.

        Returns:
            False if the broker is unreachable or refuses the message, during the pause after a
            failure, or, with confirms, if no queue takes the message.
        """

        def publish() -> bool:
            # Producer.publish would take half as much CPU time again.
            channel = self._producer.channel
            message = channel.prepare_message(
                body,
                content_type="application/octet-stream",
                content_encoding="binary",
                properties={"delivery_mode": 1, "expiration": str(int(seconds * 1000))},
            )
            for key in self._silent.list_usable(keys) if self._confirms else keys:
                self._is_returned = False
                with self._silent.request(key, SEND_SECONDS):
                    channel.basic_publish(
                        message,
                        exchange=exchange,
                        routing_key=key,
                        mandatory=self._confirms,
                        confirm_timeout=SEND_SECONDS,
                    )
                if not self._is_returned:
                    sent.append(key)
                    if not to_each:
                        break
            return bool(sent)

        sent: list[str] = []
        is_sent = self._run(f"a message to {keys[0]}", publish) or bool(sent)
        if not is_sent:
            LOST_MESSAGES.add("hosts")
        return is_sent

    def record_answer(self, key: str) -> None:
        """Note that a process reads the queue of this key, so that the key is used again."""
        self._silent.record_answer(key)

    def check(self) -> None:
        """Check that the node answers. Otherwise connect to another node.

        Why: without confirms, the sender does not notice that its node hangs.
        """

        def request_reply() -> bool:
            self._producer.channel.basic_qos(0, 0, a_global=False)
            return True

        self._run("a check of the node", request_reply)

    def move(self) -> None:
        """Let the next message go over a new connection, to another node if there are several.

        Do not wait for it.
        """
        self._moves.set()

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
                if self._confirms and self._connect.has_nodes and self._replace_channel():
                    log.info("a message was lost, at a node that hangs", target=what)
                    return False
                raise exceptions.OperationalError(
                    f"the broker did not answer in time: {problem}"
                ) from problem
            except AmqpTransport.channel_errors as problem:  # kombu would keep the closed channel.
                raise ConnectionResetError(str(problem)) from problem

        with self._lock:
            if time.monotonic() < self._rests_until:
                return False
            if self._moves.is_set():
                self._moves.clear()
                self._connection.collect(socket_timeout=1)
                self._connect_anew()
            try:
                ensured = self._connection.ensure(
                    self._producer, attempt, max_retries=1, interval_start=0
                )
                return bool(ensured())
            except BROKEN as problem:
                log.info("a message to the broker was lost", target=what, problem=problem)
                self._leave_node()
                self._rests_until = time.monotonic() + self._retry_seconds
                return False

    def _replace_channel(self) -> bool:
        """Open another channel after a timeout. Return False if the own node does not answer.

        Why: if only the node of one queue hangs, messages to other queues can go on at once.
        """
        try:
            self._producer.revive(self._connection.channel())
        except BROKEN:
            return False
        return True

    def _connect_anew(self) -> None:
        """Create the connection, which begins with another node than the one before."""
        self._turn += 1
        self._connection = self._connect(
            heartbeat=0,
            turn=self._turn,
            confirm_publish=self._confirms,
            read_timeout=SEND_SECONDS,
            write_timeout=SEND_SECONDS,
        )
        self._producer = self._connection.Producer(on_return=self._note_return)

    def _leave_node(self) -> None:
        self._connection.collect(socket_timeout=1)
        self._connection.maybe_switch_next()
        self._producer.revive(self._connection)

    def _note_return(self, *message: object) -> None:
        self._is_returned = True

    def close(self) -> None:
        with self._lock:
            self._connection.collect(socket_timeout=1)
