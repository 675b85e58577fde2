# SPDX-License-Identifier: Apache-2.0
"""The attacked cloud, as described by its configuration files and clouds.yaml, and outcomes.

The host of the first agent is the stolen host. The attacks work on a cloud of any installation.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import yaml
from oslo_config import cfg

from common.security import tls
from common.security.host_keys import OwnKeys
from common.service import config
from tests.waiting import await_true

#: Names of the two users in clouds.yaml.
DEMO, ADMIN = "kilonova", "kilonova-admin"
#: Number of the system call, which Python does not define. Linux has it since 5.6.
PIDFD_GETFD = 438
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attack.

    Attributes:
        attack: Title of the attack.
        broken: Effect of a successful attack, or "".
        untried: Reason why the attack could not run, or "".
    """

    attack: str
    broken: str = ""
    untried: str = ""

    def __str__(self) -> str:
        word = "BROKEN" if self.broken else "not tried" if self.untried else "held"
        reason = self.broken or self.untried
        return f"{word:<10}{self.attack}{': ' * bool(reason)}{reason}"


Attack = Callable[["Target"], Iterator[Outcome]]


@dataclass(frozen=True)
class Endpoint:
    """The address at which a service of Kilonova listens.

    With ``tls_files``, the connections use TLS, and the client presents this certificate.
    """

    name: str
    address: str
    port: int
    tls_files: tls.Tls | None = None

    def connect(self, data: bytes = b"", seconds: float = 30) -> socket.socket:
        """Connect, send data, and return the open socket.

        Args:
            data: The bytes to send.
            seconds: Timeout of each operation of the socket.
        """
        client = socket.create_connection((self.address, self.port), seconds)
        if self.tls_files is not None:
            client = self.tls_files.for_client().wrap_socket(client, server_hostname=self.address)
        client.sendall(data)
        return client

    def send(self, data: bytes, seconds: float = 30) -> tuple[bytes, float]:
        """Send data, and return all bytes until the connection ends, and the duration in seconds.

        A reset of the connection counts as the end.
        """
        start, received = time.monotonic(), b""
        with self.connect(data, seconds) as client, suppress(ConnectionResetError, ssl.SSLError):
            while piece := client.recv(65536):
                received += piece
        return received, time.monotonic() - start


@dataclass(frozen=True)
class Host:
    """A host, as described by the files of its agent.

    Attributes:
        file: The agent's configuration file.
        state: The agent's ``state_dir``.
        keys: The host's keys.
        tls_files: The agent's certificate, or None without TLS.
    """

    file: Path
    state: Path
    keys: OwnKeys
    tls_files: tls.Tls | None

    @classmethod
    def read(cls, file: Path) -> Host:
        """Read the agent's configuration file and the host's keys."""
        conf = config.load(str(file))
        state = Path(conf.state_dir)
        key = Path(conf.agent.key_file or state / "host.key")
        return cls(file, state, OwnKeys.read(key, conf.host), tls.of(conf))

    @property
    def name(self) -> str:
        return self.keys.host

    @property
    def conf(self) -> cfg.ConfigOpts:
        """The agent's configuration.

        The configuration is global to this process. The next read of a ``conf`` replaces it.
        """
        return config.load(str(self.file))


