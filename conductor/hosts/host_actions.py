# SPDX-License-Identifier: Apache-2.0
"""Drain and evacuate: the servers of a host move elsewhere, a few at a time, until the host is
empty.

A conductor takes each open action (``store.host_actions``) and brings it on once a second. What
counts is in the
database: every round looks at what is on the host and on its way from there, whoever began it, so
another conductor goes on where this one was killed. What is remembered between rounds (the plan,
and who cannot go) is found again by looking. Each server's move is an action of its own; one that
this began is confirmed when it has arrived, or reverted when it does not work there.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)
T = TypeVar("T")
#: For how long it is waited for what ends by itself: other actions, debts, a host that is silent
#: for a moment.
SETTLING = 60 * SECOND
RETRY = 60 * SECOND  #: with ``wait``: after which those that could not go are tried again
MAX_CONFIRMATIONS = 3  #: times that a move is confirmed or reverted, should that fail
ENDED_WELL = (MigrationStatus.COMPLETED, MigrationStatus.CONFIRMED, MigrationStatus.DONE)
FENCE = "fence"  #: the step of an evacuation whose failure ends the whole
_MOVE_ARGS: dict[MigrationType, dict[str, object]] = {
    MigrationType.LIVE: {"block_migration": None},
    MigrationType.COLD: {},
    MigrationType.EVACUATION: {"stopped": False, "shared": None},
}


@dataclass(frozen=True)
class HostActionKind:
    """What the two actions do differently."""

    command: str  # the operator's, without the host; names who began a move
    way: Callable[[Resident, Arguments], Way | Stays]  # how a server leaves, or why it cannot
    is_empty: Callable[[Look], bool]
    # why it is over before the host is empty; "" while it is not
    refusal: Callable[[Look, bool], str]
    kinds: frozenset[MigrationType]  # of migrations that count as under way
    needs_host: bool = False  # the host itself must answer


def _is_drained(look: Look) -> bool:
    """No server, no guest that waits there to come back or to be removed, and none on its way
    there. None comes after: the host is disabled, and claims heed that."""
    return not (look.servers or look.leaving or look.coming or look.guests)


def _is_evacuated(look: Look) -> bool:
    """No server is there, and none is being made again, which may fail still."""
    return not look.servers and not any(
        move.kind == MigrationType.EVACUATION for move in look.leaving
    )


def _drain_refusal(look: Look, has_hook: bool) -> str:
    return "" if look.host.disabled else f"somebody has enabled host {look.host.name} again"


def _evacuation_refusal(look: Look, has_hook: bool) -> str:
    """``has_hook``: is there a fencing hook, which proves that the host's guests are dead?"""
    host = look.host
    if host.answers:
        return f"Compute service of {host.name} is still in use. What runs is moved by: kilonova host drain {host.name}"
    return "" if host.forced_down or has_hook else services.NO_PROOF.format(host=host.name)


