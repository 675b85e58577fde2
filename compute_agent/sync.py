# SPDX-License-Identifier: Apache-2.0
"""The agent's half of the one exchange, and the rules of what it accepts: a state machine without threads.

``Agent`` is told commands (``accept``), gives them out one a server at a time (``take``), is told their
results (``ended``), says what to tell the conductor (``request``) and takes its answer (``answered``). While it has
nothing to tell, a heartbeat stands in for the exchange (``heartbeat``, ``heard``).
``compute_agent.service`` calls these from its threads under one lock; tests call them directly.
"""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from common.clock import Clock
from common.models import (
    HANGS,
    Command,
    DomainState,
    Heartbeat,
    HeartbeatAnswer,
    HostInventory,
    Result,
    Sync,
    SyncAnswer,
)
from compute_agent.journal import Journal
from compute_agent.verbs import VERBS, called_off

log = logging.getLogger(__name__)
LEASE = 30.0                 #: seconds of silence after which nothing is started and hello is said again
START = 5.0                  #: seconds of it that must be left when a guest is started
FULL_REPORT = 60.0
BUILDS = 10                  #: commands that make disks of an image, at a time
COPIES = 10                  #: commands that move whole disks, builds among them, at a time
MIGRATIONS = 1               #: commands that let a running guest go to another host, at a time
WAITS = 64                   #: commands that wait for what their guest does, at a time
HANG = 120.0                 #: seconds without a sign of life after which a command is said to hang
STEER = "steer"              #: a command for a command: what is wished of a migration


@dataclass
class Work:
    """A command in hand. ``cancelled`` is set when a higher fence arrives; ``begun``: by an agent of this host that is
    gone. ``wish``: what somebody wants of a migration, "abort" or "complete"; ``measured``: how far it is.
    ``alive_at``: when its verb was last seen to go on; ``replaced``: it hung, and its worker is not counted on."""

    command: Command
    running: bool = False
    cancelled: bool = False
    phase: str = "queued"
    begun: bool = False
    wish: str = ""
    measured: dict[str, int] = field(default_factory=dict)
    alive_at: float = 0.0
    replaced: bool = False

    def does(self, kind: str) -> bool:
        """What its verb declares, among starts, lapses, builds, copies, moves and waits."""
        verb = VERBS.get(self.command.verb)
        return verb is not None and bool(getattr(verb, kind))


