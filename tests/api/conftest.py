# SPDX-License-Identifier: Apache-2.0
"""The API in one process: the real application over SQLite, with in-memory neighbours and callers
by header."""

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
    """Counts how often conductors were woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self, neighbours: bool = False) -> None:
        self.woken += 1


class Agents:
    """Hosts that answer what they were told to, or not at all."""

    def __init__(self) -> None:
        self.output: str | None = "one\ntwo\nthree"
        self.diagnostics: dict[str, Any] = {}
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.told: list[tuple[str, Command]] = []
        self.hold: threading.Event | None = None
        self.silent: set[str] = set()
        #: hosts whose driver does not tell it, as long as it is None
        self.uptime: str | None = None

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        self.told += [(host, command) for command in commands]
        return host not in self.silent

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        self.asked.append((host, verb, arguments))
        if self.hold is not None:
            self.hold.wait(10)
        if self.output is None or host in self.silent:
            raise errors.NoAnswer(f"{host} did not answer")
        if verb == "uptime":
            if self.uptime is None:
                raise errors.NotImplementedHere("This driver does not tell its host's uptime.")
            return {"uptime": self.uptime}
        return self.diagnostics if verb == "diagnostics" else {"output": self.output}


class Images:
    """An image service with the images that a test puts into it."""

    def __init__(self) -> None:
        self.down = False
        self.records: dict[str, dict[str, Any]] = {}
        self.asked: list[dict[str, str]] = []
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
        self.asked.append(dict(query))
        return list(self.records.values())[: int(query["limit"])]

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        record = {**self.records[image_id], **properties}
        self.records[image_id] = {key: value for key, value in record.items() if value is not None}

    def delete(self, image_id: str, token: str) -> None:
        del self.records[image_id]


#: token -> user, project, roles
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
    """What the middleware for tokens says of a request, from a table instead of the identity
    service."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        known = TOKENS.get(environ.get("HTTP_X_AUTH_TOKEN", ""))
        if known:
            environ |= {
                "HTTP_X_IDENTITY_STATUS": "Confirmed",
                "HTTP_X_USER_ID": known[0],
                "HTTP_X_PROJECT_ID": known[1],
                "HTTP_X_ROLES": known[2],
            }
        return self.inner(environ, start_response)


def _version(answer: falcon.testing.Result) -> int:
    """The microversion that an answer has; under the old root the lowest."""
    return microversions.number(answer.headers.get(HEADER, "compute 2.1"))


@cache
def default_policy() -> Policy:
    """Without a file the rules are the same for all, and a tenth of a second's work."""
    return Policy(COMPUTE_RULES)


class Cloud:
    """The application and everything around it, with shortcuts for requests."""

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
        """Tables, two flavors and a host."""
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
        """Write rows as the conductor would."""
        with self.store.begin() as tx:
            tx.execute(sa.update(table).where(where).values(**values))

    def rest(self, server_id: str, vm_state: str = "active", **values: Any) -> None:
        """Let a server rest in a state on host1, as when its create is done."""
        self.change(
            schema.servers,
            schema.servers.c.id == server_id,
            **{
                "vm_state": vm_state,
                "task_state": None,
                "action": None,
                "power_state": 1,
                "host": "host1",
                "availability_zone": "nova",
                **values,
            },
        )

    def rows(self, table: sa.Table) -> list[Any]:
        return self.store.read(lambda tx: list(tx.execute(sa.select(table))))

    def meanwhile(self, read: str, work: Callable[[], None]) -> None:
        """Let others' ``work`` be committed once, right after the next statement that begins like
        this has read."""
        left = [work]

        def executed(_: Any, __: Any, statement: str, *rest: Any) -> None:
            if left and statement.startswith(read):
                left.pop()()

        sa.event.listen(self.store.engine, "after_cursor_execute", executed)

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
        sent = {"X-Auth-Token": token} if token else {}
        sent |= {"OpenStack-API-Version": f"compute {mv}"} if mv else {}
        sent |= headers or {}
        path, _, query = path.partition("?")
        content = {"json": body} if raw is None else {"body": raw}
        if raw is not None:
            sent = {"Content-Type": "application/json", **sent}
        answer = self.client.simulate_request(
            method, root + path, headers=sent, query_string=query, **content
        )
        unsendable = [
            item for item in answer.headers.items() if not HEADER_VALUE_RE.fullmatch(item[1])
        ]
        assert unsendable == [], "the server would refuse to send it"
        if root:
            nova.judge(
                method,
                root + path,
                body,
                _version(answer),
                answer.status_code,
                answer.json if answer.text else None,
            )
        return answer

    def create(self, name: str = "vm", token: str = "user", mv: str = "2.1", **more: Any) -> str:
        """A server's id."""
        body: dict[str, Any] = {
            "server": {"name": name, "imageRef": IMAGE, "flavorRef": "1", **more}
        }
        if mv != "2.1":
            body["server"].setdefault("networks", "none")
        answer = self.call("POST", "/servers", body, token=token, mv=mv)
        assert answer.status_code == 202, answer.text
        return str(answer.json["server"]["id"])


#: Writes rows into a cloud.
Prepare = Callable[[Cloud], None]


@pytest.fixture(scope="session")
def database_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Prepare | None], Path]:
    """Returns a database with tables, flavors, a host and the rows of a function, to be copied."""

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
    database_of: Callable[[Prepare | None], Path], tmp_path: Path
) -> Iterator[Callable[..., Cloud]]:
    """Makes the cloud of a test, with settings of its own and the rows of a function."""
    made: list[Cloud] = []

    def make(prepare: Prepare | None = None, **settings: Any) -> Cloud:
        path = tmp_path / f"api{len(made)}.db"
        shutil.copy(database_of(prepare), path)
        made.append(Cloud(f"sqlite:///{path}", **settings))
        return made[-1]

    yield make
    for cloud in made:
        arguments_are_declared(cloud)
        cloud.store.close()


def arguments_are_declared(cloud: Cloud) -> None:
    """Whatever the API has asked for in a test: each workflow declares the arguments that it was
    given."""
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
        assert row.args.keys() <= {one.name for one in dataclasses.fields(kind)}, row.workflow


@pytest.fixture
def networks() -> Networks:
    """An empty network service, which admins and services see all of."""
    return Networks(
        {
            token: None if roles in ("admin", "service") else project
            for token, (_, project, roles) in TOKENS.items()
        }
    )


@pytest.fixture
def wired(make_cloud: Callable[..., Cloud], networks: Networks) -> Cloud:
    """A cloud with that network service."""
    return make_cloud(networks=networks)


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """The cloud of a test."""
    return make_cloud()


@pytest.fixture(scope="session")
def whole_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """All services behind their middleware."""
    from tests.surface.world import World  # which needs this file

    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture
def world(whole_world: World) -> World:
    """That, as it was when it was made."""
    for site in whole_world.sites.values():
        site.set_back()
    return whole_world
