# SPDX-License-Identifier: Apache-2.0
"""``kilonova timeline``: the steps of a server or a request, with hosts, durations and retries."""

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
    instance = Operator(tmp_path, capsys)
    yield instance
    instance.cloud.store.close()


def run_timeline(operator: Operator, *words: str) -> tuple[int, str]:
    status = main(["--config", str(operator.conf), "timeline", *words])
    captured = operator._capsys.readouterr()
    return status, captured.out + captured.err


def test_timeline_of_server_shows_steps_hosts_and_durations(operator: Operator) -> None:
    [server] = operator.cloud.create(networks=[])
    operator.cloud.settle()
    stop = operator.cloud.ask(server, "os-stop")
    operator.time.micros += 2_000_000
    operator.cloud.settle()
    status, output = run_timeline(operator, server, "--json")
    create, stopped = json.loads(output)
    assert status == 0 and (create["name"], stopped["name"]) == ("create", "stop")
    assert (stopped["action"], stopped["state"], stopped["user"]) == (
        stop,
        "done",
        operator.read_action(stop).user_id,
    )
    assert stopped["seconds"] >= 2
    began, ended = stopped["steps"]
    assert (began["event"], began["seconds"]) == ("started", None)
    assert (ended["event"], ended["host"]) == ("succeeded", began["host"])
    assert ended["after"] >= began["after"] and ended["host"] in ("h1", "h2", "h3")
    assert ended["seconds"] == pytest.approx(ended["after"] - began["after"], abs=0.01)
    assert "args" not in stopped
    status, output = run_timeline(operator, server)
    assert status == 0 and f"stop of server {server}: done, " in output
    assert stopped["request"] in output and began["step"] in output


def test_timeline_accepts_request_id_and_server_name(operator: Operator) -> None:
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
    [timeline] = json.loads(run_timeline(operator, request, "--json")[1])
    assert (timeline["action"], timeline["seconds"]) == (stop, None)
    assert [
        action["name"] for action in json.loads(run_timeline(operator, "alone", "--json")[1])
    ] == [
        "create",
        "stop",
    ]


def test_timeline_of_stuck_action_shows_number_of_failures(operator: Operator) -> None:
    server, _ = operator.create_stuck_action(step="renamed")
    status, output = run_timeline(operator, server)
    assert status == 0 and "failed 10 times in a row: an unexpected error" in output


def test_timeline_of_unknown_or_ambiguous_name_exits_with_1_and_advice(operator: Operator) -> None:
    status, output = run_timeline(operator, ids.new_request())
    assert status == 1 and "the API's log" in output
    status, output = run_timeline(operator, "nobody")
    assert status == 1 and "give its id" in output
    operator.cloud.create(networks=[])
    operator.cloud.create(networks=[])

    def same_name(tx: Any) -> None:
        tx.execute(sa.update(schema.servers).values(name="twin"))

    operator.cloud.store.write(same_name)
    status, output = run_timeline(operator, "twin")
    assert status == 1 and "Several servers" in output


FORGED = "E:\x1b]0;PWNED\x07\x1b[31mRED\x1b[2J\r\nFAKE LINE \x9b31m \u202e"


def test_operator_commands_print_no_control_characters_of_stored_texts(operator: Operator) -> None:
    """The rows are as written by a release that stored texts of hosts without cleaning them."""
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
