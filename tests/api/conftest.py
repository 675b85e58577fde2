# SPDX-License-Identifier: Apache-2.0
"""The real API application in one process over SQLite, with in-memory services and test tokens."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import falcon.testing
import pytest
import sqlalchemy as sa
from gunicorn.http.wsgi import HEADER_VALUE_RE

from common.clients.image import Image
from common.domain import errors
from common.domain.models import Access, Command, Flavor, HostInventory, ImageRef
from common.security.vault import Vault
from common.store import schema
from common.store.engine import Store, now
from common.store.hosts import hosts
from compute_api.compute import app
from compute_api.compute.policies import COMPUTE_RULES
from compute_api.compute.request import microversions
from compute_api.compute.request.dependencies import ApiSettings, Services
from compute_api.http.microversions import HEADER
from compute_api.http.policy import Policy
from conductor.workflows import WORKFLOWS
from tests.api.networks import Networks
from tests.nova import schemas as nova
from tests.schemas import upgrade

if TYPE_CHECKING:
    from tests.surface.world import World

IMAGE = "70a599e0-31e7-49b7-b260-868f441e862b"
PROJECT, OTHER = "p" * 32, "q" * 32


class ConductorWakeup:
    """A wake-up of conductors that only counts the calls."""

    def __init__(self) -> None:
        self.count = 0

    def wake(self, service_calls: bool = False) -> None:
        self.count += 1


class Agents:
    """Hosts with configurable answers. A silent host does not answer.

    ``queries`` and ``commands`` record the messages to hosts. A query waits for ``release`` if a
    test sets this event.
    """

    def __init__(self) -> None:
        self.output: str | None = "one\ntwo\nthree"
        self.diagnostics: dict[str, Any] = {}
        self.queries: list[tuple[str, str, dict[str, Any]]] = []
        self.commands: list[tuple[str, Command]] = []
        self.release: threading.Event | None = None
        self.silent: set[str] = set()
        #: None for hosts with a driver that does not report the uptime.
        self.uptime: str | None = None

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        self.commands += [(host, command) for command in commands]
        return host not in self.silent

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        self.queries.append((host, verb, arguments))
        if self.release is not None:
            self.release.wait(10)
        if self.output is None or host in self.silent:
            raise errors.NoAnswer(f"{host} did not answer")
        if verb == "uptime":
            if self.uptime is None:
                raise errors.NotImplementedHere("This driver does not tell its host's uptime.")
            return {"uptime": self.uptime}
        return self.diagnostics if verb == "diagnostics" else {"output": self.output}


class Images:
    """An image service in memory with the images and records of a test."""

    def __init__(self) -> None:
        self.down = False
        self.records: dict[str, dict[str, Any]] = {}
        self.queries: list[dict[str, str]] = []
        self.images = {
            IMAGE: Image(ImageRef(IMAGE, "qcow2", 1024**2, properties={"architecture": "x86_64"}))
        }

    def show(self, image_id: str, token: str) -> Image:
        if self.down:
            raise errors.Unavailable("The image service does not answer; try again later.")
        if image_id not in self.images:
            raise errors.BadRequest(f"Can not find requested image {image_id}.")
        return self.images[image_id]

    def url(self, image_id: str) -> str:
        return f"http://images/v2/images/{image_id}"

    def record(self, image_id: str, token: str) -> dict[str, Any]:
        if image_id not in self.records:
            raise errors.NotFound(f"Image {image_id} could not be found.")
        if token == "stranger":
            raise errors.Forbidden("The image service does not let this user read it.")
        return self.records[image_id]

    def page(self, query: Mapping[str, str], token: str) -> list[dict[str, Any]]:
        self.queries.append(dict(query))
        return list(self.records.values())[: int(query["limit"])]

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        record = {**self.records[image_id], **properties}
        self.records[image_id] = {key: value for key, value in record.items() if value is not None}

    def delete(self, image_id: str, token: str) -> None:
        del self.records[image_id]


#: User, project and roles of each token.
TOKENS = {
    "user": ("u1", PROJECT, "member,reader"),
    "admin": ("a1", "admins", "admin"),
    "reader": ("u2", PROJECT, "reader"),
    "service": ("k1", "services", "service"),
    "stranger": ("u3", OTHER, "member"),
    "manager": ("u4", PROJECT, "manager"),
    "nobody": ("u5", PROJECT, ""),
}


class Callers:
    """A middleware that identifies callers by a table instead of the identity service."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        identity = TOKENS.get(environ.get("HTTP_X_AUTH_TOKEN", ""))
        if identity:
            environ |= {
                "HTTP_X_IDENTITY_STATUS": "Confirmed",
                "HTTP_X_USER_ID": identity[0],
                "HTTP_X_PROJECT_ID": identity[1],
                "HTTP_X_ROLES": identity[2],
            }
        return self.inner(environ, start_response)


