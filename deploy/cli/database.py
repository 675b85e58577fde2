# SPDX-License-Identifier: Apache-2.0
"""``kilonova database upgrade|version``."""

from __future__ import annotations

import argparse

from common import config
from common.store import upgrades, user_data
from common.store.engine import Store
from common.vault import Vault


def upgrade(options: argparse.Namespace) -> int:
    """Bring the database to the version of this code."""
    conf = config.load(options.config)
    store = Store.opened(conf, unhurried=True)
    before, after = upgrades.upgrade(store)
    print(
        f"database at version {after}"
        + (" already" if before == after else f", was {before or 'empty'}")
    )
    try:
        number = (
            user_data.seal_user_data(store, Vault(conf.secret_key))
            if conf.secret_key.strip(", ")
            else 0
        )
    finally:
        store.close()
    if number:
        print(f"user data of {number} servers, which could be read here, is sealed")
    return 0


def version(options: argparse.Namespace) -> int:
    """Show both versions; 1 when they differ."""
    store = Store.opened(config.load(options.config), unhurried=True)
    found, needed = upgrades.version(store), upgrades.newest()
    store.close()
    print(f"the database has {found or 'none'}, this code needs {needed}")
    return 0 if found == needed else 1
