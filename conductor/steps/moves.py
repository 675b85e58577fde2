# SPDX-License-Identifier: Apache-2.0
"""What all moves share: the two places of a server on its way, and what each of them must hold.

Used by the workflows resize, live_migrate and evacuate. Must stay true: at most one of the two
guests may run; the source's allocation is the migration's from the claim of the destination on; the
server is where ``switch`` has put it, under a fence that rose with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from common.domain import errors, local_disks, states
from common.domain.hardware import hardware, on_host, resources_of
from common.domain.json_types import JsonObject
from common.domain.models import Flavor, GuestSpec, HardwareAssignment, Interface, RequestSpec
from common.domain.states import BY_WORKFLOW
from common.domain.statuses import GuestState, MigrationStatus
from common.domain.verbs import DisconnectVolumes, Install, Offer
from common.domain.wire import from_wire, to_wire
from common.store.engine import Connection
from common.store.hosts import hosts
from common.store.placement import allocations, zones
from common.store.servers import guests
from conductor.engine.action_args import MoveArgs
from conductor.engine.action_data import StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step
from conductor.steps import claims, guest, volumes
from conductor.steps.claims import ClaimedHost, PlacementData
from conductor.steps.networks import PortData
from conductor.steps.volumes import ArrivingData

RESIZE_HERE = "resize_here"  #: the workflow of a resize that stays on its host; it begins at the step ``place``

NO_HOST_EVENTS = ("compute_task.migrate_server.error",)  #: no destination was found


@dataclass(kw_only=True)
class MoveData(PlacementData, PortData, ArrivingData):
    """What the steps of a move leave."""

    placed: bool = False  #: a destination is claimed: ``dest``, ``zone``, ``assignment``
    may_stay: bool = False  #: the destination may be the source
    assignment: HardwareAssignment | None = None  #: which parts of the destination the guest has
    old_assignment: HardwareAssignment | None = None  #: which parts of the source it had
    #: ``old_assignment`` is known; until then it is what the guest has now
    knows_old_assignment: bool = False
    switched: bool = False  #: the server is at its destination, or of its new flavor
    shared: bool | None = None  #: both hosts have the same files; None: not asked yet
    transfer: str | None = None  #: address at which the source gives files; "": it gives none
    to: JsonObject | None = None  #: how the destination takes servers in while they run


MoveRun = Run[MoveArgs, MoveData]
R = TypeVar("R", bound=MoveRun)


def source(run: MoveRun) -> str:
    """The host that the server leaves."""
    return run.args.source


def destination(run: MoveRun) -> str | None:
    """The host that it goes to; None while none is claimed."""
    return run.data.dest or run.args.dest


def claimed_destination(run: MoveRun) -> str:
    """The same, where one is claimed."""
    host = destination(run)
    assert host is not None, "a destination was claimed before"
    return host


def was_running(run: MoveRun) -> bool:
    """Did the server run when it was asked to move, so that it runs afterwards?"""
    return run.args.was != states.STOPPED


def shares_storage(run: MoveRun) -> bool:
    """Have both hosts the server's files?"""
    return bool(run.data.shared)


def copies_files(run: MoveRun) -> bool:
    """Must its files travel?"""
    return not run.data.shared


def stays_on_host(run: MoveRun) -> bool:
    """Is the server resized where it is?"""
    return destination(run) == source(run)


# --- choosing the destination ---
def request_spec(run: MoveRun) -> RequestSpec:
    """What the server wants of a destination: its new flavor, its pinned zone, and another host."""
    wanted = claims.spec(
        run,
        run.server.pinned_availability_zone,
        run.args.host,
        forced=run.args.forced,
        flavor=run.args.new_flavor,
    )
    if run.data.may_stay:
        return replace(wanted, holds_on=source(run), holds=old_resources(run))
    return replace(wanted, excluded=[*wanted.excluded, source(run)])


def old_resources(run: MoveRun) -> dict[str, int]:
    """What the server has at the source."""
    return resources_of(run.args.old_flavor, run.server.image)


def _properties(run: MoveRun) -> dict[str, str]:
    return dict((run.server.image or {}).get("properties", {}))


def propose(engine: Engine, runs: Sequence[MoveRun]) -> None:
    """Ask for destinations. A resize may stay where it is if that is allowed, and the server has no
    parts of its host for itself, before or afterwards: it would need the old ones and the new
    ones."""
    claims.exclude_hosts_with_debts(engine, runs)
    for run in runs:
        try:
            run.data.may_stay = (
                engine.allow_resize_to_same_host
                and run.action.name == "resize"
                and not any(
                    hardware(flavor, _properties(run)).needs_assignment
                    for flavor in (run.args.old_flavor, run.args.new_flavor)
                )
            )
            if run.action.name != "evacuate":
                transfer_secret(engine, run)
        except errors.Problem as problem:  # hardware that no host makes, or a cloud without a key
            run.fail(problem.text)
    asking = [run for run in runs if not run.problem]
    if asking:
        claims.propose(engine, asking, request_spec)


