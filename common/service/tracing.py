# SPDX-License-Identifier: Apache-2.0
"""Spans for OpenTelemetry: of each request, action, step and command of a host, in one trace a
request.

``service.start`` calls ``start``. Without [tracing] enabled a span costs a comparison, and
opentelemetry is not even imported. Ids are not carried but follow from what the journal and the
commands carry anyway: the trace's from the request id, a span's from the request, action or step
that it tells of. So every process knows its parent's (W3C Trace Context), whichever release wrote
the action down, and the trace of a request is found by its id without dashes. Spans are made when
what they tell of is over; they are sent by a thread of their own, and what cannot be sent is lost
and said once a minute.
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

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Link, Tracer

log = logging.getLogger(__name__)
NOT_INSTALLED = "[tracing] enabled needs OpenTelemetry: pip install 'kilonova[tracing]'"
#: Seconds for one try to send spans, with its repetitions; and for the last ones of a process.
SEND_SECONDS, END_SECONDS = 5.0, 2.0
SAMPLED = 1  #: W3C's flag
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_LIBRARY = "opentelemetry"  #: its package, and its logger
_NEEDED = (f"{_LIBRARY}.sdk.trace", f"{_LIBRARY}.exporter.otlp.proto.http")
Value = str | int | float | bool


class _Spans:
    """What makes and sends this process's spans; ``exporter`` is called in each worker."""

    def __init__(
        self, process: str, host: str, ratio: float, exporter: Callable[[], SpanExporter]
    ) -> None:
        self.ratio = ratio
        self._about = {"service.name": f"kilonova-{process}", "host.name": host}
        self._exporter, self._making = exporter, threading.Lock()
        self._provider: TracerProvider | None = None
        self._next = threading.local()

    def tracer(self) -> Tracer:
        """Made with the first span, after the fork."""
        with self._making:
            if self._provider is None:
                self._provider = self._made()
        return self._provider.get_tracer("kilonova", __version__)

    def _made(self) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        following = self._next

        class Ids(IdGenerator):
            """Those of the span that this thread is about to make."""

            def generate_span_id(self) -> int:
                return int(following.span)

            def generate_trace_id(self) -> int:
                return int(following.trace)

        resource = Resource.create({**self._about, "service.version": __version__})
        made = TracerProvider(resource=resource, id_generator=Ids(), shutdown_on_exit=False)
        made.add_span_processor(BatchSpanProcessor(self._exporter()))
        return made

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
        """One span that ends now; ``parent`` 0: it is the trace's first. ``client``: the
        traceparent that came with the request."""
        from opentelemetry import trace

        end = time.time_ns()
        self._next.trace, self._next.span = trace_id(request), span
        flags = trace.TraceFlags(SAMPLED)
        above = trace.SpanContext(self._next.trace, parent, is_remote=True, trace_flags=flags)
        made = self.tracer().start_span(
            name,
            trace.set_span_in_context(trace.NonRecordingSpan(above)) if parent else None,
            trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL,
            {key: value for key, value in attributes.items() if value not in (None, "")},
            _links(client),
            start_time=end - max(0, int(seconds * 1e9)),
        )
        if failure is not None:
            made.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        made.end(end)

    def close(self) -> None:
        """Send what is left, in a moment."""
        with self._making:
            provider, self._provider = self._provider, None
        if provider is not None:
            last = threading.Thread(target=provider.shutdown, name="spans", daemon=True)
            last.start()
            last.join(END_SECONDS)


def _links(client: str | None) -> Sequence[Link]:
    """To the client's own span; it is not the parent of ours, because clients choose its ids."""
    found = _TRACEPARENT.fullmatch(client or "")
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return ()
    from opentelemetry.trace import Link, SpanContext

    return (Link(SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True)),)


#: What makes spans; None: nothing does. Callers look before they call, which costs nothing.
spans: _Spans | None = None


def start(
    conf: cfg.ConfigOpts, process: str, exporter: Callable[[], SpanExporter] | None = None
) -> None:
    """Make spans from now on, if they are wanted. ``exporter``: in place of the one to [tracing]
    endpoint.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the endpoint is plain text on another
        machine.
    """
    global spans
    own = conf.tracing
    if not own.enabled:
        return
    if not _is_installed():
        raise ConfigError(NOT_INSTALLED)
    verify = tls.of_url(conf, "[tracing] endpoint", own.endpoint)
    spans = _Spans(
        process, conf.host, own.sample_ratio, exporter or (lambda: sending(own.endpoint, verify))
    )


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        return False


