# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the exchange with the conductor, and the rules by which it accepts commands.

``Agent`` is a state machine without threads. It takes commands (``accept``), gives them out one at
a time for each server (``take``), takes their results (``ended``), makes the next request to the
conductor (``request``) and takes the answer (``answered``). While there is nothing to report, a
heartbeat replaces the exchange (``heartbeat``, ``heard``).
``compute_agent.service`` calls these from its threads under one lock; tests call them directly.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from common.domain.clock import Clock
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import (
    Command,
    Control,
    DomainState,
    FailureReason,
    Heartbeat,
    HeartbeatAnswer,
    HostInventory,
    Result,
    Sync,
    SyncAnswer,
)
from common.domain.statuses import ResultStatus
from common.domain.verbs import Controlled, ControlMigration, UnknownVerb, Verb, decode, power_state
from common.domain.wire import to_wire
from compute_agent.journal import Journal
from compute_agent.verb_context import MAX_DETAILS_CHARS
from compute_agent.verbs import aborted

log = logging.getLogger(__name__)
LEASE_SECONDS = 30.0  #: of silence; then nothing is started, and the host registers again
START_MARGIN_SECONDS = 5.0  #: of the lease that must be left when a guest is started
FULL_REPORT_SECONDS = 60.0
MAX_BUILDS = 10  #: commands that make disks from an image, at a time
MAX_COPIES = 10  #: commands that copy whole disks, builds included, at a time
MAX_MIGRATIONS = 1  #: outgoing live migrations at a time
MAX_WAITS = 64  #: commands that wait for their guest, at a time
MAX_RESULTS = 100  #: in one exchange; the next one brings more
MOST_FILES = 100  #: servers of which a host reports at once that it has files alone
HANG_SECONDS = 120.0  #: without a sign of life; then a command is reported as hanging


class Pool(Enum):
    """Kinds of commands of which a limited number run at a time."""

    BUILDS, COPIES, MIGRATIONS, WAITS = range(4)


@dataclass
class Work:
    """A command in hand."""

    command: Command
    verb: Verb
    #: A worker carries it out.
    running: bool = False
    #: A higher fence was accepted for its server; its verb must stop.
    cancelled: bool = False
    progress: CommandProgress = CommandProgress(CommandPhase.QUEUED)
    #: An agent of this host that has ended began it.
    begun: bool = False
    #: The control that was requested of a live migration.
    requested: Control | None = None
    #: How far a migration is, in bytes.
    measured: dict[str, int] = field(default_factory=dict)
    #: When its verb last gave a sign of life, by the monotonic clock.
    alive_at: float = 0.0
    #: It hung, so that another worker replaced its worker.
    replaced: bool = False

    @property
    def key(self) -> str:
        """The text of the command's key."""
        return str(self.command.key)

    @property
    def pools(self) -> set[Pool]:
        """The pools in which it takes a place while it runs."""
        member = {
            Pool.BUILDS: self.verb.builds,
            Pool.COPIES: self.verb.copies_disks,
            Pool.MIGRATIONS: self.verb.migrates,
            Pool.WAITS: self.verb.waits_for_guest,
        }
        return {pool for pool, is_member in member.items() if is_member}


#: Servers of which a host has files alone, and what they lie between: None: they are all.
_Files = tuple[list[str] | None, list[str] | None]


