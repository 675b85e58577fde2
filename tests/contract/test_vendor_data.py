# SPDX-License-Identifier: Apache-2.0
"""Dynamic vendor data over real HTTP: what targets are asked, and that none of them keeps a boot
waiting or gets in what a guest cannot be given."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from keystoneauth1 import session
from oslo_config import cfg

from common.clients import vendor_data
from common.clients.vendor_data import MOST_BYTES, MOST_DEPTH, Dynamic, Target
from common.domain import errors
from common.domain.errors import ConfigError
from common.service import config

FACTS = {
    "project-id": "p",
    "instance-id": "s1",
    "image-id": "i",
    "user-data": None,
    "hostname": "web",
    "metadata": {"a": "b"},
    "boot-roles": "member,reader",
}
Answer = Callable[[BaseHTTPRequestHandler], None]


class Service(ThreadingHTTPServer):
    """A target, and the identity service of the token; it answers as the test says, and remembers
    what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Answer = says(b"{}")
        self.over = threading.Event()  # what hangs ends with the test

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v3/auth/tokens":
            self._token()
            return
        self.server.asked.append((self.path, dict(self.headers), body))
        self.server.answer(self)

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers), None))
        say(self, b'{"version": {"id": "v3.14", "links": [{"rel": "self", "href": "x"}]}}')

    def _token(self) -> None:
        body = {
            "token": {
                "methods": ["password"],
                "expires_at": "2199-01-01T00:00:00Z",
                "user": {"id": "u", "name": "vd", "domain": {"id": "default", "name": "Default"}},
            }
        }
        say(self, json.dumps(body).encode(), 201, {"X-Subject-Token": "the token"})

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


