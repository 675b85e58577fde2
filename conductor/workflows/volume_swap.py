# SPDX-License-Identifier: Apache-2.0
"""A volume's data goes into another one while the server runs, and the server goes on there.

The block storage service asks for it when it migrates or retypes a volume that a server has; it
gives the data the old id afterwards. The host first makes both volumes the same and keeps them so,
whatever the guest writes. Only then, in one transaction, is decided that the new one is the
volume: whoever dies before leaves the old one, whoever dies after it the new one, and either has
all data. The guest lets go of the old one before its attachment ends.
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
    """What the steps leave."""

    attachment: str | None = None  #: of the new volume
    connection: str | None = None  #: the same, sealed
    swapped: bool = False  #: the new volume has the data from here on


SwapRun = Run[SwapVolumeArgs, SwapData]


def _row(run: SwapRun) -> BlockDeviceRow:
    """The volume that the action is about."""
    return next(row for row in volumes.of(run) if row.uuid == run.args.block_device)


def _reserve(engine: Engine, run: SwapRun) -> None:
    new, server = run.args.new_volume_id, run.server.id
    volume_swaps.expect_late_swap(run, _row(run), new)
    found = volumes.service(engine).attachments(server, new) if run.is_repeated else []
    made = found[0] if found else volumes.service(engine).attach(new, server)
    run.data.attachment = made.id


def _connect(engine: Engine, run: SwapRun) -> None:
    run.data.attachment, run.data.connection = volume_swaps.connect_other(
        engine, run, _row(run), run.args.new_volume_id, str(run.data.attachment)
    )


def _keep_old(engine: Engine, run: SwapRun) -> None:
    """Nobody has the new volume, and the service deletes it; unless the guest may write to it
    still."""
    if COPY_STEP not in run.data.undo_failures:
        _end(engine, run, False)


def _end(engine: Engine, run: SwapRun, swapped: bool) -> None:
    row, new = _row(run), run.args.new_volume_id
    with _left(run, swapped):
        keeps = {str(row.attachment_id)}
        volume_swaps.end_swap(engine, run.server.id, str(row.volume_id), new, keeps, swapped)


def _left(run: SwapRun, swapped: bool) -> AbstractContextManager[None]:
    """What the service does not take becomes a pending cleanup of the whole end."""
    new = run.args.new_volume_id
    target, place = str(run.data.attachment or new), run.args.volume_id
    return run.cleanup_on_failure(ATTACHMENT, target, place, migrates_to=new, swapped=swapped)


def _volume(engine: Engine, run: SwapRun) -> AttachedVolume:
    """The volume as it is to be."""
    return volumes.describe(engine, _row(run), run.data.connection)


def _copy(engine: Engine, run: SwapRun) -> CopyVolume:
    return CopyVolume(volume=_volume(engine, run))


def _keep(engine: Engine, run: SwapRun) -> KeepVolume:
    return KeepVolume(volume=_volume(engine, run))


def _switch(engine: Engine, run: SwapRun) -> SwitchVolume:
    return SwitchVolume(volume=_volume(engine, run))


def _decide(tx: Connection, engine: Engine, runs: Sequence[SwapRun]) -> None:
    for run in runs:
        row = _row(run)
        run.set_volume(
            row,
            attachment_id=run.data.attachment,
            connection=run.data.connection,
            size_gb=max(row.size_gb or 0, run.args.new_size_gb),
        )
        run.data.swapped = True
        run.set(progress=0)


def _complete(engine: Engine, run: SwapRun) -> None:
    with _left(run, True):
        volumes.service(engine).complete(str(run.data.attachment))


def _end_old(engine: Engine, run: SwapRun) -> None:
    _end(engine, run, True)


def _failed(tx: Connection, engine: Engine, run: SwapRun, problem: StepFailed) -> None:
    """The server has the volume as before; where the guest may write to both an operator should
    look."""
    run.set(progress=0)
    if COPY_STEP in run.data.undo_failures:
        run.set_volume(_row(run), status=BlockDeviceStatus.ERROR)


SWAP_VOLUME = Workflow(
    "swap_volume",
    args=SwapVolumeArgs,
    data=SwapData,
    failed=_failed,
    steps=(
        Step(
            "reserve",
            "first: from here on nobody else can have the new volume",
            call=_reserve,
            undo_call=_keep_old,
            lane=Lane.VOLUME,
        ),
        Step(
            "connect",
            "the server's host may have both",
            call=_connect,
            lane=Lane.VOLUME,
        ),
        Step(
            COPY_STEP,
            "until both have the same data, and stay so",
            command=_copy,
            undo_command=_keep,
        ),
        Step(
            "decide",
            "one transaction, while both are the same: from here on the new one is the volume",
            apply=_decide,
            pivot=True,
        ),
        Step(
            "switch",
            "the guest lets go of the old one; of a host whose guests are dead none has it",
            command=_switch,
            done_when_host_dead=True,
        ),
        Step(
            "complete",
            "when the guest has it: the new volume is shown as in use",
            call=_complete,
            lane=Lane.VOLUME,
        ),
        Step(
            "end_migration",
            "last: the service deletes the old one, and gives its id to the new one",
            call=_end_old,
            lane=Lane.VOLUME,
        ),
    ),
)
