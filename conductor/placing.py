# SPDX-License-Identifier: Apache-2.0
"""Placing servers: the scheduler proposes, the conductor claims the first host that still fits.

A claim, its guest record and the server's new place commit together. "No valid host" is only said from a
snapshot that was read after the last failed claim; that no scheduler answers is waiting, not a failure.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from common.models import Flavor, RequestSpec
from common.store import allocations, guests
from common.store.engine import Connection
from common.wire import from_wire
from conductor.saga import Engine, Run, StepFailed, debt_command

SpecOf = Callable[[Run], RequestSpec]


def propose(engine: Engine, runs: Sequence[Run], spec_of: SpecOf) -> None:
    """Ask for hosts for all of them in one call.

    Raises:
        NoAnswer: no scheduler answers.
    """
    fresh = any(run.data.get("claim_lost") for run in runs)
    by_server = {selection.server: selection for selection in
                 engine.post.select([spec_of(run) for run in runs], fresh)}
    for run in runs:
        run.selection = by_server.get(run.server.id)


def claim(tx: Connection, runs: Sequence[Run], spec_of: SpecOf) -> None:
    """Claim for each run the first proposed host that still fits; the others ask again or fail with reasons."""
    wishes = {}
    for run in runs:
        hosts = run.selection.hosts if run.selection else []
        wishes[run.server.id] = allocations.Wish(run.server.id, run.server.project_id, run.server.user_id,
                                                 spec_of(run).resources, list(hosts))
    allocations.claim(tx, list(wishes.values()))
    placed = []
    for run in runs:
        host = wishes[run.server.id].host
        if host is not None:
            assert run.selection is not None
            run.set(host=host, availability_zone=run.selection.zones.get(host))
            placed.append({"server_id": run.server.id, "host": host, "fence": run.action.fence})
        elif run.selection is None or run.selection.hosts:
            run.again_in(0, claim_lost=True)
        else:
            by_host = "\n".join(f"{name}: {why}" for name, why in sorted(run.selection.by_host.items()))
            run.fail(f"No valid host was found. {run.selection.reason}", by_host)
    if placed:
        guests.add(tx, placed)


def leave(tx: Connection, engine: Engine, run: Run) -> None:
    """Give the claimed host up: what may be there becomes a debt, the host is asked to pay it, and the claim is given
    back when it has."""
    host = run.host
    if host is not None:
        run.data.setdefault("failed_hosts", []).append(host)
        guests.owe(tx, run.server.id, run.action.fence, host=host, may_run=False)
        run.commands.append((host, debt_command(run.server.id, run.action.fence, 0)))
    run.set(host=None, availability_zone=None)


def elsewhere(engine: Engine, run: Run, problem: StepFailed) -> bool:
    """Begin again on another host, while there are attempts and the failure was the host's own."""
    if not problem.retryable or run.attempt >= engine.max_attempts:
        return False
    run.due(None, phase="do", attempt=run.attempt + 1, host=None)
    return True


def spec(run: Run, zone: str | None, host: str | None) -> RequestSpec:
    """What the server wants of a host."""
    server = run.server
    flavor = from_wire(Flavor, server.flavor)
    return RequestSpec(
        server=server.id, project_id=server.project_id,
        resources={"VCPU": flavor.vcpus, "MEMORY_MB": flavor.memory_mb, "DISK_GB": flavor.disk_gb},
        flavor=flavor, image_id=server.image_id, availability_zone=zone, force_host=host,
        excluded=list(run.data.get("failed_hosts", ())), hints=server.scheduler_hints)
