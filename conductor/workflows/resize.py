# SPDX-License-Identifier: Apache-2.0
"""Resize and cold migration: the server stops, its files travel to another host, and it starts
there.

Two names for one workflow: a migration keeps the flavor. Until the guest has started at the
destination every step has its way back, so that a definite failure leaves the server as it was, at
its source; then another destination is tried. The source keeps its guest, off, until somebody
confirms or reverts: two more short workflows beside it. The place changes in ``switch``; from there
on silence of the destination is waited out, because the guest may run there.
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
from conductor.steps import debts, guest, moves, networks
from conductor.steps.claims import record_successful_build
from conductor.steps.moves import MoveData, MoveRun

#: The workflows of a server that was resized where it is.
CONFIRM_HERE, REVERT_HERE = "confirm_here", "revert_here"
#: Notifications of a server that can be resized now, and of one that has its new flavor.
PREPARED_EVENTS = ("instance.resize_prep.end", "instance.resize.start")
SWITCHED_EVENTS = ("instance.resize.end", "instance.resize_finish.start")


@dataclass(kw_only=True)
class MoveEndData(MoveData):
    """What confirming and reverting leave."""

    ran: bool = False  #: the guest ran at the destination when it was to be reverted


MoveEndRun = Run[MoveEndArgs, MoveEndData]


# --- resize, migrate ---
def _prepare(engine: Engine, run: MoveRun) -> Prepare:
    return Prepare(
        guest=moves.guest_spec(engine, run),
        source=_address_of_source(run),
        secret=moves.transfer_secret(engine, run),
    )


def _address_of_source(run: MoveRun) -> str | None:
    """The address at which the destination reads the guest's files. None on shared storage."""
    return run.data.transfer if moves.copies_files(run) else None


def _prepared(tx: Connection, run: MoveRun, result: Result) -> None:
    run.set(task_state=states.RESIZE_MIGRATING)
    run.set_migration(status=MigrationStatus.MIGRATING)


def runs_again(tx: Connection, engine: Engine, run: MoveRun) -> None:
    """From here on the source may run it again."""
    if moves.was_running(run):
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set(power_state=states.RUNNING)


def _receive(engine: Engine, run: MoveRun) -> Receive:
    return Receive(
        guest=moves.guest_spec(engine, run),
        source=_address_of_source(run),
        secret=moves.transfer_secret(engine, run),
    )


def _received(tx: Connection, run: MoveRun, result: Result) -> None:
    run.set(task_state=states.RESIZE_MIGRATED, progress=100)
    run.set_migration(status=MigrationStatus.POST_MIGRATING)


def _bind(engine: Engine, run: MoveRun) -> None:
    networks.rebind_to(engine, run, moves.claimed_destination(run))


def _bind_back(engine: Engine, run: MoveRun) -> None:
    networks.rebind_to(engine, run, moves.source(run))


