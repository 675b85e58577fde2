# SPDX-License-Identifier: Apache-2.0
"""The status of a volume that follows from its attachments."""

from sqlalchemy import ColumnElement, select

from deploy.one_machine.services.volume.schema import attachments, volumes
from deploy.one_machine.services.volume.service import VolumeChange

#: In these statuses a volume's status follows from its attachments. In others a job changes the
#: volume.
USES = ("available", "reserved", "attaching", "in-use", "detaching")


def derive_status(change: VolumeChange, volume_id: str) -> str:
    """Return the status of a volume that follows from its attachments.

    The status is in-use if an attachment is attached, else attaching if an attachment is attaching,
    else reserved. Without attachments the status is available.
    """
    statuses = set(
        change.connection.execute(
            select(attachments.c.status).where(attachments.c.volume_id == volume_id)
        ).scalars()
    )
    words = (("attached", "in-use"), ("attaching", "attaching"), ("reserved", "reserved"))
    return next((status for word, status in words if word in statuses), "available")


def update_status(change: VolumeChange, volume_id: str, *rules: ColumnElement[bool]) -> None:
    """Set the volume's status that follows from its attachments, if the volume meets the rules.

    Otherwise change nothing.

    Args:
        change: The transaction.
        volume_id: The volume.
        rules: Conditions on the volume. Without any, the status must be in ``USES``.
    """
    conditions = rules or (volumes.c.status.in_(USES),)
    status = {"status": derive_status(change, volume_id), "previous_status": None}
    change.set(volumes, volume_id, status, *conditions)
