# SPDX-License-Identifier: Apache-2.0
"""A simulated cloud in one thread.

Conductor, agent, scheduler and store are the real ones, with hosts and external services in memory.
``Cloud`` delivers the messages between them and can lose any of them. The clock advances under
control of the test. A fault point can raise ``Crash`` to kill the process that reaches it. Each
round of ``settle`` does the work of the services' threads once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from common.domain import hardware, states
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.domain.errors import Forbidden, NoAnswer, Unavailable
from common.domain.models import (
    Command,
    Flavor,
    Heartbeat,
    HeartbeatAnswer,
    ImageRef,
    NumaNode,
    RequestSpec,
    Selection,
    Sync,
    SyncAnswer,
)
from common.domain.service_binaries import Binary
from common.domain.statuses import GuestState, MigrationType
from common.domain.wire import from_wire, to_wire
from common.security.vault import Vault
from common.service import config
from common.store import cleanups as store_cleanups
from common.store import schema
from common.store.engine import Store, insert_many, now
from common.store.hosts import services
from common.store.servers import actions, migrations
from common.store.servers import shares as mappings
from common.store.servers.volumes import WantedVolume
from common.store.tenants import server_groups
from compute_agent import verbs
from compute_agent.journal import Journal
from compute_agent.sync import Agent, Work
from compute_agent.verb_context import Part, Peer, VerbContext, VerbFailed
from compute_agent.verbs import PeerOpener, no_peer
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from conductor.engine import reports, runner
from conductor.engine.engine import Lane
from conductor.engine.sweep import Watch, sweep
from conductor.engine.workflow_engine import WorkflowEngine
from conductor.hosts import prefetch
from conductor.hosts.host_actions import HostActions
from conductor.notifications import notices as notifications
from conductor.steps import cleanups
from conductor.workflows import WORKFLOWS
from deploy.operator import doctor
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from scheduler.selection import SelectionOptions
from scheduler.service import options
from tests import evidence, failures
from tests.workflows import new_servers
from tests.workflows import volumes as volume_service
from tests.workflows.images import Images
from tests.workflows.networks import Networks
from tests.workflows.shares import Shares
from tests.workflows.volumes import Volumes

USER = RequestContext(user_id="user", project_id="project", roles=("member",), request_id="")
FLAVOR = new_servers.FLAVOR
ALL_LANES = (Lane.INSIDE, *WORKFLOWS.lanes)
ROUND_SECONDS = 5
_SERVER = sa.select(schema.servers).where(schema.servers.c.id == sa.bindparam("server"))
#: One statement in place of one transaction per lane, because most lanes have no due action.
_DUE_STEPS = (
    sa.select(schema.actions.c.step)
    .where(schema.actions.c.due_at <= now(), schema.actions.c.state == "due")
    .distinct()
)
#: One statement in place of two transactions, because both tables are empty in most rounds.
_CHORES = sa.select(
    sa.exists().select_from(schema.cleanups), sa.exists().select_from(schema.host_actions)
)
#: Hosts with guests to remove, and NULL if an action runs: the same rows as in ``doctor.ages``.
_OWING = sa.union(
    sa.select(schema.guests.c.host).where(schema.guests.c.wanted == GuestState.ABSENT),
    sa.select(sa.null())
    .select_from(schema.actions)
    .where(schema.actions.c.state.in_(actions.LIVE)),
)


class Crash(BaseException):
    """A process died at a fault point."""


class Time:
    """The clock of the database and of every process. Each reading adds a microsecond."""

    #: Seconds for which a conductor answers heartbeats from the rows that it has read. This is less
    #: than a round takes.
    look = 0.9

    def __init__(self) -> None:
        self.micros = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        self.micros += 1
        return self.micros

    def monotonic(self) -> float:
        return self.micros / SECOND

    def pass_by(self, seconds: float) -> None:
        self.micros += int(seconds * SECOND)


def ignore_cancel_check(point: str) -> None:
    """Do nothing: the default of ``Host.inside``."""


def _read_due_lanes(tx: sa.Connection) -> list[str]:
    lanes_with_work = {WORKFLOWS.lane_of.get(step, Lane.INSIDE) for step in tx.scalars(_DUE_STEPS)}
    return [lane for lane in ALL_LANES if lane in lanes_with_work]


def _read_chores(tx: sa.Connection) -> tuple[bool, bool]:
    """Return whether pending cleanups exist, and whether host actions exist."""
    has_cleanups, has_host_actions = tx.execute(_CHORES).one()
    return bool(has_cleanups), bool(has_host_actions)


def _read_owing(tx: sa.Connection) -> set[str] | None:
    """Return the hosts with guests to remove, or None if an action runs."""
    hosts = set(tx.scalars(_OWING))
    return None if None in hosts else hosts


class OtherHost:
    """Implement ``Peer``: the files of a guest on another host of the simulated cloud."""

    def __init__(self, driver: MemoryDriver, server: str, secret: str) -> None:
        self._driver, self._server, self._secret = driver, server, secret

    def parts(self) -> list[Part]:
        try:
            return self._driver.parts(self._server, self._secret)
        except Forbidden as problem:
            raise VerbFailed(problem.text, retryable=True) from problem

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        return self._driver.read_part(self._server, self._secret, name)


class Host:
    """A host: an agent with its journal, and a hypervisor in memory."""

    def __init__(
        self,
        name: str,
        time: Time,
        images: Images,
        peer: PeerOpener = no_peer,
        storage: str = "",
        reachable: MutableMapping[str, MemoryHost] | None = None,
    ) -> None:
        self.name, self.time, self.images, self.peer, self.is_on = name, time, images, peer, True
        self.driver = MemoryDriver(
            MemoryHost(name, vcpus=16, memory_mb=8192, disk_gb=100, script={}, storage=storage)
        )
        self.driver.host.size = replace(
            self.driver.host.size,
            pcpus=4,
            numa_nodes=[
                NumaNode(0, list(range(8)), [16, 17], 4096),
                NumaNode(1, list(range(8, 16)), [18, 19], 4096),
            ],
            facts={**self.driver.host.size.facts, "transfer": name},
        )
        self.driver.host.reachable = {} if reachable is None else reachable
        self.driver.host.reachable[self.driver.host.uri] = self.driver.host
        self.journal = Journal(":memory:")
        self.carry_out_verb = verbs.carry_out
        self.fault_point: Callable[[str, str, str], None] = verbs.nothing
        # Called when a running verb checks whether its command is cancelled.
        self.inside: Callable[[str], None] = ignore_cancel_check
        self.restart()

    def restart(self) -> None:
        """Replace the agent by a new one with the same journal, as after kill -9."""
        self.agent = Agent(self.name, self.journal, self.time, self.driver.boot_id())

    def look(self) -> None:
        """Record inventory and files without a domain in the agent, for a full report."""
        self.agent.record_host(self.driver.inventory(), None, self.driver.files_alone())

    def power_cut(self) -> None:
        """Cut the power: no guest runs, and neither conductors nor other hosts reach the host."""
        self.is_on = False
        self.driver.host.reboot()
        self.driver.host.reachable.pop(self.driver.host.uri, None)

    def power_on(self) -> None:
        """Restore the power and start the agent. The disks are unchanged."""
        self.is_on = True
        self.driver.host.reachable[self.driver.host.uri] = self.driver.host
        self.restart()

    def work(self) -> None:
        """Power off domains that must be off, then run the agent's commands."""
        while (server := self.agent.take_stop()) is not None:
            self.driver.pull_plug(server)
            self.agent.record_stop(server, True)
        while (work := self.agent.take()) is not None:
            self.carry_out(work)

    def carry_out(self, work: Work) -> None:
        """Run a command and record the result, as a worker thread does."""
        context = VerbContext(
            lambda name: None,
            lambda: self._is_cancelled(work),
            lambda: work.requested,
            may_start=lambda: self.agent.may_start(work),
        )
        tools = verbs.Tools(
            self.driver, lambda image: iter(()), self.images.writer, context, self.peer
        )
        self.agent.record_result(
            work,
            verbs.run(
                self.journal, tools, work.command, work.verb, self.fault_point, self.carry_out_verb
            ),
        )

    def _is_cancelled(self, work: Work) -> bool:
        self.inside("asks")
        return work.cancelled


