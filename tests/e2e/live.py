# SPDX-License-Identifier: Apache-2.0
"""A running cloud as the tests of this ring see it: its commands, its APIs, its hypervisor, what is
left behind.

Made by the fixtures in conftest.py. Nothing here reaches into a process: what is asked is asked
through a command, an API, virsh, or by reading files. ``judge`` is the oracle: ``kilonova doctor``
with hosts.
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

PROGRAMS = Path(sys.executable).parent  # not resolved: the virtual environment's
#: What guests that are emulated on a busy machine may take, seconds.
BOOT, SETTLE = 120, 120
#: ``late`` of tests.waiting: each answer of the API costs processor time that what is awaited
#: needs.
LATE = 0.2
#: What ``kilonova doctor`` may take to explain a failure, seconds.
DIAGNOSIS = 30
#: How an answer ends whose API process was killed: before it, or in the middle of it.
CUT_OFF = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)


@dataclass(frozen=True)
class Reply:
    """What the API answered."""

    status: int
    body: Any
    headers: Any = field(repr=False)

    @property
    def fault(self) -> tuple[str, int, str]:
        """(kind, code, message) of a fault body, which holds nothing else."""
        [(kind, inside)] = self.body.items()
        assert inside.keys() == {"code", "message"}, self.body
        return kind, inside["code"], inside["message"]


# fmt: off
class Rest:
    """One user's plain HTTP: every answer is returned, none is an exception; Nova's schemas judge
    each."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        if token is not None:
            self.session.headers["X-Auth-Token"] = token

    def call(self, method: str, path: str, body: Any = None, *, version: str = "2.96", data: Any = None,
             headers: dict[str, str] | None = None) -> Reply:
        """``path`` below the compute endpoint; ``data`` is sent as it is."""
        reply = self.session.request(
            method, self.url + path, timeout=60, data=data if body is None else json.dumps(body),
            headers={"OpenStack-API-Version": f"compute {version}", "Content-Type": "application/json",
                     **(headers or {})})
        try:
            found = reply.json()
        except ValueError:
            found = reply.text
        nova.judge(method, urlsplit(self.url + path).path, body, microversions.number(
            reply.headers.get(HEADER, "2.1")), reply.status_code, found if reply.text else None)
        return Reply(reply.status_code, found, reply.headers)

    def insist(self, method: str, path: str, body: Any = None, *, fine: Iterable[int], seconds: float = 60,
               headers: dict[str, str] | None = None) -> Reply:
        """Call until the API is there and answers one of ``fine``: what a patient client does."""
        last: list[object] = []

        def answered() -> Reply | None:
            try:
                reply = self.call(method, path, body, headers=headers)
            except CUT_OFF as problem:
                last[:] = [problem]
                return None
            last[:] = [reply]
            return reply if reply.status in fine else None
        found: Reply = await_true(answered, seconds, lambda: f"{method} {path}: {last}")
        return found

    def server(self, server: str) -> dict[str, Any]:
        """The server as the API shows it, {} when there is none."""
        reply = self.insist("GET", f"/servers/{server}", fine=(200, 404))
        return dict(reply.body["server"]) if reply.status == 200 else {}

    def servers(self) -> list[dict[str, Any]]:
        """All that the user's project has."""
        return list(self.call("GET", "/servers/detail").body["servers"])

    def console(self, server: str) -> str:
        """What the guest has said so far."""
        reply = self.insist("POST", f"/servers/{server}/action", {"os-getConsoleOutput": {}}, fine=(200, 404, 409))
        return str(reply.body["output"]) if reply.status == 200 else ""

    def create(self, *, image: str, flavor: str, name: str = "e2e", seconds: float = 60, **more: Any) -> str:
        """A server's id, once it was accepted."""
        reply = self.insist("POST", "/servers", {"server": {
            "name": name, "imageRef": image, "flavorRef": flavor, "networks": "none", **more}}, fine=(202,),
            seconds=seconds, headers={"Idempotency-Key": str(uuid.uuid4())})
        return str(reply.body["server"]["id"])

    def act(self, server: str, key: str, value: Any = None) -> Reply:
        """POST one action."""
        return self.call("POST", f"/servers/{server}/action", {key: value})

    def await_status(self, server: str, wanted: str, seconds: float = SETTLE) -> dict[str, Any]:
        """Until the server has this status and no task; ERROR ends the wait."""
        def reached() -> dict[str, Any] | None:
            found = self.server(server)
            assert found and (found["status"] != "ERROR" or wanted == "ERROR"), found
            return found if (found["status"], found["OS-EXT-STS:task_state"]) == (wanted, None) else None
        found: dict[str, Any] = await_true(reached, seconds, lambda: f"not {wanted}: {self.server(server)}", late=LATE)
        return found

    def await_gone(self, server: str, seconds: float = SETTLE) -> None:
        """Until the server is no more."""
        await_true(lambda: not self.server(server), seconds, lambda: f"still there: {self.server(server)}", late=LATE)

    def await_ready(self, server: str, times: int = 1) -> str:
        """Until the guest has said so often that it is ready; returns its console."""
        await_true(lambda: self.console(server).count(READY) >= times, BOOT,
                   lambda: f"the guest of {server} is not ready: {self.server(server)}\n{self.console(server)[-2000:]}",
                   late=LATE)
        return self.console(server)
