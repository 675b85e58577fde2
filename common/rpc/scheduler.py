# SPDX-License-Identifier: Apache-2.0
"""What schedulers answer: which hosts, in which order, and why not the others."""

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
        """Propose hosts for each request; ``fresh``: from a snapshot read after the request
        arrived."""

    def explain(self, spec: RequestSpec) -> Explanation:
        """What would become of the request now, without making anything."""


def serve(transport: Transport, name: str, scheduler: SchedulerApi) -> None:
    """Answer conductors and the API."""

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
    """For conductors and the API."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def select(self, specs: list[RequestSpec], fresh: bool = False) -> list[Selection]:
        """Ask any scheduler.

        Raises:
            NoAnswer: none answered; that is waiting, never "no valid host".
        """
        answer = self._transport.call(
            TOPIC, "select", timeout=TIMEOUT, specs=to_wire(specs), fresh=fresh
        )
        return [from_wire(Selection, selection) for selection in answer]

    def explain(self, spec: RequestSpec) -> Explanation:
        """Ask any scheduler what would become of the request now.

        Raises:
            NoAnswer: none answered.
        """
        return from_wire(
            Explanation,
            self._transport.call(TOPIC, "explain", timeout=TIMEOUT_EXPLAIN, spec=to_wire(spec)),
        )
