# SPDX-License-Identifier: Apache-2.0
"""Connections to RabbitMQ that are not oslo.messaging's: one thread that listens, and one door to send through.

What is sent is transient, and dropped by the broker when nobody took it in for its time: rows remember, messages wake.
"""
from __future__ import annotations

import logging
import select
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import oslo_messaging
from kombu import exceptions
from kombu.connection import Connection as KombuConnection
from kombu.transport.pyamqp import Transport as AmqpTransport
from oslo_config import cfg

log = logging.getLogger(__name__)
CONNECT = 2.0                #: seconds for a connection
SEND = 2.0                   #: seconds until the broker has a message
RETRY = 1.0                  #: seconds before a connection is tried again
HEARTBEAT = 30
BROKEN = (*AmqpTransport.connection_errors, *AmqpTransport.channel_errors, exceptions.KombuError, OSError)
Connection = Any             #: kombu's, which declares no types
Connect = Callable[..., Connection]
Take = Callable[[bytes], None]


def opener(conf: cfg.ConfigOpts, url: str | None = None) -> Connect:
    """What makes connections to the broker that is configured, or to the one at ``url``. Named arguments of what it
    returns: ``heartbeat`` (seconds; 0: none), and amqp's own options."""
    oslo_messaging.get_rpc_transport(conf, url=url)         # connects nothing: makes known the options of TLS
    parsed = oslo_messaging.TransportURL.parse(conf, url)
    tls = _tls(conf.oslo_messaging_rabbit, parsed.hosts) or None
    made = cast(Any, KombuConnection)
    hosts = [made(hostname=host.hostname, port=host.port or 5672, userid=host.username, password=host.password,
                  virtual_host=parsed.virtual_host or "/").as_uri(include_password=True) for host in parsed.hosts]

    def connect(heartbeat: float = HEARTBEAT, **options: Any) -> Connection:
        each_once = {"max_retries": len(hosts) - 1, "interval_start": 0, "interval_step": 0}
        return made(hosts, failover_strategy="shuffle", connect_timeout=CONNECT, heartbeat=heartbeat, ssl=tls,
                    transport_options={**each_once, **options})
    return connect


def address_of(conf: cfg.ConfigOpts) -> Any:
    """The broker that is configured: hosts, virtual_host."""
    oslo_messaging.get_rpc_transport(conf)                  # connects nothing: makes known the option
    return oslo_messaging.TransportURL.parse(conf)


def url_as(conf: cfg.ConfigOpts, user: str, password: str) -> str:
    """The broker that is configured, in another user's name."""
    url = address_of(conf)
    for host in url.hosts:
        host.username, host.password = user, password
    return str(url)


def _tls(options: Any, hosts: Sequence[Any]) -> dict[str, Any]:
    """What [oslo_messaging_rabbit] says of TLS, in the words of the amqp library, with the meaning that oslo.messaging
    gives it; empty: none is wanted."""
    if not options.ssl:
        return {}
    files = {"keyfile": options.ssl_key_file, "certfile": options.ssl_cert_file, "ca_certs": options.ssl_ca_file}
    name = {"server_hostname": hosts[0].hostname} if options.ssl_ca_file and len(hosts) == 1 else {}
    return {**{file: path for file, path in files.items() if path}, **name,
            "cert_reqs": ssl.CERT_REQUIRED if options.ssl_ca_file else ssl.CERT_NONE}


class Listener:
    """A thread that takes in what comes to some queues, one message after the other. ``declare`` is called with the
    channel of each new connection, and returns the queues and what takes in their messages."""

    def __init__(self, connect: Connect, name: str, declare: Callable[[Any], dict[str, Take]]) -> None:
        self._connect, self._name, self._declare = connect, name, declare
        self._stop, self.is_ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    self._serve(connection)
            except BROKEN as problem:
                log.info("%s: the connection to the broker is gone and will be made again: %s", self._name, problem)
                self.is_ready.clear()
                self._stop.wait(RETRY)

    def _serve(self, connection: Connection) -> None:
        channel = connection.default_channel
        for queue, take in self._declare(channel).items():
            channel.basic_consume(queue, no_ack=True, callback=lambda message, take=take: self._take(take, message))
        self.is_ready.set()
        while not self._stop.is_set():
            try:
                connection.drain_events(timeout=1.0)
            except TimeoutError:
                connection.heartbeat_check()

    def _take(self, take: Take, message: Any) -> None:
        """Whatever fails here is a message that was lost."""
        body = message.body
        try:
            take(body if isinstance(body, bytes) else str(body).encode())
        except Exception:
            log.exception("%s: a message could not be taken in", self._name)


class Sender:
    """Sends, from any thread. ``confirms``: it waits until the broker has the message in a queue."""

    def __init__(self, connect: Connect, confirms: bool = False) -> None:
        self._connect, self._confirms = connect, confirms
        self._connection: Connection | None = None
        self._lock, self._returned = threading.Lock(), False
        self._rests_until = 0.0

    def send(self, exchange: str, key: str, body: bytes, seconds: float) -> bool:
        """False: it is lost, because the broker is away, or where that is waited for no queue takes it in.
        ``seconds``: for which it is worth something."""
        with self._lock:
            if time.monotonic() < self._rests_until:
                return False
            for is_new in sorted({self._connection is None, True}):     # one that broke while it idled is made again
                try:
                    return self._send(exchange, key, body, seconds)
                except BROKEN as problem:
                    again = not (is_new or isinstance(problem, TimeoutError))
                    log.info("a message to %s was lost%s: %s", key, " and is sent again" if again else "", problem)
                    self._close()
                    if not again:
                        break
            self._rests_until = time.monotonic() + RETRY
        return False

    def _send(self, exchange: str, key: str, body: bytes, seconds: float) -> bool:
        if self._connection is None:
            self._connection = self._opened()
        if select.select([self._connection.connection.sock], [], [], 0)[0]:
            self._connection.drain_events(timeout=SEND)         # mostly the end of the connection, which raises
        channel = self._connection.default_channel
        message = channel.prepare_message(body, content_type="application/octet-stream", content_encoding="binary",
                                          properties={"delivery_mode": 1, "expiration": str(int(seconds * 1000))})
        self._returned = False
        waits = {"mandatory": True, "confirm_timeout": SEND} if self._confirms else {}
        channel.basic_publish(message, exchange=exchange, routing_key=key, **waits)
        return not self._returned

    def _opened(self) -> Connection:
        """It has no heartbeat, because nobody reads while nothing is sent; the system notices when the other end is
        gone."""
        connection = self._connect(heartbeat=0, confirm_publish=self._confirms, read_timeout=SEND, write_timeout=SEND)

        def returned(*why: Any) -> None:
            self._returned = True
        try:
            connection.default_channel.events["basic_return"].add(returned)
        except BROKEN:
            connection.collect(socket_timeout=1)
            raise
        return connection

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect(socket_timeout=1)
