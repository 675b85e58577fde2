# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes: those that an image of a server names, and those that a host takes or
merges for the block storage service."""

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
    """Those of an image that there is not. What the service keeps is a pending cleanup."""
    for snapshot in snapshots:
        with run.cleanup_on_failure(SNAPSHOT, snapshot):
            volumes.service(engine).delete_snapshot(snapshot)


#: What the service hears of a snapshot when its server is deleted meanwhile, by the action in hand.
#: A new file without a guest is as good as the old one, which nobody changes any more; files that
#: were not merged are merged when the snapshot is deleted again.
_WITHOUT_GUEST = {"volume_snapshot_create": CREATING, "volume_snapshot_delete": ERROR_DELETING}
#: The step from which on the files are merged.
MERGED = "report_merged"


def status_without_guest(before: ActionRow) -> str | None:
    """The status to report of the snapshot that this action took or merged when its server was
    deleted; None: it did neither."""
    return DELETING if before.step == MERGED else _WITHOUT_GUEST.get(before.workflow)


def end_without_guest(engine: Engine, snapshot_id: str, status: str) -> None:
    """Report of a snapshot whose server is deleted. Cinder writes into the server's attachment in
    which file the volume is when it has heard that a snapshot is taken: the attachment stays until
    then.

    Raises:
        Unavailable: the service does not answer, or is not done yet.
    """
    report(engine, snapshot_id, status)
    if status == CREATING and _is_creating(engine, snapshot_id):
        raise errors.Unavailable(f"The block storage service still takes snapshot {snapshot_id}.")


def _is_creating(engine: Engine, snapshot_id: str) -> bool:
    try:
        return volumes.service(engine).snapshot(snapshot_id).status == CREATING
    except errors.NotFound:
        return False


def report(engine: Engine, snapshot_id: str, status: str) -> None:
    """What a host has made of a snapshot. A service that waits for it no more knows better.

    Raises:
        Unavailable: it does not answer.
    """
    try:
        volumes.service(engine).update_snapshot_status(snapshot_id, status)
    except (errors.NotFound, errors.BadRequest):
        return
