# SPDX-License-Identifier: Apache-2.0
"""oslo.messaging's notifier, which tells whether the broker has taken a message.

The library's own swallows that; here it is heard where the driver calls the transport. A broker
that cannot be reached is tried for a moment only: the outbox keeps what was not taken.
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
import oslo_messaging  # after transport has chosen the threading backend

#: Where Nova's consumers listen, unless [DEFAULT] control_exchange says otherwise.
EXCHANGE = "nova"
#: With one retry the library makes a dead channel anew.
RETRIES = 1


class _Context:
    """What a message says of its request; the library asks for a copy without secrets, and there
    are none."""

    def __init__(self, values: JsonObject) -> None:
        self._values = values

    def redacted_copy(self) -> JsonObject:
        return self._values


class Notifier:
    """Used by one thread."""

    def __init__(self, conf: cfg.ConfigOpts, url: str | None = None) -> None:
        # we say it ourselves
        logging.getLogger("oslo_messaging.notify.messaging").setLevel(logging.CRITICAL)
        oslo_messaging.set_transport_defaults(EXCHANGE)
        self._transport = oslo_messaging.get_notification_transport(conf, url=url)
        oslo_messaging.set_transport_defaults(CONTROL_EXCHANGE)
        configure(conf, url or conf.oslo_messaging_notifications.transport_url)
        self._send = self._transport._send_notification
        self._transport._send_notification = self._sent
        self._problem: Exception | None = None
        conf.set_default("driver", ["messagingv2"], group="oslo_messaging_notifications")
        self._older = oslo_messaging.Notifier(self._transport, retry=RETRIES)
        self._newer = oslo_messaging.Notifier(
            self._transport, retry=RETRIES, topics=conf.notifications.versioned_notifications_topics
        )

    def _sent(self, *arguments: object, **named: object) -> None:
        try:
            self._send(*arguments, **named)
        except Exception as problem:
            self._problem = problem
            raise

    def send(self, message: Message) -> None:
        """Returns when the broker has it.

        Raises:
            Unavailable: it has not, or nobody knows. Others: the message cannot be sent, wherever
            the broker is.
        """
        self._problem = None
        notifier = (self._newer if message.is_versioned else self._older).prepare(
            publisher_id=message.publisher
        )
        say = notifier.error if message.is_error else notifier.info
        say(_Context(message.context), message.event, message.payload)
        if self._problem is not None and not isinstance(self._problem, LOST):
            raise self._problem
        if self._problem is not None:
            raise errors.Unavailable(
                f"The broker takes no notifications: {self._problem}"
            ) from self._problem

    def close(self) -> None:
        """Close the connections."""
        self._transport.cleanup()
