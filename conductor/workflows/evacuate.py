# SPDX-License-Identifier: Apache-2.0
"""Evacuate: a server whose host is dead is made again on another one, of its image, or of its files
where those are on shared storage.

Silence proves nothing: a fencing hook must have made sure that the host's guests are dead, or an
admin must have said so by forcing the host down. The old guest is kept in the records until the new
one stands, so that a failure loses nothing; then it is a debt, which the host removes when it
returns.
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
from conductor.steps.debts import BURST_POLL_MICROS
from conductor.steps.moves import MoveData

HAS_COME_BACK = "Host {host} has come back meanwhile; the server is there."


@dataclass(kw_only=True)
class EvacuateData(MoveData):
    """What the steps leave."""

    session: int | None = None  #: of the source, when the evacuation began
    fenced: bool = False  #: by this action, so that the record of the host is still to be written
    #: zone and wanted state of the old guest, while a destination is claimed
    old: JsonObject | None = None
    returned: bool = False  #: the source has opened a session since


EvacuateRun = Run[EvacuateArgs, EvacuateData]


def _fence(engine: Engine, run: EvacuateRun) -> None:
    """Make sure that nothing runs on the host, unless there is proof already."""
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


def _fenced(tx: Connection, engine: Engine, runs: Sequence[EvacuateRun]) -> None:
    for run in runs:
        if not run.data.fenced:
            continue
        run.data.fenced = False
        # a new session waits from here on, or was opened before
        services.are_dead(tx, moves.source(run), locked=True)
        if _session(tx, run) == run.data.session:
            services.fence(tx, moves.source(run))
        else:
            run.fail(HAS_COME_BACK.format(host=moves.source(run)))


def _claim(tx: Connection, engine: Engine, runs: Sequence[EvacuateRun]) -> None:
    ready = [run for run in runs if _may_begin(tx, run)]
    taken = claims.claim(tx, engine, ready, moves.request_spec) if ready else []
    for run, claimed in taken:
        moves.record_claim(run, claimed)
        run.raise_fence()
        _keep_old(tx, run)
        run.set(host=claimed.host, availability_zone=claimed.zone)
        run.set_migration(status=MigrationStatus.PRE_MIGRATING, dest_host=claimed.host)
    if taken:
        guests.add(
            tx,
            [
                {
                    **claimed.guest(run),
                    "wanted": GuestState.RUNNING if _runs(run) else GuestState.STOPPED,
                    "may_run": _runs(run),
                }
                for run, claimed in taken
            ],
        )
        for run, _ in moves.compare_hosts(tx, [run for run, _ in taken]):
            if run.args.shared not in (None, run.data.shared):  # a disk would be lost, or missed
                run.fail(
                    "The server's files are on storage that its new host shares."
                    if run.data.shared
                    else "The server's files are not on storage that its new host shares."
                )


def _may_begin(tx: Connection, run: EvacuateRun) -> bool:
    if run.data.after and actions.busy_until(tx, run.data.after):
        # the old burst may still write; what it leaves must be found
        run.retry_in(BURST_POLL_MICROS)
        return False
    if not services.are_dead(tx, moves.source(run), locked=True):
        run.fail(f"Host {moves.source(run)} is not forced down any more; the server is there.")
        return False
    if _session(tx, run) != run.data.session:
        run.fail(HAS_COME_BACK.format(host=moves.source(run)))
        return False
    return True


def _session(tx: Connection, run: EvacuateRun) -> int:
    return hosts.sessions(tx, [moves.source(run)]).get(moves.source(run), 0)


def _look_back(tx: Connection, engine: Engine, run: EvacuateRun) -> None:
    """A host that has opened a session since is no longer dead; what it was kept from running runs
    there again."""
    run.data.returned = run.data.session is not None and _session(tx, run) != run.data.session


def _has_returned(run: EvacuateRun) -> bool:
    return run.data.returned and run.args.was == states.ACTIVE


def _revive(engine: Engine, run: EvacuateRun) -> Verb:
    """As it was there; with volumes from the record, because they have other attachments now."""
    if run.has_volumes():
        return Install(guest=moves.old_guest_spec(engine, run), runs=True)
    return guest.start(engine, run)


def _keep_old(tx: Connection, run: EvacuateRun) -> None:
    """The guest where the server was is kept; what an earlier move has left elsewhere is a debt."""
    old = {"zone": run.server.availability_zone}
    for row in guests.places(tx, run.server.id):
        if row.host == moves.source(run):
            old["wanted"] = row.wanted
        elif row.wanted != GuestState.ABSENT:
            guests.add_debt(
                tx,
                run.server.id,
                run.fence,
                host=row.host,
                may_run=False,
                keeps_files=migrations.share_files(tx, row.host, moves.source(run)),
            )
    run.data.old = old
    guests.become(tx, run.server.id, moves.source(run), GuestState.KEPT, may_run=False)


def _release_destination(tx: Connection, engine: Engine, run: EvacuateRun) -> None:
    """Give the destination up: the server is where it was, and as dead as before."""
    if not run.data.placed:
        return
    run.data.placed = False
    run.raise_fence()
    claims.leave_debt(tx, run, moves.claimed_destination(run), moves.shares_storage(run))
    old, run.data.old = run.data.old or {}, None
    if "wanted" in old:
        guests.become(
            tx,
            run.server.id,
            moves.source(run),
            old["wanted"],
            may_run=old["wanted"] == GuestState.RUNNING,
        )
    run.set(host=moves.source(run), availability_zone=old["zone"])


def _runs(run: EvacuateRun) -> bool:
    """Is it started there? A stopped server stays off; since 2.95 every one does."""
    return moves.was_running(run) and not run.args.stopped


def _bind(engine: Engine, run: EvacuateRun) -> None:
    networks.rebind_to(engine, run, moves.claimed_destination(run))


def _bind_back(engine: Engine, run: EvacuateRun) -> None:
    networks.rebind_to(engine, run, moves.source(run))


def _build(engine: Engine, run: EvacuateRun) -> Verb:
    """Of its files where they are; else of its image."""
    spec = moves.guest_spec(engine, run)
    if run.data.shared:
        return Install(guest=spec, runs=_runs(run))
    if _runs(run):
        return EnsureGuest(guest=spec)
    return Rebuild(guest=spec, runs=False, keep_ephemeral=False)


def _built(tx: Connection, run: EvacuateRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    run.set(launched_at=now())
    claims.record_successful_build(run)


def _leave_source(tx: Connection, engine: Engine, runs: Sequence[EvacuateRun]) -> None:
    for run in runs:
        shared = moves.shares_storage(run)
        guests.add_debt(
            tx, run.server.id, run.fence, host=moves.source(run), may_run=False, keeps_files=shared
        )
        run.commands.append(
            (moves.source(run), cleanup_command(run.server.id, run.fence, keep_files=shared))
        )
        run.set(vm_state=states.ACTIVE if _runs(run) else states.STOPPED)
        run.set_migration(status=MigrationStatus.DONE)


def _failed(tx: Connection, engine: Engine, run: EvacuateRun, problem: StepFailed) -> None:
    """Another host while there are attempts; else as before, and the action's event says why."""
    if run.data.plugged is not None:
        run.set(interfaces=run.data.plugged)
    if run.data.returned:
        problem = StepFailed(str(problem), problem.details)
    moves.fail_move(tx, engine, run, problem)
    if run.migration_changes.get("status") == MigrationStatus.ERROR:
        run.set_migration(status=MigrationStatus.FAILED)


