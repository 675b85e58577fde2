# SPDX-License-Identifier: Apache-2.0
"""What SQLAlchemy compiles of a statement is kept for the whole run.

An engine keeps it for itself, and each test makes engines of its own: half of a test's time went
into compiling again what the test before had compiled. A service has one engine, so this is nothing
to it.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

MOST = 5000  #: statements; a ring has about two thousand


class Compiled(dict[Any, Any]):
    """As an engine's own cache, but databases of the same kind and version count as one."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shared(key), default)

    def __setitem__(self, key: Any, statement: Any) -> None:
        if len(self) >= MOST:
            self.clear()
        super().__setitem__(_shared(key), statement)


def _shared(key: tuple[Any, ...]) -> tuple[Any, ...]:
    dialect, *rest = key
    return type(dialect), dialect.server_version_info, *rest


def share() -> None:
    """Let all engines that are created from now on use one cache.

    Why not an event of Engine: a listener there makes SQLAlchemy dispatch events around each
    statement, which costs a tenth of a statement.
    """
    Dialect.engine_created = classmethod(_use_shared_cache)  # type: ignore[method-assign]


def _use_shared_cache(cls: type[Dialect], engine: sa.Engine) -> None:
    engine.update_execution_options(compiled_cache=COMPILED)


COMPILED = Compiled()
