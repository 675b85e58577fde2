# SPDX-License-Identifier: Apache-2.0
"""The files for Prometheus and Grafana name metrics and labels that there are, and all of them.

promtool itself judges the rules, and tries each, in the ring lint (deploy/testing/lint.py); here
it is that no alert is left out of these trials, and that they are made of series that we have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.service import config, metrics
from common.store.views.gauges import GAUGES
from deploy.testing.lint import ALERT_TRIALS

FOLDER = Path(__file__).resolve().parents[3] / "deploy/monitoring"
NAME = re.compile(r"kilonova_[a-z_]+")
LABELS = re.compile(r"by \(([a-z_, ]+)\)|\{([^{}]*)\}")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
ADDED = {"instance", "job", "le"}  #: by Prometheus, by histograms


def exposed() -> dict[str, set[str]]:
    """Names as Prometheus reads them, with their labels."""
    own = {
        metric.name + suffix: set(metric.labels)
        for metric in metrics.Metric.known
        for suffix in SUFFIXES[metric.kind]
    }
    read = GAUGES | metrics.OF_FILES
    return own | {metrics.PREFIX + name: set(labels) for name, (_, labels) in read.items()}


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / "dashboard.json").read_text())["panels"])


def expressions() -> list[str]:
    drawn = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*drawn, *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_what_there_is(expression: str) -> None:
    known, named = exposed(), NAME.findall(expression)
    assert named and set(named) <= set(known)
    labels = set().union(*(known[name] for name in named)) | ADDED
    for by, chosen in LABELS.findall(expression):
        used = (
            by.split(",") if by else [part.split("=")[0].rstrip("!") for part in chosen.split(",")]
        )
        assert {label.strip() for label in used} <= labels, expression
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_drawn() -> None:
    drawn = {
        name for panel in panels() for one in panel["targets"] for name in NAME.findall(one["expr"])
    }
    for metric in metrics.Metric.known:
        assert any(metric.name + suffix in drawn for suffix in SUFFIXES[metric.kind]), metric.name
    for name in GAUGES | metrics.OF_FILES:
        assert metrics.PREFIX + name in drawn, name


def test_every_alert_says_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
        placed = re.findall(r"\$labels\.([a-z_]+)", str(rule["annotations"]))
        kept = {
            label.strip() for by, _ in LABELS.findall(rule["expr"]) for label in by.split(",") if by
        }
        assert set(placed) <= (kept or {"instance"}), rule["alert"]


def test_panels_stand_side_by_side() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in panels()}) == len(places)


def test_each_process_is_read_on_its_port() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    read = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    ports = {
        option.name.removesuffix("_port").replace("_", "-"): [f"127.0.0.1:{option.default}"]
        for option in config.OPTIONS["prometheus"]
        if option.name.endswith("_port")
    }
    assert read == ports
    assert set(ports) >= metrics.WITH_WORKERS


def trials() -> list[dict[str, Any]]:
    return list(yaml.safe_load(ALERT_TRIALS.read_text())["tests"])


def test_each_alert_is_tried_quiet_and_firing() -> None:
    tried = [
        (one["alertname"], bool(one.get("exp_alerts")))
        for trial in trials()
        for one in trial["alert_rule_test"]
    ]
    assert sorted(tried) == sorted((rule["alert"], way) for rule in rules() for way in (0, 1))


def test_trials_are_made_of_series_that_there_are() -> None:
    known = exposed()
    for trial in trials():
        for one in trial["input_series"]:
            name, _, labels = one["series"].rstrip("}").partition("{")
            chosen = {label.partition("=")[0].strip() for label in labels.split(",")}
            assert chosen <= known[name] | ADDED, one
