# SPDX-License-Identifier: Apache-2.0
"""One request id leads from the request through the conductor's steps to the host's commands."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import pytest

from common.domain import states
from tests.functional.cloud import USER, Cloud

Lines = dict[str, list[dict[str, Any]]]


def lines_of(caplog: pytest.LogCaptureFixture, server: str) -> Lines:
    """What was logged of a server, by kind."""
    found: Lines = defaultdict(list)
    for record in caplog.records:
        parts = getattr(record, "parts", {})
        if parts.get("server") == server:
            found[record.getMessage()].append(parts)
    return found


def test_a_request_is_followed_to_its_host(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    [server] = cloud.create()
    cloud.await_state([server], states.ACTIVE)
    cloud.begin_action(server, "os-stop")
    cloud.await_state([server], states.STOPPED)
    cloud.await_idle()
    lines = lines_of(caplog, server)
    [create, stop] = lines["action"]
    assert (create["workflow"], create["state"]) == ("create", "done")
    assert (stop["workflow"], stop["request"]) == ("stop", USER.request_id)
    assert all(0 <= line["ms"] < 60_000 for kind in lines.values() for line in kind)
    for ended in (create, stop):
        own = {
            kind: [line for line in lines[kind] if line["action"] == ended["action"]]
            for kind in ("step", "command")
        }
        requests = {line["request"] for kind in own.values() for line in kind}
        assert requests == {ended["request"]} and "" not in requests
        [command] = own["command"]
        [told] = [line for line in own["step"] if line["step"] == command["step"]]
        assert (told["event"], told["host"], command["event"]) == ("succeeded", "h1", "done")
        assert told["ms"] >= command["ms"] - 1000


def test_a_step_that_fails_says_why(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    [server] = cloud.create(host="nowhere")
    cloud.await_state([server], states.ERROR)
    cloud.await_idle()
    lines = lines_of(caplog, server)
    assert [line["state"] for line in lines["action"]] == ["failed"]
    [failed] = [line for line in lines["step"] if line["event"] == "failed"]
    assert failed["why"] and failed["step"] == "place"
