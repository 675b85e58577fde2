# SPDX-License-Identifier: Apache-2.0
"""Retry pending cleanups: removals that an external service refused or did not answer.

A thread of its own calls ``retry`` every few seconds, so that a slow service delays no action. A
remedy brings the service to the state in the *present* records. For example, a port that belongs to
its server again is kept. The ports of a server with a running action are not changed. If an action
has taken the server during the remedy, the cleanup is repeated after the action. See
``common.store.cleanups``.

Each remedy gets the cleanup and ``look``, which reads the cleanup's server: None if the server does
not exist. If an action has the server, ``look`` raises, and the cleanup waits for the action.
"""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.service.log import get_logger
from common.store import cleanups
from common.store.rows import CleanupRow, ServerRow
from conductor.engine.engine import Engine
from conductor.steps import images, networks, shares, volume_cleanups, volumes
from conductor.steps.images import try_all

log = get_logger(__name__)
#: Cleanups in one round.
BATCH_SIZE = 16
Server = ServerRow | None
#: Reads the cleanup's server. A remedy first reads from the external service and then calls this,
#: so that a newer state at the service is never compared with an older record.
Look = Callable[[], Server]


class _Busy(Exception):
    """An action has the server, so the cleanup must wait."""


def retry(engine: Engine) -> int:
    """Try at most ``BATCH_SIZE`` cleanups that are due, and return the number of tries.

    Completed cleanups are deleted, unless an action has taken the server meanwhile. The others are
    postponed.
    """
    rows = engine.store.write(lambda tx: cleanups.take(tx, REMEDIES, BATCH_SIZE))
    for row in rows:
        _try(engine, row)
    return len(rows)


def _try(engine: Engine, row: CleanupRow) -> None:
    fence_read: list[int | None] = [None]

    def look() -> Server:
        server = engine.store.read(lambda tx: cleanups.server_of(tx, row))
        if server is not None and server.action is not None:
            raise _Busy
        fence_read[0] = server.fence if server is not None else None
        return server

    description = f"cleanup {row.id} of server {row.server_id}, {cleanups.describe(row)}"
    try:
        REMEDIES[row.kind](engine, row, look)
    except _Busy:
        engine.store.write(lambda tx: cleanups.wait(tx, row))
    except errors.Unavailable as problem:
        _postpone(engine, row, description, problem, cleanups.SILENT_AT_MOST)
    except errors.Problem as problem:
        _postpone(engine, row, description, problem, cleanups.REFUSED_AT_MOST)
    except Exception:
        log.exception(
            "a cleanup failed unexpectedly",
            cleanup=row.id,
            server=row.server_id,
            description=description,
        )
        _postpone(engine, row, description, errors.Problem(), cleanups.REFUSED_AT_MOST)
    else:
        if engine.store.write(lambda tx: cleanups.strike(tx, row, fence_read[0])):
            log.info(
                "a cleanup is done", cleanup=row.id, server=row.server_id, description=description
            )
        else:
            engine.store.write(lambda tx: cleanups.wait(tx, row))


def _postpone(
    engine: Engine, row: CleanupRow, description: str, problem: errors.Problem, at_most: int
) -> None:
    log.warning(
        "a cleanup waits",
        cleanup=row.id,
        server=row.server_id,
        description=description,
        problem=problem.text,
    )
    engine.store.write(lambda tx: cleanups.postpone(tx, row, problem.text, at_most))


# --- the remedy of each kind ---
def _clean_port(engine: Engine, row: CleanupRow, look: Look) -> None:
    service = networks.service(engine)
    try:
        port = service.port(row.target)
    except errors.NotFound:
        return
    server = look()
    if port.get("device_id") == row.server_id:
        networks.reconcile_port(service, port, server)
    if row.place:
        service.unbind_at(row.target, row.place)  # An active binding is never removed.


def _clean_ports(engine: Engine, row: CleanupRow, look: Look) -> None:
    service = networks.service(engine)
    ports, server = service.ports(row.server_id), look()
    try_all(lambda port: networks.reconcile_port(service, port, server), ports)


def _delete_binding(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Delete a port's binding to a host, unless the binding is active.

    The binding is active if the server is on that host again.
    """
    look()
    networks.service(engine).unbind_at(row.target, row.place)


def _delete_image(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Delete the image, unless the server is shelved in this image."""
    server = engine.store.read(lambda tx: cleanups.server_of(tx, row))
    if server is None or server.shelved_image_id != row.target:
        images.service(engine).delete(row.target)


def _rotate_backups(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Rotate the backups while the server exists. Afterwards they belong to the user alone."""
    if look() is not None:
        images.rotate(engine, row.server_id, row.args)


def _reconcile_share(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Create the share's access rule if a server needs the rule by now, otherwise delete it."""
    shares.reconcile_rule(engine, row.target, row.place)


def _reconcile_attachment(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Bring a volume and its attachments to the state in the server's record."""
    volume_cleanups.reconcile(engine, row, look)


def _detach_guest_volume(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Begin the detach of a volume, unless its row is gone or has another status than error."""
    volume_cleanups.give_back(engine, row, look)


def _delete_snapshot(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Delete a volume snapshot, because the image that names the snapshot was not created."""
    volumes.service(engine).delete_snapshot(row.target)


def _remove_gone_port(engine: Engine, row: CleanupRow, look: Look) -> None:
    networks.remove_gone_port(engine, row, look)


Remedy = Callable[[Engine, CleanupRow, Look], None]
REMEDIES: dict[str, Remedy] = {
    cleanups.PORT: _clean_port,
    cleanups.PORTS: _clean_ports,
    cleanups.BINDING: _delete_binding,
    cleanups.IMAGE: _delete_image,
    cleanups.BACKUPS: _rotate_backups,
    cleanups.SHARE: _reconcile_share,
    cleanups.ATTACHMENT: _reconcile_attachment,
    cleanups.SNAPSHOT: _delete_snapshot,
    cleanups.GUEST_VOLUME: _detach_guest_volume,
    cleanups.GONE_PORT: _remove_gone_port,
    cleanups.LATE_PORTS: _clean_ports,
    cleanups.LATE_ATTACHMENTS: _reconcile_attachment,
}
