# SPDX-License-Identifier: Apache-2.0
"""What a transaction of the runner has to tell of its actions; see
``common.notifications.events``."""

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
    """Return the notices of each run in order: on the server's state, on steps, on the end."""
    return [
        notice for run in runs for notice in [*_update(run, settings), *_events(workflows, run)]
    ]


def _update(run: AnyRun, settings: NotificationSettings) -> list[Notice]:
    watched = _STATES[:1] if settings.states == VM_STATE else _STATES
    if settings.states == OFF or all(
        run.changes.get(name, was) == was
        for name in watched
        for was in (getattr(run.server, name),)
    ):
        return []
    return [
        Notice(
            "instance.update",
            run.server.id,
            _request(run),
            {
                f"old_{'state' if name == 'vm_state' else name}": getattr(run.server, name)
                for name in watched
            },
        )
    ]


def _events(workflows: Workflows, run: AnyRun) -> list[Notice]:
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
            _request(run),
            {**about, "fault": _fault(run)} if _is_bad(name) else about,
        )
        for name in names
    ]


def _is_bad(name: str) -> bool:
    return name.endswith(".error")


def _request(run: AnyRun) -> dict[str, str]:
    return events.request(run.action._mapping)


def _fault(run: AnyRun) -> JsonObject:
    """What failed first; the details are the operator's, and so are notifications."""
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
