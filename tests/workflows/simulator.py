# SPDX-License-Identifier: Apache-2.0
"""A whole cloud in one thread: the real functions of conductor and agent, a store, memory
hypervisors.

Nothing here replaces our code: only the messages are delivered by hand (and can be lost, doubled or
kept back), the clock is turned by hand, and any fault point can kill the process that reaches it.
Each round of ``settle`` is what the threads of the services would do.
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
)
from common.domain.service_binaries import Binary
from common.domain.statuses import GuestState, MigrationType
from common.domain.wire import from_wire, to_wire
from common.security.vault import Vault
from common.service import config
from common.store import cleanups as store_cleanups
from common.store import schema
from common.store.engine import Store, now
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
#: One statement in place of one transaction per lane, because most lanes have nothing to do.
_DUE_STEPS = (
    sa.select(schema.actions.c.step)
    .where(schema.actions.c.due_at <= now(), schema.actions.c.state == "due")
    .distinct()
)
#: One statement in place of two transactions, because most rounds have neither.
_CHORES = sa.select(
    sa.exists().select_from(schema.cleanups), sa.exists().select_from(schema.host_actions)
)
#: Hosts with guests to remove, and None if an action is in hand; what ``doctor.ages`` reads.
_OWING = sa.union(
    sa.select(schema.guests.c.host).where(schema.guests.c.wanted == GuestState.ABSENT),
    sa.select(sa.null())
    .select_from(schema.actions)
    .where(schema.actions.c.state.in_(actions.LIVE)),
)


class Crash(BaseException):
    """A process died at a fault point."""


class Time:
    """One clock for the database and for every process. ``look``: seconds for which a conductor
    believes what it has read for heartbeats; less than a round takes."""

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


def goes_on(point: str) -> None:
    """Where nobody wants to know how far a verb is."""


def _read_due_lanes(tx: sa.Connection) -> list[str]:
    lanes_with_work = {WORKFLOWS.lane_of.get(step, Lane.INSIDE) for step in tx.scalars(_DUE_STEPS)}
    return [lane for lane in ALL_LANES if lane in lanes_with_work]


def _read_chores(tx: sa.Connection) -> tuple[bool, bool]:
    """Whether the tables of pending cleanups and of actions on hosts have rows."""
    has_cleanups, has_host_actions = tx.execute(_CHORES).one()
    return bool(has_cleanups), bool(has_host_actions)


def _read_owing(tx: sa.Connection) -> set[str] | None:
    """Return the hosts that have guests to remove. None means that an action is in hand."""
    owing = set(tx.scalars(_OWING))
    return None if None in owing else owing


class OtherHost:
    """A guest's files at another host of this thread (``virt.driver.Peer``)."""

    def __init__(self, driver: MemoryDriver, server: str, secret: str) -> None:
        self._driver, self._server, self._secret = driver, server, secret

    def parts(self) -> list[Part]:
        try:
            return self._driver.parts(self._server, self._secret)
        except Forbidden as refused:
            raise VerbFailed(refused.text, retryable=True) from refused

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        return self._driver.read_part(self._server, self._secret, name)


class Host:
    """One agent and its hypervisor; ``restart`` is kill -9 and start again."""

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
        self.carries_out = verbs.carry_out
        self.fault_point: Callable[[str, str, str], None] = verbs.nothing
        self.inside: Callable[[str], None] = goes_on  # called by verbs that look whether to go on
        self.restart()

    def restart(self) -> None:
        self.agent = Agent(self.name, self.journal, self.time, self.driver.boot_id())

    def look(self) -> None:
        """What it has, as for a full report."""
        self.agent.record_host(self.driver.inventory(), None, self.driver.files_alone())

    def power_cut(self) -> None:
        """No guest runs any more, and nobody reaches it."""
        self.is_on = False
        self.driver.host.reboot()
        self.driver.host.reachable.pop(self.driver.host.uri, None)

    def power_on(self) -> None:
        """Its agent starts; what its disks had is there."""
        self.is_on = True
        self.driver.host.reachable[self.driver.host.uri] = self.driver.host
        self.restart()

    def work(self) -> None:
        """Pull the plugs that must be pulled, then carry out what is in hand."""
        while (server := self.agent.take_stop()) is not None:
            self.driver.pull_plug(server)
            self.agent.record_stop(server, True)
        while (work := self.agent.take()) is not None:
            self.carry_out(work)

    def carry_out(self, work: Work) -> None:
        """What a worker does with a command that it was given."""
        run = VerbContext(
            lambda name: None,
            lambda: self._is_cancelled(work),
            lambda: work.requested,
            may_start=lambda: self.agent.may_start(work),
        )
        tools = verbs.Tools(self.driver, lambda image: iter(()), self.images.writer, run, self.peer)
        self.agent.record_result(
            work,
            verbs.run(
                self.journal, tools, work.command, work.verb, self.fault_point, self.carries_out
            ),
        )

    def _is_cancelled(self, work: Work) -> bool:
        self.inside("asks")
        return work.cancelled


