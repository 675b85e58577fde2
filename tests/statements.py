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
            _numbers.clear()
            _by_address.clear()
        super().__setitem__(_shared(key), statement)


def _shared(key: tuple[Any, ...]) -> tuple[Any, ...]:
    dialect, parts, *rest = key
    return type(dialect), dialect.server_version_info, _number(parts), *rest


def _number(parts: tuple[Any, ...]) -> int:
    """Return the number of a statement's key.

    A statement that is built once always has the same key object. Hashing that key takes as long
    as a tenth of the statement, so the object's address is looked up first.
    """
    known = _by_address.get(id(parts))
    if known is not None and known[0] is parts:
        return known[1]
    number = _numbers.setdefault(parts, len(_numbers))
    if len(_by_address) >= MOST:
        _by_address.clear()
    _by_address[id(parts)] = parts, number
    return number


_numbers: dict[tuple[Any, ...], int] = {}
#: The key objects are kept, so that no other object gets their address.
_by_address: dict[int, tuple[tuple[Any, ...], int]] = {}


def share() -> None:
    """Let all engines that are created from now on use one cache.

    Why not an event of Engine: a listener there makes SQLAlchemy dispatch events around each
    statement, which costs a tenth of a statement.
    """
    Dialect.engine_created = classmethod(_use_shared_cache)  # type: ignore[method-assign]


def _use_shared_cache(cls: type[Dialect], engine: sa.Engine) -> None:
    engine.update_execution_options(compiled_cache=COMPILED)


COMPILED = Compiled()