def answer_version(answer: falcon.testing.Result) -> int:
    """Return the microversion number of an answer. Without a header this is 2.1."""
    return microversions.number(answer.headers.get(HEADER, "compute 2.1"))


@cache
def default_policy() -> Policy:
    """Return the default policy, cached because parsing the rules takes a tenth of a second."""
    return Policy(COMPUTE_RULES)


_SET_SERVER = sa.update(schema.servers).where(schema.servers.c.id == sa.bindparam("server"))


class Cloud:
    """The application and its services, with shortcuts for requests and database changes."""

    def __init__(
        self,
        url: str,
        secret_key: str = "",
        networks: Networks | None = None,
        policy_file: str | None = None,
        keystone: Any = None,
        **settings: Any,
    ) -> None:
        self.store = Store(url)
        self.wakeup, self.agents, self.images = ConductorWakeup(), Agents(), Images()
        self.vault = Vault(secret_key) if secret_key else None
        self.services = Services(
            self.store,
            self.wakeup,
            self.agents,
            self.images,
            ApiSettings(**{"answer_timeout_seconds": 0, **settings}),
            self.vault,
            networks,
            keystone,
        )
        policy = Policy(COMPUTE_RULES, policy_file) if policy_file else default_policy()
        self.client = falcon.testing.TestClient(Callers(app.create(self.services, policy)))

    def furnish(self) -> None:
        """Create the tables, two flavors and host1."""
        upgrade(self.store)
        for number, (name, vcpus, memory, disk) in enumerate(
            (("m1.tiny", 1, 512, 1), ("m1.small", 1, 2048, 20)), 1
        ):
            self.add_flavor(Flavor(str(number), name, vcpus, memory, disk))
        self.add_host("host1")

    def add_flavor(self, flavor: Flavor) -> None:
        with self.store.begin() as tx:
            tx.execute(
                sa.insert(schema.flavors).values(created_at=now()),
                {
                    "flavorid": flavor.id,
                    "name": flavor.name,
                    "vcpus": flavor.vcpus,
                    "memory_mb": flavor.memory_mb,
                    "root_gb": flavor.root_gb,
                    "ephemeral_gb": flavor.ephemeral_gb,
                    "swap_mb": flavor.swap_mb,
                    "is_public": True,
                    "extra_specs": flavor.extra_specs,
                },
            )

    def add_host(self, name: str) -> None:
        self.store.write(
            lambda tx: hosts.register(
                tx,
                name,
                "boot",
                HostInventory(
                    "QEMU", 7002000, name + ".cloud", 8, 16384, 100, "192.0.2.1", {"arch": "x86_64"}
                ),
            )
        )

    def change(self, table: sa.Table, where: Any, **values: Any) -> None:
        """Update rows directly, as a conductor does."""
        with self.store.begin() as tx:
            tx.execute(sa.update(table).where(where).values(**values))

    def set_state(self, server_id: str, vm_state: str = "active", **values: Any) -> None:
        """Set the state of a server on host1 without a task, as after a completed create."""
        columns = {
            "vm_state": vm_state,
            "task_state": None,
            "action": None,
            "power_state": 1,
            "host": "host1",
            "availability_zone": "nova",
            **values,
        }
        with self.store.begin() as tx:
            tx.execute(_SET_SERVER, {"server": server_id, **columns})

    def rows(self, table: sa.Table) -> list[Any]:
        return self.store.read(lambda tx: list(tx.execute(sa.select(table))))

    def run_after_statement(self, read: str, work: Callable[[], None]) -> None:
        """Call ``work`` once, right after the next statement that begins with ``read``.

        The call commits a change of another client between two statements of a request.
        """
        pending = [work]

        def run_pending(_: Any, __: Any, statement: str, *rest: Any) -> None:
            if pending and statement.startswith(read):
                pending.pop()()

        sa.event.listen(self.store.engine, "after_cursor_execute", run_pending)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        mv: str | None = "2.1",
        token: str | None = "user",
        root: str = "/v2.1",
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> falcon.testing.Result:
        sent_headers = {"X-Auth-Token": token} if token else {}
        sent_headers |= {"OpenStack-API-Version": f"compute {mv}"} if mv else {}
        sent_headers |= headers or {}
        path, _, query = path.partition("?")
        content = {"json": body} if raw is None else {"body": raw}
        if raw is not None:
            sent_headers = {"Content-Type": "application/json", **sent_headers}
        answer = self.client.simulate_request(
            method, root + path, headers=sent_headers, query_string=query, **content
        )
        unsendable = [
            item for item in answer.headers.items() if not HEADER_VALUE_RE.fullmatch(item[1])
        ]
        assert unsendable == [], "the HTTP server refuses such headers"
        if root:
            nova.judge(
                method,
                root + path,
                body,
                answer_version(answer),
                answer.status_code,
                answer.json if answer.text else None,
            )
        return answer

    def create(self, name: str = "vm", token: str = "user", mv: str = "2.1", **more: Any) -> str:
        """Create a server, and return its id."""
        body: dict[str, Any] = {
            "server": {"name": name, "imageRef": IMAGE, "flavorRef": "1", **more}
        }
        if mv != "2.1":
            body["server"].setdefault("networks", "none")
        answer = self.call("POST", "/servers", body, token=token, mv=mv)
        assert answer.status_code == 202, answer.text
        return str(answer.json["server"]["id"])