def claim(tx: Connection, engine: Engine, runs: Sequence[R]) -> list[tuple[R, JsonObject]]:
    """Claim a destination for each, where its guest arrives; the migration holds now what it has at
    the source. Returns those that got another host than their source, each with what the source
    says of itself."""
    taken = []
    for run, claimed in claims.claim(
        tx, engine, runs, request_spec, lambda run: (source(run), run.args.migration)
    ):
        record_claim(run, claimed)
        if claimed.host != source(run):
            taken.append((run, claimed))
            guests.hold(tx, run.server.id, source(run), run.args.migration)
        run.set_migration(status=MigrationStatus.PRE_MIGRATING, dest_host=claimed.host)
    if taken:
        guests.add(
            tx,
            [
                {**claimed.guest(run), "wanted": GuestState.ARRIVING, "may_run": False}
                for run, claimed in taken
            ],
        )
    return compare_hosts(tx, [run for run, _ in taken])


def claim_place(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    """``claim`` for a server whose files travel unless both hosts have them. One that stays goes on
    in a workflow of its own."""
    for run, _ in claim(tx, engine, runs):
        if copies_files(run) and not run.data.transfer:
            run.fail(f"Host {source(run)} gives no files to other hosts; its agent's log says why.")
    for run in runs:
        if run.data.placed and stays_on_host(run):
            run.switch_workflow(RESIZE_HERE)


def record_claim(run: MoveRun, claimed: ClaimedHost) -> None:
    """Write down where it goes."""
    run.data.placed, run.data.dest, run.data.source = True, claimed.host, source(run)
    run.data.zone, run.data.assignment = claimed.zone, claimed.assignment


def compare_hosts(tx: Connection, runs: Sequence[R]) -> list[tuple[R, JsonObject]]:
    """Write down what the two hosts of each say of themselves: whether they share storage, how one
    reaches the other. Returns the runs with what their sources say."""
    if not runs:
        return []
    found = hosts.facts_of(
        tx, {host for run in runs for host in (source(run), claimed_destination(run))}
    )
    for run in runs:
        here, there = found.get(source(run), {}), found.get(claimed_destination(run), {})
        run.data.shared = bool(here.get("storage")) and here.get("storage") == there.get("storage")
        run.data.transfer, run.data.to = here.get("transfer", ""), there.get("migration", {})
    return [(run, found.get(source(run), {})) for run in runs]


def release_destination(tx: Connection, engine: Engine, run: MoveRun, blames: bool = True) -> None:
    """Give the destination up: the server is where it was, and holds again what it had there."""
    if not run.data.placed:
        return
    run.data.placed = False
    if stays_on_host(run):
        allocations.stay(tx, run.args.migration, run.server.id, source(run), old_resources(run))
        run.set_migration(dest_host=None)
        return
    run.raise_fence()  # what the destination does for it still is cancelled by that
    claims.leave_debt(tx, run, claimed_destination(run), shares_storage(run), blames)
    return_source_resources(tx, run)


# --- the guest at its two places ---
def guest_spec(engine: Engine, run: MoveRun) -> GuestSpec:
    """The guest as it is at the destination."""
    made, found = guest.spec(engine, run), run.data.arriving
    return replace(
        _of_flavor(made, run, run.args.new_flavor),
        assignment=run.data.assignment,
        interfaces=[from_wire(Interface, one) for one in found]
        if found is not None
        else made.interfaces,
        volumes=volumes.described_arriving(engine, run)
        if run.data.volumes_arriving and not run.data.switched
        else made.volumes,
    )


def old_guest_spec(engine: Engine, run: MoveRun) -> GuestSpec:
    """The guest as it was at the source."""
    made = guest.spec(engine, run)
    return replace(
        _of_flavor(made, run, run.args.old_flavor),
        assignment=run.data.old_assignment if run.data.knows_old_assignment else made.assignment,
    )


def _of_flavor(made: GuestSpec, run: MoveRun, flavor: Flavor) -> GuestSpec:
    """The guest with the disks of this flavor too."""
    return replace(made, flavor=flavor, disks=local_disks.of(flavor, run.server.disks))


def assignment_of(kept: JsonObject | None) -> HardwareAssignment | None:
    """Which parts of its host a guest has, as its record says."""
    return from_wire(HardwareAssignment, kept) if kept else None


def transfer_secret(engine: Engine, run: MoveRun) -> str:
    """What opens the guest's files at the source for the destination of this attempt; it is nowhere
    written down."""
    return engine.vault.derive(f"move {run.action.id} {run.attempt}")


def offer(engine: Engine, run: MoveRun) -> Offer:
    """Return the verb by which the source lets the destination read the guest's files."""
    return Offer(secret=transfer_secret(engine, run))


def switch_to_destination(tx: Connection, run: MoveRun, runs: bool) -> None:
    """The server is at its destination: from here on its guest there may run, and the one at the
    source may not."""
    run.data.old_assignment = assignment_of(run.server.assignment)
    run.data.switched = run.data.knows_old_assignment = True
    _switch_host(tx, run, claimed_destination(run), runs, source(run), GuestState.KEPT)
    run.set(availability_zone=run.data.zone, **flavor_columns(run, run.args.new_flavor))


def _switch_host(
    tx: Connection, run: MoveRun, host: str, runs: bool, other: str, state: GuestState
) -> None:
    """The server is on this host, where its guest may run if ``runs``; the one on the other host is
    ``state``."""
    run.raise_fence()
    guests.become(tx, run.server.id, other, state, may_run=False)
    guests.become(
        tx,
        run.server.id,
        host,
        GuestState.RUNNING if runs else GuestState.STOPPED,
        may_run=runs,
        fence=run.fence,
    )
    run.set(host=host)


def _zone_of(tx: Connection, engine: Engine, host: str) -> str:
    return zones.hosts(tx, [host]).get(host, engine.default_zone)


def switch_to_source(tx: Connection, engine: Engine, run: MoveRun, runs: bool) -> None:
    """The server is at its source again, where its guest may run if ``runs``; the one at the
    destination may not."""
    _switch_host(tx, run, source(run), runs, claimed_destination(run), GuestState.ARRIVING)
    run.set(
        availability_zone=_zone_of(tx, engine, source(run)),
        **flavor_columns(run, run.args.old_flavor),
    )


def return_to_destination(tx: Connection, engine: Engine, run: MoveRun, runs: bool) -> None:
    """``switch_to_source`` undone: the server is at its destination, and its source keeps its
    guest."""
    host = claimed_destination(run)
    _switch_host(tx, run, host, runs, source(run), GuestState.KEPT)
    run.set(
        availability_zone=_zone_of(tx, engine, host), **flavor_columns(run, run.args.new_flavor)
    )


def return_source_resources(tx: Connection, run: MoveRun) -> None:
    """The server holds again what the migration held at the source."""
    guests.hold(tx, run.server.id, source(run), None)
    allocations.hand_back(tx, run.args.migration, run.server.id, source(run))


def flavor_columns(run: AnyRun, flavor: Flavor) -> JsonObject:
    """The columns of the server when it has this flavor, but for what the quota counts."""
    held = on_host(flavor, run.server.image).disk_gb
    return {"flavor": to_wire(flavor), "flavor_id": flavor.id, "disk_gb": held}


def quota_columns(flavor: Flavor) -> dict[str, int]:
    """What the quota counts of a server of this flavor; of one that moves, the larger of both."""
    return {"vcpus": flavor.vcpus, "memory_mb": flavor.memory_mb}


# --- volumes of a server that moves while it is off ---
def disconnect(engine: Engine, run: MoveRun) -> DisconnectVolumes:
    """Return the verb that disconnects the volumes of a guest that is off."""
    return DisconnectVolumes()


def install_old(engine: Engine, run: MoveRun) -> Install:
    """Return the verb that defines the guest at the source again, off, with its volumes."""
    return Install(guest=old_guest_spec(engine, run), runs=False)


def _move_volumes(engine: Engine, run: MoveRun) -> None:
    volumes.move_to(engine, run, claimed_destination(run))


def _return_volumes(engine: Engine, run: MoveRun) -> None:
    volumes.move_to(engine, run, source(run))


MOVE_VOLUMES: Step[Any, Any] = Step(
    "move_volumes",
    "when the host that the server leaves has none of them any more, and before the other one has the guest",
    call=_move_volumes,
    undo_call=_return_volumes,
    lane=Lane.VOLUME,
    condition=Run.has_volumes,
)
RETURN_VOLUMES: Step[Any, Any] = replace(
    MOVE_VOLUMES, call=_return_volumes, undo_call=_move_volumes
)


# --- the end ---
def fail_move(tx: Connection, engine: Engine, run: MoveRun, problem: StepFailed) -> None:
    """Another destination while there are attempts and the failure was the host's own; else the
    server is as before. One that could not be started again is off, and somebody must look at
    it."""
    if not run.data.undo_failures and claims.reschedule(engine, run, problem):
        run.data.arriving = None
        run.set_migration(status=MigrationStatus.ACCEPTED, dest_host=None)
        run.set(task_state=BY_WORKFLOW[run.action.workflow].during)
        return
    if run.is_left_off:
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)
    run.set(**quota_columns(run.args.old_flavor))
    run.set_migration(status=MigrationStatus.ERROR)
