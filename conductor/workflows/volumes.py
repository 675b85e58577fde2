# SPDX-License-Identifier: Apache-2.0
"""Volumes of a server that exists: attach, detach, extend.

The volume is reserved and connected before the host is told, and its attachment ends after the host
has let go of it. An attach that fails leaves nothing. Of a server that is on no host the attachment
has none either; the volume is shown as in use all the same, and its host connects it when the
server comes back.
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


def _row(run: VolumeRun) -> BlockDeviceRow:
    """The volume that the action is about."""
    return next(row for row in volumes.of(run) if row.uuid == run.args.block_device)


def _has_host(run: VolumeRun) -> bool:
    return run.host is not None


# --- attach ---
def _reserve(engine: Engine, run: VolumeRun) -> None:
    volumes.reserve(engine, run, _row(run))


def _reserved(tx: Connection, engine: Engine, runs: Sequence[VolumeRun]) -> None:
    for run in runs:
        if run.host is None:
            run.set_volume(_row(run), status=BlockDeviceStatus.RESERVED)


def _release(engine: Engine, run: VolumeRun) -> None:
    """The server has no attachment of the volume; unless its guest may have the volume still."""
    row = _row(run)
    if ATTACH_STEP in run.data.undo_failures:
        return
    target = row.attachment_id or str(row.volume_id)
    with run.cleanup_on_failure(ATTACHMENT, target, str(row.volume_id)):
        for one in volumes.service(engine).attachments(run.server.id, row.volume_id):
            volumes.service(engine).detach(one.id)


def _connect(engine: Engine, run: VolumeRun) -> None:
    assert run.host is not None, "the step is for servers with a host"
    volumes.connect(engine, run, _row(run), volumes.connector_of(engine, run.host))


def _attach(engine: Engine, run: VolumeRun) -> AttachVolume:
    return AttachVolume(volume=volumes.describe(engine, _row(run)))


def _detach(engine: Engine, run: VolumeRun) -> DetachVolume:
    return DetachVolume(volume=volumes.describe(engine, _row(run)))


def _attached(tx: Connection, run: VolumeRun, result: Result) -> None:
    run.set_volume(_row(run), status=BlockDeviceStatus.ATTACHED)


def _complete(engine: Engine, run: VolumeRun) -> None:
    row = _row(run)
    assert row.attachment_id is not None, "it was reserved"
    with run.cleanup_on_failure(ATTACHMENT, row.attachment_id, str(row.volume_id)):
        volumes.service(engine).complete(row.attachment_id)


def _attach_failed(tx: Connection, engine: Engine, run: VolumeRun, problem: StepFailed) -> None:
    """The server does not have it; or, where the guest did not give it back, may have it, until a
    pending cleanup has detached it."""
    row = _row(run)
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
    failed=_attach_failed,
    steps=(
        Step(
            "reserve",
            "first: from here on nobody else can have the volume, and the API waits for this",
            call=_reserve,
            apply=_reserved,
            undo_call=_release,
            lane=Lane.VOLUME,
        ),
        Step(
            "connect",
            "before the host is told, so that it may",
            call=_connect,
            lane=Lane.VOLUME,
            condition=_has_host,
        ),
        Step(
            ATTACH_STEP,
            "the host connects and verifies it before the guest sees it",
            command=_attach,
            on_result=_attached,
            undo_command=_detach,
            condition=_has_host,
            pivot=True,
        ),
        Step(
            "complete",
            "when the guest has it, or will when it comes back: the volume is shown as in use",
            call=_complete,
            lane=Lane.VOLUME,
        ),
    ),
)


# --- detach ---
def _detach_failed(tx: Connection, engine: Engine, run: VolumeRun, problem: StepFailed) -> None:
    """The guest did not let go of it: the server has it as before."""
    run.set_volume(_row(run), status=run.args.before)


def _forget(tx: Connection, engine: Engine, runs: Sequence[VolumeRun]) -> None:
    for run in runs:
        run.remove_volumes([_row(run)])


DETACH_VOLUME = Workflow(
    "detach_volume",
    args=VolumeActionArgs,
    data=ActionData,
    failed=_detach_failed,
    steps=(
        Step(
            "detach",
            "first: while the guest has it, its attachment stays; of a host whose guests are dead none has",
            command=_detach,
            condition=_has_host,
            done_when_host_dead=True,
            pivot=True,
        ),
        Step(
            "end_attachment",
            "after the host: from here on others can have the volume",
            call=_release,
            apply=_forget,
            lane=Lane.VOLUME,
        ),
    ),
)


# --- extend ---
def _look(engine: Engine, run: VolumeRun) -> None:
    row = _row(run)
    found = volumes.service(engine).volume(str(row.volume_id))
    run.set_volume(row, size_gb=found.size_gb)


def _extend(engine: Engine, run: VolumeRun) -> ExtendVolume:
    return ExtendVolume(volume=volumes.describe(engine, _row(run)))


EXTEND_VOLUME = Workflow(
    "extend_volume",
    args=VolumeActionArgs,
    data=ActionData,
    steps=(
        Step(
            "look_at_size",
            "the service says how large it is by now",
            call=_look,
            lane=Lane.VOLUME,
        ),
        Step("extend", "the guest sees it", command=_extend, condition=_has_host),
    ),
)
