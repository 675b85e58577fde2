# SPDX-License-Identifier: Apache-2.0
"""Spans for OpenTelemetry: for each request, action, step and command, in one trace per request.

``service.start`` calls ``start``. Without [tracing] enabled a span costs only a comparison, and
opentelemetry is not imported.

Ids are not transmitted but derived: the trace id from the request id, and a span id from the
request, action or step. Journal and commands contain these in any case. So every process can
compute the id of the parent span (W3C Trace Context), whichever release wrote the journal. The
trace id of a request is its id without dashes.

A span is created at the end of the work. A thread sends the spans. Spans that cannot be sent are
dropped, with a log line once a minute.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from oslo_config import cfg

from common import __version__
from common.domain import ids
from common.domain.command_key import UNDO
from common.domain.errors import ConfigError
from common.domain.json_types import JsonMapping
from common.domain.statuses import ActionState, ResultStatus, StepEvent
from common.security import tls
from common.service.log import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Link, Tracer

log = get_logger(__name__)
NOT_INSTALLED = "[tracing] enabled needs OpenTelemetry: pip install 'kilonova[tracing]'"
#: Seconds for one attempt to send spans, with its retries, and for the last spans of a process.
SEND_SECONDS, END_SECONDS = 5.0, 2.0
#: The flag "sampled" of W3C Trace Context.
SAMPLED = 1
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
#: The name of OpenTelemetry's package and logger.
_LIBRARY = "opentelemetry"
_NEEDED = (f"{_LIBRARY}.sdk.trace", f"{_LIBRARY}.exporter.otlp.proto.http")
Value = str | int | float | bool


class _Spans:
    """Creates and sends this process's spans.

    Args:
        process: Name of the process without "kilonova-".
        host: Name of the host.
        ratio: Fraction of requests that are traced.
        exporter: Creates the exporter. Called in each worker, because threads do not survive a
            fork.
    """

    def __init__(
        self, process: str, host: str, ratio: float, exporter: Callable[[], SpanExporter]
    ) -> None:
        self.ratio = ratio
        self._attributes = {"service.name": f"kilonova-{process}", "host.name": host}
        self._exporter, self._making = exporter, threading.Lock()
        self._provider: TracerProvider | None = None
        self._next = threading.local()

    def tracer(self) -> Tracer:
        """Return the tracer. The tracer is created with the first span, after the fork."""
        with self._making:
            if self._provider is None:
                self._provider = self._create_provider()
        return self._provider.get_tracer("kilonova", __version__)

    def _create_provider(self) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        next_ids = self._next

        class Ids(IdGenerator):
            """Returns the ids of the span that this thread is about to create."""

            def generate_span_id(self) -> int:
                return int(next_ids.span)

            def generate_trace_id(self) -> int:
                return int(next_ids.trace)

        resource = Resource.create({**self._attributes, "service.version": __version__})
        provider = TracerProvider(resource=resource, id_generator=Ids(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(self._exporter()))
        return provider

    def write(
        self,
        name: str,
        request: str,
        span: int,
        parent: int,
        seconds: float,
        *,
        attributes: Mapping[str, Value | None],
        failure: str | None = None,
        is_server: bool = False,
        client: str | None = None,
    ) -> None:
        """Create a span that ends now, and queue it for sending.

        Args:
            name: The span's name.
            request: Id of the request. The trace id is derived from this.
            span: Id of the new span.
            parent: Id of the parent span. 0 makes this the root span of the trace.
            seconds: Duration of the span.
            attributes: Attributes of the span. Values that are None or "" are left out.
            failure: Description of the error, or None if the span succeeded.
            is_server: True for a request that this process served, which sets the span kind.
            client: Traceparent header of the request, or None. The span gets a link to the
                client's span.
        """
        from opentelemetry import trace

        end = time.time_ns()
        self._next.trace, self._next.span = trace_id(request), span
        flags = trace.TraceFlags(SAMPLED)
        parent_context = trace.SpanContext(
            self._next.trace, parent, is_remote=True, trace_flags=flags
        )
        new_span = self.tracer().start_span(
            name,
            trace.set_span_in_context(trace.NonRecordingSpan(parent_context)) if parent else None,
            trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL,
            {key: value for key, value in attributes.items() if value not in (None, "")},
            _links(client),
            start_time=end - max(0, int(seconds * 1e9)),
        )
        if failure is not None:
            new_span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        new_span.end(end)

    def close(self) -> None:
        """Send the remaining spans, and return after at most ``END_SECONDS``."""
        with self._making:
            provider, self._provider = self._provider, None
        if provider is not None:
            last = threading.Thread(target=provider.shutdown, name="spans", daemon=True)
            last.start()
            last.join(END_SECONDS)


def _links(client: str | None) -> Sequence[Link]:
    """Return a link to the client's span, or () without a valid traceparent header.

    The client's span is not the parent, because clients choose its id.
    """
    match = _TRACEPARENT.fullmatch(client or "")
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return ()
    from opentelemetry.trace import Link, SpanContext

    return (Link(SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True)),)


#: The creator of spans, or None without tracing. Callers test it first, which is cheap.
spans: _Spans | None = None


def start(
    conf: cfg.ConfigOpts, process: str, exporter: Callable[[], SpanExporter] | None = None
) -> None:
    """Start tracing, if [tracing] enabled is set.

    Args:
        conf: The configuration.
        process: Name of the process without "kilonova-".
        exporter: Creates the exporter. None: the exporter for [tracing] endpoint.

    Raises:
        ConfigError: OpenTelemetry is not installed, the endpoint is plain text on another machine
            without [tls] allow_plain_text, or the files or options of [tls] cannot be used.
    """
    global spans
    own = conf.tracing
    if not own.enabled:
        return
    if not _is_installed():
        raise ConfigError(NOT_INSTALLED)
    verify = tls.of_url(conf, "[tracing] endpoint", own.endpoint)
    spans = _Spans(
        process,
        conf.host,
        own.sample_ratio,
        exporter or (lambda: otlp_exporter(own.endpoint, verify)),
    )


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        return False


def stop() -> None:
    """Send the remaining spans and stop tracing."""
    global spans
    if spans is not None:
        last, spans = spans, None
        last.close()


# --- ids ---
def trace_id(request: str) -> int:
    """Return the trace id of a request: the UUID in its id ("req-UUID") as a number."""
    return int(request.removeprefix("req-").replace("-", ""), 16)


def span_id(*names: str | int) -> int:
    """Return a span id, the same for the same names (for example an action's id). Never 0."""
    key = "/".join(map(str, names))
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big") or 1


def traceparent(request: str) -> str | None:
    """Return the traceparent header for calls of this request, or None if it is not traced."""
    if not is_traced(request):
        return None
    return f"00-{trace_id(request):032x}-{span_id(request):016x}-{SAMPLED:02x}"


def is_traced(request: str) -> bool:
    """Return True if this process writes spans of this request.

    All processes that trace with the same sample_ratio agree.
    """
    return (
        spans is not None
        and ids.is_request(request)
        and int(request[4:12], 16) < spans.ratio * 2**32
    )


# --- spans ---
def request(
    request_id: str,
    method: str,
    route: str,
    status: int,
    seconds: float,
    *,
    project: str | None,
    client: str | None,
) -> None:
    """Write the span of an answered request, if the request is traced.

    Args:
        request_id: Id of the request.
        method: HTTP method.
        route: Template of the path.
        status: HTTP status of the answer.
        seconds: Duration of the request.
        project: Id of the caller's project, or None.
        client: Traceparent header of the request, or None.
    """
    if spans is None or not is_traced(request_id):
        return
    spans.write(
        f"{method} {route}",
        request_id,
        span_id(request_id),
        0,
        seconds,
        attributes={
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "kilonova.request_id": request_id,
            "kilonova.project": project,
        },
        failure=f"status {status}" if status >= 500 else None,
        is_server=True,
        client=client,
    )


def action(parts: JsonMapping) -> None:
    """Write the span of an ended action, if its request is traced.

    Args:
        parts: Fields of the action's log line.
    """
    request_id, key = parts["request"], parts["action"]
    if spans is None or not is_traced(request_id):
        return
    spans.write(
        str(parts["workflow"]),
        request_id,
        span_id(key),
        span_id(request_id),
        parts["ms"] / 1000,
        attributes=_attributes(parts),
        failure="the action failed" if parts["state"] == ActionState.FAILED else None,
    )


def step(parts: JsonMapping, attempt: int) -> None:
    """Write the span of an ended step, if its request is traced.

    Args:
        parts: Fields of the step's log line.
        attempt: Number of the attempt.
    """
    request_id, ended = parts["request"], parts["event"]
    if spans is None or not is_traced(request_id):
        return
    name = f"{UNDO if ended in (StepEvent.UNDONE, StepEvent.UNDO_FAILED) else ''}{parts['step']}"
    spans.write(
        f"{parts['workflow']} {name}",
        request_id,
        span_id(parts["action"], name, attempt),
        span_id(parts["action"]),
        parts["ms"] / 1000,
        attributes={**_attributes(parts), "kilonova.attempt": attempt},
        failure=str(parts["why"] or ended)
        if ended in (StepEvent.FAILED, StepEvent.UNDO_FAILED, StepEvent.STUCK)
        else None,
    )


def command(parts: JsonMapping, attempt: int) -> None:
    """Write the span of a command that a host has executed or tried, if its request is traced.

    Args:
        parts: Fields of the command's log line.
        attempt: Number of the attempt of the step.
    """
    request_id, ended = parts["request"], parts["event"]
    if spans is None or not is_traced(request_id):
        return
    spans.write(
        str(parts["verb"]),
        request_id,
        random.getrandbits(64) or 1,  # Random, because a command may be executed again.
        span_id(parts["action"], parts["step"], attempt),
        parts["ms"] / 1000,
        attributes={**_attributes(parts), "kilonova.attempt": attempt},
        failure=str(parts["why"] or ended)
        if ended in (ResultStatus.FAILED, ResultStatus.DEAD, ResultStatus.UNKNOWN)
        else None,
    )


#: Fields of log lines that are also attributes.
_PARTS = ("action", "workflow", "step", "event", "state", "verb", "host", "server")


def _attributes(parts: JsonMapping) -> dict[str, Value | None]:
    attributes: dict[str, Value | None] = {f"kilonova.{name}": parts.get(name) for name in _PARTS}
    return {"kilonova.request_id": parts["request"], **attributes}


# --- sending ---
class _LastWords(logging.Handler):
    """Keeps OpenTelemetry's last warning, instead of writing it to the log."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Store the first 200 characters of the record's message as ``text``."""
        self.text = record.getMessage()[:200]


def otlp_exporter(endpoint: str, verify: bool | str, seconds: float = SEND_SECONDS) -> SpanExporter:
    """Return an exporter of spans as OTLP over HTTP. After a failure the spans are dropped.

    The exporter logs each failure with the reason. Other warnings of OpenTelemetry are not logged.

    Args:
        endpoint: URL of the collector.
        verify: Path of the authorities' certificates. A bool: those of the system.
        seconds: Maximum seconds for one attempt to send, with its retries.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    last_words, library = _LastWords(logging.WARNING), logging.getLogger(_LIBRARY)
    library.handlers, library.propagate = [last_words], False

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                if (result := super().export(spans)) is SpanExportResult.SUCCESS:
                    return result
            # A failure of tracing must not stop the process.
            except Exception as problem:  # noqa: BLE001
                last_words.text = f"{type(problem).__name__}: {problem}"[:200]
            log.warning(
                "spans were not sent; check that a collector runs at the endpoint, or set [tracing] enabled = false",
                count=len(spans),
                endpoint=endpoint,
                problem=last_words.text,
            )
            return SpanExportResult.FAILURE

    ca = verify if isinstance(verify, str) else None
    return Exporter(endpoint, certificate_file=ca, timeout=seconds)
