# SPDX-License-Identifier: Apache-2.0
"""Connections to RabbitMQ that are not oslo.messaging's: one thread that listens, and one door to
send through.

What is sent is transient, and dropped by the broker when nobody took it in for its time: rows
remember, messages wake.
"""

from __future__ import annotations

import contextlib
import logging
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import oslo_messaging
from kombu import exceptions
from kombu.connection import Connection as KombuConnection
from kombu.transport.pyamqp import Transport as AmqpTransport
from oslo_config import cfg

from common import errors, tls
from common.errors import ConfigError
from common.json_types import JsonObject

log = logging.getLogger(__name__)
CONNECT = 2.0  #: seconds for a connection
SEND = 2.0  #: seconds until the broker has a message
READ = 0.2  #: seconds for the rest of what the broker has begun to say
RETRY = 1.0  #: seconds before a connection is tried again
HEARTBEAT = 30
IDLE = 1.0  #: seconds without a message after which a listener looks at its heartbeats
BROKEN = (
    *AmqpTransport.connection_errors,
    *AmqpTransport.channel_errors,
    exceptions.KombuError,
    OSError,
)
Connection = Any  #: kombu's, which declares no types
Channel = Any  #: of such a connection
Connect = Callable[..., Connection]
#: Takes in a message: its body, and its routing key.
Take = Callable[[bytes, str], None]


def opener(conf: cfg.ConfigOpts, url: str | None = None) -> Connect:
    """What makes connections to the broker that is configured, or to the one at ``url``. Named
    arguments of what it
    returns: ``heartbeat`` (seconds; 0: none), and amqp's own options."""
    protect(conf, url)
    parsed, proof = oslo_messaging.TransportURL.parse(conf, url), _tls(conf.oslo_messaging_rabbit)
    made, once = (
        cast(Any, KombuConnection),
        {"max_retries": 0, "interval_start": 0, "interval_step": 0},
    )

    def one(
        host: oslo_messaging.TransportHost, heartbeat: float, options: JsonObject
    ) -> Connection:
        return made(
            hostname=host.hostname,
            port=host.port or 5672,
            userid=host.username,
            password=host.password,
            virtual_host=parsed.virtual_host or "/",
            connect_timeout=CONNECT,
            heartbeat=heartbeat,
            ssl={**proof, "server_hostname": host.hostname} if proof else None,
            transport_options={**once, **options},
        )

    def connect(heartbeat: float = HEARTBEAT, **options: object) -> Connection:
        *others, last = random.sample(parsed.hosts, len(parsed.hosts))
        for host in others:  # kombu would hold all of them to the name of the first
            connection = one(host, heartbeat, options)
            try:
                connection.default_channel  # noqa: B018  # connects
                return connection
            except BROKEN as problem:
                log.info(
                    "the broker %s does not answer and the next one is tried: %s",
                    host.hostname,
                    problem,
                )
                connection.collect(socket_timeout=1)
        return one(last, heartbeat, options)

    return connect


def _refused(connect: Connect) -> tuple[Connection, BaseException] | None:
    """Open a connection with a channel, and close it. Which one failed, and why; None: it did
    not."""
    connection = connect(heartbeat=0)
    try:
        connection.default_channel  # noqa: B018  # connects
    except BROKEN as problem:
        return connection, problem
    finally:
        connection.collect(socket_timeout=1)
    return None


def require_answer(connect: Connect) -> None:
    """Raises Unavailable unless the broker lets us in."""
    if found := _refused(connect):
        raise errors.Unavailable(
            "The broker does not answer, or refuses the user of transport_url."
        ) from found[1]


def look_in(conf: cfg.ConfigOpts, url: str | None = None, option: str = "transport_url") -> None:
    """Open a connection to the broker, and close it. ``option``: where its URL stands.

    Raises:
        ConfigError: the broker refuses the name, the password or the virtual host.
        Unavailable: it does not answer, or none is named.
    """
    connect = opener(conf, url)
    if not oslo_messaging.TransportURL.parse(conf, url).hosts:
        raise errors.Unavailable(
            f"{option} names no broker: set [DEFAULT] transport_url, like "
            "rabbit://kilonova:PASSWORD@127.0.0.1:5672/"
        )
    if found := _refused(connect):
        connection, problem = found
        refusal = _refusal(problem)
        if refusal is None:
            raise errors.Unavailable(f"The broker does not answer: {problem}") from problem
        said = " ".join(str(refusal).split())
        raise ConfigError(
            f"{option}: the broker refuses {connection.userid}: {said}. Give the name, password and virtual host "
            "that it knows, or let it know these"
        ) from problem


