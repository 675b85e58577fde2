# SPDX-License-Identifier: Apache-2.0
"""Dynamic vendor data from real HTTP servers.

The tests cover the requests to targets, timeouts, and bodies that guests cannot receive.
"""

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
from tests.log_lines import logged_fields, rendered_lines

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
    """A target together with the identity service of its token.

    The server records requests and gives the test's answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Answer = answer_with(b"{}")
        # Answers that hang end when this event is set.
        self.over = threading.Event()

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v3/auth/tokens":
            self._token()
            return
        self.server.requests.append((self.path, dict(self.headers), body))
        self.server.answer(self)

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers), None))
        send_answer(self, b'{"version": {"id": "v3.14", "links": [{"rel": "self", "href": "x"}]}}')

    def _token(self) -> None:
        body = {
            "token": {
                "methods": ["password"],
                "expires_at": "2199-01-01T00:00:00Z",
                "user": {"id": "u", "name": "vd", "domain": {"id": "default", "name": "Default"}},
            }
        }
        send_answer(self, json.dumps(body).encode(), 201, {"X-Subject-Token": "the token"})

    def log_message(self, *arguments: Any) -> None:
        """Write no log."""


def send_answer(
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


def answer_with(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return lambda handler: send_answer(handler, body, status, headers)


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def create_dynamic(service: Service, *names: str, **more: Any) -> Dynamic:
    return Dynamic(
        [Target(name, service.url(f"/{name}")) for name in names or ("t",)],
        session.Session(),
        **more,
    )


def test_vendor_data_request_has_body_and_headers_of_nova(service: Service) -> None:
    service.answer = answer_with(b'{"a": [1, "\\u00e4"]}')
    assert create_dynamic(service, "one", "two").of(FACTS) == {
        "one": {"a": [1, "ä"]},
        "two": {"a": [1, "ä"]},
    }
    assert [(path, body) for path, _, body in service.requests] == [
        ("/one", FACTS),
        ("/two", FACTS),
    ]
    headers = service.requests[0][1]
    assert (headers["Content-Type"], headers["Accept"]) == ("application/json", "application/json")
    assert "X-Auth-Token" not in headers


def hang_forever(service: Service) -> Answer:
    return lambda handler: service.over.wait(30) and None


def answer_slowly(service: Service, head: bytes) -> Answer:
    """Send one byte after the other, each within the timeout of one read."""

    def send_slowly(handler: BaseHTTPRequestHandler) -> None:
        with suppress(OSError):
            handler.wfile.write(head)
            while not service.over.wait(0.02):
                handler.wfile.write(b" ")

    return send_slowly


def nest_arrays(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


BODIES = {
    "not JSON": (b"<html>", "not JSON"),
    "half": (b'{"a": ', "not JSON"),
    "no text": (b'"\xff"', "not JSON"),
    "half a pair": (b'{"a": "\\ud800"}', "not JSON"),
    "NaN": (b"[NaN]", "no number"),
    "large": (b'"' + b"x" * MOST_BYTES + b'"', "longer than"),
    "deep": (nest_arrays(MOST_DEPTH + 1), "deeper than"),
    "very deep": (nest_arrays(MOST_BYTES // 2), "deeper than"),
    "a long number": (b"9" * 5000, "not JSON"),
}


@pytest.mark.parametrize("name", BODIES)
def test_vendor_data_with_unusable_body_is_empty_and_logged(
    service: Service, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, reason = BODIES[name]
    service.answer = answer_with(body)
    with caplog.at_level("WARNING"):
        assert create_dynamic(service).of(FACTS) == {"t": {}}
    [fields] = logged_fields(caplog, "a server gets no vendor data of a target")
    assert (fields["target"], fields["server"]) == ("t", "s1") and reason in str(fields["problem"])


@pytest.mark.parametrize("status", [301, 307, 308, 400, 401, 404, 500, 503])
def test_vendor_data_with_error_or_redirect_status_is_empty_and_logged(
    service: Service, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    service.answer = answer_with(b'{"a": 1}', status, {"Location": service.url("/elsewhere")})
    with caplog.at_level("WARNING"):
        assert create_dynamic(service).of(FACTS) == {"t": {}}
    [fields] = logged_fields(caplog, "a server gets no vendor data of a target")
    assert f"it answered {status}" in str(fields["problem"])
    assert [path for path, _, _ in service.requests] == ["/t"]


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_vendor_data_with_empty_body_is_empty_without_failure(
    service: Service, body: bytes
) -> None:
    service.answer = answer_with(body)
    assert create_dynamic(service, is_fatal=True).of(FACTS) == {"t": {}}


def test_vendor_data_at_limits_of_depth_and_size_is_accepted(service: Service) -> None:
    service.answer = answer_with(nest_arrays(MOST_DEPTH))
    assert create_dynamic(service).of(FACTS)["t"] == json.loads(nest_arrays(MOST_DEPTH))
    service.answer = answer_with(b'"' + b"x" * (MOST_BYTES - 2) + b'"')
    assert len(create_dynamic(service).of(FACTS)["t"]) == MOST_BYTES - 2


@pytest.mark.parametrize("hang", ["never", "body", "head"])
def test_vendor_data_of_hanging_target_is_empty_after_timeout(
    service: Service, hang: str, caplog: pytest.LogCaptureFixture
) -> None:
    heads = {
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
        "head": b"HTTP/1.1 200 OK\r\nX-Long:",
    }
    service.answer = answer_slowly(service, heads[hang]) if hang in heads else hang_forever(service)
    start = time.monotonic()
    with caplog.at_level("WARNING"):
        assert create_dynamic(service, connect=0.1, read=0.2).of(FACTS) == {"t": {}}
    assert time.monotonic() - start < 2
    [fields] = logged_fields(caplog, "a server gets no vendor data of a target")
    assert fields["target"] == "t"


def test_vendor_data_limits_number_of_unanswered_calls(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vendor_data, "AT_ONCE", 2)
    service.answer = answer_slowly(service, b"HTTP/1.1 200 OK\r\nX-Long:")
    with caplog.at_level("WARNING"):
        assert create_dynamic(service, "a", "b", "c", "d", connect=0.1, read=0.1).of(
            FACTS
        ) == dict.fromkeys("abcd", {})
    assert [path for path, _, _ in service.requests] == ["/a", "/b"]
    text = "\n".join(rendered_lines(caplog))
    assert text.count("2 calls of this process have not been answered yet") == 2


def test_vendor_data_target_is_skipped_after_three_failures(service: Service) -> None:
    service.answer = answer_with(b"", 500)
    dynamic = create_dynamic(service)
    for _ in range(5):
        assert dynamic.of(FACTS) == {"t": {}}
    assert len(service.requests) == 3


def test_vendor_data_failure_raises_unavailable_when_fatal(service: Service) -> None:
    service.answer = answer_with(b"<html>")
    with pytest.raises(errors.Unavailable, match="vendor data of t cannot be read"):
        create_dynamic(service, is_fatal=True).of(FACTS)
    unreachable = Dynamic([Target("t", "http://127.0.0.1:1/")], session.Session(), is_fatal=True)
    with pytest.raises(errors.Unavailable):
        unreachable.of(FACTS)


# --- as configured ---
@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that loads a separate configuration.

    Why: keystoneauth registers options in the configuration.
    """

    def load_config(*lines: str) -> Any:
        path, conf = tmp_path / "k.conf", cfg.ConfigOpts()
        path.write_text("\n".join(("[vendor_data]", *lines)))
        config.register(conf)
        conf(args=[], default_config_files=[str(path)], default_config_dirs=[])
        return conf

    return load_config


