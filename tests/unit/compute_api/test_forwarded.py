# SPDX-License-Identifier: Apache-2.0
"""Headers of proxies, applied as by oslo.middleware if the option is on.

Values that are no valid scheme, host, path or address are ignored.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oslo_config import cfg

from compute_api.http.worker import forwarded

CLIENT = {
    "wsgi.url_scheme": "http",
    "HTTP_HOST": "inside:8774",
    "SCRIPT_NAME": "",
    "REMOTE_ADDR": "10.0.0.1",
    "PATH_INFO": "/v2.1/servers",
    "REQUEST_METHOD": "GET",
}
CASES: dict[str, dict[str, str]] = {
    "nothing": {},
    "all of them": {
        "HTTP_X_FORWARDED_PROTO": "https",
        "HTTP_X_FORWARDED_HOST": "cloud.example:443",
        "HTTP_X_FORWARDED_FOR": "192.0.2.7",
        "HTTP_X_FORWARDED_PREFIX": "/compute",
    },
    "an address of IPv6": {
        "HTTP_X_FORWARDED_HOST": "[2001:db8::1]:443",
        "HTTP_X_FORWARDED_FOR": "2001:db8::7",
    },
    "the standard's": {
        "HTTP_FORWARDED": "for=192.0.2.60;proto=https;host=cloud.example, for=10.0.0.9;proto=http"
    },
    "the standard's before the others": {
        "HTTP_FORWARDED": "Proto=https",
        "HTTP_X_FORWARDED_HOST": "ignored.example",
        "HTTP_X_FORWARDED_PREFIX": "/compute",
    },
}
CHANGEABLE = ("wsgi.url_scheme", "HTTP_HOST", "SCRIPT_NAME", "REMOTE_ADDR", "PATH_INFO")


def environ_with(**headers: str) -> dict[str, str]:
    environ: dict[str, Any] = {**CLIENT, **headers}
    forwarded.apply_headers(environ)
    return {name: environ[name] for name in CHANGEABLE}


def conf(*, on: bool) -> cfg.ConfigOpts:
    options = cfg.ConfigOpts()
    options.register_opts([cfg.BoolOpt("enable_proxy_headers_parsing")], group="oslo_middleware")
    options([], default_config_files=[], default_config_dirs=[])
    options.set_override("enable_proxy_headers_parsing", on, group="oslo_middleware")
    return options


@pytest.mark.parametrize("headers", CASES.values(), ids=list(CASES))
def test_proxy_headers_are_applied_as_by_oslo_middleware(headers: dict[str, str]) -> None:
    from oslo_middleware.http_proxy_to_wsgi import HTTPProxyToWSGI
    from webob import Request

    expected = Request({**CLIENT, **headers})
    # The library registers its option in this configuration only.
    own_conf = cfg.ConfigOpts()
    own_conf([], default_config_files=[], default_config_dirs=[])
    reference = HTTPProxyToWSGI(None, own_conf)
    own_conf.set_override("enable_proxy_headers_parsing", True, group="oslo_middleware")
    reference.process_request(expected)
    assert environ_with(**headers) == {name: expected.environ[name] for name in CHANGEABLE}


@pytest.mark.parametrize("headers", CASES.values(), ids=list(CASES))
def test_proxy_headers_are_ignored_while_option_is_off(headers: dict[str, str]) -> None:
    def application(environ: dict[str, Any], start_response: object) -> list[bytes]:
        assert {name: environ[name] for name in CHANGEABLE} == {
            name: CLIENT[name] for name in CHANGEABLE
        }
        return []

    wrapped: Any = forwarded.apply_proxy_headers(application, conf(on=False))
    assert wrapped is application and wrapped({**CLIENT, **headers}, None) == []


def test_proxy_headers_are_applied_while_option_is_on() -> None:
    def application(environ: dict[str, Any], start_response: object) -> list[bytes]:
        return [environ["wsgi.url_scheme"].encode()]

    wrapped: Any = forwarded.apply_proxy_headers(application, conf(on=True))
    assert wrapped({**CLIENT, "HTTP_X_FORWARDED_PROTO": "HTTPS"}, None) == [b"https"]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("HTTP_X_FORWARDED_PROTO", "javascript"),
        ("HTTP_X_FORWARDED_HOST", "cloud.example/evil"),
        ("HTTP_X_FORWARDED_HOST", "user@evil.example"),
        ("HTTP_X_FORWARDED_HOST", "a b"),
        ("HTTP_X_FORWARDED_HOST", "cloud.example\r\nSet-Cookie: a=b"),
        ("HTTP_X_FORWARDED_PREFIX", "//evil.example"),
        ("HTTP_X_FORWARDED_PREFIX", "compute"),
        ("HTTP_X_FORWARDED_PREFIX", "/a/../b"),
        ("HTTP_X_FORWARDED_PREFIX", '/a"><script>'),
        ("HTTP_X_FORWARDED_FOR", "unknown"),
        ("HTTP_X_FORWARDED_FOR", "10.0.0.1 OR 1=1"),
        ("HTTP_FORWARDED", 'host="evil.example/";proto=ftp;for=_hidden'),
    ],
)
def test_invalid_values_of_proxy_headers_are_ignored(header: str, value: str) -> None:
    assert environ_with(**{header: value}) == {name: CLIENT[name] for name in CHANGEABLE}


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("192.0.2.1:4711", "192.0.2.1"),
        ('"[2001:db8::1]:4711"', "2001:db8::1"),
        ("192.0.2.1", "192.0.2.1"),
    ],
)
def test_forwarded_client_address_omits_port(value: str, address: str) -> None:
    assert environ_with(HTTP_FORWARDED=f"for={value}")["REMOTE_ADDR"] == address


@given(st.text(), st.sampled_from(("FORWARDED", "X_FORWARDED_HOST", "X_FORWARDED_PREFIX")))
def test_proxy_headers_with_any_text_leave_url_printable(text: str, header: str) -> None:
    environ = environ_with(**{f"HTTP_{header}": text})
    url = f"{environ['wsgi.url_scheme']}://{environ['HTTP_HOST']}{environ['SCRIPT_NAME']}/v2.1/"
    assert url.isascii() and url.isprintable() and not set("<>\"' @#?\\") & set(url)
