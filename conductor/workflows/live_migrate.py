# SPDX-License-Identifier: Apache-2.0
"""Live migration: the guest goes to another host while it runs.

Its CPUs run on one side at any moment; the hypervisors hand them over. What became of that is
decided by asking both: the source says that it has the guest no more, the destination that it has
it, and only then does the place change. Had neither it, the source would start it from its disk.
Ports are bound at both places meanwhile, so that the guest finds its network where it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.domain import states
from common.domain.json_types import JsonObject
from common.domain.models import Control, FailureReason, Result
from common.domain.statuses import MigrationStatus
from common.domain.verbs import (
    Arrived,
    Destination,
    EnsureAbsent,
    Install,
    LiveMigrate,
    PrepareArrival,
)
from common.domain.wire import from_wire
from common.store.engine import Connection, notification_settings
from common.store.servers import migrations
from conductor.engine.action_args import LiveMigrateArgs
from conductor.engine.action_data import StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step, StepEvents
from conductor.engine.workflow import Workflow
from conductor.steps import claims, debts, guest, moves, networks, volumes
from conductor.steps.moves import MoveData

#: The step whose command can be aborted, or completed by force.


@dataclass(kw_only=True)
class LiveMigrateData(MoveData):
    """What the steps leave."""

    cpu: JsonObject = field(default_factory=dict)  #: of the source
    diskless: bool = False  #: the source moves guests without their disks
    handed_over: bool = False  #: the source has the guest no more
    control: str | None = None  #: the control that was requested while it ran


LiveMigrateRun = Run[LiveMigrateArgs, LiveMigrateData]


def _claim(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    for run, source in moves.claim(tx, engine, runs):
        run.data.cpu, run.data.diskless = source.get("cpu_info") or {}, bool(source.get("diskless"))
        run.set_migration(status=MigrationStatus.PREPARING)
        _check(run)


def _check(run: LiveMigrateRun) -> None:
    """What can be said against it without asking the hosts."""
    if not (run.data.to or {}).get("uri"):
        run.fail(
            f"Host {moves.destination(run)} takes no servers in while they run; set [migration] "
            "live_migration_port there, or migrate the server while it is off.",
            retryable=True,
        )
    elif run.args.block_migration is True and run.data.shared:
        run.fail("Block migration cannot be used with shared storage.")
    elif run.args.block_migration is False and not run.data.shared and not run.data.diskless:
        run.fail(
            "The hosts share no storage; ask for a block migration, or leave that to Kilonova."
        )


def _connect_there(engine: Engine, run: LiveMigrateRun) -> None:
    volumes.connect_also(engine, run, moves.claimed_destination(run))


def _prepare(engine: Engine, run: LiveMigrateRun) -> PrepareArrival:
    return PrepareArrival(
        guest=moves.guest_spec(engine, run),
        source=run.data.transfer or "",
        secret=moves.transfer_secret(engine, run),
        shared=moves.shares_storage(run),
        cpu=run.data.cpu or {},
    )


def _prepared(tx: Connection, run: LiveMigrateRun, result: Result) -> None:
    run.data.to = {**(run.data.to or {}), **from_wire(Destination, result.data).details}


def _release_destination(tx: Connection, engine: Engine, run: LiveMigrateRun) -> None:
    """That two hosts do not go together says nothing of either."""
    moves.release_destination(tx, engine, run, blames=False)


def _check_abort(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    """An abort that was asked for before the hosts could be told."""
    records = migrations.open_of(tx, [run.server.id for run in runs])
    for run in runs:
        if records[run.server.id].requested_control == Control.ABORT:
            run.fail("The migration was aborted.", reason=FailureReason.ABORTED)


def _migrate(engine: Engine, run: LiveMigrateRun) -> LiveMigrate:
    return LiveMigrate(
        guest=moves.guest_spec(engine, run),
        to=Destination(details=run.data.to or {}),
        shared=moves.shares_storage(run),
    )


def _begun(tx: Connection, runs: Sequence[LiveMigrateRun]) -> None:
    for run in runs:
        run.set_migration(status=MigrationStatus.RUNNING)


def _migrated(tx: Connection, run: LiveMigrateRun, result: Result) -> None:
    run.data.handed_over = True
    run.set_migration(status=MigrationStatus.POST_MIGRATING)


def _arrive(engine: Engine, run: LiveMigrateRun) -> Arrived:
    return Arrived(guest=moves.guest_spec(engine, run))


def _drop(engine: Engine, run: LiveMigrateRun) -> EnsureAbsent:
    return EnsureAbsent(keep_files=moves.shares_storage(run))


def _arrived(tx: Connection, run: LiveMigrateRun, result: Result) -> None:
    guest.record_running(tx, run, result)


def _is_handed_over(run: LiveMigrateRun) -> bool:
    """Has the source given it up, so that on the way back it has only its disk?"""
    return run.data.handed_over


def _start_again(engine: Engine, run: LiveMigrateRun) -> Install:
    return Install(guest=moves.old_guest_spec(engine, run), runs=True)


def _switch(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    for run in runs:
        moves.switch_to_destination(tx, run, runs=True)
        if run.volumes:
            volumes.exchange(run)
        claims.record_successful_build(run)


def _leave(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    debts.collect(tx, runs, moves.source, moves.shares_storage)


def _finish(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    records = (
        migrations.open_of(tx, [run.server.id for run in runs]) if notification_settings(tx) else {}
    )
    for run in runs:
        if run.server.id in records:
            run.data.control = records[
                run.server.id
            ].requested_control  # the notification of the end names it
        run.set(progress=0)
        run.set_migration(status=MigrationStatus.COMPLETED)


def _failed(tx: Connection, engine: Engine, run: LiveMigrateRun, problem: StepFailed) -> None:
    """It is as before; one that was lost on the way was started anew, and is not sent on another.
    Nothing fails one that has moved."""
    run.set(progress=0)
    if run.data.handed_over:
        run.set(vm_state=states.ACTIVE, power_state=states.RUNNING)
        problem = StepFailed(str(problem), problem.details, reason=problem.reason)
    moves.fail_move(tx, engine, run, problem)
    if (
        run.migration_changes.get("status") == MigrationStatus.ERROR
        and problem.reason is FailureReason.ABORTED
    ):
        run.set_migration(status=MigrationStatus.CANCELLED)


LIVE_MIGRATE = Workflow(
    "live_migrate",
    args=LiveMigrateArgs,
    data=LiveMigrateData,
    failed=_failed,
    steps=(
        Step(
            "place",
            "first: after it the destination's room is sure, and the migration holds what the source has",
            prepare=moves.propose,
            apply=_claim,
            undo=_release_destination,
            events=StepEvents(failed=moves.NO_HOST_EVENTS),
        ),
        Step(
            "offer",
            "of a guest that runs only what it cannot change",
            command=moves.offer,
            host_of=moves.source,
            fails_on_any_host=True,
        ),
        Step(
            "bind_there",
            "before the destination describes the guest, while the ports still work where it is",
            call=networks.bind_at_destination,
            undo_call=networks.unbind_destination,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "connect_there",
            "the same of its volumes: both hosts have them while it moves",
            call=_connect_there,
            undo_call=volumes.disconnect_arriving,
            lane=Lane.VOLUME,
            condition=Run.has_volumes,
        ),
        Step(
            "prepare",
            "the destination looks whether it can take the guest, and lets in from the source what it has then "
            "described itself",
            command=_prepare,
            host_of=moves.destination,
            on_result=_prepared,
            fails_when_host_down=True,
            reads_source=True,
            events=StepEvents(
                started=("instance.live_migration_pre.start",),
                succeeded=("instance.live_migration_pre.end",),
            ),
        ),
        Step("heed", "the last moment at which nothing has to be called off", apply=_check_abort),
        Step(
            "return",
            "only on the way back, when it is nowhere: it starts from its disk where that is whole",
            undo_command=_start_again,
            undo_starts_guest=True,
            host_of=moves.source,
            condition=_is_handed_over,
        ),
        Step(
            "migrate",
            "the hypervisors hand it over; a source that is dead leaves the answer to the destination",
            command=_migrate,
            host_of=moves.source,
            on_start=_begun,
            on_result=_migrated,
            done_when_host_dead=True,
            takes_controls=True,
        ),
        Step(
            "arrive",
            "the destination says that it has it; only that makes it its place. Else it gives up what it may "
            "have, before the source starts it again",
            command=_arrive,
            host_of=moves.destination,
            on_result=_arrived,
            undo_command=_drop,
        ),
        Step(
            "switch",
            "one transaction: the place, and which of the two guests may run",
            apply=_switch,
            pivot=True,
            events=StepEvents(
                succeeded=(
                    "instance.live_migration_post.start",
                    "instance.live_migration_post_dest.start",
                    "instance.live_migration_post_dest.end",
                )
            ),
        ),
        Step(
            "activate",
            "at once: from now on its frames are sent there",
            call=networks.activate_at_destination,
            apply=networks.store_interfaces,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step("leave", "what the source has of it is a debt", apply=_leave),
        Step(
            "let_go",
            "the source's bindings of its ports, when nothing runs there any more",
            call=networks.unbind_source,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "disconnect_source",
            "the source's attachments of its volumes, when it has let go of them",
            call=volumes.disconnect_arriving,
            lane=Lane.VOLUME,
            condition=Run.has_volumes,
        ),
        Step("finish", "last", apply=_finish),
    ),
)
