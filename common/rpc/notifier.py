# SPDX-License-Identifier: Apache-2.0
"""oslo.messaging's notifier, with an error if the broker does not take a message.

The library ignores such errors. This notifier catches them where the driver calls the transport. An
unreachable broker is tried only briefly, because the outbox keeps the message.
"""

from __future__ import annotations

import logging

from oslo_config import cfg

from common.domain import errors
from common.domain.json_types import JsonObject
from common.notifications.message import Message
from common.rpc.broker import configure
from common.rpc.transport import CONTROL_EXCHANGE, LOST

# isort: split
import oslo_messaging  # The import of transport has chosen the threading backend.

#: The exchange that Nova's consumers read, unless [DEFAULT] control_exchange is set.
EXCHANGE = "nova"
#: With one retry the library replaces a dead channel.
RETRIES = 1


class _Context:
    """The request context in a message. The context contains no secrets to redact."""

    def __init__(self, values: JsonObject) -> None:
        self._values = values

    def redacted_copy(self) -> JsonObject:
        return self._values


class Notifier:
    """Sends notifications. Only one thread may use a notifier.

    Args:
        conf: The configuration.
        url: The broker's URL. None: the configured broker for notifications.

    Raises:
        ConfigError: The URL is malformed, or ``configure`` refuses the configuration.
    """

    def __init__(self, conf: cfg.ConfigOpts, url: str | None = None) -> None:
        # Errors of sending are raised by ``send``, so the library must not log them too.
        logging.getLogger("oslo_messaging.notify.messaging").setLevel(logging.CRITICAL)
        oslo_messaging.set_transport_defaults(EXCHANGE)
        try:
            self._transport = oslo_messaging.get_notification_transport(conf, url=url)
        except (oslo_messaging.MessagingException, ValueError):
            # The original text can contain the password of the URL.
            raise errors.ConfigError(
                "[oslo_messaging_notifications] transport_url is not the URL of a RabbitMQ broker, like "
                "rabbit://kilonova:PASSWORD@127.0.0.1:5672/"
            ) from None
        oslo_messaging.set_transport_defaults(CONTROL_EXCHANGE)
        configure(conf, url or conf.oslo_messaging_notifications.transport_url)
        self._send = self._transport._send_notification
        self._transport._send_notification = self._send_recording
        self._problem: Exception | None = None
        conf.set_default("driver", ["messagingv2"], group="oslo_messaging_notifications")
        self._unversioned = oslo_messaging.Notifier(self._transport, retry=RETRIES)
        self._versioned = oslo_messaging.Notifier(
            self._transport, retry=RETRIES, topics=conf.notifications.versioned_notifications_topics
        )

    def _send_recording(self, *arguments: object, **named: object) -> None:
        try:
            self._send(*arguments, **named)
        except Exception as problem:
            self._problem = problem
            raise

    def send(self, message: Message) -> None:
        """Send a message, and return when the broker has taken it.

        Raises:
            Unavailable: The broker has not taken the message, or this is not known.
            Exception: The message cannot be sent to any broker, for example a message that is not
                serializable.
        """
        self._problem = None
        notifier = (self._versioned if message.is_versioned else self._unversioned).prepare(
            publisher_id=message.publisher
        )
        emit = notifier.error if message.is_error else notifier.info
        emit(_Context(message.context), message.event, message.payload)
        if self._problem is not None and not isinstance(self._problem, LOST):
            raise self._problem
        if self._problem is not None:
            raise errors.Unavailable(
                f"The broker did not accept the notification: {self._problem}"
            ) from self._problem

    def close(self) -> None:
        """Close the connections to the broker."""
        self._transport.cleanup()