@cache
def default_selection_options() -> SelectionOptions:
    """Return the scheduler's default options, from a configuration without files.

    The configuration of the process is not used, because other libraries may have registered
    options without a default there.
    """
    conf = cfg.ConfigOpts()
    config.register(conf)
    conf([], default_config_files=[], default_config_dirs=[])
    return options(conf)


def lose_no_message(kind: str) -> bool:
    return False


def watch_no_round() -> None:
    pass


class Cloud:
    """A simulated cloud: store, conductor, scheduler, hosts h1, h2, ... and external services.

    The cloud delivers all messages. ``lose`` receives the kind of each message, for example "do",
    and returns True if the message is lost. ``cut`` contains the hosts that are cut off from the
    network. ``sent`` lists the commands that were sent, with their hosts.
    """

    def __init__(self, store: Store, time: Time, hosts: int = 2, storage: str = "") -> None:
        self.store, self.time = store, time
        self.images, self.networks, self.shares = Images(), Networks(), Shares()
        self.volumes = Volumes()
        self.cut: set[str] = set()
        self.equip(hosts, storage)
        self.scheduler = Proposals(Hosts(store, time), default_selection_options())
        self.lose: Callable[[str], bool] = lose_no_message
        self.sent: list[tuple[str, Command]] = []
        self.to_cache: list[tuple[str, list[str]]] = []
        self.options: dict[str, Any] = {
            "workflows": WORKFLOWS,
            "notices": notifications.of,
            "chores": (prefetch.CHORE,),
            "shutdown_timeout": 0,
            "images": self.images,
            "networks": self.networks,
            "shares": self.shares,
            "volumes": self.volumes,
            "vault": Vault("key"),
            "shelved_offload_time": -1,
        }
        # Called after each round.
        self.watcher: Callable[[], None] = watch_no_round
        # Rows changed by sweeps that wrote only heartbeats.
        self._beats = 0
        self.engine = self.conductor("c1/1")
        self.watch = Watch()
        self.host_actions = HostActions(self.engine)
        failures.register(self)

    def equip(self, hosts: int, storage: str = "") -> None:
        """Replace the hosts, before the first round.

        Args:
            hosts: Number of hosts.
            storage: Name of the storage that all hosts share, or "" for local disks.
        """
        # Destinations that a live migration of this cloud can reach, by URI.
        reachable: dict[str, MemoryHost] = {}
        self.hosts = {
            name: Host(name, self.time, self.images, partial(self.peer, name), storage, reachable)
            for name in (f"h{n}" for n in range(1, hosts + 1))
        }

    def conductor(self, owner: str) -> WorkflowEngine:
        """Return a new conductor of this cloud under this owner name."""
        engine = WorkflowEngine(self.store, self.time, self, owner, **self.options)
        engine.heartbeats.good_for = self.time.look
        return engine

    def peer(self, requester: str, address: str, server: str, secret: str) -> Peer:
        """Return access to a server's files on another host.

        Args:
            requester: The host that requests the files.
            address: The host with the files.
            server: The server's id.
            secret: The secret of the transfer.

        Raises:
            Unavailable: Either host is cut off, or the other host is off.
        """
        if {requester, address} & self.cut or not self.hosts[address].is_on:
            raise Unavailable(f"{address} does not answer")
        return OtherHost(self.hosts[address].driver, server, secret)

    # --- Messaging: messages of the conductor ---
    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        if self.lose("select"):
            raise NoAnswer("lost")
        return self.scheduler.select(
            [from_wire(RequestSpec, to_wire(spec)) for spec in specs], fresh
        )

    def do(self, host: str, commands: list[Command]) -> None:
        self.sent += [(host, command) for command in commands]
        if not self.lose("do") and self.is_heard(host):
            self.hosts[host].agent.accept(
                from_wire(Command, to_wire(command)) for command in commands
            )

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        if not self.lose("cache_images"):
            self.to_cache.append((host, [image.id for image in images]))

    def is_heard(self, host: str) -> bool:
        """Return True if the host exists, is on, and is not cut off from the network."""
        return host in self.hosts and self.hosts[host].is_on and host not in self.cut

    # --- the work of the processes ---
    def sync(self, host: Host, ask: bool = True) -> None:
        """Send a heartbeat of the host, or do an exchange if the heartbeat does not suffice.

        Args:
            host: The host.
            ask: False to exchange a report at once, without a request for commands.
        """
        if ask and self._is_idle(host):
            return
        registration = host.agent.needs_registration()
        full = registration or host.agent.wants_full_report()
        if full:
            host.look()
        request = host.agent.request(
            ask or registration,
            host.driver.domains() if full else None,
            host.driver.inventory() if registration else None,
        )
        if self.lose("sync"):
            return
        answer = self.exchange(request)
        if not self.lose("answer"):
            host.agent.record_answer(request, answer)

    def exchange(self, request: Sync) -> SyncAnswer:
        """Return a conductor's answer to a host's report, or raise the conductor's exception."""
        answer = reports.handle(self.engine, [request])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _is_idle(self, host: Host) -> bool:
        """Send a heartbeat if possible. Return True if the exchange is unnecessary."""
        if host.agent.is_look_due():
            host.look()
            host.agent.record_domains(host.driver.domains())
        beat = host.agent.heartbeat()
        if beat is None or self.lose("heartbeat"):
            return False
        answer = self.answer_heartbeat(from_wire(Heartbeat, to_wire(beat)))
        host.agent.record_heartbeat_answer(answer)
        return answer.nothing

    def answer_heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        return HeartbeatAnswer(self.engine.heartbeats.answer(beat))

    def round(self) -> None:
        """Run conductor, hosts, sweep, cleanups and host actions once. Then a second passes."""
        self.advance()
        for host in list(self.hosts.values()):
            if host.is_on:
                host.work()
            if self.is_heard(host.name):
                self.sync(host)
        self.sweep(list(filter(self.is_heard, self.hosts)))
        has_cleanups, has_host_actions = self.store.read(_read_chores)
        if has_cleanups:
            cleanups.retry(self.engine)
        if has_host_actions:
            self.host_actions.advance()
        self.watcher()
        self.time.pass_by(1)

    def sweep(self, heard: list[str], hears_itself: bool = True) -> None:
        """Run a sweep. If the sweep wrote only heartbeats, ``changes`` leaves the rows out.

        Args:
            heard: Hosts with a report or heartbeat since the last sweep.
            hears_itself: True if the conductor receives its own messages.
        """
        before = self.changes()
        sweep(self.engine, self.watch, heard, hears_itself)
        after = self.changes()
        if before is not None and after == before + len(heard) + 1:  # each host, the conductor
            self._beats += len(heard) + 1

    def changes(self) -> int | None:
        """Count the rows changed through the database connection, without mere heartbeats.

        Returns:
            The number, or None for a database with more than one connection.
        """
        if not isinstance(self.store.engine.pool, sa.StaticPool):
            return None
        with self.store.engine.connect() as tx:
            database: Any = tx.connection.dbapi_connection
        return int(database.total_changes) - self._beats

    def advance(self) -> None:
        """Advance the actions of every lane until no action is due."""
        while due := self.store.read(_read_due_lanes):
            if not sum(runner.advance(self.engine, lane) for lane in due):
                return  # The due actions are leased by another conductor, or unknown here.

    def idle(self, seconds: int) -> None:
        """Let time pass in rounds of ``ROUND_SECONDS``, the pace of an agent's heartbeats."""
        for _ in range(seconds // ROUND_SECONDS):
            self.time.pass_by(ROUND_SECONDS - 1)
            self.round()

    def settle(self, limit: int = 80) -> None:
        """Run rounds until no action runs and no reachable host has a guest to remove.

        Args:
            limit: Maximum number of rounds. The test fails if more are necessary.
        """
        for _ in range(limit):
            self.round()
            hosts = self.store.read(_read_owing)
            if hosts is not None and not any(
                host not in self.hosts or self.is_heard(host) for host in hosts
            ):
                return
        raise AssertionError(f"stuck after {limit} rounds: {self.store.read(doctor.ages)}")

    def clean_up(self) -> None:
        """Settle, try all pending cleanups once more, and check that all are done.

        A cleanup of a call that may still complete is awaited.
        """
        self.settle()
        rows = self.store.read(store_cleanups.list_all)
        for row in rows:
            self.store.write(lambda tx, row=row: store_cleanups.hasten(tx, row.id))
        if any(row.kind in store_cleanups.LATE for row in rows):
            self.idle(store_cleanups.LATE_CALL // SECOND)
        self.round()
        assert self.pending() == []

    def pending(self) -> list[tuple[str, str]]:
        """Return kind and target of each pending cleanup."""
        return [(row.kind, row.target) for row in self.store.read(store_cleanups.list_all)]

    def restart_conductor(self) -> None:
        """Replace the conductor by a new one with the same name, as after kill -9."""
        self.engine = self.conductor("c1/1")
        self.watch = Watch()
        self.host_actions = HostActions(self.engine)
        self.store.write(lambda tx: actions.free_leases_of(tx, "c1/1"))

    # --- requests of users and operators ---
    def create(
        self,
        count: int = 1,
        networks: list[dict[str, Any]] | None = None,
        *,
        flavor: Flavor = FLAVOR,
        group: str | None = None,
        disks: dict[str, Any] | None = None,
        volumes: Sequence[WantedVolume] = (),
        **args: Any,
    ) -> list[str]:
        """Create servers, as the API does, and return their ids.

        Args:
            count: Number of servers.
            networks: The requested networks of each server. None: one interface in network n1.
            flavor: The flavor.
            group: Id of the server group, or None.
            disks: Local disks in place of those of the flavor.
            volumes: Volumes of the server, if there is only one server.
            args: Further arguments of the action, as the API stores them.
        """
        requested_networks = [{"network": "n1"}] if networks is None else networks
        rows = [
            new_servers.build_rows(
                requested_networks, flavor=flavor, group=group, disks=disks, **args
            )
            for _ in range(count)
        ]
        if any(volume.more.get("boot_index") == 0 for volume in volumes):
            for server, _ in rows:
                server["image"] = {"id": "", hardware.ON_VOLUME: True}
                server["disk_gb"] = hardware.on_host(flavor, server["image"]).disk_gb
        with self.store.begin() as tx:
            for server, action in rows:
                row = {**server, "volumes": len(volumes)}
                insert_many(tx, schema.servers, [row], "created_at", "updated_at")
                actions.insert(tx, [action])
                server_groups.join(
                    tx, [{"group_id": group, "server_id": server["id"]}] if group else []
                )
                volume_service.insert(tx, str(server["id"]), volumes)
        return [str(server["id"]) for server, _ in rows]

    def group(self, policy: str, **rules: Any) -> str:
        """Create a server group of the project and return the id."""
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

    def ask(
        self,
        server: str,
        key: str,
        value: str | None = None,
        args: dict[str, Any] | None = None,
        secrets: dict[str, Any] | None = None,
        changes: dict[str, Any] | None = None,
    ) -> str:
        """Request an action on a server, as the API does.

        Args:
            server: The server's id.
            key: Key of the action in ``states.ACTIONS``.
            value: The value of the action's body that selects a row, for example "SOFT".
            args: Arguments of the action.
            secrets: Arguments that are stored sealed.
            changes: Changes of the server's row.

        Returns:
            The action's id.
        """
        rows = [
            row
            for row in states.ACTIONS
            if row.key == key and (row.when is None or row.when[1] == value)
        ]
        sealed = self.engine.vault.seal(secrets) if secrets else None
        return self.accept(
            server,
            lambda tx: actions.begin(
                tx,
                rows,
                server,
                context=USER,
                project_id="project",
                args=args,
                secrets=sealed,
                changes=changes,
            ),
        )

    def move(self, server: str, key: str, flavor: Flavor | None = None, **args: Any) -> str:
        """Request a move of a server, as the API does, and return the action's id.

        Args:
            server: The server's id.
            key: Key of the action: "resize", "migrate", "os-migrateLive" or "evacuate".
            flavor: The new flavor of a resize.
            args: Further arguments of the action.
        """
        old = from_wire(Flavor, self.show(server).flavor)
        quota_changes = (
            {}
            if flavor is None
            else {
                "vcpus": max(old.vcpus, flavor.vcpus),
                "memory_mb": max(old.memory_mb, flavor.memory_mb),
            }
        )
        kinds = {
            "resize": MigrationType.RESIZE,
            "migrate": MigrationType.COLD,
            "os-migrateLive": MigrationType.LIVE,
            "evacuate": MigrationType.EVACUATION,
        }
        self.volumes.record_move(server, live=key == "os-migrateLive")
        return self.accept(
            server,
            lambda tx: migrations.begin(
                tx,
                states.row(key),
                server,
                kinds[key],
                context=USER,
                args=args,
                project_id="project",
                new_flavor=flavor,
                changes=quota_changes,
            ),
        )

    def attach_share(self, server: str, share_id: str, tag: str = "data") -> str:
        """Request that a share is attached, as the API does, and return the action's id."""
        return self.accept(
            server,
            lambda tx: mappings.attach(
                tx,
                states.row("attach_share"),
                server,
                context=USER,
                project_id="project",
                share={
                    "share_id": share_id,
                    "tag": tag,
                    "protocol": "NFS",
                    "export_location": "192.0.2.9:/shares/one",
                },
            ),
        )

    def detach_share(self, server: str, share_id: str) -> str:
        """Request that a share is detached, as the API does, and return the action's id."""
        return self.accept(
            server,
            lambda tx: mappings.detach(
                tx,
                states.row("detach_share"),
                server,
                context=USER,
                project_id="project",
                share_id=share_id,
            ),
        )

    def shares_of(self, server: str) -> dict[str, str]:
        """Return the status of each share of a server, by the share's id."""
        return {
            row.share_id: row.status
            for row in self.store.read(lambda tx: mappings.list_of(tx, server))
        }

    def close(self, server: str, key: str) -> str:
        """Request the confirm or revert of a move, and return the action's id."""
        return self.accept(
            server, lambda tx: migrations.close(tx, states.row(key), server, context=USER)
        )

    def accept(self, server: str, begin: Callable[[sa.Connection], str]) -> str:
        """Run the transaction that begins an action, as the API does, and return the action's id.

        If COMMIT is not answered, the store looks up whether the action has begun.
        """
        return self.store.write(begin, partial(actions.is_begun, server_id=server))

    def kill(self, host: str) -> None:
        """Cut the power of a host, and force the service down once it counts as down."""
        self.hosts[host].power_cut()
        self.until_down(host)
        self.force_down(host)

    def until_down(self, host: str) -> None:
        """Run rounds until the host, which must be silent, counts as down."""
        for _ in range(8):
            self.round()
            self.time.pass_by(5)
        assert not self.store.read(lambda tx: services.list_all(tx, host, Binary.COMPUTE))[0].up

    def force_down(self, host: str, down: bool = True) -> None:
        """Set or clear forced_down of a host's service, as an admin does."""
        row = self.store.read(lambda tx: services.list_all(tx, host, Binary.COMPUTE))[0]
        self.store.write(lambda tx: services.set_state(tx, row.uuid, forced_down=down))

    def migration(self, server: str) -> Any:
        """Return the newest migration of a server."""
        return self.store.read(lambda tx: migrations.page(tx, server_id=server, limit=1))[0]

    def show(self, server: str) -> Any:
        """Return the row of a server, which may be deleted."""
        return self.store.read(lambda tx: tx.execute(_SERVER, {"server": server}).one())

    def domains(self, server: str) -> list[str]:
        """Return the names of the hosts with a domain of the server."""
        return [
            host.name
            for host in self.hosts.values()
            if any(state.server == server for state in host.driver.domains())
        ]

    def findings(self) -> list[doctor.Finding]:
        """Return the doctor's findings on the records and on hosts and external services."""
        domains = {
            host.name: {state.server: state.power_state for state in host.driver.domains()}
            for host in self.hosts.values()
        }
        ports = list(self.networks.held.values())
        disks = {host.name: host.driver.guests_volumes() for host in self.hosts.values()}
        files = {host.name: host.driver.files_alone() for host in self.hosts.values()}
        return [
            *self.store.read(doctor.check),
            *self.store.read(lambda tx: doctor.compare_guests(disks, tx)),
            *self.store.read(lambda tx: doctor.compare(domains, tx)),
            *self.store.read(lambda tx: doctor.compare_ports(ports, tx)),
            *self.store.read(
                lambda tx: doctor.compare_volumes(self.volumes.list_attachments(), tx)
            ),
            *self.store.read(lambda tx: doctor.compare_files(files, tx)),
            *self.store.read(lambda tx: doctor.compare_rules(self.shares.list_rules(), tx)),
        ]

    # --- failures.Diagnosable: evidence for the report of a failed test ---
    def bookmark(self) -> None:
        """Return no bookmark, because each cloud belongs to one test."""

    def diagnosis(self, since: None) -> dict[str, Callable[[], list[str]]]:
        return {
            "actions in hand": lambda: evidence.actions_in(self.store),
            "doctor, at one look": lambda: evidence.describe_findings(self.findings()),
        }
