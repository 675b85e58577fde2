# SPDX-License-Identifier: Apache-2.0
"""What all moves share: the two places of a server on its way, and what each of them must hold.

Used by the workflows resize, live_migrate and evacuate. The action's args say what was asked (migration, source,
old_flavor, new_flavor, host, forced), its data what was found: dest, zone, fitting, shared, and the hosts' addresses.
Must stay true: at most one of the two guests may run; the source's allocation is the migration's from the claim of the
destination on; the server is where ``switch`` has put it, under a fence that rose with it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import errors, local_disks, states
from common.hardware import hardware, resources
from common.models import Fitting, Flavor, GuestSpec, Interface, RequestSpec
from common.states import BY_WORKFLOW
from common.store import allocations, guests, hosts, zones
from common.store.engine import Connection
from common.wire import from_wire, to_wire
from conductor import guest, placing
from conductor.saga import Engine, Run, StepFailed


def source(run: Run) -> str:
    """The host that the server leaves."""
    return str(run.action.args["source"])


def dest(run: Run) -> str | None:
    """The host that it goes to; None while none is claimed."""
    host: str | None = run.data.get("dest") or run.action.args.get("dest")
    return host


def known_dest(run: Run) -> str:
    """The same, where one is claimed."""
    host = dest(run)
    assert host is not None, "a destination was claimed before"
    return host


def ran(run: Run) -> bool:
    """Did the server run when it was asked to move, so that it runs afterwards?"""
    return bool(run.action.args["was"] != states.STOPPED)


def is_copied(run: Run) -> bool:
    """Must its files travel? On shared storage they are there."""
    return not run.data.get("shared")


#: The story of a resize that stays on its host; it begins where the place is claimed.
HERE = "resize_here"


# --- choosing the destination ---
def spec_of(run: Run) -> RequestSpec:
    """What the server wants of a destination: its new flavor, its pinned zone, and another host."""
    args = run.action.args
    wanted = placing.spec(run, run.server.pinned_availability_zone, args.get("host"), forced=bool(args.get("forced")),
                          flavor=from_wire(Flavor, args["new_flavor"]))
    if run.left.get("may_stay") or run.data.get("may_stay"):
        return replace(wanted, holds_on=source(run), holds=old_resources(run))
    return replace(wanted, excluded=[*wanted.excluded, source(run)])


def old_resources(run: Run) -> dict[str, int]:
    """What the server has at the source."""
    return resources(from_wire(Flavor, run.action.args["old_flavor"]), _properties(run))


def _properties(run: Run) -> dict[str, str]:
    return dict((run.server.image or {}).get("properties", {}))


def propose(engine: Engine, runs: Sequence[Run]) -> None:
    """Ask for destinations. A resize may stay where it is if that is allowed, and the server has no parts of its host
    for itself: it would need the old ones and the new ones."""
    placing.look_for_debts(engine, runs)
    for run in runs:
        try:
            run.left["may_stay"] = engine.may_resize_here and run.action.name == "resize" and not _has_parts(run)
            if run.action.name != "evacuate":
                secret(engine, run)
        except errors.Problem as problem:           # hardware that no host makes, or a cloud without a key
            run.fail(problem.text)
    asking = [run for run in runs if not run.problem]
    if asking:
        placing.propose(engine, asking, spec_of)


def _has_parts(run: Run) -> bool:
    """Does it have parts of its host for itself, before or afterwards?"""
    return any(hardware(from_wire(Flavor, run.action.args[which]), _properties(run)).needs_fitting
               for which in ("old_flavor", "new_flavor"))


def claim(tx: Connection, engine: Engine, runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Claim a destination for each, where its guest arrives; the migration holds now what it has at the source.
    Returns those that got one, each with what its source says of itself."""
    taken = []
    for run, place in placing.take(tx, engine, runs, spec_of, lambda run: (source(run), run.action.args["migration"])):
        keep_place(run, place)
        if place.host == source(run):
            run.move(status="pre-migrating", dest_host=place.host)
            continue
        taken.append((run, place))
        guests.hold(tx, run.server.id, source(run), run.action.args["migration"])
        run.move(status="pre-migrating", dest_host=place.host)
    if taken:
        guests.add(tx, [{**place.guest(run), "wanted": guests.ARRIVING, "may_run": False} for run, place in taken])
    return compare(tx, [run for run, _ in taken])


