# SPDX-License-Identifier: Apache-2.0
"""``kilonova timeline``: a server's and a request's steps, with hosts, durations and retries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.store import schema
from deploy.operator.main import main
from tests.unit.deploy.test_actions import Operator


@pytest.fixture
def operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    made = Operator(tmp_path, capsys)
    yield made
    made.cloud.store.close()


def types(operator: Operator, *words: str) -> tuple[int, str]:
    status = main(["--config", str(operator.conf), "timeline", *words])
    told = operator._capsys.readouterr()
    return status, told.out + told.err


def test_steps_of_a_server_with_hosts_and_durations(operator: Operator) -> None:
    [server] = operator.cloud.create(networks=[])
    operator.cloud.settle()
    stop = operator.cloud.ask(server, "os-stop")
    operator.time.micros += 2_000_000
    operator.cloud.settle()
    status, told = types(operator, server, "--json")
    create, stopped = json.loads(told)
    assert status == 0 and (create["name"], stopped["name"]) == ("create", "stop")
    assert (stopped["action"], stopped["state"], stopped["user"]) == (
        stop,
        "done",
        operator.row(stop).user_id,
    )
    assert stopped["seconds"] >= 2
    began, ended = stopped["steps"]
    assert (began["event"], began["seconds"]) == ("started", None)
    assert (ended["event"], ended["host"]) == ("succeeded", began["host"])
    assert ended["after"] >= began["after"] and ended["host"] in ("h1", "h2", "h3")
    assert ended["seconds"] == pytest.approx(ended["after"] - began["after"], abs=0.01)
    assert "args" not in stopped
    status, told = types(operator, server)
    assert status == 0 and f"stop of server {server}: done, " in told
    assert stopped["request"] in told and began["step"] in told


def test_a_request_by_its_id_and_a_server_by_its_name(operator: Operator) -> None:
    [server] = operator.cloud.create(networks=[])
    operator.cloud.settle()
    stop = operator.cloud.ask(server, "os-stop")
    request = ids.new_request()

    def work(tx: Any) -> None:
        tx.execute(
            sa.update(schema.actions).where(schema.actions.c.id == stop).values(request_id=request)
        )
        tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(name="alone")
        )

    operator.cloud.store.write(work)
    [found] = json.loads(types(operator, request, "--json")[1])
    assert (found["action"], found["seconds"]) == (stop, None)
    assert [one["name"] for one in json.loads(types(operator, "alone", "--json")[1])] == [
        "create",
        "stop",
    ]


def test_what_is_stuck_says_how_often_it_was_tried(operator: Operator) -> None:
    server, _ = operator.stuck(step="renamed")
    status, told = types(operator, server)
    assert status == 0 and "failed 10 times in a row: an unforeseen failure" in told


def test_what_is_not_there(operator: Operator) -> None:
    status, told = types(operator, ids.new_request())
    assert status == 1 and "the API's log" in told
    status, told = types(operator, "nobody")
    assert status == 1 and "give its id" in told
    operator.cloud.create(networks=[])
    operator.cloud.create(networks=[])

    def same_name(tx: Any) -> None:
        tx.execute(sa.update(schema.servers).values(name="twin"))

    operator.cloud.store.write(same_name)
    status, told = types(operator, "twin")
    assert status == 1 and "Several servers" in told


FORGED = "E:\x1b]0;PWNED\x07\x1b[31mRED\x1b[2J\r\nFAKE LINE \x9b31m \u202e"


def test_terminal_shows_no_control_characters_of_a_host(operator: Operator) -> None:
    """The rows are those of a release that did not clean texts when they came in."""
    [server] = operator.cloud.create(networks=[])
    operator.cloud.settle()
    with operator.cloud.store.begin() as tx:
        tx.execute(sa.update(schema.events).values(message=FORGED, details=FORGED))
        tx.execute(sa.update(schema.actions).values(cause=FORGED, failures=3, message=FORGED))
        tx.execute(sa.update(schema.actions).values(state="stuck", finished_at=None))
    for words in (
        ["timeline", server],
        ["action", "list"],
        ["action", "list", "--stuck"],
        ["hosts"],
        ["status"],
        ["doctor", "--no-hosts"],
    ):
        main(["--config", str(operator.conf), *words])
        shown = operator._capsys.readouterr()
        lines = (shown.out + shown.err).splitlines()
        assert [line for line in lines if not line.isprintable()] == [], words
        assert [line for line in lines if line.startswith("FAKE")] == [], words
