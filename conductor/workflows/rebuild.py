# SPDX-License-Identifier: Apache-2.0
"""Rebuild: new disks from another image, on the same host, with the same id, addresses and flavor.

What was asked for (image, name, key …) stands in the server's row since the request was accepted.
Whether its host may have the new image is asked first; when not, the row becomes what it was, and
nothing has happened. The host gives up the old disk only when the new image is there and verified.

The volume that a server boots from is written by the block storage service. Until that has begun
the way back leads to the server as it was; afterwards its row says the new image, whatever comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.clients.volumes import DOWNLOADING
from common.domain import states
from common.domain.clock import SECOND
from common.domain.json_types import JsonObject
from common.domain.models import RequestSpec, Result
from common.domain.statuses import GuestState
from common.domain.verbs import DisconnectVolumes, Install, Rebuild
from common.store.engine import Connection, now
from common.store.servers import guests
from conductor.engine.action_args import RebuildArgs
from conductor.engine.action_data import StepFailed, fault_of
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import claims, guest, images, volumes
from conductor.steps.claims import PlacementData
from conductor.steps.volumes import FIRST_POLL_MICROS, MAX_POLL_MICROS

AWAIT_REIMAGE = "await_reimage"  #: the API wakes it when the service says that it is done
REBUILD_STEP = "rebuild"  #: from this step on the server has the new image


@dataclass(kw_only=True)
class RebuildData(PlacementData):
    """What the steps leave."""

    reimaged_since: int | None = None  #: when the volume began to be written, µs
    volume_status: str = ""  #: of the volume that is written


RebuildRun = Run[RebuildArgs, RebuildData]


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
        guests.want(
            tx, [run.server.id], GuestState.RUNNING if may_run else GuestState.STOPPED, may_run
        )


# --- the volume that it boots from ---
def _reimages(run: RebuildRun) -> bool:
    """Is its volume written anew?"""
    return run.args.reimage is not None


def _reimages_and_runs(run: RebuildRun) -> bool:
    return _reimages(run) and _runs_after(run)


def _runs_again(tx: Connection, engine: Engine, run: RebuildRun) -> None:
    guests.want(tx, [run.server.id], GuestState.RUNNING, True)
    run.set(power_state=states.RUNNING)


def _disconnect(engine: Engine, run: RebuildRun) -> DisconnectVolumes:
    return DisconnectVolumes()


def _install_old(engine: Engine, run: RebuildRun) -> Install:
    return Install(guest=guest.spec(engine, run), runs=False)


def _root(run: RebuildRun) -> str:
    return next(str(row.volume_id) for row in run.volumes if row.boot_index == 0)


def _reimage(engine: Engine, run: RebuildRun) -> None:
    service, volume_id = volumes.service(engine), _root(run)
    if run.is_repeated and service.volume(volume_id).status == DOWNLOADING:
        return
    service.reimage(volume_id, str(run.args.reimage))


def _is_written(tx: Connection, engine: Engine, runs: Sequence[RebuildRun]) -> None:
    for run in runs:
        run.data.reimaged_since = run.locked_at


def _look(engine: Engine, run: RebuildRun) -> None:
    run.data.volume_status = volumes.service(engine).volume(_root(run)).status


def _await(tx: Connection, engine: Engine, runs: Sequence[RebuildRun]) -> None:
    """Go on when it is reserved again; the service's event wakes this up."""
    for run in runs:
        status, since = run.data.volume_status, run.data.reimaged_since
        if status.startswith("error"):
            run.fail(
                f"Volume {_root(run)} could not be written from image {run.args.reimage}: the block "
                f"storage service shows it as {status}; see there, and rebuild the server again."
            )
        elif status != DOWNLOADING:
            continue
        elif run.locked_at - int(since or 0) >= engine.volume_timeout * SECOND:
            run.fail(
                f"Volume {_root(run)} was not written within {engine.volume_timeout} seconds; rebuild "
                "the server again when the block storage service has ended it."
            )
        else:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


def _rebuild(engine: Engine, run: RebuildRun) -> Rebuild:
    return Rebuild(
        guest=guest.spec(engine, run),
        runs=_runs_after(run),
        keep_ephemeral=run.args.preserve_ephemeral,
    )


def _rebuilt(tx: Connection, run: RebuildRun, result: Result) -> None:
    runs = _runs_after(run)
    guest.record_booted(tx, run, result)
    run.set(launched_at=now(), vm_state=states.ACTIVE if runs else states.STOPPED)


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
    begun = run.action.step == REBUILD_STEP or run.data.reimaged_since is not None
    if not begun and _has_another_image(run):
        run.set(**_columns_before(engine, run))
    if begun or run.data.undo_failures:
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
    if run.is_left_off:
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)


REBUILD = Workflow(
    "rebuild",
    args=RebuildArgs,
    data=RebuildData,
    failed=_failed,
    steps=(
        Step(
            "image",
            "before anything is touched: it may have changed since the request",
            call=images.check_own,
            condition=images.has_own,
        ),
        Step(
            "check",
            "before anything is touched: the new image may ask for what this host has not",
            prepare=_propose,
            apply=_check,
            condition=_has_another_image,
        ),
        Step(
            "stop",
            "what it still wrote would be mixed with the image; on the way back it is started again",
            command=guest.stop,
            on_result=guest.record_stopped,
            undo=_runs_again,
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=_reimages_and_runs,
        ),
        Step(
            "disconnect",
            "before the service writes; on the way back it is as it was, and off",
            command=_disconnect,
            undo_command=_install_old,
            condition=_reimages,
        ),
        Step(
            "reserve_volumes",
            "the service writes a volume that no host may have",
            call=volumes.release,
            undo_call=volumes.connect_all,
            lane=Lane.VOLUME,
            condition=_reimages,
        ),
        Step(
            "reimage",
            "the service refuses what does not fit before it writes anything",
            call=_reimage,
            apply=_is_written,
            lane=Lane.VOLUME,
            condition=_reimages,
        ),
        Step(
            AWAIT_REIMAGE,
            "the host must not have what is half written",
            call=_look,
            apply=_await,
            lane=Lane.VOLUME,
            condition=_reimages,
        ),
        replace(volumes.CONNECT, condition=_reimages),
        Step(
            REBUILD_STEP,
            "one command: the old disk goes when the new one is sure",
            command=_rebuild,
            on_start=_may_run,
            on_result=_rebuilt,
        ),
    ),
)