class Agent:
    """One host's memory of what it is doing. ``builds``, ``copies``, ``migrations``: how many of these run at a time;
    others wait here. ``hang``: seconds without a sign of life after which a command hangs. ``fence_after``:
    seconds of silence after which this host makes its own guests off; 0: never."""

    def __init__(self, host: str, journal: Journal, clock: Clock, boot_id: str, builds: int = BUILDS,
                 copies: int = COPIES, migrations: int = MIGRATIONS, hang: float = HANG,
                 fence_after: float = 0) -> None:
        self.host, self.boot_id, self._hang, self._fence_after = host, boot_id, hang, fence_after
        self._most = {"builds": builds, "copies": copies, "moves": migrations, "waits": WAITS}
        self._journal, self._clock = journal, clock
        self.session = 0
        self._fences = journal.fences()
        self._work: dict[str, Work] = {}
        self._results: dict[str, Result] = {}
        self._changed: dict[str, DomainState] = {}
        self._cached: dict[str, str] = {}
        self._must_be_off: set[str] = set()
        self._stopping: set[str] = set()
        self._inventory: HostInventory | None = None
        self._inventory_told: HostInventory | None = None
        self._metrics: dict[str, float] | None = None
        self._asked_at = self._acknowledged_at = -LEASE
        self._alone_since = clock.monotonic()
        self._fencings, self._is_fencing = journal.fencings(boot_id)
        self._looked_at: float | None = None
        self._domains = ""
        self._number, self._cookie = 0, ""

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
                                                {"known": known}, f"fence {command.fence} is older than {known}")
            return
        self._learn(command.server, command.fence)
        done = self._journal.find(command.key)
        if done is not None:
            self._results[command.key] = done
        elif command.verb == STEER:
            self._steer(command)
        else:
            work = self._work[command.key] = Work(command)
            work.begun = work.does("moves") and self._journal.has_begun(command.key)

    def _learn(self, server: str, fence: int) -> None:
        """What was to be done of the server under an older fence is not wanted any more."""
        self._fences[server] = fence
        for work in self._work.values():
            if work.command.server == server and work.command.fence < fence:
                work.cancelled = True

    def _steer(self, command: Command) -> None:
        """Somebody wishes something of the work with this key; what is not in hand cannot be steered. Nothing follows
        an abort, and a migration that nobody has begun ends with it here."""
        work = self._work.get(command.args["key"])
        if work is not None and work.wish != "abort":
            work.wish = command.args["wish"]
            if work.wish == "abort" and work.does("moves") and not (work.running or work.begun):
                self.ended(work, called_off(self._journal, work.command))
        self._results[command.key] = Result(command.key, command.server, command.fence, "done",
                                            {"in_hand": work is not None})

    def take(self) -> Work | None:
        """The next command that may run now: one a server at a time, cancelled ones dropped. What is one too many of
        its kind waits, and others overtake it; one that was begun before is only looked after. Until what must not run
        here is off, nothing is started."""
        running = [work for work in self._work.values() if work.running]
        busy = {work.command.server for work in running} | self._stopping
        full = [kind for kind, most in self._most.items()
                if sum(work.does(kind) and not work.replaced for work in running) >= most]
        for key, work in list(self._work.items()):
            if work.running:
                continue
            if work.cancelled or ((work.does("starts") or work.does("lapses")) and not self._is_valid(work)):
                del self._work[key]
            elif work.command.server in busy or (work.does("starts") and (self._must_be_off or self._stopping)):
                continue
            elif work.begun or not any(map(work.does, full)):
                work.running = True
                self.is_alive(work)
                return work
        return None

    def is_alive(self, work: Work) -> None:
        """Its verb goes on: it told its phase, or asked whether to stop, as it must every few seconds."""
        work.alive_at = self._clock.monotonic()

    def hanging(self) -> list[Work]:
        """Commands that have begun to hang in the hypervisor, or in storage, since this was asked last: each is said
        once, and leaves its place to others. Their servers have to wait."""
        found = [work for work in self._work.values() if not work.replaced and self._hangs(work)]
        for work in found:
            work.replaced = True
        return found

    def _hangs(self, work: Work) -> bool:
        return work.running and self._clock.monotonic() - work.alive_at >= self._hang

    def _phase(self, work: Work) -> str:
        return f"{HANGS} {work.command.verb} ({work.phase})" if self._hangs(work) else work.phase

    def take_stop(self) -> str | None:
        """A server whose domain is to be made off now. One that is just being started is let go of first."""
        starting = {work.command.server for work in self._work.values() if work.running and work.does("starts")}
        server = next(iter(self._must_be_off - self._stopping - starting), None)
        if server is not None:
            self._stopping.add(server)
        return server

    def stopped(self, server: str, is_off: bool) -> None:
        """The plug of this one was pulled, or that has to be tried again."""
        self._stopping.discard(server)
        if is_off:
            self._journal.forget_running(server)
            self._must_be_off.discard(server)

    def has_lease(self) -> bool:
        """Has the conductor been heard lately? Without that, nothing is started."""
        return self._clock.monotonic() - self._acknowledged_at < LEASE

    def may_start(self, work: Work) -> bool:
        """May its verb let a guest's CPUs run now? It must still be wanted, and the lease under which it was sent must
        be good for longer than a guest takes to start."""
        return not work.cancelled and self._is_valid(work, START)

    def _is_valid(self, work: Work, left: float = 0.0) -> bool:
        """Has this host been heard ever since the command was sent, and for so many seconds to come? After a hello a
        conductor may have had its server built elsewhere; it sends the command again if it still wants it."""
        return (work.command.session == self.session
                and self._clock.monotonic() - self._acknowledged_at < LEASE - left)

    def fences_itself(self) -> bool:
        """Has no conductor been heard for so long that others may have been told to take this host for dead?"""
        since = max(self._acknowledged_at, self._alone_since)
        return self._is_fencing or 0 < self._fence_after <= self._clock.monotonic() - since

    def begin_fencing(self) -> None:
        """Guests are about to be made off. What is told from now on is told as after a boot, so that those that should
        run here are started again."""
        if not self._is_fencing:
            self._journal.begin_fencing(self.boot_id)
            self._fencings, self._is_fencing = self._journal.fencings(self.boot_id)
            self.session = 0

    def fenced(self) -> None:
        """All are off."""
        self._journal.end_fencing(self.boot_id)
        self._is_fencing, self._alone_since = False, self._clock.monotonic()

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
        """Is it time to look at all domains, and to tell them in the next exchange?"""
        return self._looked_at is None or self._clock.monotonic() - self._looked_at >= FULL_REPORT

    def looks_again(self) -> bool:
        """Is it time to look at all domains, although nobody has asked for them?"""
        return self._looked_at is not None and self.wants_full_report() and not self.needs_hello()

    def looked(self, domains: list[DomainState]) -> None:
        """These are all domains; nobody is told, but for what the heartbeat says of them."""
        self._looked_at, self._domains = self._clock.monotonic(), _digest(self._settled(domains))

    def heartbeat(self) -> Heartbeat | None:
        """What to say of a host that has nothing to tell and nothing in hand, and need not list its domains. None: an
        exchange is needed."""
        idle = not (self.needs_hello() or self.wants_full_report() or self._work or self._results or self._changed
                    or self._cached or self._metrics is not None or self._inventory != self._inventory_told)
        if not idle:
            return None
        self._asked_at = self._clock.monotonic()
        return Heartbeat(self.host, self.session, self._domains, self._cookie)

    def heard(self, answer: HeartbeatAnswer | None) -> None:
        """The answer to the heartbeat: nothing waits for this host, or it is to tell all its domains; as without
        one."""
        if answer is not None:
            self._cookie = answer.cookie
        if answer is not None and answer.nothing:
            self._acknowledged_at = self._asked_at
        else:
            self._looked_at = None

    def is_working_on(self, server: str) -> bool:
        """Is a command for this server being carried out? Its result will say how the domain is."""
        return any(work.running and work.command.server == server for work in self._work.values())

    def in_hand(self) -> Set[str]:
        """The keys of the commands that wait or are carried out."""
        return self._work.keys()

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
        self._number += 1
        if domains is not None:
            self.looked(domains)
        return Sync(self.host, session, self._told_boot(), ask, list(self._work), list(self._results.values()),
                    None if domains is None else self._settled(domains), self._settled(self._changed.values()),
                    news, metrics,
                    {key: self._phase(work) for key, work in self._work.items()
                     if work.running or work.does("moves")}
                    if ask else {}, dict(self._cached),
                    {key: work.measured for key, work in self._work.items() if work.measured} if ask else {},
                    self._number, self._cookie)

    def _told_boot(self) -> str:
        """The boot that is told: another one each time this host has fenced itself."""
        return f"{self.boot_id}.{self._fencings}" if self._fencings else self.boot_id

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
        self._cookie = answer.cookie
        if answer.session == 0 or request.boot_id != self._told_boot():
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
        if request.session == 0:
            self._must_stop(answer.stop)
        if answer.guests is not None:
            for server, fence in answer.guests.items():
                if fence > self._fences.get(server, 0):
                    self._learn(server, fence)
                    self._looked_at = None          # what was told under an older fence is told again
        self.accept(answer.commands)

    def _must_stop(self, servers: Iterable[str]) -> None:
        """What must not run here, as of this hello, whatever an earlier one said. What would start it is let go of."""
        self._must_be_off = set(servers)
        for work in self._work.values():
            if work.command.server in self._must_be_off and work.does("starts"):
                work.cancelled = True


def _digest(domains: Iterable[DomainState]) -> str:
    """The same for the same domains in the same states, in any order."""
    told = sorted((state.server, state.power_state, state.fence) for state in domains)
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()
