# SPDX-License-Identifier: Apache-2.0
"""Evacuate: create a server again on another host because the server's host is dead.

The new guest is built from the image, or from the server's files if those are on storage that both
hosts share.

Invariant: the source's guests are proved dead before the rebuild begins. Either a fencing hook has
succeeded, or an admin has forced the host down. Silence alone is no proof. The record of the old
guest is kept until the new guest exists, so that a failure loses no data. Then the old guest
becomes a pending cleanup of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.domain.models import Result
from common.domain.statuses import GuestState, MigrationStatus
from common.domain.verbs import EnsureGuest, Install, Rebuild, Verb
from common.store.engine import Connection, now
from common.store.hosts import hosts, services
from common.store.servers import actions, guests, migrations
from conductor.engine.action_args import EvacuateArgs
from conductor.engine.action_data import StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run, cleanup_command
from conductor.engine.step import Step, StepEvents
from conductor.engine.workflow import Workflow
from conductor.steps import claims, guest, moves, networks
from conductor.steps.moves import MoveData
from conductor.steps.removals import BURST_POLL_MICROS

HAS_COME_BACK = "Host {host} has come back meanwhile, so the server stays there."


@dataclass(kw_only=True)
class EvacuateData(MoveData):
    """Data that the steps of an evacuation leave for later steps."""

    #: Session of the source when the evacuation began.
    session: int | None = None
    #: True if this action has fenced the host and has not yet recorded that.
    fenced: bool = False
    #: Availability zone and wanted state of the old guest, while a destination is claimed.
    old: JsonObject | None = None
    #: True if the source has opened a new session since the evacuation began.
    returned: bool = False


EvacuateRun = Run[EvacuateArgs, EvacuateData]


def _fence(engine: Engine, run: EvacuateRun) -> None:
    """Fence the source, unless the source is forced down already.

    First record the source's session in the run, unless an earlier try has done so. The step's
    ``apply`` then forces the source down in the database.

    Raises:
        Conflict: The host is up, no fencing hook is configured, or the hook has failed.
    """
    host = moves.source(run)
    dead, up, session = engine.store.read(
        lambda tx: (
            services.are_dead(tx, host),
            services.is_up(tx, host),
            hosts.sessions(tx, [host]).get(host, 0),
        )
    )
    if run.data.session is None:
        run.data.session = session
    if dead:
        return
    if up:
        raise errors.Conflict(f"Compute service of {host} is still in use.")
    if engine.fence_host is None:
        raise errors.Conflict(services.NO_PROOF.format(host=host))
    engine.fence_host(host)
    run.data.fenced = True


def _record_fenced(tx: Connection, engine: Engine, runs: Sequence[EvacuateRun]) -> None:
    for run in runs:
        if not run.data.fenced:
            continue
        run.data.fenced = False
        # This lock makes a new session of the host wait. A session opened earlier is compared
        # below.
        services.are_dead(tx, moves.source(run), locked=True)
        if _read_session(tx, run) == run.data.session:
            services.fence(tx, moves.source(run))
        else:
            run.fail(HAS_COME_BACK.format(host=moves.source(run)))


def _claim(tx: Connection, engine: Engine, runs: Sequence[EvacuateRun]) -> None:
    ready = [run for run in runs if _can_begin(tx, run)]
    claims_of_runs = claims.claim(tx, engine, ready, moves.request_spec) if ready else []
    for run, claimed_host in claims_of_runs:
        moves.record_claim(run, claimed_host)
        run.raise_fence()
        _keep_old(tx, run)
        run.set(host=claimed_host.host, availability_zone=claimed_host.zone)
        run.set_migration(status=MigrationStatus.PRE_MIGRATING, dest_host=claimed_host.host)
    if claims_of_runs:
        guests.add(
            tx,
            [
                {
                    **claimed_host.guest(run),
                    "wanted": GuestState.RUNNING if _is_started(run) else GuestState.STOPPED,
                    "may_run": _is_started(run),
                }
                for run, claimed_host in claims_of_runs
            ],
        )
        for run, _ in moves.compare_hosts(tx, [run for run, _ in claims_of_runs]):
            # With a wrong value of ``shared`` a disk would be lost or missing.
            if run.args.shared not in (None, run.data.shared):
                run.fail(
                    "onSharedStorage is false, but both hosts share the storage of the server's files."
                    if run.data.shared
                    else "onSharedStorage is true, but the hosts do not share the storage of the server's files."
                )


def _can_begin(tx: Connection, run: EvacuateRun) -> bool:
    if run.data.after and actions.busy_until(tx, run.data.after):
        # The command of the superseded action may still write data that this action must see.
        run.retry_in(BURST_POLL_MICROS)
        return False
    if not services.are_dead(tx, moves.source(run), locked=True):
        run.fail(
            f"Host {moves.source(run)} is not forced down any more, so the server stays there. If the host is "
            "dead, force it down and evacuate the server again."
        )
        return False
    if _read_session(tx, run) != run.data.session:
        run.fail(HAS_COME_BACK.format(host=moves.source(run)))
        return False
    return True


def _read_session(tx: Connection, run: EvacuateRun) -> int:
    return hosts.sessions(tx, [moves.source(run)]).get(moves.source(run), 0)


def _check_source_returned(tx: Connection, engine: Engine, run: EvacuateRun) -> None:
    """Record whether the source has opened a new session since the evacuation began.

    Such a host is alive again. If the server ran there, the host must start the guest again.
    """
    run.data.returned = run.data.session is not None and _read_session(tx, run) != run.data.session


def _has_returned(run: EvacuateRun) -> bool:
    return run.data.returned and run.args.was == states.ACTIVE


def _revive_command(engine: Engine, run: EvacuateRun) -> Verb:
    """Return the command that starts the guest on the returned source.

    For a server with volumes the command also defines the guest again from the server's record,
    because the attachments have changed.
    """
    if run.has_volumes():
        return Install(guest=moves.old_guest_spec(engine, run), runs=True)
    return guest.start(engine, run)


def _keep_old(tx: Connection, run: EvacuateRun) -> None:
    """Set the guest record at the source to KEPT, so that the guest may not run there.

    The run's data keep the former state for the undo. Guests on other hosts become pending
    cleanups, unless their wanted state is ABSENT already.
    """
    old_guest = {"zone": run.server.availability_zone}
    for row in guests.places(tx, run.server.id):
        if row.host == moves.source(run):
            old_guest["wanted"] = row.wanted
        elif row.wanted != GuestState.ABSENT:
            guests.add_removal(
                tx,
                run.server.id,
                run.fence,
                host=row.host,
                may_run=False,
                keeps_files=migrations.share_files(tx, row.host, moves.source(run)),
            )
    run.data.old = old_guest
    guests.become(tx, run.server.id, moves.source(run), GuestState.KEPT, may_run=False)


def _release_destination(tx: Connection, engine: Engine, run: EvacuateRun) -> None:
    """Release the claimed destination, and make the source the server's host again.

    The guest record at the source gets the former state back, and the guest at the destination
    becomes a pending cleanup. Without a claim do nothing.
    """
    if not run.data.placed:
        return
    run.data.placed = False
    run.raise_fence()
    claims.record_removal(tx, run, moves.claimed_destination(run), moves.shares_storage(run))
    old_guest, run.data.old = run.data.old or {}, None
    if "wanted" in old_guest:
        guests.become(
            tx,
            run.server.id,
            moves.source(run),
            old_guest["wanted"],
            may_run=old_guest["wanted"] == GuestState.RUNNING,
        )
    run.set(host=moves.source(run), availability_zone=old_guest["zone"])


def _is_started(run: EvacuateRun) -> bool:
    """Return True if the new guest is started: the server was not stopped and may be started.

    From microversion 2.95 on requests permit no start.
    """
    return moves.was_running(run) and not run.args.stopped


def _bind_to_destination(engine: Engine, run: EvacuateRun) -> None:
    networks.rebind_to(engine, run, moves.claimed_destination(run))


def _bind_to_source(engine: Engine, run: EvacuateRun) -> None:
    networks.rebind_to(engine, run, moves.source(run))


def _build_command(engine: Engine, run: EvacuateRun) -> Verb:
    """Return the command that builds the guest from the shared files, or else from the image.

    The command starts the guest if ``_is_started`` is True.
    """
    spec = moves.guest_spec(engine, run)
    if run.data.shared:
        return Install(guest=spec, runs=_is_started(run))
    if _is_started(run):
        return EnsureGuest(guest=spec)
    return Rebuild(guest=spec, runs=False, keep_ephemeral=False)


def _record_built(tx: Connection, run: EvacuateRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    run.set(launched_at=now())
    claims.record_successful_build(run)


def _leave_source(tx: Connection, engine: Engine, runs: Sequence[EvacuateRun]) -> None:
    for run in runs:
        shared = moves.shares_storage(run)
        guests.add_removal(
            tx, run.server.id, run.fence, host=moves.source(run), may_run=False, keeps_files=shared
        )
        run.commands.append(
            (moves.source(run), cleanup_command(run.server.id, run.fence, keep_files=shared))
        )
        run.set(vm_state=states.ACTIVE if _is_started(run) else states.STOPPED)
        run.set_migration(status=MigrationStatus.DONE)


def _fail_evacuate(tx: Connection, engine: Engine, run: EvacuateRun, problem: StepFailed) -> None:
    """Try another host if the failure is retryable and attempts are left, else record the failure.

    After a failure the server is at the source as before, and the migration is FAILED. No other
    host is tried if the source has returned or an undo failed.
    """
    if run.data.plugged is not None:
        run.set(interfaces=run.data.plugged)
    if run.data.returned:
        problem = StepFailed(str(problem), problem.details)
    moves.fail_move(tx, engine, run, problem)
    if run.migration_changes.get("status") == MigrationStatus.ERROR:
        run.set_migration(status=MigrationStatus.FAILED)


def _waits_for_ports(run: EvacuateRun) -> bool:
    return _is_started(run) and networks.starts_paused(run)


EVACUATE = Workflow(
    "evacuate",
    args=EvacuateArgs,
    data=EvacuateData,
    failed=_fail_evacuate,
    steps=(
        Step(
            "revive",
            "Undo only: the source has returned meanwhile and starts the guest again.",
            undo=_check_source_returned,
            undo_command=_revive_command,
            undo_starts_guest=True,
            host_of=moves.source,
            condition=_has_returned,
        ),
        Step(
            "fence",
            "First, because no second guest may exist while the old one can run.",
            call=_fence,
            apply=_record_fenced,
            lane=Lane.FENCING,
        ),
        Step(
            "place",
            "The record of the old guest is kept, so that a failure can be undone.",
            prepare=moves.propose,
            apply=_claim,
            undo=_release_destination,
            events=StepEvents(failed=("compute_task.rebuild_server.error",)),
        ),
        Step(
            "bind",
            "After the claim, because the ports are bound to the new host.",
            call=_bind_to_destination,
            apply=networks.store_plugged,
            undo_call=_bind_to_source,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        moves.MOVE_VOLUMES,
        Step(
            "build",
            "Build the guest like a new server's, or from the files on shared storage.",
            command=_build_command,
            host_of=moves.destination,
            on_result=_record_built,
        ),
        networks.plug_step(_waits_for_ports),
        Step(
            "run",
            "The ports are wired, so the paused guest continues.",
            command=guest.start,
            on_result=guest.record_booted,
            condition=_waits_for_ports,
        ),
        Step(
            "leave",
            "Last, because the new guest exists now and the old one can be removed.",
            apply=_leave_source,
            pivot=True,
        ),
    ),
)
