# SPDX-License-Identifier: Apache-2.0
"""Placing servers: the scheduler proposes, the conductor claims the first host that still fits.

A claim, its guest record and the server's new place commit together. "No valid host" is only said from a
snapshot that was read after the last failed claim; that no scheduler answers is waiting, not a failure.
Whether builds work on a host is written down here too: where several fail in a row, claims leave the host out.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common import errors
from common.clock import SECOND
from common.hardware import Hardware, hardware
from common.models import Fitting, Flavor, ImageRef, RequestSpec
from common.request_spec import of
from common.store import allocations, guests
from common.store.engine import Connection
from common.wire import from_wire, to_wire
from conductor.saga import Engine, Run, StepFailed, debt_command

log = logging.getLogger(__name__)
SpecOf = Callable[[Run], RequestSpec]
AT_ONCE = 3                         #: claims lost to others in a row before the next try waits
PAUSE_AT_MOST = 4 * SECOND


def propose(engine: Engine, runs: Sequence[Run], spec_of: SpecOf) -> None:
    """Ask for hosts for all of them in one call. One whose flavor or image asks for what no host makes, as it did not
    when the server was made, has failed.

    Raises:
        NoAnswer: no scheduler answers.
    """
    fresh, specs = any(run.data.get("claims_lost") for run in runs), []
    for run in runs:
        try:
            wanted = spec_of(run)
            assert wanted.flavor is not None
            hardware(wanted.flavor, wanted.image_properties)    # claim and host read it too; here it may still refuse
            specs.append(wanted)
        except errors.BadRequest as problem:
            run.fail(problem.text)
    by_server = {selection.server: selection for selection in engine.post.select(specs, fresh)} if specs else {}
    for run in runs:
        run.selection = by_server.get(run.server.id)


def claim(tx: Connection, engine: Engine, runs: Sequence[Run], spec_of: SpecOf) -> None:
    """Claim for each run the first proposed host that still fits, and the server is there; the others ask again or
    fail with reasons."""
    placed: list[dict[str, Any]] = []
    for run, place in take(tx, engine, runs, spec_of):
        run.set(host=place.host, availability_zone=place.zone)
        run.claimed = place.fitting
        placed.append(place.guest(run))
    if placed:
        guests.add(tx, placed)


class Place(NamedTuple):
    """What a claim got."""

    host: str
    zone: str | None
    fitting: Fitting | None

    def guest(self, run: Run) -> dict[str, Any]:
        """The record of the guest that the server has or will have there."""
        return {"server_id": run.server.id, "host": self.host, "fence": run.fence,
                "fitting": to_wire(self.fitting) if self.fitting is not None else None}


def take(tx: Connection, engine: Engine, runs: Sequence[Run], spec_of: SpecOf,
         leaves: Callable[[Run], tuple[str, str]] | None = None) -> list[tuple[Run, Place]]:
    """Claim for each run the first proposed host that still fits; the others ask again or fail with reasons.
    ``leaves``: the host that a server leaves, and the migration that holds from now on what it has there."""
    wishes = {run.server.id: _wish(run, spec_of(run)) for run in runs}
    for run in runs if leaves is not None else ():
        wishes[run.server.id].leaves = leaves(run)        # type: ignore[misc]  # it was asked for in this line
        wishes[run.server.id].has = spec_of(run).holds
    allocations.claim(tx, list(wishes.values()), engine.patience, engine.default_zone)
    taken = []
    for run in runs:
        wish = wishes[run.server.id]
        if wish.host is not None:
            assert run.selection is not None
            run.data.pop("claims_lost", None)
            if wish.tried:
                run.data["tried"] = True
            taken.append((run, Place(wish.host, run.selection.zones.get(wish.host), wish.fitting)))
        elif run.selection is None or run.selection.hosts:
            _ask_again(run, wish)
        else:
            refuse(run)
    return taken


def look_for_debts(engine: Engine, runs: Sequence[Run]) -> None:
    """A host that has not removed an old guest of the server yet holds its resources still, and gets no second one."""
    for debt in engine.store.read(lambda tx: guests.debts_of(tx, [run.server.id for run in runs])):
        for run in runs:
            if run.server.id == debt.server_id:
                run.left.setdefault("owing", []).append(debt.host)


def refuse(run: Run) -> None:
    """No host may take it: the step fails with how many hosts there are for what reason, with what the last host said
    on which it was tried, and for operators with each host by its name."""
    assert run.selection is not None
    by_host = [f"{name}: {why}" for name, why in sorted(run.selection.by_host.items())]
    text, before = f"No valid host was found. {run.selection.reason}", run.data.get("problem")
    if before:
        host = run.data.get("failed_hosts", [""])[-1]
        text += f"; the last host tried said: {before['text']}"
        by_host.append(f"{host} said: {before['text']} {before['details']}".rstrip())
    run.fail(text, "\n".join(by_host))


def _wish(run: Run, spec: RequestSpec) -> allocations.Wish:
    hosts = list(run.selection.hosts) if run.selection else []
    assert spec.flavor is not None
    wanted = hardware(spec.flavor, spec.image_properties)
    parts: Hardware | None = wanted if wanted.needs_fitting else None
    return allocations.Wish(run.server.id, run.server.project_id, run.server.user_id, spec.resources, hosts,
                            forced=spec.force_host is not None, zone=spec.availability_zone, group=spec.group,
                            hardware=parts)


def _ask_again(run: Run, wish: allocations.Wish) -> None:
    """Others were first on every host proposed: at once, but not over and over without a breath."""
    lost = int(run.data.get("claims_lost", 0)) + 1
    pause = 0 if lost <= AT_ONCE else min(PAUSE_AT_MOST, (SECOND // 100) * 2 ** min(lost - AT_ONCE, 10))
    if lost > 2 * AT_ONCE:
        log.warning("server %s: the hosts proposed were refused %d times in a row, the last because of: %s",
                    run.server.id, lost, wish.refused or "no scheduler's answer")
    run.again_in(pause, claims_lost=lost)


def leave(tx: Connection, engine: Engine, run: Run) -> None:
    """Give the claimed host up: what may be there becomes a debt, the host is asked to pay it, and the claim is given
    back when it has."""
    if run.host is not None:
        give_up(tx, run, run.host)
    run.set(host=None, availability_zone=None)


def give_up(tx: Connection, run: Run, host: str, keeps_files: bool = False, blames: bool = True) -> None:
    """What may be there of the server becomes a debt, and the next try goes elsewhere. ``keeps_files``: they are the
    guest's that stays, on shared storage; ``blames``: a failure of the host's own says that builds fail there."""
    if blames and run.problem is not None and run.problem.retryable:
        run.verdicts.append((host, -1))
        run.data.setdefault("blamed", []).append(host)
    run.data.pop("tried", None)
    run.data.setdefault("failed_hosts", []).append(host)
    guests.owe(tx, run.server.id, run.fence, host=host, may_run=False, keeps_files=keeps_files)
    run.commands.append((host, debt_command(run.server.id, run.fence, 0, keeps_files)))


def worked(run: Run) -> None:
    """The guest was built; said of a host only where builds had failed before this one."""
    if run.data.pop("tried", False) and run.host is not None:
        run.verdicts.append((run.host, 0))


def elsewhere(engine: Engine, run: Run, problem: StepFailed) -> bool:
    """Begin again on another host, while there are attempts and the failure was the host's own.

    A server that could be built on none of several hosts is itself to blame as likely as they: what was said of them is
    taken back, so that nobody puts hosts out of use by asking for servers that cannot be.
    """
    if not problem.retryable or run.attempt >= engine.max_attempts:
        if len(blamed := set(run.data.pop("blamed", ()))) > 1:
            run.verdicts += [(host, 1) for host in sorted(blamed)]
        return False
    run.due(None, phase="do", attempt=run.attempt + 1, host=None)
    return True


def spec(run: Run, zone: str | None = None, host: str | None = None, *, forced: bool = False, is_rebuild: bool = False,
         flavor: Flavor | None = None) -> RequestSpec:
    """What the server wants of a host. host: the only one that may be; forced: whatever the operator's filters say;
    flavor: another than its own."""
    server = run.server
    image = from_wire(ImageRef, server.image) if server.image else None
    return of(server.id, server.project_id, flavor or from_wire(Flavor, server.flavor), image,
              hints=server.scheduler_hints, availability_zone=zone, force_host=host if forced else None,
              requested_host=None if forced else host, is_rebuild=is_rebuild,
              excluded=[*run.data.get("failed_hosts", ()), *run.left.get("owing", ())])
