# SPDX-License-Identifier: Apache-2.0
"""Delete, soft delete and restore.

A delete supersedes every other action. The server's guests become pending cleanups of their hosts.
Ports are deleted after the guest and before the server, so that the user can use them again at
once. A silent network service therefore delays the end of the server.

Images are deleted last, because a silent image service must not keep a server alive. These are the
images that a superseded action began to create or had to delete, and the image of a shelved server.
A removal that a service refuses becomes a pending cleanup, and the delete completes all the same.

A soft delete only stops the guest. A restore starts the guest again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.domain import states
from common.domain.clock import SECOND
from common.domain.models import Result
from common.domain.statuses import ActionState, MigrationStatus
from common.domain.wire import from_wire
from common.service.log import get_logger
from common.store.cleanups import IMAGE
from common.store.engine import Connection, now
from common.store.rows import ActionRow
from common.store.servers import actions, migrations
from common.store.servers import shares as mappings
from conductor.engine.action_args import ActionArgs, ShareArgs
from conductor.engine.action_data import ActionData
from conductor.engine.engine import Engine, Lane
from conductor.engine.run import AnyRun, Run
from conductor.engine.step import Step, StepEvents
from conductor.engine.workflow import Workflow
from conductor.steps import (
    guest,
    images,
    networks,
    removals,
    shares,
    volume_cleanups,
    volume_snapshots,
    volumes,
)
from conductor.steps.shares import SharesData
from conductor.steps.volume_cleanups import LeavingData

log = get_logger(__name__)

#: Longer than a service may still take for a call that timed out here.
LATE_CALL_MICROS = 20 * SECOND
#: Limit of the superseded actions that a delete reads.
MOST_BEFORE = 100
#: Steps of superseded actions with a call that creates objects at a service.
_CREATING_CALLS = ("networks", "allow", *volumes.CALLS)


@dataclass(kw_only=True)
class DeleteData(SharesData, LeavingData):
    """Data that the steps of a delete leave for later steps."""

    #: Images to delete with the server. None before ``remove`` has read them.
    images: list[str] | None = None
    #: Volume snapshots of an image that was not completed.
    snapshots: list[str] = field(default_factory=list)
    #: True if the server may have an open migration.
    moves: bool = False
    #: True if a call of the superseded action may still succeed.
    late: bool = False
    #: True once the delete has waited for such calls.
    waited: bool = False


DeleteRun = Run[ActionArgs, DeleteData]


def _remove_guests(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    ready = removals.collect(tx, runs)
    server_mappings = (
        mappings.leaving(tx, server_ids)
        if (server_ids := [run.server.id for run in ready if run.server.shares])
        else {}
    )
    for run in ready:
        run.data.shares = [
            from_wire(ShareArgs, share) for share in server_mappings.get(run.server.id, ())
        ]
        superseded_actions = _read_superseded(tx, run)
        run.data.moves = run.args.was == states.RESIZED or bool(superseded_actions)
        images = {run.server.shelved_image_id}
        run.data.snapshots = []
        if run.volumes:
            volume_cleanups.mark_detaching(run)
        for action in superseded_actions:
            try:
                images.update(_read_images(action))
                run.data.snapshots += [
                    str(snapshot) for snapshot in action.args.get("snapshots", [])
                ]
                if run.volumes:
                    volume_cleanups.record_superseded_action(run, action)
            except (AttributeError, KeyError, TypeError, ValueError):
                log.exception(
                    "the images and volume snapshots that an action left cannot be read and are "
                    "not deleted; see the row of the action in the table actions",
                    action=action.id,
                    server=run.server.id,
                )
        run.data.images = sorted(filter(None, images))
        run.data.late = any(action.step in _CREATING_CALLS for action in superseded_actions)


def _read_superseded(tx: Connection, run: DeleteRun) -> list[ActionRow]:
    """Return the chain of superseded actions before this delete, newest first.

    Each action has superseded the next, for example a first delete and then the action that ran.
    The chain ends after ``MOST_BEFORE`` actions, or before a missing or not superseded action.
    """
    superseded_actions: list[ActionRow] = []
    earlier_id = run.data.after
    while earlier_id and len(superseded_actions) < MOST_BEFORE:
        earlier = actions.show_by_id(tx, earlier_id)
        if earlier is None or earlier.state != ActionState.SUPERSEDED:
            break
        superseded_actions.append(earlier)
        earlier_id = earlier.data.get("after") if isinstance(earlier.data, dict) else None
    return superseded_actions


def _read_images(action: ActionRow) -> list[str | None]:
    """Return two ids: the image that the action was to create, and the image that it was to delete.

    An id is None if the action has no such image.
    """
    return [action.args.get("image_id"), action.data.get("image_id")]


def _mark_deleted(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    if moving_ids := [run.server.id for run in runs if run.data.moves]:
        migrations.end_open(tx, moving_ids, MigrationStatus.CANCELLED)
    for run in runs:
        run.set(
            vm_state=states.DELETED,
            task_state=None,
            power_state=states.NOSTATE,
            deleted=1,
            deleted_at=now(),
            terminated_at=now(),
            progress=0,
        )


def _wait_for_late_calls(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    for run in runs:
        if not run.data.waited:
            run.data.waited = True
            run.retry_in(LATE_CALL_MICROS)


def _is_late(run: DeleteRun) -> bool:
    return run.data.late


def _delete_images(engine: Engine, run: DeleteRun) -> None:
    for image in run.data.images or ():
        with run.cleanup_on_failure(IMAGE, image):
            images.service(engine).delete(image)


def _delete_snapshots(engine: Engine, run: DeleteRun) -> None:
    volume_snapshots.delete(engine, run, run.data.snapshots)


def _record_stopped(tx: Connection, run: AnyRun, result: Result) -> None:
    guest.record_stopped(tx, run, result)
    run.set(soft_deleted_at=now())


def _record_restored(tx: Connection, run: AnyRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    run.set(soft_deleted_at=None)


DELETE = Workflow(
    "delete",
    args=ActionArgs,
    data=DeleteData,
    steps=(
        Step(
            "remove",
            "First and without undo: an accepted delete cannot be taken back.",
            apply=_remove_guests,
            pivot=True,
            events=StepEvents(succeeded=("instance.shutdown.start", "instance.shutdown.end")),
        ),
        Step(
            "unplug",
            "After the guest, because the port's rules must hold while the guest sends frames.",
            call=networks.delete_ports,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "unshare",
            "After the guest, and before the server counts as deleted, because the user expects "
            "no access from it.",
            call=shares.remove_rules,
            apply=shares.delete_mappings,
            lane=Lane.SHARE,
            condition=shares.has_shares,
        ),
        Step(
            "release_volumes",
            "After the guest, and before the server counts as deleted, so that the user can reuse "
            "the volumes.",
            call=volume_cleanups.release_all,
            apply=volume_cleanups.forget_all,
            lane=Lane.VOLUME,
            condition=volume_cleanups.had_volumes,
        ),
        Step(
            "gone",
            "The server counts as deleted when its ports, shares and volumes are free.",
            apply=_mark_deleted,
            events=StepEvents(succeeded=("instance.delete.end",)),
        ),
        Step(
            "wait",
            "A call of the superseded action that timed out may still succeed.",
            apply=_wait_for_late_calls,
            condition=_is_late,
        ),
        Step(
            "release",
            "Delete the ports that such a call created late.",
            call=networks.delete_ports,
            lane=Lane.NETWORK,
            condition=lambda run: run.data.late,
        ),
        Step(
            "unshare_late",
            "Remove the access rules that such a call created late.",
            call=shares.remove_rules,
            lane=Lane.SHARE,
            condition=lambda run: run.data.late and shares.has_shares(run),
        ),
        Step(
            "release_volumes_late",
            "End the attachments that such a call created late.",
            call=volume_cleanups.release_all,
            lane=Lane.VOLUME,
            condition=lambda run: run.data.late and volume_cleanups.had_volumes(run),
        ),
        Step(
            "forget",
            "Images last: the server is deleted for its user already.",
            call=_delete_images,
            condition=lambda run: run.data.images is None or bool(run.data.images),
        ),
        Step(
            "delete_snapshots",
            "The image that would have named these snapshots was never completed.",
            call=_delete_snapshots,
            lane=Lane.VOLUME,
            condition=lambda run: bool(run.data.snapshots),
        ),
    ),
)

SOFT_DELETE = Workflow(
    "soft_delete",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "stop",
            "The guest's files stay until the time to restore the server is over.",
            command=guest.stop,
            on_result=_record_stopped,
        ),
    ),
)

RESTORE = Workflow(
    "restore",
    args=ActionArgs,
    data=ActionData,
    steps=(
        Step(
            "run",
            "Start the guest as for a start.",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=_record_restored,
        ),
    ),
)
