# SPDX-License-Identifier: Apache-2.0
"""Kilonova's token: the catalogue that came with it is old, and the identity service may be silent, slow or gone."""
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from keystoneauth1 import exceptions

from common import config, errors
from common.clients import http, identity
from common.clients.identity import KEEP, RENEW, Identity

URL = "http://127.0.0.1:9696"


class Token:
    """What keystoneauth tells of a token, and the catalogue that came with it."""

    def __init__(self, number: int, catalogue: dict[str, str]) -> None:
        self.auth_token, self.seconds_left = f"token{number}", 3600
        self._catalogue = catalogue

    @property
    def service_catalog(self) -> Token:
        return self

    def url_for(self, service_type: str, region_name: str) -> str:
        if service_type not in self._catalogue:
            raise exceptions.EndpointNotFound(service_type)
        return self._catalogue[service_type]

    def will_expire_soon(self, stale_duration: int) -> bool:
        return self.seconds_left < stale_duration


class Session:
    """An identity service whose catalogue is read with each new token."""

    def __init__(self) -> None:
        self.catalogue: dict[str, str] = {}
        self.tokens: list[Token] = []
        self.problem: Exception | None = None
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    @property
    def logins(self) -> int:
        return len(self.tokens)

    def log_in(self) -> Token:
        self.asked += 1
        self.answers.wait(10)
        if self.problem is not None:
            raise self.problem
        self.tokens.append(Token(self.logins + 1, dict(self.catalogue)))
        return self.tokens[-1]


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.answers.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What time it is."""
    now = [1000.0]
    monkeypatch.setattr(identity.time, "monotonic", lambda: now[0])
    yield now


@pytest.fixture
def found(session: Session) -> Identity:
    return Identity(config.load(None), fetch=session.log_in)


@pytest.fixture
def hurried(session: Session) -> Identity:
    """One that waits for next to nothing."""
    return Identity(config.load(None), wait=0.05, fetch=session.log_in)


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
    found.token()
    began = session.logins
    assert [found.network_url() for _ in range(9)] == [URL] * 9
    assert session.logins == began


def test_one_token_serves_everybody_until_it_is_refused(found: Identity, session: Session) -> None:
    session.catalogue["image"] = "http://images"
    assert [found.token(), found.image_url(), found.token()] == ["token1", "http://images", "token1"]
    found.forget_token("token1")
    assert found.token() == "token2"
    found.forget_token("token1")            # whose refusal comes late
    assert found.token() == "token2"


def test_a_token_is_renewed_before_it_ends_and_nobody_waits_for_that(hurried: Identity, session: Session) -> None:
    hurried.token()
    session.answers.clear()
    session.tokens[0].seconds_left = RENEW - 1
    assert [hurried.token() for _ in range(3)] == ["token1"] * 3
    assert session.asked == 2
    coming = hurried._coming
    assert coming is not None
    session.answers.set()
    coming[1].result(5)
    assert hurried.token() == "token2"


def test_a_silent_identity_service_holds_nobody_up(hurried: Identity, session: Session) -> None:
    """One asks, in a thread of its own; all that need a token meanwhile wait a moment, and later ones not at all."""
    session.answers.clear()
    for _ in range(20):
        with pytest.raises(errors.Unavailable, match=r"check \[identity\]"):
            hurried.token()
    assert session.asked == 1
    coming = hurried._coming
    assert coming is not None
    session.answers.set()
    coming[1].result(5)
    assert hurried.token() == "token1"


def test_one_that_is_gone_is_left_alone_for_a_while(found: Identity, session: Session) -> None:
    session.problem = exceptions.ConnectFailure("refused")
    for _ in range(20):
        with pytest.raises(errors.Unavailable):
            found.token()
    assert session.asked == http.FAILURES


def test_any_failure_is_told_to_all_who_wait(found: Identity, session: Session) -> None:
    session.problem = ValueError("no JSON")
    with pytest.raises(errors.Unavailable) as raised:
        found.token()
    assert raised.value.__cause__ is session.problem
    session.problem = None
    assert found.token() == "token1"
