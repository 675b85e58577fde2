# SPDX-License-Identifier: Apache-2.0
"""The seams of a conductor: functions of steps, lanes, reports, commands and scheduler requests.

The functions import the product when the child process installs the seams.
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

#: Leases of a burst and of a call. They are shorter than in the product, so that cells are faster.
BURST_SECONDS, CALLS_SECONDS = 8, 20
#: Wait for a lost request, delay of a late answer, and delay of a message's second copy.
LOST_SECONDS, LATE_SECONDS, NEXT_SECONDS = 2, 5, 2


def install(process: Process) -> None:
    """Install the seams of this conductor."""
    from common.store.servers import actions

    actions.LONG_LEASE = CALLS_SECONDS * 1_000_000
    assert actions.take.__kwdefaults__ is not None
    actions.take.__kwdefaults__["lease"] = BURST_SECONDS * 1_000_000
    _watch_parts(process)
    _watch_rounds(process)
    _watch_calls(process)
    _watch_commands(process)
    _watch_selections(process)


def _list_servers(arguments: Iterable[object]) -> list[str]:
    """Return the ids of the servers in the arguments of a step's function."""
    servers = []
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else [argument]:
            if (server := getattr(value, "server", None)) is not None:
                servers.append(str(getattr(server, "id", server)))
    return servers


def _watch_parts(process: Process) -> None:
    from common.domain import errors
    from tests.fault_matrix import registry

    def part(workflow: str, step: str, part: str, where: str, arguments: Sequence[object]) -> None:
        servers = _list_servers(arguments)
        if part in ("call", "undo_call"):
            begins = where == "begins"
            process.local.calling = (workflow, step, part, servers) if begins else None
        order = process.reach(("part", workflow, step, part, where), servers)
        if order is not None and order.effect == "refuse":
            raise errors.Conflict("It broke.")

    process.exit_stack.enter_context(registry.watch_steps(part))


def _watch_rounds(process: Process) -> None:
    from conductor.engine import reports, runner

    burst, commit, handle = runner._burst, runner._commit, reports.handle

    def watched_burst(engine: Any, workflow: Any, index: int, rows: Any, lane: str) -> None:
        servers = [row.server_id for row in rows]
        process.reach(("conductor", workflow.name, workflow.steps[index].name, "taken"), servers)
        burst(engine, workflow, index, rows, lane)

    def watched_commit(engine: Any, workflow: Any, index: int, runs: Any, lane: str) -> None:
        where = "called" if lane != "inside" else "proposed"
        servers = [run.server.id for run in runs]
        process.reach(("conductor", workflow.name, workflow.steps[index].name, where), servers)
        commit(engine, workflow, index, runs, lane)

    def watched_handle(engine: Any, syncs: Any) -> Any:
        for sync in syncs:
            for result in sync.results:
                process.reach(("result", CommandKey.parse(result.key).label), [result.server])
        return handle(engine, syncs)

    runner._burst, runner._commit = watched_burst, watched_commit
    reports.handle = watched_handle


def _watch_calls(process: Process) -> None:
    """Reach a point before and after each HTTP request of a step's call."""
    from requests import ConnectionError as Lost
    from requests.adapters import HTTPAdapter

    real = HTTPAdapter.send

    def send(self: Any, request: Any, *arguments: Any, **more: Any) -> Any:
        calling = getattr(process.local, "calling", None)
        if calling is None or "/auth/" in request.url:
            return real(self, request, *arguments, **more)
        workflow, step, part, servers = calling
        if (order := process.reach(("call", workflow, step, part, "asked"), servers)) is not None:
            if order.effect == "refuse":
                return _make_refusal(request)
            raise Lost("the request is lost")
        answer = real(self, request, *arguments, **more)
        if process.reach(("call", workflow, step, part, "answered"), servers) is not None:
            raise Lost("the answer is lost")
        return answer

    HTTPAdapter.send = send  # type: ignore[method-assign]


def _make_refusal(request: Any) -> Any:
    """Return the response 409 of a service."""
    from requests import Response

    response = Response()
    response.status_code, response.request, response.url = 409, request, request.url
    response.headers["Content-Type"] = "application/json"
    response._content = b'{"conflictingRequest": {"code": 409, "message": "It broke."}}'
    return response


def _watch_commands(process: Process) -> None:
    from common.rpc.agent import AgentClient

    do = AgentClient.do

    def send_commands(self: Any, host: str, commands: Any, access: Any) -> bool:
        remaining = []
        for command in commands:
            order = process.reach(("send", command.key.label), [command.server])
            if order is None or order.effect == "double":
                remaining.append(command)
            if order is not None and order.effect != "lose":
                _send_again(
                    process, order, lambda command=command: do(self, host, [command], access)
                )
        return bool(do(self, host, remaining, access)) if remaining else True

    AgentClient.do = send_commands  # type: ignore[method-assign]


def _send_again(process: Process, order: Order, send: Callable[[], object]) -> None:
    """Send a message again in a thread.

    A doubled message is sent at once and after ``NEXT_SECONDS``. A kept message is sent when the
    order is released.
    """

    def work() -> None:
        if order.effect == "double":
            send()
            # The copy arrives later.
            time.sleep(NEXT_SECONDS)
        else:
            process.orders.hold(order)
        send()

    threading.Thread(target=work, daemon=True).start()


def _watch_selections(process: Process) -> None:
    from common.domain import errors
    from common.rpc.scheduler import SchedulerClient

    select = SchedulerClient.select

    def select_and_reach(self: Any, specs: Any, fresh: bool = False) -> Any:
        servers = [spec.server for spec in specs]
        if (order := process.reach(("select", "asked"), servers)) is not None:
            if order.effect == "lose":
                # The caller notices a lost request only after a timeout.
                time.sleep(LOST_SECONDS)
                raise errors.NoAnswer("lost")
            select(self, specs, fresh)
        selections = select(self, specs, fresh)
        if (order := process.reach(("select", "answered"), servers)) is None:
            return selections
        if order.effect == "lose":
            raise errors.NoAnswer("lost")
        if order.effect == "late":
            # The answer arrives after the conductor stopped waiting.
            time.sleep(LATE_SECONDS)
            return selections
        return [replace(selection, hosts=[], reason="none fits") for selection in selections]

    SchedulerClient.select = select_and_reach  # type: ignore[method-assign]
