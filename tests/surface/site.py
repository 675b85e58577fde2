# SPDX-License-Identifier: Apache-2.0
"""One service in this process: how it is asked by a persona, and how it is set back after a
change."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import falcon.testing

Ids = dict[str, dict[str, str]]
MISSING = "deadbeef-dead-4ead-8ead-deaddeadbeef"


class Database:
    """A file of SQLite that can be set back."""

    def __init__(self, path: Path) -> None:
        self._file = sqlite3.connect(path, check_same_thread=False, timeout=30)
        self._kept = sqlite3.connect(":memory:", check_same_thread=False)

    def keep(self) -> None:
        """This is what it is set back to."""
        self._file.backup(self._kept)

    def set_back(self) -> None:
        self._kept.backup(self._file)

    def content(self) -> list[str]:
        """All of it, as text."""
        return list(self._file.iterdump())

    def close(self) -> None:
        self._file.close()
        self._kept.close()


class Site:
    """``ids``: "own" and "foreign" records by the part of the path before them. ``fakes``:
    neighbours with a memory;
    ``also``: what else is done when it is set back."""

    def __init__(
        self,
        name: str,
        application: Any,
        tokens: Mapping[str, str],
        ids: Ids,
        database: Database,
        fakes: tuple[Any, ...] = (),
        also: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.application, self.tokens, self.ids = name, application, tokens, ids
        self.client = falcon.testing.TestClient(application)
        self.database, self._fakes, self._also = database, fakes, also
        self._kept: list[dict[str, Any]] = [{} for _ in fakes]

    def ask(
        self,
        persona: str,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> falcon.testing.Result:
        """A request with a JSON body, or with bytes as they are."""
        sent = self.proof(persona, Random(0))
        path, _, query = path.partition("?")
        if body is not None:
            sent["Content-Type"] = "application/json"
        return self.client.simulate_request(
            method,
            path,
            query_string=query,
            headers=sent | dict(headers or {}),
            body=body if body is None or isinstance(body, bytes) else json.dumps(body),
        )

    def proof(self, persona: str, chance: Random) -> dict[str, str]:
        """The headers that say who asks."""
        return {"X-Auth-Token": self.tokens[persona]} if persona in self.tokens else {}

    def keep(self) -> None:
        """This is what it is set back to."""
        self.database.keep()
        self._kept = [copy.deepcopy(vars(fake)) for fake in self._fakes]

    def set_back(self) -> None:
        """Let nothing remain of what was asked since ``keep``."""
        self.database.set_back()
        for fake, kept in zip(self._fakes, self._kept, strict=True):
            vars(fake).update(copy.deepcopy(kept))
        self._also()

    def id_of(self, owner: str, kind: str) -> str:
        """A record's id; of what belongs to nobody the only one."""
        if owner == "missing":
            return MISSING
        return self.ids[owner].get(kind) or self.ids["own"].get(kind) or MISSING


def typed(application: Any) -> Any:
    """The checker of the test client wants a type of every answer, Placement's own tests none
    without a body."""

    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if not status.startswith(("204", "304")) and "content-type" not in {
                name.lower() for name, _ in headers
            }:
                headers = [*headers, ("Content-Type", "none")]
            return start_response(status, headers, *more)

        return application(environ, start)

    return entry
