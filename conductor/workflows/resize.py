# SPDX-License-Identifier: Apache-2.0
"""Resize and cold migration.

Both stop the server, copy its files to another host and start the guest there. A cold migration
keeps the flavor. Otherwise the two are the same workflow.

If a step up to ``install`` fails for good, the completed steps are undone and the server is at the
source with the old flavor again. The conductor then tries another destination. After ``install``
the source keeps the stopped guest until the user confirms or reverts, in the workflows
``confirm_resize`` and ``revert_resize``.

Invariant: at most one of the two guests may run. ``switch`` changes the server's host and this
permission in one transaction. After ``switch`` the conductor waits for a silent destination,
because the guest may run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.domain import states
from common.domain.models import Result
from common.domain.statuses import GuestState, MigrationStatus
from common.domain.verbs import Install, Prepare, Receive
from common.store.engine import Connection, now
from common.store.servers import guests
from conductor.engine.action_args import MoveArgs, MoveEndArgs
from conductor.engine.action_data import StepFailed, fault_of
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step, StepEvents
from conductor.engine.workflow import Workflow
from conductor.steps import guest, moves, networks, removals
from conductor.steps.claims import record_successful_build
from conductor.steps.moves import MoveData, MoveRun

#: Names of the workflows for a server that was resized on the same host.
CONFIRM_HERE, REVERT_HERE = "confirm_here", "revert_here"
#: Notifications after the destination is prepared, and after the server has the new flavor.
PREPARED_EVENTS = ("instance.resize_prep.end", "instance.resize.start")
SWITCHED_EVENTS = ("instance.resize.end", "instance.resize_finish.start")


@dataclass(kw_only=True)
class MoveEndData(MoveData):
    """Data that the steps of confirm_resize and revert_resize leave for later steps."""

    #: True if the guest ran at the destination when the revert began.
    ran: bool = False


MoveEndRun = Run[MoveEndArgs, MoveEndData]


# --- resize, migrate ---
def _prepare_command(engine: Engine, run: MoveRun) -> Prepare:
    return Prepare(
        guest=moves.guest_spec(engine, run),
        source=_source_address(run),
        secret=moves.transfer_secret(engine, run),
    )


def _source_address(run: MoveRun) -> str | None:
    """Return the address at which the destination reads the files, or None on shared storage."""
    return run.data.transfer if moves.copies_files(run) else None


def _record_prepared(tx: Connection, run: MoveRun, result: Result) -> None:
    run.set(task_state=states.RESIZE_MIGRATING)
    run.set_migration(status=MigrationStatus.MIGRATING)


def allow_start_at_source(tx: Connection, engine: Engine, run: MoveRun) -> None:
    """Undo ``stop``: let the source run the guest again, unless the server was stopped before.

    The power state becomes RUNNING before the source has started the guest.
    """
    if moves.was_running(run):
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set(power_state=states.RUNNING)


def _receive_command(engine: Engine, run: MoveRun) -> Receive:
    return Receive(
        guest=moves.guest_spec(engine, run),
        source=_source_address(run),
        secret=moves.transfer_secret(engine, run),
    )


def _record_received(tx: Connection, run: MoveRun, result: Result) -> None:
    run.set(task_state=states.RESIZE_MIGRATED, progress=100)
    run.set_migration(status=MigrationStatus.POST_MIGRATING)


def _bind_to_destination(engine: Engine, run: MoveRun) -> None:
    networks.rebind_to(engine, run, moves.claimed_destination(run))


def _bind_to_source(engine: Engine, run: MoveRun) -> None:
    networks.rebind_to(engine, run, moves.source(run))


def _switch(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    for run in runs:
        moves.switch_to_destination(tx, run, moves.was_running(run))
        run.set(task_state=states.RESIZE_FINISH)


def _switch_back(tx: Connection, engine: Engine, run: MoveRun) -> None:
    if run.data.switched:
        run.data.switched = False
        moves.switch_to_source(tx, engine, run, runs=False)


def _install_command(engine: Engine, run: MoveRun) -> Install:
    return Install(guest=moves.guest_spec(engine, run), runs=moves.was_running(run))


def record_installed(tx: Connection, run: MoveRun, result: Result) -> None:
    """Record the power state that the host reports, and that the host has built the guest."""
    record_successful_build(run)
    guest.record_booted(tx, run, result)


def record_finished(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    """Set the launch time, and the migration to finished. A confirm or revert can follow."""
    for run in runs:
        run.set(launched_at=now(), progress=0)
        run.set_migration(status=MigrationStatus.FINISHED)


def _fail_resize(tx: Connection, engine: Engine, run: MoveRun, problem: StepFailed) -> None:
    """Try another destination, or record the failure of a resize.

    If the server is at the destination already, it becomes RESIZED, and the user can confirm or
    revert. Otherwise it is at the source with the old flavor. The server's interfaces are those of
    the last binding of its ports.
    """
    if run.data.plugged is not None:
        run.set(interfaces=run.data.plugged)
    if run.host == moves.destination(run):
        run.set(vm_state=states.RESIZED)
        run.set_migration(status=MigrationStatus.FINISHED)
        return
    moves.fail_move(tx, engine, run, problem)
    run.set(progress=0)


def _must_wait_for_ports(run: MoveRun) -> bool:
    return moves.was_running(run) and networks.starts_paused(run)


RESIZE = Workflow(
    "resize",
    args=MoveArgs,
    data=MoveData,
    failed=_fail_resize,
    steps=(
        Step(
            "place",
            "Claim the destination first, so that no later step fails for lack of room. From here "
            "on the migration holds the resources at the source.",
            prepare=moves.propose,
            apply=moves.claim_place,
            undo=moves.release_destination,
            events=StepEvents(failed=moves.NO_HOST_EVENTS),
        ),
        Step(
            "offer",
            "Let the destination read the backing files now, and the disk itself once the guest "
            "is stopped.",
            command=moves.offer,
            host_of=moves.source,
            condition=moves.copies_files,
            fails_on_any_host=True,
        ),
        Step(
            "prepare",
            "Find problems at the destination while the server still runs.",
            command=_prepare_command,
            host_of=moves.destination,
            on_result=_record_prepared,
            fails_when_host_down=True,
            reads_source=True,
            events=StepEvents(succeeded=PREPARED_EVENTS),
        ),
        Step(
            "stop",
            "The files must not change while they are copied. The undo starts the guest again.",
            command=guest.stop,
            host_of=moves.source,
            on_result=guest.record_stopped,
            undo=allow_start_at_source,
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=moves.was_running,
            fails_on_any_host=True,
        ),
        Step(
            "disconnect",
            "The source disconnects the volumes before the destination connects them. The undo "
            "defines the guest at the source again, stopped.",
            command=moves.disconnect,
            undo_command=moves.install_old,
            host_of=moves.source,
            condition=Run.has_volumes,
            fails_on_any_host=True,
        ),
        moves.MOVE_VOLUMES,
        Step(
            "copy",
            "The destination pulls the files, because the destination knows which backing files "
            "its cache contains.",
            command=_receive_command,
            host_of=moves.destination,
            on_result=_record_received,
            fails_when_host_down=True,
            reads_source=True,
        ),
        Step(
            "bind",
            "Bind the ports to the destination just before the start, because the stopped guest "
            "needs no network.",
            call=_bind_to_destination,
            apply=networks.store_plugged,
            undo_call=_bind_to_source,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "switch",
            "Host, flavor and the permission to run change in one transaction.",
            apply=_switch,
            undo=_switch_back,
            events=StepEvents(succeeded=SWITCHED_EVENTS),
        ),
        Step(
            "install",
            "A failure is still undone. After success only a revert leads back.",
            command=_install_command,
            host_of=moves.destination,
            on_result=record_installed,
            pivot=True,
        ),
        networks.plug_step(_must_wait_for_ports),
        Step(
            "run",
            "The ports are wired, so the paused guest continues.",
            command=guest.start,
            on_result=guest.record_booted,
            condition=_must_wait_for_ports,
        ),
        Step(
            "finish",
            "The source keeps the old guest until the user confirms or reverts.",
            apply=record_finished,
        ),
    ),
)

MIGRATE = replace(RESIZE, name="migrate")


# --- confirm ---
def _begin_confirm(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        if moves.stays_on_host(run):
            run.switch_workflow(CONFIRM_HERE)
            continue
        _compare_once(tx, run)
        run.set_migration(status=MigrationStatus.CONFIRMING)
    for run in removals.collect(
        tx, [run for run in runs if not run.paused], moves.source, moves.shares_storage
    ):
        record_confirmed(tx, run)


def record_confirmed(tx: Connection, run: MoveEndRun) -> None:
    """Record that the resize is confirmed.

    The vm_state follows the power state of the guest, and the quota counts only the new flavor. A
    guest that is off may not run.
    """
    vm_state = _VM_STATES.get(run.server.power_state, states.ACTIVE)
    if vm_state == states.STOPPED:
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
    run.set(vm_state=vm_state, **moves.quota_columns(run.args.new_flavor))
    run.set_migration(status=MigrationStatus.CONFIRMED)


_VM_STATES = {
    states.SHUTDOWN: states.STOPPED,
    states.CRASHED: states.STOPPED,
    states.POWER_PAUSED: states.PAUSED,
}


def _compare_once(tx: Connection, run: MoveEndRun) -> None:
    """Record whether the two hosts share storage, unless the action has recorded that already."""
    if run.data.shared is None:
        moves.compare_hosts(tx, [run])


CONFIRM_RESIZE = Workflow(
    "confirm_resize",
    args=MoveEndArgs,
    data=MoveEndData,
    steps=(
        Step(
            "leave",
            "The guest at the source becomes a pending cleanup, so that the confirm does not wait "
            "for a host that is down.",
            apply=_begin_confirm,
            pivot=True,
        ),
    ),
)


# --- revert ---
def _begin_revert(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        if moves.stays_on_host(run):
            run.switch_workflow(REVERT_HERE)
            continue
        _compare_once(tx, run)
        run.data.ran = run.server.power_state != states.SHUTDOWN
        run.set_migration(status=MigrationStatus.REVERTING)


def was_resized_guest_running(run: MoveEndRun) -> bool:
    """Return True if the resized guest ran when the revert began."""
    return run.data.ran


def was_running_before(run: MoveEndRun) -> bool:
    """Return True if the server ran before the resize."""
    return run.args.before != states.STOPPED


def allow_resized_guest(tx: Connection, engine: Engine, run: MoveEndRun) -> None:
    """Undo ``stop``: let the resized guest run again if it ran when the revert began.

    The power state becomes RUNNING before the host has started the guest.
    """
    if run.data.ran:
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set(power_state=states.RUNNING)


def _switch_to_source(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        source_guest = next(
            row for row in guests.places(tx, run.server.id) if row.host == moves.source(run)
        )
        run.data.old_assignment = moves.assignment_of(source_guest.assignment)
        run.data.switched = run.data.knows_old_assignment = True
        moves.switch_to_source(tx, engine, run, was_running_before(run))
        guests.become(tx, run.server.id, moves.claimed_destination(run), GuestState.KEPT)


def _undo_switch_to_source(tx: Connection, engine: Engine, run: MoveEndRun) -> None:
    """Make the destination the server's host again, if the switch to the source was done."""
    if run.data.switched:
        run.data.switched = False
        moves.return_to_destination(tx, engine, run, run.data.ran)


