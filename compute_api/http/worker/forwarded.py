# SPDX-License-Identifier: Apache-2.0
"""What a proxy in front of us says of the request that a client made: scheme, host, prefix and
address.

It is believed only with [oslo_middleware] enable_proxy_headers_parsing, as by oslo.middleware's
HTTPProxyToWSGI: ``Forwarded`` (RFC 7239), else X-Forwarded-Proto, -Host and -For; and
X-Forwarded-Prefix. Of several proxies the first one's words count, so the outermost must replace
what a client sends, not add to it. What is no scheme, host, path or address is left out: links are
made of it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from oslo_config import cfg

_SCHEMES = ("http", "https")
_HOST = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9._-]{0,251}[a-z0-9.])?|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?",
    re.IGNORECASE,
)
_PREFIX = re.compile(r"(?:/[a-z0-9._~-]{1,64}){1,16}", re.IGNORECASE)


def parsed(application: WSGIApplication, conf: cfg.ConfigOpts) -> WSGIApplication:
    """The application, which is given where its clients' requests went; itself where the option is
    off."""
    if not conf.oslo_middleware.enable_proxy_headers_parsing:
        return application

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        take_over(environ)
        return application(environ, start_response)

    return entry


def take_over(environ: WSGIEnvironment) -> None:
    """Write down what the proxy's headers say as if the client had asked us directly."""
    given = environ.get("HTTP_FORWARDED")
    proto, host, address = (
        _of_forwarded(given)
        if given
        else (_first(environ, "PROTO"), _first(environ, "HOST"), _first(environ, "FOR"))
    )
    if proto.lower() in _SCHEMES:
        environ["wsgi.url_scheme"] = proto.lower()
    if _HOST.fullmatch(host):
        environ["HTTP_HOST"] = host
    if (client := _address(address)) is not None:
        environ["REMOTE_ADDR"] = client
    prefix = _first(environ, "PREFIX").rstrip("/")
    if _PREFIX.fullmatch(prefix) and not {".", ".."} & set(prefix.split("/")):
        environ["SCRIPT_NAME"] = prefix + environ.get("SCRIPT_NAME", "")


def _first(environ: WSGIEnvironment, name: str) -> str:
    """The value that the outermost proxy gave this header."""
    return str(environ.get(f"HTTP_X_FORWARDED_{name}", "")).partition(",")[0].strip()


def _of_forwarded(given: str) -> tuple[str, str, str]:
    """proto, host and for of the first element of a header ``Forwarded``."""
    pairs = (part.partition("=") for part in given.partition(",")[0].split(";"))
    found = {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
    return found.get("proto", ""), found.get("host", ""), found.get("for", "")


def _address(given: str) -> str | None:
    """The address of 192.0.2.1, 192.0.2.1:80, 2001:db8::1 or [2001:db8::1]:80; None: it is none."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::[0-9]{1,5})?", given)
    with_port = re.fullmatch(r"([0-9.]+):[0-9]{1,5}", given)
    if found := bracketed or with_port:
        given = found[1]
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        return None