def _waits_for_ports(run: EvacuateRun) -> bool:
    return _runs(run) and networks.starts_paused(run)


EVACUATE = Workflow(
    "evacuate",
    args=EvacuateArgs,
    data=EvacuateData,
    failed=_failed,
    steps=(
        Step(
            "revive",
            "only on the way back: its host has returned meanwhile, and runs it again",
            undo=_look_back,
            undo_command=_revive,
            undo_starts_guest=True,
            host_of=moves.source,
            condition=_has_returned,
        ),
        Step(
            "fence",
            "before anything: while its guests may run there is nothing to be made again",
            call=_fence,
            apply=_fenced,
            lane=Lane.FENCING,
        ),
        Step(
            "place",
            "the old guest is kept in the records, so that a failure leads back",
            prepare=moves.propose,
            apply=_claim,
            undo=_release_destination,
            events=StepEvents(failed=("compute_task.rebuild_server.error",)),
        ),
        Step(
            "bind",
            "when the host is known",
            call=_bind,
            apply=networks.store_plugged,
            undo_call=_bind_back,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        moves.MOVE_VOLUMES,
        Step(
            "build",
            "as a new server, or of the files that are there",
            command=_build,
            host_of=moves.destination,
            on_result=_built,
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
            "leave",
            "last: the new guest stands, and the old one is a debt",
            apply=_leave_source,
            pivot=True,
        ),
    ),
)
