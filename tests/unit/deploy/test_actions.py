# SPDX-License-Identifier: Apache-2.0
"""``kilonova action list``, ``show``, ``retry``, ``abort`` and ``fail`` with a simulated cloud.

The database is an SQLite file. The conductor of the simulator runs between the commands.
"""

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
    """Runs ``kilonova action`` against the database file of a simulated cloud."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.conf, self._capsys = folder / "kilonova.conf", capsys
        self.conf.write_text(f"[database]\nurl = sqlite:///{folder}/k.db\n")
        self.time = Time()
        # The commands use the real clock.
        self.time.micros = time.time_ns() // 1000
        self.cloud = Cloud(upgrade(Store(f"sqlite:///{folder}/k.db", time=self.time)), self.time)
        self.cloud.round()

    def run_action(self, *words: str) -> tuple[int, str]:
        status = main(["--config", str(self.conf), "action", *words])
        output = self._capsys.readouterr()
        return status, output.out + output.err

    def create_stuck_action(self, what: str = "os-stop", **values: Any) -> tuple[str, str]:
        """Create a server with a stuck action, and return their ids."""
        [server] = self.cloud.create(networks=[])
        self.cloud.settle()
        action = self.cloud.ask(
            server, what, args={"image_id": "11111111-1111-4111-8111-111111111111", "name": "snap"}
        )
        change(self.cloud, action, failures=9, **values)
        self.cloud.advance()
        assert self.read_action(action).state == ActionState.STUCK
        return server, action

    def read_action(self, action: str) -> Any:
        return self.cloud.store.read(lambda tx: actions.show_by_id(tx, action))


@pytest.fixture
def operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    instance = Operator(tmp_path, capsys)
    yield instance
    instance.cloud.store.close()


def test_action_list_is_empty_and_show_fails_without_running_action(operator: Operator) -> None:
    assert operator.run_action("list") == (0, "no action is in hand\n")
    assert operator.run_action("list", "--stuck") == (0, "no action is stuck\n")
    assert operator.run_action("show", "none")[0] == 1


def test_action_list_and_show_name_cause_and_commands_of_stuck_action(operator: Operator) -> None:
    server, action = operator.create_stuck_action(step="renamed")
    other = operator.cloud.ask(operator.cloud.create(networks=[])[0], "delete")
    status, output = operator.run_action("list")
    assert status == 1 and other in output
    status, output = operator.run_action("list", "--stuck")
    assert status == 1 and other not in output
    assert [action, server, "stop", "stuck", "renamed"] == output.splitlines()[1].split()[:5]
    [listed] = json.loads(operator.run_action("list", "--stuck", "--json")[1])
    assert (listed["id"], listed["state"], listed["failures"], "args" in listed) == (
        action,
        "stuck",
        10,
        False,
    )
    status, output = operator.run_action("show", action)
    assert status == 1
    assert (
        "failed 10 times in a row: an unexpected error in each try. LookupError: workflow stop has no step"
        in output
    )
    assert all(f"kilonova action {way} {action}" in output for way in ("retry", "abort", "fail"))
    assert (
        json.loads(operator.run_action("show", action, "--json")[1])["events"][-1]["event"]
        == "stuck"
    )


def test_action_show_prints_cause_with_line_feed_on_one_line(operator: Operator) -> None:
    _, action = operator.create_stuck_action(step="renamed")
    change(operator.cloud, action, cause="refused\nkilonova action fail forged")
    lines = operator.run_action("show", action)[1].splitlines()
    assert not [line for line in lines if line.endswith("fail forged") and "refused" not in line]
    assert [line for line in lines if "refused" in line]


def test_action_retry_continues_stuck_action_to_completion(operator: Operator) -> None:
    server, action = operator.create_stuck_action(step="renamed")
    # As after an upgrade to the release that has the step.
    change(operator.cloud, action, step=None)
    assert operator.run_action("retry", action) == (
        0,
        f"action {action}, stop of server {server}, continues\n",
    )
    operator.cloud.settle()
    assert operator.cloud.show(server).vm_state == states.STOPPED
    assert operator.run_action("show", action) == (
        1,
        f"kilonova: Action {action} has ended: it is done. Run: kilonova timeline {server}\n",
    )


def test_action_fail_ends_stuck_action_and_sets_server_to_error(operator: Operator) -> None:
    server, action = operator.create_stuck_action(step="renamed")
    assert operator.run_action("fail", action, "none") == (
        1,
        f"action {action}, stop of server {server}, has ended as failed\nThere is no action none.\n",
    )
    record = operator.cloud.show(server)
    assert (record.vm_state, record.task_state, record.action) == (states.ERROR, None, None)
    assert record.fault["message"] == "The action did not continue, and an operator ended it."
    assert operator.read_action(action).secrets is None
    assert operator.run_action("fail", action) == (1, f"Action {action} is failed, not stuck.\n")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"step": "renamed"}, "stop has no step renamed in this release"),
        (
            {"workflow": "delete", "step": "gone", "data": []},
            "step gone comes after the pivot",
        ),
    ],
)
def test_action_abort_is_refused_when_stuck_action_cannot_be_undone(
    operator: Operator, values: dict[str, Any], why: str
) -> None:
    _, action = operator.create_stuck_action(**values)
    status, output = operator.run_action("abort", action)
    assert status == 1 and why in output and "kilonova action" in output
    assert operator.read_action(action).state == ActionState.STUCK


def test_action_abort_undoes_stuck_action(operator: Operator) -> None:
    server, action = operator.create_stuck_action("createImage", data=["no dictionary"])
    change(operator.cloud, action, data={})
    assert operator.run_action("abort", action) == (
        0,
        f"action {action}, createImage of server {server}, is being undone\n",
    )
    operator.cloud.settle()
    assert (operator.read_action(action).state, operator.cloud.show(server).vm_state) == (
        "failed",
        states.ACTIVE,
    )
    assert operator.cloud.images.records == {}
    assert operator.cloud.findings() == []


def test_action_list_stuck_shows_and_fail_ends_action_no_conductor_takes(
    operator: Operator,
) -> None:
    [server] = operator.cloud.create(networks=[])
    operator.cloud.settle()
    action = operator.cloud.ask(server, "os-stop")
    change(operator.cloud, action, version=9, due_at=0)
    status, output = operator.run_action("list", "--stuck")
    assert status == 1 and "overdue" in output
    assert f"kilonova action fail {action}" in operator.run_action("show", action)[1]
    assert operator.run_action("fail", action)[0] == 0
    rows = operator.cloud.store.read(
        lambda tx: tx.execute(sa.select(schema.servers.c.vm_state)).scalars().all()
    )
    assert rows == [states.ERROR]