class Target:
    """A running cloud.

    Attributes:
        control: Configuration file of the control plane.
        folders: The folders with all files of the cloud.
        login: Private SSH key for the guest "first" of the user demo, or None.
        hosts: The hosts of the agents, the stolen host first.
    """

    def __init__(
        self,
        control: Path,
        agents: list[Path],
        clouds: Path,
        folders: list[Path],
        login: Path | None = None,
    ) -> None:
        self.control, self.folders, self.login = control, folders, login
        self.hosts = [Host.read(file) for file in agents]
        self._clouds = yaml.safe_load(clouds.read_text())["clouds"]
        self._tokens: dict[str, Any] = {}
        self.session = requests.Session()
        # Proxies of this machine are not part of the cloud.
        self.session.trust_env = False

    @property
    def stolen(self) -> Host:
        return self.hosts[0]

    @property
    def conf(self) -> cfg.ConfigOpts:
        """The control plane's configuration, which is also global (see ``Host.conf``)."""
        return config.load(str(self.control))

    # --- the addresses of the services ---
    @cached_property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints of API, placement, metadata and image gateway, by name."""
        host_tls, conf = self.stolen.tls_files, self.conf
        return {
            name: Endpoint(name, ANYWHERE.get(options.host, options.host), options.port, tls_files)
            for name, options, tls_files in (
                ("api", conf.api, None),
                ("placement", conf.placement, None),
                ("metadata", conf.metadata, host_tls),
                ("image-gateway", conf.image_gateway, host_tls),
            )
        }

    @cached_property
    def identity_url(self) -> str:
        return str(self._clouds[DEMO]["auth"]["auth_url"])

    def url(self, kind: str) -> str:
        """Return the public URL of a service in the catalogue, or "".

        Args:
            kind: Type of the service: compute, image or network.
        """
        return next(
            (
                str(endpoint["url"]).rstrip("/")
                for service in self.token(ADMIN)["catalog"]
                if service["type"] == kind
                for endpoint in service["endpoints"]
                if endpoint["interface"] == "public"
            ),
            "",
        )

    # --- users and requests ---
    def credentials(self, cloud: str) -> dict[str, Any]:
        """Return the section ``auth`` of a user in clouds.yaml."""
        return dict(self._clouds[cloud]["auth"])

    def authenticate(self, name: str, password: str, project: str = "") -> requests.Response:
        """Request a token from the identity service."""
        domain = {"id": "default"}
        auth: dict[str, Any] = {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"name": name, "domain": domain, "password": password}},
            }
        }
        if project:
            auth["scope"] = {"project": {"name": project, "domain": domain}}
        return self.session.post(
            f"{self.identity_url}/auth/tokens", json={"auth": auth}, timeout=30
        )

    def token(self, cloud: str) -> dict[str, Any]:
        """Return the token of a user in clouds.yaml, with its value in the field "value"."""
        if cloud not in self._tokens:
            auth = self.credentials(cloud)
            reply = self.authenticate(auth["username"], auth["password"], auth["project_name"])
            reply.raise_for_status()
            self._tokens[cloud] = reply.json()["token"] | {
                "value": reply.headers["X-Subject-Token"]
            }
        return dict(self._tokens[cloud])

    def call(
        self, method: str, path: str, body: Any = None, cloud: str = DEMO, **more: Any
    ) -> requests.Response:
        """Send a request to the compute API.

        Args:
            method: HTTP method.
            path: Path and query below the API's URL.
            body: Body, which is encoded as JSON.
            cloud: User in clouds.yaml.
            more: Further arguments of ``requests.request``, for example ``data`` for a raw body.
        """
        headers = {
            "X-Auth-Token": self.token(cloud)["value"],
            "OpenStack-API-Version": "compute 2.96",
            "Content-Type": "application/json",
        } | more.pop("headers", {})
        data = more.pop("data", None if body is None else json.dumps(body))
        return self.session.request(
            method,
            f"{self.url('compute')}{path}",
            data=data,
            headers=headers,
            timeout=more.pop("timeout", 60),
            **more,
        )

    @contextmanager
    def create_server(self, host: str = "") -> Iterator[str]:
        """Create a server of the admin without networks, yield its id, and delete the server.

        Args:
            host: Host of the server, by default any.

        Raises:
            AssertionError: The server is not ACTIVE after two minutes.
        """
        flavors = self.call("GET", "/flavors?sort_key=memory_mb", cloud=ADMIN).json()["flavors"]
        images = self.session.get(
            f"{self.url('image')}/v2/images",
            headers={"X-Auth-Token": self.token(ADMIN)["value"]},
            timeout=60,
        ).json()["images"]
        reply = self.call(
            "POST",
            "/servers",
            {
                "server": {
                    "name": "attacked",
                    "flavorRef": flavors[0]["id"],
                    "imageRef": images[0]["id"],
                    "networks": "none",
                    **({"host": host} if host else {}),
                }
            },
            cloud=ADMIN,
        )
        assert reply.status_code == 202, reply.text
        server = str(reply.json()["server"]["id"])
        try:
            await_true(
                lambda: self.read_state(server)["status"] == "ACTIVE",
                120,
                lambda: self.read_state(server),
                pause=0.5,
            )
            yield server
        finally:
            self.call("DELETE", f"/servers/{server}", cloud=ADMIN)

    def read_state(self, server: str) -> dict[str, Any]:
        """Return everything about a server that forged messages of its host could change."""
        view = self.call("GET", f"/servers/{server}", cloud=ADMIN).json()["server"]
        actions = self.call("GET", f"/servers/{server}/os-instance-actions", cloud=ADMIN).json()
        diagnostics = self.call("GET", f"/servers/{server}/diagnostics", cloud=ADMIN)
        return {
            "status": view["status"],
            **{
                name: view[f"OS-EXT-STS:{name}"]
                for name in ("task_state", "vm_state", "power_state")
            },
            "host": view["OS-EXT-SRV-ATTR:host"],
            "actions": sorted(action["action"] for action in actions["instanceActions"]),
            "guest": diagnostics.json().get("state", diagnostics.text),
        }

    @contextmanager
    def suspend_agent(self, host: Host) -> Iterator[None]:
        """Stop the host's agent and close its connections to the broker, for the block."""
        [agent] = [pid for pid in processes(host.file) if "kilonova-agent" in command(pid)]
        os.kill(agent, signal.SIGSTOP)
        try:
            _close_connections(agent, urlsplit(host.keys.transport_url).port or 5672)
            yield
        finally:
            os.kill(agent, signal.SIGCONT)


def processes(conf: Path) -> Iterator[int]:
    """Yield the ids of the processes with this configuration file in their title or environment."""
    variable = f"KILONOVA_CONF={conf}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            title = (process / "cmdline").read_bytes().strip(b"\0").split(b" ")
            if str(conf).encode() in title or variable in (process / "environ").read_bytes().split(
                b"\0"
            ):
                yield int(process.name)


def command(pid: int) -> str:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _close_connections(pid: int, port: int) -> None:
    """Shut down another process's connections to this port."""
    sockets = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(path)]
    process = os.pidfd_open(pid)
    for number in sockets:
        copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=copy) as connection, suppress(OSError):
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
    os.close(process)


def _is_socket(path: Path) -> bool:
    with suppress(OSError):
        return str(path.readlink()).startswith("socket:")
    return False
