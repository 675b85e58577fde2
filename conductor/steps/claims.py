# SPDX-License-Identifier: Apache-2.0
"""Placement of servers: the scheduler proposes hosts, and the conductor claims the first that fits.

A claim, its guest record and the server's new host are committed together. A server fails with "No
valid host" only if the scheduler used a snapshot from after the last lost claim. If no scheduler
answers, the action waits. Results of builds are counted per host. Claims leave out a host on which
several builds have failed in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from common.domain import errors, request_spec
from common.domain.clock import SECOND
from common.domain.hardware import ON_VOLUME, hardware
from common.domain.json_types import JsonObject
from common.domain.models import Flavor, HardwareAssignment, ImageRef, RequestSpec
from common.domain.statuses import ActionPhase
from common.domain.wire import from_wire, to_wire
from common.service import metrics
from common.service.log import get_logger
from common.store.engine import Connection
from common.store.placement import allocations
from common.store.servers import failed_builds, guests
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine
from conductor.engine.run import Run, cleanup_command

log = get_logger(__name__)
#: Trait of hosts whose agent attaches volumes. Agents of earlier releases would ignore volumes.
VOLUMES = "COMPUTE_VOLUME_ATTACH"
#: Lost claims in a row before the next try waits.
MAX_LOST_CLAIMS = 3
MAX_PAUSE_MICROS = 4 * SECOND


@dataclass(kw_only=True)
class PlacementData(ActionData):
    """Data that the placement of a server leaves for later steps."""

    #: Claims in a row that other servers have won.
    claims_lost: int = 0
    #: True if the claimed host is tried again after failed builds.
    tried: bool = False
    #: Hosts on which the server failed, in order.
    failed_hosts: list[str] = field(default_factory=list)
    #: Those of ``failed_hosts`` for which a failed build was counted.
    blamed: list[str] = field(default_factory=list)
    #: Hosts that have not removed an old guest of the server yet.
    hosts_with_removals: list[str] = field(default_factory=list)


PlacementRun = Run[ActionArgs, PlacementData]
R = TypeVar("R", bound=PlacementRun)


class ClaimedHost(NamedTuple):
    """The host that a run has claimed, with its availability zone and the hardware assignment."""

    host: str
    zone: str | None
    assignment: HardwareAssignment | None

    def guest(self, run: PlacementRun) -> JsonObject:
        """Return the columns of the new guest record of the run's server on the host."""
        return {
            "server_id": run.server.id,
            "host": self.host,
            "fence": run.fence,
            "assignment": to_wire(self.assignment) if self.assignment is not None else None,
        }


def spec(
    run: PlacementRun,
    zone: str | None = None,
    host: str | None = None,
    *,
    forced: bool = False,
    is_rebuild: bool = False,
    flavor: Flavor | None = None,
) -> RequestSpec:
    """Return the server's requirements for a host.

    Hosts on which this action has failed, and hosts with an old guest of the server, are excluded.
    A server with volumes requires the trait ``VOLUMES``.

    Args:
        run: The run of an action that places the server.
        zone: The required availability zone. None: any zone.
        host: The only host that may be chosen. None: any host.
        forced: True if the operator's filters do not apply to ``host``.
        is_rebuild: True for a rebuild on the server's present host.
        flavor: The new flavor. None: the server's flavor.
    """
    server = run.server
    image = from_wire(ImageRef, server.image) if server.image else None
    requirements = request_spec.of(
        server.id,
        server.project_id,
        flavor or from_wire(Flavor, server.flavor),
        image,
        hints=server.scheduler_hints,
        boots_from_volume=bool(server.image and server.image.get(ON_VOLUME)),
        availability_zone=zone,
        force_host=host if forced else None,
        requested_host=None if forced else host,
        is_rebuild=is_rebuild,
        excluded=[*run.data.failed_hosts, *run.data.hosts_with_removals],
        hosts_with_removals=run.data.hosts_with_removals,
    )
    if server.volumes:
        requirements = replace(
            requirements, required_traits=[*requirements.required_traits, VOLUMES]
        )
    return requirements


