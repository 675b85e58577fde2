# SPDX-License-Identifier: Apache-2.0
"""Wrong passwords: how often they may be tried, and that neither status nor time tells who
exists."""

import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from falcon.testing import Result, TestClient

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity import app, schema
from deploy.one_machine.services.identity.bootstrap import bootstrap
from deploy.one_machine.services.identity.service import IdentityService, utc_now
from deploy.one_machine.services.identity.throttle import (
    ADDRESS_LIMIT,
    MAX_BUCKETS,
    USER_LIMIT,
    Throttle,
)

PASSWORD = "correct horse"


class Service:
    """The identity service, whose throttle has a clock that only the test moves."""

    def __init__(self, database: Database) -> None:
        self.now = 1000.0
        gate = IdentityService(database, timedelta(hours=1), utc_now, Throttle(lambda: self.now))
        self._client = TestClient(app.build(gate))

    def login(
        self, name: str, password: str = "wrong", address: str = "192.0.2.1", times: int = 1
    ) -> Result:
        user = {"name": name, "domain": {"id": "default"}, "password": password}
        auth: dict[str, Any] = {
            "identity": {"methods": ["password"] * times, "password": {"user": user}}
        }
        return self._client.simulate_post(
            "/v3/auth/tokens", json={"auth": auth}, remote_addr=address
        )


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    database = Database(tmp_path / "identity.db", schema.METADATA)
    bootstrap(database, {"admin": PASSWORD, "kilonova": PASSWORD}, {})
    yield Service(database)
    database.close()


@pytest.mark.parametrize("name", ["admin", "nobody"])
def test_passwords_can_be_guessed_a_few_times_then_slowly(service: Service, name: str) -> None:
    fits, seconds = USER_LIMIT
    assert [service.login(name).status_code for _ in range(fits + 3)] == [401] * fits + [429] * 3
    refused = service.login(name, PASSWORD)
    assert (refused.status_code, refused.json["error"]["code"]) == (429, 429)
    assert seconds - 1 < int(refused.headers["Retry-After"]) <= seconds + 1
    service.now += seconds
    assert [service.login(name).status_code for _ in range(2)] == [401, 429]


def test_others_and_other_addresses_are_not_held_up(service: Service) -> None:
    for _ in range(10):
        service.login("admin")
    assert service.login("kilonova", PASSWORD).status_code == 201
    assert service.login("admin", PASSWORD, "192.0.2.2").status_code == 201
    assert service.login("admin", PASSWORD).status_code == 429


def test_who_is_right_begins_anew(service: Service) -> None:
    for _ in range(3):
        assert [service.login("admin").status_code for _ in range(4)] == [401] * 4
        assert service.login("admin", PASSWORD).status_code == 201


def test_one_address_may_not_try_everybody(service: Service) -> None:
    fits, seconds = ADDRESS_LIMIT
    assert {service.login(f"user{number}").status_code for number in range(fits)} == {401}
    assert service.login("another").status_code == 429
    assert service.login("another", address="192.0.2.2").status_code == 401
    service.now += seconds
    assert service.login("another").status_code == 401


def test_a_method_named_twice_is_tried_once(service: Service) -> None:
    assert service.login("admin", times=8).status_code == 401
    assert service.login("admin", times=8).status_code == 401
    assert service.login("admin", PASSWORD).status_code == 201


def test_nobody_takes_as_long_as_somebody(service: Service) -> None:
    took: dict[str, list[float]] = {"admin": [], "nobody": []}
    for _ in range(9):
        for name, times in took.items():
            service.now += 3600
            begun = time.thread_time()
            assert service.login(name).status_code == 401
            times.append(time.thread_time() - begun)
    somebody, nobody = (statistics.median(times) for times in took.values())
    assert 0.7 < nobody / somebody < 1.4


def test_what_is_remembered_is_bounded() -> None:
    throttle = Throttle(lambda: 1.0)
    for number in range(MAX_BUCKETS + 5):
        throttle.failed(number, 10.0)
    assert len(throttle) == MAX_BUCKETS
    assert throttle.wait(MAX_BUCKETS + 4, 1, 10.0) == 10.0
