# SPDX-License-Identifier: Apache-2.0
"""``kilonova database upgrade|version|reseal|purge``."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import closing

from common.domain import errors
from common.security import secret_lists
from common.security.vault import Vault
from common.service import config
from common.store import upgrades
from common.store.engine import Store
from common.store.version import find_needed, is_usable
from deploy.operator.store import purge as old_rows
from deploy.operator.store import sealed_columns

PROGRESS_SECONDS = 5.0  # Seconds between two lines of progress.


def explain_silence(path: str | None, problem: errors.Problem) -> Exception:
    """Return the error to print when a command failed with ``problem``.

    If the problem is a NoStore (no answer of the database), but no subclass, this function connects
    again. If the database then refuses the connection, the result is the ConfigError with the
    reason. Otherwise the result is ``problem``.

    Args:
        path: Path of the configuration file.
        problem: The error that ended the command.
    """
    if type(problem) is errors.NoStore:
        try:
            with closing(Store.open(config.load(path))) as store:
                store.look_in()
        except errors.ConfigError as refusal:
            return refusal
        except errors.Problem:
            pass
    return problem


def upgrade(options: argparse.Namespace) -> int:
    """Upgrade the database to the version that this code needs.

    If ``[DEFAULT] secret_key`` is set, also encrypt user data that is stored as plain text.
    """
    conf = config.load(options.config)
    store = Store.open(conf, unhurried=True)
    before, after = upgrades.upgrade(store)
    print(
        f"database at version {after}"
        + (" already" if before == after else f", was {before or 'empty'}")
    )
    try:
        sealed_servers = (
            sealed_columns.seal_user_data(store, Vault(conf.secret_key))
            if secret_lists.split(conf.secret_key)
            else 0
        )
    finally:
        store.close()
    if sealed_servers:
        print(
            f"encrypted the user data of {sealed_servers} servers, which was stored as plain text"
        )
    return 0


def version(options: argparse.Namespace) -> int:
    """Print the version of the database and of this code. Return 1 if the code may not use it."""
    store = Store.open(config.load(options.config), unhurried=True)
    present = upgrades.version(store)
    store.close()
    usable = f" and serves code from version {present.usable_from}" if present else ""
    print(f"the database has version {present or 'none'}{usable}, this code needs {find_needed()}")
    return 0 if is_usable(present) else 1


def reseal(options: argparse.Namespace) -> int:
    """Encrypt all stored secrets with the first ``[DEFAULT] secret_key``. See docs/secrets.md.

    Raises:
        ConfigError: ``[DEFAULT] secret_key`` is not set.
        Unavailable: No key opens a stored secret, or the database does not answer.
    """
    conf = config.load(options.config)
    if not secret_lists.split(conf.secret_key):
        raise errors.ConfigError(
            "[DEFAULT] secret_key is not set. Run this command with the configuration file of a conductor"
        )
    store = Store.open(conf, unhurried=True)
    upgrades.check(store)
    try:
        changed = sealed_columns.reseal(store, Vault(conf.secret_key))
    finally:
        store.close()
    for noun, count in changed.items():
        print(f"{noun}: {count} encrypted anew")
    print("all stored secrets are encrypted with the first secret_key")
    return 0


def purge(options: argparse.Namespace) -> int:
    """Delete old rows kind by kind. With ``--dry-run`` only count them.

    Without names of kinds, kinds with ``named_only`` stay. Each kind has its own number of days,
    unless ``--older-than`` sets another.
    """
    store = Store.open(config.load(options.config), unhurried=True)
    upgrades.check(store)
    total = 0
    try:
        for kind in old_rows.chosen(options.kind):
            days = kind.days if options.older_than is None else options.older_than
            removed = (
                _count(store, kind, days)
                if options.dry_run
                else old_rows.purge(store, kind, days, _Progress(kind.name))
            )
            total += removed.total()
            print(f"{kind.name}: {_rows(removed)}, over for more than {days} days")
    finally:
        store.close()
    print(f"{total} rows {'would go; nothing was removed' if options.dry_run else 'removed'}")
    return 0


def _count(store: Store, kind: old_rows.RowKind, days: int) -> Counter[str]:
    return store.snapshot(lambda tx: old_rows.counts(tx, kind, days))


def _rows(numbers: Counter[str]) -> str:
    tables = [f"{number} of {table}" for table, number in numbers.items() if number]
    return ", ".join(tables) or "nothing"


class _Progress:
    """Prints the progress of a kind every few seconds."""

    def __init__(self, kind: str) -> None:
        self._kind, self._printed_at = kind, time.monotonic()

    def __call__(self, removed: Counter[str]) -> None:
        if time.monotonic() - self._printed_at >= PROGRESS_SECONDS:
            self._printed_at = time.monotonic()
            print(f"{self._kind}: {_rows(removed)} so far", flush=True)
