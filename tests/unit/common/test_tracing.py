# SPDX-License-Identifier: Apache-2.0
"""Tracing: optional imports, spans and their parents, sampling, and failures of the collector."""

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
    new_conf = config.load(None)
    new_conf.set_override("enabled", True, group="tracing")
    yield new_conf
    tracing.stop()
    config.CONF.clear()
    config.CONF.clear_override("enabled", group="tracing")


@pytest.fixture
def read_spans(conf: cfg.ConfigOpts) -> Callable[[], list[ReadableSpan]]:
    """Return a function that stops tracing and returns the finished spans."""
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


def test_services_and_commands_do_not_import_optional_libraries() -> None:
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
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout.strip()) == (0, "[]"), process.stderr


def test_spans_of_several_processes_form_one_trace(
    read_spans: Callable[[], list[ReadableSpan]],
) -> None:
    """Each span comes from another process. They share only the ids of the request and action."""
    tracing.command({**step(), "verb": "ensure_running", "event": "done"}, 2)
    tracing.step(step(), 2)
    tracing.action({**step(), "state": "done"})
    tracing.request(REQUEST, "POST", "/servers", 202, 0.5, project="p", client=None)
    command, guest, action, request = read_spans()
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
    # Tracing is off now.
    assert tracing.traceparent(REQUEST) is None


def test_span_of_failed_step_or_command_or_503_request_has_error_status(
    read_spans: Callable[[], list[ReadableSpan]],
) -> None:
    tracing.step(step(event="failed", why="It broke."), 1)
    tracing.step(step(event="undone"), 1)
    tracing.command({**step(), "verb": "stop", "event": "failed", "why": None}, 1)
    tracing.request(REQUEST, "GET", "/servers", 503, 0.1, project=None, client=None)
    tracing.request(REQUEST, "GET", "/servers", 404, 0.1, project=None, client=None)
    spans = read_spans()
    assert [(span.name, span.status.is_ok, span.status.description) for span in spans] == [
        ("create guest", False, "It broke."),
        ("create undo-guest", True, None),
        ("stop", False, "failed"),
        ("GET /servers", False, "status 503"),
        ("GET /servers", True, None),
    ]
    assert spans[0].context.span_id != spans[1].context.span_id


def test_request_span_links_to_the_traceparent_of_the_client(
    read_spans: Callable[[], list[ReadableSpan]],
) -> None:
    client_trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for traceparent in (
        f"00-{client_trace}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        "no",
    ):
        tracing.request(REQUEST, "GET", "/", 200, 0.1, project=None, client=traceparent)
    linked, *others = read_spans()
    [link] = linked.links
    assert f"{link.context.trace_id:032x}" == client_trace and linked.parent is None
    assert f"{linked.context.trace_id:032x}" != client_trace
    assert [tuple(span.links) for span in others] == [(), ()]


def test_api_request_span_is_named_by_route_and_passed_to_other_services(
    read_spans: Callable[[], list[ReadableSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that the API sends to other services carry its traceparent."""
    requests, traceparents = [], []

    def answer(adapter: object, request: PreparedRequest, **options: object) -> Response:
        traceparents.append(request.headers.get("traceparent"))
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

    served: Any = access_log.log_requests(application)  # type: ignore[arg-type]  # The application is minimal.
    for path in ("/v2.1/servers/5", "/healthcheck"):
        served(
            {"REQUEST_METHOD": "GET", "PATH_INFO": path, "HTTP_TRACEPARENT": "x"},
            lambda status, headers: None,
        )
    [span] = read_spans()
    assert (span.name, span.attributes["kilonova.request_id"]) == (
        "GET /v2.1/servers/{server_id}",
        requests[0],
    )
    assert traceparents[0] == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def test_sample_ratio_selects_the_same_requests_in_all_processes(conf: cfg.ConfigOpts) -> None:
    conf.set_override("sample_ratio", 0.25, group="tracing")
    request_ids = [ids.new_request() for _ in range(4000)]
    try:
        tracing.start(conf, "api", InMemorySpanExporter)
        chosen = [request for request in request_ids if tracing.is_traced(request)]
        tracing.start(conf, "conductor", InMemorySpanExporter)
        assert chosen == [request for request in request_ids if tracing.is_traced(request)]
    finally:
        conf.clear_override("sample_ratio", group="tracing")
    assert 800 < len(chosen) < 1200
    assert not tracing.is_traced("") and not tracing.is_traced("req-1")


def test_tracing_start_without_opentelemetry_names_the_package(
    conf: cfg.ConfigOpts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find in (lambda name: None, missing):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        with pytest.raises(ConfigError, match=r"pip install 'kilonova\[tracing\]'"):
            tracing.start(conf, "api")


def test_tracing_start_refuses_plain_endpoint_on_another_machine(conf: cfg.ConfigOpts) -> None:
    conf.set_override("endpoint", "http://192.0.2.1:4318/v1/traces", group="tracing")
    try:
        with pytest.raises(ConfigError, match=r"\[tracing\] endpoint"):
            tracing.start(conf, "api")
    finally:
        conf.clear_override("endpoint", group="tracing")


# --- a collector over HTTP ---
class Collector(ThreadingHTTPServer):
    """A collector that stores the OTLP bodies, or answers with ``status``."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status, self.request_count = 200, 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.request_count += 1
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.bodies.append(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Write no log lines to the output of the tests."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


@pytest.fixture
def collector(conf: cfg.ConfigOpts) -> Iterator[Collector]:
    new_collector = Collector()
    conf.set_override("endpoint", new_collector.url, group="tracing")
    yield new_collector
    conf.clear_override("endpoint", group="tracing")
    new_collector.shutdown()
    new_collector.server_close()


def test_tracing_sends_spans_to_the_collector(conf: cfg.ConfigOpts, collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    tracing.start(conf, "api")
    tracing.request(REQUEST, "GET", "/servers", 200, 0.1, project="p", client=None)
    tracing.stop()
    [body] = collector.bodies
    [resource_spans] = ExportTraceServiceRequest.FromString(body).resource_spans
    [span] = resource_spans.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("GET /servers", REQUEST[4:].replace("-", ""))
    assert {
        attribute.key: attribute.value.string_value
        for attribute in resource_spans.resource.attributes
    }["service.name"] == "kilonova-api"


@pytest.mark.parametrize("status", [400, 503])
def test_collector_failures_within_a_minute_are_logged_once(
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
            start = time.monotonic()
            tracing.request(REQUEST, "GET", "/servers", 200, 0.1, project=None, client=None)
            # The request does not wait for the collector.
            assert time.monotonic() - start < 1
            assert tracing.spans is not None and tracing.spans._provider is not None
            tracing.spans._provider.force_flush()
            await_true(lambda number=number: collector.request_count > number, 5)  # type: ignore[misc]  # The default binds the number.
    finally:
        root.removeHandler(handler)
    [line] = written.getvalue().splitlines()
    assert f"[tracing] enabled = false count=1 endpoint={collector.url} problem=" in line


def test_tracing_stop_does_not_wait_for_silent_collector(
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
    start = time.monotonic()
    tracing.stop()
    assert time.monotonic() - start < 5
    stuck.set()
    assert request_id.get() == ""
