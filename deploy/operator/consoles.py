# SPDX-License-Identifier: Apache-2.0
"""``kilonova consoles list|end``: lists and ends open console sessions."""

from __future__ import annotations

import argparse
import sys

from common.domain.clock import iso
from common.service import config
from common.store import upgrades
from common.store.engine import Store
from common.store.servers import console_tokens


def show(options: argparse.Namespace) -> int:
    """Print the open console sessions, oldest first.

    After a crash of a console service its sessions stay in the list until their tokens expire.
    """
    store = _open_store(options)
    rows = store.read(console_tokens.sessions)
    store.close()
    print(f"{'server':<36} {'kind':<8} {'host':<24} {'user':<34} since")
    for row in rows:
        print(
            f"{row.server_id:<36} {row.kind:<8} {row.host:<24} {row.user_id:<34} {iso(row.used_at)}"
        )
    return 0


def end(options: argparse.Namespace) -> int:
    """Revoke the console sessions and unused console URLs of a server, or all of them.

    The console services close the sessions within two seconds. Without ``--server`` or ``--all``
    the exit status is 2.
    """
    if not options.server and not options.all:
        print("kilonova: give --server ID or --all", file=sys.stderr)
        return 2
    store = _open_store(options)
    number = store.write(lambda tx: console_tokens.revoke(tx, options.server))
    store.close()
    print(f"ended {number} console sessions and unused console URLs")
    return 0


def _open_store(options: argparse.Namespace) -> Store:
    store = Store.open(config.load(options.config))
    upgrades.check(store)
    return store
