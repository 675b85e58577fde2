# SPDX-License-Identifier: Apache-2.0
"""What drain and evacuate share: servers leave a host, a few at a time, and somebody watches.

Nothing is kept but in the database: every round looks at what is on the host and on its way from there, whoever began
it, so the command can be ended at any moment and given again. The loop has its store, bell, pause and voice from its
caller; a simulator passes its own. Must stay true: what this moved is confirmed, or, when its arrival failed, reverted.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common import errors, states
from common.clock import SECOND
from common.context import RequestContext
from common.store import departures, guests, migrations
from common.store.departures import Look, Move, Resident
from common.store.engine import Connection, Store
from deploy.cli import plan, progress
from deploy.cli.plan import Planned, Select, Stays, Way

T = TypeVar("T")
TICK = 1.0                        # seconds between two looks
TELL = 10 * SECOND                # between two lines of a move in which nothing changes
PATIENCE = 60 * SECOND            # for what ends by itself: other actions, debts, a host that is silent for a moment
RETRY = 60 * SECOND               # with --wait: after which those that could not go are tried again
SETTLED = 3                       # times that a move is confirmed or reverted, should that fail
WELL = ("completed", "confirmed", "done")


@dataclass(frozen=True)
class Errand:
    """What the two do differently.

    by: who begins the moves; it stands in their actions. again: the command to go on with. kinds: of moves that count
    as under way. ends: why it is over before the host is empty, "" while it is not. needs_up: the host itself must
    answer. fatal: a step whose failure is everybody's.
    """

    host: str
    by: str
    again: str
    way: Callable[[Resident], Way | Stays]
    is_empty: Callable[[Look], bool]
    ends: Callable[[Look], str]
    kinds: frozenset[str]
    needs_up: bool = False
    fatal: str = ""


@dataclass(frozen=True)
class Hands:
    """What the loop works with. ring: the conductors' bell; stopped: shall no more be begun?"""

    store: Store
    select: Select
    ring: Callable[[], None]
    sleep: Callable[[float], None]
    say: Callable[[str], None]
    stopped: Callable[[], bool] = lambda: False


def look_ahead(errand: Errand, hands: Hands, servers: list[Resident]) -> list[Planned]:
    """Where these servers would go now.

    Raises:
        NoAnswer: no scheduler answers.
    """
    owing: dict[str, list[str]] = {}
    for debt in hands.store.read(lambda tx: guests.debts_of(tx, [server.id for server in servers])):
        owing.setdefault(debt.server_id, []).append(debt.host)
    return plan.plan(servers, errand.way, hands.select, host=errand.host, owing=owing,
                     lively=hands.store.read(departures.lively))


