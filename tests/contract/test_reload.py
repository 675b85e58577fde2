# SPDX-License-Identifier: Apache-2.0
"""SIGHUP to real processes: an HTTP service takes a new file over with new workers and goes on when
the file is wrong; a process of our own does too."""

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

#: A process without neighbours.
IDLE = (
    "from common.service import reload, service\n"
    "def open_up(conf):\n"
    "    reload.takes('conductor.batch', then=lambda conf: print('batch', conf.conductor.batch, flush=True))\n"
    "    return lambda: None\n"
    "service.run('conductor', service.start('conductor'), open_up)\n"
)

#: The same with another thread that the system chooses for HUP.
OTHER_THREAD = "import signal, threading\n" + IDLE.replace(
    "    return",
    "    threading.Thread(target=lambda: [signal.pause() for _ in range(9)], daemon=True).start()\n"
    "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
    "    return",
)


class Process:
    """One of them, with its file and what it has said."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.path, self.log = folder / "kilonova.conf", folder / "log"
        self.port = free_ports(1)
        self.write("")
        with self.log.open("wb") as log:
            self.running = subprocess.Popen(
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

    def again(self, more: str) -> None:
        self.write(more)
        self.running.send_signal(signal.SIGHUP)

    def await_said(self, text: str) -> None:
        await_true(lambda: text in self.log.read_text(), 60, self.log.read_text)

    def answers(self) -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/", timeout=5).status_code < 600
        except (requests.ConnectionError, requests.ReadTimeout):
            # The master listens before its worker has started.
            return False


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[object]:
    made: list[Process] = []

    def start(*command: str) -> Process:
        made.append(Process(tmp_path, *command))
        return made[-1]

    yield start
    for one in made:
        one.running.kill()
        one.running.wait()


def test_an_http_service_takes_a_new_file_and_keeps_the_old_when_it_is_wrong(processes) -> None:
    service = processes("-m", "compute_api.metadata.service")
    await_true(service.answers, 60, service.log.read_text)
    service.again("rate = 7\nthreads = 3\n")
    service.await_said("in force: metadata.rate; after a restart: metadata.threads")
    await_true(service.answers, 60, service.log.read_text)
    service.again("raet = 7\n")
    service.await_said("the configuration stays as it was: ")
    assert "[metadata] has no option raet; the nearest is rate" in service.log.read_text()
    await_true(service.answers, 60, service.log.read_text)
    service.again("rate = 8\nthreads = 3\n")
    service.await_said("in force: metadata.rate; after a restart: nothing more")
    assert service.running.poll() is None


@pytest.mark.parametrize("program", [IDLE, OTHER_THREAD], ids=["idle", "other-thread"])
def test_a_process_of_our_own_takes_what_it_can(processes, program: str) -> None:
    process = processes("-c", program)
    process.await_said("ready")
    process.again("[conductor]\nbatch = 9\nfencing_timeout = 3\n")
    process.await_said("in force: conductor.batch; after a restart: conductor.fencing_timeout")
    assert "batch 9\n" in process.log.read_text()
    process.again("[conductr]\n")
    process.await_said("the nearest is [conductor]")
    process.running.terminate()
    assert process.running.wait(timeout=30) == 0
