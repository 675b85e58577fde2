# SPDX-License-Identifier: Apache-2.0
"""Tests of retry and settle for moves that become stuck at each of their steps."""

from __future__ import annotations

import pytest

from common.domain import states
from common.domain.statuses import ActionState
from conductor.workflows import WORKFLOWS
from deploy.operator import doctor
from deploy.operator.store import stuck_actions
from tests.workflows.moves import last
from tests.workflows.poison import poison
from tests.workflows.scenarios import trial_of
from tests.workflows.simulator import Cloud

STEP_FUNCTIONS = [
    (name, step.name, part)
    for name in ("resize", "live_migrate", "revert_resize", "evacuate", "shelve")
    for step in WORKFLOWS[name].steps
    for part in ("on_result", "apply", "call")
    if getattr(step, part)
]


@pytest.mark.slice("moves")
@pytest.mark.parametrize("operation", ["retry", "settle"])
@pytest.mark.parametrize(("workflow", "step", "part"), STEP_FUNCTIONS)
def test_stuck_move_or_shelve_ends_cleanly_by_action_retry_or_fail(
    cloud: Cloud,
    monkeypatch: pytest.MonkeyPatch,
    workflow: str,
    step: str,
    part: str,
    operation: str,
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None  # A stuck action is a finding.
    with monkeypatch.context() as patch:
        poison(patch, workflow, step, part, [trial.server])
        trial.begin()
        for _ in range(30):
            cloud.round()
            if not cloud.show(trial.server).action:
                return  # The scenario skips this step.
            if last(cloud, trial.server).state == ActionState.STUCK:
                break
            cloud.time.pass_by(10)
    row = last(cloud, trial.server)
    if operation == "retry":
        cloud.store.write(lambda tx: stuck_actions.retry(tx, row.id))
        cloud.time.pass_by(5)
        cloud.settle()
        trial.check_expected_end()
        return
    cloud.store.write(lambda tx: stuck_actions.fail(tx, row.id, "It was given up."))
    cloud.settle()
    assert (cloud.show(trial.server).vm_state, cloud.store.read(doctor.check)) == (states.ERROR, [])
    cloud.ask(trial.server, "delete")
    cloud.settle()
    assert cloud.show(trial.server).vm_state == states.DELETED
    assert cloud.findings() == []
