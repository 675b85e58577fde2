# SPDX-License-Identifier: Apache-2.0
"""Keystone's limits: believed for a short time, asked for once however many wait, and never
guessed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.clients import limits
from common.clients.limits import UnifiedLimits
from common.domain import errors
from common.service import config


class Keystone:
    """Limits that a test changes, and answers that it may keep back or refuse."""

    def __init__(self) -> None:
        self.registered, self.own = {"servers": 10, "class:VCPU": 20}, {"p": {"class:VCPU": 5}}
        self.problem: Exception | None = None
        self.asked: list[str] = []
        self.answers = threading.Event()
        self.answers.set()

    def open(self) -> Keystone:
        if self.problem is not None:
            raise self.problem
        return self

    def _tell(self, name: str, found: dict[str, int]) -> list[tuple[str, int]]:
        self.asked.append(name)
        assert self.answers.wait(20)
        if self.problem is not None:
            raise self.problem
        return list(found.items())

    def get_registered_limits(self, resources_to_check: Any) -> list[tuple[str, int]]:
        return self._tell("*", self.registered)

    def get_project_limits(self, project_id: str, resource_names: Any) -> list[tuple[str, int]]:
        return self._tell(project_id, self.own.get(project_id, {}))


class Clock:
    """A time that only the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def keystone() -> Keystone:
    return Keystone()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(keystone: Keystone, clock: Clock) -> Iterator[UnifiedLimits]:
    made = UnifiedLimits(10, keystone.open, 30, clock)
    yield made
    keystone.answers.set()
    made.close()


def test_a_projects_own_limits_come_before_the_registered(client: UnifiedLimits) -> None:
    assert client.of("p") == {"servers": 10, "class:VCPU": 5}
    assert client.of("q") == client.of("*") == {"servers": 10, "class:VCPU": 20}


def test_limits_are_believed_for_a_short_time(
    client: UnifiedLimits, keystone: Keystone, clock: Clock
) -> None:
    client.of("p")
    keystone.registered["servers"] = 3
    clock.now += 9.9
    assert client.of("p")["servers"] == 10
    assert sorted(keystone.asked) == ["*", "p"]
    clock.now += 0.1
    assert client.of("p")["servers"] == 3


def test_what_is_old_is_not_told_when_keystone_is_silent(
    client: UnifiedLimits, keystone: Keystone, clock: Clock
) -> None:
    client.of("*")
    keystone.problem = OSError("no route")
    assert client.of("*")["servers"] == 10
    clock.now += 10
    for _ in range(6):
        with pytest.raises(errors.Unavailable, match="does not tell the limits"):
            client.of("*")
    assert len(keystone.asked) == 1 + 3, "after three failures it is left alone for a while"
    keystone.problem = None
    clock.now += 2
    assert client.of("*")["servers"] == 10


def test_a_way_that_cannot_be_opened_is_opened_later(
    client: UnifiedLimits, keystone: Keystone
) -> None:
    keystone.problem = OSError("no route")
    with pytest.raises(errors.Unavailable):
        client.of("*")
    keystone.problem = None
    assert client.of("*")["servers"] == 10


def test_one_question_does_for_all_who_wait(client: UnifiedLimits, keystone: Keystone) -> None:
    keystone.answers.clear()
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(client.of, "p") for _ in range(8)]
        deadline = time.monotonic() + 20
        while len(keystone.asked) < 2 and time.monotonic() < deadline:
            threading.Event().wait(0.01)  # nothing tells that a thread has asked
        keystone.answers.set()
        assert all(one.result(20)["class:VCPU"] == 5 for one in found)
    assert sorted(keystone.asked) == ["*", "p"]


def test_who_asks_waits_for_a_moment_only(keystone: Keystone) -> None:
    client = UnifiedLimits(10, keystone.open, 0.1)
    keystone.answers.clear()
    for _ in range(3):
        with pytest.raises(errors.Unavailable):
            client.of("p")
    assert sorted(keystone.asked) == ["*", "p"], "it is still the first question"
    keystone.answers.set()
    client.close()


def test_the_moment_begins_with_the_question(
    client: UnifiedLimits, keystone: Keystone, clock: Clock
) -> None:
    keystone.answers.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.of, "*")
        while not keystone.asked:
            threading.Event().wait(0.01)  # nothing tells that a thread has asked
        clock.now += 30
        begun = time.monotonic()
        with pytest.raises(errors.Unavailable):
            client.of("*")
        assert time.monotonic() - begun < 15, "it does not wait as long again"
        keystone.answers.set()
        assert first.result(20)["servers"] == 10


def test_no_more_projects_are_remembered_than_allowed(
    client: UnifiedLimits, keystone: Keystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST", 3)
    for project in "abcd":
        client.of(project)
    keystone.asked.clear()
    client.of("d")
    assert "d" not in keystone.asked
    client.of("a")
    assert "a" in keystone.asked


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    def write_and_load(*lines: str) -> Any:
        path = tmp_path / "kilonova.conf"
        path.write_text("\n".join(lines) + "\n")
        return config.load(str(path))

    yield write_and_load
    config.CONF.clear()


def test_our_own_limits_need_no_keystone(load: Callable[..., Any]) -> None:
    assert limits.configured(load("[quota]")) is None


def test_a_missing_oslo_limit_is_named_at_start(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = load("[quota]", "driver = unified")
    for name in ("oslo_limit", "oslo_limit.limit"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.ConfigError, match="pip install 'kilonova.unified-limits.'"):
        limits.configured(conf)
