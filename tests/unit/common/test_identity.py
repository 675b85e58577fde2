# SPDX-License-Identifier: Apache-2.0
"""Kilonova's token and catalogue when the identity service is slow, silent or unreachable."""

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
from tests.log_lines import logged_fields

URL = "http://127.0.0.1:9696"


class Token:
    """A stand-in for the token of keystoneauth and for its catalogue."""

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
    """An identity service that issues tokens with the current catalogue."""

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
        """Let the service answer, and wait for the threads that fetch a token."""
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
    new_session = Session()
    yield new_session
    new_session.answers.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return a list with the current time, which a test may change."""
    now = [1000.0]
    monkeypatch.setattr(identity.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def identity_client(session: Session) -> IdentityClient:
    return IdentityClient(config.load(None), fetch=session.log_in)


@pytest.fixture
def impatient_client(session: Session) -> IdentityClient:
    """Return a client that waits at most 0.3 seconds for a token."""
    return IdentityClient(config.load(None), wait=0.3, fetch=session.log_in)


def test_network_url_finds_a_new_service_within_a_minute(
    identity_client: IdentityClient, session: Session, clock: list[float]
) -> None:
    assert identity_client.network_url() is None
    session.catalogue["network"] = URL
    clock[0] += KEEP - 1
    assert identity_client.network_url() is None
    clock[0] += 1
    assert identity_client.network_url() == URL


def test_network_url_without_service_reads_the_catalogue_once_a_minute(
    identity_client: IdentityClient, session: Session, clock: list[float]
) -> None:
    earlier_logins = session.logins
    assert [identity_client.network_url() for _ in range(9)] == [None] * 9
    assert session.logins == earlier_logins + 1
    clock[0] += KEEP
    assert [identity_client.network_url() for _ in range(9)] == [None] * 9
    assert session.logins == earlier_logins + 2


def test_network_url_in_catalogue_needs_no_further_login(
    identity_client: IdentityClient, session: Session, clock: list[float]
) -> None:
    session.catalogue["network"] = URL
    identity_client.token()
    earlier_logins = session.logins
    assert [identity_client.network_url() for _ in range(9)] == [URL] * 9
    assert session.logins == earlier_logins


def test_network_url_of_moved_service_is_updated_in_the_background(
    impatient_client: IdentityClient, session: Session, clock: list[float]
) -> None:
    session.catalogue["network"] = URL
    assert impatient_client.network_url() == URL
    session.catalogue["network"] = f"{URL}/moved"
    clock[0] += BELIEVED_SECONDS - 1
    assert (impatient_client.network_url(), session.asked) == (URL, 1)
    session.answers.clear()
    clock[0] += 1
    assert [impatient_client.network_url() for _ in range(3)] == [URL] * 3
    session.finish()
    assert session.asked == 2
    assert impatient_client.network_url() == f"{URL}/moved"


def test_image_url_uses_old_catalogue_while_identity_is_unreachable(
    identity_client: IdentityClient, session: Session, clock: list[float]
) -> None:
    session.catalogue["image"] = URL
    identity_client.token()
    session.problem = exceptions.ConnectFailure("refused")
    clock[0] += 10 * BELIEVED_SECONDS
    assert [identity_client.image_url() for _ in range(9)] == [URL] * 9


def test_identity_token_is_shared_until_it_is_refused(
    identity_client: IdentityClient, session: Session
) -> None:
    session.catalogue["image"] = "https://images"
    assert [identity_client.token(), identity_client.image_url(), identity_client.token()] == [
        "token1",
        "https://images",
        "token1",
    ]
    identity_client.forget_token("token1")
    assert identity_client.token() == "token2"
    # The refusal of the old token arrives late.
    identity_client.forget_token("token1")
    assert identity_client.token() == "token2"


def test_identity_token_is_renewed_in_the_background_before_it_expires(
    impatient_client: IdentityClient, session: Session
) -> None:
    impatient_client.token()
    session.answers.clear()
    session.tokens[0].seconds_left = RENEW - 1
    assert [impatient_client.token() for _ in range(3)] == ["token1"] * 3
    session.finish()
    assert session.asked == 2
    assert impatient_client.token() == "token2"


def test_identity_token_callers_share_silent_request_and_raise_unavailable(
    impatient_client: IdentityClient, session: Session
) -> None:
    """The wait counts from the one shared request, so later callers fail at once."""
    session.answers.clear()
    for _ in range(20):
        with pytest.raises(errors.Unavailable, match=r"check \[identity\]"):
            impatient_client.token()
    assert session.asked == 1
    session.finish()
    assert impatient_client.token() == "token1"


def test_identity_login_pauses_after_repeated_connection_failures(
    identity_client: IdentityClient, session: Session
) -> None:
    session.problem = exceptions.ConnectFailure("refused")
    for _ in range(20):
        with pytest.raises(errors.Unavailable):
            identity_client.token()
    assert session.asked == http.FAILURES


def test_identity_token_with_unexpected_error_raises_unavailable_with_cause(
    identity_client: IdentityClient, session: Session
) -> None:
    session.problem = ValueError("no JSON")
    with pytest.raises(errors.Unavailable) as raised:
        identity_client.token()
    assert raised.value.__cause__ is session.problem
    session.problem = None
    assert identity_client.token() == "token1"


# --- TLS to external services on other machines ---
ELSEWHERE = "http://10.0.0.5:9696"
PLAIN_URL_MESSAGE = (
    r"http://10\.0\.0\.5:9696 is no https:// .* \[identity\] allow_plain_text = true"
)
URL_OPTIONS = [
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


@pytest.mark.parametrize(("section", "option"), URL_OPTIONS)
def test_plain_text_url_of_another_machine_is_refused_naming_its_option(
    load, section: str, option: str
) -> None:
    with pytest.raises(ConfigError, match=rf"\[{section}\] {option}: {PLAIN_URL_MESSAGE}"):
        IdentityClient(load(f"[{section}]\n{option} = {ELSEWHERE}\n"))


@pytest.mark.parametrize(("section", "option"), URL_OPTIONS)
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
def test_https_local_or_allowed_plain_text_url_is_accepted(
    load, section: str, option: str, lines: str
) -> None:
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
def test_plain_text_url_in_the_catalogue_is_refused_and_logged_once(
    session: Session, caplog: pytest.LogCaptureFixture, kind: str, section: str
) -> None:
    identity_client = IdentityClient(config.load(), fetch=session.log_in)
    session.catalogue[kind] = ELSEWHERE
    read_url = {
        "image": identity_client.image_url,
        "network": identity_client.network_url,
        "share": identity_client.share_url,
        "volume": identity_client.volume_url,
    }[section]
    for _ in range(2):
        with pytest.raises(
            errors.Unavailable, match=f"refuses the endpoint of {kind} in the catalogue"
        ):
            read_url()
    assert len(caplog.records) == 1
    [fields] = logged_fields(
        caplog, "an endpoint of the catalogue is refused, because it is plain HTTP"
    )
    problem = str(fields["problem"])
    assert fields["service"] == kind
    assert (
        re.search(rf"the catalogue's endpoint of {kind}: {PLAIN_URL_MESSAGE}", problem)
        and f"[{section}] endpoint" in problem
    )


def test_http_send_does_not_follow_redirection_from_tls_to_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the server at the plain address would receive the token."""
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
