# SPDX-License-Identifier: Apache-2.0
"""The cache of Keystone's unified limits: lifetime, shared requests, waits and failures."""

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
    """A stand-in for Keystone with limits that a test may change, delay or refuse."""

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

    def _answer(self, name: str, values: dict[str, int]) -> list[tuple[str, int]]:
        self.asked.append(name)
        assert self.answers.wait(20)
        if self.problem is not None:
            raise self.problem
        return list(values.items())

    def get_registered_limits(self, resources_to_check: Any) -> list[tuple[str, int]]:
        return self._answer("*", self.registered)

    def get_project_limits(self, project_id: str, resource_names: Any) -> list[tuple[str, int]]:
        return self._answer(project_id, self.own.get(project_id, {}))


class Clock:
    """A clock that advances only if a test changes ``now``."""

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
    new_client = UnifiedLimits(10, keystone.open, 30, clock)
    yield new_client
    keystone.answers.set()
    new_client.close()


def test_project_limits_override_registered_limits(client: UnifiedLimits) -> None:
    assert client.of("p") == {"servers": 10, "class:VCPU": 5}
    assert client.of("q") == client.of("*") == {"servers": 10, "class:VCPU": 20}


def test_unified_limits_are_cached_for_the_given_seconds(
    client: UnifiedLimits, keystone: Keystone, clock: Clock
) -> None:
    client.of("p")
    keystone.registered["servers"] = 3
    clock.now += 9.9
    assert client.of("p")["servers"] == 10
    assert sorted(keystone.asked) == ["*", "p"]
    clock.now += 0.1
    assert client.of("p")["servers"] == 3


def test_expired_limits_raise_unavailable_when_keystone_fails(
    client: UnifiedLimits, keystone: Keystone, clock: Clock
) -> None:
    client.of("*")
    keystone.problem = OSError("no route")
    assert client.of("*")["servers"] == 10
    clock.now += 10
    for _ in range(6):
        with pytest.raises(errors.Unavailable, match="does not return the limits"):
            client.of("*")
    assert len(keystone.asked) == 1 + 3, "after three failures the client pauses"
    keystone.problem = None
    clock.now += 2
    assert client.of("*")["servers"] == 10


def test_unified_limits_connect_again_after_a_failed_connection(
    client: UnifiedLimits, keystone: Keystone
) -> None:
    keystone.problem = OSError("no route")
    with pytest.raises(errors.Unavailable):
        client.of("*")
    keystone.problem = None
    assert client.of("*")["servers"] == 10


def test_concurrent_limit_lookups_share_one_request(
    client: UnifiedLimits, keystone: Keystone
) -> None:
    keystone.answers.clear()
    with ThreadPoolExecutor(8) as pool:
        lookups = [pool.submit(client.of, "p") for _ in range(8)]
        deadline = time.monotonic() + 20
        while len(keystone.asked) < 2 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        keystone.answers.set()
        assert all(lookup.result(20)["class:VCPU"] == 5 for lookup in lookups)
    assert sorted(keystone.asked) == ["*", "p"]


def test_limit_lookup_raises_unavailable_after_wait_for_silent_keystone(keystone: Keystone) -> None:
    client = UnifiedLimits(10, keystone.open, 0.1)
    keystone.answers.clear()
    for _ in range(3):
        with pytest.raises(errors.Unavailable):
            client.of("p")
    assert sorted(keystone.asked) == ["*", "p"], "the first request is still open"
    keystone.answers.set()
    client.close()


def test_limit_lookup_wait_counts_from_the_start_of_the_shared_request(
    client: UnifiedLimits, keystone: Keystone, clock: Clock
) -> None:
    keystone.answers.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.of, "*")
        while not keystone.asked:
            threading.Event().wait(0.01)
        clock.now += 30
        start = time.monotonic()
        with pytest.raises(errors.Unavailable):
            client.of("*")
        assert time.monotonic() - start < 15, "the wait counts from the first request"
        keystone.answers.set()
        assert first.result(20)["servers"] == 10


def test_unified_limits_cache_drops_projects_above_the_maximum(
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


def test_unified_limits_client_is_none_unless_quota_driver_is_unified(
    load: Callable[..., Any],
) -> None:
    assert limits.configured(load("[quota]")) is None


def test_unified_limits_without_oslo_limit_name_package_to_install(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = load("[quota]", "driver = unified")
    for name in ("oslo_limit", "oslo_limit.limit"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.ConfigError, match="pip install 'kilonova.unified-limits.'"):
        limits.configured(conf)
