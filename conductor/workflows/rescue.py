# SPDX-License-Identifier: Apache-2.0
"""Rescue and unrescue.

A rescue boots the server from another image, with the server's own disk as a second disk. An
unrescue boots the server from its own disk again.
"""

from __future__ import annotations

from common.domain import states
from common.domain.models import FailureReason, ImageRef
from common.domain.statuses import GuestState
from common.domain.verbs import Rescue, Unrescue
from common.domain.wire import from_wire
from common.store.engine import Connection
from common.store.servers import guests
from conductor.engine.action_args import ActionArgs, RescueArgs
from conductor.engine.action_data import ActionData, StepFailed, fault_of
from conductor.engine.engine import Engine
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import guest, images


def _rescue_command(engine: Engine, run: Run[RescueArgs, ActionData]) -> Rescue:
    image = run.args.image or from_wire(ImageRef, run.server.image or {})
    return Rescue(guest=guest.spec(engine, run), image=image)


def _check_image(engine: Engine, run: Run[RescueArgs, ActionData]) -> None:
    assert run.args.image is not None, "the step's condition checks this"
    images.check_disk(engine, run.args.image.id)


def _has_image(run: Run[RescueArgs, ActionData]) -> bool:
    return run.args.image is not None


def _unrescue_command(engine: Engine, run: AnyRun) -> Unrescue:
    return Unrescue(guest=guest.spec(engine, run))


def _fail_rescue(
    tx: Connection, engine: Engine, run: Run[RescueArgs, ActionData], problem: StepFailed
) -> None:
    """Set ERROR, unless the image check failed or the host did not change the guest.

    In these two cases the server keeps its vm_state. A server that was stopped may not run.
    """
    if run.action.step == "image":
        return
    if problem.reason is not FailureReason.UNTOUCHED:
        _fail_unrescue(tx, engine, run, problem)
    elif run.args.was == states.STOPPED:
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)


def _fail_unrescue(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """Set ERROR, because the guest may boot from either disk."""
    run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


RESCUE = Workflow(
    "rescue",
    args=RescueArgs,
    data=ActionData,
    failed=_fail_rescue,
    steps=(
        Step(
            "image",
            "First, because the image may have changed since the request.",
            call=_check_image,
            condition=_has_image,
        ),
        Step(
            "rescue",
            "One command, which never changes the server's own disk.",
            command=_rescue_command,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
    ),
)

UNRESCUE = Workflow(
    "unrescue",
    args=ActionArgs,
    data=ActionData,
    failed=_fail_unrescue,
    steps=(
        Step(
            "unrescue",
            "One command, which also deletes the rescue disk.",
            command=_unrescue_command,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
    ),
)
