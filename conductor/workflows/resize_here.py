# SPDX-License-Identifier: Apache-2.0
"""Resize on the same host: the server stops, is made larger where it is, and starts again.

Begun by ``resize`` when the host that was claimed is the server's own. There is one guest, and no second place: what
its files were is kept aside on the host until somebody confirms or reverts. Meanwhile the host holds of each resource
what the larger of both flavors needs: the server its new flavor, the migration what the old one needs more.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import states
from common.models import Result
from common.store import allocations, guests
from common.store.engine import Connection
from common.wire import to_wire
from conductor import guest, moving
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of
from conductor.workflows import resize


def _claimed(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(task_state=states.RESIZE_MIGRATING)
        run.move(status="migrating")


def _switch(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.data.update(old_fitting=None, switched=True)
        run.set(task_state=states.RESIZE_FINISH, **moving.sized(run.action.args["new_flavor"]))
        if moving.ran(run):
            guests.want(tx, [run.server.id], guests.RUNNING, True)
        run.move(status="post-migrating")


def _switch_back(tx: Connection, engine: Engine, run: Run) -> None:
    if run.data.pop("switched", False):
        run.set(**moving.sized(run.action.args["old_flavor"]))


def _change(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "resize_here", {"guest": to_wire(moving.spec(engine, run)), "runs": moving.ran(run)}


def _change_back(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "settle_resize", {"guest": to_wire(moving.old_spec(engine, run)), "back": True, "resized": run.fence}


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """As before; where it is no other host was looked for, so the whole story begins again while there are attempts."""
    moving.back_as_before(tx, engine, run, problem)
    if run.head.get("state") == "due":
        run.head["workflow"] = "resize"


RESIZE_HERE = Workflow("resize_here", failed=_failed, steps=(
    Step("place", "the room was claimed by the story that began", apply=_claimed, undo=moving.leave),
    Step("stop", "its domain is made anew, and its disk may not change meanwhile; on the way back it is started again",
         command=guest.stop, done=guest.rests, undo=resize.runs_again, undo_command=guest.start, needed=moving.ran),
    Step("switch", "from here on it is of its new flavor", apply=_switch, undo=_switch_back),
    Step("remake", "one command: aside, larger, and on again", command=_change, done=resize.installed,
         undo_command=_change_back),
    Step("finish", "what was is kept until somebody has looked at the server", apply=resize.moved, pivot=True),
))


# --- confirm ---
def _confirming(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.move(status="confirming")


def _drop(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "settle_resize", {"guest": to_wire(guest.spec(engine, run)), "back": False,
                             "resized": run.action.args["resized"]}


def _dropped(tx: Connection, run: Run, result: Result) -> None:
    """The migration holds nothing any more."""
    allocations.stay(tx, run.action.args["migration"], run.server.id, moving.source(run))
    resize.confirmed(tx, run)


def _still_resized(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """To be confirmed or reverted, as it was."""
    run.set(vm_state=states.RESIZED)
    run.move(status="finished")


CONFIRM_HERE = Workflow("confirm_here", failed=_still_resized, steps=(
    Step("leave", "there is no other place to leave", apply=_confirming),
    Step("drop", "the host forgets what the files were", command=_drop, done=_dropped, abandon=True),
))


# --- revert ---
def _put_back(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "settle_resize", {"guest": to_wire(moving.old_spec(engine, run)), "back": True,
                             "resized": run.action.args["resized"]}


def _is_back(tx: Connection, run: Run, result: Result) -> None:
    """It is of its old flavor again, and has what that needs; nothing is kept for another way."""
    old = run.action.args["old_flavor"]
    run.set(vm_state=states.ACTIVE if resize.ran_before(run) else states.STOPPED)
    run.move(status="reverted")
    allocations.stay(tx, run.action.args["migration"], run.server.id, moving.source(run), moving.old_resources(run))
    run.set(**moving.sized(old), **moving.counted(old))
    if resize.ran_before(run):
        guests.want(tx, [run.server.id], guests.RUNNING, True)


def _reverting(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.data["ran"] = run.server.power_state != states.SHUTDOWN
        run.move(status="reverting")


def _reverted(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(vm_state=states.ACTIVE if resize.ran_before(run) else states.STOPPED)


def _not_reverted(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Before it was put back: resized as it was. Afterwards it cannot be started."""
    if run.server.flavor == run.action.args["new_flavor"]:
        _still_resized(tx, engine, run, problem)
        return
    run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
    guests.want(tx, [run.server.id], guests.STOPPED, False)
    run.move(status="error")


REVERT_HERE = Workflow("revert_here", failed=_not_reverted, steps=(
    Step("begin", "there is no other place to ask", apply=_reverting),
    Step("restart", "only on the way back: it runs on as it is", undo=resize.runs_on, undo_command=guest.start,
         needed=resize.ran_there),
    Step("stop", "its domain is made anew", command=guest.stop, done=guest.rests),
    Step("remake", "its files are what they were, and it is of its old flavor", command=_put_back, done=_is_back,
         pivot=True),
    Step("run", "it runs if it did", command=guest.start, done=guest.runs, needed=resize.ran_before),
    Step("finish", "last", apply=_reverted),
))
