# SPDX-License-Identifier: Apache-2.0
"""The seams of an agent: its commands, what its hypervisor does for them, its link to conductors.

As ``seams``; imports the product when it is installed, in the child.
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

#: Seconds of a host's lease and between its exchanges: shorter than the product's own, so that a
#: cell need not wait for them.
LEASE_SECONDS, EXCHANGE_SECONDS = 12.0, (2.5, 3.0)
#: Seconds for which a hypervisor is away that is restarted.
AWAY_SECONDS = 3
#: Whose clock is wrong, and how far.
WRONG, WRONG_SECONDS = "agent-2", 600
#: Points inside a driver's call.
INSIDE = ("entered", "writes", "left")


def install(process: Process) -> None:
    """Put them in."""
    from compute_agent import service, sync

    sync.LEASE_SECONDS, service.EXCHANGE_PERIOD_SECONDS = LEASE_SECONDS, EXCHANGE_SECONDS
    if process.name == WRONG:
        _wrong_clock()
    _commands(process)
    _hypervisor(process, _inside(process))
    _link(process)


def _inside(process: Process) -> Callable[[str], None]:
    """What is done where a command is carried out."""
    from common.domain import errors
    from compute_agent.verb_context import VerbFailed
    from compute_agent.virt.memory.state.host import MemoryHost

    hosts: list[MemoryHost] = []
    make = MemoryHost.__init__

    def made(self: Any, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        hosts.append(self)

    MemoryHost.__init__ = made  # type: ignore[method-assign]

    def reached(where: str) -> None:
        command = getattr(process.local, "command", None)
        if command is None:
            return
        for name in (where, "inside") if where in INSIDE else (where,):
            order = process.reached(("agent", command.key.label, name), [command.server])
            if order is None:
                continue
            if order.deed == "power-cut":
                process.folder.power_cut(process.name)
                hosts[-1].reboot()
                os.killpg(os.getpgrp(), signal.SIGKILL)
            if order.deed == "restarts":
                process.away_until = time.monotonic() + AWAY_SECONDS
                raise errors.Unavailable("The hypervisor went away.")
            raise VerbFailed("It broke.", retryable=order.deed == "no-space")

    process.inside = reached
    return reached


def _commands(process: Process) -> None:
    from compute_agent import verbs

    run, fences = verbs.run, _Fences(process)

    def watched(journal: Any, tools: Any, command: Any, verb: Any) -> Any:
        fences.learn(command)
        process.local.command = command
        try:
            return run(
                journal, tools, command, verb, lambda name, step, where: process.inside(where)
            )
        finally:
            process.local.command = None

    verbs.run = watched


def _hypervisor(process: Process, reached: Callable[[str], None]) -> None:
    from common.domain import errors
    from compute_agent.virt.memory.state.host import MemoryHost

    write, call = MemoryHost.write, MemoryHost.call

    def watched_write(self: Any, key: str, guest: Any) -> None:
        write(self, key, guest)
        reached("writes")

    @contextmanager
    def watched_call(self: Any, *arguments: Any, **more: Any) -> Iterator[None]:
        if time.monotonic() < process.away_until:
            raise errors.Unavailable("The hypervisor is away.")
        with call(self, *arguments, **more):
            reached("entered")
            yield
        reached("left")

    MemoryHost.write = watched_write  # type: ignore[method-assign]
    MemoryHost.call = watched_call  # type: ignore[method-assign]


def _link(process: Process) -> None:
    from common.domain import errors
    from common.rpc.conductor import ConductorClient
    from common.rpc.host_link import HostSide
    from compute_agent import service

    ask, exchange, do = HostSide.ask, ConductorClient.sync, service.AgentProcess.do

    def watched_ask(self: Any, door: str, method: str, content: Any, timeout: float) -> Any:
        if time.monotonic() < process.cut_until:
            time.sleep(timeout)  # its silence is noticed when its time is over
            raise errors.NoAnswer("the host is cut off")
        return ask(self, door, method, content, timeout)

    def watched_do(self: Any, commands: Any, access: Any) -> None:
        if time.monotonic() >= process.cut_until:
            do(self, commands, access)

    def watched_exchange(self: Any, request: Any, timeout: float) -> Any:
        lost = None
        for result in request.results:
            point = ("answers", CommandKey.parse(result.key).label)
            lost = process.reached(point, [result.server]) or lost
        if lost is not None:
            time.sleep(timeout)  # its silence is noticed when its time is over
            raise errors.NoAnswer("lost")
        return exchange(self, request, timeout)

    HostSide.ask = watched_ask  # type: ignore[method-assign]
    ConductorClient.sync = watched_exchange  # type: ignore[method-assign]
    service.AgentProcess.do = watched_do  # type: ignore[method-assign]


class _Fences:
    """No host carries out a command whose fence is older than the last of its server."""

    def __init__(self, process: Process) -> None:
        self._process, self._known = process, dict[str, int]()
        self._file = f"{process.name}.fences"
        path = process.folder.path / self._file
        for line in path.read_text().splitlines() if path.exists() else []:
            server, fence = line.split()
            self._known[server] = int(fence)

    def learn(self, command: Any) -> None:
        known = self._known.get(command.server, 0)
        if command.fence < known:
            text = f"{self._process.name}: {command.key} is older than fence {known}"
            self._process.folder.say("violations", text)
        if command.fence > known:
            self._known[command.server] = command.fence
            self._process.folder.say(self._file, f"{command.server} {command.fence}")


def _wrong_clock() -> None:
    """This host's clock is ahead."""
    now, nanos = time.time, time.time_ns
    time.time = lambda: now() + WRONG_SECONDS
    time.time_ns = lambda: nanos() + WRONG_SECONDS * 1_000_000_000
