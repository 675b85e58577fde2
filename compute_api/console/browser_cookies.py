# SPDX-License-Identifier: Apache-2.0
"""Bind a console's URL to the first browser that fetches the page, with a cookie.

``page_server`` sets the cookies, and ``sessions`` reads them from websockets. The cookie lets the
browser reload the page and open the further connections of a SPICE session. A client that does not
fetch the page as a browser does gets no cookie and needs none: its token is valid once, for the
first client that uses it.

A page inside another page gets a cookie that binds the token only when a websocket brings the
cookie, because a browser may refuse to store it. Each token has its own cookie name, so that an
attacker cannot set the cookie in advance.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers

from common.domain import errors
from common.service.log import get_logger
from common.store.engine import Store
from common.store.servers import console_tokens

log = get_logger(__name__)
MAX_PARAMETERS = 20
#: Values of Sec-Fetch-Dest for a page inside another page.
INSIDE = ("iframe", "frame", "embed", "object")


class BrowserCookies:
    """Creates and reads the cookies that bind console tokens to browsers.

    Args:
        store: The database.
        public_url: URL of the console service. https enables secure cookies.
        origins: Origins of pages that may embed consoles.
        seconds: Lifetime of a cookie.
    """

    def __init__(self, store: Store, public_url: str, origins: Iterable[str], seconds: int) -> None:
        self._store, self._seconds = store, seconds
        self._https, self._embedded = public_url.lower().startswith("https:"), bool(list(origins))

    def new_cookie(self, path: str, headers: Headers) -> str | None:
        """Return the value of Set-Cookie for the response with a console's page.

        The token is bound to the cookie here, or for an embedded page when a websocket brings the
        cookie.

        Returns:
            None if the token is invalid or bound already, even to this browser, if the client is
            not a browser that would send the cookie, or if the database does not answer.
        """
        token, is_top_level = token_of(path), self._is_browser(headers)
        if not token or not (is_top_level or self._is_embedded(headers)):
            return None
        cookie = secrets.token_urlsafe(32)
        try:
            record = self._store.read(lambda tx: console_tokens.find(tx, token))
            if record is None:
                return None
            if is_top_level and not self._store.write(
                lambda tx: console_tokens.bind(tx, token, cookie)
            ):
                return None
        except errors.Problem as problem:
            log.warning("a console URL cannot be bound to a browser", problem=problem)
            return None
        same_site = "SameSite=Strict; Secure" if self._https else "SameSite=Strict"
        # Browsers then store the cookie separately for each embedding page.
        if self._https and not is_top_level:
            same_site = "SameSite=None; Secure; Partitioned"
        return f"{self._build_cookie_name(token)}={cookie}; Path=/; Max-Age={self._seconds}; HttpOnly; {same_site}"

    def cookie_of(self, path: str, headers: Headers) -> str:
        """Return the value of the request's cookie for the token in this path, or ""."""
        name = self._build_cookie_name(token_of(path))
        for line in headers.get_all("Cookie"):
            for part in line.split(";"):
                key, _, value = part.strip().partition("=")
                if key == name:
                    return value
        return ""

    def _build_cookie_name(self, token: str) -> str:
        """Return the name of the cookie for this token.

        With https the name has a prefix, so that other hosts of the domain cannot set the cookie.
        """
        return (
            "__Host-" if self._https else ""
        ) + f"console-{console_tokens.hash_token(token)[:16]}"

    def _is_browser(self, headers: Headers) -> bool:
        """Return True if a browser shows the page as a top-level document.

        Browsers send Sec-Fetch-Dest only over https. Without this header, a client that accepts
        HTML counts as a browser, unless other pages may embed consoles.
        """
        target = headers.get_all("Sec-Fetch-Dest")
        if target:
            return target == ["document"]
        return not self._embedded and _accepts_html(headers)

    def _is_embedded(self, headers: Headers) -> bool:
        """Return True if a browser may show the page inside another page.

        Without Sec-Fetch-Dest, a client that accepts HTML counts if other pages may embed consoles.
        """
        target = headers.get_all("Sec-Fetch-Dest")
        if target:
            return len(target) == 1 and target[0] in INSIDE
        return self._embedded and _accepts_html(headers)


def _accepts_html(headers: Headers) -> bool:
    return any("text/html" in value for value in headers.get_all("Accept"))


def token_of(path: str) -> str:
    """Return the token in ``/?token=…`` or in noVNC's ``/websockify?path=?token=…``.

    Return "" if the path has no token or too many parameters.
    """
    try:
        query = parse_qs(urlsplit(path).query, max_num_fields=MAX_PARAMETERS)
        for inner in query.get("path", ()):
            query = {**parse_qs(inner.partition("?")[2], max_num_fields=MAX_PARAMETERS), **query}
    except ValueError:
        return ""
    return query.get("token", [""])[-1]
