# SPDX-License-Identifier: Apache-2.0
"""``kilonova host discard HOST SERVER``: has a host remove a guest that no record knows."""

from __future__ import annotations

import argparse
import uuid

from common import config, errors
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_contents
from common.store.servers import guests


def discard(options: argparse.Namespace) -> int:
    """Make a debt of it; without --yes only say what would go.

    Raises:
        BadRequest: it is no server's id.
    """
    try:
        server = str(uuid.UUID(options.server))
    except ValueError as problem:
        raise errors.BadRequest(
            f"{options.server!r} is no server's id; kilonova doctor shows it"
        ) from problem
    store = Store.opened(config.load(options.config))
    upgrades.check(store)
    try:
        return _discard(store, options.host, server, options.yes)
    finally:
        store.close()


def _discard(store: Store, host: str, server: str, is_sure: bool) -> int:
    def work(tx: Connection) -> None:
        if not host_contents.host_state(tx, host, locked=True).answers:
            raise errors.Conflict(f"Host {host} does not answer: start its kilonova-agent first.")
        guests.discard(tx, server, host)

    if not is_sure:
        print(
            f"the guest of server {server} on host {host} would be removed with its disk, and nothing "
            "brings it back: --yes if that is meant"
        )
        return 1
    store.write(work)
    print(f"host {host} removes it within a minute: kilonova host debts {host}")
    return 0
