# SPDX-License-Identifier: Apache-2.0
"""Refusals of external services: failures before the pivot, pending cleanups after it and in undo.

The tests call the runner without a database.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from common.store.cleanups import PORTS
from conductor.engine import runner
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData, Failure
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.workflows import WORKFLOWS

#: Workflow -> its calls to external services after the pivot. They cannot fail the action.
AFTER_THE_PIVOT = {
    "backup": ["rotate"],
    "shelve": ["unbind", "reserve_volumes"],
    "offload": ["unbind", "reserve_volumes"],
    "unshelve": ["forget"],
    "unshelve_here": ["forget"],
    "detach_interface": ["unplug"],
    "detach_share": ["deny"],
    "attach_volume": ["complete"],
    "detach_volume": ["end_attachment"],
    "swap_volume": ["complete", "end_migration"],
    "volume_snapshot_create": ["report_taken", "await_service"],
    "volume_snapshot_delete": ["report_merged"],
    "resize": ["plug"],
    "migrate": ["plug"],
    "revert_resize": ["plug"],
    "live_migrate": ["activate", "let_go", "disconnect_source"],
    "delete": [
        "unplug",
        "unshare",
        "release_volumes",
        "release",
        "unshare_late",
        "release_volumes_late",
        "forget",
        "delete_snapshots",
    ],
}


@dataclass
class Head:
    """The columns of an action that the runner reads."""

    workflow: str = "stop"
    phase: str = "do"
    id: str = "action"
    host: str | None = None
    sends: int = 0
    attempt: int = 1
    next_seq: int = 1
    locked_at: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """The columns of a server that the runner reads."""

    id: str = "server"
    project_id: str = "project"
    host: str = "h1"


def new_run(phase: str = "do") -> AnyRun:
    new: AnyRun = Run(
        Head(phase=phase),
        Server(),
        ActionArgs(),  # type: ignore[arg-type]
        ActionData(problem=Failure(text="It broke.")),
    )
    new.fail("It is in use.")
    return new


def call(engine: Engine, run: AnyRun) -> None:
    """Stand in for a step's call to an external service."""


def workflow_of(*steps: Step[Any, Any], **more: Any) -> Workflow[Any, Any]:
    return Workflow("stop", ActionArgs, ActionData, steps, **more)


def after_pivot(lane: Lane) -> Workflow[Any, Any]:
    return workflow_of(
        Step("pivot", "no way back", pivot=True),
        Step("call", "it may be refused", call=call, lane=lane),
    )


def test_only_listed_steps_after_the_pivot_call_external_services() -> None:
    calls = {}
    for name, workflow in WORKFLOWS.items():
        pivots = [number for number, step in enumerate(workflow.steps) if step.pivot]
        calls[name] = (
            [step.name for step in workflow.steps[pivots[0] + 1 :] if step.call] if pivots else []
        )
    assert {name: steps for name, steps in calls.items() if steps} == AFTER_THE_PIVOT


@pytest.mark.parametrize(("lane", "pending"), [(Lane.NETWORK, [PORTS]), (Lane.IMAGE, [])])
def test_service_refusal_after_pivot_is_ignored_and_ports_get_a_cleanup(
    lane: Lane, pending: list[str]
) -> None:
    run = new_run()
    runner.ignore_refusals(after_pivot(lane), 1, [run])
    assert (run.problem, run.ignored_refusal, run.cleanup_message) == (
        None,
        "It is in use.",
        "It is in use.",
    )
    assert [(row["kind"], row["target"], row["why"]) for row in run.cleanups] == [
        (kind, "server", "It is in use.") for kind in pending
    ]


def test_service_refusal_before_pivot_or_in_step_without_call_is_a_failure() -> None:
    before = workflow_of(
        Step("call", "before", call=call), Step("pivot", "no way back", pivot=True)
    )
    here = workflow_of(Step("pivot", "no way back", pivot=True), Step("here", "no call"))
    for workflow, index in ((before, 0), (here, 1)):
        run = new_run()
        runner.ignore_refusals(workflow, index, [run])
        assert (str(run.problem), run.cleanups) == ("It is in use.", [])


def test_service_refusal_during_undo_becomes_a_pending_cleanup() -> None:
    failures: list[Any] = []
    workflow = workflow_of(
        Step("call", "it is undone by a call", undo_call=call, lane=Lane.NETWORK),
        failed=lambda tx, engine, run, problem: failures.append(
            (str(problem), run.data.undo_failures)
        ),
    )
    run = new_run("undo")
    runner.continue_undo(None, None, workflow, 0, run, "It is in use.")  # type: ignore[arg-type]  # No row is written.
    assert failures == [("It broke.", {})]
    assert [row["kind"] for row in run.cleanups] == [PORTS]
    assert [(event["event"], event["message"]) for event in run.events] == [
        ("undone", "It is in use.")
    ]
