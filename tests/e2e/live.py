# SPDX-License-Identifier: Apache-2.0
"""A running cloud as a test uses it: commands, APIs, hypervisors, and checks for leftovers.

The fixtures in conftest.py create the clouds. Tests use only commands, APIs, virsh, files and the
database, never the memory of a process. ``assert_healthy`` runs ``kilonova doctor`` with the hosts.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import sqlalchemy as sa

from compute_api.compute.request import microversions
from compute_api.http.microversions import HEADER
from deploy.one_machine.cloud import lifecycle, process_control
from deploy.one_machine.cloud.cloud import Cloud, Ports
from deploy.one_machine.cloud.configuration import ROLES
from deploy.one_machine.machine import libvirtd
from deploy.one_machine.seed import READY, Seed
from deploy.one_machine.services.network.host.names import Names
from deploy.packages import ROOT
from tests import evidence, failures
from tests.e2e import preloaded
from tests.nova import schemas as nova
from tests.waiting import await_true

# The unresolved path is in the virtual environment.
PROGRAMS = Path(sys.executable).parent
#: Seconds that an emulated guest on a busy machine may need to boot, or an action to complete.
BOOT, SETTLE = 120, 120
#: Argument ``late`` of tests.waiting. The pauses between two requests grow with the waiting time,
#: because each response takes processor time from the awaited action.
LATE = 0.2
#: Time limit of ``kilonova doctor`` for the explanation of a failure, in seconds.
DIAGNOSIS = 30
#: Errors of a request if the API process is killed before or during the response.
CUT_OFF = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)


@dataclass(frozen=True)
class Reply:
    """A response of the API."""

    status: int
    body: Any
    headers: Any = field(repr=False)

    @property
    def fault(self) -> tuple[str, int, str]:
        """The kind, code and message of a fault body. Other keys in the body are an error."""
        [(kind, fault)] = self.body.items()
        assert fault.keys() == {"code", "message"}, self.body
        return kind, fault["code"], fault["message"]


# fmt: off
class Rest:
    """HTTP requests of one user to the compute API.

    Responses with an error status are returned, not raised. Each response is checked with Nova's
    schemas.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        if token is not None:
            self.session.headers["X-Auth-Token"] = token

    def call(self, method: str, path: str, body: Any = None, *, version: str = "2.96", data: Any = None,
             headers: dict[str, str] | None = None) -> Reply:
        """Send a request. ``path`` follows the compute endpoint. ``data`` is sent unchanged."""
        reply = self.session.request(
            method, self.url + path, timeout=60, data=data if body is None else json.dumps(body),
            headers={"OpenStack-API-Version": f"compute {version}", "Content-Type": "application/json",
                     **(headers or {})})
        try:
            content = reply.json()
        except ValueError:
            content = reply.text
        nova.judge(method, urlsplit(self.url + path).path, body, microversions.number(
            reply.headers.get(HEADER, "2.1")), reply.status_code, content if reply.text else None)
        return Reply(reply.status_code, content, reply.headers)

    def insist(self, method: str, path: str, body: Any = None, *, expected: Iterable[int], seconds: float = 60,
               headers: dict[str, str] | None = None) -> Reply:
        """Repeat a request until the response has one of the ``expected`` statuses."""
        last: list[object] = []

        def try_once() -> Reply | None:
            try:
                reply = self.call(method, path, body, headers=headers)
            except CUT_OFF as problem:
                last[:] = [problem]
                return None
            last[:] = [reply]
            return reply if reply.status in expected else None
        reply: Reply = await_true(try_once, seconds, lambda: f"{method} {path}: {last}")
        return reply

    def server(self, server: str) -> dict[str, Any]:
        """Return the server from the API, or {} if the server does not exist."""
        reply = self.insist("GET", f"/servers/{server}", expected=(200, 404))
        return dict(reply.body["server"]) if reply.status == 200 else {}

    def servers(self) -> list[dict[str, Any]]:
        """Return all servers of the user's project."""
        return list(self.call("GET", "/servers/detail").body["servers"])

    def console(self, server: str) -> str:
        """Return the guest's console output, or "" if the API has none."""
        reply = self.insist("POST", f"/servers/{server}/action", {"os-getConsoleOutput": {}}, expected=(200, 404, 409))
        return str(reply.body["output"]) if reply.status == 200 else ""

    def create(self, *, image: str, flavor: str, name: str = "e2e", seconds: float = 60, **more: Any) -> str:
        """Request a new server, retry until the API accepts the request, and return the id."""
        reply = self.insist("POST", "/servers", {"server": {
            "name": name, "imageRef": image, "flavorRef": flavor, "networks": "none", **more}}, expected=(202,),
            seconds=seconds, headers={"Idempotency-Key": str(uuid.uuid4())})
        return str(reply.body["server"]["id"])

    def act(self, server: str, key: str, value: Any = None) -> Reply:
        """Send an action of a server, once."""
        return self.call("POST", f"/servers/{server}/action", {key: value})

    def await_status(self, server: str, status: str, seconds: float = SETTLE) -> dict[str, Any]:
        """Wait until the server has this status and no task, and return the server.

        The status ERROR fails the test at once, except when awaited.
        """
        def read() -> dict[str, Any] | None:
            shown = self.server(server)
            assert shown and (shown["status"] != "ERROR" or status == "ERROR"), shown
            return shown if (shown["status"], shown["OS-EXT-STS:task_state"]) == (status, None) else None
        shown: dict[str, Any] = await_true(read, seconds, lambda: f"not {status}: {self.server(server)}", late=LATE)
        return shown

    def await_gone(self, server: str, seconds: float = SETTLE) -> None:
        """Wait until the API does not show the server any more."""
        await_true(lambda: not self.server(server), seconds, lambda: f"still there: {self.server(server)}", late=LATE)

    def await_ready(self, server: str, times: int = 1) -> str:
        """Wait until the guest has printed ``READY`` so many times. Return the console output."""
        await_true(lambda: self.console(server).count(READY) >= times, BOOT,
                   lambda: f"the guest of {server} is not ready: {self.server(server)}\n{self.console(server)[-2000:]}",
                   late=LATE)
        return self.console(server)
