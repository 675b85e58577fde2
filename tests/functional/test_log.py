# SPDX-License-Identifier: Apache-2.0
"""The log lines of actions, steps and commands, which carry the request id."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import pytest

from common.domain import states
from tests.functional.cloud import USER, Cloud

Lines = dict[str, list[dict[str, Any]]]


def collect_lines(caplog: pytest.LogCaptureFixture, server: str) -> Lines:
    """Return the fields of the log lines about a server, by event text."""
    lines: Lines = defaultdict(list)
    for record in caplog.records:
        parts = getattr(record, "parts", {})
        if parts.get("server") == server:
            lines[record.getMessage()].append(parts)
    return lines


def await_lines(cloud: Cloud, caplog: pytest.LogCaptureFixture, server: str, actions: int) -> Lines:
    """Wait until the log has the ends of a number of actions, and return the lines.

    The conductor logs after the commit, so an action can have ended in the database before its
    lines are in the log.
    """
    cloud.await_true(
        lambda: len(collect_lines(caplog, server)["action"]) >= actions, 20, "the log lines"
    )
    return collect_lines(caplog, server)


def test_log_lines_have_request_id_from_action_to_host_command(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    [server] = cloud.create()
    cloud.await_state([server], states.ACTIVE)
    cloud.begin_action(server, "os-stop")
    cloud.await_state([server], states.STOPPED)
    lines = await_lines(cloud, caplog, server, actions=2)
    [create, stop] = lines["action"]
    assert (create["workflow"], create["state"]) == ("create", "done")
    assert (stop["workflow"], stop["request"]) == ("stop", USER.request_id)
    assert all(
        0 <= line["ms"] < 60_000 for kind in ("action", "step", "command") for line in lines[kind]
    )
    for action in (create, stop):
        own = {
            kind: [line for line in lines[kind] if line["action"] == action["action"]]
            for kind in ("step", "command")
        }
        requests = {line["request"] for kind in own.values() for line in kind}
        assert requests == {action["request"]} and "" not in requests
        [command] = own["command"]
        [step] = [line for line in own["step"] if line["step"] == command["step"]]
        assert (step["event"], step["host"], command["event"]) == ("succeeded", "h1", "done")
        assert step["ms"] >= command["ms"] - 1000


def test_log_line_of_failed_step_has_reason(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    [server] = cloud.create(host="nowhere")
    cloud.await_state([server], states.ERROR)
    lines = await_lines(cloud, caplog, server, actions=1)
    assert [line["state"] for line in lines["action"]] == ["failed"]
    [failed] = [line for line in lines["step"] if line["event"] == "failed"]
    assert failed["why"] and failed["step"] == "place"
