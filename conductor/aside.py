# SPDX-License-Identifier: Apache-2.0
"""Servers whose rows somebody holds locked: they are set aside until the lock is gone, so that who waited for one once
does not wait for it again and again, and others with them.

Called by ``conductor.runner``, which postpones their actions, and by ``conductor.reports``, which leaves out what is
told of them: it comes again. While none is set aside, asking costs nothing.
"""
from __future__ import annotations

from collections.abc import Iterable

from common.store import actions
from conductor.saga import Engine

SECONDS = 10.0               #: between two looks whether a lock is gone


def put(engine: Engine, servers: Iterable[str]) -> None:
    """Set these aside from now on."""
    engine.aside.update(dict.fromkeys(servers, engine.clock.monotonic() + SECONDS))


def look(engine: Engine, servers: Iterable[str]) -> set[str]:
    """Set those of these servers aside whose rows are locked just now, without waiting for any; returns them.

    Raises:
        Unavailable: the database does not answer.
    """
    names = set(servers)
    locked = names - engine.store.write(lambda tx: actions.unlocked(tx, names))
    put(engine, locked)
    return locked


def servers(engine: Engine) -> set[str]:
    """Those that are set aside now."""
    late = {server for server, until in list(engine.aside.items()) if engine.clock.monotonic() > until}
    if late:
        for server in late - look(engine, late):
            engine.aside.pop(server, None)
    return set(engine.aside)
