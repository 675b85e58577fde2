# SPDX-License-Identifier: Apache-2.0
"""The main figures of Kilonova, printed with the machine: ``./deploy/test bench``.

One API process, one conductor, one scheduler, ten agents with the memory driver, a private RabbitMQ
and a private MariaDB with durable commits run on this machine, together with the load. The
benchmark asserts no limits, because machines are noisy. Compare figures of one run. CPU is the time
that each process used. SQL is the number of statements that MariaDB counted.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from deploy.one_machine import up
from deploy.one_machine.cloud import lifecycle, process_control, processes
from deploy.one_machine.cloud.cloud import Cloud, Ports
from deploy.one_machine.cloud.process_control import find_process
from deploy.progress import say
from deploy.testing.servers import Servers, free_ports
from tests.bench import load

HOSTS, SERVERS, THREADS = 10, 300, 16
TICK = os.sysconf("SC_CLK_TCK")
Figures = dict[str, Any]


class Bench:
    """One cloud with a private broker and database, and its figures."""

    def __init__(self, cloud: Cloud, servers: Servers, database: str) -> None:
        self.cloud, self._servers = cloud, servers
        self._admin = sa.create_engine(
            database, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
        )
        self.figures: Figures = {}

    def statements(self) -> int:
        """Return the number of statements that MariaDB has executed so far."""
        with self._admin.connect() as connection:
            return int(connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Questions'").one()[1])

    def messages(self) -> int:
        """Return the number of messages published to RabbitMQ so far."""
        assert self._servers.broker is not None
        return self._servers.broker.count_published()

    def restart_broker(self) -> None:
        """Stop and start RabbitMQ's application, which closes all connections."""
        assert self._servers.broker is not None
        for command in ("stop_app", "start_app"):
            self._servers.broker.control(command)

    def hosts_up(self) -> int:
        """Return the number of hosts that are up according to the database."""
        engine = sa.create_engine(self.cloud.database_url or "", poolclass=sa.NullPool)
        with engine.connect() as connection:
            return int(
                connection.exec_driver_sql(
                    "SELECT COUNT(*) FROM heartbeats WHERE `binary` = 'nova-compute' AND up"
                ).scalar_one()
            )

    def processes(self) -> dict[str, list[int]]:
        """Return process ids by service. Workers belong to the API. All agents are one service."""
        process_ids: dict[str, list[int]] = {}
        for program in processes.programs(self.cloud):
            pid = find_process(self.cloud, program.name)
            if pid is not None:
                process_ids.setdefault(program.name.split("-")[0], []).extend([pid, *children(pid)])
        return process_ids

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds by service."""
        return {
            name: sum(cpu_seconds(pid) for pid in pids) for name, pids in self.processes().items()
        }

    def memory(self) -> dict[str, float]:
        """Return the PSS in MiB by service."""
        return {
            name: round(sum(pss(pid) for pid in pids), 1) for name, pids in self.processes().items()
        }


def children(pid: int) -> list[int]:
    """Return the ids of the direct children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def pss(pid: int) -> float:
    """Return the proportional set size of a process in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def machine() -> str:
    """Describe this machine: processors, load and Python version."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} x {model}, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def bring_up(bench: Bench) -> tuple[load.Client, str, str]:
    """Start the cloud and return a client and the ids of an image and a flavor."""
    from deploy.one_machine.seed import Seed

    cloud = bench.cloud
    for step in (up.prepare, up.upgrade, up.bootstrap):
        step(cloud)
    start = time.monotonic()
    lifecycle.launch(cloud)
    up.await_services(cloud)
    seed = Seed(cloud)
    seed.host()
    bench.figures["launch to all hosts up, s"] = round(time.monotonic() - start, 1)
    admin = seed.admin
    flavor = admin.compute.create_flavor(name="bench", ram=64, vcpus=1, disk=1)
    image = admin.image.create_image(
        "bench", data=b"\0" * 512, disk_format="raw", container_format="bare", visibility="public"
    )
    client = load.Client(cloud.api_url, admin.session.get_token())
    project = admin.session.get_project_id()
    for resource in ("instances", "cores", "ram"):
        set_quota(cloud, project, resource)
    return client, image.id, flavor.id


def set_quota(cloud: Cloud, project: str, resource: str) -> None:
    """Remove the limit of a resource. The API still counts the usage."""
    engine = sa.create_engine(
        cloud.database_url or "", isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )
    with engine.connect() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO quotas (project_id, user_id, resource, hard_limit) "
                "VALUES (:project, '', :resource, -1)"
            ),
            {"project": project, "resource": resource},
        )


