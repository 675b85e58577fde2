# SPDX-License-Identifier: Apache-2.0
"""Unexpected errors on purpose: changed rows, functions that raise, and locked rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.store import schema
from conductor.workflows import WORKFLOWS
from tests.workflows.simulator import Cloud


def change(cloud: Cloud, action: str, **values: Any) -> None:
    """Change the row of an action, for example to values of another release."""
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.actions).where(schema.actions.c.id == action).values(**values)
        )
    )


class Poison(Exception):
    """An unexpected exception."""


def poison(
    monkeypatch: pytest.MonkeyPatch,
    workflow: str,
    step: str | None,
    part: str,
    victims: list[str],
    text: str = "",
) -> None:
    """Let a function of a workflow raise ``Poison`` for some servers.

    Args:
        monkeypatch: Restores the workflow after the test.
        workflow: The workflow's name.
        step: The step with the function, or None for a function of the workflow itself.
        part: The name of the function's field.
        victims: Ids of the servers.
        text: Text of the exception. "" stands for the name of the field.
    """
    original = WORKFLOWS[workflow]
    owner: Any = original if step is None else original.steps[original.index(step)]
    function = getattr(owner, part)

    def raise_for_victims(*arguments: Any) -> Any:
        runs = [
            run
            for argument in arguments
            for run in (argument if isinstance(argument, list) else [argument])
        ]
        if any(getattr(getattr(run, "server", None), "id", None) in victims for run in runs):
            raise Poison(text or part)
        return function(*arguments)

    changed = replace(owner, **{part: raise_for_victims})
    monkeypatch.setitem(
        WORKFLOWS,
        workflow,
        changed
        if step is None
        else replace(
            original,
            steps=tuple(changed if entry is owner else entry for entry in original.steps),
        ),
    )


@contextmanager
def hold_row_lock(cloud: Cloud, server: str, seconds: float) -> Iterator[list[float]]:
    """Hold the lock of the server's row, as a database client that no longer answers.

    A statement that would lock the row waits and raises TooBusy. A query that skips locked rows
    does not return the server.

    Args:
        cloud: The cloud.
        server: The server's id.
        seconds: How long each statement waits.

    Yields:
        The times at which statements began to wait, by the cloud's clock.
    """
    waits: list[float] = []
    queries: list[str] = []
    is_writing = [False]

    def look(
        connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> tuple[str, Any]:
        if statement.startswith("BEGIN"):
            is_writing[0] = True
            queries.clear()
        # Statements that do not lock the row, for example reads of ``servers_of``.
        elif (
            not is_writing[0]
            or "FROM servers" not in statement
            or server not in parameters
            or ("AS assignment" in statement and "ORDER BY" not in statement)
        ):
            pass
        # The first of these queries returns all rows, the second skips locked rows.
        elif statement.startswith("SELECT servers.id \nFROM"):
            queries.append(statement)
            if len(queries) == 2:
                return statement, tuple("" if value == server else value for value in parameters)
        else:
            waits.append(cloud.time.monotonic())
            cloud.time.pass_by(seconds)
            raise errors.TooBusy
        return statement, parameters

    def end(connection: Any) -> None:
        is_writing[0] = False

    sa.event.listen(cloud.store.engine, "before_cursor_execute", look, retval=True)
    for event in ("commit", "rollback"):
        sa.event.listen(cloud.store.engine, event, end)
    yield waits
    sa.event.remove(cloud.store.engine, "before_cursor_execute", look)
    for event in ("commit", "rollback"):
        sa.event.remove(cloud.store.engine, event, end)
