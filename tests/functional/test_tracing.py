# SPDX-License-Identifier: Apache-2.0
"""The trace of a request, from the action over its steps to the commands of the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from oslo_config import cfg

from common.domain import states
from common.service import config, tracing
from tests.functional.cloud import Cloud


@pytest.fixture
def span_exporter() -> Iterator[InMemorySpanExporter]:
    """Yield the exporter of the spans of all processes, which are threads of this test."""
    conf = cfg.ConfigOpts()
    config.register(conf)
    conf([], default_config_files=[], default_config_dirs=[])
    conf.set_override("enabled", True, group="tracing")
    exporter = InMemorySpanExporter()
    tracing.start(conf, "all", lambda: exporter)
    yield exporter
    tracing.stop()


def test_trace_of_create_links_command_to_step_and_steps_to_action(
    span_exporter: InMemorySpanExporter, cloud: Cloud
) -> None:
    [server] = cloud.create()
    cloud.await_state([server], states.ACTIVE)
    cloud.await_idle()
    tracing.stop()
    spans = list(span_exporter.get_finished_spans())
    [request] = {span.attributes["kilonova.request_id"] for span in spans}
    assert {f"{span.context.trace_id:032x}" for span in spans} == {
        request.removeprefix("req-").replace("-", "")
    }
    commands = [span for span in spans if "kilonova.verb" in span.attributes]
    steps = {
        span.context.span_id: span
        for span in spans
        if "kilonova.step" in span.attributes and span not in commands
    }
    [action] = [span for span in spans if span.name == "create"]
    assert action.parent.span_id == tracing.span_id(request)
    assert {step.parent.span_id for step in steps.values()} == {action.context.span_id}
    [command] = commands
    step = steps[command.parent.span_id]
    assert (command.name, step.attributes["kilonova.step"]) == (
        "ensure_guest",
        command.attributes["kilonova.step"],
    )
    assert {span.attributes["kilonova.server"] for span in spans} == {server}
    assert {step.attributes["kilonova.step"] for step in steps.values()} > {
        step.attributes["kilonova.step"]
    }