def _refusal(problem: BaseException | None) -> BaseException | None:
    """What AMQP says of a name, password (403) or virtual host (530), among the causes of this."""
    while problem is not None and getattr(problem, "reply_code", None) not in (403, 530):
        problem = problem.__cause__ or problem.__context__
    return problem


def protect(conf: cfg.ConfigOpts, url: str | None = None) -> None:
    """Let [oslo_messaging_rabbit] have the files of [tls], for oslo.messaging and for ``opener``;
    what an operator has set there counts for more.

    Raises:
        ConfigError: plain text would travel to another machine; or certificates would not be
        verified.
    """
    oslo_messaging.get_rpc_transport(conf, url=url)  # connects nothing: makes known the options
    found, options, parsed = (
        tls.of(conf),
        conf.oslo_messaging_rabbit,
        oslo_messaging.TransportURL.parse(conf, url),
    )
    if any(name.startswith("ssl") for name in parsed.query):
        raise ConfigError(
            "transport_url says something of ssl, which only oslo.messaging would heed: set [tls] or "
            "[oslo_messaging_rabbit] in its place"
        )
    files = found or tls.Tls("", "", "")
    for name, value in (
        ("ssl", found is not None),
        ("ssl_ca_file", files.ca),
        ("ssl_cert_file", files.cert),
        ("ssl_key_file", files.key),
    ):
        conf.set_default(name, value, group="oslo_messaging_rabbit")
    if options.ssl and not options.ssl_ca_file:
        raise ConfigError(
            "[oslo_messaging_rabbit] ssl is true, and there is no authority to verify the broker's "
            "certificate with: set [tls] ca_file"
        )
    if not options.ssl_enforce_hostname_verification:
        raise ConfigError(
            "[oslo_messaging_rabbit] ssl_enforce_hostname_verification is false: the broker's name is "
            "always verified; leave it away"
        )
    if not options.ssl:
        off = "[oslo_messaging_rabbit] ssl is false" if found else ""
        tls.protecting(conf, "transport_url", [host.hostname for host in parsed.hosts], off=off)


class BrokerUser(Protocol):
    """One host of a broker, and who we are there."""

    hostname: str
    port: int | None
    username: str
    password: str


class BrokerAddress(Protocol):
    """Where a broker is."""

    hosts: list[BrokerUser]
    virtual_host: str | None


def address_of(conf: cfg.ConfigOpts, url: str | None = None) -> BrokerAddress:
    """The broker that is configured, or the one at ``url``: hosts, virtual_host."""
    oslo_messaging.get_rpc_transport(conf, url=url)  # connects nothing: makes known the option
    address: BrokerAddress = oslo_messaging.TransportURL.parse(conf, url)
    return address


def own_exchange(conf: cfg.ConfigOpts) -> str:
    """[DEFAULT] control_exchange, where an operator has set it: it is then that of calls and of
    notifications."""
    address_of(conf)
    where = conf.get_location("control_exchange")
    return (
        str(conf.control_exchange)
        if where is not None and where.location.is_user_controlled
        else ""
    )


def url_as(
    conf: cfg.ConfigOpts, user: str, password: str, url: str | None = None, at: Sequence[str] = ()
) -> str:
    """The broker that is configured, or the one at ``url``, in another user's name; ``at``: reached
    at these addresses, each HOST or HOST:PORT.

    Raises:
        ConfigError: one of them is none.
    """
    found = address_of(conf, url)
    if at:
        found.hosts = [_user_at(one) for one in at]
    for host in found.hosts:
        host.username, host.password = user, password
    return str(found)


def _user_at(address: str) -> BrokerUser:
    try:
        parts = urlsplit(f"//{address}")
        if parts.hostname and parts.netloc == address and "@" not in address:
            made: BrokerUser = oslo_messaging.TransportHost(parts.hostname, parts.port or 5672)
            return made
    except ValueError:
        pass  # of a port
    raise ConfigError(f"{address!r} is no address of a broker: give HOST or HOST:PORT")


def _tls(options: cfg.ConfigOpts.GroupAttr) -> JsonObject:
    """What [oslo_messaging_rabbit] says of TLS, in the words of the amqp library; empty: none is
    wanted."""
    if not options.ssl:
        return {}
    files = {
        "keyfile": options.ssl_key_file,
        "certfile": options.ssl_cert_file,
        "ca_certs": options.ssl_ca_file,
    }
    return {
        **{file: path for file, path in files.items() if path},
        "cert_reqs": ssl.CERT_REQUIRED,
        "tls_minimum_version": tls.OLDEST,
    }


