# SPDX-License-Identifier: Apache-2.0
"""A volume whose data is copied into another one: what the steps of the copy ask of the block
storage service, and how it ends whoever was killed meanwhile."""

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
    """What is carried out late: for the new volume, or for the old one, whose id it has then."""
    volumes.expect_late_attachment(run, row)
    late_calls.expect_late_result(run, LATE_ATTACHMENTS, new)


def connect_other(
    engine: Engine, run: AnyRun, row: BlockDeviceRow, new: str, attachment: str
) -> tuple[str, str]:
    """Let the server's host have a volume that is to take the place of this one; its attachment,
    which is another one where somebody has removed it, and its connection, sealed."""
    assert run.host is not None, "its volume is attached"
    connector = volumes.connector_of(engine, run.host)
    expect_late_swap(run, row, new)
    try:
        made = volumes.let_connect(engine, row, attachment, connector)
    except errors.NotFound:
        fresh = volumes.service(engine).attach(new, run.server.id)
        made = volumes.let_connect(engine, row, fresh.id, connector)
    return made.id, engine.vault.seal({**made.connection, NAME_ID: new})


def end_swap(
    engine: Engine, server_id: str, old: str, new: str, keeps: Collection[str], swapped: bool
) -> None:
    """The server has the data in the one or in the other: the attachments of the other end, but
    for those that it ``keeps``, and the service hears of it, which names what stays as the old one
    was."""
    for one in volumes.service(engine).attachments(server_id, old if swapped else new):
        if one.id not in keeps:
            volumes.service(engine).detach(one.id)
    for one in volumes.service(engine).attachments(server_id, new) if swapped else ():
        if one.id in keeps and one.connection and one.status != COMPLETE:
            volumes.service(engine).complete(one.id)
    try:
        found = volumes.service(engine).volume(old)
    except errors.NotFound:
        return
    if found.migration == MIGRATING:  # else it has heard of it
        volumes.service(engine).end_migration(old, new, not swapped)
