# SPDX-License-Identifier: Apache-2.0
"""``kilonova action``: what is stuck is named with its cause and the commands that help, and each
of them does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.statuses import ActionState
from common.store import schema
from common.store.engine import Store
from common.store.servers import actions
from deploy.operator.main import main
from tests.schemas import upgrade
from tests.workflows.poison import change
from tests.workflows.simulator import Cloud, Time


class Operator:
    """Types commands at a cloud, whose database is a file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.conf, self._capsys = folder / "kilonova.conf", capsys
        self.conf.write_text(f"[database]\nurl = sqlite:///{folder}/k.db\n")
        self.time = Time()
        self.time.micros = time.time_ns() // 1000  # commands go by the real clock
        self.cloud = Cloud(upgrade(Store(f"sqlite:///{folder}/k.db", time=self.time)), self.time)
        self.cloud.round()

    def types(self, *words: str) -> tuple[int, str]:
        status = main(["--config", str(self.conf), "action", *words])
        told = self._capsys.readouterr()
        return status, told.out + told.err

    def stuck(self, what: str = "os-stop", **values: Any) -> tuple[str, str]:
        """A server and its action, which is stuck."""
        [server] = self.cloud.create(networks=[])
        self.cloud.settle()
        action = self.cloud.ask(
            server, what, args={"image_id": "11111111-1111-4111-8111-111111111111", "name": "snap"}
        )
        change(self.cloud, action, failures=9, **values)
        self.cloud.advance()
        assert self.row(action).state == ActionState.STUCK
        return server, action

    def row(self, action: str) -> Any:
        return self.cloud.store.read(lambda tx: actions.show_by_id(tx, action))


@pytest.fixture
def operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    made = Operator(tmp_path, capsys)
    yield made
    made.cloud.store.close()


def test_nothing_is_in_hand(operator: Operator) -> None:
    assert operator.types("list") == (0, "no action is in hand\n")
    assert operator.types("list", "--stuck") == (0, "no action is stuck\n")
    assert operator.types("show", "none")[0] == 1


def test_what_is_stuck_is_shown_with_its_cause_and_what_helps(operator: Operator) -> None:
    server, action = operator.stuck(step="renamed")
    other = operator.cloud.ask(operator.cloud.create(networks=[])[0], "delete")
    status, told = operator.types("list")
    assert status == 1 and other in told
    status, told = operator.types("list", "--stuck")
    assert status == 1 and other not in told
    assert [action, server, "stop", "stuck", "renamed"] == told.splitlines()[1].split()[:5]
    [found] = json.loads(operator.types("list", "--stuck", "--json")[1])
    assert (found["id"], found["state"], found["failures"], "args" in found) == (
        action,
        "stuck",
        10,
        False,
    )
    status, told = operator.types("show", action)
    assert status == 1
    assert (
        "failed 10 times in a row: an unforeseen failure, again and again. LookupError: stop has no step"
        in told
    )
    assert all(f"kilonova action {way} {action}" in told for way in ("retry", "abort", "settle"))
    assert json.loads(operator.types("show", action, "--json")[1])["events"][-1]["event"] == "stuck"


def test_cause_with_a_line_feed_is_shown_on_one_line(operator: Operator) -> None:
    _, action = operator.stuck(step="renamed")
    change(operator.cloud, action, cause="refused\nkilonova action settle forged")
    shown = operator.types("show", action)[1].splitlines()
    assert not [line for line in shown if line.endswith("settle forged") and "refused" not in line]
    assert [line for line in shown if "refused" in line]


def test_one_that_is_retried_goes_on(operator: Operator) -> None:
    server, action = operator.stuck(step="renamed")
    change(operator.cloud, action, step=None)  # the release that knows it is back
    assert operator.types("retry", action) == (
        0,
        f"action {action}, stop of server {server}, goes on\n",
    )
    operator.cloud.settle()
    assert operator.cloud.show(server).vm_state == states.STOPPED
    assert operator.types("show", action) == (1, f"kilonova: Action {action} is done.\n")


def test_one_that_is_settled_lets_its_server_go(operator: Operator) -> None:
    server, action = operator.stuck(step="renamed")
    assert operator.types("settle", action, "none") == (
        1,
        f"action {action}, stop of server {server}, has ended as failed\nThere is no action none.\n",
    )
    shown = operator.cloud.show(server)
    assert (shown.vm_state, shown.task_state, shown.action) == (states.ERROR, None, None)
    assert shown.fault["message"] == "It did not go on, and an operator has ended it."
    assert operator.row(action).secrets is None
    assert operator.types("settle", action) == (1, f"Action {action} is failed, not stuck.\n")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"step": "renamed"}, "stop has no step renamed in this release"),
        (
            {"workflow": "delete", "step": "gone", "data": []},
            "at its step gone there is no way back",
        ),
    ],
)
def test_one_that_cannot_be_undone_is_not_aborted(
    operator: Operator, values: dict[str, Any], why: str
) -> None:
    _, action = operator.stuck(**values)
    status, told = operator.types("abort", action)
    assert status == 1 and why in told and "ettle it" in told
    assert operator.row(action).state == ActionState.STUCK


def test_one_that_is_aborted_is_undone(operator: Operator) -> None:
    server, action = operator.stuck("createImage", data=["no dictionary"])
    change(operator.cloud, action, data={})
    assert operator.types("abort", action) == (
        0,
        f"action {action}, createImage of server {server}, is being undone\n",
    )
    operator.cloud.settle()
    assert (operator.row(action).state, operator.cloud.show(server).vm_state) == (
        "failed",
        states.ACTIVE,
    )
    assert operator.cloud.images.records == {}
    assert operator.cloud.findings() == []


def test_what_no_conductor_takes_is_listed_too(operator: Operator) -> None:
    [server] = operator.cloud.create(networks=[])
    operator.cloud.settle()
    action = operator.cloud.ask(server, "os-stop")
    change(operator.cloud, action, version=9, due_at=0)
    status, told = operator.types("list", "--stuck")
    assert status == 1 and "overdue" in told
    assert f"kilonova action settle {action}" in operator.types("show", action)[1]
    assert operator.types("settle", action)[0] == 0
    rows = operator.cloud.store.read(
        lambda tx: tx.execute(sa.select(schema.servers.c.vm_state)).scalars().all()
    )
    assert rows == [states.ERROR]
