# SPDX-License-Identifier: Apache-2.0
"""Do database, broker and identity service let this process in? Asked once, when it starts, and by
``kilonova config check``.

A neighbour that refuses our name or password says so for ever: the process ends with the option's
name. One that does not answer comes back, and is waited for by who needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oslo_config import cfg

from common.domain import errors

DATABASE, BROKER, IDENTITY = "database", "broker", "identity"


def check(conf: cfg.ConfigOpts, *neighbours: str) -> None:
    """Return when none of these refuses us; silence is no refusal.

    Raises:
        ConfigError: one does; the text names the option and what to do.
    """
    for neighbour in neighbours:
        try:
            LOOKS[neighbour](conf)
        except errors.Unavailable:
            continue  # whoever needs it says so, and waits


def database(conf: cfg.ConfigOpts) -> None:
    """Open a connection. Raises ConfigError, or NoStore when nobody answers."""
    from common.store.engine import Store

    store = Store.opened(conf, pool=1)
    try:
        store.look_in()
    finally:
        store.close()


def broker(conf: cfg.ConfigOpts) -> None:
    """Open a connection. Raises ConfigError, or Unavailable when nobody answers."""
    from common.rpc.broker import look_in

    look_in(conf)


def identity(conf: cfg.ConfigOpts) -> None:
    """Get a token. Raises ConfigError, or Unavailable when nobody answers."""
    from common.clients.identity import IdentityClient

    IdentityClient(conf).look_in()


LOOKS: Mapping[str, Callable[[cfg.ConfigOpts], None]] = {
    DATABASE: database,
    BROKER: broker,
    IDENTITY: identity,
}
