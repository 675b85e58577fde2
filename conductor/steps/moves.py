# SPDX-License-Identifier: Apache-2.0
"""The parts that all moves share: both hosts of a server on its way, and the guest on each.

The workflows resize, live_migrate and evacuate use this module.

Invariants: At most one of the two guests may run. From the claim of the destination on, the
migration holds the allocation at the source. The step ``switch`` sets the server's host, under a
higher fence.
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

#: The workflow of a resize on the same host, with ``place`` as the first step.
RESIZE_HERE = "resize_here"

#: Notifications about a move without a destination.
NO_HOST_EVENTS = ("compute_task.migrate_server.error",)


@dataclass(kw_only=True)
class MoveData(PlacementData, PortData, ArrivingData):
    """Data that the steps of a move leave for later steps."""

    #: True if a destination is claimed, in ``dest``, ``zone`` and ``assignment``.
    placed: bool = False
    #: True if the destination may be the source.
    may_stay: bool = False
    #: The parts of the destination that the guest has.
    assignment: HardwareAssignment | None = None
    #: The parts of the source that the guest had.
    old_assignment: HardwareAssignment | None = None
    #: True if ``old_assignment`` is set. Before, the guest's present assignment counts.
    knows_old_assignment: bool = False
    #: True if the server is at its destination, or has its new flavor.
    switched: bool = False
    #: True if both hosts share storage. None: not compared yet.
    shared: bool | None = None
    #: Address of the source's transfer service. "": the source serves no files.
    transfer: str | None = None
    #: Facts of the destination about incoming live migrations.
    to: JsonObject | None = None


MoveRun = Run[MoveArgs, MoveData]
R = TypeVar("R", bound=MoveRun)


def source(run: MoveRun) -> str:
    """Return the host that the server leaves.

    Confirm and revert return the source of the move that they end.
    """
    return run.args.source


def destination(run: MoveRun) -> str | None:
    """Return the host that the server goes to, or None before the first claim.

    A released destination is returned until the next claim. Confirm and revert return the
    destination of the move that they end.
    """
    return run.data.dest or run.args.dest


def claimed_destination(run: MoveRun) -> str:
    """Return the ``destination`` of a move, which must not be None."""
    host = destination(run)
    assert host is not None, "the move has claimed a destination"
    return host


def was_running(run: MoveRun) -> bool:
    """Return True if the server's vm_state before the action was not ``stopped``."""
    return run.args.was != states.STOPPED


def shares_storage(run: MoveRun) -> bool:
    """Return True if both hosts share storage. False before ``compare_hosts``."""
    return bool(run.data.shared)


def copies_files(run: MoveRun) -> bool:
    """Return True if the server's files must be copied: the hosts share no storage.

    True before ``compare_hosts``.
    """
    return not run.data.shared


def stays_on_host(run: MoveRun) -> bool:
    """Return True if the server is resized on its present host. False before the first claim."""
    return destination(run) == source(run)


# --- choosing the destination ---
def request_spec(run: MoveRun) -> RequestSpec:
    """Return the requirements for the destination: the new flavor and the pinned zone.

    The source is excluded, unless ``may_stay`` permits a resize on the same host.
    """
    requirements = claims.spec(
        run,
        run.server.pinned_availability_zone,
        run.args.host,
        forced=run.args.forced,
        flavor=run.args.new_flavor,
    )
    if run.data.may_stay:
        return replace(requirements, holds_on=source(run), holds=old_resources(run))
    return replace(requirements, excluded=[*requirements.excluded, source(run)])


def old_resources(run: MoveRun) -> dict[str, int]:
    """Return the resources that the server holds at the source."""
    return resources_of(run.args.old_flavor, run.server.image)


def _properties(run: MoveRun) -> dict[str, str]:
    return dict((run.server.image or {}).get("properties", {}))


def propose(engine: Engine, runs: Sequence[MoveRun]) -> None:
    """Request destinations from the scheduler, and store the proposals in the runs.

    A run fails if its hardware options are invalid, or if [DEFAULT] secret_key is not set. An
    evacuation needs no such key.

    A resize may stay on the same host if the operator permits this and the server has no hardware
    assignment, neither before nor afterwards. Otherwise the host would have to hold both
    assignments at once.

    Raises:
        Unavailable: No scheduler answers (NoAnswer), or a database does not answer.
    """
    claims.exclude_hosts_with_removals(engine, runs)
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
        except errors.Problem as problem:  # No host has the hardware, or secret_key is not set.
            run.fail(problem.text)
    valid_runs = [run for run in runs if not run.problem]
    if valid_runs:
        claims.propose(engine, valid_runs, request_spec)


