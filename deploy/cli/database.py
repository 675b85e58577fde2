# SPDX-License-Identifier: Apache-2.0
"""``kilonova database upgrade|version``."""
from __future__ import annotations

import argparse

from common import config
from common.store import upgrades
from common.store.engine import Store


def upgrade(options: argparse.Namespace) -> int:
    """Bring the database to the version of this code."""
    store = Store.opened(config.load(options.config).database, unhurried=True)
    before, after = upgrades.upgrade(store)
    store.close()
    print(f"database at version {after}" + (" already" if before == after else f", was {before or 'empty'}"))
    return 0


def version(options: argparse.Namespace) -> int:
    """Show both versions; 1 when they differ."""
    store = Store.opened(config.load(options.config).database, unhurried=True)
    found, needed = upgrades.version(store), upgrades.newest()
    store.close()
    print(f"the database has {found or 'none'}, this code needs {needed}")
    return 0 if found == needed else 1
