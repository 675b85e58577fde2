# SPDX-License-Identifier: Apache-2.0
"""One cache of compiled SQL statements for all engines of a test run, and a record of statements.

By default each engine has its own cache, and each test creates engines. Without the shared cache,
tests would spend half of their time compiling statements again. A service has one engine and does
not need this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

#: Maximum number of cached statements. A ring has about two thousand.
MOST = 5000


class Compiled(dict[Any, Any]):
    """The compiled cache, shared by databases of the same kind and version."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shared_key(key), default)

    def __setitem__(self, key: Any, statement: Any) -> None:
        if len(self) >= MOST:
            self.clear()
            _numbers.clear()
            _by_address.clear()
        super().__setitem__(_shared_key(key), statement)


def _shared_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    dialect, parts, *rest = key
    return type(dialect), dialect.server_version_info, _number(parts), *rest


def _number(parts: tuple[Any, ...]) -> int:
    """Return the number of a statement's key.

    A statement that is built once always has the same key object. Hashing that key takes as long
    as a tenth of the statement, so the object's address is looked up first.
    """
    entry = _by_address.get(id(parts))
    if entry is not None and entry[0] is parts:
        return entry[1]
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


def find_rebuilt_statements(engine: sa.Engine, work: Callable[[], object]) -> list[str]:
    """Run ``work`` three times, and return the statements that each run built again, as text.

    A process builds a statement of a hot path once, because SQLAlchemy needs ten times as long to
    build a statement as to run it. A statement that only one run executes, for example that of a
    periodic task, is not returned.
    """
    executed: list[sa.ClauseElement] = []

    def record(connection: object, statement: sa.ClauseElement, *rest: object) -> None:
        executed.append(statement)

    texts: list[set[str]] = []
    sa.event.listen(engine, "before_execute", record)
    try:
        work()
        for _ in range(2):
            # The objects stay in the list, so that no other statement gets their address.
            known, number = {id(statement) for statement in executed}, len(executed)
            work()
            new = [statement for statement in executed[number:] if id(statement) not in known]
            texts.append({str(statement.compile(engine)) for statement in new})
    finally:
        sa.event.remove(engine, "before_execute", record)
    return sorted(set.intersection(*texts))