def claim(tx: Connection, engine: Engine, runs: Sequence[R]) -> list[tuple[R, JsonObject]]:
    """Claim a destination for each run. The migration now holds the resources at the source.

    If the destination is another host, a guest record is inserted there, and the hosts are compared
    (``compare_hosts``). If it is the source, the migration holds only the amounts that a revert
    would need in addition. Runs without a claim try again or fail, as in ``claims.claim``.

    Returns:
        The runs with a destination other than the source, each with the facts that the source has
        reported about itself.
    """
    moving = []
    for run, claimed in claims.claim(
        tx, engine, runs, request_spec, lambda run: (source(run), run.args.migration)
    ):
        record_claim(run, claimed)
        if claimed.host != source(run):
            moving.append((run, claimed))
            guests.hold(tx, run.server.id, source(run), run.args.migration)
        run.set_migration(status=MigrationStatus.PRE_MIGRATING, dest_host=claimed.host)
    if moving:
        guests.add(
            tx,
            [
                {**claimed.guest(run), "wanted": GuestState.ARRIVING, "may_run": False}
                for run, claimed in moving
            ],
        )
    return compare_hosts(tx, [run for run, _ in moving])


def claim_place(tx: Connection, engine: Engine, runs: Sequence[MoveRun]) -> None:
    """Claim a destination for each run and check that the server's files can be copied there.

    A run fails if the hosts share no storage and the source does not serve files to other hosts. If
    the destination is the source, the run continues in the workflow ``resize_here``.
    """
    for run, _ in claim(tx, engine, runs):
        if copies_files(run) and not run.data.transfer:
            run.fail(
                f"Host {source(run)} serves no files to other hosts, so server {run.server.id} cannot "
                "leave it. The agent's log on that host has the reason."
            )
    for run in runs:
        if run.data.placed and stays_on_host(run):
            run.switch_workflow(RESIZE_HERE)


def record_claim(run: MoveRun, claimed: ClaimedHost) -> None:
    """Record source and claimed destination, with zone and assignment, in the data of the move."""
    run.data.placed, run.data.dest, run.data.source = True, claimed.host, source(run)
    run.data.zone, run.data.assignment = claimed.zone, claimed.assignment


def compare_hosts(tx: Connection, runs: Sequence[R]) -> list[tuple[R, JsonObject]]:
    """Record in the runs' data whether the hosts share storage, and how they reach each other.

    The latter is the source's transfer address and the destination's facts about live migrations.

    Returns:
        The runs, each with the facts that the source has reported about itself.
    """
    if not runs:
        return []
    facts = hosts.facts_of(
        tx, {host for run in runs for host in (source(run), claimed_destination(run))}
    )
    for run in runs:
        old, new = (
            facts.get(source(run), {}),
            facts.get(claimed_destination(run), {}),
        )
        run.data.shared = bool(old.get("storage")) and old.get("storage") == new.get("storage")
        run.data.transfer, run.data.to = (
            old.get("transfer", ""),
            new.get("migration", {}),
        )
    return [(run, facts.get(source(run), {})) for run in runs]


def release_destination(tx: Connection, engine: Engine, run: MoveRun, blames: bool = True) -> None:
    """Release the claimed destination, if any. The server holds the source's resources again.

    The guest at the destination becomes a pending cleanup under a higher fence, unless the
    destination is the source.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        run: The run of the move.
        blames: Count a failed build of the destination if the failure is retryable.
    """
    if not run.data.placed:
        return
    run.data.placed = False
    if stays_on_host(run):
        allocations.stay(tx, run.args.migration, run.server.id, source(run), old_resources(run))
        run.set_migration(dest_host=None)
        return
    run.raise_fence()  # The destination refuses commands that are still on their way.
    claims.record_removal(tx, run, claimed_destination(run), shares_storage(run), blames)
    return_source_resources(tx, run)


# --- the guest on both hosts ---
def guest_spec(engine: Engine, run: MoveRun) -> GuestSpec:
    """Return the definition of the guest for the destination, with the new flavor.

    Interfaces and volumes are described as bound or connected there, if a step has done that.
    """
    spec, arriving = guest.spec(engine, run), run.data.arriving
    return replace(
        _set_flavor(spec, run, run.args.new_flavor),
        assignment=run.data.assignment,
        interfaces=[from_wire(Interface, interface) for interface in arriving]
        if arriving is not None
        else spec.interfaces,
        volumes=volumes.described_arriving(engine, run)
        if run.data.volumes_arriving and not run.data.switched
        else spec.volumes,
    )


