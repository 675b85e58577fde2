# SPDX-License-Identifier: Apache-2.0
"""Carrying out what neighbours have refused, or were too silent, to remove: see ``store.cleanups``.

``retry`` is called every few seconds by a thread of its own, so that a neighbour that hangs holds
nobody up. It brings things to what the records say *now*, whatever was wanted when they were
refused: a port that its server has again stays. Nothing is done to the ports of a server that an
action has; when one has taken it meanwhile the row stays, and is looked at again after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.domain import errors
from common.store import cleanups
from common.store.rows import CleanupRow, ServerRow
from conductor.engine.engine import Engine
from conductor.steps import images, networks, shares, volume_cleanups, volumes
from conductor.steps.images import try_all

log = logging.getLogger(__name__)
BATCH_SIZE = 16  #: cleanups in one round
Server = ServerRow | None
#: Looks up the cleanup's server; after the neighbour was asked, so that nothing new is judged by an
#: old record.
Look = Callable[[], Server]


class _Busy(Exception):
    """An action has the server."""


def retry(engine: Engine) -> int:
    """Try what is due; returns how many there were."""
    rows = engine.store.write(lambda tx: cleanups.take(tx, REMEDIES, BATCH_SIZE))
    for row in rows:
        _try(engine, row)
    return len(rows)


def _try(engine: Engine, row: CleanupRow) -> None:
    seen: list[int | None] = [None]

    def look() -> Server:
        server = engine.store.read(lambda tx: cleanups.server_of(tx, row))
        if server is not None and server.action is not None:
            raise _Busy
        seen[0] = server.fence if server is not None else None
        return server

    what = f"cleanup {row.id} of server {row.server_id}, {cleanups.describe(row)}"
    try:
        REMEDIES[row.kind](engine, row, look)
    except _Busy:
        engine.store.write(lambda tx: cleanups.wait(tx, row))
    except errors.Unavailable as problem:
        _postpone(engine, row, what, problem, cleanups.SILENT_AT_MOST)
    except errors.Problem as problem:
        _postpone(engine, row, what, problem, cleanups.REFUSED_AT_MOST)
    except Exception:
        log.exception("%s failed unexpectedly", what)
        _postpone(engine, row, what, errors.Problem(), cleanups.REFUSED_AT_MOST)
    else:
        if engine.store.write(lambda tx: cleanups.strike(tx, row, seen[0])):
            log.info("%s is done", what)
        else:
            engine.store.write(lambda tx: cleanups.wait(tx, row))


def _postpone(
    engine: Engine, row: CleanupRow, what: str, problem: errors.Problem, at_most: int
) -> None:
    log.warning("%s waits: %s", what, problem.text)
    engine.store.write(lambda tx: cleanups.postpone(tx, row, problem.text, at_most))


# --- what is done for each kind ---
def _port(engine: Engine, row: CleanupRow, look: Look) -> None:
    service = networks.service(engine)
    try:
        port = service.port(row.target)
    except errors.NotFound:
        return
    server = look()
    if port.get("device_id") == row.server_id:
        networks.reconcile_port(service, port, server)
    if row.place:
        service.unbind_at(row.target, row.place)  # unless that is its place again


def _ports(engine: Engine, row: CleanupRow, look: Look) -> None:
    service = networks.service(engine)
    ports, server = service.ports(row.server_id), look()
    try_all(lambda port: networks.reconcile_port(service, port, server), ports)


def _binding(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Of a server that has come back to that host the binding is the active one, which is never
    touched."""
    look()
    networks.service(engine).unbind_at(row.target, row.place)


def _image(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Never one that a server rests in."""
    server = engine.store.read(lambda tx: cleanups.server_of(tx, row))
    if server is None or server.shelved_image_id != row.target:
        images.service(engine).delete(row.target)


def _backups(engine: Engine, row: CleanupRow, look: Look) -> None:
    """While the server exists; afterwards its backups are its user's alone."""
    if look() is not None:
        images.rotate(engine, row.server_id, row.args)


def _share(engine: Engine, row: CleanupRow, look: Look) -> None:
    """The rule that lets a host mount a share; by now another of its servers may need it."""
    shares.reconcile_rule(engine, row.target, row.place)


def _attachment(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Of one volume; by now the server may have it again."""
    volume_cleanups.reconcile(engine, row, look)


def _guest_volume(engine: Engine, row: CleanupRow, look: Look) -> None:
    """While the server has it: its guest may have it too."""
    volume_cleanups.give_back(engine, row, look)


def _snapshot(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Of an image that was not made."""
    volumes.service(engine).delete_snapshot(row.target)


def _gone_port(engine: Engine, row: CleanupRow, look: Look) -> None:
    """Take a port out of its guest, by an action."""
    networks.remove_gone_port(engine, row, look)


Remedy = Callable[[Engine, CleanupRow, Look], None]
REMEDIES: dict[str, Remedy] = {
    cleanups.PORT: _port,
    cleanups.PORTS: _ports,
    cleanups.BINDING: _binding,
    cleanups.IMAGE: _image,
    cleanups.BACKUPS: _backups,
    cleanups.SHARE: _share,
    cleanups.ATTACHMENT: _attachment,
    cleanups.SNAPSHOT: _snapshot,
    cleanups.GUEST_VOLUME: _guest_volume,
    cleanups.GONE_PORT: _gone_port,
    cleanups.LATE_PORTS: _ports,
    cleanups.LATE_ATTACHMENTS: _attachment,
}
