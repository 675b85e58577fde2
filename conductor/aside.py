# SPDX-License-Identifier: Apache-2.0
"""Servers whose rows somebody holds locked: they are set aside for some seconds, so that who waited for one once does
not wait for it again and again, and others with them.

Called by ``conductor.runner``, which takes their actions last and each alone, and by ``conductor.reports``, which
leaves out what is told of them: it comes again.
"""
from __future__ import annotations

from collections.abc import Iterable

from conductor.saga import Engine

SECONDS = 10.0


def put(engine: Engine, servers: Iterable[str]) -> None:
    """Set these aside from now on."""
    engine.aside.update(dict.fromkeys(servers, engine.clock.monotonic() + SECONDS))


def servers(engine: Engine) -> set[str]:
    """Those that are set aside now."""
    for server, until in list(engine.aside.items()):
        if engine.clock.monotonic() > until:
            engine.aside.pop(server, None)
    return set(engine.aside)
