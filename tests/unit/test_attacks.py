# SPDX-License-Identifier: Apache-2.0
"""The attacks in ``tests.attacks`` report weak services as broken."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.attacks import __main__ as attacks
from tests.attacks import machine, services
from tests.attacks.target import Endpoint, Outcome

ARGUMENTS = ["--control", "c", "--agent", "a", "--clouds", "y"]


def fail_with_os_error(target: Any) -> Iterator[Outcome]:
    yield Outcome("before")
    raise OSError("nobody foresaw it")


def test_attacks_main_counts_broken_outcomes_and_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(attacks, "Target", lambda *facts: None)
    monkeypatch.setattr(
        attacks,
        "ATTACKS",
        {
            "one": lambda target: iter([Outcome("a"), Outcome("b", "too much")]),
            "two": fail_with_os_error,
            "three": lambda target: iter([Outcome("c", untried="no guest")]),
        },
    )
    assert attacks.main(ARGUMENTS, lines.append) == 2
    assert lines[:-1] == [
        "held      a",
        "BROKEN    b: too much",
        "held      before",
        "BROKEN    two: ended by OSError: nobody foresaw it",
        "not tried c: no guest",
    ]
    assert lines[-1].startswith("2 held, 2 broken, 1 not tried")


@pytest.fixture
def serial_service() -> Iterator[Endpoint]:
    """Yield a weak service that serves one client at a time, until its request arrives."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while True:
                try:
                    client = server.accept()[0]
                except OSError:
                    return
                with client:
                    client.settimeout(0.5)
                    try:
                        client.recv(1000)
                    except TimeoutError:
                        continue
                    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield Endpoint("weak", *server.getsockname())
        server.shutdown(socket.SHUT_RDWR)


def test_slow_clients_attack_reports_service_with_one_client_at_a_time(
    serial_service: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SLOW_SERVICES", ("weak",))
    monkeypatch.setattr(services, "CLIENTS", {"idle": (b"", 3)})
    monkeypatch.setattr(services, "ROUNDS", 1)
    [outcome] = services.slow_clients(SimpleNamespace(endpoints={"weak": serial_service}))  # type: ignore[arg-type]
    assert outcome.broken.startswith("others wait"), outcome
    start = time.monotonic()
    assert services.measure_slowest_request(serial_service) < 1 and time.monotonic() - start < 5


@pytest.mark.parametrize(("status", "broken"), [(400, ""), (500, "answered 500 application/json")])
def test_numbers_and_large_bodies_attacks_report_an_api_with_status_500(
    serial_service: Endpoint, monkeypatch: pytest.MonkeyPatch, status: int, broken: str
) -> None:
    def call(*request: object, **more: object) -> SimpleNamespace:
        return SimpleNamespace(status_code=status, headers={"Content-Type": "application/json"})

    monkeypatch.setattr(services, "SECONDS", 0.1)
    monkeypatch.setattr(services, "measure_slowest_request", lambda endpoint: 0.0)
    target: Any = SimpleNamespace(endpoints={"api": serial_service}, call=call)
    assert {outcome.broken for outcome in services.numbers(target)} == {broken}
    large = {outcome.broken for outcome in services.large_bodies(target)}
    assert large == ({f"answered {{{status}}}"} if broken else {""})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(("mode", "broken"), [(0o644, "reads"), (0o622, "writes"), (0o600, "")])
def test_local_users_attack_names_file_open_to_other_users(mode: int, broken: str) -> None:
    # Not below tmp_path: each start of pytest closes the parent of that folder to other users.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "agent.db").write_text("x")
        (folder / "agent.db").chmod(mode)
        target: Any = SimpleNamespace(folders=[folder])
        [outcome] = machine.local_users(target)
    assert outcome.broken == (f"{broken} {folder}/agent.db" if broken else "")
