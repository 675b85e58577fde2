# SPDX-License-Identifier: Apache-2.0
"""Bounds for messages of a host: sizes, rates and quarantine after a flood."""

from __future__ import annotations

from typing import Any

import pytest

from common.rpc import host_bounds
from common.rpc.host_bounds import Allowances, Quarantine, require_bounded
from common.security.host_keys import NotGenuine


def nest(depth: int) -> Any:
    return [nest(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    "content",
    [
        {"domains": [{"server": "s"}] * host_bounds.MAX_ITEMS},
        {"details": "x" * host_bounds.MAX_TEXT_CHARS, "inventory": None, "ratio": 1.5},
        {"number": host_bounds.MAX_NUMBER, "least": -host_bounds.MAX_NUMBER},
        nest(host_bounds.MAX_DEPTH),
    ],
    ids=["list", "text", "number", "depth"],
)
def test_require_bounded_accepts_content_at_its_bound(content: Any) -> None:
    require_bounded(content)


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (
            {"request": {"domains": [0] * 4097}},
            "domains has 4097 entries, at most 4096 are allowed",
        ),
        (
            {"phases": dict.fromkeys(map(str, range(4097)))},
            "phases has 4097 entries, at most 4096 are allowed",
        ),
        (
            {"results": [{"error": "x" * 8193}]},
            "error has 8193 characters, at most 8192 are allowed",
        ),
        ({"x" * 8193: 1}, "the message has 8193 characters, at most 8192 are allowed"),
        ({"fence": 2**63}, "fence is a number beyond 64 bits"),
        ({"cpu_info": nest(33)}, "cpu_info is nested more than 32 levels deep"),
    ],
)
def test_require_bounded_refuses_content_beyond_a_bound_and_names_field(
    content: Any, refusal: str
) -> None:
    with pytest.raises(NotGenuine) as refused:
        require_bounded(content)
    assert str(refused.value) == refusal


def test_message_allowance_refuses_only_the_host_above_its_rate() -> None:
    now = [0.0]
    allowances = Allowances(lambda: now[0])
    for _ in range(host_bounds.MESSAGES_A_SECOND):
        allowances.take("h1", 100)
    with pytest.raises(NotGenuine):
        allowances.take("h1", 100)
    allowances.take("h2", 100)
    now[0] = 1.0
    allowances.take("h1", 100)


def test_byte_allowance_refuses_only_the_host_above_its_rate() -> None:
    now = [0.0]
    allowances = Allowances(lambda: now[0])
    for _ in range(2):
        allowances.take("h1", host_bounds.MAX_MESSAGE_BYTES)
    with pytest.raises(NotGenuine):
        allowances.take("h1", 1)
    allowances.take("h2", host_bounds.MAX_MESSAGE_BYTES)
    now[0] = 0.5
    allowances.take("h1", host_bounds.MAX_MESSAGE_BYTES)


def test_host_message_above_the_maximum_length_is_refused() -> None:
    with pytest.raises(NotGenuine, match="1048577 bytes"):
        Allowances().take("h1", host_bounds.MAX_MESSAGE_BYTES + 1)


def flood(quarantine: Quarantine, host: str = "h1", size: int = 300) -> list[float]:
    """Count as many messages as a flood has, and return the seconds of each quarantine begun."""
    number = host_bounds.FLOOD_MESSAGES // (1 + size // host_bounds.FLOOD_UNIT_BYTES)
    counted = [quarantine.count(host, size) for _ in range(number)]
    return [seconds for seconds in counted if seconds]


def test_flood_of_messages_begins_quarantine_of_60_seconds() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    assert (flood(quarantine), quarantine.hosts()) == ([60], {"h1"})
    now[0] = 60.0
    assert quarantine.hosts() == set()


def test_flood_of_large_messages_begins_a_quarantine_after_fewer_messages() -> None:
    quarantine = Quarantine(lambda: 0.0)
    assert len(flood(quarantine, size=16 * 1024 * 1024)) == 0
    assert quarantine.count("h1", 16 * 1024 * 1024) == 60


def test_messages_below_the_rate_of_a_flood_begin_no_quarantine() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    for _ in range(10):
        assert not any(quarantine.count("h1", 300) for _ in range(host_bounds.FLOOD_MESSAGES - 1))
        now[0] += host_bounds.FLOOD_SECONDS + 0.1
    assert quarantine.hosts() == set()


def test_quarantine_is_not_lengthened_by_flood_in_its_first_5_seconds() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    flood(quarantine)
    now[0] = host_bounds.DRAIN_SECONDS - 0.1
    assert flood(quarantine) == []
    now[0] = host_bounds.DRAIN_SECONDS + 1
    assert flood(quarantine) == [120]


def test_quarantine_doubles_with_each_flood_up_to_900_seconds_until_quiet_hour() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    seconds = []
    for _ in range(6):
        [duration] = flood(quarantine)
        seconds.append(duration)
        now[0] += duration
    assert seconds == [60, 120, 240, 480, 900, 900]
    now[0] += host_bounds.FORGIVEN_SECONDS + 1
    assert flood(quarantine) == [60]


def test_flood_spread_over_9_of_10_seconds_begins_a_quarantine() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    for _ in range(host_bounds.FLOOD_MESSAGES - 1):
        assert not quarantine.count("h1", 300)
        now[0] += 0.9 * host_bounds.FLOOD_SECONDS / host_bounds.FLOOD_MESSAGES
    assert quarantine.count("h1", 300) == 60