@cache
def choosing() -> SelectionOptions:
    """How the scheduler chooses by default; the process's own configuration may know other
    libraries' options that have no default."""
    conf = cfg.ConfigOpts()
    config.register(conf)
    conf([], default_config_files=[], default_config_dirs=[])
    return options(conf)


def nothing_is_lost(kind: str) -> bool:
    return False


def nobody_looks() -> None:
    pass


class Cloud:
    """The post between the parts is this object: see ``lose``."""

    def __init__(self, store: Store, time: Time, hosts: int = 2, storage: str = "") -> None:
        self.store, self.time = store, time
        self.images, self.networks, self.shares = Images(), Networks(), Shares()
        self.volumes = Volumes()
        self.cut: set[str] = set()
        self.equip(hosts, storage)
        self.scheduler = Proposals(Hosts(store, time), choosing())
        self.lose: Callable[[str], bool] = nothing_is_lost
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
        self.watcher: Callable[[], None] = nobody_looks  # after each round
        self._beats = 0  # rows that sweeps changed which wrote nothing but heartbeats
        self.engine = self.conductor("c1/1")
        self.watch = Watch()
        self.host_actions = HostActions(self.engine)
        failures.register(self)

    def equip(self, hosts: int, storage: str = "") -> None:
        """So many hosts, before the first round; ``storage``: what they share."""
        reachable: dict[
            str, MemoryHost
        ] = {}  # by a guest that runs; hosts of another cloud are not
        self.hosts = {
            name: Host(name, self.time, self.images, partial(self.peer, name), storage, reachable)
            for name in (f"h{n}" for n in range(1, hosts + 1))
        }

    def conductor(self, owner: str) -> WorkflowEngine:
        """A conductor of this cloud."""
        engine = WorkflowEngine(self.store, self.time, self, owner, **self.options)
        engine.heartbeats.good_for = self.time.look
        return engine

    def peer(self, asking: str, address: str, server: str, secret: str) -> Peer:
        """The files of a server at another host."""
        if {asking, address} & self.cut or not self.hosts[address].is_on:
            raise Unavailable(f"{address} does not answer")
        return OtherHost(self.hosts[address].driver, server, secret)

    # --- the post ---
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
        """Is it there, and does the network lead to it?"""
        return host in self.hosts and self.hosts[host].is_on and host not in self.cut

    # --- what the processes do ---
    def sync(self, host: Host, ask: bool = True) -> None:
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
        answer = reports.handle(self.engine, [request])[0]
        if isinstance(answer, Exception):
            raise answer
        if not self.lose("answer"):
            host.agent.record_answer(request, answer)

    def _is_idle(self, host: Host) -> bool:
        """Does a heartbeat stand in for the exchange?"""
        if host.agent.is_look_due():
            host.look()
            host.agent.record_domains(host.driver.domains())
        beat = host.agent.heartbeat()
        if beat is None or self.lose("heartbeat"):
            return False
        nothing = self.engine.heartbeats.answer(from_wire(Heartbeat, to_wire(beat)))
        host.agent.record_heartbeat_answer(HeartbeatAnswer(nothing))
        return nothing

    def round(self) -> None:
        """Everybody does once what they have to do, and a second passes."""
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
        """Sweep, and note it if nothing but heartbeats was written; see ``changes``."""
        before = self.changes()
        sweep(self.engine, self.watch, heard, hears_itself)
        after = self.changes()
        if before is not None and after == before + len(heard) + 1:  # each host, the conductor
            self._beats += len(heard) + 1

    def changes(self) -> int | None:
        """Count the rows that were changed in the database, without mere heartbeats.

        Returns:
            The number, or None for a database that has more connections than one.
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
        """Rounds until nothing is in hand but debts of hosts that cannot be reached."""
        for _ in range(limit):
            self.round()
            owing = self.store.read(_read_owing)
            if owing is not None and not any(
                host not in self.hosts or self.is_heard(host) for host in owing
            ):
                return
        raise AssertionError(f"stuck after {limit} rounds: {self.store.read(doctor.ages)}")

    def clean_up(self) -> None:
        """The operator has all pending cleanups tried again; afterwards no neighbour has anything
        still to remove."""
        self.settle()
        for row in self.store.read(store_cleanups.list_all):
            self.store.write(lambda tx, row=row: store_cleanups.hasten(tx, row.id))
        self.round()
        assert self.pending() == []

    def pending(self) -> list[tuple[str, str]]:
        """Kind and target of each pending cleanup."""
        return [(row.kind, row.target) for row in self.store.read(store_cleanups.list_all)]

    def restart_conductor(self) -> None:
        """Kill -9 and start again under the same name."""
        self.engine = self.conductor("c1/1")
        self.watch = Watch()
        self.host_actions = HostActions(self.engine)
        self.store.write(lambda tx: actions.free_leases_of(tx, "c1/1"))

    # --- what users do ---
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
        """Servers, each with an interface in the network n1, or with these; ``disks``: asked for in
        place of the flavor's; ``volumes``: of the only one; ``args``: what else the API freezes."""
        wishes = [{"network": "n1"}] if networks is None else networks
        made = [
            new_servers.rows(wishes, flavor=flavor, group=group, disks=disks, **args)
            for _ in range(count)
        ]
        if any(one.more.get("boot_index") == 0 for one in volumes):
            for server, _ in made:
                server["image"] = {"id": "", hardware.ON_VOLUME: True}
                server["disk_gb"] = hardware.on_host(flavor, server["image"]).disk_gb
        with self.store.begin() as tx:
            for server, action in made:
                tx.execute(
                    sa.insert(schema.servers).values(
                        **server, volumes=len(volumes), created_at=now(), updated_at=now()
                    )
                )
                actions.insert(tx, [action])
                server_groups.join(
                    tx, [{"group_id": group, "server_id": server["id"]}] if group else []
                )
                volume_service.insert(tx, str(server["id"]), volumes)
        return [str(server["id"]) for server, _ in made]

    def group(self, policy: str, **rules: Any) -> str:
        """A server group of the project."""
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
        """Ask for a move as the API does."""
        old = from_wire(Flavor, self.show(server).flavor)
        counted = (
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
        self.volumes.moves(server, live=key == "os-migrateLive")
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
                changes=counted,
            ),
        )

    def attach_share(self, server: str, share_id: str, tag: str = "data") -> str:
        """Ask for a share as the API does."""
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
        """Ask for the end of it."""
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
        """The status of each share of a server."""
        return {
            row.share_id: row.status
            for row in self.store.read(lambda tx: mappings.list_of(tx, server))
        }

    def close(self, server: str, key: str) -> str:
        """Confirm or revert a move."""
        return self.accept(
            server, lambda tx: migrations.close(tx, states.row(key), server, context=USER)
        )

    def accept(self, server: str, begin: Callable[[sa.Connection], str]) -> str:
        """As the API does it: whether it has begun is looked up when COMMIT was not answered."""
        return self.store.write(begin, partial(actions.is_begun, server_id=server))

    def kill(self, host: str) -> None:
        """A power cut, and an admin who says so when the host is seen to be down."""
        self.hosts[host].power_cut()
        self.until_down(host)
        self.force_down(host)

    def until_down(self, host: str) -> None:
        """Its silence is noticed."""
        for _ in range(8):
            self.round()
            self.time.pass_by(5)
        assert not self.store.read(lambda tx: services.list_all(tx, host, Binary.COMPUTE))[0].up

    def force_down(self, host: str, down: bool = True) -> None:
        """An admin's word about a host."""
        row = self.store.read(lambda tx: services.list_all(tx, host, Binary.COMPUTE))[0]
        self.store.write(lambda tx: services.set_state(tx, row.uuid, forced_down=down))

    def migration(self, server: str) -> Any:
        """The last move of a server."""
        return self.store.read(lambda tx: migrations.page(tx, server_id=server, limit=1))[0]

    def show(self, server: str) -> Any:
        return self.store.read(
            lambda tx: tx.execute(
                sa.select(schema.servers).where(schema.servers.c.id == server)
            ).one()
        )

    def domains(self, server: str) -> list[str]:
        """Hosts where a domain of the server exists."""
        return [
            host.name
            for host in self.hosts.values()
            if any(state.server == server for state in host.driver.domains())
        ]

    def findings(self) -> list[doctor.Finding]:
        """The oracle's verdict, on records and on what hypervisors and neighbours really
        have."""
        found = {
            host.name: {state.server: state.power_state for state in host.driver.domains()}
            for host in self.hosts.values()
        }
        ports = list(self.networks.held.values())
        disks = {host.name: host.driver.guests_volumes() for host in self.hosts.values()}
        files = {host.name: host.driver.files_alone() for host in self.hosts.values()}
        return [
            *self.store.read(doctor.check),
            *self.store.read(lambda tx: doctor.compare_guests(disks, tx)),
            *self.store.read(lambda tx: doctor.compare(found, tx)),
            *self.store.read(lambda tx: doctor.compare_ports(ports, tx)),
            *self.store.read(lambda tx: doctor.compare_volumes(self.volumes.told(), tx)),
            *self.store.read(lambda tx: doctor.compare_files(files, tx)),
            *self.store.read(lambda tx: doctor.compare_rules(self.shares.told(), tx)),
        ]

    # --- what a failed test prints: failures.Diagnosable ---
    def bookmark(self) -> None:
        """It is made for one test."""

    def diagnosis(self, since: None) -> dict[str, Callable[[], list[str]]]:
        return {
            "actions in hand": lambda: evidence.actions_in(self.store),
            "doctor, at one look": lambda: evidence.describe_findings(self.findings()),
        }