class Listener:
    """A thread that takes in what comes to some queues, one message after the other. ``declare`` is
    called with the channel of each new connection, and returns the queues and what takes in their
    messages."""

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
        """End the connection and make a new one, for which ``declare`` is called again."""
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
                        "%s: the connection to the broker is gone and will be made again: %s",
                        self._name,
                        problem,
                    )
                    self.is_ready.clear()
                    self._stop.wait(RETRY)

    def _serve(self, connection: Connection) -> None:
        self._reconnects.clear()
        channel = connection.default_channel
        for queue, take in self._declare(channel).items():
            channel.basic_consume(
                queue, no_ack=True, callback=lambda message, take=take: self._take(take, message)
            )
        self.is_ready.set()
        while not (self._stop.is_set() or self._reconnects.is_set()):
            if self._await_message(connection.connection.sock):
                with contextlib.suppress(TimeoutError):  # The rest of a message comes later.
                    connection.drain_events(timeout=IDLE)
            else:
                connection.heartbeat_check()
        if self._reconnects.is_set():  # to close it in order takes as long as a flood lasts
            connection.collect(socket_timeout=1)

    def _await_message(self, broker: socket.socket) -> bool:
        """Wait until the broker has sent something, ``_wake`` is called, or ``IDLE`` is over.
        Return True in the first case."""
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
        """Whatever fails here is a message that was lost."""
        body = message.body
        try:
            text = body if isinstance(body, bytes) else str(body).encode()
            take(text, str(message.delivery_info["routing_key"]))
        except Exception:
            log.exception("%s: a message could not be taken in", self._name)


class Sender:
    """Sends, from any thread. ``confirms``: it waits until the broker has the message in a
    queue."""

    def __init__(self, connect: Connect, confirms: bool = False) -> None:
        self._connect, self._confirms = connect, confirms
        self._connection: Connection | None = None
        self._lock, self._returned = threading.Lock(), False
        self._rests_until = 0.0

    def send(self, exchange: str, key: str, body: bytes, seconds: float) -> bool:
        """False: it is lost, because the broker is away, or where that is waited for no queue takes
        it in.
        ``seconds``: for which it is worth something."""
        return self._run(f"a message to {key}", lambda: self._send(exchange, key, body, seconds))

    def run(self, what: str, work: Callable[[Connection], None]) -> bool:
        """Call ``work`` with the connection, and return False if the broker is unreachable.

        Args:
            what: The name of the work in the log.
        """

        def run() -> bool:
            work(self._connected())
            return True

        return self._run(what, run)

    def _run(self, what: str, work: Callable[[], bool]) -> bool:
        with self._lock:
            if time.monotonic() < self._rests_until:
                return False
            # one that broke while it idled is made again
            for is_new in sorted({self._connection is None, True}):
                try:
                    return work()
                except BROKEN as problem:
                    again = not (is_new or isinstance(problem, TimeoutError))
                    log.info(
                        "%s was lost%s: %s",
                        what,
                        " and is sent again" if again else "",
                        problem,
                    )
                    self._close()
                    if not again:
                        break
            self._rests_until = time.monotonic() + RETRY
        return False

    def _send(self, exchange: str, key: str, body: bytes, seconds: float) -> bool:
        channel = self._connected().default_channel
        message = channel.prepare_message(
            body,
            content_type="application/octet-stream",
            content_encoding="binary",
            properties={"delivery_mode": 1, "expiration": str(int(seconds * 1000))},
        )
        self._returned = False
        waits = {"mandatory": True, "confirm_timeout": SEND} if self._confirms else {}
        channel.basic_publish(message, exchange=exchange, routing_key=key, **waits)
        return not self._returned

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._opened()
        if select.select([self._connection.connection.sock], [], [], 0)[0]:
            # of TLS there may be something that is no message
            with contextlib.suppress(TimeoutError):
                # mostly the end of the connection, which raises
                self._connection.drain_events(timeout=READ)
        return self._connection

    def _opened(self) -> Connection:
        """It has no heartbeat, because nobody reads while nothing is sent; the system notices when
        the other end is gone."""
        connection = self._connect(
            heartbeat=0, confirm_publish=self._confirms, read_timeout=SEND, write_timeout=SEND
        )

        def returned(*why: object) -> None:
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