# fmt: on


@dataclass(frozen=True)
class Bookmark:
    """The start of a test: the time in microseconds, and the sizes of the logs in bytes."""

    moment: int
    sizes: dict[Path, int]


class Live:
    """One cloud with its own home and ports.

    Args:
        home: Folder of the cloud.
        base: First of the cloud's ports.
        facts: Other fields of ``Cloud``.
    """

    def __init__(self, home: Path, base: int, **facts: Any) -> None:
        self.home, self.base = home, base
        self.cloud = Cloud(home=home, ports=Ports.from_base(base), **facts)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OS_", "KILONOVA_"))
        }
        self.environment = inherited | {
            "KILONOVA_HOME": str(home),
            "KILONOVA_PORT_BASE": str(base),
            "KILONOVA_HOSTS": str(len(self.cloud.hosts)),
            "KILONOVA_VOLUMES": "yes" if self.cloud.volumes else "no",
            "no_proxy": self.cloud.address,
            "NO_PROXY": self.cloud.address,
        }
        self.seed = Seed(self.cloud)
        failures.register(self)

    # --- commands ---
    def run(
        self, *command: str | Path, text: str | None = None, seconds: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the repository, and return status, output and errors."""
        return subprocess.run(
            [str(part) for part in command],
            input=text or "",
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=ROOT,
            env=self.environment | variables,
        )

    def up(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``./deploy/up`` for this cloud."""
        return self.run(ROOT / "deploy/up", *arguments, seconds=900, **variables)

    def down(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``./deploy/down`` for this cloud."""
        return self.run(ROOT / "deploy/down", *arguments)

    def openstack(self, *commands: str, cloud: str = "kilonova") -> list[Any]:
        """Run commands in one ``openstack`` process and return the JSON documents of their output.

        Any text on standard error fails the test.
        """
        output, complaints = self.type(*commands, cloud=cloud)
        assert complaints == "", f"{commands}\n{output}\n{complaints}"
        return documents(output)

    def type(self, *commands: str, cloud: str = "kilonova") -> tuple[str, str]:
        """Run commands in one ``openstack`` process and return output and standard error.

        The exit status is ignored, because the interactive client does not return failures.
        """
        result = preloaded.run(
            PROGRAMS / "openstack",
            text="\n".join(commands) + "\n",
            seconds=300,
            environment=self.environment | self._as(cloud),
        )
        return result.stdout, result.stderr

    def _as(self, cloud: str) -> dict[str, str]:
        """Return the environment variables of ``openstack`` for an entry of clouds.yaml."""
        return {
            "OS_CLOUD": cloud,
            "OS_CLIENT_CONFIG_FILE": str(self.cloud.clouds_yaml),
            "PYTHONWARNINGS": "ignore",
        }

    @contextmanager
    def typist(self, folder: Path, cloud: str = "kilonova") -> Iterator[Callable[[str], None]]:
        """Yield a function that types a command into an ``openstack`` process.

        The process runs until the block ends, and must not write to standard error. The output
        is in ``folder``.
        """
        output, complaints = folder / "said", folder / "complaints"
        with output.open("w") as out, complaints.open("w") as err:
            client = subprocess.Popen(
                [str(PROGRAMS / "openstack")],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                text=True,
                cwd=ROOT,
                env=self.environment | self._as(cloud),
            )
            assert client.stdin is not None
            try:
                yield partial(print, file=client.stdin, flush=True)
                client.stdin.close()
                client.wait(SETTLE)
            finally:
                client.kill()
                client.wait()
        assert complaints.read_text() == "", complaints.read_text()

    def kilonova(self, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run ``kilonova`` with these words and the cloud's configuration."""
        return preloaded.run(
            PROGRAMS / "kilonova",
            *words,
            text="",
            seconds=seconds,
            environment=self.environment | {"KILONOVA_CONF": str(self.cloud.config())},
        )

    def virsh(self, *arguments: str, host: int = 1) -> str:
        """Run virsh on the libvirtd of a host and return the output."""
        uri = libvirtd.uri(self.cloud.libvirt_folder(host))
        return self.run("virsh", "-c", uri, *arguments).stdout

    def domains(self) -> list[str]:
        """Return the ids of all domains of all hosts, running or not."""
        return [
            domain
            for host, _ in enumerate(self.cloud.hosts, 1)
            for domain in self.virsh("list", "--all", "--uuid", host=host).split()
        ]

    def domain_state(self, server: str) -> str:
        """Return the state of a server's domain in virsh's words, for example "shut off"."""
        return "".join(
            self.virsh("domstate", server, host=host).strip()
            for host, _ in enumerate(self.cloud.hosts, 1)
        )

    @contextmanager
    def only(self, host: int) -> Iterator[None]:
        """Enable only this host for the block, and only the first host afterwards."""
        self.open_only(host)
        try:
            yield
        finally:
            self.open_only(1)

    def open_only(self, host: int) -> None:
        """Enable this host for new guests and disable all others. Hosts are counted from 1."""
        compute = self.seed.admin.compute
        for service in compute.services(binary="nova-compute"):
            is_open = service.host == self.cloud.hosts[host - 1]
            if (service.status == "enabled") != is_open:
                (compute.enable_service if is_open else compute.disable_service)(service)

    def open_all(self) -> None:
        """Enable every host for new guests."""
        compute = self.seed.admin.compute
        for service in list(compute.services(binary="nova-compute")):
            if service.status != "enabled":
                compute.enable_service(service)

    @contextmanager
    def configure(
        self, *processes: str, host: str | None = None, **sections: Mapping[str, str]
    ) -> Iterator[None]:
        """Change settings for the block, and restart these processes before and after the block.

        Args:
            processes: Names of the processes to restart.
            host: Host of the configuration, or None for the configuration of the cloud.
            sections: Section -> option -> value. Commands of ``kilonova`` use them too.
        """
        roles = {"", *(name for name in processes if name in ROLES)} if host is None else {""}
        before = {
            config: config.read_text()
            for config in (self.cloud.config(host, role) for role in sorted(roles))
        }
        for config, text in before.items():
            changed = ConfigParser(interpolation=None, default_section="")
            changed.read_string(text)
            changed.read_dict(sections)
            with config.open("w") as file:
                changed.write(file)
        try:
            self._restart(processes)
            yield
        finally:
            for config, text in before.items():
                config.write_text(text)
            self._restart(processes)

    def _restart(self, processes: Sequence[str]) -> None:
        for name in processes:
            process_control.restart(self.cloud, name)
        lifecycle.await_http(self.cloud, "api", self.cloud.api_url)

    def doctor(self, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run ``kilonova doctor``, which also checks the hosts."""
        return self.kilonova("doctor", seconds=seconds)

    def assert_healthy(self) -> None:
        """Check that ``kilonova doctor`` finds no problem, once every host answers."""
        last: list[subprocess.CompletedProcess[str]] = []

        def all_hosts_answer() -> bool:
            last[:] = [self.doctor()]
            return "did not answer" not in last[0].stderr

        await_true(all_hosts_answer, SETTLE, lambda: last[0].stderr)
        assert (last[0].returncode, last[0].stdout.strip()) == (0, "all is well"), last[0]

    # --- APIs ---
    def rest(self, user: str = "kilonova") -> Rest:
        """Return the API for "kilonova" (the user demo) or "kilonova-admin"."""
        return Rest(self.cloud.api_url, self.seed.connect(user).session.get_token())

    def image(self, name: str = "tiny") -> str:
        """Return the id of an active image with this name."""
        return str(next(iter(self.seed.demo.image.images(name=name, status="active"))).id)

    def flavor(self, name: str = "m1.nano") -> str:
        """Return the id of a flavor with this name."""
        return str(self.seed.demo.compute.find_flavor(name, ignore_missing=False).id)

    def rows(self, query: str, *values: object) -> list[Any]:
        """Read the database without locks that other processes would wait for."""
        if self.cloud.database_url is not None:
            with sa.create_engine(
                self.cloud.database_url, poolclass=sa.NullPool
            ).connect() as connection:
                return list(connection.exec_driver_sql(query.replace("?", "%s"), values))
        database = sqlite3.connect(
            f"file:{self.home}/data/kilonova.db?mode=ro", uri=True, timeout=30
        )
        try:
            return database.execute(query, values).fetchall()
        finally:
            database.close()

    def forget_refusals(self) -> None:
        """Clear the times of refused messages, which the doctor shows for an hour."""
        engine = sa.create_engine(self.cloud.store_url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE hosts SET refused_at = NULL")

    def is_writable(self) -> bool:
        """Return True if no other process has the write lock of the SQLite database."""
        database = sqlite3.connect(
            f"file:{self.home}/data/kilonova.db?mode=rw", uri=True, timeout=0, isolation_level=None
        )
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as problem:
            if not problem.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
            return False
        finally:
            database.close()
        return True

    def images(self) -> dict[str, str]:
        """Return name -> status of the private images of the user demo."""
        return {
            image.name: image.status for image in self.seed.demo.image.images(visibility="private")
        }

    def is_at_step(self, server: str, step: str) -> bool:
        """Return True if the server's action waits in this step for the result of a host."""
        return bool(
            self.rows(
                "SELECT 1 FROM actions WHERE server_id = ? AND step = ? AND state = 'waiting' "
                "AND host IS NOT NULL",
                server,
                step,
            )
        )

    def awaits_hosts(self, servers: list[str]) -> bool:
        """Return True if an action of the servers waits for a host, or a guest must be removed."""
        condition = f"server_id IN ({', '.join('?' * len(servers))})"
        return bool(
            self.rows(
                f"SELECT 1 FROM actions WHERE {condition} AND state = 'waiting' AND host IS NOT NULL "
                f"UNION SELECT 1 FROM guests WHERE {condition} AND wanted = 'absent'",
                *servers,
                *servers,
            )
        )

    # --- diagnosis of a failed test: failures.Diagnosable ---
    def bookmark(self) -> Bookmark:
        return Bookmark(time.time_ns() // 1000, evidence.sizes(self._logs()))

    def diagnosis(self, since: Bookmark) -> dict[str, Callable[[], Iterable[str]]]:
        if not (self.home / "log").exists():
            # The cloud does not exist yet, or was removed.
            return {}
        # The doctor runs last, because its requests add lines to the logs of external services.
        return {
            f"{self.home}: actions in hand": lambda: evidence.describe_actions(
                self._actions(since)
            ),
            f"{self.home}: logs since the test began": lambda: self._news(since),
            f"{self.home}: kilonova doctor": self._run_doctor,
        }

    def _logs(self) -> list[Path]:
        return sorted((self.home / "log").glob("*.log"))

    def _actions(self, since: Bookmark) -> list[Any]:
        return self.rows(evidence.query(since.moment))

    def _run_doctor(self) -> list[str]:
        result = self.doctor(DIAGNOSIS)
        return [*result.stdout.splitlines(), *result.stderr.splitlines()]

    def _news(self, since: Bookmark) -> list[str]:
        try:
            ids = evidence.ids(self._actions(since))
        except sqlite3.Error:
            # The part of the report about actions shows this error.
            ids = set()
        return evidence.news(self._logs(), since.sizes, ids)

    # --- leftovers ---
    def leftovers(self, server: str) -> list[str]:
        """Return the domain, records and files of a server, which a delete must remove."""
        leftovers = (
            [f"domain {domain}" for domain in self.domains() if domain == server]
            if self.cloud.has_guests
            else []
        )
        for table, column in (
            ("guests", "server_id"),
            ("allocations", "consumer_id"),
            ("consumers", "id"),
        ):
            leftovers += [
                f"{table} {row}"
                for row in self.rows(f"SELECT * FROM {table} WHERE {column} = ?", server)
            ]
        roots = (
            *self.home.glob("state*"),
            *self.home.glob("libvirt*"),
            *self.home.glob("instances"),
        )
        # Some of the files may be deleted meanwhile.
        paths = (
            Path(folder, name)
            for root in roots
            for folder, folders, files in os.walk(root)
            for name in (*folders, *files)
        )
        return leftovers + [
            str(path)
            for path in paths
            if server in str(path) and "log" not in path.relative_to(self.home).parts
        ]

    def await_removed(self, server: str, seconds: float) -> None:
        """Wait until a deleted server has no leftovers.

        Why: a failed action may leave a pending cleanup, which the host does later.
        """
        await_true(lambda: self.leftovers(server) == [], seconds, lambda: self.leftovers(server))

    def kernel_leftovers(self) -> list[str]:
        """Return the addresses, namespaces and rules of this cloud's networks in the kernel."""
        names = {
            Names.of(self.cloud.network_folder(number)).tag
            for number in range(len(self.cloud.hosts) + 1)
        }
        marks = [
            self.cloud.underlay.tag,
            f"{self.cloud.underlay.external[1]}/",
            *(f"kn-{tag}" for tag in names),
            *(f"kn_{tag}" for tag in names),
        ]
        output = "".join(
            self.run(*command).stdout
            for command in (("ip", "-o", "address"), ("ip", "netns"), ("nft", "list", "ruleset"))
        )
        return [line for line in output.splitlines() if any(mark in line for mark in marks)]

    def processes(self) -> list[str]:
        """Return the command lines of all processes that belong to this home.

        The variable KILONOVA_HOME in the environment does not make a process belong to the home.
        """
        lines, home = [], str(self.home).encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command, variables = (
                    (process / "cmdline").read_bytes(),
                    (process / "environ").read_bytes(),
                )
            except OSError:
                continue
            if home in command + variables.replace(b"KILONOVA_HOME=" + home, b""):
                lines.append(
                    f"{process.name}: {command.replace(bytes(1), b' ').decode(errors='replace')}"
                )
        return lines


def documents(text: str) -> list[Any]:
    """Return the JSON documents in a text, in order. Other lines between them are ignored."""
    # The progress of a waiting client has no line feed at the end.
    text = re.sub(r"\rProgress: \d+", "", text)
    results, decoder, at = [], json.JSONDecoder(), 0
    while match := re.compile(r"^[\[{]", re.MULTILINE).search(text, at):
        document, at = decoder.raw_decode(text, match.start())
        results.append(document)
    return results
