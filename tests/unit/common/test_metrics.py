# SPDX-License-Identifier: Apache-2.0
"""Metrics of a process: counting, the port for Prometheus, and workers."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from common.service import config, metrics
from common.store.engine import Store
from deploy.testing.servers import free_ports
from tests.log_lines import logged_fields


def new_conf(
    port: int, enabled: bool = True, name: str = "conductor", step: int = 0
) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    conf.register_opts(config.OPTIONS["prometheus"], group="prometheus")
    conf([], default_config_files=[], default_config_dirs=[])
    conf.set_override("enabled", enabled, group="prometheus")
    conf.set_override(f"{name}_port", port, group="prometheus")
    conf.set_override("port_step", step, group="prometheus")
    return conf


@pytest.fixture
def start_metrics() -> Iterator[Callable[..., None]]:
    yield lambda port=1, **more: metrics.start(new_conf(port, **more), "conductor")
    metrics.stop()


def test_metrics_are_served_on_the_configured_port(start_metrics: Callable[..., None]) -> None:
    port = free_ports(1)
    start_metrics(port)
    metrics.STEPS.add("create", "boot", "succeeded")
    metrics.STEPS.add("create", "boot", "succeeded")
    metrics.STEP_SECONDS.observe(0.7, "create", "boot")
    metrics.POOL_SIZE.set(8)
    metrics.SILENCE.track(lambda: 2.5)
    metrics.serve()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    read = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    for line in (
        'kilonova_action_steps_total{event="succeeded",step="boot",workflow="create"} 2.0',
        'kilonova_action_step_seconds_bucket{le="1.0",step="boot",workflow="create"} 1.0',
        'kilonova_action_step_seconds_bucket{le="0.5",step="boot",workflow="create"} 0.0',
        "kilonova_database_pool_size 8.0",
        "kilonova_host_silence_seconds 2.5",
    ):
        assert line in read.splitlines(), line


def test_metrics_text_leaves_out_unset_gauges(start_metrics: Callable[..., None]) -> None:
    """Otherwise each conductor would look like a host without a lease."""
    start_metrics()
    assert metrics.text() == ""
    metrics.LEASED.set(0)
    assert "kilonova_host_has_lease 0.0" in metrics.text()


@pytest.mark.parametrize(("port", "enabled"), [(1, False), (0, True)])
def test_metrics_are_not_counted_when_disabled_or_without_a_port(
    start_metrics: Callable[..., None], port: int, enabled: bool
) -> None:
    start_metrics(port, enabled=enabled)
    metrics.STEPS.add("create", "boot", "succeeded")
    metrics.serve()
    assert not metrics.is_counting() and metrics.text() == ""


def test_prometheus_client_is_not_imported_when_metrics_are_off() -> None:
    code = (
        "import sys; from common.service import metrics; metrics.STEPS.add('a', 'b', 'c')\n"
        "metrics.serve(); sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metrics_serve_with_port_in_use_logs_an_error_only(
    start_metrics: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        start_metrics(other.getsockname()[1])
        with caplog.at_level(logging.ERROR):
            metrics.serve()
    assert "see [prometheus]" in caplog.text


def test_metrics_serve_uses_the_next_free_port_with_port_step(
    start_metrics: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    first = free_ports(3)
    with (
        socket.create_server(("127.0.0.1", first)),
        socket.create_server(("127.0.0.1", first + 1)),
        caplog.at_level(logging.INFO),
    ):
        start_metrics(first, step=1)
        metrics.POOL_SIZE.set(8)
        metrics.serve()
    assert logged_fields(caplog, "metrics are served") == [
        {"address": "127.0.0.1", "port": first + 2}
    ]
    assert len(caplog.records) == 1
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    read = opener.open(f"http://127.0.0.1:{first + 2}/metrics", timeout=20).read().decode()
    assert "kilonova_database_pool_size 8.0" in read


def test_metrics_serve_does_not_try_other_ports_for_a_wrong_address(
    start_metrics: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    conf = new_conf(free_ports(2), step=1)
    # No machine has this address.
    conf.set_override("host", "192.0.2.1", group="prometheus")
    metrics.start(conf, "conductor")
    with caplog.at_level(logging.INFO):
        metrics.serve()
    assert len(caplog.records) == 1
    [fields] = logged_fields(
        caplog, "metrics cannot be served, because the port cannot be opened; see [prometheus]"
    )
    assert fields["address"] == "192.0.2.1"


def test_pool_used_metric_counts_database_connections_in_use(
    start_metrics: Callable[..., None], tmp_path: Path
) -> None:
    def read_pool_used() -> str:
        [line] = [
            line_text
            for line_text in metrics.text().splitlines()
            if "_pool_used " in line_text and "#" not in line_text
        ]
        return line.rpartition(" ")[2]

    start_metrics()
    store = Store(f"sqlite:///{tmp_path}/x.db")
    try:
        assert store.read(lambda tx: read_pool_used()) == "1.0"
        assert read_pool_used() == "0.0"
    finally:
        store.close()


def test_metrics_text_of_master_sums_the_counts_of_workers() -> None:
    """Runs in a separate process, because the library reads the folder when it is imported."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from common.service import metrics
from tests.unit.common.test_metrics import new_conf
metrics.start(new_conf(1, name="api"), "api")
for number in (1, 2):
    if not (worker := os.fork()):
        metrics.REQUESTS.add("GET", "/v2.1/servers", "200", value=number)
        metrics.POOL_USED.set(number)
        os._exit(0)
    os.waitpid(worker, 0)
    if number == 1:
        metrics.forget_worker(worker)
print(metrics.text())
"""
    read = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if "PROMETHEUS" not in name},
    ).stdout.splitlines()
    assert (
        'kilonova_http_requests_total{method="GET",route="/v2.1/servers",status="200"} 3.0' in read
    )
    assert "kilonova_database_pool_used 2.0" in read