def _switch(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    for run in runs:
        moves.switch_to_destination(tx, run, moves.was_running(run))
        run.set(task_state=states.RESIZE_FINISH)


def _switch_back(tx: Connection, engine: Engine, run: MoveRun) -> None:
    if run.data.switched:
        run.data.switched = False
        moves.switch_to_source(tx, engine, run, runs=False)


def _install(engine: Engine, run: MoveRun) -> Install:
    return Install(guest=moves.guest_spec(engine, run), runs=moves.was_running(run))


def installed(tx: Connection, run: MoveRun, result: Result) -> None:
    """The guest is where it is to stay."""
    record_successful_build(run)
    guest.record_booted(tx, run, result)


def finished(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    """It waits to be confirmed or reverted."""
    for run in runs:
        run.set(launched_at=now(), progress=0)
        run.set_migration(status=MigrationStatus.FINISHED)


def _resize_failed(tx: Connection, engine: Engine, run: MoveRun, problem: StepFailed) -> None:
    """Its interfaces are what the network service said last, when they were bound back. Where it
    has started already, somebody must look at it, and say whether it stays."""
    if run.data.plugged is not None:
        run.set(interfaces=run.data.plugged)
    if run.host == moves.destination(run):
        run.set(vm_state=states.RESIZED)
        run.set_migration(status=MigrationStatus.FINISHED)
        return
    moves.fail_move(tx, engine, run, problem)
    run.set(progress=0)


def _waits_for_ports(run: MoveRun) -> bool:
    return moves.was_running(run) and networks.starts_paused(run)


RESIZE = Workflow(
    "resize",
    args=MoveArgs,
    data=MoveData,
    failed=_resize_failed,
    steps=(
        Step(
            "place",
            "first: after it the destination's room is sure, and the migration holds what the source has",
            prepare=moves.propose,
            apply=moves.claim_place,
            undo=moves.release_destination,
            events=StepEvents(failed=moves.NO_HOST_EVENTS),
        ),
        Step(
            "offer",
            "whoever has the secret may read what the guest cannot change: what lies under its disk; once it is "
            "off the disk too",
            command=moves.offer,
            host_of=moves.source,
            condition=moves.copies_files,
            fails_on_any_host=True,
        ),
        Step(
            "prepare",
            "whatever could fail there fails while the server still runs",
            command=_prepare,
            host_of=moves.destination,
            on_result=_prepared,
            fails_when_host_down=True,
            reads_source=True,
            events=StepEvents(succeeded=PREPARED_EVENTS),
        ),
        Step(
            "stop",
            "the last moment at which its files may change; on the way back it is started again",
            command=guest.stop,
            host_of=moves.source,
            on_result=guest.record_stopped,
            undo=runs_again,
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=moves.was_running,
            fails_on_any_host=True,
        ),
        Step(
            "disconnect",
            "before the destination may have them; on the way back it is as it was, and off",
            command=moves.disconnect,
            undo_command=moves.install_old,
            host_of=moves.source,
            condition=Run.has_volumes,
            fails_on_any_host=True,
        ),
        moves.MOVE_VOLUMES,
        Step(
            "copy",
            "the destination fetches, because it knows what it has",
            command=_receive,
            host_of=moves.destination,
            on_result=_received,
            fails_when_host_down=True,
            reads_source=True,
        ),
        Step(
            "bind",
            "before it starts there, and as late as that: it is off, and needs no network",
            call=_bind,
            apply=networks.store_plugged,
            undo_call=_bind_back,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "switch",
            "one transaction: the place, the flavor, and which of the two guests may run",
            apply=_switch,
            undo=_switch_back,
            events=StepEvents(succeeded=SWITCHED_EVENTS),
        ),
        Step(
            "install",
            "a definite failure still leads back; when it has succeeded nothing does",
            command=_install,
            host_of=moves.destination,
            on_result=installed,
            pivot=True,
        ),
        networks.plug_step(_waits_for_ports),
        Step(
            "run",
            "its ports are wired now",
            command=guest.start,
            on_result=guest.record_booted,
            condition=_waits_for_ports,
        ),
        Step(
            "finish",
            "the source is kept until somebody has looked at the server here",
            apply=finished,
        ),
    ),
)

MIGRATE = replace(RESIZE, name="migrate")


# --- confirm ---
def _confirm(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        if moves.stays_on_host(run):
            run.switch_workflow(CONFIRM_HERE)
            continue
        _compare_once(tx, run)
        run.set_migration(status=MigrationStatus.CONFIRMING)
    for run in debts.collect(
        tx, [run for run in runs if not run.paused], moves.source, moves.shares_storage
    ):
        confirmed(tx, run)


def confirmed(tx: Connection, run: MoveEndRun) -> None:
    """There is no way back any more; the server is what its guest is."""
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
    """Whether both hosts have the same files; asked once."""
    if run.data.shared is None:
        moves.compare_hosts(tx, [run])


CONFIRM_RESIZE = Workflow(
    "confirm_resize",
    args=MoveEndArgs,
    data=MoveEndData,
    steps=(
        Step(
            "leave",
            "the guest at the source becomes a debt of its host: one that is down makes nobody wait",
            apply=_confirm,
            pivot=True,
        ),
    ),
)


# --- revert ---
def _begin(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        if moves.stays_on_host(run):
            run.switch_workflow(REVERT_HERE)
            continue
        _compare_once(tx, run)
        run.data.ran = run.server.power_state != states.SHUTDOWN
        run.set_migration(status=MigrationStatus.REVERTING)


def ran_resized(run: MoveEndRun) -> bool:
    """Did the resized guest run when it was to be reverted?"""
    return run.data.ran


def ran_before(run: MoveEndRun) -> bool:
    """Did the server run before it was resized?"""
    return run.args.before != states.STOPPED


def runs_on(tx: Connection, engine: Engine, run: MoveEndRun) -> None:
    """The resized guest may run again, if it did."""
    if run.data.ran:
        guests.want(tx, [run.server.id], GuestState.RUNNING, True)
        run.set(power_state=states.RUNNING)


def _turn_back(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        kept = next(
            row for row in guests.places(tx, run.server.id) if row.host == moves.source(run)
        )
        run.data.old_assignment = moves.assignment_of(kept.assignment)
        run.data.switched = run.data.knows_old_assignment = True
        moves.switch_to_source(tx, engine, run, ran_before(run))
        guests.become(tx, run.server.id, moves.claimed_destination(run), GuestState.KEPT)


def _undo_turn_back(tx: Connection, engine: Engine, run: MoveEndRun) -> None:
    """The source cannot have it: it is where it was resized."""
    if run.data.switched:
        run.data.switched = False
        moves.return_to_destination(tx, engine, run, run.data.ran)


def _is_back(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in runs:
        run.set(**moves.quota_columns(run.args.old_flavor))
        guests.add_debt(
            tx,
            run.server.id,
            run.fence,
            host=moves.claimed_destination(run),
            may_run=False,
            keeps_files=moves.shares_storage(run),
        )
        moves.return_source_resources(tx, run)
        run.data.no_way_back = True


def _install_back(engine: Engine, run: MoveEndRun) -> Install:
    return Install(guest=moves.old_guest_spec(engine, run), runs=ran_before(run))


def _install_resized(engine: Engine, run: MoveEndRun) -> Install:
    return Install(guest=moves.guest_spec(engine, run), runs=False)


def _leave(tx: Connection, engine: Engine, runs: Sequence[MoveEndRun]) -> None:
    for run in debts.collect(tx, runs, moves.claimed_destination, moves.shares_storage):
        run.set(vm_state=states.ACTIVE if ran_before(run) else states.STOPPED)
        run.set_migration(status=MigrationStatus.REVERTED)


def _revert_failed(tx: Connection, engine: Engine, run: MoveEndRun, problem: StepFailed) -> None:
    """To be confirmed or reverted, as it was, whether or not it could be started again there. When
    the source has it already, somebody must look at it."""
    if run.data.plugged is not None:
        run.set(interfaces=run.data.plugged)
    if run.server.host == moves.source(run):
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set_migration(status=MigrationStatus.ERROR)
        return
    stay_off(tx, run)
    run.set(vm_state=states.RESIZED)
    run.set_migration(status=MigrationStatus.FINISHED)


def stay_off(tx: Connection, run: MoveEndRun) -> None:
    """A resized guest that could not be started again is off, and can still be confirmed or
    reverted."""
    if run.data.undo_failures:
        run.data.clear_undo_failures()
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)


def _waits_for_ports_again(run: MoveEndRun) -> bool:
    return ran_before(run) and networks.starts_paused(run)


REVERT_RESIZE = Workflow(
    "revert_resize",
    args=MoveEndArgs,
    data=MoveEndData,
    failed=_revert_failed,
    steps=(
        Step("begin", "what is known of the two hosts is asked once", apply=_begin),
        Step(
            "restart",
            "only on the way back: it runs on where it is",
            undo=runs_on,
            undo_command=guest.start,
            condition=ran_resized,
        ),
        Step(
            "stop",
            "nothing may run there when it starts at the source; of a host whose guests are dead nothing does",
            command=guest.stop,
            host_of=moves.destination,
            on_result=guest.record_stopped,
            done_when_host_dead=True,
        ),
        Step(
            "disconnect",
            "as for the way there",
            command=moves.disconnect,
            undo_command=_install_resized,
            host_of=moves.destination,
            done_when_host_dead=True,
            condition=Run.has_volumes,
        ),
        moves.RETURN_VOLUMES,
        Step(
            "disconnect_again",
            "only on the way back: the source may have begun to connect them",
            undo_command=moves.disconnect,
            host_of=moves.source,
            condition=Run.has_volumes,
        ),
        Step(
            "bind",
            "as for the way there",
            call=_bind_back,
            apply=networks.store_plugged,
            undo_call=_bind,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "switch",
            "from here on only the source may run it",
            apply=_turn_back,
            undo=_undo_turn_back,
        ),
        Step(
            "install",
            "from the record, not from what the host remembers; when it has succeeded nothing leads back",
            command=_install_back,
            host_of=moves.source,
            on_result=installed,
            pivot=True,
        ),
        Step(
            "settle",
            "the source has it: the destination has to remove what it kept",
            apply=_is_back,
        ),
        networks.plug_step(_waits_for_ports_again),
        Step(
            "run",
            "its ports are wired now",
            command=guest.start,
            on_result=guest.record_booted,
            condition=_waits_for_ports_again,
        ),
        Step(
            "leave",
            "last: the server runs, and a destination that is down makes nobody wait",
            apply=_leave,
        ),
    ),
)
