# SPDX-License-Identifier: Apache-2.0
"""The start of a process: the lock of the state folder, and the notification of systemd."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.service import service


def test_second_agent_on_state_folder_in_use_exits_with_message(tmp_path: Path) -> None:
    first = service.only_one(str(tmp_path / "state"), "agent")
    with pytest.raises(
        SystemExit,
        match=f"kilonova-agent: another kilonova-agent uses {tmp_path}/state; give each process its",
    ):
        service.only_one(str(tmp_path / "state"), "agent")
    service.only_one(str(tmp_path / "other"), "agent").close()
    first.close()
    service.only_one(str(tmp_path / "state"), "agent").close()


#: A process whose database never answers.
WAITING_PROCESS = """
import threading
from common.service import config, service

service.PATIENCE = 0.1
service.run("conductor", config.load(), lambda conf: threading.Event().wait())
"""


def test_process_waiting_for_database_notifies_systemd_and_ends_at_sigterm(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING_PROCESS],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
            stdin=subprocess.DEVNULL,
        )
        try:
            lines = notices.recv(1000).decode().splitlines()
            assert lines[0] == "READY=1"
            assert lines[1].startswith("STATUS=waits for a service that it needs")
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