#: A function that writes rows into a new cloud.
Prepare = Callable[[Cloud], None]


@pytest.fixture(scope="session")
def prepare_database(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Prepare | None], Path]:
    """Return a function that prepares a database and returns its path, for copies.

    The database has tables, flavors and a host, and the rows of the function ``prepare``.
    """

    @cache
    def make(prepare: Prepare | None) -> Path:
        path = tmp_path_factory.mktemp("api") / "prepared.db"
        if prepare is not None:
            shutil.copy(make(None), path)
        cloud = Cloud(f"sqlite:///{path}")
        (prepare or Cloud.furnish)(cloud)
        cloud.store.close()
        return path

    return make


@pytest.fixture
def make_cloud(
    prepare_database: Callable[[Prepare | None], Path], tmp_path: Path
) -> Iterator[Callable[..., Cloud]]:
    """Yield a function that creates a cloud with settings and prepared rows.

    At the end of the test the arguments of all recorded actions are checked.
    """
    clouds: list[Cloud] = []

    def make(prepare: Prepare | None = None, **settings: Any) -> Cloud:
        path = tmp_path / f"api{len(clouds)}.db"
        shutil.copy(prepare_database(prepare), path)
        clouds.append(Cloud(f"sqlite:///{path}", **settings))
        return clouds[-1]

    yield make
    for cloud in clouds:
        assert_arguments_are_declared(cloud)
        cloud.store.close()


def assert_arguments_are_declared(cloud: Cloud) -> None:
    """Check that each workflow declares the arguments of the actions that the API recorded."""
    rows = cloud.store.read(
        lambda tx: list(
            tx.execute(
                sa.select(schema.actions.c.workflow, schema.actions.c.args).where(
                    schema.actions.c.workflow != ""
                )
            )
        )
    )
    for row in rows:
        kind = WORKFLOWS[row.workflow].args
        assert row.args.keys() <= {field.name for field in dataclasses.fields(kind)}, row.workflow


@pytest.fixture
def networks() -> Networks:
    """Return an empty network service. Admins and services see all its records."""
    return Networks(
        {
            token: None if roles in ("admin", "service") else project
            for token, (_, project, roles) in TOKENS.items()
        }
    )


@pytest.fixture
def networked_cloud(make_cloud: Callable[..., Cloud], networks: Networks) -> Cloud:
    """Return a cloud with this network service."""
    return make_cloud(networks=networks)


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud with default settings and without a network service."""
    return make_cloud()


@pytest.fixture(scope="session")
def session_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield all services behind their middleware, shared by the tests of a session."""
    # tests.surface.world imports this module.
    from tests.surface.world import World

    with World(tmp_path_factory.mktemp("world")) as shared_world:
        yield shared_world


@pytest.fixture
def world(session_world: World) -> World:
    """Return the shared services with their databases restored."""
    for site in session_world.sites.values():
        site.reset()
    return session_world
