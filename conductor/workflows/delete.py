# SPDX-License-Identifier: Apache-2.0
"""Delete: always wins. Whatever guests the server has become debts; the server is gone when they
are confirmed.

The action that ran before was superseded when this one was accepted. Ports go when the guest is
gone and before the server is, so that its user finds them free; a silent network service holds that
up for a while. An image that the earlier action had begun to make or had still to delete, or that
the server was shelved into, goes last, because a silent image service must not keep a server alive.
What a service refuses to remove is a pending cleanup: the server is gone all the same. Also here:
soft delete, which only stops the guest, and restore.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.domain import states
from common.domain.clock import SECOND
from common.domain.models import Result
from common.domain.statuses import ActionState, MigrationStatus
from common.domain.wire import from_wire
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
    debts,
    guest,
    images,
    networks,
    shares,
    volume_cleanups,
    volume_snapshots,
    volumes,
)
from conductor.steps.shares import SharesData
from conductor.steps.volume_cleanups import LeavingData

log = logging.getLogger(__name__)

#: Longer than a call to a service may take there after it was given up here.
LATE_CALL_MICROS = 20 * SECOND
MOST_BEFORE = 100  #: superseded actions that a delete looks at
#: Steps of superseded actions whose call makes what is to be removed.
_CREATING_CALLS = ("networks", "allow", *volumes.CALLS)


@dataclass(kw_only=True)
class DeleteData(SharesData, LeavingData):
    """What the steps leave."""

    images: list[str] | None = None  #: that nobody will want; None: not known yet
    snapshots: list[str] = field(default_factory=list)  #: of such an image
    moves: bool = False  #: a migration may be open
    late: bool = False  #: a call of the superseded action may still be carried out
    waited: bool = False  #: long enough for that


DeleteRun = Run[ActionArgs, DeleteData]


def _remove(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    ready = debts.collect(tx, runs)
    left = (
        mappings.leaving(tx, having)
        if (having := [run.server.id for run in ready if run.server.shares])
        else {}
    )
    for run in ready:
        run.data.shares = [from_wire(ShareArgs, share) for share in left.get(run.server.id, ())]
        superseded = _superseded(tx, run)
        run.data.moves = run.args.was == states.RESIZED or bool(superseded)
        images = {run.server.shelved_image_id}
        run.data.snapshots = []
        if run.volumes:
            volume_cleanups.mark_detaching(run)
        for one in superseded:
            try:
                images.update(_images_of(one))
                run.data.snapshots += [str(snapshot) for snapshot in one.args.get("snapshots", [])]
                if run.volumes:
                    volume_cleanups.record_superseded_action(run, one)
            except (AttributeError, KeyError, TypeError, ValueError):
                log.exception(
                    "what action %s has left of server %s cannot be read and stays; see its row in "
                    "the table actions",
                    one.id,
                    run.server.id,
                )
        run.data.images = sorted(filter(None, images))
        run.data.late = any(one.step in _CREATING_CALLS for one in superseded)


def _superseded(tx: Connection, run: DeleteRun) -> list[ActionRow]:
    """What was in hand when the server was deleted, and deletes that were in the place of this
    one: their user was impatient."""
    found: list[ActionRow] = []
    after = run.data.after
    while after and len(found) < MOST_BEFORE:
        before = actions.show_by_id(tx, after)
        if before is None or before.state != ActionState.SUPERSEDED:
            break
        found.append(before)
        after = before.data.get("after") if isinstance(before.data, dict) else None
    return found


def _images_of(superseded: ActionRow) -> list[str | None]:
    """Return the images that it had begun to make, or had still to delete when its server ran."""
    return [superseded.args.get("image_id"), superseded.data.get("image_id")]


def _gone(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
    if moving := [run.server.id for run in runs if run.data.moves]:
        migrations.end_open(tx, moving, MigrationStatus.CANCELLED)
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


def _wait(tx: Connection, engine: Engine, runs: Sequence[DeleteRun]) -> None:
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


def _kept(tx: Connection, run: AnyRun, result: Result) -> None:
    guest.record_stopped(tx, run, result)
    run.set(soft_deleted_at=now())


def _restored(tx: Connection, run: AnyRun, result: Result) -> None:
    guest.record_booted(tx, run, result)
    run.set(soft_deleted_at=None)


DELETE = Workflow(
    "delete",
    args=ActionArgs,
    data=DeleteData,
    steps=(
        Step(
            "remove",
            "first: there is nothing to go back to once a user has said delete",
            apply=_remove,
            pivot=True,
            events=StepEvents(succeeded=("instance.shutdown.start", "instance.shutdown.end")),
        ),
        Step(
            "unplug",
            "after the guest: what it still sends needs its port's rules",
            call=networks.delete_ports,
            lane=Lane.NETWORK,
            condition=networks.has_ports,
        ),
        Step(
            "unshare",
            "after the guest, and before its user may think that nothing of it is left",
            call=shares.remove_rules,
            apply=shares.delete_mappings,
            lane=Lane.SHARE,
            condition=shares.has_shares,
        ),
        Step(
            "release_volumes",
            "after the guest, before its user may think that nothing of it is left",
            call=volume_cleanups.release_all,
            apply=volume_cleanups.forget_all,
            lane=Lane.VOLUME,
            condition=volume_cleanups.had_volumes,
        ),
        Step(
            "gone",
            "its user sees it gone when nothing of it is in their way",
            apply=_gone,
            events=StepEvents(succeeded=("instance.delete.end",)),
        ),
        Step(
            "wait",
            "a call that the superseded action gave up may still be carried out",
            apply=_wait,
            condition=_is_late,
        ),
        Step(
            "release",
            "what an earlier call made late",
            call=networks.delete_ports,
            lane=Lane.NETWORK,
            condition=lambda run: run.data.late,
        ),
        Step(
            "unshare_late",
            "the same of shares",
            call=shares.remove_rules,
            lane=Lane.SHARE,
            condition=lambda run: run.data.late and shares.has_shares(run),
        ),
        Step(
            "release_volumes_late",
            "the same of volumes",
            call=volume_cleanups.release_all,
            lane=Lane.VOLUME,
            condition=lambda run: run.data.late and volume_cleanups.had_volumes(run),
        ),
        Step(
            "forget",
            "last: only images are left, and the server is gone for its user already",
            call=_delete_images,
            condition=lambda run: run.data.images is None or bool(run.data.images),
        ),
        Step(
            "delete_snapshots",
            "with the image that would have named them",
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
            "the guest's disk stays until the time to restore it is over",
            command=guest.stop,
            on_result=_kept,
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
            "as a start",
            command=guest.start,
            on_start=guest.allow_to_run,
            on_result=_restored,
        ),
    ),
)
