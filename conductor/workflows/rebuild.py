# SPDX-License-Identifier: Apache-2.0
"""Rebuild: new disks from another image, on the same host, with the same id, addresses and flavor.

What was asked for (image, name, key …) stands in the server's row since the request was accepted. The host gives up
the old disk only when the new image is there and verified.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import states
from common.models import Result
from common.store import guests
from common.store.engine import Connection, now
from common.wire import to_wire
from conductor import guest
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of


def _runs_after(run: Run) -> bool:
    """A stopped server stays off."""
    return bool(run.action.args.get("was") != states.STOPPED)


def _may_run(tx: Connection, runs: Sequence[Run]) -> None:
    for run in runs:
        may_run = _runs_after(run)
        guests.want(tx, [run.server.id], guests.RUNNING if may_run else guests.STOPPED, may_run)


def _rebuild(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "rebuild", {"guest": to_wire(guest.spec(engine, run)), "runs": _runs_after(run)}


def _rebuilt(tx: Connection, run: Run, result: Result) -> None:
    runs = _runs_after(run)
    run.set(power_state=int(result.data.get("power_state", states.RUNNING)), launched_at=now(),
            vm_state=states.ACTIVE if runs else states.STOPPED)


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """The row says the new image already: only another rebuild, or a look by its owner, makes that true."""
    run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


REBUILD = Workflow("rebuild", failed=_failed, steps=(
    Step("rebuild", "one command: the old disk goes when the new one is sure", command=_rebuild, before=_may_run,
         done=_rebuilt),))
