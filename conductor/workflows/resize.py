# SPDX-License-Identifier: Apache-2.0
"""Resize and cold migration: the server stops, its files travel to another host, and it starts there.

Two names for one story: a migration keeps the flavor. Until the guest has started at the destination every step has
its way back, so that a definite failure leaves the server as it was, at its source; then another destination is tried.
The source keeps its guest, off, until somebody confirms or reverts: two more short stories beside it. The place changes
in ``switch``; from there on silence of the destination is waited out, because the guest may run there.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import states
from common.models import Result
from common.store import guests
from common.store.engine import Connection, now
from common.wire import to_wire
from conductor import debts, guest, moving, networks, placing
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of

#: The same for a server that was resized where it is.
CONFIRM_HERE, REVERT_HERE = "confirm_here", "revert_here"


def _prepare(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "prepare", {"guest": to_wire(moving.spec(engine, run)), **_from_source(engine, run)}


def _from_source(engine: Engine, run: Run) -> dict[str, Any]:
    """Where the destination reads the guest's files, and by which right; nowhere when storage is shared."""
    return {"secret": moving.secret(engine, run), "from": run.data.get("transfer") if moving.is_copied(run) else None}


def _prepared(tx: Connection, run: Run, result: Result) -> None:
    run.set(task_state=states.RESIZE_MIGRATING)
    run.move(status="migrating")


def runs_again(tx: Connection, engine: Engine, run: Run) -> None:
    """From here on the source may run it again."""
    if moving.ran(run):
        guests.want(tx, [run.server.id], guests.RUNNING, True)
        run.set(power_state=states.RUNNING)


def _receive(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "receive", {"guest": to_wire(moving.spec(engine, run)), **_from_source(engine, run)}


def _received(tx: Connection, run: Run, result: Result) -> None:
    run.set(task_state=states.RESIZE_MIGRATED, progress=100)
    run.move(status="post-migrating")


def _bind(engine: Engine, run: Run) -> None:
    networks.rebind_to(engine, run, moving.known_dest(run))


def _bind_back(engine: Engine, run: Run) -> None:
    networks.rebind_to(engine, run, moving.source(run))


def _switch(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        moving.go(tx, run, moving.ran(run))
        run.set(task_state=states.RESIZE_FINISH)


def _switch_back(tx: Connection, engine: Engine, run: Run) -> None:
    if run.data.pop("switched", False):
        moving.go_back(tx, engine, run, runs=False)


def _install(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "install", {"guest": to_wire(moving.spec(engine, run)), "runs": moving.ran(run)}


def installed(tx: Connection, run: Run, result: Result) -> None:
    placing.worked(run)
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)))


