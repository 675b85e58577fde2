# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes, for images of servers and on behalf of Cinder."""

from __future__ import annotations

from collections.abc import Sequence

from common.clients.volumes import CREATING, DELETING, ERROR_DELETING
from common.domain import errors
from common.store.cleanups import SNAPSHOT
from common.store.rows import ActionRow
from conductor.engine.engine import Engine
from conductor.engine.run import AnyRun
from conductor.steps import volumes


def delete(engine: Engine, run: AnyRun, snapshots: Sequence[str]) -> None:
    """Delete these volume snapshots, because the image that names them was not created.

    A refusal becomes a pending cleanup.
    """
    for snapshot in snapshots:
        with run.cleanup_on_failure(SNAPSHOT, snapshot):
            volumes.service(engine).delete_snapshot(snapshot)


#: Workflow -> the status to report for its snapshot if the server was deleted meanwhile. A snapshot
#: without its new file is still valid, because no guest changes the old file any more. Files that
#: were not merged are merged when the snapshot is deleted again.
_WITHOUT_GUEST = {"volume_snapshot_create": CREATING, "volume_snapshot_delete": ERROR_DELETING}
#: The first step after the files were merged.
MERGED = "report_merged"


def status_without_guest(before: ActionRow) -> str | None:
    """Return the status to report for the snapshot of a superseded action.

    Args:
        before: The action that the server's delete has superseded.

    Returns:
        None if the action neither creates nor deletes a snapshot.
    """
    return DELETING if before.step == MERGED else _WITHOUT_GUEST.get(before.workflow)


def end_without_guest(engine: Engine, snapshot_id: str, status: str) -> None:
    """Report the status of a snapshot whose server was deleted.

    With the status ``creating``, this raises Unavailable until the service has ended the creation.
    The caller repeats the call.

    Why: when Cinder completes a new snapshot, it writes the volume's new file name into the
    server's attachment. So the attachment must exist until then.

    Raises:
        Unavailable: The service does not answer, or still creates the snapshot.
        Problem: The service refuses the report, as in ``report``.
    """
    report(engine, snapshot_id, status)
    if status == CREATING and _is_creating(engine, snapshot_id):
        raise errors.Unavailable(
            f"The block storage service is still creating snapshot {snapshot_id}."
        )


def _is_creating(engine: Engine, snapshot_id: str) -> bool:
    try:
        return volumes.service(engine).snapshot(snapshot_id).status == CREATING
    except errors.NotFound:
        return False


def report(engine: Engine, snapshot_id: str, status: str) -> None:
    """Report to the service how the creation or deletion of a snapshot on a host has ended.

    A missing snapshot is ignored, and so is a BadRequest of the service, because then the service
    no longer waits for the report.

    Raises:
        Unavailable: The service does not answer.
        Problem: The service refuses for another reason.
    """
    try:
        volumes.service(engine).update_snapshot_status(snapshot_id, status)
    except (errors.NotFound, errors.BadRequest):
        return
