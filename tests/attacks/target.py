# SPDX-License-Identifier: Apache-2.0
"""The cloud that is attacked, as its configuration files and clouds.yaml tell it; and what is said
of an attack.

The first agent's host is the stolen one. Nothing here depends on how the cloud was set up.
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

DEMO, ADMIN = "kilonova", "kilonova-admin"  # in clouds.yaml
PIDFD_GETFD = 438  # since Linux 5.6; Python has no name for it
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Outcome:
    """Of one attack. ``broken``: what it achieved; ``untried``: why it could not be tried."""

    attack: str
    broken: str = ""
    untried: str = ""

    def __str__(self) -> str:
        word = "BROKEN" if self.broken else "not tried" if self.untried else "held"
        why = self.broken or self.untried
        return f"{word:<10}{self.attack}{': ' * bool(why)}{why}"


Attack = Callable[["Target"], Iterator[Outcome]]


@dataclass(frozen=True)
class Door:
    """Where a service of ours listens. ``proof``: it speaks TLS, and is shown this certificate."""

    name: str
    address: str
    port: int
    proof: tls.Tls | None = None

    def connect(self, said: bytes = b"", seconds: float = 30) -> socket.socket:
        """A connection on which so much has been said."""
        client = socket.create_connection((self.address, self.port), seconds)
        if self.proof is not None:
            client = self.proof.for_client().wrap_socket(client, server_hostname=self.address)
        client.sendall(said)
        return client

    def ask(self, said: bytes, seconds: float = 30) -> tuple[bytes, float]:
        """All that is answered until the connection ends, and after how many seconds."""
        begun, came = time.monotonic(), b""
        with self.connect(said, seconds) as client, suppress(ConnectionResetError, ssl.SSLError):
            while piece := client.recv(65536):
                came += piece
        return came, time.monotonic() - begun


@dataclass(frozen=True)
class Host:
    """A host, as its agent's files tell it. ``proof``: what it shows where TLS is spoken."""

    file: Path
    state: Path
    keys: OwnKeys
    proof: tls.Tls | None

    @classmethod
    def read(cls, file: Path) -> Host:
        conf = config.load(str(file))
        state = Path(conf.state_dir)
        key = Path(conf.agent.key_file or state / "host.key")
        return cls(file, state, OwnKeys.read(key, conf.host), tls.of(conf))

    @property
    def name(self) -> str:
        return self.keys.host

    @property
    def conf(self) -> cfg.ConfigOpts:
        """Its configuration, which is this process's from now until another one is asked for."""
        return config.load(str(self.file))


class Target:
    """``folders``: all that the cloud keeps; ``login``: the private key for a guest of the user
    demo that is called first, if there is one."""

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
        self.session.trust_env = False  # a proxy is not what is attacked

    @property
    def stolen(self) -> Host:
        return self.hosts[0]

    @property
    def conf(self) -> cfg.ConfigOpts:
        """The control plane's configuration; see ``Host.conf``."""
        return config.load(str(self.control))

    # --- where its services are ---
    @cached_property
    def doors(self) -> dict[str, Door]:
        """API, placement, metadata, image gateway."""
        proof, conf = self.stolen.proof, self.conf
        return {
            name: Door(name, ANYWHERE.get(options.host, options.host), options.port, shown)
            for name, options, shown in (
                ("api", conf.api, None),
                ("placement", conf.placement, None),
                ("metadata", conf.metadata, proof),
                ("image-gateway", conf.image_gateway, proof),
            )
        }

    @cached_property
    def identity_url(self) -> str:
        return str(self._clouds[DEMO]["auth"]["auth_url"])

    def url(self, kind: str) -> str:
        """Of a service in the catalogue: compute, image, network; empty when it is not there."""
        return next(
            (
                str(end["url"]).rstrip("/")
                for service in self.token(ADMIN)["catalog"]
                if service["type"] == kind
                for end in service["endpoints"]
                if end["interface"] == "public"
            ),
            "",
        )

    # --- who asks ---
    def credentials(self, cloud: str) -> dict[str, Any]:
        """What clouds.yaml has of a user."""
        return dict(self._clouds[cloud]["auth"])

    def prove(self, name: str, password: str, project: str = "") -> requests.Response:
        """Ask the identity service for a token."""
        domain = {"id": "default"}
        asked: dict[str, Any] = {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"name": name, "domain": domain, "password": password}},
            }
        }
        if project:
            asked["scope"] = {"project": {"name": project, "domain": domain}}
        return self.session.post(
            f"{self.identity_url}/auth/tokens", json={"auth": asked}, timeout=30
        )

    def token(self, cloud: str) -> dict[str, Any]:
        """Of a user in clouds.yaml; its value stands under "value"."""
        if cloud not in self._tokens:
            auth = self.credentials(cloud)
            reply = self.prove(auth["username"], auth["password"], auth["project_name"])
            reply.raise_for_status()
            self._tokens[cloud] = reply.json()["token"] | {
                "value": reply.headers["X-Subject-Token"]
            }
        return dict(self._tokens[cloud])

    def call(
        self, method: str, path: str, body: Any = None, cloud: str = DEMO, **more: Any
    ) -> requests.Response:
        """Ask the compute API; ``more`` are options of requests."""
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
    def server(self, host: str = "") -> Iterator[str]:
        """A running server without networks, of the admin; it is deleted afterwards."""
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
                lambda: self.account(server)["status"] == "ACTIVE",
                120,
                lambda: self.account(server),
                pause=0.5,
            )
            yield server
        finally:
            self.call("DELETE", f"/servers/{server}", cloud=ADMIN)

    def account(self, server: str) -> dict[str, Any]:
        """All of a server that an attack on its host's messages could change."""
        shown = self.call("GET", f"/servers/{server}", cloud=ADMIN).json()["server"]
        acted = self.call("GET", f"/servers/{server}/os-instance-actions", cloud=ADMIN).json()
        told = self.call("GET", f"/servers/{server}/diagnostics", cloud=ADMIN)
        return {
            "status": shown["status"],
            **{
                name: shown[f"OS-EXT-STS:{name}"]
                for name in ("task_state", "vm_state", "power_state")
            },
            "host": shown["OS-EXT-SRV-ATTR:host"],
            "actions": sorted(one["action"] for one in acted["instanceActions"]),
            "guest": told.json().get("state", told.text),
        }

    @contextmanager
    def silent(self, host: Host) -> Iterator[None]:
        """The host's own agent says nothing for the block, and hears nothing."""
        [agent] = [pid for pid in processes(host.file) if "kilonova-agent" in command(pid)]
        os.kill(agent, signal.SIGSTOP)
        try:
            _hang_up(agent, urlsplit(host.keys.transport_url).port or 5672)
            yield
        finally:
            os.kill(agent, signal.SIGCONT)


def processes(conf: Path) -> Iterator[int]:
    """Yield the processes that run with this configuration file."""
    wanted = f"KILONOVA_CONF={conf}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def command(pid: int) -> str:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _hang_up(pid: int, port: int) -> None:
    """End a process's connections to this port."""
    found = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(path)]
    process = os.pidfd_open(pid)
    for number in found:
        taken = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
        if taken < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=taken) as one, suppress(OSError):
            if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                one.shutdown(socket.SHUT_RDWR)
    os.close(process)


def _is_socket(path: Path) -> bool:
    with suppress(OSError):
        return str(path.readlink()).startswith("socket:")
    return False
