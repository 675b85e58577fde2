# SPDX-License-Identifier: Apache-2.0
"""What a transaction of the runner has to tell of its actions; see ``common.notifications.events``."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.notifications import events
from common.notifications.events import Notice
from common.notifications.options import OFF, VM_STATE, Telling
from common.states import BY_WORKFLOW
from conductor.saga import Run

_STATES = ("vm_state", "task_state")


def of(runs: Iterable[Run], telling: Telling) -> list[Notice]:
    """Of each run in order: the change of its server's state, what its steps tell, its end."""
    return [notice for run in runs for notice in [*_update(run, telling), *_events(run)]]


def _update(run: Run, telling: Telling) -> list[Notice]:
    watched = _STATES[:1] if telling.states == VM_STATE else _STATES
    if telling.states == OFF or all(run.changes.get(name, was) == was for name in watched
                                    for was in (getattr(run.server, name),)):
        return []
    return [Notice("instance.update", run.server.id, _request(run), {
        f"old_{'state' if name == 'vm_state' else name}": getattr(run.server, name) for name in watched})]


def _events(run: Run) -> list[Notice]:
    workflow, state = run.action.workflow, run.head.get("state")
    names = [name for event in run.events for name in events.STEPS.get((workflow, event["step"], event["event"]), ())]
    tale = events.tale(BY_WORKFLOW.get(workflow))
    names += tale.done if state == "done" else tale.failed if state == "failed" else ()
    about = events.about(workflow, run.action.args)
    return [Notice(name, run.server.id, _request(run), {**about, "fault": _fault(run)} if _is_bad(name) else about)
            for name in names]


def _is_bad(name: str) -> bool:
    return name.endswith(".error")


def _request(run: Run) -> dict[str, str]:
    return events.request(run.action._mapping)


def _fault(run: Run) -> dict[str, Any]:
    """What failed first; the details are the operator's, and so are notifications."""
    told = run.data.get("problem") or {}
    step = next((event["step"] for event in run.events if event["event"] == "failed"), run.action.step or "")
    message = told.get("text") or run.head.get("message") or ""
    exception = "NoValidHost" if step == "place" else "ActionFailed"
    return {"exception": exception, "message": message, "step": step, "details": told.get("details") or ""}
