# SPDX-License-Identifier: Apache-2.0
"""Split reports of hosts into parts, so that a part which cannot be processed delays no other part.

``conductor.engine.reports`` uses this when a transaction failed, and for servers with locked rows.
Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from common.domain.json_types import JsonObject
from common.domain.models import Sync

#: Fields that describe the report and the commands in progress. All other fields are content.
HEAD = frozenset(
    ("host", "session", "boot_id", "ask", "working", "number", "cookie", "files_between")
)
_EMPTY: JsonObject = {
    field.name: getattr(Sync("", 0), field.name) for field in fields(Sync) if field.name not in HEAD
}
#: Fields that are never split, although they have entries.
WHOLE = frozenset(("metrics", "files"))


def split(sync: Sync) -> list[Sync]:
    """Split a report by fields, or a report with one field into its entries.

    Metrics and files are not split into entries.

    Returns:
        The parts, each with the report's fields in ``HEAD``. Empty if the report has no content or
        cannot be split further.
    """
    head = replace(sync, **_EMPTY)
    content = {
        name: value for name, empty in _EMPTY.items() if (value := getattr(sync, name)) != empty
    }
    if len(content) > 1:
        return [replace(head, **{name: value}) for name, value in content.items()]
    entries = [(name, entry) for name, value in content.items() for entry in _entries(name, value)]
    return [replace(head, **{name: entry}) for name, entry in entries] if len(entries) > 1 else []


def _entries(name: str, value: Any) -> list[Any]:
    if name in WHOLE:
        return [value]
    if isinstance(value, list):
        return [[entry] for entry in value]
    if isinstance(value, dict):
        return [{key: entry} for key, entry in value.items()]
    return [value]


def servers_in(sync: Sync) -> set[str]:
    """Return the ids of the servers in a report's results and domains.

    The processing of the report may lock these servers.
    """
    return {entry.server for entry in [*sync.results, *(sync.domains or ()), *sync.changed]}


def remove_host_state(sync: Sync) -> Sync:
    """Return the report without domains, inventory, metrics, cached images and files."""
    return replace(
        sync, domains=None, changed=[], inventory=None, metrics=None, cached={}, files=None
    )


def remove_servers(sync: Sync, servers: Collection[str]) -> Sync:
    """Return the report without the results and domains of these servers."""
    if not servers_in(sync) & set(servers):
        return sync
    fields: JsonObject = {
        name: [entry for entry in getattr(sync, name) if entry.server not in servers]
        for name in ("results", "domains", "changed")
        if getattr(sync, name)
    }
    return replace(sync, **fields)
