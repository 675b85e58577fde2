# SPDX-License-Identifier: Apache-2.0
"""Start, stop, reboot, pause, suspend and similar actions: one command to the server's host."""

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


def _reboot_soft_command(engine: Engine, run: AnyRun) -> Reboot:
    return Reboot(timeout=engine.shutdown_timeout, has=guest.belongings(engine, run))


def _reboot_hard_command(engine: Engine, run: AnyRun) -> Reboot:
    return Reboot(timeout=0, has=guest.belongings(engine, run))


def _pause_command(engine: Engine, run: AnyRun) -> EnsurePaused:
    return EnsurePaused()


def _suspend_command(engine: Engine, run: AnyRun) -> EnsureSuspended:
    return EnsureSuspended()


def _inject_nmi_command(engine: Engine, run: AnyRun) -> InjectNmi:
    return InjectNmi()


def _set_password_command(engine: Engine, run: AnyRun) -> SetPassword:
    properties = (run.server.image or {}).get("properties", {})
    return SetPassword(
        user=properties.get("os_admin_user", "root"), admin_pass=run.secrets(engine)["admin_pass"]
    )


def _record_off(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """Record that the guest, which could not be started, is off and may not run."""
    guests.want(tx, [run.server.id], GuestState.STOPPED, False)
    run.set(power_state=states.SHUTDOWN)


def _fail_reboot(tx: Connection, engine: Engine, run: AnyRun, problem: StepFailed) -> None:
    """Record that the guest is off and may not run, and set ERROR.

    A resized server stays RESIZED without a fault, because the resize must still be confirmed or
    reverted.
    """
    _record_off(tx, engine, run, problem)
    if run.args.was != states.RESIZED:
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


def _record_hard_reboot(tx: Connection, run: AnyRun, result: Result) -> None:
    """Record the boot. A server that was RESIZED or RESCUED keeps this vm_state.

    Why: a boot of the host also reboots servers in these states.
    """
    guest.record_booted(tx, run, result)
    if run.args.was in (states.RESIZED, states.RESCUED):
        run.set(vm_state=run.args.was)


START = Workflow(
    "start",
    args=ActionArgs,
    data=ActionData,
    failed=_record_off,
    steps=(
        Step(
            "run",
            "From this step on the guest may run.",
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
            "Request a shutdown from the guest, and power the guest off after the timeout.",
            command=guest.stop,
            on_result=guest.record_stopped,
        ),
    ),
)

REBOOT_SOFT = Workflow(
    "reboot_soft",
    args=ActionArgs,
    data=ActionData,
    failed=_fail_reboot,
    steps=(
        Step(
            "reboot",
            "Repeatable, because a rebooted guest has the fence of this action.",
            command=_reboot_soft_command,
            on_start=guest.allow_to_run,
            on_result=guest.record_booted,
        ),
    ),
)

REBOOT_HARD = Workflow(
    "reboot_hard",
    args=ActionArgs,
    data=ActionData,
    failed=_fail_reboot,
    steps=(
        Step(
            "reboot",
            "Like a soft reboot, but without a shutdown by the guest.",
            command=_reboot_hard_command,
            on_start=guest.allow_to_run,
            on_result=_record_hard_reboot,
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
            "The guest's memory stays in the host's memory.",
            command=_pause_command,
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
            "Like a start: the host continues the paused guest.",
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
            "The guest's memory is written to the host's disk.",
            command=_suspend_command,
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
            "Like a start: the host restores the memory of the suspended guest.",
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
            "interrupt",
            "At most once: the agent does not repeat an interrupt that had begun before a crash.",
            command=_inject_nmi_command,
        ),
    ),
)

CHANGE_PASSWORD = Workflow(
    "change_password",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step("set", "At most once. The API waits for the result.", command=_set_password_command),
    ),
)
