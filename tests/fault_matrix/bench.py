# SPDX-License-Identifier: Apache-2.0
"""One cell's cloud: the simulator's, with a watcher at everything that happens in it, and its parts
at work in an order that a seed changes.

A fault is a watcher too: it is told of each point that is reached, and may kill whoever reached it,
make it fail, let time pass while the others go on, or have a user ask for something.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.command_key import CommandKey
from common.domain.models import Command, ImageRef, RequestSpec, Selection
from common.domain.wire import to_wire
from common.store import engine as store_engine
from common.store import schema
from compute_agent.sync import Work
from conductor.engine import runner
from conductor.engine.engine import Lane
from conductor.engine.workflow_engine import WorkflowEngine
from conductor.steps import cleanups
from conductor.workflows import WORKFLOWS
from tests.fault_matrix import registry, stage
from tests.fault_matrix.incarnations import Incarnations
from tests.fault_matrix.notifications import CellNotifications
from tests.workflows.simulator import Cloud, Crash, Host

#: What is reached: who, and where. conductor: (workflow, step, where); part: (workflow, step, part,
#: begins or ends); journal: (step, event); commit: (before or after, what was journalled); agent:
#: (host, verb, step, where); send: (host, step, command); result: (host, step); select: (asked or
#: answered, the question); statement: (its text).
Point = tuple[Any, ...]
Watcher = Callable[[Point], None]
PARTS_A_SECOND = 2  # how often everybody does what they have to do
#: While somebody waits for long: seconds that are lived through one by one, and at once later.
FIRST_SECONDS, STRIDE_SECONDS = 6, 4
DELIVER_SECONDS = 100  # between two deliveries of notifications
MOST_STARTS = 10  # of a conductor, until one succeeds
#: Whether two tables have rows; most rounds have no such chores.
_CHORES = "SELECT EXISTS (SELECT 1 FROM cleanups), EXISTS (SELECT 1 FROM host_actions)"
NESTED = 0.08  # how likely another part is at work while one stands at a point


class Bench:
    """``scenario``: as ``stage.pour`` has it. ``hits``: how often the cell's fault was injected;
    ``over_at``: when it was over."""

    def __init__(self, scenario: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.trial = stage.pour(scenario, self._tell)
        self.cloud: Cloud = self.trial.cloud
        self.incarnations = Incarnations(self.cloud, lambda: self.trial.server)
        self.time = self.cloud.time
        with self.cloud.store.engine.connect() as tx:
            self._database: Any = tx.connection.dbapi_connection
        self.watchers: list[Watcher] = []
        self.hits, self.over_at = 0, 0.0
        self.action = ""
        self.accepted = self.conflicting = False  # another action
        self.committed = False  # what its client did not hear of
        self.again = self.superseded = 0  # how often it is asked for again, and replaces itself
        self.asleep: set[str] = set()  # "work h1": its worker stands still; "sync h1" likewise
        self.running = 0  # parts that are at work now
        self.proofs: list[Callable[[], bool]] = []  # that the fault had an effect
        self.at_hit: list[Callable[[], object]] = []  # what comes when it is injected
        self.at_end: list[Callable[[], object]] = []  # what comes when all is over
        self.answer: Callable[[list[Selection]], list[Selection]] = lambda found: found
        self.lose: Callable[[str], bool] = lambda kind: False
        self.trace: list[Point] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._journalled: list[tuple[str, str]] = []
        self._fences: Counter[tuple[str, str]] = Counter()
        self._busy: set[str] = set()
        self._syncing: list[Host] = []
        self._depth, self._delivered_at = 0, self.time.monotonic()
        self._left = ExitStack()
        self._hook()

    # --- being watched ---
    def _hook(self) -> None:
        cloud = self.cloud
        self.select, cloud.select = cloud.select, self._select  # type: ignore[method-assign]
        self.deliver, cloud.do = cloud.do, self._send  # type: ignore[method-assign]
        cloud.lose = self._lost
        self._watch(cloud.engine)
        for host in cloud.hosts.values():
            self._watch_host(host)
        self._left.enter_context(registry.watched(self._part))
        self._left.enter_context(_no_waits())
        sa.event.listen(cloud.store.engine, "before_cursor_execute", self._statement)
        dialect = cloud.store.engine.dialect
        self._commit, dialect.do_commit = dialect.do_commit, self._committing  # type: ignore[method-assign]

    def _tell(self, cloud: Cloud) -> None:
        self.notifications = CellNotifications(cloud)

    def close(self) -> None:
        self._left.close()
        self.cloud.store.close()

    def _watch(self, engine: WorkflowEngine) -> None:
        def reached(*where: str) -> None:
            if where[0] == "sweep":
                return
            self.at("conductor", *where)
            if where[2] != "written" and not self._depth and self.chance.random() < NESTED:
                self._nest()

        engine.fault_point = reached

    def _watch_host(self, host: Host) -> None:
        hypervisor = host.driver.host
        write, carry_out, call = hypervisor.write, host.carry_out, hypervisor.call
        doing: list[Command] = []

        def inside(what: str) -> None:
            if doing:
                self.at("agent", host.name, doing[-1].verb, doing[-1].key.label, what)

        def written(key: str, guest: Any) -> None:
            write(key, guest)
            inside("writes")

        @contextmanager
        def called(*arguments: Any, **more: Any) -> Iterator[None]:
            with call(*arguments, **more):
                inside("entered")
                yield
            inside("left")

        def carried(work: Work) -> None:
            command = work.command
            known = self._fences[host.name, command.server]
            assert command.fence >= known, f"{command.key} is older than fence {known}"
            self._fences[host.name, command.server] = command.fence
            doing.append(command)
            try:
                carry_out(work)
            finally:
                doing.pop()

        hypervisor.write = written  # type: ignore[method-assign]
        hypervisor.call = called  # type: ignore[method-assign]
        host.carry_out = carried  # type: ignore[method-assign]
        host.inside = inside
        host.fault_point = partial(self.at, "agent", host.name)

    def at(self, *point: Any) -> None:
        """Somebody has reached this."""
        if point[0] != "statement":
            self.trace.append(point)
        for watcher in list(self.watchers):
            watcher(point)

    def _part(
        self, workflow: str, step: str, part: str, where: str, arguments: Sequence[object]
    ) -> None:
        self.at("part", workflow, step, part, where)

    def _statement(
        self, connection: Any, cursor: Any, text: str, parameters: Any, context: Any, *_: Any
    ) -> None:
        if text.startswith("BEGIN"):
            self._journalled.clear()
        elif text.startswith("INSERT INTO events"):
            for row in context.compiled_parameters:
                if row["action_id"] == self.action:
                    entry = (row["step"], row["event"])
                    self._journalled.append(entry)
                    self.at("journal", *entry)
        self.at("statement", text)

    def _committing(self, connection: Any) -> None:
        entries = tuple(self._journalled)
        self._journalled.clear()
        self.at("commit", "before", entries)
        self._commit(connection)
        self.at("commit", "after", entries)

    def _select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        self.at("select", "asked", specs)
        found = self.answer(self.select(specs, fresh))
        self.at("select", "answered", specs)
        return found

    def _send(self, host: str, commands: list[Command]) -> None:
        for command in commands:
            self.at("send", host, command.key.label, command)
        self.deliver(host, commands)

    # --- who does what ---
    def parts(self) -> list[Callable[[], object]]:
        """What there is to do, each by itself."""
        found: list[Callable[[], object]] = [
            partial(self._advance, lane) for lane in (Lane.INSIDE, *WORKFLOWS.lanes)
        ]
        for host in self.cloud.hosts.values():
            found += [partial(self._work, host), partial(self._sync, host)]
        return found

    def _advance(self, lane: str) -> None:
        """Where something is due; asked past everybody who watches, since mostly nothing is."""
        due = self._database.execute("SELECT step FROM actions WHERE state = 'due'")
        if any(WORKFLOWS.lane_of.get(step, Lane.INSIDE) == lane for (step,) in due):
            runner.advance(self.cloud.engine, lane)

    def _work(self, host: Host) -> None:
        name = f"work {host.name}"
        if host.is_on and name not in self.asleep | self._busy:
            self._busy.add(name)
            try:
                host.work()
            finally:
                self._busy.discard(name)

    def _sync(self, host: Host) -> None:
        name = f"sync {host.name}"
        if self.cloud.is_heard(host.name) and name not in self.asleep | self._busy:
            self._busy.add(name)
            try:
                self._syncing.append(host)
                self.cloud.sync(host)
            finally:
                self._syncing.pop()
                self._busy.discard(name)

    def _lost(self, kind: str) -> bool:
        """Does a message of this kind get lost?"""
        if kind == "sync" and self._syncing:  # not by the simulator's own round
            host = self._syncing[-1]
            for result in list(host.agent._results.values()):
                self.at("result", host.name, CommandKey.parse(result.key).label)
        return self.lose(kind)

    def _look(self) -> None:
        cloud = self.cloud
        heard = [
            name
            for name in cloud.hosts
            if cloud.is_heard(name) and f"sync {name}" not in self.asleep
        ]
        cloud.sweep(heard, not self.lose("heartbeat"))
        [(has_cleanups, has_host_actions)] = self._database.execute(_CHORES)
        if has_cleanups:
            cleanups.retry(cloud.engine)
        if has_host_actions:
            cloud.host_actions.advance()

    def run(self, part: Callable[[], object]) -> None:
        """As the threads do: what is not available is tried again, who is killed starts again."""
        self.running += 1
        try:
            part()
        except Crash as crash:
            self.died(crash)
        except errors.Unavailable:
            pass
        finally:
            self.running -= 1

    def died(self, crash: Crash) -> None:
        """Whoever was killed is started again."""
        who = crash.args[0]
        if who in self.cloud.hosts:
            self.cloud.hosts[who].restart()
        else:
            self.restart_conductor()

    def restart_conductor(self) -> None:
        """Kill -9, and another with the same name, as soon as the database lets it start."""
        self.cloud.engine.fault_point = lambda *where: None
        for _ in range(MOST_STARTS):
            with suppress(errors.Unavailable):
                stage.restart(self.cloud)
                break
        self._watch(self.cloud.engine)

    def _nest(self) -> None:
        """Another part is at work while one stands here."""
        self._depth += 1
        try:
            part = self.chance.choice(self.parts())
            try:
                part()
            except errors.Unavailable:
                pass
            except Crash as crash:
                if crash.args[0] not in self.cloud.hosts:
                    raise
                self.died(crash)
        finally:
            self._depth -= 1

    def round(self, seconds: float = 1) -> None:
        """A second, or a few in which little happens."""
        for _ in range(PARTS_A_SECOND):
            parts = self.parts()
            self.chance.shuffle(parts)
            for part in parts:
                self.run(part)
        self.run(self._look)
        if self.time.monotonic() - self._delivered_at >= DELIVER_SECONDS:
            self._delivered_at = self.time.monotonic()
            self.run(self.notifications.deliver)
        self.check()
        self.time.pass_by(seconds)
        now = self.time.monotonic()
        due = [one for one in self._later if one[0] <= now]
        self._later = [one for one in self._later if one[0] > now]
        for _, what in due:
            what()

    def check(self) -> None:
        """What must always hold: no server runs twice; of those that move, all that the doctor
        knows of records."""
        if self.trial.scenario.keeps is not None:
            self.cloud.watcher()
        runs = Counter(
            server
            for host in self.cloud.hosts.values()
            for server, guest in host.driver.host.guests.items()
            if guest.power_state != states.SHUTDOWN
        )
        assert set(runs.values()) <= {1}, f"two domains run: {runs}"

    # --- for faults ---
    def begin(self) -> None:
        """The workflow is asked for."""
        self.incarnations.open()
        self.trial.begin()
        if self.trial.scenario.ask == "create" and not self.trial.scenario.volumes:
            self._let_image_age()
        self.adopt()

    def _let_image_age(self) -> None:
        """Give the new server an image, and let it wait for so long that this is checked again."""
        image = ImageRef(ids.new(), "qcow2")
        with self.cloud.store.begin() as tx:
            tx.execute(
                sa.update(schema.servers)
                .where(schema.servers.c.id == self.trial.server)
                .values(image=to_wire(image), image_id=image.id)
            )
        self.time.pass_by(1)

    def adopt(self) -> None:
        """The action that has the server now is the one that is watched."""
        self.is_over()
        self.action = str(self.cloud.show(self.trial.server).action)

    def row(self) -> Any:
        """The action."""
        with self.cloud.store.engine.connect() as tx:
            return tx.execute(
                sa.select(schema.actions).where(schema.actions.c.id == self.action)
            ).one()

    def hit(self) -> None:
        """The fault is injected now."""
        self.hits += 1
        self.is_over()
        due, self.at_hit = self.at_hit, []
        for what in due:
            what()

    def is_over(self, after: float = 0) -> None:
        """It is over then, in so many seconds."""
        self.over_at = max(self.over_at, self.time.monotonic() + after)

    def user_deletes(self) -> None:
        """Somebody deletes the server, or hears that it is gone."""
        try:
            self.cloud.ask(self.trial.server, "delete")
        except errors.NotFound:
            assert self.cloud.show(self.trial.server).deleted, "it is not gone"

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """This happens then."""
        self.is_over(seconds)
        self._later.append((self.time.monotonic() + seconds, what))

    def world(
        self,
        seconds: int,
        asleep: Sequence[str] = (),
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let time pass for all parts but those asleep, while a part stands at a point.

        Args:
            seconds: How long, unless ``has_ended`` returns True before.
            asleep: Parts that stand still; see ``Bench.asleep``.
            has_ended: True if nothing more is expected. Called after the first seconds.
        """
        self.asleep |= set(asleep)
        self._depth += 1
        try:
            until = self.time.monotonic() + seconds
            for _ in range(min(seconds, FIRST_SECONDS)):
                self.round()
            while self.time.monotonic() < until and not has_ended():
                self.round(STRIDE_SECONDS)
        finally:
            self._depth -= 1
            self.asleep -= set(asleep)
        self.is_over()

    @contextmanager
    def another_conductor(self) -> Iterator[None]:
        """It does the work of one that does not."""
        cloud = self.cloud
        before = cloud.engine, cloud.watch, cloud.host_actions
        busy, self._busy = self._busy, set()
        stage.begin(cloud, "c2/1")
        self._watch(cloud.engine)
        try:
            yield
        finally:
            self._busy = busy
            cloud.engine, cloud.watch, cloud.host_actions = before

    @property
    def is_quiet(self) -> bool:
        """Is nothing in hand any more, but what hosts owe that nobody reaches?"""
        left = stage.ages(self.cloud)
        owing = {host for _, host, _ in left["debts"]}
        return (
            not left["actions"]
            and not self._later
            and self.time.monotonic() >= self.over_at
            and not any(self.cloud.is_heard(host) for host in owing)
        )

    def settle(self, limit: float) -> float:
        """Until all is quiet; how many seconds after the fault's end that was. Each fault may make
        it so late."""
        while not self.is_quiet:
            late = self.time.monotonic() - self.over_at
            assert late <= limit * max(1, self.hits), (
                f"not over {late:.0f} s after the fault: {stage.left(self.cloud)}"
            )
            self.round(STRIDE_SECONDS if late < -STRIDE_SECONDS else 1)
        return max(0.0, self.time.monotonic() - self.over_at)


@contextmanager
def _no_waits() -> Iterator[None]:
    """Whoever tries a transaction again waits in the clock of this machine, which nothing here goes
    by."""
    real = store_engine.time
    store_engine.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=real.monotonic, time_ns=real.time_ns, sleep=lambda seconds: None
    )
    try:
        yield
    finally:
        store_engine.time = real
