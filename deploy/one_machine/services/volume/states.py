# SPDX-License-Identifier: Apache-2.0
"""The status of a volume as its attachments make it."""

from sqlalchemy import ColumnElement, select

from deploy.one_machine.services.volume.schema import attachments, volumes
from deploy.one_machine.services.volume.service import VolumeChange

#: A volume in one of them is as its attachments are; in another one somebody works on it.
USES = ("available", "reserved", "attaching", "in-use", "detaching")


def derive_status(change: VolumeChange, volume_id: str) -> str:
    """What the attachments say: in-use, attaching, reserved or available."""
    found = set(
        change.connection.execute(
            select(attachments.c.status).where(attachments.c.volume_id == volume_id)
        ).scalars()
    )
    words = (("attached", "in-use"), ("attaching", "attaching"), ("reserved", "reserved"))
    return next((status for word, status in words if word in found), "available")


def update_status(change: VolumeChange, volume_id: str, *rules: ColumnElement[bool]) -> None:
    """Give a volume the status that its attachments say, unless somebody works on it."""
    wanted = rules or (volumes.c.status.in_(USES),)
    status = {"status": derive_status(change, volume_id), "previous_status": None}
    change.set(volumes, volume_id, status, *wanted)
