# SPDX-License-Identifier: Apache-2.0
"""Attach, detach and extend volumes of an existing server.

A volume is reserved and connected before the host uses the volume. Its attachment ends after the
host has released it. A failed attach leaves no attachment. Attachments of a server without a host
have no host either. The service still shows such a volume as in use, and the server's next host
connects the volume.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.domain.models import Result
from common.domain.statuses import BlockDeviceStatus
from common.domain.verbs import AttachVolume, DetachVolume, ExtendVolume
from common.store.cleanups import ATTACHMENT, GUEST_VOLUME
from common.store.engine import Connection
from common.store.rows import BlockDeviceRow
from conductor.engine.action_args import VolumeActionArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import volumes

VolumeRun = Run[VolumeActionArgs, ActionData]
ATTACH_STEP = "attach"


def _find_row(run: VolumeRun) -> BlockDeviceRow:
    """Return the row of the action's volume, with the run's changes that are not stored yet."""
    return next(row for row in volumes.of(run) if row.uuid == run.args.block_device)


def _has_host(run: VolumeRun) -> bool:
    return run.host is not None


# --- attach ---
def _reserve(engine: Engine, run: VolumeRun) -> None:
    volumes.reserve(engine, run, _find_row(run))


def _record_reserved(tx: Connection, engine: Engine, runs: Sequence[VolumeRun]) -> None:
    for run in runs:
        if run.host is None:
            run.set_volume(_find_row(run), status=BlockDeviceStatus.RESERVED)


def _release(engine: Engine, run: VolumeRun) -> None:
    """Delete the server's attachments of the volume at the service.

    If the undo of ``attach`` failed, do nothing, because the guest may still have the volume. A
    failure of the service becomes a pending cleanup.
    """
    row = _find_row(run)
    if ATTACH_STEP in run.data.undo_failures:
        return
    target = row.attachment_id or str(row.volume_id)
    with run.cleanup_on_failure(ATTACHMENT, target, str(row.volume_id)):
        for attachment in volumes.service(engine).attachments(run.server.id, row.volume_id):
            volumes.service(engine).detach(attachment.id)


def _connect(engine: Engine, run: VolumeRun) -> None:
    assert run.host is not None, "the step's condition checks this"
    volumes.connect(engine, run, _find_row(run), volumes.connector_of(engine, run.host))


def _attach_command(engine: Engine, run: VolumeRun) -> AttachVolume:
    return AttachVolume(volume=volumes.describe(engine, _find_row(run)))


def _detach_command(engine: Engine, run: VolumeRun) -> DetachVolume:
    return DetachVolume(volume=volumes.describe(engine, _find_row(run)))


def _record_attached(tx: Connection, run: VolumeRun, result: Result) -> None:
    run.set_volume(_find_row(run), status=BlockDeviceStatus.ATTACHED)


def _complete(engine: Engine, run: VolumeRun) -> None:
    row = _find_row(run)
    assert row.attachment_id is not None, "an earlier step has reserved the volume"
    with run.cleanup_on_failure(ATTACHMENT, row.attachment_id, str(row.volume_id)):
        volumes.service(engine).complete(row.attachment_id)


def _fail_attach(tx: Connection, engine: Engine, run: VolumeRun, problem: StepFailed) -> None:
    """Remove the volume from the server after a failed attach.

    If the undo failed too, the guest may still have the volume. Then the row of the volume
    has the status ERROR until a pending cleanup has detached the volume.
    """
    row = _find_row(run)
    if why := run.data.undo_failures.get(ATTACH_STEP):
        run.set_volume(row, status=BlockDeviceStatus.ERROR)
        run.add_cleanup(GUEST_VOLUME, row.uuid, why, str(row.volume_id))
        run.data.clear_undo_failures()
    else:
        run.remove_volumes([row])


ATTACH_VOLUME = Workflow(
    "attach_volume",
    args=VolumeActionArgs,
    data=ActionData,
    failed=_fail_attach,
    steps=(
        Step(
            "reserve",
            "First, so that no other server can use the volume. The API waits for this step.",
            call=_reserve,
            apply=_record_reserved,
            undo_call=_release,
            lane=Lane.VOLUME,
        ),
        Step(
            "connect",
            "The host needs the connection before it can attach the volume.",
            call=_connect,
            lane=Lane.VOLUME,
            condition=_has_host,
        ),
        Step(
            ATTACH_STEP,
            "The host connects and verifies the volume before the guest gets it.",
            command=_attach_command,
            on_result=_record_attached,
            undo_command=_detach_command,
            condition=_has_host,
            pivot=True,
        ),
        Step(
            "complete",
            "The service shows the volume as in use.",
            call=_complete,
            lane=Lane.VOLUME,
        ),
    ),
)


# --- detach ---
def _fail_detach(tx: Connection, engine: Engine, run: VolumeRun, problem: StepFailed) -> None:
    """Give the row the status before the detach, because the guest has not released the volume."""
    run.set_volume(_find_row(run), status=run.args.before)


def _remove_volume(tx: Connection, engine: Engine, runs: Sequence[VolumeRun]) -> None:
    for run in runs:
        run.remove_volumes([_find_row(run)])


DETACH_VOLUME = Workflow(
    "detach_volume",
    args=VolumeActionArgs,
    data=ActionData,
    failed=_fail_detach,
    steps=(
        Step(
            "detach",
            "First, because the attachment must last while the guest has the volume. A dead host "
            "counts as done.",
            command=_detach_command,
            condition=_has_host,
            done_when_host_dead=True,
            pivot=True,
        ),
        Step(
            "end_attachment",
            "After the host. From here on other servers can use the volume.",
            call=_release,
            apply=_remove_volume,
            lane=Lane.VOLUME,
        ),
    ),
)


# --- extend ---
def _read_size(engine: Engine, run: VolumeRun) -> None:
    row = _find_row(run)
    volume = volumes.service(engine).volume(str(row.volume_id))
    run.set_volume(row, size_gb=volume.size_gb)


def _extend_command(engine: Engine, run: VolumeRun) -> ExtendVolume:
    return ExtendVolume(volume=volumes.describe(engine, _find_row(run)))


EXTEND_VOLUME = Workflow(
    "extend_volume",
    args=VolumeActionArgs,
    data=ActionData,
    steps=(
        Step(
            "look_at_size",
            "Read the new size from the service.",
            call=_read_size,
            lane=Lane.VOLUME,
        ),
        Step(
            "extend", "The guest sees the new size.", command=_extend_command, condition=_has_host
        ),
    ),
)
