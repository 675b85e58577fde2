# SPDX-License-Identifier: Apache-2.0
"""Create: find a host that fits, claim it, and have it make the guest.

The guest is made by one verb on the host (image, disks, domain, start), so that a create is two transactions here and
one command, and one more with a call for its ports. After that command was sent only a definite failure moves the
server to another host; silence waits for the host. A guest whose ports are not wired yet starts paused and waits.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import states
from common.models import RequestSpec, Result
from common.store.engine import Connection, now
from common.wire import to_wire
from conductor import guest, networks, placing
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of


def _spec(run: Run) -> RequestSpec:
    args = run.action.args
    return placing.spec(run, args.get("zone"), args.get("host"), forced=bool(args.get("forced")))


def _propose(engine: Engine, runs: Sequence[Run]) -> None:
    placing.propose(engine, runs, _spec)


def _claim(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    placing.claim(tx, engine, runs, _spec)
    for run in runs:
        if not run.paused and not run.problem:
            run.set(task_state=states.NETWORKING if networks.wishes(run) else states.SPAWNING)


def _plugged(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    networks.keep_plugged(tx, engine, runs)
    for run in runs:
        run.set(task_state=states.SPAWNING)


def _unplugged(tx: Connection, engine: Engine, run: Run) -> None:
    run.set(interfaces=[])


def _build(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "ensure_guest", {"guest": to_wire(guest.spec(engine, run))}


def _built(tx: Connection, run: Run, result: Result) -> None:
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)), launched_at=now())
    placing.worked(run)


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Another host while there are attempts and the failure was the host's own; else ERROR, with the reason."""
    if placing.elsewhere(engine, run, problem):
        run.set(task_state=states.SCHEDULING)
        return
    run.set(vm_state=states.ERROR, power_state=states.NOSTATE,
            fault=fault_of(tx, problem))


CREATE = Workflow("create", failed=_failed, steps=(
    Step("place", "first, because everything after it costs something on a host",
         propose=_propose, apply=_claim, undo=placing.leave),
    Step("networks", "when the host is known, so that one call makes and binds all ports",
         outside=networks.plug, apply=_plugged, undo=_unplugged, undo_outside=networks.withdraw,
         neighbour=networks.NETWORK, needed=networks.wishes),
    Step("build", "one command, because each message costs more than all that it saves",
         command=_build, done=_built),
    networks.PLUG,
    Step("run", "its ports are wired now", command=guest.start, done=guest.runs, needed=networks.is_waiting),
))

