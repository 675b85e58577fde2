# SPDX-License-Identifier: Apache-2.0
"""Evacuate: a server whose host is dead is made again on another one, of its image, or of its files where those are
on shared storage.

Silence proves nothing: a fencing hook must have made sure that the host's guests are dead, or an admin must have said
so by forcing the host down. The old guest is kept in the records until the new one stands, so that a failure loses
nothing; then it is a debt, which the host pays when it returns.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import errors, states
from common.models import Result
from common.store import actions, guests, hosts, migrations, services
from common.store.engine import Connection, now
from common.wire import to_wire
from conductor import guest, moving, networks, placing
from conductor.debts import BURST_POLL
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, debt_command

FENCING = "fencing"


def _fence(engine: Engine, run: Run) -> None:
    """Make sure that nothing runs on the host, unless there is proof already."""
    host = moving.source(run)
    dead, up, session = engine.store.read(lambda tx: (
        services.are_dead(tx, host), services.is_up(tx, host), hosts.sessions(tx, [host]).get(host, 0)))
    run.left["session"] = run.data.get("session", session)
    if dead:
        return
    if up:
        raise errors.Conflict(f"Compute service of {host} is still in use.")
    if engine.fence is None:
        raise errors.Conflict(services.NO_PROOF.format(host=host))
    engine.fence(host)
    run.left["fenced"] = True


HAS_COME_BACK = "Host {host} has come back meanwhile; the server is there."


def _fenced(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        if not run.data.pop("fenced", False):
            continue
        services.are_dead(tx, moving.source(run), locked=True)      # a hello waits from here on, or was before
        if _session(tx, run) == run.data["session"]:
            services.fence(tx, moving.source(run))
        else:
            run.fail(HAS_COME_BACK.format(host=moving.source(run)))


def _claim(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    ready = [run for run in runs if _may_begin(tx, run)]
    taken = placing.take(tx, engine, ready, moving.spec_of) if ready else []
    for run, place in taken:
        moving.keep_place(run, place)
        run.raise_fence()
        _keep_old(tx, run)
        run.set(host=place.host, availability_zone=place.zone)
        run.move(status="pre-migrating", dest_host=place.host)
    if taken:
        guests.add(tx, [{**place.guest(run), "wanted": guests.RUNNING if _runs(run) else guests.STOPPED,
                         "may_run": _runs(run)} for run, place in taken])
        for run, _ in moving.compare(tx, [run for run, _ in taken]):
            _check(run)


def _check(run: Run) -> None:
    """Who says where the files are must be right: a disk would be lost, or missed."""
    told = run.action.args.get("shared")
    if told is not None and told != run.data["shared"]:
        run.fail("The server's files are on storage that its new host shares." if run.data["shared"] else
                 "The server's files are not on storage that its new host shares.")


def _may_begin(tx: Connection, run: Run) -> bool:
    before = run.data.get("after")
    if before and actions.busy_until(tx, before):
        run.again_in(BURST_POLL)            # the old burst may still write; what it leaves must be found
        return False
    if not services.are_dead(tx, moving.source(run), locked=True):
        run.fail(f"Host {moving.source(run)} is not forced down any more; the server is there.")
        return False
    if _session(tx, run) != run.data["session"]:
        run.fail(HAS_COME_BACK.format(host=moving.source(run)))
        return False
    return True


def _session(tx: Connection, run: Run) -> int:
    return hosts.sessions(tx, [moving.source(run)]).get(moving.source(run), 0)


def _look_back(tx: Connection, engine: Engine, run: Run) -> None:
    """A host that has said hello since is no longer dead; what it was told to keep off runs there again."""
    run.data["returned"] = "session" in run.data and _session(tx, run) != run.data["session"]


def _has_returned(run: Run) -> bool:
    return bool(run.data.get("returned")) and run.action.args["was"] == states.ACTIVE


def _keep_old(tx: Connection, run: Run) -> None:
    """The guest where the server was is kept; what an earlier move has left elsewhere is a debt."""
    run.data["old"] = {"zone": run.server.availability_zone}
    for row in guests.places(tx, run.server.id):
        if row.host == moving.source(run):
            run.data["old"] |= {"wanted": row.wanted}
        elif row.wanted != guests.ABSENT:
            guests.owe(tx, run.server.id, run.fence, host=row.host, may_run=False,
                       keeps_files=migrations.share_files(tx, row.host, moving.source(run)))
    guests.become(tx, run.server.id, moving.source(run), guests.KEPT, may_run=False)


def _leave_dest(tx: Connection, engine: Engine, run: Run) -> None:
    """Give the destination up: the server is where it was, and as dead as before."""
    if not run.data.pop("placed", False):
        return
    run.raise_fence()
    placing.give_up(tx, run, moving.known_dest(run), keeps_files=bool(run.data.get("shared")))
    old = run.data.pop("old")
    if "wanted" in old:
        guests.become(tx, run.server.id, moving.source(run), old["wanted"], may_run=old["wanted"] == guests.RUNNING)
    run.set(host=moving.source(run), availability_zone=old["zone"])


def _runs(run: Run) -> bool:
    """Is it started there? A stopped server stays off; since 2.95 every one does."""
    return moving.ran(run) and not run.action.args.get("stopped")


def _bind(engine: Engine, run: Run) -> None:
    networks.rebind_to(engine, run, moving.known_dest(run))


def _bind_back(engine: Engine, run: Run) -> None:
    networks.rebind_to(engine, run, moving.source(run))


def _build(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    """Of its files where they are; else of its image."""
    spec = {"guest": to_wire(moving.spec(engine, run))}
    if run.data.get("shared"):
        return "install", {**spec, "runs": _runs(run)}
    return ("ensure_guest", spec) if _runs(run) else ("rebuild", {**spec, "runs": False})


def _built(tx: Connection, run: Run, result: Result) -> None:
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)), launched_at=now())
    placing.worked(run)


def _owe_old(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        shared = bool(run.data.get("shared"))
        guests.owe(tx, run.server.id, run.fence, host=moving.source(run), may_run=False, keeps_files=shared)
        run.commands.append((moving.source(run), debt_command(run.server.id, run.fence, 0, shared)))
        run.set(vm_state=states.ACTIVE if _runs(run) else states.STOPPED)
        run.move(status="done")


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Another host while there are attempts; else as before, and the action's event says why."""
    if "plugged" in run.data:
        run.set(interfaces=run.data["plugged"])
    if run.data.get("returned"):
        problem = StepFailed(str(problem), problem.details)
    moving.back_as_before(tx, engine, run, problem)
    if run.moved.get("status") == "error":
        run.move(status="failed")


def _waits(run: Run) -> bool:
    return _runs(run) and networks.is_waiting(run)


EVACUATE = Workflow("evacuate", failed=_failed, steps=(
    Step("revive", "only on the way back: its host has returned meanwhile, and runs it again", undo=_look_back,
         undo_command=guest.start, at=moving.source, needed=_has_returned),
    Step("fence", "before anything: while its guests may run there is nothing to be made again", outside=_fence,
         apply=_fenced, neighbour=FENCING),
    Step("place", "the old guest is kept in the records, so that a failure leads back", propose=moving.propose,
         apply=_claim, undo=_leave_dest),
    Step("bind", "when the host is known", outside=_bind, apply=networks.keep_plugged,
         undo_outside=_bind_back, neighbour=networks.NETWORK, needed=networks.has_ports),
    Step("build", "as a new server, or of the files that are there", command=_build, at=moving.dest, done=_built),
    Step("plug", networks.PLUG.why, outside=networks.look, apply=networks.await_wired, neighbour=networks.NETWORK,
         needed=_waits),
    Step("run", "its ports are wired now", command=guest.start, done=guest.runs, needed=_waits),
    Step("leave", "last: the new guest stands, and the old one is a debt", apply=_owe_old, pivot=True),
))
