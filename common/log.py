# SPDX-License-Identifier: Apache-2.0
"""Logging: one line an event to standard error, where systemd or the supervisor keeps it.

Libraries that tell of every connection are quieted; values of options marked secret never reach a
log because nothing here prints configuration.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_QUIET = (
    "amqp",
    "kombu",
    "oslo_messaging",
    "oslo.messaging",
    "keystoneauth",
    "urllib3",
    "stevedore",
    "keystonemiddleware",
    "oslo_policy",
    "alembic",
    "oslo_service",
)


def start(level: str = "INFO") -> None:
    """Log from this level on."""
    logging.basicConfig(stream=sys.stderr, level=level, format=_FORMAT, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