def _settle_at_source(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.set(**moves.quota_columns(run.args.old_flavor))
        guests.add_removal(
            tx,
            run.server.id,
            run.fence,
            host=moves.claimed_destination(run),
            may_run=False,
            keeps_files=moves.shares_storage(run),
        )
        moves.return_source_resources(tx, run)
        run.data.no_way_back = True


def _install_old_command(engine: Engine, run: MoveEndRun) -> Install:
    return Install(guest=moves.old_guest_spec(engine, run), runs=was_running_before(run))


def _install_resized_command(engine: Engine, run: MoveEndRun) -> Install:
    return Install(guest=moves.guest_spec(engine, run), runs=False)


def _leave_destination(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in removals.collect(tx, runs, moves.claimed_destination, moves.shares_storage):
        run.set(vm_state=states.ACTIVE if was_running_before(run) else states.STOPPED)
        run.set_migration(status=MigrationStatus.REVERTED)


def _fail_revert(tx: Connection, engine: Engine, run: MoveEndRun, problem: StepFailed) -> None:
    """Record the failure of a revert.

    If the source is the server's host already, the server is in ERROR, because the source could not
    start the guest. Otherwise the server is RESIZED as before and can be confirmed or reverted
    again.
    """
    if run.data.plugged is not None:
        run.set(interfaces=run.data.plugged)
    if run.server.host == moves.source(run):
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set_migration(status=MigrationStatus.ERROR)
        return
    record_guest_off(tx, run)
    run.set(vm_state=states.RESIZED)
    run.set_migration(status=MigrationStatus.FINISHED)


def record_guest_off(tx: Connection, run: MoveEndRun) -> None:
    """Record that the resized guest is stopped, if the undo of a step failed.

    The failed undos are cleared, so that the server does not go to ERROR. The user can still
    confirm or revert.
    """
    if run.data.undo_failures:
        run.data.clear_undo_failures()
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)


def _must_wait_for_ports_at_source(run: MoveEndRun) -> bool:
    return was_running_before(run) and networks.starts_paused(run)


REVERT_RESIZE = Workflow(
    "revert_resize",
    args=MoveEndArgs,
    data=MoveEndData,
    failed=_fail_revert,
    steps=(
        Step(
            "begin",
            "Compare the two hosts once, because later steps need to know whether they share "
            "storage.",
            apply=_begin_revert,
        ),
        Step(
            "restart",
            "Undo only: the guest continues at the destination.",
            undo=allow_resized_guest,
            undo_command=guest.start,
            condition=was_resized_guest_running,
        ),
        Step(
            "stop",
            "Stop the guest at the destination before the source starts the other one. A dead "
            "host counts as stopped.",
            command=guest.stop,
            host_of=moves.destination,
            on_result=guest.record_stopped,
            done_when_host_dead=True,
        ),
        Step(
            "disconnect",
            "The destination disconnects the volumes before the source connects them.",
            command=moves.disconnect,
            undo_command=_install_resized_command,
            host_of=moves.destination,
            done_when_host_dead=True,
            condition=Run.has_volumes,
        ),
        moves.RETURN_VOLUMES,
        Step(
            "disconnect_again",
            "Undo only: the source may have begun to connect the volumes.",
            undo_command=moves.disconnect,
            host_of=moves.source,
            condition=Run.has_volumes,
        ),
        Step(
            "bind",
            "Bind the ports to the source just before the start, because the stopped guest needs "
            "no network.",
            call=_bind_to_source,
            apply=networks.store_plugged,
            undo_call=_bind_to_destination,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "switch",
            "From here on only the source may run the guest.",
            apply=_switch_to_source,
            undo=_undo_switch_to_source,
        ),
        Step(
            "install",
            "The guest is defined from the server's record, not from the host's files. After "
            "success the revert is not undone.",
            command=_install_old_command,
            host_of=moves.source,
            on_result=record_installed,
            pivot=True,
        ),
        Step(
            "settle",
            "The source runs the guest, so the destination can remove the other one.",
            apply=_settle_at_source,
        ),
        networks.plug_step(_must_wait_for_ports_at_source),
        Step(
            "run",
            "The ports are wired, so the paused guest continues.",
            command=guest.start,
            on_result=guest.record_booted,
            condition=_must_wait_for_ports_at_source,
        ),
        Step(
            "leave",
            "The server runs already, so a destination that is down delays only the cleanup.",
            apply=_leave_destination,
        ),
    ),
)
