# SPDX-License-Identifier: Apache-2.0
"""Spans: nothing of OpenTelemetry is there while they are off; what they tell, how they find each
other, and that a collector that fails disturbs nobody."""

from __future__ import annotations

import importlib.util
import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from keystoneauth1.session import TCPKeepAliveAdapter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from oslo_config import cfg
from requests import PreparedRequest, Response

from common.clients import http
from common.domain import ids
from common.domain.errors import ConfigError
from common.service import config, tracing
from common.service.log import LogHandler, request_id
from compute_api.http import access_log
from tests.waiting import await_true

REQUEST = "req-0123abcd-4567-489a-8bcd-ef0123456789"
SERVICES = (
    "compute_api.compute.service",
    "compute_api.http.access_log",
    "conductor.service",
    "compute_agent.service",
    "scheduler.service",
)


@pytest.fixture
def conf() -> Iterator[cfg.ConfigOpts]:
    made = config.load(None)
    made.set_override("enabled", True, group="tracing")
    yield made
    tracing.stop()
    config.CONF.clear()
    config.CONF.clear_override("enabled", group="tracing")


@pytest.fixture
def finished(conf: cfg.ConfigOpts) -> Callable[[], list[ReadableSpan]]:
    """The spans that were made, when no more are."""
    memory = InMemorySpanExporter()
    tracing.start(conf, "test", lambda: memory)

    def read() -> list[ReadableSpan]:
        tracing.stop()
        return list(memory.get_finished_spans())

    return read


def step(**parts: Any) -> dict[str, Any]:
    return {
        "request": REQUEST,
        "action": "a1",
        "workflow": "create",
        "step": "guest",
        "event": "succeeded",
        "host": "h1",
        "server": "s1",
        "ms": 20.0,
        "why": None,
        **parts,
    }


def test_processes_do_not_import_optional_libraries() -> None:
    """Only tracing needs OpenTelemetry. Only upgrades need alembic, which is slow to import."""
    parts = step()
    code = f"""
import importlib, sys
from deploy.operator.commands import COMMANDS
for name in (*{SERVICES!r}, *(module for module, _, _ in COMMANDS.values())):
    importlib.import_module(name)
from common.service import config, tracing
tracing.start(config.load(None), "conductor")
tracing.request({REQUEST!r}, "GET", "/", 200, 0.1, project=None, client=None)
tracing.step({parts!r}, 1)
tracing.command({parts!r} | {{"verb": "start"}}, 1)
assert tracing.spans is None and tracing.traceparent({REQUEST!r}) is None
tracing.stop()
optional = ("alembic", "opentelemetry", "google.protobuf")
print(sorted(name for name in sys.modules if name.startswith(optional)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_spans_of_several_processes_find_each_other(
    finished: Callable[[], list[ReadableSpan]],
) -> None:
    """Each is made by another process; nothing but the request's and the action's id is known to
    all of them."""
    tracing.command({**step(), "verb": "ensure_running", "event": "done"}, 2)
    tracing.step(step(), 2)
    tracing.action({**step(), "state": "done"})
    tracing.request(REQUEST, "POST", "/servers", 202, 0.5, project="p", client=None)
    command, guest, action, request = finished()
    assert {span.context.trace_id for span in (command, guest, action, request)} == {
        int("0123abcd4567489a8bcdef0123456789", 16)
    }
    assert [span.parent and span.parent.span_id for span in (command, guest, action, request)] == [
        guest.context.span_id,
        action.context.span_id,
        request.context.span_id,
        None,
    ]
    assert [span.name for span in (command, guest, action, request)] == [
        "ensure_running",
        "create guest",
        "create",
        "POST /servers",
    ]
    assert all(span.attributes["kilonova.request_id"] == REQUEST for span in (guest, request))
    assert guest.attributes["kilonova.attempt"] == 2 and guest.attributes["kilonova.host"] == "h1"
    assert guest.end_time - guest.start_time == 20_000_000
    assert guest.resource.attributes["service.name"] == "kilonova-test"
    assert tracing.traceparent(REQUEST) is None  # it is off by now


def test_failures_are_seen_as_failures(finished: Callable[[], list[ReadableSpan]]) -> None:
    tracing.step(step(event="failed", why="It broke."), 1)
    tracing.step(step(event="undone"), 1)
    tracing.command({**step(), "verb": "stop", "event": "failed", "why": None}, 1)
    tracing.request(REQUEST, "GET", "/servers", 503, 0.1, project=None, client=None)
    tracing.request(REQUEST, "GET", "/servers", 404, 0.1, project=None, client=None)
    spans = finished()
    assert [(span.name, span.status.is_ok, span.status.description) for span in spans] == [
        ("create guest", False, "It broke."),
        ("create undo-guest", True, None),
        ("stop", False, "failed"),
        ("GET /servers", False, "status 503"),
        ("GET /servers", True, None),
    ]
    assert spans[0].context.span_id != spans[1].context.span_id


def test_a_client_s_trace_is_linked_and_not_joined(
    finished: Callable[[], list[ReadableSpan]],
) -> None:
    theirs = "4bf92f3577b34da6a3ce929d0e0e4736"
    for given in (f"00-{theirs}-00f067aa0ba902b7-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", "no"):
        tracing.request(REQUEST, "GET", "/", 200, 0.1, project=None, client=given)
    linked, *others = finished()
    [link] = linked.links
    assert f"{link.context.trace_id:032x}" == theirs and linked.parent is None
    assert f"{linked.context.trace_id:032x}" != theirs
    assert [tuple(span.links) for span in others] == [(), ()]


def test_a_request_of_the_api_has_a_span_by_its_route(
    finished: Callable[[], list[ReadableSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that it makes of other services belong to its trace."""
    requests, seen = [], []

    def answer(adapter: object, request: PreparedRequest, **options: object) -> Response:
        seen.append(request.headers.get("traceparent"))
        response = Response()
        response.status_code, response.raw = 200, io.BytesIO()
        return response

    monkeypatch.setattr(TCPKeepAliveAdapter, "send", answer)

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        environ[access_log.ROUTE] = "/v2.1/servers/{server_id}"
        requests.append(environ[access_log.REQUEST])
        http.Http("image service", "http://images").send("GET", "http://images/v2", "t")
        start_response("200 OK", [])
        return []

    served: Any = access_log.log_requests(application)  # type: ignore[arg-type]  # of few lines
    for path in ("/v2.1/servers/5", "/healthcheck"):
        served(
            {"REQUEST_METHOD": "GET", "PATH_INFO": path, "HTTP_TRACEPARENT": "x"},
            lambda status, headers: None,
        )
    [span] = finished()
    assert (span.name, span.attributes["kilonova.request_id"]) == (
        "GET /v2.1/servers/{server_id}",
        requests[0],
    )
    assert seen[0] == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def test_all_processes_trace_the_same_part_of_requests(conf: cfg.ConfigOpts) -> None:
    conf.set_override("sample_ratio", 0.25, group="tracing")
    asked = [ids.new_request() for _ in range(4000)]
    try:
        tracing.start(conf, "api", InMemorySpanExporter)
        chosen = [request for request in asked if tracing.is_traced(request)]
        tracing.start(conf, "conductor", InMemorySpanExporter)
        assert chosen == [request for request in asked if tracing.is_traced(request)]
    finally:
        conf.clear_override("sample_ratio", group="tracing")
    assert 800 < len(chosen) < 1200
    assert not tracing.is_traced("") and not tracing.is_traced("req-1")


