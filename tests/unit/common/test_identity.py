# SPDX-License-Identifier: Apache-2.0
"""Kilonova's token: the catalogue that came with it is old, and the identity service may be silent,
slow or gone."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keystoneauth1 import exceptions
from keystoneauth1.session import TCPKeepAliveAdapter
from oslo_config import cfg
from requests import PreparedRequest, Response

from common.clients import http, identity
from common.clients.identity import BELIEVED_SECONDS, KEEP, RENEW, IdentityClient
from common.domain import errors
from common.domain.errors import ConfigError
from common.service import config

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

    def finish(self) -> None:
        """Answer, and wait for the threads that fetch a token."""
        self.answers.set()
        for thread in threading.enumerate():
            if thread.name == "token":
                thread.join(5)

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
    return now


@pytest.fixture
def found(session: Session) -> IdentityClient:
    return IdentityClient(config.load(None), fetch=session.log_in)


@pytest.fixture
def hurried(session: Session) -> IdentityClient:
    """Return a client that waits for a token for a moment only."""
    return IdentityClient(config.load(None), wait=0.3, fetch=session.log_in)


def test_service_that_came_later_is_found_in_a_minute(
    found: IdentityClient, session: Session, clock: list[float]
) -> None:
    assert found.network_url() is None
    session.catalogue["network"] = URL
    clock[0] += KEEP - 1
    assert found.network_url() is None
    clock[0] += 1
    assert found.network_url() == URL


def test_cloud_without_networks_asks_for_a_catalogue_once_a_minute(
    found: IdentityClient, session: Session, clock: list[float]
) -> None:
    began = session.logins
    assert [found.network_url() for _ in range(9)] == [None] * 9
    assert session.logins == began + 1
    clock[0] += KEEP
    assert [found.network_url() for _ in range(9)] == [None] * 9
    assert session.logins == began + 2


def test_service_that_is_named_costs_no_token(
    found: IdentityClient, session: Session, clock: list[float]
) -> None:
    session.catalogue["network"] = URL
    found.token()
    began = session.logins
    assert [found.network_url() for _ in range(9)] == [URL] * 9
    assert session.logins == began


def test_a_service_that_has_moved_is_found_and_nobody_waits_for_that(
    hurried: IdentityClient, session: Session, clock: list[float]
) -> None:
    session.catalogue["network"] = URL
    assert hurried.network_url() == URL
    session.catalogue["network"] = f"{URL}/moved"
    clock[0] += BELIEVED_SECONDS - 1
    assert (hurried.network_url(), session.asked) == (URL, 1)
    session.answers.clear()
    clock[0] += 1
    assert [hurried.network_url() for _ in range(3)] == [URL] * 3
    session.finish()
    assert session.asked == 2
    assert hurried.network_url() == f"{URL}/moved"


def test_an_old_catalogue_is_good_enough_while_identity_is_silent(
    found: IdentityClient, session: Session, clock: list[float]
) -> None:
    session.catalogue["image"] = URL
    found.token()
    session.problem = exceptions.ConnectFailure("refused")
    clock[0] += 10 * BELIEVED_SECONDS
    assert [found.image_url() for _ in range(9)] == [URL] * 9


def test_one_token_serves_everybody_until_it_is_refused(
    found: IdentityClient, session: Session
) -> None:
    session.catalogue["image"] = "https://images"
    assert [found.token(), found.image_url(), found.token()] == [
        "token1",
        "https://images",
        "token1",
    ]
    found.forget_token("token1")
    assert found.token() == "token2"
    found.forget_token("token1")  # whose refusal comes late
    assert found.token() == "token2"


def test_a_token_is_renewed_before_it_ends_and_nobody_waits_for_that(
    hurried: IdentityClient, session: Session
) -> None:
    hurried.token()
    session.answers.clear()
    session.tokens[0].seconds_left = RENEW - 1
    assert [hurried.token() for _ in range(3)] == ["token1"] * 3
    session.finish()
    assert session.asked == 2
    assert hurried.token() == "token2"


def test_a_silent_identity_service_holds_nobody_up(
    hurried: IdentityClient, session: Session
) -> None:
    """One asks, in a thread of its own; all that need a token meanwhile wait a moment, and later
    ones not at all."""
    session.answers.clear()
    for _ in range(20):
        with pytest.raises(errors.Unavailable, match=r"check \[identity\]"):
            hurried.token()
    assert session.asked == 1
    session.finish()
    assert hurried.token() == "token1"


def test_one_that_is_gone_is_left_alone_for_a_while(
    found: IdentityClient, session: Session
) -> None:
    session.problem = exceptions.ConnectFailure("refused")
    for _ in range(20):
        with pytest.raises(errors.Unavailable):
            found.token()
    assert session.asked == http.FAILURES


def test_any_failure_is_told_to_all_who_wait(found: IdentityClient, session: Session) -> None:
    session.problem = ValueError("no JSON")
    with pytest.raises(errors.Unavailable) as raised:
        found.token()
    assert raised.value.__cause__ is session.problem
    session.problem = None
    assert found.token() == "token1"


# --- neighbours on other machines are asked over TLS ---
ELSEWHERE = "http://10.0.0.5:9696"
SAID = r"http://10\.0\.0\.5:9696 is no https:// .* \[identity\] allow_plain_text = true"
CONFIGURED = [
    ("identity", "auth_url"),
    ("image", "endpoint"),
    ("network", "endpoint"),
    ("share", "endpoint"),
    ("volume", "endpoint"),
]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], cfg.ConfigOpts]]:
    def read(lines: str) -> cfg.ConfigOpts:
        (tmp_path / "kilonova.conf").write_text(lines)
        return config.load(str(tmp_path / "kilonova.conf"))

    yield read
    config.CONF.clear()


@pytest.mark.parametrize(("section", "option"), CONFIGURED)
def test_a_plain_url_of_another_machine_is_refused_by_its_option(
    load, section: str, option: str
) -> None:
    with pytest.raises(ConfigError, match=rf"\[{section}\] {option}: {SAID}"):
        IdentityClient(load(f"[{section}]\n{option} = {ELSEWHERE}\n"))


@pytest.mark.parametrize(("section", "option"), CONFIGURED)
@pytest.mark.parametrize(
    "lines",
    [
        "{} = https://10.0.0.5:9696",
        "{} = http://127.0.0.1:9696",
        "{} = http://[::1]/",
        f"{{}} = {ELSEWHERE}\n[identity]\nallow_plain_text = true",
        f"{{}} = {ELSEWHERE}\n[tls]\nallow_plain_text = true",
    ],
)
def test_urls_that_may_be_asked(load, section: str, option: str, lines: str) -> None:
    IdentityClient(load(f"[{section}]\n{lines.format(option)}\n"))


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("image", "image"),
        ("network", "network"),
        ("shared-file-system", "share"),
        ("sharev2", "share"),
        ("block-storage", "volume"),
        ("volumev3", "volume"),
        ("volume", "volume"),
    ],
)
def test_a_plain_url_in_the_catalogue_is_not_given_out(
    session: Session, caplog: pytest.LogCaptureFixture, kind: str, section: str
) -> None:
    found = IdentityClient(config.load(), fetch=session.log_in)
    session.catalogue[kind] = ELSEWHERE
    ask = {
        "image": found.image_url,
        "network": found.network_url,
        "share": found.share_url,
        "volume": found.volume_url,
    }[section]
    for _ in range(2):
        with pytest.raises(
            errors.Unavailable, match=f"endpoint of {kind} in the catalogue is plain text"
        ):
            ask()
    [said] = [record.getMessage() for record in caplog.records]
    assert (
        re.search(rf"the catalogue's endpoint of {kind}: {SAID}", said)
        and f"[{section}] endpoint" in said
    )


def test_redirection_from_tls_to_plain_text_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server at the plain address would receive the token."""
    urls = []

    def redirect(adapter: object, request: PreparedRequest, **options: object) -> Response:
        urls.append(request.url)
        answer = Response()
        answer.status_code, answer.url, answer.request = 302, str(request.url), request
        answer.headers["Location"], answer.raw = "http://127.0.0.1:1/v2", io.BytesIO()
        return answer

    monkeypatch.setattr(TCPKeepAliveAdapter, "send", redirect)
    service = http.Http("image service", "https://images.example")
    with pytest.raises(errors.Unavailable):
        service.send("GET", "https://images.example/v2", "5ecret", connect_retries=0)
    assert urls == ["https://images.example/v2"]
