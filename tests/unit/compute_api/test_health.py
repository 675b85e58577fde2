# SPDX-License-Identifier: Apache-2.0
"""Health checks for load balancers: their answers, and the number of checks behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

import common.rpc  # noqa: F401  # selects threads before oslo.messaging is imported
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


class CountingDependency:
    """A dependency that counts its checks, and fails while ``problem`` is set."""

    def __init__(self) -> None:
        self.checks = 0
        self.problem: Exception | None = None

    def __call__(self) -> None:
        self.checks += 1
        if self.problem:
            raise self.problem


class World:
    def __init__(self, patience: float = 20) -> None:
        self.now = 0.0
        self.database, self.broker = CountingDependency(), CountingDependency()
        needs = [
            Dependency("database", self.database),
            Dependency("broker", self.broker, required=False),
        ]
        self.health = Health(needs, lambda: self.now, patience)

    def ready(self) -> tuple[int, dict[str, Any]]:
        answer = self.health.answer(READY)
        assert answer is not None
        return answer


def test_health_ready_returns_200_when_all_dependencies_answer() -> None:
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


def test_health_ready_returns_503_with_public_message_of_failed_dependency() -> None:
    world = World()
    world.database.problem = errors.NoStore()
    status, body = world.ready()
    assert (status, body["status"]) == (503, "not ready")
    assert body["dependencies"]["database"]["message"] == errors.NoStore().text
    assert body["dependencies"]["broker"]["status"] == "ok"


def test_health_ready_hides_text_of_unexpected_error() -> None:
    world = World()
    world.database.problem = ValueError("user kilonova, password canary")
    status, body = world.ready()
    assert status == 503 and "canary" not in json.dumps(body)


def test_health_ready_returns_200_when_optional_dependency_fails() -> None:
    world = World()
    world.broker.problem = errors.Unavailable("The broker does not answer.")
    status, body = world.ready()
    assert (status, body["status"]) == (200, "ready")
    assert body["dependencies"]["broker"]["status"] == "failed"


def test_health_ready_checks_each_dependency_once_per_cache_period() -> None:
    world = World()
    for _ in range(50):
        world.ready()
    assert (world.database.checks, world.broker.checks) == (1, 1)
    world.now = KEEP_SECONDS
    world.database.problem = errors.NoStore()
    assert world.ready()[0] == 503 and world.database.checks == 2
    world.now, world.database.problem = 2 * KEEP_SECONDS, None
    assert world.ready()[0] == 200


def test_health_alive_checks_no_dependency() -> None:
    world = World()
    world.database.problem = errors.NoStore()
    assert world.health.answer(ALIVE) == (200, {"status": "alive"})
    assert world.database.checks == 0


def test_health_ready_returns_503_for_hanging_dependency_checked_once() -> None:
    world, wait = World(patience=0.05), threading.Event()
    checks: list[int] = []

    def hang() -> None:
        checks.append(1)
        assert wait.wait(20)

    world.health = Health([Dependency("database", hang)], lambda: world.now, 0.05)
    try:
        for round_number in range(3):
            world.now = round_number * KEEP_SECONDS
            status, body = world.ready()
            assert status == 503
            assert body["dependencies"]["database"]["message"] == "no answer in 0.05 s"
        assert checks == [1]
    finally:
        wait.set()


def call_application(
    world: World, path: str, method: str = "GET", unless: str | None = None, **more: str
) -> tuple[str, bytes]:
    def application(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("300 Multiple Choices", [])
        return [b"as before"]

    environ: dict[str, Any] = {"PATH_INFO": path, "REQUEST_METHOD": method}
    setup_testing_defaults(environ)
    statuses: list[str] = []
    items = add_health_checks(application, world.health, unless)(
        {**environ, **more}, lambda status, headers: statuses.append(status)
    )
    return statuses[0], b"".join(items)


def test_health_checks_answer_get_and_head_of_two_paths_only() -> None:
    world = World()
    assert call_application(world, ALIVE) == ("200 OK", b'{"status":"alive"}')
    assert call_application(world, READY, "HEAD") == ("200 OK", b"")
    world.database.problem, world.now = errors.NoStore(), KEEP_SECONDS
    assert call_application(world, READY)[0] == "503 Service Unavailable"
    before = ("300 Multiple Choices", b"as before")
    for path in ("/", "/healthcheck/", "/healthcheck/ready/x", "/healthchecks", "/v2.1"):
        assert call_application(world, path) == before, path
    assert (
        call_application(world, ALIVE, "POST") == call_application(world, READY, "DELETE") == before
    )


def test_health_checks_leave_requests_with_guest_header_to_application() -> None:
    world = World()
    guest_headers = {"HTTP_X_INSTANCE_ID": "some"}
    assert (
        call_application(world, READY, unless="HTTP_X_INSTANCE_ID", **guest_headers)[1]
        == b"as before"
    )
    assert call_application(world, READY, unless="HTTP_X_INSTANCE_ID")[0] == "200 OK"
    assert call_application(world, READY, **guest_headers)[0] == "200 OK"


@pytest.mark.parametrize(
    ("status", "is_answer"), [(200, True), (401, True), (300, True), (503, False)]
)
def test_require_answer_accepts_every_status_except_server_errors(
    status: int, is_answer: bool
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Write no log to the tests' output."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v3"
    try:
        if is_answer:
            http.require_answer(url)
        else:
            with pytest.raises(errors.Unavailable, match="answers 503"):
                http.require_answer(url)
    finally:
        thread.join(10)
        server.server_close()
    with pytest.raises(errors.Unavailable, match="does not answer"):
        http.require_answer(url)


def test_require_answer_raises_unavailable_when_broker_refuses() -> None:
    timeouts: list[float] = []

    class Connection:
        @property
        def default_channel(self) -> object:
            raise ConnectionRefusedError(111, "Connection refused")

        def collect(self, socket_timeout: float) -> None:
            timeouts.append(socket_timeout)

    connect: Callable[..., Connection] = lambda heartbeat: Connection()  # noqa: E731
    with pytest.raises(errors.Unavailable, match="transport_url"):
        require_answer(connect)
    assert timeouts == [1]