# fmt: on


@dataclass(frozen=True)
class Bookmark:
    """Where a test began: by the clock, in microseconds, and in the logs."""

    moment: int
    sizes: dict[Path, int]


class Live:
    """One cloud with its own home and ports from ``base`` on; ``facts`` are further ones of
    ``Cloud``."""

    def __init__(self, home: Path, base: int, **facts: Any) -> None:
        self.home, self.base = home, base
        self.cloud = Cloud(home=home, ports=Ports.from_base(base), **facts)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OS_", "KILONOVA_"))
        }
        self.environment = kept | {
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
        """Run to the end, in the repository; output and errors are kept apart."""
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
        """./deploy/up"""
        return self.run(ROOT / "deploy/up", *arguments, seconds=900, **variables)

    def down(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """./deploy/down"""
        return self.run(ROOT / "deploy/down", *arguments)

    def openstack(self, *commands: str, cloud: str = "kilonova") -> list[Any]:
        """Type the commands into one ``openstack``; returns the JSON documents that they said, in
        order."""
        said, complaints = self.type(*commands, cloud=cloud)
        assert complaints == "", f"{commands}\n{said}\n{complaints}"
        return documents(said)

    def type(self, *commands: str, cloud: str = "kilonova") -> tuple[str, str]:
        """What one ``openstack`` said to these commands, and its complaints; its status tells
        nothing here."""
        done = preloaded.run(
            PROGRAMS / "openstack",
            text="\n".join(commands) + "\n",
            seconds=300,
            environment=self.environment | self._as(cloud),
        )
        return done.stdout, done.stderr

    def _as(self, cloud: str) -> dict[str, str]:
        """What ``openstack`` needs in its environment."""
        return {
            "OS_CLOUD": cloud,
            "OS_CLIENT_CONFIG_FILE": str(self.cloud.clouds_yaml),
            "PYTHONWARNINGS": "ignore",
        }

    @contextmanager
    def typist(self, folder: Path, cloud: str = "kilonova") -> Iterator[Callable[[str], None]]:
        """An ``openstack`` that stays open and takes one command after the other, while the test
        looks what came of them; at the end it must have had nothing to complain about. What it says
        is in ``folder``."""
        said, complaints = folder / "said", folder / "complaints"
        with said.open("w") as out, complaints.open("w") as err:
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
        """``kilonova`` with these words, as the cloud's operator runs it."""
        return preloaded.run(
            PROGRAMS / "kilonova",
            *words,
            text="",
            seconds=seconds,
            environment=self.environment | {"KILONOVA_CONF": str(self.cloud.config())},
        )

    def virsh(self, *arguments: str, host: int = 1) -> str:
        """Ask a host's own libvirtd."""
        uri = libvirtd.uri(self.cloud.libvirt_folder(host))
        return self.run("virsh", "-c", uri, *arguments).stdout

    def domains(self) -> list[str]:
        """The ids of all domains of all hosts, running or not."""
        return [
            one
            for host, _ in enumerate(self.cloud.hosts, 1)
            for one in self.virsh("list", "--all", "--uuid", host=host).split()
        ]

    def domain_state(self, server: str) -> str:
        """As virsh words it: running, shut off."""
        return "".join(
            self.virsh("domstate", server, host=host).strip()
            for host, _ in enumerate(self.cloud.hosts, 1)
        )

    @contextmanager
    def only(self, host: int) -> Iterator[None]:
        """New guests go to this host of several; afterwards to the first again."""
        self.open_only(host)
        try:
            yield
        finally:
            self.open_only(1)

    def open_only(self, host: int) -> None:
        """No other host than this one takes new guests."""
        compute = self.seed.admin.compute
        for service in compute.services(binary="nova-compute"):
            wanted = service.host == self.cloud.hosts[host - 1]
            if (service.status == "enabled") != wanted:
                (compute.enable_service if wanted else compute.disable_service)(service)

    def open_all(self) -> None:
        """Every host takes new guests."""
        compute = self.seed.admin.compute
        for service in list(compute.services(binary="nova-compute")):
            if service.status != "enabled":
                compute.enable_service(service)

    @contextmanager
    def configured(
        self, *processes: str, host: str | None = None, **sections: Mapping[str, str]
    ) -> Iterator[None]:
        """For the block these processes, of a host or of the cloud, run with these settings in
        place of their own; so do commands of ``kilonova``."""
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
        """``kilonova doctor``, with hosts."""
        return self.kilonova("doctor", seconds=seconds)

    def judge(self) -> None:
        """All is well by ``kilonova doctor``, and every host was asked."""
        last: list[subprocess.CompletedProcess[str]] = []

        def all_asked() -> bool:
            last[:] = [self.doctor()]
            return "did not answer" not in last[0].stderr

        await_true(all_asked, SETTLE, lambda: last[0].stderr)
        assert (last[0].returncode, last[0].stdout.strip()) == (0, "all is well"), last[0]

    # --- APIs ---
    def rest(self, user: str = "kilonova") -> Rest:
        """Plain HTTP as "kilonova" (the user demo) or "kilonova-admin"."""
        return Rest(self.cloud.api_url, self.seed.connect(user).session.get_token())

    def image(self, name: str = "tiny") -> str:
        """The id of an image."""
        return str(next(iter(self.seed.demo.image.images(name=name, status="active"))).id)

    def flavor(self, name: str = "m1.nano") -> str:
        """The id of a flavor."""
        return str(self.seed.demo.compute.find_flavor(name, ignore_missing=False).id)

    def rows(self, query: str, *values: object) -> list[Any]:
        """Read the database, without a lock that anybody could notice."""
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

    def is_writable(self) -> bool:
        """Could somebody write to the database just now?"""
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
        """Name -> status of the private images of the user demo."""
        return {
            image.name: image.status for image in self.seed.demo.image.images(visibility="private")
        }

    def doing(self, server: str, step: str) -> bool:
        """Has a host been told to do this step of the server's action, and has not answered yet?"""
        return bool(
            self.rows(
                "SELECT 1 FROM actions WHERE server_id = ? AND step = ? AND state = 'waiting' "
                "AND host IS NOT NULL",
                server,
                step,
            )
        )

    def at_work(self, servers: list[str]) -> bool:
        """Has a host been told to do something for one of the servers, or to remove it, and has not
        answered yet?"""
        one_of = f"server_id IN ({', '.join('?' * len(servers))})"
        return bool(
            self.rows(
                f"SELECT 1 FROM actions WHERE {one_of} AND state = 'waiting' AND host IS NOT NULL "
                f"UNION SELECT 1 FROM guests WHERE {one_of} AND wanted = 'absent'",
                *servers,
                *servers,
            )
        )

    # --- what a failed test prints: failures.Diagnosable ---
    def bookmark(self) -> Bookmark:
        return Bookmark(time.time_ns() // 1000, evidence.sizes(self._logs()))

    def diagnosis(self, since: Bookmark) -> dict[str, Callable[[], Iterable[str]]]:
        if not (self.home / "log").exists():
            return {}  # it was never made, or is gone
        # last: it makes neighbours write to their logs
        return {
            f"{self.home}: actions in hand": lambda: evidence.describe_actions(
                self._actions(since)
            ),
            f"{self.home}: logs since the test began": lambda: self._news(since),
            f"{self.home}: kilonova doctor": self._doctor_says,
        }

    def _logs(self) -> list[Path]:
        return sorted((self.home / "log").glob("*.log"))

    def _actions(self, since: Bookmark) -> list[Any]:
        return self.rows(evidence.query(since.moment))

    def _doctor_says(self) -> list[str]:
        said = self.doctor(DIAGNOSIS)
        return [*said.stdout.splitlines(), *said.stderr.splitlines()]

    def _news(self, since: Bookmark) -> list[str]:
        try:
            concern = evidence.ids(self._actions(since))
        except sqlite3.Error:  # told of, where the actions would be
            concern = set()
        return evidence.news(self._logs(), since.sizes, concern)

    # --- what is left ---
    def remains(self, server: str) -> list[str]:
        """Everything that a deleted server must not leave: domain, records, files."""
        found = (
            [f"domain {one}" for one in self.domains() if one == server]
            if self.cloud.has_guests
            else []
        )
        for table, column in (
            ("guests", "server_id"),
            ("allocations", "consumer_id"),
            ("consumers", "id"),
        ):
            found += [
                f"{table} {row}"
                for row in self.rows(f"SELECT * FROM {table} WHERE {column} = ?", server)
            ]
        roots = (
            *self.home.glob("state*"),
            *self.home.glob("libvirt*"),
            *self.home.glob("instances"),
        )
        # some go meanwhile
        paths = (
            Path(folder, name)
            for root in roots
            for folder, folders, files in os.walk(root)
            for name in (*folders, *files)
        )
        return found + [
            str(path)
            for path in paths
            if server in str(path) and "log" not in path.relative_to(self.home).parts
        ]

    def await_nothing_of(self, server: str, seconds: float) -> None:
        """Until nothing remains of it: what an action that failed leaves is a debt, which its host
        pays after that."""
        await_true(lambda: self.remains(server) == [], seconds, lambda: self.remains(server))

    def kernel_leftovers(self) -> list[str]:
        """What of this cloud's networks there is in the machine's kernel, its own namespace and
        others."""
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
        said = "".join(
            self.run(*command).stdout
            for command in (("ip", "-o", "address"), ("ip", "netns"), ("nft", "list", "ruleset"))
        )
        return [line for line in said.splitlines() if any(mark in line for mark in marks)]

    def processes(self) -> list[str]:
        """Command lines of all processes that belong to this home; those that were only told of it
        do not."""
        found, home = [], str(self.home).encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command, variables = (
                    (process / "cmdline").read_bytes(),
                    (process / "environ").read_bytes(),
                )
            except OSError:
                continue
            if home in command + variables.replace(b"KILONOVA_HOME=" + home, b""):
                found.append(
                    f"{process.name}: {command.replace(bytes(1), b' ').decode(errors='replace')}"
                )
        return found


def documents(text: str) -> list[Any]:
    """The JSON documents in a text, one after the other; other lines between them are dropped."""
    # A client that waits shows progress, if there is any, and ends that with no line feed.
    text = re.sub(r"\rProgress: \d+", "", text)
    found, decoder, at = [], json.JSONDecoder(), 0
    while match := re.compile(r"^[\[{]", re.MULTILINE).search(text, at):
        document, at = decoder.raw_decode(text, match.start())
        found.append(document)
    return found
