# SPDX-License-Identifier: Apache-2.0
"""Rebuild: new disks from another image, on the same host, with the same id, addresses and flavor.

The accepted request has written its changes (image, name, key and so on) to the server's row
already. The workflow first checks whether the host suits the new image. If not, the row is
restored. The host deletes the old disk only after the new image is complete and verified.

The block storage service writes the root volume of a server that boots from a volume. A failure
before that leaves the server as it was. A failure later leaves the new image in the server's row.
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

#: The API wakes this step when the service reports that the volume is written.
AWAIT_REIMAGE = "await_reimage"
#: From this step on the server has the new image.
REBUILD_STEP = "rebuild"


@dataclass(kw_only=True)
class RebuildData(PlacementData):
    """Data that the steps of a rebuild leave for later steps."""

    #: Time at which the service began to write the volume, in µs.
    reimaged_since: int | None = None
    #: Status of that volume.
    volume_status: str = ""


RebuildRun = Run[RebuildArgs, RebuildData]


def _is_started_after(run: RebuildRun) -> bool:
    """Return True if the server runs after the rebuild. A stopped server stays stopped."""
    return run.args.was != states.STOPPED


def _has_another_image(run: RebuildRun) -> bool:
    """Return True if the request changes the image or overwrites the root volume.

    Such a request has saved the old values of the row.
    """
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


def _allow_to_run(tx: Connection, runs: Sequence[RebuildRun]) -> None:
    for run in runs:
        may_run = _is_started_after(run)
        guests.want(
            tx, [run.server.id], GuestState.RUNNING if may_run else GuestState.STOPPED, may_run
        )


def _is_reimaged(run: RebuildRun) -> bool:
    """Return True if the block storage service overwrites the root volume with the image."""
    return run.args.reimage is not None


def _is_reimaged_and_started(run: RebuildRun) -> bool:
    return _is_reimaged(run) and _is_started_after(run)


def _start_again(tx: Connection, engine: Engine, run: RebuildRun) -> None:
    guests.want(tx, [run.server.id], GuestState.RUNNING, True)
    run.set(power_state=states.RUNNING)


def _disconnect_command(engine: Engine, run: RebuildRun) -> DisconnectVolumes:
    return DisconnectVolumes()


def _install_old_command(engine: Engine, run: RebuildRun) -> Install:
    return Install(guest=guest.spec(engine, run), runs=False)


def _root_volume_id(run: RebuildRun) -> str:
    return next(str(row.volume_id) for row in run.volumes if row.boot_index == 0)


def _reimage(engine: Engine, run: RebuildRun) -> None:
    service, volume_id = volumes.service(engine), _root_volume_id(run)
    if run.is_repeated and service.volume(volume_id).status == DOWNLOADING:
        return
    service.reimage(volume_id, str(run.args.reimage))


def _record_reimage_start(tx: Connection, engine: Engine, runs: Sequence[RebuildRun]) -> None:
    for run in runs:
        run.data.reimaged_since = run.locked_at


def _read_volume_status(engine: Engine, run: RebuildRun) -> None:
    run.data.volume_status = volumes.service(engine).volume(_root_volume_id(run)).status


def _await_reimage(tx: Connection, engine: Engine, runs: Sequence[RebuildRun]) -> None:
    """Let runs continue whose volume is written. Poll the others again with a growing delay.

    A run fails on an error status of the volume, or after ``volume_timeout``.
    """
    for run in runs:
        status, since = run.data.volume_status, run.data.reimaged_since
        if status.startswith("error"):
            run.fail(
                f"Volume {_root_volume_id(run)} could not be written from image {run.args.reimage}: its status at "
                f"the block storage service is {status}. Repair the volume there, and rebuild the server again."
            )
        elif status != DOWNLOADING:
            continue
        elif run.locked_at - int(since or 0) >= engine.volume_timeout * SECOND:
            run.fail(
                f"Volume {_root_volume_id(run)} was not written within {engine.volume_timeout} seconds. Wait until "
                "the block storage service has written it, and rebuild the server again."
            )
        else:
            run.retry_in(min(FIRST_POLL_MICROS * 2 ** min(run.data.polls, 8), MAX_POLL_MICROS))
            run.data.polls += 1


def _rebuild_command(engine: Engine, run: RebuildRun) -> Rebuild:
    return Rebuild(
        guest=guest.spec(engine, run),
        runs=_is_started_after(run),
        keep_ephemeral=run.args.preserve_ephemeral,
    )


def _record_rebuilt(tx: Connection, run: RebuildRun, result: Result) -> None:
    runs = _is_started_after(run)
    guest.record_booted(tx, run, result)
    run.set(launched_at=now(), vm_state=states.ACTIVE if runs else states.STOPPED)


def _old_columns(engine: Engine, run: RebuildRun) -> JsonObject:
    """Return the old values of the columns that the request changed, with the old user data.

    Left out are columns that another request has changed since.
    """
    wrote = run.args.wrote
    before = {**run.args.before, **run.secrets(engine).get("before", {})}
    return {
        name: value
        for name, value in before.items()
        if name not in wrote or getattr(run.server, name) == wrote[name]
    }


def _fail_rebuild(tx: Connection, engine: Engine, run: RebuildRun, problem: StepFailed) -> None:
    """Record the failure.

    Before the host or the service began, the server's row is restored if the request saved the
    old values. Later the row keeps the new image and the server is in ERROR, because the disk may
    contain either image. A failed undo sets ERROR too. If the undo could not start the guest again,
    the server is recorded as off.
    """
    begun = run.action.step == REBUILD_STEP or run.data.reimaged_since is not None
    if not begun and _has_another_image(run):
        run.set(**_old_columns(engine, run))
    if begun or run.data.undo_failures:
        run.set(vm_state=states.ERROR, fault=fault_of(tx, problem))
    if run.is_left_off:
        guests.want(tx, [run.server.id], GuestState.STOPPED, False)
        run.set(power_state=states.SHUTDOWN)


REBUILD = Workflow(
    "rebuild",
    args=RebuildArgs,
    data=RebuildData,
    failed=_fail_rebuild,
    steps=(
        Step(
            "image",
            "First, because the image may have changed since the request.",
            call=images.check_own,
            condition=images.has_own,
        ),
        Step(
            "check",
            "First, because the host may lack a requirement of the new image.",
            prepare=_propose,
            apply=_check,
            condition=_has_another_image,
        ),
        Step(
            "stop",
            "A running guest would write into the new image. The undo starts the guest again.",
            command=guest.stop,
            on_result=guest.record_stopped,
            undo=_start_again,
            undo_command=guest.start,
            undo_starts_guest=True,
            condition=_is_reimaged_and_started,
        ),
        Step(
            "disconnect",
            "The host disconnects the volume before the service writes it. The undo defines the "
            "guest again, stopped.",
            command=_disconnect_command,
            undo_command=_install_old_command,
            condition=_is_reimaged,
        ),
        Step(
            "reserve_volumes",
            "The service writes only a volume that no host uses.",
            call=volumes.release,
            undo_call=volumes.connect_all,
            lane=Lane.VOLUME,
            condition=_is_reimaged,
        ),
        Step(
            "reimage",
            "The service refuses an unsuitable image before it writes any data.",
            call=_reimage,
            apply=_record_reimage_start,
            lane=Lane.VOLUME,
            condition=_is_reimaged,
        ),
        Step(
            AWAIT_REIMAGE,
            "The host must not use a volume that is partly written.",
            call=_read_volume_status,
            apply=_await_reimage,
            lane=Lane.VOLUME,
            condition=_is_reimaged,
        ),
        replace(volumes.CONNECT, condition=_is_reimaged),
        Step(
            REBUILD_STEP,
            "One command, so that the old disk is deleted only when the new one is complete.",
            command=_rebuild_command,
            on_start=_allow_to_run,
            on_result=_record_rebuilt,
        ),
    ),
)
