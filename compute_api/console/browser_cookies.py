# SPDX-License-Identifier: Apache-2.0
"""A console's URL belongs to the first browser that fetches its page, known by a cookie from then
on.

Used by ``page_server`` for pages and by ``sessions`` for websockets. A program that fetches no
page, or not as a browser does, gets no cookie and needs none: its token is good once, for whoever
comes first. A page inside another one is offered a cookie which binds nothing until a websocket
brings it, since a browser may not keep it. Then the other connections of a SPICE session, and a
reload of the page, can be told from strangers. Each token has a cookie of its own, so that nobody
can plant one beforehand."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers

from common.domain import errors
from common.store.engine import Store
from common.store.servers import console_tokens

log = logging.getLogger(__name__)
MAX_PARAMETERS = 20
#: What Sec-Fetch-Dest says of a page inside another one.
INSIDE = ("iframe", "frame", "embed", "object")


class BrowserCookies:
    """``public_url`` decides how the cookie is kept; ``origins``: of pages that may show ours
    inside them; a cookie is kept for ``seconds``."""

    def __init__(self, store: Store, public_url: str, origins: Iterable[str], seconds: int) -> None:
        self._store, self._seconds = store, seconds
        self._https, self._embedded = public_url.lower().startswith("https:"), bool(list(origins))

    def new_cookie(self, path: str, headers: Headers) -> str | None:
        """What Set-Cookie says to who fetches a page; None: the token is none, is another browser's
        already, or the cookie would not come back."""
        token, alone = token_of(path), self._is_browser(headers)
        if not token or not (alone or self._is_inside(headers)):
            return None
        cookie = secrets.token_urlsafe(32)
        try:
            record = self._store.read(lambda tx: console_tokens.find(tx, token))
            if record is None:
                return None
            if alone and not self._store.write(lambda tx: console_tokens.bind(tx, token, cookie)):
                return None
        except errors.Problem as problem:
            log.warning("a console's address was bound to no browser: %s", problem)
            return None
        same_site = "SameSite=Strict; Secure" if self._https else "SameSite=Strict"
        if self._https and not alone:  # kept for the page around it alone
            same_site = "SameSite=None; Secure; Partitioned"
        return (
            f"{self._name(token)}={cookie}; Path=/; Max-Age={self._seconds}; HttpOnly; {same_site}"
        )

    def cookie_of(self, path: str, headers: Headers) -> str:
        """The cookie that came for this path's token; empty: none."""
        name = self._name(token_of(path))
        for line in headers.get_all("Cookie"):
            for part in line.split(";"):
                found, _, value = part.strip().partition("=")
                if found == name:
                    return value
        return ""

    def _name(self, token: str) -> str:
        """Under https with the prefix by which no other host of the domain can set it."""
        return (
            "__Host-" if self._https else ""
        ) + f"console-{console_tokens.hash_token(token)[:16]}"

    def _is_browser(self, headers: Headers) -> bool:
        """Does a browser show this page by itself? It says so under https; else it is one that asks
        for HTML, where no other page may show ours."""
        target = headers.get_all("Sec-Fetch-Dest")
        if target:
            return target == ["document"]
        return not self._embedded and _wants_html(headers)

    def _is_inside(self, headers: Headers) -> bool:
        """May it be shown inside another page?"""
        target = headers.get_all("Sec-Fetch-Dest")
        if target:
            return len(target) == 1 and target[0] in INSIDE
        return self._embedded and _wants_html(headers)


def _wants_html(headers: Headers) -> bool:
    return any("text/html" in one for one in headers.get_all("Accept"))


def token_of(path: str) -> str:
    """The token of ``/?token=…``, or of the path that noVNC was told:
    ``/websockify?path=?token=…``. Empty: none."""
    try:
        query = parse_qs(urlsplit(path).query, max_num_fields=MAX_PARAMETERS)
        for inner in query.get("path", ()):
            query = {**parse_qs(inner.partition("?")[2], max_num_fields=MAX_PARAMETERS), **query}
    except ValueError:
        return ""
    return query.get("token", [""])[-1]
