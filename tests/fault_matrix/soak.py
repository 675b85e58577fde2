# SPDX-License-Identifier: Apache-2.0
"""A soak: lives of servers, drawn by a seed: what is asked for next, and what goes wrong meanwhile,
at any point that is reached, more than once in a round and of all kinds together.

After each round all must be at rest and the doctor find nothing; whether an action succeeds is
nobody's concern. In the end all servers are deleted, and nothing of them is left.
"""

from __future__ import annotations

import random
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.domain import errors, states
from compute_agent.virt.memory.state.script import Fail
from tests.answers import Answer
from tests.fault_matrix import at_hosts, at_scheduler, at_services, outcome, pairs
from tests.fault_matrix.aim import CONDUCTOR, OUTSIDE, dies
from tests.fault_matrix.at_database import DEADLOCK, GONE, LOCK_WAIT, error
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import ASKED, Cell, Kind
from tests.fault_matrix.incarnations import Incarnations
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Crash

ROUNDS = 20  #: of one life
MOST_SERVERS, NEW_SERVER = 3, 0.2  #: that live together; how likely one more is asked for
#: What is asked of them.
WANTED = [wanted for wanted in ASKED.values() if wanted != "create"]
#: Where a life may be lived: a scenario and its circumstance.
CLOUDS = (
    "create+",
    "create+late-wires",
    "create+offloads",
    "create+nfs",
    "create:volumes+",
    "create:boots+",
    "create:placed+",
)
#: Faults of one round at the most, and how likely one is at a point: in each round one of these.
MOST_FAULTS, CHANCES = 3, (0.0, 0.01, 0.03, 0.1)
ANSWERS = (Answer.CONFLICT, Answer.SILENT, Answer.LOST, Answer.HALF)


@dataclass(frozen=True)
class Life:
    """What became of one; ``problem`` empty: all held. ``faults``: that were injected."""

    seed: int
    requests: int
    faults: int
    problem: str = ""
    story: str = ""


def live(seed: int) -> Life:
    """Live one life."""
    cloud = random.Random(seed).choice(CLOUDS)
    with _drawn_ids("cloud"):
        Bench(cloud, 0).close()  # what it begins with is the same, whichever lives came before
    with _drawn_ids(f"life {seed}"):
        return _live(cloud, seed)


@contextmanager
def _drawn_ids(seed: str) -> Iterator[None]:
    """The seed draws identifiers too, by which rows are ordered."""
    real, chance = uuid.uuid4, random.Random(seed)
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)
    try:
        yield
    finally:
        uuid.uuid4 = real


def _live(cloud: str, seed: int) -> Life:
    soak = Soak(cloud, seed)
    try:
        soak.run()
    except (Exception, Crash) as problem:  # noqa: BLE001  # it is what the life is about
        story = "\n".join((*soak.story, traceback.format_exc()))
        return Life(seed, soak.asked, soak.faults, outcome.worded(problem), story)
    finally:
        soak.bench.close()
    return Life(seed, soak.asked, soak.faults)


