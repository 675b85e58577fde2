# SPDX-License-Identifier: Apache-2.0
"""The access log: one line for each request, for every application, and without secrets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults

import falcon
import pytest

from common.domain import ids
from common.domain.context import RequestContext
from common.service import log
from compute_api.http import access_log
from compute_api.http.middleware import HttpRequest, RequestIds

CALLER = RequestContext(user_id="u1", project_id="p1", roles=(), request_id="")


class Resource:
    def on_get(self, req: HttpRequest, resp: falcon.Response, **params: str) -> None:
        req.context.caller = CALLER
        logging.getLogger("compute_api.inside").warning("inside")
        resp.text = "well"


def create_application() -> Any:
    application: Any = falcon.App(request_type=HttpRequest, middleware=[RequestIds("X-Id")])
    application.add_route("/things/{token}", Resource())
    return access_log.log_requests(application)


def call_application(
    application: Any, path: str, headers: dict[str, str] | None = None, query: str = ""
) -> tuple[str, dict[str, str], Iterable[bytes]]:
    environ: dict[str, Any] = {"PATH_INFO": path, "QUERY_STRING": query}
    setup_testing_defaults(environ)
    environ |= {"REMOTE_ADDR": "10.0.0.9", **(headers or {})}
    responses: list[Any] = []
    items = application(environ, lambda status, pairs: responses.append((status, dict(pairs))))
    return (*responses[0], items)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.INFO, access_log.__name__)
    return lambda: [
        record.parts  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == access_log.__name__
    ]


def test_access_log_line_contains_request_caller_and_status(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    client_request_id = ids.new_request()
    status, headers, _ = call_application(
        create_application(), "/things/1", {"HTTP_X_OPENSTACK_REQUEST_ID": client_request_id}
    )
    [line] = lines()
    assert status == "200 OK" and 0 <= line.pop("ms") < 5000
    assert line == {
        "method": "GET",
        "path": "/things/1",
        "status": 200,
        "user": "u1",
        "project": "p1",
        "request": headers["x-id"],
        "given": client_request_id,
        "client": "10.0.0.9",
    }


def test_access_log_ignores_forged_user_and_request_id(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    forged = {"HTTP_X_USER_ID": "root", "HTTP_X_OPENSTACK_REQUEST_ID": "req-1\nforged"}
    status, _, _ = call_application(create_application(), "/nothing", forged)
    [line] = lines()
    assert status.startswith("404") and line["user"] == "" and line["given"] is None


@pytest.mark.parametrize(
    ("path", "logged_path"),
    [
        ("/v2.1/os-console-auth-tokens/s3cr3t", "/v2.1/os-console-auth-tokens/***"),
        ("/v2.1/p/os-console-auth-tokens//s3cr3t/more", "/v2.1/p/os-console-auth-tokens//***/more"),
        ("/vnc?token=s3cr3t&x", "/vnc?token=***&x"),
        ("/" + "a" * 1000, "/***"),
        ("/things/" + "a" * 64 + "/x", "/things/" + "a" * 64 + "/x"),
        ("/a" * 500, "/a" * 200),
    ],
)
def test_access_log_hides_tokens_and_shortens_paths(
    path: str, logged_path: str, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    call_application(create_application(), path, query="token=s3cr3t")
    assert [line["path"] for line in lines()] == [logged_path]


def test_log_lines_of_handlers_have_request_id() -> None:
    request_ids = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            request_ids.append(log.request_id.get())

    logger, keeper = logging.getLogger("compute_api.inside"), Keeper()
    logger.addHandler(keeper)
    try:
        _, headers, _ = call_application(create_application(), "/things/1")
    finally:
        logger.removeHandler(keeper)
    assert request_ids == [headers["x-id"]] and not log.request_id.get()


def test_access_log_has_status_500_when_application_raises(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    def broken(environ: Any, start_response: Any) -> Iterable[bytes]:
        raise ValueError("no answer at all")

    with pytest.raises(ValueError, match="no answer"):
        call_application(access_log.log_requests(broken), "/x")
    assert [line["status"] for line in lines()] == [500]


def create_stream_factory(stream_kind: str) -> Callable[[], Iterable[bytes]]:
    def generator() -> Iterator[bytes]:
        yield b"one"

    class File:
        closed = False

        def read(self, size: int = 0) -> bytes:
            return b""

        def close(self) -> None:
            self.closed = True

    return generator if stream_kind == "generator" else lambda: FileWrapper(File())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("kind", ["generator", "file"])
def test_access_log_writes_line_only_when_response_stream_is_closed(
    kind: str, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    stream = create_stream_factory(kind)()

    def application(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return stream

    _, _, items = call_application(access_log.log_requests(application), "/file")
    list(items)
    assert not lines()
    items.close()  # type: ignore[attr-defined]
    assert [line["status"] for line in lines()] == [200]
    if isinstance(stream, FileWrapper):
        assert items is stream and stream.filelike.closed
