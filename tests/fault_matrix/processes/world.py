# SPDX-License-Identifier: Apache-2.0
"""A cloud of real processes with seams.

The cloud is the cloud of ``deploy`` with two conductors and six hosts in memory. ``victim`` runs
each process of the product. Three hosts are for cells that make a host unreachable, one such cell
at a time. The cells on two other hosts only delay each other. The last host is the bystander's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests
import sqlalchemy as sa
from keystoneauth1.exceptions import ClientException
from openstack.exceptions import SDKException

from common.domain.models import DomainState
from common.domain.service_binaries import Binary
from common.store import cleanups, schema
from common.store.engine import Store
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.state_file import FILES
from deploy.one_machine import up
from deploy.one_machine.cloud import lifecycle, process_control, processes
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import Cloud, Ports, numbered
from deploy.one_machine.cloud.probes import answers
from deploy.one_machine.cloud.process_control import find_process
from deploy.one_machine.cloud.processes import PYTHON
from deploy.one_machine.machine.supervise import Program
from deploy.one_machine.seed import Seed
from deploy.operator import doctor
from deploy.testing.servers import Servers, free_ports
from tests.fault_matrix.processes.orders import Folder
from tests.waiting import await_true

GENTLE, ROUGH = ("g1", "g2"), ("r1", "r2", "r3")
CALM, CALM_HOSTS = "calm", ("c1",)
HOSTS = (*GENTLE, *ROUGH, *CALM_HOSTS)
ZONES = {"gentle": GENTLE, "rough": ROUGH, CALM: CALM_HOSTS}
VICTIMS = {
    "api": "compute_api.compute.service",
    "conductor": "conductor.service",
    "scheduler": "scheduler.service",
    "agent": "compute_agent.service",
}
CONDUCTORS = ("conductor", "conductor-2")
#: The programs of the product that no cell needs.
WITHOUT = ("placement", "metadata", "console")
KINDS = ("sqlite", "mariadb", "postgresql")
SILENCE_SECONDS, START_SECONDS = 12, 240
NO_LIMIT = 1_000_000
OPTIONS = (
    ("conductor", "host_silence", SILENCE_SECONDS),
    ("DEFAULT", "reclaim_instance_interval", NO_LIMIT),
    ("DEFAULT", "shelved_offload_time", -1),
)


def faults_folder(cloud: Cloud) -> Path:
    """Return the folder in which the programs of the cloud find their orders."""
    return cloud.home / "faults"


def list_programs(cloud: Cloud) -> list[Program]:
    """Return the programs of a cloud. ``victim`` starts the programs of ``VICTIMS``."""
    programs: list[Program] = []
    for program in processes.programs(cloud):
        module = VICTIMS.get(program.name.rstrip("-0123456789"))
        if program.name in WITHOUT:
            continue
        if module is None:
            programs.append(program)
            continue
        names = CONDUCTORS if program.name == "conductor" else (program.name,)
        programs += [_wrap_program(cloud, program, name, module) for name in names]
    return programs


def _wrap_program(cloud: Cloud, program: Program, name: str, module: str) -> Program:
    return replace(
        program,
        name=name,
        command=[PYTHON, "-m", "tests.fault_matrix.processes.victim", name, module],
        entry=None,
        log=str(cloud.log(name)),
        env={**program.env, "KILONOVA_FAULTS": str(faults_folder(cloud))},
    )


class GuestFile:
    """The file in which a host in memory stores its guests, read incrementally."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._at = path, 0, 0
        self._entries: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the entries. A key is a server's id, or ``FILES`` and a server's id."""
        with self._lock, suppress(FileNotFoundError), self._path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._at, self._entries = inode, 0, {}
            file.seek(self._at)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                key, value = json.loads(line)
                if isinstance(value, dict):
                    self._entries[key] = value
                else:
                    self._entries.pop(key, None)
        return dict(self._entries)

    def read_power_states(self) -> dict[str, int]:
        """Return the power state of each server's domain."""
        return {
            key: int(value["power_state"])
            for key, value in self.read().items()
            if not key.startswith(FILES)
        }


