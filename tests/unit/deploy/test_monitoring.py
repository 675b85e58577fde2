# SPDX-License-Identifier: Apache-2.0
"""The files for Prometheus and Grafana: every metric is used, and every name and label exists.

The ring lint (deploy/testing/lint.py) runs promtool, which checks the rules and runs the trials of
the alerts. The tests here check that the trials cover every alert and use existing series.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.rpc import broker, host_messages, transport
from common.service import config, metrics
from common.store.views.gauges import GAUGES
from deploy.testing.lint import ALERT_TRIALS

FOLDER = Path(__file__).resolve().parents[3] / "deploy/monitoring"
#: Prometheus adds the metric "up" to each target.
NAME = re.compile(r"kilonova_[a-z_]+|\bup\b(?=\{)")
LABELS = re.compile(r"by \(([a-z_, ]+)\)|\{([^{}]*)\}")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
#: The modules with metrics of their own, beside ``metrics``. Their import registers the metrics.
WITH_METRICS = (broker, host_messages, transport)
#: Labels that Prometheus and histograms add.
ADDED = {"instance", "job", "le"}


def list_metrics() -> dict[str, set[str]]:
    """Return the names of all metrics as Prometheus reads them, with their labels."""
    own = {
        metric.name + suffix: set(metric.labels)
        for metric in metrics.Metric.known
        for suffix in SUFFIXES[metric.kind]
    }
    read = GAUGES | metrics.OF_FILES
    gauges = {metrics.PREFIX + name: set(labels) for name, (_, labels) in read.items()}
    return own | gauges | {"up": set()}


def read_rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def read_panels() -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / "dashboard.json").read_text())["panels"])


def list_expressions() -> list[str]:
    drawn_metrics = [target["expr"] for panel in read_panels() for target in panel["targets"]]
    return [*drawn_metrics, *(rule["expr"] for rule in read_rules())]


@pytest.mark.parametrize("expression", list_expressions())
def test_monitoring_expression_uses_existing_metrics_and_labels(expression: str) -> None:
    metrics_by_name, metric_names = list_metrics(), NAME.findall(expression)
    assert metric_names and set(metric_names) <= set(metrics_by_name)
    labels = set().union(*(metrics_by_name[name] for name in metric_names)) | ADDED
    for by, selected_labels in LABELS.findall(expression):
        used = (
            by.split(",")
            if by
            else [part.split("=")[0].rstrip("!") for part in selected_labels.split(",")]
        )
        assert {label.strip() for label in used} <= labels, expression
    assert expression.count("(") == expression.count(")")


def test_dashboard_draws_every_metric() -> None:
    drawn_metrics = {
        name
        for panel in read_panels()
        for entry in panel["targets"]
        for name in NAME.findall(entry["expr"])
    }
    for metric in metrics.Metric.known:
        assert any(metric.name + suffix in drawn_metrics for suffix in SUFFIXES[metric.kind]), (
            metric.name
        )
    for name in GAUGES | metrics.OF_FILES:
        assert metrics.PREFIX + name in drawn_metrics, name


def test_alerts_have_severity_summary_and_description() -> None:
    names = [rule["alert"] for rule in read_rules()]
    assert len(names) == len(set(names))
    for rule in read_rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
        template_labels = re.findall(r"\$labels\.([a-z_]+)", str(rule["annotations"]))
        rule_labels = {
            label.strip() for by, _ in LABELS.findall(rule["expr"]) for label in by.split(",") if by
        }
        assert set(template_labels) <= (rule_labels or {"instance"}), rule["alert"]


def test_dashboard_panels_have_distinct_grid_positions_and_ids() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in read_panels()]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in read_panels()}) == len(places)


def test_prometheus_configuration_scrapes_each_service_on_its_port() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    read = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    ports = {
        option.name.removesuffix("_port").replace("_", "-"): [f"127.0.0.1:{option.default}"]
        for option in config.OPTIONS["prometheus"]
        if option.name.endswith("_port")
    }
    assert read == ports
    assert set(ports) >= metrics.WITH_WORKERS


def read_trials() -> list[dict[str, Any]]:
    return list(yaml.safe_load(ALERT_TRIALS.read_text())["tests"])


def test_alert_trials_cover_each_alert_quiet_and_firing() -> None:
    cases = [
        (entry["alertname"], bool(entry.get("exp_alerts")))
        for trial in read_trials()
        for entry in trial["alert_rule_test"]
    ]
    assert sorted(cases) == sorted((rule["alert"], way) for rule in read_rules() for way in (0, 1))


def test_alert_trials_use_existing_series() -> None:
    metrics_by_name = list_metrics()
    for trial in read_trials():
        for entry in trial["input_series"]:
            name, _, labels = entry["series"].rstrip("}").partition("{")
            selected_labels = {label.partition("=")[0].strip() for label in labels.split(",")}
            assert selected_labels <= metrics_by_name[name] | ADDED, entry
