# SPDX-License-Identifier: Apache-2.0
"""The embedded services as real processes on free ports, with their data in a scratch folder.

``with running(folder, with_image=True) as cloud:`` bootstraps and starts the services, and stops
them with SIGTERM at the end. Their logs stay in the folder. A service that does not answer within
30 seconds raises RuntimeError with the end of its log.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openstack

from deploy.testing.servers import free_ports
from tests.e2e import preloaded

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 30.0
#: Environment variable with the address of a machine with Keystone and Glance, and the passwords of
#: the users admin and kilonova.
REAL_CLOUD = "KILONOVA_TEST_CLOUD"


@dataclass(frozen=True)
class Cloud:
    """The addresses, ports and secrets of the services.

    The passwords belong to the users admin and kilonova. The catalogue contains the network and
    the volume service if they have a port.
    """

    folder: Path
    identity_port: int
    image_port: int
    admin_password: str
    service_password: str
    metadata_secret: str
    address: str = "127.0.0.1"
    network_port: int = 0
    volume_port: int = 0

    @property
    def auth_url(self) -> str:
        return f"http://{self.address}:{self.identity_port}/v3"

    @property
    def image_url(self) -> str:
        return f"http://{self.address}:{self.image_port}"

    def passwords(self) -> dict[str, str]:
        """Return the environment with the passwords for the services' commands."""
        return os.environ | {
            "KILONOVA_ADMIN_PASSWORD": self.admin_password,
            "KILONOVA_SERVICE_PASSWORD": self.service_password,
            "KILONOVA_METADATA_SECRET": self.metadata_secret,
        }

    def openstack(self, *commands: str, **settings: str) -> list[Any]:
        """Run commands in one ``openstack`` process as admin and return the JSON of each.

        Args:
            commands: Commands with the option ``-f json``.
            settings: OS_* variables of the environment.

        Raises:
            RuntimeError: The process has written to stderr. The exit status is ignored, because the
                interactive mode always exits with 1.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
        env |= {
            "OS_AUTH_URL": self.auth_url,
            "OS_USERNAME": "admin",
            "OS_PASSWORD": self.admin_password,
            "OS_PROJECT_NAME": "admin",
            "OS_USER_DOMAIN_ID": "default",
            "OS_PROJECT_DOMAIN_ID": "default",
            "OS_IDENTITY_API_VERSION": "3",
            **settings,
        }
        client = Path(sys.executable).with_name("openstack")
        process = preloaded.run(client, text="\n".join(commands), seconds=60, environment=env)
        if process.stderr.strip():
            raise RuntimeError(process.stderr)
        answers, text = [], process.stdout.strip()
        while text:
            answer, end = json.JSONDecoder().raw_decode(text)
            answers.append(answer)
            text = text[end:].strip()
        return answers

    def bootstrap(self, **endpoints: str) -> None:
        """Fill the database of the identity service. This can be repeated.

        Args:
            endpoints: URLs of further services by type.
        """
        if self.network_port:
            endpoints["network"] = f"http://{self.address}:{self.network_port}"
        if self.volume_port:
            endpoints["block-storage"] = f"http://{self.address}:{self.volume_port}/v3"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "deploy.one_machine.services.identity",
                "bootstrap",
                "--db",
                self.folder / "identity.db",
                "--endpoint",
                f"identity={self.auth_url}",
                "--endpoint",
                f"image={self.image_url}",
                *(
                    word
                    for name, url in endpoints.items()
                    for word in ("--endpoint", f"{name}={url}")
                ),
            ],
            cwd=ROOT,
            env=self.passwords(),
            check=True,
        )

    @contextmanager
    def identity(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the identity service for the block, and yield the process."""
        with self._service(
            "identity", self.identity_port, "--db", str(self.folder / "identity.db")
        ) as process:
            yield process

    @contextmanager
    def image(
        self, max_megabytes: int = 8, idle_seconds: float = 60
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run the image service for the block, and yield the process."""
        with self._service(
            "image",
            self.image_port,
            "--data",
            str(self.folder / "image"),
            "--auth-url",
            self.auth_url,
            "--idle-seconds",
            str(idle_seconds),
            "--max-megabytes",
            str(max_megabytes),
        ) as process:
            yield process

    @contextmanager
    def network(self, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the network service on this port."""
        with self._service(
            "network",
            port,
            "--db",
            str(self.folder / "network.db"),
            "--auth-url",
            self.auth_url,
            *options,
        ) as process:
            yield process

    @contextmanager
    def volume(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the volume service for the block, and yield the process."""
        with self._service(
            "volume",
            self.volume_port,
            "--data",
            str(self.folder / "volume"),
            "--auth-url",
            self.auth_url,
            *options,
        ) as process:
            yield process

    @contextmanager
    def _service(self, name: str, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        log = self.folder / f"{name}.log"
        command = [
            sys.executable,
            "-m",
            f"deploy.one_machine.services.{name}",
            "serve",
            "--bind",
            f"127.0.0.1:{port}",
        ]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*command, *options],
                cwd=ROOT,
                env=self.passwords(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _await_answer(process, f"http://127.0.0.1:{port}/", log)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def connect(cloud: Cloud, user: str, password: str, project: str) -> Any:
    """Return an openstacksdk connection to this cloud for a user."""
    return openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        region_name="RegionOne",
        auth={
            "auth_url": cloud.auth_url,
            "username": user,
            "password": password,
            "project_name": project,
            "user_domain_id": "default",
            "project_domain_id": "default",
        },
    )


@contextmanager
def running(folder: Path, *, with_image: bool, **ports: int) -> Iterator[Cloud]:
    """Run a new identity service, and an image service if requested, in an empty folder.

    If ``REAL_CLOUD`` is set, the cloud has the real services of that machine instead.

    Args:
        folder: Folder for the data and logs.
        with_image: True to run the image service.
        ports: network_port and volume_port, if the caller runs these services.
    """
    if REAL_CLOUD in os.environ:
        yield _real(folder)
        return
    secret = secrets.token_hex
    cloud = Cloud(folder, free_ports(1), free_ports(1), secret(12), secret(12), secret(12), **ports)
    cloud.bootstrap()
    with ExitStack() as stack:
        stack.enter_context(cloud.identity())
        if with_image:
            stack.enter_context(cloud.image())
        yield cloud


@contextmanager
def running_api(cloud: Cloud, database_url: str, options: str = "") -> Iterator[str]:
    """Run an API process with the cloud's identity service, and yield its URL.

    Args:
        cloud: The cloud.
        database_url: URL of the API's database.
        options: Lines of the section [api].
    """
    port, file, notify = free_ports(1), cloud.folder / "api.conf", cloud.folder / "notify"
    file.write_text(
        f"[DEFAULT]\nsecret_key = key\n[database]\nurl = {database_url}\n[api]\nport = {port}\n"
        f"{options}\n[identity]\nauth_url = {cloud.auth_url}\npassword = {cloud.service_password}\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(notify))
        notices.settimeout(TIMEOUT_SECONDS)
        with (cloud.folder / "api.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "compute_api.compute.service"],
                cwd=ROOT,
                env=os.environ | {"KILONOVA_CONF": str(file), "NOTIFY_SOCKET": str(notify)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            notices.recv(1000)
            yield f"http://127.0.0.1:{port}/v2.1"
        finally:
            process.terminate()
            process.wait(TIMEOUT_SECONDS)


def _real(folder: Path) -> Cloud:
    address, admin, own = os.environ[REAL_CLOUD].split()
    return Cloud(folder, 5000, 9292, admin, own, "", address)


def _await_answer(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            # The service does not report when it begins to listen.
            time.sleep(0.05)
    raise RuntimeError(f"Nothing answers at {url}; the end of {log}:\n{log.read_text()[-2000:]}")
