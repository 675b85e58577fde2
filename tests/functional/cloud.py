# SPDX-License-Identifier: Apache-2.0
"""A cloud in one process, with a real broker and database.

Conductors, schedulers and agents run with their threads, and the hypervisors are in memory. The
transports count messages and can lose them (``messages``). SQL statements are counted for each part
of each process. In place of the API, ``Cloud`` calls ``Creator`` and ``actions.begin``, and sends
the wakeup message.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from common.domain import ids, states
from common.domain.clock import Clock
from common.domain.context import RequestContext
from common.domain.errors import Unavailable
from common.domain.models import Access, Flavor, HostInventory
from common.domain.service_binaries import Binary
from common.domain.wire import to_wire
from common.rpc import agent as agent_rpc
from common.rpc import conductor as conductor_rpc
from common.rpc import scheduler as scheduler_rpc
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide, HostSide
from common.rpc.transport import Transport
from common.security.host_keys import AllKeys, Purpose
from common.security.image_tickets import Gateway, Tickets
from common.security.vault import Vault
from common.service import config
from common.service.notification_options import BOTH, NotificationSettings
from common.store import schema
from common.store.engine import Store
from common.store.hosts import host_keys, services
from common.store.servers import actions
from common.store.tenants import server_groups
from compute_agent.image_access import ImageGatewayAccess
from compute_agent.journal import Journal
from compute_agent.service import AgentProcess
from compute_agent.sync import Agent
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from compute_api.compute.request.creation import Creation, Creator
from conductor.engine.workflow_engine import WorkflowEngine
from conductor.hosts import prefetch
from conductor.hosts.sync_cookies import SyncCookies
from conductor.notifications import notices as notifications
from conductor.notifications.notification_sender import NotificationSender, NotificationTransport
from conductor.service import Conductor, Messages
from conductor.workflows import WORKFLOWS
from deploy.operator import doctor
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from scheduler.service import OneAtATime, options
from tests import evidence, failures
from tests.functional.messages import LossyControlSide, LossyHostSide, Network, PrivateTransport
from tests.waiting import await_true
from tests.workflows.networks import Networks

USER = RequestContext(user_id="user", project_id="project", roles=("member",), request_id="req-1")
FLAVOR = Flavor("1", "m1.nano", 1, 128, 1)
KEY_SECRETS = {Purpose.COMMAND: "conductors' secret", Purpose.QUERY: "everybody's secret"}
#: Limit for closing all transports. Each waits some seconds for its connections.
CLOSE_SECONDS = 60
QUOTA = {"instances": -1, "cores": -1, "ram": -1, "server_group_members": -1}


def _close_all(transports: Sequence[Any]) -> None:
    """Close the transports in parallel.

    Raises:
        AssertionError: A transport does not close in time. The message has the stack of its thread,
            which remains.
    """
    threads = [threading.Thread(target=transport.close, daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    frames = sys._current_frames()
    hang = [
        frames[thread.ident] for thread in threads if thread.is_alive() and thread.ident in frames
    ]
    assert not hang, "\n".join("".join(traceback.format_stack(frame)) for frame in hang)


class NoImages(ImageGatewayAccess):
    """The image access of a cloud without an image service."""

    def download(self, access: Access, image: str) -> Iterator[bytes]:
        raise Unavailable("this cloud has no image service")


class Cloud:
    """A cloud with a thread for each process. ``start_*`` starts a process, ``close`` ends all."""

    def __init__(self, database: str, broker: str, folder: Path) -> None:
        self.conf = config.load()
        self.network, self._database, self._broker, self._folder = (
            Network(),
            database,
            broker,
            folder,
        )
        self.ports = Networks()
        self.statements: Counter[str] = Counter()
        self.drivers: dict[str, MemoryDriver] = {}
        self._closers: list[Callable[[], Any]] = []
        self._stoppers: list[Callable[[], Any]] = []
        self._transports: list[Any] = []
        self.watcher = Store(database)
        self._closers.append(self.watcher.close)
        self.store = self._store("api")
        self._creator = Creator(self.store, QUOTA)
        self.wakeup = conductor_rpc.ConductorWakeup(self._transport())  # type: ignore[arg-type]  # the same interface
        failures.register(self)

    def _transport(self) -> Any:
        transport = PrivateTransport(Transport(self.conf, self._broker), self.network)
        self._transports.append(transport)
        return transport

    def _control_side(self, store: Store) -> Any:
        keys = AllKeys(KEY_SECRETS, lambda: store.read(host_keys.generations), Clock())
        return self._lossy(
            LossyControlSide, ControlSide(opener(self.conf, self._broker), keys, self.network.name)
        )

    def _host_side(self, name: str) -> Any:
        """Create the key of a host, and return its end of the messages with conductors."""
        self.watcher.write(lambda tx: host_keys.ensure(tx, name))
        keys = AllKeys(
            KEY_SECRETS, lambda: self.watcher.read(host_keys.generations), Clock()
        ).for_host(name)
        return self._lossy(
            LossyHostSide, HostSide(opener(self.conf, self._broker), keys, name, self.network.name)
        )

    def _lossy(self, kind: type[Any], real: Any) -> Any:
        self._transports.append(kind(real, self.network))
        return self._transports[-1]

    def _store(self, process: str) -> Store:
        """Return a store that counts its statements, except BEGIN.

        The statements of a conductor are counted by thread, all others by process.
        """
        store = Store(self._database)
        self._closers.append(store.close)

        @sa.event.listens_for(store.engine, "before_cursor_execute")
        def count(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
            if not statement.startswith("BEGIN"):
                self.statements[
                    process if process != "conductor" else threading.current_thread().name
                ] += 1

        return store

    def start_conductor(
        self, name: str = "c1", notification_transport: NotificationTransport | None = None
    ) -> Conductor:
        """Start a conductor.

        With ``notification_transport``, send notifications in both formats there.
        """
        owner = f"{name}/1"
        store, transport = self._store("conductor"), self._transport()
        link = self._control_side(store)
        post = Messages(transport, link, Gateway("http://127.0.0.1:1", Tickets(Vault("key"))))
        store.notify_with(NotificationSettings(name) if notification_transport else None)
        sender = (
            NotificationSender(store, Clock(), notification_transport, owner, BOTH, 1000)
            if notification_transport
            else None
        )
        engine = WorkflowEngine(
            store,
            Clock(),
            post,
            owner,
            workflows=WORKFLOWS,
            notices=notifications.of,
            chores=(prefetch.CHORE,),
            shutdown_timeout=0,
            networks=self.ports,
        )
        conductor = Conductor(engine, post, SyncCookies(KEY_SECRETS[Purpose.COMMAND]), sender)
        store.write(lambda tx: services.enrol(tx, name, Binary.CONDUCTOR))
        conductor_rpc.serve(transport, owner, conductor)
        conductor_rpc.listen(link, conductor)
        threads = conductor.start(
            conductor_rpc.ConductorWakeup(transport, server=owner, method="loop_back")
        )
        self._stoppers += [lambda: [thread.join(5) for thread in threads], conductor.close]
        return conductor

    def start_scheduler(self, name: str = "s1") -> None:
        hosts = Hosts(self._store("scheduler"), Clock())
        scheduler_rpc.serve(
            self._transport(), f"{name}/1", OneAtATime(Proposals(hosts, options(self.conf)))
        )

    def start_agent(
        self, name: str, journal: Journal | None = None, size: HostInventory | None = None
    ) -> None:
        """Start an agent, and wait until the host is registered."""
        self._begin_agent(name, journal, size)
        self._await_up({name})

    def _begin_agent(
        self, name: str, journal: Journal | None = None, size: HostInventory | None = None
    ) -> None:
        driver = self.drivers[name] = MemoryDriver(MemoryHost(name, inventory=size))
        journal, link = journal or Journal(self._folder / name / "agent.db"), self._host_side(name)
        agent = Agent(name, journal, Clock(), driver.boot_id())
        host = AgentProcess(agent, journal, driver, conductor_rpc.ConductorClient(link), NoImages())
        agent_rpc.serve(link, host)
        host.start(4)
        self._stoppers.append(host.close)
        self._closers += [journal.close, driver.close]

    def _await_up(self, hosts: set[str]) -> None:
        def list_up_hosts() -> set[str]:
            rows = self.watcher.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE))
            return {row.host for row in rows if row.up and not row.forced_down}

        self.await_true(
            lambda: hosts <= list_up_hosts(), 20, f"hosts {', '.join(sorted(hosts))} register"
        )

    def start(
        self,
        hosts: int = 1,
        conductors: int = 1,
        schedulers: int = 1,
        sizes: Sequence[HostInventory] = (),
    ) -> None:
        """Start all processes. ``sizes`` replaces ``hosts`` and has the inventory of each host."""
        for number in range(1, conductors + 1):
            self.start_conductor(f"c{number}")
        for number in range(1, schedulers + 1):
            self.start_scheduler(f"s{number}")
        names = {f"h{number}": size for number, size in enumerate(sizes or [None] * hosts, 1)}
        for name, size in names.items():
            self._begin_agent(name, size=size)
        self._await_up(set(names))

    def close(self) -> None:
        """Stop the threads, newest first, then close the transports, the stores and journals.

        The transports are closed in parallel, because each waits for idle connections.
        """
        for stop in reversed(self._stoppers):
            stop()
        _close_all(self._transports)
        for close in reversed(self._closers):
            close()

    # --- requests, in place of the API ---
    def create(
        self,
        count: int = 1,
        networks: Sequence[dict[str, Any]] = (),
        *,
        flavor: Flavor = FLAVOR,
        group: str | None = None,
        host: str | None = None,
    ) -> list[str]:
        servers = [ids.new() for _ in range(count)]
        args = {"networks": list(networks), **({"host": host} if host else {})}
        self._creator.create(
            Creation(
                "project",
                "user",
                flavor.vcpus,
                flavor.memory_mb,
                count,
                count,
                "r-1",
                lambda assignment: _make_rows(servers, args, flavor, group),
                group=group,
            )
        )
        self.wakeup.wake()
        return servers

    def group(self, policy: str, **rules: Any) -> str:
        """Create a server group of the project, and return its id."""
        return str(
            self.store.write(
                lambda tx: server_groups.create(
                    tx,
                    {
                        "project_id": "project",
                        "user_id": "user",
                        "name": "g",
                        "policy": policy,
                        "rules": rules,
                    },
                )
            ).id
        )

    def begin_action(self, server: str, key: str, value: str | None = None) -> None:
        row = states.action(key, value)
        assert row is not None
        self.store.write(
            lambda tx: actions.begin(tx, row, server, context=USER, project_id="project")
        )
        self.wakeup.wake()

    # --- views of users and operators ---
    def state(self, server: str) -> tuple[str, str | None]:
        row = self.watcher.read(
            lambda tx: tx.execute(
                sa.select(schema.servers.c.vm_state, schema.servers.c.task_state).where(
                    schema.servers.c.id == server
                )
            ).one()
        )
        return row.vm_state, row.task_state

    def await_state(
        self,
        servers: list[str],
        vm_state: str,
        seconds: float = 20,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> float:
        """Wait until all servers have this state and no task, and return the seconds that passed.

        ``meanwhile`` is called before each look.
        """
        began = time.monotonic()

        def is_reached() -> bool:
            meanwhile()
            return all(self.state(server) == (vm_state, None) for server in servers)

        self.await_true(
            is_reached, seconds, f"{vm_state}; they are {Counter(map(self.state, servers))}"
        )
        return time.monotonic() - began

    def await_true(self, condition: Callable[[], Any], seconds: float, story: str) -> None:
        await_true(condition, seconds, story)

    def await_idle(self) -> None:
        """Wait until no action and no pending guest removal is left."""

        def is_idle() -> bool:
            ages = self.watcher.read(doctor.ages)
            return not ages["actions"] and not ages["removals"]

        self.await_true(is_idle, 20, "no action and no removal is left")

    def await_quiet(self) -> None:
        """Wait until the cloud is idle, without statements and messages for 50 ms."""
        self.await_idle()
        last, since = None, time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            now = (self.statements.total(), self.network.sent.total())
            if now != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > 0.05

        self.await_true(is_quiet, 10, "a quiet moment")

    def findings(self) -> list[doctor.Finding]:
        """Return the doctor's findings about the database and the domains of the hypervisors."""
        domains = {
            name: {state.server: state.power_state for state in driver.domains()}
            for name, driver in self.drivers.items()
        }
        return self.watcher.read(doctor.check) + self.watcher.read(
            lambda tx: doctor.compare(domains, tx)
        )

    def count_commands(self, verb: str) -> Counter[str]:
        """Return how often the hosts executed a verb, by server."""
        return Counter(
            server
            for driver in self.drivers.values()
            for name, server in list(driver.host.calls)
            if name == verb
        )

    # --- the output of a failed test: failures.Diagnosable ---
    def bookmark(self) -> None:
        """Return no bookmark, because the cloud exists for one test only."""

    def diagnosis(self, since: None) -> dict[str, Callable[[], list[str]]]:
        return {
            "actions in hand": lambda: evidence.actions_in(self.watcher),
            "doctor, at one look": lambda: evidence.describe_findings(self.findings()),
        }


def _make_rows(
    ids_of_servers: list[str], args: dict[str, Any], flavor: Flavor, group: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the servers and of their create actions, as the API writes them."""
    servers, rows = [], []
    for server in ids_of_servers:
        action = ids.new()
        servers.append(
            {
                "id": server,
                "project_id": "project",
                "user_id": "user",
                "name": "s",
                "hostname": "s",
                "fence": 1,
                "vm_state": states.BUILDING,
                "task_state": states.SCHEDULING,
                "action": action,
                "flavor_id": "1",
                "flavor": to_wire(flavor),
                "vcpus": flavor.vcpus,
                "memory_mb": flavor.memory_mb,
                "disk_gb": flavor.disk_gb,
                "meta": {},
                "tags": [],
                "scheduler_hints": {"group": group} if group else {},
                "security_groups": [],
                "reservation_id": "r-1",
                "interfaces": [] if args["networks"] else None,
            }
        )
        rows.append(
            {
                "id": action,
                "server_id": server,
                "project_id": "project",
                "user_id": "user",
                "request_id": ids.new_request(),
                "name": "create",
                "workflow": "create",
                "fence": 1,
                "args": args,
            }
        )
    return servers, rows
