# SPDX-License-Identifier: Apache-2.0
"""Notices that a transaction of the runner writes about its actions, and their contents."""

from __future__ import annotations

from collections.abc import Iterable

from common.domain.json_types import JsonObject
from common.domain.states import BY_WORKFLOW
from common.domain.statuses import ActionState, StepEvent
from common.notifications import events
from common.notifications.events import Notice
from common.service.notification_options import OFF, VM_STATE, NotificationSettings
from conductor.engine.run import AnyRun
from conductor.engine.workflow import Workflows

_STATES = ("vm_state", "task_state")


def of(
    workflows: Workflows, runs: Iterable[AnyRun], settings: NotificationSettings
) -> list[Notice]:
    """Return the notices about each run: on a changed state of the server, on steps, on the end.

    ``settings`` selects the watched states. The last notice of a run is on the abort or forced
    completion of a live migration, if any.
    """
    return [
        notice
        for run in runs
        for notice in [*_update_notices(run, settings), *_event_notices(workflows, run)]
    ]


def _update_notices(run: AnyRun, settings: NotificationSettings) -> list[Notice]:
    watched = _STATES[:1] if settings.states == VM_STATE else _STATES
    if settings.states == OFF or all(
        run.changes.get(name, before) == before
        for name in watched
        for before in (getattr(run.server, name),)
    ):
        return []
    return [
        Notice(
            "instance.update",
            run.server.id,
            _describe_request(run),
            {
                f"old_{'state' if name == 'vm_state' else name}": getattr(run.server, name)
                for name in watched
            },
        )
    ]


def _event_notices(workflows: Workflows, run: AnyRun) -> list[Notice]:
    workflow, state = run.action.workflow, run.head.get("state")
    names = [
        name
        for event in run.events
        for name in getattr(workflows.events.get((workflow, event["step"])), event["event"], ())
    ]
    names_of = events.event_names(BY_WORKFLOW.get(workflow))
    names += (
        names_of.done
        if state == ActionState.DONE
        else names_of.failed
        if state == ActionState.FAILED
        else ()
    )
    names += events.of_control(
        state, run.migration_changes.get("status"), getattr(run.data, "control", None)
    )
    about = events.about(workflow, run.action.args)
    return [
        Notice(
            name,
            run.server.id,
            _describe_request(run),
            {**about, "fault": _describe_fault(run)} if _is_error(name) else about,
        )
        for name in names
    ]


def _is_error(name: str) -> bool:
    return name.endswith(".error")


def _describe_request(run: AnyRun) -> dict[str, str]:
    return events.request(run.action._mapping)


def _describe_fault(run: AnyRun) -> JsonObject:
    """Return the fault of a failed run: exception, message, step, and the details for operators.

    The step is the first that failed in this transaction, or else the action's current step. The
    details are included, because notifications go to operators.
    """
    problem = run.data.problem if run.data is not None else None
    step = next(
        (event["step"] for event in run.events if event["event"] == StepEvent.FAILED),
        run.action.step or "",
    )
    message = problem.text if problem is not None else run.head.get("message") or ""
    exception = "NoValidHost" if step == "place" else "ActionFailed"
    return {
        "exception": exception,
        "message": message,
        "step": step,
        "details": problem.details if problem is not None else "",
    }
