# SPDX-License-Identifier: Apache-2.0
"""The seams of a conductor: parts of steps, rounds of the runner, reports, what it sends and asks.

As ``seams``; imports the product when it is installed, in the child.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from common.domain.command_key import CommandKey
from tests.fault_matrix.processes.orders import Order
from tests.fault_matrix.processes.struck import Process

#: Seconds of the leases of a burst and of a call: shorter than the product's own, so that a cell
#: need not wait for them.
BURST_SECONDS, CALLS_SECONDS = 8, 20
#: Seconds: a question that is lost, an answer that is late, and the next copy of a message.
LOST_SECONDS, LATE_SECONDS, NEXT_SECONDS = 2, 5, 2


def install(process: Process) -> None:
    """Put them in."""
    from common.store.servers import actions

    actions.LONG_LEASE = CALLS_SECONDS * 1_000_000
    assert actions.take.__kwdefaults__ is not None
    actions.take.__kwdefaults__["lease"] = BURST_SECONDS * 1_000_000
    _parts(process)
    _rounds(process)
    _calls(process)
    _commands(process)
    _questions(process)


def _servers(arguments: Iterable[object]) -> list[str]:
    """Those that the arguments of a part of a step speak of."""
    found = []
    for argument in arguments:
        for one in argument if isinstance(argument, list | tuple) else [argument]:
            if (server := getattr(one, "server", None)) is not None:
                found.append(str(getattr(server, "id", server)))
    return found


def _parts(process: Process) -> None:
    from common.domain import errors
    from tests.fault_matrix import registry

    def part(workflow: str, step: str, part: str, where: str, arguments: Sequence[object]) -> None:
        servers = _servers(arguments)
        if part in ("call", "undo_call"):
            begins = where == "begins"
            process.local.calling = (workflow, step, part, servers) if begins else None
        order = process.reached(("part", workflow, step, part, where), servers)
        if order is not None and order.deed == "refuse":
            raise errors.Conflict("It broke.")

    process.kept.enter_context(registry.watch_steps(part))


def _rounds(process: Process) -> None:
    from conductor.engine import reports, runner

    burst, commit, handle = runner._burst, runner._commit, reports.handle

    def watched_burst(engine: Any, workflow: Any, index: int, rows: Any, lane: str) -> None:
        servers = [row.server_id for row in rows]
        process.reached(("conductor", workflow.name, workflow.steps[index].name, "taken"), servers)
        burst(engine, workflow, index, rows, lane)

    def watched_commit(engine: Any, workflow: Any, index: int, runs: Any, lane: str) -> None:
        where = "called" if lane != "inside" else "proposed"
        servers = [run.server.id for run in runs]
        process.reached(("conductor", workflow.name, workflow.steps[index].name, where), servers)
        commit(engine, workflow, index, runs, lane)

    def watched_handle(engine: Any, syncs: Any) -> Any:
        for sync in syncs:
            for result in sync.results:
                process.reached(("result", CommandKey.parse(result.key).label), [result.server])
        return handle(engine, syncs)

    runner._burst, runner._commit = watched_burst, watched_commit
    reports.handle = watched_handle


def _calls(process: Process) -> None:
    """Requests of a step's call, on the wire."""
    from requests import ConnectionError as Lost
    from requests.adapters import HTTPAdapter

    real = HTTPAdapter.send

    def send(self: Any, request: Any, *arguments: Any, **more: Any) -> Any:
        calling = getattr(process.local, "calling", None)
        if calling is None or "/auth/" in request.url:
            return real(self, request, *arguments, **more)
        workflow, step, part, servers = calling
        if (order := process.reached(("call", workflow, step, part, "asked"), servers)) is not None:
            if order.deed == "refuse":
                return _refusal(request)
            raise Lost("nobody hears it")
        answer = real(self, request, *arguments, **more)
        if process.reached(("call", workflow, step, part, "answered"), servers) is not None:
            raise Lost("the answer is lost")
        return answer

    HTTPAdapter.send = send  # type: ignore[method-assign]


def _refusal(request: Any) -> Any:
    """What a service answers that does not want to do it."""
    from requests import Response

    refused = Response()
    refused.status_code, refused.request, refused.url = 409, request, request.url
    refused.headers["Content-Type"] = "application/json"
    refused._content = b'{"conflictingRequest": {"code": 409, "message": "It broke."}}'
    return refused


def _commands(process: Process) -> None:
    from common.rpc.agent import AgentClient

    do = AgentClient.do

    def watched(self: Any, host: str, commands: Any, access: Any) -> bool:
        kept = []
        for command in commands:
            order = process.reached(("send", command.key.label), [command.server])
            if order is None or order.deed == "double":
                kept.append(command)
            if order is not None and order.deed != "lose":
                _again(process, order, lambda one=command: do(self, host, [one], access))
        return bool(do(self, host, kept, access)) if kept else True

    AgentClient.do = watched  # type: ignore[method-assign]


def _again(process: Process, order: Order, send: Callable[[], object]) -> None:
    """A message is sent another time: at once and two seconds later, or when all is over."""

    def work() -> None:
        if order.deed == "double":
            send()
            time.sleep(NEXT_SECONDS)  # the copy comes later
        else:
            process.orders.hold(order)
        send()

    threading.Thread(target=work, daemon=True).start()


def _questions(process: Process) -> None:
    from common.domain import errors
    from common.rpc.scheduler import SchedulerClient

    select = SchedulerClient.select

    def watched(self: Any, specs: Any, fresh: bool = False) -> Any:
        servers = [spec.server for spec in specs]
        if (order := process.reached(("select", "asked"), servers)) is not None:
            if order.deed == "lose":
                time.sleep(LOST_SECONDS)  # its silence is noticed when its time is over
                raise errors.NoAnswer("lost")
            select(self, specs, fresh)
        found = select(self, specs, fresh)
        if (order := process.reached(("select", "answered"), servers)) is None:
            return found
        if order.deed == "lose":
            raise errors.NoAnswer("lost")
        if order.deed == "late":
            time.sleep(LATE_SECONDS)  # that it is late is the fault
            return found
        return [replace(one, hosts=[], reason="none fits") for one in found]

    SchedulerClient.select = watched  # type: ignore[method-assign]
