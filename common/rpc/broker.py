# SPDX-License-Identifier: Apache-2.0
"""One configuration of RabbitMQ for both AMQP stacks, oslo.messaging and kombu.

``configure`` decides brokers, TLS, heartbeats and reconnection for both, and ``BrokerTransport``
opens each connection of both. docs/broker.md explains why there are two stacks.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import oslo_messaging
from kombu import exceptions
from kombu.connection import Connection as KombuConnection
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport.pyamqp import Transport as AmqpTransport
from oslo_config import cfg

from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.json_types import JsonObject
from common.security import tls
from common.service import metrics

#: The section with the options of both stacks.
RABBIT = "oslo_messaging_rabbit"
#: Time limit for a connection to one node.
CONNECT_SECONDS = 2.0
#: Maximum seconds between heartbeats of kombu's connections. oslo.messaging keeps the longer value,
#: because it notices a queue that does not answer only after a minute on the same connection.
HEARTBEAT_SECONDS = 15
#: Time limit for a reply of the broker to kombu, for example to the declaration of a queue. With
#: one node the limit is long, because another connection would be to the same node.
REPLY_SECONDS, LONG_REPLY_SECONDS = 5.0, 60.0
#: A reply code of AMQP.
ACCESS_REFUSED = 403
#: Defaults for both stacks. An operator's file overrides them. The database remembers all work, so
#: retries are quick. With the two heartbeat options oslo.messaging wakes up once a second
#: (threshold / rate / 2), so a process stops promptly. For the same reason an answer to a caller
#: that is gone is not offered for a minute.
DEFAULTS = {
    "rabbit_retry_interval": 1,
    "rabbit_retry_backoff": 1,
    "rabbit_interval_max": 5,
    "kombu_reconnect_delay": 0.5,
    "heartbeat_timeout_threshold": 30,
    "heartbeat_rate": 15,
    "kombu_missing_consumer_retry_timeout": 3,
}
BROKEN = (
    *AmqpTransport.connection_errors,
    *AmqpTransport.channel_errors,
    exceptions.KombuError,
    OSError,
)
#: kombu's connection and its channel, which declare no types.
Connection = Any
Channel = Any
CONNECTIONS = metrics.Metric(
    metrics.COUNTER,
    "broker_connections",
    "Connections to RabbitMQ that were opened, or could not be opened.",
    "result",
)
LOST_MESSAGES = metrics.Metric(
    metrics.COUNTER,
    "lost_messages",
    "Messages that RabbitMQ did not take, to hosts or to other services. They are sent again.",
    "to",
)


class BrokerTransport(AmqpTransport):
    """Opens a connection to one node of the broker, for both oslo.messaging and kombu.

    With TLS, each node's certificate must contain the node's own name. kombu alone would expect the
    first node's name in the certificates of all nodes of a cluster.
    """

    def establish_connection(self) -> Connection:
        client: Any = self.client
        name = client.hostname
        if client.ssl:
            client.ssl = {**client.ssl, "server_hostname": name}
        try:
            connection = self._log_in(client.transport_options.get("other_passwords", ()))
        except Exception:
            CONNECTIONS.add("failed")
            raise
        finally:
            client.hostname = name  # kombu has replaced "localhost" by 127.0.0.1.
        limit = client.transport_options.get("read_timeout")
        if client.ssl and limit:
            # With TLS, amqp would keep the time limit of the connection's start.
            connection.sock.settimeout(limit)
        CONNECTIONS.add("opened")
        return connection

    def _log_in(self, other_passwords: Sequence[str]) -> Connection:
        """Open the connection with the first password that the broker accepts."""
        client: Any = self.client
        remaining = list(other_passwords)
        while True:
            try:
                # kombu declares no types.
                return super().establish_connection()  # type: ignore[no-untyped-call]
            except BROKEN as problem:
                if not remaining or getattr(problem, "reply_code", None) != ACCESS_REFUSED:
                    raise
                client.password = remaining.pop(0)


TRANSPORT_ALIASES["amqp"] = f"{__name__}:{BrokerTransport.__name__}"


@dataclass
class Connect:
    """Creates connections to one broker, which may be a cluster of several nodes.

    A connection opens when first used. It tries each node once.

    Args:
        urls: One URL for each node, in random order.
        files: The TLS options of amqp. Empty without TLS.
        heartbeat: Seconds between heartbeats.
        retry_seconds: The pause before a broken connection is opened again.
        other_passwords: Passwords for a node that refuses the password in its URL.
    """

    urls: Sequence[str] = field(repr=False)
    files: JsonObject
    heartbeat: float
    retry_seconds: float
    other_passwords: Sequence[str] = field(default=(), repr=False)

    def become(self, other: Connect) -> None:
        """Use the nodes and passwords of another object for all further connections."""
        self.urls, self.other_passwords = other.urls, other.other_passwords

    @property
    def has_nodes(self) -> bool:
        """True if the broker has several nodes."""
        return len(self.urls) > 1

    @property
    def reply_seconds(self) -> float:
        """Time limit for a reply of the broker."""
        return REPLY_SECONDS if self.has_nodes else LONG_REPLY_SECONDS

    def __call__(
        self, heartbeat: float | None = None, turn: int = 0, **options: object
    ) -> Connection:
        """Return a connection that is not open yet.

        Args:
            heartbeat: Seconds between heartbeats. None means the default of this object, 0 disables
                heartbeats.
            turn: Connections with consecutive numbers begin with different nodes.
            options: Further transport options of kombu's amqp transport.
        """
        first = turn % len(self.urls) if self.urls else 0
        return cast(Any, KombuConnection)(
            [*self.urls[first:], *self.urls[:first]],
            connect_timeout=CONNECT_SECONDS,
            heartbeat=self.heartbeat if heartbeat is None else heartbeat,
            ssl=self.files or None,
            transport_options={
                "max_retries": len(self.urls) - 1,  # each node once
                "interval_start": 0,
                "interval_step": 0,
                "connect_retries_timeout": None,
                "other_passwords": self.other_passwords,
                **options,
            },
        )


def opener(
    conf: cfg.ConfigOpts, url: str | None = None, other_passwords: Sequence[str] = ()
) -> Connect:
    """Return a ``Connect`` for the configured broker, or for the broker at ``url``.

    Defaults in ``conf`` are set as by ``configure``. No connection is opened yet.

    Args:
        conf: The configuration.
        url: The broker's URL. None: the configured broker.
        other_passwords: As in ``Connect``.

    Raises:
        ConfigError: ``configure`` refuses the configuration, or the URL is malformed.
    """
    address, options = configure(conf, url), conf[RABBIT]
    urls = []
    for host in address.hosts:
        host.port = host.port or 5672
        node = oslo_messaging.TransportURL(conf, "amqp", address.virtual_host, [host])
        urls.append(str(node))
    return Connect(
        random.sample(urls, len(urls)),
        _tls_files(options),
        min(options.heartbeat_timeout_threshold, HEARTBEAT_SECONDS),
        options.rabbit_retry_interval,
        other_passwords,
    )


def require_answer(connect: Callable[..., Connection]) -> None:
    """Check that the broker accepts a connection.

    Args:
        connect: Returns a connection that is not open yet, for example a ``Connect``.

    Raises:
        Unavailable: The broker does not answer, or refuses the user or the virtual host.
    """
    try:
        _try(connect(heartbeat=0))
    except BROKEN as problem:
        raise errors.Unavailable(
            "The broker does not answer, or refuses the name, password or virtual host in transport_url."
        ) from problem


def look_in(
    conf: cfg.ConfigOpts,
    url: str | None = None,
    option: str = "transport_url",
    other_passwords: Sequence[str] = (),
) -> None:
    """Check that the broker accepts a connection.

    Args:
        conf: The configuration.
        url: The broker's URL. None: the configured broker.
        option: The name of the option that has the URL, for the texts of errors.
        other_passwords: As in ``Connect``.

    Raises:
        ConfigError: The broker refuses the name, the password or the virtual host, or ``configure``
            refuses the configuration, or the URL is malformed.
        Unavailable: The broker does not answer, or the URL names no broker.
    """
    connect = opener(conf, url, other_passwords)
    if not address_of(conf, url).hosts:
        raise errors.Unavailable(
            f"{option} names no broker: set [DEFAULT] transport_url, like "
            "rabbit://kilonova:PASSWORD@127.0.0.1:5672/"
        )
    connection = connect(heartbeat=0)
    try:
        _try(connection)
    except BROKEN as problem:
        refusal = _refusal(problem)
        if refusal is None:
            raise errors.Unavailable(f"The broker does not answer: {problem}") from problem
        text = " ".join(str(refusal).split())
        raise ConfigError(
            f"{option}: the broker refuses {connection.userid}: {text}. Correct the name, password and "
            "virtual host in the URL, or create them at the broker"
        ) from problem


def _try(connection: Connection) -> None:
    """Open a connection and a channel, and close both. A failure raises an error of ``BROKEN``."""
    try:
        connection.default_channel  # noqa: B018  # connects
    finally:
        connection.collect(socket_timeout=1)


def _refusal(problem: BaseException | None) -> BaseException | None:
    """Return the refusal of a user (403) or virtual host (530) among ``problem`` and its causes.

    Returns:
        The exception with this reply code of AMQP, or None if there is no such exception.
    """
    while problem is not None and getattr(problem, "reply_code", None) not in (ACCESS_REFUSED, 530):
        problem = problem.__cause__ or problem.__context__
    return problem


class BrokerUser(Protocol):
    """One node of a broker, and the user there."""

    hostname: str
    port: int | None
    username: str
    password: str


class BrokerAddress(Protocol):
    """The nodes of a broker."""

    hosts: list[BrokerUser]
    virtual_host: str | None
    query: dict[str, str]


def configure(conf: cfg.ConfigOpts, url: str | None = None) -> BrokerAddress:
    """Set defaults in ``conf`` for oslo.messaging and kombu: TLS, heartbeats and reconnection.

    TLS is the default if [tls] has the files. The operator's own values in
    [oslo_messaging_rabbit] override the defaults. No connection is opened.

    Returns:
        The nodes of the configured broker, or of the broker at ``url``.

    Raises:
        ConfigError: Plain text would travel to another machine without permission, certificates
            would not be verified, the URL contains options for TLS or is malformed, or [tls] is not
            usable.
    """
    address, files, options = address_of(conf, url), tls.of(conf), conf[RABBIT]
    if any(name.startswith("ssl") for name in address.query):
        raise ConfigError(
            "transport_url contains ssl options, which only oslo.messaging would read: remove them, and set "
            "[tls] or [oslo_messaging_rabbit]"
        )
    from_tls = {
        "ssl": files is not None,
        "ssl_ca_file": files.ca if files else "",
        "ssl_cert_file": files.cert if files else "",
        "ssl_key_file": files.key if files else "",
    }
    for name, value in (DEFAULTS | from_tls).items():
        conf.set_default(name, value, group=RABBIT)
    if options.ssl and not options.ssl_ca_file:
        raise ConfigError(
            "[oslo_messaging_rabbit] ssl is true, but no CA file is set to verify the broker's certificate: "
            "set [tls] ca_file"
        )
    if not options.ssl_enforce_hostname_verification:
        raise ConfigError(
            "[oslo_messaging_rabbit] ssl_enforce_hostname_verification is false: the broker's name is "
            "always verified; remove this option"
        )
    if not options.ssl:
        off = "[oslo_messaging_rabbit] ssl is false" if files else ""
        tls.protecting(conf, "transport_url", [host.hostname for host in address.hosts], off=off)
    return address


def address_of(conf: cfg.ConfigOpts, url: str | None = None) -> BrokerAddress:
    """Return the nodes of the configured broker, or of the broker at ``url``.

    Raises:
        ConfigError: The URL is malformed, or of an unknown kind.
    """
    try:
        oslo_messaging.get_rpc_transport(conf, url=url)  # Registers the options without connecting.
        address: BrokerAddress = oslo_messaging.TransportURL.parse(conf, url)
        if not all(0 <= (host.port or 0) < 65536 for host in address.hosts):
            raise ValueError("a port is out of range")
    except (oslo_messaging.MessagingException, ValueError):
        # The original text can contain the password of the URL, or a part of the password.
        raise ConfigError(
            "transport_url is not the URL of a RabbitMQ broker, like rabbit://kilonova:PASSWORD@127.0.0.1:5672/. "
            "The port must be a number from 1 to 65535. In a password, write # / ? as %23 %2F %3F"
        ) from None
    return address


def own_exchange(conf: cfg.ConfigOpts) -> str:
    """Return [DEFAULT] control_exchange if the operator has set the option, else an empty text.

    The exchange of this option is used for calls and for notifications.
    """
    address_of(conf)
    where = conf.get_location("control_exchange")
    is_set = where is not None and where.location.is_user_controlled
    return str(conf.control_exchange) if is_set else ""


def url_as(
    conf: cfg.ConfigOpts, user: str, password: str, url: str | None = None, at: Sequence[str] = ()
) -> str:
    """Return the URL of the configured broker, or of the broker at ``url``, for another user.

    Args:
        conf: The configuration.
        user: Name of the user at the broker.
        password: Password of the user.
        url: The broker's URL. None: the configured broker.
        at: Addresses of the nodes that replace the addresses in the URL, each HOST or HOST:PORT.

    Raises:
        ConfigError: An entry of ``at`` is not an address.
    """
    address = address_of(conf, url)
    if at:
        address.hosts = [_user_at(node) for node in at]
    for host in address.hosts:
        host.username, host.password = user, password
    return str(address)


def _user_at(address: str) -> BrokerUser:
    try:
        parts = urlsplit(f"//{address}")
        if parts.hostname and parts.netloc == address and "@" not in address:
            user: BrokerUser = oslo_messaging.TransportHost(parts.hostname, parts.port or 5672)
            return user
    except ValueError:
        pass  # The port is not a number.
    raise ConfigError(f"{address!r} is not an address of a broker: give HOST or HOST:PORT")


def _tls_files(options: cfg.ConfigOpts.GroupAttr) -> JsonObject:
    """Return the TLS options for the amqp library, or an empty dict without TLS."""
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
