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

    They belong to the volume with the id ``new``, or to the old volume of ``row``, whose id the new
    volume gets after the swap. A first try adds no cleanup.
    """
    volumes.expect_late_attachment(run, row)
    late_calls.expect_late_result(run, LATE_ATTACHMENTS, new)


def connect_other(
    engine: Engine, run: AnyRun, row: BlockDeviceRow, new: str, attachment: str
) -> tuple[str, str]:
    """Connect the new volume of a swap to the server's host.

    If the attachment was deleted, a new one is created and connected.

    Args:
        engine: The conductor's engine.
        run: The run of the swap.
        row: The row of the old volume.
        new: The id of the new volume.
        attachment: The id of the server's reservation of the new volume.

    Returns:
        The id of the connected attachment, and the encrypted connection.

    Raises:
        Conflict: The host's agent reports no connector.
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
    """End a swap at the service: delete attachments, and complete or cancel the migration.

    The server's attachments of the unused volume are deleted, except ``keeps``. With ``swapped``, a
    kept attachment of the new volume is completed. The service keeps the volume with the data,
    under the old volume's id. A migration that the service has ended already, or whose volume does
    not exist, is ignored.

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
