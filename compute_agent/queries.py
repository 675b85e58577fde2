# SPDX-License-Identifier: Apache-2.0
"""Queries that the API sends to this host. The API waits for each answer.

``service.AgentProcess.query`` passes each query to ``HostQueries.answer``, which has a table of
them. Queries are not journalled. Only ``quiesce``, ``unquiesce`` and ``console`` have an effect.
Frozen file systems and offered consoles end after a time limit without a further query.

Invariant: console output is at most ``MAX_CONSOLE_BYTES`` long, and an unknown query is refused
with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.wire import to_wire
from compute_agent.consoles.consoles import Consoles
from compute_agent.verb_context import VerbFailed
from compute_agent.virt import machine
from compute_agent.virt.driver import Driver

MAX_CONSOLE_BYTES = 64 * 1024
#: Longest time for which a guest's file systems stay frozen.
MAX_STILL_SECONDS = 60.0
Arguments = JsonObject


class HostQueries:
    """The table of queries. With ``consoles`` None there is no query ``console``."""

    def __init__(self, driver: Driver, consoles: Consoles | None) -> None:
        self._driver = driver
        self._answers: dict[str, Callable[[Arguments], JsonObject]] = {
            "console_kinds": self._console_kinds,
            "console_output": self._console_output,
            "diagnostics": self._diagnostics,
            "domains": self._domains,
            "files": lambda arguments: {"servers": self._driver.files_alone()},
            "quiesce": self._quiesce,
            "unquiesce": self._unquiesce,
            "guests_volumes": lambda arguments: {"volumes": self._driver.guests_volumes()},
            "server_facts": self._server_facts,
            "uptime": lambda arguments: {"uptime": machine.uptime(datetime.now())},
        }
        if consoles is not None:
            self._answers["console"] = lambda arguments: consoles.offer(
                arguments["server"], arguments["kind"]
            )

    def answer(self, verb: str, arguments: Arguments) -> JsonObject:
        """Return the answer to a query.

        Args:
            verb: Name of the query.
            arguments: Arguments of the query, for example the id of the server.

        Raises:
            NotImplementedHere: The agent does not know the query.
            Problem: The query failed, for example NotFound or Conflict.
        """
        if verb not in self._answers:
            raise errors.NotImplementedHere(
                f"This host does not know the query {verb}; upgrade its agent."
            )
        return self._answers[verb](arguments)

    def _console_output(self, arguments: Arguments) -> JsonObject:
        limit = min(int(arguments.get("length_bytes") or MAX_CONSOLE_BYTES), MAX_CONSOLE_BYTES)
        try:
            return {"output": self._driver.console_output(arguments["server"], limit)}
        except VerbFailed as problem:
            raise errors.NotFound(str(problem)) from problem

    def _console_kinds(self, arguments: Arguments) -> JsonObject:
        try:
            return {"kinds": self._driver.console_kinds(arguments["server"])}
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem

    def _diagnostics(self, arguments: Arguments) -> JsonObject:
        try:
            return self._driver.diagnostics(arguments["server"])
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem

    def _domains(self, arguments: Arguments) -> JsonObject:
        return {"domains": {state.server: state.power_state for state in self._driver.domains()}}

    def _quiesce(self, arguments: Arguments) -> JsonObject:
        seconds = min(float(arguments["seconds"]), MAX_STILL_SECONDS)
        try:
            self._driver.quiesce(arguments["server"], seconds)
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem
        return {}

    def _unquiesce(self, arguments: Arguments) -> JsonObject:
        try:
            self._driver.unquiesce(arguments["server"])
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem
        return {}

    def _server_facts(self, arguments: Arguments) -> JsonObject:
        """Return a server's ``power_state``, ``fence`` and ``facts`` (``HostedServer`` as JSON).

        Raises:
            NotFound: This host has no guest of the server, or the facts cannot be read.
        """
        server = arguments["server"]
        state = next((domain for domain in self._driver.domains() if domain.server == server), None)
        if state is None:
            raise errors.NotFound(f"This host has no guest of server {server}.")
        try:
            facts = to_wire(self._driver.server_facts(server))
        except VerbFailed as problem:
            raise errors.NotFound(str(problem)) from problem
        return {"power_state": state.power_state, "fence": state.fence, "facts": facts}
