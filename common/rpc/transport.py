# SPDX-License-Identifier: Apache-2.0
"""oslo.messaging over RabbitMQ, with threads: between processes of the control plane (hosts:
``common.rpc.host_link``).

``Transport`` refuses a process in which anything was monkey-patched. A cast gives up after one try:
the sweep and the sync exchange make up for it. A call ends within its time, also when the broker
was never there; only one that finds its channel dead, while the broker does not answer, takes about
ten seconds more.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import oslo_messaging
from kombu import exceptions as kombu_exceptions
from oslo_config import cfg

from common.domain import errors
from common.domain.json_types import JsonObject, JsonValue
from common.rpc import broker
from common.rpc.problems import answered, result
from common.security.broker_names import CALLS, CONDUCTOR, reply_queue

log = logging.getLogger(__name__)
CONTROL_EXCHANGE = CALLS
Sent = TypeVar("Sent")
#: seconds between two tries to make a dead channel anew, which may take some seconds more
MEND = 5.0
_CANCELLED = (60, 30)  #: basic.cancel: the queue that is read is there no more
LOST = (
    oslo_messaging.MessagingException,
    oslo_messaging.MessageUndeliverable,
    kombu_exceptions.KombuError,
    kombu_exceptions.ConnectionError,
    kombu_exceptions.ChannelError,
    OSError,
)


def _is_news(record: logging.LogRecord) -> bool:
    """At its end the library removes its fanout queue under its own reader, which RabbitMQ then
    tells of it."""
    return not (
        str(record.msg).startswith("Received method %s during closing channel")
        and isinstance(record.args, tuple)
        and record.args[0] == _CANCELLED
    )


logging.getLogger("amqp").addFilter(_is_news)


class Transport:
    """One process's connection to the broker; made after the process has forked. ``role``: whose
    name it has there."""

    def __init__(self, conf: cfg.ConfigOpts, url: str | None = None, role: str = CONDUCTOR) -> None:
        if getattr(socket.socket, "__module__", "socket") not in ("socket", "_socket"):
            raise RuntimeError(
                "sockets are monkey-patched; run Kilonova without eventlet and gevent"
            )
        oslo_messaging.set_transport_defaults(CONTROL_EXCHANGE)
        broker.configure(conf, url)
        self._transport = oslo_messaging.get_rpc_transport(conf, url=url)
        # The library's names for these queues are of one kind for all, and the broker knows users
        # by names of queues.
        self._transport._driver._get_reply_queue_name = lambda: reply_queue(role, uuid.uuid4().hex)
        self._options = oslo_messaging.TransportOptions(at_least_once=True)
        self._servers: list[Any] = []
        self._lock, self._can_hear = threading.Lock(), threading.Event()
        self._opener: threading.Thread | None = None
        self._mends_from = 0.0

    def cast(self, topic: str, method: str, server: str | None = None, **arguments: object) -> bool:
        """Send and forget; False when the broker or the queue is not there."""
        try:
            self._sent(
                lambda retry: self._client(topic, server, None, retry).cast({}, method, **arguments)
            )
        except LOST as problem:
            broker.LOST_MESSAGES.add("services")
            log.debug("cast %s to %s/%s was lost: %s", method, topic, server, problem)
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
        """Ask and wait.

        Raises:
            NoAnswer: nobody answered in time: what became of the question is unknown.
            Problem: the one that the other side raised; its class and text are the same, other
            attributes are not.
        """
        silence = f"{server or topic} did not answer {method} within {timeout:g} s."
        deadline = time.monotonic() + timeout
        if not self._hears(timeout) or (left := deadline - time.monotonic()) <= 0:
            raise errors.NoAnswer(silence)
        try:
            answer = self._sent(
                lambda retry: self._client(topic, server, left, retry).call({}, method, **arguments)
            )
        except LOST as problem:
            if not isinstance(problem, oslo_messaging.MessagingTimeout):
                broker.LOST_MESSAGES.add("services")
            raise errors.NoAnswer(silence) from problem
        return result(answer)

    def _hears(self, timeout: float) -> bool:
        """Can answers reach us? The library opens its queue for them in the first call and waits
        for the broker without end, so a first call to nobody is made in a thread that may wait."""
        if not self._can_hear.is_set():
            with self._lock:
                if self._opener is None:
                    self._opener = threading.Thread(target=self._open, name="replies", daemon=True)
                    self._opener.start()
        return self._can_hear.wait(timeout)

    def _open(self) -> None:
        try:
            self._client("kilonova-nobody", None, 1).call({}, "open")
        except LOST as problem:
            log.debug("answers can be heard from now on: %s", problem)
        self._can_hear.set()

    def _sent(self, send: Callable[[int], Sent]) -> Sent:
        """Try once. Where the library's connection lives and its channel is dead, once more with a
        retry: only in one does it make a new channel, and without any it would fail with the dead
        one for ever."""
        try:
            return send(0)
        except oslo_messaging.MessageDeliveryFailure as problem:
            if not _has_dead_channel(problem) or time.monotonic() < self._mends_from:
                raise
            log.warning("a channel to the broker is dead and is made anew: %s", problem)
        try:
            return send(1)
        finally:
            self._mends_from = time.monotonic() + MEND

    def _client(
        self, topic: str, server: str | None, timeout: float | None, retry: int = 0
    ) -> oslo_messaging.RPCClient:
        target = oslo_messaging.Target(topic=topic, server=server)
        return oslo_messaging.get_rpc_client(
            self._transport, target, timeout=timeout, retry=retry, transport_options=self._options
        )

    def serve(self, topic: str, server: str, methods: Mapping[str, Callable[..., object]]) -> None:
        """Answer these methods on the topic, from threads of the library's pool."""
        endpoint = type(
            "Endpoint", (), {name: _answering(function) for name, function in methods.items()}
        )()
        rpc_server = oslo_messaging.get_rpc_server(
            self._transport,
            oslo_messaging.Target(topic=topic, server=server),
            [endpoint],
            access_policy=oslo_messaging.ExplicitRPCAccessPolicy,
        )
        rpc_server.start()
        self._servers.append(rpc_server)

    def close(self) -> None:
        """Stop serving, close the connections."""
        for rpc_server in self._servers:
            rpc_server.stop()
        for rpc_server in self._servers:
            rpc_server.wait()
        # else the library still waits for the broker
        if self._opener is None or self._can_hear.is_set():
            self._transport.cleanup()


def _has_dead_channel(problem: BaseException | None) -> bool:
    """Did the library fail because what it wanted to use was closed before, and not because the
    broker is away?"""
    while problem is not None:
        if isinstance(problem, kombu_exceptions.ConnectionError):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _answering(function: Callable[..., object]) -> Callable[..., object]:
    """An endpoint method whose Problems travel back as plain data."""

    def method(self: object, context: JsonObject, **arguments: object) -> JsonObject:
        return answered(function, arguments)

    exposed: Callable[..., object] = oslo_messaging.expose(method)
    return exposed
