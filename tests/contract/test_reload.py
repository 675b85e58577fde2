# SPDX-License-Identifier: Apache-2.0
"""Configuration reload by SIGHUP in real processes: an HTTP service, and a minimal conductor.

A valid file takes effect. After an invalid file, the process continues with the old configuration.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from deploy.testing.servers import free_ports
from tests.waiting import await_true

#: A process without external services.
IDLE = (
    "from common.service import reload, service\n"
    "def open_up(conf):\n"
    "    reload.takes('conductor.batch', then=lambda conf: print('batch', conf.conductor.batch, flush=True))\n"
    "    return lambda: None\n"
    "service.run('conductor', service.start('conductor'), open_up)\n"
)

#: The same with another thread, which the kernel chooses for SIGHUP.
OTHER_THREAD = "import signal, threading\n" + IDLE.replace(
    "    return",
    "    threading.Thread(target=lambda: [signal.pause() for _ in range(9)], daemon=True).start()\n"
    "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
    "    return",
)


class Process:
    """A process with a configuration file and a log."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.path, self.log = folder / "kilonova.conf", folder / "log"
        self.port = free_ports(1)
        self.write("")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=log,
                env={**os.environ, "KILONOVA_CONF": str(self.path)},
            )

    def write(self, more: str) -> None:
        self.path.write_text(
            f"[database]\nurl = sqlite:///{self.path.parent}/k.db\n"
            f"[metadata]\nport = {self.port}\nproxy_shared_secret = x\n{more}"
        )

    def reload(self, more: str) -> None:
        self.write(more)
        self.process.send_signal(signal.SIGHUP)

    def await_log(self, text: str) -> None:
        await_true(lambda: text in self.log.read_text(), 60, self.log.read_text)

    def is_answering(self) -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/", timeout=5).status_code < 600
        except (requests.ConnectionError, requests.ReadTimeout):
            # The master listens before the worker has started.
            return False


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[object]:
    started: list[Process] = []

    def start(*command: str) -> Process:
        started.append(Process(tmp_path, *command))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.process.wait()


def test_sighup_http_service_reloads_valid_file_and_keeps_old_when_invalid(processes) -> None:
    service = processes("-m", "compute_api.metadata.service")
    await_true(service.is_answering, 60, service.log.read_text)
    service.reload("rate = 7\nthreads = 3\n")
    service.await_log("again in_force=metadata.rate needs_restart=metadata.threads\n")
    await_true(service.is_answering, 60, service.log.read_text)
    service.reload("raet = 7\n")
    service.await_log("the configuration stays as it was, because ")
    assert "[metadata] has no option raet; the nearest is rate" in service.log.read_text()
    await_true(service.is_answering, 60, service.log.read_text)
    service.reload("rate = 8\nthreads = 3\n")
    service.await_log("again in_force=metadata.rate\n")
    assert service.process.poll() is None


@pytest.mark.parametrize("program", [IDLE, OTHER_THREAD], ids=["idle", "other-thread"])
def test_sighup_conductor_reloads_valid_file_and_keeps_old_when_invalid(
    processes, program: str
) -> None:
    process = processes("-c", program)
    process.await_log("ready")
    process.reload("[conductor]\nbatch = 9\nfencing_timeout = 3\n")
    process.await_log("again in_force=conductor.batch needs_restart=conductor.fencing_timeout\n")
    assert "batch 9\n" in process.log.read_text()
    process.reload("[conductr]\n")
    process.await_log("the nearest is [conductor]")
    process.process.terminate()
    assert process.process.wait(timeout=30) == 0
