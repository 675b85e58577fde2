# SPDX-License-Identifier: Apache-2.0
"""``kilonova cleanup list|retry|cancel``: pending cleanups in external services and on hosts.

Conductors retry each cleanup automatically, with pauses from seconds to an hour. ``retry`` makes
one due now, for example after a repair of the cause. ``cancel`` removes one from the list. Then the
object remains in the external service, and the operator has to delete the object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from common.domain.clock import iso
from common.domain.text import one_line
from common.service import config
from common.store import cleanups, upgrades
from common.store.engine import Connection, Store
from common.store.rows import CleanupRow
from deploy.operator.output import columns

HEAD = ["id", "server", "project", "what", "since", "tries", "next"]


def show(options: argparse.Namespace) -> int:
    """Print the pending cleanups, oldest first. Return 1 if there are any."""
    store = _open_store(options)
    try:
        rows = store.read(cleanups.list_all)
    finally:
        store.close()
    print(json.dumps([facts(row) for row in rows], indent=1) if options.json else table(rows))
    return 1 if rows else 0


def facts(row: CleanupRow) -> dict[str, object]:
    """Return the cleanup for JSON output."""
    return {
        "id": row.id,
        "kind": row.kind,
        "target": row.target,
        "place": row.place or None,
        "server": row.server_id or None,
        "project": row.project_id,
        "why": row.why,
        "since": iso(row.created_at),
        "tries": row.tries,
        "next": iso(row.due_at),
    }


def table(rows: list[CleanupRow]) -> str:
    """Return a table of the cleanups, with the stored reason (``why``) below each.

    Without cleanups return a sentence.
    """
    if not rows:
        return "no cleanup is pending"
    lines = columns(
        [
            HEAD,
            *(
                [
                    str(row.id),
                    row.server_id or "none",
                    row.project_id,
                    cleanups.describe(row),
                    iso(row.created_at) or "",
                    str(row.tries),
                    iso(row.due_at) or "",
                ]
                for row in rows
            ),
        ]
    ).splitlines()
    shown = [
        part
        for line, row in zip(lines[1:], rows, strict=True)
        for part in (line, f"    {one_line(row.why)}")
    ]
    return "\n".join([lines[0], *shown, f"{len(rows)} pending cleanups"])


def retry(options: argparse.Namespace) -> int:
    """Make a cleanup due, which a conductor then runs. Return 1 if the cleanup is missing.

    A conductor runs a due cleanup within seconds, see ``cleanups.hasten``.
    """
    return _change(
        options,
        cleanups.hasten,
        "is retried within seconds, or within a minute if a request may still take effect; see: "
        "kilonova cleanup list",
    )


def cancel(options: argparse.Namespace) -> int:
    """Delete a cleanup without running it. Return 1 if it does not exist."""
    return _change(
        options, cleanups.cancel, "is cancelled; its object remains in the external service"
    )


def _change(
    options: argparse.Namespace, change: Callable[[Connection, int], bool], done: str
) -> int:
    store = _open_store(options)
    try:
        exists = store.write(lambda tx: change(tx, options.id))
    finally:
        store.close()
    if not exists:
        print(f"kilonova: there is no pending cleanup {options.id}", file=sys.stderr)
        return 1
    print(f"cleanup {options.id} {done}")
    return 0


def _open_store(options: argparse.Namespace) -> Store:
    store = Store.open(config.load(options.config))
    upgrades.check(store)
    return store