class Soak:
    """One life. ``story``: what was asked for and what went wrong, in order."""

    def __init__(self, cloud: str, seed: int) -> None:
        self.bench = Bench(cloud, seed)
        self.chance, self._began = self.bench.chance, self.bench.time.monotonic()
        self.story: list[str] = []
        self.asked = self.faults = 0
        self._servers: dict[str, Incarnations] = {}  # those that are not deleted
        self._left, self._likely = 0, 0.0

    def run(self) -> None:
        """Round after round; in the end all servers are deleted."""
        for _ in range(ROUNDS):
            self._round()
        for server in list(self._servers)[1:]:
            self.bench.trial.server = server
            self.bench.user_deletes()
        self.bench.is_over()
        self.bench.settle(outcome.MOVE_SECONDS)
        if self._servers:
            self.bench.trial.server = next(iter(self._servers))
        outcome.empty(self.bench)

    def _round(self) -> None:
        """Ask something of one server, or of several at once, and look when all is at rest."""
        bench = self.bench
        for host in bench.cloud.hosts.values():
            for guest in host.driver.host.guests.values():
                guest.has_agent = True
        self._left, self._likely = MOST_FAULTS, self.chance.choice(CHANCES)
        bench.watchers.append(self._strike)
        for server in self._asked_now():
            self._ask(server)
        bench.is_over()
        bench.settle(outcome.MOVE_SECONDS)
        bench.watchers.clear()
        outcome.heal(bench)
        outcome.return_hosts(bench)
        outcome.at_rest(bench, list(self._servers))
        for server, incarnations in list(self._servers.items()):
            incarnations.check()
            found = bench.cloud.show(server)
            self._say(f"    {server[:4]} {found.vm_state}")
            if found.deleted:
                del self._servers[server]
            else:
                incarnations.open()

    def _asked_now(self) -> list[str]:
        """Servers, each of which is asked something; an empty name: another one is made."""
        there = list(self._servers)
        if not there or (len(there) < MOST_SERVERS and self.chance.random() < NEW_SERVER):
            there.append("")
        return self.chance.sample(there, self.chance.randint(1, len(there)))

    def _ask(self, server: str) -> None:
        """Ask something that the server's state may allow, or for a server."""
        trial, self.asked = self.bench.trial, self.asked + 1
        trial.server = server
        try:
            if not server:
                trial.begin()
                made = trial.server
                self._servers[made] = Incarnations(self.bench.cloud, lambda: made)
                self._say(f"{made[:4]} create")
                return
            wanted = self.chance.choice(self._may_want(server))
            self._say(f"{server[:4]} {wanted}")
            if wanted == "evacuate":
                self.bench.cloud.kill(self.bench.cloud.show(server).host)
            ask(self.bench.cloud, server, wanted)
        except errors.Problem as problem:
            assert 400 <= problem.status < 500, f"it is answered with {problem.status}"
            self._say(f"    refused: {problem.text}")

    def _may_want(self, server: str) -> list[str]:
        """What the state of an idle server may allow."""
        found, hosts = self.bench.cloud.show(server), self.bench.cloud.hosts.values()
        return [
            wanted
            for wanted in WANTED
            if any(
                row.vm == states.ANY or found.vm_state in row.vm for row in pairs.rows_of(wanted)
            )
            and (wanted != "detach_interface" or found.interfaces)
            and (wanted != "evacuate" or (found.host and all(host.is_on for host in hosts)))
        ]

    def _say(self, what: str) -> None:
        self.story.append(f"{self.bench.time.monotonic() - self._began:6.0f} s {what}")

    # --- what goes wrong ---
    def _strike(self, point: Point) -> None:
        """Perhaps, here."""
        possible = self.bench.running and self._left and self._at(point)
        if not possible or self.chance.random() >= self._likely:
            return
        what = self.chance.choice(possible)
        self._left -= 1
        self.faults += 1
        self._say(f"    {' '.join(map(str, point[:5]))[:90]}: {what.__name__.strip('_')}")
        self.bench.is_over()
        what(self, point)

    def _at(self, point: Point) -> tuple[Strike, ...]:
        """What can go wrong at this point."""
        match point:
            case ("agent", _, _, _, "before"):
                return AT_COMMAND
            case ("agent", _, _, _, "entered" | "writes" | "left"):
                return INSIDE_VERB
            case ("agent", *_):
                return (Soak._agent_dies,)
            case ("conductor", _, _, where) if where in OUTSIDE:
                return BETWEEN_TRANSACTIONS
            case ("part", _, _, "call", "begins"):
                return AT_CALL
            case ("conductor" | "part", *_):
                return (Soak._conductor_dies,)
            case ("journal", *_):
                return (Soak._database_fails,)
            case ("commit", _, (_, *_)):  # of one that says something of an action
                return (Soak._connection_lost,)
            case ("select", *_):
                return (Soak._question_lost, Soak._scheduler_restarts)
            case ("send", *_):
                return (Soak._message_lost, Soak._answer_lost)
        return ()

    def _agent_dies(self, point: Point) -> None:
        dies(point[1])(point)

    def _refused(self, point: Point) -> None:
        host = self.bench.cloud.hosts[point[1]]
        host.driver.host.script[point[2]] = [Fail("It broke.")]

    def _host_gone(self, point: Point) -> None:
        """It has no power for a while; an admin says so when it counts as down."""
        bench, host = self.bench, self.bench.cloud.hosts[point[1]]
        left, self._left = self._left, 0  # nothing goes wrong with that
        host.power_cut()
        self._left = left
        bench.later(at_hosts.LEASE_SECONDS, lambda: bench.cloud.force_down(host.name))
        dies(host.name)(point)

    def _cut_off(self, point: Point) -> None:
        bench, host = self.bench, str(point[1])
        bench.cloud.cut.add(host)
        bench.later(at_hosts.LEASE_SECONDS, lambda: bench.cloud.cut.discard(host))

    def _agent_sleeps(self, point: Point) -> None:
        asleep = [f"work {point[1]}", f"sync {point[1]}"]
        self.bench.world(at_hosts.LEASE_SECONDS, asleep=asleep)

    def _hypervisor_away(self, point: Point) -> None:
        raise errors.Unavailable("The hypervisor went away.")

    def _conductor_dies(self, point: Point) -> None:
        dies(CONDUCTOR)(point)

    def _conductor_sleeps(self, point: Point) -> None:
        """Another one does its work."""
        with self.bench.another_conductor():
            self.bench.world(at_hosts.LEASE_SECONDS)

    def _database_fails(self, point: Point) -> None:
        raise error(self.chance.choice((DEADLOCK, LOCK_WAIT, GONE)))

    def _connection_lost(self, point: Point) -> None:
        raise error(GONE)

    def _question_lost(self, point: Point) -> None:
        raise errors.NoAnswer("lost")

    def _scheduler_restarts(self, point: Point) -> None:
        at_scheduler.restart(self.bench)
        raise errors.NoAnswer("lost")

    def _message_lost(self, point: Point) -> None:
        at_hosts.lose(self.bench, "do")

    def _answer_lost(self, point: Point) -> None:
        at_hosts.lose(self.bench, "sync")

    def _service(self, point: Point) -> Cell:
        return Cell(point[1], point[2], Kind.EXTERNAL, "")

    def _service_fails(self, point: Point) -> None:
        """Its next request is refused, or not answered."""
        at_services.script(self.bench, self._service(point), self.chance.choice(ANSWERS))

    def _service_away(self, point: Point) -> None:
        at_services.leave(self.bench, self._service(point))

    def _service_slow(self, point: Point) -> None:
        self.bench.world(at_services.LATE_SECONDS)

    def _service_late(self, point: Point) -> None:
        at_services.put_off(self.bench, self._service(point))

    def _asks_meanwhile(self, point: Point) -> None:
        """Somebody asks for something else; as the table of states says."""
        busy = [server for server in self._servers if self.bench.cloud.show(server).action]
        if busy:
            server, wanted = self.chance.choice(busy), self.chance.choice(WANTED)
            self._say(f"        {server[:4]} {wanted}")
            pairs.ask_meanwhile(self.bench, server, wanted)


Strike = Callable[[Soak, Point], object]
AT_COMMAND: tuple[Strike, ...] = (
    Soak._agent_dies,
    Soak._refused,
    Soak._host_gone,
    Soak._cut_off,
    Soak._agent_sleeps,
    Soak._asks_meanwhile,
)
INSIDE_VERB: tuple[Strike, ...] = (Soak._agent_dies, Soak._hypervisor_away)
BETWEEN_TRANSACTIONS: tuple[Strike, ...] = (Soak._conductor_dies, Soak._conductor_sleeps)
AT_CALL: tuple[Strike, ...] = (
    Soak._service_fails,
    Soak._service_away,
    Soak._service_slow,
    Soak._service_late,
    Soak._asks_meanwhile,
)
