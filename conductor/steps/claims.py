# SPDX-License-Identifier: Apache-2.0
"""Placing servers: the scheduler proposes, the conductor claims the first host that still fits.

A claim, its guest record and the server's new place commit together. "No valid host" is only said
from a snapshot that was read after the last failed claim; that no scheduler answers is waiting, not
a failure. Whether builds work on a host is written down here too: where several fail in a row,
claims leave the host out.
"""

from __future__ import annotations

import logging
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
from common.store.engine import Connection
from common.store.placement import allocations
from common.store.servers import failed_builds, guests
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine
from conductor.engine.run import Run, cleanup_command

log = logging.getLogger(__name__)
#: Of hosts whose agent attaches volumes: one of an earlier release would leave them out.
VOLUMES = "COMPUTE_VOLUME_ATTACH"
MAX_LOST_CLAIMS = 3  #: claims lost to others in a row before the next try waits
MAX_PAUSE_MICROS = 4 * SECOND


@dataclass(kw_only=True)
class PlacementData(ActionData):
    """What placing a server leaves."""

    claims_lost: int = 0  #: to others, in a row
    tried: bool = False  #: the claim is a try of a host on which builds have failed
    failed_hosts: list[str] = field(default_factory=list)  #: that were given up, the last one last
    #: of these, those for which a failed build was counted
    blamed: list[str] = field(default_factory=list)
    #: that have not removed an old guest of the server yet
    hosts_with_debts: list[str] = field(default_factory=list)


PlacementRun = Run[ActionArgs, PlacementData]
R = TypeVar("R", bound=PlacementRun)


class ClaimedHost(NamedTuple):
    """What a claim got."""

    host: str
    zone: str | None
    assignment: HardwareAssignment | None

    def guest(self, run: PlacementRun) -> JsonObject:
        """The record of the guest that the server has or will have there."""
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
    """What the server wants of a host. host: the only one that may be; forced: whatever the
    operator's filters say;
    flavor: another than its own."""
    server = run.server
    image = from_wire(ImageRef, server.image) if server.image else None
    made = request_spec.of(
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
        excluded=[*run.data.failed_hosts, *run.data.hosts_with_debts],
        debts=run.data.hosts_with_debts,
    )
    if server.volumes:
        made = replace(made, required_traits=[*made.required_traits, VOLUMES])
    return made


def exclude_hosts_with_debts(engine: Engine, runs: Sequence[PlacementRun]) -> None:
    """A host that has not removed an old guest of the server yet holds its resources still, and
    gets no second one."""
    debts = engine.store.read(lambda tx: guests.debts_of(tx, [run.server.id for run in runs]))
    for run in runs:
        run.data.hosts_with_debts = [debt.host for debt in debts if debt.server_id == run.server.id]


def propose(engine: Engine, runs: Sequence[R], spec_of: Callable[[R], RequestSpec]) -> None:
    """Ask for hosts for all of them in one call. One whose flavor or image asks for what no host
    makes, as it did not when the server was made, has failed.

    Raises:
        NoAnswer: no scheduler answers.
    """
    fresh, specs = any(run.data.claims_lost for run in runs), []
    for run in runs:
        try:
            wanted = spec_of(run)
            assert wanted.flavor is not None
            # claim and host read it too; here it may still refuse
            hardware(wanted.flavor, wanted.image_properties)
            specs.append(wanted)
        except errors.BadRequest as problem:
            run.fail(problem.text)
    by_server = {one.server: one for one in engine.messaging.select(specs, fresh)} if specs else {}
    for run in runs:
        run.selection = by_server.get(run.server.id)


