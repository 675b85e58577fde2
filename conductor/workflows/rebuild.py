# SPDX-License-Identifier: Apache-2.0
"""Rebuild: new disks from another image, on the same host, with the same id, addresses and flavor.

What was asked for (image, name, key …) stands in the server's row since the request was accepted.
Whether its host may have the new image is asked first; when not, the row becomes what it was, and
nothing has happened. The host gives up the old disk only when the new image is there and verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import states
from common.action_args import RebuildArgs
from common.json_types import JsonObject
from common.models import RequestSpec, Result
from common.store.engine import Connection, now
from common.store.servers import guests
from common.wire import to_wire
from conductor import claims, guest
from conductor.claims import PlacementData
from conductor.saga import Engine, Run, Step, StepFailed, Verb, Workflow, fault_of

REBUILD_STEP = "rebuild"  #: from this step on the server has the new image
RebuildRun = Run[RebuildArgs, PlacementData]


def _runs_after(run: RebuildRun) -> bool:
    """A stopped server stays off."""
    return run.args.was != states.STOPPED


def _has_another_image(run: RebuildRun) -> bool:
    """Is it another image than it had? Then the request kept what the row said before."""
    return bool(run.args.before)


def _spec(run: RebuildRun) -> RequestSpec:
    return claims.spec(run, host=run.server.host, is_rebuild=True)


def _propose(engine: Engine, runs: Sequence[RebuildRun]) -> None:
    claims.propose(engine, runs, _spec)


def _check(tx: Connection, engine: Engine, runs: Sequence[RebuildRun]) -> None:
    for run in runs:
        if run.selection is None:
            run.retry_in(0)
        elif run.server.host not in run.selection.hosts:
            claims.fail_no_valid_host(run)


def _may_run(tx: Connection, runs: Sequence[RebuildRun]) -> None:
    for run in runs:
        may_run = _runs_after(run)
        guests.want(tx, [run.server.id], guests.RUNNING if may_run else guests.STOPPED, may_run)


def _rebuild(engine: Engine, run: RebuildRun) -> Verb:
    return "rebuild", {
        "guest": to_wire(guest.spec(engine, run)),
        "runs": _runs_after(run),
        "keep_ephemeral": run.args.preserve_ephemeral,
    }


def _rebuilt(tx: Connection, run: RebuildRun, result: Result) -> None:
    runs = _runs_after(run)
    run.set(
        power_state=int(result.data.get("power_state", states.RUNNING)),
        launched_at=now(),
        vm_state=states.ACTIVE if runs else states.STOPPED,
    )


def _columns_before(engine: Engine, run: RebuildRun) -> JsonObject:
    """The columns as they were, but for those that somebody has changed since the request wrote
    them."""
    wrote = run.args.wrote
    before = {**run.args.before, **run.secrets(engine).get("before", {})}
    return {
        name: value
        for name, value in before.items()
        if name not in wrote or getattr(run.server, name) == wrote[name]
    }


def _failed(tx: Connection, engine: Engine, run: RebuildRun, problem: StepFailed) -> None:
    """Refused before the host was told: as it was. Later the row says the new image already: only
    another rebuild, or a look by its owner, makes that true."""
    if run.action.step != REBUILD_STEP and _has_another_image(run):
        run.set(**_columns_before(engine, run))
    else:
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))


REBUILD = Workflow(
    "rebuild",
    args=RebuildArgs,
    data=PlacementData,
    failed=_failed,
    steps=(
        Step(
            "check",
            "before anything is touched: the new image may ask for what this host has not",
            prepare=_propose,
            apply=_check,
            condition=_has_another_image,
        ),
        Step(
            REBUILD_STEP,
            "one command: the old disk goes when the new one is sure",
            command=_rebuild,
            on_start=_may_run,
            on_result=_rebuilt,
        ),
    ),
)
