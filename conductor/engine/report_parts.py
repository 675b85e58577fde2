# SPDX-License-Identifier: Apache-2.0
"""What a report tells, divided: a part that cannot be taken in must not hold up the others.

Called by ``conductor.engine.reports`` when a transaction failed, and for servers whose rows
somebody holds locked. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from common.domain.json_types import JsonObject
from common.domain.models import Sync

#: Fields that say who reports and what is in hand there; each other field tells something.
HEAD = frozenset(
    ("host", "session", "boot_id", "ask", "working", "number", "cookie", "files_between")
)
_NOTHING: JsonObject = {
    field.name: getattr(Sync("", 0), field.name) for field in fields(Sync) if field.name not in HEAD
}
#: Fields that are one thing, although they have entries.
WHOLE = frozenset(("metrics", "files"))


def divided(sync: Sync) -> list[Sync]:
    """The same report in parts: one for each field that tells something; of one field, one for each
    entry. Nothing when it tells one thing, or none."""
    bare = replace(sync, **_NOTHING)
    filled = {
        name: value
        for name, nothing in _NOTHING.items()
        if (value := getattr(sync, name)) != nothing
    }
    if len(filled) > 1:
        return [replace(bare, **{name: value}) for name, value in filled.items()]
    entries = [(name, entry) for name, value in filled.items() for entry in _entries(name, value)]
    return [replace(bare, **{name: entry}) for name, entry in entries] if len(entries) > 1 else []


def _entries(name: str, value: Any) -> list[Any]:
    if name in WHOLE:
        return [value]
    if isinstance(value, list):
        return [[one] for one in value]
    if isinstance(value, dict):
        return [{key: one} for key, one in value.items()]
    return [value]


def servers_in(sync: Sync) -> set[str]:
    """The servers whose rows are locked when it is taken in."""
    return {one.server for one in [*sync.results, *(sync.domains or ()), *sync.changed]}


def stateless(sync: Sync) -> Sync:
    """Without what it tells of the host's state."""
    return replace(
        sync, domains=None, changed=[], inventory=None, metrics=None, cached={}, files=None
    )


def without(sync: Sync, servers: Collection[str]) -> Sync:
    """What it tells of all others than these servers."""
    if not servers_in(sync) & set(servers):
        return sync
    kept: JsonObject = {
        name: [one for one in getattr(sync, name) if one.server not in servers]
        for name in ("results", "domains", "changed")
        if getattr(sync, name)
    }
    return replace(sync, **kept)