def moved(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(launched_at=now(), progress=0)
        run.move(status="finished")


def _as_before(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Its interfaces are what the network service said last, when they were bound back. Where it has started already,
    somebody must look at it, and say whether it stays."""
    if "plugged" in run.data:
        run.set(interfaces=run.data["plugged"])
    if run.host == moving.dest(run):
        run.set(vm_state=states.RESIZED)
        run.move(status="finished")
        return
    moving.back_as_before(tx, engine, run, problem)
    run.set(progress=0)


def _waits(run: Run) -> bool:
    return moving.ran(run) and networks.is_waiting(run)


RESIZE = Workflow("resize", failed=_as_before, steps=(
    Step("place", "first: after it the destination's room is sure, and the migration holds what the source has",
         propose=moving.propose, apply=moving.place, undo=moving.leave),
    Step("offer", "whoever has the secret may read what the guest cannot change: what lies under its disk; once it is "
         "off the disk too", command=moving.offer, at=moving.source, needed=moving.is_copied, final=True),
    Step("prepare", "whatever could fail there fails while the server still runs", command=_prepare, at=moving.dest,
         done=_prepared, abandon=True, reads_source=True),
    Step("stop", "the last moment at which its files may change; on the way back it is started again",
         command=guest.stop, at=moving.source, done=guest.rests, undo=runs_again, undo_command=guest.start,
         needed=moving.ran, final=True),
    Step("copy", "the destination fetches, because it knows what it has", command=_receive, at=moving.dest,
         done=_received, abandon=True, reads_source=True),
    Step("bind", "before it starts there, and as late as that: it is off, and needs no network", outside=_bind,
         apply=networks.keep_plugged, undo_outside=_bind_back, neighbour=networks.NETWORK,
         needed=networks.has_ports),
    Step("switch", "one transaction: the place, the flavor, and which of the two guests may run", apply=_switch,
         undo=_switch_back),
    Step("install", "a definite failure still leads back; when it has succeeded nothing does", command=_install,
         at=moving.dest, done=installed, pivot=True),
    replace(networks.PLUG, needed=_waits),
    Step("run", "its ports are wired now", command=guest.start, done=guest.runs, needed=_waits),
    Step("finish", "the source is kept until somebody has looked at the server here", apply=moved),
))

MIGRATE = replace(RESIZE, name="migrate")


# --- confirm ---
def _confirm(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        if moving.stays(run):
            run.become(CONFIRM_HERE)
            continue
        _know(tx, run)
        run.move(status="confirming")
    for run in debts.settle(tx, [run for run in runs if not run.paused], moving.source):
        confirmed(tx, run)


def confirmed(tx: Connection, run: Run) -> None:
    """There is no way back any more; the server is what its guest is."""
    vm_state = _RESTS.get(run.server.power_state, states.ACTIVE)
    if vm_state == states.STOPPED:
        guests.want(tx, [run.server.id], guests.STOPPED, False)
    run.set(vm_state=vm_state, **moving.counted(run.action.args["new_flavor"]))
    run.move(status="confirmed")


_RESTS = {states.SHUTDOWN: states.STOPPED, states.CRASHED: states.STOPPED, states.POWER_PAUSED: states.PAUSED}


def _know(tx: Connection, run: Run) -> None:
    """Whether both hosts have the same files; asked once."""
    if "shared" not in run.data:
        moving.compare(tx, [run])


CONFIRM_RESIZE = Workflow("confirm_resize", steps=(
    Step("leave", "the guest at the source becomes a debt of its host: one that is down makes nobody wait",
         apply=_confirm, pivot=True),))


# --- revert ---
def _begin(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        if moving.stays(run):
            run.become(REVERT_HERE)
            continue
        _know(tx, run)
        run.data["ran"] = run.server.power_state != states.SHUTDOWN
        run.move(status="reverting")


def ran_there(run: Run) -> bool:
    return bool(run.data.get("ran"))


def ran_before(run: Run) -> bool:
    return bool(run.action.args["before"] != states.STOPPED)


def runs_on(tx: Connection, engine: Engine, run: Run) -> None:
    if not ran_there(run):
        return
    guests.want(tx, [run.server.id], guests.RUNNING, True)
    run.set(power_state=states.RUNNING)


def _turn_back(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        kept = next(row for row in guests.places(tx, run.server.id) if row.host == moving.source(run))
        run.data["old_fitting"] = kept.fitting
        run.data["switched"] = True
        moving.go_back(tx, engine, run, ran_before(run))
        guests.become(tx, run.server.id, moving.known_dest(run), guests.KEPT)


def _turn_forth(tx: Connection, engine: Engine, run: Run) -> None:
    """The source cannot have it: it is where it was resized."""
    if run.data.pop("switched", False):
        moving.stay_there(tx, engine, run, ran_there(run))


def _is_back(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(**moving.counted(run.action.args["old_flavor"]))
        guests.owe(tx, run.server.id, run.fence, host=moving.known_dest(run), may_run=False,
                   keeps_files=bool(run.data.get("shared")))
        moving.returned(tx, run)
        run.data["no_way_back"] = True


def _install_back(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "install", {"guest": to_wire(moving.old_spec(engine, run)), "runs": ran_before(run)}


def _leave(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in debts.settle(tx, runs, moving.known_dest):
        run.set(vm_state=states.ACTIVE if ran_before(run) else states.STOPPED)
        run.move(status="reverted")


def _not_reverted(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """To be confirmed or reverted, as it was, whether or not it could be started again there. When the source has it
    already, somebody must look at it."""
    if "plugged" in run.data:
        run.set(interfaces=run.data["plugged"])
    if run.server.host == moving.source(run):
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
        guests.want(tx, [run.server.id], guests.STOPPED, False)
        run.move(status="error")
        return
    if run.data.pop("undo_failed", None):
        guests.want(tx, [run.server.id], guests.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)
    run.set(vm_state=states.RESIZED)
    run.move(status="finished")


def _waits_back(run: Run) -> bool:
    return ran_before(run) and networks.is_waiting(run)


REVERT_RESIZE = Workflow("revert_resize", failed=_not_reverted, steps=(
    Step("begin", "what is known of the two hosts is asked once", apply=_begin),
    Step("restart", "only on the way back: it runs on where it is", undo=runs_on, undo_command=guest.start,
         needed=ran_there),
    Step("stop", "nothing may run there when it starts at the source; of a host whose guests are dead nothing does",
         command=guest.stop, at=moving.dest, done=guest.rests, dead_is_done=True),
    Step("bind", "as for the way there", outside=_bind_back, apply=networks.keep_plugged,
         undo_outside=_bind, neighbour=networks.NETWORK, needed=networks.has_ports),
    Step("switch", "from here on only the source may run it", apply=_turn_back, undo=_turn_forth),
    Step("install", "from the record, not from what the host remembers; when it has succeeded nothing leads back",
         command=_install_back, at=moving.source, done=installed, pivot=True),
    Step("settle", "the source has it: the destination owes what it kept", apply=_is_back),
    replace(networks.PLUG, needed=_waits_back),
    Step("run", "its ports are wired now", command=guest.start, done=guest.runs, needed=_waits_back),
    Step("leave", "last: the server runs, and a destination that is down makes nobody wait", apply=_leave),
))
