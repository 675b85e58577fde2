# SPDX-License-Identifier: Apache-2.0
"""The throttle of logins in the embedded identity service, and answers for unknown users."""

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
    """The identity service, with a clock of the throttle that only the test advances."""

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
def test_login_returns_429_after_wrong_passwords_of_known_or_unknown_user(
    service: Service, name: str
) -> None:
    attempts, seconds = USER_LIMIT
    assert [service.login(name).status_code for _ in range(attempts + 3)] == [401] * attempts + [
        429
    ] * 3
    refused = service.login(name, PASSWORD)
    assert (refused.status_code, refused.json["error"]["code"]) == (429, 429)
    assert seconds - 1 < int(refused.headers["Retry-After"]) <= seconds + 1
    service.now += seconds
    assert [service.login(name).status_code for _ in range(2)] == [401, 429]


def test_login_throttle_spares_other_users_and_addresses(service: Service) -> None:
    for _ in range(10):
        service.login("admin")
    assert service.login("kilonova", PASSWORD).status_code == 201
    assert service.login("admin", PASSWORD, "192.0.2.2").status_code == 201
    assert service.login("admin", PASSWORD).status_code == 429


def test_login_with_right_password_resets_throttle(service: Service) -> None:
    for _ in range(3):
        assert [service.login("admin").status_code for _ in range(4)] == [401] * 4
        assert service.login("admin", PASSWORD).status_code == 201


def test_login_throttle_limits_address_over_all_users(service: Service) -> None:
    attempts, seconds = ADDRESS_LIMIT
    assert {service.login(f"user{number}").status_code for number in range(attempts)} == {401}
    assert service.login("another").status_code == 429
    assert service.login("another", address="192.0.2.2").status_code == 401
    service.now += seconds
    assert service.login("another").status_code == 401


def test_login_with_repeated_method_counts_as_one_attempt_of_throttle(service: Service) -> None:
    assert service.login("admin", times=8).status_code == 401
    assert service.login("admin", times=8).status_code == 401
    assert service.login("admin", PASSWORD).status_code == 201


def test_login_of_unknown_user_takes_as_long_as_of_known_user(service: Service) -> None:
    durations: dict[str, list[float]] = {"admin": [], "nobody": []}
    for _ in range(9):
        for name, times in durations.items():
            service.now += 3600
            start = time.thread_time()
            assert service.login(name).status_code == 401
            times.append(time.thread_time() - start)
    known_user_time, unknown_user_time = (statistics.median(times) for times in durations.values())
    assert 0.7 < unknown_user_time / known_user_time < 1.4


def test_login_throttle_limits_number_of_buckets() -> None:
    throttle = Throttle(lambda: 1.0)
    for number in range(MAX_BUCKETS + 5):
        throttle.failed(number, 10.0)
    assert len(throttle) == MAX_BUCKETS
    assert throttle.wait(MAX_BUCKETS + 4, 1, 10.0) == 10.0
