# SPDX-License-Identifier: Apache-2.0
"""Live migration: the guest goes to another host while it runs.

Its CPUs run on one side at any moment; the hypervisors hand them over. What became of that is decided by asking both:
the source says that it has the guest no more, the destination that it has it, and only then does the place change. Had
neither it, the source would start it from its disk. Ports are bound at both places meanwhile, so that the guest finds
its network where it arrives.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import states
from common.models import Result
from common.store import migrations
from common.store.engine import Connection
from common.wire import to_wire
from conductor import debts, moving, networks, placing
from conductor.saga import Engine, Run, Step, StepFailed, Workflow

ABORTED = "The migration was aborted."        #: what the source says when somebody wished it


def _claim(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run, source in moving.claim(tx, engine, runs):
        run.data.update(cpu=source.get("cpu_info") or {}, diskless=bool(source.get("diskless")))
        run.move(status="preparing")
        _check(run)


def _check(run: Run) -> None:
    """What can be said against it without asking the hosts."""
    block, shared = run.action.args.get("block_migration"), bool(run.data["shared"])
    if not run.data["to"].get("uri"):
        run.fail(f"Host {moving.dest(run)} takes no servers in while they run; set [migration] live_migration_uri "
                 "there, or migrate the server while it is off.", retryable=True)
    elif block is True and shared:
        run.fail("Block migration cannot be used with shared storage.")
    elif block is False and not shared and not run.data["diskless"]:
        run.fail("The hosts share no storage; ask for a block migration, or leave that to Kilonova.")


def _prepare(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "prepare_arrival", {"guest": to_wire(moving.spec(engine, run)), "from": run.data.get("transfer"),
                               "secret": moving.secret(engine, run), "shared": run.data["shared"],
                               "cpu": run.data.get("cpu", {})}


def _prepared(tx: Connection, run: Run, result: Result) -> None:
    run.data["to"] = {**run.data["to"], **result.data}


def _give_up(tx: Connection, engine: Engine, run: Run) -> None:
    """That two hosts do not go together says nothing of either."""
    moving.leave(tx, engine, run, blames=False)


def _heed(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    """What was wished before the hosts could be told."""
    moves = migrations.open_of(tx, [run.server.id for run in runs])
    for run in runs:
        if moves[run.server.id].wish == migrations.ABORT:
            run.fail(ABORTED)


def _migrate(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "live_migrate", {"guest": to_wire(moving.spec(engine, run)), "to": run.data["to"],
                            "shared": run.data["shared"]}


def _begun(tx: Connection, runs: Sequence[Run]) -> None:
    for run in runs:
        run.move(status="running")


def _migrated(tx: Connection, run: Run, result: Result) -> None:
    run.data["handed_over"] = True
    run.move(status="post-migrating")


def _arrive(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "arrived", {"guest": to_wire(moving.spec(engine, run))}


def _drop(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "ensure_absent", {"keep_files": bool(run.data.get("shared"))}


def _arrived(tx: Connection, run: Run, result: Result) -> None:
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)))


def _is_lost(run: Run) -> bool:
    """Has the source given it up, so that on the way back it has only its disk?"""
    return bool(run.data.get("handed_over"))


def _start_again(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "install", {"guest": to_wire(moving.old_spec(engine, run)), "runs": True}


def _switch(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        moving.go(tx, run, runs=True)
        placing.worked(run)


def _leave(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    debts.settle(tx, runs, moving.source)


def _done(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        run.set(progress=0)
        run.move(status="completed")


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """It is as before; one that was lost on the way was started anew, and is not sent on another. Nothing fails one
    that has moved."""
    run.set(progress=0)
    if _is_lost(run):
        run.set(vm_state=states.ACTIVE, power_state=states.RUNNING)
        problem = StepFailed(str(problem), problem.details)
    moving.back_as_before(tx, engine, run, problem)
    if run.moved.get("status") == "error" and str(problem) == ABORTED:
        run.move(status="cancelled")


LIVE_MIGRATE = Workflow("live_migrate", failed=_failed, steps=(
    Step("place", "first: after it the destination's room is sure, and the migration holds what the source has",
         propose=moving.propose, apply=_claim, undo=_give_up),
    Step("offer", "of a guest that runs only what it cannot change", command=moving.offer, at=moving.source,
         final=True),
    Step("prepare", "the destination looks whether it can take the guest, before anything of it moves",
         command=_prepare, at=moving.dest, done=_prepared, abandon=True, reads_source=True),
    Step("bind_there", "before it runs there, while the ports still work where it is", outside=networks.bind_there,
         undo_outside=networks.withdraw_there, neighbour=networks.NETWORK,
         needed=networks.has_ports),
    Step("heed", "the last moment at which nothing has to be called off", apply=_heed),
    Step("return", "only on the way back, when it is nowhere: it starts from its disk where that is whole",
         undo_command=_start_again, at=moving.source, needed=_is_lost),
    Step("migrate", "the hypervisors hand it over; a source that is dead leaves the answer to the destination",
         command=_migrate, at=moving.source, before=_begun, done=_migrated, dead_is_done=True),
    Step("arrive", "the destination says that it has it; only that makes it its place. Else it gives up what it may "
         "have, before the source starts it again", command=_arrive, at=moving.dest, done=_arrived, undo_command=_drop),
    Step("switch", "one transaction: the place, and which of the two guests may run", apply=_switch, pivot=True),
    Step("activate", "at once: from now on its frames are sent there", outside=networks.activate_there,
         apply=networks.written, neighbour=networks.NETWORK, needed=networks.has_ports),
    Step("leave", "what the source has of it is a debt", apply=_leave),
    Step("let_go", "the source's bindings of its ports, when nothing runs there any more",
         outside=networks.forget_source, neighbour=networks.NETWORK, needed=networks.has_ports),
    Step("finish", "last", apply=_done),
))