def exclude_hosts_with_removals(engine: Engine, runs: Sequence[PlacementRun]) -> None:
    """Record in each run the hosts that have not removed an old guest of the server yet.

    ``spec`` excludes these hosts. Such a host still holds the old guest's resources, and must not
    get a second guest.
    """
    removals = engine.store.read(lambda tx: guests.removals_of(tx, [run.server.id for run in runs]))
    for run in runs:
        run.data.hosts_with_removals = [
            removal.host for removal in removals if removal.server_id == run.server.id
        ]


def propose(engine: Engine, runs: Sequence[R], spec_of: Callable[[R], RequestSpec]) -> None:
    """Request hosts for all runs in one call to a scheduler, and store the proposals in the runs.

    A run fails if its flavor and image require hardware that Kilonova does not support. This can
    happen when the rules have changed since the server was created.

    Raises:
        Unavailable: No scheduler answers (NoAnswer), or its database does not answer.
    """
    fresh, specs = any(run.data.claims_lost for run in runs), []
    for run in runs:
        try:
            requirements = spec_of(run)
            assert requirements.flavor is not None
            # The claim and the host read the hardware too, but only here a refusal fails the run.
            hardware(requirements.flavor, requirements.image_properties)
            specs.append(requirements)
        except errors.BadRequest as problem:
            run.fail(problem.text)
    selections = engine.messaging.select(specs, fresh) if specs else []
    by_server = {selection.server: selection for selection in selections}
    for run in runs:
        run.selection = by_server.get(run.server.id)


def claim_and_place(
    tx: Connection, engine: Engine, runs: Sequence[R], spec_of: Callable[[R], RequestSpec]
) -> None:
    """Claim a host for each run, make it the server's host, and insert the guest's record.

    Runs without a claim try again or fail, as in ``claim``.
    """
    placed: list[JsonObject] = []
    for run, claimed in claim(tx, engine, runs, spec_of):
        run.set(host=claimed.host, availability_zone=claimed.zone)
        run.claimed = claimed.assignment
        placed.append(claimed.guest(run))
    if placed:
        guests.add(tx, placed)


def claim(
    tx: Connection,
    engine: Engine,
    runs: Sequence[R],
    spec_of: Callable[[R], RequestSpec],
    leaves: Callable[[R], tuple[str, str]] | None = None,
) -> list[tuple[R, ClaimedHost]]:
    """Claim for each run the first proposed host that still fits.

    Only the first choices of all runs and the hosts that runs leave are considered, because the
    transaction locks no other hosts. If none fits a run, or the run has no selection, the run
    becomes due again for new proposals. A run whose selection contains no hosts fails with the
    reasons.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        runs: The runs, after ``propose``.
        spec_of: Returns the requirements of a run for a host.
        leaves: Returns the host that the server leaves, and the migration that holds its resources
            there from now on. None: the server leaves no host.

    Returns:
        The runs with a claimed host, each with this host.
    """
    requests = {run.server.id: _request(run, spec_of(run)) for run in runs}
    if leaves is not None:
        for run in runs:
            requests[run.server.id].leaves = leaves(run)
            requests[run.server.id].has = spec_of(run).holds
    allocations.claim(tx, list(requests.values()), engine.failed_build_limit, engine.default_zone)
    claimed_runs = []
    for run in runs:
        request = requests[run.server.id]
        if request.host is not None:
            metrics.CLAIMS.add("taken")
            assert run.selection is not None
            run.data.claims_lost = 0
            run.data.tried = run.data.tried or bool(request.tried)
            claimed_runs.append(
                (
                    run,
                    ClaimedHost(
                        request.host, run.selection.zones.get(request.host), request.assignment
                    ),
                )
            )
        elif run.selection is None or run.selection.hosts:
            metrics.CLAIMS.add("lost")
            _retry(run, request.refused)
        else:
            metrics.CLAIMS.add("none")
            fail_no_valid_host(run)
    return claimed_runs


def _request(run: PlacementRun, spec: RequestSpec) -> allocations.ClaimRequest:
    assert spec.flavor is not None
    assignment_request = hardware(spec.flavor, spec.image_properties)
    return allocations.ClaimRequest(
        run.server.id,
        run.server.project_id,
        run.server.user_id,
        spec.resources,
        list(run.selection.hosts) if run.selection else [],
        forced=spec.force_host is not None,
        zone=spec.availability_zone,
        group=spec.group,
        hardware=assignment_request if assignment_request.needs_assignment else None,
    )