class World:
    """A cloud with one kind of database.

    Attributes:
        rough_lock: Held by a cell that makes a host unreachable.
        broker_lock: Held by a cell that restarts the broker.
        sleep_lock: Held by a cell that suspends a conductor, because the other must continue.
        doubled: Texts about servers that ran twice.
    """

    def __init__(self, cloud: Cloud, servers: Servers | None, kind: str) -> None:
        self.cloud, self.kind, self._servers = cloud, kind, servers
        self.folder = Folder(faults_folder(cloud))
        self.seed = Seed(cloud)
        self.store = Store(cloud.store_url)
        self.files = {
            host: GuestFile(cloud.state_folder(number) / "memory-guests.json")
            for number, host in enumerate(HOSTS, 1)
        }
        self.image = self.other_image = self.network = ""
        self.flavors: dict[str, str] = {}
        self.tokens: dict[str, str] = {}
        self.doubled: list[str] = []
        self.rough_lock, self.broker_lock = threading.Lock(), threading.Lock()
        self.sleep_lock = threading.Lock()
        self._over = threading.Event()

    # --- start and end ---
    def start(self) -> None:
        """Start the cloud, and wait until all services answer."""
        self.folder.make()
        for step in (up.prepare, up.upgrade, up.bootstrap):
            step(self.cloud)
        lifecycle.launch(self.cloud, list_programs(self.cloud), START_SECONDS)
        self._await_services()
        for create in (self.seed.host, self.seed.flavors, self.seed.tenant):
            create()
        self._create_resources()
        threading.Thread(target=self._watch_domains, daemon=True).start()

    def _await_services(self) -> None:
        cloud = self.cloud
        for name, url in (
            ("identity", cloud.identity_url),
            ("image", cloud.image_url),
            ("network", cloud.network_url),
            ("volume", cloud.volume_url),
            ("api", cloud.api_url.removesuffix("/v2.1")),
        ):
            lifecycle.await_http(cloud, name, url, START_SECONDS)

    def _create_resources(self) -> None:
        admin, demo = self.seed.admin, self.seed.demo
        for user in (admin, demo):
            project = user.session.get_project_id()
            admin.compute.update_quota_set(
                project, instances=NO_LIMIT, cores=NO_LIMIT, ram=NO_LIMIT
            )
            admin.network.update_quota(project, **dict.fromkeys(("ports", "security_groups"), -1))
        for zone, hosts in ZONES.items():
            aggregate = admin.compute.create_aggregate(name=zone, availability_zone=zone)
            for host in hosts:
                admin.compute.add_host_to_aggregate(aggregate, host)
        self.image, self.other_image = (
            admin.image.create_image(
                name,
                data=bytes(512),
                disk_format="raw",
                container_format="bare",
                visibility="public",
            ).id
            for name in ("empty", "empty too")
        )
        self.network = demo.network.create_network(name="n").id
        demo.network.create_subnet(network_id=self.network, ip_version=4, cidr="10.9.0.0/16")
        self.second = demo.network.create_network(name="n2").id
        demo.network.create_subnet(network_id=self.second, ip_version=4, cidr="10.10.0.0/16")
        demo.network.create_security_group(name="web")
        self.flavors = {flavor.name: flavor.id for flavor in admin.compute.flavors(details=False)}
        self.tokens = {"demo": demo.session.get_token(), "admin": admin.session.get_token()}
        requests.put(
            f"{self.cloud.volume_url}/os-quota-sets/{demo.session.get_project_id()}",
            json={"quota_set": {"volumes": -1, "gigabytes": -1}},
            headers={"X-Auth-Token": self.tokens["admin"]},
            timeout=20,
        ).raise_for_status()

    def close(self) -> None:
        self._over.set()
        self.store.close()
        lifecycle.shut_down(self.cloud)
        lifecycle.purge(self.cloud)

    # --- faults ---
    def kill(self, process: str) -> None:
        """Kill a process with all children. ``victim`` starts the process again."""
        pid = await_true(lambda: self.folder.read_pid(process), 30, f"{process} runs")
        assert pid is not None
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def resume(self, pid: int) -> None:
        """Resume a suspended process, if it still exists."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def restart_broker(self, wiped: bool) -> None:
        """Kill the broker, and start a new one, without the old data if ``wiped``."""
        cloud = self.cloud
        order = cloud.run / "rabbitmq.kill"
        order.write_text("kill")
        # The rename is atomic, because an incomplete file would mean an ordinary stop.
        order.replace(cloud.run / "rabbitmq.down")
        await_true(lambda: find_process(cloud, "rabbitmq") is None, 30, "the broker has ended")
        if wiped:
            for entry in (Broker.of(cloud).folder / "data").iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        process_control.start(cloud, "rabbitmq")
        await_true(lambda: answers(cloud.ports.broker), START_SECONDS, "the broker answers", 0.2)

    def name_agent(self, host: str) -> str:
        return numbered("agent", HOSTS.index(host) + 1)

    def cut_power(self, host: str) -> None:
        """Stop the agent and the guests of a host until ``power_on``."""
        name = self.name_agent(host)
        self.folder.power_cut(name)
        self.kill(name)
        await_true(lambda: self.folder.read_pid(name) is None, 10, f"{name} has ended")
        path = self.cloud.state_folder(HOSTS.index(host) + 1) / "memory-guests.json"
        memory_host = MemoryHost(host, state_file=path)
        memory_host.reboot()
        memory_host.close()

    def power_on(self) -> None:
        """Start every host without power, and wait until all hosts count as up."""
        hosts_without_power = [host for host in HOSTS if self.folder.is_off(self.name_agent(host))]
        for host in hosts_without_power:
            self.folder.power_on(self.name_agent(host))
        for host in HOSTS:
            if self.read_service(host).forced_down:
                self.force_down(host, False)
        await_true(
            lambda: all(self.read_service(host).up for host in HOSTS), 120, "every host is up", 0.2
        )

    def read_service(self, host: str) -> Any:
        """Return the row of a host's compute service, as the operator sees it."""
        from common.store.hosts import services

        rows = self.store.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE))
        return next(row for row in rows if row.host == host)

    def force_down(self, host: str, down: bool = True) -> None:
        def is_accepted() -> bool:
            compute = self.seed.admin.compute
            # Another cell may have killed the API.
            with suppress(SDKException, ClientException):
                for service in compute.services(binary="nova-compute", host=host):
                    compute.update_service_forced_down(service, forced=down)
                return True
            return False

        await_true(is_accepted, 60, "the API answers", 0.3)

    def await_down(self, host: str) -> None:
        """Wait until the host counts as down."""
        await_true(lambda: not self.read_service(host).up, 120, f"{host} counts as down", 0.2)

    # --- state ---
    def read_server(self, server: str) -> Any:
        return self.store.read(
            lambda tx: tx.execute(
                sa.select(schema.servers).where(schema.servers.c.id == server)
            ).one_or_none()
        )

    def read_actions(self, server: str) -> list[Any]:
        """Return all actions of a server, ended or not."""
        return self.store.read(
            lambda tx: list(
                tx.execute(
                    sa.select(schema.actions).where(schema.actions.c.server_id == server)
                ).all()
            )
        )

    def list_hosts_with_cleanups(self, server: str) -> list[str]:
        """Return the hosts that still have to remove a guest of the server."""
        return [
            cleanup[1]
            for cleanup in self.store.read(doctor.ages)["removals"]
            if cleanup[0] == server
        ]

    def clean_up(self, server: str) -> None:
        """Retry the pending cleanups at external services until all are done."""
        for row in self._read_cleanups(server):
            self.store.write(lambda tx, row=row: cleanups.hasten(tx, row.id))
        await_true(
            lambda: not self._read_cleanups(server),
            60,
            lambda: f"the cleanups are done. Pending: {self._read_cleanups(server)}",
            0.2,
        )

    def _read_cleanups(self, server: str) -> list[Any]:
        """Return the pending cleanups of the server, except the searches for late results."""
        rows = self.store.read(cleanups.list_all)
        return [row for row in rows if row.server_id == server and row.kind not in cleanups.LATE]

    def findings(self, server: str = "") -> list[doctor.Finding]:
        """Return the findings of the doctor about a server, or all findings."""
        domains = {
            host: {
                server_id: DomainState(server_id, power, 0).power_state
                for server_id, power in states.items()
            }
            for host, states in (
                (host, file.read_power_states()) for host, file in self.files.items()
            )
        }
        findings = self.store.snapshot(doctor.check)
        findings += self.store.read(lambda tx: doctor.compare(domains, tx))
        return [
            finding
            for finding in findings
            if server in f"{finding.subject} {finding.text} {finding.facts}"
        ]

    def find_remains(self, server: str) -> list[str]:
        """Return descriptions of all traces of a deleted server."""
        remains = [
            f"{key} at {host}"
            for host, file in self.files.items()
            for key in file.read()
            if server in key
        ]
        for table, column in (
            (schema.guests, schema.guests.c.server_id),
            (schema.allocations, schema.allocations.c.consumer_id),
            (schema.consumers, schema.consumers.c.id),
        ):
            count = sa.select(sa.func.count()).select_from(table).where(column == server)
            if self.store.read(lambda tx, count=count: tx.scalar(count)):
                remains.append(f"rows of {table.name}")
        for folder in self.cloud.home.glob("state*/arrivals"):
            remains += [str(path) for path in folder.iterdir() if server in path.name]
        return remains + [f"port {port}" for port in self.list_ports(server)]

    def list_ports(self, server: str) -> list[str]:
        body = requests.get(
            f"{self.cloud.network_url}/v2.0/ports?device_id={server}",
            headers={"X-Auth-Token": self.tokens["admin"]},
            timeout=20,
        ).json()
        return [str(port["id"]) for port in body["ports"]]

    def _watch_domains(self) -> None:
        """Record servers that run twice, in two consecutive observations."""
        before: set[tuple[str, str, str]] = set()
        while not self._over.wait(0.3):
            runs: dict[str, list[str]] = {}
            for host, file in self.files.items():
                for server, power in file.read_power_states().items():
                    if power == 1:
                        runs.setdefault(server, []).append(host)
            twice = {(server, *hosts[:2]) for server, hosts in runs.items() if len(hosts) > 1}
            self.doubled += [f"{entry} runs twice" for entry in twice & before]
            before = twice


