# SPDX-License-Identifier: Apache-2.0
"""Faults of the transaction that accepts an action, and of the client's request.

A client without an answer, or with a 503, sends the request again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from common.domain import errors
from common.store import schema
from compute_api.compute.request.creation import Creation, Creator
from tests.fault_matrix.aim import inject_once
from tests.fault_matrix.at_database import AWAY_SECONDS, DEADLOCK, GONE, LOCK_WAIT, make_error
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows import new_servers
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Crash

MOST_TRIES = 10
LIMITS = {"instances": 10, "cores": 20, "ram": 50_000, "server_group_members": 10}
Accept = Callable[[Bench], None]


def _kill_before_commit(bench: Bench) -> None:
    store: Any = bench.cloud.store
    write = store.write

    def write_and_crash(work: Callable[[Any], Any], *more: Any, **keywords: Any) -> Any:
        def work_and_crash(tx: Any) -> Any:
            work(tx)
            del store.write
            bench.record_hit()
            raise Crash("api")

        return write(work_and_crash, *more, **keywords)

    store.write = write_and_crash


def _kill_after_commit(bench: Bench) -> None:
    store: Any = bench.cloud.store
    write = store.write

    def write_and_crash(*more: Any, **keywords: Any) -> Any:
        write(*more, **keywords)
        del store.write
        bench.record_hit()
        bench.committed = True
        raise Crash("api")

    store.write = write_and_crash


def _kill_after_reply(bench: Bench) -> None:
    """Only count the fault, because no process of the API is needed after the reply."""
    bench.record_hit()


def _fail_statement(number: int) -> Accept:
    def watch(bench: Bench) -> None:
        def fail(point: Point) -> None:
            raise make_error(number)

        inject_once(bench, _is_insert, fail)

    return watch


def _is_insert(point: Point) -> bool:
    return point[0] == "statement" and point[1].startswith("INSERT INTO actions")


def _fail_commit(when: str) -> Accept:
    def watch(bench: Bench) -> None:
        def fail(point: Point) -> None:
            raise make_error(GONE)

        inject_once(bench, lambda point: point[:2] == ("commit", when), fail)

    return watch


def _restart_database(bench: Bench) -> None:
    until: list[float] = []

    def refuse(point: Point) -> None:
        if not until and _is_insert(point):
            bench.record_hit()
            until.append(bench.time.monotonic() + AWAY_SECONDS)
        away = bool(until) and bench.time.monotonic() < until[0]
        if away and point[0] == "statement" and bench.running:
            raise make_error(GONE)

    bench.watchers.append(refuse)


def _repeat_request(bench: Bench) -> None:
    """Let the client, which got no answer, send the same request again."""
    bench.record_hit()
    bench.again = 1


def _send_conflicting_request(bench: Bench) -> None:
    """Send another request at the same moment."""
    bench.record_hit()
    bench.conflicting = True


ACCEPTS: dict[str, Accept] = {
    "api-kill-before-commit": _kill_before_commit,
    "api-kill-after-commit": _kill_after_commit,
    "api-kill-after-reply": _kill_after_reply,
    "database-drops-before-commit": _fail_statement(GONE),
    "database-commits-unanswered": _fail_commit("after"),
    "database-loses-commit-unanswered": _fail_commit("before"),
    "database-deadlock": _fail_statement(DEADLOCK),
    "database-restarts": _restart_database,
    "database-lock-times-out": _fail_statement(LOCK_WAIT),
    "client-retries": _repeat_request,
    "conflicting-request": _send_conflicting_request,
}


def inject_nothing(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Return the verdict only, because ``begin`` injects the fault."""
    return Verdict.LATE


def begin(bench: Bench, cell: Cell) -> None:
    """Send the request until the API accepts it, as a client does, and watch the action."""
    before = _count_actions(bench)
    if cell.workflow == "create":
        bench.trial.begin = _make_create_request(bench)  # type: ignore[method-assign]
    ACCEPTS[cell.fault](bench)
    # The API is a process that uses the database.
    bench.running += 1
    try:
        _request_until_accepted(bench)
    finally:
        bench.running -= 1
    if bench.again:
        _send_repetition(bench)
    if bench.conflicting:
        _check_conflict(bench)
    new_actions = _count_actions(bench) - before
    assert new_actions == 1 + bench.superseded, f"{new_actions} actions were created"
    bench.adopt()


def _request_until_accepted(bench: Bench) -> None:
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
            # The first request was accepted, and its answer was lost.
            if lost:
                return
            raise
    raise AssertionError(f"not accepted in {MOST_TRIES} tries")


def _make_create_request(bench: Bench) -> Callable[[], None]:
    """Return a function that creates a server as the API does.

    Each request of the client has the same Idempotency-Key.
    """
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


def _send_repetition(bench: Bench) -> None:
    if bench.trial.scenario.ask == "create":
        server = bench.trial.server
        bench.trial.begin()
        assert bench.trial.server == server, "a second server was created"
        return
    try:
        bench.trial.begin()
        bench.superseded += 1
    except errors.Problem as problem:
        assert problem.status in (404, 409), problem


def _check_conflict(bench: Bench) -> None:
    try:
        ask(bench.cloud, bench.trial.server, "reboot:SOFT")
    except errors.Conflict:
        return
    raise AssertionError("both requests were accepted")


def _count_actions(bench: Bench) -> int:
    with bench.cloud.store.engine.connect() as tx:
        return int(tx.scalar(sa.select(sa.func.count()).select_from(schema.actions)) or 0)
