# SPDX-License-Identifier: Apache-2.0
"""The copy of an attached volume to another one: calls to the block storage service.

The functions can be repeated after a crash at any point.
"""

from __future__ import annotations

from collections.abc import Collection

from common.clients.volumes import MIGRATING
from common.domain import errors
from common.store.cleanups import LATE_ATTACHMENTS
from common.store.rows import BlockDeviceRow
from conductor.engine import late_calls
from conductor.engine.engine import Engine
from conductor.engine.run import AnyRun
from conductor.steps import volumes
from conductor.steps.volumes import COMPLETE, NAME_ID


def expect_late_swap(run: AnyRun, row: BlockDeviceRow, new: str) -> None:
    """Add pending cleanups for attachments that an earlier try may still create.

    They belong to the new volume, or to the old one, which gets the new volume's data and keeps its
    id.
    """
    volumes.expect_late_attachment(run, row)
    late_calls.expect_late_result(run, LATE_ATTACHMENTS, new)


def connect_other(
    engine: Engine, run: AnyRun, row: BlockDeviceRow, new: str, attachment: str
) -> tuple[str, str]:
    """Connect the new volume of a swap to the server's host.

    A deleted attachment is replaced.

    Returns:
        The id of the attachment, and the sealed connection.
    """
    assert run.host is not None, "a server with an attached volume has a host"
    connector = volumes.connector_of(engine, run.host)
    expect_late_swap(run, row, new)
    try:
        attachment_with_connection = volumes.let_connect(engine, row, attachment, connector)
    except errors.NotFound:
        reservation = volumes.service(engine).attach(new, run.server.id)
        attachment_with_connection = volumes.let_connect(engine, row, reservation.id, connector)
    return attachment_with_connection.id, engine.vault.seal(
        {**attachment_with_connection.connection, NAME_ID: new}
    )


def end_swap(
    engine: Engine, server_id: str, old: str, new: str, keeps: Collection[str], swapped: bool
) -> None:
    """End a swap: the server's data is in the new volume, or in the old volume.

    The attachments of the unused volume end, and the service completes or cancels the migration.
    The remaining volume has the old volume's id.

    Args:
        engine: The conductor's engine.
        server_id: The server.
        old: The id of the volume that the server had before the swap.
        new: The id of the volume to which the data is copied.
        keeps: Ids of the attachments that the server keeps.
        swapped: True if the server's data is in the new volume.
    """
    for attachment in volumes.service(engine).attachments(server_id, old if swapped else new):
        if attachment.id not in keeps:
            volumes.service(engine).detach(attachment.id)
    for attachment in volumes.service(engine).attachments(server_id, new) if swapped else ():
        if attachment.id in keeps and attachment.connection and attachment.status != COMPLETE:
            volumes.service(engine).complete(attachment.id)
    try:
        volume = volumes.service(engine).volume(old)
    except errors.NotFound:
        return
    if volume.migration == MIGRATING:  # Otherwise an earlier try has ended the migration.
        volumes.service(engine).end_migration(old, new, not swapped)
