# SPDX-License-Identifier: Apache-2.0
"""Resize on the same host: the server stops, is made larger where it is, and starts again.

Begun by ``resize`` when the host that was claimed is the server's own. There is one guest, and no
second place: what its files were is kept on the host until somebody confirms or reverts. Meanwhile
the host holds of each resource what the larger of both flavors needs: the server its new flavor,
the migration what the old one needs more.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain import states
from common.domain.models import Flavor, Result
from common.domain.statuses import ActionState, GuestState, MigrationStatus
from common.domain.verbs import ResizeHere, SettleResize
from common.domain.wire import from_wire
from common.store.engine import Connection
from common.store.placement import allocations
from common.store.servers import guests
from conductor.engine.action_args import MoveArgs, MoveEndArgs
from conductor.engine.action_data import StepFailed, fault_of
from conductor.engine.engine import Engine
from conductor.engine.step import Step, StepEvents
from conductor.engine.workflow import Workflow
from conductor.steps import guest, moves, volumes
from conductor.steps.moves import MoveData, MoveRun
from conductor.workflows import resize
from conductor.workflows.resize import MoveEndData, MoveEndRun


def _claimed(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    for run in runs:
        run.set(task_state=states.RESIZE_MIGRATING)
        run.set_migration(status=MigrationStatus.MIGRATING)


def _switch(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    for run in runs:
        run.data.old_assignment = None
        run.data.switched = run.data.knows_old_assignment = True
        run.set(task_state=states.RESIZE_FINISH, **moves.flavor_columns(run, run.args.new_flavor))
        if moves.was_running(run):
            guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set_migration(status=MigrationStatus.POST_MIGRATING)


def _switch_back(tx: Connection, engine: Engine, run: MoveRun) -> None:
    if run.data.switched:
        run.data.switched = False
        run.set(**moves.flavor_columns(run, run.args.old_flavor))


def _change(engine: Engine, run: MoveRun) -> ResizeHere:
    return ResizeHere(guest=moves.guest_spec(engine, run), runs=moves.was_running(run))


def _change_back(engine: Engine, run: MoveRun) -> SettleResize:
    return SettleResize(guest=moves.old_guest_spec(engine, run), back=True, resized=run.fence)


def _resize_failed(tx: Connection, engine: Engine, run: MoveRun, problem: StepFailed) -> None:
    """As before; where it is no other host was looked for, so the whole workflow begins again while
    there are attempts."""
    moves.fail_move(tx, engine, run, problem)
    if run.head.get("state") == ActionState.DUE:
        run.head["workflow"] = resize.RESIZE.name


RESIZE_HERE = Workflow(
    moves.RESIZE_HERE,
    args=MoveArgs,
    data=MoveData,
    failed=_resize_failed,
    steps=(
        Step(
            "place",
            "the room was claimed by the workflow that began",
            apply=_claimed,
            undo=moves.release_destination,
            events=StepEvents(succeeded=resize.PREPARED_EVENTS),
        ),
        Step(
            "stop",
            "its domain is made anew, and its disk may not change meanwhile; on the way back it is started again",
            command=guest.stop,
            on_result=guest.record_stopped,
            undo=resize.runs_again,
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=moves.was_running,
        ),
        Step(
            "switch",
            "from here on it is of its new flavor",
            apply=_switch,
            undo=_switch_back,
            events=StepEvents(succeeded=resize.SWITCHED_EVENTS),
        ),
        Step(
            "remake",
            "one command: its files are kept, made larger, and it is on again",
            command=_change,
            on_result=resize.installed,
            undo_command=_change_back,
        ),
        Step(
            "finish",
            "what was is kept until somebody has looked at the server",
            apply=resize.finished,
            pivot=True,
        ),
    ),
)


# --- confirm ---
def _confirming(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.set_migration(status=MigrationStatus.CONFIRMING)


def _drop(engine: Engine, run: MoveEndRun) -> SettleResize:
    return SettleResize(guest=guest.spec(engine, run), back=False, resized=run.args.resized)


def _dropped(tx: Connection, run: MoveEndRun, result: Result) -> None:
    """The migration holds nothing any more."""
    allocations.stay(tx, run.args.migration, run.server.id, moves.source(run))
    resize.confirmed(tx, run)


def _confirm_failed(tx: Connection, engine: Engine, run: MoveEndRun, problem: StepFailed) -> None:
    """To be confirmed or reverted, as it was."""
    run.set(vm_state=states.RESIZED)
    run.set_migration(status=MigrationStatus.FINISHED)


CONFIRM_HERE = Workflow(
    resize.CONFIRM_HERE,
    args=MoveEndArgs,
    data=MoveEndData,
    failed=_confirm_failed,
    steps=(
        Step("leave", "there is no other place to leave", apply=_confirming),
        Step(
            "drop",
            "the host removes what the files were",
            command=_drop,
            on_result=_dropped,
            fails_when_host_down=True,
        ),
    ),
)


# --- revert ---
def _put_back(engine: Engine, run: MoveEndRun) -> SettleResize:
    return SettleResize(
        guest=moves.old_guest_spec(engine, run), back=True, resized=run.args.resized
    )


def _is_back(tx: Connection, run: MoveEndRun, result: Result) -> None:
    """It is of its old flavor again, and has what that needs; nothing is kept for another way."""
    old = run.args.old_flavor
    run.set(vm_state=states.ACTIVE if resize.ran_before(run) else states.STOPPED)
    run.set_migration(status=MigrationStatus.REVERTED)
    allocations.stay(
        tx, run.args.migration, run.server.id, moves.source(run), moves.old_resources(run)
    )
    run.set(**moves.flavor_columns(run, old), **moves.quota_columns(old))
    volumes.name_devices(run)
    if resize.ran_before(run):
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)


def _reverting(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.data.ran = run.server.power_state != states.SHUTDOWN
        run.set_migration(status=MigrationStatus.REVERTING)


def _reverted(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.set(vm_state=states.ACTIVE if resize.ran_before(run) else states.STOPPED)


def _revert_failed(tx: Connection, engine: Engine, run: MoveEndRun, problem: StepFailed) -> None:
    """Before it was put back: resized as it was. Afterwards it cannot be started."""
    if from_wire(Flavor, run.server.flavor) == run.args.new_flavor:
        resize.stay_off(tx, run)
        _confirm_failed(tx, engine, run, problem)
        return
    run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
    guests.want(tx, [run.server.id], GuestState.STOPPED, False)
    run.set_migration(status=MigrationStatus.ERROR)


REVERT_HERE = Workflow(
    resize.REVERT_HERE,
    args=MoveEndArgs,
    data=MoveEndData,
    failed=_revert_failed,
    steps=(
        Step("begin", "there is no other place to ask", apply=_reverting),
        Step(
            "restart",
            "only on the way back: it runs on as it is",
            undo=resize.runs_on,
            undo_command=guest.start,
            condition=resize.ran_resized,
        ),
        Step("stop", "its domain is made anew", command=guest.stop, on_result=guest.record_stopped),
        Step(
            "remake",
            "its files are what they were, and it is of its old flavor",
            command=_put_back,
            on_result=_is_back,
            pivot=True,
        ),
        Step(
            "run",
            "it runs if it did",
            command=guest.start,
            on_result=guest.record_booted,
            condition=resize.ran_before,
        ),
        Step("finish", "last", apply=_reverted),
    ),
)