def claim_and_place(
    tx: Connection, engine: Engine, runs: Sequence[R], spec_of: Callable[[R], RequestSpec]
) -> None:
    """Claim for each run the first proposed host that still fits, and the server is there; the
    others ask again or fail with reasons."""
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
    """Claim for each run the first proposed host that still fits; the others ask again or fail with
    reasons.
    ``leaves``: the host that a server leaves, and the migration that holds from now on what it has
    there."""
    requests = {run.server.id: _request(run, spec_of(run)) for run in runs}
    if leaves is not None:
        for run in runs:
            requests[run.server.id].leaves = leaves(run)
            requests[run.server.id].has = spec_of(run).holds
    allocations.claim(tx, list(requests.values()), engine.failed_build_limit, engine.default_zone)
    taken = []
    for run in runs:
        request = requests[run.server.id]
        if request.host is not None:
            metrics.CLAIMS.add("taken")
            assert run.selection is not None
            run.data.claims_lost = 0
            run.data.tried = run.data.tried or bool(request.tried)
            taken.append(
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
    return taken


def _request(run: PlacementRun, spec: RequestSpec) -> allocations.ClaimRequest:
    assert spec.flavor is not None
    wanted = hardware(spec.flavor, spec.image_properties)
    return allocations.ClaimRequest(
        run.server.id,
        run.server.project_id,
        run.server.user_id,
        spec.resources,
        list(run.selection.hosts) if run.selection else [],
        forced=spec.force_host is not None,
        zone=spec.availability_zone,
        group=spec.group,
        hardware=wanted if wanted.needs_assignment else None,
    )


def _retry(run: PlacementRun, refused: str) -> None:
    """Others were first on every host proposed: ask again at once, and after some tries with
    pauses."""
    lost = run.data.claims_lost = run.data.claims_lost + 1
    over = lost - MAX_LOST_CLAIMS
    if over > MAX_LOST_CLAIMS:
        log.warning(
            "server %s: the hosts proposed were refused %d times in a row, the last because of: %s",
            run.server.id,
            lost,
            refused or "no scheduler's answer",
        )
    run.retry_in(0 if over <= 0 else min(MAX_PAUSE_MICROS, (SECOND // 100) * 2 ** min(over, 10)))


def fail_no_valid_host(run: PlacementRun) -> None:
    """No host may take it: the step fails with how many hosts there are for what reason, with what
    the last host said on which it was tried, and for operators with each host by its name."""
    assert run.selection is not None
    by_host = [f"{name}: {why}" for name, why in sorted(run.selection.by_host.items())]
    text, before = f"No valid host was found. {run.selection.reason}", run.data.problem
    if before is not None:
        host = run.data.failed_hosts[-1] if run.data.failed_hosts else ""
        text += f"; the last host tried said: {before.text}"
        by_host.append(f"{host} said: {before.text} {before.details}".rstrip())
    run.fail(text, "\n".join(by_host))


def release_host(tx: Connection, engine: Engine, run: PlacementRun) -> None:
    """Give the claimed host up: what may be there becomes a debt, the host is asked to remove it,
    and the claim is given back when it has."""
    if run.host is not None:
        leave_debt(tx, run, run.host)
    run.set(host=None, availability_zone=None)


def leave_debt(
    tx: Connection, run: PlacementRun, host: str, keeps_files: bool = False, blames: bool = True
) -> None:
    """What may be there of the server becomes a debt, and the next try goes to another host.
    ``keeps_files``: they are the guest's that stays, on shared storage; ``blames``: a failure of
    the host's own says that builds fail there, unless its image is as likely to blame."""
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
    guests.add_debt(tx, run.server.id, run.fence, host=host, may_run=False, keeps_files=keeps_files)
    run.commands.append((host, cleanup_command(run.server.id, run.fence, keep_files=keeps_files)))


def record_successful_build(run: PlacementRun) -> None:
    """The guest was built; written down of a host only where builds had failed before this one."""
    if run.data.tried and run.host is not None:
        run.build_verdicts.append((run.host, 0))
    run.data.tried = False


def reschedule(engine: Engine, run: PlacementRun, problem: StepFailed) -> bool:
    """Begin again on another host, while there are attempts and the failure was the host's own.

    A server that could be built on none of several hosts is itself to blame as likely as they: what
    was counted against them is taken back, so that nobody puts hosts out of use by asking for
    servers that cannot be.
    """
    if not problem.retryable or run.attempt >= engine.max_attempts:
        if len(blamed := set(run.data.blamed)) > 1:
            run.build_verdicts += [(host, 1) for host in sorted(blamed)]
        run.data.blamed = []
        return False
    run.continue_at(None, phase=ActionPhase.FORWARD, attempt=run.attempt + 1, host=None)
    return True