@contextmanager
def world(kind: str) -> Iterator[World]:
    """Yield a running cloud with a database of this kind."""
    from tests.e2e.conftest import new_home

    with ExitStack() as stack:
        servers, url = None, None
        home = new_home()
        if kind != "sqlite":
            folder = home.with_name(f"{home.name}-database")
            folder.mkdir(mode=0o755)
            stack.callback(shutil.rmtree, folder)
            servers = stack.enter_context(Servers(folder))
            database_url = sa.make_url(servers.start(kind)).set(database="faults")
            system = {"postgresql": "postgres", "mariadb": "mysql"}[kind]
            admin = sa.create_engine(
                database_url.set(database=system),
                isolation_level="AUTOCOMMIT",
                poolclass=sa.NullPool,
            )
            with admin.connect() as connection:
                connection.exec_driver_sql("CREATE DATABASE faults")
            url = database_url.render_as_string(hide_password=False)
        cloud = Cloud(
            home=home,
            ports=Ports.from_base(free_ports(Ports.COUNT)),
            hosts=HOSTS,
            driver="memory",
            database_url=url,
            networks=True,
            volumes=True,
            options=OPTIONS,
        )
        cloud_with_seams = World(cloud, servers, kind)
        began = time.monotonic()
        try:
            cloud_with_seams.start()
            print(f"{kind}: a cloud in {home} after {time.monotonic() - began:.0f} s", flush=True)
            yield cloud_with_seams
        finally:
            cloud_with_seams.close()
