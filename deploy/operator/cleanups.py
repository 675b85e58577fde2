# SPDX-License-Identifier: Apache-2.0
"""``kilonova cleanup list|retry|drop``: what neighbours have still to remove, and why they have
not.

Conductors try each again by themselves, from seconds to an hour apart. ``retry`` has it done within
seconds, when what kept it is mended; ``drop`` gives it up: what it names stays at the neighbour,
and is the operator's to remove.
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
    """Print them, oldest first; 1 when there are some."""
    store = _opened(options)
    try:
        rows = store.read(cleanups.list_all)
    finally:
        store.close()
    print(json.dumps([facts(row) for row in rows], indent=1) if options.json else table(rows))
    return 1 if rows else 0


def facts(row: CleanupRow) -> dict[str, object]:
    """For programs."""
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
    """For people: one line a cleanup, and below it what the neighbour said last."""
    if not rows:
        return "no neighbour has anything still to remove"
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
    """Have one tried again within seconds."""
    return _change(
        options, cleanups.hasten, "is tried again within seconds; see: kilonova cleanup list"
    )


def drop(options: argparse.Namespace) -> int:
    """Give one up."""
    return _change(options, cleanups.drop, "is given up; what it names stays at the neighbour")


def _change(
    options: argparse.Namespace, change: Callable[[Connection, int], bool], done: str
) -> int:
    store = _opened(options)
    try:
        found = store.write(lambda tx: change(tx, options.id))
    finally:
        store.close()
    if not found:
        print(f"kilonova: there is no pending cleanup {options.id}", file=sys.stderr)
        return 1
    print(f"cleanup {options.id} {done}")
    return 0


def _opened(options: argparse.Namespace) -> Store:
    store = Store.opened(config.load(options.config))
    upgrades.check(store)
    return store
