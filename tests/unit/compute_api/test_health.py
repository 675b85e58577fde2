# SPDX-License-Identifier: Apache-2.0
"""What load balancers are told, and what it may cost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

import common.rpc  # noqa: F401  # chooses threads before oslo.messaging is imported
from common.clients import http
from common.domain import errors
from common.rpc.broker import require_answer
from compute_api.http.health import (
    ALIVE,
    KEEP_SECONDS,
    READY,
    Dependency,
    Health,
    add_health_checks,
)


class Counted:
    """A dependency that counts its looks, and fails while ``problem`` is set."""

    def __init__(self) -> None:
        self.looks = 0
        self.problem: Exception | None = None

    def __call__(self) -> None:
        self.looks += 1
        if self.problem:
            raise self.problem


class World:
    def __init__(self, patience: float = 20) -> None:
        self.now = 0.0
        self.database, self.broker = Counted(), Counted()
        needs = [
            Dependency("database", self.database),
            Dependency("broker", self.broker, required=False),
        ]
        self.health = Health(needs, lambda: self.now, patience)

    def ready(self) -> tuple[int, dict[str, Any]]:
        found = self.health.answer(READY)
        assert found is not None
        return found


def test_all_is_well() -> None:
    world = World()
    assert world.ready() == (
        200,
        {
            "status": "ready",
            "dependencies": {
                "database": {"status": "ok", "required": True},
                "broker": {"status": "ok", "required": False},
            },
        },
    )


def test_each_dependency_is_named_with_what_users_are_told() -> None:
    world = World()
    world.database.problem = errors.NoStore()
    status, body = world.ready()
    assert (status, body["status"]) == (503, "not ready")
    assert body["dependencies"]["database"]["message"] == errors.NoStore().text
    assert body["dependencies"]["broker"]["status"] == "ok"


def test_what_nobody_foresaw_is_not_told() -> None:
    world = World()
    world.database.problem = ValueError("user kilonova, password canary")
    status, body = world.ready()
    assert status == 503 and "canary" not in json.dumps(body)


def test_without_what_is_not_required_it_is_ready() -> None:
    world = World()
    world.broker.problem = errors.Unavailable("The broker does not answer.")
    status, body = world.ready()
    assert (status, body["status"]) == (200, "ready")
    assert body["dependencies"]["broker"]["status"] == "failed"


def test_many_questions_are_one_look() -> None:
    world = World()
    for _ in range(50):
        world.ready()
    assert (world.database.looks, world.broker.looks) == (1, 1)
    world.now = KEEP_SECONDS
    world.database.problem = errors.NoStore()
    assert world.ready()[0] == 503 and world.database.looks == 2
    world.now, world.database.problem = 2 * KEEP_SECONDS, None
    assert world.ready()[0] == 200


def test_to_be_alive_needs_nothing() -> None:
    world = World()
    world.database.problem = errors.NoStore()
    assert world.health.answer(ALIVE) == (200, {"status": "alive"})
    assert world.database.looks == 0


def test_silence_is_told_in_time_and_not_asked_again() -> None:
    world, wait = World(patience=0.05), threading.Event()
    looks: list[int] = []

    def silent() -> None:
        looks.append(1)
        assert wait.wait(20)

    world.health = Health([Dependency("database", silent)], lambda: world.now, 0.05)
    try:
        for look in range(3):
            world.now = look * KEEP_SECONDS
            status, body = world.ready()
            assert status == 503
            assert body["dependencies"]["database"]["message"] == "no answer in 0.05 s"
        assert looks == [1]
    finally:
        wait.set()


def asked(
    world: World, path: str, method: str = "GET", unless: str | None = None, **more: str
) -> tuple[str, bytes]:
    def application(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("300 Multiple Choices", [])
        return [b"as before"]

    environ: dict[str, Any] = {"PATH_INFO": path, "REQUEST_METHOD": method}
    setup_testing_defaults(environ)
    said: list[str] = []
    items = add_health_checks(application, world.health, unless)(
        {**environ, **more}, lambda status, headers: said.append(status)
    )
    return said[0], b"".join(items)


def test_two_paths_are_answered_and_no_other() -> None:
    world = World()
    assert asked(world, ALIVE) == ("200 OK", b'{"status":"alive"}')
    assert asked(world, READY, "HEAD") == ("200 OK", b"")
    world.database.problem, world.now = errors.NoStore(), KEEP_SECONDS
    assert asked(world, READY)[0] == "503 Service Unavailable"
    before = ("300 Multiple Choices", b"as before")
    for path in ("/", "/healthcheck/", "/healthcheck/ready/x", "/healthchecks", "/v2.1"):
        assert asked(world, path) == before, path
    assert asked(world, ALIVE, "POST") == asked(world, READY, "DELETE") == before


def test_a_guest_is_told_nothing_of_the_cloud() -> None:
    world = World()
    given = {"HTTP_X_INSTANCE_ID": "some"}
    assert asked(world, READY, unless="HTTP_X_INSTANCE_ID", **given)[1] == b"as before"
    assert asked(world, READY, unless="HTTP_X_INSTANCE_ID")[0] == "200 OK"
    assert asked(world, READY, **given)[0] == "200 OK"


@pytest.mark.parametrize(
    ("status", "answers"), [(200, True), (401, True), (300, True), (503, False)]
)
def test_a_service_answers_unless_it_fails_inside(status: int, answers: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *said: Any) -> None:
            """No line on the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v3"
    try:
        if answers:
            http.require_answer(url)
        else:
            with pytest.raises(errors.Unavailable, match="answers 503"):
                http.require_answer(url)
    finally:
        thread.join(10)
        server.server_close()
    with pytest.raises(errors.Unavailable, match="does not answer"):
        http.require_answer(url)


def test_a_broker_that_refuses_does_not_answer() -> None:
    collected: list[float] = []

    class Connection:
        @property
        def default_channel(self) -> object:
            raise ConnectionRefusedError(111, "Connection refused")

        def collect(self, socket_timeout: float) -> None:
            collected.append(socket_timeout)

    connect: Callable[..., Connection] = lambda heartbeat: Connection()  # noqa: E731
    with pytest.raises(errors.Unavailable, match="transport_url"):
        require_answer(connect)
    assert collected == [1]
