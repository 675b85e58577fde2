# SPDX-License-Identifier: Apache-2.0
"""oslo.messaging over RabbitMQ with threads, between processes of the control plane.

For messages to and from hosts see ``common.rpc.host_link``. ``Transport`` refuses to run in a
process with monkey-patched sockets. A cast is tried once, because the sweep and the reports of
hosts repeat its effect. A call ends within its time-out, also if the broker was never reachable.
The exception is a call that finds its channel dead while the broker does not answer, which takes
about ten seconds more.

A process that serves methods checks every few seconds that its own queue exists and has a reader.
If this fails for long although the broker accepts connections, the transport opens all connections
again. Why: the library does not notice that RabbitMQ has lost the queue, and waits for ever for a
node that hangs.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import oslo_messaging
from kombu import exceptions as kombu_exceptions
from kombu.transport.pyamqp import Transport as AmqpTransport
from oslo_config import cfg

from common.domain import errors
from common.domain.json_types import JsonObject, JsonValue
from common.rpc import broker
from common.rpc.broker_client import Probe, new_channel
from common.rpc.problems import result, run_method
from common.security.broker_names import CALLS, CONDUCTOR, reply_queue
from common.service import metrics
from common.service.log import get_logger

log = get_logger(__name__)
CONTROL_EXCHANGE = CALLS
Sent = TypeVar("Sent")
#: Minimum seconds between two replacements of a dead channel, each of which may take some seconds.
MEND = 5.0
#: Seconds between two checks of the own queue, and the time without success that is too long.
CHECK_SECONDS, MAX_SILENCE_SECONDS = 5.0, 15.0
#: Time for calls under way over connections that are replaced.
CALLS_SECONDS = 15.0
SILENCE = metrics.Metric(
    metrics.GAUGE,
    "broker_silence_seconds",
    "Seconds since this process last saw that its queue at RabbitMQ exists and has a reader.",
)
#: The AMQP method basic.cancel: the queue of a consumer was deleted.
_CANCELLED = (60, 30)
LOST = (
    oslo_messaging.MessagingException,
    oslo_messaging.MessageUndeliverable,
    kombu_exceptions.KombuError,
    kombu_exceptions.ConnectionError,
    kombu_exceptions.ChannelError,
    OSError,
)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for a log record that is part of a normal shutdown.

    At its end the library deletes the fanout queue that it still reads, and RabbitMQ reports this.
    """
    return not (
        str(record.msg).startswith("Received method %s during closing channel")
        and isinstance(record.args, tuple)
        and record.args[0] == _CANCELLED
    )


logging.getLogger("amqp").addFilter(_is_relevant)