def test_a_library_that_is_missing_is_said_at_start(
    conf: cfg.ConfigOpts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find in (lambda name: None, missing):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        with pytest.raises(ConfigError, match=r"pip install 'kilonova\[tracing\]'"):
            tracing.start(conf, "api")


def test_plain_text_to_another_machine_is_refused(conf: cfg.ConfigOpts) -> None:
    conf.set_override("endpoint", "http://192.0.2.1:4318/v1/traces", group="tracing")
    try:
        with pytest.raises(ConfigError, match=r"\[tracing\] endpoint"):
            tracing.start(conf, "api")
    finally:
        conf.clear_override("endpoint", group="tracing")


# --- a collector over HTTP ---
class Collector(ThreadingHTTPServer):
    """Takes what is sent as OTLP, or fails with ``status``."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status, self.asked = 200, 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked += 1
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.bodies.append(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Not to the tests' output."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


@pytest.fixture
def collector(conf: cfg.ConfigOpts) -> Iterator[Collector]:
    made = Collector()
    conf.set_override("endpoint", made.url, group="tracing")
    yield made
    conf.clear_override("endpoint", group="tracing")
    made.shutdown()
    made.server_close()


def test_a_collector_is_sent_the_spans(conf: cfg.ConfigOpts, collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    tracing.start(conf, "api")
    tracing.request(REQUEST, "GET", "/servers", 200, 0.1, project="p", client=None)
    tracing.stop()
    [body] = collector.bodies
    [told] = ExportTraceServiceRequest.FromString(body).resource_spans
    [span] = told.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("GET /servers", REQUEST[4:].replace("-", ""))
    assert {one.key: one.value.string_value for one in told.resource.attributes}[
        "service.name"
    ] == "kilonova-api"


@pytest.mark.parametrize("status", [400, 503])
def test_a_collector_that_fails_is_one_line_a_minute(
    conf: cfg.ConfigOpts, collector: Collector, status: int
) -> None:
    collector.status = status
    written = io.StringIO()
    handler, root = LogHandler(written), logging.getLogger()
    root.addHandler(handler)
    try:
        exporter = tracing.otlp_exporter(collector.url, True, seconds=0.2)
        tracing.start(conf, "api", lambda: exporter)
        for number in range(3):
            began = time.monotonic()
            tracing.request(REQUEST, "GET", "/servers", 200, 0.1, project=None, client=None)
            assert time.monotonic() - began < 1  # nobody waits for the collector
            assert tracing.spans is not None and tracing.spans._provider is not None
            tracing.spans._provider.force_flush()
            await_true(lambda number=number: collector.asked > number, 5)  # type: ignore[misc]  # bound at once
    finally:
        root.removeHandler(handler)
    [line] = written.getvalue().splitlines()
    assert f"1 spans were not sent to {collector.url}" in line and "[tracing] enabled" in line


def test_a_collector_that_is_not_there_delays_no_end(
    conf: cfg.ConfigOpts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "END_SECONDS", 0.2)
    stuck = threading.Event()

    class Silent(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            stuck.wait(10)
            return super().export(spans)

    tracing.start(conf, "api", Silent)
    tracing.request(REQUEST, "GET", "/", 200, 0.1, project=None, client=None)
    began = time.monotonic()
    tracing.stop()
    assert time.monotonic() - began < 5
    stuck.set()
    assert request_id.get() == ""
