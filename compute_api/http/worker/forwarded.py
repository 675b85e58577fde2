# SPDX-License-Identifier: Apache-2.0
"""Apply the headers of a proxy in front of the API: scheme, host, prefix and client address.

They are only trusted with [oslo_middleware] enable_proxy_headers_parsing, as in oslo.middleware's
HTTPProxyToWSGI. The headers are ``Forwarded`` (RFC 7239), else X-Forwarded-Proto, -Host and -For,
and X-Forwarded-Prefix. With several proxies, the values of the first one apply. Therefore the
outermost proxy must replace these headers of clients. Invalid values are ignored, because links are
built from them.
"""

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


def apply_proxy_headers(application: WSGIApplication, conf: cfg.ConfigOpts) -> WSGIApplication:
    """Wrap the application so that it sees the URL and the address of the client's request.

    Without [oslo_middleware] enable_proxy_headers_parsing, return the application unchanged.
    """
    if not conf.oslo_middleware.enable_proxy_headers_parsing:
        return application

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        apply_headers(environ)
        return application(environ, start_response)

    return entry


def apply_headers(environ: WSGIEnvironment) -> None:
    """Set scheme, host, client address and prefix in the WSGI environment from proxy headers.

    With ``Forwarded``, only the prefix is read from an X-Forwarded header. Invalid values are
    ignored.
    """
    forwarded = environ.get("HTTP_FORWARDED")
    proto, host, address = (
        _parse_forwarded(forwarded)
        if forwarded
        else (
            _read_first(environ, "PROTO"),
            _read_first(environ, "HOST"),
            _read_first(environ, "FOR"),
        )
    )
    if proto.lower() in _SCHEMES:
        environ["wsgi.url_scheme"] = proto.lower()
    if _HOST.fullmatch(host):
        environ["HTTP_HOST"] = host
    if (client := _parse_address(address)) is not None:
        environ["REMOTE_ADDR"] = client
    prefix = _read_first(environ, "PREFIX").rstrip("/")
    if _PREFIX.fullmatch(prefix) and not {".", ".."} & set(prefix.split("/")):
        environ["SCRIPT_NAME"] = prefix + environ.get("SCRIPT_NAME", "")


def _read_first(environ: WSGIEnvironment, name: str) -> str:
    """Return the first value of the header X-Forwarded-``name``, or "".

    The outermost proxy sets the first value.
    """
    return str(environ.get(f"HTTP_X_FORWARDED_{name}", "")).partition(",")[0].strip()


def _parse_forwarded(header: str) -> tuple[str, str, str]:
    """Return proto, host and for of a ``Forwarded`` header's first element, each "" if missing."""
    pairs = (part.partition("=") for part in header.partition(",")[0].split(";"))
    values = {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
    return values.get("proto", ""), values.get("host", ""), values.get("for", "")


def _parse_address(text: str) -> str | None:
    """Return the IP address in the text without port and brackets, or None if it is invalid.

    For example, 192.0.2.1, 192.0.2.1:80, 2001:db8::1 or [2001:db8::1]:80.
    """
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::[0-9]{1,5})?", text)
    with_port = re.fullmatch(r"([0-9.]+):[0-9]{1,5}", text)
    if match := bracketed or with_port:
        text = match[1]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
