# SPDX-License-Identifier: Apache-2.0
"""Live migration: move the guest to another host while it runs.

The hypervisors hand the guest over, so the guest's CPUs run on one host at a time. The server's
host changes only after both agents have reported: the source, that the guest has left, and the
destination, that the guest has arrived. If neither host has the guest, the source starts the guest
again from the disk. During the migration the ports are bound to both hosts, so that the guest has a
network on arrival.
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
from conductor.steps import claims, guest, moves, networks, removals, volumes
from conductor.steps.moves import MoveData


@dataclass(kw_only=True)
class LiveMigrateData(MoveData):
    """Data that the steps of a live migration leave for later steps."""

    #: CPU model and features of the source.
    cpu: JsonObject = field(default_factory=dict)
    #: True if the source can migrate guests without copying their disks.
    diskless: bool = False
    #: True if the source has handed the guest over.
    handed_over: bool = False
    #: Control that a user requested during the migration, for example an abort.
    control: str | None = None


LiveMigrateRun = Run[LiveMigrateArgs, LiveMigrateData]


def _claim(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    for run, source in moves.claim(tx, engine, runs):
        run.data.cpu, run.data.diskless = source.get("cpu_info") or {}, bool(source.get("diskless"))
        run.set_migration(status=MigrationStatus.PREPARING)
        _check_hosts(run)


def _check_hosts(run: LiveMigrateRun) -> None:
    """Fail the run if the two hosts cannot migrate the guest as requested.

    A destination that accepts no live migrations is a retryable failure. A block migration fails on
    shared storage. A migration without copies of the disks needs shared storage or a source that
    supports this. With ``block_migration`` auto, any storage suits.
    """
    if not (run.data.to or {}).get("uri"):
        run.fail(
            f"Host {moves.destination(run)} accepts no live migrations. Set [migration] live_migration_port "
            "there, or use a cold migration.",
            retryable=True,
        )
    elif run.args.block_migration is True and run.data.shared:
        run.fail("Block migration cannot be used with shared storage.")
    elif run.args.block_migration is False and not run.data.shared and not run.data.diskless:
        run.fail(
            "Source and destination share no storage. Request a block migration, or block_migration auto."
        )


def _connect_at_destination(engine: Engine, run: LiveMigrateRun) -> None:
    volumes.connect_also(engine, run, moves.claimed_destination(run))


def _prepare_command(engine: Engine, run: LiveMigrateRun) -> PrepareArrival:
    return PrepareArrival(
        guest=moves.guest_spec(engine, run),
        source=run.data.transfer or "",
        secret=moves.transfer_secret(engine, run),
        shared=moves.shares_storage(run),
        cpu=run.data.cpu or {},
    )


def _record_prepared(tx: Connection, run: LiveMigrateRun, result: Result) -> None:
    run.data.to = {**(run.data.to or {}), **from_wire(Destination, result.data).details}


def _release_destination(tx: Connection, engine: Engine, run: LiveMigrateRun) -> None:
    """Release the claimed destination, if any.

    The failure does not count against the destination, because the hosts may only be incompatible.
    """
    moves.release_destination(tx, engine, run, blames=False)


def _check_abort(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    """Fail the runs whose migration a user has aborted. The source has not begun to send yet."""
    records = migrations.open_of(tx, [run.server.id for run in runs])
    for run in runs:
        if records[run.server.id].requested_control == Control.ABORT:
            run.fail("The migration was aborted.", reason=FailureReason.ABORTED)


def _migrate_command(engine: Engine, run: LiveMigrateRun) -> LiveMigrate:
    return LiveMigrate(
        guest=moves.guest_spec(engine, run),
        to=Destination(details=run.data.to or {}),
        shared=moves.shares_storage(run),
    )


def _record_begun(tx: Connection, runs: Sequence[LiveMigrateRun]) -> None:
    for run in runs:
        run.set_migration(status=MigrationStatus.RUNNING)


def _record_migrated(tx: Connection, run: LiveMigrateRun, result: Result) -> None:
    run.data.handed_over = True
    run.set_migration(status=MigrationStatus.POST_MIGRATING)


def _arrived_command(engine: Engine, run: LiveMigrateRun) -> Arrived:
    return Arrived(guest=moves.guest_spec(engine, run))


def _remove_command(engine: Engine, run: LiveMigrateRun) -> EnsureAbsent:
    return EnsureAbsent(keep_files=moves.shares_storage(run))


def _record_arrived(tx: Connection, run: LiveMigrateRun, result: Result) -> None:
    guest.record_running(tx, run, result)


def _is_handed_over(run: LiveMigrateRun) -> bool:
    """Return True if the source has handed the guest over, so that only the disk is left there."""
    return run.data.handed_over


def _start_at_source_command(engine: Engine, run: LiveMigrateRun) -> Install:
    return Install(guest=moves.old_guest_spec(engine, run), runs=True)


def _switch(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    for run in runs:
        moves.switch_to_destination(tx, run, runs=True)
        if run.volumes:
            volumes.exchange(run)
        claims.record_successful_build(run)


def _leave_source(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    removals.collect(tx, runs, moves.source, moves.shares_storage)


def _finish(tx: Connection, engine: Engine, runs: Sequence[LiveMigrateRun]) -> None:
    records = (
        migrations.open_of(tx, [run.server.id for run in runs]) if notification_settings(tx) else {}
    )
    for run in runs:
        if run.server.id in records:
            # The notification of the end contains the control.
            run.data.control = records[run.server.id].requested_control
        run.set(progress=0)
        run.set_migration(status=MigrationStatus.COMPLETED)


def _fail_migration(
    tx: Connection, engine: Engine, run: LiveMigrateRun, problem: StepFailed
) -> None:
    """Try another destination, or record the failure and leave the server at the source.

    If the source had handed the guest over, no other destination is tried, because the undo has
    started the guest from its disk. If this undo failed, the server is recorded as off. An aborted
    migration gets the status cancelled.
    """
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
    failed=_fail_migration,
    steps=(
        Step(
            "place",
            "Claim the destination first, so that no later step fails for lack of room. From here "
            "on the migration holds the resources at the source.",
            prepare=moves.propose,
            apply=_claim,
            undo=_release_destination,
            events=StepEvents(failed=moves.NO_HOST_EVENTS),
        ),
        Step(
            "offer",
            "Let the destination read the backing files, which the running guest cannot change.",
            command=moves.offer,
            host_of=moves.source,
            fails_on_any_host=True,
        ),
        Step(
            "bind_there",
            "Before the destination defines the guest. The ports stay active at the source.",
            call=networks.bind_at_destination,
            undo_call=networks.unbind_destination,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "connect_there",
            "Both hosts need the volumes during the migration.",
            call=_connect_at_destination,
            undo_call=volumes.disconnect_arriving,
            lane=Lane.VOLUME,
            condition=Run.has_volumes,
        ),
        Step(
            "prepare",
            "The destination checks that the guest can run there, and permits the source to "
            "connect.",
            command=_prepare_command,
            host_of=moves.destination,
            on_result=_record_prepared,
            fails_when_host_down=True,
            reads_source=True,
            events=StepEvents(
                started=("instance.live_migration_pre.start",),
                succeeded=("instance.live_migration_pre.end",),
            ),
        ),
        Step("heed", "The last moment at which an abort needs no command.", apply=_check_abort),
        Step(
            "return",
            "Undo only: if no host has the guest, the source starts the guest from its disk.",
            undo_command=_start_at_source_command,
            undo_starts_guest=True,
            host_of=moves.source,
            condition=_is_handed_over,
        ),
        Step(
            "migrate",
            "The hypervisors hand the guest over. If the source is dead, only the destination "
            "knows the outcome.",
            command=_migrate_command,
            host_of=moves.source,
            on_start=_record_begun,
            on_result=_record_migrated,
            done_when_host_dead=True,
            takes_controls=True,
        ),
        Step(
            "arrive",
            "Only the destination's report makes it the server's host. The undo removes the guest "
            "from the destination before the source starts it again.",
            command=_arrived_command,
            host_of=moves.destination,
            on_result=_record_arrived,
            undo_command=_remove_command,
        ),
        Step(
            "switch",
            "The server's host and the permission to run change in one transaction.",
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
            "At once, because the guest's frames now come from the destination.",
            call=networks.activate_at_destination,
            apply=networks.store_interfaces,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "leave",
            "The source removes the rest of the guest as a pending cleanup.",
            apply=_leave_source,
        ),
        Step(
            "let_go",
            "Remove the port bindings of the source, because no guest runs there.",
            call=networks.unbind_source,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "disconnect_source",
            "End the attachments of the source, because the source has disconnected the volumes.",
            call=volumes.disconnect_arriving,
            lane=Lane.VOLUME,
            condition=Run.has_volumes,
        ),
        Step("finish", "The migration is completed last.", apply=_finish),
    ),
)
