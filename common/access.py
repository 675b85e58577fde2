# SPDX-License-Identifier: Apache-2.0
"""Checks at start that database, broker and identity service accept this process's credentials.

``kilonova config check`` runs the same checks. A refused name or password does not recover by
itself, so the process ends with the name of the option. A service that does not answer may
recover, so its clients wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oslo_config import cfg

from common.domain import errors

DATABASE, BROKER, IDENTITY = "database", "broker", "identity"


def check(conf: cfg.ConfigOpts, *services: str) -> None:
    """Check that each named service accepts this process. A service that does not answer passes.

    Args:
        conf: The configuration.
        *services: Keys of ``CHECKS``, for example "database".

    Raises:
        ConfigError: A service refuses the login, or the configuration of its connection is not
            valid. The text names the option and the remedy.
    """
    for service in services:
        try:
            CHECKS[service](conf)
        except errors.Unavailable:
            continue  # The clients of the service log the failure and wait.


def database(conf: cfg.ConfigOpts) -> None:
    """Open a connection to the database, and close it.

    Raises:
        ConfigError: The database refuses, or the configuration of the connection is not valid.
        NoStore: The database does not answer.
    """
    from common.store.engine import Store

    store = Store.open(conf, pool=1)
    try:
        store.look_in()
    finally:
        store.close()


def broker(conf: cfg.ConfigOpts) -> None:
    """Open a connection to the broker, and close it.

    Raises:
        ConfigError: The broker refuses, or the configuration of the connection is not valid.
        Unavailable: The broker does not answer, or no broker is configured.
    """
    from common.rpc.broker import look_in

    look_in(conf)


def identity(conf: cfg.ConfigOpts) -> None:
    """Get a token from the identity service, and drop it.

    Raises:
        ConfigError: The service answers 401 or 404, or a configured URL is plain HTTP to another
            machine.
        Unavailable: The service does not answer, or answers with another error.
    """
    from common.clients.identity import IdentityClient

    IdentityClient(conf).look_in()


CHECKS: Mapping[str, Callable[[cfg.ConfigOpts], None]] = {
    DATABASE: database,
    BROKER: broker,
    IDENTITY: identity,
}