def test_vendor_data_requests_carry_token_of_configured_user(
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
    tokens_by_path = [
        (path, headers.get("X-Auth-Token"))
        for path, headers, _ in service.requests
        if path in ("/a", "/b")
    ]
    assert tokens_by_path == [("/a", "the token"), ("/b", "the token")]


def test_vendor_data_is_off_without_dynamic_provider(load: Callable[..., Any]) -> None:
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
def test_vendor_data_with_invalid_target_raises_config_error(
    load: Callable[..., Any], targets: str
) -> None:
    with pytest.raises(ConfigError, match=r"\[vendor_data\] dynamic_targets") as failure:
        vendor_data.configured(load("providers = dynamic", f"dynamic_targets = {targets}"))
    assert "hidden" not in str(failure.value)


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
def test_vendor_data_from_remote_host_over_plain_http_is_refused(
    load: Callable[..., Any], option: str, lines: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"{option}: http://10.0.0.5 is no https://"):
        vendor_data.configured(load("providers = dynamic", *lines))


def test_vendor_data_with_invalid_auth_plugin_raises_config_error(load: Callable[..., Any]) -> None:
    conf = load(
        "providers = dynamic",
        "dynamic_targets = a@https://h/",
        "[vendordata_dynamic_auth]",
        "auth_type = no-such-plugin",
    )
    with pytest.raises(ConfigError, match=r"\[vendordata_dynamic_auth\]"):
        vendor_data.configured(conf)
