# SPDX-License-Identifier: Apache-2.0
"""Upgrades of the database: numbered files, applied in order by alembic.

``upgrade`` is what ``kilonova database upgrade`` calls; a command that finds a database of another version says so and
ends (``check``), a service says so and waits (``common.store.version``).
"""
from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from common import errors
from common.store.engine import Store


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def upgrade(store: Store, to: str = "head") -> tuple[str | None, str]:
    """Bring the database to the newest version, or to an older one that a test begins with; returns (version before,
    newest version). Repeatable."""
    before = version(store)
    config = _config()
    with store.begin() as tx:
        config.attributes["connection"] = tx
        command.upgrade(config, to)
    return before, newest()


def version(store: Store) -> str | None:
    """The version that the database has; None before the first upgrade, which is what makes SQLite's file."""
    if store.dialect_name == "sqlite" and _is_absent(store.url.database):
        return None
    found: str | None = store.read(lambda tx: MigrationContext.configure(tx).get_current_revision())
    return found


def _is_absent(file: str | None) -> bool:
    """Whether SQLite would make that file, which nobody who only looks may cause."""
    return bool(file) and file != ":memory:" and not Path(str(file)).exists()


def newest() -> str:
    """The version that this code needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def check(store: Store) -> None:
    """Refuse a database of another version.

    Raises:
        Problem: it must be upgraded first, or is newer than this code.
    """
    found = version(store)
    if found != newest():
        where = store.url.render_as_string(hide_password=True)
        raise errors.Problem(f"The database {where} is at version {found or 'none'}, this code needs {newest()}. "
                             "If that is the right one ([database] url), run: kilonova database upgrade")
