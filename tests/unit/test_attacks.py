# SPDX-License-Identifier: Apache-2.0
"""The attacks on running clouds say of a weak one that it is broken, and count it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.attacks import __main__ as attacks
from tests.attacks import doors, machine
from tests.attacks.target import Door, Outcome

ARGUMENTS = ["--control", "c", "--agent", "a", "--clouds", "y"]


def raises(target: Any) -> Iterator[Outcome]:
    yield Outcome("before")
    raise OSError("nobody foresaw it")


def test_what_is_broken_is_counted_and_so_is_a_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(attacks, "Target", lambda *facts: None)
    monkeypatch.setattr(
        attacks,
        "ATTACKS",
        {
            "one": lambda target: iter([Outcome("a"), Outcome("b", "too much")]),
            "two": raises,
            "three": lambda target: iter([Outcome("c", untried="no guest")]),
        },
    )
    assert attacks.main(ARGUMENTS, said.append) == 2
    assert said[:-1] == [
        "held      a",
        "BROKEN    b: too much",
        "held      before",
        "BROKEN    two: ended by OSError: nobody foresaw it",
        "not tried c: no guest",
    ]
    assert said[-1].startswith("2 held, 2 broken, 1 not tried")


@pytest.fixture
def one_at_a_time() -> Iterator[Door]:
    """A service that reads from one client until it has a whole head."""
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
        yield Door("weak", *server.getsockname())
        server.shutdown(socket.SHUT_RDWR)


def test_slow_clients_break_a_service_that_waits_for_them(
    one_at_a_time: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "SLOW_DOORS", ("weak",))
    monkeypatch.setattr(doors, "CLIENTS", {"idle": (b"", 3)})
    monkeypatch.setattr(doors, "ROUNDS", 1)
    [outcome] = doors.slow_clients(SimpleNamespace(doors={"weak": one_at_a_time}))  # type: ignore[arg-type]
    assert outcome.broken.startswith("others wait"), outcome
    begun = time.monotonic()
    assert doors.worst(one_at_a_time) < 1 and time.monotonic() - begun < 5


@pytest.mark.parametrize(("status", "broken"), [(400, ""), (500, "answered 500 application/json")])
def test_numbers_and_large_bodies_break_an_api_that_fails(
    one_at_a_time: Door, monkeypatch: pytest.MonkeyPatch, status: int, broken: str
) -> None:
    def call(*request: object, **more: object) -> SimpleNamespace:
        return SimpleNamespace(status_code=status, headers={"Content-Type": "application/json"})

    monkeypatch.setattr(doors, "SECONDS", 0.1)
    monkeypatch.setattr(doors, "worst", lambda door: 0.0)
    target: Any = SimpleNamespace(doors={"api": one_at_a_time}, call=call)
    assert {outcome.broken for outcome in doors.numbers(target)} == {broken}
    large = {outcome.broken for outcome in doors.large_bodies(target)}
    assert large == ({f"answered {{{status}}}"} if broken else {""})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(("mode", "broken"), [(0o644, "reads"), (0o622, "writes"), (0o600, "")])
def test_what_others_can_open_is_named(tmp_path: Path, mode: int, broken: str) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.name:
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "agent.db").write_text("x")
    (tmp_path / "agent.db").chmod(mode)
    [outcome] = machine.local_users(SimpleNamespace(folders=[tmp_path]))  # type: ignore[arg-type]
    assert outcome.broken == (f"{broken} {tmp_path}/agent.db" if broken else "")