class Transport:
    """A process's connection to the broker, created after the process has forked.

    Args:
        conf: The configuration.
        url: The broker's URL. None: the configured broker.
        role: The broker user of this process. Names of its reply queues begin with the role,
            because the broker's permissions depend on queue names.
    """

    def __init__(self, conf: cfg.ConfigOpts, url: str | None = None, role: str = CONDUCTOR) -> None:
        if getattr(socket.socket, "__module__", "socket") not in ("socket", "_socket"):
            raise RuntimeError(
                "sockets are monkey-patched; run Kilonova without eventlet and gevent"
            )
        oslo_messaging.set_transport_defaults(CONTROL_EXCHANGE)
        broker.configure(conf, url)
        self._conf, self._url, self._role = conf, url, role
        self._transport = self._open_transport()
        self._options = oslo_messaging.TransportOptions(at_least_once=True)
        self._served: list[tuple[oslo_messaging.Target, object]] = []
        self._servers: list[Any] = []
        self._lock, self._has_replies = threading.Lock(), threading.Event()
        self._opener: threading.Thread | None = None
        self._mends_after = 0.0
        self._checked_at = time.monotonic()
        self._stops = threading.Event()
        self._watch: threading.Thread | None = None

    def _open_transport(self) -> Any:  # noqa: ANN401 - the library declares no types
        transport = oslo_messaging.get_rpc_transport(self._conf, url=self._url)
        # The library would give the queues of all roles the same prefix.
        transport._driver._get_reply_queue_name = lambda: reply_queue(self._role, uuid.uuid4().hex)
        return transport

    def cast(self, topic: str, method: str, server: str | None = None, **arguments: object) -> bool:
        """Call a method of another process without waiting for an answer.

        Args:
            topic: The topic that the process serves.
            method: Name of the method.
            server: The process. None: any process that serves the topic.
            arguments: Arguments of the method.

        Returns:
            False if the broker is unreachable or the queue does not exist.
        """
        try:
            self._try_send(
                lambda retry: self._client(topic, server, None, retry).cast({}, method, **arguments)
            )
        except LOST as problem:
            broker.LOST_MESSAGES.add("services")
            log.debug(
                "a message to another process was lost",
                method=method,
                topic=topic,
                receiver=server,
                problem=problem,
            )
            return False
        return True

    def call(
        self,
        topic: str,
        method: str,
        server: str | None = None,
        timeout: float = 10,
        **arguments: object,
    ) -> JsonValue:
        """Call a method of another process and return its result.

        Args:
            topic: The topic that the process serves.
            method: Name of the method.
            server: The process. None: any process that serves the topic.
            timeout: Seconds to wait for the answer.
            arguments: Arguments of the method.

        Raises:
            NoAnswer: No answer came in time, or the broker did not take the request. The call may
                still be executed.
            Problem: The error of the other process, with the same class and text. Other attributes
                are lost.
        """
        failure = f"{server or topic} did not answer {method} within {timeout:g} s."
        deadline = time.monotonic() + timeout
        if not self._await_replies(timeout) or (seconds_left := deadline - time.monotonic()) <= 0:
            raise errors.NoAnswer(failure)
        try:
            answer = self._try_send(
                lambda retry: self._client(topic, server, seconds_left, retry).call(
                    {}, method, **arguments
                )
            )
        except LOST as problem:
            if not isinstance(problem, oslo_messaging.MessagingTimeout):
                broker.LOST_MESSAGES.add("services")
            raise errors.NoAnswer(failure) from problem
        return result(answer)

    def _await_replies(self, timeout: float) -> bool:
        """Wait until this process can receive replies. Return False after ``timeout`` seconds.

        The library opens the reply queue during the first call, and then waits for the broker
        without a time limit. So a thread makes a first call to a topic that no process serves.
        """
        with self._lock:
            has_replies = self._has_replies
            if self._opener is None:
                self._opener = threading.Thread(
                    target=self._open, args=(has_replies,), name="replies", daemon=True
                )
                self._opener.start()
        return has_replies.wait(timeout)

    def _open(self, has_replies: threading.Event) -> None:
        try:
            self._client("kilonova-nobody", None, 1).call({}, "open")
        except LOST as problem:
            log.debug("the reply queue is open", problem=problem)
        has_replies.set()

    def _try_send(self, send: Callable[[int], Sent]) -> Sent:
        """Try to send once, and once more if the channel is dead while the connection is alive.

        The second try happens at most every ``MEND`` seconds. ``send`` gets the number of retries
        that the library may make: 0, and 1 in the second try.

        The library creates a new channel only in a retry. Without a retry each later call would
        fail with the dead channel.
        """
        try:
            return send(0)
        except oslo_messaging.MessageDeliveryFailure as problem:
            if not _has_dead_channel(problem) or time.monotonic() < self._mends_after:
                raise
            log.warning("a channel to the broker is dead, and is replaced", problem=problem)
        try:
            return send(1)
        finally:
            self._mends_after = time.monotonic() + MEND

    def _client(
        self, topic: str, server: str | None, timeout: float | None, retry: int = 0
    ) -> oslo_messaging.RPCClient:
        target = oslo_messaging.Target(topic=topic, server=server)
        return oslo_messaging.get_rpc_client(
            self._transport, target, timeout=timeout, retry=retry, transport_options=self._options
        )

    def serve(self, topic: str, server: str, methods: Mapping[str, Callable[..., object]]) -> None:
        """Serve these methods on the topic, in threads of the library's pool.

        Args:
            topic: The topic of the messages.
            server: Name of this process, for messages to this process alone.
            methods: The function of each method name. Messages carry the arguments by name.
        """
        endpoint = type(
            "Endpoint", (), {name: _expose(function) for name, function in methods.items()}
        )()
        target = oslo_messaging.Target(topic=topic, server=server)
        self._served.append((target, endpoint))
        self._servers.append(self._start_server(self._transport, target, endpoint))
        if self._watch is None:
            self._checked_at = time.monotonic()
            SILENCE.track(lambda: time.monotonic() - self._checked_at)
            self._watch = threading.Thread(
                target=self._check_queue, name="queue-check", daemon=True
            )
            self._watch.start()

    def _start_server(
        self,
        transport: Any,  # noqa: ANN401 - the library declares no types
        target: oslo_messaging.Target,
        endpoint: object,
    ) -> Any:  # noqa: ANN401 - the library declares no types
        rpc_server = oslo_messaging.get_rpc_server(
            transport,
            target,
            [endpoint],
            access_policy=oslo_messaging.ExplicitRPCAccessPolicy,
        )
        rpc_server.start()
        return rpc_server

    def _check_queue(self) -> None:
        """Loop until ``close``: check the own queue, and replace the connections if it fails long.

        The queue of a target with a server has only this process as reader.
        """
        probe = Probe(broker.opener(self._conf, self._url))
        target, _ = self._served[0]
        queue = f"{target.topic}.{target.server}"
        broken_since: float | None = None
        while not self._stops.wait(CHECK_SECONDS):
            try:
                problem = _find_problem(probe, queue)
                now = time.monotonic()
                if not problem:
                    self._checked_at, broken_since = now, None
                elif broken_since is None:
                    broken_since = now
                elif now - broken_since > MAX_SILENCE_SECONDS:
                    log.warning(
                        "the own queue at the broker does not work, so all connections are opened "
                        "again",
                        queue=queue,
                        problem=problem,
                        seconds=now - self._checked_at,
                    )
                    broken_since = now
                    self._renew()
            except broker.BROKEN as problem:
                log.info("the own queue cannot be checked", queue=queue, problem=problem)
                broken_since = None
                probe.close()
            except Exception:
                log.exception("the check of the own queue failed", queue=queue)
                probe.close()
        probe.close()

    def _renew(self) -> None:
        """Replace all connections. The old ones serve until the new ones do."""
        transport, servers = self._open_transport(), []
        try:
            for target, endpoint in self._served:
                servers.append(self._start_server(transport, target, endpoint))
        except Exception:
            _close(transport, servers)
            raise
        with self._lock:
            old = self._transport if self._is_closable() else None
            old_servers = self._servers
            self._transport, self._servers = transport, servers
            self._has_replies, self._opener = threading.Event(), None
        threading.Thread(
            target=_close, args=(old, old_servers, CALLS_SECONDS), name="old-transport", daemon=True
        ).start()

    def _is_closable(self) -> bool:
        """Return False while the thread of ``_await_replies`` waits for the broker.

        It waits inside the library, whose end would wait for this thread.
        """
        return self._opener is None or self._has_replies.is_set()

    def close(self) -> None:
        """Stop serving and close the connections.

        The connections stay open if the thread of ``_await_replies`` still waits for the broker.
        """
        self._stops.set()
        if self._watch is not None:
            self._watch.join(timeout=1)
        _close(self._transport if self._is_closable() else None, self._servers)


