# SPDX-License-Identifier: Apache-2.0
"""Headers of proxies: believed where the option is on, as oslo.middleware believes them; what is no
scheme, host, path or address never gets into a link."""

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
SEEN = ("wsgi.url_scheme", "HTTP_HOST", "SCRIPT_NAME", "REMOTE_ADDR", "PATH_INFO")


def seen_with(**headers: str) -> dict[str, str]:
    environ: dict[str, Any] = {**CLIENT, **headers}
    forwarded.apply_headers(environ)
    return {name: environ[name] for name in SEEN}


def conf(*, on: bool) -> cfg.ConfigOpts:
    made = cfg.ConfigOpts()
    made.register_opts([cfg.BoolOpt("enable_proxy_headers_parsing")], group="oslo_middleware")
    made([], default_config_files=[], default_config_dirs=[])
    made.set_override("enable_proxy_headers_parsing", on, group="oslo_middleware")
    return made


@pytest.mark.parametrize("headers", CASES.values(), ids=list(CASES))
def test_headers_mean_what_they_mean_to_the_field(headers: dict[str, str]) -> None:
    from oslo_middleware.http_proxy_to_wsgi import HTTPProxyToWSGI
    from webob import Request

    theirs = Request({**CLIENT, **headers})
    apart = cfg.ConfigOpts()  # the library makes its option known there, not in everybody's
    apart([], default_config_files=[], default_config_dirs=[])
    reference = HTTPProxyToWSGI(None, apart)
    apart.set_override("enable_proxy_headers_parsing", True, group="oslo_middleware")
    reference.process_request(theirs)
    assert seen_with(**headers) == {name: theirs.environ[name] for name in SEEN}


@pytest.mark.parametrize("headers", CASES.values(), ids=list(CASES))
def test_nothing_is_believed_while_the_option_is_off(headers: dict[str, str]) -> None:
    def application(environ: dict[str, Any], start_response: object) -> list[bytes]:
        assert {name: environ[name] for name in SEEN} == {name: CLIENT[name] for name in SEEN}
        return []

    made: Any = forwarded.apply_proxy_headers(application, conf(on=False))
    assert made is application and made({**CLIENT, **headers}, None) == []


def test_the_option_brings_them_to_the_application() -> None:
    def application(environ: dict[str, Any], start_response: object) -> list[bytes]:
        return [environ["wsgi.url_scheme"].encode()]

    made: Any = forwarded.apply_proxy_headers(application, conf(on=True))
    assert made({**CLIENT, "HTTP_X_FORWARDED_PROTO": "HTTPS"}, None) == [b"https"]


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
def test_what_is_none_is_left_out(header: str, value: str) -> None:
    assert seen_with(**{header: value}) == {name: CLIENT[name] for name in SEEN}


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("192.0.2.1:4711", "192.0.2.1"),
        ('"[2001:db8::1]:4711"', "2001:db8::1"),
        ("192.0.2.1", "192.0.2.1"),
    ],
)
def test_a_client_s_port_is_no_part_of_its_address(value: str, address: str) -> None:
    assert seen_with(HTTP_FORWARDED=f"for={value}")["REMOTE_ADDR"] == address


@given(st.text(), st.sampled_from(("FORWARDED", "X_FORWARDED_HOST", "X_FORWARDED_PREFIX")))
def test_any_text_leaves_a_url_that_can_be_read(text: str, header: str) -> None:
    seen = seen_with(**{f"HTTP_{header}": text})
    url = f"{seen['wsgi.url_scheme']}://{seen['HTTP_HOST']}{seen['SCRIPT_NAME']}/v2.1/"
    assert url.isascii() and url.isprintable() and not set("<>\"' @#?\\") & set(url)
