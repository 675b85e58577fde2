# SPDX-License-Identifier: Apache-2.0
"""Random lives of servers, with random faults at any point.

The seed draws the next requests and the faults, several of all kinds in one round. After each round
all actions have ended and the doctor has no finding. The actions themselves may fail. At the end
all servers are deleted, and no trace of them is left.
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
from tests.fault_matrix.aim import CONDUCTOR, OUTSIDE, kill_at_point
from tests.fault_matrix.at_database import DEADLOCK, GONE, LOCK_WAIT, make_error
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import REQUESTS, Cell, Kind
from tests.fault_matrix.incarnations import Incarnations
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Crash

#: Rounds of one life.
ROUNDS = 20
#: Servers that exist together, and the probability that a round creates another.
MOST_SERVERS, NEW_SERVER = 3, 0.2
#: Requests that need a server.
SERVER_REQUESTS = [request for request in REQUESTS.values() if request != "create"]
#: The clouds of lives, each a scenario and its circumstance.
CLOUDS = (
    "create+",
    "create+late-wires",
    "create+offloads",
    "create+nfs",
    "create:volumes+",
    "create:boots+",
    "create:placed+",
)
#: Faults of one round at most. Each round draws the probability of a fault at a point.
MOST_FAULTS, CHANCES = 3, (0.0, 0.01, 0.03, 0.1)
ANSWERS = (Answer.CONFLICT, Answer.SILENT, Answer.LOST, Answer.HALF)


@dataclass(frozen=True)
class Life:
    """The result of a life.

    Attributes:
        requests: Number of requests.
        faults: Number of injected faults.
        problem: Empty if all checks passed.
        story: Requests and faults in order, and the traceback of the problem.
    """

    seed: int
    requests: int
    faults: int
    problem: str = ""
    story: str = ""


def run_life(seed: int) -> Life:
    """Run the life with this seed."""
    cloud = random.Random(seed).choice(CLOUDS)
    with _seed_uuids("cloud"):
        # Prepare the scenario now, so that the result does not depend on earlier lives.
        Bench(cloud, 0).close()
    with _seed_uuids(f"life {seed}"):
        return _run_life(cloud, seed)


@contextmanager
def _seed_uuids(seed: str) -> Iterator[None]:
    """Derive new identifiers from a seed, because the order of some rows depends on them."""
    real, rng = uuid.uuid4, random.Random(seed)
    uuid.uuid4 = lambda: uuid.UUID(int=rng.getrandbits(128), version=4)
    try:
        yield
    finally:
        uuid.uuid4 = real


def _run_life(cloud: str, seed: int) -> Life:
    soak = Soak(cloud, seed)
    try:
        soak.run()
    except (Exception, Crash) as problem:  # noqa: BLE001  # every exception is a result
        story = "\n".join((*soak.story, traceback.format_exc()))
        return Life(seed, soak.requests, soak.faults, outcome.describe_problem(problem), story)
    finally:
        soak.bench.close()
    return Life(seed, soak.requests, soak.faults)


class Soak:
    """One life. ``story`` contains the requests and faults, in order."""

    def __init__(self, cloud: str, seed: int) -> None:
        self.bench = Bench(cloud, seed)
        self.rng, self._began = self.bench.rng, self.bench.time.monotonic()
        self.story: list[str] = []
        self.requests = self.faults = 0
        # The servers that are not deleted.
        self._servers: dict[str, Incarnations] = {}
        self._faults_left, self._probability = 0, 0.0

    def run(self) -> None:
        """Run all rounds, and delete the servers."""
        for _ in range(ROUNDS):
            self._run_round()
        for server in list(self._servers)[1:]:
            self.bench.trial.server = server
            self.bench.delete_server()
        self.bench.extend_fault()
        self.bench.settle(outcome.MOVE_SECONDS)
        if self._servers:
            self.bench.trial.server = next(iter(self._servers))
        outcome.delete_and_check(self.bench)

    def _run_round(self) -> None:
        """Send requests, wait until all actions have ended, and check the cloud."""
        bench = self.bench
        for host in bench.cloud.hosts.values():
            for guest in host.driver.host.guests.values():
                guest.has_agent = True
        self._faults_left, self._probability = MOST_FAULTS, self.rng.choice(CHANCES)
        bench.watchers.append(self._inject_by_chance)
        for server in self._choose_servers():
            self._send_request(server)
        bench.extend_fault()
        bench.settle(outcome.MOVE_SECONDS)
        bench.watchers.clear()
        outcome.heal(bench)
        outcome.power_on_hosts(bench)
        outcome.check_at_rest(bench, list(self._servers))
        for server, incarnations in list(self._servers.items()):
            incarnations.check()
            row = bench.cloud.show(server)
            self._log(f"    {server[:4]} {row.vm_state}")
            if row.deleted:
                del self._servers[server]
            else:
                incarnations.open()

    def _choose_servers(self) -> list[str]:
        """Return the servers that get a request in this round. An empty name means a new server."""
        servers = list(self._servers)
        if not servers or (len(servers) < MOST_SERVERS and self.rng.random() < NEW_SERVER):
            servers.append("")
        return self.rng.sample(servers, self.rng.randint(1, len(servers)))

    def _send_request(self, server: str) -> None:
        """Create a server, or send a request that the server's state may allow."""
        trial, self.requests = self.bench.trial, self.requests + 1
        trial.server = server
        try:
            if not server:
                trial.begin()
                new_server = trial.server
                self._servers[new_server] = Incarnations(self.bench.cloud, lambda: new_server)
                self._log(f"{new_server[:4]} create")
                return
            request = self.rng.choice(self._list_possible_requests(server))
            self._log(f"{server[:4]} {request}")
            if request == "evacuate":
                self.bench.cloud.kill(self.bench.cloud.show(server).host)
            ask(self.bench.cloud, server, request)
        except errors.Problem as problem:
            assert 400 <= problem.status < 500, f"it is answered with {problem.status}"
            self._log(f"    refused: {problem.text}")

    def _list_possible_requests(self, server: str) -> list[str]:
        """Return the requests that the state of an idle server may allow."""
        server_row, hosts = self.bench.cloud.show(server), self.bench.cloud.hosts.values()
        return [
            request
            for request in SERVER_REQUESTS
            if any(
                row.vm == states.ANY or server_row.vm_state in row.vm
                for row in pairs.find_table_rows(request)
            )
            and (request != "detach_interface" or server_row.interfaces)
            and (request != "evacuate" or (server_row.host and all(host.is_on for host in hosts)))
        ]

    def _log(self, text: str) -> None:
        self.story.append(f"{self.bench.time.monotonic() - self._began:6.0f} s {text}")

    # --- faults ---
    def _inject_by_chance(self, point: Point) -> None:
        """Inject a random fault at the point, with the probability of this round."""
        possible = self.bench.running and self._faults_left and self._list_faults_at(point)
        if not possible or self.rng.random() >= self._probability:
            return
        inject = self.rng.choice(possible)
        self._faults_left -= 1
        self.faults += 1
        self._log(f"    {' '.join(map(str, point[:5]))[:90]}: {inject.__name__.strip('_')}")
        self.bench.extend_fault()
        inject(self, point)

    def _list_faults_at(self, point: Point) -> tuple[Injection, ...]:
        """Return the faults that are possible at a point."""
        match point:
            case ("agent", _, _, _, "before"):
                return AT_COMMAND
            case ("agent", _, _, _, "entered" | "writes" | "left"):
                return INSIDE_VERB
            case ("agent", *_):
                return (Soak._kill_agent,)
            case ("conductor", _, _, where) if where in OUTSIDE:
                return BETWEEN_TRANSACTIONS
            case ("part", _, _, "call", "begins"):
                return AT_CALL
            case ("conductor" | "part", *_):
                return (Soak._kill_conductor,)
            case ("journal", *_):
                return (Soak._fail_transaction,)
            # A commit with journal entries.
            case ("commit", _, (_, *_)):
                return (Soak._drop_connection,)
            case ("select", *_):
                return (Soak._lose_request, Soak._restart_scheduler)
            case ("send", *_):
                return (Soak._lose_command, Soak._lose_report)
        return ()

    def _kill_agent(self, point: Point) -> None:
        kill_at_point(point[1])(point)

    def _refuse_command(self, point: Point) -> None:
        host = self.bench.cloud.hosts[point[1]]
        host.driver.host.script[point[2]] = [Fail("It broke.")]

    def _cut_power(self, point: Point) -> None:
        """Cut the power of the host. An admin forces the host down after the end of the lease."""
        bench, host = self.bench, self.bench.cloud.hosts[point[1]]
        # No fault is injected into the power cut itself.
        faults_left, self._faults_left = self._faults_left, 0
        host.power_cut()
        self._faults_left = faults_left
        bench.schedule(at_hosts.LEASE_SECONDS, lambda: bench.cloud.force_down(host.name))
        kill_at_point(host.name)(point)

    def _cut_network(self, point: Point) -> None:
        bench, host = self.bench, str(point[1])
        bench.cloud.cut.add(host)
        bench.schedule(at_hosts.LEASE_SECONDS, lambda: bench.cloud.cut.discard(host))

    def _suspend_agent(self, point: Point) -> None:
        asleep = [f"work {point[1]}", f"sync {point[1]}"]
        self.bench.pass_time(at_hosts.LEASE_SECONDS, asleep=asleep)

    def _interrupt_hypervisor(self, point: Point) -> None:
        raise errors.Unavailable("The hypervisor went away.")

    def _kill_conductor(self, point: Point) -> None:
        kill_at_point(CONDUCTOR)(point)

    def _suspend_conductor(self, point: Point) -> None:
        """Suspend the conductor while another does its work."""
        with self.bench.run_another_conductor():
            self.bench.pass_time(at_hosts.LEASE_SECONDS)

    def _fail_transaction(self, point: Point) -> None:
        raise make_error(self.rng.choice((DEADLOCK, LOCK_WAIT, GONE)))

    def _drop_connection(self, point: Point) -> None:
        raise make_error(GONE)

    def _lose_request(self, point: Point) -> None:
        raise errors.NoAnswer("lost")

    def _restart_scheduler(self, point: Point) -> None:
        at_scheduler.restart_scheduler(self.bench)
        raise errors.NoAnswer("lost")

    def _lose_command(self, point: Point) -> None:
        at_hosts.lose_next_message(self.bench, "do")

    def _lose_report(self, point: Point) -> None:
        at_hosts.lose_next_message(self.bench, "sync")

    def _find_call(self, point: Point) -> Cell:
        return Cell(point[1], point[2], Kind.EXTERNAL, "")

    def _fail_call(self, point: Point) -> None:
        """Let the next request of the call be refused, or stay without an answer."""
        at_services.script_next_call(self.bench, self._find_call(point), self.rng.choice(ANSWERS))

    def _silence_service(self, point: Point) -> None:
        at_services.silence_called_service(self.bench, self._find_call(point))

    def _delay_answer(self, point: Point) -> None:
        self.bench.pass_time(at_services.LATE_SECONDS)

    def _delay_effect(self, point: Point) -> None:
        at_services.delay_next_effect(self.bench, self._find_call(point))

    def _request_meanwhile(self, point: Point) -> None:
        """Request another action of a busy server, and check the answer."""
        busy = [server for server in self._servers if self.bench.cloud.show(server).action]
        if busy:
            server, request = self.rng.choice(busy), self.rng.choice(SERVER_REQUESTS)
            self._log(f"        {server[:4]} {request}")
            pairs.request_meanwhile(self.bench, server, request)


Injection = Callable[[Soak, Point], object]
AT_COMMAND: tuple[Injection, ...] = (
    Soak._kill_agent,
    Soak._refuse_command,
    Soak._cut_power,
    Soak._cut_network,
    Soak._suspend_agent,
    Soak._request_meanwhile,
)
INSIDE_VERB: tuple[Injection, ...] = (Soak._kill_agent, Soak._interrupt_hypervisor)
BETWEEN_TRANSACTIONS: tuple[Injection, ...] = (Soak._kill_conductor, Soak._suspend_conductor)
AT_CALL: tuple[Injection, ...] = (
    Soak._fail_call,
    Soak._silence_service,
    Soak._delay_answer,
    Soak._delay_effect,
    Soak._request_meanwhile,
)