def measure(bench: Bench) -> None:
    """Measure all figures, one after the other."""
    client, image, flavor = bring_up(bench)
    load.create_in_sequence(client, "warm", 5, image, flavor)
    # Work left over from the start ends within this time without a signal.
    time.sleep(6)
    bench.figures["memory at rest, PSS MiB"] = bench.memory()
    statements, messages = bench.statements(), bench.messages()
    alone = load.create_in_sequence(client, "one", 20, image, flavor)
    bench.figures["one at a time, POST to ACTIVE"] = load.milliseconds(alone)
    bench.figures["one at a time, messages a create (with idle syncs)"] = round(
        (bench.messages() - messages) / 20, 1
    )
    bench.figures["one at a time, SQL a create (with the client's polling)"] = round(
        (bench.statements() - statements) / 20, 1
    )
    for threads in (THREADS, 2 * THREADS):
        before, statements, messages = bench.cpu(), bench.statements(), bench.messages()
        result = load.create(client, f"load{threads}", SERVERS, threads, image, flavor)
        used = {
            name: round((value - before[name]) * 1000 / SERVERS, 2)
            for name, value in bench.cpu().items()
        }
        bench.figures[f"{SERVERS} creates, {threads} clients"] = result | {
            "cpu_ms_a_create": used,
            "sql_a_create": round((bench.statements() - statements) / SERVERS, 1),
            "messages_a_create": round((bench.messages() - messages) / SERVERS, 2),
        }
    measure_networks(bench, client, image, flavor)
    actions(bench, client)
    load.create(client, "rest", 1000 - 3 * SERVERS - 65, THREADS, image, flavor)
    times = [client.call("GET", "/servers/detail?limit=1000")[0] for _ in range(20)]
    _, answer = client.call("GET", "/servers/detail?limit=1000")
    bench.figures[f"GET /servers/detail with {len(answer['servers'])} servers"] = load.milliseconds(
        times
    )
    bench.figures["memory after the load, PSS MiB"] = bench.memory()
    bench.figures["doctor"] = (
        subprocess.run(
            [sys.executable, "-m", "deploy.operator.main", "doctor"],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ, KILONOVA_CONF=str(bench.cloud.config())),
        )
        .stdout.strip()
        .splitlines()[-1:]
    )
    restart(bench, client, image, flavor)


def measure_networks(bench: Bench, client: load.Client, image: str, flavor: str) -> None:
    """Measure creates with and without an interface in turns.

    The network service has no hosts to wait for.
    """
    from deploy.one_machine.seed import Seed

    service = Seed(bench.cloud).admin.network
    network = service.create_network(name="bench")
    service.create_subnet(network_id=network.id, ip_version=4, cidr="10.0.0.0/16")
    service.update_quota(service.get_project_id(), ports=-1)
    load.create_in_sequence(client, "warm-net", 3, image, flavor, network.id)
    times: dict[str | None, list[float]] = {None: [], network.id: []}
    for turn in range(4):
        for which, durations in times.items():
            durations += load.create_in_sequence(
                client, f"turn{turn}-{'net' if which else 'none'}", 5, image, flavor, which
            )
    bench.figures["one at a time, without a network"] = load.milliseconds(times[None])
    bench.figures["one at a time, with a network"] = load.milliseconds(times[network.id])
    before = bench.cpu()
    result = load.create(client, "net", SERVERS, THREADS, image, flavor, network.id)
    used = {
        name: round((value - before[name]) * 1000 / SERVERS, 2)
        for name, value in bench.cpu().items()
    }
    bench.figures[f"{SERVERS} creates with a network, {THREADS} clients"] = result | {
        "cpu_ms_a_create": used
    }


def actions(bench: Bench, client: load.Client) -> None:
    """Measure actions from the POST to the final state, on one server and on 32 at once."""
    together = f"^load{THREADS}-000([0-2][0-9]|3[01])$"
    _, answer = client.call("GET", f"/servers?limit=1000&name={urllib.parse.quote(together)}")
    ids = [(server["id"], server["name"]) for server in answer["servers"]]
    for there, back in (
        (("os-stop", "SHUTOFF"), ("os-start", "ACTIVE")),
        (("pause", "PAUSED"), ("unpause", "ACTIVE")),
    ):
        for action, ends in (there, back):
            alone = [
                load.act(client, [server], f"^{name}$", action, ends, 1)[0][0]
                for server, name in ids[:10]
            ]
            bench.figures[f"{action} alone, POST to state"] = load.milliseconds(alone)
        for action, ends in (there, back):
            times, rate = load.act(
                client,
                [server for server, _ in ids],
                urllib.parse.quote(together),
                action,
                ends,
                len(ids),
            )
            bench.figures[f"{action}, {len(ids)} at once, POST to state"] = {
                "each": load.milliseconds(times),
                "per_s": round(rate, 1),
            }


def restart(bench: Bench, client: load.Client, image: str, flavor: str) -> None:
    """Measure the time from the start of the API to the first successful POST."""
    process_control.stop(bench.cloud, "api")
    start = time.monotonic()
    process_control.start(bench.cloud, "api")
    while True:
        try:
            client = load.Client(bench.cloud.api_url, client.token)
            client.call("POST", "/servers", load.body("again", image, flavor, None))
            break
        except OSError:
            # The API process cannot notify this process.
            time.sleep(0.05)
    bench.figures["API start to first POST, s"] = round(time.monotonic() - start, 2)


def run(work: Callable[[Bench], None], hosts: int, volumes: bool = False) -> int:
    """Start a cloud and its servers, measure with ``work``, print the figures and stop all."""
    with (
        tempfile.TemporaryDirectory(prefix="kilonova-bench-") as folder,
        Servers(Path(folder) / "servers") as servers,
    ):
        Path(folder).chmod(0o755)
        broker, database = servers.start("rabbitmq"), servers.start("mariadb")
        bench_url = sa.make_url(database).set(database="bench")
        admin = sa.create_engine(database, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with admin.connect() as connection:
            connection.exec_driver_sql("CREATE DATABASE bench CHARACTER SET utf8mb4")
            connection.exec_driver_sql("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        names = tuple(f"h{number}" for number in range(1, hosts + 1))
        cloud = Cloud(
            Path(folder) / "cloud",
            Ports.from_base(free_ports(Ports.COUNT)),
            names,
            "memory",
            broker,
            bench_url.render_as_string(hide_password=False),
            networks=True,
            volumes=volumes,
        )
        bench = Bench(cloud, servers, database)
        say(f"Machine: {machine()}")
        try:
            work(bench)
        finally:
            lifecycle.shut_down(cloud)
            say(json.dumps(bench.figures, indent=1))
    return 0


def main() -> int:
    """Measure and print the main figures of a cloud."""
    return run(measure, HOSTS)


if __name__ == "__main__":
    sys.exit(main())
