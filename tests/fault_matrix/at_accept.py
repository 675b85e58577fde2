# SPDX-License-Identifier: Apache-2.0
"""What happens to the transaction that accepts an action, and to who asked for it: whoever is
answered with a 503, or not at all, asks again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from common.domain import errors
from common.store import schema
from compute_api.compute.request.creation import Creation, Creator
from tests.fault_matrix.aim import once
from tests.fault_matrix.at_database import AWAY_SECONDS, DEADLOCK, GONE, LOCK_WAIT, error
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows import new_servers
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Crash

MOST_TRIES = 10
LIMITS = {"instances": 10, "cores": 20, "ram": 50_000, "server_group_members": 10}
Accept = Callable[[Bench], None]


def _killed_before_commit(bench: Bench) -> None:
    store: Any = bench.cloud.store
    write = store.write

    def dies(work: Callable[[Any], Any], *more: Any, **named: Any) -> Any:
        def worked(tx: Any) -> Any:
            work(tx)
            del store.write
            bench.hit()
            raise Crash("api")

        return write(worked, *more, **named)

    store.write = dies


def _killed_after_commit(bench: Bench) -> None:
    store: Any = bench.cloud.store
    write = store.write

    def dies(*more: Any, **named: Any) -> Any:
        write(*more, **named)
        del store.write
        bench.hit()
        bench.committed = True
        raise Crash("api")

    store.write = dies


def _killed_after_reply(bench: Bench) -> None:
    """Nobody needs it any more."""
    bench.hit()


def _statement(number: int) -> Accept:
    def watch(bench: Bench) -> None:
        def fail(point: Point) -> None:
            raise error(number)

        once(bench, _inserts, fail)

    return watch


def _inserts(point: Point) -> bool:
    return point[0] == "statement" and point[1].startswith("INSERT INTO actions")


def _commit(when: str) -> Accept:
    def watch(bench: Bench) -> None:
        def fail(point: Point) -> None:
            raise error(GONE)

        once(bench, lambda point: point[:2] == ("commit", when), fail)

    return watch


def _restarts(bench: Bench) -> None:
    until: list[float] = []

    def refuse(point: Point) -> None:
        if not until and _inserts(point):
            bench.hit()
            until.append(bench.time.monotonic() + AWAY_SECONDS)
        away = bool(until) and bench.time.monotonic() < until[0]
        if away and point[0] == "statement" and bench.running:
            raise error(GONE)

    bench.watchers.append(refuse)


def _asks_again(bench: Bench) -> None:
    """The client got no answer, and sends the same request."""
    bench.hit()
    bench.again = 1


def _conflicts(bench: Bench) -> None:
    """Somebody wants something else at the same moment."""
    bench.hit()
    bench.conflicting = True


ACCEPTS: dict[str, Accept] = {
    "api-kill-before-commit": _killed_before_commit,
    "api-kill-after-commit": _killed_after_commit,
    "api-kill-after-reply": _killed_after_reply,
    "database-drops-before-commit": _statement(GONE),
    "database-commits-unanswered": _commit("after"),
    "database-loses-commit-unanswered": _commit("before"),
    "database-deadlock": _statement(DEADLOCK),
    "database-restarts": _restarts,
    "database-lock-times-out": _statement(LOCK_WAIT),
    "client-retries": _asks_again,
    "conflicting-request": _conflicts,
}


def nothing(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The request itself is what goes wrong: see ``begin``."""
    return Verdict.LATE


def begin(bench: Bench, cell: Cell) -> None:
    """Ask until it is accepted, as a client does."""
    before = _actions(bench)
    if cell.workflow == "create":
        bench.trial.begin = _creates(bench)  # type: ignore[method-assign]
    ACCEPTS[cell.fault](bench)
    bench.running += 1  # as a process that uses the database
    try:
        _ask(bench)
    finally:
        bench.running -= 1
    if bench.again:
        _repeat(bench)
    if bench.conflicting:
        _conflict(bench)
    made = _actions(bench) - before
    assert made == 1 + bench.superseded, f"{made} actions were made"
    bench.adopt()


def _ask(bench: Bench) -> None:
    lost = False
    for _ in range(MOST_TRIES):
        try:
            bench.trial.begin()
            bench.superseded += lost and bench.committed and bench.trial.scenario.ask != "create"
            return
        except Crash:
            lost = True
        except errors.Unavailable:
            bench.time.pass_by(1)
        except errors.Conflict:
            if lost:  # it was accepted, and the answer was lost
                return
            raise
    raise AssertionError(f"not accepted in {MOST_TRIES} tries")


def _creates(bench: Bench) -> Callable[[], None]:
    """The API's own way to make a server; each try of a client has the same Idempotency-Key."""
    cloud = bench.cloud
    creator = Creator(cloud.store, LIMITS)

    def create() -> None:
        server, action = new_servers.build_rows([{"network": "n1"}])
        creation = Creation(
            "project",
            "user",
            server["vcpus"],
            server["memory_mb"],
            1,
            1,
            "r",
            lambda count: ([server], [action]),
            key="key",
            digest="digest",
        )
        bench.trial.server = creator.create(creation).server_id

    return create


def _repeat(bench: Bench) -> None:
    if bench.trial.scenario.ask == "create":
        server = bench.trial.server
        bench.trial.begin()
        assert bench.trial.server == server, "a second server was made"
        return
    try:
        bench.trial.begin()
        bench.superseded += 1
    except errors.Problem as problem:
        assert problem.status in (404, 409), problem


def _conflict(bench: Bench) -> None:
    try:
        ask(bench.cloud, bench.trial.server, "reboot:SOFT")
    except errors.Conflict:
        return
    raise AssertionError("both were accepted")


def _actions(bench: Bench) -> int:
    with bench.cloud.store.engine.connect() as tx:
        return int(tx.scalar(sa.select(sa.func.count()).select_from(schema.actions)) or 0)