def _find_problem(probe: Probe, queue: str) -> str:
    """Return the reason why messages do not reach the reader of a queue, or an empty text.

    Raises:
        An error of ``broker.BROKEN``: The broker cannot be reached.
    """
    connection = probe.open()
    try:
        with new_channel(connection) as channel:
            has_reader = channel.queue_declare(queue, passive=True).consumer_count > 0
    except TimeoutError:
        probe.close()
        return "the broker does not answer about the queue"
    except AmqpTransport.channel_errors as problem:
        return str(problem)
    return "" if has_reader else "the queue has no reader"


def _close(
    transport: Any,  # noqa: ANN401 - the library declares no types
    servers: Sequence[Any],
    seconds_for_calls: float = 0.0,
) -> None:
    """Stop servers of the library, and then close the connections of ``transport`` if given.

    ``seconds_for_calls`` is the time for calls under way over these connections.
    """
    for rpc_server in servers:
        rpc_server.stop()
    for rpc_server in servers:
        rpc_server.wait()
    time.sleep(seconds_for_calls)
    if transport is not None:
        transport.cleanup()


def _has_dead_channel(problem: BaseException | None) -> bool:
    """Return True if the error or a cause of it shows that the library used a closed channel."""
    while problem is not None:
        if isinstance(problem, kombu_exceptions.ConnectionError):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _expose(function: Callable[..., object]) -> Callable[..., object]:
    """Return an endpoint method for oslo.messaging that answers as ``run_method`` does."""

    def method(self: object, context: JsonObject, **arguments: object) -> JsonObject:
        return run_method(function, arguments)

    endpoint: Callable[..., object] = oslo_messaging.expose(method)
    return endpoint
