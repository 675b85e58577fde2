# SPDX-License-Identifier: Apache-2.0
"""A service in this process that a persona can call and that can be reset after changes."""

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
    """A SQLite file that can be reset to a saved state."""

    def __init__(self, path: Path) -> None:
        self._file = sqlite3.connect(path, check_same_thread=False, timeout=30)
        self._saved = sqlite3.connect(":memory:", check_same_thread=False)

    def save(self) -> None:
        """Save the current content for ``reset``."""
        self._file.backup(self._saved)

    def reset(self) -> None:
        self._saved.backup(self._file)

    def content(self) -> list[str]:
        """Return the whole content as SQL statements."""
        return list(self._file.iterdump())

    def close(self) -> None:
        self._file.close()
        self._saved.close()


class Site:
    """A service with its records.

    Args:
        name: Name of the service.
        application: The WSGI application.
        tokens: Persona -> token.
        ids: "own" and "foreign" -> ids of records by the part of the path before them.
        database: The database of the service.
        fakes: Stand-ins for external services, which are reset, too.
        also: Called at each reset.
    """

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
        self._saved: list[dict[str, Any]] = [{} for _ in fakes]

    def ask(
        self,
        persona: str,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> falcon.testing.Result:
        """Send a request of a persona with a JSON body, or with bytes as the raw body."""
        sent_headers = self.proof(persona, Random(0))
        path, _, query = path.partition("?")
        if body is not None:
            sent_headers["Content-Type"] = "application/json"
        return self.client.simulate_request(
            method,
            path,
            query_string=query,
            headers=sent_headers | dict(headers or {}),
            body=body if body is None or isinstance(body, bytes) else json.dumps(body),
        )

    def proof(self, persona: str, chance: Random) -> dict[str, str]:
        """Return the headers that authenticate the persona."""
        return {"X-Auth-Token": self.tokens[persona]} if persona in self.tokens else {}

    def save(self) -> None:
        """Save the current state for ``reset``."""
        self.database.save()
        self._saved = [copy.deepcopy(vars(fake)) for fake in self._fakes]

    def reset(self) -> None:
        """Restore the state of the last ``save``."""
        self.database.reset()
        for fake, state in zip(self._fakes, self._saved, strict=True):
            vars(fake).update(copy.deepcopy(state))
        self._also()

    def id_of(self, owner: str, kind: str) -> str:
        """Return the id of a record. Kinds without a foreign record have the own id."""
        if owner == "missing":
            return MISSING
        return self.ids[owner].get(kind) or self.ids["own"].get(kind) or MISSING


def add_content_type(application: Any) -> Any:
    """Wrap an application so that each answer has a Content-Type.

    The checker of the test client requires the header. The placement service leaves it out of
    answers without a body.
    """

    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if not status.startswith(("204", "304")) and "content-type" not in {
                name.lower() for name, _ in headers
            }:
                headers = [*headers, ("Content-Type", "none")]
            return start_response(status, headers, *more)

        return application(environ, start)

    return entry
