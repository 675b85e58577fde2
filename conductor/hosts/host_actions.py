# SPDX-License-Identifier: Apache-2.0
"""Drain and evacuate: move all servers away from a host.

A conductor leases each open action (``common.store.hosts.host_actions``) and advances it once a
second. All state is in the database: every round reads the servers on the host and their moves,
including moves of other origin. So another conductor can continue after a crash, and the plan is
made again there. Each server's move is an action of its own. A move that this action began is
confirmed on arrival, or reverted if the server does not work at the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common.domain import errors, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.statuses import (
    MIGRATIONS_IN_PROGRESS,
    GuestState,
    MigrationStatus,
    MigrationType,
)
from common.service.log import get_logger
from common.store.engine import Connection, Store
from common.store.hosts import host_actions, host_status, services
from common.store.hosts.host_actions import (
    Arguments,
    Event,
    EventName,
    HostAction,
    Name,
    Progress,
    State,
)
from common.store.servers import guests, migrations
from common.store.views import host_contents
from common.store.views.host_contents import Look, Move, Resident
from conductor.engine.engine import Engine, Lane
from conductor.hosts import host_plan, move_progress
from conductor.hosts.host_plan import Planned, Stays, Way

log = get_logger(__name__)
T = TypeVar("T")
#: How long an action waits for an end of other actions, pending cleanups, and a silent host.
SETTLING = 60 * SECOND
#: With ``wait``: the delay before servers that could not leave are tried again.
RETRY = 60 * SECOND
#: Repeated attempts to confirm or revert a move, after the first.
MAX_CONFIRMATIONS = 3
ENDED_WELL = (MigrationStatus.COMPLETED, MigrationStatus.CONFIRMED, MigrationStatus.DONE)
#: The step of an evacuation. A failure of this step ends the whole host action.
FENCE = "fence"
_MOVE_ARGS: dict[MigrationType, dict[str, object]] = {
    MigrationType.LIVE: {"block_migration": None},
    MigrationType.COLD: {},
    MigrationType.EVACUATION: {"stopped": False, "shared": None},
}


@dataclass(frozen=True)
class HostActionKind:
    """The differences between a drain and an evacuation."""

    # The operator's command without the host. Moves store it as their origin.
    command: str
    # Returns how a server leaves the host, or why the server stays.
    way: Callable[[Resident, Arguments], Way | Stays]
    is_empty: Callable[[Look], bool]
    # Returns why the action must end before the host is empty, or "".
    refusal: Callable[[Look, bool], str]
    # Types of migrations that count as moves under way.
    kinds: frozenset[MigrationType]
    # True if the host itself must answer.
    needs_host: bool = False


def _is_drained(look: Look) -> bool:
    """Return True if the host has no server, guest record or open migration in either direction.

    A pending cleanup is a guest record too. The host stays empty, because claims place no server on
    a disabled host.
    """
    return not (look.servers or look.leaving or look.coming or look.guests)


def _is_evacuated(look: Look) -> bool:
    """Return True if no server is on the host, and no evacuation away from the host is open."""
    return not look.servers and not any(
        move.kind == MigrationType.EVACUATION for move in look.leaving
    )


def _drain_refusal(look: Look, has_hook: bool) -> str:
    return "" if look.host.disabled else f"host {look.host.name} was enabled during the drain"


def _evacuation_refusal(look: Look, has_hook: bool) -> str:
    """Return why the evacuation must not continue, or "".

    The host must be down or forced down. Without a fencing hook (``has_hook``) it must be forced
    down.
    """
    host = look.host
    if host.answers:
        return (
            f"Compute service of {host.name} is still in use. To move its running servers: kilonova host drain "
            f"{host.name}"
        )
    return "" if host.forced_down or has_hook else services.NO_PROOF.format(host=host.name)


KINDS = {
    Name.DRAIN: HostActionKind(
        "kilonova host drain",
        lambda server, args: host_plan.plan_drain(server, args.cold),
        _is_drained,
        _drain_refusal,
        frozenset({MigrationType.LIVE, MigrationType.COLD, MigrationType.RESIZE}),
        needs_host=True,
    ),
    Name.EVACUATE: HostActionKind(
        "kilonova host evacuate",
        lambda server, args: host_plan.plan_evacuation(server),
        _is_evacuated,
        _evacuation_refusal,
        frozenset({MigrationType.EVACUATION}),
    ),
}


def look_ahead(
    store: Store,
    select: host_plan.Select,
    host: str,
    name: Name,
    args: Arguments,
    servers: Sequence[Resident],
) -> list[Planned]:
    """Return the plan for these servers: where each would go now, or why it stays.

    The plan changes nothing and reserves no resources.

    Args:
        store: The database.
        select: Calls a scheduler.
        host: The host that the servers leave.
        name: Drain or evacuation.
        args: The options of the host action.
        servers: The servers.

    Raises:
        NoAnswer: No scheduler answers.
        Unavailable: The database does not answer.
    """
    owing: dict[str, list[str]] = {}
    for removal in store.read(lambda tx: guests.removals_of(tx, [server.id for server in servers])):
        owing.setdefault(removal.server_id, []).append(removal.host)
    return host_plan.plan(
        servers,
        lambda server: KINDS[name].way(server, args),
        select,
        host=host,
        owing=owing,
        live_capable=store.read(host_contents.live_migration_capable),
    )


@dataclass(frozen=True)
class _End:
    """The end of an action: the final state, and a message with the next step."""

    state: State
    message: str


class HostActions:
    """The open actions on hosts that this conductor carries out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rounds: dict[str, _Round] = {}

    def advance(self) -> None:
        """Lease the open actions on hosts, and advance each of them by one round.

        Actions that another conductor has leased are left out. A failed round is noted and
        repeated in the next call. Without open actions this costs one statement.

        Raises:
            Unavailable: The database does not answer.
        """
        store, owner = self._engine.store, self._engine.owner
        if not self._rounds and not store.read(host_actions.is_any_open):
            return
        actions = store.write(lambda tx: host_actions.take(tx, owner))
        self._rounds = {
            action.id: self._rounds.get(action.id) or self._restore_round(action)
            for action in actions
        }
        for action in actions:
            self._advance(action)

    def _restore_round(self, action: HostAction) -> _Round:
        """Return the state of a host action, restored from its journal.

        Another conductor may have begun the action.
        """
        journal = self._engine.store.read(lambda tx: host_actions.events(tx, action.id))
        begun = {
            line.migration
            for line in journal
            if line.event is EventName.BEGUN and line.migration is not None
        }
        ended = {line.migration for line in journal if line.event is not EventName.BEGUN}
        return _Round(
            self._engine,
            action,
            moved=sum(line.event is EventName.MOVED for line in journal),
            has_begun=bool(begun),
            known_moves=begun - ended,
        )

    def _advance(self, action: HostAction) -> None:
        round_ = self._rounds[action.id]
        end: _End | None = None
        try:
            end = round_.advance(action)
        except errors.NotFound as problem:
            end = _End(State.FAILED, problem.text)
        except errors.Unavailable as problem:
            round_.note(f"{problem.text} Trying again.")
        except Exception:
            log.exception(
                "a round of a host's action failed; the next begins in a second",
                action=action.id,
                host=action.host,
            )
            round_.note("An unexpected error; the conductor's log has the details. Trying again.")
        self._record(action, round_, end)

    def _record(self, action: HostAction, round_: _Round, end: _End | None) -> None:
        lines, progress = round_.lines, round_.progress
        if lines or end or progress != action.progress:
            written = self._engine.store.write(
                lambda tx: host_actions.record(
                    tx,
                    action.id,
                    self._engine.owner,
                    lines,
                    progress,
                    ended=end.state if end else None,
                    message=end.message if end else "",
                )
            )
            round_.lines = []
            for line in lines:
                log.info(
                    "a host's action continues",
                    host=action.host,
                    action=action.id,
                    action_name=action.name,
                    progress=line.message,
                )
            if end or not written:
                self._rounds.pop(action.id, None)
            if end:
                log.info(
                    "a host's action has ended",
                    host=action.host,
                    action=action.id,
                    action_name=action.name,
                    state=end.state,
                    result=end.message,
                )

    def close(self) -> None:
        """Release this conductor's leases on open host actions.

        Another conductor can then continue at once, before the leases expire.
        """
        if self._rounds:
            self._engine.store.write(lambda tx: host_actions.let_go(tx, self._engine.owner))