def place(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    """``claim`` for a server whose files travel unless both hosts have them. One that stays has a story of its own."""
    for run, _ in claim(tx, engine, runs):
        if is_copied(run) and not run.data["transfer"]:
            run.fail(f"Host {source(run)} gives no files to other hosts; its agent's log says why.")
    for run in runs:
        if run.data.get("placed") and stays(run):
            run.become(HERE)


def keep_place(run: Run, place: placing.Place) -> None:
    """Write down where it goes."""
    run.data.update(placed=True, dest=place.host, source=source(run), zone=place.zone,
                    fitting=to_wire(place.fitting) if place.fitting is not None else None)


def compare(tx: Connection, runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """What the two hosts of each say of themselves: whether they share storage, how one reaches the other. Returns them
    with what their sources say."""
    if not runs:
        return []
    found = hosts.facts_of(tx, {host for run in runs for host in (source(run), known_dest(run))})
    for run in runs:
        here, there = found.get(source(run), {}), found.get(known_dest(run), {})
        run.data.update(shared=bool(here.get("storage")) and here.get("storage") == there.get("storage"),
                        transfer=here.get("transfer", ""), to=there.get("migration", {}))
    return [(run, found.get(source(run), {})) for run in runs]


def stays(run: Run) -> bool:
    """Is the server resized where it is?"""
    return dest(run) == source(run)


def leave(tx: Connection, engine: Engine, run: Run, blames: bool = True) -> None:
    """Give the destination up: the server is where it was, and holds again what it had there."""
    if not run.data.pop("placed", False):
        return
    if stays(run):
        allocations.stay(tx, run.action.args["migration"], run.server.id, source(run), old_resources(run))
        run.move(dest_host=None)
        return
    run.raise_fence()               # what the destination does for it still is cancelled by that
    placing.give_up(tx, run, known_dest(run), bool(run.data.get("shared")), blames)
    returned(tx, run)


# --- the guest at its two places ---
def spec(engine: Engine, run: Run) -> GuestSpec:
    """The guest as it is at the destination."""
    made = guest.spec(engine, run)
    found = run.data.get("arriving")
    return replace(_of_flavor(made, run, "new_flavor"), fitting=_fitting(run.data.get("fitting")),
                   interfaces=[from_wire(Interface, one) for one in found] if found is not None else made.interfaces)


def old_spec(engine: Engine, run: Run) -> GuestSpec:
    """The guest as it was at the source."""
    made = guest.spec(engine, run)
    return replace(_of_flavor(made, run, "old_flavor"), fitting=made.fitting
                   if "old_fitting" not in run.data else _fitting(run.data["old_fitting"]))


def _of_flavor(made: GuestSpec, run: Run, which: str) -> GuestSpec:
    """The guest with the disks of this flavor too."""
    flavor = from_wire(Flavor, run.action.args[which])
    return replace(made, flavor=flavor, disks=local_disks.of(flavor, run.server.disks))


def _fitting(kept: dict[str, Any] | None) -> Fitting | None:
    return from_wire(Fitting, kept) if kept else None


def secret(engine: Engine, run: Run) -> str:
    """What opens the guest's files at the source for the destination of this attempt; it is nowhere written down."""
    return engine.vault.derive(f"move {run.action.id} {run.attempt}")


def offer(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    """Have the source let the destination read the guest's files."""
    return "offer", {"secret": secret(engine, run)}


def go(tx: Connection, run: Run, runs: bool) -> None:
    """The server is at its destination: from here on its guest there may run, and the one at the source is kept off."""
    run.data.update(old_fitting=run.server.fitting, switched=True)
    _change_place(tx, run, known_dest(run), runs, source(run), guests.KEPT)
    run.set(availability_zone=run.data.get("zone"), **sized(run.action.args["new_flavor"]))


def _change_place(tx: Connection, run: Run, host: str, runs: bool, other: str, state: str) -> None:
    """The server is on this host, where its guest may run if ``runs``; the one on the other host is ``state``."""
    run.raise_fence()
    guests.become(tx, run.server.id, other, state, may_run=False)
    guests.become(tx, run.server.id, host, guests.RUNNING if runs else guests.STOPPED, may_run=runs, fence=run.fence)
    run.set(host=host)


def _zone_of(tx: Connection, engine: Engine, host: str) -> str:
    return zones.hosts(tx, [host]).get(host, engine.default_zone)


def go_back(tx: Connection, engine: Engine, run: Run, runs: bool) -> None:
    """The server is at its source again, where its guest may run if ``runs``; the one at the destination may not."""
    _change_place(tx, run, source(run), runs, known_dest(run), guests.ARRIVING)
    run.set(availability_zone=_zone_of(tx, engine, source(run)), **sized(run.action.args["old_flavor"]))


def stay_there(tx: Connection, engine: Engine, run: Run, runs: bool) -> None:
    """``go_back`` undone: the server is at its destination, and its source keeps its guest."""
    _change_place(tx, run, known_dest(run), runs, source(run), guests.KEPT)
    run.set(availability_zone=_zone_of(tx, engine, known_dest(run)), **sized(run.action.args["new_flavor"]))


def returned(tx: Connection, run: Run) -> None:
    """The server holds again what the migration held at the source."""
    guests.hold(tx, run.server.id, source(run), None)
    allocations.hand_back(tx, run.action.args["migration"], run.server.id, source(run))


def sized(flavor: dict[str, Any]) -> dict[str, Any]:
    """The columns of a server of this flavor, but for what the quota counts."""
    return {"flavor": flavor, "flavor_id": flavor["id"], "disk_gb": from_wire(Flavor, flavor).disk_gb}


def counted(flavor: dict[str, Any]) -> dict[str, int]:
    """What the quota counts of a server of this flavor; of one that moves, the larger of both."""
    return {"vcpus": flavor["vcpus"], "memory_mb": flavor["memory_mb"]}


# --- the end ---
def back_as_before(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Another destination while there are attempts and the failure was the host's own; else the server is as before.
    One that could not be started again is off, and somebody must look at it."""
    undone = [told.partition(":")[0] for told in run.data.get("undo_failed", ())]
    if not undone and placing.elsewhere(engine, run, problem):
        for found in ("arriving", "handed_over"):
            run.data.pop(found, None)
        run.move(status="accepted", dest_host=None)
        run.set(task_state=BY_WORKFLOW[run.action.workflow].during)
        return
    if {"stop", "return", "revive"} & {*undone}:
        guests.want(tx, [run.server.id], guests.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)
    run.set(**counted(run.action.args["old_flavor"]))
    run.move(status="error")
