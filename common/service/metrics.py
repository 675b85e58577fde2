# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: the list of the metrics of a process, and their HTTP endpoint.

``service.start`` calls ``start``. Before that, and in a process without [prometheus] enabled,
counting costs only a comparison, and prometheus-client is not imported. A master with workers
collects theirs from files in a folder of its own. ``conductor.gauges`` has the metrics from the
database.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from oslo_config import cfg

from common.security.certificates import ends_at

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as Family
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)
PREFIX = "kilonova_"
_making = threading.Lock()
#: The variable of prometheus-client for the folder with the workers' metrics.
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  #: seconds
LONG = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)  #: seconds
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
#: The limit of processes of one kind on a machine with metrics, and the highest port.
MAX_ALIKE, MAX_PORT = 8, 65535
#: Processes with workers. The master collects their metrics.
WITH_WORKERS = frozenset(("api", "placement", "metadata", "image-gateway"))


class Metric:
    """One metric with labels.

    Invariant: labels have few values, which come from Kilonova and never from a client.
    """

    known: list[Metric] = []

    def __init__(
        self, kind: str, name: str, about: str, *labels: str, buckets: tuple[float, ...] = SHORT
    ) -> None:
        self.kind, self.name, self.about, self.labels = kind, PREFIX + name, about, labels
        self._buckets = buckets
        self._real: Any = None
        self._registry: Any = None
        self.known.append(self)

    def add(self, *labels: str, value: float = 1) -> None:
        """Add to the counter."""
        if self._registry is not None:
            self._of(labels).inc(value)

    def observe(self, value: float, *labels: str) -> None:
        """Record a measured value in seconds."""
        if self._registry is not None:
            self._of(labels).observe(value)

    def set(self, value: float, *labels: str) -> None:
        """Set the gauge."""
        if self._registry is not None:
            self._of(labels).set(value)

    def track(self, value: Callable[[], float]) -> None:
        """Read the gauge from this function on each request. Not for workers."""
        if self._registry is not None:
            self._of(()).set_function(value)

    def begin(self, registry: CollectorRegistry | None) -> None:
        """Start counting in this registry, or stop counting if None."""
        self._real, self._registry = None, registry

    def _of(self, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - depends on the kind
        """Return the metric with these labels, created at first use.

        A process reports no metrics of tasks that it never does.
        """
        if self._real is None:
            with _making:
                self._real = self._real or self._create()
        return self._real.labels(*labels) if self.labels else self._real

    def _create(self) -> Any:  # noqa: ANN401 - depends on the kind
        import prometheus_client as client

        kinds: dict[str, Any] = {
            COUNTER: client.Counter,
            GAUGE: client.Gauge,
            HISTOGRAM: client.Histogram,
        }
        more: dict[str, Any] = {"buckets": self._buckets} if self.kind == HISTOGRAM else {}
        if self.kind == GAUGE:
            more["multiprocess_mode"] = "livesum"
        return kinds[self.kind](self.name, self.about, self.labels, registry=self._registry, **more)


REQUESTS = Metric(
    COUNTER,
    "http_requests",
    "Requests that were answered, by the path's template; other: there is none.",
    "method",
    "route",
    "status",
)
REQUEST_SECONDS = Metric(
    HISTOGRAM, "http_request_seconds", "How long an answer took.", "method", "route"
)
STEPS = Metric(
    COUNTER,
    "action_steps",
    "Steps of actions that are over, by how they ended.",
    "workflow",
    "step",
    "event",
)
STEP_SECONDS = Metric(
    HISTOGRAM, "action_step_seconds", "How long a step took.", "workflow", "step", buckets=LONG
)
ACTIONS = Metric(
    COUNTER, "actions_ended", "Actions that ended here, done or failed.", "workflow", "state"
)
ACTION_SECONDS = Metric(
    HISTOGRAM,
    "action_seconds",
    "How long actions took, from the request.",
    "workflow",
    "state",
    buckets=LONG,
)
CLAIMS = Metric(
    COUNTER,
    "claims",
    "Claims of places on hosts: taken, lost to others, or none was valid.",
    "result",
)
SELECT_SECONDS = Metric(
    HISTOGRAM, "scheduler_select_seconds", "How long a scheduler's answer took, with its turn."
)
SELECTIONS = Metric(
    COUNTER, "scheduler_selections", "Servers that were given hosts, or none.", "result"
)
COMMANDS = Metric(
    COUNTER, "host_commands", "Commands that a host has carried out.", "verb", "event"
)
COMMAND_SECONDS = Metric(
    HISTOGRAM, "host_command_seconds", "How long a command took.", "verb", buckets=LONG
)
EXCHANGE_SECONDS = Metric(
    HISTOGRAM, "host_exchange_seconds", "How long an exchange with a conductor took.", "result"
)
SILENCE = Metric(
    GAUGE, "host_silence_seconds", "Seconds since a conductor answered this host; -1: none has."
)
LEASED = Metric(GAUGE, "host_has_lease", "Whether this host may start guests.")
POOL_SIZE = Metric(GAUGE, "database_pool_size", "Connections that are kept open at most.")
POOL_USED = Metric(GAUGE, "database_pool_used", "Connections that are in use.")


#: Metrics of a process's own files, computed when they are read: name -> description, labels.
OF_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "certificate_left_seconds": ("Until the certificate in [tls] cert_file ends.", ()),
}


