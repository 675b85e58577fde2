# SPDX-License-Identifier: Apache-2.0
"""Start, stop, pause, suspend and their like: one command each, to the host where the server is."""
from __future__ import annotations

from typing import Any

from common import states
from common.models import Result
from common.store import guests
from common.store.engine import Connection
from conductor import guest
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of


def _reboot_soft(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "reboot", {"timeout": engine.shutdown_timeout}


def _reboot_hard(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "reboot", {"timeout": 0}


def _pause(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "ensure_paused", {}


def _suspend(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "ensure_suspended", {}


def _interrupt(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    return "inject_nmi", {}


def _set_password(engine: Engine, run: Run) -> tuple[str, dict[str, Any]]:
    properties = (run.server.image or {}).get("properties", {})
    return "set_password", {"user": properties.get("os_admin_user", "root"), **run.secrets(engine)}


def _stays_off(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """A guest that could not be started does not run."""
    guests.want(tx, [run.server.id], guests.STOPPED, False)
    run.set(power_state=states.SHUTDOWN)


def _is_lost(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """A reboot that failed leaves the guest off where it should run: that is an error to be seen."""
    _stays_off(tx, engine, run, problem)
    if run.action.args["was"] != states.RESIZED:            # whose move is still to be ended
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


def _goes_on(tx: Connection, run: Run, result: Result) -> None:
    """Whoever's host was booted is what it was, also where its user could not have asked for this."""
    guest.runs(tx, run, result)
    if run.action.args["was"] in (states.RESIZED, states.RESCUED):
        run.set(vm_state=run.action.args["was"])


START = Workflow("start", failed=_stays_off, steps=(
    Step("run", "the guest may run from the moment this is sent", command=guest.start,
         before=guest.will_run, done=guest.runs),))

STOP = Workflow("stop", steps=(
    Step("stop", "asks the guest first, and pulls the plug when it does not listen", command=guest.stop,
         done=guest.rests),))

REBOOT_SOFT = Workflow("reboot_soft", failed=_is_lost, steps=(
    Step("reboot", "repeatable: a guest that carries this fence has been rebooted", command=_reboot_soft,
         before=guest.will_run, done=guest.runs),))

REBOOT_HARD = Workflow("reboot_hard", failed=_is_lost, steps=(
    Step("reboot", "as soft, without asking the guest", command=_reboot_hard, before=guest.will_run, done=_goes_on),))

PAUSE = Workflow("pause", steps=(
    Step("pause", "the guest's memory stays where it is", command=_pause, done=guest.runs),))

UNPAUSE = Workflow("unpause", steps=(
    Step("run", "as a start: the host sees where to go on from", command=guest.start,
         before=guest.will_run, done=guest.runs),))

SUSPEND = Workflow("suspend", steps=(
    Step("suspend", "the guest's memory goes to the host's disk", command=_suspend, done=guest.rests),))

RESUME = Workflow("resume", steps=(
    Step("run", "as a start: the host sees where to go on from", command=guest.start,
         before=guest.will_run, done=guest.runs),))

CRASH_DUMP = Workflow("crash_dump", steps=(
    Step("interrupt", "once: found begun after a crash it is not repeated", command=_interrupt),))

CHANGE_PASSWORD = Workflow("change_password", steps=(
    Step("set", "once, and the API waits for its outcome", command=_set_password),))
