# SPDX-License-Identifier: Apache-2.0
"""The simulated cloud of one cell, with watchers at all points of the processes.

The seed decides the order in which conductor, agents and periodic tasks run. A fault is a watcher,
too. At the right point the fault kills the process, raises an error, lets time pass for the other
processes, or sends a user's request.
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
from common.domain.clock import SECOND
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
from conductor.workflows.create import IMAGE_AGE
from tests.fault_matrix import registry, stage
from tests.fault_matrix.incarnations import Incarnations
from tests.fault_matrix.notifications import CellNotifications
from tests.workflows.simulator import Cloud, Crash, Host

#: A point: its kind, and values that depend on the kind. conductor: workflow, step, where. part:
#: workflow, step, function, "begins" or "ends". journal: step, event. commit: "before" or "after",
#: the journal entries of the transaction. agent: host, verb, step, where. send: host, step,
#: command. result: host, step. select: "asked" or "answered", request specs. statement: SQL text.
Point = tuple[Any, ...]
Watcher = Callable[[Point], None]
#: Runs of each part of the cloud per simulated second.
PARTS_A_SECOND = 2
#: A long wait begins with FIRST_SECONDS rounds of one second. Later rounds take STRIDE_SECONDS.
FIRST_SECONDS, STRIDE_SECONDS = 6, 4
#: Seconds between two deliveries of notifications.
DELIVER_SECONDS = 100
#: Attempts to start a conductor.
MOST_STARTS = 10
#: Most rounds have no pending cleanup and no host action, so one statement checks for both.
_CHORES = "SELECT EXISTS (SELECT 1 FROM cleanups), EXISTS (SELECT 1 FROM host_actions)"
#: Probability that another part runs while a conductor is at a point.
NESTED = 0.08


class Bench:
    """The simulated cloud of one cell.

    Attributes:
        hits: Number of injections of the fault.
        over_at: Time at which the fault ends.
    """

    def __init__(self, scenario: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.trial = stage.pour(scenario, self._watch_notifications)
        self.cloud: Cloud = self.trial.cloud
        self.incarnations = Incarnations(self.cloud, lambda: self.trial.server)
        self.time = self.cloud.time
        with self.cloud.store.engine.connect() as tx:
            self._database: Any = tx.connection.dbapi_connection
        self.watchers: list[Watcher] = []
        self.hits, self.over_at = 0, 0.0
        self.action = ""
        # Another action was accepted meanwhile, and another action is to be requested.
        self.accepted = self.conflicting = False
        # The request was committed, but the client has no answer.
        self.committed = False
        # Repetitions of the request after its answer, and own actions that a repetition superseded.
        self.again = self.superseded = 0
        # Suspended parts. For example, "work h1" is the worker of host h1, "sync h1" the exchange.
        self.asleep: set[str] = set()
        # Number of parts that run now.
        self.running = 0
        # Predicates that are true if the fault had an effect.
        self.proofs: list[Callable[[], bool]] = []
        # Called at the next injection, and when the server is deleted.
        self.at_hit: list[Callable[[], object]] = []
        self.at_end: list[Callable[[], object]] = []
        # Changes the scheduler's answer.
        self.answer: Callable[[list[Selection]], list[Selection]] = lambda selections: selections
        self.lose: Callable[[str], bool] = lambda kind: False
        self.trace: list[Point] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._journalled: list[tuple[str, str]] = []
        self._fences: Counter[tuple[str, str]] = Counter()
        self._busy: set[str] = set()
        self._syncing: list[Host] = []
        self._depth, self._delivered_at = 0, self.time.monotonic()
        self._left = ExitStack()
        self._watch_cloud()

    # --- watchers ---
    def _watch_cloud(self) -> None:
        cloud = self.cloud
        self.select, cloud.select = cloud.select, self._watch_select  # type: ignore[method-assign]
        self.deliver, cloud.do = cloud.do, self._watch_send  # type: ignore[method-assign]
        cloud.lose = self._is_lost
        self._watch_conductor(cloud.engine)
        for host in cloud.hosts.values():
            self._watch_host(host)
        self._left.enter_context(registry.watch_steps(self._watch_part))
        self._left.enter_context(_skip_retry_waits())
        sa.event.listen(cloud.store.engine, "before_cursor_execute", self._watch_statement)
        dialect = cloud.store.engine.dialect
        self._commit, dialect.do_commit = dialect.do_commit, self._watch_commit  # type: ignore[method-assign]

    def _watch_notifications(self, cloud: Cloud) -> None:
        self.notifications = CellNotifications(cloud)

    def close(self) -> None:
        self._left.close()
        self.cloud.store.close()

    def _watch_conductor(self, engine: WorkflowEngine) -> None:
        def report_point(*where: str) -> None:
            if where[0] == "sweep":
                return
            self.reach("conductor", *where)
            if where[2] != "written" and not self._depth and self.rng.random() < NESTED:
                self._run_another_part()

        engine.fault_point = report_point

    def _watch_host(self, host: Host) -> None:
        hypervisor = host.driver.host
        write, carry_out, call = hypervisor.write, host.carry_out, hypervisor.call
        commands: list[Command] = []

        def report_inside(where: str) -> None:
            if commands:
                self.reach("agent", host.name, commands[-1].verb, commands[-1].key.label, where)

        def write_and_report(key: str, guest: Any) -> None:
            write(key, guest)
            report_inside("writes")

        @contextmanager
        def call_and_report(*arguments: Any, **more: Any) -> Iterator[None]:
            with call(*arguments, **more):
                report_inside("entered")
                yield
            report_inside("left")

        def check_fence_and_carry_out(work: Work) -> None:
            command = work.command
            last_fence = self._fences[host.name, command.server]
            assert command.fence >= last_fence, f"{command.key} is older than fence {last_fence}"
            self._fences[host.name, command.server] = command.fence
            commands.append(command)
            try:
                carry_out(work)
            finally:
                commands.pop()

        hypervisor.write = write_and_report  # type: ignore[method-assign]
        hypervisor.call = call_and_report  # type: ignore[method-assign]
        host.carry_out = check_fence_and_carry_out  # type: ignore[method-assign]
        host.inside = report_inside
        host.fault_point = partial(self.reach, "agent", host.name)

    def reach(self, *point: Any) -> None:
        """Record a point in the trace, and call the watchers. SQL statements are not recorded."""
        if point[0] != "statement":
            self.trace.append(point)
        for watcher in list(self.watchers):
            watcher(point)

    def _watch_part(
        self, workflow: str, step: str, part: str, where: str, arguments: Sequence[object]
    ) -> None:
        self.reach("part", workflow, step, part, where)

    def _watch_statement(
        self, connection: Any, cursor: Any, text: str, parameters: Any, context: Any, *_: Any
    ) -> None:
        if text.startswith("BEGIN"):
            self._journalled.clear()
        elif text.startswith("INSERT INTO events"):
            for row in context.compiled_parameters:
                if row["action_id"] == self.action:
                    entry = (row["step"], row["event"])
                    self._journalled.append(entry)
                    self.reach("journal", *entry)
        self.reach("statement", text)

    def _watch_commit(self, connection: Any) -> None:
        entries = tuple(self._journalled)
        self._journalled.clear()
        self.reach("commit", "before", entries)
        self._commit(connection)
        self.reach("commit", "after", entries)

    def _watch_select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        self.reach("select", "asked", specs)
        selections = self.answer(self.select(specs, fresh))
        self.reach("select", "answered", specs)
        return selections

    def _watch_send(self, host: str, commands: list[Command]) -> None:
        for command in commands:
            self.reach("send", host, command.key.label, command)
        self.deliver(host, commands)

    # --- parts of the cloud ---
    def list_parts(self) -> list[Callable[[], object]]:
        """Return all parts: the conductor's lanes, and the worker and the exchange of each host."""
        parts: list[Callable[[], object]] = [
            partial(self._advance, lane) for lane in (Lane.INSIDE, *WORKFLOWS.lanes)
        ]
        for host in self.cloud.hosts.values():
            parts += [partial(self._work, host), partial(self._sync, host)]
        return parts

    def _advance(self, lane: str) -> None:
        """Advance the actions of a lane if one is due.

        The query bypasses the watchers, because mostly no action is due.
        """
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

    def _is_lost(self, kind: str) -> bool:
        """Return True if a message of this kind is lost."""
        # An exchange of the simulator's own round is not watched.
        if kind == "sync" and self._syncing:
            host = self._syncing[-1]
            for result in list(host.agent._results.values()):
                self.reach("result", host.name, CommandKey.parse(result.key).label)
        return self.lose(kind)

    def _run_periodic_tasks(self) -> None:
        cloud = self.cloud
        reachable_hosts = [
            name
            for name in cloud.hosts
            if cloud.is_heard(name) and f"sync {name}" not in self.asleep
        ]
        cloud.sweep(reachable_hosts, not self.lose("heartbeat"))
        [(has_cleanups, has_host_actions)] = self._database.execute(_CHORES)
        if has_cleanups:
            cleanups.retry(cloud.engine)
        if has_host_actions:
            cloud.host_actions.advance()

    def run(self, part: Callable[[], object]) -> None:
        """Run a part as its thread would.

        A killed process is restarted. An unavailable service is tried again in the next round.
        """
        self.running += 1
        try:
            part()
        except Crash as crash:
            self.restart_after(crash)
        except errors.Unavailable:
            pass
        finally:
            self.running -= 1

    def restart_after(self, crash: Crash) -> None:
        """Restart the process that was killed."""
        process = crash.args[0]
        if process in self.cloud.hosts:
            self.cloud.hosts[process].restart()
        else:
            self.restart_conductor()

    def restart_conductor(self) -> None:
        """Kill the conductor, and start another of the same name once the database accepts it."""
        self.cloud.engine.fault_point = lambda *where: None
        for _ in range(MOST_STARTS):
            with suppress(errors.Unavailable):
                stage.restart_conductor(self.cloud)
                break
        self._watch_conductor(self.cloud.engine)

    def _run_another_part(self) -> None:
        """Run a part of the cloud while a conductor is at a point."""
        self._depth += 1
        try:
            part = self.rng.choice(self.list_parts())
            try:
                part()
            except errors.Unavailable:
                pass
            except Crash as crash:
                if crash.args[0] not in self.cloud.hosts:
                    raise
                self.restart_after(crash)
        finally:
            self._depth -= 1

    def round(self, seconds: float = 1) -> None:
        """Run all parts in random order, check the invariants, and let so many seconds pass."""
        for _ in range(PARTS_A_SECOND):
            parts = self.list_parts()
            self.rng.shuffle(parts)
            for part in parts:
                self.run(part)
        self.run(self._run_periodic_tasks)
        if self.time.monotonic() - self._delivered_at >= DELIVER_SECONDS:
            self._delivered_at = self.time.monotonic()
            self.run(self.notifications.deliver)
        self.check()
        self.time.pass_by(seconds)
        now = self.time.monotonic()
        due = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, call in due:
            call()

    def check(self) -> None:
        """Check the invariants: no server runs twice, and moves leave no finding of the doctor."""
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
        """Request the workflow of the cell, and watch the action."""
        self.incarnations.open()
        self.trial.begin()
        scenario = self.trial.scenario
        if scenario.ask in ("create", "rebuild") and not scenario.volumes:
            self._set_image()
        self.adopt()

    def _set_image(self) -> None:
        """Give the server an image, which is old enough that a create checks the image again."""
        image = ImageRef(ids.new(), "qcow2")
        with self.cloud.store.begin() as tx:
            tx.execute(
                sa.update(schema.servers)
                .where(schema.servers.c.id == self.trial.server)
                .values(image=to_wire(image), image_id=image.id)
            )
        self.time.pass_by(IMAGE_AGE // SECOND)

    def adopt(self) -> None:
        """Watch the action that is in progress for the server now."""
        self.extend_fault()
        self.action = str(self.cloud.show(self.trial.server).action)

    def read_action(self) -> Any:
        """Return the row of the watched action."""
        with self.cloud.store.engine.connect() as tx:
            return tx.execute(
                sa.select(schema.actions).where(schema.actions.c.id == self.action)
            ).one()

    def record_hit(self) -> None:
        """Count an injection of the fault, and run the calls of ``at_hit``."""
        self.hits += 1
        self.extend_fault()
        due, self.at_hit = self.at_hit, []
        for call in due:
            call()

    def extend_fault(self, after: float = 0) -> None:
        """Let the fault end in so many seconds, unless the fault lasts longer already."""
        self.over_at = max(self.over_at, self.time.monotonic() + after)

    def delete_server(self) -> None:
        """Delete the server, or check that the server is deleted if the API answers 404."""
        try:
            self.cloud.ask(self.trial.server, "delete")
        except errors.NotFound:
            assert self.cloud.show(self.trial.server).deleted, "it is not gone"

    def schedule(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function after some simulated seconds. The fault lasts until then."""
        self.extend_fault(seconds)
        self._later.append((self.time.monotonic() + seconds, call))

    def pass_time(
        self,
        seconds: int,
        asleep: Sequence[str] = (),
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let time pass for all parts but those asleep, while a part is at a point.

        Args:
            seconds: How long, unless ``has_ended`` returns True before.
            asleep: Suspended parts, see ``Bench.asleep``.
            has_ended: True if no more is expected. Called after the first seconds.
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
        self.extend_fault()

    @contextmanager
    def run_another_conductor(self) -> Iterator[None]:
        """Let a second conductor do all work while the first is suspended."""
        cloud = self.cloud
        before = cloud.engine, cloud.watch, cloud.host_actions
        busy, self._busy = self._busy, set()
        stage.start_conductor(cloud, "c2/1")
        self._watch_conductor(cloud.engine)
        try:
            yield
        finally:
            self._busy = busy
            cloud.engine, cloud.watch, cloud.host_actions = before

    @property
    def is_quiet(self) -> bool:
        """True if no work is left except pending cleanups of unreachable hosts.

        Work is an unfinished action, a scheduled call, or a fault that has not ended.
        """
        ages = stage.read_ages(self.cloud)
        hosts_with_cleanups = {host for _, host, _ in ages["removals"]}
        return (
            not ages["actions"]
            and not self._later
            and self.time.monotonic() >= self.over_at
            and not any(self.cloud.is_heard(host) for host in hosts_with_cleanups)
        )

    def settle(self, limit: float) -> float:
        """Run rounds until all is quiet, and return the seconds since the end of the fault.

        Raises:
            AssertionError: The wait exceeds ``limit`` seconds for each injected fault.
        """
        while not self.is_quiet:
            late = self.time.monotonic() - self.over_at
            assert late <= limit * max(1, self.hits), (
                f"not over {late:.0f} s after the fault: {stage.describe_unfinished(self.cloud)}"
            )
            self.round(STRIDE_SECONDS if late < -STRIDE_SECONDS else 1)
        return max(0.0, self.time.monotonic() - self.over_at)


@contextmanager
def _skip_retry_waits() -> Iterator[None]:
    """Make retries of transactions wait for no real time, because the clock here is simulated."""
    real = store_engine.time
    store_engine.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=real.monotonic, time_ns=real.time_ns, sleep=lambda seconds: None
    )
    try:
        yield
    finally:
        store_engine.time = real
