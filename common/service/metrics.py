# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: the list of the metrics of a process, and their HTTP endpoint.

``service.start`` calls ``start``. Before that, and in a process without [prometheus] enabled,
counting costs only a comparison, and prometheus-client is not imported. The master of a process
with workers collects the workers' metrics from files in a temporary folder. ``conductor.gauges``
has the metrics from the database.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from oslo_config import cfg

from common.security.certificates import ends_at
from common.service.log import get_logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as Family
    from prometheus_client.registry import Collector

log = get_logger(__name__)
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
    """One metric with labels. The methods have no effect while the process does not count.

    Invariant: labels have few values, which come from Kilonova and never from a client.

    Args:
        kind: COUNTER, GAUGE or HISTOGRAM.
        name: Name without ``PREFIX``.
        about: Description for the endpoint.
        *labels: Names of the labels. The methods take the values in this order.
        buckets: Upper limits of a histogram's buckets, in seconds.
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
        """Add ``value`` to the counter with these label values, if the process counts."""
        if self._registry is not None:
            self._of(labels).inc(value)

    def observe(self, value: float, *labels: str) -> None:
        """Record a measured value, usually seconds, in the histogram with these label values.

        No effect if the process does not count.
        """
        if self._registry is not None:
            self._of(labels).observe(value)

    def set(self, value: float, *labels: str) -> None:
        """Set the gauge with these label values, if the process counts."""
        if self._registry is not None:
            self._of(labels).set(value)

    def track(self, value: Callable[[], float]) -> None:
        """Register the function that returns the gauge's value at each read of the metrics.

        No effect if the process does not count. For a gauge without labels, and only in processes
        without workers, because a master reads its workers' metrics from files.
        """
        if self._registry is not None:
            self._of(()).set_function(value)

    def begin(self, registry: CollectorRegistry | None) -> None:
        """Start counting in this registry. None: stop counting."""
        self._real, self._registry = None, registry

    def _of(self, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - depends on the kind
        """Return the metric of prometheus-client with these label values, created at first use.

        So a process reports no metrics of tasks that it never does.
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
    "Number of answered requests, by the template of the path. other: a path without a template.",
    "method",
    "route",
    "status",
)
REQUEST_SECONDS = Metric(
    HISTOGRAM, "http_request_seconds", "Duration of requests in seconds.", "method", "route"
)
STEPS = Metric(
    COUNTER,
    "action_steps",
    "Number of ended steps of actions, by their last event.",
    "workflow",
    "step",
    "event",
)
STEP_SECONDS = Metric(
    HISTOGRAM,
    "action_step_seconds",
    "Duration of steps in seconds.",
    "workflow",
    "step",
    buckets=LONG,
)
ACTIONS = Metric(
    COUNTER,
    "actions_ended",
    "Number of actions that this process ended, done or failed.",
    "workflow",
    "state",
)
ACTION_SECONDS = Metric(
    HISTOGRAM,
    "action_seconds",
    "Duration of actions in seconds since the request.",
    "workflow",
    "state",
    buckets=LONG,
)
CLAIMS = Metric(
    COUNTER,
    "claims",
    "Number of claims of resources on hosts: successful, lost to other claims, or without a valid host.",
    "result",
)
SELECT_SECONDS = Metric(
    HISTOGRAM,
    "scheduler_select_seconds",
    "Duration of selections by a scheduler in seconds, including the wait for its turn.",
)
SELECTIONS = Metric(
    COUNTER,
    "scheduler_selections",
    "Number of servers for which a scheduler selected hosts, or found none.",
    "result",
)
COMMANDS = Metric(
    COUNTER, "host_commands", "Number of commands that a host has executed.", "verb", "event"
)
COMMAND_SECONDS = Metric(
    HISTOGRAM, "host_command_seconds", "Duration of commands in seconds.", "verb", buckets=LONG
)
EXCHANGE_SECONDS = Metric(
    HISTOGRAM,
    "host_exchange_seconds",
    "Duration of exchanges with a conductor in seconds.",
    "result",
)
SILENCE = Metric(
    GAUGE,
    "host_silence_seconds",
    "Seconds since a conductor answered this host. -1: no conductor has answered yet.",
)
LEASED = Metric(GAUGE, "host_has_lease", "1 if this host has a lease to start guests, otherwise 0.")
POOL_SIZE = Metric(
    GAUGE, "database_pool_size", "Maximum number of database connections that are kept open."
)
POOL_USED = Metric(GAUGE, "database_pool_used", "Number of database connections in use.")


#: Metrics of a process's own files, computed when they are read: name -> description, labels.
OF_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "certificate_remaining_seconds": (
        "Seconds until the certificate in [tls] cert_file expires.",
        (),
    ),
}


class CertificateGauge:
    """Collector of prometheus-client: the seconds until the certificate in a PEM file expires.

    With workers, the master reports this metric, because all workers use the same file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def describe(self) -> list[Family]:
        """Return no metrics, so that registration reads no file."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield the seconds until the certificate ends, or only log that the file is unusable."""
        from prometheus_client.core import GaugeMetricFamily

        [(name, (about, _))] = OF_FILES.items()
        try:
            left = ends_at(self._path) - time.time()
        except (OSError, ValueError) as problem:
            log.warning(
                "the end of a certificate cannot be read; see [tls] cert_file",
                path=self._path,
                problem=problem,
            )
            return
        yield GaugeMetricFamily(PREFIX + name, about, value=left)


class _Served:
    """The registries of this process's metrics, and the address and ports of their endpoint.

    Args:
        address: The address on which ``serve`` listens.
        ports: The ports that ``serve`` tries in this order.
        folder: The folder with the files of workers, or None without workers.
    """

    def __init__(self, address: str, ports: Sequence[int], folder: str | None) -> None:
        from prometheus_client import CollectorRegistry

        self.address, self.ports, self.folder = address, ports, folder
        self.own = CollectorRegistry()
        self.collectors: list[Collector] = []

    def registry(self) -> CollectorRegistry:
        """Return the registry to read, which in a master has the metrics of all workers."""
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
    """Start counting, if [prometheus] is enabled and this process has a port for metrics.

    The port is opened later, by ``serve``.

    Args:
        conf: The configuration.
        process: Name of the process without "kilonova-".
    """
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
    """Return True if ``start`` has begun counting in this process."""
    return _served is not None


def collect(collector: Collector) -> None:
    """Register a collector of prometheus-client. No effect if this process does not count."""
    if _served is not None:
        _served.own.register(collector)
        _served.collectors.append(collector)


def serve() -> None:
    """Serve this process's metrics from a thread, at the first free port.

    If no port is free, or a port cannot be opened for another reason, the process logs an error and
    runs without the endpoint. No effect if this process does not count.
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
            log.info("metrics are served", address=_served.address, port=port)
            return
    log.error(
        "metrics cannot be served, because the port cannot be opened; see [prometheus]",
        address=_served.address,
        ports=", ".join(map(str, _served.ports)),
        problem=last,
    )


def forget_worker(worker: int) -> None:
    """Remove the gauges of a worker that has ended. ``worker`` is the worker's process id."""
    if _served is not None and _served.folder:
        from prometheus_client import multiprocess

        forget: Any = multiprocess.mark_process_dead  # it has no types
        forget(worker, _served.folder)


def text() -> str:
    """Return the current metrics in Prometheus' text format, "" if the process does not count."""
    from prometheus_client import generate_latest

    return generate_latest(_served.registry()).decode() if _served is not None else ""
