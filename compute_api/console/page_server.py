# SPDX-License-Identifier: Apache-2.0
"""Pages of the console service, and who may open a websocket.

Called by ``service`` for every request, before any session begins. Pages are the files that were
there at the start, known by name: no path that a request says ever becomes the name of a file, and
nothing redirects. A websocket is opened for pages of our own and of ``allowed_origins``, compared
letter by letter with what was configured and never with what a request says of itself. A request
without Origin is let in: every browser sends one, so it comes from a program, which no foreign page
can steer, and the token alone decides. Whoever fetches a page for a token is given the cookie that
makes it his (``browser_cookies``).

A browser shows a page in a frame of our own pages and of ``allowed_origins`` only. In the frame of
another page it would show nothing, so that page gets ``framed.html``, which names the option.
Browsers say over https alone that a page goes into a frame. Over http the page that links to ours
gets ``framed.html`` too, whose script goes on to the console unless it stands in a frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import orjson
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from common.domain.console_types import SPICE_PAGE
from compute_api.console.browser_cookies import INSIDE, BrowserCookies
from compute_api.http.health import Health

log = logging.getLogger(__name__)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".mp3": "audio/mpeg",
    ".oga": "audio/ogg",
    ".ttf": "font/ttf",
    ".woff": "font/woff",
}
MAX_FILE_BYTES = 4 * 1024 * 1024
OWN_FOLDER = Path(__file__).parent  #: with the page of the serial console
FRAMED_PAGE = OWN_FOLDER / "framed.html"
#: The policy of that page: any page may show it in a frame.
FRAMED_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
#: In the query of a page that is known to stand in no frame.
ALONE = "alone=1"
SCREEN_PAGE = "vnc_lite.html"  #: the page that URLs of screens name
WEBSOCKETS = ("/", "/websockify")
_INSTALL = (
    "an operator can install the package spice-html5, or say in [spice] html5 where it is, and start the "
    "console service again"
)


class PageServer:
    """``novnc``: the folder with noVNC. ``spice``: the one with spice-html5, None: there is none.
    ``public_url``: where browsers reach us."""

    def __init__(
        self,
        novnc: Path,
        public_url: str,
        browsers: BrowserCookies,
        allowed_origins: Iterable[str] = (),
        health: Health | None = None,
        spice: Path | None = None,
    ) -> None:
        self._health = health or Health(())
        own, self._browsers = origin(public_url), browsers
        self._origins = frozenset((own, *allowed_origins))
        self._files = {**_files(novnc), **_files(OWN_FOLDER)}
        if spice is not None:
            self._files |= _files(spice, SPICE_PAGE.rpartition("/")[0])
        if f"/{SCREEN_PAGE}" not in self._files:
            log.warning(
                "there is no %s in %s: install novnc, or say in [console] novnc where it is; until then "
                "browsers see no screen",
                SCREEN_PAGE,
                novnc,
            )
        self._policy = "; ".join(
            (
                "default-src 'self'",
                "script-src 'self' 'unsafe-inline'",
                "style-src 'self' 'unsafe-inline'",
                "img-src 'self' data:",
                "media-src 'self' blob:",  # SPICE shows films so
                f"connect-src 'self' {own.replace('http', 'ws', 1)}",
                "base-uri 'none'",
                "form-action 'none'",
                f"frame-ancestors 'self' {' '.join(sorted(self._origins))}",
            )
        )

    def answer(self, request: Request) -> Response | None:
        """The answer to a request; None: a websocket may be opened."""
        path = urlsplit(request.path).path if request.path.startswith("/") else ""
        if (
            "websocket" in request.headers.get_all("Upgrade")
            or "Sec-WebSocket-Key" in request.headers
        ):
            return self._websocket(path, request.headers)
        if (found := self._health.answer(path)) is not None:
            return self._said(HTTPStatus(found[0]), orjson.dumps(found[1]), "application/json")
        file = self._files.get(path)
        content = _content(file) if file is not None else None
        if file is None and path == f"/{SPICE_PAGE}":
            log.warning("spice-html5 is missing, so that nobody sees a SPICE console: %s", _INSTALL)
            return self._said(
                HTTPStatus.NOT_FOUND,
                f"There is no spice-html5 here: {_INSTALL}.\n".encode(),
                "text/plain; charset=utf-8",
            )
        if file is None or content is None:
            return self._said(
                HTTPStatus.NOT_FOUND, b"There is no such page.\n", "text/plain; charset=utf-8"
            )
        if file.suffix == ".html" and self._is_framed(request):
            return self._said(
                HTTPStatus.OK, FRAMED_PAGE.read_bytes(), TYPES[".html"], FRAMED_POLICY
            )
        answer = self._said(HTTPStatus.OK, content, TYPES[file.suffix])
        cookie = (
            self._browsers.new_cookie(request.path, request.headers)
            if file.suffix == ".html"
            else None
        )
        if cookie is not None:
            answer.headers["Set-Cookie"] = cookie
        return answer

    def _is_framed(self, request: Request) -> bool:
        """True if a page that is not allowed shows this one in a frame, or may be doing so."""
        referers = request.headers.get_all("Referer")
        if not referers or self._origins.issuperset(map(origin, referers)):
            return False
        target = request.headers.get_all("Sec-Fetch-Dest")
        if target:
            return target[0] in INSIDE
        return ALONE not in urlsplit(request.path).query.split("&")

    def _websocket(self, path: str, headers: Headers) -> Response | None:
        origins = headers.get_all("Origin")
        if path not in WEBSOCKETS:
            return self._said(
                HTTPStatus.NOT_FOUND, b"There is no such console.\n", "text/plain; charset=utf-8"
            )
        if len(origins) > 1 or not self._origins.issuperset(origins):
            return self._said(
                HTTPStatus.FORBIDDEN,
                b"Pages of this origin may not open consoles; an operator can add "
                b"it to [console] allowed_origins.\n",
                "text/plain; charset=utf-8",
            )
        return None

    def _said(self, status: HTTPStatus, content: bytes, kind: str, policy: str = "") -> Response:
        """The URL of a page contains a token: it goes to no other site, and the page is not
        kept."""
        headers = Headers(
            {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                "Connection": "close",
                "Cache-Control": "no-store"
                if kind.startswith(("text/html", "application/json"))
                else "no-cache",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "Content-Security-Policy": policy or self._policy,
            }
        )
        return Response(status.value, status.phrase, headers, content)


def origin(url: str) -> str:
    """Return the Origin that a browser sends for a page of this URL, "" if it is not a URL."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        return ""
    if ":" in host:
        host = f"[{host}]"
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{port}" if port and port != usual else "")


def _files(folder: Path, below: str = "") -> dict[str, Path]:
    """URL path -> file, for what may be served ``below`` a path of ours; a link that leads out of
    the folder is none of it."""
    home, prefix = folder.resolve(), f"/{below}" if below else ""
    found = {}
    for path in home.rglob("*"):
        if path.suffix in TYPES and path.is_file() and path.resolve().is_relative_to(home):
            found[f"{prefix}/{path.relative_to(home).as_posix()}"] = path
    return found


def _content(file: Path) -> bytes | None:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        log.warning("a page cannot be read: %s", error)
        return None
    return content if len(content) <= MAX_FILE_BYTES else None