def stop() -> None:
    """Send what is left, and make no more."""
    global spans
    if spans is not None:
        found, spans = spans, None
        found.close()


# --- ids ---
def trace_id(request: str) -> int:
    """Of a request's trace: its id's UUID."""
    return int(request.removeprefix("req-").replace("-", ""), 16)


def span_id(*names: str | int) -> int:
    """Of the span that tells of this request, action, or step of an action; never 0."""
    key = "/".join(map(str, names))
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big") or 1


def traceparent(request: str) -> str | None:
    """W3C's header for what is asked of others for this request; None: it is not traced."""
    if not is_traced(request):
        return None
    return f"00-{trace_id(request):032x}-{span_id(request):016x}-{SAMPLED:02x}"


def is_traced(request: str) -> bool:
    """Are there spans of this request? All processes with the same sample_ratio say the same."""
    return (
        spans is not None
        and ids.is_request(request)
        and int(request[4:12], 16) < spans.ratio * 2**32
    )


# --- what is told ---
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
    """A request was answered. ``route``: the path's template; ``client``: its traceparent."""
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
    """An action has ended; the parts are those of its line in the log."""
    about, key = parts["request"], parts["action"]
    if spans is None or not is_traced(about):
        return
    spans.write(
        str(parts["workflow"]),
        about,
        span_id(key),
        span_id(about),
        parts["ms"] / 1000,
        attributes=_attributes(parts),
        failure="the action failed" if parts["state"] == ActionState.FAILED else None,
    )


def step(parts: JsonMapping, attempt: int) -> None:
    """A step is over; the parts are those of its line in the log."""
    about, ended = parts["request"], parts["event"]
    if spans is None or not is_traced(about):
        return
    name = f"{UNDO if ended in (StepEvent.UNDONE, StepEvent.UNDO_FAILED) else ''}{parts['step']}"
    spans.write(
        f"{parts['workflow']} {name}",
        about,
        span_id(parts["action"], name, attempt),
        span_id(parts["action"]),
        parts["ms"] / 1000,
        attributes={**_attributes(parts), "kilonova.attempt": attempt},
        failure=str(parts["why"] or ended)
        if ended in (StepEvent.FAILED, StepEvent.UNDO_FAILED, StepEvent.STUCK)
        else None,
    )


def command(parts: JsonMapping, attempt: int) -> None:
    """A host has carried out a command, or has tried to."""
    about, ended = parts["request"], parts["event"]
    if spans is None or not is_traced(about):
        return
    spans.write(
        str(parts["verb"]),
        about,
        random.getrandbits(64) or 1,  # it may be carried out again
        span_id(parts["action"], parts["step"], attempt),
        parts["ms"] / 1000,
        attributes={**_attributes(parts), "kilonova.attempt": attempt},
        failure=str(parts["why"] or ended)
        if ended in (ResultStatus.FAILED, ResultStatus.DEAD, ResultStatus.UNKNOWN)
        else None,
    )


#: Parts of lines of the log that are attributes too.
_PARTS = ("action", "workflow", "step", "event", "state", "verb", "host", "server")


def _attributes(parts: JsonMapping) -> dict[str, Value | None]:
    found: dict[str, Value | None] = {f"kilonova.{name}": parts.get(name) for name in _PARTS}
    return {"kilonova.request_id": parts["request"], **found}


# --- sending ---
class _LastWords(logging.Handler):
    """Keeps what the library says last, in place of a log that it would fill."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self.text = record.getMessage()[:200]


def sending(endpoint: str, verify: bool | str, seconds: float = SEND_SECONDS) -> SpanExporter:
    """Sends spans as OTLP over HTTP to a collector; what it cannot send is lost, and said."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    words, library = _LastWords(logging.WARNING), logging.getLogger(_LIBRARY)
    library.handlers, library.propagate = [words], False

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                if (result := super().export(spans)) is SpanExportResult.SUCCESS:
                    return result
            except Exception as problem:  # noqa: BLE001  # no span is worth more than what it tells of
                words.text = f"{type(problem).__name__}: {problem}"[:200]
            log.warning(
                "%d spans were not sent to %s (%s); see that a collector runs there, or set [tracing] "
                "enabled = false",
                len(spans),
                endpoint,
                words.text,
            )
            return SpanExportResult.FAILURE

    ca = verify if isinstance(verify, str) else None
    return Exporter(endpoint, certificate_file=ca, timeout=seconds)