def say(
    handler: BaseHTTPRequestHandler,
    body: bytes,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def says(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return lambda handler: say(handler, body, status, headers)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield made
    made.over.set()
    made.shutdown()
    made.server_close()


def opened(service: Service, *names: str, **more: Any) -> Dynamic:
    return Dynamic(
        [Target(name, service.url(f"/{name}")) for name in names or ("t",)],
        session.Session(),
        **more,
    )


def test_each_target_is_asked_what_nova_asks(service: Service) -> None:
    service.answer = says(b'{"a": [1, "\\u00e4"]}')
    assert opened(service, "one", "two").of(FACTS) == {
        "one": {"a": [1, "ä"]},
        "two": {"a": [1, "ä"]},
    }
    assert [(path, body) for path, _, body in service.asked] == [("/one", FACTS), ("/two", FACTS)]
    headers = service.asked[0][1]
    assert (headers["Content-Type"], headers["Accept"]) == ("application/json", "application/json")
    assert "X-Auth-Token" not in headers


def never(service: Service) -> Answer:
    return lambda handler: service.over.wait(30) and None


def drip(service: Service, head: bytes) -> Answer:
    """A byte after the other, each soon enough for the time-out of one read."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with suppress(OSError):
            handler.wfile.write(head)
            while not service.over.wait(0.02):
                handler.wfile.write(b" ")

    return answer


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


BODIES = {
    "not JSON": (b"<html>", "not JSON"),
    "half": (b'{"a": ', "not JSON"),
    "no text": (b'"\xff"', "not JSON"),
    "half a pair": (b'{"a": "\\ud800"}', "not JSON"),
    "NaN": (b"[NaN]", "no number"),
    "large": (b'"' + b"x" * MOST_BYTES + b'"', "longer than"),
    "deep": (deep(MOST_DEPTH + 1), "deeper than"),
    "very deep": (deep(MOST_BYTES // 2), "deeper than"),
    "a long number": (b"9" * 5000, "not JSON"),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_no_guest_can_be_given_is_refused(
    service: Service, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, why = BODIES[name]
    service.answer = says(body)
    with caplog.at_level("WARNING"):
        assert opened(service).of(FACTS) == {"t": {}}
    assert "vendor data of t for server s1: " in caplog.text and why in caplog.text


@pytest.mark.parametrize("status", [301, 307, 308, 400, 401, 404, 500, 503])
def test_a_status_that_is_no_success_is_refused(
    service: Service, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    service.answer = says(b'{"a": 1}', status, {"Location": service.url("/elsewhere")})
    with caplog.at_level("WARNING"):
        assert opened(service).of(FACTS) == {"t": {}}
    assert f"it answered {status}" in caplog.text
    assert [path for path, _, _ in service.asked] == ["/t"]


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_answer_says_nothing(service: Service, body: bytes) -> None:
    service.answer = says(body)
    assert opened(service, is_fatal=True).of(FACTS) == {"t": {}}


def test_as_deep_and_as_long_as_allowed_is_taken(service: Service) -> None:
    service.answer = says(deep(MOST_DEPTH))
    assert opened(service).of(FACTS)["t"] == json.loads(deep(MOST_DEPTH))
    service.answer = says(b'"' + b"x" * (MOST_BYTES - 2) + b'"')
    assert len(opened(service).of(FACTS)["t"]) == MOST_BYTES - 2


@pytest.mark.parametrize("how", ["never", "body", "head"])
def test_no_boot_waits_longer_than_the_time_outs(
    service: Service, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    heads = {
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
        "head": b"HTTP/1.1 200 OK\r\nX-Long:",
    }
    service.answer = drip(service, heads[how]) if how in heads else never(service)
    began = time.monotonic()
    with caplog.at_level("WARNING"):
        assert opened(service, connect=0.1, read=0.2).of(FACTS) == {"t": {}}
    assert time.monotonic() - began < 2
    assert "vendor data of t" in caplog.text


def test_calls_that_never_end_are_not_more_than_so_many(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vendor_data, "AT_ONCE", 2)
    service.answer = drip(service, b"HTTP/1.1 200 OK\r\nX-Long:")
    with caplog.at_level("WARNING"):
        assert opened(service, "a", "b", "c", "d", connect=0.1, read=0.1).of(
            FACTS
        ) == dict.fromkeys("abcd", {})
    assert [path for path, _, _ in service.asked] == ["/a", "/b"]
    assert caplog.text.count("2 calls of this process have not been answered yet") == 2


def test_a_target_that_has_failed_three_times_is_left_alone(service: Service) -> None:
    service.answer = says(b"", 500)
    dynamic = opened(service)
    for _ in range(5):
        assert dynamic.of(FACTS) == {"t": {}}
    assert len(service.asked) == 3


def test_where_a_failure_is_fatal_it_is_said(service: Service) -> None:
    service.answer = says(b"<html>")
    with pytest.raises(errors.Unavailable, match="vendor data of t cannot be had"):
        opened(service, is_fatal=True).of(FACTS)
    nobody = Dynamic([Target("t", "http://127.0.0.1:1/")], session.Session(), is_fatal=True)
    with pytest.raises(errors.Unavailable):
        nobody.of(FACTS)


# --- as configured ---
@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """A configuration of its own: what keystoneauth adds stays in it."""

    def read(*lines: str) -> Any:
        path, conf = tmp_path / "k.conf", cfg.ConfigOpts()
        path.write_text("\n".join(("[vendor_data]", *lines)))
        config.register(conf)
        conf(args=[], default_config_files=[str(path)], default_config_dirs=[])
        return conf

    return read


def test_targets_are_told_who_asks_as_configured(
    service: Service, load: Callable[..., Any]
) -> None:
    conf = load(
        "providers = static, dynamic",
        f"dynamic_targets = a@{service.url('/a')}, b@{service.url('/b')}",
        "[vendordata_dynamic_auth]",
        "auth_type = v3password",
        f"auth_url = {service.url('/v3')}",
        "username = vd",
        "password = secret",
        "user_domain_name = Default",
    )
    dynamic = vendor_data.configured(conf)
    assert dynamic is not None and vendor_data.static(conf) == {}
    assert dynamic.of(FACTS) == {"a": {}, "b": {}}
    asked = [
        (path, headers.get("X-Auth-Token"))
        for path, headers, _ in service.asked
        if path in ("/a", "/b")
    ]
    assert asked == [("/a", "the token"), ("/b", "the token")]


def test_without_the_provider_nobody_is_asked(load: Callable[..., Any]) -> None:
    assert vendor_data.configured(load("dynamic_targets = a@http://127.0.0.1:1/")) is None
    conf = load("providers = dynamic", "dynamic_targets = a@http://127.0.0.1:1/")
    assert vendor_data.static(conf) is None and vendor_data.configured(conf) is not None


@pytest.mark.parametrize(
    "targets",
    [
        "",
        "a",
        "@http://h/",
        "a@ftp://h/",
        "static@http://h/",
        "a b@http://h/",
        "a@http://h/, a@http://i/",
        "a@http://user:hidden@h/",
        "a@http://[::/",
        "a@http:///x",
        ", ".join(f"a{number}@http://h/" for number in range(17)),
    ],
)
def test_a_wrong_target_is_refused_at_start(load: Callable[..., Any], targets: str) -> None:
    with pytest.raises(ConfigError, match=r"\[vendor_data\] dynamic_targets") as refused:
        vendor_data.configured(load("providers = dynamic", f"dynamic_targets = {targets}"))
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        (r"\[vendor_data\] dynamic_targets: a", ["dynamic_targets = a@http://10.0.0.5/"]),
        (
            r"\[vendordata_dynamic_auth\] auth_url",
            [
                "dynamic_targets = a@https://t/",
                "[vendordata_dynamic_auth]",
                "auth_type = v3password",
                "auth_url = http://10.0.0.5/v3",
                "username = u",
                "password = p",
                "user_domain_name = Default",
            ],
        ),
    ],
)
def test_none_is_asked_for_as_plain_text_elsewhere(
    load: Callable[..., Any], option: str, lines: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"{option}: http://10.0.0.5 is no https://"):
        vendor_data.configured(load("providers = dynamic", *lines))


def test_a_user_who_is_half_named_is_refused_at_start(load: Callable[..., Any]) -> None:
    conf = load(
        "providers = dynamic",
        "dynamic_targets = a@https://h/",
        "[vendordata_dynamic_auth]",
        "auth_type = no-such-plugin",
    )
    with pytest.raises(ConfigError, match=r"\[vendordata_dynamic_auth\]"):
        vendor_data.configured(conf)