class Agent:
    """What one host knows of its commands, fences and lease. ``builds``, ``copies`` and
    ``migrations`` limit how many of these run at a time. ``hang``: seconds without a sign of life
    after which a command hangs. ``fence_after``: seconds of silence after which this host stops its
    own guests; 0: never."""

    def __init__(
        self,
        host: str,
        journal: Journal,
        clock: Clock,
        boot_id: str,
        builds: int = MAX_BUILDS,
        copies: int = MAX_COPIES,
        migrations: int = MAX_MIGRATIONS,
        hang: float = HANG_SECONDS,
        fence_after: float = 0,
    ) -> None:
        self.host, self.boot_id, self._hang, self._fence_after = host, boot_id, hang, fence_after
        self._limits = {
            Pool.BUILDS: builds,
            Pool.COPIES: copies,
            Pool.MIGRATIONS: migrations,
            Pool.WAITS: MAX_WAITS,
        }
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
        self._inventory_reported: HostInventory | None = None
        self._metrics: dict[str, float] | None = None
        self._files: _Files = (None, None)
        self._files_reported: _Files = (None, None)
        self._asked_at = self._acknowledged_at = -LEASE_SECONDS
        self._alone_since = clock.monotonic()
        self._fencings, self._is_fencing = journal.fencings(boot_id)
        self._looked_at: float | None = None
        self._domains = ""
        self._number, self._cookie = 0, ""

    # --- commands ---
    def accept(self, commands: Iterable[Command]) -> None:
        """Take commands in hand. Those that were carried out before are answered again."""
        for command in commands:
            if command.session != self.session:
                log.info(
                    "a command for session %d is dropped in session %d",
                    command.session,
                    self.session,
                )
            elif str(command.key) not in self._work and str(command.key) not in self._results:
                try:
                    self._accept(command)
                except UnknownVerb:
                    log.warning(
                        "%s of server %s is refused: this agent does not know it",
                        command.verb,
                        command.server,
                    )
                    self._refuse(
                        command,
                        f"its agent does not know {command.verb} and must be upgraded.",
                        FailureReason.UNKNOWN_VERB,
                    )
                except Exception as problem:
                    log.exception("command %s cannot be understood", command.key)
                    self._refuse(
                        command,
                        f"its agent cannot understand the command {command.key}.",
                        details=f"{type(problem).__name__}: {problem}",
                    )

    def _refuse(
        self,
        command: Command,
        error: str,
        reason: FailureReason = FailureReason.UNSPECIFIED,
        known_fence: int | None = None,
        details: str = "",
    ) -> None:
        """Refuse a command. The conductor sends it again, until its action is stuck."""
        self._results[str(command.key)] = Result(
            str(command.key),
            str(command.server),
            command.fence if isinstance(command.fence, int) else 0,
            ResultStatus.REFUSED,
            error=error,
            details=details[:MAX_DETAILS_CHARS],
            reason=reason,
            known_fence=known_fence,
        )

    def _accept(self, command: Command) -> None:
        known, key = self._fences.get(command.server, 0), str(command.key)
        if command.fence < known:
            error = f"fence {command.fence} is older than {known}"
            self._refuse(command, error, FailureReason.STALE_FENCE, known)
            return
        self._learn(command.server, command.fence)
        verb = decode(command)
        done = self._journal.find(key)
        if done is not None:
            self._results[key] = done
        elif isinstance(verb, ControlMigration):
            self._control(command, verb)
        else:
            begun = verb.migrates and self._journal.has_begun(key)
            self._work[key] = Work(command, verb, begun=begun)

    def _learn(self, server: str, fence: int) -> None:
        """A new fence of the server: its commands with an older fence are cancelled."""
        self._fences[server] = fence
        for work in self._work.values():
            if work.command.server == server and work.command.fence < fence:
                work.cancelled = True

    def _control(self, command: Command, verb: ControlMigration) -> None:
        """Control a live migration, if it is in hand. No control replaces an abort. An abort ends a
        migration that has not begun at once."""
        work = self._work.get(str(verb.migration))
        if work is not None and work.requested is not Control.ABORT:
            work.requested = verb.control
            if (
                work.requested is Control.ABORT
                and work.verb.migrates
                and not (work.running or work.begun)
            ):
                self.ended(work, aborted(self._journal, work.command))
        key, data = str(command.key), to_wire(Controlled(in_hand=work is not None))
        self._results[key] = Result(key, command.server, command.fence, ResultStatus.DONE, data)

    def take(self) -> Work | None:
        """The next command that may run now, at most one for each server; cancelled ones are
        dropped. A command whose pool is full waits, and others overtake it. A migration that
        another agent has begun is joined in any case. Until all guests that must not run here are
        off, nothing is started."""
        running = [work for work in self._work.values() if work.running]
        busy = {work.command.server for work in running} | self._stopping
        full = {
            pool
            for pool, limit in self._limits.items()
            if sum(pool in work.pools and not work.replaced for work in running) >= limit
        }
        for key, work in list(self._work.items()):
            if work.running:
                continue
            if work.cancelled or (
                (work.verb.starts_guest or work.verb.needs_lease) and not self._is_valid(work)
            ):
                del self._work[key]
            elif work.command.server in busy or (
                work.verb.starts_guest and (self._must_be_off or self._stopping)
            ):
                continue
            elif work.begun or not work.pools & full:
                work.running = True
                self.is_alive(work)
                return work
        return None

    def is_alive(self, work: Work) -> None:
        """Its verb gave a sign of life: it reported its progress, or asked whether to stop."""
        work.alive_at = self._clock.monotonic()

    def hanging(self) -> list[Work]:
        """Commands that hang, in the hypervisor or in storage, and did not at the last call. Each
        is returned once and gives its place in the pools to others; commands of its server wait."""
        found = [work for work in self._work.values() if not work.replaced and self._hangs(work)]
        for work in found:
            work.replaced = True
        return found

    def _hangs(self, work: Work) -> bool:
        return work.running and self._clock.monotonic() - work.alive_at >= self._hang

    def _progress(self, work: Work) -> CommandProgress:
        return (
            replace(work.progress, stalled_verb=work.command.verb)
            if self._hangs(work)
            else work.progress
        )

    def take_stop(self) -> str | None:
        """A server whose domain must be stopped now. A command that is just starting it ends
        first."""
        starting = {
            work.command.server
            for work in self._work.values()
            if work.running and work.verb.starts_guest
        }
        server = next(iter(self._must_be_off - self._stopping - starting), None)
        if server is not None:
            self._stopping.add(server)
        return server

    def stopped(self, server: str, is_off: bool) -> None:
        """The domain of this server is off, or that has to be tried again."""
        self._stopping.discard(server)
        if is_off:
            self._journal.forget_running(server)
            self._must_be_off.discard(server)

    def has_lease(self) -> bool:
        """Was a conductor heard within the lease? Without a lease nothing is started."""
        return self._clock.monotonic() - self._acknowledged_at < LEASE_SECONDS

    def silence(self) -> float:
        """Seconds since a conductor was heard; -1: none was."""
        return self._clock.monotonic() - self._acknowledged_at if self.session else -1.0

    def may_start(self, work: Work) -> bool:
        """May its verb start a guest's CPUs now? The command must still be wanted, and the lease
        under which it was sent must last for longer than a guest takes to start."""
        return not work.cancelled and self._is_valid(work, START_MARGIN_SECONDS)

    def _is_valid(self, work: Work, left: float = 0.0) -> bool:
        """Has the lease lasted since the command was sent, and does it last for ``left`` more
        seconds? After a new registration a conductor may have built the server elsewhere; it sends
        the command again if it is wanted."""
        return (
            work.command.session == self.session
            and self._clock.monotonic() - self._acknowledged_at < LEASE_SECONDS - left
        )

    def fences_itself(self) -> bool:
        """Was no conductor heard for so long that this host may have been declared dead?"""
        since = max(self._acknowledged_at, self._alone_since)
        return self._is_fencing or 0 < self._fence_after <= self._clock.monotonic() - since

    def begin_fencing(self) -> None:
        """The guests of this host are about to be stopped. From now on another boot is reported, so
        that those which should run here are started again."""
        if not self._is_fencing:
            self._journal.begin_fencing(self.boot_id)
            self._fencings, self._is_fencing = self._journal.fencings(self.boot_id)
            self.session = 0

    def fenced(self) -> None:
        """All guests are off."""
        self._journal.end_fencing(self.boot_id)
        self._is_fencing, self._alone_since = False, self._clock.monotonic()

    def ended(self, work: Work, result: Result | None) -> None:
        """A command has ended. None: it was cancelled, or has to be sent again."""
        self._work.pop(work.key, None)
        if result is not None:
            self._results[result.key] = result

    def changed(self, states: Iterable[DomainState]) -> None:
        """Domains whose state changed, by an event. A state that a waiting result reports already
        is left out, as is one that was seen while the command was still running."""
        reported = {
            (result.server, result.fence, power_state(result)) for result in self._results.values()
        }
        for state in states:
            if (state.server, state.fence, state.power_state) in reported:
                self._changed.pop(state.server, None)
            else:
                self._changed[state.server] = state

    def noticed(
        self,
        inventory: HostInventory,
        metrics: dict[str, float] | None,
        files: Iterable[str] | None = None,
    ) -> None:
        """The present inventory and metrics of the host, and the servers of which it has files
        alone. Inventory and files are reported when they differ from the last that the conductor
        took; metrics are reported once. Files of servers with a command in hand, or a result that
        nobody has heard, are in use. Of many files a page is reported at a time, over and over."""
        self._inventory, self._metrics = inventory, metrics
        if files is not None:
            self._files = self._page(sorted(set(files) - self._busy()))

    def _page(self, files: list[str]) -> _Files:
        """The files to tell of next; when there are many, with what they lie between."""
        if len(files) <= MOST_FILES:
            return files, None
        after, through = self._files[1] or ("", "")
        if self._files == self._files_reported:
            after = through
        page = [one for one in files if one > after][: MOST_FILES + 1]
        if len(page) > MOST_FILES:
            return page[:MOST_FILES], [after, page[MOST_FILES - 1]]
        return page, [after, ""]

    def cached(self, image: str, problem: str) -> None:
        """The outcome of an image that was fetched ahead; ``problem`` empty: it is here."""
        self._cached[image] = problem

    # --- the exchange ---
    def wants_full_report(self) -> bool:
        """Is it time to report all domains with the next exchange?"""
        return (
            self._looked_at is None
            or self._clock.monotonic() - self._looked_at >= FULL_REPORT_SECONDS
        )

    def looks_again(self) -> bool:
        """Is it time to look at all domains for the heartbeat?"""
        return (
            self._looked_at is not None
            and self.wants_full_report()
            and not self.needs_registration()
        )

    def looked(self, domains: list[DomainState]) -> None:
        """These are all domains. Only their digest is reported, with the heartbeat."""
        self._looked_at, self._domains = self._clock.monotonic(), _digest(self._settled(domains))

    def heartbeat(self) -> Heartbeat | None:
        """The heartbeat of a host that has nothing to report and no command in hand. None: an
        exchange is needed."""
        idle = not (
            self.needs_registration()
            or self.wants_full_report()
            or self._work
            or self._results
            or self._changed
            or self._cached
            or self._metrics is not None
            or self._inventory != self._inventory_reported
            or self._files != self._files_reported
        )
        if not idle:
            return None
        self._asked_at = self._clock.monotonic()
        return Heartbeat(self.host, self.session, self._domains, self._cookie)

    def heard(self, answer: HeartbeatAnswer | None) -> None:
        """The answer to the heartbeat. Without one, or with one that asks for it, all domains are
        reported next."""
        if answer is not None:
            self._cookie = answer.cookie
        if answer is not None and answer.nothing:
            self._acknowledged_at = self._asked_at
        else:
            self._looked_at = None

    def is_working_on(self, server: str) -> bool:
        """Does a command for this server run? Its result will report the domain."""
        return any(work.running and work.command.server == server for work in self._work.values())

    def in_hand(self) -> Mapping[str, Work]:
        """The commands that wait or run, by key."""
        return self._work

    def has_news(self) -> bool:
        """Is there something to report before the next periodic exchange?"""
        return bool(self._results or self._cached or self._settled(self._changed.values()))

    def needs_registration(self) -> bool:
        """Is a new session needed? It is at start, and after a silence longer than the lease."""
        return self.session == 0 or not self.has_lease()

    def request(
        self, ask: bool, domains: list[DomainState] | None, inventory: HostInventory | None
    ) -> Sync:
        """The next request to the conductor. With ``inventory`` the host registers."""
        session = self.session
        if inventory is not None:
            session, self._inventory, self._inventory_reported = 0, inventory, None
            self._files_reported = (None, None)
        news = self._inventory if self._inventory != self._inventory_reported else None
        metrics, self._metrics = self._metrics, None
        self._asked_at = self._clock.monotonic()
        self._number += 1
        if domains is not None:
            self.looked(domains)
        return Sync(
            self.host,
            session,
            self._reported_boot_id(),
            ask,
            list(self._work),
            list(self._results.values())[:MAX_RESULTS],
            None if domains is None else self._settled(domains),
            self._settled(self._changed.values()),
            news,
            metrics,
            {
                key: self._progress(work)
                for key, work in self._work.items()
                if work.running or work.verb.migrates
            }
            if ask
            else {},
            dict(self._cached),
            {key: work.measured for key, work in self._work.items() if work.measured}
            if ask
            else {},
            self._number,
            self._cookie,
            *(self._files if self._files != self._files_reported else (None, None)),
        )

    def _reported_boot_id(self) -> str:
        """The boot id to report: a new one each time this host has fenced itself."""
        return f"{self.boot_id}.{self._fencings}" if self._fencings else self.boot_id

    def _settled(self, domains: Iterable[DomainState]) -> list[DomainState]:
        """Domains of servers without a command in hand or an unacknowledged result, each with the
        highest fence that was accepted for it. A state that is seen after a failed command is true
        under that command's fence, although the domain never carried it. A state from before a
        result is reported after the result."""
        busy = self._busy()
        return [
            DomainState(
                state.server, state.power_state, max(state.fence, self._fences.get(state.server, 0))
            )
            for state in domains
            if state.server not in busy
        ]

    def _busy(self) -> set[str]:
        """Servers with a command in hand, or a result that nobody has heard."""
        return {work.command.server for work in self._work.values()} | {
            result.server for result in self._results.values()
        }

    def answered(self, request: Sync, answer: SyncAnswer) -> None:
        """Take the conductor's answer to this request."""
        self._cookie = answer.cookie
        if answer.session == 0 or request.boot_id != self._reported_boot_id():
            self.session = 0
            return
        self._acknowledged_at = self._asked_at  # the conductor answered after that
        self.session = answer.session
        for key in answer.acknowledged:
            self._results.pop(key, None)
        self._inventory_reported = request.inventory or self._inventory_reported
        if request.files is not None:
            self._files_reported = request.files, request.files_between
        for image, problem in request.cached.items():
            if self._cached.get(image) == problem:
                del self._cached[image]
        for reported in request.changed:
            state = self._changed.get(reported.server)
            if state is not None and state.power_state == reported.power_state:
                del self._changed[reported.server]
        if request.session == 0:
            self._must_stop(answer.stop)
        if answer.guests is not None:
            for server, fence in answer.guests.items():
                if fence > self._fences.get(server, 0):
                    self._learn(server, fence)
                    self._looked_at = None  # states under an older fence are reported again
        self.accept(answer.commands)

    def _must_stop(self, servers: Iterable[str]) -> None:
        """The servers whose guests must not run here, by the answer to this registration. Commands
        that would start one are cancelled."""
        self._must_be_off = set(servers)
        for work in self._work.values():
            if work.command.server in self._must_be_off and work.verb.starts_guest:
                work.cancelled = True


def _digest(domains: Iterable[DomainState]) -> str:
    """The same for the same domains in the same states, in any order."""
    reported = sorted((state.server, state.power_state, state.fence) for state in domains)
    return hashlib.blake2b(repr(reported).encode(), digest_size=8).hexdigest()
