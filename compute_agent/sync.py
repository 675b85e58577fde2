# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the exchange with conductors, and the rules for accepting commands.

``Agent`` is a state machine without threads. It accepts commands (``accept``), returns one at a
time for each server to a worker (``take``), records their results (``record_result``), builds the
next report to a conductor (``request``), and processes the answer (``record_answer``). While there
is nothing to report, heartbeats replace exchanges (``heartbeat``, ``record_heartbeat_answer``).
``compute_agent.service`` calls these methods from several threads under one lock. Tests call them
directly.
"""

from __future__ import annotations

import hashlib
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
from common.service.log import get_logger
from compute_agent.journal import Journal
from compute_agent.verb_context import MAX_DETAILS_CHARS
from compute_agent.verbs import abort_before_begin

log = get_logger(__name__)
#: Length of the lease after an answer. After it the agent starts no guest, and registers again.
LEASE_SECONDS = 30.0
#: Rest of the lease that is required when a guest is started.
START_MARGIN_SECONDS = 5.0
FULL_REPORT_SECONDS = 60.0
#: Limit of simultaneous commands that make disks from an image.
MAX_BUILDS = 10
#: Limit of simultaneous commands that copy whole disks, builds included.
MAX_COPIES = 10
#: Limit of simultaneous outgoing live migrations.
MAX_MIGRATIONS = 1
#: Limit of simultaneous commands that wait for their guest.
MAX_WAITS = 64
#: Results in one exchange. The next exchange reports the rest.
MAX_RESULTS = 100
#: Servers with files and no domain in one report.
MOST_FILES = 100
#: Time without a sign of life after which a command is reported as hanging.
HANG_SECONDS = 120.0


class Pool(Enum):
    """Kinds of commands with a limit on how many run at the same time."""

    BUILDS, COPIES, MIGRATIONS, WAITS = range(4)


@dataclass
class Work:
    """A command in hand: accepted, and without a result yet. With the progress of its verb."""

    command: Command
    verb: Verb
    #: True while a worker carries the command out.
    running: bool = False
    #: True if the verb must stop, for example because a command with a higher fence was accepted.
    cancelled: bool = False
    progress: CommandProgress = CommandProgress(CommandPhase.QUEUED)
    #: True if an earlier process of this agent has begun the command.
    begun: bool = False
    #: The control that was requested of a live migration.
    requested: Control | None = None
    #: Progress of a live migration in bytes, as in ``VerbContext.report_migration``.
    measured: dict[str, int] = field(default_factory=dict)
    #: Monotonic time of the verb's last sign of life.
    alive_at: float = 0.0
    #: True if the command hung and another worker has taken the worker's place.
    replaced: bool = False

    @property
    def key(self) -> str:
        """The command's key as text."""
        return str(self.command.key)

    @property
    def pools(self) -> set[Pool]:
        """The pools that count this command while it runs."""
        member = {
            Pool.BUILDS: self.verb.builds,
            Pool.COPIES: self.verb.copies_disks,
            Pool.MIGRATIONS: self.verb.migrates,
            Pool.WAITS: self.verb.waits_for_guest,
        }
        return {pool for pool, is_member in member.items() if is_member}


#: Servers of which the host has files and no domain, and the bounds of this page, as in
#: ``Sync.files`` and ``Sync.files_between``.
_Files = tuple[list[str] | None, list[str] | None]


