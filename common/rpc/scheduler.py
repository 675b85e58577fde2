# SPDX-License-Identifier: Apache-2.0
"""The interface of schedulers: proposals of hosts, and explanations of proposals."""

from __future__ import annotations

from typing import Any, Protocol

from common.domain.json_types import JsonObject, JsonValue
from common.domain.models import Explanation, RequestSpec, Selection
from common.domain.wire import from_wire, to_wire
from common.rpc.transport import Transport

TOPIC = "kilonova-scheduler"
TIMEOUT = 2.0
TIMEOUT_EXPLAIN = 10.0


class SchedulerApi(Protocol):
    """The interface that a scheduler process serves."""

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Propose hosts for each request, in the order of ``specs``.

        A selection without hosts means that no host fits now.

        Args:
            specs: The requests, one for each server.
            fresh: True to use only facts that are read after the request arrived.

        Raises:
            Unavailable: The database does not answer.
        """

    def explain(self, spec: RequestSpec) -> Explanation:
        """Explain how the scheduler would answer the request now, without placing a server.

        ``spec`` is the request for one server.

        Raises:
            Unavailable: The database does not answer.
        """


def serve(transport: Transport, name: str, scheduler: SchedulerApi) -> None:
    """Serve the methods of ``scheduler`` to conductors and operators' commands.

    Args:
        transport: Receives the requests.
        name: The name of this scheduler at the broker.
        scheduler: Answers the requests.
    """

    def select(specs: list[JsonObject], fresh: bool) -> list[Any]:
        return [
            to_wire(selection)
            for selection in scheduler.select(
                [from_wire(RequestSpec, spec) for spec in specs], fresh
            )
        ]

    def explain(spec: JsonObject) -> JsonValue:
        return to_wire(scheduler.explain(from_wire(RequestSpec, spec)))

    transport.serve(TOPIC, name, {"select": select, "explain": explain})


class SchedulerClient:
    """The client of schedulers, for conductors and operators' commands."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def select(self, specs: list[RequestSpec], fresh: bool = False) -> list[Selection]:
        """Request proposals from any scheduler. See ``SchedulerApi.select``.

        Raises:
            NoAnswer: No scheduler answered. The caller must wait, and must not report "no valid
                host".
            Problem: The answer is this error.
        """
        answer = self._transport.call(
            TOPIC, "select", timeout=TIMEOUT, specs=to_wire(specs), fresh=fresh
        )
        return [from_wire(Selection, selection) for selection in answer]

    def explain(self, spec: RequestSpec) -> Explanation:
        """Request an explanation from any scheduler. See ``SchedulerApi.explain``.

        Raises:
            NoAnswer: No scheduler answered.
            Problem: The answer is this error.
        """
        return from_wire(
            Explanation,
            self._transport.call(TOPIC, "explain", timeout=TIMEOUT_EXPLAIN, spec=to_wire(spec)),
        )
