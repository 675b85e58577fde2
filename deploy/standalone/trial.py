# SPDX-License-Identifier: Apache-2.0
"""Both services as real processes on free ports over a scratch folder, for trials and tests.

`with running(folder) as cloud:` bootstraps, starts and, at the end, stops them by SIGTERM. Their logs stay in
the folder. A service that doesn't answer within 30 s raises RuntimeError with the end of its log.
"""

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

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Cloud:
    """Where the services listen, and the passwords of the users admin and kilonova."""

    folder: Path
    identity_port: int
    image_port: int
    admin_password: str
    service_password: str

    @property
    def auth_url(self) -> str:
        return f"http://127.0.0.1:{self.identity_port}/v3"

    @property
    def image_url(self) -> str:
        return f"http://127.0.0.1:{self.image_port}"

    def passwords(self) -> dict[str, str]:
        """The environment from which the services' commands take the passwords."""
        return os.environ | {"KILONOVA_ADMIN_PASSWORD": self.admin_password,
                             "KILONOVA_SERVICE_PASSWORD": self.service_password}

    def bootstrap(self) -> None:
        """Fill the identity service's database; may be repeated."""
        subprocess.run(
            [
                sys.executable,
                "-m",
                "deploy.standalone.identity",
                "bootstrap",
                "--db",
                self.folder / "identity.db",
                "--endpoint",
                f"identity={self.auth_url}",
                "--endpoint",
                f"image={self.image_url}",
            ],
            cwd=ROOT,
            env=self.passwords(),
            check=True,
        )

    @contextmanager
    def identity(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the identity service."""
        with self._service(
            "identity", self.identity_port, "--db", str(self.folder / "identity.db")
        ) as process:
            yield process

    @contextmanager
    def image(self, max_megabytes: int = 8) -> Iterator[subprocess.Popen[bytes]]:
        """Run the image service."""
        with self._service("image", self.image_port, "--data", str(self.folder / "image"), "--auth-url",
                           self.auth_url, "--max-megabytes", str(max_megabytes)) as process:
            yield process

    @contextmanager
    def _service(self, name: str, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-m", f"deploy.standalone.{name}", "serve", "--bind", f"127.0.0.1:{port}"]
        with log.open("ab") as output:
            process = subprocess.Popen([*command, *options], cwd=ROOT, env=self.passwords(), stdout=output,
                                       stderr=subprocess.STDOUT)
        try:
            _await_answer(process, f"http://127.0.0.1:{port}/", log)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running(folder: Path, *, with_image: bool) -> Iterator[Cloud]:
    """A fresh identity service, and image service if asked for, in an empty `folder`."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in held]
        cloud = Cloud(folder, ports[0], ports[1], secrets.token_urlsafe(12), secrets.token_urlsafe(12))
        cloud.bootstrap()
        for each in held:
            each.close()
        stack.enter_context(cloud.identity())
        if with_image:
            stack.enter_context(cloud.image())
        yield cloud


def _await_answer(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"Nothing answers at {url}; the end of {log}:\n{log.read_text()[-2000:]}")
