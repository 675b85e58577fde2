# SPDX-License-Identifier: Apache-2.0
"""The catalogue that comes with a token is old: a service that came later is found, and asked for seldom."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from keystoneauth1 import exceptions

from common import config
from common.clients import identity
from common.clients.identity import KEEP, Identity

URL = "http://127.0.0.1:9696"


class Session:
    """An identity service whose catalogue is read with each new token."""

    def __init__(self) -> None:
        self.catalogue: dict[str, str] = {}
        self.logins = 0
        self.invalidate()

    def invalidate(self) -> None:
        self._seen = dict(self.catalogue)
        self.logins += 1

    def get_endpoint(self, service_type: str, region_name: str) -> str:
        if service_type not in self._seen:
            raise exceptions.EndpointNotFound(service_type)
        return self._seen[service_type]


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What time it is."""
    now = [1000.0]
    monkeypatch.setattr(identity.time, "monotonic", lambda: now[0])
    yield now


@pytest.fixture
def found(session: Session) -> Identity:
    made = Identity(config.load(None))
    made._session = session
    return made


def test_service_that_came_later_is_found_in_a_minute(found: Identity, session: Session, clock: list[float]) -> None:
    assert found.network_url() is None
    session.catalogue["network"] = URL
    clock[0] += KEEP - 1
    assert found.network_url() is None
    clock[0] += 1
    assert found.network_url() == URL


def test_cloud_without_networks_asks_for_a_catalogue_once_a_minute(found: Identity, session: Session,
                                                                   clock: list[float]) -> None:
    began = session.logins
    assert [found.network_url() for _ in range(9)] == [None] * 9
    assert session.logins == began + 1
    clock[0] += KEEP
    assert [found.network_url() for _ in range(9)] == [None] * 9
    assert session.logins == began + 2


def test_service_that_is_named_costs_no_token(found: Identity, session: Session, clock: list[float]) -> None:
    session.catalogue["network"] = URL
    session.invalidate()
    began = session.logins
    assert [found.network_url() for _ in range(9)] == [URL] * 9
    assert session.logins == began