@dataclass
class _Round:
    """The state of one conductor about an action on a host, kept from round to round."""

    engine: Engine
    action: HostAction
    moved: int = 0
    # True if a move of any server has begun.
    has_begun: bool = False
    # Moves that were under way in the last round.
    known_moves: set[str] = field(default_factory=set)
    # Server -> its planned destination.
    plan: dict[str, Planned] = field(default_factory=dict)
    # Server -> why the server stays.
    stays_by_server: dict[str, Stays] = field(default_factory=dict)
    # Move -> number of attempts to confirm or revert.
    confirmations: dict[str, int] = field(default_factory=dict)
    # Servers that have a destination once hosts have removed old guests.
    blocked_servers: set[str] = field(default_factory=set)
    # Durations of the last moves from this host in seconds, newest first.
    durations: list[float] | None = None
    # The failure that ends the whole action.
    fatal: str = ""
    # The last note.
    last_note: str = ""
    # Since when no move has been under way.
    quiet_since: int | None = None
    # Since when the host has not answered.
    silent_since: int | None = None
    # True if the host has answered this conductor.
    was_heard: bool = False
    # New lines for the journal.
    lines: list[Event] = field(default_factory=list)
    progress: Progress = Progress()

    @property
    def host(self) -> str:
        return self.action.host

    @property
    def kind(self) -> HostActionKind:
        return KINDS[self.action.name]

    @property
    def again(self) -> str:
        """The operator's command that starts the action again, without options except --cold."""
        return f"{self.kind.command} {self.host}{' --cold' * self.action.args.cold}"

    def add_line(
        self,
        event: EventName,
        message: str,
        server: str | None = None,
        migration: str | None = None,
    ) -> None:
        self.lines.append(Event(event, message, server, migration))

    def note(self, message: str) -> None:
        """Add a note about the host to the new journal lines, unless the last note is the same."""
        if message != self.last_note:
            self.last_note = message
            self.add_line(EventName.NOTE, message)

    def advance(self, action: HostAction) -> _End | None:
        """Do one round. Return the end of the action, or None while the action continues.

        Raises:
            NotFound: The host has been removed.
            Unavailable: The database does not answer, or no scheduler answers.
        """
        self.action = action
        store = self.engine.store
        if self.durations is None:
            self.durations = [
                seconds
                for kind in sorted(self.kind.kinds)
                for seconds in store.read(
                    partial(host_contents.read_durations, host=self.host, kind=kind)
                )
            ]
        look = store.snapshot(lambda tx: host_contents.look(tx, self.host))
        begun = [
            move
            for move in look.leaving
            if self._is_ours(move)
            or (move.kind in self.kind.kinds and move.status in MIGRATIONS_IN_PROGRESS)
        ]
        self._drop_outdated(look.servers)
        self._note_moves(look.at, begun)
        under_way = self._drop_stuck(begun)
        if self.kind.is_empty(look) and (self.has_begun or not self._refusal(look)):
            self._count([], 0, look.at)
            return _End(
                State.DONE,
                f"host {self.host} is empty; {self.moved} servers moved{_describe_cleanups(look)}",
            )
        self._confirm(under_way)
        held = self._find_hold(look)
        waiting = self._find_waiting(look, under_way, held)
        self._count(under_way, len(waiting), look.at)
        if over := self._find_end(look, under_way, waiting, held):
            self._add_summary(look)
            return _End(
                State.STOPPED if action.state is State.STOPPING else State.FAILED,
                f"host {self.host} is not empty: {len(look.servers)} servers left, {self.moved} moved; {over}"
                f"{_describe_cleanups(look)}",
            )
        if not held:
            self._begin(waiting[: max(0, action.args.parallel - len(under_way))])
        return None

    def _drop_outdated(self, servers: list[Resident]) -> None:
        """Remove plans of servers that have left, or that have another state than planned.

        Their reasons to stay are removed too. For example, a server that was started since needs a
        live migration.
        """
        here = {server.id: server.vm_state for server in servers}
        for server, line in list(self.plan.items()):
            if here.get(server) != line.server.vm_state:
                del self.plan[server]
                self.stays_by_server.pop(server, None)

    def _is_ours(self, move: Move) -> bool:
        """Return True if the move is complete and this action must confirm or revert it.

        An earlier action of the same kind may have begun the move. After more than
        ``MAX_CONFIRMATIONS`` attempts the move is left to the server's owner.
        """
        return (
            move.by == self.kind.command
            and move.status == MigrationStatus.FINISHED
            and self.confirmations.get(move.uuid, 0) <= MAX_CONFIRMATIONS
        )

    # --- moves under way ---
    def _note_moves(self, at: int, under_way: list[Move]) -> None:
        """Add moves that ended since the last round to the new journal lines.

        The number of moved servers and the reasons to stay are updated. Moves of another origin
        that began since then are added too.

        Args:
            at: The current time, in microseconds.
            under_way: All moves under way, also stuck moves.
        """
        now = {move.uuid for move in under_way}
        for move in (
            self.engine.store.read(lambda tx: host_contents.moves(tx, self.known_moves - now))
            if (self.known_moves - now)
            else ()
        ):
            self._note_end(at, move)
        for move in under_way:
            if move.uuid not in self.known_moves and move.by != self.kind.command:
                self.add_line(EventName.BEGUN, move_progress.line(move, at), move.server, move.uuid)
        self.known_moves = now

    def _note_end(self, at: int, move: Move) -> None:
        about = f"{move.name} ({move.server})"
        self.plan.pop(move.server, None)
        if move.status in ENDED_WELL:
            self.moved += 1
            seconds = move_progress.seconds(move, at)
            self.durations = [seconds, *(self.durations or [])]
            self.add_line(
                EventName.MOVED,
                f"{about}  is on {move.dest}, after {move_progress.words(seconds)}",
                move.server,
                move.uuid,
            )
        elif move.gone:
            self.add_line(
                EventName.DELETED, f"{about}  was deleted meanwhile", move.server, move.uuid
            )
        elif move.status == MigrationStatus.FINISHED:
            self.add_line(
                EventName.UNCONFIRMED,
                f"{about}  is on {move.dest}; its owner must confirm or revert the move",
                move.server,
                move.uuid,
            )
        else:
            if self.action.name is Name.EVACUATE and move.step == FENCE:
                self.fatal = move.message
            why = f"its move ended {move.status}: {move.message or 'another action has taken the server'}"
            self.stays_by_server[move.server] = Stays(why, f"repair the cause, then: {self.again}")
            self.add_line(EventName.STAYS, f"{about}  stays: {why}", move.server, move.uuid)

    def _drop_stuck(self, begun: list[Move]) -> list[Move]:
        """Return the moves that are not stuck, and record why servers with stuck moves stay.

        A stuck move does not count toward ``parallel``. The recorded reasons of servers with other
        moves are removed.
        """
        for move in begun:
            if move.stuck:
                self.stays_by_server[move.server] = Stays(
                    f"its move is stuck: {move.stuck}",
                    f"kilonova action list --stuck, then: {self.again}",
                )
            else:
                self.stays_by_server.pop(move.server, None)
        return [move for move in begun if not move.stuck]

    def _confirm(self, under_way: list[Move]) -> None:
        """Begin the confirm of complete moves, or the revert if the move's action has failed.

        Other moves, and moves of servers with a running action, are left alone.
        """
        for move in under_way:
            if self._is_ours(move) and move.idle:
                self.confirmations[move.uuid] = self.confirmations.get(move.uuid, 0) + 1
                row = states.row("revertResize" if move.failed else "confirmResize")
                self._begin_action(
                    f"{move.name} ({move.server})",
                    partial(migrations.close, row=row, server_id=move.server, context=_context()),
                )

    def _begin_action(self, about: str, work: Callable[[Connection], T]) -> T | None:
        """Begin an action by calling ``work`` in a transaction, and return the result of ``work``.

        Returns None if the server's state does not permit the action now. The reason is noted
        after ``about``, the server's name and id.
        """
        try:
            begun = self.engine.store.write(work)
        except (errors.Conflict, errors.BadRequest, errors.NotFound) as problem:
            self.note(f"{about}  {problem.text}")
            return None
        self.engine.wake(Lane.INSIDE)
        return begun

    def _count(self, under_way: list[Move], waiting: int, at: int) -> None:
        """Update the numbers of moved, moving and waiting servers, and the forecast of the end.

        If no number has changed, the forecast stays as it is.

        Args:
            under_way: The moves under way.
            waiting: The number of servers that wait for their move.
            at: The current time, in microseconds.
        """
        counts = (self.moved, len(under_way), waiting)
        if counts != (self.progress.moved, self.progress.under_way, self.progress.waiting):
            seconds = move_progress.forecast(
                (self.durations or [])[:10], under_way, waiting, self.action.args.parallel, at
            )
            self.progress = Progress(*counts, seconds)

    # --- servers that are to go ---
    def _find_waiting(self, look: Look, under_way: list[Move], held: str) -> list[Planned]:
        """Return the plans of the servers whose move can begin now, in the order of the servers.

        Servers without a plan are planned first, unless ``held`` is a reason to begin no move.
        Servers that are moving, must stay or have an action that must end first are left out.

        Args:
            look: The host with its servers and moves.
            under_way: The moves under way.
            held: The result of ``_find_hold``.
        """
        moving = {move.server for move in under_way}
        ready = [
            server
            for server in look.servers
            if server.id not in moving and not self._is_busy(server)
        ]
        new = [
            server
            for server in ready
            if server.id not in self.plan and server.id not in self.stays_by_server
        ]
        self.blocked_servers = set()
        if new and not held:
            planned = look_ahead(
                self.engine.store,
                self.engine.messaging.select,
                self.host,
                self.action.name,
                self.action.args,
                new,
            )
            self.blocked_servers = {
                line.server.id
                for line in planned
                if line.soon and self._quiet_micros(look.at) < SETTLING
            }
            lines = [line for line in planned if line.server.id not in self.blocked_servers]
            self.plan.update({line.server.id: line for line in lines})
            self.stays_by_server.update(
                {line.server.id: line.stays for line in lines if line.stays is not None}
            )
            for line in lines:
                event = EventName.PLANNED if line.stays is None else EventName.STAYS
                self.add_line(event, host_plan.text(line), line.server.id)
        return [
            self.plan[server.id]
            for server in ready
            if server.id in self.plan and server.id not in self.stays_by_server
        ]

    def _is_busy(self, server: Resident) -> bool:
        return host_plan.is_busy(server, self.kind.way(server, self.action.args))

    def _begin(self, lines: list[Planned]) -> None:
        for line in lines:
            way, server = line.way, line.server
            assert way is not None, "a server that stays is not in the list"
            move = self._begin_action(
                f"{server.name} ({server.id})",
                partial(
                    host_contents.begin,
                    host=self.host,
                    key=way.key,
                    server_id=server.id,
                    kind=way.kind,
                    vm_state=server.vm_state,
                    context=_context(),
                    args=move_args(way.kind, self.kind.command),
                ),
            )
            if move is None:
                self.plan.pop(server.id, None)
                continue
            self.known_moves.add(move.uuid)
            self.has_begun = True
            self.add_line(
                EventName.BEGUN,
                f"{server.name} ({server.id})  leaves {self.host}, {way.word}",
                server.id,
                move.uuid,
            )

    # --- the end ---
    def _find_hold(self, look: Look) -> str:
        """Return why no further move begins, or "" if moves may begin.

        Also records since when a host that must answer is silent.
        """
        if self.action.state is State.STOPPING:
            return f"stopped; to continue: {self.again}"
        if self.fatal:
            return f"the step {FENCE} failed: {self.fatal}"
        if reason := self._refusal(look) or self._too_many_down(look):
            return reason
        if self.kind.needs_host and not look.host.answers:
            if self.silent_since is None:
                self.silent_since = look.at if self.was_heard else 0
            return f"host {self.host} does not answer. If it is dead: kilonova host evacuate {self.host}"
        self.silent_since, self.was_heard = None, True
        return ""

    def _refusal(self, look: Look) -> str:
        return self.kind.refusal(look, self.engine.fence_host is not None)

    def _too_many_down(self, look: Look) -> str:
        """Return a warning if too many hosts are down for an evacuation, or "".

        Only an evacuation without ``force`` is checked, and only before its first move.
        """
        if self.action.name is not Name.EVACUATE or self.action.args.force or self.has_begun:
            return ""
        hosts = self.engine.store.read(host_status.host_states).values()
        return host_plan.too_many_down(hosts, look.at, self.engine.host_silence)

    def _find_end(
        self, look: Look, under_way: list[Move], waiting: list[Planned], held: str
    ) -> str:
        """Return why the action ends before the host is empty, or "" while it continues.

        Moves under way are always awaited. Other actions, pending cleanups and a silent host are
        awaited for ``SETTLING``, or with the option ``wait`` without limit. With ``wait``, servers
        that could not leave are planned again after ``RETRY``.

        Args:
            look: The host with its servers and moves.
            under_way: The moves under way, without stuck moves.
            waiting: The result of ``_find_waiting``.
            held: The result of ``_find_hold``.
        """
        wait = self.action.args.wait
        if held:
            if under_way:
                self.note(
                    f"no further move begins, and {len(under_way)} moves under way continue: {held}"
                )
            silent = self.silent_since is not None and self.action.state is not State.STOPPING
            may_answer = silent and (wait or look.at - (self.silent_since or 0) < SETTLING)
            return "" if under_way or may_answer else held
        if under_way or waiting:
            self.quiet_since = None
            return ""
        if self.quiet_since is None:
            self.quiet_since = look.at
            if wait:
                self._add_summary(look)
        since = self._quiet_micros(look.at)
        if wait and since >= RETRY and self.stays_by_server:
            self.stays_by_server, self.plan, self.quiet_since = {}, {}, None
        comes = (
            self.blocked_servers
            or any(self._is_busy(server) for server in look.servers)
            or look.guests.get(GuestState.ABSENT)
            or any(move.status in MIGRATIONS_IN_PROGRESS for move in look.coming)
            or any(not move.idle for move in look.leaving)
        )
        return "" if wait or (comes and since < SETTLING) else f"to continue: {self.again}"

    def _quiet_micros(self, at: int) -> int:
        """Return for how many microseconds no move has been under way and no server has waited.

        0 if a move is under way or a server waits.
        """
        return at - self.quiet_since if self.quiet_since is not None else 0

    def _add_summary(self, look: Look) -> None:
        """Add each server that stays to the journal lines, with the reason and the next step.

        A server with a running action counts as staying. Moves that wait for a confirm or revert by
        the server's owner are added too.
        """
        for server in look.servers:
            stays = self.stays_by_server.get(server.id) or (
                Stays(
                    f"its action {server.busy} is running",
                    "it can leave when this action has ended",
                )
                if server.busy
                else None
            )
            if stays is not None:
                self.add_line(EventName.STAYS, host_plan.stays(server, stays), server.id)
        for move in look.leaving:
            if move.status == MigrationStatus.FINISHED and not self._is_ours(move):
                self.add_line(
                    EventName.UNCONFIRMED,
                    f"{move.server} ({move.name}) is on {move.dest}, and its files stay here until its owner confirms "
                    f"or reverts\n    openstack server resize confirm {move.server}, or resize revert {move.server}",
                    move.server,
                    move.uuid,
                )


def move_args(kind: MigrationType, by: str) -> dict[str, object]:
    """Return the arguments of the action that moves a server.

    Args:
        kind: Live migration, cold migration or evacuation.
        by: The operator's command that begins the move.
    """
    return {"host": None, "forced": False, "by": by, **_MOVE_ARGS[kind]}


def _describe_cleanups(look: Look) -> str:
    to_remove = look.guests.get(GuestState.ABSENT)
    return (
        f"; {to_remove} guests are still to be removed there: kilonova host removals {look.host.name}"
        if to_remove
        else ""
    )


def _context() -> RequestContext:
    return RequestContext.of_ourselves("")