@dataclass
class Moving:
    """One run of the loop. left: who stays, and why; known: moves that were under way at the last look; told: when a
    line was said of each; settled: how often each was asked to be confirmed or reverted; soon: servers that hosts may
    take when they have removed old guests of theirs."""

    errand: Errand
    hands: Hands
    parallel: int = 2
    wait: bool = False
    plan: dict[str, Planned] = field(default_factory=dict)
    left: dict[str, Stays] = field(default_factory=dict)
    known: dict[str, Move] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    soon: set[str] = field(default_factory=set)
    took: list[float] = field(default_factory=list)
    moved: int = 0
    fatal: str = ""
    said: str = ""
    quiet_since: int | None = None
    silent_since: int | None = None
    was_heard: bool = False

    def run(self) -> int:
        """Until the host is empty (0), or nothing more can be done (1)."""
        for kind in sorted(self.errand.kinds):
            self.took += self.hands.store.read(lambda tx, kind=kind: departures.took(  # type: ignore[misc]
                tx, self.errand.host, kind))
        while True:
            try:
                status = self._round()
            except errors.Unavailable as problem:
                self._say_once(f"{problem.text} Trying again.")
                status = None
            if status is not None:
                return status
            self.hands.sleep(TICK)

    def _round(self) -> int | None:
        look = self.hands.store.snapshot(lambda tx: departures.look(tx, self.errand.host))
        begun = [move for move in look.leaving if self._is_ours(move) or (
            move.kind in self.errand.kinds and move.status in migrations.IN_PROGRESS)]
        self._keep_plan(look.servers)
        self._tell(look.at, begun)
        under_way = self._but_stuck(begun)
        if self.errand.is_empty(look):
            self.hands.say(f"host {look.host.name} is empty; {self.moved} servers moved")
            return 0
        self._settle(under_way)
        held = self._why_held(look)
        waiting = self._waiting(look, under_way, held)
        over = self._why_over(look, under_way, waiting, held)
        if over:
            self._sum_up(look)
            self.hands.say(f"host {look.host.name} is not empty: {len(look.servers)} servers left, {self.moved} moved; "
                           f"{over}")
            return 1
        if not held:
            self._begin(look.at, waiting[:max(0, self.parallel - len(under_way))])
        return None

    def _keep_plan(self, servers: list[Resident]) -> None:
        """Of who is there, as long as it is in the state in which it was planned: who has been started since goes live,
        and not cold."""
        here = {server.id: server.vm_state for server in servers}
        for server, line in list(self.plan.items()):
            if here.get(server) != line.server.vm_state:
                del self.plan[server]
                self.left.pop(server, None)

    def _is_ours(self, move: Move) -> bool:
        """Is it one that we moved and have still to confirm?"""
        return (move.by == self.errand.by and move.status == migrations.FINISHED
                and self.settled.get(move.uuid, 0) <= SETTLED)

    def _but_stuck(self, begun: list[Move]) -> list[Move]:
        """Those that go on; one that is stuck is not waited for, and takes nobody's place."""
        for move in begun:
            if move.stuck:
                self.left[move.server] = Stays(f"its move is stuck: {move.stuck}",
                                               f"kilonova action list --stuck, then: {self.errand.again}")
            else:
                self.left.pop(move.server, None)
        return [move for move in begun if not move.stuck]

    # --- those under way ---
    def _tell(self, at: int, under_way: list[Move]) -> None:
        """Say which moves have ended, begun or gone a step, and now and then how far the others are."""
        now = {move.uuid: move for move in under_way}
        ended = [uuid for uuid in self.known if uuid not in now]
        for move in self.hands.store.read(lambda tx: departures.moves(tx, ended)) if ended else ():
            self._tell_end(at, move)
        for move in under_way:
            before = self.known.get(move.uuid)
            changed = before is None or (before.status, before.dest, before.stuck) != (
                move.status, move.dest, move.stuck)
            if changed or at - self.told.get(move.uuid, 0) >= TELL:
                self.told[move.uuid] = at
                self.hands.say(progress.line(move, at))
        self.known = now
        if ended:
            self._forecast(at, under_way)

    def _tell_end(self, at: int, move: Move) -> None:
        who = f"{move.name} ({move.server})"
        self.plan.pop(move.server, None)
        if move.status in WELL:
            self.moved += 1
            self.took.insert(0, progress.seconds(move, at))
            self.hands.say(f"{who}  is on {move.dest}, after {progress.words(self.took[0])}")
        elif move.gone:
            self.hands.say(f"{who}  was deleted meanwhile")
        elif move.status == migrations.FINISHED:
            self.hands.say(f"{who}  is on {move.dest} and waits for its owner to confirm it")
        else:
            if self.errand.fatal and move.step == self.errand.fatal:
                self.fatal = move.message
            why = f"its move ended {move.status}: {move.message or 'another action has taken the server'}"
            self.left[move.server] = Stays(why, f"mend that, then: {self.errand.again}")
            self.hands.say(f"{who}  stays: {why}")

    def _forecast(self, at: int, under_way: list[Move]) -> None:
        waiting = sum(one.way is not None and one.server.id not in self.left for one in self.plan.values())
        waiting -= sum(move.server in self.plan for move in under_way)
        rest = progress.forecast(self.took[:10], under_way, waiting, self.parallel, at)
        self.hands.say(progress.summary(self.moved, under_way, waiting, rest))

    def _settle(self, under_way: list[Move]) -> None:
        """Confirm what has arrived; what has arrived and does not work there goes back."""
        for move in under_way:
            if self._is_ours(move) and move.idle:
                self.settled[move.uuid] = self.settled.get(move.uuid, 0) + 1
                row = states.row("revertResize" if move.failed else "confirmResize")
                self._ask(f"{move.name} ({move.server})", partial(
                    migrations.close, row=row, server_id=move.server, context=_context()))

    def _ask(self, who: str, work: Callable[[Connection], T]) -> T | None:
        """Begin an action; None when somebody else was first: the next look shows what there is to do."""
        try:
            begun = self.hands.store.write(work)
        except (errors.Conflict, errors.BadRequest, errors.NotFound) as problem:
            self._say_once(f"{who}  {problem.text}")
            return None
        self.hands.ring()
        return begun

    # --- those to come ---
    def _waiting(self, look: Look, under_way: list[Move], held: str) -> list[Planned]:
        """Those that can be begun, in the order of the plan; who is new gets a place in it."""
        moving = {move.server for move in under_way}
        ready = [server for server in look.servers if server.id not in moving and not self._is_busy(server)]
        new = [server for server in ready if server.id not in self.plan and server.id not in self.left]
        self.soon = set()
        if new and not held:
            planned = look_ahead(self.errand, self.hands, new)
            self.soon = {line.server.id for line in planned if line.soon and self._quiet(look.at) < PATIENCE}
            lines = [line for line in planned if line.server.id not in self.soon]
            self.plan.update({line.server.id: line for line in lines})
            self.left.update({line.server.id: line.stays for line in lines if line.stays is not None})
            if lines:
                self.hands.say(plan.table(lines))
                self._forecast(look.at, under_way)
        return [self.plan[server.id] for server in ready if server.id in self.plan and server.id not in self.left]

    def _is_busy(self, server: Resident) -> bool:
        return plan.is_busy(server, self.errand.way(server))

    def _begin(self, at: int, lines: list[Planned]) -> None:
        for line in lines:
            way, server = line.way, line.server
            assert way is not None, "who stays waits for nothing"
            move = self._ask(f"{server.name} ({server.id})", partial(
                departures.begin, host=self.errand.host, key=way.key, server_id=server.id, kind=way.kind,
                vm_state=server.vm_state, context=_context(),
                args={"host": None, "forced": False, "by": self.errand.by, **_ARGS[way.kind]}))
            if move is None:
                self.plan.pop(server.id, None)
                continue
            self.known[move.uuid] = move
            self.told[move.uuid] = at
            self.hands.say(f"{progress.line(move, at)}  {way.word}")

    # --- the end ---
    def _why_held(self, look: Look) -> str:
        """Why nothing more is begun, "" when it is."""
        if self.hands.stopped():
            return f"stopped; {self.errand.again} goes on"
        if self.fatal:
            return f"the step {self.errand.fatal} failed: {self.fatal}"
        if found := self.errand.ends(look):
            return found
        if self.errand.needs_up and not look.host.answers:
            if self.silent_since is None:
                self.silent_since = look.at if self.was_heard else 0
            return f"host {look.host.name} does not answer. If it is dead: kilonova host evacuate {look.host.name}"
        self.silent_since, self.was_heard = None, True
        return ""

    def _why_over(self, look: Look, under_way: list[Move], waiting: list[Planned], held: str) -> str:
        """Why it is over before the host is empty, "" while it goes on."""
        if held:
            if under_way:
                self._say_once(f"nothing more is begun, {len(under_way)} under way are waited for: {held}")
            silent = self.silent_since is not None and not self.hands.stopped()
            return "" if under_way or (silent and self._is_patient(look.at - (self.silent_since or 0))) else held
        if under_way or waiting:
            self.quiet_since = None
            return ""
        if self.quiet_since is None:
            self.quiet_since = look.at
            if self.wait:
                self._sum_up(look)
        since = self._quiet(look.at)
        if self.wait and since >= RETRY and self.left:
            self.left, self.plan, self.quiet_since = {}, {}, None
        comes = (self.soon or any(self._is_busy(server) for server in look.servers) or look.guests.get(guests.ABSENT)
                 or any(move.status in migrations.IN_PROGRESS for move in look.coming)
                 or any(not move.idle for move in look.leaving))
        return "" if self.wait or (comes and self._is_patient(since)) else f"to go on: {self.errand.again}"

    def _quiet(self, at: int) -> int:
        """For how long nothing has been under way."""
        return at - self.quiet_since if self.quiet_since is not None else 0

    def _is_patient(self, since: int) -> bool:
        return self.wait or since < PATIENCE

    def _sum_up(self, look: Look) -> None:
        """Who is left, why, and what to do."""
        for server in look.servers:
            said = self.left.get(server.id) or (
                Stays(f"it is busy with {server.busy}", "it can go when that has ended") if server.busy else None)
            if said is not None:
                self.hands.say(plan.stays(server, said))
        for move in look.leaving:
            if move.status == migrations.FINISHED and not self._is_ours(move):
                self.hands.say(f"{move.server} ({move.name}) is on {move.dest}; what it left here waits for a word\n"
                               f"    openstack server resize confirm {move.server}, or resize revert {move.server}")
        if owed := look.guests.get(guests.ABSENT):
            self.hands.say(f"{owed} guests are still to be removed there: kilonova host debts {look.host.name}")

    def _say_once(self, text: str) -> None:
        """Not again in every round."""
        if text != self.said:
            self.said = text
            self.hands.say(text)


def _context() -> RequestContext:
    return RequestContext.of_ourselves("")


#: What a request without options of its own means, beside the host, by the kind of the migration.
_ARGS: dict[str, dict[str, object]] = {
    migrations.LIVE: {"block_migration": None}, migrations.MIGRATION: {},
    migrations.EVACUATION: {"stopped": False, "shared": None}}