def _retry(run: PlacementRun, refused: str) -> None:
    """Let the run request new proposals, because no proposed host could be claimed.

    After more than ``MAX_LOST_CLAIMS`` lost claims in a row, the pauses before the request grow.
    ``refused`` is the reason of the last refusal, for the log.
    """
    losses = run.data.claims_lost = run.data.claims_lost + 1
    excess = losses - MAX_LOST_CLAIMS
    if excess > MAX_LOST_CLAIMS:
        log.warning(
            "the hosts proposed for a server were refused many times in a row",
            server=run.server.id,
            count=losses,
            problem=refused or "the scheduler has not answered",
        )
    run.retry_in(
        0 if excess <= 0 else min(MAX_PAUSE_MICROS, (SECOND // 100) * 2 ** min(excess, 10))
    )


def fail_no_valid_host(run: PlacementRun) -> None:
    """Fail the run, because no host fits.

    The text counts the hosts by reason, and contains the error of the last host that was tried, if
    any. For operators the details list each host by name.
    """
    assert run.selection is not None
    by_host = [f"{name}: {why}" for name, why in sorted(run.selection.by_host.items())]
    text, previous = f"No valid host was found. {run.selection.reason}", run.data.problem
    if previous is not None:
        host = run.data.failed_hosts[-1] if run.data.failed_hosts else ""
        text += f"; the last host tried reported: {previous.text}"
        by_host.append(f"{host} reported: {previous.text} {previous.details}".rstrip())
    run.fail(text, "\n".join(by_host))


def release_host(tx: Connection, engine: Engine, run: PlacementRun) -> None:
    """Take the server off its host, and record a pending cleanup of the guest there.

    The host's resources stay claimed until the host has removed the guest. A retryable failure can
    count as a failed build of the host (``record_removal``). Without a host nothing is recorded.
    """
    if run.host is not None:
        record_removal(tx, run, run.host)
    run.set(host=None, availability_zone=None)


def record_removal(
    tx: Connection, run: PlacementRun, host: str, keeps_files: bool = False, blames: bool = True
) -> None:
    """Record a pending cleanup of the server's guest on a host, and exclude the host from now on.

    The host gets the command to remove the guest after the commit.

    Args:
        tx: The transaction.
        run: The run of the action. ``run.problem`` is the failure on the host, if any.
        host: The host that must remove the guest.
        keeps_files: Keep the files, because the remaining guest uses them on shared storage.
        blames: Count a failed build of the host if the failure is retryable, unless the image is as
            likely a cause.
    """
    if (
        blames
        and run.problem is not None
        and run.problem.retryable
        and failed_builds.counts_against_host(tx, run.action.id, host, run.server.image_id)
    ):
        run.build_verdicts.append((host, -1))
        run.data.blamed = [*run.data.blamed, host]
    run.data.tried = False
    run.data.failed_hosts = [*run.data.failed_hosts, host]
    guests.add_removal(
        tx, run.server.id, run.fence, host=host, may_run=False, keeps_files=keeps_files
    )
    run.commands.append((host, cleanup_command(run.server.id, run.fence, keep_files=keeps_files)))


def record_successful_build(run: PlacementRun) -> None:
    """Count a successful build of the host if the host was tried again after failed builds."""
    if run.data.tried and run.host is not None:
        run.build_verdicts.append((run.host, 0))
    run.data.tried = False


def reschedule(engine: Engine, run: PlacementRun, problem: StepFailed) -> bool:
    """Restart the workflow for another host if the failure is retryable and attempts are left.

    If the server failed on several hosts and is not tried again, the server is a likely cause. Then
    the failures that were counted against the hosts are withdrawn. Invariant: a tenant cannot
    exclude hosts by requesting servers that cannot be built.

    Returns:
        True if the workflow restarts. False if the caller must end the action.
    """
    if not problem.retryable or run.attempt >= engine.max_attempts:
        if len(blamed := set(run.data.blamed)) > 1:
            run.build_verdicts += [(host, 1) for host in sorted(blamed)]
        run.data.blamed = []
        return False
    run.continue_at(None, phase=ActionPhase.FORWARD, attempt=run.attempt + 1, host=None)
    return True
