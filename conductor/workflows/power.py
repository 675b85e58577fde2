# SPDX-License-Identifier: Apache-2.0
"""Start, stop, pause, suspend and their like: one command each, to the host where the server is."""

from __future__ import annotations

from common.domain import states
from common.domain.models import Result
from common.domain.statuses import GuestState
from common.domain.verbs import EnsurePaused, EnsureSuspended, InjectNmi, Reboot, SetPassword
from common.store.engine import Connection
from common.store.servers import guests
from conductor.engine.action_args import ActionArgs
from conductor.engine.action_data import ActionData, StepFailed, fault_of
from conductor.engine.engine import Engine
from conductor.engine.run import AnyRun
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import guest


def _reboot_soft(engine: Engine, run: AnyRun) -> Reboot:
    return Reboot(timeout=engine.shutdown_timeout, has=guest.belongings(engine, run))


def _reboot_hard(engine: Engine, run: AnyRun) -> Reboot:
    return Reboot(timeout=0, has=guest.belongings(engine, run))


def _pause(engine: Engine, run: AnyRun) -> EnsurePaused:
    return EnsurePaused()


def _suspend(engine: Engine, run: AnyRun) -> EnsureSuspended:
    return EnsureSuspended()


def _inject_nmi(engine: Engine, run: AnyRun) -> InjectNmi:
    return InjectNmi()


def _set_password(engine: Engine, run: AnyRun) -> SetPassword:
    properties = (run.server.image or {}).get("properties", {})
    return SetPassword(
        user=properties.get("os_admin_user", "root"), admin_pass=run.secrets(engine)["admin_pass"]
    )


def _is_off(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """A guest that could not be started does not run."""
    guests.want(tx, [run.server.id], GuestState.STOPPED, False)
    run.set(power_state=states.SHUTDOWN)


def _reboot_failed(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """A reboot that failed leaves the guest off where it should run: that is an error to be
    seen."""
    _is_off(tx, engine, run, problem)
    if run.args.was != states.RESIZED:  # whose move is still to be ended
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


def _rebooted(tx: Connection, run: AnyRun, result: Result) -> None:
    """Whoever's host was booted is what it was, also where its user could not have asked for
    this."""
    guest.record_booted(tx, run, result)
    if run.args.was in (states.RESIZED, states.RESCUED):
        run.set(vm_state=run.args.was)


START = Workflow(
    "start",
    args=ActionArgs,
    data=ActionData,
    failed=_is_off,
    steps=(
        Step(
            "run",
            "the guest may run from the moment this is sent",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
    ),
)

STOP = Workflow(
    "stop",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "stop",
            "asks the guest first, and pulls the plug when it does not listen",
            command=guest.stop,
            on_result=guest.record_stopped,
        ),
    ),
)

REBOOT_SOFT = Workflow(
    "reboot_soft",
    args=ActionArgs,
    data=ActionData,
    failed=_reboot_failed,
    steps=(
        Step(
            "reboot",
            "repeatable: a guest that carries this fence has been rebooted",
            command=_reboot_soft,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
    ),
)

REBOOT_HARD = Workflow(
    "reboot_hard",
    args=ActionArgs,
    data=ActionData,
    failed=_reboot_failed,
    steps=(
        Step(
            "reboot",
            "as soft, without asking the guest",
            command=_reboot_hard,
            on_start=guest.allow_to_run,
            on_result=_rebooted,
        ),
    ),
)

PAUSE = Workflow(
    "pause",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "pause",
            "the guest's memory stays where it is",
            command=_pause,
            on_result=guest.record_running,
        ),
    ),
)

UNPAUSE = Workflow(
    "unpause",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "run",
            "as a start: the host sees where to go on from",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=guest.record_running,
        ),
    ),
)

SUSPEND = Workflow(
    "suspend",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "suspend",
            "the guest's memory goes to the host's disk",
            command=_suspend,
            on_result=guest.record_stopped,
        ),
    ),
)

RESUME = Workflow(
    "resume",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "run",
            "as a start: the host sees where to go on from",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=guest.record_running,
        ),
    ),
)

CRASH_DUMP = Workflow(
    "crash_dump",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "interrupt", "once: found begun after a crash it is not repeated", command=_inject_nmi
        ),
    ),
)

CHANGE_PASSWORD = Workflow(
    "change_password",
    args=ActionArgs,
    data=ActionData,
    steps=(Step("set", "once, and the API waits for its outcome", command=_set_password),),
)