class CertificateGauge:
    """Collector of prometheus-client for the certificate's end.

    A master reports this as well, because its workers use the same file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def describe(self) -> list[Family]:
        """Return no metrics, so that registration reads no file."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield the seconds until the certificate ends, unless the file cannot be read."""
        from prometheus_client.core import GaugeMetricFamily

        [(name, (about, _))] = OF_FILES.items()
        try:
            left = ends_at(self._path) - time.time()
        except (OSError, ValueError) as problem:
            log.warning("[tls] cert_file %s: %s", self._path, problem)
            return
        yield GaugeMetricFamily(PREFIX + name, about, value=left)


class _Served:
    """The endpoint of this process's metrics, at the first of these ports that is free.

    ``folder`` has the files of workers, or is None without workers.
    """

    def __init__(self, address: str, ports: Sequence[int], folder: str | None) -> None:
        from prometheus_client import CollectorRegistry

        self.address, self.ports, self.folder = address, ports, folder
        self.own = CollectorRegistry()
        self.collectors: list[Collector] = []

    def registry(self) -> CollectorRegistry:
        """Return the registry to read: in a master, that of the workers."""
        if self.folder is None:
            return self.own
        from prometheus_client import CollectorRegistry, multiprocess

        gathered = CollectorRegistry()
        gather: Any = multiprocess.MultiProcessCollector  # it has no types
        gather(gathered, self.folder)
        for collector in self.collectors:
            gathered.register(collector)
        return gathered


_served: _Served | None = None


def start(conf: cfg.ConfigOpts, process: str) -> None:
    """Start counting, if this process has a port for metrics."""
    global _served
    own = conf.prometheus
    port = own[f"{process.replace('-', '_')}_port"] if own.enabled else 0
    if not port:
        return
    folder = None
    if process in WITH_WORKERS:  # prometheus-client reads the variable when it is imported.
        folder = tempfile.mkdtemp(prefix=f"kilonova-{process}-metrics-")
        os.environ[_FOLDER] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ports = (
        range(port, port + own.port_step * MAX_ALIKE, own.port_step) if own.port_step else (port,)
    )
    _served = _Served(own.host, [number for number in ports if number <= MAX_PORT], folder)
    for metric in Metric.known:
        metric.begin(_served.own)


def stop() -> None:
    """Stop counting. For tests."""
    global _served
    if _served is not None:
        for metric in Metric.known:
            metric.begin(None)
        _served = None


def is_counting() -> bool:
    """Return True if this process has metrics."""
    return _served is not None


def collect(collector: Collector) -> None:
    """Register another collector for reads of the metrics."""
    if _served is not None:
        _served.own.register(collector)
        _served.collectors.append(collector)


def serve() -> None:
    """Serve this process's metrics from a thread, at the first free port.

    If no port is free, the process runs without metrics and logs an error.
    """
    if _served is None:
        return
    from prometheus_client import start_http_server

    last: OSError | None = None
    for port in _served.ports:
        try:
            start_http_server(port, _served.address, _served.registry())
        except OSError as problem:
            last = problem
            if problem.errno != errno.EADDRINUSE:
                break
        else:
            log.info("metrics are read at %s port %d", _served.address, port)
            return
    log.error(
        "no metrics: %s port %s cannot be listened on: %s; see [prometheus]",
        _served.address,
        ", ".join(map(str, _served.ports)),
        last,
    )


def forget_worker(worker: int) -> None:
    """Remove the gauges of a worker that has ended."""
    if _served is not None and _served.folder:
        from prometheus_client import multiprocess

        forget: Any = multiprocess.mark_process_dead  # it has no types
        forget(worker, _served.folder)


def text() -> str:
    """Return the current metrics in Prometheus' text format."""
    from prometheus_client import generate_latest

    return generate_latest(_served.registry()).decode() if _served is not None else ""