KINDS = {
    Name.DRAIN: HostActionKind(
        "kilonova host drain",
        lambda server, args: host_plan.drained(server, args.cold),
        _is_drained,
        _drain_refusal,
        frozenset({MigrationType.LIVE, MigrationType.COLD, MigrationType.RESIZE}),
        needs_host=True,
    ),
    Name.EVACUATE: HostActionKind(
        "kilonova host evacuate",
        lambda server, args: host_plan.evacuated(server),
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
    """Where these servers would go now. Raises NoAnswer when no scheduler answers."""
    owing: dict[str, list[str]] = {}
    for debt in store.read(lambda tx: guests.debts_of(tx, [server.id for server in servers])):
        owing.setdefault(debt.server_id, []).append(debt.host)
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
    """How an action ended, and what to do next."""

    state: State
    message: str


class HostActions:
    """The open actions on hosts that this conductor carries out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, _Round] = {}

    def advance(self) -> None:
        """Bring each on by one round; one statement when there are none."""
        store, owner = self._engine.store, self._engine.owner
        if not self._known and not store.read(host_actions.is_any_open):
            return
        taken = store.write(lambda tx: host_actions.take(tx, owner))
        self._known = {
            action.id: self._known.get(action.id) or self._found(action) for action in taken
        }
        for action in taken:
            self._advance(action)

    def _found(self, action: HostAction) -> _Round:
        """With what its journal says, for another conductor may have begun it."""
        journal = self._engine.store.read(lambda tx: host_actions.events(tx, action.id))
        begun = {
            one.migration
            for one in journal
            if one.event is EventName.BEGUN and one.migration is not None
        }
        ended = {one.migration for one in journal if one.event is not EventName.BEGUN}
        return _Round(
            self._engine,
            action,
            moved=sum(one.event is EventName.MOVED for one in journal),
            has_begun=bool(begun),
            known=begun - ended,
        )

    def _advance(self, action: HostAction) -> None:
        one = self._known[action.id]
        end: _End | None = None
        try:
            end = one.advance(action)
        except errors.NotFound as problem:
            end = _End(State.FAILED, problem.text)
        except errors.Unavailable as problem:
            one.note(f"{problem.text} Trying again.")
        except Exception:
            log.exception(
                "a round of action %s on host %s failed; the next begins in a second",
                action.id,
                action.host,
            )
            one.note("An unforeseen failure; the conductor's log has the details. Trying again.")
        self._record(action, one, end)

    def _record(self, action: HostAction, one: _Round, end: _End | None) -> None:
        lines, progress = one.lines, one.progress
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
            one.lines = []
            for line in lines:
                log.info("host %s, %s: %s", action.host, action.name, line.message)
            if end or not written:
                self._known.pop(action.id, None)
            if end:
                log.info("host %s, %s: %s: %s", action.host, action.name, end.state, end.message)

    def close(self) -> None:
        """Another conductor may go on with them at once."""
        if self._known:
            self._engine.store.write(lambda tx: host_actions.let_go(tx, self._engine.owner))


@dataclass
class _Round:
    """An action on a host in the hands of one conductor, from round to round."""

    engine: Engine
    action: HostAction
    moved: int = 0
    has_begun: bool = False  # the move of any server
    known: set[str] = field(default_factory=set)  # moves that were under way at the last look
    plan: dict[str, Planned] = field(default_factory=dict)  # server -> where it goes
    left: dict[str, Stays] = field(default_factory=dict)  # server -> why it stays
    # move -> times that its end was asked for
    confirmed: dict[str, int] = field(default_factory=dict)
    # servers that hosts may take when they have removed old guests
    soon: set[str] = field(default_factory=set)
    took: list[float] | None = None  # seconds of the last moves from this host, the newest first
    fatal: str = ""  # the failure that is everybody's
    said: str = ""  # the last note
    quiet_since: int | None = None  # nothing has been under way since
    silent_since: int | None = None  # the host has not answered since
    was_heard: bool = False  # the host has answered in this conductor's time
    lines: list[Event] = field(default_factory=list)  # for the journal, of this round
    progress: Progress = Progress()

    @property
    def host(self) -> str:
        return self.action.host

    @property
    def kind(self) -> HostActionKind:
        return KINDS[self.action.name]

    @property
    def again(self) -> str:
        """The command to go on with."""
        return f"{self.kind.command} {self.host}{' --cold' * self.action.args.cold}"

    def say(
        self,
        event: EventName,
        message: str,
        server: str | None = None,
        migration: str | None = None,
    ) -> None:
        self.lines.append(Event(event, message, server, migration))

    def note(self, message: str) -> None:
        """Say something about the host; not again in every round."""
        if message != self.said:
            self.said = message
            self.say(EventName.NOTE, message)

    def advance(self, action: HostAction) -> _End | None:
        """One round; how it ended, if it has.

        Raises:
            NotFound: the host has been removed. Unavailable: the database, or no scheduler,
            answers.
        """
        self.action = action
        store = self.engine.store
        if self.took is None:
            self.took = [
                seconds
                for kind in sorted(self.kind.kinds)
                for seconds in store.read(partial(host_contents.took, host=self.host, kind=kind))
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
        under_way = self._without_stuck(begun)
        if self.kind.is_empty(look) and (self.has_begun or not self._refusal(look)):
            self._count([], 0, look.at)
            return _End(
                State.DONE,
                f"host {self.host} is empty; {self.moved} servers moved{_debts_on(look)}",
            )
        self._confirm(under_way)
        held = self._why_held(look)
        waiting = self._waiting(look, under_way, held)
        self._count(under_way, len(waiting), look.at)
        if over := self._why_over(look, under_way, waiting, held):
            self._sum_up(look)
            return _End(
                State.STOPPED if action.state is State.STOPPING else State.FAILED,
                f"host {self.host} is not empty: {len(look.servers)} servers left, {self.moved} moved; {over}"
                f"{_debts_on(look)}",
            )
        if not held:
            self._begin(waiting[: max(0, action.args.parallel - len(under_way))])
        return None

    def _drop_outdated(self, servers: list[Resident]) -> None:
        """A plan holds as long as its server is there, in the state in which it was planned: who
        has been started since goes live, and not cold."""
        here = {server.id: server.vm_state for server in servers}
        for server, line in list(self.plan.items()):
            if here.get(server) != line.server.vm_state:
                del self.plan[server]
                self.left.pop(server, None)

    def _is_ours(self, move: Move) -> bool:
        """Did an action like this one move it, and has it still to be confirmed?"""
        return (
            move.by == self.kind.command
            and move.status == MigrationStatus.FINISHED
            and self.confirmed.get(move.uuid, 0) <= MAX_CONFIRMATIONS
        )

    # --- moves under way ---
    def _note_moves(self, at: int, under_way: list[Move]) -> None:
        """Write down which moves have begun, also by others, and which have ended."""
        now = {move.uuid for move in under_way}
        for move in (
            self.engine.store.read(lambda tx: host_contents.moves(tx, self.known - now))
            if (self.known - now)
            else ()
        ):
            self._note_end(at, move)
        for move in under_way:
            if move.uuid not in self.known and move.by != self.kind.command:
                self.say(EventName.BEGUN, move_progress.line(move, at), move.server, move.uuid)
        self.known = now

    def _note_end(self, at: int, move: Move) -> None:
        about = f"{move.name} ({move.server})"
        self.plan.pop(move.server, None)
        if move.status in ENDED_WELL:
            self.moved += 1
            seconds = move_progress.seconds(move, at)
            self.took = [seconds, *(self.took or [])]
            self.say(
                EventName.MOVED,
                f"{about}  is on {move.dest}, after {move_progress.words(seconds)}",
                move.server,
                move.uuid,
            )
        elif move.gone:
            self.say(EventName.DELETED, f"{about}  was deleted meanwhile", move.server, move.uuid)
        elif move.status == MigrationStatus.FINISHED:
            self.say(
                EventName.UNCONFIRMED,
                f"{about}  is on {move.dest} and waits for its owner to confirm it",
                move.server,
                move.uuid,
            )
        else:
            if self.action.name is Name.EVACUATE and move.step == FENCE:
                self.fatal = move.message
            why = f"its move ended {move.status}: {move.message or 'another action has taken the server'}"
            self.left[move.server] = Stays(why, f"mend that, then: {self.again}")
            self.say(EventName.STAYS, f"{about}  stays: {why}", move.server, move.uuid)

    def _without_stuck(self, begun: list[Move]) -> list[Move]:
        """Those that go on; one that is stuck is not waited for, and takes nobody's place."""
        for move in begun:
            if move.stuck:
                self.left[move.server] = Stays(
                    f"its move is stuck: {move.stuck}",
                    f"kilonova action list --stuck, then: {self.again}",
                )
            else:
                self.left.pop(move.server, None)
        return [move for move in begun if not move.stuck]

    def _confirm(self, under_way: list[Move]) -> None:
        """Confirm what has arrived; what has arrived and does not work there goes back."""
        for move in under_way:
            if self._is_ours(move) and move.idle:
                self.confirmed[move.uuid] = self.confirmed.get(move.uuid, 0) + 1
                row = states.row("revertResize" if move.failed else "confirmResize")
                self._ask(
                    f"{move.name} ({move.server})",
                    partial(migrations.close, row=row, server_id=move.server, context=_context()),
                )

    def _ask(self, about: str, work: Callable[[Connection], T]) -> T | None:
        """Begin an action; None when somebody else was first: the next look shows what there is to
        do."""
        try:
            begun = self.engine.store.write(work)
        except (errors.Conflict, errors.BadRequest, errors.NotFound) as problem:
            self.note(f"{about}  {problem.text}")
            return None
        self.engine.wake(Lane.INSIDE)
        return begun

    def _count(self, under_way: list[Move], waiting: int, at: int) -> None:
        """The forecast is made again when a count has changed, so that an unchanged round writes
        nothing."""
        counts = (self.moved, len(under_way), waiting)
        if counts != (self.progress.moved, self.progress.under_way, self.progress.waiting):
            seconds = move_progress.forecast(
                (self.took or [])[:10], under_way, waiting, self.action.args.parallel, at
            )
            self.progress = Progress(*counts, seconds)

    # --- servers that are to go ---
    def _waiting(self, look: Look, under_way: list[Move], held: str) -> list[Planned]:
        """Those that can be begun, in the order of the plan; who is new gets a place in it."""
        moving = {move.server for move in under_way}
        ready = [
            server
            for server in look.servers
            if server.id not in moving and not self._is_busy(server)
        ]
        new = [
            server for server in ready if server.id not in self.plan and server.id not in self.left
        ]
        self.soon = set()
        if new and not held:
            planned = look_ahead(
                self.engine.store,
                self.engine.messaging.select,
                self.host,
                self.action.name,
                self.action.args,
                new,
            )
            self.soon = {
                line.server.id for line in planned if line.soon and self._quiet(look.at) < SETTLING
            }
            lines = [line for line in planned if line.server.id not in self.soon]
            self.plan.update({line.server.id: line for line in lines})
            self.left.update(
                {line.server.id: line.stays for line in lines if line.stays is not None}
            )
            for line in lines:
                event = EventName.PLANNED if line.stays is None else EventName.STAYS
                self.say(event, host_plan.text(line), line.server.id)
        return [
            self.plan[server.id]
            for server in ready
            if server.id in self.plan and server.id not in self.left
        ]

    def _is_busy(self, server: Resident) -> bool:
        return host_plan.is_busy(server, self.kind.way(server, self.action.args))

    def _begin(self, lines: list[Planned]) -> None:
        for line in lines:
            way, server = line.way, line.server
            assert way is not None, "who stays waits for nothing"
            move = self._ask(
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
            self.known.add(move.uuid)
            self.has_begun = True
            self.say(
                EventName.BEGUN,
                f"{server.name} ({server.id})  leaves {self.host}, {way.word}",
                server.id,
                move.uuid,
            )

    # --- the end ---
    def _why_held(self, look: Look) -> str:
        """Why nothing more is begun; "" while it is."""
        if self.action.state is State.STOPPING:
            return f"stopped; {self.again} goes on"
        if self.fatal:
            return f"the step {FENCE} failed: {self.fatal}"
        if found := self._refusal(look) or self._too_many_down(look):
            return found
        if self.kind.needs_host and not look.host.answers:
            if self.silent_since is None:
                self.silent_since = look.at if self.was_heard else 0
            return f"host {self.host} does not answer. If it is dead: kilonova host evacuate {self.host}"
        self.silent_since, self.was_heard = None, True
        return ""

    def _refusal(self, look: Look) -> str:
        return self.kind.refusal(look, self.engine.fence_host is not None)

    def _too_many_down(self, look: Look) -> str:
        """Asked before the first move only: an evacuation that has begun goes on."""
        if self.action.name is not Name.EVACUATE or self.action.args.force or self.has_begun:
            return ""
        hosts = self.engine.store.read(host_status.host_states).values()
        return host_plan.too_many_down(hosts, look.at, self.engine.host_silence)

    def _why_over(
        self, look: Look, under_way: list[Move], waiting: list[Planned], held: str
    ) -> str:
        """Why it is over before the host is empty; "" while it goes on."""
        wait = self.action.args.wait
        if held:
            if under_way:
                self.note(
                    f"nothing more is begun, {len(under_way)} under way are waited for: {held}"
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
                self._sum_up(look)
        since = self._quiet(look.at)
        if wait and since >= RETRY and self.left:
            self.left, self.plan, self.quiet_since = {}, {}, None
        comes = (
            self.soon
            or any(self._is_busy(server) for server in look.servers)
            or look.guests.get(GuestState.ABSENT)
            or any(move.status in MIGRATIONS_IN_PROGRESS for move in look.coming)
            or any(not move.idle for move in look.leaving)
        )
        return "" if wait or (comes and since < SETTLING) else f"to go on: {self.again}"

    def _quiet(self, at: int) -> int:
        """For how long nothing has been under way, in microseconds."""
        return at - self.quiet_since if self.quiet_since is not None else 0

    def _sum_up(self, look: Look) -> None:
        """Who is left, why, and what to do."""
        for server in look.servers:
            stays = self.left.get(server.id) or (
                Stays(f"it is busy with {server.busy}", "it can go when that has ended")
                if server.busy
                else None
            )
            if stays is not None:
                self.say(EventName.STAYS, host_plan.stays(server, stays), server.id)
        for move in look.leaving:
            if move.status == MigrationStatus.FINISHED and not self._is_ours(move):
                self.say(
                    EventName.UNCONFIRMED,
                    f"{move.server} ({move.name}) is on {move.dest}, and what it left here is kept until then\n"
                    f"    openstack server resize confirm {move.server}, or resize revert {move.server}",
                    move.server,
                    move.uuid,
                )


def move_args(kind: MigrationType, by: str) -> dict[str, object]:
    """The arguments of a server's move. ``by``: who begins it."""
    return {"host": None, "forced": False, "by": by, **_MOVE_ARGS[kind]}


def _debts_on(look: Look) -> str:
    to_remove = look.guests.get(GuestState.ABSENT)
    return (
        f"; {to_remove} guests are still to be removed there: kilonova host debts {look.host.name}"
        if to_remove
        else ""
    )


def _context() -> RequestContext:
    return RequestContext.of_ourselves("")