def old_guest_spec(engine: Engine, run: MoveRun) -> GuestSpec:
    """Return the definition of the guest for the source, with the old flavor and assignment."""
    spec = guest.spec(engine, run)
    return replace(
        _set_flavor(spec, run, run.args.old_flavor),
        assignment=run.data.old_assignment if run.data.knows_old_assignment else spec.assignment,
    )


def _set_flavor(spec: GuestSpec, run: MoveRun, flavor: Flavor) -> GuestSpec:
    """Return the guest's definition with this flavor and the flavor's local disks."""
    return replace(spec, flavor=flavor, disks=local_disks.of(flavor, run.server.disks))


def assignment_of(stored: JsonObject | None) -> HardwareAssignment | None:
    """Return the hardware assignment that a guest's record stores, or None without one."""
    return from_wire(HardwareAssignment, stored) if stored else None


def transfer_secret(engine: Engine, run: MoveRun) -> str:
    """Return the secret by which the destination of this attempt reads the files at the source.

    The secret is derived and never stored.

    Raises:
        Unavailable: [DEFAULT] secret_key is not set.
    """
    return engine.vault.derive(f"move {run.action.id} {run.attempt}")


def offer(engine: Engine, run: MoveRun) -> Offer:
    """Return the verb by which the source lets the destination read the guest's files.

    Raises:
        Unavailable: As in ``transfer_secret``.
    """
    return Offer(secret=transfer_secret(engine, run))


def switch_to_destination(tx: Connection, run: MoveRun, runs: bool) -> None:
    """Make the destination the server's host, with the new flavor and under a higher fence.

    From here on the guest at the source may not run. ``runs`` is True if the guest at the
    destination should run, and False if it must stay off.
    """
    run.data.old_assignment = assignment_of(run.server.assignment)
    run.data.switched = run.data.knows_old_assignment = True
    _switch_host(tx, run, claimed_destination(run), runs, source(run), GuestState.KEPT)
    run.set(availability_zone=run.data.zone, **flavor_columns(run, run.args.new_flavor))


def _switch_host(
    tx: Connection, run: MoveRun, host: str, runs: bool, other: str, state: GuestState
) -> None:
    """Set the server's host under a higher fence, and the wanted states of both guests.

    ``runs`` is True if the guest on ``host`` should run. The guest on the host ``other`` may not
    run and gets the wanted state ``state``.
    """
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
    """Make the source the server's host again, with the old flavor and under a higher fence.

    The guest at the destination may not run. ``runs`` is True if the guest at the source should
    run.
    """
    _switch_host(tx, run, source(run), runs, claimed_destination(run), GuestState.ARRIVING)
    run.set(
        availability_zone=_zone_of(tx, engine, source(run)),
        **flavor_columns(run, run.args.old_flavor),
    )


def return_to_destination(tx: Connection, engine: Engine, run: MoveRun, runs: bool) -> None:
    """Undo ``switch_to_source``: make the destination the server's host, with the new flavor.

    The guest at the source may not run. ``runs`` is True if the guest at the destination should
    run.
    """
    host = claimed_destination(run)
    _switch_host(tx, run, host, runs, source(run), GuestState.KEPT)
    run.set(
        availability_zone=_zone_of(tx, engine, host), **flavor_columns(run, run.args.new_flavor)
    )


def return_source_resources(tx: Connection, run: MoveRun) -> None:
    """Give the resources that the migration holds at the source back to the server."""
    guests.hold(tx, run.server.id, source(run), None)
    allocations.hand_back(tx, run.args.migration, run.server.id, source(run))


def flavor_columns(run: AnyRun, flavor: Flavor) -> JsonObject:
    """Return the server's columns for a flavor, without those in ``quota_columns``."""
    disk_gb = on_host(flavor, run.server.image).disk_gb
    return {"flavor": to_wire(flavor), "flavor_id": flavor.id, "disk_gb": disk_gb}


def quota_columns(flavor: Flavor) -> dict[str, int]:
    """Return the columns that the quota counts for a server with this flavor."""
    return {"vcpus": flavor.vcpus, "memory_mb": flavor.memory_mb}


# --- volumes of a stopped server on its way ---
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
    "The old host has disconnected the volumes, and the new host does not have the guest yet.",
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
    """Begin another try, or record the failure of the move, which leaves the server at the source.

    Another destination is tried if the failure is retryable, attempts are left, and no undo failed.
    Otherwise the migration gets the status ``error``, and the quota counts the old flavor again. If
    the undo could not start the guest again, the server is recorded as off.
    """
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
