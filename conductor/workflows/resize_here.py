# SPDX-License-Identifier: Apache-2.0
"""Resize on the same host: stop the server, enlarge its guest and start the guest again.

``resize`` switches to this workflow if the claimed host is the server's own. The host keeps the old
files until the user confirms or reverts. Until then the claims on the host cover the larger of both
flavors, for each resource. The server holds the resources of the new flavor, and the migration
holds the difference.
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


def _begin_resize(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
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


def _resize_command(engine: Engine, run: MoveRun) -> ResizeHere:
    return ResizeHere(guest=moves.guest_spec(engine, run), runs=moves.was_running(run))


def _undo_resize_command(engine: Engine, run: MoveRun) -> SettleResize:
    return SettleResize(guest=moves.old_guest_spec(engine, run), back=True, resized=run.fence)


def _fail_resize(tx: Connection, engine: Engine, run: MoveRun, problem: StepFailed) -> None:
    """Do the same as ``moves.fail_move``, but with the workflow ``resize`` for another try.

    Only ``resize`` can choose another host.
    """
    moves.fail_move(tx, engine, run, problem)
    if run.head.get("state") == ActionState.DUE:
        run.head["workflow"] = resize.RESIZE.name


RESIZE_HERE = Workflow(
    moves.RESIZE_HERE,
    args=MoveArgs,
    data=MoveData,
    failed=_fail_resize,
    steps=(
        Step(
            "place",
            "The workflow ``resize`` has claimed the room already.",
            apply=_begin_resize,
            undo=moves.release_destination,
            events=StepEvents(succeeded=resize.PREPARED_EVENTS),
        ),
        Step(
            "stop",
            "The domain is defined again, and the disk must not change meanwhile. The undo starts "
            "the guest again.",
            command=guest.stop,
            on_result=guest.record_stopped,
            undo=resize.allow_start_at_source,
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=moves.was_running,
        ),
        Step(
            "switch",
            "From here on the server has the new flavor.",
            apply=_switch,
            undo=_switch_back,
            events=StepEvents(succeeded=resize.SWITCHED_EVENTS),
        ),
        Step(
            "remake",
            "One command keeps the old files, enlarges the disk and starts the guest.",
            command=_resize_command,
            on_result=resize.record_installed,
            undo_command=_undo_resize_command,
        ),
        Step(
            "finish",
            "The host keeps the old files until the user confirms or reverts.",
            apply=resize.record_finished,
            pivot=True,
        ),
    ),
)


# --- confirm ---
def _begin_confirm(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.set_migration(status=MigrationStatus.CONFIRMING)


def _drop_command(engine: Engine, run: MoveEndRun) -> SettleResize:
    return SettleResize(guest=guest.spec(engine, run), back=False, resized=run.args.resized)


def _record_dropped(tx: Connection, run: MoveEndRun, result: Result) -> None:
    """Release the resources of the migration and record the confirm."""
    allocations.stay(tx, run.args.migration, run.server.id, moves.source(run))
    resize.record_confirmed(tx, run)


def _fail_confirm(tx: Connection, engine: Engine, run: MoveEndRun, problem: StepFailed) -> None:
    """Set the server to RESIZED as before and the migration to finished.

    The user can confirm or revert again.
    """
    run.set(vm_state=states.RESIZED)
    run.set_migration(status=MigrationStatus.FINISHED)


CONFIRM_HERE = Workflow(
    resize.CONFIRM_HERE,
    args=MoveEndArgs,
    data=MoveEndData,
    failed=_fail_confirm,
    steps=(
        Step("leave", "No other host has files of the server.", apply=_begin_confirm),
        Step(
            "drop",
            "The host removes the old files.",
            command=_drop_command,
            on_result=_record_dropped,
            fails_when_host_down=True,
        ),
    ),
)


# --- revert ---
def _revert_command(engine: Engine, run: MoveEndRun) -> SettleResize:
    return SettleResize(
        guest=moves.old_guest_spec(engine, run), back=True, resized=run.args.resized
    )


def _record_old_flavor(tx: Connection, run: MoveEndRun, result: Result) -> None:
    """Record the revert: the old flavor and its resources, and the vm_state before the resize.

    The resources of the migration are released. A guest that ran before the resize may run.
    """
    old_flavor = run.args.old_flavor
    run.set(vm_state=states.ACTIVE if resize.was_running_before(run) else states.STOPPED)
    run.set_migration(status=MigrationStatus.REVERTED)
    allocations.stay(
        tx, run.args.migration, run.server.id, moves.source(run), moves.old_resources(run)
    )
    run.set(**moves.flavor_columns(run, old_flavor), **moves.quota_columns(old_flavor))
    volumes.name_devices(run)
    if resize.was_running_before(run):
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)


def _begin_revert(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.data.ran = run.server.power_state != states.SHUTDOWN
        run.set_migration(status=MigrationStatus.REVERTING)


def _finish_revert(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.set(vm_state=states.ACTIVE if resize.was_running_before(run) else states.STOPPED)


def _fail_revert(tx: Connection, engine: Engine, run: MoveEndRun, problem: StepFailed) -> None:
    """Record the failure of a revert.

    If the server still has the new flavor, the server is RESIZED and the migration finished as
    before, and the user can try again. Otherwise the host has the old files and cannot start the
    guest. Then server and migration are in ERROR, and the guest stays off.
    """
    if from_wire(Flavor, run.server.flavor) == run.args.new_flavor:
        resize.record_guest_off(tx, run)
        _fail_confirm(tx, engine, run, problem)
        return
    run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
    guests.want(tx, [run.server.id], GuestState.STOPPED, False)
    run.set_migration(status=MigrationStatus.ERROR)


REVERT_HERE = Workflow(
    resize.REVERT_HERE,
    args=MoveEndArgs,
    data=MoveEndData,
    failed=_fail_revert,
    steps=(
        Step("begin", "No other host needs to be compared.", apply=_begin_revert),
        Step(
            "restart",
            "Undo only: the guest continues with the new flavor.",
            undo=resize.allow_resized_guest,
            undo_command=guest.start,
            condition=resize.was_resized_guest_running,
        ),
        Step(
            "stop",
            "The domain is defined again.",
            command=guest.stop,
            on_result=guest.record_stopped,
        ),
        Step(
            "remake",
            "The host restores the old files, and the server has the old flavor again.",
            command=_revert_command,
            on_result=_record_old_flavor,
            pivot=True,
        ),
        Step(
            "run",
            "The guest runs again if the server ran before the resize.",
            command=guest.start,
            on_result=guest.record_booted,
            condition=resize.was_running_before,
        ),
        Step("finish", "The server reaches its final state last.", apply=_finish_revert),
    ),
)
