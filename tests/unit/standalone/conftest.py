# SPDX-License-Identifier: Apache-2.0
"""The embedded identity, image and network services in this process, with SQLite databases.

Requests go through falcon's test client.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from falcon.testing import Result, TestClient

from compute_api.metadata.proxy_headers import host_key
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity import app as identity_app
from deploy.one_machine.services.identity import schema as identity_schema
from deploy.one_machine.services.identity.bootstrap import bootstrap
from deploy.one_machine.services.identity.service import IdentityService
from deploy.one_machine.services.image import app as image_app
from deploy.one_machine.services.image import schema as image_schema
from deploy.one_machine.services.image.files import ImageFiles
from deploy.one_machine.services.image.store import ImageStore
from deploy.one_machine.services.network import app as network_app
from deploy.one_machine.services.network import schema as network_schema
from deploy.one_machine.services.network.fabric import Fabric, NetworkSettings
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key

PASSWORD = "correct horse"


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class Identity:
    """The identity service. ``request`` uses an admin's token by default."""

    def __init__(self, database: Database) -> None:
        self.clock = Clock()
        self._admin_tokens: dict[datetime, str] = {}
        self.client = TestClient(
            identity_app.build(IdentityService(database, timedelta(hours=12), self.clock))
        )

    def login(self, scope: Any = None, **user: Any) -> Result:
        user_body = {"name": "admin", "domain": {"id": "default"}, "password": PASSWORD} | user
        auth: dict[str, Any] = {
            "identity": {"methods": ["password"], "password": {"user": user_body}}
        }
        return self.authenticate(auth | ({} if scope is None else {"scope": scope}))

    def authenticate(self, auth: Any) -> Result:
        return self.client.simulate_post("/v3/auth/tokens", json={"auth": auth})

    def request(self, method: str, path: str, token: str | None = None, **options: Any) -> Result:
        headers = {"X-Auth-Token": token or self._admin_token()} | options.pop("headers", {})
        return self.client.simulate_request(method, path, headers=headers, **options)

    def _admin_token(self) -> str:
        """Return the same token until the time changes, because each login hashes a password."""
        if self.clock.now not in self._admin_tokens:
            self._admin_tokens[self.clock.now] = self.token()
        return self._admin_tokens[self.clock.now]

    def token(self) -> str:
        answer = self.login({"project": {"name": "admin", "domain": {"id": "default"}}})
        return str(answer.headers["X-Subject-Token"])


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identity]:
    database = Database(
        tmp_path_factory.mktemp("identity") / "identity.db", identity_schema.METADATA
    )
    bootstrap(
        database, {"admin": PASSWORD, "kilonova": PASSWORD}, {"image": "http://127.0.0.1:9292"}
    )
    yield Identity(database)
    database.close()


class Images:
    """The image service, with the headers of keystonemiddleware for a member of project "mine"."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    def request(self, method: str, path: str, **options: Any) -> Result:
        headers = {
            "X-Identity-Status": "Confirmed",
            "X-Roles": "member,reader",
            "X-Project-Id": "mine",
        }
        return self._client.simulate_request(
            method, path, headers=headers | options.pop("headers", {}), **options
        )

    def create(self, **attributes: Any) -> str:
        body = {"name": "image", "disk_format": "raw", "container_format": "bare"} | attributes
        answer = self.request("POST", "/v2/images", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json["id"])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    folder: Path = tmp_path_factory.mktemp("image")
    database = Database(folder / "images.db", image_schema.METADATA)
    yield Images(
        TestClient(image_app.build(ImageStore(database, ImageFiles(folder / "images", 1024))))
    )
    database.close()


class Network:
    """The network service, with keystonemiddleware's headers. Default: a member of "mine"."""

    def __init__(self, fabric: Fabric) -> None:
        fabric.settings = replace(fabric.settings, host_secret="a secret of the services")
        self.fabric = fabric
        self._client = TestClient(network_app.build(fabric))

    def call(
        self, method: str, path: str, body: Any = None, project: str = "mine", role: str = "member"
    ) -> Result:
        headers = {"X-Identity-Status": "Confirmed", "X-Roles": role, "X-Project-Id": project}
        return self._client.simulate_request(method, f"/v2.0{path}", headers=headers, json=body)

    def call_as_host(
        self, method: str, path: str, call_as_host: str, body: Any = None, key_of: str = ""
    ) -> Result:
        """Send a request to /kilonova/hosts/HOST with the key of this host or of ``key_of``."""
        key = wiring_key(host_key(self.fabric.settings.host_secret, key_of or call_as_host))
        return self._client.simulate_request(
            method, f"/v2.0/kilonova/hosts/{call_as_host}{path}", json=body, headers={HEADER: key}
        )

    def describe_host(self, call_as_host: str) -> Any:
        """Return the network description for a host."""
        answer = self.call_as_host("GET", "/description", call_as_host)
        assert answer.status_code == 200, answer.text
        return answer.json

    def get(self, path: str, **caller: str) -> Any:
        """Send a GET that must return 200, and return the body."""
        answer = self.call("GET", path, **caller)
        assert answer.status_code == 200, answer.text
        return answer.json

    def create(
        self, noun: str, role: str = "member", project: str = "mine", **attributes: Any
    ) -> Any:
        """Create a resource and return its representation."""
        answer = self.call("POST", f"/{noun.replace('_', '-')}s", {noun: attributes}, project, role)
        assert answer.status_code == 201, answer.text
        return answer.json[noun]

    def change(self, noun: str, key: str, role: str = "member", **attributes: Any) -> Any:
        """Update a resource and return the new representation."""
        answer = self.call(
            "PUT", f"/{noun.replace('_', '-')}s/{key}", {noun: attributes}, role=role
        )
        assert answer.status_code == 200, answer.text
        return answer.json[noun]

    def delete(self, noun: str, key: str, role: str = "member") -> None:
        answer = self.call("DELETE", f"/{noun.replace('_', '-')}s/{key}", role=role)
        assert answer.status_code == 204, answer.text

    def refusal(self, method: str, path: str, body: Any = None, **caller: str) -> tuple[int, str]:
        """Send a request that must fail. Return the status and Neutron's error type."""
        answer = self.call(method, path, body, **caller)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json["NeutronError"]["type"]

    def create_network(self, cidr: str = "10.0.0.0/24", **attributes: Any) -> tuple[str, str]:
        """Create a network with a subnet, and return both ids."""
        network = self.create("network")["id"]
        version = 6 if ":" in cidr else 4
        return network, self.create(
            "subnet", network_id=network, cidr=cidr, ip_version=version, **attributes
        )["id"]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database with the tables of the network service, to be copied."""
    path = tmp_path_factory.mktemp("network") / "empty.db"
    Database(path, network_schema.METADATA).close()
    return path


@pytest.fixture
def network(tmp_path: Path, empty_database: Path) -> Iterator[Network]:
    """Yield a network service without hosts."""
    shutil.copy(empty_database, tmp_path / "network.db")
    database = Database(tmp_path / "network.db", network_schema.METADATA)
    yield Network(Fabric(database, NetworkSettings(has_hosts=False)))
    database.close()
