# SPDX-License-Identifier: Apache-2.0
"""Swap a volume: copy the data to a new volume while the server runs, and switch to it.

The block storage service requests this when it migrates or retypes an attached volume. Afterwards
the service gives the old id to the new volume. The host first copies the volume and mirrors all
further writes. Then ``decide`` makes the new volume the server's, in one transaction. A crash
before that leaves the old volume attached, and a crash afterwards the new one. Both contain all
data. The guest releases the old volume before its attachment ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from common.domain.models import AttachedVolume
from common.domain.statuses import BlockDeviceStatus
from common.domain.verbs import CopyVolume, KeepVolume, SwitchVolume
from common.store.cleanups import ATTACHMENT
from common.store.engine import Connection
from common.store.rows import BlockDeviceRow
from conductor.engine.action_args import SwapVolumeArgs
from conductor.engine.action_data import ActionData, StepFailed
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import Run
from conductor.engine.step import Step
from conductor.engine.workflow import Workflow
from conductor.steps import volume_swaps, volumes

COPY_STEP = "copy"


@dataclass(kw_only=True)
class SwapData(ActionData):
    """Data that the steps of a swap leave for later steps."""

    #: Attachment of the new volume.
    attachment: str | None = None
    #: Sealed connection of the new volume.
    connection: str | None = None
    #: True once the new volume is the server's.
    swapped: bool = False


SwapRun = Run[SwapVolumeArgs, SwapData]


def _find_row(run: SwapRun) -> BlockDeviceRow:
    """Return the row of the action's volume, with the run's changes that are not stored yet."""
    return next(row for row in volumes.of(run) if row.uuid == run.args.block_device)


def _reserve(engine: Engine, run: SwapRun) -> None:
    new, server = run.args.new_volume_id, run.server.id
    volume_swaps.expect_late_swap(run, _find_row(run), new)
    attachments = volumes.service(engine).attachments(server, new) if run.is_repeated else []
    attachment = attachments[0] if attachments else volumes.service(engine).attach(new, server)
    run.data.attachment = attachment.id


def _connect(engine: Engine, run: SwapRun) -> None:
    run.data.attachment, run.data.connection = volume_swaps.connect_other(
        engine, run, _find_row(run), run.args.new_volume_id, str(run.data.attachment)
    )


def _end_without_swap(engine: Engine, run: SwapRun) -> None:
    """End the attachments of the new volume, and cancel the migration at the service.

    If the undo of the copy failed, do nothing, because the guest may still write to the new volume.
    A failure of the service becomes a pending cleanup.
    """
    if COPY_STEP not in run.data.undo_failures:
        _end_swap(engine, run, False)


def _end_swap(engine: Engine, run: SwapRun, swapped: bool) -> None:
    row, new = _find_row(run), run.args.new_volume_id
    with _cleanup_on_failure(run, swapped):
        keeps = {str(row.attachment_id)}
        volume_swaps.end_swap(engine, run.server.id, str(row.volume_id), new, keeps, swapped)


def _cleanup_on_failure(run: SwapRun, swapped: bool) -> AbstractContextManager[None]:
    """Return a context that turns a failure of the service into a pending cleanup.

    If the service does not answer, tries come first, as in ``Run.cleanup_on_failure``. ``swapped``
    is True if the server's data is in the new volume.
    """
    new = run.args.new_volume_id
    target, place = str(run.data.attachment or new), run.args.volume_id
    return run.cleanup_on_failure(ATTACHMENT, target, place, migrates_to=new, swapped=swapped)


def _describe_volume(engine: Engine, run: SwapRun) -> AttachedVolume:
    """Return the server's volume with the connection of the new volume."""
    return volumes.describe(engine, _find_row(run), run.data.connection)


def _copy_command(engine: Engine, run: SwapRun) -> CopyVolume:
    return CopyVolume(volume=_describe_volume(engine, run))


def _keep_command(engine: Engine, run: SwapRun) -> KeepVolume:
    return KeepVolume(volume=_describe_volume(engine, run))


def _switch_command(engine: Engine, run: SwapRun) -> SwitchVolume:
    return SwitchVolume(volume=_describe_volume(engine, run))


def _decide(tx: Connection, engine: Engine, runs: Sequence[SwapRun]) -> None:
    for run in runs:
        row = _find_row(run)
        run.set_volume(
            row,
            attachment_id=run.data.attachment,
            connection=run.data.connection,
            size_gb=max(row.size_gb or 0, run.args.new_size_gb),
        )
        run.data.swapped = True
        run.set(progress=0)


def _complete(engine: Engine, run: SwapRun) -> None:
    with _cleanup_on_failure(run, True):
        volumes.service(engine).complete(str(run.data.attachment))


def _end_with_swap(engine: Engine, run: SwapRun) -> None:
    _end_swap(engine, run, True)


def _fail_swap(tx: Connection, engine: Engine, run: SwapRun, problem: StepFailed) -> None:
    """Reset the progress of a failed swap. The runner records the failure.

    If the undo of the copy failed, the guest may write to both volumes. Then the volume's status
    becomes ERROR.
    """
    run.set(progress=0)
    if COPY_STEP in run.data.undo_failures:
        run.set_volume(_find_row(run), status=BlockDeviceStatus.ERROR)


SWAP_VOLUME = Workflow(
    "swap_volume",
    args=SwapVolumeArgs,
    data=SwapData,
    failed=_fail_swap,
    steps=(
        Step(
            "reserve",
            "First, so that no other server can use the new volume.",
            call=_reserve,
            undo_call=_end_without_swap,
            lane=Lane.VOLUME,
        ),
        Step(
            "connect",
            "The server's host needs both volumes for the copy.",
            call=_connect,
            lane=Lane.VOLUME,
        ),
        Step(
            COPY_STEP,
            "The step succeeds once both volumes have the same data and all writes are mirrored.",
            command=_copy_command,
            undo_command=_keep_command,
        ),
        Step(
            "decide",
            "Both volumes are the same. From here on the new one is the server's.",
            apply=_decide,
            pivot=True,
        ),
        Step(
            "switch",
            "The guest releases the old volume. A dead host counts as done.",
            command=_switch_command,
            done_when_host_dead=True,
        ),
        Step(
            "complete",
            "After the guest has the new volume, the service shows it as in use.",
            call=_complete,
            lane=Lane.VOLUME,
        ),
        Step(
            "end_migration",
            "Last: the service deletes the old volume and gives its id to the new one.",
            call=_end_with_swap,
            lane=Lane.VOLUME,
        ),
    ),
)
