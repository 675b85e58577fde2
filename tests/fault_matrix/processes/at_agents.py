# SPDX-License-Identifier: Apache-2.0
"""The seams of an agent: commands, calls of the hypervisor, and the link to conductors.

The functions import the product when the child process installs the seams.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common.domain.command_key import CommandKey
from tests.fault_matrix.processes.struck import Process

#: A host's lease, and the least and the greatest time between exchanges. They are shorter than in
#: the product, so that cells are faster.
LEASE_SECONDS, EXCHANGE_SECONDS = 12.0, (2.5, 3.0)
#: Duration of a restart of the hypervisor.
AWAY_SECONDS = 3
#: The agent with a wrong clock, and how far the clock is ahead.
WRONG, WRONG_SECONDS = "agent-2", 600
#: Points inside a driver's call.
INSIDE = ("entered", "writes", "left")


def install(process: Process) -> None:
    """Install the seams of this agent."""
    from compute_agent import service, sync

    sync.LEASE_SECONDS, service.EXCHANGE_PERIOD_SECONDS = LEASE_SECONDS, EXCHANGE_SECONDS
    if process.name == WRONG:
        _set_clock_ahead()
    _watch_commands(process)
    _watch_hypervisor(process, _make_reach_inside(process))
    _watch_link(process)


def _make_reach_inside(process: Process) -> Callable[[str], None]:
    """Return a function that takes and executes orders inside a command."""
    from common.domain import errors
    from compute_agent.verb_context import VerbFailed
    from compute_agent.virt.memory.state.host import MemoryHost

    hosts: list[MemoryHost] = []
    make = MemoryHost.__init__

    def record_host(self: Any, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        hosts.append(self)

    MemoryHost.__init__ = record_host  # type: ignore[method-assign]

    def reach_inside(where: str) -> None:
        command = getattr(process.local, "command", None)
        if command is None:
            return
        for name in (where, "inside") if where in INSIDE else (where,):
            order = process.reach(("agent", command.key.label, name), [command.server])
            if order is None:
                continue
            if order.effect == "power-cut":
                process.folder.power_cut(process.name)
                hosts[-1].reboot()
                os.killpg(os.getpgrp(), signal.SIGKILL)
            if order.effect == "restarts":
                process.away_until = time.monotonic() + AWAY_SECONDS
                raise errors.Unavailable("The hypervisor went away.")
            raise VerbFailed("It broke.", retryable=order.effect == "no-space")

    process.inside = reach_inside
    return reach_inside


def _watch_commands(process: Process) -> None:
    from compute_agent import verbs

    run, fences = verbs.run, _Fences(process)

    def run_with_seams(journal: Any, tools: Any, command: Any, verb: Any) -> Any:
        fences.check_and_record(command)
        process.local.command = command
        try:
            return run(
                journal, tools, command, verb, lambda name, step, where: process.inside(where)
            )
        finally:
            process.local.command = None

    verbs.run = run_with_seams


def _watch_hypervisor(process: Process, reach_inside: Callable[[str], None]) -> None:
    from common.domain import errors
    from compute_agent.virt.memory.state.host import MemoryHost

    write, call = MemoryHost.write, MemoryHost.call

    def watched_write(self: Any, key: str, guest: Any) -> None:
        write(self, key, guest)
        reach_inside("writes")

    @contextmanager
    def watched_call(self: Any, *arguments: Any, **more: Any) -> Iterator[None]:
        if time.monotonic() < process.away_until:
            raise errors.Unavailable("The hypervisor is away.")
        with call(self, *arguments, **more):
            reach_inside("entered")
            yield
        reach_inside("left")

    MemoryHost.write = watched_write  # type: ignore[method-assign]
    MemoryHost.call = watched_call  # type: ignore[method-assign]


def _watch_link(process: Process) -> None:
    from common.domain import errors
    from common.rpc.conductor import ConductorClient
    from common.rpc.host_link import HostSide
    from compute_agent import service

    ask, exchange, do = HostSide.ask, ConductorClient.sync, service.AgentProcess.do

    def watched_ask(self: Any, door: str, method: str, content: Any, timeout: float) -> Any:
        if time.monotonic() < process.cut_until:
            # The caller notices a lost message only after the timeout.
            time.sleep(timeout)
            raise errors.NoAnswer("the host is cut off")
        return ask(self, door, method, content, timeout)

    def watched_do(self: Any, commands: Any, access: Any) -> None:
        if time.monotonic() >= process.cut_until:
            do(self, commands, access)

    def watched_exchange(self: Any, request: Any, timeout: float) -> Any:
        lost = None
        for result in request.results:
            point = ("answers", CommandKey.parse(result.key).label)
            lost = process.reach(point, [result.server]) or lost
        if lost is not None:
            # The caller notices a lost message only after the timeout.
            time.sleep(timeout)
            raise errors.NoAnswer("lost")
        return exchange(self, request, timeout)

    HostSide.ask = watched_ask  # type: ignore[method-assign]
    ConductorClient.sync = watched_exchange  # type: ignore[method-assign]
    service.AgentProcess.do = watched_do  # type: ignore[method-assign]


class _Fences:
    """Check that no host executes a command with an older fence than the last of its server."""

    def __init__(self, process: Process) -> None:
        self._process, self._last_fences = process, dict[str, int]()
        self._file = f"{process.name}.fences"
        path = process.folder.path / self._file
        for line in path.read_text().splitlines() if path.exists() else []:
            server, fence = line.split()
            self._last_fences[server] = int(fence)

    def check_and_record(self, command: Any) -> None:
        last_fence = self._last_fences.get(command.server, 0)
        if command.fence < last_fence:
            text = f"{self._process.name}: {command.key} is older than fence {last_fence}"
            self._process.folder.append_line("violations", text)
        if command.fence > last_fence:
            self._last_fences[command.server] = command.fence
            self._process.folder.append_line(self._file, f"{command.server} {command.fence}")


def _set_clock_ahead() -> None:
    now, nanos = time.time, time.time_ns
    time.time = lambda: now() + WRONG_SECONDS
    time.time_ns = lambda: nanos() + WRONG_SECONDS * 1_000_000_000
