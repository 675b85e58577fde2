# SPDX-License-Identifier: Apache-2.0
"""The agent's half of the one exchange, and the rules of what it accepts: a state machine without threads.

``Agent`` is told commands (``accept``), gives them out one a server at a time (``take``), is told their
results (``ended``), says what to tell the conductor (``request``) and takes its answer (``answered``).
``compute_agent.service`` calls these from its threads under one lock; tests call them directly.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from common.clock import Clock
from common.models import Command, DomainState, HostInventory, Result, Sync, SyncAnswer
from compute_agent.journal import Journal
from compute_agent.verbs import VERBS

log = logging.getLogger(__name__)
LEASE = 30.0                 #: seconds of silence after which nothing is started and hello is said again
FULL_REPORT = 60.0
BUILDS = 10                  #: commands that make disks of an image, at a time
COPIES = 10                  #: commands that move whole disks, builds among them, at a time


def _starts(command: Command) -> bool:
    return command.verb in VERBS and VERBS[command.verb].starts


def _builds(command: Command) -> bool:
    return command.verb in VERBS and VERBS[command.verb].builds


def _copies(command: Command) -> bool:
    return command.verb in VERBS and VERBS[command.verb].copies


@dataclass
class Work:
    """A command in hand; ``cancelled`` is set when a higher fence arrives."""

    command: Command
    running: bool = False
    cancelled: bool = False
    phase: str = "queued"


class Agent:
    """One host's memory of what it is doing. ``builds``, ``copies``: how many of these run at a time; others wait
    here."""

    def __init__(self, host: str, journal: Journal, clock: Clock, boot_id: str, builds: int = BUILDS,
                 copies: int = COPIES) -> None:
        self.host, self.boot_id, self._most_builds, self._most_copies = host, boot_id, builds, copies
        self._journal, self._clock = journal, clock
        self.session = 0
        self._fences = journal.fences()
        self._work: dict[str, Work] = {}
        self._results: dict[str, Result] = {}
        self._changed: dict[str, DomainState] = {}
        self._cached: dict[str, str] = {}
        self._inventory: HostInventory | None = None
        self._inventory_told: HostInventory | None = None
        self._metrics: dict[str, float] | None = None
        self._asked_at = self._acknowledged_at = -LEASE
        self._reported_at: float | None = None

    # --- commands ---
    def accept(self, commands: Iterable[Command]) -> None:
        """Take commands in hand, or answer again those that were carried out before."""
        for command in commands:
            if command.session != self.session:
                log.info("a command for session %d is dropped in session %d", command.session, self.session)
            elif command.key not in self._work and command.key not in self._results:
                self._accept(command)

    def _accept(self, command: Command) -> None:
        known = self._fences.get(command.server, 0)
        if command.fence < known:
            self._results[command.key] = Result(command.key, command.server, command.fence, "refused",
                                                error=f"fence {command.fence} is older than {known}")
            return
        self._fences[command.server] = command.fence
        for work in self._work.values():
            if work.command.server == command.server and work.command.fence < command.fence:
                work.cancelled = True
        done = self._journal.find(command.key)
        if done is not None:
            self._results[command.key] = done
        else:
            self._work[command.key] = Work(command)

    def take(self) -> Work | None:
        """The next command that may run now: one a server at a time, cancelled ones dropped. A build or a copy
        that is one too many waits, and what is neither overtakes it."""
        running = [work.command for work in self._work.values() if work.running]
        busy = {command.server for command in running}
        full = sum(map(_builds, running)) >= self._most_builds
        crowded = sum(map(_copies, running)) >= self._most_copies
        for key, work in list(self._work.items()):
            if work.running:
                continue
            if work.cancelled or (_starts(work.command) and not self.has_lease()):
                del self._work[key]
            elif work.command.server not in busy and not (full and _builds(work.command)
                                                          or crowded and _copies(work.command)):
                work.running = True
                return work
        return None

    def has_lease(self) -> bool:
        """Has the conductor been heard lately? Without that, nothing is started."""
        return self._clock.monotonic() - self._acknowledged_at < LEASE

    def ended(self, work: Work, result: Result | None) -> None:
        """A command has come to its end; None: it was cancelled, or is to be sent again."""
        self._work.pop(work.command.key, None)
        if result is not None:
            self._results[result.key] = result

    def changed(self, states: Iterable[DomainState]) -> None:
        """Domains whose state an event spoke of; what a result that is about to be told says already is no news, and
        neither is what was seen of such a domain while the command was still at work."""
        told = {(result.server, result.fence, result.data.get("power_state")) for result in self._results.values()}
        for state in states:
            if (state.server, state.fence, state.power_state) in told:
                self._changed.pop(state.server, None)
            else:
                self._changed[state.server] = state

    def noticed(self, inventory: HostInventory, metrics: dict[str, float] | None) -> None:
        """What the host has and how busy it is, seen just now. The inventory is told unless it is what the conductor
        knows already; metrics are told once."""
        self._inventory, self._metrics = inventory, metrics

    def cached(self, image: str, problem: str) -> None:
        """What became of an image that was to be fetched ahead; ``problem`` empty: it is here."""
        self._cached[image] = problem

    # --- the exchange ---
    def wants_full_report(self) -> bool:
        """Is it time to list all domains?"""
        return self._reported_at is None or self._clock.monotonic() - self._reported_at >= FULL_REPORT

    def is_working_on(self, server: str) -> bool:
        """Is a command for this server being carried out? Its result will say how the domain is."""
        return any(work.running and work.command.server == server for work in self._work.values())

    def has_news(self) -> bool:
        """Is there something that should not wait for the next periodic exchange?"""
        return bool(self._results or self._cached or self._settled(self._changed.values()))

    def needs_hello(self) -> bool:
        """A new session is needed at start and after a silence longer than the lease."""
        return self.session == 0 or not self.has_lease()

    def request(self, ask: bool, domains: list[DomainState] | None, inventory: HostInventory | None) -> Sync:
        """What to say now. With ``inventory`` it is a hello."""
        session = self.session
        if inventory is not None:
            session, self._inventory, self._inventory_told = 0, inventory, None
        news = self._inventory if self._inventory != self._inventory_told else None
        metrics, self._metrics = self._metrics, None
        self._asked_at = self._clock.monotonic()
        if domains is not None:
            self._reported_at = self._clock.monotonic()
        return Sync(self.host, session, self.boot_id, ask, list(self._work), list(self._results.values()),
                    None if domains is None else self._settled(domains), self._settled(self._changed.values()),
                    news, metrics,
                    {key: work.phase for key, work in self._work.items() if work.running} if ask else {},
                    dict(self._cached))

    def _settled(self, domains: Iterable[DomainState]) -> list[DomainState]:
        """Domains of servers that no command or unacknowledged result speaks for, each with the highest fence
        accepted for it: a state seen after a command that failed is true under that command's fence, although the
        domain never got to carry it. What happened before a result was taken in is told after it."""
        busy = {work.command.server for work in self._work.values()}
        busy |= {result.server for result in self._results.values()}
        return [DomainState(state.server, state.power_state, max(state.fence, self._fences.get(state.server, 0)))
                for state in domains if state.server not in busy]

    def answered(self, request: Sync, answer: SyncAnswer) -> None:
        """Take the conductor's answer to this request."""
        if answer.session == 0:
            self.session = 0
            return
        self._acknowledged_at = self._asked_at      # the conductor spoke some time after that
        self.session = answer.session
        for key in answer.acknowledged:
            self._results.pop(key, None)
        self._inventory_told = request.inventory or self._inventory_told
        for image, problem in request.cached.items():
            if self._cached.get(image) == problem:
                del self._cached[image]
        for told in request.changed:
            state = self._changed.get(told.server)
            if state is not None and state.power_state == told.power_state:
                del self._changed[told.server]
        if answer.guests is not None:
            for server, fence in answer.guests.items():
                if fence > self._fences.get(server, 0):
                    self._fences[server] = fence
                    self._reported_at = None        # what was told under an older fence is told again
        self.accept(answer.commands)
