# SPDX-License-Identifier: Apache-2.0
"""Rescue: boot from another image with the server's own disk beside it; unrescue: boot from its own disk again."""
from __future__ import annotations

from typing import Any

from common import states
from common.store.engine import Connection
from common.wire import to_wire
from conductor import guest
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of


def _rescue(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    image = run.action.args.get("image") or run.server.image
    return "rescue", {"guest": to_wire(guest.spec(engine, run)), "image": image}


def _unrescue(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "unrescue", {"guest": to_wire(guest.spec(engine, run))}


def _failed(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """Which disk the guest boots from now is for its owner to see."""
    run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


RESCUE = Workflow("rescue", failed=_failed, steps=(
    Step("rescue", "one command; the server's own disk is never changed by it", command=_rescue, before=guest.will_run,
         done=guest.runs),))

UNRESCUE = Workflow("unrescue", failed=_failed, steps=(
    Step("unrescue", "one command; the rescue disk goes with it", command=_unrescue,
         before=guest.will_run, done=guest.runs),))
