# SPDX-License-Identifier: Apache-2.0
"""Rebuild: new disks from another image, on the same host, with the same id, addresses and flavor.

What was asked for (image, name, key …) stands in the server's row since the request was accepted. Whether its host may
have the new image is asked first; when not, the row becomes what it was, and nothing has happened. The host gives up
the old disk only when the new image is there and verified.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import states
from common.models import RequestSpec, Result
from common.store import guests
from common.store.engine import Connection, now
from common.wire import to_wire
from conductor import guest, placing
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of

TELL = "rebuild"


def _runs_after(run: Run) -> bool:
    """A stopped server stays off."""
    return bool(run.action.args.get("was") != states.STOPPED)


def _has_another_image(run: Run) -> bool:
    """Is it another image than it had? Then the request kept what the row said before."""
    return bool(run.action.args.get("before"))


def _spec(run: Run) -> RequestSpec:
    return placing.spec(run, host=run.server.host, is_rebuild=True)


def _propose(engine: Engine, runs: Sequence[Run]) -> None:
    placing.propose(engine, runs, _spec)


def _check(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.selection is None:
            run.again_in(0)
        elif run.server.host not in run.selection.hosts:
            placing.refuse(run)


def _may_run(tx: Connection, runs: Sequence[Run]) -> None:
    for run in runs:
        may_run = _runs_after(run)
        guests.want(tx, [run.server.id], guests.RUNNING if may_run else guests.STOPPED, may_run)


def _rebuild(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "rebuild", {"guest": to_wire(guest.spec(engine, run)), "runs": _runs_after(run),
                       "keep_ephemeral": bool(run.action.args.get("preserve_ephemeral"))}


def _rebuilt(tx: Connection, run: Run, result: Result) -> None:
    runs = _runs_after(run)
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)), launched_at=now(),
            vm_state=states.ACTIVE if runs else states.STOPPED)


def _taken_back(engine: Engine, run: Run) -> dict[str, Any]:
    """The columns as they were, but for those that somebody has changed since the request wrote them."""
    wrote = run.action.args.get("wrote", {})
    before = {**run.action.args["before"], **run.secrets(engine).get("before", {})}
    return {name: value for name, value in before.items()
            if name not in wrote or getattr(run.server, name) == wrote[name]}


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Refused before the host was told: as it was. Later the row says the new image already: only another rebuild, or
    a look by its owner, makes that true."""
    if run.action.step != TELL and _has_another_image(run):
        run.set(**_taken_back(engine, run))
    else:
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


REBUILD = Workflow("rebuild", failed=_failed, steps=(
    Step("check", "before anything is touched: the new image may ask for what this host has not",
         propose=_propose, apply=_check, needed=_has_another_image),
    Step(TELL, "one command: the old disk goes when the new one is sure", command=_rebuild, before=_may_run,
         done=_rebuilt),))