class Agent:
    """The commands, fences and lease of one host.

    Args:
        host: Name of the host.
        journal: Results and fences that survive a restart.
        clock: Source of the monotonic time.
        boot_id: Id of the host's boot.
        builds: Limit of simultaneous builds.
        copies: Limit of simultaneous copies of disks, builds included.
        migrations: Limit of simultaneous outgoing live migrations.
        hang: Seconds without a sign of life after which a command counts as hanging.
        fence_after: Seconds without contact after which this host stops all guests. 0 means never.
    """

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

    # --- Commands ---
    def accept(self, commands: Iterable[Command]) -> None:
        """Queue commands for ``take``, and report again the results that the journal contains.

        A control of a live migration is applied at once. A higher fence cancels the server's
        commands with lower fences. A command that is in hand or has an unacknowledged result is
        ignored. Commands of another session are dropped. Commands that are unknown, malformed, or
        have an older fence are refused, and the refusal is reported like a result.
        """
        for command in commands:
            if command.session != self.session:
                log.info(
                    "a command for another session of this host is dropped",
                    verb=command.verb,
                    server=command.server,
                    command_session=command.session,
                    session=self.session,
                )
            elif str(command.key) not in self._work and str(command.key) not in self._results:
                try:
                    self._accept(command)
                except UnknownVerb:
                    log.warning(
                        "a command is refused, because this agent does not know its verb",
                        verb=command.verb,
                        server=command.server,
                    )
                    self._refuse(
                        command,
                        f"its agent does not know {command.verb} and must be upgraded.",
                        FailureReason.UNKNOWN_VERB,
                    )
                except Exception as problem:
                    log.exception("a command cannot be parsed and is refused", command=command.key)
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
        """Record a refusal as the result of a command, for the next exchange.

        The conductor repeats the command while the action waits for the result. After
        ``MAX_REFUSALS`` refusals in a row (``conductor.engine.retries``) the action is stuck.

        Args:
            command: The refused command.
            error: The reason. The conductor shows this after "Host h1 refuses the command VERB: ".
            reason: The kind of the reason.
            known_fence: The server's higher fence on this host, for a command with an older fence.
            details: Text for the operator.
        """
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
        known_fence, key = self._fences.get(command.server, 0), str(command.key)
        if command.fence < known_fence:
            error = f"fence {command.fence} is older than {known_fence}"
            self._refuse(command, error, FailureReason.STALE_FENCE, known_fence)
            return
        self._raise_fence(command.server, command.fence)
        verb = decode(command)
        recorded_result = self._journal.find(key)
        if recorded_result is not None:
            self._results[key] = recorded_result
        elif isinstance(verb, ControlMigration):
            self._control(command, verb)
        else:
            begun = verb.migrates and self._journal.has_begun(key)
            self._work[key] = Work(command, verb, begun=begun)

    def _raise_fence(self, server: str, fence: int) -> None:
        """Set a new fence of a server, and cancel the server's commands with a lower fence.

        A fence that is equal changes nothing.
        """
        self._fences[server] = fence
        for work in self._work.values():
            if work.command.server == server and work.command.fence < fence:
                work.cancelled = True

    def _control(self, command: Command, verb: ControlMigration) -> None:
        """Apply a control to a live migration, and record the result of the control.

        The result says whether the migration is in hand. If it is not, nothing else happens. After
        an abort, further controls have no effect. An abort ends a migration at once if the
        migration has not begun.
        """
        work = self._work.get(str(verb.migration))
        if work is not None and work.requested is not Control.ABORT:
            work.requested = verb.control
            if (
                work.requested is Control.ABORT
                and work.verb.migrates
                and not (work.running or work.begun)
            ):
                self.record_result(work, abort_before_begin(self._journal, work.command))
        key, data = str(command.key), to_wire(Controlled(in_hand=work is not None))
        self._results[key] = Result(key, command.server, command.fence, ResultStatus.DONE, data)

    def take(self) -> Work | None:
        """Return the next command and mark the command as running, or return None without one.

        At most one command runs for each server. The caller must call ``record_result``. Cancelled
        commands are dropped, and so are commands that need a lease if the lease has not lasted
        since they were sent. A command waits while one of its pools is full or its server is being
        powered off, and others may overtake it. A migration that an earlier agent has begun does
        not wait for its pool. No guest is started before all guests that must not run here are off.
        """
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
        """Record a sign of life of a running verb: a progress report or check for cancellation."""
        work.alive_at = self._clock.monotonic()

    def take_hanging(self) -> list[Work]:
        """Return the running commands that have begun to hang, and mark them as replaced.

        A command hangs after the agent's ``hang`` seconds without a sign of life (``is_alive``).
        Each command is returned once. The caller must start another worker in place of its worker,
        except for a command that waits for its guest and occupies no worker. A replaced command no
        longer counts in its pools. Further commands of the same server still wait.
        """
        hanging_work = [
            work for work in self._work.values() if not work.replaced and self._hangs(work)
        ]
        for work in hanging_work:
            work.replaced = True
        return hanging_work

    def _hangs(self, work: Work) -> bool:
        return work.running and self._clock.monotonic() - work.alive_at >= self._hang

    def _progress(self, work: Work) -> CommandProgress:
        return (
            replace(work.progress, stalled_verb=work.command.verb)
            if self._hangs(work)
            else work.progress
        )

    def take_stop(self) -> str | None:
        """Return a server whose domain must be powered off now, or None.

        The answer to the last registration named these servers. The caller powers the domain off
        and then calls ``record_stop``. Until then the server is not returned again. A server with a
        running command that starts its guest is not returned before the command has ended.
        """
        starting = {
            work.command.server
            for work in self._work.values()
            if work.running and work.verb.starts_guest
        }
        server = next(iter(self._must_be_off - self._stopping - starting), None)
        if server is not None:
            self._stopping.add(server)
        return server

    def record_stop(self, server: str, is_off: bool) -> None:
        """Record whether a server's domain is off. If not, ``take_stop`` returns the server again.

        If the domain is off, journalled results that report the guest as running or paused are
        deleted, so that their commands are carried out again when they are repeated.
        """
        self._stopping.discard(server)
        if is_off:
            self._journal.forget_running(server)
            self._must_be_off.discard(server)

    def has_lease(self) -> bool:
        """Return True if a conductor answered a message of the last ``LEASE_SECONDS``.

        The time counts from the sending of the message. These answers do not count: an answer
        without a session, an answer to a report from before a fencing began, and an answer to a
        heartbeat that the conductor has work for the host. Without a lease no guest is started.
        """
        return self._clock.monotonic() - self._acknowledged_at < LEASE_SECONDS

    def silence(self) -> float:
        """Return the seconds since the agent sent the last message that a conductor answered.

        ``has_lease`` states which answers do not count.

        Returns:
            -1 without a session, for example before the first answer.
        """
        return self._clock.monotonic() - self._acknowledged_at if self.session else -1.0

    def may_start(self, work: Work) -> bool:
        """Return True if the verb may start the CPUs of a guest now.

        The command must not be cancelled, and the lease under which it was sent must last for
        ``START_MARGIN_SECONDS`` more.
        """
        return not work.cancelled and self._is_valid(work, START_MARGIN_SECONDS)

    def _is_valid(self, work: Work, left: float = 0.0) -> bool:
        """Return True if the lease of the command's session lasts ``left`` more seconds.

        After a new registration another host may have the server. If the command is still valid, a
        conductor sends it again in the new session.
        """
        return (
            work.command.session == self.session
            and self._clock.monotonic() - self._acknowledged_at < LEASE_SECONDS - left
        )

    def fences_itself(self) -> bool:
        """Return True if this host must power off all its guests.

        This is so while a begun fencing has not ended, and when no message of the last
        ``fence_after`` seconds was answered, because conductors may then have declared the host
        dead. The start of the agent and the end of a fencing count as an answered message.
        ``has_lease`` names the answers that do not count. With ``fence_after`` 0 no fencing begins.
        """
        since = max(self._acknowledged_at, self._alone_since)
        return self._is_fencing or 0 < self._fence_after <= self._clock.monotonic() - since

    def begin_fencing(self) -> None:
        """Journal the begin of a fencing, and end the session. A begun fencing is not begun again.

        From now on the host reports another boot id, so that conductors start the guests again.
        """
        if not self._is_fencing:
            self._journal.begin_fencing(self.boot_id)
            self._fencings, self._is_fencing = self._journal.fencings(self.boot_id)
            self.session = 0

    def end_fencing(self) -> None:
        """Record the end of the fencing: all guests are off. ``fence_after`` counts from now."""
        self._journal.end_fencing(self.boot_id)
        self._is_fencing, self._alone_since = False, self._clock.monotonic()

    def record_result(self, work: Work, result: Result | None) -> None:
        """Record the end of a command, and its result for the next exchange.

        ``result`` is None if the conductor has to send the command again.
        """
        self._work.pop(work.key, None)
        if result is not None:
            self._results[result.key] = result

    def record_changes(self, states: Iterable[DomainState]) -> None:
        """Record the states of domains for which the driver reported an event, for the next report.

        A state that an unacknowledged result already contains is left out.
        """
        reported = {
            (result.server, result.fence, power_state(result)) for result in self._results.values()
        }
        for state in states:
            if (state.server, state.fence, state.power_state) in reported:
                self._changed.pop(state.server, None)
            else:
                self._changed[state.server] = state

    def record_host(
        self,
        inventory: HostInventory,
        metrics: dict[str, float] | None,
        files: Iterable[str] | None = None,
    ) -> None:
        """Record inventory, metrics, and the servers of which the host has files and no domain.

        The next exchange reports the metrics, even if equal, and inventory and files if they differ
        from the last that a conductor has acknowledged. Files of servers with a command in hand or
        an unacknowledged result count as in use and are left out.

        Args:
            inventory: The present inventory.
            metrics: Metrics by name, or None if the host reports none.
            files: Ids of the servers, or None to keep the last files. Long lists are reported in
                pages, in turn.
        """
        self._inventory, self._metrics = inventory, metrics
        if files is not None:
            self._files = self._select_page(sorted(set(files) - self._find_busy_servers()))

    def _select_page(self, files: list[str]) -> _Files:
        """Return the servers to report next, and the bounds of this page as in ``Sync``.

        The bounds are None if all servers fit into one report. The next page follows once a
        conductor has acknowledged this one.
        """
        if len(files) <= MOST_FILES:
            return files, None
        after, through = self._files[1] or ("", "")
        if self._files == self._files_reported:
            after = through
        page = [server for server in files if server > after][: MOST_FILES + 1]
        if len(page) > MOST_FILES:
            return page[:MOST_FILES], [after, page[MOST_FILES - 1]]
        return page, [after, ""]

    def record_prefetch(self, image: str, problem: str) -> None:
        """Record the outcome of a prefetch. ``problem`` is empty if the image is on this host."""
        self._cached[image] = problem

    # --- Exchanges ---
    def wants_full_report(self) -> bool:
        """Return True if the next exchange must report all domains. A registration does so anyway.

        This is so at the start, a minute after all domains were read last, when a conductor did not
        answer a heartbeat or had work for the host, and when an answer had a higher fence of a
        server (``SyncAnswer.guests``).
        """
        return (
            self._looked_at is None
            or self._clock.monotonic() - self._looked_at >= FULL_REPORT_SECONDS
        )

    def is_look_due(self) -> bool:
        """Return True if domains must be read again before the next heartbeat, for its digest.

        This is so a minute after the last reading. False if an exchange that reports all domains
        must come next, for example a registration.
        """
        return (
            self._looked_at is not None
            and self.wants_full_report()
            and not self.needs_registration()
        )

    def record_domains(self, domains: list[DomainState]) -> None:
        """Store the digest of this host's domains for the heartbeats, and the time of the reading.

        Domains of servers with a command in hand or an unacknowledged result are left out.
        """
        self._looked_at, self._domains = (
            self._clock.monotonic(),
            _digest(self._select_settled(domains)),
        )

    def heartbeat(self) -> Heartbeat | None:
        """Return a heartbeat, or None if an exchange is needed.

        An exchange is needed if the agent must register or report all domains, if there is
        something else to report, or if a command is in hand. The lease that the answer renews
        begins now.
        """
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

    def record_heartbeat_answer(self, answer: HeartbeatAnswer | None) -> None:
        """Process the answer to a heartbeat.

        If the conductor has no work for the host, the lease is renewed from the time of the
        heartbeat. If the conductor has work, or no answer came (None), the next exchange reports
        all domains.
        """
        if answer is not None:
            self._cookie = answer.cookie
        if answer is not None and answer.nothing:
            self._acknowledged_at = self._asked_at
        else:
            self._looked_at = None

    def is_working_on(self, server: str) -> bool:
        """Return True if a command runs for this server. Waiting commands do not count."""
        return any(work.running and work.command.server == server for work in self._work.values())

    def in_hand(self) -> Mapping[str, Work]:
        """Return the commands that wait or run, by ``Work.key``."""
        return self._work

    def has_news(self) -> bool:
        """Return True if there is something to report before the next periodic exchange.

        This is a result, the outcome of a prefetch, or a changed domain without a command in hand.
        """
        return bool(self._results or self._cached or self._select_settled(self._changed.values()))

    def needs_registration(self) -> bool:
        """Return True if a new session is needed.

        This is so at the start, after the lease has lapsed, after the begin of a fencing, and after
        an answer without a session.
        """
        return self.session == 0 or not self.has_lease()

    def request(
        self, ask: bool, domains: list[DomainState] | None, inventory: HostInventory | None
    ) -> Sync:
        """Build the next report to a conductor. Pass its answer to ``record_answer``.

        The lease that the answer renews begins now. Recorded metrics are reported once, even if the
        report is lost.

        Args:
            ask: True to request the commands that this host lacks, and to report progress.
            domains: The states of all domains, or None if they are not reported.
            inventory: The inventory for a registration, or None to stay in the session.
        """
        session = self.session
        if inventory is not None:
            session, self._inventory, self._inventory_reported = 0, inventory, None
            self._files_reported = (None, None)
        changed_inventory = self._inventory if self._inventory != self._inventory_reported else None
        metrics, self._metrics = self._metrics, None
        self._asked_at = self._clock.monotonic()
        self._number += 1
        if domains is not None:
            self.record_domains(domains)
        return Sync(
            self.host,
            session,
            self._reported_boot_id(),
            ask,
            list(self._work),
            list(self._results.values())[:MAX_RESULTS],
            None if domains is None else self._select_settled(domains),
            self._select_settled(self._changed.values()),
            changed_inventory,
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
        """Return the boot id to report. Each fencing of this host changes it."""
        return f"{self.boot_id}.{self._fencings}" if self._fencings else self.boot_id

    def _select_settled(self, domains: Iterable[DomainState]) -> list[DomainState]:
        """Return the states of servers without a command in hand or an unacknowledged result.

        Each state gets the highest fence that was accepted for its server. After a failed command
        the state is true under that command's fence, although the domain never carried this fence.
        For a busy server the command's result must be reported before the state.
        """
        busy_servers = self._find_busy_servers()
        return [
            DomainState(
                state.server, state.power_state, max(state.fence, self._fences.get(state.server, 0))
            )
            for state in domains
            if state.server not in busy_servers
        ]

    def _find_busy_servers(self) -> set[str]:
        """Return the servers with a command in hand or an unacknowledged result."""
        return {work.command.server for work in self._work.values()} | {
            result.server for result in self._results.values()
        }

    def record_answer(self, request: Sync, answer: SyncAnswer) -> None:
        """Process a conductor's answer to a request: renew the lease, and accept its commands.

        What the conductor acknowledges is not reported again. If the answer has no session, or a
        fencing has begun since the request, the agent must register again. Then only the cookie of
        the answer is used.
        """
        self._cookie = answer.cookie
        if answer.session == 0 or request.boot_id != self._reported_boot_id():
            self.session = 0
            return
        # The lease begins with the request, because the conductor answered after that time.
        self._acknowledged_at = self._asked_at
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
            self._set_stops(answer.stop)
        if answer.guests is not None:
            for server, fence in answer.guests.items():
                if fence > self._fences.get(server, 0):
                    self._raise_fence(server, fence)
                    # States under a lower fence must be reported again.
                    self._looked_at = None
        self.accept(answer.commands)

    def _set_stops(self, servers: Iterable[str]) -> None:
        """Set the servers whose guests must not run here, from the answer to a registration.

        Commands that would start such a guest are cancelled.
        """
        self._must_be_off = set(servers)
        for work in self._work.values():
            if work.command.server in self._must_be_off and work.verb.starts_guest:
                work.cancelled = True


def _digest(domains: Iterable[DomainState]) -> str:
    """Return a digest of the states of domains, which does not depend on their order."""
    reported = sorted((state.server, state.power_state, state.fence) for state in domains)
    return hashlib.blake2b(repr(reported).encode(), digest_size=8).hexdigest()
