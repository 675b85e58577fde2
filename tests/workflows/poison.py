# SPDX-License-Identifier: Apache-2.0
"""What nobody foresaw, made on purpose: rows of another release, functions that raise, rows that
somebody locks."""

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
    """As if another release had written it."""
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.actions).where(schema.actions.c.id == action).values(**values)
        )
    )


class Poison(Exception):
    """What nobody foresaw."""


def poison(
    monkeypatch: pytest.MonkeyPatch,
    workflow: str,
    step: str | None,
    part: str,
    victims: list[str],
    text: str = "",
) -> None:
    """This function of a step, or of the workflow, raises for these servers, in these words."""
    story = WORKFLOWS[workflow]
    owner: Any = story if step is None else story.steps[story.index(step)]
    function = getattr(owner, part)

    def fails(*arguments: Any) -> Any:
        runs = [
            run
            for argument in arguments
            for run in (argument if isinstance(argument, list) else [argument])
        ]
        if any(getattr(getattr(run, "server", None), "id", None) in victims for run in runs):
            raise Poison(text or part)
        return function(*arguments)

    changed = replace(owner, **{part: fails})
    monkeypatch.setitem(
        WORKFLOWS,
        workflow,
        changed
        if step is None
        else replace(story, steps=tuple(changed if one is owner else one for one in story.steps)),
    )


@contextmanager
def locked(cloud: Cloud, server: str, seconds: float) -> Iterator[list[float]]:
    """Somebody who does not answer any more holds the server's row: who would lock it waits so
    long, in vain. When each of them began to wait."""
    waits: list[float] = []
    asked: list[str] = []
    is_writing = [False]

    def look(
        connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> tuple[str, Any]:
        if statement.startswith("BEGIN"):
            is_writing[0] = True
            asked.clear()
        # servers_of, which locks nothing
        elif (
            not is_writing[0]
            or "FROM servers" not in statement
            or server not in parameters
            or ("AS assignment" in statement and "ORDER BY" not in statement)
        ):
            pass
        # nobody waits: once all, once the free ones
        elif statement.startswith("SELECT servers.id \nFROM"):
            asked.append(statement)
            if len(asked) == 2:
                return statement, tuple("" if one == server else one for one in parameters)
        else:
            waits.append(cloud.time.monotonic())
            cloud.time.pass_by(seconds)
            raise errors.TooBusy
        return statement, parameters

    def end(connection: Any) -> None:
        is_writing[0] = False

    sa.event.listen(cloud.store.engine, "before_cursor_execute", look, retval=True)
    for what in ("commit", "rollback"):
        sa.event.listen(cloud.store.engine, what, end)
    yield waits
    sa.event.remove(cloud.store.engine, "before_cursor_execute", look)
    for what in ("commit", "rollback"):
        sa.event.remove(cloud.store.engine, what, end)
